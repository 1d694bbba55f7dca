"""Options and arguments, each checked when it is parsed: numbers by their range, files by whether they can be used.

So nothing is computed for a number beyond all bounds, or for a result that cannot be written in the end.
"""

from __future__ import annotations

import functools
import math
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nicest.errors import NicestError
from nicest.files import require_writable
from nicest.messages import shown
from nicest.remote import is_address, place


def number(kind: type[int] | type[float], least: int, most: int, help: str, *names: str, **more: Any) -> Any:
    """The option of a number from `least` to `most`, which is no infinity and no NaN."""

    def parse(text: Any) -> float:
        try:
            value: float = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            what = "an integer" if kind is int else "a number"
            raise typer.BadParameter(f"expected {what} from {least:,} to {most:,}, got {shown(text, 40)}")
        return value

    return typer.Option(*names, parser=parse, help=f"{help} From {least:,} to {most:,}.", **more)


integer, real = functools.partial(number, int), functools.partial(number, float)


def to_read(text: str) -> str:
    """The name of something to read; a pipe or a device, which may never end, is refused."""
    try:
        if is_address(text):
            return text
        mode = named(text).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return text  # it may be no file, but a name; whoever looks for it says that it is not there
    except OSError as error:
        raise NicestError(f"cannot read {text}: {error.strerror}") from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise NicestError(f"expected a file or folder, got {text}, a pipe or a device: write its content to a file")
    return text


def named(text: str | Path) -> Path:
    if not str(text):
        raise NicestError("expected the name of a file or folder, got an empty string")
    if is_address(str(text)):
        raise NicestError(f"expected a path on this machine, got the address {text}: only tables and arrays have one")
    return Path(text)


def out_file(help: str, within: str = "", rows: bool = False, **more: Any) -> Any:
    """The option of a file to write: that it can be written is found out before the work. One of `rows` may be at an
    address."""

    def parse(text: str | Path) -> Path:
        path = place(text) if rows and str(text) else named(text)
        require_writable(path / within if within else path)
        return path

    return typer.Option(parser=parse, metavar="<path>", help=help, **more)


def out_folder(help: str, **more: Any) -> Any:
    """The option of a folder to write in."""
    return out_file(help, ".lock", **more)


def given(help: str, kind: Callable[[str], Any] | None = None, **more: Any) -> Any:
    """The argument of a file or folder to read."""
    return typer.Argument(parser=lambda text: (kind or named)(to_read(str(text))), help=help, **more)


Logger = Literal["tensorboard", "mlflow", "wandb"]
GraphFormat = Literal["onnx", "torch-export"]
Preset = Literal["ours", "authors"]
Direction = Literal["adam", "gradient"]
Basis = Literal["random", "top"]
Way = Literal["straight", "spherical"]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting: train.epochs=50; repeatable. `nicest recipes NAME` lists them."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1; auto uses a GPU if there is one.")]
Run = Annotated[Path, given("A run folder, or a model that comes with nicest.", show_default=False)]
Verify = Annotated[
    bool | None,
    typer.Option(
        "--verify/--no-verify",
        help="Check the SHA-256 of the files that training wrote; --verify also refuses files without a record.",
        show_default="check if recorded",
    ),
]
Moved = Annotated[
    str | None,
    typer.Option(
        "--data", parser=to_read, help="Where the data of the run is now, if it has moved.", show_default=False
    ),
]
Label = Annotated[
    int | None,
    integer(0, 255, "The label, for a model of images given their labels.", show_default=False),
]
Seed = Annotated[int, integer(0, 10**12, "Random seed.")]
Draws = Annotated[int, integer(1, 1000, "Average over this many draws of the dequantisation noise.")]
Split = Annotated[Literal["train", "valid", "test"], typer.Option(help="Which split of the data.")]
Images = Annotated[
    Literal["train", "valid", "test", "samples"],
    typer.Option("--split", help="Which split of the data, or samples of the model, which need no data."),
]
Jobs = Annotated[int, integer(0, 1000, "How many processes to run at a time.", show_default="one per core")]
Runs = Annotated[Path, out_folder("The folder for the runs.")]
DataSet = Annotated[str, typer.Argument(help="The name of a data set.")]


def figure(look: str) -> Any:
    """The option of a picture that goes into the run folder unless told otherwise."""
    return out_file("An image file, or arrays (.npz).", show_default=f"RUN/figures/{look}.png")
