"""Options and arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Preset = Literal["ours", "authors"]
Direction = Literal["adam", "gradient"]
Basis = Literal["random", "top"]
Way = Literal["straight", "spherical"]
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
Draws = Annotated[int, typer.Option(min=1, help="Draws of the dequantisation noise to average over.")]
Split = Annotated[Literal["train", "valid", "test"], typer.Option(help="Which examples.")]
Tables = Annotated[list[str] | None, typer.Argument(help="Which tables.", show_default="all of them")]
Splittings = Annotated[int, typer.Option(min=1, help="Splits of each table.")]
Record = Annotated[Path | None, typer.Option(help="A JSON file to write.", show_default=False)]
Runs = Annotated[Path, typer.Option(help="Where the runs are, or will be.")]
DataSet = Annotated[str, typer.Argument(help="A data set by name.")]


def figure(look: str) -> Any:
    """The option of a picture that goes into the run folder unless told otherwise."""
    return typer.Option(help="A picture, or arrays (.npz).", show_default=f"RUN/figures/{look}.png")
