"""Distributions of single cells: categories, and mixtures of logistics with atoms, bounds and steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

Interval = tuple[float, float]
NODES, WEIGHTS = (torch.from_numpy(each / 2) for each in np.polynomial.legendre.leggauss(16))
NODES = NODES + 0.5
# quadrature of [0, 1], denser at the ends, where quantiles are infinite
NODES, WEIGHTS = NODES**2 * (3 - 2 * NODES), WEIGHTS * 6 * NODES * (1 - NODES)
BISECTIONS = 60
SINGLE = 2.0**-23  # relative error of float32
PARAMETERS = ("log_atoms", "log_weights", "loc", "log_scale")  # of Numbers, which differ between rows


def log_mass(low: Tensor, high: Tensor) -> Tensor:
    """Return log(sigmoid(high) - sigmoid(low)) for low < high, without cancellation.

    sigmoid(b) - sigmoid(a) = sigmoid(b) sigmoid(-a) (1 - exp(a - b)).
    """
    gap = (high - low).clamp_min(1e-30)
    return logsigmoid(high) + logsigmoid(-low) + torch.log(-torch.expm1(-gap))


def within(values: Tensor, intervals: Sequence[Interval]) -> Tensor:
    """Return which values lie in one of the closed intervals."""
    inside = torch.zeros_like(values, dtype=torch.bool)
    for low, high in intervals:
        inside = inside | ((values >= low) & (values <= high))
    return inside


@dataclass(frozen=True)
class Numbers:
    """Distributions of numbers: a mixture of logistics on [low, high], plus atoms with probabilities of their own.

    With `step` > 0 the values are multiples of the step, and each has the probability of the interval of one step
    around it. All shapes are (..., n), n columns of the last dimension, or (..., n, A) and (..., n, K).

    Attributes
    ----------
    log_atoms : Tensor of shape (..., n, A)
        Log-probabilities of the atoms.
    log_weights, loc, log_scale : Tensor of shape (..., n, K)
        Components. Their weights and the probabilities of the atoms sum to 1.
    atoms : Tensor of shape (n, A)
        Values of the atoms; NaN where a column has fewer than A.
    low, high, step, log_unit : Tensor of shape (n,)
        Bounds, grid steps (0: a density), and the logarithm of the unit that densities refer to.
    bounded, stepped : bool
        Whether any column has bounds or steps: saves work.
    """

    log_atoms: Tensor
    log_weights: Tensor
    loc: Tensor
    log_scale: Tensor
    atoms: Tensor
    low: Tensor
    high: Tensor
    step: Tensor
    log_unit: Tensor
    bounded: bool
    stepped: bool

    def rows(self, which: Tensor | slice) -> Numbers:
        """Return the distributions of some rows."""
        changes: dict[str, Any] = {name: getattr(self, name)[which] for name in PARAMETERS}
        return replace(self, **changes)

    def exact(self) -> Numbers:
        """Return the distributions in float64 on the CPU."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        changes: dict[str, Any] = {name: value.cpu().double() for name, value in tensors.items()}
        return replace(self, **changes)

    @staticmethod
    def joined(parts: Sequence[Numbers]) -> Numbers:
        """Concatenate the rows of several."""
        changes: dict[str, Any] = {name: torch.cat([getattr(each, name) for each in parts]) for name in PARAMETERS}
        return replace(parts[0], **changes)

    def log_prob(self, x: Tensor) -> Tensor:
        """Return log-densities of values x (..., n); log-probabilities on grids and at atoms."""
        outside = (x < self.low) | (x > self.high)
        x = torch.where(outside, 0.0, x)  # also instead of infinities, whose differences are NaN
        z = self._standard(x)
        each = logsigmoid(z) + logsigmoid(-z) - self.log_scale
        if self.stepped:
            half = self.step[:, None] / 2 * torch.exp(-self.log_scale)
            half = torch.where(self.step[:, None] > 0, half, 1.0)
            each = torch.where(self.step[:, None] > 0, log_mass(z - half, z + half), each)
        if self.bounded:
            each = each - self._log_total()
        smooth = torch.logsumexp(self.log_weights + each, -1) - self.log_unit
        if self.atoms.shape[-1]:
            hits = x[..., None] == self.atoms
            # a finite floor instead of -inf: its gradient is 0, not NaN
            at_atom = torch.logsumexp(torch.where(hits, self.log_atoms, -1e4), -1)
            hit = hits.any(-1)
            # on a grid an atom adds to the probability that its grid point has anyway
            both = torch.logaddexp(at_atom, smooth) if self.stepped else at_atom
            smooth = torch.where(hit, torch.where(self.step > 0, both, at_atom), smooth)
        return torch.where(outside, -math.inf, smooth)

    def cdf(self, x: Tensor, *, strict: bool = False) -> Tensor:
        """Return P(X <= x), or with `strict` P(X < x), for x of shape (..., n)."""
        half, count = self.step / 2, x / torch.where(self.step > 0, self.step, 1.0)
        slack = 1e-6 + SINGLE * count.abs()  # of rounding
        last = torch.ceil(count - slack) - 1 if strict else torch.floor(count + slack)
        last = torch.where(self.step > 0, last * self.step, x)
        top = torch.minimum(torch.maximum(last, self.low), self.high) + half
        share = torch.exp(log_mass(self._lowest(), self._standard(top)) - self._log_total())
        share = torch.where((last >= self.low - half)[..., None], share, 0.0)
        total = (torch.exp(self.log_weights) * share).sum(-1)
        end = (last + half)[..., None]
        below = self.atoms < end if strict else self.atoms <= end
        return total + torch.where(below, torch.exp(self.log_atoms), 0.0).sum(-1)

    def log_probability(self, intervals: Sequence[Interval]) -> Tensor:
        """Return log P(X in one of the intervals), (..., n)."""
        atoms, components = self._masses(intervals)
        return torch.logsumexp(torch.cat((atoms, components.flatten(-2)), -1), -1)

    def sample(self, generator: torch.Generator | None = None, intervals: Sequence[Interval] = ()) -> Tensor:
        """Draw values (..., n), of those in the intervals if there are any."""
        intervals = intervals or [(-math.inf, math.inf)]
        atoms, components = self._masses(intervals)
        logits = torch.cat((atoms, components.flatten(-2)), -1)
        flat = torch.softmax(logits, -1).flatten(0, -2)
        choice = torch.multinomial(flat, 1, generator=generator).view(logits.shape[:-1])[..., None]
        n_atoms, n_parts = atoms.shape[-1], len(intervals)
        part = (choice - n_atoms).clamp_min(0)
        loc, log_scale = (each.gather(-1, part // n_parts)[..., 0] for each in (self.loc, self.log_scale))
        ends = torch.stack([torch.stack(self._clipped(each), -1) for each in intervals], -2)  # (n, parts, 2)
        ends = ends.expand(*loc.shape, n_parts, 2).gather(-2, (part % n_parts)[..., None].expand(*part.shape, 2))[
            ..., 0, :
        ]
        half = self.step / 2
        low, high = ((end - loc) * torch.exp(-log_scale) for end in (ends[..., 0] - half, ends[..., 1] + half))
        share = torch.rand(loc.shape, generator=generator, dtype=loc.dtype, device=loc.device)
        drawn = loc + truncated_quantile(low, high, share) * torch.exp(log_scale)
        drawn = torch.minimum(torch.maximum(self._rounded(drawn), ends[..., 0]), ends[..., 1])
        if n_atoms:
            atom = self.atoms.expand(*loc.shape, n_atoms).gather(-1, choice.clamp_max(n_atoms - 1))[..., 0]
            drawn = torch.where(choice[..., 0] < n_atoms, atom, drawn)
        return drawn

    def quantile(self, share: Tensor) -> Tensor:
        """Return the smallest x with P(X <= x) >= share, for shares of shape (..., n)."""
        atoms = torch.where(self.atoms.isnan(), self.loc[..., :1], self.atoms)
        nodes = torch.cat((self._nodes().flatten(-2), atoms), -1)
        low, high = nodes.min(-1).values, nodes.max(-1).values
        width = high - low
        low, high = low - 50 * width - 1, high + 50 * width + 1
        low, high = torch.maximum(low, self.low - self.step), torch.minimum(high, self.high + self.step)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            below = self.cdf(middle) < share
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        found = self._rounded(high)
        if self.atoms.shape[-1]:
            gap = (found[..., None] - self.atoms).abs().nan_to_num(math.inf)
            near = gap.min(-1)
            snapped = self.atoms.expand(*gap.shape).gather(-1, near.indices[..., None])[..., 0]
            found = torch.where(near.values <= 1e-6 * (1 + found.abs()), snapped, found)
        return found

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return means and variances, (..., n)."""
        nodes, weights, step = self._nodes(), WEIGHTS.to(self.loc), self.step[:, None]
        narrow = step > 3 * torch.exp(self.log_scale)  # rounding to the grid moves the mean of these alone
        rounded = self._rounded(nodes.movedim(-3, -1)).movedim(-1, -3)
        nodes = torch.where(narrow[..., None], rounded, nodes)
        first, second = (torch.einsum("...kq,q->...k", nodes**power, weights) for power in (1, 2))
        second = second + torch.where(narrow, 0.0, step**2 / 12)
        atoms, log_atoms = self.atoms.nan_to_num(0.0), self.log_atoms
        mean = (torch.exp(self.log_weights) * first).sum(-1) + (torch.exp(log_atoms) * atoms).sum(-1)
        square = (torch.exp(self.log_weights) * second).sum(-1) + (torch.exp(log_atoms) * atoms**2).sum(-1)
        return mean, (square - mean**2).clamp_min(0.0)

    def crps(self, y: Tensor) -> Tensor:
        """Return the continuous ranked probability score, the integral of (P(X <= t) - 1{t >= y})^2, (..., n)."""
        nodes = self._nodes()[..., :: max(1, self.loc.shape[-1] // 8)].flatten(
            -2
        )  # many components need few nodes each
        points = torch.cat((self._rounded(nodes.mT).mT, y[..., None]), -1)
        if self.atoms.shape[-1]:
            atoms = self.atoms.expand(*y.shape, -1)
            atoms = torch.where(atoms.isnan(), y[..., None], atoms)
            points = torch.cat((points, atoms), -1)
        points = points.sort(-1).values
        right = left = torch.stack([self.cdf(each) for each in points.unbind(-1)], -1)
        if self.stepped or self.atoms.shape[-1]:  # F jumps
            right = torch.stack([self.cdf(each, strict=True) for each in points.unbind(-1)], -1)
        left, right = left[..., :-1], right[..., 1:]
        above = (points[..., :-1] >= y[..., None]).to(left)
        left, right = left - above, right - above
        # Simpson's rule for a linear F: the integral of its square
        return ((points[..., 1:] - points[..., :-1]) * (left**2 + left * right + right**2) / 3).sum(-1)

    def _standard(self, x: Tensor) -> Tensor:
        return (x[..., None] - self.loc) * torch.exp(-self.log_scale)

    def _lowest(self) -> Tensor:
        return self._standard(self.low - self.step / 2)

    def _log_total(self) -> Tensor:
        """Return the log-mass of every component between the bounds, half a step beyond them on a grid."""
        return log_mass(self._lowest(), self._standard(self.high + self.step / 2))

    def _clipped(self, interval: Interval) -> tuple[Tensor, Tensor]:
        """Return the ends of an interval inside the bounds, on grids rounded inwards; low > high if it is empty."""
        unit = torch.where(self.step > 0, self.step, 1.0)
        low, high = (self.low.new_tensor(end) for end in interval)
        inner_low, inner_high = torch.ceil(low / unit - 1e-6) * unit, torch.floor(high / unit + 1e-6) * unit
        low, high = torch.where(self.step > 0, inner_low, low), torch.where(self.step > 0, inner_high, high)
        return torch.maximum(low, self.low), torch.minimum(high, self.high)

    def _masses(self, intervals: Sequence[Interval]) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of atoms (..., n, A) and of components (..., n, K, J) in the intervals."""
        total, half, parts = self._log_total(), self.step / 2, []
        for interval in intervals:
            low, high = self._clipped(interval)
            empty = torch.where(half > 0, high < low - half, high <= low)[..., None]
            mass = log_mass(self._standard(low - half), self._standard(high + half)) - total
            parts.append(torch.where(empty, -math.inf, self.log_weights + mass))
        atoms = torch.where(within(self.atoms, intervals), self.log_atoms, -math.inf)
        return atoms, torch.stack(parts, -1)

    def _nodes(self) -> Tensor:
        """Return quadrature nodes of every component between the bounds, (..., n, K, Q)."""
        half = self.step / 2
        low, high = self._standard(self.low - half)[..., None], self._standard(self.high + half)[..., None]
        nodes = truncated_quantile(low, high, NODES.to(self.loc).expand(*self.loc.shape, -1))
        return self.loc[..., None] + nodes * torch.exp(self.log_scale)[..., None]

    def _rounded(self, x: Tensor) -> Tensor:
        """Return numbers (..., n), those of grids rounded to grid points."""
        return torch.where(self.step > 0, torch.round(x / torch.where(self.step > 0, self.step, 1.0)) * self.step, x)


def truncated_quantile(low: Tensor, high: Tensor, share: Tensor) -> Tensor:
    """Return z with P(low <= Z <= z) = share P(low <= Z <= high), Z a standard logistic.

    Computed from the end that is nearer to the centre, so that intervals far out in a tail keep their digits.
    """
    flip = low + high > 0
    a, b = torch.where(flip, -high, low), torch.where(flip, -low, high)
    share = torch.where(flip, 1 - share, share)
    # log F = log(F(a) + share (F(b) - F(a))), and z = log F - log(1 - F)
    log_f = torch.logaddexp(logsigmoid(a) + torch.log1p(-share), logsigmoid(b) + torch.log(share))
    z = log_f - torch.log(-torch.expm1(log_f.clamp_max(-1e-300)))
    z = torch.minimum(torch.maximum(z, a), b)
    return torch.where(flip, -z, z)


@dataclass(frozen=True)
class Categories:
    """Distributions over categories 0 to C - 1; `log_probs` has shape (..., C)."""

    log_probs: Tensor

    def rows(self, which: Tensor | slice) -> Categories:
        """Return the distributions of some rows."""
        return Categories(self.log_probs[which])

    def exact(self) -> Categories:
        """Return the distributions in float64 on the CPU, normalised anew."""
        return Categories(self.log_probs.cpu().double().log_softmax(-1))

    @staticmethod
    def joined(parts: Sequence[Categories]) -> Categories:
        """Concatenate the rows of several."""
        return Categories(torch.cat([each.log_probs for each in parts]))

    def log_prob(self, x: Tensor) -> Tensor:
        """Return log-probabilities of categories x (...); -inf for a category that is none."""
        count = self.log_probs.shape[-1]
        known = (x >= 0) & (x < count) & (x == x.round())
        index = torch.where(known, x, 0.0).long()[..., None]
        shape = torch.broadcast_shapes(index.shape[:-1], self.log_probs.shape[:-1])
        nats = self.log_probs.expand(*shape, count).gather(-1, index.expand(*shape, 1))[..., 0]
        return torch.where(known, nats, -math.inf)

    def log_probability(self, intervals: Sequence[Interval]) -> Tensor:
        """Return log P(X in one of the intervals), (...)."""
        return torch.logsumexp(self._inside(intervals), -1)

    def sample(self, generator: torch.Generator | None = None, intervals: Sequence[Interval] = ()) -> Tensor:
        """Draw categories (...), of those in the intervals if there are any."""
        logits = self._inside(intervals) if intervals else self.log_probs
        flat = torch.softmax(logits, -1).flatten(0, -2)
        return torch.multinomial(flat, 1, generator=generator).view(logits.shape[:-1]).to(logits)

    def _inside(self, intervals: Sequence[Interval]) -> Tensor:
        codes = torch.arange(self.log_probs.shape[-1], device=self.log_probs.device).to(self.log_probs)
        return torch.where(within(codes, intervals), self.log_probs, -math.inf)
