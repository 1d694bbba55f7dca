"""The same flows in other libraries, as their users would build them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from nicest.flows import MLP, ConvNet, Spline

BOUND = Spline.bound  # beyond which splines are the identity
SCALES, STEPS, BLOCKS, WIDTH = 3, 8, 2, 128  # a Glow's scales, couplings on each, and networks


class Peer(NamedTuple):
    """A flow of couplings with a Gaussian prior, made of a library's own blocks."""

    flow: nn.Module
    log_prob: Callable[[Tensor], Tensor]
    sample: Callable[[int], Tensor]


def build_peer(library: str, dim: int, hidden: tuple[int, ...], *, bins: int = 0) -> Peer:
    """Build a flow of a library with these hidden layers: four additive couplings and a scaling.

    With `bins`, it has eight couplings with splines instead.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = PEERS[library](dim, hidden, **({"bins": bins} if bins else {}))
    Distribution.set_default_validate_args(__debug__)  # zuko disables it globally
    return peer


class Network(nn.Module):
    """A conditioner, from one half to the parameters of the other; it ignores the context that libraries pass."""

    def __init__(self, dim: int, hidden: tuple[int, ...], size: int = 1) -> None:
        super().__init__()
        self.network = MLP(dim // 2, size * (dim // 2), hidden)
        self.hidden_features = hidden[-1]  # nflows and normflows divide the logits of the bins by its root

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return self.network(x)


def build_glow(library: str, shape: tuple[int, ...]) -> Peer:
    """Build a Glow of a library (Kingma and Dhariwal 2018) for square images (C, H, W).

    Each of three scales has eight affine couplings of channels, each with a mixing and a scaling of channels. Half of
    the channels are factored out after the first two scales.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GLOWS[library](shape)


class Planes(nn.Module):
    """A convolutional network for square images."""

    def __init__(self, inputs: int, outputs: int, side: int) -> None:
        super().__init__()
        self.network, self.outputs = ConvNet((inputs, side, side), outputs, 1, WIDTH, BLOCKS), outputs

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x.flatten(1)).unflatten(1, (self.outputs, *x.shape[2:]))


def _nflows(dim: int, hidden: tuple[int, ...], bins: int = 0) -> Peer:
    from nflows import distributions, flows, transforms

    if bins:
        spline = transforms.PiecewiseRationalQuadraticCouplingTransform
        layers = [spline(mask, _network(dim, hidden, bins), **_tails(bins)) for mask in _masks(dim)]
    else:
        layers = [transforms.AdditiveCouplingTransform(mask, _network(dim, hidden)) for mask in _masks(dim, 4)]
        layers.append(transforms.PointwiseAffineTransform(0.0, torch.ones(dim)))
    flow = flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal([dim]))
    return Peer(flow, flow.log_prob, flow.sample)


def _zuko(dim: int, hidden: tuple[int, ...], bins: int = 0) -> Peer:
    import zuko
    from zuko.flows.coupling import GeneralCouplingTransform

    spline = partial(zuko.transforms.MonotonicRQSTransform, bound=BOUND)
    law, shapes = (spline, [(bins,), (bins,), (bins - 1,)]) if bins else (zuko.transforms.AdditiveTransform, [()])
    how = {"univariate": law, "shapes": shapes, "hidden_features": hidden}
    couplings = [GeneralCouplingTransform(dim, mask=mask < 1, **how) for mask in _masks(dim, 8 if bins else 4)]
    normal = torch.zeros(dim), torch.ones(dim)
    base = zuko.lazy.UnconditionalDistribution(zuko.distributions.DiagNormal, *normal, buffer=bins > 0)
    flow = zuko.flows.Flow(couplings, base)
    return Peer(flow, lambda x: flow().log_prob(x), lambda n: flow().sample((n,)))


