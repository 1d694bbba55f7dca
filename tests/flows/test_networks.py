"""Coupling functions: deep rectified networks with linear output units (NICE §5.1)."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close
from zoo import LAWS

from nicest.flows import MLP, AffineSpline, Coupling, Spline, odd_even
from nicest.flows.noise import Dropout


def linears(network: MLP) -> list[nn.Linear]:
    return [layer for layer in network.modules() if isinstance(layer, nn.Linear)]


def test_default_is_the_papers_mnist_network():
    assert [(m.in_features, m.out_features) for m in linears(MLP(392, 392))] == [
        (392, 1000),
        *[(1000, 1000)] * 4,
        (1000, 392),
    ]


@pytest.mark.parametrize("hidden", [(), (7,), (7, 4), (3, 8, 5)])
@pytest.mark.parametrize("context_dim", [0, 2])
def test_depth_and_widths(hidden: tuple[int, ...], context_dim: int):
    sizes = [(m.in_features, m.out_features) for m in linears(MLP(5, 6, hidden, context_dim=context_dim))]
    assert sizes == list(zip((5 + context_dim, *hidden), (*hidden, 6), strict=True))


def test_is_rectified_inside_and_linear_at_the_output():
    network, x, context = MLP(3, 50, (8, 9), context_dim=2), torch.randn(20, 3), torch.randn(20, 2)
    first, second, last = linears(network)
    expected = last(functional.relu(second(functional.relu(first(torch.cat((x, context), 1))))))
    torch.testing.assert_close(network(x, context), expected)
    assert (network(x, context) < 0).any()


def test_uniform_is_the_authors_initialisation():
    layers = linears(MLP(50, 60, (200, 200), initialisation="uniform"))
    for layer in layers:
        assert 0.0099 < layer.weight.abs().max() <= 0.01
        assert layer.weight.abs().mean().item() == pytest.approx(0.005, rel=0.05)
        assert not layer.bias.any()


def test_torch_is_torchs_own_initialisation():
    torch.manual_seed(5)
    network = MLP(3, 4, (6,))
    torch.manual_seed(5)
    for layer, expected in zip(linears(network), (nn.Linear(3, 6), nn.Linear(6, 4)), strict=True):
        assert torch.equal(layer.weight, expected.weight)
        assert torch.equal(layer.bias, expected.bias)


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_zero_last_makes_the_coupling_start_as_identity(law):
    layer = Coupling(odd_even(6), law, MLP(3, 3 * law.size, (8, 8), initialisation="zero-last"))
    x = torch.randn(5, 6)
    y, log_det = layer(x)
    assert_close(y, x, rtol=0, atol=1e-6 if isinstance(law, Spline | AffineSpline) else 0)
    assert_close(log_det, torch.zeros(5), rtol=0, atol=1e-6 if isinstance(law, Spline | AffineSpline) else 0)
    y.square().sum().backward()
    assert linears(layer.network)[-1].weight.grad.any()  # and it can leave


def test_unknown_initialisation_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"uniform.*got 'xavier'"):
        MLP(3, 3, (4,), initialisation="xavier")


def test_dropout_follows_every_rectifier_in_training_alone():
    network, x = MLP(4, 4, (64, 64), dropout=0.5), torch.randn(10, 4)
    assert [type(m) for m in network.layers] == [nn.Linear, nn.ReLU, Dropout] * 2 + [nn.Linear]
    network.train()
    assert not torch.equal(network(x), network(x))
    network.eval()
    assert torch.equal(network(x), network(x))
    plain = MLP(4, 4, (64, 64)).train()
    assert torch.equal(plain(x), plain(x))


class LowRank(nn.Module):
    """A linear layer with a trainable update of rank 1."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 1, bias=False), nn.Linear(1, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize(
    ("at", "replacement"), [(1, lambda old: nn.Tanh()), (2, LowRank), (4, LowRank)], ids=["tanh", "inner", "last"]
)
def test_a_replaced_layer_is_called(at: int, replacement: Callable[[nn.Module], nn.Module]):
    network, x = MLP(4, 4, (8, 8)), torch.randn(5, 4)
    before = network(x)
    network.layers[at] = replacement(network.layers[at])
    expected = x
    for layer in network.layers:
        expected = layer(expected)
    assert torch.equal(network(x), expected)
    assert (network(x) - before).abs().max() > 1e-3


def test_hooks_on_inner_layers_run():
    network, seen = MLP(4, 4, (8, 8)), []
    for layer in network.layers:
        layer.register_forward_hook(lambda module, *_: seen.append(module))
    network(torch.randn(5, 4))
    assert seen == list(network.layers)
