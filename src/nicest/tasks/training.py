"""Train a model by a recipe, on published data or on your own."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from nicest.data.tables import is_table
from nicest.errors import NicestError
from nicest.remote import is_address, place
from nicest.tasks.options import Device, Set, Verify, given, option, out_folder, to_read
from nicest.tasks.results import Result


@dataclass(frozen=True, kw_only=True)
class Training(Result):
    """Where a training ended."""

    run: str
    finished: bool
    step: int
    epochs: int
    best_epoch: int
    best_nats: float
    seconds: float
    rolled_back: bool
    unscored: bool

    @property
    def exit_code(self) -> int:
        return 0 if self.finished else 130

    def lines(self) -> Iterator[Any]:
        if not self.finished:
            yield f"stopped at step {self.step}, all saved in {self.run}: --resume continues it"
            return
        best = f"{self.best_nats:.2f} nats on validation, epoch {self.best_epoch} of {self.epochs}"
        yield f"{self.run}: best {best}, {self.seconds:.0f} s"
        yield f"next: nicest evaluate {shlex.quote(self.run)}"


def train(
    recipe: Annotated[
        str, given("A recipe: its name or a .toml file. Or your data: a table or a folder of images.", str)
    ],
    data: Annotated[
        str | None,
        option(
            parser=to_read,
            help="Your own data: a table (.csv, .parquet, .arrow), an array (.npy, .npz) or a folder of images.",
        ),
    ] = None,
    target: Annotated[
        Sequence[str], option(help="A column of a table that you want to predict: training favours it; repeatable.")
    ] = (),
    effort: Annotated[
        Literal["low", "medium", "high"] | None, option(help="How long to train on a table.", show_default="medium")
    ] = None,
    out: Annotated[str | Path | None, out_folder("The run folder.", show_default="runs/RECIPE or runs/FILE")] = None,
    change: Set = (),  # type: ignore[assignment]
    resume: Annotated[bool, option("--resume", help="Resume the run in the folder.")] = False,
    logger: Annotated[
        Literal["tensorboard", "mlflow", "wandb"] | None,
        option(help="Write curves for this logger to RUN/LOGGER; nothing is uploaded."),
    ] = None,
    private: Annotated[
        bool, option("--private", help="Record no command, host name, user name or absolute path in the run folder.")
    ] = False,
    device: Device = "auto",
    verify: Verify = None,
) -> Training:
    """Train a model. Ctrl-C saves and stops; --resume continues exactly where it stopped.

    Example: nicest train people.csv

    With a column to predict: nicest train houses.csv --target price --effort high

    By a recipe of images: nicest train mnist --set train.epochs=50

    On several GPUs: torchrun --nproc-per-node 8 -m nicest train tfd
    """
    from nicest.recipes import load_recipe, names

    name = None
    if recipe not in names() and (kind := data_kind(recipe)):
        if data:
            raise NicestError(f"expected one data set, got {recipe} and {data}: leave one out")
        recipe, data, name = kind, recipe, Path(recipe).stem
    loaded, overrides = load_recipe(recipe), list(change)
    settings = {"data.name": data and located(data), "table.targets": list(target), "train.effort": effort}
    overrides += [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items() if value]
    to_read(loaded.override(*overrides).data.name)
    folder = Path(out) if out else Path("runs") / (name or loaded.name)
    if data and folder.resolve() == place(data).resolve():
        raise NicestError(f"expected a separate folder for the run, got {folder}, which holds the data: choose another")
    if verify and not resume:
        raise NicestError("only a run that is resumed can be verified: resume one, or leave verify out")
    if private and resume:
        raise NicestError("private is for a new run: leave it out, the resumed run keeps its setting")
    if private and logger:
        raise NicestError("loggers record names of host, user or paths: leave out the logger or private")
    from nicest.train.callbacks import LOGGERS, ProgressBar  # after the recipe: this import takes two seconds
    from nicest.train.fit import train as run_training

    callbacks: list[Any] = [ProgressBar(), *([LOGGERS[logger](folder / logger)] if logger else [])]
    how: dict[str, Any] = {"resume": resume, "device": device, "verify": verify, "private": private}
    found = Training(**run_training(loaded, folder, overrides=tuple(overrides), callbacks=callbacks, **how))
    if found.finished and os.environ.get("RANK", "0") == "0":
        from nicest.runs.run import Run
        from nicest.tasks.score import score_quantiles

        run = Run(folder, device=device, data=located(data) if data else None)
        if run.kind == "table":
            score_quantiles(run)  # now, while the data is at hand
    return found


def data_kind(text: str) -> str:
    """Return the recipe for a data file or folder, "" if the text names neither."""
    path = Path(text)
    if path.is_dir():
        return "" if (path / "recipe.toml").exists() else "images"
    if path.suffix in (".npy", ".npz") and path.is_file():
        from nicest.data.arrays import read_npy, read_npz

        array = read_npy(path) if path.suffix == ".npy" else next(iter(read_npz(path).values()))
        return "rows" if array.ndim == 2 else "images"
    return "table" if is_table(path) or is_address(text) else ""


def located(data: str) -> str:
    """Return the absolute path of existing data, so that a run finds it from any folder."""
    path = place(data)
    return str(path.resolve()) if path.exists() else data
