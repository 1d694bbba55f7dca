"""Kernels of learned linear layers of the channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
