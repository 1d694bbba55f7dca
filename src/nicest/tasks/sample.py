"""Unbiased samples of a trained model (NICE eq. 2), as a picture or as an array."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from nicest.data.cells import decode
from nicest.data.tables import SUFFIXES as TABLES
from nicest.data.tables import require_pyarrow, write_table, writing
from nicest.data.where import where as parsed
from nicest.errors import NicestError
from nicest.files import replacing
from nicest.inference.conditional import Conditional
from nicest.inference.impute import MIXED
from nicest.messages import listed
from nicest.plots import image_grid
from nicest.progress import Bar
from nicest.recipes.recipe import DataSettings
from nicest.remote import place
from nicest.runs.folder import require_own_file
from nicest.runs.run import Run
from nicest.tasks.pictures import as_images, brightest, save_arrays

LARGEST = 1 << 30  # numbers that are drawn for one file
SUFFIXES = (".png", ".npy", ".npz", *TABLES)


def sample(
    run: Run,
    n: int = 100,
    *,
    where: str | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Draw n examples from the prior that was trained and write them: a grid (.png), an array (.npy, .npz), a table.

    Unless told otherwise, images go to samples.png, tables to samples.csv and other rows to samples.npy. Rows of a
    table may be drawn `where` conditions on its columns hold, such as `age = 30 and income > 50000`. A model of images
    given labels draws as many of each label, at least n in all: a row of the grid for each.
    """
    if where is not None and run.kind != "table":
        raise NicestError("where: conditions need the columns of a table, and this model has none")
    path = place(out or {"table": "samples.csv", "rows": "samples.npy", "images": "samples.png"}[run.kind])
    recipe, kind = run.recipe, path.suffix
    if kind not in SUFFIXES:
        raise NicestError(f"expected a file that ends in {', '.join(SUFFIXES)}, got {str(path)!r}")
    if kind in TABLES and run.kind != "table":
        raise NicestError(f"the model is not of a table: write samples.npy instead of {str(path)!r}")
    if kind == ".png" and run.kind != "images":
        raise NicestError(f"rows of {recipe.data.dim} numbers are not images: write samples.npy, or .csv for a table")
    if kind in TABLES:
        require_pyarrow()
    require_own_file(path, recipe)
    classes = len(recipe.data.classes)
    each = -(-n // classes) if classes else None  # of every label
    labels = np.repeat(np.arange(classes), each) if each else None
    n = n if labels is None else len(labels)
    asked = {"n": n, "temperature": temperature, "seed": seed}
    told = {"out": str(path), **asked, "shape": list(recipe.data.shape), "dataset": recipe.data.name}
    if where is not None:
        if kind not in TABLES or temperature != 1:
            raise NicestError(f"where: expected a table ({', '.join(TABLES)}) as output, and temperature 1")
        return told | sample_where(run, n, where, seed=seed, out=path)
    drawn = draw(run, n, temperature=temperature, seed=seed, labels=labels)
    if kind in TABLES:
        write_table(path, decode(drawn, run.columns))
    elif kind == ".png":
        save_grid(path, drawn, recipe.data, columns=each)
    elif kind == ".npz":
        save_arrays(path, samples=drawn, **({} if labels is None else {"labels": labels}))
    else:
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.save(file, drawn)
    return told


def sample_batch(run: Run, table: Any, *, rows: int = 100_000, temperature: float = 1.0, seed: int = 0) -> Any:
    """Draw an Arrow table of `rows` samples for each number in the column `id`, with the seed `seed` + id."""
    import pyarrow as pa

    if "id" not in table.column_names:
        raise NicestError(
            f"expected a column `id` of whole numbers, got {listed(table.column_names)}: see docs/scale.md"
        )
    seeds = [seed + number for number in table.column("id").to_pylist()]
    drawn = (draw(run, rows, temperature=temperature, seed=each) for each in seeds)
    empty = np.empty((0, len(run.columns)))
    return pa.concat_tables([decode(each, run.columns) for each in (empty, *drawn)])


def sample_where(run: Run, n: int, where: str, *, seed: int, out: Path) -> dict[str, Any]:
    """Write n rows that meet conditions, as they are drawn; returned are figures of the draws."""
    asked = parsed(where, run.columns)
    with Bar("sampling", n) as bar:
        drawn = Conditional(run.flow, asked.ranges, seed=seed, watch=lambda rows, text: bar.update(int(rows), text))
        with writing(out, decode(np.empty((0, len(run.columns))), asked.columns).schema) as write:
            for rows in drawn.draws(n):
                write(decode(asked.clip(rows.cpu().numpy()), asked.columns).columns)
    return {"where": where, "share": drawn.share, "r_hat": drawn.r_hat, "mixed": drawn.r_hat < MIXED}


def draw(run: Run, n: int, *, temperature: float = 1.0, seed: int = 0, labels: np.ndarray | None = None) -> np.ndarray:
    """n samples in the shape and the number type of the data, of `labels` (n,) where the model is given them; no more
    memory is taken than they need."""
    data, generator = run.recipe.data, torch.Generator(run.device).manual_seed(seed)
    if not 1 <= n <= LARGEST // data.dim:
        most = f"{LARGEST // data.dim:,} samples of {data.dim:,} numbers"
        raise NicestError(f"expected 1 to {most}, got {n:,}: draw the others into other files, with other seeds")
    context = None if labels is None else torch.from_numpy(labels[:, None]).to(run.flow.units.scale)
    parts = run.engine.draws(n, context, temperature=temperature, generator=generator)
    return np.concatenate([as_images(part.cpu().numpy(), data) for part in parts])


def save_grid(path: Path, images: np.ndarray, data: DataSettings, *, columns: int | None = None) -> None:
    """Images as one picture, in a grid of so many columns, or as square as can be."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        image_grid(images, brightest=brightest(images, data), columns=columns).save(file, format="PNG")
