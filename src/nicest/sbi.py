"""Posteriors of simulators: a conditional flow that the NPE of `sbi` trains (extra `sbi`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints

from nicest.errors import NicestError, needing
from nicest.flows import (
    AffineSpline,
    Bijection,
    Bounded,
    Chain,
    Coupling,
    Features,
    Flow,
    Gaussian,
    Mixing,
    Mixture,
    Partition,
    PartPrior,
    ResidualMLP,
    Units,
    Within,
)

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
        summary = self.embedding or Features([0] * x.shape[1], [False] * x.shape[1])
        embedding = nn.Sequential(Standard(x), summary.to(x.device))
        with torch.no_grad():
            given, dim = embedding(x[:2]).shape[1], theta.shape[1]
        low, high = bounds(getattr(self.prior, "support", None), dim)
        variance, mean = torch.var_mean(theta.double().cpu(), 0)
        reach = torch.where(high.isfinite(), high - low, mean - low)  # as `Bounded` wants it
        loc, variance = torch.where(low.isfinite(), low, mean), torch.where(low.isfinite(), reach**2, variance)
        units = Units.continuous(given + dim)
        units.fit(torch.cat((torch.zeros(given), loc)), torch.cat((torch.ones(given), variance)))
        condition, ends = Partition(range(given), given + dim), low.isfinite().int() + high.isfinite().int()
        chains = [self.chain(condition, ends) for _ in range(self.members)]
        flow = Mixture(units, chains, PartPrior(Gaussian(dim), condition))
        return ConditionalFlow(flow, embedding, theta.shape[1:], x.shape[1:]).to(theta.device)

    def chain(self, condition: Partition, ends: Tensor) -> Chain:
        """Of rows [x | θ], of which x is the condition; `ends` are how many bounds each parameter has."""
        given, dim, law = len(condition.i1), condition.dim, AffineSpline(self.bins)
        layers: list[Bijection] = [Within(condition, Bounded(ends))] if ends.any() else []
        for i in range(self.couplings):
            half = range(given + i % 2, dim, 2) if dim - given > 1 else ()
            part = Partition((*range(given), *half), dim)
            options: dict[str, Any] = {"width": self.width, "blocks": self.blocks, "dropout": self.dropout}
            network = ResidualMLP(len(part.i1), law.size * len(part.i2), **options)
            layers += [Within(condition, Mixing(dim - given)), Coupling(part, law, network)]
        return Chain(*layers)


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
    """A flow of θ given an embedding of x, as sbi has density estimators: θ is (samples, batch, D), x (batch, ...)."""

    net: Flow

    def __init__(self, flow: Flow, embedding: nn.Module, input_shape: torch.Size, condition_shape: torch.Size) -> None:
        super().__init__(flow, input_shape, condition_shape)
        self.embedding = embedding

    @property
    def embedding_net(self) -> nn.Module:
        return self.embedding

    def log_prob(self, input: Tensor, condition: Tensor, **options: Any) -> Tensor:
        self._check_input_shape(input)
        theta = input if input.ndim > 2 else input[None]
        return self.net.log_prob(theta, given=self.embedded(condition))

    def loss(self, input: Tensor, condition: Tensor, **options: Any) -> Tensor:
        return -self.log_prob(input[None], condition)[0]

    def sample(self, sample_shape: torch.Size, condition: Tensor, **options: Any) -> Tensor:
        return self.net.to_distribution(given=self.embedded(condition)).sample(torch.Size(sample_shape))

    def embedded(self, condition: Tensor) -> Tensor:
        """The summaries of data (..., *its shape), (..., C)."""
        self._check_condition_shape(condition)
        shape = condition.shape[: condition.ndim - len(self.condition_shape)]
        found: Tensor = self.embedding(condition.reshape(-1, *self.condition_shape))
        return found.reshape(*shape, -1)
