"""A flow fitted to rows in memory: a start that is chosen for them, then the loop."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nicest.data import in_memory
from nicest.data.columns import Column
from nicest.data.splits import WIDEST
from nicest.errors import NicestError
from nicest.flows import Flow
from nicest.recipes import Recipe
from nicest.recipes.defaults import IN_MEMORY, held_out
from nicest.recipes.recipe import DataSettings, ModelSettings, TrainSettings
from nicest.runs.runtime import choose_device
from nicest.train.callbacks import ProgressBar
from nicest.train.fit import Fitted, choose, continues, fit_rows
from nicest.train.initial import sized


def fit_table(
    rows: np.ndarray,
    *,
    seed: int,
    given: Mapping[str, Mapping[str, Any]] | None = None,
    valid: float | None = None,
    device: str = "cpu",
    quiet: bool = True,
    warm: tuple[Flow, ModelSettings] | None = None,
    columns: Sequence[Column] = (),
    copies: np.ndarray | None = None,
    targets: Sequence[int] = (),
) -> Fitted:
    """Fit a flow to rows (N, D) of numbers; settings that are not `given` are chosen from the data.

    NaN cells are missing. `valid` is the fraction of validation rows, `copies` how often each row counts. `columns`
    describes the columns if any is discrete. With `targets`, these columns are predicted from the others. `warm` is a
    flow to continue from, with its settings.
    """
    if not targets and rows.shape[1] > WIDEST and np.isnan(rows).any():
        raise NicestError(f"expected rows without NaN, as of all tables of more than {WIDEST} columns: leave them out")
    there = ~np.isnan(rows).all(1)
    rows, copies = rows[there], None if copies is None else copies[there]
    given = {"model": {}, "train": {}} | dict(given or {})
    share = held_out(len(rows), targets=bool(targets)) if valid is None else valid
    dtype = np.float32 if np.nanmax(np.abs(rows)) < np.finfo(np.float32).max / 4 else np.float64
    rows = rows.astype(dtype)
    splits = in_memory(IN_MEMORY, rows, seed, share, columns, targets=targets)
    place, shown = choose_device(device), () if quiet else [ProgressBar()]
    continued = continues(splits)
    # from rows that come once each: with copies of a row on both sides, cross-validation would choose badly
    recipes = sized(Recipe("table", data=DataSettings(name=IN_MEMORY), train=TrainSettings(seed=seed)), splits, given)
    if copies is not None:
        splits = in_memory(IN_MEMORY, rows, seed, share, columns, copies, targets)
        recipes = [each.changed({"train": _shorter(each, copies.mean())}, "").changed(given, "") for each in recipes]
    if warm is not None:
        flow, model = warm
        return fit_rows(replace(recipes[0], model=model), splits, place, shown, flow=copy.deepcopy(flow))
    recipe, tried = choose(recipes, splits, place, shown, continued=continued)
    return fit_rows(recipe, splits, place, shown, sink=tried)


def _shorter(recipe: Recipe, times: float) -> dict[str, int]:
    """The lengths that count in epochs, for epochs that have `times` as many steps."""
    lengths = ("epochs", "evaluate_every", "patience")
    return {name: max(1, round(getattr(recipe.train, name) / times)) for name in lengths}
