"""The start of a training, and its continuation exactly where it stopped."""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from nicest.data import Splits
from nicest.errors import NicestError
from nicest.files import to_json
from nicest.flows import Density
from nicest.inference.engine import Engine
from nicest.messages import shown
from nicest.recipes import Recipe
from nicest.recipes.build import build
from nicest.recipes.recipe import DataSettings
from nicest.recipes.splits import describe, load_splits
from nicest.runs.digests import ENVIRONMENT
from nicest.runs.folder import COLUMNS, FORMAT, LAST, RunFolder, Sink, newer, restore_flow
from nicest.runs.formats import NAMES_OF_TODAY
from nicest.runs.runtime import environment, rows_to
from nicest.runs.sinks import Saved
from nicest.train.distributed import World
from nicest.train.loop import Saver, read_state
from nicest.train.state import State, under


def start(recipe: Recipe, splits: Splits, device: torch.device, world: World = World()) -> State:
    """Build the model of a recipe, fit its constants to the training rows, and return the first state."""
    recipe = describe(recipe, splits)
    torch.manual_seed(recipe.train.seed)
    flow = build(recipe, splits.schema).double().to(device)
    prepare(flow, splits.train, recipe.data, device, world)
    return State(recipe, flow, device, world)


def prepare(
    flow: Density, rows: np.ndarray, data: DataSettings, device: torch.device, world: World, *, fitted: bool = True
) -> None:
    """Fit the constants of a density to rows; all processes start from the same weights."""
    if world.rank == 0 and fitted:
        try:
            # it draws noise; afterwards this process must draw what the others do
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                flow.initialise(*data.split(rows_to(rows, device)))
        except ValueError as error:  # such as columns that depend on each other
            raise NicestError(str(error)) from error
        flow.double()  # a density may have replaced its constants
    if world.joined:
        flow.load_state_dict(world.sent({name: tensor.cpu() for name, tensor in flow.state_dict().items()}))


def begin(state: State, splits: Splits, sink: Sink, *, private: bool = False) -> None:
    """Write the files that describe a new training, and its first state."""
    made = environment(state.device, private=private) | {"processes": state.world.size}
    made |= {"format": f"nicest {FORMAT}", "private": private}
    sink.begin(state.recipe, {ENVIRONMENT: to_json(made)} | columns_file(splits))
    state.save(sink)


def columns_file(splits: Splits) -> dict[str, str]:
    """Return the file that describes the columns of a table, by its name."""
    return {} if splits.schema is None else {COLUMNS: to_json(splits.schema.to_json())}


def keep_start(state: State, splits: Splits, sink: Sink) -> None:
    """Save the model as it is as the best so far: training must improve on it."""
    state.prepare_average()
    nats = validation_nats(state.average, splits, state.recipe.data, state.world, captured=not state.sharded)
    state.flow.train()
    if math.isfinite(nats):
        state.counters.best_nats = nats
        saver = Saver(state, sink)
        saver.best = state.average_tensors(), {"epoch": 0, "step": 0, "valid_nats": state.counters.best_nats}
        saver.save()


def validation_nats(
    flow: Density, splits: Splits, data: DataSettings, world: World = World(), *, captured: bool = True
) -> float:
    """Return the mean log-likelihood of the validation rows, as metrics report it."""
    rows = rows_to(splits.valid, flow.device)
    rows = rows.to(flow.dtype) if rows.is_floating_point() else rows
    engine = Engine(flow.eval(), share=world.share, captured=captured)
    return world.mean(engine.validation_log_prob(*data.split(rows))) + flow.interval_nats


def resumed(
    folder: RunFolder, sink: Sink, recipe: Recipe, overrides: tuple[str, ...], device: torch.device, world: World
) -> tuple[State, Splits]:
    """Return the state that a run stopped in, and its data; the run keeps its own recipe, except for the overrides."""
    saved = read_state(sink, world)
    if saved is None:
        raise NicestError(f"nothing to resume: {folder.path} holds no {LAST}")
    if saved.recipe.name != recipe.name:
        raise NicestError(f"{folder.path} holds a run of recipe {saved.recipe.name!r}, not {recipe.name!r}")
    recipe = same_training(saved.recipe, saved.recipe.override(*overrides), sink)
    splits = load_splits(recipe)
    world.require_shares(min(recipe.train.batch, len(splits.train)))
    source = str(folder.path / LAST)
    flow = restore_flow(recipe, under("flow.", saved.tensors), source, saved.version, splits.schema)
    state = State(recipe, flow, device, world)
    go_on(state, saved, splits, sink)
    return state, splits


def go_on(state: State, saved: Saved, splits: Splits, sink: Sink) -> None:
    """Restore a saved state, and check that the sink still holds what belongs to it."""
    if saved.version >= NAMES_OF_TODAY and saved.figures.get("flow", state.fingerprint) != state.fingerprint:
        raise NicestError(f"{sink} holds a run of another flow: other layers, or other weights that train")
    if unknown := saved.figures.keys() - {"flow", *asdict(state.counters)}:
        raise newer(f"{sink}: unknown counter {shown(min(unknown))}")
    state.restore(saved, random=True)
    counters, world = state.counters, state.world
    if world.broadcast(world.rank == 0 and counters.best_nats > -math.inf and not _has_best(sink, state)):
        if world.rank == 0:
            warnings.warn(
                f"{sink}: the best model, of epoch {counters.best_epoch}, is gone, damaged or not of this run;"
                " the next validation writes a new one",
                stacklevel=2,
            )
        counters.best_nats, counters.best_epoch = -math.inf, 0
        counters.unscored = counters.unscored or counters.step % max(1, len(state.losses)) == 0
    if world.rank == 0:
        if counters.best_epoch > 0 and all(row.get("epoch") != counters.best_epoch for row in sink.metrics()):
            warnings.warn(f"{sink}: the metrics of earlier epochs are gone or not of this run", stacklevel=2)
        sink.drop_metrics_after(counters.step - counters.unscored)
        sink.begin(state.recipe, columns_file(splits))


def _has_best(sink: Sink, state: State) -> bool:
    """Return True if the sink holds the best model of this run, or a better one that was saved just before a crash."""

    def of(recipe: Recipe) -> tuple[Any, ...]:
        return recipe.data.shape, recipe.data.seed, recipe.model, recipe.table, recipe.train.seed

    try:
        found = sink.read_model()
    except NicestError:
        return False
    return of(found.recipe) == of(state.recipe) and found.figures.get("epoch", 0) >= state.counters.best_epoch


def same_training(stored: Recipe, changed: Recipe, sink: Sink) -> Recipe:
    """Return the changed recipe of a run; raise a NicestError if it would be another training."""

    def kept(recipe: Recipe) -> tuple[Any, ...]:
        data = replace(recipe.data, name="") if recipe.data.digest else recipe.data  # it may have moved
        return data, recipe.model, recipe.table, recipe.train.batch, recipe.train.optimizer, bool(recipe.train.ema)

    if kept(stored) != kept(changed):
        raise NicestError(
            f"{sink} holds a run with other data or settings: a resumed run keeps its data, model, batch, optimizer and"
            " whether it averages; only augment.* and the rest of train.* may change"
        )
    same = ("title", "reading", "paper_nats", "expected_nats", "own_flow")
    return replace(changed, **{name: getattr(stored, name) for name in same})
