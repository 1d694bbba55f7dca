"""The start of a training: the model is built, its constants are fitted, and the run is described."""

from __future__ import annotations

import math

import numpy as np
import torch

from nicest.data import Splits
from nicest.errors import NicestError
from nicest.files import to_json
from nicest.flows import Density
from nicest.inference.engine import Engine
from nicest.recipes import Recipe
from nicest.recipes.build import build
from nicest.recipes.recipe import DataSettings
from nicest.recipes.splits import describe
from nicest.runs.digests import ENVIRONMENT
from nicest.runs.folder import COLUMNS, FORMAT, Sink
from nicest.runs.runtime import environment, rows_to
from nicest.train.distributed import World
from nicest.train.loop import Saver
from nicest.train.state import State


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
