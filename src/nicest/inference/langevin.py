"""Markov chains through the hidden cells of rows, given the observed ones: Langevin moves, jumps, and lines."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nicest.errors import NicestError
from nicest.fast import lower
from nicest.flows import Flow, moments

ROWS = 2000  # chains that walk at once, whatever the number of rows
NUMBERS = 1 << 25  # in the factors of the rows that walk at once, D² for each
SAMPLES = 4000  # for the Gaussian that the chains are preconditioned by
COMPARED, OFF = 256, 0.01  # samples whose log-density must not change by more, in nats, for float32 to be good enough
TAIL = 0.005  # share of those at either end of a column that is drawn in: a flow may have outliers
ACCEPTANCE = 0.574  # what is best for Langevin proposals in many dimensions (Roberts & Rosenthal 1998)
JUMP_EVERY = 5  # iterations of which one proposes a draw from the Gaussian, which may lie at another mode
LINE_AT, LINE_DIM = (1, 2, 3), 100  # of these five, those that move one coordinate, in rows of so many columns at most
STARTS = 4  # draws, of which a chain starts at the likeliest
TRIES = 4  # points on a line that a chain chooses from
ALIKE = 32  # samples that chains of an image may start from
MARGIN = 1e-3  # of the width of a box
HARDLY = 1e-6
SPREAD = 1.2  # of those draws, in standard deviations of the Gaussian


class Point(NamedTuple):
    """Where chains are, (B, chains, ...): y in the flow's space, w as the chains see it.

    `nats` is the log-density of w, up to a constant, `height` that of y. The gradient is there where it was needed.
    """

    w: Tensor
    nats: Tensor
    y: Tensor
    height: Tensor
    gradient: Tensor | None = None

    def of(self, rows: Tensor) -> Point:
        """Return the points of these rows."""
        gradient = None if self.gradient is None else self.gradient[rows]
        return Point(self.w[rows], self.nats[rows], self.y[rows], self.height[rows], gradient)


class Chains:
    """Chains of a flow: what is the same for all rows, and the moves of those that `place` takes.

    y = the point of the box that belongs to z, and z = mean + w factorᵀ, so that w ~ N(0, I) if the model of the hidden
    given the observed is the Gaussian that has the moments of `samples`, rows like those of the model. Discrete
    columns walk as the real numbers they are dequantised to. With `alike` the chains start at parts of so many samples.
    The flow is evaluated in float32 where that is as good; the coordinates keep their own precision.
    """

    def __init__(
        self,
        flow: Flow,
        samples: Tensor,
        generator: torch.Generator,
        chains: int = 1,
        alike: int = 0,
    ) -> None:
        self.units, self.generator = flow.units, generator
        self.chains, self.alike = chains, alike
        self.box = Box(*self.units.box())
        self.samples = self.enter(samples)
        self.flow = single(flow, self.samples[:COMPARED])
        self.mean, self.precision = gaussian(self.box.enter(self.samples))

    def enter(self, x: Tensor) -> Tensor:
        """Rows of data as real numbers, with noise of the chains' own."""
        return self.units.enter(x, generator=self.generator)

    def at_once(self) -> int:
        """Return how many rows fit in memory at once."""
        return max(1, min(ROWS // self.chains, NUMBERS // self.units.dim**2))

    def walk(self, x: Tensor, hidden: Tensor, *, warmup: int, steps: int) -> Iterator[tuple[int, Point]]:
        """Yield the points of the chains after each iteration, numbered 1 - warmup to steps; from 1 on they are draws.

        `acceptance` (B,) is the fraction of Langevin proposals taken since then. In between you may `go_on` with fewer
        rows.
        """
        self.x = torch.where(hidden, 0, x)
        self.place(self.enter(self.x), hidden)
        self.point, self.log_step, self.langevins = self.start(), self.first_step(), 0
        self.taken = torch.zeros_like(self.log_step)
        for i in range(1 - warmup, steps + 1):
            if i == 1:
                self.langevins = 0
            self.iteration(i)
            yield i, self.point

    def iteration(self, i: int) -> None:
        """Move every chain by the i-th kind of move in turn; before the first iteration adapt the Langevin steps."""
        if i % JUMP_EVERY == 0:
            self.point, _ = self.jump(self.point)
            if self.units.discrete:
                self.point = self.redraw(self.point, self.x)
        elif i % JUMP_EVERY in LINE_AT and self.units.dim <= LINE_DIM:
            self.point = self.line(self.point, self.next_coordinate())
        else:
            self.point, chance = self.langevin(self.point, self.log_step.exp())
            self.langevins += 1
            if i <= 0:  # after the warm-up the step stays as it is, else the chains would not be exact
                self.log_step = adapted(self.log_step, chance, self.langevins)
            else:
                self.taken = self.taken + chance

    @property
    def acceptance(self) -> Tensor:
        return (self.taken / max(self.langevins, 1)).double()

    def go_on(self, rows: Tensor) -> None:
        """Walk on with only those rows, (B,) of booleans."""
        self.x, self.point, self.log_step, self.taken = (
            self.x[rows],
            self.point.of(rows),
            self.log_step[rows],
            self.taken[rows],
        )
        for name in ("centre", "factor", "observed", "hidden", "order"):
            setattr(self, name, getattr(self, name)[rows])

    def start(self) -> Point:
        """Start every chain at the likeliest of a few draws from the Gaussian.

        A chain that starts far out, where the Gaussian has hardly any density, may never leave. The start is the mean
        where the model has no density at a draw, and `patched` where that is likelier.
        """
        drawn = self.at(self.noise())
        for _ in range(STARTS - 1):
            other = self.at(self.noise())
            drawn = self.choose(other.nats.nan_to_num(-torch.inf) > drawn.nats.nan_to_num(-torch.inf), other, drawn)
        centre = self.at(torch.zeros_like(drawn.w))
        at = self.choose(drawn.nats.isfinite(), drawn, centre)
        if self.alike:
            patched = self.patched(max(self.alike, self.chains))
            at = self.choose(patched.nats > at.nats, patched, at)
        if not bool(at.nats.isfinite().all()):
            raise NicestError("the log-likelihood of a row is finite nowhere that was tried: is a cell far off?")
        return at

    def patched(self, count: int) -> Point:
        """Start every chain at the hidden part of a sample.

        Of the `count` samples whose other part is most like the observed one, take the likeliest with it.
        """
        seen, known = self.observed[:, 0], (~self.hidden[:, 0]).to(self.samples)
        distance = known @ self.samples.square().T - 2 * (known * seen) @ self.samples.T  # squared, up to a constant
        nearest = distance.topk(min(count, len(self.samples)), largest=False).indices
        w = self.seen_as(self.samples[nearest])
        nats = torch.cat([self.at(each).nats for each in w.split(1, 1)], 1).nan_to_num(-torch.inf)
        best = nats.topk(self.chains, 1).indices
        return self.at(w.gather(1, best[..., None].expand(-1, -1, w.shape[-1])))

    def seen_as(self, y: Tensor) -> Tensor:
        """Return the w of points y, (B, chains, D)."""
        z = self.box.enter(y.clamp(self.box.lower, self.box.upper))
        w = torch.linalg.solve_triangular(self.factor[:, None], (z - self.centre)[..., None], upper=True)[..., 0]
        return torch.where(self.hidden, w, 0.0)

    def first_step(self) -> Tensor:
        """Return log ε of every row, (B,), before it is adapted."""
        return -self.hidden[:, 0].sum(1).log().to(self.units.scale) / 6

    def place(self, y: Tensor, hidden: Tensor) -> None:
        """Take rows to walk in, as real numbers; what they hold in the hidden does not count."""
        z = self.box.enter(y)
        mean, factor = conditional(self.mean, self.precision, z.double(), hidden)
        self.centre, self.factor = mean.to(y)[:, None], factor.to(y)
        self.observed, self.hidden = y[:, None], hidden[:, None]
        self.order, self.turn = torch.sort(~hidden, dim=1, stable=True).indices, 0  # the hidden come first

    def at(self, w: Tensor) -> Point:
        """Return the log-density at w, (B, chains, D), as a point."""
        with torch.no_grad():
            return Point(w, *self.density(self.centre + w @ self.factor.mT))

    def steered(self, w: Tensor) -> tuple[Point, Tensor]:
        """Return the log-density at w, (B, chains, D), as a point with its gradient, and the gradient."""
        w = w.detach().requires_grad_()
        with torch.enable_grad():
            found = self.density(self.centre + w @ self.factor.mT)
            (gradient,) = torch.autograd.grad(found[0].sum(), w)
        nats, y, height = (each.detach() for each in found)
        return Point(w.detach(), nats, y, height, gradient), gradient

    def density(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `nats`, y and `height` of points z, (B, chains, D) or (B, chains, points, D)."""
        hidden, observed = (each[:, :, None] if z.ndim == 4 else each for each in (self.hidden, self.observed))
        y, log_det = self.box.leave(z)
        y = torch.where(hidden, y, observed)
        height = self.flow.log_density(y.flatten(0, -2).to(self.flow.units.scale)).to(y).view(y.shape[:-1])
        return height + torch.where(hidden, log_det, 0.0).sum(-1), y, height

    def langevin(self, at: Point, step: Tensor) -> tuple[Point, Tensor]:
        """Propose w' = w + ½ ε² ∇ log p(w) + ε ξ; accept with probability min(1, p(w') q(w | w') / p(w) q(w' | w))."""
        noise, step = self.noise(), step[:, None, None]
        at, gradient = (at, at.gradient) if at.gradient is not None else self.steered(at.w)
        to, gradient = self.steered(at.w + 0.5 * step**2 * gradient + step * noise)
        back = (at.w - to.w) / step - 0.5 * step * gradient
        return self.metropolis(at, to, to.nats - at.nats + half_square(noise) - half_square(back))

    def jump(self, at: Point) -> tuple[Point, Tensor]:
        """Propose w' ~ N(0, SPREAD² I); accept with probability min(1, p(w') q(w) / p(w) q(w'))."""
        to = self.at(SPREAD * self.noise())
        return self.metropolis(at, to, to.nats - at.nats + half_square(to.w / SPREAD) - half_square(at.w / SPREAD))

    def line(self, at: Point, which: Tensor) -> Point:
        """Move one coordinate w_d of each row's chains, `which` (B,), to one of several points on its line.

        The line is cut into TRIES parts of equal probability under Student's law q with two degrees of freedom. The
        chain stands for the part it is in; in every other part a point is drawn from q. One of these points is chosen
        with probability ∝ p / q. This is a Gibbs move among points of which each part holds one, so p stays as it is.
        Where the density has steps, Langevin moves must be short. These need not, and they need no gradient.
        """
        index = which[:, None, None].expand(*at.w.shape[:2], 1)
        here = at.w.gather(-1, index)
        part = (TRIES * student_cdf(here)).floor().clamp(0, TRIES - 1)
        others = torch.arange(TRIES - 1, device=here.device).expand(*here.shape[:2], -1)
        others = others + (others >= part)
        uniform = torch.rand(others.shape, generator=self.generator, dtype=here.dtype, device=here.device)
        there = student_quantile((others + uniform) / TRIES)
        direction = self.factor.gather(-1, which[:, None, None].expand(-1, self.factor.shape[1], 1))[
            :, None, None, :, 0
        ]
        z = self.centre + at.w @ self.factor.mT
        with torch.no_grad():
            found = self.density(z[:, :, None] + (there - here)[..., None] * direction)
        nats, y, height = (
            torch.cat((old[:, :, None], new), 2) for old, new in zip((at.nats, at.y, at.height), found, strict=True)
        )
        weight = nats - log_student(torch.cat((here, there), -1))
        chosen = gumbel_argmax(weight.nan_to_num(-torch.inf, posinf=-torch.inf), self.generator)[..., None]
        w = at.w.scatter(-1, index, torch.cat((here, there), -1).gather(-1, chosen))
        y = y.gather(2, chosen[..., None].expand(-1, -1, 1, y.shape[-1]))[:, :, 0]
        return Point(w, nats.gather(-1, chosen)[..., 0], y, height.gather(-1, chosen)[..., 0])

    def next_coordinate(self) -> Tensor:
        """Return the next hidden cell of every row, in turn, (B,)."""
        turn = self.turn % self.hidden[:, 0].sum(1)
        self.turn += 1
        return self.order.gather(1, turn[:, None])[:, 0]

    def redraw(self, at: Point, x: Tensor) -> Point:
        """Draw anew where some observed discrete cells of rows x lie in their steps: that is as hidden as the rest.

        y' ~ U(step), taken with probability min(1, p(y') / p(y)); about two cells of a row at a time.
        """
        few = min(0.5, 2 / max(1, int((self.units.step > 0).sum())))
        drawn = self.enter(x.repeat_interleave(self.chains, 0)).view_as(at.y)
        uniform = torch.rand(at.y.shape, generator=self.generator, dtype=at.y.dtype, device=at.y.device)
        self.observed = torch.where(uniform < few, drawn, at.y)
        to = self.at(at.w)
        at, _ = self.metropolis(at, to, to.nats - at.nats)
        self.observed = at.y
        return at

    def metropolis(self, at: Point, to: Point, log_ratio: Tensor) -> tuple[Point, Tensor]:
        """Accept or reject a proposal in each chain; return the points and the mean probability of acceptance, (B,)."""
        chance = log_ratio.clamp(max=0).exp().nan_to_num(0.0)
        uniform = torch.rand(chance.shape, generator=self.generator, dtype=chance.dtype, device=chance.device)
        return self.choose(uniform < chance, to, at), chance.mean(1)

    def choose(self, which: Tensor, one: Point, other: Point) -> Point:
        """Return one point where `which` (B, chains), else the other; with a gradient where both have one."""
        pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
        return Point(*(torch.where(which[..., None] if a.ndim == 3 else which, a, b) for a, b in pairs))

    def noise(self) -> Tensor:
        """Draw N(0, I) in the hidden cells of every chain, 0 in the others."""
        shape = (len(self.hidden), self.chains, self.hidden.shape[-1])
        like = self.observed
        return self.hidden * torch.randn(shape, generator=self.generator, dtype=like.dtype, device=like.device)


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
        """Return y and log dy/dz of every number."""
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


def single(flow: Flow, y: Tensor) -> Flow:
    """Return the flow in its fast form, in float32 if that hardly changes the log-density of points y."""
    exact = lower(flow)
    if flow.units.scale.dtype != torch.float64:
        return exact
    fast = lower(copy.deepcopy(flow).float())
    with torch.no_grad():
        off = (fast.log_density(y.float()).double() - exact.log_density(y)).abs()
    return fast if bool((off < OFF).all()) else exact


def gaussian(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and inverse covariance of rows, in float64; tails are clipped, rows that are not finite left out."""
    z = z[z.isfinite().all(1)].double()
    if len(z) < 2:
        raise NicestError("the samples are not finite: is the flow trained?")
    ends = torch.stack([z.kthvalue(k, 0).values for k in (1 + int(TAIL * len(z)), len(z) - int(TAIL * len(z)))])
    mean, covariance = moments(z.clamp(*ends))
    ridge = 1e-6 * covariance.diagonal() + torch.finfo(torch.float32).tiny
    return mean, torch.linalg.inv(covariance + ridge.diag())


def conditional(mean: Tensor, precision: Tensor, z: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return means (B, D) and factors M (B, D, D) of the hidden given the observed: the covariance is M Mᵀ = (Λ_HH)⁻¹.

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


def student_cdf(t: Tensor) -> Tensor:
    """Return the distribution function of Student's law with two degrees of freedom."""
    return 0.5 * (1 + t / (2 + t.square()).sqrt())


def student_quantile(u: Tensor) -> Tensor:
    """Return the inverse of `student_cdf`, finite at both ends."""
    u = u.clamp(HARDLY, 1 - HARDLY)
    return (2 * u - 1) / (2 * u * (1 - u)).sqrt()


def log_student(t: Tensor) -> Tensor:
    """Return the log-density of Student's law, -3/2 log(2 + t²), up to a constant."""
    return -1.5 * (2 + t.square()).log()


def gumbel_argmax(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Draw an index of the last dimension with probability ∝ exp(weight)."""
    noise = torch.empty_like(weight).exponential_(generator=generator)
    return (weight - noise.log()).argmax(-1)


def adapted(log_step: Tensor, chance: Tensor, i: int) -> Tensor:
    """Return log ε after the i-th move, which was taken with this probability."""
    return log_step + (chance - ACCEPTANCE) / i**0.6


def half_square(w: Tensor) -> Tensor:
    return 0.5 * w.square().sum(-1)
