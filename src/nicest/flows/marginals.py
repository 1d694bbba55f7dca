"""One dimension at a time: logit for pixels, sinh-arcsinh for the skew and the tails of columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from nicest.flows.bijection import Bijection, check_context, check_features
from nicest.flows.laws import Law, Spline
from nicest.flows.optimizer import LightLBFGS

STEEPEST = 1.5  # largest |log δ|: no column is bent further, so that rows far out stay finite
HARDLY, LEAST = 1e-6, 1e-30  # how far from a bound a number counts that is on it; the least distance of others
CENTRE, TAIL = math.sqrt(math.tau) / 4, 0.13  # of the map from a logistic variable to a Gaussian one: see `Bounded`
ENOUGH = 5_000  # rows that tell how columns are bent
NARROWEST = 3.0  # largest |log(scale / standard deviation)|


class Logit(Bijection):
    """y = logit(a), a = margin + (1 - 2 margin) x, for x in [0, 1].

    log det = Σ_d [log(1 - 2 margin) - log a_d - log(1 - a_d)]. The margin keeps y finite at 0 and 1.
    """

    elementwise = True

    def __init__(self, margin: float = 1e-6) -> None:
        super().__init__()
        if not 0 <= margin < 0.5:
            raise ValueError(f"expected a margin in [0, 0.5), got {margin}")
        self.margin = margin

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = torch.logit(self.margin + (1 - 2 * self.margin) * x)
        log_det = math.log1p(-2 * self.margin) + y.abs() + 2 * functional.softplus(-y.abs())
        return y, log_det.sum(-1)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        return (y.sigmoid() - self.margin) / (1 - 2 * self.margin)

    def extra_repr(self) -> str:
        return f"margin={self.margin}"


class Bounded(Bijection):
    """All real numbers y for x in [0, 1], `ends` = 2, or in [0, ∞), `ends` = 1; y = x in columns of `ends` = 0.

    y = c t / √(1 + k |t|), t = logit(x) or log(exp x - 1): about Gaussian where x is uniform, or exponential, since
    t is logistic then. log dy/dt = log c - 3/2 log(1 + k |t|) + log(1 + k |t| / 2). What lies on a bound, or beyond it,
    counts as 1e-6 from it.
    """

    elementwise = True
    ends: Tensor

    def __init__(self, ends: Sequence[int] | Tensor) -> None:
        super().__init__()
        self.register_buffer("ends", torch.as_tensor(ends).to(torch.get_default_dtype()))

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_features(x, len(self.ends))
        two = self.ends == 2
        inside = torch.where(x > 0, x.clamp_min(LEAST), HARDLY)
        between = torch.where(inside < 1, inside, 1 - HARDLY)
        t = torch.where(two, torch.logit(between), inside + torch.log(-torch.expm1(-inside)))
        slope = functional.softplus(-t) + torch.where(two, functional.softplus(t), 0.0)
        size = TAIL * t.abs()
        bend = CENTRE * t * torch.rsqrt(1 + size)
        slope = slope + math.log(CENTRE) - 1.5 * torch.log1p(size) + torch.log1p(size / 2)
        y = torch.where(self.ends > 0, bend, x)
        return y, torch.where(self.ends > 0, slope, 0.0).sum(-1)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        check_features(y, len(self.ends))
        half = TAIL * y.abs() / (2 * CENTRE**2)  # |t| is the root of c² t² - k y² |t| - y² = 0
        t = y * (half + torch.sqrt(half.square() + 1 / CENTRE**2))
        return torch.where(self.ends == 2, t.sigmoid(), torch.where(self.ends == 1, functional.softplus(t), y))


class SinhArcsinh(Bijection):
    """y = sinh(u), u = δ asinh(z) - ε, z = (x - loc) / scale, in every column (Jones and Pewsey 2009).

    log det = Σ_d [log cosh u + log δ - ½ log(1 + z²) - log scale]. ε is the skew; δ < 1 draws long tails in, δ > 1
    spreads short ones out. ε = 0, δ = 1, loc = 0, scale = 1 is the identity. All four are fitted, then held.
    """

    elementwise = True
    loc: Tensor
    log_scale: Tensor
    skew: Tensor
    log_tail: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        for name in ("loc", "log_scale", "skew", "log_tail"):
            self.register_buffer(name, torch.zeros(dim))

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_features(x, len(self.loc))
        y, log_slope = bend(x, self.loc, self.log_scale, self.skew, self.log_tail)
        return y, log_slope.sum(-1)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        check_features(y, len(self.loc))
        z = torch.sinh((torch.asinh(y) + self.skew) * torch.exp(-self.log_tail))
        return self.loc + self.log_scale.exp() * z

    def fit(self, x: Tensor, steps: int = 60) -> Self:
        """Make every column of x, (N, D), as Gaussian as can be: maximum likelihood, ε and log δ held near 0.

        The prior N(0, 1) on both counts as much as one row: it decides where there are few rows. Of more than
        5,000 rows, mean and spread are of all, the rest of as many from all parts of x.
        """
        x = x.detach().double()
        mean, spread = x.mean(0), x.std(0, correction=0).clamp_min(1e-12)
        x = x[:: -(-len(x) // ENOUGH)]
        free = torch.zeros(4, x.shape[1], dtype=torch.float64, device=x.device, requires_grad=True)
        optimizer = LightLBFGS([free], max_iter=steps, history_size=20, line_search_fn="strong_wolfe")

        def shape() -> tuple[Tensor, ...]:
            loc, log_scale, skew, tail = free  # a scale that may vanish would find every value that occurs twice
            return mean + spread * loc, spread.log() + bounded(log_scale, NARROWEST), skew, bounded(tail, STEEPEST)

        def loss() -> Tensor:
            optimizer.zero_grad()
            y, log_slope = bend(x, *shape())
            penalty = 0.5 * free[2:].square().sum(0) / len(x)
            value = (0.5 * y.square() - log_slope).mean(0).add(penalty).sum()
            value.backward()
            return value

        with torch.enable_grad():
            optimizer.step(loss)
        if bool(free.isfinite().all()):
            for name, values in zip(("loc", "log_scale", "skew", "log_tail"), shape(), strict=True):
                getattr(self, name).copy_(values.detach())
        return self


def bend(x: Tensor, loc: Tensor, log_scale: Tensor, skew: Tensor, log_tail: Tensor) -> tuple[Tensor, Tensor]:
    """sinh(δ asinh(z) - ε) and the logarithm of its slope, for each number by itself."""
    z = (x - loc) * torch.exp(-log_scale)
    u = log_tail.exp() * torch.asinh(z) - skew
    log_cosh = u.abs() + functional.softplus(-2 * u.abs()) - math.log(2)
    log_root = 0.5 * torch.log1p(z.square())
    return torch.sinh(u), log_cosh + log_tail - log_root - log_scale


def bounded(free: Tensor, most: float) -> Tensor:
    return most * torch.tanh(free / most)


class Elementwise(Bijection):
    """y_d = g(x_d; b_d): a coupling law in every dimension, whose b is learned and the same for all x.

    With a `Spline` of many bins each dimension gets a marginal law of its own, as far as the bins resolve it; `fit`
    starts it where the quantiles of the data are those of a Gaussian. With a context, of `context_dim` numbers, b is a
    linear function of it: before the prior, an affine law of a label makes the prior one of each class.
    """

    elementwise = True

    def __init__(self, law: Law, dim: int, context_dim: int = 0) -> None:
        super().__init__()
        self.law, self.dim, self.context_dim = law, dim, context_dim
        self.b = nn.Parameter(torch.zeros(law.size * dim))
        if context_dim:
            self.weight = nn.Parameter(torch.zeros(law.size * dim, context_dim))

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_features(x, self.dim)
        return self.law.forward(x, self.parameters_of(x, context))

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        check_features(y, self.dim)
        return self.law.inverse(y, self.parameters_of(y, context))

    def parameters_of(self, x: Tensor, context: Tensor | None) -> Tensor:
        """b of every row, (B, size * dim)."""
        if not self.context_dim:
            return self.b.expand(len(x), -1)
        check_context(context, self.context_dim)
        assert context is not None
        return functional.linear(context.to(x.dtype), self.weight, self.b)

    @torch.no_grad()
    def fit(self, x: Tensor) -> Self:
        if isinstance(self.law, Spline):
            y = torch.linspace(-self.law.bound, self.law.bound, self.law.bins + 1)[1:-1].to(x)
            share = torch.special.ndtr(y).clamp(0.5 / len(x), 1 - 0.5 / len(x))
            knots = torch.quantile(x, share, dim=0).mT.clamp(-self.law.bound, self.law.bound)
            # beyond the data, where it has no quantiles, nothing is bent
            knots = torch.where((share > 1 / len(x)) & (share < 1 - 1 / len(x)), knots, y)
            self.b.copy_(self.law.through(knots.cummax(-1).values, y.expand_as(knots)))
        return self

    def extra_repr(self) -> str:
        return str(self.law)
