"""Rectified and residual networks without the calls of their modules.

On a CPU they are one operation with a backward pass by hand: their layers are so small that autograd's bookkeeping
would take as long as the products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from nicest.fast.derivatives import first_only
from nicest.fast.rectified import Buffers, rectified, shifted
from nicest.flows import MLP, Partition, ResidualMLP, noise
from nicest.flows.networks import with_context
from nicest.flows.noise import Dropout, dropout


class FastNetwork:
    """A network in `dtype`, without the calls of its modules, each of which costs as much as a small product."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        self.network: Any = network
        self.dtype = dtype
        self.linears = [each for each in network.modules() if isinstance(each, nn.Linear)]
        self.dropout = next((each for each in network.modules() if isinstance(each, Dropout)), None)
        self.by_columns = False  # whether the output lies in memory column by column, where it can

    @classmethod
    def of(cls, network: nn.Module, dtype: torch.dtype) -> Self | None:
        """Return the fast form of a network, or None if its modules are not those of an unmodified one."""
        modules = list(network.modules())
        rates = {each.p for each in modules if isinstance(each, Dropout)}
        made = [type(each) for each in modules] == cls.made(network) and cls.sizes_fit(network)
        return cls(network, dtype) if made and len(rates) < 2 and not hooked(network) else None

    @staticmethod
    def made(network: Any) -> list[type]:
        """Return the classes of the modules of an unmodified network of this size; none for other classes."""
        raise NotImplementedError

    @staticmethod
    def sizes_fit(network: Any) -> bool:
        """Return True if the modules of a network, which are of the right classes, are as they were made."""
        return all(each.bias is not None for each in network.modules() if isinstance(each, nn.Linear))

    def read(self, x1: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x_I1 as the network reads it, and the output at it, in the dtype of x_I1."""
        raise NotImplementedError

    @property
    def rate(self) -> float:
        """The current dropout rate (0 in eval mode)."""
        return self.dropout.p if self.dropout is not None and self.dropout.training else 0.0


class FastMLP(FastNetwork):
    """A rectified network; what it keeps of the weights, if anything, is in `buffers`."""

    buffers: Buffers | None = None

    @staticmethod
    def made(network: Any) -> list[type]:
        if type(network) is not MLP:
            return []
        layer = [nn.Linear, nn.ReLU, *([Dropout] if any(isinstance(each, Dropout) for each in network.layers) else [])]
        return [MLP, nn.Sequential, *layer * ((len(network.layers) - 1) // len(layer)), nn.Linear]

    def read(self, x1: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        x = with_context(x1, context, self.network.context_dim)
        if self.dtype == x.dtype:
            return x1, self.call(x)
        x, b = rectified(x, *self.weights(), self.dtype, dropout=self.rate, buffers=self.buffers)
        return x[:, : x1.shape[1]], b

    def call(self, x: Tensor) -> Tensor:
        """Apply the network in its own dtype."""
        (*hidden, last), rate = self.linears, self.rate
        if self.by_columns and by_hand(x):
            return on_cpu(x, rate, self.linears, residual=False, by_columns=True)
        for layer in hidden:
            x = functional.linear(x, layer.weight, layer.bias).relu_()
            if rate:
                x = dropout(x, rate)
        return functional.linear(x, last.weight, last.bias)

    def shift(self, x: Tensor, partition: Partition, sign: int) -> Tensor:
        """Apply an additive coupling with this network in one operation, on a GPU."""
        return shifted(x, partition.layout, sign, *self.weights(), self.dtype, dropout=self.rate, buffers=self.buffers)

    def weights(self) -> tuple[list[Tensor], list[Tensor]]:
        return [layer.weight for layer in self.linears], [layer.bias for layer in self.linears]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Shapes that a GPU likes for the weights: hidden units in multiples of 64, or of 8 if few."""
        shapes = [layer.weight.shape for layer in self.linears]
        widths = [shapes[0][1], *(_padded(rows) for rows, _ in shapes[:-1]), shapes[-1][0]]
        return [(rows, columns) for columns, rows in pairwise(widths)]

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Keep copies of the weights as they are now, in `dtype` and in shapes that a GPU likes."""
        if self.buffers is None:
            like = self.linears[0].weight.new_zeros((), dtype=self.dtype)
            self.buffers = Buffers([(like.new_zeros(n, m), like.new_zeros(n)) for n, m in self.shapes])
        for layer, (w, b) in zip(self.linears, self.buffers.copies, strict=True):
            w[: layer.weight.shape[0], : layer.weight.shape[1]] = layer.weight
            b[: len(layer.bias)] = layer.bias


class FastResidual(FastNetwork):
    """A residual network."""

    @staticmethod
    def made(network: Any) -> list[type]:
        if type(network) is not ResidualMLP:
            return []
        block = [nn.Sequential, nn.ReLU, nn.Linear, nn.ReLU, Dropout, nn.Linear]
        return [ResidualMLP, nn.Linear, nn.ModuleList, *block * len(network.blocks), nn.Linear]

    def read(self, x1: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        x = with_context(x1, context, self.network.context_dim)
        if self.dtype == x.dtype and by_hand(x):
            return x1, on_cpu(x, self.rate, self.linears, residual=True, by_columns=self.by_columns)
        first, *blocks, last = ((layer.weight, layer.bias) for layer in self.linears)
        with reduced(x, self.dtype):
            h = functional.linear(x, *first)
            for outer, inner in zip(blocks[::2], blocks[1::2], strict=True):
                u = functional.linear(h.relu(), *outer).relu_()
                h = h + functional.linear(dropout(u, self.rate) if self.rate else u, *inner)
            return x1, functional.linear(h.relu_(), *last).to(x1.dtype)


def reduced(x: Tensor, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return a context manager that computes products in `dtype` if autocast supports it."""
    halved = dtype in (torch.bfloat16, torch.float16) and dtype != x.dtype
    return torch.autocast(x.device.type, dtype) if halved else nullcontext()


def hooked(module: nn.Module, *, deep: bool = True) -> bool:
    """Return True if a module, or one inside it, has hooks."""
    return any(
        each._forward_hooks or each._forward_pre_hooks or each._backward_hooks or each._backward_pre_hooks
        for each in (module.modules() if deep else [module])
    )


def _padded(width: int) -> int:
    unit = 64 if width >= 512 else 8
    return -(-width // unit) * unit


def on_cpu(x: Tensor, dropout: float, layers: Sequence[nn.Linear], *, residual: bool, by_columns: bool) -> Tensor:
    """Apply an `MLP`, or a `ResidualMLP`, with these linear layers to rows x.

    With `by_columns` the output, and its gradient, are stored column by column, as a spline law reads them.
    """
    parameters = [each for layer in layers for each in (layer.weight, layer.bias)]
    kept = torch.is_grad_enabled() and any(each.requires_grad for each in (x, *parameters))
    return _Network.apply(x, dropout, residual, by_columns, kept, *parameters)


def by_hand(x: Tensor) -> bool:
    """Return True if `on_cpu` applies to these rows: they are on a CPU and autocast is off."""
    return x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


class _Network(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dropout: float, residual: bool, by_columns: bool, kept: bool, *parameters: Tensor
    ) -> Tensor:
        *hidden, (w, b) = zip(parameters[::2], parameters[1::2], strict=True)
        active: list[Tensor] = []  # what each layer reads, if it is kept
        for h in _residual(x, hidden, dropout) if residual else _rectified(x, hidden, dropout):
            active = [*active, h] if kept else [h]
        ctx.dropout, ctx.residual = dropout, residual
        if kept:
            ctx.save_for_backward(*active, *parameters[::2])
        if by_columns:
            return torch.addmm(b[:, None], w, active[-1].mT).mT
        return torch.addmm(b, active[-1], w.mT)

    @staticmethod
    @first_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        layers = len(ctx.saved_tensors) // 2
        active, weights = ctx.saved_tensors[:layers], ctx.saved_tensors[layers:]
        needs = ctx.needs_input_grad[5:]
        found: list[Tensor | None] = []  # the gradients of weights and biases, the last first

        def gather(g: Tensor, layer: int) -> None:
            """Append the gradients of a layer's parameters, if they are needed."""
            found.append(g.sum(0) if needs[2 * layer + 1] else None)
            found.append(_product(g.mT, active[layer]) if needs[2 * layer] else None)

        def back(g: Tensor, layer: int, *, dropped: bool) -> Tensor:
            """Return the gradient at the input of a layer and its rectifier."""
            gather(g, layer)
            g = g @ weights[layer]
            torch.ops.aten.threshold_backward.grad_input(g, active[layer], 0, grad_input=g)
            # numbers that dropout dropped are 0, as those that the rectifier stopped
            return g.mul_(noise.dropout_scale(ctx.dropout)) if dropped and ctx.dropout else g

        g = gradient
        if ctx.residual:
            g = back(g, layers - 1, dropped=False)
            for k in range(layers - 2, 0, -2):
                g += back(back(g, k, dropped=True), k - 1, dropped=False)
        else:
            for k in range(layers - 1, 0, -1):
                g = back(g, k, dropped=True)
        gather(g, 0)
        through = _product(g, weights[0]) if ctx.needs_input_grad[0] else None
        return (through, None, None, None, None, *reversed(found))


def _rectified(x: Tensor, hidden: Sequence[tuple[Tensor, Tensor]], dropout: float) -> Iterator[Tensor]:
    """Yield the input of each layer of an `MLP`."""
    yield x
    for w, b in hidden:
        x = noise.dropout(torch.addmm(b, x, w.mT).relu_(), dropout, inplace=True)
        yield x


def _residual(x: Tensor, hidden: Sequence[tuple[Tensor, Tensor]], dropout: float) -> Iterator[Tensor]:
    """Yield the input of each layer of a `ResidualMLP`."""
    (w, b), *blocks = hidden
    yield x
    h = torch.addmm(b, x, w.mT)
    for (w1, b1), (w2, b2) in zip(blocks[::2], blocks[1::2], strict=True):
        outer = h.relu()
        yield outer
        inner = noise.dropout(torch.addmm(b1, outer, w1.mT).relu_(), dropout, inplace=True)
        yield inner
        h += torch.addmm(b2, inner, w2.mT)
    yield h.relu_()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b; for a narrow b, the transposed product takes a third of the time."""
    if 4 * b.shape[1] > a.shape[0]:
        return a @ b
    return (b.mT @ a.mT).mT.clone(memory_format=torch.contiguous_format)  # as torch expects of gradients
