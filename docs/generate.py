"""Write docs/cli.md from the --help of every command; a test checks that it is up to date."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent / "cli.md"
COMMANDS = [
    [],
    ["demo"],
    ["recipes"],
    ["models"],
    ["train"],
    ["evaluate"],
    ["score"],
    ["impute"],
    ["predict"],
    ["sample"],
    ["calibrate"],
    ["classify"],
    ["inpaint"],
    ["certify"],
    ["compress"],
    ["decompress"],
    ["export"],
    ["pack"],
    ["push"],
    ["pull"],
    ["latent"],
    ["latent", "spectrum"],
    ["latent", "sphere"],
    ["latent", "interpolate"],
    ["latent", "truncate"],
    ["studio"],
    ["reproduce"],
    ["reproduce", "table"],
    ["reproduce", "figures"],
    ["data"],
    ["data", "list"],
    ["data", "get"],
    ["data", "check"],
]


EVERY_HELP = """
import json, sys
from typer.testing import CliRunner
from nicest.cli import app
told = {"prog_name": "nicest", "catch_exceptions": False}
asked = ([*command, "--help"] for command in json.loads(sys.argv[1]))
print(json.dumps([CliRunner().invoke(app, words, **told).stdout for words in asked]))
"""


def page() -> str:
    """Return the page as Markdown."""
    parts = [
        "# The command line",
        "",
        "Every command with its options, as `nicest COMMAND --help` prints them. JSON output and exit codes:"
        " [conventions](conventions.md#machine-readable-output).",
        "",
    ]
    for command, text in zip(COMMANDS, help_texts(), strict=True):
        lines = "\n".join(unboxed(line) for line in text.strip().splitlines() if not line.startswith("╰"))
        parts += [f"## nicest {' '.join(command)}".rstrip(), "", "```text", lines, "```", ""]
    return "\n".join(parts)


def unboxed(line: str) -> str:
    """Return a line of help without the box that rich draws around lists."""
    return line.replace("─", "").replace("╮", ":").replace("╭ ", "").replace("│", "").rstrip().replace(" :", ":")


def help_texts() -> list[str]:
    """Return the help of every command, from one process: typer settles width and colours when it is imported."""
    plain = {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "100", "TERMINAL_WIDTH": "100", "PYTHONIOENCODING": "utf-8"}
    asked = [sys.executable, "-c", EVERY_HELP, json.dumps(COMMANDS)]
    answer = subprocess.run(asked, env=os.environ | plain, capture_output=True, encoding="utf-8", check=True)
    return json.loads(answer.stdout)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
