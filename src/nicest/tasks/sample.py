"""Unbiased samples of a trained model (NICE eq. 2), as a picture or as an array."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nicest.data.cells import decode
from nicest.data.tables import SUFFIXES as TABLES
from nicest.data.tables import write_table
from nicest.errors import NicestError
from nicest.files import write_bytes
from nicest.plots import image_grid
from nicest.recipes.recipe import DataSettings
from nicest.runs.folder import require_own_file
from nicest.runs.run import Run

SUFFIXES = (".png", ".npy", ".npz", *TABLES)


def sample(
    run: Run,
    n: int = 100,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Draw n examples from the prior that was trained and write them: a grid (.png), an array (.npy, .npz), a table.

    Unless told otherwise, images go to samples.png, tables to samples.csv and other rows to samples.npy.
    """
    if out is not None and Path(out).suffix not in SUFFIXES:
        raise NicestError(f"expected --out to end in {', '.join(SUFFIXES)}, got {str(out)!r}")
    recipe, columns = run.recipe, run.columns
    kind = ".csv" if columns else ".npy" if len(recipe.data.shape) == 1 else ".png"
    path = Path(f"samples{kind}") if out is None else Path(out)
    require_own_file(path, recipe)
    drawn = draw(run, n, temperature=temperature, seed=seed)
    if path.suffix in TABLES:
        if not columns:
            raise NicestError(f"the model is not of a table: choose --out samples.npy, got {str(path)!r}")
        write_table(path, decode(drawn, columns))
    elif path.suffix == ".png":
        if len(recipe.data.shape) == 1:
            raise NicestError(
                f"rows of {recipe.data.dim} numbers are not images: choose --out samples.npy, or .csv for a table"
            )
        save_grid(path, drawn, recipe.data)
    else:
        buffer = io.BytesIO()
        np.save(buffer, drawn) if path.suffix == ".npy" else np.savez_compressed(buffer, samples=drawn)
        write_bytes(path, buffer.getvalue())
    return {
        "out": str(path),
        "n": n,
        "shape": list(recipe.data.shape),
        "temperature": temperature,
        "seed": seed,
        "dataset": recipe.data.name,
    }


def draw(run: Run, n: int, *, temperature: float = 1.0, seed: int = 0) -> np.ndarray:
    """n samples in the shape and the number type of the data; memory is bounded whatever n is."""
    data, generator = run.recipe.data, torch.Generator(run.device).manual_seed(seed)
    drawn = run.engine.draws(n, temperature=temperature, generator=generator)
    parts = [part.cpu().numpy() for part in drawn]
    rows = np.concatenate(parts).reshape(n, *data.shape)
    return rows if not data.levels else rows.astype(np.uint8 if data.levels <= 256 else np.uint16)


def save_grid(path: Path, images: np.ndarray, data: DataSettings) -> None:
    """Images as one picture, in a grid as square as can be."""
    brightest = data.levels - 1 if data.levels else float(np.abs(images).max()) or 1.0
    buffer = io.BytesIO()
    image_grid(images, brightest=brightest).save(buffer, format="PNG")
    write_bytes(path, buffer.getvalue())
