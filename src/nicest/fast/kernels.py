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
    """Apply AdamW to scale · gradient at step number `step`; copy the weights, and update their average.

    `rates` are tensors step, lr, scale and weight, and the numbers beta1, beta2, eps and decay.
    """
    logs = {f"log_{name}": math.log(max(rates[name], 1e-300)) for name in ("beta1", "beta2")}
    _update(_adam, tensors, **rates, **logs)


def rmsprop(tensors: Update, **rates: Any) -> None:
    """Apply the released code's RMSProp to scale · gradient with lr, momentum, decay and floor; otherwise as `adam`."""
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


def spline(a: Tensor, b: Tensor, bins: int, bound: float, least: float, steepest: float) -> tuple[Tensor, Tensor]:
    """Compute `spline._forward` for numbers within the bound; return a and 0 outside."""
    y, log_slope = (a.new_empty(a.shape) for _ in range(2))
    _spline[(triton.cdiv(a.numel(), _SPLINES.value),)](
        a, *a.stride(), b.contiguous(), y, log_slope, a.shape[1], a.numel(), bound, least, steepest,
        bins=bins, padded=triton.next_power_of_2(bins),
    )  # fmt: skip
    return y, log_slope


def spline_backward(
    a: Tensor, b: Tensor, gy: Tensor, gl: Tensor, bins: int, bound: float, least: float, steepest: float
) -> tuple[Tensor, Tensor]:
    """Compute `spline._backward`."""
    ga, gb = a.new_empty(a.shape), b.new_empty(b.shape)
    _spline_backward[(triton.cdiv(a.numel(), _SPLINES.value),)](
        a, *a.stride(), b.contiguous(), gy, *gy.stride(), gl, *gl.stride(), ga, gb, a.shape[1], a.numel(), bound, least,
        steepest, bins=bins, padded=triton.next_power_of_2(bins),
    )  # fmt: skip
    return ga, gb


_SPLINES = tl.constexpr(128)  # numbers that a program sees to


@triton.jit
def _shares(b, at, inside, bins: tl.constexpr, padded: tl.constexpr):
    """Return the softmax of `bins` logits from offset `at` on, for every number."""
    j = tl.arange(0, padded)[None, :]
    there = inside[:, None] & (j < bins)
    logits = tl.load(b + at[:, None] + j, mask=there, other=-float("inf")).to(tl.float32)
    logits = tl.where(inside[:, None], logits, 0.0)
    risen = tl.exp(logits - tl.max(logits, 1)[:, None])
    return risen / tl.sum(risen, 1)[:, None]


@triton.jit
def _slope(b, at, inside, knot, steepest, bins: tl.constexpr):
    """Return the slope at an inner knot and its derivative; 1 and 0 at the first and the last knot."""
    there = inside & (knot >= 0) & (knot < bins - 1)
    tanh = _tanh(tl.load(b + at + 2 * bins + knot, mask=there, other=0.0).to(tl.float32) / steepest)
    d = tl.exp(steepest * tanh)
    return d, tl.where(there, d * (1.0 - tanh * tanh), 0.0)


@triton.jit
def _tanh(v):
    return 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(v, 20.0)) + 1.0)


@triton.jit
def _bin(a, b, at, inside, bound, least, steepest, bins: tl.constexpr, padded: tl.constexpr):
    j = tl.arange(0, padded)[None, :]
    wide, high = _shares(b, at, inside, bins, padded), _shares(b, at + bins, inside, bins, padded)
    inner = tl.minimum(tl.maximum(a, -bound), bound) + bound
    factor, floor = 2.0 * bound * (1.0 - least * bins), 2.0 * bound * least
    widths, heights = tl.where(j < bins, wide * factor + floor, 0.0), tl.where(j < bins, high * factor + floor, 0.0)
    k = tl.sum(((tl.cumsum(widths, 1) <= inner[:, None]) & (j < bins - 1)).to(tl.int32), 1)
    here, before = j == k[:, None], j < k[:, None]
    w, h = tl.sum(tl.where(here, widths, 0.0), 1), tl.sum(tl.where(here, heights, 0.0), 1)
    x, y = tl.sum(tl.where(before, widths, 0.0), 1), tl.sum(tl.where(before, heights, 0.0), 1)
    t = tl.minimum(tl.maximum((inner - x) / w, 0.0), 1.0)
    d0, u0 = _slope(b, at, inside, k - 1, steepest, bins)
    d1, u1 = _slope(b, at, inside, k, steepest, bins)
    return wide, high, k, t, y - bound, w, h, d0, u0, d1, u1


