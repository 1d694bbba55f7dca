"""GPU kernels, in Triton: each makes one pass over memory where stock kernels would make several.

Imported only where there is a GPU. What each computes is written beside it in torch, where it is called.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS, _BLOCK = tl.constexpr(32), tl.constexpr(128), tl.constexpr(1024)


Layout = tuple[bool, bool, int]  # as `rectified.shifted` has it


def part(x: Tensor, layout: Layout, which: int) -> Tensor:
    """x_I1 or x_I2, as a view."""
    alternating, turned, size = layout
    first = (which == 1) != turned
    if alternating:
        return x[:, (0 if first else 1) :: 2]
    return x[:, :size] if first else x[:, size:]


def read(x: Tensor, layout: Layout, shift: float, dtype: torch.dtype) -> Tensor:
    """(x_I1 + shift) - shift, in dtype."""
    x1 = part(x, layout, 1)
    out = x1.new_empty(x1.shape, dtype=dtype)
    _read[(triton.cdiv(out.numel(), _BLOCK.value),)](x1, *x1.stride(), out, out.shape[1], out.numel(), shift)
    return out


@triton.jit
def _read(x, row_stride, column_stride, out, columns, total, shift):
    i = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    inside = i < total
    value = tl.load(x + (i // columns) * row_stride + (i % columns) * column_stride, mask=inside)
    tl.store(out + i, ((value + shift) - shift).to(out.dtype.element_ty), mask=inside)


def couple(x: Tensor, b: Tensor, layout: Layout, sign: int, shift: float) -> Tensor:
    """y_I1 = x_I1 and y_I2 = x_I2 ± b, with x_I1 and b rounded by adding `shift` and taking it away."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _merge[(triton.cdiv(x.numel(), _BLOCK.value),)](
        x, *x.stride(), b, y, x.shape[1], b.shape[1], x.numel(), shift, sign, *layout, to_read=False
    )
    return y


def add_to_read(x: Tensor, b: Tensor, layout: Layout) -> Tensor:
    """y_I1 = x_I1 + b and y_I2 = x_I2."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _merge[(triton.cdiv(x.numel(), _BLOCK.value),)](
        x, *x.stride(), b, y, x.shape[1], b.shape[1], x.numel(), 0.0, 1, *layout, to_read=True
    )
    return y


@triton.jit
def _merge(
    x,
    row_stride,
    column_stride,
    b,
    y,
    columns,
    b_columns,
    total,
    shift,
    sign,
    alternating: tl.constexpr,
    turned: tl.constexpr,
    size,
    to_read: tl.constexpr,
):
    i = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    inside = i < total
    row, column = i // columns, i % columns
    value = tl.load(x + row * row_stride + column * column_stride, mask=inside)
    if alternating:
        first = column % 2 == 0
        at = column // 2
    else:
        first = column < size
        at = tl.where(first, column, column - size)
    gets = first if to_read != turned else first == 0  # I1 is the first set, unless it is turned
    added = tl.load(b + row * b_columns + at, mask=inside & gets, other=0.0).to(tl.float32)
    if to_read:
        value += added
    else:
        value = tl.where(gets, value + sign * ((added + shift) - shift), (value + shift) - shift)
    tl.store(y + i, value, mask=inside)


def dequantize(x: Tensor, u: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    """(x + u - loc) / scale, but below (x + 1 - loc) / scale whatever the rounding; u in [0, 1), float32."""
    y = torch.empty_like(u)
    _dequantize[(triton.cdiv(u.numel(), _BLOCK.value),)](x, u, loc, scale, y, u.shape[1], u.numel())
    return y


@triton.jit
def _dequantize(x, u, loc, scale, y, columns, total):
    i = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    inside = i < total
    level = tl.load(x + i, mask=inside, other=0).to(tl.float32)
    away = tl.load(loc + i % columns, mask=inside, other=0.0)
    width = tl.load(scale + i % columns, mask=inside, other=1.0)
    value = tl.div_rn((level + tl.load(u + i, mask=inside, other=0.0)) - away, width)
    edge = tl.div_rn((level + 1.0) - away, width)
    bits = edge.to(tl.int32, bitcast=True)
    below = tl.where(edge > 0, bits - 1, tl.where(edge < 0, bits + 1, -2147483647))  # the float before the edge
    tl.store(y + i, tl.minimum(value, below.to(tl.float32, bitcast=True)), mask=inside)


def quantize(y: Tensor, loc: Tensor, scale: Tensor, levels: int) -> Tensor:
    """The level that y lies in, whose edges are (level - loc) / scale and (level + 1 - loc) / scale; float32."""
    x = torch.empty_like(y)
    _quantize[(triton.cdiv(y.numel(), _BLOCK.value),)](y, loc, scale, x, levels, y.shape[1], y.numel())
    return x


@triton.jit
def _quantize(y, loc, scale, x, levels, columns, total):
    i = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    inside = i < total
    value = tl.load(y + i, mask=inside, other=0.0)
    away = tl.load(loc + i % columns, mask=inside, other=0.0)
    width = tl.load(scale + i % columns, mask=inside, other=1.0)
    level = tl.floor(value * width + away)
    above = tl.div_rn((level + 1.0) - away, width) <= value  # rounding may have taken it across an edge
    below = tl.div_rn(level - away, width) > value
    level = level + above.to(tl.float32) - below.to(tl.float32)
    level = tl.minimum(tl.maximum(level, 0.0), levels - 1.0)
    tl.store(x + i, tl.where(value == value, level, value), mask=inside)


def sum_rows(rows: int) -> int:
    """How many rows `rectified_gradient` leaves of so many to be summed."""
    return triton.cdiv(rows, _ROWS.value)


def rectified_gradient(gradient: Tensor, active: Tensor | None, scale: float, out: Tensor, sums: Tensor) -> None:
    """out <- scale · gradient where active > 0 (or everywhere), else 0; sums <- rows that add up to out's sum.

    gradient is (B, n) with any strides; active and out are contiguous; sums is (sum_rows(B), at least n), 0 beyond n.
    """
    rows, columns = out.shape
    grid = (triton.cdiv(rows, _ROWS.value), triton.cdiv(sums.shape[1], _COLUMNS.value))
    _rectified_gradient[grid](
        gradient,
        *gradient.stride(),
        out if active is None else active,
        scale,
        out,
        sums,
        rows,
        columns,
        sums.shape[1],
        masked=active is not None,
    )


@triton.jit
def _rectified_gradient(
    gradient, row_stride, column_stride, active, scale, out, sums, rows, columns, sum_columns, masked: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64) * _ROWS + tl.arange(0, _ROWS)
    c = tl.program_id(1) * _COLUMNS + tl.arange(0, _COLUMNS)
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    i = r[:, None] * columns + c[None, :]
    g = tl.load(gradient + r[:, None] * row_stride + c[None, :] * column_stride, mask=inside, other=0.0).to(tl.float32)
    if masked:
        g = tl.where(tl.load(active + i, mask=inside, other=0.0) > 0, g, 0.0)
    reduced = (g * scale).to(out.dtype.element_ty)
    tl.store(out + i, reduced, mask=inside)
    tl.store(sums + tl.program_id(0) * sum_columns + c, tl.sum(reduced.to(tl.float32), 0), mask=c < sum_columns)


Update = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]  # weights, gradient, two moments, copy, average


def adam(tensors: Update, **rates: Any) -> None:
    """AdamW at step number `step` on scale · gradient; copy <- weights; average <- average + weight · (w - average).

    `rates` are tensors step, lr, scale and weight, and the numbers beta1, beta2, eps and decay.
    """
    logs = {f"log_{name}": math.log(max(rates[name], 1e-300)) for name in ("beta1", "beta2")}
    _update(_adam, tensors, **rates, **logs)


def rmsprop(tensors: Update, **rates: Any) -> None:
    """The released code's RMSProp on scale · gradient, by lr, momentum, decay and floor; the rest is as in `adam`."""
    _update(_rmsprop, tensors, **rates)


