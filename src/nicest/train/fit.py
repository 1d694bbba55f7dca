"""Fit a density to rows: any density with `fit`, a recipe with `train`; in memory, or in a run folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nicest.data import Splits, given
from nicest.errors import NicestError
from nicest.flows import Density
from nicest.messages import shown
from nicest.recipes import Recipe
from nicest.recipes.build import build
from nicest.recipes.defaults import IN_MEMORY, settings_given
from nicest.recipes.recipe import AugmentSettings, DataSettings, TrainSettings
from nicest.recipes.splits import describe, load_splits
from nicest.runs.folder import LAST, RunFolder, Sink, filled
from nicest.runs.sinks import Memory
from nicest.train.callbacks import Callback, ProgressBar
from nicest.train.distributed import World, joined, restarts
from nicest.train.initial import sized
from nicest.train.loop import read_state, run_loop
from nicest.train.start import begin, go_on, keep_start, prepare, resumed, same_training, start, validation_nats
from nicest.train.state import State, under


class Fitted(NamedTuple):
    """The result of a fit: the density, the metrics it was chosen by, a row for each validation, and its recipe."""

    flow: Any
    figures: dict[str, Any]
    metrics: list[dict[str, Any]]
    recipe: Recipe


def fit(
    flow: Density,
    rows: np.ndarray | Tensor,
    context: np.ndarray | Tensor | None = None,
    *,
    valid: Any = None,
    settings: TrainSettings = TrainSettings(),
    augment: AugmentSettings = AugmentSettings(),
    sink: Sink | str | Path | None = None,
    callbacks: Sequence[Callback] | None = None,
    device: str = "auto",
    initialise: bool = True,
) -> Fitted:
    """Train a flow, or any other `Density`, in place by maximum likelihood.

    The weights that are best by validation are kept, and the density is never worse by validation than before. Training
    is in float32, with coupling functions in `settings.precision`; the density comes back in its own dtype, on the
    device it was trained on. Ctrl-C leaves the best weights so far and raises KeyboardInterrupt. With a run folder it
    saves the state first, as SIGTERM, SIGHUP and SIGUSR1 do; without one, signals are left to the caller. Under
    torchrun all processes train together.

    Parameters
    ----------
    flow : Density
        What is trained: calling it returns the objective.
    rows : array or Tensor of shape (N, ...)
        Training rows. For a density that is not a flow, NaN stands for a missing cell.
    context : array or Tensor of shape (N, C), optional
        What the rows are conditioned on.
    valid : rows, or pair of rows and context, optional
        Validation rows; the training rows by default.
    settings, augment : TrainSettings, AugmentSettings
        How to train, and how to vary images.
    sink : RunFolder, path or Memory, optional
        Where metrics, states and the best model are saved; in memory by default. In a run folder, the same call
        continues a training that was killed exactly where it stopped, and `nicest.open(path, flow=flow)` opens it.
    callbacks : sequence of Callback, optional
        A progress bar by default.
    device : str
        "auto", "cpu" or "cuda".
    initialise : bool
        Whether to fit the constants of the density to the rows first (`Density.initialise`).

    Returns
    -------
    Fitted
    """
    with joined(device) as (world, place):
        opened = RunFolder(sink) if isinstance(sink, str | Path) else sink
        kept = opened if opened and world.rank == 0 else Memory(handles_signals=isinstance(opened, RunFolder))
        splits, width = rows_given(flow, rows, context, valid)
        data = DataSettings(name=IN_MEMORY, context=width)
        recipe = Recipe("own", "a density built by hand", own_flow=True, data=data, augment=augment, train=settings)
        with kept.open_for_writing():
            return fit_density(
                flow, describe(recipe, splits), splits, kept, callbacks, place, world, initialise=initialise
            )


def fit_splits(
    recipe: Recipe,
    splits: Splits,
    device: torch.device,
    callbacks: Sequence[Callback] = (),
    flow: Density | None = None,
) -> Fitted:
    """Train the model of a recipe on data in memory, for an estimator; the model comes back in float64.

    Constants are fitted to training and validation rows. With `flow`, that model is trained further instead.
    """
    recipe = describe(recipe, splits)
    if flow is None:
        with seeded(recipe.train.seed, device):
            flow = build(recipe, splits.schema).double()
            # constants do not change while training: the validation that stops it still compares like with like
            rows = [splits.train] if splits.valid is splits.train else [splits.train, splits.valid]
            prepare(flow, np.concatenate(rows), recipe.data, torch.device("cpu"), World())
    return fit_density(flow, recipe, splits, Memory(), callbacks, device, initialise=False)


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    overrides: tuple[str, ...] = (),
    resume: bool = False,
    device: str = "auto",
    callbacks: Sequence[Callback] | None = None,
    verify: bool | None = None,
    private: bool = False,
) -> dict[str, Any]:
    """Train a recipe into the run folder `out`, or continue a run; return where training ended.

    Under torchrun all processes train together, and the first alone writes.

    Parameters
    ----------
    recipe : Recipe
    out : str or Path
    overrides : tuple of str
        Settings such as "train.epochs=50".
    resume : bool
        Whether to continue the run in `out`.
    device : str
    callbacks : sequence of Callback, optional
        A progress bar by default.
    verify : bool, optional
        As for `RunFolder`.
    private : bool
        Whether to record no command, no user name and no absolute path, also when the run is resumed.
    """
    with joined(device) as (world, place):
        folder = RunFolder(out, verify=verify)
        sink: Sink = folder if world.rank == 0 else Memory(handles_signals=True)
        watching = [ProgressBar()] if callbacks is None else callbacks
        there = world.broadcast((folder.path / LAST).exists())
        if resume or (there and world.any(restarts() > 0)):
            if not there:
                raise NicestError(f"nothing to resume: {folder.path} holds no {LAST}")
            with sink.open_for_writing():
                state, splits = resumed(folder, sink, recipe, overrides, place, world)
                return run_loop(state, splits, sink, watching)
        sink.refuse_existing()
        recipe = recipe.override(*overrides)
        splits = load_splits(recipe)  # before the folder is made: a wrong name or path leaves nothing behind
        if splits.schema is not None:
            for name in recipe.table.targets:
                splits.schema.index(name)  # refuses a name that is no column
        for note in splits.notes if world.rank == 0 else ():
            for each in watching:
                each.note(note)
        if recipe.sized:
            chosen = sized(recipe, splits, settings_given(recipe, overrides)) if world.rank == 0 else None
            recipe = world.broadcast(chosen)
        world.require_shares(min(recipe.train.batch, len(splits.train)))
        with sink.open_for_writing():
            sink.refuse_existing()
            state = start(recipe, splits, place, world)
            begin(state, splits, sink, private=private)
            return run_loop(state, splits, sink, watching)


def fit_density(
    flow: Density,
    recipe: Recipe,
    splits: Splits,
    sink: Sink,
    callbacks: Sequence[Callback] | None,
    device: torch.device,
    world: World = World(),
    *,
    initialise: bool = True,
) -> Fitted:
    """Train a density in place, or continue what the sink holds, to the end."""
    dtype, training = flow.dtype, flow.training
    world.require_shares(min(recipe.train.batch, len(splits.train)))
    with seeded(recipe.train.seed, device):
        try:
            saved = read_state(sink, world)
            flow.double()
            if saved:
                recipe = same_training(saved.recipe, recipe, sink)
                filled(flow, under("flow.", saved.tensors), str(sink), saved.version, saved.recipe.data)
            else:
                sink.refuse_existing()
                prepare(flow, splits.train, recipe.data, device, world, fitted=initialise)
            if not any(p.requires_grad for p in flow.parameters()):
                nats = validation_nats(flow.to(device), splits, recipe.data)  # all was fitted in closed form
                return Fitted(flow.to(dtype).eval(), {"epoch": 0, "step": 0, "valid_nats": nats}, [], recipe)
            state = State(recipe, flow, device, world)
            if saved:
                go_on(state, saved, splits, sink)
            else:
                begin(state, splits, sink)
                keep_start(state, splits, sink)
            ended = run_loop(state, splits, sink, [ProgressBar()] if callbacks is None else callbacks)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and isinstance(sink, Memory) and sink.model:
                filled(flow.double(), sink.model.tensors, str(sink))
            flow.to(dtype).train(training)
            raise
        best = sink.read_model() if world.rank == 0 else None
        tensors = world.sent(best.tensors if best else {})
        figures = world.broadcast(best and best.figures)
    found = filled(state.whole(state.flow).double(), tensors, str(sink)).to(dtype).eval()
    if not ended["finished"]:
        raise KeyboardInterrupt  # everything is saved; the caller wants to know
    return Fitted(found, figures, sink.metrics(), recipe)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators, and restore them at the end."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def rows_given(flow: Density, rows: Any, context: Any, valid: Any) -> tuple[Splits, int]:
    """Return the checked rows of a call of `fit`, with their context in the last columns, and its width."""
    if not isinstance(flow, Density):
        raise NicestError(f"expected a nicest.flows.Density to train, such as a Flow, got {shown(type(flow).__name__)}")
    if context is not None and valid is not None and not isinstance(valid, tuple):
        raise NicestError("expected validation rows with their context, got rows alone: pass valid=(rows, context)")
    width = 0 if context is None else int(np.prod(np.shape(context)[1:]))
    held_out = None if valid is None else _with_context(*(valid if isinstance(valid, tuple) else (valid, None)))
    units = getattr(flow, "units", None)
    how: dict[str, Any] = {"may_miss": True}
    if units is not None:
        how = {"levels": units.levels, "steps": units.step.tolist()}
    return given(_with_context(rows, context), held_out, dim=flow.dim, context=width, **how), width


def _with_context(rows: np.ndarray | Tensor, context: np.ndarray | Tensor | None) -> np.ndarray:
    """Return the rows as an array, with the context in its last columns."""
    if context is None:
        return _array(rows)
    parts = [_array(each) for each in (rows, context)]
    if len(parts[0]) != len(parts[1]):
        raise NicestError(f"expected a context for each of {len(parts[0])} rows, got {len(parts[1])}")
    return np.concatenate([each.reshape(len(each), -1) for each in parts], 1)


def _array(rows: np.ndarray | Tensor) -> np.ndarray:
    """Return rows as an array on the CPU."""
    if isinstance(rows, Tensor):
        rows = rows.detach().cpu()
        return (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()
    if np.ndim(rows) == 0:  # an iterable of batches, such as a DataLoader
        raise NicestError(
            f"expected rows (N, ...) as one array or tensor, got {shown(type(rows).__name__)}: concatenate its batches"
            " with torch.cat"
        )
    return np.asarray(rows)