def _normflows(dim: int, hidden: tuple[int, ...], bins: int = 0) -> Peer:
    import normflows
    from normflows.flows.neural_spline import coupling

    layers: list[Any] = []
    if bins:
        spline = coupling.PiecewiseRationalQuadraticCoupling
        layers = [spline(mask, _network(dim, hidden, bins), **_tails(bins)) for mask in _masks(dim)]
    for _ in range(0 if bins else 4):
        layers += [normflows.flows.AffineCouplingBlock(Network(dim, hidden), scale=False)]
        layers += [normflows.flows.Permute(dim, mode="swap")]
    flow = normflows.NormalizingFlow(normflows.distributions.DiagGaussian(dim, trainable=not bins), layers)
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


def _normflows_glow(shape: tuple[int, ...]) -> Peer:
    import normflows

    bases: list[Any] = []
    scales: list[Any] = []
    channels, side = shape[0], shape[1]
    for scale in range(SCALES):
        channels, side = 4 * channels, side // 2
        layers = [normflows.flows.GlowBlock(channels, WIDTH) for _ in range(STEPS)]
        for layer in layers:  # the same network for all
            layer.flows[0].flows[1].param_map = Planes(channels // 2, channels, side)
        channels //= 1 if scale == SCALES - 1 else 2
        scales.append([*layers, normflows.flows.Squeeze()])
        bases.append(normflows.distributions.DiagGaussian((channels, side, side), trainable=False))
    merges = [normflows.flows.Merge() for _ in range(SCALES - 1)]
    flow = normflows.MultiscaleFlow(bases[::-1], scales[::-1], merges, class_cond=False)
    return Peer(flow, lambda x: flow.log_prob(x.unflatten(1, shape), None), lambda n: flow.sample(n)[0].flatten(1))


def _freia_glow(shape: tuple[int, ...]) -> Peer:
    from FrEIA import framework, modules

    nodes: list[Any] = [framework.InputNode(*shape)]
    last = nodes[0]
    for scale in range(SCALES):
        how = {"subnet_constructor": partial(Planes, side=shape[1] >> scale + 1), "permute_soft": True}
        for block in (modules.IRevNetDownsampling, *[modules.AllInOneBlock] * STEPS):
            nodes.append(framework.Node(last, block, how if block is modules.AllInOneBlock else {}))
            last = nodes[-1]
        if scale < SCALES - 1:
            halves = framework.Node(last, modules.Split, {})
            nodes += [halves, framework.OutputNode(halves.out1)]
            last = halves.out0
    flow = framework.GraphINN([*nodes, framework.OutputNode(last)])

    def log_prob(x: Tensor) -> Tensor:
        codes, log_det = flow(x.unflatten(1, shape))
        return log_det - sum(0.5 * (h.square() + 1.8378770664093453).flatten(1).sum(1) for h in codes)

    def sample(n: int) -> Tensor:
        device = next(flow.parameters()).device
        return flow([torch.randn(n, *each, device=device) for each in flow.global_out_shapes], rev=True)[0].flatten(1)

    return Peer(flow, log_prob, sample)


def _network(dim: int, hidden: tuple[int, ...], bins: int = 0) -> Callable[..., Network]:
    """Return what nflows and normflows call to build a conditioner."""
    return lambda *_: Network(dim, hidden, 3 * bins - 1 if bins else 1)


def _tails(bins: int) -> dict[str, Any]:
    return {"num_bins": bins, "tails": "linear", "tail_bound": BOUND}


def _masks(dim: int, n: int = 8) -> list[Tensor]:
    """Return alternating masks: 1 for the half that a coupling changes."""
    mask = (torch.arange(dim) >= dim // 2).float()
    return [mask, 1 - mask] * (n // 2)


PEERS: dict[str, Callable[..., Peer]] = {"nflows": _nflows, "zuko": _zuko, "normflows": _normflows, "FrEIA": _freia}
SPLINES: dict[str, Callable[..., Peer]] = {"nflows": _nflows, "zuko": _zuko, "normflows": _normflows}
GLOWS: dict[str, Callable[..., Peer]] = {"normflows": _normflows_glow, "FrEIA": _freia_glow}


def installed(among: Mapping[str, Any] = PEERS) -> list[str]:
    """Return the installed libraries of PEERS, SPLINES or GLOWS."""
    return [name for name in among if find_spec(name)]
