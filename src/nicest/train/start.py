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
    prepare(flow, splits, recipe.data, device, world)
    return State(recipe, flow, device, world)


def prepare(
    flow: Density,
    splits: Splits,
    data: DataSettings,
    device: torch.device,
    world: World,
    *,
    fitted: bool = True,
    everything: bool = False,
) -> None:
    """Fit the constants of a density to the training rows; all processes start from the same weights.

    With `everything`, constants are fitted to training and validation rows together: they do not change while
    training, so the validation that stops it still compares like with like.
    """
    if world.rank == 0 and fitted:
        rows = splits.train
        if everything and splits.valid is not splits.train:
            rows = np.concatenate([rows, splits.valid])
        try:
            # it draws noise; afterwards this process must draw what the others do
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                flow.initialise(*data.split(rows_to(rows, device)))
        except ValueError as error:  # such as columns that depend on each other
            raise NicestError(str(error)) from error
        flow.double()  # a density may have replaced its constants
    if world.joined:
        flow.load_state_dict(world.sent({name: tensor.cpu() for name, tensor in flow.state_dict().items()}))


def begin(
    recipe: Recipe, splits: Splits, sink: Sink, device: torch.device, world: World, *, private: bool = False
) -> None:
    """Write the files that describe a new training."""
    made = environment(device, private=private) | {"processes": world.size}
    made |= {"format": f"nicest {FORMAT}", "private": private}
    sink.begin(recipe, {ENVIRONMENT: to_json(made)} | columns_file(splits))


def columns_file(splits: Splits) -> dict[str, str]:
    """Return the file that describes the columns of a table, by its name."""
    return {} if splits.schema is None else {COLUMNS: to_json(splits.schema.to_json())}


def keep_start(state: State, splits: Splits, sink: Sink) -> None:
    """Save the model as it is as the best so far: training must improve on it."""
    state.prepare_average()
    engine = Engine(state.average, share=state.world.share, captured=not state.sharded)
    rows = state.recipe.data.split(rows_to(splits.valid, state.device))
    nats = state.world.mean(engine.validation_log_prob(*rows))
    state.flow.train()
    if math.isfinite(nats):
        state.counters.best_nats = nats + state.flow.interval_nats
        saver = Saver(state, sink)
        saver.best = state.average_tensors(), {"epoch": 0, "step": 0, "valid_nats": state.counters.best_nats}
        saver.save()
