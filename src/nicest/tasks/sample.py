"""Samples of a trained model (NICE eq. 2), as a picture, an array or a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from nicest.data.tables import SUFFIXES as TABLES
from nicest.data.tables import require_pyarrow, write_table, writing
from nicest.errors import NicestError
from nicest.files import replacing
from nicest.messages import listed
from nicest.plots import image_grid
from nicest.progress import Bar
from nicest.recipes.recipe import DataSettings
from nicest.remote import place
from nicest.runs.run import Run
from nicest.tasks.options import Seed, integer, option, out_file, real
from nicest.tasks.results import Result
from nicest.tasks.rows import require_outputs

LARGEST = 1 << 30  # numbers drawn for one file
SUFFIXES = (".png", ".npy", ".npz", *TABLES)
ROWS = 100_000  # rows of a table drawn at once


@dataclass(frozen=True, kw_only=True)
class Samples(Result):
    """What was drawn; with conditions, their probability and how many independent rows the samples are worth."""

    out: str
    n: int
    temperature: float
    seed: int
    shape: list[int]
    dataset: str
    where: str | None = None
    probability: float | None = None
    effective_size: float | None = None

    def lines(self) -> Iterator[Any]:
        yield f"{self.n} samples in {self.out}"
        if self.probability is not None and self.effective_size is not None:
            yield f"probability of the conditions: {self.probability:.3g}"
            yield f"effective sample size: {self.effective_size:,.0f} of {self.n:,}"


def sample(
    run: Run,
    n: Annotated[int, integer(1, 10**8, "Number of samples.", "-n")] = 100,
    *,
    where: Annotated[
        str | None,
        option(
            help="Conditions on columns of a table, joined by and: =, !=, <, <=, >, >=, in (...).", show_default=False
        ),
    ] = None,
    temperature: Annotated[float, real(0, 1000, "Multiplies the scale of the prior of images.")] = 1.0,
    seed: Seed = 0,
    out: Annotated[
        str | Path | None,
        out_file(
            "A grid (.png), an array (.npy, .npz) or a table (.csv, .parquet, .arrow).",
            rows=True,
            show_default="samples.png, samples.npy or samples.csv, depending on the data",
        ),
    ] = None,
) -> Samples:
    """Draw samples from a trained model.

    A model of images given labels draws the same number of each label, at least n in all, in rows of the grid.

    Example: nicest sample runs/demo -n 100 --out grid.png

    Of a table: nicest sample runs/people -n 1000 --where 'age >= 30 and sex = "F" and income > 50000' --out rows.csv
    """
    path = place(out or {"table": "samples.csv", "rows": "samples.npy", "images": "samples.png"}[run.kind])
    data, kind = run.recipe.data, path.suffix.lower()
    if kind not in SUFFIXES:
        raise NicestError(f"expected a file that ends in {', '.join(SUFFIXES)}, got {str(path)!r}")
    if (kind in TABLES) != (run.kind == "table"):
        what = "of a table: write samples.csv" if run.kind == "table" else "not of a table: write samples.npy"
        raise NicestError(f"the model is {what} instead of {str(path)!r}")
    if kind == ".png" and run.kind != "images":
        raise NicestError(f"rows of {data.dim} numbers are not images: write samples.npy")
    require_outputs(run, path)
    told: dict[str, Any] = {"temperature": temperature, "seed": seed, "shape": list(data.shape), "dataset": data.name}
    if run.kind == "table":
        if temperature != 1:
            raise NicestError("a model of a table has no temperature: leave it out")
        return Samples(out=str(path), n=n, **told, **sample_table(run, n, where or "", seed, path))
    if where is not None:
        raise NicestError("where: conditions need the columns of a table, and this model has none")
    classes = len(data.classes)
    columns = -(-n // classes) if classes else None  # samples of each label
    labels = np.repeat(np.arange(classes), columns) if columns else None
    drawn = draw(run, n, temperature=temperature, seed=seed, labels=labels)
    if kind == ".png":
        save_grid(path, drawn, data, columns=columns)
    elif kind == ".npz":
        save_arrays(path, samples=drawn, **({} if labels is None else {"labels": labels}))
    else:
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.save(file, drawn)
    return Samples(out=str(path), n=len(drawn), **told)


def sample_table(run: Run, n: int, where: str, seed: int, path: Path) -> dict[str, Any]:
    """Write n rows of a table, those that meet conditions if there are any; return their probability."""
    if where:
        drawn = run.table.sample(n, where=where, seed=seed)
        write_table(path, run.table.schema.decode(drawn.rows))
        return {"where": where, "probability": drawn.probability, "effective_size": drawn.effective_size}
    require_pyarrow()
    batches = parts(run, n, seed)
    with Bar("sampling", n) as bar, writing(path, next(batches).schema) as write:
        for done, some in enumerate(batches, 1):
            write(some.columns)
            bar.update(done * ROWS)
    return {}


def parts(run: Run, n: int, seed: int) -> Iterator[Any]:
    """Draw n rows of a table; yield an empty Arrow table, then tables of at most ROWS rows."""
    yield run.table.schema.decode(np.empty((0, len(run.table.schema)), dtype=np.float32))
    for first in range(0, n, ROWS):
        own_seed = int(np.random.SeedSequence([seed, first]).generate_state(1)[0])
        yield run.table.schema.decode(run.table.sample(min(ROWS, n - first), seed=own_seed).rows)


def sample_batch(run: Run, table: Any, *, rows: int = ROWS, seed: int = 0) -> Any:
    """Draw an Arrow table of `rows` samples for each number in the column `id`, with the seed `seed` + id."""
    import pyarrow as pa

    if "id" not in table.column_names:
        names = listed(table.column_names)
        raise NicestError(f"expected a column `id` of whole numbers, got {names}: see docs/scale.md")
    seeds = [seed + number for number in table.column("id").to_pylist()]
    return pa.concat_tables([*parts(run, 0, 0), *(some for each in seeds for some in parts(run, rows, each))])


def draw(run: Run, n: int, *, temperature: float = 1.0, seed: int = 0, labels: np.ndarray | None = None) -> np.ndarray:
    """Return samples of a flow in the shape and type of the data: n, or one for each of `labels` (n,)."""
    data, generator = run.recipe.data, torch.Generator(run.device).manual_seed(seed)
    n = n if labels is None else len(labels)
    if not 1 <= n <= LARGEST // data.dim:
        most = f"{LARGEST // data.dim:,} samples of {data.dim:,} numbers"
        raise NicestError(f"expected 1 to {most}, got {n:,}: draw the others into other files, with other seeds")
    context = None if labels is None else torch.from_numpy(labels[:, None]).to(run.flow.units.scale)
    drawn = run.engine.draws(n, context, temperature=temperature, generator=generator)
    return np.concatenate([as_images(part.cpu().numpy(), data) for part in drawn])


def save_grid(path: Path, images: np.ndarray, data: DataSettings, *, columns: int | None = None) -> None:
    """Save images as one picture, in a grid with `columns` columns, or as square as possible."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        image_grid(images, brightest=brightest(images, data), columns=columns).save(file, format="PNG")


def as_images(rows: np.ndarray, data: DataSettings) -> np.ndarray:
    """Return rows (..., D) in the shape and type of the data, without a label at their end."""
    images = rows[..., : data.dim].reshape(*rows.shape[:-1], *data.shape)
    return images.astype(np.uint8 if data.levels <= 256 else np.uint16) if data.levels else images


def brightest(images: np.ndarray, data: DataSettings) -> float:
    """Return the value that is drawn white."""
    return data.levels - 1 if data.levels else float(np.abs(images).max()) or 1.0


def save_arrays(path: Path, **arrays: np.ndarray) -> None:
    """Save arrays as a compressed .npz file."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
