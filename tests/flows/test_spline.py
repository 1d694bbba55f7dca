"""The rational-quadratic spline law: against other libraries, at extremes, and its shape."""

import math

import pytest
import torch
from torch.testing import assert_close

from benchmarks.inversions import worst_inversions
from nicest.flows import Flow, Gaussian, Spline, Units
from nicest.flows.marginals import Elementwise


def drawn(law: Spline, n: int, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers within and beyond the bound, and parameters."""
    a = torch.linspace(-1.5 * law.bound, 1.5 * law.bound, n, dtype=torch.float64)[:, None]
    return a, size * torch.randn(n, law.size, dtype=torch.float64)


def knots(law: Spline, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Places, heights and slopes of the knots, written down once more."""
    widths, heights, slopes = b.split((law.bins, law.bins, law.bins - 1), -1)
    x, y = (
        torch.cat((torch.zeros(len(b), 1), (1e-3 + (1 - 1e-3 * law.bins) * each.softmax(-1)).cumsum(-1)), -1)
        for each in (widths, heights)
    )
    ends = torch.ones(len(b), 1)
    d = torch.cat((ends, (7 * torch.tanh(slopes / 7)).exp(), ends), -1)
    return 2 * law.bound * x - law.bound, 2 * law.bound * y - law.bound, d


class TestShape:
    @pytest.mark.parametrize("law", [Spline(), Spline(bins=2), Spline(bins=30, bound=1.5)])
    def test_it_passes_its_knots_with_their_slopes(self, law: Spline):
        _, b = drawn(law, 50)
        x, y, d = knots(law, b)
        for k in range(law.bins + 1):
            near = x[:, k : k + 1].requires_grad_()
            found, _ = law.forward(near, b[:, None])
            (slope,) = torch.autograd.grad(found.sum(), near)
            assert_close(found[:, 0], y[:, k], rtol=0, atol=1e-9)
            assert_close(slope[:, 0], d[:, k], rtol=1e-5, atol=1e-9)

    def test_between_knots_it_is_the_quotient_of_the_paper(self):
        law = Spline()
        a, b = drawn(law, 400)
        x, y, d = knots(law, b)
        found, log_det = law.forward(a, b[:, None])
        for i in range(len(a)):
            v = float(a[i])
            if abs(v) >= law.bound:
                assert float(found[i]) == v
                assert float(log_det[i]) == 0
                continue
            k = int(torch.searchsorted(x[i], v, right=True)) - 1
            w, h, d0, d1 = x[i, k + 1] - x[i, k], y[i, k + 1] - y[i, k], d[i, k], d[i, k + 1]
            t, s = (v - x[i, k]) / w, h / w
            below = s + (d1 + d0 - 2 * s) * t * (1 - t)  # Durkan et al. 2019, eq. 4 and 5
            assert_close(found[i, 0], y[i, k] + h * (s * t**2 + d0 * t * (1 - t)) / below)
            assert_close(log_det[i, 0].exp(), s**2 * (d1 * t**2 + 2 * s * t * (1 - t) + d0 * (1 - t) ** 2) / below**2)

    @pytest.mark.parametrize("size", [0.0, 1.0, 10.0, 1e30])
    def test_it_never_falls(self, size: float):
        law = Spline()
        a = torch.linspace(-5, 5, 20_001, dtype=torch.float64)[:, None]
        for _ in range(20):
            b = size * torch.randn(1, law.size, dtype=torch.float64)
            assert float(law.forward(a, b.expand(len(a), 1, -1))[0].diff(dim=0).min()) >= -1e-12

    @pytest.mark.parametrize(
        ("bins", "bound"), [(1, 4.0), (0, 4.0), (257, 4.0), (8, 0.0), (8, -1.0), (8, float("nan"))]
    )
    def test_settings_that_make_no_spline_are_refused(self, bins: int, bound: float):
        with pytest.raises(ValueError, match="expected"):
            Spline(bins, bound)


class TestExtremes:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_no_inversion_fails(self, dtype: torch.dtype):
        """`python -m benchmarks.inversions` does the same a hundred million times."""
        found = worst_inversions(400_000, dtype, torch.device("cpu"), seed=0)
        assert found["not_finite"] == 0
        assert found["failed"] == 0

    def test_gradients_stay_finite(self):
        law = Spline()
        for size in (1.0, 30.0, 1e6, 1e30):
            a = (3 * torch.randn(5000, 1)).requires_grad_()
            b = (size * torch.randn(5000, 1, law.size)).requires_grad_()
            y, log_det = law.forward(a, b)
            x, log_slope = law.inverse(3 * torch.randn(5000, 1), b)
            for gradient in torch.autograd.grad(sum(each.sum() for each in (y, log_det, x, log_slope)), (a, b)):
                assert bool(gradient.isfinite().all())


@pytest.mark.peers
class TestPeers:
    def test_nflows(self):
        splines = pytest.importorskip("nflows.transforms.splines.rational_quadratic")
        law = Spline()
        a, b = drawn(law, 1000)
        widths, heights, slopes = b[:, None].split((8, 8, 7), -1)
        # a slope of theirs is 1e-3 + softplus
        theirs = torch.log(torch.expm1((7 * torch.tanh(slopes / 7)).exp() - 1e-3))
        y, log_det = splines.unconstrained_rational_quadratic_spline(
            a, widths, heights, theirs, tails="linear", tail_bound=4.0
        )
        found, found_log_det = law.forward(a, b[:, None])
        inside = a[:, 0].abs() < 4
        assert_close(found[inside], y[inside], rtol=0, atol=1e-9)
        assert_close(found_log_det[inside], log_det[inside], rtol=0, atol=1e-7)

    def test_zuko(self):
        transforms = pytest.importorskip("zuko.transforms")
        law = Spline()
        a, b = drawn(law, 200)
        x, y, d = knots(law, b)
        for i in range(len(a)):
            # theirs is made of its own raw numbers: give it the knots
            theirs = transforms.MonotonicRQSTransform(torch.zeros(8), torch.zeros(8), torch.zeros(7))
            theirs.horizontal, theirs.vertical, theirs.derivatives = x[i], y[i], d[i]
            found, ladj = theirs.call_and_ladj(a[i])
            ours, log_det = law.forward(a[i : i + 1], b[i : i + 1, None])
            assert_close(ours[0], found, rtol=0, atol=1e-9)
            assert_close(log_det[0], ladj, rtol=0, atol=1e-9)


def mixture(n: int, seed: int) -> torch.Tensor:
    """Two narrow bumps, at -1 and 1."""
    generator = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, (n, 1), generator=generator) * 2.0 - 1
    return sign + 0.05 * torch.randn(n, 1, generator=generator)


