"""The command line: it parses, calls one task, and prints its result. `--help` imports no torch."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

import typer

from nicest.cli.base import fail, is_first, with_options
from nicest.cli.commands import app
from nicest.errors import NicestError, Resumable
from nicest.messages import one_line, printable

__all__ = ["app", "main"]
UsageError: Any = typer.BadParameter.__mro__[1]  # of click, which typer may bundle
EXTRAS = {  # by the module that is missing
    "fastapi": "studio",
    "huggingface_hub": "hub",
    "onnx": "export",
    "onnxruntime": "export",
    "onnxscript": "export",
    "pyarrow": "tables",
    "mlflow": "mlflow",
    "tensorboard": "loggers",
    "uvicorn": "studio",
    "wandb": "wandb",
}


def main(commands: typer.Typer = app, name: str = "nicest") -> None:
    """Run a command line. An error is one line on standard error, with a traceback only if --debug is given."""
    debug = "--debug" in sys.argv
    warnings.showwarning = lambda message, *_: print(
        f"warning: {printable(with_options(str(message)))}", file=sys.stderr
    )
    arguments = [each for each in sys.argv[1:] if each != "--debug"]
    if not is_first("LOCAL_RANK"):  # one process reports for a machine, unless another one fails
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    try:
        code = commands(arguments, prog_name=name, standalone_mode=False)
    except UsageError as error:
        message, where = error.format_message(), error.ctx.command_path if error.ctx else name
        if not message:  # no arguments at all: the help was printed
            sys.exit(2)
        if where == "nicest train" and message.startswith("Missing argument 'recipe'"):
            data = error.ctx.params.get("data")
            advice = (
                f"to train on your own data, type nicest train {shlex.quote(data)}"
                if data
                else "`nicest recipes` lists them all"
            )
            message = f"{message.rstrip('.')}: {advice}"
        fail(f"{message.rstrip('.').replace('Value error, ', '')}; see {where} --help", 2)
    except Exception as error:
        if debug:
            raise
        fail(explained(error))
    sys.exit(code)


def explained(error: Exception) -> str:
    """Describe an error in one line."""
    if isinstance(error, Resumable):
        recipe, folder = shlex.quote(f"{error.folder}/recipe.toml"), shlex.quote(str(error.folder))
        return f"{error} with `nicest train {recipe} --out {folder} --resume`"
    if isinstance(error, NicestError):
        return with_options(str(error))
    if isinstance(error, ImportError) and (extra := EXTRAS.get((error.name or "").partition(".")[0])):
        return f"this needs {error.name}, which is not installed: pip install 'nicest[{extra}]'"
    memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch is not imported here
    if memory or "can't allocate memory" in str(error):
        return f"out of memory: ask for less at once, or choose --device cpu ({one_line(error)})"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {one_line(error)} (a bug in nicest: --debug shows where, please report it)"
