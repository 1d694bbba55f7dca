"""A coupling function that is a random forest: it reads what its trees read, and its law follows the targets."""

import copy
import math

import numpy as np
import pytest
import torch
from nicest.flows.forest import SHAPES, quantiles
from sklearn.ensemble import RandomForestRegressor
from zoo import initialised

from nicest.fast import lower
from nicest.flows import Chain, DiagonalScaling, ForestCoupling, Logistic, Mixture, Partition, PartPrior, Units, Within
from nicest.inference.predictive import Predictive

PART = Partition(range(2), 3)


def rows(n: int = 400, seed: int = 0) -> torch.Tensor:
    """x given c: around 2 c_1, three times as wide where c_2 is positive; one c_1 in ten is missing."""
    rng = np.random.default_rng(seed)
    c = rng.normal(size=(n, 2))
    x = 2 * c[:, 0] + np.where(c[:, 1] > 0, 0.9, 0.3) * rng.normal(size=n)
    c[rng.random(n) < 0.1, 0] = math.nan
    return torch.from_numpy(np.column_stack([c, x]))


@pytest.fixture(scope="module")
def fitted() -> ForestCoupling:
    torch.manual_seed(0)
    return initialised(ForestCoupling(PART, 8, Logistic(1), 60, 150).double(), rows())


def nats(layer: ForestCoupling, x: torch.Tensor) -> float:
    h, log_det = layer(x)
    return float((Logistic(1).double().log_prob(h[:, 2:]) + log_det).mean())


def mixture(layer: ForestCoupling, share: float) -> Mixture:
    units = Units.continuous(3)
    units.fit(torch.zeros(3), torch.ones(3))
    flat = Chain(Within(PART, DiagonalScaling(1)))
    flow = Mixture(units, [flat, copy.deepcopy(flat)], PartPrior(Logistic(1), PART), Chain(layer)).double().eval()
    flow.share.fill_(share)
    return flow


