"""Posteriors of simulators: a conditional flow that the NPE of `sbi` trains (extra `sbi`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints

from nicest.errors import NicestError, needing
from nicest.flows import Bounded, Features, Gaussian, Mixture, Units, spline

with needing("sbi"):
    from sbi.neural_nets.estimators.base import ConditionalDensityEstimator


@dataclass(frozen=True)
class NICEPosterior:
    """What builds the density estimator of an `NPE`, from simulations.

        inference = NPE(prior, density_estimator=NICEPosterior(prior))
        inference.append_simulations(theta, x).train()
        posterior = inference.build_posterior()

    The flow is of θ given x. Both are standardised, and each number of x is read by `Features`. Then come `couplings`
    couplings, each of which changes half of θ given the other half and x, after a learned mixing of θ; of a single
    parameter, each changes it given x. Their law is an affine map and a spline of `bins` bins; their networks have
    `blocks` residual blocks of `width` units. The density is the mean of those of `members` such flows.

    With the `prior`, parameters that it keeps between two bounds, or above one, are mapped to all real numbers first:
    the flow then gives no others. `embedding` is a module that summarises x in place of `Features`; it gets x
    standardised, which may then have any shape.
    """

    prior: Distribution | None = None
    members: int = 3
    couplings: int = 6
    width: int = 64
    blocks: int = 2
    bins: int = 8
    dropout: float = 0.1
    embedding: nn.Module | None = None

    def __call__(self, theta: Tensor, x: Tensor) -> ConditionalFlow:
        if theta.ndim != 2 or (x.ndim != 2 and self.embedding is None):
            shapes = f"theta {tuple(theta.shape)} and x {tuple(x.shape)}"
            raise NicestError(f"expected rows of parameters and rows of data, got {shapes}: x needs an embedding")
        summary = self.embedding or Features(x.shape[1])
        shaped = [nn.Unflatten(1, x.shape[1:])] if x.ndim > 2 else []  # contexts are rows
        embedding = nn.Sequential(*shaped, Standard(x), summary.to(x.device))
        with torch.no_grad():
            width, dim = embedding(x[:2].flatten(1)).shape[1], theta.shape[1]
        low, high = bounds(getattr(self.prior, "support", None), dim)
        variance, mean = torch.var_mean(theta.double().cpu(), 0)
        reach = torch.where(high.isfinite(), high - low, mean - low)  # as `Bounded` wants it
        units = Units.continuous(dim)
        units.fit(torch.where(low.isfinite(), low, mean), torch.where(low.isfinite(), reach**2, variance))
        ends = low.isfinite().int() + high.isfinite().int()
        options: dict[str, Any] = {"couplings": self.couplings, "width": self.width, "blocks": self.blocks}
        options |= {"bins": self.bins, "dropout": self.dropout, "units": units, "prior": Gaussian(dim)}
        first = [Bounded(ends)] if ends.any() else []
        members = [spline(dim, context=width, embedding=embedding, first=first, **options) for _ in range(self.members)]
        return ConditionalFlow(Mixture(members), theta.shape[1:], x.shape[1:]).to(theta.device)


def bounds(support: constraints.Constraint | None, dim: int) -> tuple[Tensor, Tensor]:
    """The lower and the upper bounds of numbers (dim,), infinite where they have none, or have an upper one alone."""
    if isinstance(support, constraints.independent):
        return bounds(support.base_constraint, dim)
    if isinstance(support, constraints.cat):
        low, high = zip(*map(bounds, support.cseq, support.lengths), strict=True)
        return torch.cat(low), torch.cat(high)
    ends = (getattr(support, name, end) for name, end in (("lower_bound", -math.inf), ("upper_bound", math.inf)))
    lower, upper = (torch.as_tensor(end, dtype=torch.float64).cpu().expand(dim) for end in ends)
    return lower, torch.where(lower.isfinite(), upper, math.inf)


class Standard(nn.Module):
    """(x - mean) / standard deviation of rows, number by number; numbers that never vary are left at 0."""

    mean: Tensor
    spread: Tensor

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        spread = x.std(0)
        self.register_buffer("mean", x.mean(0))
        self.register_buffer("spread", torch.where(spread > 0, spread, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.spread


class ConditionalFlow(ConditionalDensityEstimator):
    """A flow of θ given x, as sbi has density estimators: θ is (samples, batch, D), x (batch, ...)."""

    net: Mixture

    def __init__(self, flow: Mixture, input_shape: torch.Size, condition_shape: torch.Size) -> None:
        super().__init__(flow, input_shape, condition_shape)

    @property
    def embedding_net(self) -> nn.Module:
        return self.net.members[0].embedding

    def log_prob(self, input: Tensor, condition: Tensor, **options: Any) -> Tensor:
        self._check_input_shape(input)
        theta = input if input.ndim > 2 else input[None]
        return self.net.log_prob(theta, self.flat(condition))

    def loss(self, input: Tensor, condition: Tensor, **options: Any) -> Tensor:
        """Return minus the training objective, (B,); in eval mode, where sbi validates, minus the log-density."""
        return -(self.net if self.training else self.net.log_prob)(input, self.flat(condition))

    def flat(self, condition: Tensor) -> Tensor:
        """Return data (..., *its shape) as rows, (..., C)."""
        self._check_condition_shape(condition)
        return condition.reshape(*condition.shape[: condition.ndim - len(self.condition_shape)], -1)

    def sample(self, sample_shape: torch.Size, condition: Tensor, **options: Any) -> Tensor:
        return self.net.given(self.flat(condition)).sample(torch.Size(sample_shape))
