"""A flow fitted to rows in memory: a start that is chosen for them, then the loop."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nicest.data import in_memory
from nicest.data.arrays import widened
from nicest.data.splits import WIDEST
from nicest.errors import NicestError
from nicest.flows import Flow
from nicest.recipes.build import build
from nicest.recipes.defaults import FEW, IN_MEMORY, held_out, recipe_for
from nicest.recipes.recipe import ModelSettings
from nicest.recipes.splits import describe
from nicest.runs.runtime import choose_device
from nicest.runs.sinks import Memory
from nicest.train.distributed import World
from nicest.train.fit import Fitted, fit_flow, prepare
from nicest.train.initial import UNBENT, choose_start


def fit_table(
    rows: np.ndarray,
    *,
    seed: int,
    given: Mapping[str, Mapping[str, Any]] | None = None,
    valid: float | None = None,
    device: str = "cpu",
    quiet: bool = True,
    warm: tuple[Flow, ModelSettings] | None = None,
) -> Fitted:
    """A flow of rows (N, D) in float64, what is not `given` of its recipe chosen for them; or on from a `warm` one.

    Cells that are NaN are missing. `valid` is the share of rows that validates, by default as their number asks for.
    """
    if rows.shape[1] > WIDEST and np.isnan(rows).any():
        raise NicestError(f"expected rows without NaN, as of all tables of more than {WIDEST} columns: leave them out")
    rows = rows[~np.isnan(rows).all(1)]
    given = {"model": {}, "train": {}} | dict(given or {})
    fewest = int((~np.isnan(rows)).sum(0).min())
    recipe = recipe_for(len(rows) if fewest >= FEW else fewest, rows.shape[1], given)
    recipe = recipe.changed({"train": {"seed": seed}}, "NICE")
    share = held_out(len(rows)) if valid is None else valid
    dtype = np.float32 if np.nanmax(np.abs(rows)) < np.finfo(np.float32).max / 4 else np.float64
    splits = in_memory(IN_MEMORY, widened(rows, seed).astype(dtype), seed, share)
    place = choose_device(device)
    if warm is None:
        unbent = {} if fewest >= FEW else UNBENT
        recipe = describe(choose_start(splits.training, recipe, unbent | dict(given["model"])), splits)
        with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
            torch.manual_seed(seed)
            flow = build(recipe).double()
            prepare(flow, splits, torch.device("cpu"), World(), everything=True)
    else:
        flow, recipe = copy.deepcopy(warm[0]), describe(replace(recipe, model=warm[1]), splits)
    return fit_flow(flow, recipe, splits, Memory(), () if quiet else None, place, initialise=False)
