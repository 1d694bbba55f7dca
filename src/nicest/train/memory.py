"""The error of a training that ran out of memory: which batch would fit, found by trying."""

from __future__ import annotations

import gc

import torch

from nicest.data import Splits
from nicest.errors import NicestError
from nicest.inference.engine import out_of_memory
from nicest.runs.folder import Sink
from nicest.runs.runtime import describe_device, rows_to
from nicest.train.state import State
from nicest.train.step import TrainingStep


def too_large(state: State, splits: Splits, sink: Sink) -> NicestError:
    """Return the error of a training that ran out of memory: one line, with the batch that would fit."""
    if state.world.size > 1:  # where no process may try a batch by itself
        where = f"{describe_device(state.device)} of process {state.world.rank}"
        return NicestError(f"out of memory on {where}: set a smaller train.batch, or train.sharding=full")
    begun = state.counters.step > 0
    if not begun:  # the run may be made again, with another batch
        sink.forget_state()
    batch = min(state.recipe.train.batch, len(splits.train))
    fits = fitting_batch(state, splits, batch)
    if not fits:
        size = splits.train.nbytes + splits.valid.nbytes
        remedy = (
            f"not even one row fits beside the model and the data ({size / 2**20:,.0f} MiB):"
            " free the device, lower model.width, take fewer rows, or train on the CPU"
        )
    elif not begun:
        remedy = f"a batch of {fits} would fit: set train.batch={fits}"
    else:
        remedy = (
            f"a batch of {fits} would fit, but a resumed run keeps its own: free the device and resume, or"
            f" set train.batch={fits} and train again in another folder; the last state is kept in {sink}"
        )
    return NicestError(f"out of memory on {describe_device(state.device)} with a batch of {batch}: {remedy}")


def fitting_batch(state: State, splits: Splits, batch: int) -> int:
    """Return the first of batch/2, batch/4, ... that a step fits with, next to all that training holds; 0 if none.

    The state cannot be used afterwards.
    """
    while batch := batch // 2:
        gc.collect()
        if state.device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            rows, _ = rows_to(splits.train, state.device), rows_to(splits.valid, state.device)
            TrainingStep(state, rows, batch)(torch.zeros(batch, dtype=torch.long, device=state.device))
            if state.device.type == "cuda":
                torch.cuda.synchronize(state.device)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        else:
            return batch
    return 0
