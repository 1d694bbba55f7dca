"""The spline law with a backward pass by hand: few passes over memory on a CPU, a kernel each way on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nicest.flows import AffineSpline, Law, Spline
from nicest.lowering.derivatives import first_only
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
        y, log_slope, found = _forward(law, a.mT.contiguous(), b)
        ctx.save_for_backward(*found)
        return y.mT, log_slope.mT

    @staticmethod
    @first_only
    def backward(ctx: Any, gy: Tensor, gl: Tensor) -> tuple[Tensor, Tensor, None]:
        law: Spline = ctx.law
        kernels = kernels_for(gy)
        if kernels:
            a, b = ctx.saved_tensors
            return *kernels.spline_backward(a, b, gy, gl, law.bins, law.bound, law.LEAST, law.STEEPEST.bound), None
        ga, gb = _backward(law, _Found(*ctx.saved_tensors), gy.mT, gl.mT)
        return ga.mT, gb, None


class _AffineSpline(torch.autograd.Function):
    """g(a; b) and log g' of every number of a, (B, n) each; b is (B, pixels, at least size · channels)."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, law: AffineSpline) -> tuple[Tensor, Tensor]:
        kernels: Any = kernels_for(a)
        ctx.save_for_backward(a, b)
        ctx.settings = law.log_scale, law.bins, law.bound, Spline.LEAST, Spline.STEEPEST.bound
        return kernels.affine_spline(a, b, *ctx.settings)

    @staticmethod
    @first_only
    def backward(ctx: Any, gy: Tensor, gl: Tensor) -> tuple[Tensor, Tensor, None]:
        kernels: Any = kernels_for(gy)
        return *kernels.affine_spline_backward(*ctx.saved_tensors, gy, gl, *ctx.settings), None


class _Found(NamedTuple):
    """What the backward pass keeps of numbers (n, B), rows last, so that every pass runs along memory.

    `inside` is 1 where a number lies between the tails; `shares` (n, 2, bins, B) are those of all bins on either axis,
    or (n, 2, bins, 1) of splines that all rows share; `past` (n, bins, B) is 1 for bins that lie before a number, and
    empty for shared splines; `own` (n, 1, B) says where its bin stands among those of all rows. Of its own bin: its
    `share` (n, 2, B) of either axis and the sum of those `before` it, s = height / width, d (n, 2, B) the slopes at its
    ends and u (n, 2, B) their derivatives. The rest are parts of the formula at t, the place in the bin (Durkan et al.
    2019, eq. 4 and 5).
    """

    inside: Tensor
    shares: Tensor
    past: Tensor
    own: Tensor
    before: Tensor
    share: Tensor
    s: Tensor
    d: Tensor
    u: Tensor
    t: Tensor
    rest: Tensor
    middle: Tensor
    bend: Tensor
    above: Tensor
    below: Tensor
    slopes: Tensor
    slope: Tensor


def _forward(law: Spline, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, _Found]:
    """g and log g' of numbers a (n, B); b is as the law has it, and best lies in memory column by column."""
    bins, bound, least, steepest = law.bins, law.bound, law.LEAST, law.STEEPEST.bound
    b = b.mT.contiguous().view(len(a), law.size, -1)
    rows, room = b.shape[2], 1 - least * bins
    shares = b[:, : 2 * bins].unflatten(1, (2, bins)).softmax(2)
    sums = torch.ones(bins, bins, dtype=b.dtype, device=b.device).tril_(-1) @ shares  # of the bins before each
    knots = sums[:, 0, 1:] * room + torch.arange(1, bins, dtype=b.dtype, device=b.device)[:, None] * least
    at = a.clamp(-bound, bound).add_(bound).mul_(0.5 / bound)
    if rows == 1:
        past = a.new_empty(0)
        k = torch.searchsorted(knots[..., 0].contiguous(), at, right=True)[:, None]
    else:
        past = torch.le(knots, at[:, None], out=a.new_empty(len(a), bins - 1, rows))
        past = pad(past, (0, 0, 0, 1))  # torch.export takes no `out` that is a part of a tensor
        k = past.sum(1, keepdim=True).long()
    own = torch.arange(rows, device=b.device).add(k, alpha=rows)
    before, share = (each.flatten(2).gather(2, own.expand(-1, 2, -1)) for each in (sums, shares))
    (x, y), (w, h) = (before * room).add_(k, alpha=least).unbind(1), (share * room).add_(least).unbind(1)
    slopes = pad(b[:, 2 * bins :], (0, 0, 1, 1))  # the outermost two knots have no parameter, and slope 1
    tanh = slopes.flatten(1).gather(1, _ends(own, rows).flatten(1)).div_(steepest).tanh_().view(len(a), 2, -1)
    d = (steepest * tanh).exp_()
    u = torch.addcmul(d, d, tanh.square_(), value=-1)
    d0, d1 = d.unbind(1)
    t = ((at - x) / w).clamp_(0, 1)
    s, rest = h / w, 1 - t
    middle, bend = t * rest, torch.sub(d0 + d1, s, alpha=2)
    above, below = torch.addcmul(d0 * middle, s * t, t), torch.addcmul(s, bend, middle)
    slopes = torch.addcmul(d1 * t * t, s, middle, value=2).addcmul_(d0 * rest, rest)
    slope = (s / below).square_().mul_(slopes)
    value = torch.addcdiv(y, h * above, below).mul_(2 * bound).sub_(bound)
    inside = a.abs() < bound
    found = _Found(
        inside.to(a), shares, past, own, before, share, s, d, u, t, rest, middle, bend, above, below, slopes, slope
    )
    return torch.where(inside, value, a), slope.log().mul_(found.inside), found


