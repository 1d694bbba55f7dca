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
from nicest.flows import Flow
from nicest.inference.engine import Engine
from nicest.plots import image_grid
from nicest.recipes.recipe import DataSettings
from nicest.runs.folder import RunFolder, load_with_recipe, require_own_file
from nicest.runs.runtime import choose_device

SUFFIXES = (".png", ".npy", ".npz", *TABLES)


def sample(
    run: str | Path,
    n: int = 100,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    out: str | Path | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Draw n examples from the prior that was trained and write them: a grid (.png), an array (.npy, .npz), a table.

    Unless told otherwise, images go to samples.png, tables to samples.csv and other rows to samples.npy.
    """
    if out is not None and Path(out).suffix not in SUFFIXES:
        raise NicestError(f"expected --out to end in {', '.join(SUFFIXES)}, got {str(out)!r}")
    flow, recipe, _ = load_with_recipe(run, device=choose_device(device))
    columns = RunFolder(run).columns()
    kind = ".csv" if columns else ".npy" if len(recipe.data.shape) == 1 else ".png"
    path = Path(f"samples{kind}") if out is None else Path(out)
    require_own_file(path, recipe)
    drawn = draw(flow, recipe.data, n, temperature=temperature, seed=seed)
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


def draw(flow: Flow, data: DataSettings, n: int, *, temperature: float, seed: int) -> np.ndarray:
    """n samples in the shape and the number type of the data; memory is bounded whatever n is."""
    device = flow.prior.loc.device
    generator = torch.Generator(device).manual_seed(seed)
    drawn = Engine(flow).draws(n, temperature=temperature, generator=generator)
    parts = [part.cpu().numpy() for part in drawn]
    rows = np.concatenate(parts).reshape(n, *data.shape)
    return rows if not data.levels else rows.astype(np.uint8 if data.levels <= 256 else np.uint16)


def save_grid(path: Path, images: np.ndarray, data: DataSettings) -> None:
    """Images as one picture, in a grid as square as can be."""
    brightest = data.levels - 1 if data.levels else float(np.abs(images).max()) or 1.0
    buffer = io.BytesIO()
    image_grid(images, brightest=brightest).save(buffer, format="PNG")
    write_bytes(path, buffer.getvalue())
