"""Coupling laws g(a; b): elementwise invertible maps with parameters (NICE §3.2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

Pair = tuple[Tensor, Tensor]


class Law(ABC):
    """An increasing function g(·; b) of one number a, with `size` parameters b.

    Laws act elementwise: a is (B, n) and b is (B, n, size). g(a; 0) = a, so a coupling whose network returns zeros is
    the identity. To add a law, write a frozen dataclass, whose fields are its settings in a recipe, and add it to
    `LAWS`. The zoo then tests it.
    """

    size: int = 1

    @abstractmethod
    def forward(self, a: Tensor, b: Tensor) -> Pair:
        """Return g(a; b) and log dg/da, both of shape (B, n)."""

    @abstractmethod
    def inverse(self, y: Tensor, b: Tensor) -> Pair:
        """Return the a with g(a; b) = y, and log da/dy, both of shape (B, n)."""


@dataclass(frozen=True)
class Additive(Law):
    """g(a; b) = a + b, with unit Jacobian determinant (NICE §3.2, additive coupling layer)."""

    def forward(self, a: Tensor, b: Tensor) -> Pair:
        return a + b[..., 0], a.new_zeros(()).expand_as(a)

    def inverse(self, y: Tensor, b: Tensor) -> Pair:
        return y - b[..., 0], y.new_zeros(()).expand_as(y)


@dataclass(frozen=True)
class Multiplicative(Law):
    """g(a; b) = a exp(l(b)), l(b) = bound · tanh(b / bound); log dg/da = l(b) (NICE §3.2, multiplicative law).

    DIFFERS: the paper asks for a factor b ≠ 0 and leaves it there. Ours is exp(l), never zero, equal to 1 where
    the network gives 0, and |l| < bound keeps one layer from scaling by more than e^±bound: no overflow, no NaN.
    """

    bound: float = 2.0

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise ValueError(f"expected a positive bound, got {self.bound}")

    def forward(self, a: Tensor, b: Tensor) -> Pair:
        log_scale = self.log_scale(b[..., 0])
        return a * log_scale.exp(), log_scale

    def inverse(self, y: Tensor, b: Tensor) -> Pair:
        log_scale = -self.log_scale(b[..., 0])
        return y * log_scale.exp(), log_scale

    def log_scale(self, b: Tensor) -> Tensor:
        """Return l(b)."""
        return self.bound * torch.tanh(b / self.bound)


@dataclass(frozen=True)
class Affine(Law):
    """g(a; b) = a exp(l(b1)) + b2 with b = (b1, b2); log dg/da = l(b1) (NICE §3.2, affine law).

    The factor is bounded as in `Multiplicative`, and for the same reason.
    """

    bound: float = 2.0
    size = 2

    def __post_init__(self) -> None:
        Multiplicative(self.bound)  # validates bound > 0

    def forward(self, a: Tensor, b: Tensor) -> Pair:
        y, log_slope = Multiplicative(self.bound).forward(a, b)
        return y + b[..., 1], log_slope

    def inverse(self, y: Tensor, b: Tensor) -> Pair:
        return Multiplicative(self.bound).inverse(y - b[..., 1], b)


class Bin(NamedTuple):
    """A bin of a spline: its lower left corner (x, y), width w, height h, and the slopes d0, d1 at its ends."""

    x: Tensor
    y: Tensor
    w: Tensor
    h: Tensor
    d0: Tensor
    d1: Tensor

    def rise(self, t: Tensor) -> Tensor:
        """Return the height above y at x + t w (Durkan et al. 2019, eq. 4)."""
        s, middle = self.h / self.w, t * (1 - t)
        return self.h * (s * t.square() + self.d0 * middle) / (s + (self.d0 + self.d1 - 2 * s) * middle)

    def log_slope(self, t: Tensor) -> Tensor:
        """Return the log-slope at x + t w (Durkan et al. 2019, eq. 5)."""
        s, middle = self.h / self.w, t * (1 - t)
        below = s + (self.d0 + self.d1 - 2 * s) * middle
        above = self.d1 * t.square() + 2 * s * middle + self.d0 * (1 - t).square()
        return (s.square() * above / below.square()).log()

    def find(self, rise: Tensor) -> Tensor:
        """Return the t in [0, 1] at which the height above y is `rise`.

        t is the root of a quadratic, computed without cancellation and from the end of the bin with the smaller slope:
        from the other end, digits would be lost.
        """
        s, turned = self.h / self.w, self.d0 > self.d1
        d0 = torch.minimum(self.d0, self.d1)
        rise = torch.where(turned, self.h - rise, rise)
        bend = rise * (self.d0 + self.d1 - 2 * s)
        square, linear, constant = self.h * (s - d0) + bend, self.h * d0 - bend, s * rise
        tiny = torch.finfo(rise.dtype).tiny
        root = (linear.square() + 4 * square * constant).clamp_min(tiny).sqrt()
        falls = linear < 0
        above = torch.where(falls, root - linear, 2 * constant)
        below = torch.where(falls, 2 * square, root + linear)
        t = (above / below.clamp_min(tiny)).clamp(0, 1)
        return torch.where(turned, 1 - t, t)


@dataclass(frozen=True)
class Spline(Law):
    """A rational quadratic in each of `bins` bins of [-bound, bound], the identity outside (Durkan et al. 2019).

    b = (widths, heights, slopes): logits of the fraction of each axis that a bin takes, and the logarithms of the
    slopes at the inner knots.

    DIFFERS: a bin takes at least a thousandth of either axis, and log-slopes are bounded as in `Multiplicative`: for
    all finite a and b there is no overflow, no NaN, and an inverse. The paper's slopes are a softplus with no upper
    bound.
    """

    bins: int = 8
    bound: float = 4.0

    LEAST = 1e-3  # fraction of an axis
    STEEPEST = Multiplicative(7.0)  # slopes of a thousandth to a thousand

    def __post_init__(self) -> None:
        if not 2 <= self.bins <= 256:
            raise ValueError(f"expected 2 to 256 bins, got {self.bins}")
        if not 1e-3 <= self.bound <= 1e6:
            raise ValueError(f"expected a bound from 0.001 to 1000000, got {self.bound}")

    @property
    def size(self) -> int:  # type: ignore[override]
        return 3 * self.bins - 1

    def forward(self, a: Tensor, b: Tensor) -> Pair:
        return self.rise(a, self.knots(b))

    def inverse(self, y: Tensor, b: Tensor) -> Pair:
        return self.find(y, self.knots(b))

    def rise(self, a: Tensor, knots: Pair) -> Pair:
        """Return g and log dg/da at a, given the knots."""
        inner = a.clamp(-self.bound, self.bound)
        found = self._bin(inner, knots, axis=0)
        t = ((inner - found.x) / found.w).clamp(0, 1)
        inside = a.abs() < self.bound
        return torch.where(inside, found.y + found.rise(t), a), torch.where(inside, found.log_slope(t), 0.0)

    def find(self, y: Tensor, knots: Pair) -> Pair:
        """Return the inverse of g and log da/dy at y, given the knots."""
        inner = y.clamp(-self.bound, self.bound)
        found = self._bin(inner, knots, axis=1)
        t = found.find(inner - found.y)
        inside = y.abs() < self.bound
        return torch.where(inside, found.x + found.w * t, y), torch.where(inside, -found.log_slope(t), 0.0)

    def through(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the parameters of n splines with knots near given points.

        Knots that are too close for a bin are moved apart. The slope at a knot is the geometric mean of the slopes of
        the two bins next to it.

        Parameters
        ----------
        x, y : Tensor of shape (n, bins - 1)
            Coordinates of the inner knots, increasing and within the bound.

        Returns
        -------
        Tensor of shape (n, size)
        """

        def sizes(inner: Tensor) -> Tensor:
            ends = pad(pad(inner, (1, 0), value=-self.bound), (0, 1), value=self.bound)
            fraction = (ends.diff(dim=-1) / (2 * self.bound)).clamp_min(2 * self.LEAST)
            return fraction / fraction.sum(-1, keepdim=True)

        widths, heights = sizes(x), sizes(y)
        steep = (heights / widths).log()
        slopes = ((steep[:, 1:] + steep[:, :-1]) / 2 / self.STEEPEST.bound).clamp(-0.9, 0.9).atanh()
        logits = ((each - self.LEAST).clamp_min(1e-2 * self.LEAST).log() for each in (widths, heights))
        return torch.cat((*logits, self.STEEPEST.bound * slopes), -1)

    def knots(self, b: Tensor) -> Pair:
        """Return the knots on both axes, (B, n, 2, bins + 1), and the slopes at them, (B, n, bins + 1)."""
        k, bound = self.bins, self.bound
        logits, slopes = b.split((2 * k, k - 1), -1)
        fractions = self.LEAST + (1 - self.LEAST * k) * logits.unflatten(-1, (2, k)).softmax(-1)
        between = 2 * bound * fractions.cumsum(-1)[..., :-1] - bound
        knots = pad(pad(between, (1, 0), value=-bound), (0, 1), value=bound)
        return knots, pad(self.STEEPEST.log_scale(slopes), (1, 1)).exp()

    def _bin(self, v: Tensor, at: Pair, axis: int) -> Bin:
        """Return the bins that contain v, which is an input (axis 0) or an output (axis 1)."""
        knots, slopes = at
        which = (knots[..., axis, 1:-1] <= v[..., None]).sum(-1, keepdim=True)
        here = which[..., None].expand(*which.shape[:-1], 2, 1)
        (x, y), (x1, y1) = (knots.gather(-1, each)[..., 0].unbind(-1) for each in (here, here + 1))
        return Bin(x, y, x1 - x, y1 - y, *(slopes.gather(-1, each)[..., 0] for each in (which, which + 1)))


