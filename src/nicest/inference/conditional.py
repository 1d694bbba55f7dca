"""Draws of a flow given ranges of its columns: particles in latent space that close in on them, then chains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nicest.errors import NicestError
from nicest.fast import lower
from nicest.flows import Flow, Mixture, Units, members
from nicest.inference.engine import frozen
from nicest.inference.impute import MIXED, split_r_hat
from nicest.inference.langevin import half_square

Range = tuple[tuple[float, int], tuple[float, int]]  # from one end to the other: see `data.where.End`

BATCH = 1000  # rows that are decoded at once, and chains
POOL = 20 * BATCH  # draws of the model to start from
COMMON = 0.01  # the share of draws in the ranges from which it is cheapest to draw until enough are
KEEP = 0.25  # share of the particles that go on to the next level
EVEN, VERY_EVEN = 0.5, 0.9  # the least effective share of particles that are weighted for all columns, and for one
LEVELS, RAREST = 200, 1e-30
MOVES, WARMUP = 10, 30  # of every particle on each level, and on the last
ACCEPTANCE = 0.4
SELDOM, MEMORY = 0.1, 0.8  # the least share of moves by each kernel; of what is known about it, that each move keeps
SPREAD = 1.1  # of the Gaussian that moves are made by
WIDEST = 1000  # columns of which it has a covariance
SHORTEST, LONGEST = 40, 2560  # moves of the chains
LOOKS, WATCHED = 20, 250  # states of each chain, and chains, that R-hat is computed from


class Particles(NamedTuple):
    """Latent coordinates h (B, D), their y, how far y lies from the ranges, (B,), and the logarithm of the density that
    h is drawn from where it is on the level, (B,)."""

    h: Tensor
    y: Tensor
    off: Tensor
    nats: Tensor

    @property
    def n(self) -> int:
        return len(self.h)

    def pick(self, which: Tensor) -> Particles:
        return Particles(*(each[which] for each in self))


@dataclass
class Kernel:
    """A Gaussian N(m, L Lᵀ) that moves of h are made by: h = m + L w, w' = √(1 - β²) w + β ξ, ξ ~ N(0, I).

    The size β of a step is from 0 to 1, where h' no longer depends on h. `jump` is the mean square of moves so far.
    """

    centre: Tensor
    factor: Tensor
    beta: float
    jump: float = 1.0

    def white(self, h: Tensor) -> Tensor:
        """w of h."""
        return torch.linalg.solve_triangular(self.factor, (h - self.centre).mT, upper=False).mT

    def proposed(self, h: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """h', and log N(w) - log N(w')."""
        w = self.white(h)
        to = math.sqrt(1 - self.beta**2) * w + self.beta * noise
        return self.centre + to @ self.factor.mT, half_square(to) - half_square(w)


class Region:
    """Ranges of columns in the flow's space: a column lies in one of the pieces from `lower` to `upper`, (K, pieces).

    A piece of no width is a number that is given for a continuous column.
    """

    def __init__(self, units: Units, ranges: Mapping[int, Sequence[Range]]) -> None:
        spans = {d: spans_of(units, d, pieces) for d, pieces in ranges.items()}
        self.columns, most = list(spans), max(map(len, spans.values()))
        self.least, self.most = (end[0, self.columns, None] for end in units.box())  # of all y
        self.lower = torch.full((len(ranges), most), torch.inf).to(units.scale)
        self.upper = -self.lower
        for k, pieces in enumerate(spans.values()):
            for i, (low, high) in enumerate(pieces):
                self.lower[k, i], self.upper[k, i] = low.clamp_min(self.least[k, 0]), high.clamp_max(self.most[k, 0])
        self.has_points = bool((self.lower == self.upper).any())
        self.size = torch.ones_like(self.least[:, 0])
        self.reach = torch.zeros_like(self.size)  # how far beyond its pieces a column may lie
        self.fixed = self.reach > 0  # columns for which that will not change any more

    def measure(self, y: Tensor) -> None:
        """Distances will be in units of the spread of rows y."""
        ends = y[:, self.columns].quantile(torch.tensor([0.05, 0.95]).to(y), dim=0)
        self.size = torch.where(ends[1] > ends[0], (ends[1] - ends[0]) / 3.3, 1.0)

    def gaps(self, y: Tensor) -> Tensor:
        """How far rows lie from each piece, (B, K, pieces)."""
        at = y[:, self.columns, None]
        return torch.maximum(self.lower - at, at - self.upper).clamp_min(0)

    def off(self, y: Tensor) -> Tensor:
        """How far rows lie from the ranges, in the column where that is farthest, (B,)."""
        beyond = (self.gaps(y).amin(-1) - torch.where(self.fixed, self.reach, 0.0)).clamp_min(0)
        return (beyond / self.size).amax(1).nan_to_num(torch.inf)

    def moved_in(self, y: Tensor, which: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rows y within reach, taken into the ranges in all or some columns, and the log-slope of that map, (B,).

        What is near to a piece is shrunk onto it, or shifted if the piece has one end; the slope is left out where it
        is 0 for all rows, as the piece is a point.
        """
        piece = self.gaps(y).argmin(-1)[..., None]
        lower, upper = (each.expand(len(y), -1, -1).gather(2, piece)[..., 0] for each in (self.lower, self.upper))
        # pieces are apart: nearer to this one than half way to the next
        between = torch.minimum((self.upper[:, :-1] + self.lower[:, 1:]) / 2, self.most)
        edges = torch.cat((self.least, between, self.most), 1)
        first, last = (edges[:, i:j].expand(len(y), -1, -1).gather(2, piece)[..., 0] for i, j in ((0, -1), (1, None)))
        first, last = torch.maximum(first, lower - self.reach), torch.minimum(last, upper + self.reach)
        at = y[:, self.columns]
        two = lower.isfinite() & upper.isfinite()
        slope = torch.where(two & (last > first), (upper - lower) / (last - first), 1.0)
        from_end = torch.where(lower.isfinite(), lower - first, torch.where(upper.isfinite(), upper - last, 0.0))
        inside = torch.where(two, lower + (at - first) * slope, at + from_end)
        inside = torch.maximum(torch.minimum(inside, upper), lower)  # whatever the rounding
        y, log_slope = y.clone(), torch.where(slope > 0, slope, 1.0).log()
        if which is not None:
            inside, log_slope = torch.where(which, inside, at), torch.where(which, log_slope, 0.0)
        y[:, self.columns] = inside
        return y, log_slope.sum(1)


