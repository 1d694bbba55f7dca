"""Run the Python and shell blocks of a page of docs/ in a temporary folder.

python docs/run_page.py tutorial-tables            # run it
python docs/run_page.py gallery --pictures         # run it, and keep the pictures it draws in docs/images
"""

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


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the language and the code of every block that runs."""
    return re.findall(r"^```(python|sh)\n(.*?)^```$", page, re.S | re.M)


def run(page: str) -> dict[str, Any]:
    """Run the blocks in the current folder and return the names that the Python blocks define."""
    names: dict[str, Any] = {}
    for language, code in blocks(page):
        if language == "python":
            exec(compile(code, "page", "exec"), names)
        else:
            for line in code.replace("\\\n", " ").splitlines():
                print(f"$ {line}", flush=True)
                command(shlex.split(line))
    return names


def command(words: list[str]) -> None:
    """Run a command of nicest in this process."""
    from nicest.cli import main

    sys.argv = words
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise


def main() -> None:
    """Run the page named on the command line."""
    import matplotlib

    matplotlib.use("Agg")
    name, *options = sys.argv[1:]
    page = (DOCS / f"{name}.md").read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        run(page)
        if options == ["--pictures"]:
            for picture in re.findall(r"\]\(images/([^)]+)\)", page):
                shutil.copy(picture, DOCS / "images")
        os.chdir(DOCS)


if __name__ == "__main__":
    main()
