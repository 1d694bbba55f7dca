"""Draw hidden pixels given the observed ones: Markov chains of Langevin moves, jumps and lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nicest.errors import NicestError
from nicest.fast import lower
from nicest.flows import Flow, moments
from nicest.inference.engine import Engine, frozen
from nicest.inference.fill import require_mask

ROWS = 2000  # chains that walk at once, whatever the number of rows
NUMBERS = 1 << 25  # in the factors of the rows that walk at once, D² for each
SAMPLES = 4000  # for the Gaussian that preconditions the chains
TAIL = 0.005  # fraction of the samples at either end of a dimension that is clipped: a flow may have outliers
ACCEPTANCE = 0.574  # the best rate for Langevin proposals in many dimensions (Roberts & Rosenthal 1998)
JUMP_EVERY = 5  # iterations of which one proposes a draw from the Gaussian, which may lie at another mode
LINE_AT, LINE_DIM = (1, 2, 3), 100  # of these five, those that move one coordinate, in rows of at most 100 numbers
STARTS = 4  # draws, of which a chain starts at the likeliest
TRIES = 4  # points on a line that a chain chooses from
ALIKE = 32  # samples whose hidden part a chain may start from
HARDLY = 1e-6
SPREAD = 1.2  # standard deviations of the draws that are proposed, in those of the Gaussian


class Point(NamedTuple):
    """Where chains are, (B, chains, ...): y in the flow's space, w as the chains see it.

    `nats` is the log-density of w, up to a constant, `height` that of y. The gradient is kept where it was computed.
    """

    w: Tensor
    nats: Tensor
    y: Tensor
    height: Tensor
    gradient: Tensor | None = None


class Drawn(NamedTuple):
    """Rows with draws of what was hidden: `states` (looks, chains, N, D), evenly spaced in the chains.

    `acceptance` (N,) is the fraction of Langevin proposals taken after the warm-up, `r_hat` (N,) the worst split R-hat
    of the hidden numbers of a row. Both are 1 in rows where nothing is hidden.
    """

    looks: tuple[int, ...]
    states: Tensor
    acceptance: Tensor
    r_hat: Tensor


def draw(
    flow: Flow,
    x: Tensor,
    hidden: Tensor,
    *,
    steps: int,
    warmup: int,
    keep: int,
    chains: int = 4,
    seed: int = 0,
    watch: Callable[[float], None] = lambda fraction: None,
) -> Drawn:
    """Draw the hidden numbers of rows from p(hidden | observed) by chains.

    Parameters
    ----------
    flow : Flow
    x : Tensor
        (N, D) rows in the data's own space, ignored where they are hidden.
    hidden : Tensor
        (N, D) booleans.
    steps, warmup, keep : int
        Iterations of a chain, those before that adapt its step, and the number of its states that are kept.
    chains, seed : int
        Chains of each row, and the seed of all random numbers.
    watch : callable
        Called with the fraction done.

    Returns
    -------
    Drawn
    """
    require_mask(flow, x, hidden, chains)
    if keep < 4:
        raise NicestError(f"expected 4 draws or more of each chain, got {keep}")
    generator = torch.Generator(x.device).manual_seed(seed)
    looks = tuple(round((k + 1) * steps / keep) for k in range(keep))
    states = x.expand(keep, chains, -1, -1).clone()
    acceptance, r_hat = x.new_ones(2, len(x), dtype=torch.float64)
    rows = hidden.any(1).nonzero().flatten()
    with frozen(flow):
        walk = Chains(flow, Engine(flow).sample(SAMPLES, generator=generator), generator, chains)
        parts = rows.split(walk.at_once()) if len(rows) else ()
        for part, index in enumerate(parts):
            kept = []
            for i, at in walk.walk(x[index], hidden[index], warmup=warmup, steps=steps):
                if i in looks:
                    kept.append(at.y)
                watch((part + (i + warmup) / (steps + warmup)) / len(parts))
            found = torch.stack(kept, 2)  # (B, chains, keep, D)
            values = flow.units.leave(found.flatten(0, 2)).view(found.shape).permute(2, 1, 0, 3)
            states[:, :, index] = torch.where(hidden[index], values.to(x), x[index])
            worst = torch.where(hidden[index], split_r_hat(found.double()), 1.0).amax(-1)
            acceptance[index], r_hat[index] = walk.acceptance, worst
    return Drawn(looks, states, acceptance, r_hat)


class Chains:
    """Markov chains through the hidden numbers of rows of images, given the observed ones.

    y = the point of the box that belongs to z, and z = mean + w factorᵀ, so that w ~ N(0, I) if the model of the hidden
    given the observed is the Gaussian that has the moments of `samples` (n, D), rows like those of the model. Pixels
    walk as the real numbers they are dequantised to.
    """

    def __init__(self, flow: Flow, samples: Tensor, generator: torch.Generator, chains: int = 1) -> None:
        self.units, self.generator, self.chains = flow.units, generator, chains
        self.box = Box(*self.units.box())
        self.samples = self.units.enter(samples, generator=generator)
        self.flow = lower(flow)
        self.mean, self.precision = gaussian(self.box.enter(self.samples))

    def at_once(self) -> int:
        """Return the number of rows that fit in memory together."""
        return max(1, min(ROWS // self.chains, NUMBERS // self.units.dim**2))

    def walk(self, x: Tensor, hidden: Tensor, *, warmup: int, steps: int) -> Iterator[tuple[int, Point]]:
        """Yield where the chains of rows are after each iteration, numbered 1 - warmup to steps.

        Only states from 1 on are draws; `acceptance` (B,) is the fraction of Langevin proposals taken since.
        """
        self.x = torch.where(hidden, 0, x)
        self.place(self.units.enter(self.x, generator=self.generator), hidden)
        self.point, self.langevins = self.start(), 0
        self.log_step = -hidden.sum(1).log().to(self.units.scale) / 6
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
                self.point = self.redraw(self.point)
        elif i % JUMP_EVERY in LINE_AT and self.units.dim <= LINE_DIM:
            self.point = self.line(self.point, self.next_coordinate())
        else:
            self.point, chance = self.langevin(self.point, self.log_step.exp())
            self.langevins += 1
            if i <= 0:  # after the warm-up the step stays as it is, else the chains would not be exact
                self.log_step = self.log_step + (chance - ACCEPTANCE) / self.langevins**0.6
            else:
                self.taken = self.taken + chance

    @property
    def acceptance(self) -> Tensor:
        """The fraction of Langevin proposals that were taken, (B,)."""
        return (self.taken / max(self.langevins, 1)).double()

    def start(self) -> Point:
        """Return each chain's start: the likeliest of a few draws from the Gaussian, its mean, or `patched`.

        A chain that starts far out, where the Gaussian has hardly any density, may never leave.
        """
        drawn = self.at(self.noise())
        for _ in range(STARTS - 1):
            other = self.at(self.noise())
            drawn = self.choose(other.nats.nan_to_num(-torch.inf) > drawn.nats.nan_to_num(-torch.inf), other, drawn)
        centre = self.at(torch.zeros_like(drawn.w))
        at = self.choose(drawn.nats.isfinite(), drawn, centre)
        patched = self.patched(max(ALIKE, self.chains))
        at = self.choose(patched.nats > at.nats, patched, at)
        if not bool(at.nats.isfinite().all()):
            raise NicestError("the log-likelihood of a row is finite nowhere that was tried: is a number far off?")
        return at

    def patched(self, count: int) -> Point:
        """Return each chain at the hidden part of a sample.

        Of the `count` samples whose other part is most like the observed one, these are the likeliest with it.
        """
        seen, known = self.observed[:, 0], (~self.hidden[:, 0]).to(self.samples)
        distance = known @ self.samples.square().T - 2 * (known * seen) @ self.samples.T  # squared, up to a constant
        nearest = distance.topk(min(count, len(self.samples)), largest=False).indices
        z = self.box.enter(self.samples[nearest]) - self.centre
        w = torch.linalg.solve_triangular(self.factor[:, None], z[..., None], upper=True)[..., 0] * self.hidden
        nats = torch.cat([self.at(each).nats for each in w.split(1, 1)], 1).nan_to_num(-torch.inf)
        best = nats.topk(self.chains, 1).indices
        return self.at(w.gather(1, best[..., None].expand(-1, -1, w.shape[-1])))

    def place(self, y: Tensor, hidden: Tensor) -> None:
        """Take rows to walk in, as real numbers, which are ignored where they are hidden."""
        z = self.box.enter(y)
        mean, factor = conditional(self.mean, self.precision, z.double(), hidden)
        self.centre, self.factor = mean.to(y)[:, None], factor.to(y)
        self.observed, self.hidden = y[:, None], hidden[:, None]
        self.order, self.turn = torch.sort(~hidden, dim=1, stable=True).indices, 0  # the hidden come first

    def at(self, w: Tensor) -> Point:
        """Return the points of w, (B, chains, D)."""
        with torch.no_grad():
            return Point(w, *self.density(self.centre + w @ self.factor.mT))

    def steered(self, w: Tensor) -> tuple[Point, Tensor]:
        """Return the points of w, (B, chains, D), and the gradient there, which the points keep too."""
        w = w.detach().requires_grad_()
        with torch.enable_grad():
            found = self.density(self.centre + w @ self.factor.mT)
            (gradient,) = torch.autograd.grad(found[0].sum(), w)
        nats, y, height = (each.detach() for each in found)
        return Point(w.detach(), nats, y, height, gradient), gradient

    def density(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `nats`, y and `height` of z, (B, chains, D) or (B, chains, points, D)."""
        hidden, observed = (each[:, :, None] if z.ndim == 4 else each for each in (self.hidden, self.observed))
        y, log_det = self.box.leave(z)
        y = torch.where(hidden, y, observed)
        height = self.flow.log_density(y.flatten(0, -2)).view(y.shape[:-1])
        return height + torch.where(hidden, log_det, 0.0).sum(-1), y, height

    def langevin(self, at: Point, step: Tensor) -> tuple[Point, Tensor]:
        """Propose w' = w + ½ ε² ∇ log p(w) + ε ξ, taken with probability min(1, p(w') q(w | w') / p(w) q(w' | w))."""
        noise, step = self.noise(), step[:, None, None]
        at, gradient = (at, at.gradient) if at.gradient is not None else self.steered(at.w)
        to, gradient = self.steered(at.w + 0.5 * step**2 * gradient + step * noise)
        back = (at.w - to.w) / step - 0.5 * step * gradient
        return self.metropolis(at, to, to.nats - at.nats + half_square(noise) - half_square(back))

    def jump(self, at: Point) -> tuple[Point, Tensor]:
        """Propose w' ~ N(0, SPREAD² I), taken with probability min(1, p(w') q(w) / p(w) q(w'))."""
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
        direction = self.factor[torch.arange(len(which)), :, which][:, None, None]
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
        """Return a hidden dimension of every row, (B,), each in turn."""
        turn = self.turn % self.hidden[:, 0].sum(1)
        self.turn += 1
        return self.order.gather(1, turn[:, None])[:, 0]

    def redraw(self, at: Point) -> Point:
        """Draw the dequantisation noise of about two observed pixels of each row anew: it is as hidden as the rest.

        y' ~ U(level), taken with probability min(1, p(y') / p(y)).
        """
        drawn = self.units.enter(self.x.repeat_interleave(self.chains, 0), generator=self.generator).view_as(at.y)
        uniform = torch.rand(at.y.shape, generator=self.generator, dtype=at.y.dtype, device=at.y.device)
        self.observed = torch.where(uniform < min(0.5, 2 / self.units.dim), drawn, at.y)
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
        """Return one point where `which` (B, chains), else the other; with a gradient if both have one."""
        pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
        return Point(*(torch.where(which[..., None] if a.ndim == 3 else which, a, b) for a, b in pairs))

    def noise(self) -> Tensor:
        """Draw N(0, I) in the hidden dimensions of every chain; the others are 0."""
        shape = (len(self.hidden), self.chains, self.hidden.shape[-1])
        like = self.observed
        return self.hidden * torch.randn(shape, generator=self.generator, dtype=like.dtype, device=like.device)


