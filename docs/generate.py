"""Write docs/cli.md from the --help of every command; a test checks that it is up to date."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent / "cli.md"
COMMANDS = [
    [],
    ["demo"],
    ["recipes"],
    ["train"],
    ["evaluate"],
    ["sample"],
    ["score"],
    ["impute"],
    ["calibrate"],
    ["inpaint"],
    ["certify"],
    ["latent"],
    ["latent", "spectrum"],
    ["latent", "sphere"],
    ["latent", "interpolate"],
    ["latent", "truncate"],
    ["studio"],
    ["bench"],
    ["reproduce"],
    ["reproduce", "table"],
    ["reproduce", "figures"],
    ["reproduce", "vae"],
    ["compare"],
    ["compare", "density"],
    ["compare", "imputation"],
    ["compare", "outliers"],
    ["compare", "synthesis"],
    ["data"],
    ["data", "list"],
    ["data", "get"],
    ["data", "check"],
]


def page() -> str:
    parts = ["# The command line", "", "Made from `--help` by `make docs`.", ""]
    for command in COMMANDS:
        parts += [f"## nicest {' '.join(command)}".rstrip(), "", "```text", help_text(command), "```", ""]
    return "\n".join(parts)


def help_text(command: list[str]) -> str:
    plain = {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "100", "TERMINAL_WIDTH": "100", "PYTHONIOENCODING": "utf-8"}
    asked = [sys.executable, "-m", "nicest", *command, "--help"]
    answer = subprocess.run(asked, env=os.environ | plain, capture_output=True, encoding="utf-8", check=True)
    return "\n".join(line.rstrip() for line in answer.stdout.strip().splitlines()).replace("python -m nicest", "nicest")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
