"""Columns bent to a Gaussian's shape; that it inverts and counts its volume is in `test_bijections.py`."""

import pytest
import torch
from scipy import stats

from nicest.flows import SinhArcsinh


def bent(x: torch.Tensor) -> torch.Tensor:
    return SinhArcsinh(x.shape[1]).double().fit(x)(x)[0]


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
    layer = SinhArcsinh(1).double().fit(x)
    y, log_det = layer(x)
    found = (log_det + torch.from_numpy(stats.norm.logpdf(y[:, 0].numpy()))).mean()
    assert found == pytest.approx(stats.lognorm(1).logpdf(x).mean(), abs=0.05)


@pytest.mark.parametrize("rows", [torch.zeros(5, 2), torch.ones(1, 2), torch.tensor([[0.0, 1e30], [1, -1e30]])])
def test_hopeless_columns_stay_finite(rows: torch.Tensor):
    layer = SinhArcsinh(2).double().fit(rows.double())
    assert all(bool(buffer.isfinite().all()) for buffer in layer.buffers())
