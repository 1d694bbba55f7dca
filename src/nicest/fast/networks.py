"""Networks on a CPU as one operation with a backward pass by hand.

Their layers are so small that autograd's bookkeeping would take as long as the products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nicest.fast.derivatives import first_only
from nicest.flows import noise


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
