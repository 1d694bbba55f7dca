"""Convolutional networks as one operation: the same numbers as the modules they stand for, and gradients by hand."""

import pytest
import torch
from parity import assert_close_in_bfloat16, assert_parity
from parity import gradients as of_criterion
from torch import Tensor, nn
from torch.testing import assert_close

from nicest.fast import LoweredChain, conv
from nicest.fast.conv import FastConv, deterministic
from nicest.flows import Affine, AffineSpline, ChannelMixing, ConvNet, Coupling, Law, channels
from nicest.inference.engine import Share

SHAPES = {"wide": (2, 3, 4), "one channel": (1, 2, 2), "one pixel": (3, 1, 1)}


def network(
    shape: tuple[int, int, int], law: Law, blocks: int = 2, dropout: float = 0.0, context_dim: int = 0
) -> ConvNet:
    made = ConvNet(shape, 2, law.size, 5, blocks, dropout=dropout, context_dim=context_dim).double()
    for p in made.parameters():
        nn.init.normal_(p, std=0.3)
    return made


def gradients(b: Tensor, x: Tensor, network: nn.Module) -> list[Tensor]:
    """Of a loss that asks something else of each number."""
    weights = torch.linspace(-1, 1, b.numel(), dtype=b.dtype, device=b.device).view_as(b)
    return list(torch.autograd.grad((b * weights).sum(), [x, *network.parameters()], allow_unused=True))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("blocks", [0, 1, 3])