class Box:
    """All real numbers z for the numbers y of a box: y = lower + (upper - lower) sigmoid(z), or z if it is infinite."""

    def __init__(self, lower: Tensor, upper: Tensor) -> None:
        self.lower, self.width = lower, upper - lower
        self.finite = bool(self.width.isfinite().all())

    def leave(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return y and log dy/dz of every number."""
        if not self.finite:
            return z, torch.zeros_like(z)
        slope = self.width.log() + functional.logsigmoid(z) + functional.logsigmoid(-z)
        return self.lower + self.width * z.sigmoid(), slope

    def enter(self, y: Tensor) -> Tensor:
        """Return z; a number on the boundary counts as hardly inside."""
        return ((y - self.lower) / self.width).clamp(HARDLY, 1 - HARDLY).logit() if self.finite else y


def gaussian(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and inverse covariance of rows, in float64; tails are clipped, non-finite rows left out."""
    z = z[z.isfinite().all(1)].double()
    if len(z) < 2:
        raise NicestError("the samples are not finite: is the flow trained?")
    ends = torch.stack([z.kthvalue(k, 0).values for k in (1 + int(TAIL * len(z)), len(z) - int(TAIL * len(z)))])
    mean, covariance = moments(z.clamp(*ends))
    ridge = 1e-6 * covariance.diagonal() + torch.finfo(torch.float32).tiny
    return mean, torch.linalg.inv(covariance + ridge.diag())


def conditional(mean: Tensor, precision: Tensor, z: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return means (B, D) and factors M (B, D, D) of the hidden given the observed, of covariance M Mᵀ = (Λ_HH)⁻¹.

    In the observed the factor is the identity, and z is ignored in the hidden. One Cholesky for each pattern.
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
    """Return the inverse of `student_cdf`."""
    u = u.clamp(HARDLY, 1 - HARDLY)
    return (2 * u - 1) / (2 * u * (1 - u)).sqrt()


def log_student(t: Tensor) -> Tensor:
    """Return the log-density of that law, up to a constant."""
    return -1.5 * (2 + t.square()).log()


def gumbel_argmax(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Draw an index of the last dimension with probability ∝ exp(weight)."""
    noise = torch.empty_like(weight).exponential_(generator=generator)
    return (weight - noise.log()).argmax(-1)


def half_square(w: Tensor) -> Tensor:
    return 0.5 * w.square().sum(-1)


def split_r_hat(chains: Tensor) -> Tensor:
    """Return √(variance of all / variance within) of the halves of chains (B, chains, draws, ...).

    It is 1 where nothing varies, and infinite where halves stand still apart from one another (Gelman et al., BDA3).
    """
    n = chains.shape[2] // 2
    halves = torch.cat((chains[:, :, :n], chains[:, :, -n:]), 1)
    within, between = halves.var(2).mean(1), halves.mean(2).var(1)
    ratio = ((n - 1) / n + between / within).sqrt()
    return torch.where(between == 0, 1.0, ratio)
