"""Draws given ranges of columns: against closed forms, quadrature and long rejection sampling, common or rare."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from test_impute import bent, gaussian_flow, real, truth, two_hills, whitening
from torch import Tensor, nn

from nicest.flows import (
    Affine,
    Chain,
    Elementwise,
    Flow,
    Gaussian,
    Logistic,
    MixedUnits,
    Mixture,
    Standardiser,
    TriangularAffine,
    Units,
)
from nicest.inference import conditional
from nicest.inference.conditional import Conditional, Region

INF = (math.inf, 0)
Ranges = dict[int, list]


def above(number: float) -> list:
    return [((number, 1), INF)]


def between(low: float, high: float) -> list:
    return [((low, 0), (high, 0))]


def equal(number: float) -> list:
    return between(number, number)


def drawn(flow: Flow, ranges: Ranges, n: int = 4000, seed: int = 0) -> tuple[Tensor, Conditional]:
    found = Conditional(flow, ranges, seed=seed)
    rows = torch.cat(list(found.draws(n)))
    assert rows.shape == (n, flow.dim)
    assert found.r_hat < 1.1
    return rows.double(), found


def close(some: Tensor, others: Tensor, most: float = 4.5) -> None:
    """Two sets of rows have the same means, squares and correlations, in standard errors of independent rows."""
    for f in (lambda x: x, lambda x: x.square(), lambda x: x[:, :1] * x, lambda x: (x > others.median(0).values) * 1.0):
        a, b = f(some), f(others)
        error = (a.var(0) / len(a) + b.var(0) / len(b)).sqrt() + 1e-9
        assert float(((a.mean(0) - b.mean(0)) / error).abs().max()) < most


class TestMixture:
    """The mean of two Gaussians, of which one alone reaches the ranges, or both do: all is known in closed form."""

    @staticmethod
    def flow() -> tuple[Mixture, list]:
        means = torch.tensor([[0.0, 0.0, 1.0], [3.0, -2.0, 0.0]]).double()
        spreads = torch.tensor([[[1.0, 0.8, 0.0], [0.8, 1.0, 0.3], [0.0, 0.3, 1.0]]]).double().repeat(2, 1, 1)
        spreads[1] = torch.tensor([[0.25, -0.2, 0.0], [-0.2, 4.0, 0.0], [0.0, 0.0, 0.5]])
        parts = list(zip(means, spreads, strict=True))
        units, prior = Units.continuous(3, standardise=False), Gaussian(3)
        return Mixture([Flow(units, whitening(*each), prior) for each in parts]).double().eval(), parts

    @staticmethod
    def expected(parts: list, weigh: Callable[[float, float], float], at: Callable[[float, float], float]) -> tuple:
        """Shares of the two, and the mean of x1, given x0: by its weight and its mean under each of the Gaussians."""
        pairs = [(float(mean[0]), float(spread[0, 0]) ** 0.5) for mean, spread in parts]
        shares = np.array([weigh(*pair) for pair in pairs])
        firsts = np.array([at(*pair) for pair in pairs])
        lines = zip(parts, firsts, strict=True)
        seconds = np.array([float(m[1] + s[0, 1] / s[0, 0] * (x - m[0])) for (m, s), x in lines])
        return shares / shares.sum(), float((shares * seconds).sum() / shares.sum()), shares.mean()

    @pytest.mark.parametrize(("low", "rare"), [(1.0, False), (-3.5, True), (4.2, True)])
    def test_a_range(self, low: float, rare: bool):
        flow, parts = self.flow()
        high = low + 0.2
        x, found = drawn(flow, {0: between(low, high)})

        def weigh(mean: float, sd: float) -> float:
            law = stats.norm(mean, sd)
            return law.cdf(high) - law.cdf(low) if low < mean else law.sf(low) - law.sf(high)

        def at(mean: float, sd: float) -> float:
            return stats.truncnorm((low - mean) / sd, (high - mean) / sd, mean, sd).mean()

        _, second, share = self.expected(parts, weigh, at)
        assert found.independent != rare
        assert math.log(found.share / share) == pytest.approx(0, abs=0.7 if rare else 0.1)
        assert float((x[:, 1].mean() - second) / x[:, 1].std()) == pytest.approx(0, abs=0.08)

    @pytest.mark.parametrize("number", [1.8, 2.0])
    def test_a_number(self, number: float):
        """Of which both Gaussians have much: their shares are those of their densities there."""
        flow, parts = self.flow()
        x, _ = drawn(flow, {0: equal(number)})
        shares, second, _ = self.expected(parts, lambda mean, sd: stats.norm(mean, sd).pdf(number), lambda *_: number)
        assert 0.2 < shares[0] < 0.8
        assert float((x[:, 1].mean() - second) / x[:, 1].std()) == pytest.approx(0, abs=0.08)
        law = stats.norm(float(parts[1][0][2]), float(parts[1][1][2, 2]) ** 0.5)
        third = shares[0] * conditional_cdf(parts[0], number, 0.5) + shares[1] * law.cdf(0.5)
        assert float((x[:, 2] < 0.5).double().mean()) == pytest.approx(third, abs=0.04)


def conditional_cdf(part: tuple[Tensor, Tensor], number: float, at: float) -> float:
    """P(x2 < at | x0 = number) of a Gaussian."""
    middle, spread = truth(*part, torch.tensor([number, 0.0, 0.0]).double(), torch.tensor([False, True, True]))
    return stats.norm(float(middle[1]), float(spread[1, 1]) ** 0.5).cdf(at)


class TestCategories:
    """Values whose intervals lie in another order than their codes."""

    @staticmethod
    def flow() -> Flow:
        generator = torch.Generator().manual_seed(0)
        place = torch.multinomial(torch.tensor([0.2, 0.3, 0.1, 0.37, 0.03]), 5000, True, generator=generator)
        code = torch.tensor([3, 0, 4, 1, 2])[place]
        x = torch.stack([code.float(), place + torch.randn(5000, generator=generator)], 1).double()
        units = MixedUnits([0.0, 0.0], [[0, 1, 2, 3, 4], []], categories=[True, False], unordered=[True, False])
        units.double().fit_rows(x)
        assert units.start[0].argsort().tolist() in ([3, 0, 4, 1, 2], [2, 1, 4, 0, 3])
        chain = Chain(units.first_layers() | {"whitening": TriangularAffine(2).double()})
        chain["whitening"].initialise(chain["bounds"](units.enter(x))[0])
        return Flow(units, chain, Gaussian(2)).double().eval()

    @pytest.mark.parametrize("pieces", [between(0, 2), equal(4), [*between(0, 1), *equal(3)], above(0.5)])
    def test_are_drawn_as_often_as_the_model_says(self, pieces: list):
        """Among many draws of the model that meet the condition, by their codes."""
        flow = self.flow()
        x, found = drawn(flow, {0: pieces})
        every = flow.sample(40_000, generator=torch.Generator().manual_seed(1))
        met = torch.stack([(every[:, 0] >= low[0]) & (every[:, 0] <= high[0]) for low, high in pieces]).any(0)
        assert set(x[:, 0].tolist()) == set(every[met, 0].tolist())
        assert found.share == pytest.approx(float(met.double().mean()), rel=0.1)
        close(x, every[met])

    def test_a_rare_one_beside_a_range(self):
        flow = self.flow()
        x, found = drawn(flow, {0: equal(2), 1: [((-math.inf, 0), (1.0, -1))]})
        assert not found.independent
        every = flow.sample(2_000_000, generator=torch.Generator().manual_seed(1))
        met = every[(every[:, 0] == 2) & (every[:, 1] < 1)]
        assert 30 < len(met) < 20_000
        assert set(x[:, 0].tolist()) == {2.0}
        assert float(x[:, 1].mean() - met[:, 1].mean()) == pytest.approx(
            0, abs=5 * float(met[:, 1].std()) / len(met) ** 0.5
        )


class TestGaussian:
    """A Gaussian flow of correlated columns: all is known in closed form."""

    @pytest.mark.parametrize("z", [1.0, 3.0, 4.75, 8.0])
    def test_above_a_number_however_rare(self, z: float):
        """x0 is a truncated Gaussian, the others follow it: means, variances and the probability, 6e-16 at last."""
        flow, mean, covariance = gaussian_flow(4)
        sd = covariance.diagonal().sqrt()
        x, found = drawn(flow, {0: above(float(mean[0] + z * sd[0]))})
        law = stats.truncnorm(z, math.inf)
        first = ((x[:, 0] - mean[0]) / sd[0]).numpy()
        assert first.min() > z
        assert stats.kstest(first, law.cdf).statistic < 0.035
        gain = covariance[0] / sd[0]
        off = (x.mean(0) - mean - gain * law.mean()) / sd
        assert off.abs().max() < 0.06
        variance = covariance.diagonal() - gain**2 * (1 - law.var())
        torch.testing.assert_close(x.var(0) / variance, torch.ones(4).double(), rtol=0, atol=0.12)
        assert math.log(found.share / stats.norm.sf(z)) == pytest.approx(0, abs=0.7 if z > 1 else 0.05)
        assert found.independent == (z == 1.0)

    @pytest.mark.parametrize("given", [1, 3])
    def test_numbers_that_are_given(self, given: int):
        flow, mean, covariance = gaussian_flow(4)
        c = flow.sample(1)[0] + 0.5 * covariance.diagonal().sqrt()
        x, found = drawn(flow, {d: equal(float(c[d])) for d in range(given)})
        torch.testing.assert_close(x[:, :given], c[:given].expand(len(x), -1))
        middle, spread = truth(mean, covariance, c, torch.arange(4) >= given)
        exact = torch.distributions.MultivariateNormal(middle, spread).sample((20_000,))
        close((x[:, given:] - middle), exact - middle, 6)
        assert found.share is None

    def test_a_number_and_a_range_of_another_column(self):
        """x1 | x0 = c is Gaussian, and truncated to a range; x2 follows both."""
        flow, mean, covariance = gaussian_flow(3)
        sd = covariance.diagonal().sqrt()
        c = mean + sd
        middle, spread = truth(mean, covariance, c, torch.tensor([False, True, True]))
        low, high = (float(middle[0] + k * spread[0, 0].sqrt()) for k in (2.0, 2.5))
        x, _ = drawn(flow, {0: equal(float(c[0])), 1: between(low, high)})
        law = stats.truncnorm(2.0, 2.5)
        assert stats.kstest(((x[:, 1] - middle[0]) / spread[0, 0].sqrt()).numpy(), law.cdf).statistic < 0.035
        gain = spread[0, 1] / spread[0, 0].sqrt()
        variance = spread[1, 1] - gain**2 * (1 - law.var())
        assert float((x[:, 2].mean() - middle[1] - gain * law.mean()) / variance.sqrt()) == pytest.approx(0, abs=0.07)
        assert float(x[:, 2].var() / variance) == pytest.approx(1, abs=0.12)

    def test_a_corner_that_correlation_makes_rare(self):
        """x0 > z and x1 < -z with a correlation of 0.9: the probability by quadrature."""
        covariance = torch.tensor([[1.0, 0.9], [0.9, 1.0]]).double()
        flow = real(whitening(torch.zeros(2), covariance), 2)
        x, found = drawn(flow, {0: above(1.0), 1: [((-math.inf, 0), (-1.0, -1))]})
        inner = stats.norm(scale=math.sqrt(1 - 0.81))

        def integral(f: Callable[[float], float]) -> float:
            return integrate.quad(lambda a: f(a) * stats.norm.pdf(a) * inner.cdf(-1 - 0.9 * a), 1, 6, epsabs=0)[0]

        share = integral(lambda a: 1.0)
        assert share < 2e-5
        assert math.log(found.share / share) == pytest.approx(0, abs=0.5)
        assert float(x[:, 0].mean()) - 1 == pytest.approx(integral(lambda a: a) / share - 1, rel=0.1)

    def test_a_prior_that_is_not_gaussian(self):
        flow = Flow(Units.continuous(2, standardise=False), Chain(), Logistic(2)).double()
        x, found = drawn(flow, {0: above(9.0)})
        assert found.share == pytest.approx(stats.logistic.sf(9), rel=0.5)
        assert float(x[:, 0].mean()) == pytest.approx(10, abs=0.1)
        assert stats.kstest(x[:, 1].numpy(), stats.logistic.cdf).statistic < 0.035


class TestOtherShapes:
    def test_both_hills_have_their_shares(self):
        """x1 given x2 = c has two modes, which are mirror images."""
        x, _ = drawn(two_hills(), {1: equal(0.5)})
        grid = np.linspace(-6, 6, 4001)
        density = np.exp(-0.5 * grid**2 - 0.5 * (0.5 + grid**2 - 2) ** 2)
        assert float((x[:, 0] > 0).double().mean()) == pytest.approx(0.5, abs=0.04)
        second = (density * grid**2).sum() / density.sum()
        assert float(x[:, 0].square().mean()) == pytest.approx(second, rel=0.03)

    def test_chains_that_cannot_cross_are_told_by_their_r_hat(self, monkeypatch: pytest.MonkeyPatch):
        """Hills far apart, of 1 to 1 by symmetry: the particles have found both, which the chains cannot confirm."""
        monkeypatch.setattr(conditional, "LONGEST", 40)
        found = Conditional(two_hills(), {1: equal(-9.0)})
        x = torch.cat(list(found.draws(2000)))
        assert found.r_hat > 2
        assert float((x[:, 0] > 0).double().mean()) == pytest.approx(0.5, abs=0.15)

    def test_the_chains_draw_what_rejection_draws(self, monkeypatch: pytest.MonkeyPatch):
        """Ranges that are common in a flow far from Gaussian: rows of chains, and draws of the model inside."""
        flow = bent(4)
        rows = flow.sample(200_000)
        low, high = rows[:, 0].quantile(torch.tensor([0.6, 0.7]).double()).tolist()
        ranges = {0: between(low, high), 2: above(float(rows[:, 2].quantile(0.6)))}
        inside = rows[(rows[:, 0] >= low) & (rows[:, 0] <= high) & (rows[:, 2] > ranges[2][0][0][0])]
        free, found = drawn(flow, ranges)
        assert found.independent
        close(free, inside)
        monkeypatch.setattr(conditional, "COMMON", 2.0)
        chained, found = drawn(flow, ranges)
        assert not found.independent
        close(chained, inside, 6)
        assert found.share == pytest.approx(len(inside) / len(rows), rel=0.2)

    def test_draws_are_exact_however_wide_the_neighbourhood(self, monkeypatch: pytest.MonkeyPatch):
        """Chains that walk far outside of the ranges: T makes up for all that lies there."""
        flow = bent(3)
        monkeypatch.setattr(conditional, "COMMON", 2.0)
        monkeypatch.setattr(conditional, "EVEN", 0.05)
        rows = flow.sample(100_000)
        low, high = rows[:, 1].quantile(torch.tensor([0.2, 0.25]).double()).tolist()
        x, found = drawn(flow, {1: between(low, high)})
        assert float(found.region.reach) * float(flow.units.scale[1]) > high - low
        close(x, rows[(rows[:, 1] >= low) & (rows[:, 1] <= high)], 6)


class TestMixed:
    """Integers, categories and spikes: ranges of the real line that they are drawn from."""

    @staticmethod
    def flow() -> Flow:
        """An integer, a category, reals with a spike at 0 and a bound, and plain reals; far from independent."""
        rng = np.random.default_rng(0)
        a = rng.standard_normal(4000)
        rows = np.stack(
            [
                np.floor(10 + 3 * a + rng.standard_normal(4000)).clip(0, 20),
                np.digitize(a + rng.standard_normal(4000), [-1, 0, 1.5]),
                np.where(rng.random(4000) < 0.4, 0.0, np.exp(a)),
                a + rng.standard_normal(4000),
            ],
            1,
        )
        units = MixedUnits(
            [1.0, 0.0, 0.0, 0.0],
            [(), (0.0, 1.0, 2.0, 3.0), (0.0,), ()],
            categories=[False, True, False, False],
            bounds=[(-math.inf, math.inf), (0, 0), (0, math.inf), (-math.inf, math.inf)],
        )
        flow = Flow(units, Chain(units.first_layers(), TriangularAffine(4)), Gaussian(4)).double()
        flow.initialise(torch.from_numpy(rows))
        return flow.requires_grad_(False)

    def test_the_edges_are_those_that_leave_finds(self):
        """Every y is in the region exactly if its x meets the conditions."""
        units = self.flow().units
        ranges = {
            0: [((5.0, 0), (8.0, 0)), ((11.0, 0), INF)],
            1: [((1.0, 0), (1.0, 0)), ((3.0, 0), INF)],
            2: [((0.0, 1), (1.5, 0))],
        }
        flow = self.flow()
        y = flow.bijection.inverse(torch.randn(100_000, 4).double())[0]
        x = units.leave(y)
        count, kind, real = x[:, 0], x[:, 1], x[:, 2]
        met = (((count >= 5) & (count <= 8)) | (count >= 11)) & ((kind == 1) | (kind == 3)) & (real > 0) & (real <= 1.5)
        assert 100 < int(met.sum()) < 50_000
        assert torch.equal(Region(units, ranges).off(y) == 0, met)

    @pytest.mark.parametrize(
        "ranges",
        [
            {1: between(2, 2), 0: between(9, 9)},
            {1: [((0.0, 0), (0.0, 0)), ((3.0, 0), INF)], 2: above(0.0), 3: above(1.0)},
            {2: equal(0.0), 3: between(0.5, 0.7)},
        ],
    )
    def test_the_chains_draw_what_rejection_draws(self, monkeypatch: pytest.MonkeyPatch, ranges: Ranges):
        flow = self.flow()
        y = flow.bijection.inverse(torch.randn(300_000, 4).double())[0]
        inside = flow.units.leave(y[Region(flow.units, ranges).off(y) == 0])
        assert len(inside) > 1000
        monkeypatch.setattr(conditional, "COMMON", 2.0)
        x, found = drawn(flow, ranges)
        close(x, inside, 6)
        assert found.share == pytest.approx(len(inside) / 300_000, rel=0.25)
        columns = list(ranges)
        assert set(map(tuple, x[:, columns].tolist())) <= set(map(tuple, inside[:, columns].tolist())) or 3 in ranges

    def test_rare_conditions_in_bounded_time(self, monkeypatch: pytest.MonkeyPatch):
        """An integer far out, a rare category and a tail at once: one row in a million, for 250,000 decoded."""
        decoded, at = 0, Conditional.at

        def counted(self: Conditional, h: Tensor) -> conditional.Particles:
            nonlocal decoded
            decoded += len(h)
            return at(self, h)

        monkeypatch.setattr(Conditional, "at", counted)
        x, found = drawn(self.flow(), {0: between(1, 2), 1: between(3, 3), 2: above(1.0)}, 500)
        assert 100_000 < decoded < 250_000
        assert found.share < 3e-6
        assert set(x[:, 0].tolist()) <= {1.0, 2.0}
        assert (x[:, 1] == 3).all()
        assert (x[:, 2] > 1).all()


def test_the_seed_decides_and_batches_are_of_bounded_size(monkeypatch: pytest.MonkeyPatch):
    flow, told = bent(3), []
    monkeypatch.setattr(conditional, "BATCH", 200)
    monkeypatch.setattr(conditional, "POOL", 2000)
    ranges = {0: above(float(flow.sample(2000)[:, 0].max()))}
    random = torch.get_rng_state()
    first, again, other = (
        list(Conditional(flow, ranges, seed=seed, watch=lambda rows, text: told.append(rows)).draws(450))
        for seed in (1, 1, 2)
    )
    assert [len(each) for each in first] == [200, 200, 50]
    assert torch.equal(torch.cat(first), torch.cat(again))
    assert not torch.equal(torch.cat(first), torch.cat(other))
    assert torch.equal(torch.get_rng_state(), random)
    assert len(torch.cat(first).unique(dim=0)) > 440
    assert max(told) == 450
    assert flow.training
    assert all(parameter.requires_grad for parameter in flow.parameters())


def test_what_no_row_can_be_found_for_is_refused(refusal: Callable[..., str]):
    flow, mean, covariance = gaussian_flow(2)
    far = float(mean[0] + 40 * covariance[0, 0].sqrt())
    assert "no rows that meet the conditions" in refusal(Conditional, flow, {0: above(far)})


def test_a_conditional_model_is_refused(refusal: Callable[..., str]):
    layer = Elementwise(Affine(), 2, nn.Linear(1, 4))
    flow = Flow(Units.continuous(2), layer, Gaussian(2), Standardiser([0]))
    assert "the model is conditional" in refusal(Conditional, flow, {0: above(1.0)})
