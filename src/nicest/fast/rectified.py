"""Rectified networks in reduced precision, as one operation with a backward pass by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nicest.fast.derivatives import first_only
from nicest.fast.gpu import kernels_for
from nicest.flows import noise

# Numbers of the stream lie on a grid: adding this and taking it away rounds to multiples of 2^-17 (to coarser ones
# beyond 32). Sums of such numbers are exact in float32 up to 128, so x + m and y - m undo each other to the bit, and
# the next m is asked for the same number on the way back as on the way there. Without the grid a difference of 1e-7
# can turn over a rounding inside m, which moves its output by one step of bfloat16.
SHIFT = 96.0

Layout = tuple[bool, bool, int]  # whether the sets alternate, whether I2 has component 0, the size of the set with it


@dataclass
class Buffers:
    """What a training step or an engine keeps of one network, in the order of its linear layers.

    copies: weights (out, in) and biases in reduced precision, and, for training, where the gradients of them go.
    Hidden layers may be wider here than in the network, padded with zeros: such units stay 0 and learn nothing.
    """

    copies: list[tuple[Tensor, Tensor]]
    weight_gradients: list[Tensor] = field(default_factory=list)
    bias_gradients: Tensor | None = None  # float32, one row for each layer, as wide as the widest


def rectified(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], dtype: torch.dtype, *,
    dropout: float = 0.0, buffers: Buffers | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return x rounded to the grid, and the network's output at it, rounded too; products are in `dtype`.

    Without `buffers` the weights are cast here and gradients come through autograd. With them, the copies are used as
    they are and gradients are written there.
    """
    return _Rectified.apply(x, dtype, dropout, buffers, *weights, *biases)


def shifted(
    x: Tensor, layout: Layout, sign: int, weights: Sequence[Tensor], biases: Sequence[Tensor], dtype: torch.dtype, *,
    dropout: float = 0.0, buffers: Buffers | None = None,
) -> Tensor:  # fmt: skip
    """Apply an additive coupling on a GPU: round I1 to the grid and add ± the network's output to I2."""
    return _Shifted.apply(x, layout, sign, dtype, dropout, buffers, *weights, *biases)


class _Pass:
    """A pass through the network, with what the way back needs.

    `run` gives the output and does not keep it: autograd's node, which keeps the pass, would keep itself.
    """

    def __init__(self, inputs: Tensor, dropout: float, buffers: Buffers | None, parameters: Sequence[Tensor]) -> None:
        half, dtype = len(parameters) // 2, inputs.dtype
        self.buffers = buffers
        self.scale = noise.dropout_scale(dropout) if inputs.device.type == "cpu" else 1 / (1 - dropout)
        self.dtypes = [p.dtype for p in parameters]
        if buffers is None:
            casts = [p.detach().to(dtype) for p in parameters]
            self.copies = list(zip(casts[:half], casts[half:], strict=True))
        else:
            self.copies = buffers.copies
        self.inputs, self.dropout = inputs, dropout

    def run(self) -> Tensor:
        inputs, dropout, dtype = self.inputs, self.dropout, self.inputs.dtype
        *hidden, (last_weight, last_bias) = self.copies
        widths = [len(b) for _, b in hidden]
        self.room: Any = [None] * len(widths)
        if len(set(widths)) == 1:  # side by side, so that all their weight gradients are one product
            self.room = torch.empty(len(widths), len(inputs), widths[0], dtype=dtype, device=inputs.device)
        self.active = [inputs]
        for (w, b), out in zip(hidden, self.room, strict=True):
            self.active.append(torch._addmm_activation(b, self.active[-1], w.t(), out=out))
            if dropout:
                noise.dropout(self.active[-1], dropout, inplace=True)
        return torch.addmm(last_bias, self.active[-1], last_weight.t())

    def back(self, gradient: Tensor, sign: float, wanted: bool) -> tuple[Tensor, list[Tensor | None]]:
        """Return the gradient at the first layer from that of sign · output, and those of weights and biases."""
        copies, active, n = self.copies, self.active, len(self.copies)
        stacked = isinstance(self.room, Tensor)
        room: Any = torch.empty_like(self.room) if stacked else [torch.empty_like(a) for a in active[1:]]
        deltas = [*room, active[0].new_empty(gradient.shape)]  # the gradients before each rectifier
        sums = _sums(gradient, n, max(len(b) for _, b in copies))
        _rectified_gradient(gradient, None, sign, deltas[-1], sums[-1])
        for k in reversed(range(1, n)):
            _rectified_gradient(deltas[k] @ copies[k][0], active[k], self.scale, deltas[k - 1], sums[k - 1])
        if not wanted:
            return deltas[0], [None] * (2 * n)

        buffers = self.buffers or Buffers(copies)
        outs: list[Any] = buffers.weight_gradients or [None] * n
        grads: list[Any] = [None] * n
        if stacked and n > 2:
            together = torch.bmm(room[1:].transpose(1, 2), self.room[:-1], out=_together(outs[1:-1]))
            grads[1:-1] = together.unbind()
        for k in range(n):
            if grads[k] is None:
                grads[k] = torch.mm(deltas[k].t(), active[k], out=outs[k])
        bias_grads = torch.sum(sums, 1, out=buffers.bias_gradients)
        if self.buffers is not None:
            return deltas[0], [None] * (2 * n)
        both = [*grads, *(row[: len(b)] for row, (_, b) in zip(bias_grads, copies, strict=True))]
        return deltas[0], [g.to(dtype) for g, dtype in zip(both, self.dtypes, strict=True)]


