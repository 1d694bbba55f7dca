"""From stored data to real numbers and back (NICE §5.1): pixels, columns of a table, real numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from nicest.flows import Chain, Flow, Gaussian, Prior, Units, bits_per_dim, moments

LEVELS = (2, 17, 49, 100, 256, 65536)
INTERVALS = ((0.0, 1.0), (-1.0, 1.0), (-0.3, 2.7), (5.0, 5.1), (-1000.0, -999.0))
STEPS = (0.0, 1.0, 5.0, 0.25, 0.1, 86400.0, 0.0)

all_levels = pytest.mark.parametrize("levels", LEVELS)
intervals = pytest.mark.parametrize("interval", INTERVALS, ids=str)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
noises = pytest.mark.parametrize("noise", ["fresh", "smallest", "largest"])


class Uniform(Prior):
    """The uniform density on [0, 1]^D."""

    def standard_log_prob(self, e: Tensor) -> Tensor:
        return torch.where((e >= 0) & (e < 1), 0.0, -math.inf).sum(-1)

    def standard_sample(self, shape, generator):
        return torch.rand(shape, generator=generator)


def use_noise(monkeypatch: pytest.MonkeyPatch, noise: str) -> None:
    """Make every draw of the noise the smallest or the largest there is, or leave it fresh."""

    def constant(shape, *, dtype: torch.dtype = torch.float32, device=None, generator=None) -> Tensor:
        one = torch.ones((), dtype=dtype)
        return torch.full(shape, 0.0 if noise == "smallest" else torch.nextafter(one, 0 * one).item(), dtype=dtype)

    if noise != "fresh":
        monkeypatch.setattr(torch, "rand", constant)


def columns(dtype: torch.dtype = torch.float64, *, fitted: bool = False) -> Units:
    units = Units.columns(STEPS).to(dtype)
    if fitted:
        units.fit(*(each.diagonal() if each.ndim > 1 else each for each in moments(rows(500, dtype))))
    return units


def rows(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Multiples of the steps, and real numbers where the step is 0."""
    step = torch.tensor(STEPS).to(dtype)
    return torch.where(step > 0, torch.randint(-900, 900, (n, len(step))) * step, torch.randn(n, len(step)).to(dtype))


