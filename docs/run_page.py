"""Run the Python and shell blocks of a page of docs/ in a temporary folder.

python docs/run_page.py tutorial-tables            # run it
python docs/run_page.py gallery --pictures         # run it, and keep the pictures it draws in docs/images
python docs/run_page.py tutorial-tables --output   # run it, and write the numbers that it prints into the page
"""

from __future__ import annotations

import contextlib
import io
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


def form(line: str) -> str:
    """Return a line of output without its numbers, which differ from machine to machine."""
    return re.sub(r"[-+]?[\d.]+", "0", " ".join(line.split()))


def refreshed(page: str, output: str) -> str:
    """Return the page with each line of its text blocks as the output has it, matched in order by their form."""
    printed = [line.rstrip() for line in output.splitlines()]

    def lines(block: re.Match[str]) -> str:
        found = []
        for line in block[1].splitlines():
            same = [i for i, each in enumerate(printed) if form(each) == form(line)]
            found.append(printed.pop(same[0]) if same and line else line)
        return "```text\n" + "".join(f"{line}\n" for line in found) + "```"

    return re.sub(r"^```text\n(.*?)^```$", lines, page, flags=re.S | re.M)


def main() -> None:
    """Run the page named on the command line."""
    import matplotlib

    matplotlib.use("Agg")
    name, *options = sys.argv[1:]
    path = DOCS / f"{name}.md"
    page, printed = path.read_text("utf-8"), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with contextlib.redirect_stdout(printed) if options == ["--output"] else contextlib.nullcontext():
            run(page)
        if options == ["--output"]:
            path.write_text(refreshed(page, printed.getvalue()), "utf-8")
        if options == ["--pictures"]:
            for picture in re.findall(r"\]\(images/([^)]+)\)", page):
                shutil.copy(picture, DOCS / "images")
        os.chdir(DOCS)


if __name__ == "__main__":
    main()