def _update(kernel: Any, tensors: Update, **rates: Any) -> None:
    *others, average = tensors
    total, kept = tensors[0].numel(), tensors[0] if average is None else average
    kernel[(triton.cdiv(total, _BLOCK.value),)](*others, kept, total=total, averages=average is not None, **rates)


@triton.jit
def _adam(
    weights,
    gradient,
    first,
    second,
    copy,
    average,
    step,
    lr,
    scale,
    weight,
    total,
    beta1: tl.constexpr,
    beta2: tl.constexpr,
    log_beta1: tl.constexpr,
    log_beta2: tl.constexpr,
    eps,
    decay,
    averages: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    inside = i < total
    steps, rate = tl.load(step).to(tl.float64), tl.load(lr)
    correction1 = (1.0 - tl.exp(steps * log_beta1)).to(tl.float32)
    correction2 = tl.sqrt((1.0 - tl.exp(steps * log_beta2)).to(tl.float32))
    g = tl.load(gradient + i, mask=inside).to(tl.float32) * tl.load(scale)
    m = tl.load(first + i, mask=inside)
    m += (1.0 - beta1) * (g - m)
    v = beta2 * tl.load(second + i, mask=inside) + (1.0 - beta2) * g * g
    p = tl.load(weights + i, mask=inside) * (1.0 - rate * decay)
    p -= rate / correction1 * m / (tl.sqrt(v) / correction2 + eps)
    tl.store(first + i, m, mask=inside)
    tl.store(second + i, v, mask=inside)
    _store(weights, copy, average, weight, i, inside, p, averages)


@triton.jit
def _rmsprop(
    weights,
    gradient,
    square,
    velocity,
    copy,
    average,
    lr,
    momentum,
    scale,
    weight,
    total,
    decay,
    floor,
    averages: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    inside = i < total
    g = tl.load(gradient + i, mask=inside).to(tl.float32) * tl.load(scale)
    v = decay * tl.load(square + i, mask=inside) + (1.0 - decay) * g * g
    w = tl.load(momentum) * tl.load(velocity + i, mask=inside) - tl.load(lr) * g / tl.maximum(tl.sqrt(v), floor)
    p = tl.load(weights + i, mask=inside) + w
    tl.store(square + i, v, mask=inside)
    tl.store(velocity + i, w, mask=inside)
    _store(weights, copy, average, weight, i, inside, p, averages)


@triton.jit
def _store(weights, copy, average, weight, i, inside, p, averages: tl.constexpr):
    tl.store(weights + i, p, mask=inside)
    tl.store(copy + i, p.to(copy.dtype.element_ty), mask=inside)
    if averages:
        mean = tl.load(average + i, mask=inside)
        tl.store(average + i, mean + tl.load(weight) * (p - mean), mask=inside)
