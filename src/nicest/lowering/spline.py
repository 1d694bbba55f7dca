"""The spline law with a backward pass by hand: few passes over memory on a CPU, a kernel each way on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nicest.flows import AffineSpline, Law, Spline
from nicest.lowering.gpu import kernels_for


def fast_law(law: Law) -> Law:
    """A law that computes the same, faster where we know how."""
    if type(law) is AffineSpline:
        return FastAffineSpline(law.bins, law.bound, law.log_scale)
    return FastSpline(law) if type(law) is Spline else law


class FastSpline(Law):
    def __init__(self, plain: Spline) -> None:
        self.plain = plain
        self.size = plain.size

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """b is (B, n · size), or, on a CPU, (1, n · size) for all rows."""
        y, log_slope = _Spline.apply(a, b, self.plain)
        return y, log_slope.sum(-1)

    def inverse(self, y: Tensor, b: Tensor) -> Tensor:
        return self.plain.inverse(y, b)


class FastAffineSpline(AffineSpline):
    @property
    def spline(self) -> Law:
        return FastSpline(Spline(self.bins, self.bound))

    def at_pixels(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` on a GPU, with b in the order of `FastConv.planes`."""
        y, log_slope = _AffineSpline.apply(a, b, self)
        return y, log_slope.sum(-1)


class _Spline(torch.autograd.Function):
    """g(a; b) and log g' of every number of a, (B, n) each."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, law: Spline) -> tuple[Tensor, Tensor]:
        ctx.law, kernels = law, kernels_for(b)
        if kernels:
            ctx.save_for_backward(a, b)
            return kernels.spline(a, b, law.bins, law.bound, law.LEAST, law.STEEPEST.bound)
        found = _find(law, a, b)
        ctx.save_for_backward(*found)
        y, log_slope, _ = _value(found)
        return torch.where(found.inside, y, a), torch.where(found.inside, log_slope, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor, gl: Tensor) -> tuple[Tensor, Tensor, None]:
        law: Spline = ctx.law
        kernels = kernels_for(gy)
        if kernels:
            a, b = ctx.saved_tensors
            return *kernels.spline_backward(a, b, gy, gl, law.bins, law.bound, law.LEAST, law.STEEPEST.bound), None
        return *_backward(law, _Found(*ctx.saved_tensors), gy, gl), None


class _AffineSpline(torch.autograd.Function):
    """g(a; b) and log g' of every number of a, (B, n) each; b is (B, pixels, at least size · channels)."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, law: AffineSpline) -> tuple[Tensor, Tensor]:
        kernels: Any = kernels_for(a)
        ctx.save_for_backward(a, b)
        ctx.settings = law.log_scale, law.bins, law.bound, Spline.LEAST, Spline.STEEPEST.bound
        return kernels.affine_spline(a, b, *ctx.settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor, gl: Tensor) -> tuple[Tensor, Tensor, None]:
        kernels: Any = kernels_for(gy)
        return *kernels.affine_spline_backward(*ctx.saved_tensors, gy, gl, *ctx.settings), None


class _Found(NamedTuple):
    """The bins that numbers (B, n) lie in, these dimensions last, so that every pass runs along memory.

    `shares` (2, bins, B, n) of either axis, `past` (bins - 1, B, n) whether a knot between bins lies below; of its own
    bin what `nicest.flows.laws.Bin` holds, with t where in it a number lies, d (2, B, n) the slopes at its ends and u
    (2, B, n) their derivatives.
    """

    inside: Tensor
    shares: Tensor
    past: Tensor
    t: Tensor
    y: Tensor
    w: Tensor
    h: Tensor
    d: Tensor
    u: Tensor


