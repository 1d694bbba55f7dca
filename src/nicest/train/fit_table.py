"""A flow fitted to rows in memory: a start that is chosen for them, then the loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nicest.data import in_memory
from nicest.data.arrays import widened
from nicest.data.columns import Column
from nicest.data.splits import WIDEST
from nicest.errors import NicestError
from nicest.flows import Flow
from nicest.recipes import Recipe
from nicest.recipes.build import build, units_of
from nicest.recipes.defaults import FEW, IN_MEMORY, held_out, recipe_for
from nicest.recipes.recipe import ModelSettings
from nicest.recipes.splits import describe
from nicest.runs.runtime import choose_device, rows_to
from nicest.runs.sinks import Memory
from nicest.train.distributed import World
from nicest.train.fit import Fitted, fit_flow, prepare
from nicest.train.initial import UNBENT, choose_start, some


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
    work: float = math.inf,
) -> Fitted:
    """A flow of rows (N, D) in float64, what is not `given` of its recipe chosen for them; or on from a `warm` one.

    Cells that are NaN are missing. `valid` is the share of rows that validates, by default as their number asks for.
    `columns` say which are discrete, if any is; `copies` how often each row counts; `work` is that of `recipe_for`.
    """
    if rows.shape[1] > WIDEST and np.isnan(rows).any():
        raise NicestError(f"expected rows without NaN, as of all tables of more than {WIDEST} columns: leave them out")
    there = ~np.isnan(rows).all(1)
    rows, copies = rows[there], None if copies is None else copies[there]
    given = {"model": {}, "train": {}} | dict(given or {})
    fewest = int((~np.isnan(rows)).sum(0).min())
    recipe = recipe_for(len(rows) if fewest >= FEW else fewest, rows.shape[1], given, work)
    recipe = recipe.changed({"train": {"seed": seed}}, "NICE")
    share = held_out(len(rows)) if valid is None else valid
    dtype = np.float32 if np.nanmax(np.abs(rows)) < np.finfo(np.float32).max / 4 else np.float64
    rows = (widened(rows, seed) if warm is None else rows).astype(dtype)
    splits = in_memory(IN_MEMORY, rows, seed, share, columns)
    if warm is None:
        # from rows that come once each: with copies of a row on both sides, cross-validation would choose badly
        units = units_of(describe(recipe, splits).data, splits.steps).double()
        noise = torch.Generator().manual_seed(seed)
        seen = units.enter(rows_to(some(splits.training)), generator=noise).numpy()
        recipe = choose_start(seen, recipe, ({} if fewest >= FEW else UNBENT) | dict(given["model"]))
    if copies is not None:
        splits = in_memory(IN_MEMORY, rows, seed, share, columns, copies)
        recipe = recipe.changed({"train": _shorter(recipe, copies.mean())}, "NICE").changed(given, "NICE")
    place, recipe = choose_device(device), describe(recipe, splits)
    if warm is None:
        with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
            torch.manual_seed(seed)
            flow = build(recipe, splits.steps).double()
            prepare(flow, splits, torch.device("cpu"), World(), everything=True)
    else:
        flow, recipe = copy.deepcopy(warm[0]), replace(recipe, model=warm[1])
    return fit_flow(flow, recipe, splits, Memory(), () if quiet else None, place, initialise=False)


def _shorter(recipe: Recipe, times: float) -> dict[str, int]:
    """The lengths that count in epochs, for epochs that have `times` as many steps."""
    lengths = ("epochs", "evaluate_every", "patience")
    return {name: max(1, round(getattr(recipe.train, name) / times)) for name in lengths}
