"""The same NICE in other flow libraries, as their users would build it: the company `bench` keeps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from nicest.flows import MLP


class Peer(NamedTuple):
    """Four additive couplings and a scaling over halves of D numbers, under a Gaussian, of a library's own blocks."""

    flow: nn.Module
    log_prob: Callable[[Tensor], Tensor]
    sample: Callable[[int], Tensor]


def build_peer(library: str, dim: int, hidden: tuple[int, ...]) -> Peer:
    """The flow of a library, with networks of so many hidden units."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = PEERS[library](dim, hidden)
    Distribution.set_default_validate_args(__debug__)  # zuko turns it off for everybody
    return peer


class Network(nn.Module):
    """One half to the other; peers hand their networks sizes and contexts, which this one leaves."""

    def __init__(self, dim: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.network = MLP(dim // 2, dim // 2, hidden)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return self.network(x)


def _nflows(dim: int, hidden: tuple[int, ...]) -> Peer:
    from nflows import distributions, flows, transforms

    mask = (torch.arange(dim) >= dim // 2).float()
    layers = [
        transforms.AdditiveCouplingTransform(mask if k % 2 == 0 else 1 - mask, lambda *_: Network(dim, hidden))
        for k in range(4)
    ]
    layers.append(transforms.PointwiseAffineTransform(0.0, torch.ones(dim)))
    flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([dim]))
    return Peer(flow, flow.log_prob, flow.sample)


def _zuko(dim: int, hidden: tuple[int, ...]) -> Peer:
    import zuko
    from zuko.flows.coupling import GeneralCouplingTransform

    mask = torch.arange(dim) < dim // 2
    how = {"univariate": zuko.transforms.AdditiveTransform, "shapes": [()], "hidden_features": hidden}
    couplings = [GeneralCouplingTransform(dim, mask=mask if k % 2 == 0 else ~mask, **how) for k in range(4)]
    normal = torch.zeros(dim), torch.ones(dim)
    base = zuko.lazy.UnconditionalDistribution(zuko.distributions.DiagNormal, *normal, buffer=False)
    flow = zuko.flows.Flow(couplings, base)
    return Peer(flow, lambda x: flow().log_prob(x), lambda n: flow().sample((n,)))


def _normflows(dim: int, hidden: tuple[int, ...]) -> Peer:
    import normflows

    layers: list[Any] = []
    for _ in range(4):
        layers += [normflows.flows.AffineCouplingBlock(Network(dim, hidden), scale=False)]
        layers += [normflows.flows.Permute(dim, mode="swap")]
    flow = normflows.NormalizingFlow(normflows.distributions.DiagGaussian(dim), layers)
    return Peer(flow, flow.log_prob, lambda n: flow.sample(n)[0])


def _freia(dim: int, hidden: tuple[int, ...]) -> Peer:
    from FrEIA import framework, modules

    flow = framework.SequenceINN(dim)
    for _ in range(2):  # a block is two couplings
        flow.append(modules.NICECouplingBlock, subnet_constructor=lambda *_: Network(dim, hidden))
    flow.append(modules.ActNorm)

    def log_prob(x: Tensor) -> Tensor:
        h, log_det = flow(x)
        return log_det - 0.5 * (h.square() + 1.8378770664093453).sum(-1)

    def sample(n: int) -> Tensor:
        return flow(torch.randn(n, dim, device=next(flow.parameters()).device), rev=True)[0]

    return Peer(flow, log_prob, sample)


PEERS = {"nflows": _nflows, "zuko": _zuko, "normflows": _normflows, "FrEIA": _freia}


def installed() -> list[str]:
    """The peers that are here."""
    return [name for name in PEERS if find_spec(name)]
