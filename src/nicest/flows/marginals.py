"""Elementwise layers: logit for pixels, bounds, sinh-arcsinh for skew and tails, and learned laws."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from nicest.flows.bijection import Bijection
from nicest.flows.laws import Law, Spline
from nicest.flows.optimizer import LightLBFGS

STEEPEST = 1.5  # largest |log δ|, so that rows far out stay finite
ON_BOUND, LEAST = 1e-6, 1e-30  # the distance from its bound at which a value on the bound counts; the least of others
CENTRE, TAIL = math.sqrt(math.tau) / 4, 0.13  # of the map from a logistic to a Gaussian variable: see `Bounded`
ENOUGH = 5_000  # rows that skew and tails are fitted to
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

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        log_det = -math.log1p(-2 * self.margin) - y.abs() - 2 * functional.softplus(-y.abs())
        return (y.sigmoid() - self.margin) / (1 - 2 * self.margin), log_det.sum(-1)

    def extra_repr(self) -> str:
        return f"margin={self.margin}"


class Bounded(Bijection):
    """Map [0, 1] (`ends` = 2) or [0, ∞) (`ends` = 1) to the real line, column by column; `ends` = 0 leaves a column.

    y = c t / √(1 + k |t|), with t = logit(x) or log(exp x - 1): about Gaussian where x is uniform or exponential, since
    t is logistic then. log dy/dt = log c - 3/2 log(1 + k |t|) + log(1 + k |t| / 2). A value on a bound counts as 1e-6
    from it. The log-determinant is -inf beyond the bounds, where the density is 0.
    """

    elementwise = True
    ends: Tensor

    def __init__(self, ends: Sequence[int] | Tensor) -> None:
        super().__init__()
        self.register_buffer("ends", torch.as_tensor(ends).to(torch.get_default_dtype()))
        self.dim = len(self.ends)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        two, slack = self.ends == 2, 8 * torch.finfo(x.dtype).eps  # units may round a bound by this much
        inside = torch.where(x > 0, x.clamp_min(LEAST), ON_BOUND)
        between = torch.where(inside < 1, inside, 1 - ON_BOUND)
        t = torch.where(two, torch.logit(between), inside + torch.log(-torch.expm1(-inside)))
        y, log_slope = self._bend(t)
        beyond = (self.ends > 0) & (x < -slack) | two & (x > 1 + slack)
        log_slope = torch.where(beyond, -math.inf, log_slope - self._log_width(t))
        return torch.where(self.ends > 0, y, x), torch.where(self.ends > 0, log_slope, 0.0).sum(-1)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        half = TAIL * y.abs() / (2 * CENTRE**2)  # |t| is the root of c² t² - k y² |t| - y² = 0
        t = y * (half + torch.sqrt(half.square() + 1 / CENTRE**2))
        x = torch.where(self.ends == 2, t.sigmoid(), torch.where(self.ends == 1, functional.softplus(t), y))
        log_slope = self._log_width(t) - self._bend(t)[1]
        return x, torch.where(self.ends > 0, log_slope, 0.0).sum(-1)

    def _bend(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return y and log dy/dt."""
        size = TAIL * t.abs()
        log_slope = math.log(CENTRE) - 1.5 * torch.log1p(size) + torch.log1p(size / 2)
        return CENTRE * t * torch.rsqrt(1 + size), log_slope

    def _log_width(self, t: Tensor) -> Tensor:
        """Return log dx/dt."""
        return -functional.softplus(-t) - torch.where(self.ends == 2, functional.softplus(t), 0.0)


