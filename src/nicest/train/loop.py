"""Training: maximise the log-likelihood (NICE §5.1), in one loop."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

import nicest
from nicest.data import Splits
from nicest.errors import NicestError
from nicest.flows import Density, bits_per_dim, members
from nicest.inference.engine import Engine, out_of_memory
from nicest.recipes.recipe import DataSettings, TrainSettings
from nicest.runs.folder import Sink
from nicest.runs.runtime import rows_to
from nicest.runs.sinks import Saved
from nicest.train.callbacks import Begun, Callback
from nicest.train.distributed import World, local
from nicest.train.memory import too_large
from nicest.train.optim import set_rates
from nicest.train.state import Counters, State
from nicest.train.step import TrainingStep

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
CHECK_EVERY = 100  # steps between two looks at the losses: each look waits for the device
SAVE_EVERY = 300.0  # seconds after which a state is saved also in the middle of an epoch
ELSEWHERE = "the prior or the gradient"
SHARED = 12e6  # multiplications in the largest product of a step, from which it uses all threads
SCORED_AT_ONCE = 500  # rows of a validation between two looks at the signals
RARELY = 100  # times what the last save took, that pass before the next; the first and the last come beside it
CHEAP = 0.25  # seconds: until so much was spent in all, a state is saved at every validation


def run_loop(state: State, splits: Splits, sink: Sink, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Train from a state to the end or until a signal comes, save everything, and return where training ended."""
    try:
        return Training(state, splits, sink, callbacks).run()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    raise too_large(state, splits, sink)  # outside the handler: the error holds on to the memory of what failed


