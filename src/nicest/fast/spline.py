"""The spline law with a backward pass by hand: few passes over memory on a CPU, a kernel each way on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nicest.fast.derivatives import first_only
from nicest.fast.gpu import kernels_for
from nicest.flows import AffineSpline, Law, Spline


def fast_law(law: Law) -> Law:
    """Return a law that computes the same faster, if there is one."""
    if type(law) is AffineSpline:
        return FastAffineSpline(law.bins, law.bound, law.log_scale)
    return FastSpline(law) if type(law) is Spline else law


class FastSpline(Law):
    """The spline law with a backward pass by hand."""

    def __init__(self, plain: Spline) -> None:
        self.plain = plain
        self.size = plain.size

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return g and log g'; b is (B, n, size), or, on a CPU, (1, n, size) for all rows."""
        if a.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            return self.plain.forward(a, b)  # autocast would round the knots, which are a product here
        return _Spline.apply(a, b, self.plain)

    def inverse(self, y: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.plain.inverse(y, b)


class FastAffineSpline(AffineSpline):
    """The affine spline law with a fast spline."""

    @property
    def spline(self) -> Law:
        return FastSpline(Spline(self.bins, self.bound))

    def at_pixels(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `forward` on a GPU, with b in the order of `FastConv.planes`."""
        return _AffineSpline.apply(a, b, self)


class _Spline(torch.autograd.Function):
    """g(a; b) and log g' of every number of a, (B, n); b is (B, n, size) or (1, n, size)."""

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
    or (n, 2, bins, 1) of splines that all rows share; `past` (n, bins, B) is 1 for bins that do not begin after a
    number, and empty for shared splines; `ends` (n, 2, B) says where the knots of its bin stand among those of all
    rows; the first is also that of the bin. Of its own bin: its `share` (n, 2, B) of either axis, what those `before`
    it take of what is shared, its size (w, h), s = h / w, d (n, 2, B) the slopes at its ends and u (n, 2, B) a quarter
    of their derivatives. The rest are parts of the formula at t, the place in the bin (Durkan et al. 2019, eq. 4, 5).
    """

    inside: Tensor
    shares: Tensor
    past: Tensor
    ends: Tensor
    before: Tensor
    share: Tensor
    w: Tensor
    h: Tensor
    s: Tensor
    d: Tensor
    u: Tensor
    t: Tensor
    rest: Tensor
    t_squared: Tensor
    rest_squared: Tensor
    middle: Tensor
    bend: Tensor
    risen: Tensor
    below: Tensor
    slopes: Tensor
    slope: Tensor


def _forward(law: Spline, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, _Found]:
    """Return g and log g' of a (n, B), and what the backward pass needs; b (B, n, size) is best stored rows last."""
    bins, bound, steepest = law.bins, law.bound, law.STEEPEST.bound
    least, room = _lengths(law)
    b = b.permute(1, 2, 0).contiguous()
    rows = b.shape[2]
    shares = b[:, : 2 * bins].unflatten(1, (2, bins)).softmax(2)
    # where bins begin is a product with the shares; these add up to 1, so that constants may stand in the matrix
    each = torch.arange(bins, dtype=b.dtype, device=b.device)[:, None]
    begin = b.new_full((bins, bins), room).tril_(-1).add_(each, alpha=least).sub_(bound) @ shares
    at = a.clamp(-bound, bound)
    if rows == 1:
        past = a.new_empty(0)
        own = k = torch.searchsorted(begin[:, 0, 1:, 0].contiguous(), at, right=True)[:, None]
    else:
        past = torch.le(begin[:, 0], at[:, None], out=a.new_empty(len(a), bins, rows))
        k = past.sum(1, keepdim=True).clamp_(min=1).sub_(1)
        own = torch.arange(rows, device=b.device).add(k.long(), alpha=rows)
    start, share = (each.flatten(2).gather(2, own.expand(-1, 2, -1)) for each in (begin, shares))
    (x, y), (w, h) = start.unbind(1), (share * room).add_(least).unbind(1)
    slopes = pad(b[:, 2 * bins :], (0, 0, 1, 1))  # the outermost two knots have no parameter, and slope 1
    ends = torch.cat((own, own + rows), 1)
    half = slopes.flatten(1).gather(1, ends.flatten(1)).mul_(2 / steepest).sigmoid_().view(len(a), 2, -1)
    d = (half * (2 * steepest)).sub_(steepest).exp_()  # the law's tanh by a sigmoid, in a third of its time
    u = torch.addcmul(half, half, half, value=-1).mul_(d)
    d0, d1 = d.unbind(1)
    t = ((at - x) / w).clamp_(0, 1)
    s, rest = h / w, 1 - t
    t_squared, rest_squared, middle, bend = t * t, rest * rest, t * rest, torch.sub(d0 + d1, s, alpha=2)
    below = torch.addcmul(s, bend, middle)
    risen = torch.addcmul(d0 * middle, s, t_squared).div_(below)
    slopes = torch.addcmul(d1 * t_squared, s, middle, value=2).addcmul_(d0, rest_squared)
    slope = (s / below).square_().mul_(slopes)
    inside, outside = (compare(a.abs(), bound, out=torch.empty_like(a)) for compare in (torch.lt, torch.ge))
    before = (start + bound).sub_(k, alpha=least)
    found = _Found(
        *(inside, shares, past, ends, before, share, w, h, s, d, u),
        *(t, rest, t_squared, rest_squared, middle, bend, risen, below, slopes, slope),
    )
    return torch.addcmul(a * outside, y.addcmul(h, risen), inside), slope.log().mul_(inside), found


def _backward(law: Spline, found: _Found, gy: Tensor, gl: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of a (n, B) and b (B, n, size) from those of g and log g', (n, B)."""
    inside, shares, past, ends, before, share, w, h, s, d, u, t, rest, *parts = found
    t_squared, rest_squared, middle, bend, risen, below, slopes, slope = parts
    bins, rows, n = law.bins, shares.shape[3], len(gy)
    room = _lengths(law)[1]
    (d0, d1), own = d.unbind(1), ends[:, :1]
    direct, gy, gl = gy, gy * inside, gl * inside
    direct = direct - gy
    turn, lower, upper = rest - t, gl / below, gl / slopes  # of log g', by what is below and above in its fraction
    higher = (gy * h).div_(below)  # of the height within the bin
    lowers = torch.add(higher * risen, lower, alpha=2)
    middling = lowers * middle
    gt = torch.addcmul(d1 * t, d0, rest, value=-1).addcmul_(s, turn).mul_(upper).addcmul_(bend * turn, lower, value=-1)
    gt = (gy * slope).addcdiv_(gt, w, value=2)
    gs = (higher * t_squared).sub_(lowers).add_(torch.addcmul(middling, upper, middle), alpha=2)
    gs = gs.addcdiv_(gl, s, value=2).div_(w)
    of_slopes = torch.stack((
        (upper * rest_squared).addcmul_(higher, middle).sub_(middling),
        (upper * t_squared).sub_(middling),
    ), 1).mul_(u).mul_(4).flatten(1)  # fmt: skip
    # of where the bin begins, and of how large it is, on either axis: both are sums of shares
    gx = -gt
    begins = torch.stack((gx, gy), 1)
    size = torch.stack(((gx * t).addcmul_(gs, s, value=-1), gs.addcmul_(gy, risen)), 1).mul_(room)
    out = gy.new_empty(n, law.size, rows)
    of_shares = out[:, : 2 * bins].unflatten(1, (2, bins))
    if rows == 1:  # one b for all rows
        both = torch.cat((begins.mul_(room), size), 1)
        later, each = gy.new_zeros(n, 4, bins).scatter_add_(2, own.expand(-1, 4, -1), both).unsqueeze(3).split(2, 1)
        each = each + later.sum(2, keepdim=True) - later.cumsum(2)
        torch.mul(each - (each * shares).sum(2, keepdim=True), shares, out=of_shares)
    else:
        mean = torch.addcmul(begins * before, size, share)  # over all bins, each counting by its share
        torch.addcmul(-mean[:, :, None], past[:, None], begins[:, :, None], value=room, out=of_shares).mul_(shares)
        of_shares.flatten(2).scatter_(2, own.expand(-1, 2, -1), size.sub_(mean).mul_(share))
    knots = gy.new_zeros(n, (bins + 1) * rows).scatter_add_(1, ends.flatten(1), of_slopes)
    out[:, 2 * bins :] = knots.view(n, bins + 1, rows)[:, 1:-1]
    return direct.add_(gt), out.permute(2, 0, 1)


def _lengths(law: Spline) -> tuple[float, float]:
    """Return the least length of a bin, and the length that all bins divide among themselves."""
    axis = 2 * law.bound
    return axis * law.LEAST, axis * (1 - law.LEAST * law.bins)