class TestPixels:
    @all_levels
    @intervals
    @dtypes
    @noises
    def test_leaving_gives_back_every_level(self, levels: int, interval, dtype: torch.dtype, noise: str, monkeypatch):
        use_noise(monkeypatch, noise)
        low, high = interval
        if (high - low) / levels < 8 * torch.finfo(dtype).eps * max(abs(low), abs(high)):
            pytest.skip("the levels on this interval are closer than the numbers of this dtype")
        units, x = Units.pixels(levels, levels, interval).to(dtype), torch.arange(levels)[None]
        y = units.enter(x)
        assert y.dtype == dtype
        assert torch.equal(units.leave(y), x.to(dtype))
        assert torch.equal(units.leave(units.enter(x, noise=False)), x.to(dtype))
        assert (y[0, 1:] > y[0, :-1]).all()
        edge = low + (high - low) * torch.arange(levels + 1, dtype=torch.float64) / levels
        slack = 2 * torch.finfo(torch.float32).eps * max(abs(low), abs(high))  # units are made in float32
        assert (y[0] >= edge[:-1] - slack).all()
        assert (y[0] < edge[1:] + slack).all()

    @all_levels
    @dtypes
    def test_values_on_the_unit_interval_lie_strictly_below_the_next_level(self, levels: int, dtype, monkeypatch):
        use_noise(monkeypatch, "largest")
        x = torch.arange(levels)[None]
        y = Units.pixels(levels, levels).to(dtype).enter(x)
        assert (y.double() < (x.double() + 1) / levels).all()
        assert y.max() < 1

    @pytest.mark.parametrize("given", [torch.uint8, torch.int64, torch.float32, torch.float64])
    @dtypes
    def test_any_dtype_enters_in_that_of_the_flow_and_stays_as_it_was(self, given: torch.dtype, dtype: torch.dtype):
        x = torch.arange(256).to(given).view(2, 128)
        before, units = x.clone(), Units.pixels(128).to(dtype)
        y = units.enter(x)
        assert y.dtype == dtype
        assert torch.equal(units.leave(y), x.to(dtype))
        assert torch.equal(x, before)

    def test_what_lies_outside_leaves_as_the_first_or_last_level(self):
        y = torch.tensor([[-0.3, 0.0, 0.5, 0.9999, 1.0, 1.7]])
        assert Units.pixels(6, 4).leave(y).tolist() == [[0, 0, 2, 3, 3, 3]]

    def test_uniform_density_is_exactly_eight_bits_per_dimension(self):
        flow = Flow(Units.pixels(784), Chain(), Uniform(784)).double()
        nats = flow.log_prob(torch.randint(256, (10, 784)).to(torch.uint8))
        for each in nats.tolist():
            assert bits_per_dim(each, 784) == pytest.approx(8, rel=1e-14)

    @pytest.mark.parametrize(("levels", "interval"), [(n, ends) for n in (2, 256) for ends in INTERVALS], ids=str)
    def test_log_det_and_its_terms(self, levels: int, interval: tuple[float, float]):
        units, width = Units.pixels(7, levels, interval), interval[1] - interval[0]
        assert units.log_det(torch.zeros(2, 7)) == pytest.approx(7 * math.log(width / levels))
        assert units.terms()["dequantise"] == pytest.approx(-7 * math.log(levels))
        assert units.terms().get("interval", 0.0) == pytest.approx(7 * math.log(width))
        assert ("interval" in units.terms()) == (interval != (0.0, 1.0))
        assert units.interval_nats == pytest.approx(-7 * math.log(width / levels))

    def test_nats_on_the_interval_are_those_of_the_density_of_y(self):
        flow = Flow(Units.pixels(3, 17, (-1.0, 1.0)), Chain(), Gaussian(3)).double()
        x = torch.randint(17, (5, 3))
        density = flow.log_density(flow.units.enter(x, noise=False))
        torch.testing.assert_close(flow.log_prob(x, noise=False) + flow.units.interval_nats, density)
        assert Units.continuous(3).interval_nats == Units.columns([1.0]).interval_nats == 0

    @pytest.mark.parametrize("levels", [1, 0, -3])
    def test_fewer_than_two_levels_are_refused(self, levels: int):
        with pytest.raises(ValueError, match=f"got {levels}"):
            Units.pixels(3, levels)

    @pytest.mark.parametrize("interval", [(1.0, 1.0), (1.0, 0.0), (math.nan, 1.0)], ids=str)
    def test_an_interval_that_is_none_is_refused(self, interval: tuple[float, float]):
        with pytest.raises(ValueError, match="from low to high"):
            Units.pixels(3, 256, interval)


