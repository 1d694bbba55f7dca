"""What the commands share: the application and its groups, options, and how results and errors are told."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from nicest.files import to_json

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Exact-likelihood density models by invertible coupling layers (NICE).",
    epilog="Any command takes --debug, for a traceback where there would be one line.",
)
data_app = typer.Typer(no_args_is_help=True, help="The data sets: what there is, fetch one, check one.")
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
    help="Look inside a trained model: its spectrum, a sphere, ways between images, codes cut short.",
    epilog="The run may stand first: nicest latent runs/demo sphere",
)
app.add_typer(latent_app, name="latent")
reproduce_app = typer.Typer(no_args_is_help=True, help="The paper's tables and figures, from nothing.")
app.add_typer(reproduce_app, name="reproduce")
compare_app = typer.Typer(no_args_is_help=True, help="NICE beside what people use for tables instead.")
app.add_typer(compare_app, name="compare")
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting, repeatable: train.epochs=50. `nicest recipes NAME` lists all."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1; auto takes a GPU where there is one.")]
Run = Annotated[Path, typer.Argument(help="A run folder.", show_default=False)]
Verify = Annotated[
    bool | None,
    typer.Option(
        "--verify/--no-verify",
        help="Refuse files that are not those training wrote, by their SHA-256; --verify also where none is kept.",
        show_default="where one is kept",
    ),
]
Moved = Annotated[
    str | None, typer.Option("--data", help="Where the data of the run is now, if it was moved.", show_default=False)
]
Seed = Annotated[int, typer.Option(help="Seed of the random numbers.")]
Tables = Annotated[list[str] | None, typer.Argument(help="Which tables.", show_default="all of them")]
Folder = Annotated[
    Path | None,
    typer.Option("--data", help="A folder of your own tables (.csv, .csv.gz, .parquet, .arrow, .npy, .npz)."),
]
Methods = Annotated[list[str] | None, typer.Option(help="Only this method, repeatable.", show_default="all of them")]
Splittings = Annotated[int, typer.Option(min=1, help="Splits of each table.")]
Jobs = Annotated[int, typer.Option(min=0, help="Processes at a time.", show_default="one for each core")]
Results = Annotated[
    Path | None,
    typer.Option(
        help="A JSON file, written as results come; run again, and what it holds is kept.", show_default=False
    ),
]


class Split(StrEnum):
    train = "train"
    valid = "valid"
    test = "test"


class Preset(StrEnum):
    ours = "ours"
    authors = "authors"


class Direction(StrEnum):
    adam = "adam"
    gradient = "gradient"


class Basis(StrEnum):
    random = "random"
    top = "top"


class Way(StrEnum):
    straight = "straight"
    spherical = "spherical"


def figure(look: str) -> Any:
    """The option of a picture that goes into the run folder unless told otherwise."""
    return typer.Option(help="A picture, or arrays (.npz).", show_default=f"RUN/figures/{look}.png")


def opened(run: Path, device: str, verify: bool | None = None, data: str | None = None) -> Any:
    """The run in a folder, on a device; its data may have moved."""
    from nicest.runs.run import Run

    return Run(run, device=device, verify=verify, data=data if data is None else located(data))


def located(data: str) -> str:
    """Data that a user names: a path is kept whole, so that a run finds it from anywhere."""
    path = Path(data)
    return str(path.resolve()) if path.exists() else data


def is_first(variable: str) -> bool:
    """Whether this is the only process, or the first of those that torchrun counts by a variable."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get(variable, "0") == "0"


def emit(result: Mapping[str, Any], as_json: bool, show: Callable[[Any], None]) -> None:
    if not is_first("RANK"):
        return
    if as_json:
        print(to_json(result, indent=None), end="")
    else:
        show(result)


def fail(message: str, code: int = 1) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    if not is_first("LOCAL_RANK") and sys.stderr is not sys.__stderr__:
        time.sleep(3)  # this process was silent: torchrun must not end the one that speaks before it has spoken
    raise SystemExit(code)


def leave_unfinished(result: Mapping[str, Any]) -> None:
    if "unfinished" in result:
        raise typer.Exit(130)


def interrupted(training: Mapping[str, Any], as_json: bool) -> NoReturn:
    text = f"stopped at step {training['step']}, all saved in {training['run']}: --resume goes on"
    emit(training, as_json, lambda _: print(text))
    raise typer.Exit(130)
