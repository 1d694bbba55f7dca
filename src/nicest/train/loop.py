"""Training: maximise the log-likelihood (NICE §5.1), in one loop."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nicest.data import Splits
from nicest.data.columns import columns_to_json
from nicest.errors import NicestError
from nicest.files import to_json
from nicest.flows import Flow, bits_per_dim
from nicest.inference.engine import Engine
from nicest.progress import Bar
from nicest.recipes import Recipe
from nicest.recipes.build import build
from nicest.recipes.recipe import TrainSettings
from nicest.recipes.splits import describe, load_splits
from nicest.runs.digests import ENVIRONMENT
from nicest.runs.folder import COLUMNS, LAST, RunFolder, WatchedFolder, read_tensors, restore_flow
from nicest.runs.runtime import environment, rows_to
from nicest.train.distributed import World, joined, local, restarts
from nicest.train.initial import sized
from nicest.train.memory import explaining_memory
from nicest.train.missing_cells import Holes
from nicest.train.optim import set_rates
from nicest.train.state import Counters, State, under
from nicest.train.step import TrainingStep

CHECK_EVERY = 100  # steps between two looks at the losses: each look waits for the device
SAVE_EVERY = 300.0  # seconds after which a state is saved also in the middle of an epoch
ELSEWHERE = "the prior or the gradient"
SCORED_AT_ONCE = 500  # rows of a validation between two looks at the signals
RARELY = 100  # times what the last save took, that pass before the next; the first and the last come beside it
CHEAP = 0.25  # seconds: until so much was spent in all, a state is saved at every validation


def train(
    recipe: Recipe, out: str | Path, *, overrides: tuple[str, ...] = (), resume: bool = False, device: str = "auto"
) -> dict[str, Any]:
    """Train a recipe into the run folder `out`, or go on where it stopped; returns where that ended.

    Under torchrun all its processes train together, and the first alone writes.
    """
    with joined(device) as (world, place):
        run = RunFolder(out) if world.rank == 0 else WatchedFolder(out)
        there = world.broadcast((run.path / LAST).exists())
        if resume or (there and world.any(restarts() > 0)):
            if not there:
                raise NicestError(f"nothing to resume: {run.path} holds no {LAST}")
            with run.open_for_writing():
                state, splits = resume_state(run, recipe, overrides, place, world)
                return fit(state, splits, run)
        run.refuse_existing()
        recipe = recipe.override(*overrides)
        splits = load_splits(recipe)  # before the folder is made: a wrong name or path leaves nothing behind
        if recipe.sized:
            recipe = world.broadcast(sized(recipe, splits, overrides) if world.rank == 0 else None)
        world.require_shares(min(recipe.train.batch, splits.n_training))
        with run.open_for_writing():
            run.refuse_existing()
            state = start(recipe, splits, place, world)
            run.write("recipe.toml", state.recipe.to_toml())
            run.write(ENVIRONMENT, to_json(environment(place) | {"processes": world.size}))
            if splits.columns:
                run.write(COLUMNS, to_json(columns_to_json(splits.columns)))
            state.save(run.path / LAST)
            return fit(state, splits, run)


def start(recipe: Recipe, splits: Splits, device: torch.device, world: World = World()) -> State:
    """The state before the first step: a fresh flow, its constants fitted to the training rows."""
    recipe = describe(recipe, splits)
    torch.manual_seed(recipe.train.seed)
    flow = build(recipe, splits.steps).double()
    if world.rank == 0:
        fit_constants(flow, rows_to(splits.training, device))
    if world.joined:
        flow.load_state_dict(world.sent(flow.state_dict()))
    return State(recipe, flow, device, world)


def fit_constants(flow: Flow, rows: Tensor) -> None:
    """Fit to the training rows what is fitted before training."""
    try:
        flow.fit_constants(rows)
    except ValueError as error:  # such as dependent columns
        raise NicestError(str(error)) from error


def resume_state(
    run: RunFolder, recipe: Recipe, overrides: tuple[str, ...], device: torch.device, world: World
) -> tuple[State, Splits]:
    """The state a run stopped in, and its data; the run keeps its own recipe, but for the overrides."""
    tensors, stored, counters = read_last(run, world)
    if stored.name != recipe.name:
        raise NicestError(f"{run.path} holds a run of recipe {stored.name!r}, not {recipe.name!r}")
    recipe = _same_model(stored, stored.override(*overrides))
    splits = load_splits(recipe)
    world.require_shares(min(recipe.train.batch, splits.n_training))
    state = State(recipe, restore_flow(recipe, under("flow.", tensors), str(run.path / LAST)), device, world)
    state.restore(tensors, counters, random=True)
    run.drop_metrics_after(state.counters.step - state.counters.unscored)
    run.write("recipe.toml", recipe.to_toml())
    return state, splits


def read_last(run: RunFolder, world: World) -> tuple[dict[str, Tensor], Recipe, dict[str, Any]]:
    """The last state of a run, which the first process reads for all."""
    tensors, *rest = read_tensors(run.path / LAST) if world.rank == 0 else ({}, None, None)
    recipe, counters = world.broadcast(rest)
    return world.sent(tensors), recipe, counters


@explaining_memory
def fit(state: State, splits: Splits, run: RunFolder, *, quiet: bool = False) -> dict[str, Any]:
    """The loop. Stops early, with everything saved, when the user presses Ctrl-C."""
    settings, flow, counters, world = state.recipe.train, state.flow, state.counters, state.world
    rows, valid = rows_to(splits.training, state.device), rows_to(splits.validating, state.device)
    holes = Holes(state, splits, rows)
    batch = min(settings.batch, len(rows))
    per_epoch = len(rows) // batch  # what is left over sits out this epoch; the order is new in each
    total = settings.epochs * per_epoch
    unit = splits.dim if settings.loss == "nats-per-dim" else 1
    offset = flow.units.interval_nats
    if len(state.losses) not in (0, per_epoch):
        raise NicestError(
            f"an epoch of {run.path} had {len(state.losses)} steps, now {per_epoch}: a resumed run keeps its data"
        )
    order, order_of = torch.empty(0), -1
    origin = time.perf_counter() - counters.seconds
    listens = not world.joined or state.device.type == "cpu"  # at every step: on a GPU it would wait for the others

    with (
        Bar(state.recipe.name, total, counters.step, quiet=quiet or world.rank > 0) as bar,
        interruptible(once=not world.joined) as interrupted,
    ):
        if len(holes.missing) and not counters.step:
            share = f"{len(holes.missing):,} of {len(rows):,}"
            bar.note(f"{share} rows that train have missing cells, which are drawn from the model while it learns")
        flow.train()
        step, stop = TrainingStep(state, rows, batch), False
        saver = Saver(state, run)
        engine = scoring(state)
        while not over(counters, settings, per_epoch) and not stop:
            unscored, counters.unscored = counters.unscored, False  # the step is done, its validation is not
            epoch, position = divmod(counters.step - unscored, per_epoch)
            if order_of != epoch:  # from the seed and the epoch alone, so that a resumed epoch has the same order
                generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + epoch)
                order, order_of = torch.randperm(len(rows), generator=generator).to(state.device), epoch
            if position == 0 and not unscored:
                stop = not holes.draw(epoch, lambda: world.any(interrupted.is_set()))
                if stop:  # the resumed run draws them
                    continue
                state.losses = torch.zeros(per_epoch, device=state.device)
            lr = set_rates(state.optimizer, settings, counters.step - unscored, epoch, total)
            try:
                if not unscored:
                    state.losses[position] = step(order[position * batch : (position + 1) * batch])
                    counters.step += 1
            except FloatingPointError as error:
                raise NicestError(diverged(state, run, step)) from error

            last_of_epoch = position + 1 == per_epoch
            looks = last_of_epoch or counters.step % CHECK_EVERY == 0
            # asked once a step, so that what is saved then was looked at first
            stop = (listens or looks) and world.any(interrupted.is_set())
            validates = last_of_epoch and ((epoch + 1) % settings.evaluate_every == 0 or epoch + 1 == settings.epochs)
            if looks or stop:
                good = int(state.losses[: position + 1].isfinite().cumprod(0).sum())  # losses before the first bad one
                late = world.broadcast(saver.late())
                if good <= position or ((stop or late) and world.any(not finite(flow))):
                    recover(state, run, epoch * per_epoch + good, step, bar)
                    holes.put()
                    counters, step, saver.best = state.counters, TrainingStep(state, rows, batch), None
                    engine = scoring(state)  # the weights may have moved
                    continue
                nats = offset - unit * float(state.losses[: position + 1].mean())
                bar.update(counters.step, f"epoch {epoch + 1}/{settings.epochs} {_figures(nats, splits.dim, offset)}")
                if late and not stop and not validates:  # else it is saved after the validation, which must not be lost
                    counters.seconds = time.perf_counter() - origin
                    saver.save()
            if validates:
                state.average.eval()
                scored = None if stop else score(engine, valid, interrupted, world)
                flow.train()
                if scored is None and not world.any(
                    not finite(flow)
                ):  # a signal waits for no validation: the resumed run makes it
                    counters.unscored = stop = True
                    continue
                valid_nats = math.nan if scored is None else scored + offset
                if not math.isfinite(valid_nats):
                    recover(state, run, counters.step, step, bar)
                    holes.put()
                    counters, step, saver.best = state.counters, TrainingStep(state, rows, batch), None
                    engine = scoring(state)  # the weights may have moved
                    continue
                counters.seconds = time.perf_counter() - origin
                row = {
                    "epoch": epoch + 1,
                    "step": counters.step,
                    "train_nats": nats,
                    "valid_nats": valid_nats,
                    "valid_bits_per_dim": bits_per_dim(valid_nats - offset, splits.dim),
                    "lr": lr,
                    "seconds": counters.seconds,
                }
                if valid_nats > counters.best_nats:
                    counters.best_nats, counters.best_epoch = valid_nats, epoch + 1
                    saver.best = state.average_tensors(), row
                # before the state: --resume drops a row too many, but a lost one stays lost
                run.append_metrics(row)
                if world.broadcast(saver.due()) or over(counters, settings, per_epoch):
                    saver.save()
                if not bar.console.is_terminal:
                    bar.note(f"epoch {epoch + 1}/{settings.epochs}  train {nats:.2f}  valid {valid_nats:.2f} nats")
        if stop:
            counters.seconds = time.perf_counter() - origin
            saver.save()
    finished = over(counters, settings, per_epoch)
    return asdict(counters) | {"run": str(run.path), "epochs": settings.epochs, "finished": finished}


def scoring(state: State) -> Engine:
    """What validates: in float32, whatever the networks train in, as `evaluate` will."""
    return Engine(state.average, share=state.world.share, captured=not state.sharded)


def over(counters: Counters, settings: TrainSettings, per_epoch: int) -> bool:
    """Whether training has come to its end: all epochs, or the end of patience, which is asked after a validation."""
    if counters.unscored:
        return False
    epoch, position = divmod(counters.step, per_epoch)
    tired = 0 < settings.patience <= epoch - counters.best_epoch and epoch % settings.evaluate_every == 0
    return epoch >= settings.epochs or (position == 0 and tired)


def score(engine: Engine, rows: Tensor, interrupted: threading.Event, world: World) -> float | None:
    """Mean log-likelihood of rows; None if a signal comes in between, and the random numbers to come as before."""
    cuda = [engine.device] if engine.device.type == "cuda" else []
    random = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in cuda]
    scores = []
    for part in rows.split(SCORED_AT_ONCE):
        if world.any(interrupted.is_set()):
            torch.set_rng_state(random[0])
            for device, numbers in zip(cuda, random[1], strict=True):
                torch.cuda.set_rng_state(numbers, device)
            return None
        scores.append(engine.log_prob(part))
    return world.mean(torch.cat(scores))


class Saver:
    """Writes the state, and the best model before it: often, unless that would cost more than 1 % of the time."""

    def __init__(self, state: State, run: RunFolder) -> None:
        self.state, self.run = state, run
        self.best: tuple[dict[str, Tensor], dict[str, Any]] | None = None  # not written yet, with its row
        self.took, self.spent, self.at = 0.0, 0.0, time.perf_counter()

    def due(self) -> bool:
        """After a validation."""
        return self.spent < CHEAP or time.perf_counter() - self.at > RARELY * self.took

    def late(self) -> bool:
        """At any step: so much would be lost that it is saved in the middle of an epoch."""
        return time.perf_counter() - self.at > max(SAVE_EVERY, RARELY * self.took)

    def save(self) -> None:
        began = time.perf_counter()
        if self.best is not None:
            tensors, row = self.best
            self.run.save_model(self.state.world.collected(tensors), self.state.constants, self.state.recipe, row)
            self.best = None
        self.run.flush_metrics()
        self.state.save(self.run.path / LAST)
        self.at = time.perf_counter()
        self.took = self.at - began
        self.spent += self.took


def recover(state: State, run: RunFolder, at: int, step: TrainingStep, bar: Bar) -> None:
    """After a non-finite loss: back to the last good state, once; the second time, stop and say where."""
    if state.counters.rolled_back:
        raise NicestError(diverged(state, run, step))
    tensors, _, counters = read_last(run, state.world)
    state.restore(tensors, counters | {"rolled_back": True}, random=False)
    run.drop_metrics_after(state.counters.step - state.counters.unscored)
    bar.note(f"non-finite loss at step {at}: back to step {state.counters.step}, with new noise")


def diverged(state: State, run: RunFolder, step: TrainingStep) -> str:
    """What to say when a run cannot go on: the step, the layer, the remedy."""
    settings = state.recipe.train
    found = state.world.all_gather(sick_layer(state.whole(state.flow), step.rows[step.index]))
    where = next((each for each in found if each != ELSEWHERE), ELSEWHERE)
    return (
        f"non-finite loss at step {state.counters.step}, for the second time, first in {where}: lower train.lr"
        f" (now {settings.lr:g}) or set train.clip (now {settings.clip:g}); the last good state is kept in {run.path}"
    )


def finite(flow: Flow) -> bool:
    """Whether all weights are finite."""
    return all(bool(local(p).isfinite().all()) for p in flow.parameters())


@torch.no_grad()
def sick_layer(flow: Flow, x: Tensor) -> str:
    """The first layer whose weights, output or log-det are not finite."""
    x = flow.units.enter(x)
    for name, layer in getattr(flow.chain, "layers", {"chain": flow.chain}).items():
        x, log_det = layer(x)
        suspects = {"weights": layer.parameters(), "output": [x], "log-det": [log_det]}
        for part, tensors in suspects.items():
            if not all(bool(tensor.isfinite().all()) for tensor in tensors):
                return f"the {part} of layer {name!r}"
    return ELSEWHERE


@contextmanager
def interruptible(*, once: bool = True) -> Iterator[threading.Event]:
    """An event that Ctrl-C or a termination signal sets; the second one acts as usual, unless all are to be caught.

    torchrun may pass on a signal that was heard already, and has means of its own to end what does not stop.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    heard = [each for each in before if before[each] != signal.SIG_IGN]  # nohup and background jobs ignore Ctrl-C

    def handle(number: int, frame: Any) -> None:
        event.set()
        if once:
            signal.signal(number, before[signal.Signals(number)])

    for each in heard:
        signal.signal(each, handle)
    try:
        yield event
    finally:
        for each in heard:
            signal.signal(each, before[each])


def _figures(nats: float, dim: int, offset: float) -> str:
    return f"{nats:.1f} nats, {bits_per_dim(nats - offset, dim):.3f} bits/dim"


def _same_model(stored: Recipe, changed: Recipe) -> Recipe:
    def kept(recipe: Recipe) -> tuple[Any, ...]:
        return recipe.data, recipe.model, recipe.train.batch, recipe.train.optimizer, bool(recipe.train.ema)

    if kept(stored) != kept(changed):
        raise NicestError(
            "a resumed run keeps its data, model, batch, optimizer and whether it averages:"
            " only augment.* and the rest of train.* may be --set with --resume"
        )
    return changed