class SinhArcsinh(Bijection):
    """y = sinh(u), u = δ asinh(z) - ε, z = (x - loc) / scale, in every column (Jones and Pewsey 2009).

    log det = Σ_d [log cosh u + log δ - ½ log(1 + z²) - log scale]. ε is the skew; δ < 1 shortens long tails, δ > 1
    lengthens short ones. ε = 0, δ = 1, loc = 0, scale = 1 is the identity. All four are fitted by `initialise` and then
    stay fixed.
    """

    elementwise = True
    loc: Tensor
    log_scale: Tensor
    skew: Tensor
    log_tail: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        for name in ("loc", "log_scale", "skew", "log_tail"):
            self.register_buffer(name, torch.zeros(dim))

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, log_slope = bend(x, self.loc, self.log_scale, self.skew, self.log_tail)
        return y, log_slope.sum(-1)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z = torch.sinh((torch.asinh(y) + self.skew) * torch.exp(-self.log_tail))
        x = self.loc + self.log_scale.exp() * z
        return x, -bend(x, self.loc, self.log_scale, self.skew, self.log_tail)[1].sum(-1)

    @torch.no_grad()
    def initialise(self, x: Tensor, context: Tensor | None = None) -> None:
        """Make every column of x as Gaussian as possible by maximum likelihood.

        A prior N(0, 1) on ε and log δ counts as much as one row and matters where there are few. Mean and standard
        deviation are those of all rows, skew and tails those of at most 5,000.
        """
        x = x.detach().double()
        mean, spread = x.mean(0), x.std(0, correction=0).clamp_min(1e-12)
        x = x[:: -(-len(x) // ENOUGH)]
        free = torch.zeros(4, x.shape[1], dtype=torch.float64, device=x.device, requires_grad=True)
        optimizer = LightLBFGS([free], max_iter=60, history_size=20, line_search_fn="strong_wolfe")

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


def bend(x: Tensor, loc: Tensor, log_scale: Tensor, skew: Tensor, log_tail: Tensor) -> tuple[Tensor, Tensor]:
    """Return sinh(δ asinh(z) - ε) and the logarithm of its slope, elementwise."""
    z = (x - loc) * torch.exp(-log_scale)
    u = log_tail.exp() * torch.asinh(z) - skew
    log_cosh = u.abs() + functional.softplus(-2 * u.abs()) - math.log(2)
    log_root = 0.5 * torch.log1p(z.square())
    return torch.sinh(u), log_cosh + log_tail - log_root - log_scale


def bounded(free: Tensor, most: float) -> Tensor:
    """Return a smooth function of `free` whose absolute value is below `most`."""
    return most * torch.tanh(free / most)


class Elementwise(Bijection):
    """y_d = g(x_d; b_d): a law in every dimension with learned parameters.

    With a `Spline` of many bins every dimension gets its own marginal law; `initialise` starts it where the quantiles
    of the data are those of a Gaussian.

    Parameters
    ----------
    law : Law
    dim : int
        Number of features.
    conditioner : nn.Module, optional
        Maps the context to the parameters, (B, dim · law.size), in place of learned parameters that are the same for
        all rows. In front of the prior, an affine law with a linear function of a label gives every class a prior of
        its own.
    """

    elementwise = True

    def __init__(self, law: Law, dim: int, conditioner: nn.Module | None = None) -> None:
        super().__init__()
        self.law, self.conditioner = law, conditioner
        self.dim: int = dim
        if conditioner is None:
            self.b = nn.Parameter(torch.zeros(dim * law.size))

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, log_slope = self.law.forward(x, self.parameters_at(x, context))
        return y, log_slope.sum(-1)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, log_slope = self.law.inverse(y, self.parameters_at(y, context))
        return x, log_slope.sum(-1)

    def parameters_at(self, x: Tensor, context: Tensor | None) -> Tensor:
        """Return the parameters of every row, (B, dim, size)."""
        if self.conditioner is None:
            return self.b.view(self.dim, self.law.size).expand(len(x), -1, -1)
        if context is None:
            raise ValueError("Elementwise: expected a context, got none")
        b: Tensor = self.conditioner(context.to(x.dtype))
        if b.shape != (expected := (len(x), self.dim * self.law.size)):
            raise ValueError(f"the conditioner must return {expected}, got {tuple(b.shape)}")
        return b.to(x.dtype).unflatten(1, (self.dim, self.law.size))

    @torch.no_grad()
    def initialise(self, x: Tensor, context: Tensor | None = None) -> None:
        """Start a spline at the map from the quantiles of x to those of a Gaussian; other laws at the identity."""
        if self.conditioner is not None or not isinstance(self.law, Spline):
            return
        x = x[:: -(-len(x) // ENOUGH)]
        y = torch.linspace(-self.law.bound, self.law.bound, self.law.bins + 1)[1:-1].to(x)
        fraction = torch.special.ndtr(y).clamp(0.5 / len(x), 1 - 0.5 / len(x))
        knots = torch.quantile(x, fraction, dim=0).mT.clamp(-self.law.bound, self.law.bound)
        # beyond the data, where it has no quantiles, the spline is the identity
        knots = torch.where((fraction > 1 / len(x)) & (fraction < 1 - 1 / len(x)), knots, y)
        self.b.copy_(self.law.through(knots.cummax(-1).values, y.expand_as(knots)).flatten())

    def extra_repr(self) -> str:
        return str(self.law)
