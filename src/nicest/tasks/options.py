"""Options of tasks: types with help texts, from which the command line is built. Values are checked when parsed.

So nothing is computed for a number out of range, or for a result that could not be written in the end.
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

option = typer.Option
argument = typer.Argument


def number(kind: type[int] | type[float], least: int, most: int, help: str, *names: str, **more: Any) -> Any:
    """Return an option for a finite number from `least` to `most`."""

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
    """Return the name of something to read; refuse pipes and devices, which may never end."""
    try:
        if is_address(text):
            return text
        mode = local(text).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return text  # perhaps not a file but a name; whoever opens it reports that it is missing
    except OSError as error:
        raise NicestError(f"cannot read {text}: {error.strerror}") from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise NicestError(f"expected a file or folder, got {text}, a pipe or a device: write its content to a file")
    return text


def local(text: str | Path) -> Path:
    """Return a path on this machine; refuse addresses."""
    if not str(text):
        raise NicestError("expected the name of a file or folder, got an empty string")
    if is_address(str(text)):
        raise NicestError(f"expected a path on this machine, got the address {text}: only tables and arrays have one")
    return Path(text)


def out_file(help: str, within: str = "", *, rows: bool = False, **more: Any) -> Any:
    """Return an option for a file to write, refused at once if it cannot be written; `rows` may be at an address."""

    def parse(text: str | Path) -> Path:
        path = place(text) if rows and str(text) else local(text)
        require_writable(path / within if within else path)
        return path

    return typer.Option(parser=parse, metavar="<path>", help=help, **more)


def out_folder(help: str, **more: Any) -> Any:
    """Return an option for a folder to write to."""
    return out_file(help, ".lock", **more)


def figure(name: str) -> Any:
    """Return an option for a picture that goes to the run folder by default."""
    return out_file("An image file, or arrays (.npz).", show_default=f"RUN/figures/{name}.png")


def given(help: str, kind: Callable[[str], Any] = local, **more: Any) -> Any:
    """Return an argument for a file or folder to read."""
    return typer.Argument(parser=lambda text: kind(to_read(str(text))), help=help, show_default=False, **more)


Run = Annotated[Path, given("A run folder, or a model that comes with nicest.")]
Device = Annotated[str, option(help="auto, cpu, cuda or cuda:1; auto uses a GPU if there is one.")]
Verify = Annotated[
    bool | None,
    option(
        "--verify/--no-verify",
        help="Check the SHA-256 of the files that training wrote; --verify also refuses files without a record.",
        show_default="check if recorded",
    ),
]
Moved = Annotated[
    str | None,
    option("--data", parser=to_read, help="Where the data of the run is now, if it has moved.", show_default=False),
]
Label = Annotated[
    int | None, integer(0, 255, "The label, for a model of images given their labels.", show_default=False)
]
Json = Annotated[bool, option("--json", help="Print one JSON object on standard output.")]

Seed = Annotated[int, integer(0, 10**12, "Random seed.")]
Noise = Annotated[int, integer(1, 1000, "Draws of the dequantisation noise to average over; tables need none.")]
Split = Annotated[Literal["train", "valid", "test"], option(help="Which split of the data.")]
Interval = Annotated[float, real(0, 1, "Probability of the intervals.")]
Jobs = Annotated[int, integer(0, 1000, "Number of processes; 0 for one per core.")]
Runs = Annotated[Path | str, out_folder("The folder for the runs.")]
Set = Annotated[
    list[str], option("--set", help="Change a setting: train.epochs=50; repeatable. `nicest recipes NAME` lists them.")
]
Table = Annotated[Path | str, given("A table (.csv, .parquet, .arrow) with the columns of the training data.", place)]
About = Annotated[str, option(help="A line for the card.", show_default="the title of the recipe")]
DataSet = Annotated[str, argument(help="The name of a data set.", show_default=False)]
