"""Kernels of the spline laws."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
