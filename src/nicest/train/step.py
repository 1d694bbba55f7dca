"""One step of training: the same few lines on a CPU and on a GPU, where they are captured once and then replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from nicest.train.augment import Warp
from nicest.train.engine import capture
from nicest.train.fused import FusedUpdate
from nicest.train.optim import average_weight
from nicest.train.state import State


class TrainingStep:
    """`loss = step(index)` trains on the rows of that index; the loss is a tensor that the next step overwrites.

    On a GPU the whole step is one CUDA graph: gather, warp, dequantise, forward, backward, clip, optimiser, average.
    After a roll-back it runs line by line instead, and raises FloatingPointError before a non-finite loss spoils the
    weights.
    """

    def __init__(self, state: State, rows: Tensor, batch: int, *, captured: bool = True) -> None:
        self.state, self.rows = state, rows
        self.index = torch.zeros(batch, dtype=torch.long, device=state.device)
        self.loss = torch.zeros((), device=state.device)
        self.weight = torch.ones((), device=state.device)  # of the new weights in their average
        augment, data = state.recipe.augment, state.recipe.data
        self.warp = Warp(data.shape, data.levels, augment).to(state.device) if augment.share else nn.Identity()
        self.trained, self.averaged = list(state.flow.parameters()), list(state.average.parameters())
        self.watched = state.counters.rolled_back
        on_gpu = state.device.type == "cuda"
        fused = on_gpu and state.precision != torch.float32 and FusedUpdate.fits(state)
        self.fused = FusedUpdate(state) if fused else None
        graph = captured and on_gpu and not self.watched
        self.run = captured_step(self.lines, state, self.fused) if graph else self.lines

    def __call__(self, index: Tensor) -> Tensor:
        settings = self.state.recipe.train
        self.index.copy_(index)
        if settings.ema:
            self.weight.fill_(average_weight(settings.ema, self.state.counters.step))
        self.run()
        return self.loss

    def lines(self) -> None:
        state, settings = self.state, self.state.recipe.train
        unit = state.recipe.data.dim if settings.loss == "nats-per-dim" else 1
        rows = self.warp(self.rows[self.index])
        loss = -state.flow(rows).mean() / unit  # forward is log_prob; noise is drawn afresh inside
        if self.watched and not bool(loss.isfinite()):
            raise FloatingPointError
        if self.fused:
            self.fused.zero_grad()
            loss.backward()
            self.fused(self.weight)
        else:
            state.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if settings.clip:
                torch.nn.utils.clip_grad_norm_(self.trained, settings.clip)
            state.optimizer.step()
            if settings.ema:
                update_average(self.averaged, self.trained, self.weight)
        self.loss.copy_(loss.detach())


@torch.no_grad()
def update_average(averages: Sequence[Tensor], weights: Sequence[Tensor], weight: Tensor) -> None:
    """average <- average + weight · (new - average)."""
    torch._foreach_lerp_(list(averages), list(weights), [weight] * len(averages))


def captured_step(lines: Callable[[], None], state: State, fused: FusedUpdate | None) -> Callable[[], None]:
    """The lines as one CUDA graph; the runs that warm them up leave no trace in the state or the random numbers."""

    def changed() -> list[Tensor]:
        if fused:
            return fused.tensors()
        slots = [tensor for values in state.optimizer.state.values() for tensor in values.values()]
        return [
            *slots,
            *(p.detach() for p in state.flow.parameters()),
            *(p.detach() for p in state.average.parameters()),
        ]

    before = {tensor.data_ptr(): tensor.clone() for tensor in changed()}
    random = torch.cuda.get_rng_state(state.device)
    graph, _ = capture(lines, state.device)
    for tensor in changed():
        # what the optimiser made in its first step was 0 before it
        tensor.copy_(before[tensor.data_ptr()]) if tensor.data_ptr() in before else tensor.zero_()
    torch.cuda.set_rng_state(random, state.device)
    return graph.replay
