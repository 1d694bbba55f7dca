"""Run the code of docs/tutorial-tables.md in a folder of its own; `--pictures` keeps what it draws."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "tutorial-tables.md"


def blocks() -> list[tuple[str, str]]:
    """The language and the code of every block that runs."""
    return re.findall(r"^```(python|sh)\n(.*?)^```$", PAGE.read_text("utf-8"), re.S | re.M)


def run() -> dict[str, Any]:
    """Run the blocks here; returns the names that the Python ones have defined."""
    names: dict[str, Any] = {}
    for language, code in blocks():
        if language == "python":
            exec(compile(code, PAGE.name, "exec"), names)
        else:
            for line in code.replace("\\\n", " ").splitlines():
                print(f"$ {line}", flush=True)
                command(shlex.split(line))
    return names


def command(words: list[str]) -> None:
    """One command of nicest, in this process."""
    from nicest.cli import main

    sys.argv = words
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    keep = "--pictures" in sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        run()
        for picture in Path(folder).glob("tutorial-*.png") if keep else ():
            shutil.copy(picture, DOCS / "images")
        os.chdir(DOCS)


if __name__ == "__main__":
    main()
