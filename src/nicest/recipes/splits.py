"""The data of a recipe, checked to be what the recipe says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nicest.data import Splits, load
from nicest.data.images import Fit
from nicest.data.tables import is_table
from nicest.errors import NicestError
from nicest.recipes.defaults import IN_MEMORY
from nicest.recipes.recipe import DataSettings, Recipe


def load_splits(recipe: Recipe) -> Splits:
    """The data of a recipe; where a run was trained on it before, it must still be the same."""
    data = recipe.data
    if data.name == IN_MEMORY:
        raise NicestError("this model was fitted to rows in memory, by nicest.NICE, and keeps none of them: bring data")
    if not data.shape:  # nothing was trained yet
        _require_kind(recipe)
    found = load(
        data.name, seed=data.seed, valid=data.valid, test=data.test, drop=data.drop, fit=Fit(data.crop, data.resize)
    )
    splits = _with_levels(found, data)
    if data.shape and (splits.shape, splits.levels or 0) != (data.shape, data.levels):
        raise NicestError(
            f"{data.name}: expected {data.dim} features, shape {data.shape}, {data.levels} levels, as in training;"
            f" got {splits.dim} features, shape {splits.shape}, {splits.levels or 0} levels: bring the same data"
        )
    if data.digest and splits.digest() != data.digest:
        raise NicestError(
            f"{data.name} has changed since the run was trained, and its split with it:"
            " test rows of today may be training rows of then; bring the same data, or train again"
        )
    return splits


def _require_kind(recipe: Recipe) -> None:
    """Refuse a table, or nothing, for pictures, and pictures for a table."""
    path = Path(recipe.data.name).expanduser()
    if recipe.name == path.name == "images" and not path.exists():
        raise NicestError("recipe 'images' is for a folder of pictures of your own; give it with --data FOLDER")
    if recipe.name == "images" and is_table(path):
        raise NicestError(
            f"{path} is a table, recipe 'images' is for folders of pictures; use `nicest train table --data ...`"
        )
    if recipe.name == "table" and path.is_dir():
        raise NicestError(f"{path} is a folder, recipe 'table' is for tables; use `nicest train images --data ...`")


def describe(recipe: Recipe, splits: Splits) -> Recipe:
    """The recipe with what it takes from the data written in."""
    data = replace(
        recipe.data,
        shape=splits.shape,
        levels=splits.levels or 0,
        discrete=sum(step > 0 for step in splits.steps),
        digest=splits.digest(),
    )
    return replace(recipe, data=data)


def _with_levels(splits: Splits, data: DataSettings) -> Splits:
    """The splits with the number of levels the recipe asks for, where the data allows it."""
    if not data.levels or data.levels == splits.levels:
        return splits
    largest = max(int(rows.max()) for rows in (splits.train, splits.valid, splits.test))
    if splits.levels and largest < data.levels:
        return replace(splits, levels=data.levels)
    if data.shape:
        return splits  # not the data of training: the caller says so
    what = f"has values up to {largest}" if splits.levels else "is continuous, without levels"
    raise NicestError(f"{data.name} {what}: data.levels={data.levels} does not fit it")