class Training:
    """The loop, part by part. All that an exact resume needs is in `state`."""

    def __init__(self, state: State, splits: Splits, sink: Sink, callbacks: Sequence[Callback]) -> None:
        self.state, self.sink, self.settings, self.world = state, sink, state.recipe.train, state.world
        self.callbacks = callbacks if state.world.rank == 0 else ()
        self.rows, self.valid = rows_to(splits.train, state.device), rows_to(splits.valid, state.device)
        self.batch = min(self.settings.batch, len(self.rows))
        self.per_epoch = len(self.rows) // self.batch  # the remainder is left out; every epoch has a new order
        self.total = self.settings.epochs * self.per_epoch
        self.dim, self.offset = state.flow.dim, state.flow.interval_nats
        if len(state.losses) not in (0, self.per_epoch):
            raise NicestError(
                f"an epoch of {sink} had {len(state.losses)} steps, now {self.per_epoch}: a resumed run keeps its data"
            )
        self.order, self.order_of = torch.empty(0), -1
        self.origin = time.perf_counter() - state.counters.seconds
        self.listens = not self.world.joined or state.device.type == "cpu"  # at every step: a GPU waits for the others
        self.stopped = False

    def run(self) -> dict[str, Any]:
        state, settings = self.state, self.settings
        begun = Begun(state.recipe.name, self.total, state.counters.step, settings.epochs)
        with ExitStack() as stack:  # every callback is told of the end, whatever the others do
            for each in self.callbacks:
                each.started(begun)
                stack.callback(each.ended)
            self.interrupted = threading.Event()
            if self.sink.handles_signals:
                self.interrupted = stack.enter_context(interruptible(once=not self.world.joined))
            stack.enter_context(enough_threads(state.flow, self.batch))
            self.prepare()
            self.saver = Saver(state, self.sink)
            if not state.counters.step and (plain := self.step.plain_layers):
                self.note(f"no fast form for {', '.join(plain)}: these layers run as they are written")
            while not self.done and not self.stopped:
                self.turn()
            if self.stopped:
                self.clock()
                self.saver.save()
        return asdict(state.counters) | {"run": str(self.sink), "epochs": settings.epochs, "finished": self.done}

    @property
    def done(self) -> bool:
        return over(self.state.counters, self.settings, self.per_epoch)

    def prepare(self) -> None:
        """Make the step and the engine, which hold pointers to the weights: at the start and after a roll-back."""
        self.state.flow.train()
        self.step = TrainingStep(self.state, self.rows, self.batch)
        # validation is in float32, whatever the networks train in, as `evaluate` will be
        self.engine = Engine(self.state.average, share=self.world.share, captured=not self.state.sharded)

    def note(self, text: str) -> None:
        """Show one line to the user."""
        for each in self.callbacks:
            each.note(text)

    def turn(self) -> None:
        """Take one step, then check the losses, validate and save if that is due."""
        counters = self.state.counters
        unscored, counters.unscored = counters.unscored, False  # the step is done, its validation is not
        epoch, position = divmod(counters.step - unscored, self.per_epoch)
        if position == 0 and not unscored:
            self.state.losses = torch.zeros(self.per_epoch, device=self.state.device)
        lr = set_rates(self.state.optimizer, self.settings, counters.step - unscored, epoch, self.total)
        if not unscored:
            self.take_step(epoch, position)
        last_of_epoch = position + 1 == self.per_epoch
        looks = last_of_epoch or counters.step % CHECK_EVERY == 0
        # asked once a step, so that what is saved then was looked at first
        self.stopped = (self.listens or looks) and self.world.any(self.interrupted.is_set())
        every, epochs = self.settings.evaluate_every, self.settings.epochs
        validates = last_of_epoch and ((epoch + 1) % every == 0 or epoch + 1 == epochs)
        if looks or self.stopped:
            late = self.world.broadcast(self.saver.late())
            good = int(self.state.losses[: position + 1].isfinite().cumprod(0).sum())  # before the first that is not
            if good <= position or ((self.stopped or late) and self.world.any(not finite(self.state.flow))):
                self.roll_back(epoch * self.per_epoch + good)
                return
            nats = self.report(epoch, position)
            if late and not self.stopped and not validates:  # else after the validation, which must not be lost
                self.clock()
                self.saver.save()
            if validates:
                self.validate(epoch, nats, lr)

    def take_step(self, epoch: int, position: int) -> None:
        state = self.state
        if self.order_of != epoch:  # from the seed and the epoch alone, so that a resumed epoch has the same order
            generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch)
            self.order, self.order_of = torch.randperm(len(self.rows), generator=generator).to(state.device), epoch
        try:
            state.losses[position] = self.step(self.order[position * self.batch : (position + 1) * self.batch])
        except FloatingPointError as error:
            raise NicestError(self.diverged()) from error
        state.counters.step += 1

    def report(self, epoch: int, position: int) -> float:
        """Report the mean nats of the epoch so far to the callbacks, and return it."""
        unit = self.dim if self.settings.loss == "nats-per-dim" else 1
        nats = self.offset - unit * float(self.state.losses[: position + 1].mean())
        row = {"epoch": epoch + 1, "step": self.state.counters.step, "train_nats": nats}
        for each in self.callbacks:
            each.stepped(row | {"train_bits_per_dim": bits_per_dim(nats - self.offset, self.dim)})
        return nats

    def validate(self, epoch: int, nats: float, lr: float) -> None:
        """Score the validation rows, keep the model if it is the best, and save the state if that is due."""
        state, counters = self.state, self.state.counters
        state.prepare_average()
        scored = (
            None if self.stopped else score(self.engine, self.valid, state.recipe.data, self.interrupted, self.world)
        )
        state.flow.train()
        if scored is None and not self.world.any(not finite(state.flow)):
            counters.unscored = self.stopped = True  # a signal waits for no validation: the resumed run makes it
            return
        valid_nats = math.nan if scored is None else scored + self.offset
        if not math.isfinite(valid_nats):
            self.roll_back(counters.step)
            return
        self.clock()
        row = {
            "epoch": epoch + 1,
            "step": counters.step,
            "train_nats": nats,
            "valid_nats": valid_nats,
            "valid_bits_per_dim": bits_per_dim(valid_nats - self.offset, self.dim),
            "lr": lr,
            "seconds": counters.seconds,
        }
        if valid_nats > counters.best_nats:
            counters.best_nats, counters.best_epoch = valid_nats, epoch + 1
            self.saver.best = state.average_tensors(), row
        self.sink.append_metrics(row)  # before the state: a resumed run drops a row too many, but a lost one stays lost
        if self.world.broadcast(self.saver.due()) or over(counters, self.settings, self.per_epoch):
            self.saver.save()
        for each in self.callbacks:
            each.validated(row)

    def clock(self) -> None:
        self.state.counters.seconds = time.perf_counter() - self.origin

    def roll_back(self, at: int) -> None:
        """Return to the last good state after a non-finite loss; raise a NicestError the second time."""
        state = self.state
        if state.counters.rolled_back:
            raise NicestError(self.diverged())
        saved = read_state(self.sink, self.world)
        if saved is None:
            raise NicestError(f"the last good state is gone from {self.sink}: train again")
        state.restore(saved._replace(figures=saved.figures | {"rolled_back": True}), random=False)
        self.sink.drop_metrics_after(state.counters.step - state.counters.unscored)
        self.note(f"non-finite loss at step {at}: back to step {state.counters.step}, with new noise")
        self.saver.best = None
        self.prepare()

    def diverged(self) -> str:
        """Return the message for a run that cannot continue: the step, the layer, the remedy."""
        state = self.state
        x, context = state.recipe.data.split(self.rows[self.step.index])
        found = self.world.all_gather(first_nonfinite_layer(state.whole(state.flow), x, context))
        where = next((each for each in found if each != ELSEWHERE), ELSEWHERE)
        return (
            f"non-finite loss at step {state.counters.step}, for the second time, first in {where}: lower train.lr"
            f" (now {self.settings.lr:g}) or set train.clip (now {self.settings.clip:g}); the last good state is kept"
            f" in {self.sink}"
        )


