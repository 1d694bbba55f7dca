"""Predictions: the distribution of one column given the others, as a flow has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nicest.flows import Bijection, Flow, Mixture, at_context, members

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

    @torch.no_grad()
    def __init__(self, flow: Flow | Mixture, context: Tensor) -> None:
        if flow.dim != 1:
            raise ValueError(f"expected a flow of one target, got one of {flow.dim}")
        self.flow, self.units, self.prior, self.context = flow.eval(), flow.units, flow.prior, context
        self.weights = flow.weights if isinstance(flow, Mixture) else flow.units.scale.new_ones(1)
        # bijections of every block of contexts and every member: conditioners are evaluated once
        self.blocks = [
            (len(some), [at_context(each.bijection, each.embed(some)) for each in members(flow)])
            for some in context.split(BLOCK)
        ]

    def __len__(self) -> int:
        return len(self.context)

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log-density of targets (N,), or their log-probability where they are discrete."""
        low, high = self._ends(x[:, None])
        y = self._enter(x[:, None], 0.5)
        h, log_det = self._forward(y)
        log_det = log_det + torch.as_tensor(self.units.log_det(y.reshape(-1, 1))).to(y).expand(y.numel()).view_as(y)
        each = self.prior.log_prob(h.reshape(-1, 1)).view_as(h) + log_det
        density = (each + self.weights.to(each).log()[:, None, None]).logsumexp(0)
        density = torch.where(self.units.contains(x[:, None])[:, None], density, -math.inf)
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
        counts = (self.weights * len(self.weights) * count).round().long().tolist()
        found = []
        for each in dict.fromkeys(filter(None, counts)):
            share = ((torch.arange(each, device=self.context.device) + 0.5) / each).to(self.weights)
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
        k = torch.searchsorted(self.weights.cumsum(0)[:-1], chosen, right=True)
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
        return torch.tensordot(self.weights.to(found), found, 1)

    def _latent(self, y: Tensor) -> Tensor:
        """Return the latents of numbers y, (N, L), in each member, (K, N, L).

        They are infinite at the bounds of y, which a bijection only approaches.
        """
        h = self._forward(y)[0]
        low, high = (end[0, 0] for end in self.units.box())
        h = torch.where(y <= low, -math.inf, h)
        return torch.where(y >= torch.nextafter(high, torch.full_like(high, -math.inf)), math.inf, h)

    def _inverse(self, h: Tensor, who: Sequence[int] | None = None) -> Tensor:
        """Return the y of each member, (K, N, L), or of those that are named, whose latent is h, (N, L)."""
        return self._each(h, lambda bijection, rows: bijection.inverse(rows)[0][:, 0], who)

    def _forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents of numbers y, (N, L), and the log-determinants, both (K, N, L)."""
        both = self._each(y, lambda bijection, rows: torch.stack((bijection(rows)[0][:, 0], bijection(rows)[1]), -1))
        return both[..., 0], both[..., 1]

    def _enter(self, x: Tensor, noise: float) -> Tensor:
        """Return targets (N, L) as real numbers y, at this place in their interval."""
        level = torch.full((), noise).to(self.units.scale)
        y: Tensor = self.units.enter(x.reshape(-1, 1), noise=level)
        return y.view(x.shape)

    def _ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends of the intervals of targets (N, L), in y; those of a continuous one are the same."""
        return self._enter(x, 0.0), self._enter(x, 1.0)

    def _leave(self, y: Tensor) -> Tensor:
        x: Tensor = self.units.leave(y.reshape(-1, 1))
        return x.view(y.shape)

    @torch.no_grad()
    def _each(
        self, x: Tensor, function: Callable[[Bijection, Tensor], Tensor], who: Sequence[int] | None = None
    ) -> Tensor:
        """Apply a function of a member's bijection and rows (N · L, 1) to x (N, L): (K, N, L, ...)."""
        parts = []
        for (size, bijections), wide in zip(self.blocks, x.split([size for size, _ in self.blocks]), strict=True):
            chosen = [each for k, each in enumerate(bijections) if who is None or k in who]
            found = []
            for some in wide.split(max(1, ROWS // max(1, size)), 1):
                rows = some.reshape(-1, 1).to(self.units.scale)
                found.append(torch.stack([function(each, rows).unflatten(0, some.shape) for each in chosen]))
            parts.append(torch.cat(found, 2))
        return torch.cat(parts, 1)


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