def spans_of(units: Units, column: int, ranges: Sequence[Range]) -> list[tuple[Tensor, Tensor]]:
    """The first and the last y of every piece of a column, sorted and apart; values of a category follow no line, and
    make a piece with those beside them in y."""
    codes = units.values_of(column)
    if codes is None:
        return [
            (edge(units, column, *low, first=True), edge(units, column, *high, first=False)) for low, high in ranges
        ]
    rows = torch.zeros(len(codes), units.dim, dtype=torch.float64, device=units.scale.device)
    rows[:, column] = codes
    firsts, lasts = (units.enter(rows, noise=torch.full_like(rows, u).to(units.scale))[:, column] for u in (0.0, 1.0))
    spans, before = list[tuple[Tensor, Tensor]](), False
    for i in firsts.argsort().tolist():
        asked = any(low <= (float(codes[i]), 0) <= high for low, high in ranges)
        if asked:
            spans[-1 if before else len(spans) :] = [(spans[-1][0] if before else firsts[i], lasts[i])]
        before = asked
    return spans


def edge(units: Units, column: int, number: float, side: int, *, first: bool) -> Tensor:
    """The first or the last y of a range that ends at a number, just below it or just above it."""
    if math.isinf(number):
        return torch.tensor(number).to(units.scale)
    row = torch.zeros(1, units.dim, dtype=torch.float64, device=units.scale.device)
    row[0, column] = number
    end = float(not first if side == 0 else first)  # which end of its interval, if the number is an atom or a step
    y = units.enter(row, noise=torch.full_like(row, end).to(units.scale))[0, column]
    return torch.nextafter(y, torch.full_like(y, side * torch.inf)) if side else y


