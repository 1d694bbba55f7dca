"""Metropolis-adjusted Langevin chains through the hidden cells of rows, given the observed ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nicest.errors import NicestError
from nicest.flows import Flow, Units, moments
from nicest.flows.units import Bounds
from nicest.lowering import lower

ROWS = 2000  # chains that walk at once, whatever the number of rows
NUMBERS = 1 << 25  # in the factors of the rows that walk at once, D² for each
SAMPLES = 4000  # for the Gaussian that the chains are preconditioned by
TAIL = 0.005  # share of those at either end of a column that is drawn in: a flow may have outliers
ACCEPTANCE = 0.574  # what is best for Langevin proposals in many dimensions (Roberts & Rosenthal 1998)
JUMP_EVERY = 5  # iterations of which one proposes a draw from the Gaussian, which may lie at another mode
CELL_AT, CELL_DIM = (1, 3), 100  # of these five, those that may propose one cell, in rows of so many columns at most
ALIKE = 32  # samples that chains of an image may start from
MARGIN = 1e-3  # of the width of a box
HARDLY = 1e-6
SPREAD = 1.2  # of those draws, in standard deviations of the Gaussian


class Point(NamedTuple):
    """Where chains are, (B, chains, ...): y in the flow's space, w as the chains see it.

    `nats` is the log-density of w, up to a constant, `height` that of y.
    """

    w: Tensor
    gradient: Tensor
    nats: Tensor
    y: Tensor
    height: Tensor


class Chains:
    """Chains of a flow: what is the same for all rows, and the moves of those that `place` takes.

    y = the point of the box that belongs to z, and z = mean + w factorᵀ, so that w ~ N(0, I) if the model of the hidden
    given the observed is the Gaussian that has the moments of `samples`, rows like those of the model. Discrete
    columns walk as the real numbers they are dequantised to. With `alike` the chains start at parts of so many samples.
    """

    def __init__(
        self,
        flow: Flow,
        samples: Tensor,
        bounds: Bounds | None,
        generator: torch.Generator,
        chains: int = 1,
        alike: int = 0,
    ) -> None:
        self.flow, self.units, self.generator = lower(flow), flow.units, generator
        self.chains, self.alike = chains, alike
        self.box = Box(*corners(self.units, bounds))
        self.samples = self.enter(samples)
        self.mean, self.precision = gaussian(self.box.enter(self.samples))

    def enter(self, x: Tensor) -> Tensor:
        """Rows of data as real numbers, with noise of the chains' own."""
        return self.units.enter(x, generator=self.generator)

    def at_once(self) -> int:
        """Rows that walk at once, for the memory's sake."""
        return max(1, min(ROWS // self.chains, NUMBERS // self.units.dim**2))

    def walk(self, x: Tensor, hidden: Tensor, *, warmup: int, steps: int) -> Iterator[tuple[int, Point]]:
        """Where the chains of rows are after each iteration, numbered 1 - warmup to steps; only those from 1 on are
        draws. `acceptance` (B,) is the share of Langevin proposals taken since."""
        x = torch.where(hidden, 0, x)
        self.place(self.enter(x), hidden)
        self.cell_at = CELL_AT if self.units.dim <= CELL_DIM else ()
        at, log_step = self.start(), self.first_step()
        taken, langevins = torch.zeros_like(log_step), 0
        by_cell, by_langevin = list[Tensor](), list[Tensor]()  # mean squares of moves in the warm-up
        for i in range(1 - warmup, steps + 1):
            if i == 1:  # single cells only where they get the chains farther
                self.cell_at = self.cell_at if farther(by_cell, by_langevin) else ()
            if i % JUMP_EVERY == 0:
                at, _ = self.jump(at)
                at = self.redraw(at, x) if self.units.discrete else at
            elif i % JUMP_EVERY in self.cell_at:
                before, (at, _) = at, self.cell(at)
                by_cell += [(at.w - before.w).square().mean()] if i <= 0 else []
            else:
                before, (at, chance) = at, self.langevin(at, log_step.exp())
                by_langevin += [(at.w - before.w).square().mean()] if i <= 0 else []
                if i <= 0:  # after the warm-up the step stays as it is, else the chains would not be exact
                    log_step = adapted(log_step, chance, i + warmup)
                else:
                    taken, langevins = taken + chance, langevins + 1
            self.acceptance = (taken / max(langevins, 1)).double()
            yield i, at

    def start(self) -> Point:
        """Every chain at a draw from the Gaussian, or at its mean where the model has no density at the draw; `patched`
        where that is likelier."""
        drawn = self.at(self.noise())
        centre = self.at(torch.zeros_like(drawn.w))
        at = self.choose(drawn.nats.isfinite(), drawn, centre)
        if self.alike:
            patched = self.patched(max(self.alike, self.chains))
            at = self.choose(patched.nats > at.nats, patched, at)
        if not bool(at.nats.isfinite().all()):
            raise NicestError("the log-likelihood of a row is finite nowhere that was tried: is a cell far off?")
        return at

    def patched(self, count: int) -> Point:
        """Every chain at the hidden part of a sample: of the `count` samples whose other part is most like the observed
        one, those that the model finds likeliest with it."""
        seen, known = self.observed[:, 0], (~self.hidden[:, 0]).to(self.samples)
        distance = known @ self.samples.square().T - 2 * (known * seen) @ self.samples.T  # squared, up to a constant
        nearest = distance.topk(min(count, len(self.samples)), largest=False).indices
        w = self.seen_as(self.samples[nearest])
        nats = torch.cat([self.at(each).nats for each in w.split(1, 1)], 1).nan_to_num(-torch.inf)
        best = nats.topk(self.chains, 1).indices
        return self.at(w.gather(1, best[..., None].expand(-1, -1, w.shape[-1])))

    def seen_as(self, y: Tensor) -> Tensor:
        """The w of points y, (B, chains, D)."""
        z = self.box.enter(y.clamp(self.box.lower, self.box.upper))
        w = torch.linalg.solve_triangular(self.factor[:, None], (z - self.centre)[..., None], upper=True)[..., 0]
        return torch.where(self.hidden, w, 0.0)

    def moved(self, x: Tensor, hidden: Tensor, moves: int) -> Tensor:
        """Rows (B, D) whose hidden cells, drawn before, went some moves on; where nothing is finite they stay."""
        y = self.enter(x)
        self.place(y, hidden)
        at = self.at(self.seen_as(y[:, None]))
        at = self.choose(at.nats.isfinite(), at, self.at(self.noise()))
        log_step = self.first_step()
        for i in range(1, moves + 1):
            if i % JUMP_EVERY == 0:
                at, _ = self.jump(at)
            else:
                at, chance = self.langevin(at, log_step.exp())
                log_step = adapted(log_step, chance.mean(), i)  # of all: by its own past a chain would go astray
        good = at.nats.isfinite() & at.y[:, 0].isfinite().all(-1, keepdim=True)
        return torch.where(hidden & good, self.units.leave(at.y[:, 0]).to(x), x)

    def first_step(self) -> Tensor:
        """log ε of every row, (B,), before it is adapted."""
        return -self.hidden[:, 0].sum(1).log().to(self.units.scale) / 6

    def place(self, y: Tensor, hidden: Tensor) -> None:
        """Take rows to walk in, as real numbers; what they hold in the hidden does not count."""
        z = self.box.enter(y)
        mean, factor = conditional(self.mean, self.precision, z.double(), hidden)
        self.centre, self.factor = mean.to(y)[:, None], factor.to(y)
        self.observed, self.hidden = y[:, None], hidden[:, None]

    def at(self, w: Tensor) -> Point:
        """Log-density and gradient at w, (B, chains, D)."""
        w = w.detach().requires_grad_()
        with torch.enable_grad():
            y, log_det = self.box.leave(self.centre + w @ self.factor.mT)
            y = torch.where(self.hidden, y, self.observed)
            height = self.flow.log_density(y.flatten(0, 1)).unflatten(0, y.shape[:2])
            nats = height + torch.where(self.hidden, log_det, 0.0).sum(-1)
            (gradient,) = torch.autograd.grad(nats.sum(), w)
        return Point(w.detach(), gradient, nats.detach(), y.detach(), height.detach())

    def langevin(self, at: Point, step: Tensor) -> tuple[Point, Tensor]:
        """w' = w + ½ ε² ∇ log p(w) + ε ξ, taken with probability min(1, p(w') q(w | w') / p(w) q(w' | w))."""
        noise, step = self.noise(), step[:, None, None]
        to = self.at(at.w + 0.5 * step**2 * at.gradient + step * noise)
        back = (at.w - to.w) / step - 0.5 * step * to.gradient
        return self.metropolis(at, to, to.nats - at.nats + half_square(noise) - half_square(back))

    def jump(self, at: Point) -> tuple[Point, Tensor]:
        """w' ~ N(0, SPREAD² I) wherever w is, taken with probability min(1, p(w') q(w) / p(w) q(w'))."""
        to = self.at(SPREAD * self.noise())
        return self.metropolis(at, to, to.nats - at.nats + half_square(to.w / SPREAD) - half_square(at.w / SPREAD))

    def cell(self, at: Point) -> tuple[Point, Tensor]:
        """One hidden cell z_d' ~ N(μ, SPREAD² σ²) of each chain, taken by the Metropolis rule as a jump is.

        μ and σ are those of the Gaussian given all other cells: μ = z_d - (Λ (z - m))_d / Λ_dd, σ² = 1 / Λ_dd. Where
        the density has steps or ridges, Langevin moves of all cells have to be short; those of one cell need not.
        """
        hidden = self.hidden.expand_as(at.w)
        which = torch.rand(at.w.shape, generator=self.generator, dtype=at.w.dtype, device=at.w.device)
        d = which.masked_fill(~hidden, -1).argmax(-1, keepdim=True)
        z = torch.where(hidden, self.centre + at.w @ self.factor.mT, self.box.enter(self.observed))
        precision = self.precision.to(z)
        tightness, before = precision.diagonal()[d], z.gather(-1, d)
        mean = before - ((z - self.mean.to(z)) @ precision).gather(-1, d) / tightness
        spread = SPREAD * tightness.rsqrt()
        noise = torch.randn(before.shape, generator=self.generator, dtype=z.dtype, device=z.device)
        change = torch.zeros_like(z).scatter(-1, d, mean + spread * noise - before)
        w = torch.linalg.solve_triangular(self.factor[:, None], change[..., None], upper=True)[..., 0]
        to = self.at(at.w + torch.where(hidden, w, 0.0))
        ratio = to.nats - at.nats + half_square(noise) - half_square((before - mean) / spread)
        return self.metropolis(at, to, ratio)

    def redraw(self, at: Point, x: Tensor) -> Point:
        """Draw anew where some observed discrete cells of rows x lie in their steps: that is as hidden as the rest.

        y' ~ U(step), taken with probability min(1, p(y') / p(y)); about two cells of a row at a time.
        """
        few = min(0.5, 2 / max(1, self.units.n_drawn))
        drawn = self.enter(x.repeat_interleave(self.chains, 0)).view_as(at.y)
        uniform = torch.rand(at.y.shape, generator=self.generator, dtype=at.y.dtype, device=at.y.device)
        self.observed = torch.where(uniform < few, drawn, at.y)
        to = self.at(at.w)
        at, _ = self.metropolis(at, to, to.nats - at.nats)
        self.observed = at.y
        return at

    def metropolis(self, at: Point, to: Point, log_ratio: Tensor) -> tuple[Point, Tensor]:
        """Each chain where it goes, and the mean probability of going, (B,); to what is not a number it does not go."""
        chance = log_ratio.clamp(max=0).exp().nan_to_num(0.0)
        uniform = torch.rand(chance.shape, generator=self.generator, dtype=chance.dtype, device=chance.device)
        return self.choose(uniform < chance, to, at), chance.mean(1)

    def choose(self, which: Tensor, one: Point, other: Point) -> Point:
        pairs = zip(one, other, strict=True)
        return Point(*(torch.where(which[..., None] if a.ndim == 3 else which, a, b) for a, b in pairs))

    def noise(self) -> Tensor:
        """N(0, I) in the hidden cells of every chain, 0 in the others."""
        shape = (len(self.hidden), self.chains, self.hidden.shape[-1])
        like = self.observed
        return self.hidden * torch.randn(shape, generator=self.generator, dtype=like.dtype, device=like.device)


def corners(units: Units, bounds: Bounds | None) -> tuple[Tensor, Tensor]:
    """Where y may lie, for bounds in units of the data."""
    try:
        return units.box(bounds)
    except ValueError as error:
        raise NicestError(str(error)) from error


class Box:
    """All real numbers z for the numbers y between bounds (1, D): chains in z never meet a wall.

    y = lower + (upper - lower) sigmoid(z); lower + exp(z) or upper - exp(z), where only that one is finite; else z.
    """

    def __init__(self, lower: Tensor, upper: Tensor) -> None:
        self.lower, self.upper = lower, upper
        self.two = lower.isfinite() & upper.isfinite()
        self.one = lower.isfinite() ^ upper.isfinite()
        self.sign = torch.where(lower.isfinite(), 1.0, -1.0).to(lower)
        self.base = torch.where(lower.isfinite(), lower, torch.where(upper.isfinite(), upper, 0.0))
        self.width = torch.where(self.two, upper - lower, 1.0)

    def leave(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """y and log dy/dz of every number."""
        logistic, log = (torch.where(which, z, 0.0) for which in (self.two, self.one))  # no overflow where not used
        y = torch.where(self.one, self.base + self.sign * log.exp(), z)
        slope = self.width.log() + functional.logsigmoid(logistic) + functional.logsigmoid(-logistic)
        y = torch.where(self.two, self.base + self.width * logistic.sigmoid(), y)
        return y, torch.where(self.two, slope, log)

    def enter(self, y: Tensor) -> Tensor:
        """z; what lies beyond a bound counts as at a margin inside, and what lies at it as hardly inside."""
        share = (y - self.base) * self.sign / self.width
        share = torch.where(share >= 0, share.clamp_min(HARDLY), MARGIN)
        z = torch.where(self.one, share.log(), y)
        share = torch.where(share <= 1, share.clamp_max(1 - HARDLY), 1 - MARGIN)
        return torch.where(self.two, share.logit(), z)


def gaussian(z: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and inverse covariance of rows, in float64; tails are drawn in, rows that are not finite left out."""
    z = z[z.isfinite().all(1)].double()
    if len(z) < 2:
        raise NicestError("the samples are not finite: is the flow trained?")
    ends = torch.stack([z.kthvalue(k, 0).values for k in (1 + int(TAIL * len(z)), len(z) - int(TAIL * len(z)))])
    mean, covariance = moments(z.clamp(*ends))
    ridge = 1e-6 * covariance.diagonal() + torch.finfo(torch.float32).tiny
    return mean, torch.linalg.inv(covariance + ridge.diag())


def conditional(mean: Tensor, precision: Tensor, z: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Means (B, D) and factors M (B, D, D) of the hidden given the observed: their covariance is M Mᵀ = (Λ_HH)⁻¹.

    In the observed the factor is the identity, and z is not looked at in the hidden. One Cholesky for each pattern.
    """
    patterns, which = hidden.unique(dim=0, return_inverse=True)
    h = patterns.to(precision)
    identity = torch.eye(len(mean)).to(precision)
    block = h[:, :, None] * precision * h[:, None, :] + identity * (1 - h)[:, None, :]
    lower = torch.linalg.cholesky(block)
    factor = torch.linalg.solve_triangular(lower.mT, identity.expand_as(block), upper=True)[which]
    pull = hidden * ((~hidden * (z - mean)) @ precision)
    return mean - (factor @ (factor.mT @ pull[..., None]))[..., 0], factor


def farther(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether the later half of some moves went farther in the mean than that of others."""
    if not some or not others:
        return False
    one, other = (torch.stack(each[len(each) // 2 :]).mean() for each in (some, others))
    return bool(one > other)


def adapted(log_step: Tensor, chance: Tensor, i: int) -> Tensor:
    """log ε after the i-th move, which was taken with that chance."""
    return log_step + (chance - ACCEPTANCE) / i**0.6


def half_square(w: Tensor) -> Tensor:
    return 0.5 * w.square().sum(-1)
