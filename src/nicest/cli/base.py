"""What the commands share: the application and its groups, and how results and errors are told."""

from __future__ import annotations

import functools
import inspect
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from nicest.cli import options
from nicest.files import to_json
from nicest.messages import printable
from nicest.remote import place

BY_NAME = inspect.Parameter.KEYWORD_ONLY
Result = dict[str, Any]
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Normalizing flows with exact likelihoods, for images and tables.",
    epilog="Every command takes --debug, which shows a traceback instead of a one-line error.",
)
data_app = typer.Typer(no_args_is_help=True, help="List, download and check data sets.")
app.add_typer(data_app, name="data")


class RunFirst(TyperGroup):
    """Commands of a run that take it before their name too: `latent RUN sphere` is `latent sphere RUN`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if len(args) > 1 and args[1] in self.commands and args[0] not in self.commands:
            args = [args[1], args[0], *args[2:]]
        return super().parse_args(ctx, args)


latent_app = typer.Typer(
    cls=RunFirst,
    no_args_is_help=True,
    help="Explore the latent space of a model: spectrum, sphere, interpolation, truncation.",
    epilog="The run may come first: nicest latent runs/demo sphere",
)
app.add_typer(latent_app, name="latent")
reproduce_app = typer.Typer(no_args_is_help=True, help="Reproduce the tables and figures of the paper from scratch.")
app.add_typer(reproduce_app, name="reproduce")


def outcome(result: Result) -> int:
    """The exit code: 130 for work that a signal stopped, which can go on, 1 where some of it failed, else 0."""
    return 130 if "unfinished" in result or not result.get("finished", True) else int("failed" in result)


def command(
    group: typer.Typer,
    show: Callable[[Any], None],
    name: str | None = None,
    code: Callable[[Any], int] = outcome,
    *,
    also: Sequence[str] = (),
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Register a command whose result is printed: as one JSON object with --json, else by `show`.

    A command with a parameter `run` takes a run folder, --device, --verify and, if it says so, --data and --label; what
    it gets is the opened run: of a model of whole rows, unless the command is `also` for models that predict "targets"
    or that are given "labels".
    """

    def register(function: Callable[..., Result]) -> Callable[..., Result]:
        own = dict(inspect.signature(function, eval_str=True).parameters)
        added: dict[str, tuple[Any, Any]] = {"as_json": (options.Json, False)}
        if "run" in own:
            own["run"] = own["run"].replace(annotation=options.Run)
            added = {"device": (options.Device, "auto"), "verify": (options.Verify, None)} | added
        for each, (kind, default) in added.items():
            own.setdefault(each, inspect.Parameter(each, BY_NAME, default=default, annotation=kind))

        @functools.wraps(function)
        def called(*, as_json: bool, **asked: Any) -> None:
            if "run" in asked:
                how = ("run", "device", "verify", "data", "label")
                asked["run"] = opened(*(asked.pop(each, None) for each in how))
                asked["run"].require_whole_rows(but=also)
            result = function(**asked)
            emit(result, as_json, show)
            raise typer.Exit(code(result))

        called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [each.replace(kind=BY_NAME) for each in own.values()]
        )
        called.__annotations__ = {each: parameter.annotation for each, parameter in own.items()}
        group.command(name)(called)
        return function

    return register


def opened(
    run: Path, device: str, verify: bool | None = None, data: str | None = None, label: int | None = None
) -> Any:
    """The run in a folder, on a device; its data may have moved; of one label, where it is given.

    Under torchrun every process of a machine takes a GPU of its own, where there are some.
    """
    import torch

    from nicest.runs.run import Run

    if device == "auto" and "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        device = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
    return Run(run, device=device, verify=verify, data=data if data is None else located(data), label=label)


def train_on(data: str) -> str:
    """The command that trains on a file or folder of one's own."""
    return f"nicest train {'images' if Path(data).is_dir() else 'table'} --data {shlex.quote(data)}"


def located(data: str) -> str:
    """Data that a user names: a path is kept whole, so that a run finds it from anywhere."""
    path = place(data)
    return str(path.resolve()) if path.exists() else data


def is_first(variable: str) -> bool:
    """Whether this is the only process, or the first of those that torchrun counts by a variable."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get(variable, "0") == "0"


def emit(result: Result, as_json: bool, show: Callable[[Any], None]) -> None:
    if not is_first("RANK"):
        return
    if as_json:
        print(to_json(result, indent=None), end="")
    else:
        show(escaped(result))


def escaped(value: Any) -> Any:
    """A result whose texts fit on one line each, whatever the names of files and columns; a recipe stays as it is."""
    if isinstance(value, Mapping):
        return {key: each if key == "toml" else escaped(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(each) for each in value]
    return printable(value) if isinstance(value, str | Path) else value


def with_options(message: str) -> str:
    """What the library says to set, as the option that sets it."""
    return re.sub(r"\bset (?='?(?:data|model|train|augment)\.\w+=)", "--set ", message)


def fail(message: str, code: int = 1) -> NoReturn:
    print(f"error: {printable(message)}", file=sys.stderr)
    if not is_first("LOCAL_RANK") and sys.stderr is not sys.__stderr__:
        time.sleep(3)  # this process was silent: torchrun must not end the one that speaks before it has spoken
    raise SystemExit(code)