@pytest.mark.parametrize("law", [Affine(), AffineSpline(4)], ids=str)
def test_in_float64_it_is_the_network_itself(shape: tuple[int, int, int], blocks: int, law: Law):
    torch.manual_seed(0)
    m = network(shape, law, blocks)
    x = torch.randn(3, 2 * m.place[0].numel() * shape[0], dtype=torch.float64)[:, ::2].requires_grad_()  # strided
    found, expected = FastConv(m, torch.float64).read(x)[1], m(x)
    assert_close(found, expected, rtol=0, atol=1e-12)
    for ours, autograds in zip(gradients(found, x, m), gradients(expected, x, m), strict=True):
        assert_close(ours, autograds, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("blocks", [0, 2])
def test_a_context_is_read_as_the_network_reads_it(shape: tuple[int, int, int], blocks: int):
    torch.manual_seed(0)
    m = network(shape, Affine(), blocks, context_dim=10)
    x = torch.randn(3, m.place[0].numel() * shape[0], dtype=torch.float64, requires_grad=True)
    context = torch.eye(10, dtype=torch.float64)[[3, 0, 9]]
    fast = FastConv.of(m, torch.float64)
    assert fast
    found, expected = fast.read(x, context)[1], m(x, context)
    assert_close(found, expected, rtol=0, atol=1e-12)
    assert (expected - m(x, context.roll(1, 0))).abs().max() > 0.01
    for ours, autograds in zip(gradients(found, x, m), gradients(expected, x, m), strict=True):
        assert_close(ours, autograds, rtol=1e-10, atol=1e-12)


def test_dropout_drops_what_every_process_agrees_on():
    m, rows = network((2, 3, 4), Affine(), 2, dropout=0.3), torch.randn(6, 24, dtype=torch.float64)
    fast = FastConv(m, torch.float64)
    torch.manual_seed(3)
    together, after = fast.read(rows)[1], torch.rand(())
    assert (together - m.eval()(rows)).abs().max() > 1e-3
    assert_close(fast.read(rows)[1], m(rows))
    m.train()
    for rank in range(2):
        share = Share(rank, 2)
        torch.manual_seed(3)
        with share.of(6):
            assert_close(fast.read(share.rows(rows))[1], share.rows(together), rtol=0, atol=1e-12)
        assert torch.rand(()) == after


def test_dropout_has_the_gradient_of_what_was_kept():
    m, x = network((2, 2, 3), Affine(), 2, dropout=0.3), torch.randn(2, 12, dtype=torch.float64, requires_grad=True)
    fast = FastConv(m, torch.float64)

    def read(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return fast.read(x)[1]

    assert torch.autograd.gradcheck(read, x)


def test_what_dropout_keeps_is_scaled():
    c, bias, rate = torch.randn(50, 40, dtype=torch.float64), torch.randn(40, dtype=torch.float64), 0.3
    u, mean, kept = torch.empty_like(c), c.new_empty(5, 40), torch.empty(5, 10, 40).bernoulli_(1 - rate)
    conv._activate(c, bias, kept, rate, u, mean)
    expected = nn.functional.silu(c + bias)
    assert_close(u[u != 0], expected[kept.view_as(u) != 0] / (1 - rate))
    assert int((u == 0).sum()) == int((kept == 0).sum())
    assert_close(mean, u.view(5, 10, 40).mean(1))


def test_only_the_network_that_was_made_has_this_form():
    assert FastConv.of(network((2, 2, 2), Affine()), torch.bfloat16)
    other = network((2, 2, 2), Affine())
    other.blocks[0].inner = nn.Conv2d(5, 5, 3, padding=1, padding_mode="circular")
    for each in (other, nn.Conv2d(1, 1, 1)):
        assert FastConv.of(each, torch.bfloat16) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
class TestOnAGPU:
    @pytest.mark.parametrize("shape", [*SHAPES.values(), (3, 9, 14)], ids=str)
    @pytest.mark.parametrize("width", [5, 48, 128])
    @pytest.mark.parametrize(("dropout", "context_dim"), [(0.0, 0), (0.2, 0), (0.0, 10)])
    def test_kernels_compute_what_torch_does(
        self,
        shape: tuple[int, int, int],
        width: int,
        dropout: float,
        context_dim: int,
        monkeypatch: pytest.MonkeyPatch,
    ):
        m = ConvNet(shape, 2, AffineSpline().size, width, 2, dropout=dropout, context_dim=context_dim)
        for p in m.parameters():
            nn.init.normal_(p, std=0.1)
        m, x = m.cuda(), torch.randn(7, 2 * m.place[0].numel() * shape[0], device="cuda")[:, ::2].requires_grad_()
        fast, found = FastConv(m, torch.float32), []
        for _ in range(2):
            torch.manual_seed(0)
            b = fast.read(x, torch.eye(10, device="cuda")[:7] if context_dim else None)[1]
            found.append([b, *gradients(b, x, m)])
            monkeypatch.setattr(conv, "kernels_for", lambda _: None)
        for ours, torchs in zip(*found, strict=True):
            assert_close(ours, torchs, rtol=1e-3, atol=1e-3 * torchs.detach().abs().max().item())

    def test_a_coupling_agrees_with_float32_and_learns_the_same_bits_twice(self):
        torch.manual_seed(0)
        layer = Coupling(part := channels(6, 8, 8), AffineSpline(), ConvNet((3, 8, 8), 3, AffineSpline().size, 64, 3))
        for p in layer.parameters():
            nn.init.normal_(p, std=0.05)
        layer, x = layer.cuda(), torch.randn(100, part.dim, device="cuda")
        assert_close_in_bfloat16(layer, x)
        with deterministic():
            first, second = (of_criterion(LoweredChain(layer, torch.bfloat16), layer, x) for _ in range(2))
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))

    @pytest.mark.parametrize("shape", [(1, 2, 2), (3, 7, 5), (48, 4, 4), (64, 3, 1), (70, 2, 2)], ids=str)
    def test_channels_are_mixed_as_the_plain_layer_does(self, shape: tuple[int, int, int]):
        layer = ChannelMixing(shape)
        for p in layer.parameters():
            nn.init.normal_(p, std=0.1)
        assert_parity(layer.cuda(), torch.randn(9, 2 * layer.dim, device="cuda")[:, ::2])
