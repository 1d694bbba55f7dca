"""Diagonal scaling (NICE §3.3), approximate whitening (NICE App. B), exact ZCA (NICE §5.1), moments."""

import numpy as np
import pytest
import torch
from scipy import stats
from zoo import correlated, initialised

from nicest.flows import ZCA, Bijection, DiagonalScaling, Flow, Gaussian, TriangularAffine, Units, moments
from nicest.flows.linear import mean_and_variance

whitenings = pytest.mark.parametrize("whitening", [TriangularAffine, ZCA])


def gaussian_flow(layer: Bijection, dim: int) -> Flow:
    return Flow(Units.continuous(dim, standardise=False), layer, Gaussian(dim)).double()


def test_diagonal_scaling_is_exp_s_and_its_spectrum_exp_minus_s():
    layer = DiagonalScaling(3)
    layer.s.data = torch.tensor([-1.0, 0.0, 2.0])
    y, log_det = layer(torch.ones(4, 3))
    torch.testing.assert_close(y, torch.tensor([-1.0, 0.0, 2.0]).exp().expand(4, 3))
    torch.testing.assert_close(log_det, torch.ones(4))
    torch.testing.assert_close(layer.sigma, 1 / y[0])
    assert not layer.sigma.requires_grad


@whitenings
@pytest.mark.parametrize("dim", [2, 3, 17])
def test_whitens_exactly(whitening, dim: int):
    x = correlated(200, dim)
    y = initialised(whitening(dim).double(), x)(x)[0].detach()
    np.testing.assert_allclose(y.mean(0), 0, atol=1e-9)
    np.testing.assert_allclose(np.cov(y.T, bias=True), np.eye(dim), atol=1e-9)


@whitenings
@pytest.mark.parametrize("dim", [2, 3, 17])
def test_fitted_layer_under_a_gaussian_prior_is_the_sample_gaussian(whitening, dim: int):
    x, new = correlated(300, dim), correlated(20, dim)
    flow = gaussian_flow(initialised(whitening(dim).double(), x), dim)
    expected = stats.multivariate_normal(x.mean(0).numpy(), np.cov(x.numpy().T, bias=True)).logpdf(new.numpy())
    np.testing.assert_allclose(flow.log_prob(new).detach(), expected, rtol=1e-9)


@whitenings
def test_shrinkage_is_the_fraction_by_which_covariances_are_reduced(whitening):
    x, new = correlated(300, 4), correlated(20, 4)
    flow = gaussian_flow(initialised(whitening(4, shrinkage=0.3).double(), x), 4)
    covariance = np.cov(x.numpy().T, bias=True)
    shrunk = np.where(np.eye(4), covariance, 0.7 * covariance)
    expected = stats.multivariate_normal(x.mean(0).numpy(), shrunk).logpdf(new.numpy())
    np.testing.assert_allclose(flow.log_prob(new).detach(), expected, rtol=1e-9)


@pytest.mark.parametrize("rows", [7, 8192])
def test_missing_cells_do_not_count_in_mean_and_variance(rows: int):
    x = correlated(100, 3)
    x[::3, 0] = x[::7, 1] = torch.nan
    mean, variance = mean_and_variance(x, rows)
    np.testing.assert_allclose(mean, np.nanmean(x.numpy(), axis=0), rtol=1e-12)
    np.testing.assert_allclose(variance, np.nanvar(x.numpy(), axis=0), rtol=1e-12)


def test_triangular_closed_form_is_the_inverse_cholesky_factor():
    x = correlated(100, 4)
    layer = initialised(TriangularAffine(4).double(), x)
    lower = np.linalg.inv(np.linalg.cholesky(np.cov(x.numpy().T, bias=True)))
    np.testing.assert_allclose(layer.lower.detach(), lower, atol=1e-10)
    np.testing.assert_allclose(layer.b.detach(), -lower @ x.numpy().mean(0), atol=1e-9)


def test_triangular_is_lower_triangular_whatever_its_parameters():
    layer = TriangularAffine(4)
    torch.nn.init.normal_(layer.below)
    torch.nn.init.normal_(layer.log_diagonal)
    assert not layer.lower.triu(1).any()
    assert (layer.lower.diagonal() > 0).all()


