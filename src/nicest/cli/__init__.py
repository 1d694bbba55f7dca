"""The command line: it parses, calls one function, and prints. torch is imported by the commands, not by --help."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from nicest import __version__
from nicest.cli import runs, topics  # whose commands are there once they are imported
from nicest.cli.base import app, fail, is_first
from nicest.errors import NicestError
from nicest.messages import one_line

__all__ = ["app", "main", "runs", "topics"]


def main() -> None:
    """Run the command line; an error is one line on standard error, and a traceback only with --debug."""
    debug = "--debug" in sys.argv
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    arguments = [each for each in sys.argv[1:] if each != "--debug"]
    if not is_first("LOCAL_RANK"):  # one process speaks for all of a machine, unless another alone fails
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    try:
        app(arguments)
    except NicestError as error:
        if debug:
            raise
        fail(str(error))
    except Exception as error:
        if debug:
            raise
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
            fail(f"out of memory: ask for less at once, or choose --device cpu ({one_line(error)})")
        fail(f"{type(error).__name__}: {one_line(error)} (this should not happen: --debug shows where)")


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"nicest {__version__}")
        raise typer.Exit