class TestMarginalLaw:
    """A spline in every dimension: the likelihood of rows unseen comes near the entropy of their law."""

    ENTROPY = 0.5 + 0.5 * math.log(2 * math.pi * 0.05**2) + math.log(2)

    def test_is_fitted_by_quantiles(self):
        flow = Flow(Units.continuous(1, standardise=False), Elementwise(Spline(bins=32), 1), Gaussian(1))
        flow.initialise(mixture(4000, 0))
        with torch.no_grad():
            assert float(flow.log_prob(mixture(4000, 1)).mean()) == pytest.approx(-self.ENTROPY, abs=0.15)
            grid = torch.linspace(-9, 9, 200_001)[:, None]
            assert float(torch.trapezoid(flow.log_prob(grid).exp(), grid[:, 0])) == pytest.approx(1, abs=1e-3)

    def test_is_learnt(self):
        flow, x = (
            Flow(Units.continuous(1, standardise=False), Elementwise(Spline(16), 1), Gaussian(1)),
            mixture(4000, 0),
        )
        optimizer = torch.optim.Adam(flow.parameters(), 0.05)
        for _ in range(300):
            optimizer.zero_grad()
            (-flow.log_prob(x).mean()).backward()
            optimizer.step()
        with torch.no_grad():
            assert float(flow.log_prob(mixture(4000, 1)).mean()) == pytest.approx(-self.ENTROPY, abs=0.1)

    @pytest.mark.parametrize(
        "x", [torch.zeros(50, 2), torch.full((50, 2), 1e9), torch.arange(4.0)[:, None].expand(4, 2)]
    )
    def test_rows_that_tell_nothing_leave_a_law(self, x: torch.Tensor):
        layer = Elementwise(Spline(), 2)
        layer.initialise(x)
        y, log_det = layer(torch.randn(100, 2))
        assert bool(y.isfinite().all() & log_det.isfinite().all())

    def test_knots_that_are_given_are_met(self):
        law, y = Spline(bins=5), torch.tensor([[-2.0, -1.0, 0.5, 3.0]], dtype=torch.float64)
        x = torch.tensor([[-3.0, -0.5, 0.0, 1.0]], dtype=torch.float64)
        found, _ = law.forward(x.mT, law.through(x, y).expand(4, 1, -1))
        assert_close(found, y.mT, rtol=0, atol=0.05)
