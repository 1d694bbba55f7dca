"""Predictions: the distribution of one column given the others, as a flow has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nicest.fast import lower
from nicest.flows import Flow, Mixture
from nicest.flows.repeated import Network, repeated

POINTS = 64  # quantiles of each member, that a mean is taken over
HALVINGS = 40  # of the interval in which a quantile lies
ROWS = 1 << 17  # rows that a flow is given at once
BLOCK = 1 << 12  # rows of conditions for which the results of coupling functions are kept together


class Predictive:
    """p(x | c) of one target x for every row c of conditions, (N, C), in the numbers of the model.

    With one target, the flow is a distribution function of it: F(x | c) = Σ_k w_k P(h_k(x; c)), P that of the prior. So
    densities, probabilities and quantiles are exact; means are those of `points`. An integer, a category or a spike has
    the probability between the ends of its interval.
    """

    def __init__(self, flow: Flow, given: Tensor) -> None:
        prior = flow.conditional_prior
        self.part, self.prior = prior.partition, prior.prior
        if len(self.part.i2) != 1:
            raise ValueError(f"expected a flow of one target, got one of {len(self.part.i2)}")
        self.flow, self.fast, self.given = flow, lower(flow.eval()), given
        self.shares = flow.shares if isinstance(flow, Mixture) else flow.units.scale.new_ones(1)
        # coupling functions read the conditions alone, which stay as they are: each is computed once
        self.blocks: list[tuple[Tensor, dict[Network, Tensor]]] = [(some, {}) for some in given.split(BLOCK)]

    def __len__(self) -> int:
        return len(self.given)

    def log_prob(self, x: Tensor) -> Tensor:
        """The log-density of targets (N,), or their log-probability where they are discrete."""
        low, high = self._ends(x[:, None])
        density = self._each(x[:, None], lambda rows: self.fast.log_prob(rows, noise=False))
        inside = self._between(low, high).clamp_min(torch.finfo(density.dtype).tiny).log()
        return torch.where(high > low, inside, density)[:, 0]

    def cdf(self, x: Tensor) -> Tensor:
        """The probability that a target is x or less, for x (N,) or (N, L)."""
        wide = x if x.ndim == 2 else x[:, None]
        return self._below(self._ends(wide)[1]).reshape(x.shape)

    def quantile(self, share: Tensor) -> Tensor:
        """The targets (N, L) at which `cdf` comes to shares (L,)."""
        return self._leave(self._quantile(share))

    def probability(self, x: Tensor) -> Tensor:
        """The probability of each of L values, (N, L): 0 of a continuous one."""
        return self._between(*self._ends(x.expand(len(self), -1)))

    def points(self, count: int = POINTS) -> Tensor:
        """About K · count targets (N, M) that stand for the distribution: of each member, as many as its weight asks
        for, the medians of parts of equal probability."""
        counts = (self.shares * len(self.shares) * count).round().long().tolist()
        found = []
        for each in dict.fromkeys(filter(None, counts)):
            share = ((torch.arange(each, device=self.given.device) + 0.5) / each).to(self.shares)
            who = [k for k, own in enumerate(counts) if own == each]
            found.append(self._members(share, who).movedim(0, 1).flatten(1))
        return self._leave(torch.cat(found, 1))

    def mean(self) -> Tensor:
        return self.points().mean(1)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws for every row, (N, n)."""
        scale = self.flow.units.scale
        u = torch.rand(len(self), n, generator=generator, dtype=scale.dtype, device=scale.device)
        chosen = torch.rand(u.shape, generator=generator, dtype=scale.dtype, device=scale.device)
        k = torch.searchsorted(self.shares.cumsum(0)[:-1], chosen, right=True)
        eps = torch.finfo(u.dtype).eps
        y = self._inverse(self.prior.quantile(u.clamp(eps / 4, 1 - eps / 2)))
        return self._leave(y.gather(0, k[None])[0])

    def _members(self, share: Tensor, who: Sequence[int] | None = None) -> Tensor:
        """The quantiles of each member at shares (L,), in y, (K, N, L), or of those that are named."""
        return self._inverse(self.prior.quantile(share).expand(len(self), -1), who)

    def _quantile(self, share: Tensor) -> Tensor:
        """The quantiles at shares (L,), in y, (N, L), each between the least and the largest of the members."""
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
        return self._averaged(self.prior.cdf(self._latent(y)))

    def _between(self, low: Tensor, high: Tensor) -> Tensor:
        """The probability between numbers y, (N, L)."""
        return self._averaged(self.prior.between(self._latent(low), self._latent(high)))

    def _averaged(self, found: Tensor) -> Tensor:
        """The mean of numbers of each member, (K, ...), by their weights."""
        return torch.tensordot(self.shares.to(found), found, 1)

    def _latent(self, y: Tensor) -> Tensor:
        """The latent coordinates of numbers y, (N, L), in each member, (K, N, L).

        They are infinite at the bounds of y, to which a chain only comes near.
        """

        def found(rows: Tensor) -> Tensor:
            return torch.cat([self.part.split(chain(rows)[0])[1] for chain in self.fast.chains], 1)

        h = self._each(y, found, stored=False).movedim(-1, 0)
        low, high = (end[0, self.part.i2[0]] for end in self.flow.units.box())
        h = torch.where(y <= low, -math.inf, h)
        return torch.where(y >= torch.nextafter(high, torch.full_like(high, -math.inf)), math.inf, h)

    def _inverse(self, h: Tensor, who: Sequence[int] | None = None) -> Tensor:
        """The y of each member, (K, N, L), or of those that are named, whose latent coordinate is h, (N, L)."""
        chains = [each for k, each in enumerate(self.fast.chains) if who is None or k in who]

        def found(rows: Tensor) -> Tensor:
            return torch.cat([self.part.split(chain.inverse(rows)[0])[1] for chain in chains], 1)

        return self._each(h, found, stored=False).movedim(-1, 0)

    def _ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The ends of the interval of each target (N, L), in y; those of a continuous one are the same."""

        def found(noise: float) -> Tensor:
            level = torch.full((), noise).to(self.flow.units.scale)
            return self._each(x, lambda rows: self._targets(self.flow.units.enter(rows, noise=level)))

        return found(0.0), found(1.0)

    def _targets(self, rows: Tensor) -> Tensor:
        return self.part.split(rows)[1][:, 0]

    def _leave(self, y: Tensor) -> Tensor:
        return self._each(y, lambda rows: self._targets(self.flow.units.leave(rows)), stored=False)

    @torch.no_grad()
    def _each(self, x: Tensor, function: Callable[[Tensor], Tensor], *, stored: bool = True) -> Tensor:
        """A function of rows [c | x], for x (N, L): (N, L, ...). c comes as it is `stored`, or as the chain sees it."""
        parts, sizes = [], [len(given) for given, _ in self.blocks]
        for (given, known), wide in zip(self.blocks, x.split(sizes), strict=True):
            like = given.new_zeros(len(given), 1)
            c = given if stored else self.part.split(self.flow.enter(self.part.merge(given, like), noise=False))[0]
            found = []
            for some in wide.split(max(1, ROWS // max(1, len(given))), 1):
                n = some.shape[1]
                rows = self.part.merge(c.repeat_interleave(n, 0), some.reshape(-1, 1).to(c.dtype))
                with repeated(n, known if n else None):
                    found.append(function(rows).unflatten(0, (len(c), n)))
            parts.append(torch.cat(found, 1))
        return torch.cat(parts)


def interval(level: float) -> tuple[float, float]:
    """The shares below the ends of the central interval of a probability."""
    if not 0 < level < 1:
        raise ValueError(f"expected a probability between 0 and 1, got {level}")
    return (1 - level) / 2, (1 + level) / 2


def crps(points: Tensor, x: Tensor) -> Tensor:
    """The continuous ranked probability score of targets x (N,) under points (N, M) of equal weight, in the unit of x:
    E|X - x| - ½ E|X - X'| (Gneiting & Raftery 2007)."""
    sorted_points, m = points.sort(1).values, points.shape[1]
    weight = (2 * torch.arange(1, m + 1, device=x.device, dtype=points.dtype) - m - 1) / m**2
    return (points - x[:, None]).abs().mean(1) - (sorted_points * weight).sum(1)
