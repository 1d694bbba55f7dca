"""Fill in hidden pixels: the mode by the ascent of NICE §5.2, and draws by Metropolis-adjusted Langevin chains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nicest.errors import NicestError
from nicest.fast import lower
from nicest.flows import Flow
from nicest.inference.engine import Engine, frozen
from nicest.inference.fill import OURS, Ascent, require_mask
from nicest.inference.langevin import SAMPLES, Chains

STEPS = 1000  # of a chain, at most
WARMUP = 100  # steps before those that are enough to adapt in
ROUNDS = 4  # at whose ends chains may stop: at an eighth, a quarter, a half and all of their steps
ENOUGH = 1.02  # the largest R-hat of chains that stop early
MIXED = 1.1  # the largest R-hat of chains that agree


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


def impute_rows(
    flow: Flow,
    x: Tensor,
    missing: Tensor,
    *,
    draws: int = 400,
    steps: int = STEPS,
    warmup: int | None = None,
    rounds: int = ROUNDS,
    chains: int = 4,
    ascent: int = 500,
    alike: int = 0,
    interval: float = 0.9,
    seed: int = 0,
    watch: Callable[[float], None] = lambda share: None,
) -> Imputed:
    """Fill in the missing cells of rows from p(missing | observed), row by row.

    x (N, D) is not looked at where `missing` (N, D) is true: it may be NaN. Every row has `chains` chains of at most
    `steps` iterations after a warm-up, by default an eighth as long, and 100 iterations unless `steps` are few. Rows
    whose chains agree (R-hat below 1.02) stop at an eighth, a quarter or a half of the steps; `rounds` is the number of
    checks, and 1 disables early stopping. `draws` evenly spaced states are kept for each row. The mode is `ascent`
    steps up the hill from the likeliest of them. Chains start at draws from a Gaussian; with `alike`, at parts of
    samples of the flow, chosen among so many that are most like the observed part: better for images, which no Gaussian
    resembles. Discrete dimensions come back in whole steps; their low, high and mean are of those.
    """
    require_mask(flow, x, missing)
    if not x.is_floating_point():
        raise NicestError(f"expected rows of floating-point numbers, got {x.dtype}")
    bad = ((~x.isfinite()) & ~missing).any(1).nonzero().flatten()
    if len(bad):
        raise NicestError(f"expected a finite number in every observed cell; row {int(bad[0])} has another")
    warmup = max(1, steps // 8, min(steps // 3, WARMUP)) if warmup is None else warmup
    if chains > 0 and draws % chains:
        raise NicestError(f"expected draws to be a multiple of the {chains} chains, got {draws}")
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
        walk = Walk(flow, chains, draws // chains, steps, warmup, generator, alike, rounds)
        parts = rows.split(walk.at_once()) if len(rows) else ()
        for part, index in enumerate(parts):
            for done in walk.over(x[index], missing[index]):
                watch((part + done) / len(parts))
            hidden = missing[index]
            kept[:, index] = torch.where(hidden, walk.draws.to(x), x[index])
            mode[index] = torch.where(hidden, walk.climb(ascent).to(x), x[index])
            acceptance[index], r_hat[index] = walk.accepted, walk.r_hat
        with torch.no_grad():
            nats = flow.log_prob(mode, noise=False).double()
    ends = ((1 - interval) / 2, (1 + interval) / 2)  # by "weibull" they hold a further draw as often as they say
    low, high = torch.from_numpy(np.quantile(kept.double().cpu().numpy(), ends, axis=0, method="weibull"))
    mean, low, high = (torch.where(missing, each.to(x), x) for each in (kept.double().mean(0), low, high))
    return Imputed(mode, mean, low, high, kept, nats, acceptance, r_hat)


class Walk(Chains):
    """Chains that keep what they find: `over` walks those of some rows, `climb` goes to their modes."""

    def __init__(
        self,
        flow: Flow,
        chains: int,
        keep: int,
        steps: int,
        warmup: int,
        generator: torch.Generator,
        alike: int = 0,
        rounds: int = 1,
    ) -> None:
        samples = Engine(flow).sample(SAMPLES, generator=generator)
        super().__init__(flow, samples, generator, chains, alike)
        self.exact, self.steps, self.warmup, self.keep = lower(flow), steps, warmup, keep
        lengths = [steps / 2**k for k in range(rounds)]
        self.lengths = sorted(each for each in lengths if each >= keep or each == steps)
        slope = self.box.leave(self.mean.to(self.units.scale))[1][0]
        self.unit = self.precision.diagonal().rsqrt().to(slope) * slope.exp()  # of y, given all other columns

    def over(self, x: Tensor, hidden: Tensor) -> Iterator[float]:
        """Walk the chains of rows; yields the share done, and leaves what was found in the attributes below.

        Rows whose chains agree at the end of a round stop. The others go on to twice the length, of which as many
        states are kept: every second of those so far, and as many again.
        """
        n, dim = x.shape
        like = self.units.scale
        states, heights = like.new_empty(n, self.chains * self.keep, dim), like.new_empty(n, self.chains * self.keep)
        self.r_hat, self.accepted = like.new_ones(2, n, dtype=torch.float64)
        rows = torch.arange(n, device=x.device)
        kept, lengths = list[tuple[Tensor, Tensor]](), list(self.lengths)
        looks = self.looks(lengths[0])
        for i, at in self.walk(x, hidden, warmup=self.warmup, steps=self.steps):
            if i in looks:
                kept.append((at.y, at.height))
            if i == looks[-1]:
                found, height = (torch.stack(each, 2) for each in zip(*kept, strict=True))  # (B, chains, keep, D)
                r_hat = torch.where(self.hidden[:, 0], split_r_hat(found.double()), 1.0).amax(-1)
                last = len(lengths) == 1
                done = (r_hat < ENOUGH) | last
                here = rows[done]
                states[here] = found[done].flatten(1, 2)
                heights[here] = height[done].flatten(1)
                self.r_hat[here], self.accepted[here] = r_hat[done], self.acceptance[done]
                if last or bool(done.all()):
                    break
                self.go_on(~done)
                rows, kept = rows[~done], [(y[~done], height[~done]) for y, height in kept[1::2]]
                looks = self.looks(lengths.pop(0) * 2)
            yield (i + self.warmup) / (self.warmup + self.steps)
        self.masked = hidden
        self.draws = self.units.leave(states.transpose(0, 1).flatten(0, 1)).unflatten(0, (-1, n))
        self.top = states[torch.arange(n, device=x.device), heights.argmax(1)]
        yield 1.0

    def looks(self, length: float) -> list[int]:
        """Return the iterations of chains of a length whose states are kept."""
        return [round((k + 1) * length / self.keep) for k in range(self.keep)]

    def climb(self, steps: int) -> Tensor:
        """Return the mode: the end of the ascent of NICE §5.2, without noise, from the likeliest draw.

        Steps are of a size for each column; where they led down, the draw stays.
        """
        top = self.top
        if steps:
            schedule = replace(OURS, steps=steps, noise=0.0)
            box = (self.box.lower, self.box.upper)
            ascent = Ascent(self.exact, top, self.masked, box, schedule, self.generator, top, self.unit)
            for _ in range(steps):
                ascent.iteration()
            with torch.no_grad():
                higher = self.exact.log_density(ascent.y) > self.exact.log_density(top)
            top = torch.where(higher[:, None], ascent.y, top)
        return self.units.leave(top)


def split_r_hat(chains: Tensor) -> Tensor:
    """Return √(total variance / mean variance within) of the halves of chains (B, chains, draws, ...) (Gelman et al.).

    It is 1 where nothing varies, and infinite where halves stand still apart from one another.
    """
    n = chains.shape[2] // 2
    halves = torch.cat((chains[:, :, :n], chains[:, :, -n:]), 1)
    within, between = halves.var(2).mean(1), halves.mean(2).var(1)
    ratio = ((n - 1) / n + between / within).sqrt()
    return torch.where(between == 0, 1.0, ratio)
