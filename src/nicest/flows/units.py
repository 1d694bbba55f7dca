"""From stored data to real numbers and back: the data's side of a flow (NICE §5.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributions import constraints

from nicest.flows.linear import mean_and_variance, moments
from nicest.flows.noise import batch_size, select

Noise = bool | Tensor  # draw it or use the middle of a step, or the noise itself


def check_rows(x: Tensor, dim: int) -> None:
    """Raise ValueError unless x is (B, dim)."""
    if x.ndim != 2:
        raise ValueError(f"expected rows (B, {dim}), got shape {tuple(x.shape)}")
    if x.shape[1] != dim:
        raise ValueError(f"expected {dim} features, got {x.shape[1]}")


class Units(nn.Module):
    """y = (x + step ⊙ u - loc) / scale, u ~ U[0, 1): stored data x as real numbers y, which the chain works on.

    A discrete dimension holds multiples of its `step` and is dequantised: u is drawn afresh in every call, so that
    log_prob(x) is a noisy value whose mean over u bounds log P(x) from below (NICE §5.1). The step of a continuous
    dimension is 0. `leave` gives the step that y lies in, exactly: leave(enter(x)) = x, whatever the rounding.

    Make one with `Units.pixels`, `Units.columns` or `Units.continuous`.
    """

    step: Tensor
    loc: Tensor
    scale: Tensor

    def __init__(
        self,
        step: Sequence[float] | Tensor,
        *,
        levels: int = 0,
        interval: tuple[float, float] = (0.0, 1.0),
        standardise: bool = False,
    ) -> None:
        super().__init__()
        steps = step.tolist() if isinstance(step, Tensor) else list(step)
        if not all(each >= 0 for each in steps):
            raise ValueError("every step must be 0 or more")
        self.dim, self.levels, self.interval, self.standardise = len(steps), levels, interval, standardise
        self.discrete = any(each > 0 for each in steps)
        low, high = interval
        width = levels / (high - low) if levels else 1.0
        constants = {
            "step": torch.tensor(steps, dtype=torch.get_default_dtype()),
            "loc": torch.full((self.dim,), -low * width if levels else 0.0),
            "scale": torch.full((self.dim,), width),
        }
        for name, values in constants.items():  # stored only if they are fitted to data
            self.register_buffer(name, values, persistent=standardise)

    @classmethod
    def pixels(cls, dim: int, levels: int = 256, interval: tuple[float, float] = (0.0, 1.0)) -> Units:
        """Make units of grey levels 0..levels-1, dequantised onto an interval."""
        if levels < 2:
            raise ValueError(f"expected at least 2 levels, got {levels}")
        low, high = interval
        if not (low < high and 1e-30 < high - low < 1e30 and max(-low, high) < 1e6 * (high - low)):
            raise ValueError(f"expected an interval from low to high, such as (-1, 1), got {interval}")
        return cls([1.0] * dim, levels=levels, interval=interval)

    @classmethod
    def columns(cls, step: Sequence[float] | Tensor) -> Units:
        """Make units of the columns of a table, standardised by `fit`: multiples of a step, or reals if it is 0."""
        return cls(step, standardise=True)

    @classmethod
    def continuous(cls, dim: int, *, standardise: bool = True) -> Units:
        """Make units of real numbers, standardised by `fit` by default; log-densities stay in the units of the data."""
        return cls([0.0] * dim, standardise=standardise)

    def enter(self, x: Tensor, *, noise: Noise = True, generator: torch.Generator | None = None) -> Tensor:
        """Map stored rows (B, D) to real numbers y.

        `noise` is True to draw the dequantisation noise, False for the middle of a step, or the noise itself in [0, 1).
        """
        check_rows(x, self.dim)
        if not self.discrete:
            return self.place(x)
        stored, x = x, x.to(self.scale.dtype)
        if noise is True:
            shape = (batch_size(len(x)), self.dim)
            noise = select(torch.rand(shape, dtype=x.dtype, device=x.device, generator=generator))
        y = self.place(x + self.step * (0.5 if noise is False else noise))
        # rounding may take y across an edge of its step, which is where `leave` looks for it
        count = (x.detach() / self._unit).round()
        low, high = self.place(count * self._unit), self.place((count + 1) * self._unit)
        inside = torch.maximum(torch.minimum(y, torch.nextafter(high, torch.full_like(high, -math.inf))), low)
        return inside if self.levels else torch.where(self.step > 0, inside, self.place(stored))

    def place(self, x: Tensor) -> Tensor:
        """Map real numbers in the units of the data to y; a step x has its edges at x and x + step."""
        if self.levels or self.standardise:  # a float64 x far from 0 keeps its digits until it is near 0
            x = (x - self.loc) / self.scale
        return x.to(self.scale.dtype)

    def leave(self, y: Tensor) -> Tensor:
        """Map real numbers y to stored rows; discrete dimensions to whole steps, pixels to 0..levels-1."""
        check_rows(y, self.dim)
        x = y * self.scale + self.loc if self.levels or self.standardise else y
        if not self.discrete:
            return x
        unit = self._unit
        count = (x / unit).floor()
        # where rounding took y across the edge of a step, y itself says on which side it lies
        count = count + (self.place((count + 1) * unit) <= y).to(y) - (self.place(count * unit) > y).to(y)
        if self.levels:
            count = count.clamp(0, self.levels - 1)
        return count if self.levels else torch.where(self.step > 0, count * unit, x)

    def terms(self) -> dict[str, Tensor | float]:
        """Return what the change of units adds to the log-likelihood of every row, by name.

        For a discrete dimension it turns the density of y into a probability of x.
        """
        terms: dict[str, Tensor | float] = {}
        if self.levels:
            low, high = self.interval
            terms["dequantise"] = -self.dim * math.log(self.levels)
            if high - low != 1 or low:
                terms["interval"] = self.dim * math.log(high - low)
        elif self.discrete:
            terms["columns"] = self._unit.log().sum()
        if self.standardise:
            terms["standardise"] = -self.scale.log().sum()
        return terms

    def log_det(self, y: Tensor) -> Tensor | float:
        """Return log p(x) - log p(y) of rows y, the same for all."""
        return sum(self.terms().values())

    @property
    def _unit(self) -> Tensor:
        """The step of a discrete dimension, 1 for a continuous one."""
        return torch.where(self.step > 0, self.step, 1.0)

    @property
    def interval_nats(self) -> float:
        """What turns nats of grey levels into nats on the interval, the paper's unit (NICE §5.1); 0 for the rest.

        A level has volume 1 among levels and (high - low)/levels on the interval.
        """
        low, high = self.interval
        return self.dim * math.log(self.levels / (high - low)) if self.levels else 0.0

    @property
    def support(self) -> constraints.Constraint:
        """The values that x can take, as a constraint of `torch.distributions`."""
        if self.levels or not self.discrete:
            each = constraints.integer_interval(0, self.levels - 1) if self.levels else constraints.real
            return constraints.independent(each, 1)
        return InSteps(self.step)

    def contains(self, x: Tensor) -> Tensor:
        """Return which rows x lie in the support, (B,), or one value for all."""
        if not self.discrete or not len(x):  # constraints of torch raise an error without rows
            return x.isfinite().all(-1)
        if self.levels >= 256 and x.dtype == torch.uint8:
            return torch.ones((), dtype=torch.bool, device=x.device)  # every byte is a level
        found: Tensor = self.support.check(x)
        return found

    def box(self) -> tuple[Tensor, Tensor]:
        """Return the lower and upper corner, (1, D) each, of the values of y: the interval of pixels, or infinite."""
        ends = (0, self.levels) if self.levels else (-math.inf, math.inf)
        lower, upper = (self.place(self.scale.new_full((1, self.dim), end)) for end in ends)
        return lower, upper

    def moments(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the exact mean and covariance of y over rows, with the dequantisation noise.

        DIFFERS: the paper whitens one draw of noisy data; the expectation has no draw to overfit, which is worth 6
        nats to a full Gaussian on CIFAR-10.
        """
        mean, covariance = moments(rows)
        step, loc, scale = (each.to(mean) for each in (self.step, self.loc, self.scale))
        noisy = covariance + torch.diag(step**2 / 12)
        return (mean + step / 2 - loc) / scale, noisy / (scale[:, None] * scale)

    def fit_rows(self, rows: Tensor) -> None:
        """Standardise rows of data, if these units standardise."""
        if self.standardise:
            self.fit(*mean_and_variance(rows))

    @torch.no_grad()
    def fit(self, mean: Tensor, variance: Tensor) -> None:
        """Standardise data of this mean and variance, its noise included."""
        step = self.step.to(mean)
        self.loc.copy_(mean + step / 2)
        spread = (variance + step**2 / 12).sqrt()
        self.scale.copy_(torch.where(spread > 0, spread, 1.0))

    def extra_repr(self) -> str:
        if self.levels:
            return f"{self.dim} pixels of {self.levels} levels on [{self.interval[0]:g}, {self.interval[1]:g}]"
        return f"{self.dim} dimensions, {int((self.step > 0).sum())} of them discrete"


class InSteps(constraints.Constraint):
    """Rows whose dimensions hold multiples of their step, or any numbers where that is 0."""

    event_dim = 1

    def __init__(self, step: Tensor) -> None:
        self.step = step

    @property
    def is_discrete(self) -> bool:  # type: ignore[override]  # lazily: a captured graph must not wait for the device
        return bool((self.step > 0).all())

    def check(self, value: Tensor) -> Tensor:
        unit = torch.where(self.step > 0, self.step, 1.0).to(value.dtype)
        return (value.isfinite() & (((value / unit).round() * unit == value) | (self.step == 0))).all(-1)


def bits_per_dim(nats: float, dim: int) -> float:
    """Convert nats in the units of the data to bits per dimension."""
    return -nats / (dim * math.log(2))
