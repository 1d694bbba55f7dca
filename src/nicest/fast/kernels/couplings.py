"""Kernels of units, and of additive couplings with rectified networks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS, _BLOCK = tl.constexpr(32), tl.constexpr(128), tl.constexpr(1024)
Layout = tuple[bool, bool, int]  # as `rectified.shifted` has it


def part(x: Tensor, layout: Layout, which: int) -> Tensor:
    """Return x_I1 or x_I2 as a view."""
    alternating, turned, size = layout
    first = (which == 1) != turned
    if alternating:
        return x[:, (0 if first else 1) :: 2]
    return x[:, :size] if first else x[:, size:]


def read(x: Tensor, layout: Layout, shift: float, dtype: torch.dtype) -> Tensor:
    """Return (x_I1 + shift) - shift in `dtype`."""
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
    """Return y with y_I1 = x_I1 and y_I2 = x_I2 ± b; x_I1 and b are rounded by adding and subtracting `shift`."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _merge[(triton.cdiv(x.numel(), _BLOCK.value),)](
        x, *x.stride(), b, y, x.shape[1], b.shape[1], x.numel(), shift, sign, *layout, to_read=False
    )
    return y


def add_to_read(x: Tensor, b: Tensor, layout: Layout) -> Tensor:
    """Return y with y_I1 = x_I1 + b and y_I2 = x_I2."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _merge[(triton.cdiv(x.numel(), _BLOCK.value),)](
        x, *x.stride(), b, y, x.shape[1], b.shape[1], x.numel(), 0.0, 1, *layout, to_read=True
    )
    return y


@triton.jit
def _merge(
    x, row_stride, column_stride, b, y, columns, b_columns, total, shift, sign,
    alternating: tl.constexpr, turned: tl.constexpr, size, to_read: tl.constexpr,
):  # fmt: skip
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
    """Return (x + u - loc) / scale, kept below (x + 1 - loc) / scale; u is in [0, 1), float32."""
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
    """Return the level of y, between (level - loc) / scale and (level + 1 - loc) / scale, in float32."""
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
    """Return the number of partial sums that `rectified_gradient` writes for a batch."""
    return triton.cdiv(rows, _ROWS.value)


def rectified_gradient(gradient: Tensor, active: Tensor | None, scale: float, out: Tensor, sums: Tensor) -> None:
    """Write scale · gradient where active > 0 (or everywhere) to `out`, and partial sums over its rows to `sums`.

    gradient is (B, n) with any strides; active and out are contiguous; sums is (sum_rows(B), at least n), 0 beyond n.
    """
    rows, columns = out.shape
    grid = (triton.cdiv(rows, _ROWS.value), triton.cdiv(sums.shape[1], _COLUMNS.value))
    _rectified_gradient[grid](
        gradient, *gradient.stride(), out if active is None else active, scale, out, sums, rows, columns, sums.shape[1],
        masked=active is not None,
    )  # fmt: skip


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
