"""Rectified networks as one operation: the same numbers as the layers they stand for, and gradients by hand."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from zoo import LAWS

from nicest.fast import LoweredChain
from nicest.fast.networks import FastMLP
from nicest.fast.rectified import Buffers, rectified
from nicest.flows import MLP, Additive, Affine, Chain, Coupling, Law, odd_even

HIDDEN = {"none": (), "one": (5,), "equal": (6, 6, 6), "unequal": (4, 7, 3)}
nets = pytest.mark.parametrize("hidden", HIDDEN.values(), ids=HIDDEN)


def linears(network: MLP) -> list[nn.Linear]:
    return [layer for layer in network.layers if isinstance(layer, nn.Linear)]


def read(network: MLP, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """By hand, in float64: a `FastMLP` in its own dtype would not."""
    fast = FastMLP(network, torch.float64)
    both = x if context is None else torch.cat((x, context), -1)
    found, b = rectified(both, *fast.weights(), torch.float64, dropout=fast.rate)
    return found[:, : x.shape[1]], b


def gradients(b: Tensor, x: Tensor, network: nn.Module) -> list[Tensor]:
    """Of a loss that asks something else of each number."""
    loss = (b * torch.linspace(-1, 1, b.numel(), dtype=b.dtype).view_as(b)).sum() + x.square().sum()
    return list(torch.autograd.grad(loss, [x, *network.parameters()]))


@nets
@pytest.mark.parametrize("context", [0, 2])
def test_in_float64_it_is_the_network_itself(hidden: tuple[int, ...], context: int):
    torch.manual_seed(0)
    network = MLP(4, 3, hidden, context_dim=context).double()
    x = torch.randn(9, 8, dtype=torch.float64)[:, ::2].requires_grad_()  # strided, as a partition gives it
    beside = torch.randn(9, context, dtype=torch.float64) if context else None
    settled, b = read(network, x, beside)
    torch.testing.assert_close(settled, x, rtol=0, atol=1e-12)
    torch.testing.assert_close(b, network(x, beside), rtol=0, atol=1e-12)
    for ours, autograds in zip(gradients(b, x, network), gradients(network(x, beside), x, network), strict=True):
        torch.testing.assert_close(ours, autograds, rtol=1e-10, atol=1e-12)


def test_x_gets_both_its_own_gradient_and_that_through_m():
    network = MLP(4, 3, (6, 6)).double()
    x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    settled, b = read(network, x)
    (ours,) = torch.autograd.grad((settled**3).sum() + b.sum(), x)
    (autograds,) = torch.autograd.grad((x**3).sum() + network(x).sum(), x)
    torch.testing.assert_close(ours, autograds)


def test_nothing_is_computed_for_weights_that_need_no_gradient(monkeypatch: pytest.MonkeyPatch):
    network = MLP(4, 3, (6, 6)).double().requires_grad_(False)
    x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    _, b = read(network, x)
    (expected,) = torch.autograd.grad(network(x).sum(), x)
    monkeypatch.setattr(torch, "bmm", None)
    monkeypatch.setattr(torch, "mm", None)
    (ours,) = torch.autograd.grad(b.sum(), x)
    torch.testing.assert_close(ours, expected)


def test_dropout_drops_in_training_alone_and_its_gradient_is_that_of_what_was_kept():
    network = MLP(50, 1, (400,), dropout=0.25).double()
    with torch.no_grad():
        linears(network)[1].weight.fill_(1.0)
        linears(network)[1].bias.zero_()
    x = torch.randn(200, 50, dtype=torch.float64, requires_grad=True)
    exact = network.layers[:2](x)
    _, b = read(network, x)
    dropped = float((b.mean() / exact.sum(-1).mean()).detach())
    assert dropped == pytest.approx(1, abs=0.02)
    assert (b[:, 0] - exact.sum(-1)).abs().max() > 1
    grad_w, grad_b = torch.autograd.grad(b.sum(), [linears(network)[0].weight, linears(network)[0].bias])
    full_w, full_b = torch.autograd.grad(exact.sum(), [linears(network)[0].weight, linears(network)[0].bias])
    assert float(grad_b.sum() / full_b.sum()) == pytest.approx(1, abs=0.02)
    # each unit's loss is linear in its weights: w · dL/dw + b · dL/db is what reaches the output
    w, bias = linears(network)[0].weight, linears(network)[0].bias
    torch.testing.assert_close((w * grad_w).sum() + (bias * grad_b).sum(), b.sum())
    torch.testing.assert_close((w * full_w).sum() + (bias * full_b).sum(), exact.sum())
    torch.testing.assert_close(read(network.eval(), x)[1][:, 0], exact.sum(-1))


@nets
def test_with_buffers_copies_are_read_as_they_are_and_gradients_written_there(hidden: tuple[int, ...]):
    torch.manual_seed(1)
    network = MLP(4, 3, hidden).double()
    x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    expected = gradients(read(network, x)[1], x, network)
    fast = FastMLP(network, torch.float64)
    sizes = [layer.weight.numel() for layer in fast.linears]
    flat, ends = torch.zeros(sum(sizes), dtype=torch.float64), [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    room = [flat[a:b].view_as(layer.weight) for (a, b), layer in zip(pairwise(ends), fast.linears, strict=True)]
    copies = [(layer.weight.detach().clone(), layer.bias.detach().clone()) for layer in fast.linears]
    biases = torch.zeros(len(fast.linears), max(len(layer.bias) for layer in fast.linears), dtype=torch.float64)
    fast.buffers = Buffers(copies, room, biases)
    with torch.no_grad():
        for p in network.parameters():
            p.fill_(float("nan"))  # the copies alone are read
    _, b = rectified(x, *fast.weights(), torch.float64, buffers=fast.buffers)
    loss = (b * torch.linspace(-1, 1, b.numel(), dtype=b.dtype).view_as(b)).sum() + x.square().sum()
    loss.backward()
    assert all(p.grad is None for p in network.parameters())
    torch.testing.assert_close(x.grad, expected[0])
    for k, layer in enumerate(fast.linears):
        torch.testing.assert_close(room[k], expected[1 + 2 * k])
        torch.testing.assert_close(biases[k, : len(layer.bias)], expected[2 + 2 * k])
        assert biases[k, len(layer.bias) :].eq(0).all()


def stack(law: Additive | Affine, dim: int = 64) -> LoweredChain:
    torch.manual_seed(3)
    partition, layers = odd_even(dim), []
    for _ in range(6):
        layers.append(Coupling(partition, law, MLP(dim // 2, law.size * dim // 2, (64, 64))))
        partition = partition.swap()
    return LoweredChain(Chain(*layers), torch.bfloat16)


class TestGrid:
    x = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def test_a_stack_of_additive_couplings_in_bfloat16_inverts_like_float32(self):
        chain = stack(Additive())
        assert (chain.inverse(chain(self.x)[0])[0] - self.x).abs().max() < 2**-17  # once, to get on the grid

    @torch.no_grad()
    def test_and_to_the_bit_from_then_on(self):
        chain = stack(Additive())
        y = chain(self.x)[0]
        assert torch.equal(chain(chain.inverse(y)[0])[0], y)

    @torch.no_grad()
    def test_latent_to_data_and_back(self):
        chain = stack(Additive())
        assert (chain(chain.inverse(self.x)[0])[0] - self.x).abs().max() < 2**-17

    @torch.no_grad()
    def test_without_the_grid_it_does_not(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("nicest.fast.rectified.SHIFT", 0.0)
        chain = stack(Additive())
        assert (chain.inverse(chain(self.x)[0])[0] - self.x).abs().max() > 2**-12


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_in_bfloat16_only_the_network_is_rounded(law: Law):
    layer, x = Coupling(odd_even(64), law, MLP(32, 32 * law.size, (64, 64))), torch.randn(50, 64)
    exact, _ = layer(x)
    fast = LoweredChain(layer, torch.bfloat16)
    y, log_det = fast(x)
    _, b = fast.networks[0].read(layer.partition.split(x)[0], None)
    assert y.dtype == log_det.dtype == b.dtype == torch.float32
    assert (b - b.bfloat16().float()).abs().max() <= 2**-18  # bfloat16, put on the grid of the stream
    assert (fast.inverse(y)[0] - x).abs().max() < 2**-17
    assert 1e-5 < (y - exact).abs().max() < 0.1
