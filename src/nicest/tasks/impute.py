"""Missing cells of a table: the mode by the ascent of NICE §5.2, and draws by Metropolis-adjusted Langevin chains."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nicest.errors import NicestError
from nicest.flows import Chain, Flow, Rescale, moments
from nicest.tasks.fill import OURS, Ascent, Space, frozen
from nicest.train.engine import Engine

ROWS = 2000  # chains that walk at once, whatever the number of rows
AT_ONCE = 500  # rows with missing cells
NUMBERS = 1 << 25  # in the factors of the rows that walk at once, D² for each
SAMPLES = 4000  # of the flow, for the Gaussian that the chains start from and are preconditioned by
TAIL = 0.005  # share of those at either end of a column that is drawn in: a flow may have outliers
ACCEPTANCE = 0.574  # what is best for Langevin proposals in many dimensions (Roberts & Rosenthal 1998)
JUMP_EVERY = 5  # iterations of which one proposes a draw from the Gaussian, which may lie at another mode
SPREAD = 1.2  # of those draws, in standard deviations of the Gaussian
MIXED = 1.1  # the largest R-hat of chains that agree

Bounds = tuple[Tensor | float, Tensor | float]


@dataclass(frozen=True)
class Imputed:
    """Rows with their hidden cells filled in; observed cells are those of the rows, bit for bit, in every field.

    `mode`, `mean`, `low` and `high` are (N, D), `draws` (draws, N, D): a draw is of all hidden cells of a row at once,
    and the interval from `low` to `high` is of each cell alone. `nats` (N,) is log p of the mode. `acceptance` (N,) is
    the share of Langevin proposals taken after the warm-up; `r_hat` (N,) the worst split R-hat of the row's cells,
    which is near 1 where all parts of all chains agree. Both are 1 in rows without hidden cells.
    """

    mode: Tensor
    mean: Tensor
    low: Tensor
    high: Tensor
    draws: Tensor
    nats: Tensor
    acceptance: Tensor
    r_hat: Tensor

    @property
    def mixed(self) -> Tensor:
        """Whether the chains of a row agree, (N,): where they do not, its draws are not to be trusted."""
        return self.r_hat < MIXED

    @property
    def verdict(self) -> str:
        """One line about the chains."""
        bad = (~self.mixed).nonzero().flatten().tolist()
        if not bad:
            return f"the chains of all {len(self.mixed)} rows mixed"
        named = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        worst = float(self.r_hat.max())
        return f"{len(bad)} of {len(self.mixed)} rows did not mix ({named}; R-hat up to {worst:.2f}): take more steps"


def impute_rows(
    flow: Flow,
    x: Tensor,
    missing: Tensor,
    *,
    draws: int = 400,
    steps: int = 1500,
    warmup: int | None = None,
    chains: int = 4,
    ascent: int = 500,
    interval: float = 0.9,
    bounds: Bounds | None = None,
    seed: int = 0,
    watch: Callable[[float], None] = lambda share: None,
) -> Imputed:
    """Fill in the missing cells of rows of real numbers from p(missing | observed), row by row.

    x (N, D) is not looked at where `missing` (N, D) is true: it may be NaN. Every row has `chains` chains of `steps`
    iterations after the warm-up (a third as many, unless told), of which `draws` states are kept in all; the mode is
    `ascent` steps up the hill from the likeliest of them. What is filled in lies within `bounds`,
    (lower, upper), each one number or one for each column, in units of x; the density is cut off there. Where columns
    hold whole levels, give `flow.continuous()` and rows of its numbers, and take the levels of what comes back.
    """
    _check(flow, x, missing)
    warmup = max(1, steps // 3) if warmup is None else warmup
    if chains > 0 and draws % chains:
        raise NicestError(f"expected as many draws of each of {chains} chains, got {draws} in all: take a multiple")
    if chains < 1 or draws < 4 * chains or steps * chains < draws or warmup < 1:
        got = f"{chains} chains, {draws} draws, {steps} steps, {warmup} of warm-up"
        raise NicestError(f"expected 4 draws or more of each chain, a step or more for each, a warm-up; got {got}")
    if not 0 < interval < 1:
        raise NicestError(f"expected an interval between 0 and 1, such as 0.9, got {interval}")
    generator = torch.Generator(x.device).manual_seed(seed)
    rows = missing.any(1).nonzero().flatten()
    kept = x.expand(draws, -1, -1).clone()
    mode, acceptance, r_hat = x.clone(), *x.new_ones(2, len(x), dtype=torch.float64)
    with frozen(flow):
        walk = Walk(flow, bounds, chains, draws // chains, steps, warmup, generator)
        parts = rows.split(max(1, min(ROWS // chains, NUMBERS // x.shape[1] ** 2))) if len(rows) else ()
        for part, index in enumerate(parts):
            for done in walk.over(x[index], missing[index]):
                watch((part + done) / len(parts))
            hidden = missing[index]
            kept[:, index] = torch.where(hidden, walk.draws.to(x), x[index])
            mode[index] = torch.where(hidden, walk.climb(ascent).to(x), x[index])
            acceptance[index], r_hat[index] = walk.acceptance, walk.r_hat
        nats = walk.space.nats(walk.space.enter(mode))
    ordered = kept.sort(0).values
    low, high = (_quantile(ordered, q) for q in ((1 - interval) / 2, (1 + interval) / 2))
    mean, low, high = (torch.where(missing, each.to(x), x) for each in (kept.double().mean(0), low, high))
    return Imputed(mode, mean, low, high, kept, nats, acceptance, r_hat)


def in_parts(missing: np.ndarray, seed: int | list[int]) -> list[tuple[np.ndarray, int]]:
    """The rows with missing cells, some at once, since all their draws are held in memory; each part has its seed."""
    holed = np.flatnonzero(missing.any(1))
    parts = np.split(holed, range(AT_ONCE, len(holed), AT_ONCE)) if len(holed) else []
    return list(zip(parts, np.random.SeedSequence(seed).generate_state(len(parts)).tolist(), strict=True))


def _check(flow: Flow, x: Tensor, missing: Tensor) -> None:
    dim = flow.prior.dim
    if x.shape != missing.shape or x.shape[1:] != (dim,) or missing.dtype != torch.bool:
        got = f"{tuple(x.shape)} and {tuple(missing.shape)} of {missing.dtype}"
        raise NicestError(f"expected rows (N, {dim}) and a boolean mask of that shape, got {got}")
    if not x.is_floating_point() or flow.continuous() is not flow:
        raise NicestError("expected rows of real numbers and a flow of them; of whole levels, give flow.continuous()")
    bad = ((~x.isfinite()) & ~missing).any(1).nonzero().flatten()
    if len(bad):
        raise NicestError(f"expected a finite number in every observed cell; row {int(bad[0])} has another")


class Point(NamedTuple):
    """Where chains are, (B, chains, ...): y in the flow's space, w as the chains see it.

    `nats` is the log-density of w, up to a constant, `height` that of y.
    """

    w: Tensor
    gradient: Tensor
    nats: Tensor
    y: Tensor
    height: Tensor


class Walk:
    """The chains of a flow: what is the same for all rows, and `over` which walks those of some rows.

    y = the point of the box that belongs to z, and z = mean + w factorᵀ, so that w ~ N(0, I) if the model of the hidden
    given the observed is the Gaussian that has the moments of the flow's own samples.
    """

    def __init__(
        self,
        flow: Flow,
        bounds: Bounds | None,
        chains: int,
        keep: int,
        steps: int,
        warmup: int,
        generator: torch.Generator,
    ) -> None:
        self.space, self.generator = Space(flow), generator
        self.chains, self.steps, self.warmup = chains, steps, warmup
        self.looks = {round((k + 1) * steps / keep) for k in range(keep)}
        self.box = Box(*self.space.box(bounds))
        samples = Engine(self.space.flow).sample(SAMPLES, generator=generator)
        self.mean, self.precision = gaussian(self.box.enter(samples))
        slope = self.box.leave(self.mean.to(self.space.like))[1][0]
        self.unit = self.precision.diagonal().rsqrt().to(slope) * slope.exp()  # of y, given all other columns
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whoever made this flow was warned then
            units = Rescale(0.0, self.unit, self.space.dim).to(self.space.like)
            self.scaled = Flow(Chain(units, self.space.flow.chain), self.space.flow.prior)

    def over(self, x: Tensor, hidden: Tensor) -> Iterator[float]:
        """Walk the chains of rows; yields the share done, and leaves what was found in the attributes below."""
        self.place(x, hidden)
        at, log_step = self.start(), -hidden.sum(1).log().to(self.space.like) / 6
        taken, states, heights = torch.zeros_like(log_step), [], []
        langevins = 0
        for i in range(1 - self.warmup, self.steps + 1):
            if i % JUMP_EVERY == 0:
                at, _ = self.jump(at)
            else:
                at, chance = self.langevin(at, log_step.exp())
                if i <= 0:  # after the warm-up the step stays as it is, else the chains would not be exact
                    log_step = log_step + (chance - ACCEPTANCE) / (i + self.warmup) ** 0.6
                else:
                    taken, langevins = taken + chance, langevins + 1
            if i in self.looks:
                states.append(at.y)
                heights.append(at.height)
            yield (i + self.warmup) / (self.warmup + self.steps)
        kept, height = torch.stack(states, 2), torch.stack(heights, 2).flatten(1)  # (B, chains, keep, ...)
        self.r_hat = torch.where(hidden, split_r_hat(kept.double()), 1.0).amax(-1)
        self.acceptance = (taken / max(langevins, 1)).double()
        flat, each = kept.flatten(1, 2), torch.arange(len(x), device=x.device)
        self.draws = self.space.leave(flat.transpose(0, 1).flatten(0, 1)).unflatten(0, (-1, len(x)))
        self.top = flat[each, height.argmax(1)]

    def place(self, x: Tensor, hidden: Tensor) -> None:
        """Take rows to walk in."""
        y = self.space.enter(torch.where(hidden, 0.0, x))
        z = self.box.enter(y.clamp(self.box.lower, self.box.upper))
        mean, factor = conditional(self.mean, self.precision, z.double(), hidden)
        self.centre, self.factor = mean.to(y)[:, None], factor.to(y)
        self.observed, self.hidden = y[:, None], hidden[:, None]

    def start(self) -> Point:
        """Every chain at a draw from the Gaussian, or at its mean where the model has no density at the draw."""
        drawn = self.at(self.noise())
        centre = self.at(torch.zeros_like(drawn.w))
        at = self.choose(drawn.nats.isfinite(), drawn, centre)
        if not bool(at.nats.isfinite().all()):
            raise NicestError("the log-likelihood of a row is finite nowhere that was tried: is a cell far off?")
        return at

    def at(self, w: Tensor) -> Point:
        """Log-density and gradient at w, (B, chains, D)."""
        w = w.detach().requires_grad_()
        with torch.enable_grad():
            y, log_det = self.box.leave(self.centre + w @ self.factor.mT)
            y = torch.where(self.hidden, y, self.observed)
            height = self.space.flow.log_prob(y.flatten(0, 1)).unflatten(0, y.shape[:2])
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

    def metropolis(self, at: Point, to: Point, log_ratio: Tensor) -> tuple[Point, Tensor]:
        """Each chain where it goes, and the mean probability of going, (B,); to what is not a number it does not go."""
        chance = log_ratio.clamp(max=0).exp().nan_to_num(0.0)
        uniform = torch.rand(chance.shape, generator=self.generator, dtype=chance.dtype, device=chance.device)
        return self.choose(uniform < chance, to, at), chance.mean(1)

    def choose(self, which: Tensor, one: Point, other: Point) -> Point:
        pairs = zip(one, other, strict=True)
        return Point(*(torch.where(which[..., None] if a.ndim == 3 else which, a, b) for a, b in pairs))

    def climb(self, steps: int) -> Tensor:
        """The mode: up the hill from the likeliest draw by the ascent of NICE §5.2, without its noise.

        Steps are of a size for each column; where they led down, the draw stays.
        """
        if not steps:
            return self.space.leave(self.top)
        y, box = self.top, (self.box.lower / self.unit, self.box.upper / self.unit)
        schedule = replace(OURS, steps=steps, noise=0.0)
        ascent = Ascent(self.scaled, y / self.unit, self.hidden[:, 0], box, schedule, self.generator, y / self.unit)
        for _ in range(steps):
            ascent.iteration()
        top = ascent.y.detach() * self.unit
        higher = self.space.nats(top) > self.space.nats(y)
        return self.space.leave(torch.where(higher[:, None], top, y))

    def noise(self) -> Tensor:
        """N(0, I) in the hidden cells of every chain, 0 in the others."""
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
        """y and log dy/dz of every number."""
        logistic, log = (torch.where(which, z, 0.0) for which in (self.two, self.one))  # no overflow where not used
        y = torch.where(self.one, self.base + self.sign * log.exp(), z)
        slope = self.width.log() + functional.logsigmoid(logistic) + functional.logsigmoid(-logistic)
        y = torch.where(self.two, self.base + self.width * logistic.sigmoid(), y)
        return y, torch.where(self.two, slope, log)

    def enter(self, y: Tensor, margin: float = 1e-3) -> Tensor:
        """z; what lies at a bound, or beyond, counts as at a margin inside."""
        share = ((y - self.base) * self.sign / self.width).clamp_min(margin)
        z = torch.where(self.one, share.log(), y)
        return torch.where(self.two, share.clamp_max(1 - margin).logit(), z)


def gaussian(z: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and inverse covariance of rows, in float64; tails are drawn in, rows that are not finite left out."""
    z = z[z.isfinite().all(1)].double()
    if len(z) < 2:
        raise NicestError("the samples of the flow are not finite: is it trained?")
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


def half_square(w: Tensor) -> Tensor:
    return 0.5 * w.square().sum(-1)


def split_r_hat(chains: Tensor) -> Tensor:
    """√(variance of all / mean variance within) of the halves of chains (B, chains, draws, ...) (Gelman et al., BDA3).

    It is 1 where nothing varies, and infinite where halves stand still apart from one another.
    """
    n = chains.shape[2] // 2
    halves = torch.cat((chains[:, :, :n], chains[:, :, -n:]), 1)
    within, between = halves.var(2).mean(1), halves.mean(2).var(1)
    ratio = ((n - 1) / n + between / within).sqrt()
    return torch.where(between == 0, 1.0, ratio)


def _quantile(ordered: Tensor, q: float) -> Tensor:
    """The quantile of n numbers sorted along the first dimension, the k-th being that of k/(n + 1).

    So an interval of draws holds a further draw as often as it says, however few they are.
    """
    place = min(max(q * (len(ordered) + 1) - 1, 0), len(ordered) - 1)
    below = ordered[math.floor(place)]
    return below + (place - math.floor(place)) * (ordered[math.ceil(place)] - below)
