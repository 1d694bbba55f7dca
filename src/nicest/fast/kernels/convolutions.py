"""Kernels of convolutional networks: between two products, one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = tl.constexpr(1024)
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
        gs, h, h if gh is None else gh, ag, bias, lift, g_ag, g_lift, sums, out, *sizes, adds=gh is not None,
        num_warps=2,
    )  # fmt: skip
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
