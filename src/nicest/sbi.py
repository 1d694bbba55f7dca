"""Posteriors of simulators: a conditional flow that the NPE of `sbi` trains (extra `sbi`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nicest.errors import NicestError
from nicest.flows import (
    AffineSpline,
    Bijection,
    Chain,
    Coupling,
    Flow,
    Gaussian,
    Mixing,
    Partition,
    PartPrior,
    ResidualMLP,
    Units,
    Within,
)

try:
    from sbi.neural_nets.estimators.base import ConditionalDensityEstimator
except ImportError as error:
    raise NicestError("nicest.sbi needs sbi, which is not installed: pip install 'nicest[sbi]'") from error


@dataclass(frozen=True)
class NICEPosterior:
    """What builds the density estimator of an `NPE`, from simulations.

        inference = NPE(prior, density_estimator=NICEPosterior())
        inference.append_simulations(theta, x).train()
        posterior = inference.build_posterior()

    The flow is of θ given x. Both are standardised. Then come `couplings` couplings, each of which changes half of θ
    given the other half and x, after a learned mixing of θ; of a single parameter, each changes it given x. Their law
    is an affine map and a spline of `bins` bins; their networks have `blocks` residual blocks of `width` units.

    `embedding` is a module that summarises x, which it gets standardised: x may then have any shape.
    """

    couplings: int = 6
    width: int = 64
    blocks: int = 2
    bins: int = 8
    dropout: float = 0.0
    embedding: nn.Module | None = None

    def __call__(self, theta: Tensor, x: Tensor) -> ConditionalFlow:
        if theta.ndim != 2 or (x.ndim != 2 and self.embedding is None):
            shapes = f"theta {tuple(theta.shape)} and x {tuple(x.shape)}"
            raise NicestError(f"expected rows of parameters and rows of data, got {shapes}: x needs an embedding")
        embedding = nn.Sequential(Standard(x), self.embedding or nn.Identity())
        with torch.no_grad():
            given, dim = embedding(x[:2]).shape[1], theta.shape[1]
        condition, law = Partition(range(given), given + dim), AffineSpline(self.bins)
        layers: list[Bijection] = []
        for i in range(self.couplings):
            half = range(given + i % 2, given + dim, 2) if dim > 1 else ()
            part = Partition((*range(given), *half), given + dim)
            options: dict[str, Any] = {"width": self.width, "blocks": self.blocks, "dropout": self.dropout}
            network = ResidualMLP(len(part.i1), law.size * len(part.i2), **options)
            layers += [Within(condition, Mixing(dim)), Coupling(part, law, network)]
        units, (variance, mean) = Units.continuous(given + dim), torch.var_mean(theta.double().cpu(), 0)
        variance = torch.where(variance > 0, variance, 1.0)
        units.fit(torch.cat((torch.zeros(given), mean)), torch.cat((torch.ones(given), variance)))
        flow = Flow(units, Chain(*layers), PartPrior(Gaussian(dim), condition))
        return ConditionalFlow(flow, embedding, theta.shape[1:], x.shape[1:]).to(theta.device)


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
