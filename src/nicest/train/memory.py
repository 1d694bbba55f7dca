"""Memory that runs out: which batch would fit, found by trying."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch

from nicest.data import Splits
from nicest.errors import NicestError
from nicest.inference.engine import out_of_memory
from nicest.runs.runtime import describe_device, rows_to
from nicest.runs.sinks import Sink
from nicest.train.state import State
from nicest.train.step import TrainingStep

Loop = Callable[..., dict[str, Any]]  # of a state, its data, a sink, and more


def explaining_memory(loop: Loop) -> Loop:
    """A training whose memory runs out ends in one line, with the batch that would fit."""

    @functools.wraps(loop)
    def explained(state: State, splits: Splits, sink: Sink, *more: Any, **options: Any) -> dict[str, Any]:
        try:
            return loop(state, splits, sink, *more, **options)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        # out of the handler, since the error holds on to the memory of the step that failed
        begun = state.counters.step > 0
        if state.world.size > 1:  # where no process may try a batch by itself
            where = f"{describe_device(state.device)} of process {state.world.rank}"
            raise NicestError(f"out of memory on {where}: set a smaller train.batch, or train.sharding=full")
        if not begun:  # the run may be made again, with another batch
            sink.forget_state()
        raise NicestError(too_large(state, splits, sink, begun))

    return explained


def too_large(state: State, splits: Splits, sink: Sink, begun: bool) -> str:
    """What to say when memory ran out."""
    batch = min(state.recipe.train.batch, splits.n_training)
    fits = fitting_batch(state, splits, batch)
    said = f"out of memory on {describe_device(state.device)} with a batch of {batch}: "
    if not fits:
        size = splits.training.nbytes + splits.validating.nbytes
        return said + (
            f"not even one row fits beside the model and the data ({size / 2**20:,.0f} MiB):"
            " free the device, lower model.width, take fewer rows, or choose --device cpu"
        )
    if not begun:
        return said + f"a batch of {fits} would fit: --set train.batch={fits}"
    return said + (
        f"a batch of {fits} would fit, but a resumed run keeps its own: free the device and --resume, or train again"
        f" with --set train.batch={fits} and another --out; the last state is kept in {sink}"
    )


def fitting_batch(state: State, splits: Splits, batch: int) -> int:
    """The first of batch/2, batch/4, ... with which a step can be taken beside all that training holds; 0 if none.

    The state is no longer of use after it.
    """
    while batch := batch // 2:
        _give_back()
        try:
            rows, _ = rows_to(splits.training, state.device), rows_to(splits.validating, state.device)
            TrainingStep(state, rows, batch)(torch.zeros(batch, dtype=torch.long, device=state.device))
            if state.device.type == "cuda":
                torch.cuda.synchronize(state.device)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        else:
            return batch
    return 0


def _give_back() -> None:
    """Free what nobody needs any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