def _backward(law: Spline, found: _Found, gy: Tensor, gl: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of a (n, B) and b from those of g and log g'."""
    inside, shares, past, own, before, share, s, d, u, t, rest, middle, bend, above, below, slopes, slope = found
    bins, rows, axis, n = law.bins, shares.shape[3], 2 * law.bound, len(gy)
    room = 1 - law.LEAST * bins
    w, h = (share * room + law.LEAST).unbind(1)
    d0, d1 = d.unbind(1)
    direct, gl = gy - gy * inside, gl * inside
    gy = gy - direct
    turn, lower, upper = rest - t, 2 * gl / below, gl / slopes  # of log g', by what is below and above in its fraction
    higher = axis * gy * h / below  # of the height within the bin
    lowers = torch.addcmul(lower, higher, above / below)
    gt = torch.addcmul(d1 * t - d0 * rest, s, turn).mul_(upper).mul_(2).addcmul_(bend * turn, lower, value=-1)
    gt = gt.div_(axis * w).addcmul_(gy, slope)
    gs = torch.addcmul(higher * t * t, upper, middle, value=2).addcmul_(lowers, 2 * middle - 1)
    gs = gs.addcdiv_(gl, s, value=2).div_(w)
    g0 = ((higher - lowers) * middle).addcmul_(upper * rest, rest)
    g1 = (upper * t * t).addcmul_(lowers, middle, value=-1)
    # of what lies before the bin, and of how large it is, on either axis: both are sums of shares
    begins = torch.stack((-gt, gy), 1).mul_(axis * room)
    size = torch.stack((-(axis * gt * t).addcmul_(gs, s), gs.addcdiv_(axis * gy * above, below)), 1).mul_(room)
    out = gy.new_empty(n, law.size, rows)
    of_shares = out[:, : 2 * bins].unflatten(1, (2, bins))
    if rows == 1:  # one b for all rows
        sums = gy.new_zeros(n, 4, bins).scatter_add_(2, own.expand(-1, 4, -1), torch.cat((begins, size), 1))
        later, each = sums.unsqueeze(3).split(2, 1)
        each = each + later.sum(2, keepdim=True) - later.cumsum(2)
        torch.mul(each - (each * shares).sum(2, keepdim=True), shares, out=of_shares)
    else:
        mean = torch.addcmul(begins * before, size, share)  # over all bins, each counting by its share
        torch.addcmul(-mean[:, :, None], past[:, None], begins[:, :, None], out=of_shares).mul_(shares)
        of_shares.flatten(2).scatter_(2, own.expand(-1, 2, -1), size.sub_(mean).mul_(share))
    of_slopes = torch.stack((g0, g1), 1).mul_(u).flatten(1)
    knots = gy.new_zeros(n, (bins + 1) * rows).scatter_add_(1, _ends(own, rows).flatten(1), of_slopes)
    out[:, 2 * bins :] = knots.view(n, -1, rows)[:, 1:-1]
    return direct.add_(gt), out.flatten(0, 1).mT


def _ends(own: Tensor, rows: int) -> Tensor:
    """(n, 2, B): where the two knots of a bin stand among those of all rows."""
    return torch.cat((own, own + rows), 1)