def test_training_by_the_nice_criterion_reaches_the_closed_form():
    x = correlated(200, 3) / 2
    closed = initialised(TriangularAffine(3).double(), x)
    trained = TriangularAffine(3).double()
    flow = gaussian_flow(trained, 3)
    options = {"max_iter": 100, "tolerance_grad": 1e-12, "tolerance_change": 0, "line_search_fn": "strong_wolfe"}
    optimiser = torch.optim.LBFGS(flow.parameters(), **options)

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = -flow.log_prob(x).mean()
        loss.backward()
        return loss

    optimiser.step(closure)
    torch.testing.assert_close(trained.lower, closed.lower, rtol=0, atol=1e-5)
    torch.testing.assert_close(trained.b, closed.b, rtol=0, atol=1e-5)
    best = gaussian_flow(closed, 3).log_prob(x).mean()
    assert abs((best - flow.log_prob(x).mean()).item()) < 1e-9


@pytest.mark.parametrize("dim", [2, 5])
def test_zca_is_symmetric_with_its_log_det(dim: int):
    x = correlated(200, dim)
    layer = initialised(ZCA(dim).double(), x)
    covariance = np.cov(x.numpy().T, bias=True)
    np.testing.assert_allclose(layer.whiten, layer.whiten.T, atol=1e-12)
    assert (torch.linalg.eigvalsh(layer.whiten) > 0).all()
    np.testing.assert_allclose(layer.whiten @ layer.whiten @ torch.from_numpy(covariance), np.eye(dim), atol=1e-8)
    np.testing.assert_allclose(layer.whiten @ layer.colour, np.eye(dim), atol=1e-10)
    assert layer.log_det.item() == pytest.approx(-0.5 * np.linalg.slogdet(covariance)[1], abs=1e-10)


@whitenings
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_is_fitted_in_float64_whatever_the_data(whitening, dtype: torch.dtype):
    x = (correlated(500, 4) * 10 + 100).clamp(0, 255).to(dtype)
    fitted, expected = initialised(whitening(4).double(), x), initialised(whitening(4).double(), x.double())
    for key, value in fitted.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[key], rtol=1e-12, atol=1e-12)
    single = initialised(whitening(4), x)  # a layer in float32 holds the float64 fit, rounded once
    for key, value in single.state_dict().items():
        assert torch.equal(value, expected.state_dict()[key].float())


def of_rank_3(case: str) -> torch.Tensor:
    """Rows whose covariance has rank 3."""
    x = torch.randn(50, 3, dtype=torch.float64) @ torch.randn(3, 3, dtype=torch.float64)
    more = {"dependent": x @ torch.randn(3, 1, dtype=torch.float64), "constant": torch.full((50, 1), 0.1).double()}
    return torch.randn(4, 6).double() if case == "few" else torch.cat((x, more[case]), 1)[:, torch.randperm(4)]


@whitenings
@pytest.mark.parametrize("case", [*["dependent"] * 30, "constant", "few"])
def test_a_covariance_without_full_rank_is_refused_with_the_rank(whitening, case: str):
    x = of_rank_3(case)
    with pytest.raises(ValueError, match=f"rank 3 of {x.shape[1]}"):
        initialised(whitening(x.shape[1]).double(), x)


@whitenings
def test_a_small_but_full_rank_covariance_is_accepted(whitening):
    x = torch.randn(500, 3, dtype=torch.float64) * torch.tensor([1.0, 1e-3, 1e-5])  # eigenvalues down to 1e-10
    y = initialised(whitening(3).double(), x)(x)[0].detach()
    np.testing.assert_allclose(np.cov(y.T, bias=True), np.eye(3), atol=1e-5)


@pytest.mark.parametrize("rows", [1, 7, 100, 8192])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_moments_are_numpys_in_chunks_of_any_size(rows: int, dtype: torch.dtype):
    x = (correlated(100, 3) * 10 + 100).clamp(0, 255).to(dtype)
    mean, covariance = moments(x, rows)
    assert mean.dtype == covariance.dtype == torch.float64
    np.testing.assert_allclose(mean, x.double().numpy().mean(0), rtol=1e-12)
    np.testing.assert_allclose(covariance, np.cov(x.double().numpy().T, bias=True), rtol=1e-10, atol=1e-10)


def test_moments_keep_their_digits_far_from_zero():
    x = torch.randn(1000, 2, dtype=torch.float64)
    np.testing.assert_allclose(moments(x + 1e7)[1], moments(x)[1], atol=1e-7)


def test_fit_moments_is_initialise():
    x = correlated(100, 3)
    for whitening in (TriangularAffine, ZCA):
        one, two = initialised(whitening(3).double(), x), whitening(3).double()
        two.fit_moments(*moments(x))
        assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
