"""The command line: it parses, calls one task, and prints its result. `--help` imports no torch."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from nicest import __version__
from nicest.cli.base import emit, fail, is_first, task_command, with_options
from nicest.errors import NicestError, Resumable
from nicest.messages import one_line, printable
from nicest.tasks.options import Json, given, integer
from nicest.tasks.results import Result

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

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Normalizing flows with exact likelihoods, for images and tables.",
    epilog="Every command takes --debug, which shows a traceback instead of a one-line error.",
)


class RunFirst(TyperGroup):
    """A group whose commands also take the run before their name: `latent RUN sphere` is `latent sphere RUN`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the name of the command first."""
        if len(args) > 1 and args[1] in self.commands and args[0] not in self.commands:
            args = [args[1], args[0], *args[2:]]
        return super().parse_args(ctx, args)


data_app = typer.Typer(no_args_is_help=True, help="List, download and check data sets.")
latent_app = typer.Typer(
    cls=RunFirst,
    no_args_is_help=True,
    help="Explore the latent space of a model: spectrum, sphere, interpolation, truncation.",
    epilog="The run may come first: nicest latent runs/demo sphere",
)
reproduce_app = typer.Typer(no_args_is_help=True, help="Reproduce the tables and figures of the paper from scratch.")
app.add_typer(data_app, name="data")
app.add_typer(latent_app, name="latent")
app.add_typer(reproduce_app, name="reproduce")

# module of nicest.tasks, function, name of the command, options with which its run is opened
for _module, _function, *_more in (
    ("demo", "demo"),
    ("catalogue", "recipes"),
    ("catalogue", "models"),
    ("training", "train"),
    ("evaluate", "evaluate", "label", "data", "labels"),
    ("sample", "sample", "label", "labels"),
    ("score", "score", "label"),
    ("impute", "impute"),
    ("predict", "predict"),
    ("calibrate", "calibrate"),
    ("classify", "classify", "data", "labels"),
    ("inpaint", "inpaint", "label", "data"),
    ("certify", "certify", "data", "labels"),
    ("files", "compress", "labels"),
    ("files", "decompress"),
    ("export", "export", "label", "labels"),
    ("hub", "pack", "data", "labels"),
    ("hub", "push", "data", "labels"),
    ("hub", "pull"),
):
    _package = "nicest.codec" if _module == "files" else "nicest.tasks"
    task_command(app, f"{_package}.{_module}", _function, _function, *_more)
for _look in ("spectrum", "sphere", "interpolate", "truncate"):
    task_command(latent_app, "nicest.tasks.latent", _look, _look, "label", "data")
for _what in ("table", "figures"):
    task_command(reproduce_app, "nicest.tasks.reproduce", _what, _what)
for _what in ("list", "get", "check"):
    task_command(data_app, "nicest.tasks.catalogue", f"data_{_what}", _what)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"nicest {__version__}")
        raise typer.Exit


@dataclass(frozen=True, kw_only=True)
class Serving(Result):
    """Where the studio listens."""

    url: str
    runs: list[str]

    def lines(self) -> Iterator[Any]:
        yield f"{self.url}  (Ctrl-C stops it)"


@app.command()
def studio(
    runs: Annotated[list[Path], given("Run folders.")] = [Path("mnist")],  # noqa: B006
    host: Annotated[
        str, typer.Option(help="The address to listen on. Addresses that other machines can reach need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, integer(0, 65535, "The port; 0 picks a free one.")] = 8000,
    allow_host: Annotated[
        list[str],
        typer.Option(help="A name or address under which people reach the server; needed with --host 0.0.0.0."),
    ] = [],  # noqa: B006
    folder: Annotated[
        Path, typer.Option(help="Where trainings from the page keep their data and runs; those are served, too.")
    ] = Path("runs/studio"),
    browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    as_json: Json = False,
) -> None:
    """Open models of images and tables in the browser: inpaint, sample, score, impute, and train new ones.

    Without a run, you see the model of MNIST that comes with nicest. Example: nicest studio runs/demo --open
    """
    for run in runs:
        if run.is_file() and run.suffix.lower() in (".csv", ".parquet", ".arrow", ".feather", ".xlsx", ".xls"):
            raise NicestError(
                f"{run} is a table, not a model: train one with `nicest train {run}`, or start `nicest studio --open`"
                " and drop the file under New model"
            )
    from nicest.studio.server import is_loopback, serve

    def ready(url: str) -> None:
        if not is_loopback(host):
            print(
                f"warning: on {host} anyone who knows the address and its token can use the studio, and the connection"
                " is not encrypted; with 127.0.0.1 only you can",
                file=sys.stderr,
            )
        emit(Serving(url=url, runs=[str(run) for run in runs]), as_json=as_json)
        sys.stdout.flush()

    debug = "--debug" in sys.argv
    serve(runs, folder=folder, host=host, port=port, allowed=allow_host, browser=browser, debug=debug, ready=ready)


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