class Conditional:
    """p(x | every given column lies in its ranges), by draws.

    Where the ranges are common, `draws` are those draws of the model that lie in them: exact and independent. Otherwise
    particles h of the prior close in on them, level by level (subset simulation, Au & Beck 2001): those nearest to the
    ranges go on, and move by Metropolis steps that leave the prior on the level as it is. So a range may be as rare as
    1e-20.

    Particles need not go all the way, which to a number of a continuous column is infinitely far. A map T, by which
    every column is shrunk or shifted, leads from a neighbourhood W of the ranges R onto R. If y has the density
    p(T(y)) |dT/dy| on W, then T(y) has the density p on R: exactly, however wide W is; a wide one allows long steps.
    A column stops closing in on its range where T changes the density of particles little. Once all have, chains go
    on from them under p(T(y)) |dT/dy|, and T of their states are the draws.

    `share` is the probability of the ranges, None if one is a number. `r_hat` is the worst split R-hat of the columns,
    1 for independent draws.
    """

    particles: Particles

    def __init__(
        self,
        flow: Flow,
        ranges: Mapping[int, Sequence[Range]],
        *,
        seed: int = 0,
        watch: Callable[[float, str], None] = lambda rows, text: None,
    ) -> None:
        if any(getattr(each, "embedding", None) is not None for each in members(flow)):
            raise NicestError("where: the model is conditional: expected one of all columns")
        self.own, self.units, self.watch, self.mixture = flow, flow.units, watch, isinstance(flow, Mixture)
        self.generator = torch.Generator(flow.device).manual_seed(seed)
        self.region = Region(flow.units, ranges)
        spread = (flow.prior.standard_deviation * flow.prior.log_scale.detach().exp()).expand(flow.dim)
        centre, more = flow.prior.loc.detach().expand(flow.dim).to(spread), (0, int(isinstance(flow, Mixture)))
        self.kernels = [Kernel(pad(centre, more), pad(spread, more, value=1.0).diag(), 0.5)]
        self.limit, self.weighted, self.length, self.r_hat = math.inf, False, 0, 1.0
        with frozen(flow), torch.no_grad():
            self.flow = lower(flow)
            pool = self.pool(POOL)
            self.region.measure(pool.y)
            pool = pool._replace(off=self.region.off(pool.y))
            share = float((pool.off == 0).double().mean())
            self.independent = share >= COMMON and not self.region.has_points
            self.share: float | None = share if self.independent else self.close_in(pool)

    def draws(self, n: int) -> Iterator[Tensor]:
        """n rows in the units of the model, in batches."""
        done = 0
        if not self.independent:
            self.particles = self.particles.pick(torch.arange(max(n, WATCHED))[: self.particles.n])
        while done < n:
            with frozen(self.own), torch.no_grad():
                y = self.hits() if self.independent else self.walked(done, n)
                rows = self.units.leave(y)[: n - done]
            done += len(rows)
            self.watch(done, "")
            yield rows

    def hits(self) -> Tensor:
        """Draws of the model that lie in the ranges."""
        drawn = self.pool(BATCH)
        return drawn.y[drawn.off == 0]

    def pool(self, n: int) -> Particles:
        """Draws of the model."""
        parts = [self.at(self.draw(BATCH)) for _ in range(n // BATCH)]
        return Particles(*map(torch.cat, zip(*parts, strict=True)))

    def draw(self, n: int) -> Tensor:
        """Draw n latents."""
        draw = self.own.sample_latent if isinstance(self.own, Mixture) else self.own.prior.rsample
        return draw(n, generator=self.generator)

    def latent_log_prob(self, h: Tensor) -> Tensor:
        """Return the log-density of latents, (B,)."""
        return self.flow.latent_log_prob(h) if self.mixture else self.flow.prior.log_prob(h)

    def at(self, h: Tensor) -> Particles:
        y = self.flow.invert(h) if self.mixture else self.flow.bijection.inverse(h)[0]
        off, nats = self.region.off(y), self.latent_log_prob(h)
        if self.weighted:  # p_H(h) p(T(y)) |dT/dy| / p(y), where it will be asked for
            near = off <= self.limit
            nats = nats.masked_fill(~near, -torch.inf)
            nats[near] += self.log_weight(y[near])
        return Particles(h, y, off, nats)

    def close_in(self, pool: Particles) -> float | None:
        """Take particles level by level to the last one; the probability of the ranges."""
        particles, share = pool, 1.0
        for level in range(LEVELS):
            limit = float(particles.off.kthvalue(int(KEEP * particles.n)).values)
            near = particles.pick(particles.off <= limit)
            share *= near.n / particles.n
            if not limit < self.limit or share < RAREST:
                break
            self.limit = limit
            self.fix_reach(near)
            if bool(self.region.fixed.all()):
                self.limit, self.weighted = 0.0, bool((self.region.reach > 0).any())
                weights = self.weights(near.y)
                self.particles = self.resampled(self.at(near.h), weights)
                for i in range(WARMUP):
                    if i in (0, WARMUP // 2):
                        self.fit(self.particles)
                    self.particles = self.move(self.particles, adapt=True)
                return None if self.region.has_points else share * float(weights.mean())
            self.watch(0, f"level {level + 1}: {share:.1g} of all rows are as near")
            particles = self.resampled(near, torch.ones_like(near.off))
            self.fit(particles)
            for _ in range(MOVES):
                particles = self.move(particles, adapt=True)
        raise NicestError(
            "where: the model has no rows that meet the conditions, or they are too rare to find: relax the conditions"
        )

    def fix_reach(self, near: Particles) -> None:
        """Let columns stay within their reach if T leaves the weights of particles even: all of them, or each alone."""
        region = self.region
        region.reach = torch.where(region.fixed, region.reach, self.limit * region.size)
        each = torch.eye(len(region.fixed), dtype=torch.bool, device=near.y.device)[~region.fixed]
        for which, enough in ((torch.ones_like(region.fixed), EVEN), *((one, VERY_EVEN) for one in each)):
            weights = self.weights(near.y, which)
            if float(weights.sum().square() / weights.square().sum()) >= enough * near.n:
                region.fixed = region.fixed | which

    def weights(self, y: Tensor, which: Tensor | None = None) -> Tensor:
        """p(T(y)) |dT/dy| / p(y), (B,), of a T in all or some columns."""
        return self.log_weight(y, which).double().exp().nan_to_num(0.0, posinf=0.0)

    def log_weight(self, y: Tensor, which: Tensor | None = None) -> Tensor:
        inside, log_slope = self.region.moved_in(y, which)
        before, after = self.flow.log_density(torch.cat((y, inside))).chunk(2)
        return after + log_slope - before

    def resampled(self, particles: Particles, weights: Tensor) -> Particles:
        """As many particles as walk at once, each as often as it weighs."""
        ends, n = weights.cumsum(0) / weights.sum(), BATCH
        start = torch.rand((), generator=self.generator, dtype=ends.dtype, device=ends.device)
        places = torch.searchsorted(ends, (torch.arange(n, device=ends.device) + start) / n).clamp_max(len(ends) - 1)
        return particles.pick(places[torch.randperm(n, generator=self.generator, device=ends.device)])

    def fit(self, particles: Particles) -> None:
        """Make moves by the mean and the covariance of particles, small ones and large ones, beside those by the prior.

        The covariance is shrunk to that of the prior, the more the fewer particles there are for a dimension.
        """
        h, prior = particles.h.double(), self.kernels[0].factor.double()
        if len(prior) <= WIDEST:
            trust = particles.n / (particles.n + 2 * len(prior))
            covariance = trust * h.mT.cov().view_as(prior) + (1 - trust) * prior.square()
            factor, centre = SPREAD * torch.linalg.cholesky(covariance), h.mean(0)
            known = self.kernels[1:] or [Kernel(centre, factor, beta) for beta in (0.5, 1.0)]
            self.kernels[1:] = [replace(k, centre=centre.to(particles.h), factor=factor.to(particles.h)) for k in known]

    def move(self, at: Particles, *, adapt: bool = False) -> Particles:
        """Move every particle by one of the kernels. The move is taken with the probability that leaves the density on
        the level as it is, min(1, p(h') N(w) / p(h) N(w')).

        By the prior's own Gaussian, β must be small where the ranges are rare; by that of the particles it may be
        large, and 1 if it fits, but not in their tails, which are heavier. Each is taken the oftener the farther it
        leads.
        """
        jumps = torch.tensor([kernel.jump for kernel in self.kernels], dtype=torch.float64, device=at.h.device)
        chance = (jumps / jumps.sum()).clamp_min(SELDOM)
        which = torch.multinomial(chance, at.n, replacement=True, generator=self.generator)
        noise = torch.randn(at.h.shape, generator=self.generator, dtype=at.h.dtype, device=at.h.device)
        h, log_ratio = at.h.clone(), -at.nats
        for i, kernel in enumerate(self.kernels):
            some = which == i
            h[some], ratio = kernel.proposed(at.h[some], noise[some])
            log_ratio[some] += ratio
        to = self.at(h)
        chance = (to.nats + log_ratio).clamp(max=0).exp().nan_to_num(0.0)
        uniform = torch.rand(chance.shape, generator=self.generator, dtype=chance.dtype, device=chance.device)
        go = (uniform < chance) & (to.off <= self.limit)
        if adapt:  # after the warm-up all stays as it is, else the chains would not be exact
            self.adapt(which, go, self.kernels[-1].white(to.h) - self.kernels[-1].white(at.h))
        pairs = zip(to, at, strict=True)
        moved = Particles(*(torch.where(go[:, None] if a.ndim == 2 else go, a, b) for a, b in pairs))
        return self.recoded(moved) if self.mixture else moved

    def adapt(self, which: Tensor, go: Tensor, way: Tensor) -> None:
        """Learn from moves by kernels: how long their steps should be, and how far they lead."""
        for i, kernel in enumerate(self.kernels):
            some = which == i
            taken, way_taken = go[some].double(), half_square(way[some]).double()
            if len(taken):
                kernel.jump = MEMORY * kernel.jump + (1 - MEMORY) * float((taken * way_taken).mean())
                if kernel.beta < 1:
                    kernel.beta = min(0.99, kernel.beta * math.exp(float(taken.mean()) - ACCEPTANCE))

    def recoded(self, at: Particles) -> Particles:
        """Particles of a mixture with another code of the same y, by chance: so they go from one flow to another."""
        h = self.flow.infer_latent(at.y, self.generator)
        return at._replace(h=h, nats=at.nats + self.latent_log_prob(h) - self.latent_log_prob(at.h))

    def walked(self, done: int, n: int) -> Tensor:
        """The states of all chains, so far from the last that they hardly depend on them."""
        length, states, rows = self.length // 4 or SHORTEST, list[Tensor](), min(self.particles.n, n - done)
        while True:
            every = length // LOOKS
            for i in range(len(states) * every, length):
                self.particles = self.move(self.particles)
                if not self.length and (i + 1) % every == 0:
                    states.append(self.region.moved_in(self.particles.y[:WATCHED])[0])
                self.watch(done + rows * i / length, f"{length} moves of {self.particles.n} chains")
            if not self.length:
                self.r_hat = float(split_r_hat(torch.stack(states, 1)[None].double()).max())
            if self.length or self.r_hat < MIXED or length >= LONGEST:
                self.length = self.length or length
                return self.region.moved_in(self.particles.y)[0]
            length, states = 2 * length, states[1::2]