class TestColumns:
    @dtypes
    @noises
    @pytest.mark.parametrize("fitted", [False, True])
    def test_leaving_gives_back_the_steps(self, dtype: torch.dtype, noise: str, fitted: bool, monkeypatch):
        units, x = columns(dtype, fitted=fitted), rows(2000, dtype)
        use_noise(monkeypatch, noise)
        y = units.enter(x)
        discrete = units.step > 0
        assert y.dtype == dtype
        assert torch.equal(units.leave(y)[:, discrete], x[:, discrete])
        torch.testing.assert_close(units.leave(y)[:, ~discrete], x[:, ~discrete])
        if not fitted:
            assert torch.equal(y[:, ~discrete], x[:, ~discrete])
            assert (y >= x).all()
            assert (y <= x + units.step).all()

    @settings(deadline=None, derandomize=True, max_examples=300)
    @given(st.data())
    def test_integers_survive_any_standardisation(self, data: st.DataObject):
        dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
        step = data.draw(st.sampled_from([1.0, 0.1, 0.25, 3.0, 1 / 3, 60.0, 1e-3]))
        far = data.draw(st.integers(-(10**5), 10**5))
        loc = step * far + step * data.draw(st.floats(-300, 300))
        scale = step * data.draw(st.floats(1e-2, 1e4))
        units = Units.columns([step]).to(dtype)
        units.loc.fill_(loc)
        units.scale.fill_(scale)
        x = (torch.arange(far - 50, far + 50).to(dtype) * units.step)[:, None]
        assume(len(units.place(x).unique()) == len(x))
        with pytest.MonkeyPatch.context() as patch:
            use_noise(patch, data.draw(st.sampled_from(["fresh", "smallest", "largest"])))
            assert torch.equal(units.leave(units.enter(x)), x)
        assert torch.equal(units.leave(units.enter(x, noise=False)), x)

    @pytest.mark.parametrize("noise", ["smallest", "largest"])
    def test_a_million_steps_in_float32(self, noise: str, monkeypatch):
        use_noise(monkeypatch, noise)
        x, units = torch.arange(1 << 20).float()[:, None], Units.columns([1.0])
        y = units.enter(x)
        assert torch.equal(units.leave(y), x)
        assert (y[1:] > y[:-1]).all()

    def test_real_columns_beside_integers_keep_the_digits_of_float64(self):
        x = torch.stack((1.6e9 + torch.rand(100).double(), torch.randint(9, (100,)).double()), 1)
        units = Units.columns([0.0, 1.0])
        units.fit(x.mean(0), x.var(0, correction=0))
        alone = Units.continuous(1)
        alone.fit(x.mean(0)[:1], x.var(0, correction=0)[:1])
        assert torch.equal(units.enter(x)[:, :1], alone.enter(x[:, :1]))
        assert len(units.enter(x)[:, 0].unique()) == 100

    def test_log_det_and_its_terms(self):
        units = columns(fitted=True)
        steps = sum(math.log(step) for step in STEPS if step)
        assert list(units.terms()) == ["columns", "standardise"]
        torch.testing.assert_close(units.terms()["columns"].item(), steps)
        torch.testing.assert_close(units.log_det(rows(2)), steps - units.scale.log().sum())

    def test_a_uniform_density_over_k_steps_gives_each_one_kth(self):
        """Prior uniform on [0, 1], steps of width 5 in a range of 20: each of the 4 has probability 1/4."""
        flow = Flow(Units.columns([5.0, 0.0]), Chain(), Uniform(2)).double()
        flow.units.scale.copy_(torch.tensor([20.0, 1.0]))
        x = torch.tensor([[0.0, 0.5], [5.0, 0.1], [10.0, 0.9], [15.0, 0.2]], dtype=torch.float64)
        torch.testing.assert_close(flow.log_prob(x), torch.full((4,), math.log(1 / 4), dtype=torch.float64))

    def test_the_mean_bounds_the_probability_of_the_step_from_below(self):
        """A Gaussian density: E log p(x + u) over u, by quadrature and by draws, below log of the step's mass."""
        step, scale = 2.0, 3.0
        flow = Flow(Units.columns([step]), Chain(), Gaussian(1)).double()
        flow.units.scale.fill_(scale)
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

    def test_refused(self):
        for bad in ([-1.0], [math.nan]):
            with pytest.raises(ValueError, match="every step must be 0 or more"):
                Units.columns(bad)


