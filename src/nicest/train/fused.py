"""The update of all weights by one kernel: optimiser, average and bfloat16 copies in one pass over memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nicest.fast import LoweredChain
from nicest.fast.gpu import kernels_for
from nicest.fast.rectified import Buffers
from nicest.flows import Flow
from nicest.train.optim import RMSProp, moment_names
from nicest.train.state import State

Shape = tuple[int, ...]


class Block:
    """Some weights, side by side in memory, with their gradients, moments, copies and averages in the same order."""

    def __init__(
        self, state: State, parameters: Sequence[Tensor], rooms: Sequence[Shape], gradient_dtype: torch.dtype
    ) -> None:
        averages: dict[Tensor, Tensor] = dict(zip(state.flow.parameters(), state.average.parameters(), strict=True))
        self.weights = side_by_side(parameters, rooms)
        self.average = side_by_side([averages[p] for p in parameters], rooms) if state.recipe.train.ema else None
        self.moments = [
            side_by_side([state.optimizer.state[p][name] for p in parameters], rooms)
            for name in moment_names(state.optimizer)
        ]
        self.gradient = torch.zeros_like(self.weights, dtype=gradient_dtype)
        self.copy = self.weights.to(state.precision, copy=True)


class FusedUpdate:
    """In place of `optimizer.step()` on a GPU, for networks in reduced precision.

    The optimiser's state stays where it was, under the same names, so that a run may be resumed on any device.
    """

    def __init__(self, state: State, chain: LoweredChain) -> None:
        self.optimizer: Optimizer = state.optimizer
        self.recipe = state.recipe.train
        networks = chain.networks
        linears = [layer for network in networks for layer in network.linears]
        others = other_weights(state, chain)
        shapes = [shape for network in networks for shape in network.shapes]
        widest = [max(rows for rows, _ in network.shapes) for network in networks for _ in network.linears]

        self.step = start_moments(self.optimizer)
        self.matrices = Block(state, [layer.weight for layer in linears], shapes, state.precision)
        vectors, rooms = [*(layer.bias for layer in linears), *others], [*widest, *(p.numel() for p in others)]
        lengths: list[Shape] = [(room,) for room in rooms]
        self.vectors = Block(state, vectors, lengths, torch.float32)
        self.blocks = self.matrices, self.vectors
        self.scale = torch.ones((), device=state.device)

        copies = list(zip(parts(self.matrices.copy, shapes), parts(self.vectors.copy, lengths), strict=False))
        gradients = parts(self.matrices.gradient, shapes)
        bias_gradients = parts(self.vectors.gradient, lengths)
        at = 0
        for network in networks:
            these = slice(at, at := at + len(network.linears))
            network.buffers = Buffers(
                [(w, b[: len(w)]) for w, b in copies[these]],
                gradients[these],
                bias_gradients[these][0].as_strided((len(network.linears), widest[at - 1]), (widest[at - 1], 1)),
            )
        for p, gradient in zip(others, bias_gradients[at:], strict=True):
            p.grad = gradient.view_as(p)

    @staticmethod
    def fits(state: State, chain: LoweredChain) -> bool:
        """Return True if a flow consists of fast networks, each used once, and vectors."""
        inside = [p for network in chain.networks for p in network.network.parameters()]
        return (
            len(inside) > 0
            and all(p.requires_grad for p in inside)
            and all(p.ndim <= 1 for p in other_weights(state, chain))
            and chain.exclusive
            and type(state.flow).forward is Flow.forward  # one that uses the chain twice would need sums
            and type(state.flow).log_density is Flow.log_density
            and kernels_for(inside[0]) is not None
        )

    def tensors(self) -> list[Tensor]:
        """Return all tensors that a step changes."""
        changed = [self.step]
        for block in self.blocks:
            changed += [block.weights, *block.moments, block.copy, *([] if block.average is None else [block.average])]
        return changed

    def zero_grad(self) -> None:
        self.vectors.gradient.zero_()  # the networks overwrite theirs

    @torch.no_grad()
    def __call__(self, weight: Tensor) -> None:
        """Take one step; `weight` is the weight of the new parameters in their average."""
        from nicest.fast import kernels

        group = self.optimizer.param_groups[0]
        if self.recipe.clip:
            norms = [torch.linalg.vector_norm(block.gradient, dtype=torch.float32) for block in self.blocks]
            norm = torch.linalg.vector_norm(torch.stack(norms))
            torch.clamp(self.recipe.clip / (norm + 1e-6), max=1.0, out=self.scale)
        self.step += 1
        shared: dict[str, Any] = {"lr": group["lr"], "scale": self.scale, "weight": weight}
        for block, decay in ((self.matrices, self.recipe.weight_decay), (self.vectors, 0.0)):
            tensors: Any = (block.weights, block.gradient, *block.moments, block.copy, block.average)
            if isinstance(self.optimizer, RMSProp):
                rates: dict[str, Any] = {name: group[name] for name in ("momentum", "decay", "floor")}
                kernels.rmsprop(tensors, **shared, **rates)
            else:
                beta1, beta2 = group["betas"]
                rates = {"step": self.step, "beta1": beta1, "beta2": beta2, "eps": group["eps"], "decay": decay}
                kernels.adam(tensors, **shared, **rates)


def other_weights(state: State, chain: LoweredChain) -> list[Tensor]:
    """Return the parameters outside the fast networks."""
    inside = {p for network in chain.networks for p in network.network.parameters()}
    return [p for p in state.flow.parameters() if p.requires_grad and p not in inside]


def parts(block: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Return the parts of a block as views of these shapes."""
    sizes = [math.prod(shape) for shape in shapes]
    return [each.view(shape) for each, shape in zip(block.split(sizes), shapes, strict=True)]


def side_by_side(tensors: Sequence[Tensor], rooms: Sequence[Shape]) -> Tensor:
    """Move tensors into one block of memory, each into the corner of a room of its own; the block is returned."""
    block = tensors[0].detach().new_zeros(sum(math.prod(room) for room in rooms))
    for tensor, room in zip(tensors, parts(block, rooms), strict=True):
        corner = room[tuple(slice(n) for n in tensor.shape)] if room.ndim == tensor.ndim else room.view_as(tensor)
        corner.copy_(tensor.detach())
        tensor.data = corner
    return block


def start_moments(optimizer: Optimizer) -> Tensor:
    """Make the state that the optimiser would make in its first step, if there is none yet.

    All weights count their steps by one number, which is returned.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    step: Tensor = optimizer.state[trained[0]].get("step", torch.zeros((), device=trained[0].device))
    for p in trained:
        for name in moment_names(optimizer):
            optimizer.state[p].setdefault(name, torch.zeros_like(p))
        if not isinstance(optimizer, RMSProp):
            optimizer.state[p]["step"] = step
    return step
