"""Layers of one dimension at a time; that they invert and have the right log-det is in `test_bijections.py`."""

import math

import pytest
import torch
from scipy import stats
from zoo import initialised

from nicest.flows import Logit, SinhArcsinh


def bent(x: torch.Tensor) -> torch.Tensor:
    return initialised(SinhArcsinh(x.shape[1]).double(), x)(x)[0]


def test_it_starts_as_the_identity():
    x = torch.randn(10, 3).double()
    y, log_det = SinhArcsinh(3).double()(x)
    torch.testing.assert_close(y, x)
    torch.testing.assert_close(log_det, torch.zeros(10).double())


@pytest.mark.parametrize("law", [stats.lognorm(0.8), stats.t(3), stats.gumbel_r(5, 0.01)])
def test_fitted_columns_have_a_gaussians_skew_and_tails(law):
    x = torch.from_numpy(law.rvs((4_000, 2), random_state=0))
    before, after = stats.kurtosis(x), stats.kurtosis(bent(x))
    assert abs(stats.skew(bent(x))).max() < 0.2
    assert abs(after).max() < 0.5 * max(1.0, abs(before).max())


def test_fitting_raises_the_likelihood_of_the_column():
    x = torch.from_numpy(stats.lognorm(1).rvs((2_000, 1), random_state=0))
    layer = initialised(SinhArcsinh(1).double(), x)
    y, log_det = layer(x)
    found = (log_det + torch.from_numpy(stats.norm.logpdf(y[:, 0].numpy()))).mean()
    assert found == pytest.approx(stats.lognorm(1).logpdf(x).mean(), abs=0.05)


@pytest.mark.parametrize("rows", [torch.zeros(5, 2), torch.ones(1, 2), torch.tensor([[0.0, 1e30], [1, -1e30]])])
def test_hopeless_columns_stay_finite(rows: torch.Tensor):
    layer = initialised(SinhArcsinh(2).double(), rows.double())
    assert all(bool(buffer.isfinite().all()) for buffer in layer.buffers())


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
        torch.testing.assert_close(Logit().inverse(y)[0], x, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("margin", [-0.1, 0.5, math.nan])
    def test_margin_outside_its_interval_is_refused(self, margin: float):
        with pytest.raises(ValueError, match=str(margin)):
            Logit(margin)

    def test_log_det_far_out_is_exact(self):
        y = torch.tensor([[-25.0, -20.5]], dtype=torch.float64)
        a = y.sigmoid()
        expected = -(a.log() + torch.log1p(-a)).sum(1)
        torch.testing.assert_close(Logit(0.0)(a)[1], expected, rtol=1e-13, atol=0)