class Saver:
    """Writer of the best model and then the state: often, unless that would cost more than 1 % of the time."""

    def __init__(self, state: State, sink: Sink) -> None:
        self.state, self.sink = state, sink
        self.best: tuple[dict[str, Tensor], dict[str, Any]] | None = None  # not written yet, with its row
        self.took, self.spent, self.at = 0.0, 0.0, time.perf_counter()

    def due(self) -> bool:
        """Return True if a save is due after a validation."""
        return self.spent < CHEAP or time.perf_counter() - self.at > RARELY * self.took

    def late(self) -> bool:
        """Return True if a save is due in the middle of an epoch."""
        return time.perf_counter() - self.at > max(SAVE_EVERY, RARELY * self.took)

    def save(self) -> None:
        began = time.perf_counter()
        if self.best is not None:
            tensors, row = self.best
            model = self.state.world.collected(tensors)
            if self.state.world.rank == 0:
                self.sink.save_model(Saved(self.state.exact(model), self.state.recipe, row))
            self.best = None
        self.state.save(self.sink)
        self.at = time.perf_counter()
        self.took = self.at - began
        self.spent += self.took


def read_state(sink: Sink, world: World) -> Saved | None:
    """Read the last state of a training in the first process and send it to all."""
    saved = sink.read_state() if world.rank == 0 else None
    rest = world.broadcast(saved and saved[1:])
    return rest and Saved(world.sent(saved.tensors if saved else {}), *rest)


def over(counters: Counters, settings: TrainSettings, per_epoch: int) -> bool:
    """Return True after the last epoch, or at a validation after which patience is exhausted."""
    if counters.unscored:
        return False
    epoch, position = divmod(counters.step, per_epoch)
    out_of_patience = 0 < settings.patience <= epoch - counters.best_epoch and epoch % settings.evaluate_every == 0
    return epoch >= settings.epochs or (position == 0 and out_of_patience)


def score(engine: Engine, rows: Tensor, data: DataSettings, interrupted: threading.Event, world: World) -> float | None:
    """Return the mean log-likelihood of rows; None, with torch's random state as before, if a signal interrupts it."""
    cuda = [engine.device] if engine.device.type == "cuda" else []
    random = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in cuda]
    scores = []
    for part in rows.split(SCORED_AT_ONCE):
        if world.any(interrupted.is_set()):
            torch.set_rng_state(random[0])
            for device, numbers in zip(cuda, random[1], strict=True):
                torch.cuda.set_rng_state(numbers, device)
            return None
        scores.append(engine.validation_log_prob(*data.split(part)))
    return world.mean(torch.cat(scores))


def finite(flow: Density) -> bool:
    """Return True if all weights are finite."""
    return all(bool(local(p).isfinite().all()) for p in flow.parameters())


@torch.no_grad()
def first_nonfinite_layer(flow: Any, x: Tensor, context: Tensor | None) -> str:
    """Describe the first layer whose weights, output or log-determinant are not finite."""
    for name, parameter in flow.named_parameters() if not hasattr(flow, "units") else ():
        if not bool(parameter.isfinite().all()):
            return f"the weights {name!r}"
    for each in members(flow) if hasattr(flow, "units") else ():
        y, given = flow.units.enter(x), each.embed(context) if hasattr(each, "embed") else None
        layers = getattr(each.bijection, "layers", None)
        if y.shape[1] != each.prior.dim:
            break
        for name, layer in layers.items() if isinstance(layers, torch.nn.ModuleDict) else [("chain", each.bijection)]:
            y, log_det = layer(y, given)
            suspects = {"weights": layer.parameters(), "output": [y], "log-det": [log_det]}
            for part, tensors in suspects.items():
                if not all(bool(tensor.isfinite().all()) for tensor in tensors):
                    return f"the {part} of layer {name!r}"
    return ELSEWHERE


class _Threads(threading.local):
    """The number of fits on one thread of torch, here and in all threads of Python, and torch's usual number."""

    lock, fits, usual = threading.Lock(), 0, 0
    depth = 0


_threads = _Threads()


def busy() -> bool:
    """Return True if programs keep more than half of the cores busy, as far as the system tells."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1)


@contextmanager
def enough_threads(flow: Density, batch: int) -> Iterator[None]:
    """Use one thread on a CPU if more would mostly wait: for small products, or if threads spin on busy cores."""
    shapes = [local(p).shape for p in flow.parameters()]
    largest = max((batch * shape.numel() for shape in shapes if len(shape) > 1), default=0)
    large = largest >= SHARED or max(map(len, shapes), default=0) > 3  # convolutions
    if flow.device.type != "cpu" or (large and not (nicest._spins and busy())):
        yield
        return
    with _Threads.lock:
        if not _Threads.fits:
            _Threads.usual = torch.get_num_threads()
        _Threads.fits, _threads.depth = _Threads.fits + 1, _threads.depth + 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _Threads.lock:
            _Threads.fits, _threads.depth = _Threads.fits - 1, _threads.depth - 1
            if not _threads.depth:  # threads of Python's that still fit keep their own number
                torch.set_num_threads(_Threads.usual)


@contextmanager
def interruptible(*, once: bool = True) -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C or a termination signal sets; restore the previous handlers at the end.

    With `once`, a second signal acts as usual. SIGHUP comes when a terminal is closed, SIGUSR1 from Slurm before a
    job's time is up. torchrun may forward a signal twice, and ends processes that do not stop.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = {each: signal.getsignal(each) for each in SIGNALS}
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
