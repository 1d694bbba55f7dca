"""Factorial priors against scipy (NICE §3.4)."""

import numpy as np
import pytest
import torch
from scipy import stats

from nicest.flows import Gaussian, Logistic, Prior

LAWS = {Gaussian: stats.norm, Logistic: stats.logistic}
both = pytest.mark.parametrize("prior_class", LAWS)
learned_or_fixed = pytest.mark.parametrize("learned", [False, True])


def make(prior_class: type[Prior], dim: int, learned: bool) -> tuple[Prior, np.ndarray, np.ndarray]:
    """A prior in float64, with its location and scale of every dimension."""
    prior = prior_class(dim, learned=learned).double()
    if learned:
        torch.nn.init.normal_(prior.loc)
        torch.nn.init.normal_(prior.log_scale, std=0.5)
    loc, log_scale = (np.broadcast_to(t.detach().numpy(), dim) for t in (prior.loc, prior.log_scale))
    return prior, loc, np.exp(log_scale)


@both
@learned_or_fixed
@pytest.mark.parametrize("dim", [1, 2, 17])
def test_log_density_is_scipys(prior_class, learned: bool, dim: int):
    prior, loc, scale = make(prior_class, dim, learned)
    h = 5 * torch.randn(50, dim, dtype=torch.float64)
    expected = LAWS[prior_class].logpdf(h.numpy(), loc, scale).sum(1)
    np.testing.assert_allclose(prior.log_prob(h).detach(), expected, rtol=1e-12, atol=1e-12)


@both
def test_log_density_is_scipys_in_the_tails(prior_class):
    h = torch.linspace(-60, 60, 2401, dtype=torch.float64)[:, None]
    expected = LAWS[prior_class].logpdf(h[:, 0].numpy())
    np.testing.assert_allclose(prior_class(1).double().log_prob(h), expected, rtol=1e-12)


def test_gradient_of_the_logistic_is_minus_tanh_of_half_everywhere():
    h = (torch.arange(-1200, 1201, dtype=torch.float64) / 20)[:, None].requires_grad_()  # 0, too, where |h| has a kink
    Logistic(1).double().log_prob(h).sum().backward()
    torch.testing.assert_close(h.grad, -torch.tanh(h.detach() / 2), rtol=1e-12, atol=1e-12)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [-1e4, -100.0, 100.0, 1e4])
def test_extreme_values_and_their_gradients_are_finite(prior_class, dtype: torch.dtype, value: float):
    prior = prior_class(3, learned=True).to(dtype)
    h = torch.full((2, 3), value, dtype=dtype, requires_grad=True)
    log_prob = prior.log_prob(h)
    log_prob.sum().backward()
    assert log_prob.shape == (2,)
    assert log_prob.dtype == dtype
    assert all(t.isfinite().all() for t in (log_prob, h.grad, prior.loc.grad, prior.log_scale.grad))
    slope = -abs(value) if prior_class is Gaussian else -1.0  # d log p / d|h|
    torch.testing.assert_close(h.grad, torch.full_like(h, np.sign(value) * slope))


@both
@learned_or_fixed
def test_samples_follow_scipys_law(prior_class, learned: bool):
    prior, loc, scale = make(prior_class, 3, learned)
    h = prior.rsample(20_000).detach().numpy()
    for d in range(3):
        assert stats.kstest(h[:, d], LAWS[prior_class].cdf, args=(loc[d], scale[d])).pvalue > 0.005
    variance = LAWS[prior_class].var() * scale**2
    assert np.all(np.abs(h.mean(0) - loc) < 4 * np.sqrt(variance / len(h)))
    np.testing.assert_allclose(h.var(0), variance, rtol=0.06)
    assert np.all(np.abs(np.corrcoef(h.T) - np.eye(3)) < 0.03)


@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
def test_the_ends_of_float32_noise_are_as_far_out_as_they_are_rare(u: float, monkeypatch):
    """torch.rand gives 0 once in 2^24 draws; the draw that comes of it must not be one of 1 in e^87."""
    monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.full(shape, u))
    h = Logistic(1).rsample(1)
    assert h.isfinite().all()
    assert 2**-27 < stats.logistic.sf(h.abs().double().item()) < 2**-22


@both
def test_temperature_multiplies_the_scale_about_loc(prior_class):
    prior, loc, _ = make(prior_class, 3, learned=True)
    hot, cold = (
        prior.rsample(9, temperature=t, generator=torch.Generator().manual_seed(3)).detach().numpy() for t in (1.0, 0.3)
    )
    np.testing.assert_allclose(cold - loc, 0.3 * (hot - loc), rtol=1e-12)
    np.testing.assert_allclose(prior.rsample(2, temperature=0.0).detach(), np.tile(loc, (2, 1)))
    np.testing.assert_allclose(prior.mode, loc)
    assert not prior.mode.requires_grad


@both
def test_generator_makes_sampling_reproducible(prior_class):
    prior = prior_class(3)
    one, same, other = (prior.rsample(5, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    state = torch.get_rng_state()
    prior.rsample(5, generator=torch.Generator())
    assert torch.equal(torch.get_rng_state(), state)


@both
def test_gradients_of_rsample(prior_class):
    prior, _, scale = make(prior_class, 3, learned=True)
    h = prior.rsample(6)
    e = (h.detach() - prior.loc.detach()) / prior.log_scale.detach().exp()
    h.sum().backward()
    torch.testing.assert_close(prior.loc.grad, torch.full((3,), 6.0, dtype=torch.float64))
    torch.testing.assert_close(prior.log_scale.grad, e.sum(0) * torch.from_numpy(scale.copy()))


@both
def test_learned_has_parameters_and_fixed_has_none(prior_class):
    shapes = {name: tuple(p.shape) for name, p in prior_class(4, learned=True).named_parameters()}
    assert shapes == {"loc": (4,), "log_scale": (4,)}
    assert not list(prior_class(4).parameters())
    assert not prior_class(4).state_dict()
    h = torch.randn(3, 4)
    torch.testing.assert_close(prior_class(4, learned=True).log_prob(h), prior_class(4).log_prob(h))


@both
def test_empty_batch(prior_class):
    assert prior_class(3).log_prob(torch.zeros(0, 3)).shape == (0,)
    assert prior_class(3).rsample(0).shape == (0, 3)


@both
def test_samples_and_density_stay_on_the_device_of_the_prior(prior_class):
    prior = prior_class(3).to("meta")
    h = prior.rsample(4)
    assert h.device.type == prior.log_prob(h).device.type == "meta"


@both
@learned_or_fixed
@pytest.mark.parametrize("got", [1, 4])
def test_wrong_number_of_dimensions_is_refused(prior_class, learned: bool, got: int):
    with pytest.raises((ValueError, RuntimeError), match=rf"3.*{got}|{got}.*3"):
        prior_class(3, learned=learned).log_prob(torch.zeros(2, got))


@both
@learned_or_fixed
def test_cdf_and_quantile_are_scipys(prior_class, learned: bool):
    prior, loc, scale = make(prior_class, 3, learned)
    e, law = 4 * torch.randn(50, 3, dtype=torch.float64), LAWS[prior_class]
    np.testing.assert_allclose(prior.standard_cdf(e), law.cdf(e.numpy()), rtol=1e-10)
    p = torch.rand(50, 3, dtype=torch.float64)
    np.testing.assert_allclose(prior.quantile(p).detach(), law(loc, scale).ppf(p.numpy()), rtol=1e-10, atol=1e-12)