class _Rectified(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, dropout: float, buffers: Buffers | None, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        settled = _settle(x)
        ctx.made = _Pass(settled.to(dtype), dropout, buffers, parameters)
        return settled, _settle(ctx.made.run().to(x.dtype))

    @staticmethod
    @first_only
    def backward(ctx: Any, grad_x: Tensor, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        delta, grads = ctx.made.back(grad_output, 1, any(ctx.needs_input_grad[4:]))
        through = grad_x + delta @ ctx.made.copies[0][0] if ctx.needs_input_grad[0] else None
        return (through, None, None, None, *grads)


class _Shifted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layout: Layout, sign: int, dtype: torch.dtype, dropout: float, buffers: Buffers | None,
        *parameters: Tensor,
    ) -> Tensor:  # fmt: skip
        kernels: Any = kernels_for(x)
        ctx.layout, ctx.sign = layout, sign
        ctx.made = _Pass(kernels.read(x, layout, SHIFT, dtype), dropout, buffers, parameters)
        return kernels.couple(x, ctx.made.run(), layout, sign, SHIFT)

    @staticmethod
    @first_only
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        kernels: Any = kernels_for(grad_y)
        changed = kernels.part(grad_y, ctx.layout, 2)
        delta, grads = ctx.made.back(changed, ctx.sign, any(ctx.needs_input_grad[6:]))
        through = None
        if ctx.needs_input_grad[0]:
            through = kernels.add_to_read(grad_y, delta @ ctx.made.copies[0][0], ctx.layout)
        return (through, None, None, None, None, None, *grads)


def _together(outs: Sequence[Tensor | None]) -> Tensor | None:
    """View tensors of one shape that are adjacent in memory as one."""
    first = outs[0]
    return None if first is None else first.as_strided((len(outs), *first.shape), (first.numel(), *first.stride()))


def _settle(x: Tensor) -> Tensor:
    return (x + SHIFT) - SHIFT


def _sums(gradient: Tensor, layers: int, width: int) -> Tensor:
    """Allocate space for partial sums over rows."""
    kernels = kernels_for(gradient)
    rows = kernels.sum_rows(len(gradient)) if kernels else 1
    accurate = torch.promote_types(gradient.dtype, torch.float32)
    return torch.empty(layers, rows, width, dtype=accurate, device=gradient.device)


def _rectified_gradient(gradient: Tensor, active: Tensor | None, scale: float, out: Tensor, sums: Tensor) -> None:
    """Write scale · gradient where active > 0, else 0, to `out`, and partial sums over rows to `sums`."""
    if kernels := kernels_for(gradient):
        kernels.rectified_gradient(gradient, active, scale, out, sums)
        return
    if active is not None:
        torch.ops.aten.threshold_backward.grad_input(gradient, active, 0, grad_input=out)
    elif out is not gradient:
        out.copy_(gradient)
    if scale != 1:
        out *= scale
    sums.zero_()[0, : out.shape[1]] = out.sum(0, dtype=sums.dtype)