def _find(law: Spline, a: Tensor, b: Tensor) -> _Found:
    bins, bound, steepest = law.bins, law.bound, law.STEEPEST.bound
    b = b.reshape(-1, law.size).mT.contiguous().unflatten(1, (len(b), a.shape[1]))
    inner = a.clamp(-bound, bound).add_(bound)
    logits = b[: 2 * bins].unflatten(0, (2, bins))
    shares = (logits - logits.amax(1, keepdim=True)).exp_()
    shares /= shares.sum(1, keepdim=True)
    sizes = shares * (2 * bound * (1 - law.LEAST * bins)) + 2 * bound * law.LEAST
    sums = torch.ones(bins - 1, bins, dtype=b.dtype, device=b.device).tril_()
    past = ((sums @ sizes[0].flatten(1)).unflatten(1, b.shape[1:]) <= inner).to(b.dtype)
    here = _here(past)
    w, h = (sizes * here).sum(1)
    x, y = (sizes[:, :-1] * past).sum(1)
    slopes = b[2 * bins :]
    tanh = torch.stack(((slopes * here[1:]).sum(0), (slopes * here[:-1]).sum(0))).div_(steepest).tanh_()
    d = (steepest * tanh).exp_()  # 1 at the outermost two knots, which have no parameter
    t = ((inner - x) / w).clamp_(0, 1)
    return _Found(a.abs() < bound, shares, past, t, y - bound, w, h, d, d * (1 - tanh.square()))


def _here(past: Tensor) -> Tensor:
    """(bins, B, n): 1 for the bin that a number lies in, else 0."""
    ones, zeros = torch.ones_like(past[:1]), torch.zeros_like(past[:1])
    return torch.cat((ones, past)) - torch.cat((past, zeros))


def _value(found: _Found) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """g, log g', and the parts of the formula that its derivatives have too."""
    t, (d0, d1) = found.t, found.d
    s, rest = found.h / found.w, 1 - t
    middle, square = t * rest, t.square()
    above, below = s * square + d0 * middle, s + (d0 + d1 - 2 * s) * middle
    slopes = d1 * square + 2 * s * middle + d0 * rest.square()
    log_slope = torch.log(slopes * (s / below).square())
    return found.y + found.h * above / below, log_slope, (s, middle, square, rest, above, below, slopes)


def _backward(law: Spline, found: _Found, gy: Tensor, gl: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of a and b from those of g and log g'."""
    bins, outside = law.bins, ~found.inside
    direct = gy.masked_fill(found.inside, 0)
    gy, gl = gy.masked_fill(outside, 0), gl.masked_fill(outside, 0)
    t, w, h, (d0, d1) = found.t, found.w, found.h, found.d
    _, _, (s, middle, square, rest, above, below, slopes) = _value(found)
    ry, rl, rb, turn = gy * h / below.square(), gl / slopes, 2 * gl / below, rest - t
    bend, twice = (d0 + d1 - 2 * s) * turn, 1 - 2 * middle
    gt = ry * ((2 * s * t + d0 * turn) * below - above * bend)
    gt = (gt + rl * 2 * (d1 * t + s * turn - d0 * rest) - rb * bend) / w
    gs = (ry * (square * below - above * twice) + 2 * gl / s + rl * 2 * middle - rb * twice) / w
    g0 = (ry * middle * (below - above) + rl * rest.square() - rb * middle) * found.u[0]
    g1 = (rl * square - rb * middle - ry * middle * above) * found.u[1]
    here = _here(found.past)
    out = gy.new_empty(law.size, *gy.shape)
    # of where the bin begins, and of how large it is, on either axis
    begins, size = torch.stack((-gt, gy)), torch.stack((-gt * t - gs * s, gs + gy * above / below))
    torch.mul(size[:, None], here, out=out[: 2 * bins].unflatten(0, (2, bins)))
    out[: 2 * bins].unflatten(0, (2, bins))[:, :-1].addcmul_(begins[:, None], found.past)
    torch.mul(here[1:], g0, out=out[2 * bins :]).addcmul_(here[:-1], g1)
    if found.shares.shape[2] < len(gy):  # one b for all rows
        out = out.sum(1, keepdim=True)
    of_shares = out[: 2 * bins].unflatten(0, (2, bins))
    of_shares -= (of_shares * found.shares).sum(1, keepdim=True)
    of_shares *= found.shares * (2 * law.bound * (1 - law.LEAST * bins))
    return direct + gt, out.flatten(1).mT.reshape(out.shape[1], -1)
