"""Coupling laws g(a; b): what a coupling layer does to the components it changes (NICE §3.2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Law(ABC):
    """A coupling law g(a; b), invertible in a for every b; b holds `size` numbers for each number of a.

    g(a; 0) = a: a coupling whose network gives 0 is the identity. To add a law, write a frozen dataclass, whose
    fields are its settings in a recipe, and one line in `LAWS`; the zoo of the tests then holds it to all this.
    """

    size: int = 1

    @abstractmethod
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """g(a; b) and log |det dg/da|, (B,)."""

    @abstractmethod
    def inverse(self, y: Tensor, b: Tensor) -> Tensor:
        """The a with g(a; b) = y."""

    def from_planes(self, b: Tensor) -> Tensor:
        """b from images (B, size · C, H, W), of an a that is (C, H, W): its numbers stay at their pixel."""
        return b.flatten(1)


@dataclass(frozen=True)
class Additive(Law):
    """g(a; b) = a + b, with unit Jacobian determinant (NICE §3.2, additive coupling layer)."""

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a + b, a.new_zeros(len(a))

    def inverse(self, y: Tensor, b: Tensor) -> Tensor:
        return y - b


@dataclass(frozen=True)
class Multiplicative(Law):
    """g(a; b) = a ⊙ exp(l(b)), l(b) = bound · tanh(b / bound); log det = Σ l(b) (NICE §3.2, multiplicative law).

    DIFFERS: the paper asks for a factor b ≠ 0 and leaves it there. Ours is exp(l), never zero, equal to 1 where
    the network gives 0, and |l| < bound keeps one layer from scaling by more than e^±bound: no overflow, no NaN.
    """

    bound: float = 2.0

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise ValueError(f"expected a positive bound, got {self.bound}")

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        log_scale = self.log_scale(b)
        return a * log_scale.exp(), log_scale.sum(-1)

    def inverse(self, y: Tensor, b: Tensor) -> Tensor:
        return y * torch.exp(-self.log_scale(b))

    def log_scale(self, b: Tensor) -> Tensor:
        return self.bound * torch.tanh(b / self.bound)


@dataclass(frozen=True)
class Affine(Law):
    """g(a; b) = a ⊙ exp(l(b1)) + b2 with b = (b1, b2); log det = Σ l(b1) (NICE §3.2, affine law).

    The factor is bounded as in `Multiplicative`, and for the same reason.
    """

    bound: float = 2.0
    size = 2

    def __post_init__(self) -> None:
        Multiplicative(self.bound)  # which refuses a bound that is not positive

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        b1, b2 = b.chunk(2, dim=-1)
        y, log_det = Multiplicative(self.bound).forward(a, b1)
        return y + b2, log_det

    def inverse(self, y: Tensor, b: Tensor) -> Tensor:
        b1, b2 = b.chunk(2, dim=-1)
        return Multiplicative(self.bound).inverse(y - b2, b1)


class Bin(NamedTuple):
    """The bin of a spline that a number lies in: from (x, y), w wide and h high, with slopes d0 and d1 at its ends."""

    x: Tensor
    y: Tensor
    w: Tensor
    h: Tensor
    d0: Tensor
    d1: Tensor

    def at(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Height above y and log-slope at x + t w (Durkan et al. 2019, eq. 4 and 5)."""
        s, middle = self.h / self.w, t * (1 - t)
        below = s + (self.d0 + self.d1 - 2 * s) * middle
        rise = self.h * (s * t.square() + self.d0 * middle) / below
        slope = s.square() * (self.d1 * t.square() + 2 * s * middle + self.d0 * (1 - t).square()) / below.square()
        return rise, slope.log()

    def find(self, rise: Tensor) -> Tensor:
        """The t in [0, 1] with this height above y, by the root of its quadratic that does not cancel, from that end
        of the bin at which the slope is smaller: from the other one, digits would be lost."""
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
    """g(a; b) rises by a rational quadratic in each of `bins` bins of [-bound, bound], and is a outside (Durkan et al.
    2019, "Neural spline flows"). b = (widths, heights, slopes): shares of the bins on either axis, as logits, and
    the logarithms of the slopes at the knots between them; log det = Σ log g'.

    DIFFERS: a bin has at least a thousandth of either axis, and log-slopes are bounded as in `Multiplicative`: for all
    finite a and b there is no overflow, no NaN, and an inverse. The paper's slopes are a softplus with no upper bound.
    """

    bins: int = 8
    bound: float = 4.0

    LEAST = 1e-3  # share of an axis
    STEEPEST = Multiplicative(7.0)  # slopes of a thousandth to a thousand

    def __post_init__(self) -> None:
        if not 2 <= self.bins <= 256:
            raise ValueError(f"expected 2 to 256 bins, got {self.bins}")
        if not 1e-3 <= self.bound <= 1e6:
            raise ValueError(f"expected a bound from 0.001 to 1000000, got {self.bound}")

    @property
    def size(self) -> int:  # type: ignore[override]
        return 3 * self.bins - 1

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self._rise(a, self._knots(b, a.shape[-1]))

    def inverse(self, y: Tensor, b: Tensor) -> Tensor:
        return self._find(y, self._knots(b, y.shape[-1]))

    def _rise(self, a: Tensor, knots: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inner = a.clamp(-self.bound, self.bound)
        found = self._bin(inner, *knots, axis=0)
        rise, log_slope = found.at(((inner - found.x) / found.w).clamp(0, 1))
        inside = a.abs() < self.bound
        return torch.where(inside, found.y + rise, a), torch.where(inside, log_slope, 0.0).sum(-1)

    def _find(self, y: Tensor, knots: tuple[Tensor, Tensor]) -> Tensor:
        inner = y.clamp(-self.bound, self.bound)
        found = self._bin(inner, *knots, axis=1)
        return torch.where(y.abs() < self.bound, found.x + found.w * found.find(inner - found.y), y)

    def from_planes(self, b: Tensor) -> Tensor:
        return b.unflatten(1, (-1, self.size)).movedim(2, -1).flatten(1)

    def through(self, x: Tensor, y: Tensor) -> Tensor:
        """The b of splines, (n · size), with knots near (x, y), each (n, bins - 1) and rising within the bound.

        Knots that lie too close for a bin are moved apart. The slope at a knot is the mean, by logarithms, of those of
        the bins beside it.
        """

        def sizes(inner: Tensor) -> Tensor:
            ends = pad(pad(inner, (1, 0), value=-self.bound), (0, 1), value=self.bound)
            share = (ends.diff(dim=-1) / (2 * self.bound)).clamp_min(2 * self.LEAST)
            return share / share.sum(-1, keepdim=True)

        widths, heights = sizes(x), sizes(y)
        steep = (heights / widths).log()
        slopes = ((steep[:, 1:] + steep[:, :-1]) / 2 / self.STEEPEST.bound).clamp(-0.9, 0.9).atanh()
        logits = ((each - self.LEAST).clamp_min(1e-2 * self.LEAST).log() for each in (widths, heights))
        return torch.cat((*logits, self.STEEPEST.bound * slopes), -1).flatten()

    def _knots(self, b: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The knots of n splines on both axes, (B, n, 2, bins + 1), and the slopes at them."""
        k, bound = self.bins, self.bound
        shares, slopes = b.unflatten(-1, (n, self.size)).split((2 * k, k - 1), -1)
        shares = self.LEAST + (1 - self.LEAST * k) * shares.unflatten(-1, (2, k)).softmax(-1)
        between = 2 * bound * shares.cumsum(-1)[..., :-1] - bound
        knots = pad(pad(between, (1, 0), value=-bound), (0, 1), value=bound)
        return knots, pad(self.STEEPEST.log_scale(slopes), (1, 1)).exp()

    def _bin(self, v: Tensor, knots: Tensor, slopes: Tensor, axis: int) -> Bin:
        """The bins that v lies in, by their widths (axis 0) or their heights (axis 1)."""
        which = (knots[..., axis, 1:-1] <= v[..., None]).sum(-1, keepdim=True)
        here = which[..., None].expand(*which.shape[:-1], 2, 1)
        (x, y), (x1, y1) = (knots.gather(-1, each)[..., 0].unbind(-1) for each in (here, here + 1))
        return Bin(x, y, x1 - x, y1 - y, *(slopes.gather(-1, each)[..., 0] for each in (which, which + 1)))


@dataclass(frozen=True)
class AffineSpline(Law):
    """g(a; b) = spline(affine(a; b1); b2), b = (b1, b2): `Affine` brings a to where the bins of a `Spline` are.

    `bins` and `bound` are those of the spline, `log_scale` is the bound of the affine law.
    """

    bins: int = 8
    bound: float = 4.0
    log_scale: float = 2.0

    def __post_init__(self) -> None:
        Affine(self.log_scale), Spline(self.bins, self.bound)  # which refuse what cannot be

    @property
    def affine(self) -> Affine:
        return Affine(self.log_scale)

    @property
    def spline(self) -> Law:
        return Spline(self.bins, self.bound)

    @property
    def size(self) -> int:  # type: ignore[override]
        return Affine.size + 3 * self.bins - 1

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        b1, b2 = b.tensor_split((Affine.size * a.shape[-1],), -1)
        inner, log_det = self.affine.forward(a, b1)
        y, log_slope = self.spline.forward(inner, b2)
        return y, log_det + log_slope

    def inverse(self, y: Tensor, b: Tensor) -> Tensor:
        b1, b2 = b.tensor_split((Affine.size * y.shape[-1],), -1)
        return self.affine.inverse(self.spline.inverse(y, b2), b1)

    def from_planes(self, b: Tensor) -> Tensor:
        b1, b2 = b.tensor_split((Affine.size * b.shape[1] // self.size,), 1)
        return torch.cat((self.affine.from_planes(b1), self.spline.from_planes(b2)), 1)


LAWS: dict[str, type[Law]] = {
    "additive": Additive,
    "multiplicative": Multiplicative,
    "affine": Affine,
    "spline": Spline,
    "affine-spline": AffineSpline,
}