class TestContinuous:
    def test_without_standardisation_nothing_changes(self):
        units, x = Units.continuous(3, standardise=False), torch.randn(4, 3)
        assert torch.equal(units.enter(x), x)
        assert torch.equal(units.leave(x), x)
        assert (units.log_det(x), units.terms()) == (0, {})

    @dtypes
    def test_standardised_and_back(self, dtype: torch.dtype):
        units, x = Units.continuous(3).to(dtype), (torch.randn(50, 3) * torch.tensor([0.1, 1, 10]) + 5).to(dtype)
        units.fit(x.double().mean(0), x.double().var(0, correction=0))
        y = units.enter(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y.mean(0), torch.zeros(3, dtype=dtype), rtol=0, atol=1e-4)
        torch.testing.assert_close(y.var(0, correction=0), torch.ones(3, dtype=dtype), rtol=1e-4, atol=0)
        torch.testing.assert_close(units.leave(y), x)
        torch.testing.assert_close(units.log_det(y), -units.scale.log().sum())
        assert torch.equal(units.enter(x, noise=False), y)

    def test_float64_far_from_zero_keeps_its_digits(self):
        x = 1.6e9 + torch.randn(1000, 1, dtype=torch.float64)
        units = Units.continuous(1)
        units.fit(x.mean(0), x.var(0, correction=0))
        y = units.enter(x)
        assert y.dtype == torch.float32
        expected = (x - units.loc.double()) / units.scale.double()
        torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-6)


NOISY = {"pixels": Units.pixels(30, 256, (-1.0, 1.0)), "columns": Units.columns([1.0, 0.1, 60.0] * 10)}
both = pytest.mark.parametrize("name", NOISY)


