"""The data of a recipe, checked to be what the recipe says."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from nicest.data import Splits, load
from nicest.data.download import SETS
from nicest.data.images import Fit
from nicest.data.tables import is_table
from nicest.errors import NicestError
from nicest.recipes.defaults import IN_MEMORY
from nicest.recipes.recipe import DataSettings, Recipe
from nicest.remote import place


def load_splits(recipe: Recipe) -> Splits:
    """Load the data of a recipe; if a run was trained on it, it must still be the same."""
    data = recipe.data
    if data.name == IN_MEMORY:
        raise NicestError("this model was fitted to rows in memory, which a run does not keep: provide the data")
    _require_kind(data)
    if data.shape and data.name not in SETS and not (path := place(data.name).expanduser()).exists():
        raise NicestError(f"found no {path}, which the run was trained on: put it back, or give its new path as data")
    fit = Fit(data.crop, data.resize)
    how: dict[str, Any] = {"seed": data.seed, "valid": data.valid, "test": data.test, "labels": data.labels}
    splits = _with_levels(load(data.name, fit=fit, drop=data.drop, bounds=data.bounds, **how), data)
    if data.shape and (splits.shape, splits.levels or 0) != (data.shape, data.levels):
        raise NicestError(
            f"{data.name}: expected {data.dim} features, shape {data.shape}, {data.levels} levels, as in training;"
            f" got {splits.dim} features, shape {splits.shape}, {splits.levels or 0} levels: provide the same data"
        )
    if data.digest and splits.digest() != data.digest:
        raise NicestError(
            f"{data.name} has changed since the run was trained, and its split with it:"
            " test rows of today may be training rows of then; provide the same data, or train again"
        )
    return splits


def _require_kind(data: DataSettings) -> None:
    """Raise a NicestError for data that is not of the kind of the recipe."""
    path = place(data.name).expanduser()
    table = data.name not in SETS and is_table(path)
    if table and data.kind != "table":
        other = "folders of images" if data.kind == "images" else "images and arrays"
        raise NicestError(f"{path} is a table, and the recipe is for {other}: use the recipe `table`")
    if not table and data.kind == "table":
        what, other = ("a folder", "images") if path.is_dir() else ("no table", "rows")
        raise NicestError(f"{data.name} is {what}, and the recipe is for tables: use the recipe `{other}`")
    if data.kind == "images" and not data.shape and not path.exists() and data.name not in SETS:
        raise NicestError(
            f"found no folder {path}, looked from {Path.cwd()}; the recipe is for a folder of your own images:"
            " give its path as data"
        )


def describe(recipe: Recipe, splits: Splits) -> Recipe:
    """Write what a recipe takes from the data into it."""
    taken: dict[str, Any] = {
        "shape": splits.shape,
        "levels": splits.levels or 0,
        "classes": splits.classes,
        "digest": splits.digest(),
    }
    return replace(recipe, data=replace(recipe.data, **taken))


def _with_levels(splits: Splits, data: DataSettings) -> Splits:
    """Return the splits with the number of levels of the recipe, if the data allows it."""
    if not data.levels or data.levels == splits.levels:
        return splits
    pixels = math.prod(splits.shape)
    largest = max(int(rows[:, :pixels].max()) for rows in (splits.train, splits.valid, splits.test))
    if splits.levels and largest < data.levels:
        return replace(splits, levels=data.levels)
    if data.shape:
        return splits  # not the data of training: the caller says so
    what = f"has values up to {largest}" if splits.levels else "is continuous, without levels"
    raise NicestError(f"{data.name} {what}: data.levels={data.levels} does not fit it")