@dataclass(frozen=True)
class AffineSpline(Law):
    """g(a; b) = spline(affine(a; b1); b2), b = (b1, b2): `Affine` moves a to where the bins of a `Spline` are.

    `bins` and `bound` are those of the spline, `log_scale` is the bound of the affine law.
    """

    bins: int = 8
    bound: float = 4.0
    log_scale: float = 2.0

    def __post_init__(self) -> None:
        Affine(self.log_scale), Spline(self.bins, self.bound)  # validates the settings

    @property
    def affine(self) -> Affine:
        return Affine(self.log_scale)

    @property
    def spline(self) -> Law:
        return Spline(self.bins, self.bound)

    @property
    def size(self) -> int:  # type: ignore[override]
        return Affine.size + 3 * self.bins - 1

    def forward(self, a: Tensor, b: Tensor) -> Pair:
        inner, log_scale = self.affine.forward(a, b[..., : Affine.size])
        y, log_slope = self.spline.forward(inner, b[..., Affine.size :])
        return y, log_scale + log_slope

    def inverse(self, y: Tensor, b: Tensor) -> Pair:
        inner, log_slope = self.spline.inverse(y, b[..., Affine.size :])
        a, log_scale = self.affine.inverse(inner, b[..., : Affine.size])
        return a, log_slope + log_scale


LAWS: dict[str, type[Law]] = {
    "additive": Additive,
    "multiplicative": Multiplicative,
    "affine": Affine,
    "spline": Spline,
    "affine-spline": AffineSpline,
}