class TestForest:
    def test_finds_the_leaves_that_scikit_learn_finds(self, fitted: ForestCoupling):
        x = rows(50, 1)
        given, target = rows()[:, :2].float().numpy(), rows()[:, 2].numpy()
        net = copy.deepcopy(fitted.network)
        trees, _ = net._grown(given, target, 5)
        leaf, share = SHAPES[0]
        options = {"min_samples_leaf": leaf, "max_features": share, "max_leaf_nodes": 150, "random_state": 5}
        theirs = RandomForestRegressor(60 // len(SHAPES), **options).fit(given, target)
        for t, leaf in enumerate(theirs.apply(x[:, :2].float().numpy()).T):
            at = np.zeros(len(x), int)
            for _ in range(net.steps):
                cell = x[:, :2].float().numpy()[np.arange(len(x)), trees.feature[t, at]]
                left = np.where(np.isnan(cell), trees.missing_left[t, at], cell <= trees.threshold[t, at])
                at = np.where(left, trees.left[t, at], trees.right[t, at])
            assert np.array_equal(at, leaf)

    def test_predicts_rows_it_has_not_seen(self, fitted: ForestCoupling):
        new = rows(1000, 2)
        marginal = torch.distributions.Normal(new[:, 2].mean(), new[:, 2].std()).log_prob(new[:, 2]).mean()
        assert nats(fitted, new) > float(marginal) + 0.5

    def test_intervals_widen_with_the_noise(self, fitted: ForestCoupling):
        c = torch.cartesian_prod(torch.linspace(-1, 1, 9), torch.tensor([-1.0, 1.0])).double()
        low, high = (fitted.inverse(torch.cat((c, c.new_full((18, 1), h)), 1))[0][:, 2] for h in (-2.2, 2.2))
        narrow, wide = (high - low).view(9, 2).mean(0).tolist()
        assert narrow < 0.8 * wide

    def test_the_seed_of_torch_decides(self, fitted: ForestCoupling):
        for seed, same in ((0, True), (1, False)):
            torch.manual_seed(seed)
            again = initialised(ForestCoupling(PART, 8, Logistic(1), 60, 150).double(), rows())
            assert torch.equal(again.network.values, fitted.network.values) is same

    def test_stored_weights_that_no_forest_has_are_refused(self, fitted: ForestCoupling):
        for name, value in (("left", -1), ("right", 1000), ("feature", 2), ("depth", 1 << 30)):
            stored = {key: each.clone() for key, each in fitted.state_dict().items()}
            stored[f"network.{name}"].view(-1)[0] = value
            with pytest.raises(RuntimeError, match=f"{name}: expected numbers from 0"):
                ForestCoupling(PART, 8, Logistic(1), 60, 150).double().load_state_dict(stored)

    def test_copies_of_a_row_do_not_stand_for_new_ones(self):
        x, layer = rows(60), ForestCoupling(PART, 8, Logistic(1), 20, 60).double()
        given, target = (torch.cat((x, x))[:, i].numpy() for i in (slice(2), 2))
        _, unseen = layer.network._grown(given.astype("f4"), target, 0)
        once = unseen.view(2, 60, -1)
        assert torch.equal(once[0], once[1])
        assert float(unseen.isinf().double().mean()) > 0.8  # 1 - e^-2 of the trees have seen a row or its copy

    def test_a_target_of_one_value_in_every_leaf(self):
        x = rows(60)
        x[:, 2] = (x[:, 1] > 0).double()
        layer = initialised(ForestCoupling(PART, 8, Logistic(1), 20, 30).double(), x)
        h, log_det = layer(x)
        assert h.isfinite()[:, 2].all()
        assert log_det.isfinite().all()
        torch.testing.assert_close(layer.inverse(h)[0][:, 2], x[:, 2])

    def test_predicts_one_component_alone(self):
        with pytest.raises(ValueError, match="expected one component"):
            ForestCoupling(Partition([0], 3), 8, Logistic(1), 10, 16)


def test_quantiles_are_of_the_first_numbers_alone():
    ordered = torch.tensor([[0.0, 1.0, 2.0, 3.0], [5.0, 7.0, math.inf, math.inf]])
    found = quantiles(ordered, torch.tensor([0.0, 0.5, 1.0]), torch.tensor([4.0, 2.0]))
    torch.testing.assert_close(found, torch.tensor([[0.0, 1.5, 3.0], [5.0, 6.0, 7.0]]))


class TestInAMixture:
    @pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
    @pytest.mark.parametrize("lowered", [False, True])
    @torch.no_grad()
    def test_the_density_is_the_weighted_mean(self, fitted: ForestCoupling, share: float, lowered: bool):
        flow, x = mixture(fitted, share), rows(20, 3)
        each = flow.of_each(flow.enter(x)).exp()
        expected = (1 - share) * each[:2].mean(0) + share * each[2]
        torch.testing.assert_close((lower(flow) if lowered else flow).log_prob(x), expected.log())

    def test_in_training_the_forest_does_not_count(self, fitted: ForestCoupling):
        flow, x = mixture(fitted, 0.5).train(), rows(20, 3)
        torch.testing.assert_close(flow.log_prob(x), flow.of_each(flow.enter(x))[:2].mean(0))

    @torch.no_grad()
    def test_a_prediction_agrees_with_itself(self, fitted: ForestCoupling):
        flow, c = mixture(fitted, 0.3), rows(5, 4)[:, :2]
        ahead = Predictive(flow, c)
        shares = torch.tensor([0.05, 0.4, 0.9], dtype=torch.float64)
        x = ahead.quantile(shares)
        torch.testing.assert_close(ahead.cdf(x), shares.expand(5, 3), atol=1e-6, rtol=0)
        step = 1e-5
        slope = (ahead.cdf(x[:, 1] + step) - ahead.cdf(x[:, 1] - step)) / (2 * step)
        torch.testing.assert_close(ahead.log_prob(x[:, 1]).exp(), slope, rtol=1e-4, atol=1e-6)
        points = ahead.points()
        assert points.shape[1] == pytest.approx(3 * 64, abs=2)
        below = (points[:, :, None] <= x[:, None]).double().mean(1)
        torch.testing.assert_close(below, shares.expand(5, 3), atol=0.03, rtol=0)

    @torch.no_grad()
    def test_draws_follow_the_weights(self, fitted: ForestCoupling):
        flow, c = mixture(fitted, 0.3), torch.tensor([0.5, -1.0], dtype=torch.float64)
        ahead = Predictive(flow, c[None])
        drawn = flow.sample(4000, given=c, generator=torch.Generator().manual_seed(0))[:, 0]
        for x in (drawn, ahead.sample(4000, torch.Generator().manual_seed(1))[0]):
            share = Predictive(flow, c.expand(len(x), 2)).cdf(x)
            assert float((share.sort().values - torch.linspace(0, 1, len(x))).abs().max()) < 0.03

    @torch.no_grad()
    def test_a_code_leads_back(self, fitted: ForestCoupling):
        flow, x = mixture(fitted, 0.3), rows(20, 5)
        x = x[~x.isnan().any(1)]
        code = flow.code_of(flow.enter(x), torch.Generator().manual_seed(0))
        torch.testing.assert_close(flow.units.leave(flow.invert(code)), x)
