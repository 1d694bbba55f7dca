"""The same NICE in other flow libraries, as their users would build it: the company `bench` keeps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from nicest.flows import MLP


class Peer(nn.Module):
    """Four additive couplings and a scaling over halves of D numbers, under a Gaussian, of a peer's own blocks."""

    def __init__(self, dim: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.dim, self.hidden = dim, hidden
        self.part = dim // 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.flow: Any = self.build()
        Distribution.set_default_validate_args(__debug__)  # zuko turns it off for everybody

    def network(self, *_: Any) -> nn.Module:
        return _Network(MLP(self.part, self.part, self.hidden))

    def build(self) -> nn.Module:
        raise NotImplementedError

    def log_prob(self, x: Tensor) -> Tensor:
        return self.flow.log_prob(x)

    def sample(self, n: int) -> Tensor:
        return self.flow.sample(n)


class NFlows(Peer):
    def build(self) -> nn.Module:
        from nflows import distributions, flows, transforms

        mask = (torch.arange(self.dim) >= self.part).float()
        couplings = [
            transforms.AdditiveCouplingTransform(mask if k % 2 == 0 else 1 - mask, self.network) for k in range(4)
        ]
        scaling = transforms.PointwiseAffineTransform(0.0, torch.ones(self.dim))
        return flows.Flow(
            transforms.CompositeTransform([*couplings, scaling]), distributions.StandardNormal([self.dim])
        )


class Zuko(Peer):
    def build(self) -> nn.Module:
        import zuko
        from zuko.flows.coupling import GeneralCouplingTransform

        mask = torch.arange(self.dim) < self.part
        couplings = [
            GeneralCouplingTransform(
                self.dim,
                mask=mask if k % 2 == 0 else ~mask,
                univariate=zuko.transforms.AdditiveTransform,
                shapes=[()],
                hidden_features=self.hidden,
            )
            for k in range(4)
        ]
        base = zuko.lazy.UnconditionalDistribution(
            zuko.distributions.DiagNormal, torch.zeros(self.dim), torch.ones(self.dim), buffer=False
        )
        return zuko.flows.Flow(couplings, base)

    def log_prob(self, x: Tensor) -> Tensor:
        return self.flow().log_prob(x)

    def sample(self, n: int) -> Tensor:
        return self.flow().sample((n,))


class NormFlows(Peer):
    def build(self) -> nn.Module:
        import normflows

        layers: list[Any] = []
        for _ in range(4):
            layers += [normflows.flows.AffineCouplingBlock(self.network(), scale=False)]
            layers += [normflows.flows.Permute(self.dim, mode="swap")]
        return normflows.NormalizingFlow(normflows.distributions.DiagGaussian(self.dim), layers)

    def sample(self, n: int) -> Tensor:
        return self.flow.sample(n)[0]


class Freia(Peer):
    def build(self) -> nn.Module:
        from FrEIA import framework, modules

        inn = framework.SequenceINN(self.dim)
        for _ in range(2):  # a block is two couplings
            inn.append(modules.NICECouplingBlock, subnet_constructor=self.network)
        inn.append(modules.ActNorm)
        return inn

    def log_prob(self, x: Tensor) -> Tensor:
        h, log_det = self.flow(x)
        return log_det - 0.5 * (h.square() + 1.8378770664093453).sum(-1)

    def sample(self, n: int) -> Tensor:
        h = torch.randn(n, self.dim, device=next(self.parameters()).device)
        return self.flow(h, rev=True)[0]


class _Network(nn.Module):
    """Peers hand their networks a context or more, which this one leaves."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return self.network(x)


PEERS: dict[str, Callable[[int, tuple[int, ...]], Peer]] = {
    "nflows": NFlows,
    "zuko": Zuko,
    "normflows": NormFlows,
    "FrEIA": Freia,
}


def installed() -> list[str]:
    """The peers that are here."""
    return [name for name in PEERS if find_spec(name)]
