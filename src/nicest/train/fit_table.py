"""A flow fitted to rows in memory: a start that is chosen for them, then the loop."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from nicest.data import Splits, in_memory
from nicest.data.arrays import widened
from nicest.data.splits import WIDEST
from nicest.errors import NicestError
from nicest.flows import Flow
from nicest.inference.engine import Engine
from nicest.recipes import Recipe
from nicest.recipes.build import build
from nicest.recipes.defaults import FEW, IN_MEMORY, held_out, recipe_for
from nicest.recipes.recipe import ModelSettings
from nicest.recipes.splits import describe
from nicest.runs.folder import LAST, RunFolder
from nicest.runs.run import Run
from nicest.runs.runtime import choose_device, rows_to
from nicest.train.initial import UNBENT, choose_start
from nicest.train.loop import fit, fit_constants
from nicest.train.state import State


class Fitted(NamedTuple):
    """What came of a fit: the flow in float64, its recipe, the figures it was chosen by, a row for each validation."""

    flow: Flow
    recipe: Recipe
    figures: dict[str, Any]
    metrics: list[dict[str, Any]]


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
    """A flow of rows (N, D), what is not `given` of its recipe chosen for them; or on from a `warm` one.

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
    if warm is None:
        unbent = {} if fewest >= FEW else UNBENT
        recipe = choose_start(splits.training, recipe, unbent | dict(given["model"]))
        return fit_rows(recipe, splits, device=device, quiet=quiet)
    flow, model = warm
    return fit_rows(replace(recipe, model=model), splits, device=device, quiet=quiet, flow=copy.deepcopy(flow))


def fit_rows(
    recipe: Recipe, splits: Splits, *, device: str = "cpu", quiet: bool = True, flow: Flow | None = None
) -> Fitted:
    """Train a recipe on rows in memory, from `flow` where one is given; the random state of torch stays as it was.

    The constants are fitted to training and validation rows together: they do not change while training, so the
    validation that stops it still compares like with like. Of the start and all that was validated, the best is kept.
    """
    place = choose_device(device)
    recipe = describe(recipe, splits)
    cuda = [place] if place.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(recipe.train.seed)
        if flow is None:
            flow = build(recipe).double()
            fit_constants(flow, torch.from_numpy(_all_rows(splits)))
        state, run = State(recipe, flow, place), RunFolder(folder)
        first = state.average_tensors() | state.constants
        start = float(Engine(state.average.eval()).log_prob(rows_to(splits.validating, place)).double().mean())
        state.save(run.path / LAST)
        ended = fit(state, splits, run, quiet=quiet)
        if not ended["finished"]:
            raise KeyboardInterrupt  # the loop ends in good order for the command line; here the caller wants to know
        found = Run(run.path, dtype=torch.float64, device=place)
        flow, recipe, figures = found.flow, found.recipe, found.figures
        if start >= figures["valid_nats"]:
            flow.load_state_dict(first)
            figures = {"epoch": 0, "step": 0, "valid_nats": start}
        return Fitted(flow, recipe, figures, run.metrics())


def _all_rows(splits: Splits) -> np.ndarray:
    """Training and validation rows, which are the same ones where there are too few to hold any out."""
    if splits.valid is splits.train:
        return splits.training
    return np.concatenate([splits.training, splits.validating])
