"""The same weights in other flow libraries' own blocks give the same log-density, in float64."""

import importlib
import math
import warnings
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from zoo import LAWS, PARTITIONS, couplings, inputs, randomised

from nicest.flows import Additive, Chain, Coupling, DiagonalScaling, Flow, Gaussian, Multiplicative, Units

pytestmark = pytest.mark.peers

laws = pytest.mark.parametrize("law", ["additive", "multiplicative", "affine"])  # those that the peers have
dims = pytest.mark.parametrize("dim", [2, 5, 6])
partitions = pytest.mark.parametrize("partition", ["odd_even", "halves", "irregular"])


def peer(name: str) -> ModuleType:
    """A peer's module, its import warnings silenced and torch's own defaults kept."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(name.split(".")[0], reason=f"{name} is the oracle: install nicest[bench]")
        module = importlib.import_module(name)
    Distribution.set_default_validate_args(True)  # zuko turns it off for everybody
    return module


def make(dim: int, law: str, partition: str) -> Flow:
    """The paper's architecture under a Gaussian prior."""
    chain = couplings(dim, LAWS[law], 4, PARTITIONS[partition])
    units = Units.continuous(dim, standardise=False)
    return Flow(units, Chain(*chain, randomised(DiagonalScaling(dim))), Gaussian(dim)).double()


def parts(flow: Flow) -> tuple[list[Coupling], Tensor]:
    """The couplings of the flow and the s of its scaling."""
    *layers, scaling = flow.bijection
    return layers, scaling.s.detach()


def scale_and_shift(layer: Coupling, x1: Tensor) -> tuple[Tensor, Tensor]:
    """log factor and shift of a law, written out again: l = 2 tanh(b1 / 2)."""
    b = layer.network(x1)
    match layer.law:
        case Additive():
            return torch.zeros_like(b), b
        case Multiplicative():
            return 2 * torch.tanh(b / 2), torch.zeros_like(b)
        case _:
            b1, b2 = b.unflatten(1, (-1, 2)).unbind(2)
            return 2 * torch.tanh(b1 / 2), b2


