"""The comparison of posteriors: its simulators against closed forms and scipy, and what is scored."""

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.integrate import odeint

from nicest.studies import compare_posteriors, simulators
from nicest.studies.compare_posteriors import METHODS, Simulations, c2st, posteriors, trial
from nicest.studies.simulators import TASKS, infected

sbibm = pytest.mark.skipif(importlib.util.find_spec("sbibm") is None, reason="sbibm is not installed")


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_the_epidemic_is_that_of_scipy():
    theta = TASKS["sir"].draw(50, rng())[0]

    def slope(state: list[float], t: float, beta: float, gamma: float) -> list[float]:
        new = beta * state[0] * state[1] / 1e6
        return [-new, new - gamma * state[1], gamma * state[1]]

    start, days = [1e6 - 1, 1, 0], np.arange(161.0)
    exact = [odeint(slope, start, days, tuple(each), rtol=1e-10, atol=1e-8)[::17, 1] for each in theta]
    np.testing.assert_allclose(infected(theta), exact, rtol=1e-5, atol=1e-3)
    x = TASKS["sir"].simulate(np.repeat(theta[:1], 20_000, 0), rng())
    np.testing.assert_allclose(x.mean(0), exact[0] / 1e3, rtol=0.01, atol=0.02)


def test_slcp_is_four_points_of_a_gaussian():
    theta = np.array([0.5, -1.0, 1.2, 0.8, 0.7])
    x = TASKS["slcp"].simulate(np.repeat(theta[None], 50_000, 0), rng()).reshape(-1, 2)
    s1, s2, r = 1.44, 0.64, np.tanh(0.7)
    np.testing.assert_allclose(x.mean(0), theta[:2], atol=0.02)
    np.testing.assert_allclose(np.cov(x.T), [[s1**2, r * s1 * s2], [r * s1 * s2, s2**2]], rtol=0.02)


def test_points_of_the_moons_lie_on_a_crescent_that_is_moved():
    theta, x = TASKS["two_moons"].draw(5000, rng())
    moved = x - np.column_stack([-np.abs(theta.sum(1)), theta[:, 1] - theta[:, 0]]) / np.sqrt(2) - [0.25, 0]
    assert (moved[:, 0] > 0).all()
    assert stats.kstest(np.linalg.norm(moved, axis=1), stats.norm(0.1, 0.01).cdf).pvalue > 0.01
    assert stats.kstest(np.arctan2(*moved.T[::-1]), stats.uniform(-np.pi / 2, np.pi).cdf).pvalue > 0.01


def test_the_mixture_has_two_widths():
    theta, x = TASKS["gaussian_mixture"].draw(5000, rng())
    both = stats.norm(0, 1), stats.norm(0, 0.1)
    assert stats.kstest((x - theta)[:, 0], lambda z: sum(law.cdf(z) for law in both) / 2).pvalue > 0.01


@sbibm
def test_the_score_of_the_true_posterior_is_0_in_the_mean():
    """E ∇ log p(θ | x) = 0 under p(θ | x): of the neuron, ∇ = x - Xᵀ sigmoid(X θ) - P θ. So its prior, design and sums
    are those of the stored posterior."""
    task = TASKS["bernoulli_glm"]
    theta, x = task.posterior(1), task.observation(1)
    design = torch.load(simulators.files("bernoulli_glm") / "design_matrix.pt", weights_only=True).double().numpy()
    precision: Any = task.prior().precision_matrix.double().numpy()  # type: ignore[attr-defined]
    score = x - 1 / (1 + np.exp(-theta @ design.T)) @ design - theta @ precision
    assert np.abs(score.mean(0) / (score.std(0) / np.sqrt(len(score)))).max() < 6
    repeated = np.repeat(theta[:1], 20_000, 0)
    np.testing.assert_allclose(
        task.simulate(repeated, rng()).mean(0), (1 / (1 + np.exp(-theta[0] @ design.T))) @ design, atol=0.2
    )


@sbibm
@pytest.mark.parametrize("name", TASKS)
def test_stored_posteriors_fit_the_simulators(name: str):
    task = TASKS[name]
    for i in (1, 10):
        theta, observed = task.posterior(i), task.observation(i)
        assert len(theta) == 10_000
        assert not task.outside(torch.from_numpy(theta)).any()
        x = task.simulate(theta, rng())
        below = ((x < observed).mean(0) + (x <= observed).mean(0)) / 2  # where it stands among what they predict
        assert x.shape[1] == observed.shape[1]
        assert below.min() > 1e-4
        assert below.max() < 1 - 1e-4


def test_c2st_of_two_gaussians_is_known():
    """δ apart, the best classifier is right with probability Φ(δ/2); without a difference, half of the time."""
    x, y = rng().normal(size=(2, 2000, 2))
    assert c2st(3 * x + 7, 3 * y + 7) == pytest.approx(0.5, abs=0.03)
    assert c2st(3 * x + 7, 3 * (y + np.array([2.0, 0.0])) + 7) == pytest.approx(stats.norm.cdf(1), abs=0.02)


class Gaussian(SimpleNamespace):
    """θ ~ N(0, 1), above 0; x = θ + N(0, ½²)."""

    def prior(self) -> torch.distributions.Distribution:
        return torch.distributions.Independent(torch.distributions.HalfNormal(torch.ones(2)), 1)

    def observation(self, i: int) -> np.ndarray:
        return np.full((1, 2), 0.5 * i)

    def posterior(self, i: int) -> np.ndarray:
        law = stats.truncnorm(-0.4 * i / np.sqrt(0.2), np.inf, 0.4 * i, np.sqrt(0.2))
        return law.rvs((1000, 2), random_state=i)

    outside = simulators.Task.outside


def small(prior: torch.distributions.Distribution) -> Any:
    return replace(METHODS["NICE"](prior), members=1, couplings=3, width=24)


@pytest.mark.parametrize(("method", "keeps_to_the_prior"), [(small, True), (METHODS["MAF"], False)])
def test_what_is_scored(
    method: Callable, keeps_to_the_prior: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inference = pytest.importorskip("sbi.inference")
    monkeypatch.setattr(compare_posteriors, "DRAWS", 1000)
    monkeypatch.setattr(compare_posteriors, "OBSERVATIONS", range(1, 3))
    train = inference.NPE.train
    monkeypatch.setattr(inference.NPE, "train", lambda self: train(self, max_num_epochs=15, learning_rate=2e-3))
    task, noise = Gaussian(), rng().normal(size=(2, 2000, 2))
    theta, x = np.abs(noise[0]), np.abs(noise[0]) + 0.5 * noise[1]
    torch.manual_seed(0)
    found = trial(method, Simulations(np.c_[theta, x], task), 0)[""]
    assert found["c2st"] == pytest.approx((found["c2st_1"] + found["c2st_2"]) / 2)
    assert 0.45 < found["c2st"] < 0.65
    assert (found["outside"] == 0) == keeps_to_the_prior
    assert capsys.readouterr().out == ""


def test_what_is_not_installed_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]):
    monkeypatch.setattr(compare_posteriors, "find_spec", lambda name: None)
    assert "pip install 'nicest[sbi]'" in refusal(posteriors)
    monkeypatch.setattr(compare_posteriors, "find_spec", lambda name: name)
    monkeypatch.setattr(simulators, "find_spec", lambda name: None)
    assert "pip install --no-deps sbibm" in refusal(posteriors)