class TestNoise:
    @both
    def test_is_uniform_with_mean_one_half_and_variance_one_twelfth(self, name: str):
        units = NOISY[name].double()
        x = torch.randint(256, (4000, 30)) * units.step
        u = ((units.enter(x) * units.scale + units.loc - x) / units.step).flatten()
        n = u.numel()
        assert abs(u.mean().item() - 1 / 2) < 4 * math.sqrt(1 / 12 / n)
        assert abs(u.var().item() - 1 / 12) < 4 * math.sqrt(1 / 180 / n)
        assert stats.kstest(u.numpy(), "uniform").pvalue > 0.01

    @both
    def test_without_it_every_step_is_at_its_middle(self, name: str):
        units = NOISY[name].double()
        x = torch.randint(256, (20, 30)) * units.step
        middle = (x + units.step / 2 - units.loc) / units.scale
        torch.testing.assert_close(units.enter(x, noise=False), middle, rtol=1e-12, atol=1e-12)

    @both
    @pytest.mark.parametrize("training", [False, True])
    def test_is_fresh_for_every_call_row_and_dimension(self, name: str, training: bool):
        units, x = NOISY[name].double().train(training), torch.zeros(20, 30)
        u = torch.stack([(units.enter(x) * units.scale + units.loc) / units.step for _ in range(2)])
        assert u.unique().numel() == u.numel()

    @both
    def test_a_generator_makes_it_reproducible_and_leaves_the_others_alone(self, name: str):
        units, x, state = NOISY[name], torch.zeros(4, 30), torch.get_rng_state()
        one, same, other = (units.enter(x, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)
        assert torch.equal(torch.get_rng_state(), state)


ALL = {
    "pixels": lambda: Units.pixels(7, 17, (-1.0, 2.0)),
    "columns": lambda: columns(fitted=True),
    "continuous": lambda: fitted(Units.continuous(7)),
    "as they are": lambda: Units.continuous(7, standardise=False),
}
kinds = pytest.mark.parametrize("kind", ALL)


def fitted(units: Units) -> Units:
    units = units.double()
    units.fit(torch.linspace(-3, 3, units.dim).double(), torch.linspace(0.1, 9, units.dim).double())
    return units


def stored(kind: str, n: int) -> Tensor:
    """Correlated rows for one of the kinds of units."""
    if kind == "pixels":
        return (torch.randint(9, (n, 7)) + torch.randint(9, (n, 1))).double()
    return rows(n) + torch.tensor(STEPS).double() * torch.randint(9, (n, 1))


class TestMoments:
    @kinds
    def test_moments_are_the_formula_and_those_of_many_draws(self, kind: str):
        units, x = ALL[kind]().double(), stored(kind, 40_000)
        mean, covariance = units.moments(x)
        scale = units.scale
        expected = moments((x + units.step / 2 - units.loc) / scale)
        torch.testing.assert_close(mean, expected[0])
        noise = torch.diag(units.step**2 / 12 / scale**2)
        torch.testing.assert_close(covariance, expected[1] + noise)
        drawn = moments(units.enter(x))
        spread = covariance.diagonal().sqrt()
        torch.testing.assert_close(drawn[0] / spread, mean / spread, rtol=0, atol=0.02)
        ratio = (drawn[1] - covariance) / (spread[:, None] * spread)
        assert ratio.abs().max() < 0.02

    @pytest.mark.parametrize("kind", ["columns", "continuous"])
    def test_fitted_data_has_mean_zero_and_variance_one_noise_included(self, kind: str):
        units, x = ALL[kind]().double(), stored(kind, 40_000)
        mean, covariance = moments(x)
        units.fit(mean, covariance.diagonal())
        carried = units.moments(x)
        torch.testing.assert_close(carried[0], torch.zeros(7).double(), rtol=0, atol=1e-9)
        torch.testing.assert_close(carried[1].diagonal(), torch.ones(7).double())
        y = units.enter(x)
        assert y.mean(0).abs().max() < 0.02
        assert (y.var(0) - 1).abs().max() < 0.02


class TestModule:
    @kinds
    def test_state_dict_round_trip_is_exact(self, kind: str):
        """It holds what comes from data; a recipe, or whoever makes the units, says the rest."""
        units, x = ALL[kind]().double(), stored(kind, 5)
        made = {"levels": units.levels, "interval": units.interval, "standardise": units.standardise}
        other = Units(units.step, **made).double()
        other.load_state_dict(units.state_dict())
        assert list(units.state_dict()) == (["step", "loc", "scale"] if units.standardise else [])
        assert torch.equal(other.enter(x, noise=False), units.enter(x, noise=False))

    @kinds
    @pytest.mark.parametrize("got", [1, 8])
    def test_another_number_of_features_is_refused(self, kind: str, got: int):
        for direction in ("enter", "leave"):
            with pytest.raises(ValueError, match=f"expected 7 features, got {got}"):
                getattr(ALL[kind](), direction)(torch.zeros(2, got))

    @kinds
    def test_empty_batches_and_other_devices(self, kind: str):
        units = ALL[kind]().float()
        assert units.leave(units.enter(torch.zeros(0, 7))).shape == (0, 7)
        y = units.to("meta").enter(torch.zeros(2, 7, device="meta"))
        assert y.device.type == units.leave(y).device.type == "meta"

    def test_repr_says_what_the_data_is(self):
        assert repr(Units.pixels(9, 17, (-1, 1))) == "Units(9 pixels of 17 levels on [-1, 1])"
        assert repr(columns()) == "Units(7 dimensions, 5 of them discrete)"

    def test_support(self):
        pixels, real = Units.pixels(2, 17).support, Units.continuous(2).support
        x = torch.tensor([[0.0, 16.0], [0.5, 3.0], [-1.0, 3.0], [2.0, 17.0], [math.nan, 0.0]])
        assert pixels.check(x).tolist() == [True, False, False, False, False]
        assert real.check(x).tolist() == [True, True, True, True, False]
        assert pixels.event_dim == real.event_dim == 1


class TestBox:
    def test_pixels_stay_in_their_interval_and_other_data_goes_anywhere(self):
        lower, upper = Units.pixels(3, 256, (-1.0, 1.0)).box()
        assert (lower.tolist(), upper.tolist()) == ([[-1.0] * 3], [[1.0] * 3])
        lower, upper = fitted(Units.continuous(3)).box()
        assert (lower.tolist(), upper.tolist()) == ([[-math.inf] * 3], [[math.inf] * 3])
