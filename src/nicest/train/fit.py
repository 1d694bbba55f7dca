"""Fit a flow to rows: anybody's flow with `fit`, a recipe with `train`; in memory, or in a run folder."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nicest.data import Splits, given
from nicest.data.columns import columns_to_json
from nicest.errors import NicestError
from nicest.files import to_json
from nicest.inference.engine import Engine
from nicest.messages import shown
from nicest.recipes import Recipe
from nicest.recipes.build import build
from nicest.recipes.defaults import IN_MEMORY, settings_given
from nicest.recipes.recipe import AugmentSettings, DataSettings, TrainSettings
from nicest.recipes.splits import describe, load_splits
from nicest.runs.digests import ENVIRONMENT
from nicest.runs.folder import COLUMNS, FORMAT, LAST, RunFolder, Sink, filled, newer, restore_flow
from nicest.runs.runtime import environment, rows_to
from nicest.runs.sinks import Memory, Saved
from nicest.train.blend import blend
from nicest.train.callbacks import Callback, ProgressBar
from nicest.train.distributed import World, joined, restarts
from nicest.train.initial import sized
from nicest.train.loop import Saver, read_state, run_loop
from nicest.train.state import State, under

TRIAL, TRIAL_STEPS = 0.1, 200  # share of a training, and steps at least, that tell which of several recipes is best
CONTINUED = 1_000  # rows from which the best training is then continued


class Fitted(NamedTuple):
    """What came of a fit: the flow, the figures it was chosen by, a row for each validation, and its recipe."""

    flow: Any
    figures: dict[str, Any]
    metrics: list[dict[str, Any]]
    recipe: Recipe


def fit(
    flow: Any,
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
    """Train any flow on rows (N, ...), in place, by maximum likelihood; the best weights by validation are kept.

    `context`, (N, C), is what the flow is conditioned on. `valid` are rows that tell when to stop and which weights are
    best, or a pair of rows and their context; without them the training rows do. NaN in rows stands for a missing cell.
    With `initialise` the flow's constants are fitted to the rows first (`Flow.initialise`).
    A `sink` keeps metrics, states and the best model: in memory by default; in a `RunFolder`, or the path of one, a
    training that was killed goes on exactly where it stopped, when the same call is made again, and
    `nicest.open(path, flow=flow)` opens it. Without `callbacks` a progress bar is shown. Under torchrun all processes
    train together.

    Training is in float32, with the coupling functions in `settings.precision`; the flow comes back in its own dtype,
    on the device it was trained on, never worse by validation than it was. Ctrl-C leaves the best weights so far in
    the flow, and raises KeyboardInterrupt. With a run folder it saves the state first, as SIGTERM, SIGHUP and SIGUSR1
    do; without one, signals are left to the caller.
    """
    with joined(device) as (world, place):
        opened = RunFolder(sink) if isinstance(sink, str | Path) else sink
        kept = opened if opened and world.rank == 0 else Memory(handles_signals=isinstance(opened, RunFolder))
        if context is not None and valid is not None and not isinstance(valid, tuple):
            raise NicestError("expected validation rows with their context, got rows alone: pass valid=(rows, context)")
        width = 0 if context is None else int(np.prod(np.shape(context)[1:]))
        kept_valid = None if valid is None else _with_context(*(valid if isinstance(valid, tuple) else (valid, None)))
        steps = [*flow.units.step.tolist(), *[0.0] * width]
        splits = given(_with_context(rows, context), kept_valid, flow.units.levels, steps, context=width)
        data = DataSettings(name=IN_MEMORY, context=width)
        recipe = Recipe("own", "a flow built by hand", own_flow=True, data=data, augment=augment, train=settings)
        recipe = describe(recipe, splits)
        with kept.open_for_writing():
            return fit_flow(flow, recipe, splits, kept, callbacks, place, world, initialise=initialise)


def fit_flow(
    flow: Any,
    recipe: Recipe,
    splits: Splits,
    sink: Sink,
    callbacks: Sequence[Callback] | None,
    device: torch.device,
    world: World = World(),
    *,
    initialise: bool = True,
    until: int | None = None,
) -> Fitted:
    """Train a flow in place, or go on with what the sink holds, to the end or `until` an epoch; torch's random state
    stays as it was."""
    dtype, training = flow.units.scale.dtype, flow.training
    world.require_shares(min(recipe.train.batch, splits.n_training))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(recipe.train.seed)
        try:
            saved = read_state(sink, world)
            flow.double()
            if saved:
                recipe = _same_training(saved.recipe, recipe, sink)
                filled(flow, under("flow.", saved.tensors), str(sink), saved.version, saved.recipe.data)
            else:
                sink.refuse_existing()
                prepare(flow, splits, recipe.data, device, world, fitted=initialise)
            if not any(p.requires_grad for p in flow.parameters()):
                nats = Engine(flow.to(device).eval()).log_prob(*recipe.data.split(rows_to(splits.validating, device)))
                figures = {"epoch": 0, "step": 0, "valid_nats": float(nats.double().mean()) + flow.units.interval_nats}
                return Fitted(flow.to(dtype), figures, [], recipe)  # all was fitted in closed form
            state = State(recipe, flow, device, world)
            if saved:
                go_on(state, saved, splits, sink)
            else:
                begin(recipe, splits, sink, device, world)
                state.save(sink)
                keep_start(state, splits, sink)
            watching = [ProgressBar()] if callbacks is None else callbacks
            ended = run_loop(state, splits, sink, watching, until=until)
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


def keep_start(state: State, splits: Splits, sink: Sink) -> None:
    """Take the flow as it is for the best so far: training must do better to replace it."""
    state.prepare_average()
    engine = Engine(state.average, share=state.world.share, captured=not state.sharded)
    nats = state.world.mean(engine.log_prob(*state.recipe.data.split(rows_to(splits.validating, state.device))))
    state.flow.train()
    if math.isfinite(nats):
        state.counters.best_nats = nats + state.flow.units.interval_nats
        saver = Saver(state, sink)
        saver.best = state.average_tensors(), {"epoch": 0, "step": 0, "valid_nats": state.counters.best_nats}
        saver.save()


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
    """Train a recipe into the run folder `out`, or go on where it stopped; returns where that ended.

    Under torchrun all its processes train together, and the first alone writes. A `private` run records no command, no
    user name and no absolute path, and stays private when it is resumed.
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
                return weighed(run_loop(state, splits, sink, watching), sink, splits, world)
        sink.refuse_existing()
        recipe = recipe.override(*overrides)
        splits = load_splits(recipe)  # before the folder is made: a wrong name or path leaves nothing behind
        tried: Memory | None = None
        if recipe.sized:
            if world.rank == 0:
                among = sized(recipe, splits, settings_given(recipe, overrides))
                recipe, tried = choose(
                    among, splits, place, watching, continued=continues(splits), handles_signals=True
                )
            recipe = world.broadcast(recipe)
        world.require_shares(min(recipe.train.batch, splits.n_training))
        with sink.open_for_writing():
            sink.refuse_existing()
            if world.any(tried is not None):
                recipe = describe(recipe, splits)
                begin(recipe, splits, sink, place, world, private=private)
                if tried is not None:
                    tried.hand_over(sink, recipe)
                state, splits = resumed(folder, sink, recipe, (), place, world, splits)
            else:
                state = start(recipe, splits, place, world)
                begin(state.recipe, splits, sink, place, world, private=private)
                state.save(sink)
            return weighed(run_loop(state, splits, sink, watching), sink, splits, world)