@triton.jit
def _spline(
    a, a_rows, a_columns, b, out, log_slope, columns, total, bound, least, steepest,
    bins: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * _SPLINES + tl.arange(0, _SPLINES)
    inside = i < total
    v = tl.load(a + (i // columns) * a_rows + (i % columns) * a_columns, mask=inside, other=0.0)
    y, log_y = _spline_at(v, b, i * (3 * bins - 1), inside, bound, least, steepest, bins, padded)
    tl.store(out + i, y, mask=inside)
    tl.store(log_slope + i, log_y, mask=inside)


@triton.jit
def _spline_at(v, b, at, inside, bound, least, steepest, bins: tl.constexpr, padded: tl.constexpr):
    """Return values and log-slopes at v of the splines whose parameters start at offsets `at`."""
    _, _, _, t, y, w, h, d0, _, d1, _ = _bin(v, b, at, inside, bound, least, steepest, bins, padded)
    s, past = h / w, 1.0 - t
    middle = t * past
    below = s + (d0 + d1 - 2.0 * s) * middle
    slopes = d1 * t * t + 2.0 * s * middle + d0 * past * past
    within = tl.abs(v) < bound
    value = tl.where(within, y + h * (s * t * t + d0 * middle) / below, v)
    return value, tl.where(within, tl.log(slopes * (s / below) * (s / below)), 0.0)


@triton.jit
def _spline_backward(
    a, a_rows, a_columns, b, gy, gy_rows, gy_columns, gl, gl_rows, gl_columns, ga, gb, columns, total, bound, least,
    steepest, bins: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * _SPLINES + tl.arange(0, _SPLINES)
    inside = i < total
    row, column = i // columns, i % columns
    v = tl.load(a + row * a_rows + column * a_columns, mask=inside, other=0.0)
    y_gradient = tl.load(gy + row * gy_rows + column * gy_columns, mask=inside, other=0.0)
    l_gradient = tl.load(gl + row * gl_rows + column * gl_columns, mask=inside, other=0.0)
    at = i * (3 * bins - 1)
    gv = _spline_back_at(v, b, gb, at, inside, y_gradient, l_gradient, bound, least, steepest, bins, padded)
    tl.store(ga + i, gv, mask=inside)


@triton.jit
def _spline_back_at(
    v, b, gb, at, inside, y_gradient, l_gradient, bound, least, steepest, bins: tl.constexpr, padded: tl.constexpr
):
    """Return the gradient of v; write those of the parameters to the same offsets of gb."""
    wide, high, k, t, _, w, h, d0, u0, d1, u1 = _bin(v, b, at, inside, bound, least, steepest, bins, padded)
    within = tl.abs(v) < bound
    y_inner, l_inner = tl.where(within, y_gradient, 0.0), tl.where(within, l_gradient, 0.0)
    s, past = h / w, 1.0 - t
    middle, turn = t * past, 1.0 - 2.0 * t
    above, below = s * t * t + d0 * middle, s + (d0 + d1 - 2.0 * s) * middle
    slopes = d1 * t * t + 2.0 * s * middle + d0 * past * past
    ry, rl, rb = y_inner * h / (below * below), l_inner / slopes, 2.0 * l_inner / below
    bend = (d0 + d1 - 2.0 * s) * turn
    gt = ry * ((2.0 * s * t + d0 * turn) * below - above * bend)
    gt = (gt + rl * 2.0 * (d1 * t + s * turn - d0 * past) - rb * bend) / w
    gs = ry * (t * t * below - above * (1.0 - 2.0 * middle)) + 2.0 * l_inner / s
    gs = (gs + rl * 2.0 * middle - rb * (1.0 - 2.0 * middle)) / w
    g0 = (ry * middle * (below - above) + rl * past * past - rb * middle) * u0
    g1 = (-ry * middle * above + rl * t * t - rb * middle) * u1
    factor = 2.0 * bound * (1.0 - least * bins)
    first = gb + at[:, None]
    j = tl.arange(0, padded)[None, :]
    there = inside[:, None] & (j < bins)
    here, before = j == k[:, None], j < k[:, None]
    of_wide = tl.where(before, -gt[:, None], tl.where(here, (-gt * t - gs * s)[:, None], 0.0))
    of_wide = factor * wide * (of_wide - tl.sum(of_wide * wide, 1)[:, None])
    of_high = tl.where(before, y_inner[:, None], tl.where(here, (gs + y_inner * above / below)[:, None], 0.0))
    of_high = factor * high * (of_high - tl.sum(of_high * high, 1)[:, None])
    tl.store(first + j, of_wide.to(gb.dtype.element_ty), mask=there)
    tl.store(first + bins + j, of_high.to(gb.dtype.element_ty), mask=there)
    of_slopes = tl.where(j == (k - 1)[:, None], g0[:, None], tl.where(here, g1[:, None], 0.0))
    tl.store(first + 2 * bins + j, of_slopes.to(gb.dtype.element_ty), mask=inside[:, None] & (j < bins - 1))
    return tl.where(within, gt, y_gradient)


def affine_spline(
    a: Tensor, b: Tensor, log_scale: float, bins: int, bound: float, least: float, steepest: float
) -> tuple[Tensor, Tensor]:
    """Compute g(a; b) and log g' of `AffineSpline` with b in the order of pixels, (B, H · W, n)."""
    y, log_slope = (a.new_empty(a.shape) for _ in range(2))
    _affine_spline[(triton.cdiv(a.numel(), _SPLINES.value),)](
        a, *a.stride(), b, y, log_slope, *_of_pixels(a, b), log_scale, bound, least, steepest,
        bins=bins, padded=triton.next_power_of_2(bins),
    )  # fmt: skip
    return y, log_slope


def affine_spline_backward(
    a: Tensor, b: Tensor, gy: Tensor, gl: Tensor,
    log_scale: float, bins: int, bound: float, least: float, steepest: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of `affine_spline`."""
    ga, gb = a.new_empty(a.shape), torch.zeros_like(b)
    _affine_spline_backward[(triton.cdiv(a.numel(), _SPLINES.value),)](
        a, *a.stride(), b, gy, *gy.stride(), gl, *gl.stride(), ga, gb, *_of_pixels(a, b), log_scale, bound, least,
        steepest, bins=bins, padded=triton.next_power_of_2(bins),
    )  # fmt: skip
    return ga, gb


def _of_pixels(a: Tensor, b: Tensor) -> tuple[int, int, int, int]:
    """Return channels and pixels of a, (B, channels · pixels), the numbers of b per pixel, and the numbers of a."""
    return a.shape[1] // b.shape[1], b.shape[1], b.shape[2], a.numel()


@triton.jit
def _affine_spline(
    a, a_rows, a_columns, b, out, log_slope, channels, pixels, size, total, log_scale, bound, least, steepest,
    bins: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    row, column, at, inside = _of_pixel(channels, pixels, size, total, 3 * bins + 1)
    v = tl.load(a + row * a_rows + column * a_columns, mask=inside, other=0.0)
    tanh, shift = _affine(b, at, inside, log_scale)
    v = v * tl.exp(log_scale * tanh) + shift
    y, log_y = _spline_at(v, b, at + 2, inside, bound, least, steepest, bins, padded)
    i = row * channels * pixels + column
    tl.store(out + i, y, mask=inside)
    tl.store(log_slope + i, log_y + log_scale * tanh, mask=inside)


@triton.jit
def _affine_spline_backward(
    a, a_rows, a_columns, b, gy, gy_rows, gy_columns, gl, gl_rows, gl_columns, ga, gb, channels, pixels, size, total,
    log_scale, bound, least, steepest, bins: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    row, column, at, inside = _of_pixel(channels, pixels, size, total, 3 * bins + 1)
    v = tl.load(a + row * a_rows + column * a_columns, mask=inside, other=0.0)
    y_gradient = tl.load(gy + row * gy_rows + column * gy_columns, mask=inside, other=0.0)
    l_gradient = tl.load(gl + row * gl_rows + column * gl_columns, mask=inside, other=0.0)
    tanh, shift = _affine(b, at, inside, log_scale)
    scaled = v * tl.exp(log_scale * tanh)
    g = _spline_back_at(
        scaled + shift, b, gb, at + 2, inside, y_gradient, l_gradient, bound, least, steepest, bins, padded
    )
    tl.store(ga + row * channels * pixels + column, g * tl.exp(log_scale * tanh), mask=inside)
    of_scale = (g * scaled + l_gradient) * (1.0 - tanh * tanh)
    tl.store(gb + at, of_scale.to(gb.dtype.element_ty), mask=inside)
    tl.store(gb + at + 1, g.to(gb.dtype.element_ty), mask=inside)


@triton.jit
def _of_pixel(channels, pixels, size, total, each):
    """Return the rows and columns of some numbers of a, in the order of b, and where their `each` parameters start."""
    i = tl.program_id(0) * _SPLINES + tl.arange(0, _SPLINES)
    row, rest = i // (channels * pixels), i % (channels * pixels)
    pixel, channel = rest // channels, rest % channels
    return row, channel * pixels + pixel, (row * pixels + pixel).to(tl.int64) * size + channel * each, i < total


@triton.jit
def _affine(b, at, inside, log_scale):
    """Return tanh of the bounded log-scale, and the shift."""
    tanh = _tanh(tl.load(b + at, mask=inside, other=0.0).to(tl.float32) / log_scale)
    return tanh, tl.load(b + at + 1, mask=inside, other=0.0).to(tl.float32)


Shape = tuple[int, int, int]  # of an image: channels, height, width


def patches(x: Tensor, shape: Shape, columns: int, dtype: torch.dtype) -> Tensor:
    """Compute `conv._patches`."""
    channels, height, width = shape
    out = x.new_empty(len(x) * height * width, columns, dtype=dtype)
    padded = triton.next_power_of_2(columns)
    rows = max(1, 2 * _BLOCK.value // padded)
    _patches[(triton.cdiv(len(out), rows),)](
        x, *x.stride(), out, 9 * channels, height, width, columns, len(out), rows, padded
    )
    return out


@triton.jit
def _patches(
    x, row_stride, column_stride, out, used, height, width, columns, total, rows: tl.constexpr, padded: tl.constexpr
):
    row, k = tl.program_id(0) * rows + tl.arange(0, rows), tl.arange(0, padded)
    image, pixel = row // (height * width), row % (height * width)
    r, c = (pixel // width)[:, None] + (k % 9 // 3 - 1)[None, :], (pixel % width)[:, None] + (k % 3 - 1)[None, :]
    inside = (row[:, None] < total) & (k[None, :] < columns)
    there = inside & (k[None, :] < used) & (r >= 0) & (r < height) & (c >= 0) & (c < width)
    at = (image.to(tl.int64) * row_stride)[:, None] + (
        (k // 9)[None, :] * height * width + r * width + c
    ) * column_stride
    value = tl.load(x + at, mask=there, other=0.0).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64)[:, None] * columns + k[None, :], value, mask=inside)


def patches_back(gradient: Tensor, images: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Compute `conv._patches_back`."""
    channels, height, width = shape
    out = gradient.new_empty(images, channels * height * width, dtype=dtype)
    _patches_back[(triton.cdiv(out.numel(), _BLOCK.value),)](
        gradient, out, channels, height, width, gradient.shape[1], out.numel()
    )
    return out


@triton.jit
def _patches_back(gradient, out, channels, height, width, columns, total):
    i = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    inside = i < total
    pixels = height * width
    image, channel, pixel = i // (channels * pixels), i // pixels % channels, i % pixels
    value = tl.zeros((_BLOCK,), tl.float32)
    for k in tl.static_range(9):  # who saw this pixel, and as which of theirs
        r, c = pixel // width + 1 - k // 3, pixel % width + 1 - k % 3
        there = inside & (r >= 0) & (r < height) & (c >= 0) & (c < width)
        at = (image * pixels + r * width + c).to(tl.int64) * columns + channel * 9 + k
        value += tl.load(gradient + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + i, value, mask=inside)


def conv_enter(m: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `conv._enter`; here and below m, h, s, c, u, ag and their gradients are contiguous."""
    h, s = torch.empty_like(m), torch.empty_like(m)
    _conv_enter[(triton.cdiv(m.numel(), _BLOCK.value),)](m, place, h, s, place.numel(), m.numel())
    return h, s


@triton.jit
def _conv_enter(m, place, h, s, period, total):
    i = tl.program_id(0).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    inside = i < total
    value = tl.load(m + i, mask=inside).to(tl.float32) + tl.load(place + i % period, mask=inside)
    rounded = value.to(h.dtype.element_ty)
    tl.store(h + i, rounded, mask=inside)
    tl.store(s + i, _silu(rounded.to(tl.float32)).to(s.dtype.element_ty), mask=inside)


def conv_enter_back(gs: Tensor, h: Tensor, gh: Tensor | None) -> Tensor:
    """Compute `conv._enter_back`."""
    out = torch.empty_like(h)
    _conv_enter_back[(triton.cdiv(h.numel(), _BLOCK.value),)](
        gs, h, h if gh is None else gh, out, h.numel(), adds=gh is not None
    )
    return out


@triton.jit
def _conv_enter_back(gs, h, gh, out, total, adds: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    inside = i < total
    value = tl.load(gs + i, mask=inside).to(tl.float32) * _silu_slope(tl.load(h + i, mask=inside).to(tl.float32))
    if adds:
        value += tl.load(gh + i, mask=inside).to(tl.float32)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=inside)


def conv_activate(c: Tensor, bias: Tensor, kept: Tensor | None, scale: float, u: Tensor, mean: Tensor) -> None:
    """Compute `conv._activate`; kept is (B, H · W, width), with any row stride."""
    mask = c if kept is None else kept
    grid, sizes = _of_images(len(mean), c, (64, 64))
    _conv_activate[grid](c, bias, mask, mask.stride(0), scale, u, mean, *sizes, drops=kept is not None)


@triton.jit
def _conv_activate(
    c, bias, kept, kept_stride, scale, u, mean, pixels, width,
    rows: tl.constexpr, columns: tl.constexpr, drops: tl.constexpr,
):  # fmt: skip
    n, j, first = _image(pixels, width, columns)
    b = tl.load(bias + j, mask=j < width, other=0.0)[None, :]
    total = tl.zeros((columns,), tl.float32)
    for start in range(0, pixels, rows):
        at, inside = _tile(start, j, pixels, width, rows)
        value = _silu(tl.load(c + first + at, mask=inside, other=0.0).to(tl.float32) + b)
        if drops:
            alive = tl.load(kept + n * kept_stride + at, mask=inside, other=0)
            value = tl.where(alive != 0, value * scale, 0.0)
        rounded = value.to(u.dtype.element_ty)
        tl.store(u + first + at, rounded, mask=inside)
        total += tl.sum(tl.where(inside, rounded.to(tl.float32), 0.0), 0)
    tl.store(mean + n * width + j, (total / pixels).to(mean.dtype.element_ty), mask=j < width)


def conv_activate_back(
    gu: Tensor, g_mean: Tensor, c: Tensor, bias: Tensor, kept: Tensor | None, scale: float, sums: Tensor
) -> Tensor:
    """Compute `conv._activate_back`."""
    out, mask = torch.empty_like(c), c if kept is None else kept
    grid, sizes = _of_images(len(g_mean), c, (64, 64))
    _conv_activate_back[grid](
        gu, g_mean, c, bias, mask, mask.stride(0), scale, out, sums, *sizes, drops=kept is not None
    )
    return out


@triton.jit
def _conv_activate_back(
    gu, g_mean, c, bias, kept, kept_stride, scale, out, sums, pixels, width,
    rows: tl.constexpr, columns: tl.constexpr, drops: tl.constexpr,
):  # fmt: skip
    n, j, first = _image(pixels, width, columns)
    b = tl.load(bias + j, mask=j < width, other=0.0)[None, :]
    of_mean = tl.load(g_mean + n * width + j, mask=j < width, other=0.0).to(tl.float32)[None, :] / pixels
    total = tl.zeros((columns,), tl.float32)
    for start in range(0, pixels, rows):
        at, inside = _tile(start, j, pixels, width, rows)
        slope = _silu_slope(tl.load(c + first + at, mask=inside, other=0.0).to(tl.float32) + b)
        value = (tl.load(gu + first + at, mask=inside, other=0.0).to(tl.float32) + of_mean) * slope
        if drops:
            alive = tl.load(kept + n * kept_stride + at, mask=inside, other=0)
            value = tl.where(alive != 0, value * scale, 0.0)
        tl.store(out + first + at, value.to(out.dtype.element_ty), mask=inside)
        total += tl.sum(tl.where(inside, value, 0.0), 0)
    tl.store(sums + (n * 3 + 2) * width + j, total, mask=j < width)


def conv_gate(h: Tensor, ag: Tensor, bias: Tensor, lift: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `conv._gate`."""
    out, s = torch.empty_like(h), torch.empty_like(h)
    grid, sizes = _of_images(len(lift), h, (32, 64))
    _conv_gate[*grid, triton.cdiv(sizes[0], sizes[2])](h, ag, bias, lift, out, s, *sizes)
    return out, s


@triton.jit
def _conv_gate(h, ag, bias, lift, out, s, pixels, width, rows: tl.constexpr, columns: tl.constexpr):
    n, j, first = _image(pixels, width, columns)
    start = tl.program_id(2) * rows
    at, inside = _tile(start, j, pixels, width, rows)
    of_a, of_g = _gate_biases(bias, lift, n, j, width)
    a, share = _gates(ag, of_a, of_g, n, start, j, inside, pixels, width, rows)
    value = tl.load(h + first + at, mask=inside, other=0.0).to(tl.float32) + a * share
    rounded = value.to(out.dtype.element_ty)
    tl.store(out + first + at, rounded, mask=inside)
    tl.store(s + first + at, _silu(rounded.to(tl.float32)).to(s.dtype.element_ty), mask=inside)


def conv_gate_back(
    gs: Tensor, h: Tensor, gh: Tensor | None, ag: Tensor, bias: Tensor, lift: Tensor,
    g_ag: Tensor, g_lift: Tensor, sums: Tensor,
) -> Tensor:  # fmt: skip
    """Compute `conv._gate_back`."""
    out = torch.empty_like(h)
    grid, sizes = _of_images(len(lift), h, (32, 32))
    _conv_gate_back[grid](
        gs,
        h,
        h if gh is None else gh,
        ag,
        bias,
        lift,
        g_ag,
        g_lift,
        sums,
        out,
        *sizes,
        adds=gh is not None,
        num_warps=2,
    )
    return out


@triton.jit
def _conv_gate_back(
    gs, h, gh, ag, bias, lift, g_ag, g_lift, sums, out, pixels, width,
    rows: tl.constexpr, columns: tl.constexpr, adds: tl.constexpr,
):  # fmt: skip
    n, j, first = _image(pixels, width, columns)
    of_a, of_g = _gate_biases(bias, lift, n, j, width)
    total_a, total_g = tl.zeros((columns,), tl.float32), tl.zeros((columns,), tl.float32)
    for start in range(0, pixels, rows):
        at, inside = _tile(start, j, pixels, width, rows)
        slope = _silu_slope(tl.load(h + first + at, mask=inside, other=0.0).to(tl.float32))
        value = tl.load(gs + first + at, mask=inside, other=0.0).to(tl.float32) * slope
        if adds:
            value += tl.load(gh + first + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + first + at, value.to(out.dtype.element_ty), mask=inside)
        a, share = _gates(ag, of_a, of_g, n, start, j, inside, pixels, width, rows)
        ga = tl.where(inside, value * share, 0.0)
        gg = ga * a * (1.0 - share)
        to = g_ag + 2 * first + _tile(start, j, pixels, 2 * width, rows)[0]
        tl.store(to, ga.to(g_ag.dtype.element_ty), mask=inside)
        tl.store(to + width, gg.to(g_ag.dtype.element_ty), mask=inside)
        total_a += tl.sum(ga, 0)
        total_g += tl.sum(gg, 0)
    tl.store(g_lift + n * width + j, total_g.to(g_lift.dtype.element_ty), mask=j < width)
    tl.store(sums + n * 3 * width + j, total_a, mask=j < width)
    tl.store(sums + (n * 3 + 1) * width + j, total_g, mask=j < width)


def _of_images(images: int, x: Tensor, tile: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
    """Return the grid and the sizes of programs for one image and some channels each, which loop over the pixels.

    The tile of pixels and channels was chosen by measurements on an H200.
    """
    pixels, width = len(x) // images, x.shape[1]
    columns = min(tile[1] if width % tile[1] == 0 else 32, triton.next_power_of_2(width))
    tile = min(tile[0], triton.next_power_of_2(pixels)), columns
    return (images, triton.cdiv(width, tile[1])), (pixels, width, *tile)


@triton.jit
def _image(pixels, width, columns: tl.constexpr):
    """Return the image of a program, its channels, and the offset of the image."""
    n = tl.program_id(0).to(tl.int64)
    return n, tl.program_id(1) * columns + tl.arange(0, columns), n * pixels * width


@triton.jit
def _tile(start, j, pixels, width, rows: tl.constexpr):
    """Return the offsets of some pixels of an image, and whether they exist."""
    p = start + tl.arange(0, rows)
    return p[:, None] * width + j[None, :], (p[:, None] < pixels) & (j[None, :] < width)


@triton.jit
def _gate_biases(bias, lift, n, j, width):
    of_a, of_g = tl.load(bias + j, mask=j < width, other=0.0), tl.load(bias + width + j, mask=j < width, other=0.0)
    of_g += tl.load(lift + n * width + j, mask=j < width, other=0.0).to(tl.float32)
    return of_a[None, :], of_g[None, :]


@triton.jit
def _gates(ag, of_a, of_g, n, start, j, inside, pixels, width, rows: tl.constexpr):
    """Return a and sigmoid(g) from rows that hold both."""
    at = ag + n * pixels * 2 * width + _tile(start, j, pixels, 2 * width, rows)[0]
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32) + of_a
    return a, tl.sigmoid(tl.load(at + width, mask=inside, other=0.0).to(tl.float32) + of_g)


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _silu_slope(x):
    share = tl.sigmoid(x)
    return share * (1.0 + x * (1.0 - share))


def add_bias(out: Tensor, bias: Tensor) -> None:
    """Add the bias to out[:, : len(bias)], in place."""
    padded = triton.next_power_of_2(out.shape[1])
    rows = max(1, 2 * _BLOCK.value // padded)
    _add_bias[(triton.cdiv(len(out), rows),)](out, bias, len(out), out.shape[1], len(bias), rows, padded)


@triton.jit
def _add_bias(out, bias, total, columns, used, rows: tl.constexpr, padded: tl.constexpr):
    row, j = tl.program_id(0) * rows + tl.arange(0, rows), tl.arange(0, padded)
    inside = (row[:, None] < total) & (j[None, :] < columns)
    at = out + row.to(tl.int64)[:, None] * columns + j[None, :]
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32) + tl.load(bias + j, mask=j < used, other=0.0)[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=inside)


MOST_CHANNELS = 64  # that `channel_mixing` takes


def mixing_matrix(lu: Tensor, log_diagonal: Tensor, order: Tensor) -> Tensor:
    """Compute `Mixing.matrix`."""
    matrix, n = torch.empty_like(lu), len(lu)
    _mixing_matrix[(1,)](lu, log_diagonal, order, matrix, n, _padded(n))
    return matrix


def mixing_matrix_back(gradient: Tensor, lu: Tensor, log_diagonal: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of lu and log_diagonal from that of the matrix."""
    g_lu, g_log, n = torch.zeros_like(lu), torch.empty_like(log_diagonal), len(lu)
    _mixing_matrix_back[(triton.cdiv(n, 16),)](gradient, lu, log_diagonal, order, g_lu, g_log, n, _padded(n))
    return g_lu, g_log


def _padded(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


@triton.jit
def _mixing_matrix(lu, log_diagonal, order, out, n, padded: tl.constexpr):
    r, c = tl.arange(0, padded)[:, None], tl.arange(0, padded)[None, :]
    lower, upper, _ = _factors(lu, log_diagonal, order, n, padded)
    value = tl.dot(lower, upper, input_precision="ieee")
    tl.store(out + r * n + c, value, mask=(r < n) & (c < n))


@triton.jit
def _mixing_matrix_back(gradient, lu, log_diagonal, order, g_lu, g_log, n, padded: tl.constexpr):
    """Compute 16 rows of `mixing_matrix_back`."""
    r, c = tl.program_id(0) * 16 + tl.arange(0, 16)[:, None], tl.arange(0, padded)[None, :]
    inside = (r < n) & (c < n)
    _, upper, column = _factors(lu, log_diagonal, order, n, padded)
    of_rows = tl.load(gradient + r * n + c, mask=inside, other=0.0)
    of_lower = tl.dot(of_rows, tl.trans(upper), input_precision="ieee")
    tl.store(g_lu + r * n + c, of_lower, mask=inside & (r > c))
    turned = tl.load(lu + c * n + r, mask=inside & (c > r), other=0.0) + tl.where(r == c, 1.0, 0.0)  # of L
    k = tl.arange(0, padded)[:, None]
    whole = tl.load(gradient + k * n + c, mask=(k < n) & (c < n), other=0.0)
    of_upper = tl.dot(turned, whole, input_precision="ieee")
    tl.store(g_lu + r * n + column[None, :], of_upper, mask=inside & (r < column[None, :]))
    diagonal = tl.sum(tl.where(inside & (r == column[None, :]), of_upper, 0.0), 1)
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    scale = tl.exp(tl.load(log_diagonal + row, mask=row < n, other=0.0))
    tl.store(g_log + row, diagonal * scale, mask=row < n)


@triton.jit
def _factors(lu, log_diagonal, order, n, padded: tl.constexpr):
    """Return L, U P, and the column of U for each column of U P."""
    r, c = tl.arange(0, padded)[:, None], tl.arange(0, padded)[None, :]
    inside = (r < n) & (c < n)
    lower = tl.load(lu + r * n + c, mask=inside & (r > c), other=0.0) + tl.where(r == c, 1.0, 0.0)
    column = tl.load(order + tl.arange(0, padded), mask=tl.arange(0, padded) < n, other=0).to(tl.int32)
    upper = tl.load(lu + r * n + column[None, :], mask=inside & (r < column[None, :]), other=0.0)
    diagonal = tl.exp(tl.load(log_diagonal + r, mask=r < n, other=0.0))
    return lower, tl.where(inside & (r == column[None, :]), diagonal, upper), column


def mix_channels(x: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
    """Return W x + b at every pixel of images (B, C · H · W) with any strides."""
    channels = len(matrix)
    out, pixels = x.new_empty(x.shape), x.shape[1] // channels
    columns = min(64, _padded(pixels))
    _mix_channels[(len(x), triton.cdiv(pixels, columns))](
        x, *x.stride(), matrix, bias, out, channels, pixels, _padded(channels), columns
    )
    return out


@triton.jit
def _mix_channels(
    x, row_stride, column_stride, matrix, bias, out, channels, pixels, padded: tl.constexpr, columns: tl.constexpr
):
    n, r, c = tl.program_id(0).to(tl.int64), tl.arange(0, padded), tl.arange(0, padded)
    p = tl.program_id(1) * columns + tl.arange(0, columns)
    inside, at = (r[:, None] < channels) & (p[None, :] < pixels), r[:, None] * pixels + p[None, :]
    square = (r[:, None] < channels) & (c[None, :] < channels)
    w = tl.load(matrix + r[:, None] * channels + c[None, :], mask=square, other=0.0)
    value = tl.load(x + n * row_stride + at * column_stride, mask=inside, other=0.0)
    value = tl.dot(w, value, input_precision="ieee") + tl.load(bias + r, mask=r < channels, other=0.0)[:, None]
    tl.store(out + n * channels * pixels + at, value, mask=inside)


def mix_channels_back(gradient: Tensor, x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the matrix and of the bias; the last two are not yet summed over images."""
    channels = len(matrix)
    pixels = x.shape[1] // channels
    out, g_matrix = x.new_empty(x.shape), x.new_empty(len(x), channels, channels)
    g_bias = x.new_empty(len(x), channels)
    _mix_channels_back[(len(x),)](
        gradient, *gradient.stride(), x, *x.stride(), matrix, out, g_matrix, g_bias, channels, pixels,
        _padded(channels), min(64, _padded(pixels)),
    )  # fmt: skip
    return out, g_matrix, g_bias


@triton.jit
def _mix_channels_back(
    gradient, g_row_stride, g_column_stride, x, row_stride, column_stride, matrix, out, g_matrix, g_bias,
    channels, pixels, padded: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    n, r, c = tl.program_id(0).to(tl.int64), tl.arange(0, padded), tl.arange(0, padded)
    square, corner = (r[:, None] < channels) & (c[None, :] < channels), r[:, None] * channels + c[None, :]
    w = tl.load(matrix + r[None, :] * channels + c[:, None], mask=square, other=0.0)  # its transpose
    of_matrix, of_bias = tl.zeros((padded, padded), tl.float32), tl.zeros((padded,), tl.float32)
    for start in range(0, pixels, columns):
        p = start + tl.arange(0, columns)
        inside, at = (r[:, None] < channels) & (p[None, :] < pixels), r[:, None] * pixels + p[None, :]
        g = tl.load(gradient + n * g_row_stride + at * g_column_stride, mask=inside, other=0.0)
        value = tl.load(x + n * row_stride + at * column_stride, mask=inside, other=0.0)
        tl.store(out + n * channels * pixels + at, tl.dot(w, g, input_precision="ieee"), mask=inside)
        of_matrix += tl.dot(g, tl.trans(value), input_precision="ieee")
        of_bias += tl.sum(g, 1)
    tl.store(g_matrix + n * channels * channels + corner, of_matrix, mask=square)
    tl.store(g_bias + n * channels + r, of_bias, mask=r < channels)
