"""Predictions: the distribution of one column given the others, as a flow has it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nicest.flows import Flow
from nicest.flows.shares import repeated
from nicest.lowering import lower

POINTS = 64  # of each member's distribution, that its mean is taken over
HALVINGS = 40  # of the interval in which a quantile lies
ROWS = 1 << 17  # rows that a flow is given at once


class Predictive:
    """p(x | c) of one target x for every row c of conditions, (N, C), in the numbers of the model.

    All of it is exact: with one target, the flow is a distribution function of it, F(x | c) = 1/K Σ_k P(h_k(x; c)), P
    that of the prior. A whole number, a category or a spike has the probability between the ends of its interval.
    """

    def __init__(self, flow: Flow, given: Tensor) -> None:
        prior = flow.conditional_prior
        self.part, self.prior = prior.partition, prior.prior
        if len(self.part.i2) != 1:
            raise ValueError(f"expected a flow of one target, got one of {len(self.part.i2)}")
        self.flow, self.fast, self.given = flow, lower(flow.eval()), given

    def __len__(self) -> int:
        return len(self.given)

    def log_prob(self, x: Tensor) -> Tensor:
        """The log-density of targets (N,), or their log-probability where they are discrete."""
        low, high = self._ends(x[:, None])
        density = self._each(x[:, None], self._log_density)[:, 0]
        inside = (self._below(high) - self._below(low))[:, 0].clamp_min(torch.finfo(density.dtype).tiny).log()
        return torch.where((high > low)[:, 0], inside, density)

    def cdf(self, x: Tensor) -> Tensor:
        """The probability that a target is x or less, for x (N,) or (N, L)."""
        wide = x if x.ndim == 2 else x[:, None]
        return self._below(self._ends(wide)[1]).reshape(x.shape)

    def quantile(self, share: Tensor) -> Tensor:
        """The targets (N, L) below which shares (L,) of the distribution lie."""
        return self._leave(self._quantile(share))

    def probability(self, x: Tensor) -> Tensor:
        """The probability of each of L values, (N, L), of which those that are not discrete have none."""
        low, high = self._ends(x.expand(len(self), -1))
        return (self._below(high) - self._below(low)).clamp_min(0)

    def points(self, count: int = POINTS) -> Tensor:
        """Targets (N, K · count) that stand for the distribution: the middles of parts of equal probability of each
        member's."""
        share = (torch.arange(count, device=self.given.device) + 0.5) / count
        return self._leave(self._members(share.to(self.flow.units.scale)).movedim(0, 1).flatten(1))

    def mean(self) -> Tensor:
        return self.points().mean(1)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws for every row, (N, n)."""
        scale = self.flow.units.scale
        u = torch.rand(len(self), n, generator=generator, dtype=scale.dtype, device=scale.device)
        k = torch.randint(len(self.flow.chains), u.shape, generator=generator, device=scale.device)
        eps = torch.finfo(u.dtype).eps
        y = self._inverse(self.prior.quantile(u.clamp(eps / 4, 1 - eps / 2)))
        return self._leave(y.gather(0, k[None])[0])

    def _members(self, share: Tensor) -> Tensor:
        """Where shares (L,) of each member's distribution end, in y, (K, N, L)."""
        return self._inverse(self.prior.quantile(share).expand(len(self), -1))

    def _quantile(self, share: Tensor) -> Tensor:
        """Where shares (L,) of the distribution end, in y: between the least and the largest of its members."""
        share = share.to(self.flow.units.scale)
        ends = self._members(share)
        low, high = ends.amin(0), ends.amax(0)
        for _ in range(HALVINGS if len(ends) > 1 else 0):
            middle = (low + high) / 2
            above = self._below(middle) >= share
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        return (low + high) / 2

    def _below(self, y: Tensor) -> Tensor:
        """F at numbers y, (N, L)."""

        def share(rows: Tensor) -> Tensor:
            latent = (self.part.split(chain(rows)[0])[1] for chain in self.fast.chains)
            return torch.stack([self.prior.cdf(h) for h in latent]).mean(0)[:, 0]

        return self._each(y, share, stored=False)

    def _inverse(self, h: Tensor) -> Tensor:
        """The y of each member, (K, N, L), whose latent coordinate is h, (N, L)."""

        def found(rows: Tensor) -> Tensor:
            return torch.cat([self.part.split(chain.inverse(rows))[1] for chain in self.fast.chains], 1)

        return self._each(h, found, stored=False).movedim(-1, 0)

    def _log_density(self, rows: Tensor) -> Tensor:
        return self.fast.log_prob(rows, noise=False)

    def _ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Where the interval of each target (N, L) begins and ends, in y; of a continuous one, where it lies, twice."""

        def found(noise: float) -> Tensor:
            level = torch.full((), noise).to(self.flow.units.scale)
            return self._each(x, lambda rows: self._targets(self.flow.units.enter(rows, noise=level)))

        return found(0.0), found(1.0)

    def _targets(self, rows: Tensor) -> Tensor:
        return self.part.split(rows)[1][:, 0]

    def _leave(self, y: Tensor) -> Tensor:
        return self._each(y, lambda rows: self._targets(self.flow.units.leave(rows)), stored=False)

    @torch.no_grad()
    def _each(self, x: Tensor, function: object, *, stored: bool = True) -> Tensor:
        """A function of rows [c | x], for x (N, L), (N, L, ...): c as it is `stored`, or as the chain sees it."""
        parts = []
        for given, some in self._batches(x):
            like = given.new_zeros(len(given), 1)
            c = given if stored else self.part.split(self.flow.enter(self.part.merge(given, like), noise=False))[0]
            n = some.shape[1]
            rows = self.part.merge(c.repeat_interleave(n, 0), some.reshape(-1, 1).to(c.dtype))
            with repeated(n):
                parts.append(function(rows).unflatten(0, (-1, n)))  # type: ignore[operator]
        return torch.cat(parts) if parts else x.new_zeros(x.shape)

    def _batches(self, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        size = max(1, ROWS // max(1, x.shape[1]))
        return zip(self.given.split(size), x.split(size), strict=True)


def interval(level: float) -> tuple[float, float]:
    """The shares below the ends of a central interval that holds so large a part of a distribution."""
    if not 0 < level < 1:
        raise ValueError(f"expected a level between 0 and 1, got {level}")
    return (1 - level) / 2, (1 + level) / 2


def crps(points: Tensor, x: Tensor) -> Tensor:
    """The continuous ranked probability score of targets x (N,) under points (N, M) of equal weight, in the unit of x:
    E|X - x| - ½ E|X - X'| (Gneiting & Raftery 2007)."""
    sorted_points, m = points.sort(1).values, points.shape[1]
    weight = (2 * torch.arange(1, m + 1, device=x.device, dtype=points.dtype) - m - 1) / m**2
    return (points - x[:, None]).abs().mean(1) - (sorted_points * weight).sum(1)
