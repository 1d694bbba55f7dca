"""The spline law with a backward pass by hand: few passes over memory on a CPU, a kernel each way on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nicest.flows import Law, Spline
from nicest.lowering.gpu import kernels_for


def fast_law(law: Law) -> Law:
    """A law that computes the same, faster where we know how."""
    return FastSpline(law) if type(law) is Spline else law


class FastSpline(Law):
    def __init__(self, plain: Spline) -> None:
        self.plain = plain
        self.size = plain.size

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y, log_slope = _Spline.apply(a, b, self.plain)
        return y, log_slope.sum(-1)

    def inverse(self, y: Tensor, b: Tensor) -> Tensor:
        return self.plain.inverse(y, b)


class _Spline(torch.autograd.Function):
    """g(a; b) and log g' of every number of a, (B, n) each."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, law: Spline) -> tuple[Tensor, Tensor]:
        ctx.law, kernels = law, kernels_for(b)
        if kernels:
            ctx.save_for_backward(a, b)
            return kernels.spline(a, b, law.bins, law.bound, law.LEAST, law.STEEPEST.bound)
        found = _find(law, a, b)
        ctx.save_for_backward(a, *found)
        y, log_slope, _ = _value(found)
        inside = found.inside
        return torch.where(inside, y, a), torch.where(inside, log_slope, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor, gl: Tensor) -> tuple[Tensor, Tensor, None]:
        law: Spline = ctx.law
        a, *saved = ctx.saved_tensors
        kernels = kernels_for(gy)
        if kernels:
            (b,) = saved
            return *kernels.spline_backward(a, b, gy, gl, law.bins, law.bound, law.LEAST, law.STEEPEST.bound), None
        return *_backward(law, _Found(*saved), gy, gl), None


class _Found(NamedTuple):
    """The bins that numbers lie in: `shares` (B, n, 2, bins) of either axis, `k` (B, n, 1) which bin, and of that bin
    what `nicest.flows.laws.Bin` holds, with t where in it a number lies and u0, u1 the slopes' derivatives."""

    shares: Tensor
    k: Tensor
    inside: Tensor
    t: Tensor
    y: Tensor
    w: Tensor
    h: Tensor
    d: Tensor
    u: Tensor


def _find(law: Spline, a: Tensor, b: Tensor) -> _Found:
    bins, width = law.bins, 2 * law.bound
    b = b.unflatten(-1, (a.shape[-1], law.size))
    inner = a.clamp(-law.bound, law.bound)
    shares = b[..., : 2 * bins].unflatten(-1, (2, bins)).softmax(-1)
    sizes = shares * (width * (1 - law.LEAST * bins)) + width * law.LEAST
    ends = sizes.cumsum(-1)
    k = (ends[..., 0, :-1] <= (inner + law.bound)[..., None]).sum(-1, keepdim=True)
    here = k[..., None].expand(*k.shape[:-1], 2, 1)
    w, h = (size := sizes.gather(-1, here)[..., 0]).unbind(-1)
    x, y = (ends.gather(-1, here)[..., 0] - size).unbind(-1)
    t = ((inner + law.bound - x) / w).clamp_(0, 1)
    knots = torch.cat((k - 1, k), -1)  # of those between bins; the outermost two have slope 1
    bound = law.STEEPEST.bound
    tanh = (b[..., 2 * bins :].gather(-1, knots.clamp(0, bins - 2)) / bound).tanh_()
    tanh.masked_fill_((knots < 0) | (knots > bins - 2), 0)
    d = (bound * tanh).exp_()
    return _Found(shares, k, a.abs() < law.bound, t, y - law.bound, w, h, d, d * (1 - tanh.square()))


def _value(found: _Found) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """g, log g', and the parts of the formula that its derivatives have too."""
    t, (d0, d1) = found.t, found.d.unbind(-1)
    s, past = found.h / found.w, 1 - t
    middle, square = t * past, t.square()
    above, below = s * square + d0 * middle, s + (d0 + d1 - 2 * s) * middle
    slopes = d1 * square + 2 * s * middle + d0 * past.square()
    log_slope = torch.log(slopes * (s / below).square())
    return found.y + found.h * above / below, log_slope, (s, middle, square, past, above, below, slopes)


def _backward(law: Spline, found: _Found, gy: Tensor, gl: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of a and b from those of g and log g'."""
    outside = ~found.inside
    ga = gy.masked_fill(found.inside, 0)
    gy, gl = gy.masked_fill(outside, 0), gl.masked_fill(outside, 0)
    t, w, h, (d0, d1) = found.t, found.w, found.h, found.d.unbind(-1)
    _, _, (s, middle, square, past, above, below, slopes) = _value(found)
    ry, rl, rb = gy * h / below.square(), gl / slopes, 2 * gl / below
    bend = (d0 + d1 - 2 * s) * (past - t)
    gt = ry * ((2 * s * t + d0 * (past - t)) * below - above * bend)
    gt = (gt + rl * 2 * (d1 * t + s * (past - t) - d0 * past) - rb * bend) / w
    gs = ry * (square * below - above * (1 - 2 * middle)) + 2 * gl / s + rl * 2 * middle - rb * (1 - 2 * middle)
    gs = gs / w
    gd = torch.stack(
        (
            ry * middle * (below - above) + rl * past.square() - rb * middle,
            -ry * middle * above + rl * square - rb * middle,
        ),
        -1,
    )
    # of where the bin begins and how large it is, on either axis
    begins, size = torch.stack((-gt, gy), -1), torch.stack((-gt * t - gs * s, gs + gy * above / below), -1)
    bins = law.bins
    out = gy.new_zeros(*gy.shape, law.size)
    position = torch.arange(bins, device=gy.device)
    k = found.k[..., None]
    of_shares = torch.where(position < k, begins[..., None], torch.where(position == k, size[..., None], 0.0))
    of_shares -= (of_shares * found.shares).sum(-1, keepdim=True)
    of_shares *= found.shares
    torch.mul(of_shares, 2 * law.bound * (1 - law.LEAST * bins), out=out[..., : 2 * bins].unflatten(-1, (2, bins)))
    knots = torch.cat((found.k - 1, found.k), -1)
    gd = (gd * found.u).masked_fill_((knots < 0) | (knots > bins - 2), 0)
    out[..., 2 * bins :].scatter_add_(-1, knots.clamp_(0, bins - 2), gd)
    return ga + gt, out.flatten(-2)
