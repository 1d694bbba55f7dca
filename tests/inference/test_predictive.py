"""Predictions of one target: its distribution, density, quantiles and probabilities agree with each other."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from nicest.flows import (
    MLP,
    AffineSpline,
    Chain,
    DiagonalScaling,
    Elementwise,
    FeatureNetwork,
    Features,
    Flow,
    Gaussian,
    Logistic,
    MixedUnits,
    Mixture,
    Prior,
    ResidualMLP,
    Spline,
    Standardiser,
    Units,
)
from nicest.inference.predictive import Predictive, crps, interval

CONTEXT = torch.tensor([[0.5, 0.0], [-1.0, 2.0], [math.nan, 1.0], [3.0, math.nan], [2.0, 7.0]])  # a number, a category
COLUMNS = [0, 3]  # the category is one of three
ATOMS: dict[str, dict[str, object]] = {
    "category": {"atoms": [0.0, 1.0, 2.0, 3.0], "categories": True},
    "spike": {"atoms": [1.0]},
    "bounded": {"atoms": [], "bounds": (0.0, 4.0)},
    "bounded spike": {"atoms": [0.0], "bounds": (0.0, math.inf)},
    "bounded steps": {"atoms": [], "bounds": (0.0, 9.0), "step": 1.0},
}
KINDS = ("real", "steps", *ATOMS)
kinds = pytest.mark.parametrize("kind", KINDS)
members = pytest.mark.parametrize("members", [1, 3])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def units(kind: str) -> Units:
    """Units of one target, fitted to rows."""
    rng = np.random.default_rng(0)
    target = {
        "real": rng.normal(3.0, 2.0, 400),
        "steps": rng.poisson(5.0, 400),
        "category": rng.choice(4, 400, p=[0.1, 0.2, 0.3, 0.4]),
        "spike": np.where(rng.random(400) < 0.3, 1.0, rng.normal(1.0, 2.0, 400)),
        "bounded": 4 * rng.beta(0.5, 0.5, 400),
        "bounded spike": np.where(rng.random(400) < 0.3, 0.0, rng.exponential(2.0, 400)),
        "bounded steps": rng.integers(0, 10, 400),
    }[kind]
    if kind in ATOMS:
        own = ATOMS[kind]
        bounds = [own.get("bounds", (-math.inf, math.inf))]
        categories = [bool(own.get("categories"))]
        made: Units = MixedUnits([own.get("step", 0.0)], [own["atoms"]], categories=categories, bounds=bounds)
    else:
        made = Units.columns([float(kind == "steps")])
    made.double().fit_rows(torch.from_numpy(target.astype(float))[:, None])
    return made


def chain(units: Units, *, residual: bool, std: float = 0.2) -> Chain:
    """A spline of the target, a law whose parameters depend on the context, and a scaling, all with random weights."""
    law = AffineSpline(bins=4)
    network = partial(ResidualMLP, width=8, blocks=1) if residual else partial(MLP, hidden=(8, 8))
    conditioner = FeatureNetwork(Features(COLUMNS), lambda inputs: network(inputs, law.size))
    layers = {"spline": Elementwise(Spline(bins=4), 1), "coupling": Elementwise(law, 1, conditioner)}
    made = Chain(units.first_layers(), layers, {"scaling": DiagonalScaling(1)})
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=std)
    return made


def make(
    kind: str, members: int = 1, *, prior: type[Prior] = Logistic, dtype: torch.dtype = torch.float64, std: float = 0.2
) -> tuple[Flow | Mixture, Predictive]:
    of, law, embedding = units(kind), prior(1), Standardiser(COLUMNS)
    flows = [Flow(of, chain(of, residual=bool(k % 2), std=std), law, embedding) for k in range(members)]
    flow = (flows[0] if members == 1 else Mixture(flows)).to(dtype)
    return flow, Predictive(flow, CONTEXT.to(dtype))


def values(kind: str) -> Tensor:
    """All values with a probability, of kinds that have no others, as far as it can be told from 0."""
    if kind == "category":
        return torch.arange(4.0, dtype=torch.float64)
    return torch.arange(0.0, 10.0) if kind == "bounded steps" else torch.arange(-400.0, 400.0, dtype=torch.float64)


class TestDistribution:
    @pytest.mark.parametrize(("kind", "prior"), [("real", Gaussian), ("real", Logistic), ("bounded", Gaussian)])
    @members
    def test_cdf_is_the_integral_of_the_density(self, kind: str, members: int, prior: type[Prior]):
        flow, ahead = make(kind, members, prior=prior)
        ends = 9 if kind == "real" else 35  # as near to the upper bound as a float64 can be
        t = torch.linspace(-ends, ends, 10_001, dtype=torch.float64)
        x, slope = (3 + t.sinh(), t.cosh()) if kind == "real" else (4 * t.sigmoid(), 4 * t.sigmoid() * (-t).sigmoid())
        for i, context in enumerate(CONTEXT.double()):
            with torch.no_grad():
                density = flow.log_prob(x[:, None], context).exp() * slope
            below = torch.cumulative_trapezoid(density, t)
            limit = 1e-4 if kind == "real" else 1e-5
            assert float(below[-1]) == pytest.approx(1, abs=limit)
            found = ahead.cdf(x[1:].expand(len(CONTEXT), -1))[i]
            torch.testing.assert_close(found, below, rtol=0, atol=limit)

    @members
    @pytest.mark.parametrize("prior", [Gaussian, Logistic])
    @pytest.mark.parametrize("kind", ["real", "bounded", "spike"])
    def test_log_prob_is_that_of_the_derivative_of_cdf(self, kind: str, members: int, prior: type[Prior]):
        flow, ahead = make(kind, members, prior=prior)
        for x in (0.3, 2.0, 3.7):
            y = torch.full((len(CONTEXT),), x, dtype=torch.float64)
            slope = (ahead.cdf(y + 1e-5) - ahead.cdf(y - 1e-5)) / 2e-5
            torch.testing.assert_close(ahead.log_prob(y), slope.log(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ahead.log_prob(y), flow.log_prob(y[:, None], CONTEXT.double()).detach())

    @kinds
    @members
    @dtypes
    def test_quantiles_invert_the_cdf(self, kind: str, members: int, dtype: torch.dtype):
        _, ahead = make(kind, members, dtype=dtype)
        shares = torch.tensor([0.001, 0.05, 0.3, 0.5, 0.9, 0.999], dtype=dtype)
        found = ahead.quantile(shares)
        assert found.shape == (len(CONTEXT), 6)
        assert found.dtype == dtype
        assert bool((found.diff(dim=1) >= 0).all())
        at, limit = ahead.cdf(found), 1e-9 if dtype == torch.float64 else 2e-4
        if kind in ("real", "bounded"):
            near = 1e-9 if dtype == torch.float64 else 1e-5  # to a bound: what rounding, or halving, cannot tell apart
            fine = (found > near) & (found < 4 - near) if kind == "bounded" else found.isfinite()
            assert fine[:, 1:-2].all()
            torch.testing.assert_close(at[fine], shares.expand_as(at)[fine], rtol=0, atol=limit)
        else:  # it is the least value whose cdf comes to the share
            below = at - inside(ahead, found)
            assert bool((at >= shares - limit).all())
            assert bool((below <= shares + limit).all())

    @members
    @dtypes
    @pytest.mark.parametrize("kind", ["category", "steps", "bounded steps"])
    @pytest.mark.parametrize("std", [0.2, 2.0])  # with the latter, much lies near the bounds
    def test_probabilities_sum_to_one(self, kind: str, members: int, dtype: torch.dtype, std: float):
        _, ahead = make(kind, members, dtype=dtype, std=std)
        every = values(kind).to(dtype)
        found = ahead.probability(every)
        assert found.shape == (len(CONTEXT), len(every))
        assert bool((found >= 0).all())
        if kind != "steps" or std < 1:  # else the tails are longer than any list
            torch.testing.assert_close(found.sum(1), torch.ones(len(CONTEXT), dtype=dtype), rtol=0, atol=1e-4)
        one = torch.full((len(CONTEXT),), 2.0, dtype=dtype)
        limit = 1e-9 if dtype == torch.float64 else 1e-4
        likely = ahead.probability(one[:1])[:, 0].clamp_min(torch.finfo(dtype).tiny)
        torch.testing.assert_close(ahead.log_prob(one), likely.log(), rtol=limit, atol=limit)
        below = ahead.cdf(every.expand(len(CONTEXT), -1))
        torch.testing.assert_close(below - below[:, :1], found.cumsum(1) - found[:, :1], rtol=0, atol=1e-4)

    @members
    @pytest.mark.parametrize("kind", ["spike", "bounded spike"])
    def test_a_spike_has_a_probability_beside_the_density_of_the_rest(self, kind: str, members: int):
        _, ahead = make(kind, members)
        (spike,) = ATOMS[kind]["atoms"]
        share = ahead.probability(torch.tensor([spike, spike + 0.5]).double())
        assert bool((share[:, 0] > 0.01).all())
        assert bool((share[:, 1] == 0).all())
        one = torch.full((len(CONTEXT),), spike, dtype=torch.float64)
        torch.testing.assert_close(ahead.log_prob(one), share[:, 0].log())
        step = ahead.cdf(one) - ahead.cdf(one - 1e-5)
        torch.testing.assert_close(step, share[:, 0], rtol=0, atol=1e-4)
        drawn = ahead.sample(4000, torch.Generator().manual_seed(0))
        torch.testing.assert_close((drawn == spike).double().mean(1), share[:, 0], rtol=0, atol=0.04)

    @kinds
    def test_members_are_averaged(self, kind: str):
        flow, ahead = make(kind, 3)
        each = [Predictive(one, CONTEXT.double()) for one in flow.members]
        x = torch.tensor([1.0, 0.0, 2.0, 3.0, 1.0], dtype=torch.float64)
        mean = torch.stack([one.log_prob(x).exp() for one in each]).mean(0)
        torch.testing.assert_close(ahead.log_prob(x).exp(), mean)
        torch.testing.assert_close(ahead.cdf(x), torch.stack([one.cdf(x) for one in each]).mean(0))

    def test_far_out_the_probability_of_an_integer_is_not_lost_to_rounding(self):
        """In float32, where F is 1 from 17 scales above the middle on."""
        flow, high = make("steps")
        low = Predictive(copy.deepcopy(flow).float(), CONTEXT)
        x = torch.full((len(CONTEXT),), 60.0)
        assert bool((low.cdf(x) == 1).any())
        torch.testing.assert_close(low.log_prob(x).double(), high.log_prob(x.double()), rtol=1e-3, atol=1e-3)


def inside(ahead: Predictive, x: Tensor) -> Tensor:
    """The probability of each cell of x, (N, L)."""
    return torch.cat([ahead.probability(column[:, None]) for column in x.T], 1)


class TestMean:
    @members
    def test_of_a_number_is_that_of_quadrature(self, members: int):
        _, ahead = make("real", members)
        share = torch.linspace(0, 1, 1001, dtype=torch.float64)[1:-1]
        found = ahead.quantile(share)
        expected, spread = found.mean(1), found.std(1)
        assert bool(((ahead.mean() - expected).abs() < 0.02 * spread).all())

    @members
    def test_of_integers_is_the_sum_over_them(self, members: int):
        _, ahead = make("bounded steps", members)
        every = values("bounded steps").double()
        expected = (ahead.probability(every) * every).sum(1)
        assert bool(((ahead.mean() - expected).abs() < 0.05).all())

    def test_points_have_equal_weight(self):
        _, ahead = make("real", 3)
        points = ahead.points(16)
        assert points.shape == (len(CONTEXT), 48)
        first = Predictive(ahead.flow.members[0], CONTEXT.double())
        expected = (torch.arange(16, dtype=torch.float64) + 0.5) / 16
        torch.testing.assert_close(first.cdf(points[:, :16]), expected.expand(len(CONTEXT), -1))


class TestSample:
    @members
    @dtypes
    def test_draws_follow_the_distribution(self, members: int, dtype: torch.dtype):
        _, ahead = make("real", members, dtype=dtype)
        drawn = ahead.sample(3000, torch.Generator().manual_seed(1))
        assert drawn.shape == (len(CONTEXT), 3000)
        for share in ahead.cdf(drawn):
            assert stats.kstest(share.numpy(), "uniform").pvalue > 0.001
            tails = (share < 0.01).sum(), (share > 0.99).sum()  # which the Kolmogorov-Smirnov test hardly looks at
            assert all(stats.binomtest(int(count), 3000, 0.01).pvalue > 1e-4 for count in tails)

    @pytest.mark.parametrize("kind", ["category", "steps", "bounded steps"])
    def test_draws_of_discrete_targets_have_their_probabilities(self, kind: str):
        _, ahead = make(kind, 3)
        drawn = ahead.sample(4000, torch.Generator().manual_seed(1))
        every = torch.arange(0.0, 4.0, dtype=torch.float64)
        counted = (drawn[..., None] == every).double().mean(1)
        torch.testing.assert_close(counted, ahead.probability(every), rtol=0, atol=0.03)

    def test_the_generator_decides(self):
        _, ahead = make("real", 3)
        one, same, other = (ahead.sample(9, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)


class TestRows:
    @kinds
    def test_batches_change_nothing(self, kind: str, monkeypatch: pytest.MonkeyPatch):
        _, ahead = make(kind, 3)
        x, shares = torch.ones(len(CONTEXT), dtype=torch.float64), torch.tensor([0.1, 0.5])
        whole = ahead.log_prob(x), ahead.cdf(x), ahead.quantile(shares), ahead.points()
        monkeypatch.setattr("nicest.inference.predictive.ROWS", 70)
        again = ahead.log_prob(x), ahead.cdf(x), ahead.quantile(shares), ahead.points()
        for one, other in zip(whole, again, strict=True):
            torch.testing.assert_close(one, other)

    def test_blocks_change_nothing(self, monkeypatch: pytest.MonkeyPatch):
        flow, ahead = make("real", 3)
        x, shares = torch.ones(len(CONTEXT), dtype=torch.float64), torch.tensor([0.1, 0.5])
        monkeypatch.setattr("nicest.inference.predictive.BLOCK", 2)
        again = Predictive(flow, CONTEXT.double())
        assert len(again.blocks) == 3
        torch.testing.assert_close(again.log_prob(x), ahead.log_prob(x))
        torch.testing.assert_close(again.quantile(shares), ahead.quantile(shares))
        torch.testing.assert_close(again.points(), ahead.points())

    def test_a_conditioner_is_evaluated_once_for_all_questions(self):
        flow, _ = make("real", 3)
        calls = list[int]()
        conditioner = flow.members[0].bijection["coupling"].conditioner
        conditioner.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
        ahead = Predictive(flow, CONTEXT.double())
        x = torch.ones(len(CONTEXT), dtype=torch.float64)
        assert ahead.quantile(torch.zeros(0)).shape == (len(CONTEXT), 0)
        first, again = ((ahead.quantile(torch.tensor([0.1, 0.5])), ahead.log_prob(x), ahead.mean()) for _ in range(2))
        assert calls == [len(CONTEXT)]
        for one, other in zip(first, again, strict=True):
            assert torch.equal(one, other)

    def test_no_rows(self):
        flow, _ = make("real", 3)
        ahead = Predictive(flow, CONTEXT[:0].double())
        assert ahead.mean().shape == ahead.log_prob(torch.zeros(0).double()).shape == (0,)
        assert ahead.quantile(torch.tensor([0.1, 0.5])).shape == (0, 2)
        assert ahead.sample(4).shape == (0, 4)

    def test_missing_and_unknown_cells_are_read(self):
        """A missing cell is like no number; a code that training never saw is like the last one."""
        _, ahead = make("real", 3)
        flow = ahead.flow
        cells = torch.tensor([[0.5, 0.0], [math.nan, 0.0], [0.0, 0.0], [0.5, 7.0], [0.5, 2.0], [0.5, math.nan]])
        means = Predictive(flow, cells.double()).mean()
        assert means.isfinite().all()
        assert len({f"{mean:.9f}" for mean in means[[0, 1, 2, 3, 5]]}) == 5
        assert float(means[3]) == pytest.approx(float(means[4]), rel=1e-12)

    def test_it_leaves_the_flow_in_evaluation_mode_with_its_members_averaged(self):
        flow, _ = make("real", 3)
        x = torch.ones(len(CONTEXT), 1, dtype=torch.float64)
        expected = flow.eval().log_prob(x, CONTEXT.double())
        torch.testing.assert_close(Predictive(flow.train(), CONTEXT.double()).log_prob(x[:, 0]), expected.detach())

    def test_a_flow_of_several_targets_is_refused(self):
        flow = Flow(Units.columns([0.0] * 2), DiagonalScaling(2), Gaussian(2))
        with pytest.raises(ValueError, match="expected a flow of one target, got one of 2"):
            Predictive(flow, torch.zeros(4, 1))


class TestScore:
    def test_crps_of_points_by_its_definition(self):
        points, x = torch.randn(5, 30, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
        apart = (points[:, :, None] - points[:, None]).abs().mean((1, 2))
        torch.testing.assert_close(crps(points, x), (points - x[:, None]).abs().mean(1) - apart / 2)

    def test_crps_of_a_gaussian_in_closed_form(self):
        """σ [z (2 Φ(z) - 1) + 2 φ(z) - 1/√π], z = (x - μ) / σ (Gneiting & Raftery 2007)."""
        share = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
        points = (2 + 3 * torch.special.ndtri(share)).expand(3, -1)
        x = torch.tensor([-1.0, 2.0, 6.0], dtype=torch.float64)
        z = ((x - 2) / 3).numpy()
        expected = 3 * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / math.sqrt(math.pi))
        np.testing.assert_allclose(crps(points, x), expected, rtol=1e-3)

    def test_an_interval_has_its_probability_between_its_ends(self):
        assert interval(0.9) == pytest.approx((0.05, 0.95))
        for level in (0, 1, -0.1, 1.5, math.nan):
            with pytest.raises(ValueError, match="expected a probability between 0 and 1, got"):
                interval(level)