def weighed(ended: dict[str, Any], sink: Sink, splits: Splits, world: World) -> dict[str, Any]:
    """Where a training ended; if all of it is done, the forest in its best model, if there is one, has its weight."""
    best = sink.read_model() if ended["finished"] and world.rank == 0 else None
    if best is not None and best.recipe.model.trees:
        flow = restore_flow(best.recipe, best.tensors, str(sink), best.version)
        blended(flow, splits, best.recipe)
        sink.save_model(Saved({**flow.state_dict()}, best.recipe, best.figures))
    return ended


def blended(flow: Any, splits: Splits, recipe: Recipe) -> Any:
    """The flow, in place, its forest weighed; torch's random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.train.seed)
        if recipe.model.trees:
            blend(flow, splits, recipe.data)
    return flow


def continues(splits: Splits) -> bool:
    """Whether the best training of several is continued. With few rows it starts again, because `fit_rows` then
    fits constants to the validation rows, too; so does a prediction, whose forest also grows from them."""
    return splits.n_fitted >= CONTINUED and not splits.targets


def choose(
    recipes: Sequence[Recipe],
    splits: Splits,
    device: torch.device,
    callbacks: Sequence[Callback] = (),
    *,
    continued: bool = False,
    handles_signals: bool = False,
) -> tuple[Recipe, Memory | None]:
    """Return the recipe with the best validation score after a tenth of its training; with `continued`, also its state.

    `handles_signals` is that of `Memory`.
    """
    if len(recipes) == 1:
        return recipes[0], None
    bars = [ProgressBar() for each in callbacks if isinstance(each, ProgressBar)]
    names, nats = [recipe.title.partition(": ")[2] for recipe in recipes], list[float]()
    sinks = [Memory(handles_signals=handles_signals) for _ in recipes]
    for name, recipe, sink in zip(names, recipes, sinks, strict=True):
        for each in callbacks:
            each.note(f"trying {name}, for a few epochs")
        per_epoch, every = max(1, splits.n_training // recipe.train.batch), recipe.train.evaluate_every
        epochs = max(TRIAL * recipe.train.epochs, TRIAL_STEPS / per_epoch)
        until = min(recipe.train.epochs, every * math.ceil(epochs / every))  # where it is validated
        model = replace(recipe.model, trees=0) if splits.targets else recipe.model
        trial = replace(recipe, name=f"trying {name}", model=model)
        # kinds differ in what is fitted before training: rows that decide between them must not be among it
        try:
            fitted = fit_rows(trial, splits, device, bars, everything=False, sink=sink, until=until)
        except KeyboardInterrupt:
            for each in callbacks:
                each.note("stopped in the short trainings: nothing is saved yet")
            raise
        nats.append(fitted.figures["valid_nats"])
    best = nats.index(max(nats))
    found = ", ".join(f"{name} {value:.2f}" for name, value in zip(names, nats, strict=True))
    what = "is continued" if continued else "is trained in full"
    for each in callbacks:
        each.note(f"after short trainings, nats of the validation rows: {found}; the best {what}")
    return recipes[best], sinks[best] if continued else None


def fit_rows(
    recipe: Recipe,
    splits: Splits,
    device: torch.device,
    callbacks: Sequence[Callback] = (),
    flow: Any = None,
    *,
    everything: bool = True,
    sink: Memory | None = None,
    until: int | None = None,
) -> Fitted:
    """Train a recipe on rows in memory: from `flow` where one is given, or on from what `sink` holds; the flow comes
    back in float64.

    `everything` is that of `prepare`, `until` that of `run_loop`.
    """
    recipe, sink = describe(recipe, splits), sink or Memory()
    if flow is None:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(recipe.train.seed)
            flow = build(recipe, splits).double()
            if sink.read_state() is None:
                prepare(flow, splits, recipe.data, torch.device("cpu"), World(), everything=everything)
    fitted = fit_flow(flow, recipe, splits, sink, callbacks, device, initialise=False, until=until)
    return fitted._replace(flow=blended(fitted.flow, splits, recipe))


def start(recipe: Recipe, splits: Splits, device: torch.device, world: World = World()) -> State:
    """The state before the first step: a fresh flow of a recipe, its constants fitted to the training rows."""
    recipe = describe(recipe, splits)
    torch.manual_seed(recipe.train.seed)
    flow = build(recipe, splits).double().to(device)
    prepare(flow, splits, recipe.data, device, world)
    return State(recipe, flow, device, world)


def prepare(
    flow: Any,
    splits: Splits,
    data: DataSettings,
    device: torch.device,
    world: World,
    *,
    fitted: bool = True,
    everything: bool = False,
) -> None:
    """Before training: fit the constants of a flow to the training rows; all processes start from the same weights.

    With `everything`, constants are fitted to training and validation rows together: they do not change while
    training, so the validation that stops it still compares like with like.
    """
    if world.rank == 0 and fitted:
        rows = splits.training
        if everything and splits.valid is not splits.train:
            rows = np.concatenate([rows, splits.validating])
        try:
            # which draws noise: after it, this process draws what the others do
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                flow.initialise(*data.split(rows_to(rows, device)))
        except ValueError as error:  # such as columns that depend on each other
            raise NicestError(str(error)) from error
    if world.joined:
        flow.load_state_dict(world.sent({name: tensor.cpu() for name, tensor in flow.state_dict().items()}))


def begin(
    recipe: Recipe, splits: Splits, sink: Sink, device: torch.device, world: World, *, private: bool = False
) -> None:
    """Describe a new training."""
    made = environment(device, private=private) | {"processes": world.size}
    made |= {"format": f"nicest {FORMAT}", "private": private}
    sink.begin(recipe, {ENVIRONMENT: to_json(made)} | columns_file(splits))


def columns_file(splits: Splits) -> dict[str, str]:
    """The file that describes the columns of a table, by its name."""
    return {COLUMNS: to_json(columns_to_json(splits.columns))} if splits.columns else {}


def go_on(state: State, saved: Saved, splits: Splits, sink: Sink) -> None:
    """Take up a training where it was saved."""
    if saved.version == FORMAT and saved.figures.get("flow", state.fingerprint) != state.fingerprint:
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
    """Whether the sink holds the best model of this run, or a better one that was saved just before a crash."""

    def of(recipe: Recipe) -> tuple[Any, ...]:
        return recipe.data.shape, recipe.data.seed, recipe.model, recipe.train.seed

    try:
        found = sink.read_model()
    except NicestError:
        return False
    return of(found.recipe) == of(state.recipe) and found.figures.get("epoch", 0) >= state.counters.best_epoch


def resumed(
    folder: RunFolder,
    sink: Sink,
    recipe: Recipe,
    overrides: tuple[str, ...],
    device: torch.device,
    world: World,
    splits: Splits | None = None,
) -> tuple[State, Splits]:
    """The state a run stopped in, and its data, if it is not here yet; the run keeps its own recipe, but for the
    overrides."""
    saved = read_state(sink, world)
    if saved is None:
        raise NicestError(f"nothing to resume: {folder.path} holds no {LAST}")
    if saved.recipe.name != recipe.name:
        raise NicestError(f"{folder.path} holds a run of recipe {saved.recipe.name!r}, not {recipe.name!r}")
    recipe = _same_training(saved.recipe, saved.recipe.override(*overrides), sink)
    splits = splits or load_splits(recipe)
    world.require_shares(min(recipe.train.batch, splits.n_training))
    flow = restore_flow(recipe, under("flow.", saved.tensors), str(folder.path / LAST), saved.version)
    state = State(recipe, flow, device, world)
    go_on(state, saved, splits, sink)
    return state, splits


def _same_training(stored: Recipe, changed: Recipe, sink: Sink) -> Recipe:
    def kept(recipe: Recipe) -> tuple[Any, ...]:
        data = replace(recipe.data, name="") if recipe.data.digest else recipe.data  # it may have moved
        return data, recipe.model, recipe.train.batch, recipe.train.optimizer, bool(recipe.train.ema)

    if kept(stored) != kept(changed):
        raise NicestError(
            f"{sink} holds a run with other data or settings: a resumed run keeps its data, model, batch, optimizer and"
            " whether it averages; only augment.* and the rest of train.* may change"
        )
    same = ("title", "reading", "paper_nats", "expected_nats", "own_flow")
    return replace(changed, **{name: getattr(stored, name) for name in same})


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
