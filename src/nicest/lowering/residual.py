"""Residual networks on a CPU as one operation with a backward pass by hand: their layers are so small that what
autograd keeps and does between the products takes as long as the products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nicest.flows import shares
from nicest.lowering.derivatives import first_only


def residual(x: Tensor, dropout: float, parameters: Sequence[Tensor], *, by_columns: bool) -> Tensor:
    """`ResidualMLP` at rows x; weights and biases are in the order of its layers.

    The output may lie in memory column by column, as a spline law reads it; its gradient then comes so too.
    """
    return _Residual.apply(x, dropout, by_columns, *parameters)


class _Residual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout: float, by_columns: bool, *parameters: Tensor) -> Tensor:
        (w, b), *blocks, (w_last, b_last) = zip(parameters[::2], parameters[1::2], strict=True)
        h = torch.addmm(b, x, w.mT)
        active = [x]  # what each layer reads
        for (w1, b1), (w2, b2) in zip(blocks[::2], blocks[1::2], strict=True):
            outer = h.relu()
            inner = torch.addmm(b1, outer, w1.mT).relu_()
            if dropout:
                shares.dropout(inner, dropout, inplace=True)
            h += torch.addmm(b2, inner, w2.mT)
            active += [outer, inner]
        active.append(h.relu_())
        ctx.dropout = dropout
        ctx.save_for_backward(*active, *parameters[::2])
        if by_columns:
            return torch.addmm(b_last[:, None], w_last, h.mT).mT
        return torch.addmm(b_last, h, w_last.mT)

    @staticmethod
    @first_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        layers = len(ctx.saved_tensors) // 2
        active, weights = ctx.saved_tensors[:layers], ctx.saved_tensors[layers:]
        needs = ctx.needs_input_grad[3:]
        found: list[Tensor | None] = []  # the gradients of weights and biases, the last first

        def gather(g: Tensor, layer: int) -> None:
            """The gradients of a layer's own parameters, where they are wanted."""
            found.append(g.sum(0) if needs[2 * layer + 1] else None)
            found.append(g.mT @ active[layer] if needs[2 * layer] else None)

        def back(g: Tensor, layer: int) -> Tensor:
            """The gradient before a layer and the rectifier that it reads, from that after it."""
            gather(g, layer)
            return torch.ops.aten.threshold_backward(g @ weights[layer], active[layer], 0)

        g = back(gradient, layers - 1)
        for k in range(layers - 2, 0, -2):
            inner = back(g, k)
            if ctx.dropout:  # numbers that it dropped are 0, as those that the rectifier stopped
                inner *= shares.scale(ctx.dropout)
            g += back(inner, k - 1)
        gather(g, 0)
        through = g @ weights[0] if ctx.needs_input_grad[0] else None
        return (through, None, None, *reversed(found))
