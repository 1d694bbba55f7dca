"""The data of a recipe, checked to be what the recipe says."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from nicest.data import Splits, load
from nicest.data.download import SETS
from nicest.data.images import Fit
from nicest.data.tables import is_table
from nicest.errors import NicestError
from nicest.messages import listed
from nicest.recipes.defaults import IN_MEMORY
from nicest.recipes.recipe import DataSettings, Recipe
from nicest.remote import place


def load_splits(recipe: Recipe) -> Splits:
    """The data of a recipe; where a run was trained on it before, it must still be the same."""
    data = recipe.data
    if data.name == IN_MEMORY:
        raise NicestError("this model was fitted to rows in memory, which a run does not keep: provide the data")
    if not data.shape:  # nothing was trained yet
        _require_kind(data)
    elif data.name not in SETS and not (path := place(data.name).expanduser()).exists():
        raise NicestError(f"found no {path}, which the run was trained on: put it back, or give its new path as data")
    fit = Fit(data.crop, data.resize)
    how = {"seed": data.seed, "valid": data.valid, "test": data.test, "drop": data.drop, "bounds": data.bounds}
    how |= {"target": data.target, "labels": data.labels}
    found = load(data.name, fit=fit, **how)  # type: ignore[arg-type]
    if data.target and not found.targets:
        raise NicestError(f"{data.name} is no table: expected no target, got {listed(data.target)}")
    splits = _with_levels(found, data)
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
    """Refuse data that is not of the kind the recipe is for."""
    path = place(data.name).expanduser()
    if data.kind == "images" and is_table(path):
        raise NicestError(f"{path} is a table, and the recipe is for folders of images: use the recipe `table`")
    if data.kind == "images" and not path.exists() and data.name not in SETS:
        raise NicestError(
            f"found no folder {path}, looked from {Path.cwd()}; the recipe is for a folder of your own images:"
            " give its path as data"
        )
    if data.kind == "table" and path.is_dir():
        raise NicestError(f"{path} is a folder, and the recipe is for tables: use the recipe `images`")


def describe(recipe: Recipe, splits: Splits) -> Recipe:
    """The recipe with what it takes from the data written in."""
    data = replace(
        recipe.data,
        shape=splits.shape,
        levels=splits.levels or 0,
        discrete=sum(step > 0 and (not splits.targets or i in splits.targets) for i, step in enumerate(splits.steps)),
        targets=splits.targets,
        categories=splits.categories if splits.targets else (),
        atoms=splits.support.most_atoms if splits.support else 0,
        classes=splits.classes,
        digest=splits.digest(),
    )
    return replace(recipe, data=data)


def _with_levels(splits: Splits, data: DataSettings) -> Splits:
    """The splits with the number of levels the recipe asks for, where the data allows it."""
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
