"""Dequantisation, rescaling, logit (NICE §5.1)."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from nicest.flows import Chain, Dequantize, DequantizeColumns, Flow, Gaussian, Logit, Prior, Rescale

LEVELS = (2, 17, 256, 65536)


class Uniform(Prior):
    """The uniform density on [0, 1]^D."""

    def standard_log_prob(self, e: Tensor) -> Tensor:
        return torch.where((e >= 0) & (e < 1), 0.0, -math.inf).sum(-1)

    def standard_sample(self, shape, generator):
        return torch.rand(shape, generator=generator)


def constant_noise(monkeypatch: pytest.MonkeyPatch, u: float) -> None:
    monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.full(shape, u, **options))


def largest_below_one(dtype: torch.dtype) -> float:
    return torch.nextafter(torch.ones((), dtype=dtype), torch.zeros((), dtype=dtype)).item()


class TestDequantize:
    @pytest.mark.parametrize("levels", LEVELS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_values_lie_in_their_cell_and_inverse_gives_them_back(self, levels: int, dtype: torch.dtype):
        layer, x = Dequantize(levels).to(dtype), torch.arange(levels)[None]
        for _ in range(1 if levels > 1000 else 100):
            y, _ = layer(x)
            assert torch.equal(layer.inverse(y), x.to(dtype))
            assert ((y.double() * levels - x >= -1e-9) & (y.double() * levels - x < 1)).all()

    @pytest.mark.parametrize("levels", [*LEVELS, 49, 100])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("noise", ["none", "largest"])
    def test_extreme_noise_stays_in_the_cell(self, levels: int, dtype: torch.dtype, noise: str, monkeypatch):
        constant_noise(monkeypatch, 0.0 if noise == "none" else largest_below_one(dtype))
        layer, x = Dequantize(levels).to(dtype), torch.arange(levels)[None]
        y, _ = layer(x)
        assert y.max() < 1
        assert torch.equal(layer.inverse(y), x.to(dtype))

    @pytest.mark.parametrize("levels", LEVELS)
    def test_float32_never_reaches_the_next_level(self, levels: int, monkeypatch):
        constant_noise(monkeypatch, largest_below_one(torch.float32))
        x = torch.arange(levels)[None]
        y = Dequantize(levels)(x)[0]
        assert y.dtype == torch.float32
        assert (y[0, 1:] > y[0, :-1]).all()
        assert (y[0].double() < (x[0].double() + 1) / levels).all()

    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_noise_is_fresh_for_every_call_image_and_pixel(self, mode: str):
        layer = Dequantize().double()
        getattr(layer, mode)()
        x = torch.zeros(20, 30)
        draws = torch.stack([layer(x)[0], layer(x)[0]])
        assert draws.unique().numel() == draws.numel()

    def test_noise_is_uniform_with_mean_one_half_and_variance_one_twelfth(self):
        x = torch.randint(256, (500, 400))
        u = (Dequantize().double()(x)[0] * 256 - x).flatten()
        n = u.numel()
        assert abs(u.mean().item() - 1 / 2) < 4 * math.sqrt(1 / 12 / n)
        assert abs(u.var().item() - 1 / 12) < 4 * math.sqrt(1 / 180 / n)
        assert stats.kstest(u.numpy(), "uniform").pvalue > 0.01

    @pytest.mark.parametrize("levels", LEVELS)
    @pytest.mark.parametrize("dim", [1, 7])
    def test_log_det(self, levels: int, dim: int):
        log_det = Dequantize(levels).double()(torch.zeros(3, dim))[1]
        torch.testing.assert_close(log_det, torch.full((3,), -dim * math.log(levels), dtype=torch.float64))

    @pytest.mark.parametrize("given", [torch.uint8, torch.int64, torch.float32, torch.float64])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_takes_any_dtype_to_that_of_the_flow(self, given: torch.dtype, dtype: torch.dtype):
        x = torch.arange(256).to(given).view(2, 128)
        before, layer = x.clone(), Dequantize().to(dtype)
        y, log_det = layer(x)
        assert y.dtype == log_det.dtype == dtype
        assert torch.equal(layer.inverse(y), x.to(dtype))
        assert torch.equal(x, before)

    def test_empty_batch(self):
        y, log_det = Dequantize()(torch.zeros(0, 5, dtype=torch.uint8))
        assert (y.shape, log_det.shape, Dequantize().inverse(y).shape) == ((0, 5), (0,), (0, 5))

    def test_inverse_stays_among_the_levels(self):
        y = torch.tensor([[-0.3, 0.0, 0.5, 0.9999, 1.0, 1.7]])
        assert Dequantize(4).inverse(y).tolist() == [[0, 0, 2, 3, 3, 3]]

    def test_uniform_density_is_exactly_eight_bits_per_dimension(self):
        flow, x = Flow(Dequantize().double(), Uniform(784).double()), torch.randint(256, (10, 784)).to(torch.uint8)
        bits_per_dim = -flow.log_prob(x) / (784 * math.log(2))
        torch.testing.assert_close(bits_per_dim, torch.full((10,), 8.0, dtype=torch.float64), rtol=1e-14, atol=0)

    @pytest.mark.parametrize("levels", [1, 0, -3])
    def test_fewer_than_two_levels_are_refused(self, levels: int):
        with pytest.raises(ValueError, match=str(levels)):
            Dequantize(levels)

    def test_has_nothing_to_save(self):
        assert not Dequantize().state_dict()


class TestRescale:
    def test_unit_interval_to_minus_one_one(self):
        layer = Rescale(-1.0, 2.0, 3)
        y, log_det = layer(torch.tensor([[0.0, 0.5, 1.0]]))
        assert y.tolist() == [[-1, 0, 1]]
        torch.testing.assert_close(log_det, torch.tensor([3 * math.log(2)]))

    def test_standardises_columns(self):
        x = torch.randn(100, 3) * torch.tensor([0.1, 1.0, 10.0]) + 5
        y, log_det = Rescale(-x.mean(0) / x.std(0), 1 / x.std(0), 3)(x)
        torch.testing.assert_close(y.mean(0), torch.zeros(3), rtol=0, atol=1e-4)
        torch.testing.assert_close(y.std(0), torch.ones(3))
        torch.testing.assert_close(log_det, -x.std(0).log().sum().expand(100))

    @pytest.mark.parametrize("scale", [0.0, -1.0, math.nan])
    def test_a_scale_that_is_not_positive_is_refused(self, scale: float):
        with pytest.raises(ValueError, match="positive"):
            Rescale(0.0, torch.tensor([1.0, scale]), 2)

    def test_does_not_follow_the_callers_tensor(self):
        shift, scale = torch.zeros(3), torch.ones(3)
        layer = Rescale(shift, scale, 3)
        shift.fill_(7), scale.fill_(7)
        assert (layer.shift.tolist(), layer.scale.tolist()) == ([0, 0, 0], [1, 1, 1])


class TestLogit:
    def test_is_the_formula(self):
        margin, x = 0.05, torch.rand(4, 3, dtype=torch.float64)
        y, log_det = Logit(margin)(x)
        a = margin + (1 - 2 * margin) * x
        torch.testing.assert_close(y, torch.log(a / (1 - a)))
        torch.testing.assert_close(log_det, (math.log(1 - 2 * margin) - a.log() - (1 - a).log()).sum(1))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_margin_keeps_the_ends_finite(self, dtype: torch.dtype):
        x = torch.tensor([[0.0, 1.0]], dtype=dtype)
        y, log_det = Logit()(x)
        assert y.isfinite().all()
        assert log_det.isfinite().all()
        torch.testing.assert_close(Logit().inverse(y), x, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("margin", [-0.1, 0.5, math.nan])
    def test_margin_outside_its_interval_is_refused(self, margin: float):
        with pytest.raises(ValueError, match=str(margin)):
            Logit(margin)

    def test_log_det_far_out_is_exact(self):
        y = torch.tensor([[-25.0, -20.5]], dtype=torch.float64)
        a = y.sigmoid()
        expected = -(a.log() + torch.log1p(-a)).sum(1)
        torch.testing.assert_close(Logit(0.0)(a)[1], expected, rtol=1e-13, atol=0)


def test_interval_changes_the_log_det_by_d_ln_2():
    x = torch.randint(256, (5, 11))
    unit, symmetric = Chain(Dequantize()).double(), Chain(Dequantize(), Rescale(-1.0, 2.0, 11)).double()
    torch.testing.assert_close(symmetric(x)[1] - unit(x)[1], torch.full((5,), 11 * math.log(2), dtype=torch.float64))


class TestDequantizeColumns:
    """Columns of whole steps beside continuous ones."""

    STEPS = (0.0, 1.0, 5.0, 0.25, 0.1, 86400.0, 0.0)

    def layer(self, dtype: torch.dtype = torch.float64) -> DequantizeColumns:
        return DequantizeColumns(torch.tensor(self.STEPS, dtype=dtype))

    def rows(self, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Whole steps, and anything where there are none."""
        step = torch.tensor(self.STEPS, dtype=dtype)
        return torch.where(
            step > 0, torch.randint(-900, 900, (n, len(step))) * step, torch.randn(n, len(step)).to(dtype)
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("noise", ["fresh", "none", "largest"])
    def test_inverse_gives_the_steps_back(self, dtype: torch.dtype, noise: str, monkeypatch):
        if noise != "fresh":
            constant_noise(monkeypatch, 0.0 if noise == "none" else largest_below_one(dtype))
        layer, x = self.layer(dtype), self.rows(2000, dtype)
        y, log_det = layer(x)
        assert torch.equal(layer.inverse(y), x)
        assert (y.dtype, log_det.dtype, log_det.shape) == (dtype, dtype, (2000,))
        assert torch.equal(y[:, [0, 6]], x[:, [0, 6]])
        assert (y >= x).all()
        assert (y <= x + layer.step).all()

    @pytest.mark.parametrize("noise", ["none", "largest"])
    def test_a_million_steps_in_float32(self, noise: str, monkeypatch):
        constant_noise(monkeypatch, 0.0 if noise == "none" else largest_below_one(torch.float32))
        x = torch.arange(1 << 20).float()[:, None]
        layer = DequantizeColumns(torch.ones(1))
        y = layer(x)[0]
        assert torch.equal(layer.inverse(y), x)
        assert (y[1:] > y[:-1]).all()

    def test_log_det(self):
        expected = sum(math.log(step) for step in self.STEPS if step)
        torch.testing.assert_close(self.layer()(self.rows(3))[1], torch.full((3,), expected, dtype=torch.float64))

    def test_a_uniform_density_over_k_steps_gives_each_one_kth(self):
        """Prior uniform on [0, 1], cells of width 5 in a range of 20: each of the 4 has probability 1/4."""
        layer = DequantizeColumns(torch.tensor([5.0, 0.0]))
        flow = Flow(Chain(layer, Rescale(0.0, torch.tensor([1 / 20, 1.0]), 2)), Uniform(2)).double()
        x = torch.tensor([[0.0, 0.5], [5.0, 0.1], [10.0, 0.9], [15.0, 0.2]], dtype=torch.float64)
        torch.testing.assert_close(flow.log_prob(x), torch.full((4,), math.log(1 / 4), dtype=torch.float64))

    def test_the_mean_bounds_the_probability_of_the_step_from_below(self):
        """A Gaussian density: E log p(x + u) over u, by quadrature and by draws, below log of the cell's mass."""
        step, scale = 2.0, 3.0
        flow = Flow(Chain(DequantizeColumns(torch.tensor([step])), Rescale(0.0, 1 / scale, 1)), Gaussian(1)).double()
        x = torch.arange(-4, 4, dtype=torch.float64)[:, None] * step
        nodes, weights = map(torch.from_numpy, np.polynomial.legendre.leggauss(40))
        u = (nodes + 1) / 2
        density = stats.norm(scale=scale)
        mean = (torch.from_numpy(density.logpdf((x + step * u).numpy())) * weights / 2).sum(1) + math.log(step)
        true = torch.from_numpy(np.log(density.cdf((x + step).numpy()) - density.cdf(x.numpy())))[:, 0]
        draws = flow.log_prob(x.repeat_interleave(20_000, 0)).view(len(x), -1)
        error = draws.std(1) / math.sqrt(draws.shape[1])
        assert ((draws.mean(1) - mean).abs() < 5 * error).all()
        assert (mean < true).all()
        assert (true - mean).max() < 0.2
        assert true.exp().sum() < 1

    def test_dtype_moves_with_the_flow_and_whole_numbers_are_taken(self):
        layer = DequantizeColumns(torch.tensor([1.0, 0.0]))
        assert layer.double()(torch.zeros(2, 2))[0].dtype == torch.float64
        assert layer.float()(torch.zeros(2, 2, dtype=torch.int64))[0].dtype == torch.float32
        assert layer.to("meta")(torch.zeros(2, 2, device="meta"))[0].device.type == "meta"
        assert list(layer.state_dict()) == ["step"]

    def test_noise_is_fresh_and_uniform(self):
        layer, x = DequantizeColumns(torch.ones(30)).double(), torch.zeros(200, 30, dtype=torch.float64)
        draws = torch.stack([layer(x)[0], layer(x)[0]]).flatten()
        assert draws.unique().numel() == draws.numel()
        assert stats.kstest(draws.numpy(), "uniform").pvalue > 0.01

    def test_refused(self):
        for bad in ([-1.0], [math.nan]):
            with pytest.raises(ValueError, match="every step must be 0 or more"):
                DequantizeColumns(torch.tensor(bad))
        with pytest.raises(ValueError, match="expected 7 features, got 3"):
            self.layer()(torch.zeros(2, 3))
        assert repr(self.layer()) == "DequantizeColumns(5 of 7)"

    def test_the_continuous_flow_is_without_it(self):
        flow = Flow(Chain(self.layer(), Rescale(0.0, 1.0, 7)), Gaussian(7)).double()
        x = self.rows(5)
        y, log_det = flow.chain[:1](x)
        assert len(flow.continuous().chain) == 1
        assert flow.continuous().log_prob(y).shape == log_det.shape
        assert not flow.to_distribution().has_rsample
