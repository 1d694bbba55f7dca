"""The spline law by hand beside the plain one under autograd: inside, in the tails and at their ends."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from nicest.fast import LoweredChain
from nicest.fast.spline import FastSpline
from nicest.flows import MLP, Chain, Coupling, Law, Spline, odd_even


def found(law: Law, a: Tensor, b: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Return g, log g', and the gradients of a and b of a sum of both."""
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    y, log_det = law.forward(a, b)
    return y, log_det, *torch.autograd.grad((y * weight).sum() + (log_det * weight.flip(1)).sum(), (a, b))


def drawn(law: Spline, rows: int, n: int, *, shared: bool, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    a = law.bound * torch.randn(rows, n).double()
    return a, spread * torch.randn(1 if shared else rows, n, law.size).double(), torch.randn(rows, n).double()


@pytest.mark.parametrize("spread", [1.0, 5.0])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 50])
@pytest.mark.parametrize("law", [Spline(2), Spline(8), Spline(5, 1e-3), Spline(33, 1e6)], ids=str)
def test_it_is_the_plain_law(law: Spline, rows: int, shared: bool, spread: float):
    for n in (1, 3):
        a, b, weight = drawn(law, rows, n, shared=shared, spread=spread)
        fast, plain = found(FastSpline(law), a, b, weight), found(law, a, b.expand(rows, -1, -1), weight)
        gradient = plain[3].sum(0, keepdim=True) if shared else plain[3]
        for one, other in zip(fast, (*plain[:3], gradient), strict=True):
            assert_close(one, other, rtol=1e-7, atol=1e-9 * max(1.0, float(other.detach().abs().max())))


def test_in_the_tails_and_at_their_ends_a_number_stays_to_the_bit():
    for dtype in (torch.float32, torch.float64):
        a = torch.tensor([4.0, -4.0, 4.5, -1e30, float("inf")], dtype=dtype)[:, None]
        b = 3 * torch.randn(5, 1, 23, dtype=dtype)
        y, log_det, ga, gb = found(FastSpline(Spline()), a, b, torch.ones_like(a))
        assert torch.equal(y, a)
        assert torch.equal(log_det, torch.zeros(5, 1, dtype=dtype))
        assert torch.equal(ga, torch.ones_like(a))
        assert not gb.any()


def test_slopes_at_their_limits_get_no_gradient():
    b = torch.randn(50, 1, 23)
    b[..., 16:] = 1e4
    assert not found(FastSpline(Spline()), torch.randn(50, 1), b, torch.randn(50, 1))[3][..., 16:].any()


@pytest.mark.parametrize("size", [1e2, 1e4, 1e30])
def test_no_logits_are_too_large_for_float32(size: float):
    law = Spline()
    a, b = 3 * torch.randn(500, 2), size * torch.randn(500, 2, law.size)
    fast, plain = found(FastSpline(law), a, b, torch.ones(500, 2)), found(law, a, b, torch.ones(500, 2))
    assert all(each.isfinite().all() for each in fast)
    assert_close(fast[0], plain[0], rtol=1e-3, atol=1e-3)


def test_no_rows():
    law = Spline(4)
    y, log_det, ga, gb = found(FastSpline(law), torch.randn(0, 2), torch.randn(0, 2, law.size), torch.randn(0, 2))
    assert [tuple(each.shape) for each in (y, log_det, ga, gb)] == [(0, 2), (0, 2), (0, 2), (0, 2, 11)]


def test_autocast_takes_no_digits_from_a_spline_and_its_gradients_come():
    part, law = odd_even(4), Spline()
    networks = [MLP(2, 2 * law.size, (16,)) for _ in range(2)]
    chain = Chain(*(Coupling(p, law, each) for p, each in zip((part, part.swap()), networks, strict=True)))
    for p in chain.parameters():
        nn.init.normal_(p, std=0.3)
    x = torch.randn(200, 4)
    for each in (chain, LoweredChain(chain, torch.float32)):
        with torch.autocast("cpu", torch.bfloat16):
            y, log_det = each(x)
        (y.sum() + log_det.sum()).backward()
    a, b = torch.randn(200, 2), torch.randn(200, 2, law.size)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(FastSpline(law).forward(a, b), law.forward(a, b), rtol=0, atol=0)