def assert_equal_densities(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 1e-10
    assert ours.std() > 0.1


class Network(nn.Module):
    """A network for a peer, which may hand it a context or a mask too."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, *_: object) -> Tensor:
        return self.function(x)


@laws
@dims
@partitions
def test_nflows(law: str, dim: int, partition: str):
    """Its factor is sigmoid(u + 2) + 0.001, below 1.001: the log factor is shifted below 0 and s put right for it."""
    flows, transforms, distributions = (peer(f"nflows.{part}") for part in ("flows", "transforms", "distributions"))
    flow, x = make(dim, law, partition), inputs("", 20, dim)
    layers, s = parts(flow)
    shrink, stack = 0.0 if law == "additive" else 2.0, []
    for layer in layers:
        changed = torch.zeros(dim)
        changed[list(layer.partition.i2)] = 1

        def parameters(x1: Tensor, layer: Coupling = layer) -> Tensor:
            log_scale, shift = scale_and_shift(layer, x1)
            if law == "additive":
                return shift
            return torch.cat((shift * math.exp(-shrink), torch.logit(torch.exp(log_scale - shrink) - 1e-3) - 2), 1)

        block = transforms.AdditiveCouplingTransform if law == "additive" else transforms.AffineCouplingTransform
        stack.append(block(changed, lambda *_, m=parameters: Network(m)))
        stack.append(transforms.PointwiseAffineTransform(0.0, torch.exp(shrink * changed.double())))
    stack.append(transforms.PointwiseAffineTransform(0.0, s.exp()))
    theirs = flows.Flow(transforms.CompositeTransform(stack), distributions.StandardNormal([dim])).double()
    assert_equal_densities(flow.log_prob(x), theirs.log_prob(x))


@laws
@dims
@partitions
def test_zuko(law: str, dim: int, partition: str):
    """Its log factor is a / (1 + |a / log slope|)."""
    distributions, transforms = peer("zuko.distributions"), peer("zuko.transforms")
    flow, x = make(dim, law, partition), inputs("", 20, dim)
    layers, s = parts(flow)
    slope = 1e-3

    def unconstrained(log_scale: Tensor) -> Tensor:
        return log_scale / (1 - abs(log_scale / math.log(slope)))

    stack = []
    for layer in layers:

        def conditional(x1: Tensor, layer: Coupling = layer):
            log_scale, shift = scale_and_shift(layer, x1)
            if law == "additive":
                univariate = transforms.AdditiveTransform(shift)
            else:
                univariate = transforms.MonotonicAffineTransform(shift, unconstrained(log_scale), slope)
            return transforms.DependentTransform(univariate, 1)

        constant = torch.zeros(dim, dtype=torch.bool)
        constant[list(layer.partition.i1)] = True
        stack.append(transforms.CouplingTransform(conditional, constant))
    top = transforms.MonotonicAffineTransform(torch.zeros_like(s), unconstrained(s), slope)
    stack.append(transforms.DependentTransform(top, 1))
    base = distributions.DiagNormal(torch.zeros_like(s), torch.ones_like(s))
    theirs = distributions.NormalizingFlow(transforms.ComposedTransform(*stack), base)
    assert_equal_densities(flow.log_prob(x), theirs.log_prob(x))


@laws
@dims
def test_freia(law: str, dim: int):
    """A block of its is two couplings, the first half changes and then the second; its log factor is 2 tanh(u)."""
    framework, modules = peer("FrEIA.framework"), peer("FrEIA.modules")
    flow, x = make(dim, law, "halves-swapped"), inputs("", 20, dim)
    layers, s = parts(flow)
    theirs = framework.SequenceINN(dim)
    for left, right in (layers[:2], layers[2:]):
        if law == "additive":
            block, order = modules.NICECouplingBlock, [left.network, right.network]
        else:
            block, order = modules.RNVPCouplingBlock, [u_or_shift(m, k) for m in (right, left) for k in (0, 1)]
        clamp = {} if law == "additive" else {"clamp": 2.0, "clamp_activation": "TANH"}
        networks = iter(order)
        theirs.append(block, subnet_constructor=lambda *_, it=networks: next(it), split_len=(dim + 1) // 2, **clamp)
    theirs.append(modules.FixedLinearTransform, M=s.exp().diag())
    h, log_det = theirs(x)
    base = torch.distributions.Normal(torch.zeros_like(h), 1.0)
    assert_equal_densities(flow.log_prob(x), base.log_prob(h).sum(1) + log_det)


def u_or_shift(layer: Coupling, which: int) -> Network:
    """FrEIA's two networks of a coupling: u with 2 tanh(u) the log factor, and the shift."""
    if which == 0:
        return Network(lambda x1: torch.atanh(scale_and_shift(layer, x1)[0] / 2))
    return Network(lambda x1: scale_and_shift(layer, x1)[1])


@laws
@dims
@partitions
def test_normflows(law: str, dim: int, partition: str):
    """Its direction is from latent to data, and its masked networks read and give all D numbers."""
    normflows = peer("normflows")
    flow, x = make(dim, law, partition), inputs("", 20, dim)
    layers, s = parts(flow)

    def spread(layer: Coupling, which: int) -> Network:
        def network(masked: Tensor) -> Tensor:
            out = torch.zeros_like(masked)
            out[:, list(layer.partition.i2)] = scale_and_shift(layer, masked[:, list(layer.partition.i1)])[which]
            return out

        return Network(network)

    stack = []
    for layer in layers:
        constant = torch.zeros(dim, dtype=torch.float64)
        constant[list(layer.partition.i1)] = 1
        stack.append(normflows.flows.MaskedAffineFlow(constant, t=spread(layer, 1), s=spread(layer, 0)))
    top = normflows.flows.AffineConstFlow(dim, shift=False)
    top.s.data = s[None]
    reverse = [normflows.flows.Reverse(block) for block in (*stack, top)]
    base = normflows.distributions.DiagGaussian(dim, trainable=False)
    theirs = normflows.NormalizingFlow(base, reverse[::-1]).double()
    assert_equal_densities(flow.log_prob(x), theirs.log_prob(x))
