"""One step of training: the same lines on a CPU and on a GPU, where they are captured once and then replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from nicest.fast import capture, lower, lowered_chains
from nicest.fast.conv import deterministic
from nicest.flows import Flow
from nicest.flows.noise import batch_size, select
from nicest.train.augment import Warp
from nicest.train.distributed import local
from nicest.train.fused import FusedUpdate
from nicest.train.optim import average_weight
from nicest.train.state import State


class TrainingStep:
    """`loss = step(index)` trains on the rows of that index; the loss is a tensor that the next step overwrites.

    On a GPU the whole step is one CUDA graph: gather, warp, dequantise, forward, backward, clip, optimiser, average.
    After a roll-back it runs line by line instead, and raises FloatingPointError before a non-finite loss reaches the
    weights. Each of several processes takes its shard of the rows, and all compute the same loss and weights; there are
    two graphs then, and the gradients are averaged between them.
    """

    def __init__(self, state: State, rows: Tensor, batch: int, *, captured: bool = True) -> None:
        self.state, self.rows, self.batch = state, rows, batch
        self.world, self.share = state.world, state.world.share
        self.index = torch.zeros(batch // self.world.size, dtype=torch.long, device=state.device)
        self.loss = torch.zeros((), device=state.device)
        self.weight = torch.ones((), device=state.device)  # of the new weights in their average
        augment, data = state.recipe.augment, state.recipe.data
        self.warp = Warp(data.shape, data.levels, augment).to(state.device) if augment.share else nn.Identity()
        self.trained, self.averaged = list(state.flow.parameters()), list(state.average.parameters())
        self.watched = state.counters.rolled_back
        on_gpu = state.device.type == "cuda"
        fast = lower(state.flow, state.precision)
        chain = next(iter(lowered_chains(fast)), None) if isinstance(fast, Flow) else None
        self.plain_layers = chain.plain_layers if chain and state.precision != torch.float32 else []
        fused = on_gpu and chain and state.precision != torch.float32 and FusedUpdate.fits(state, chain)
        self.fused = FusedUpdate(state, chain) if fused and chain else None
        self.averages = self.world.joined and on_gpu and not state.sharded  # gradients; else torch does
        self.flow: nn.Module = fast
        if self.world.joined and not on_gpu and not state.sharded:
            self.flow = DistributedDataParallel(fast)
            self.flow.broadcast_buffers = False  # beyond this first time: they are constants
            with torch.random.fork_rng(devices=[]):
                self.differentiate()  # after it torch sorts its buckets anew: so all steps add up in one order
        self.run: Callable[[], None] = self.lines
        if captured and on_gpu and state.flow.captures and not self.watched and not state.sharded:
            self.run = self.captured()

    def __call__(self, index: Tensor) -> Tensor:
        settings = self.state.recipe.train
        self.index.copy_(self.share.rows(index))
        if settings.ema:
            self.weight.fill_(average_weight(settings.ema, self.state.counters.step))
        self.run()
        return self.loss

    def lines(self) -> None:
        self.differentiate()
        self.exchange()
        self.update()

    def differentiate(self) -> None:
        """Compute the loss of the batch and its gradients."""
        state, settings = self.state, self.state.recipe.train
        unit = state.flow.dim if settings.loss == "nats-per-dim" else 1
        with self.share.of(self.batch):
            x, context = state.recipe.data.split(self.warp(self.rows[self.index]))
            if settings.label_weight:
                x, context = x.repeat(2, 1), torch.cat((context, self.other_labels(context)))
        with self.share.of(self.batch, copies=len(x) // len(self.index)), deterministic():
            nats = (self.flow(x) if context is None else self.flow(x, context)) / unit  # draws the noise inside
            right, *wrong = nats.split(len(self.index))
            loss = -right.mean()
            self.loss.copy_(loss.detach())
            for each in wrong:
                loss = loss + settings.label_weight * functional.softplus(unit * (each - right)).mean() / unit
            self.fused.zero_grad() if self.fused else state.optimizer.zero_grad(set_to_none=True)
            loss.backward()

    def other_labels(self, labels: Tensor) -> Tensor:
        """Draw another label for each of these, (B, 1)."""
        count = len(self.state.recipe.data.classes)
        other = select(torch.randint(1, count, (batch_size(len(labels)),), device=labels.device))
        return ((labels + other[:, None]) % count).to(labels.dtype)

    def exchange(self) -> None:
        """Average the loss over all processes, and the gradients that torch does not average."""
        self.world.average_(self.loss, *(self.gradients() if self.averages else ()))
        if self.watched and not bool(self.loss.isfinite()):
            raise FloatingPointError

    def gradients(self) -> list[Tensor]:
        if self.fused:
            return [block.gradient for block in self.fused.blocks]
        return [p.grad for p in self.state.flow.parameters() if p.grad is not None]

    def update(self) -> None:
        """Update the weights and their average."""
        state, settings = self.state, self.state.recipe.train
        if self.fused:
            self.fused(self.weight)
            return
        if settings.clip:
            torch.nn.utils.clip_grad_norm_(self.trained, settings.clip)
        state.optimizer.step()
        if settings.ema:
            update_average([local(p) for p in self.averaged], [local(p) for p in self.trained], self.weight)

    def captured(self) -> Callable[[], None]:
        """Capture the step as graphs."""
        if not self.world.joined:
            (replay,) = captured_parts([self.lines], self.state, self.fused)
            return replay
        differentiate, update = captured_parts([self.differentiate, self.update], self.state, self.fused)

        def run() -> None:
            differentiate()
            self.exchange()
            update()

        return run


@torch.no_grad()
def update_average(averages: Sequence[Tensor], weights: Sequence[Tensor], weight: Tensor) -> None:
    """average <- average + weight · (new - average)."""
    torch._foreach_lerp_(list(averages), list(weights), [weight] * len(averages))


def captured_parts(
    parts: Sequence[Callable[[], None]], state: State, fused: FusedUpdate | None
) -> list[Callable[[], None]]:
    """Capture each part as a CUDA graph; the warm-up leaves the state and the random numbers unchanged."""

    def changed() -> list[Tensor]:
        flows = state.flow, state.average
        buffers = [buffer for each in flows for buffer in each.buffers() if buffer.numel()]
        if fused:
            return [*fused.tensors(), *buffers]
        slots = [tensor for values in state.optimizer.state.values() for tensor in values.values()]
        return [*slots, *buffers, *(p.detach() for each in flows for p in each.parameters())]

    before = {tensor.data_ptr(): tensor.clone() for tensor in changed()}
    random = torch.cuda.get_rng_state(state.device)
    graphs = [capture(part, state.device)[0] for part in parts]
    for tensor in changed():
        # what the optimiser made in its first step was 0 before it
        tensor.copy_(before[tensor.data_ptr()]) if tensor.data_ptr() in before else tensor.zero_()
    torch.cuda.set_rng_state(random, state.device)
    return [graph.replay for graph in graphs]
