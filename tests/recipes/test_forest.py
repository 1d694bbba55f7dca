"""A conditioner that is a random forest: it finds the leaves of its trees, and its law follows the targets."""

import copy
import math

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestRegressor
from torch import Tensor

from nicest.fast import lower
from nicest.flows import AffineSpline, Chain, DiagonalScaling, Elementwise, Flow, Logistic, Mixture, Units
from nicest.inference.predictive import Predictive
from nicest.recipes.forest import SHAPES, STEEPEST, Forest, quantiles

LAW = AffineSpline(8, log_scale=STEEPEST)


def data(n: int = 400, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return targets x and contexts c: x is near 2 c_1 and varies more if c_2 > 0; one c_1 in ten is missing."""
    rng = np.random.default_rng(seed)
    c = rng.normal(size=(n, 2))
    x = 2 * c[:, 0] + np.where(c[:, 1] > 0, 0.9, 0.3) * rng.normal(size=n)
    c[rng.random(n) < 0.1, 0] = math.nan
    return torch.from_numpy(x[:, None]), torch.from_numpy(c)


def make(x: Tensor, c: Tensor, trees: int = 60, leaves: int = 150) -> Elementwise:
    layer = Elementwise(LAW, 1, Forest(2, LAW, Logistic(1), trees, leaves)).double()
    layer.initialise(x, c)
    return layer


@pytest.fixture(scope="module")
def fitted() -> Elementwise:
    torch.manual_seed(0)
    return make(*data())


def mixture(layer: Elementwise, weight: float = 0.3) -> Mixture:
    """Mix the forest with two flows that ignore the context."""
    units, prior = Units.continuous(1), Logistic(1)
    chains = [Chain(DiagonalScaling(1)), Chain(DiagonalScaling(1)), Chain(layer)]
    flows = [Flow(units, chain, prior) for chain in chains]
    return Mixture(flows, [(1 - weight) / 2, (1 - weight) / 2, weight]).double().eval()


class TestForest:
    def test_finds_the_leaves_that_scikit_learn_finds(self, fitted: Elementwise):
        given, target = data()[1].float().numpy(), data()[0][:, 0].numpy()
        new = data(50, 1)[1].float().numpy()
        forest = copy.deepcopy(fitted.conditioner)
        trees, _ = forest._grown(given, target, 5)
        leaf, share = SHAPES[0]
        options = {"min_samples_leaf": leaf, "max_features": share, "max_leaf_nodes": 150, "random_state": 5}
        theirs = RandomForestRegressor(60 // len(SHAPES), **options).fit(given, target)
        for t, leaf in enumerate(theirs.apply(new).T):
            at = np.zeros(len(new), int)
            for _ in range(forest.steps):
                cell = new[np.arange(len(new)), trees.feature[t, at]]
                left = np.where(np.isnan(cell), trees.missing_left[t, at], cell <= trees.threshold[t, at])
                at = np.where(left, trees.left[t, at], trees.right[t, at])
            assert np.array_equal(at, leaf)

    def test_predicts_rows_it_has_not_seen(self, fitted: Elementwise):
        x, c = data(1000, 2)
        marginal = torch.distributions.Normal(x.mean(), x.std()).log_prob(x).mean()
        h, log_det = fitted(x, c)
        assert float((Logistic(1).double().log_prob(h) + log_det).mean()) > float(marginal) + 0.5

    def test_is_a_bijection_at_every_context(self, fitted: Elementwise):
        x, c = data(50, 3)
        x.requires_grad_()
        y, log_det = fitted(x, c)
        back, inverse_log_det = fitted.inverse(y, c)
        torch.testing.assert_close(back, x)
        torch.testing.assert_close(inverse_log_det, -log_det)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0][:, 0].log(), log_det)

    def test_intervals_widen_with_the_noise(self, fitted: Elementwise):
        c = torch.cartesian_prod(torch.linspace(-1, 1, 9), torch.tensor([-1.0, 1.0])).double()
        low, high = (fitted.inverse(c.new_full((18, 1), h), c)[0] for h in (-2.2, 2.2))
        narrow, wide = (high - low).view(9, 2).mean(0).tolist()
        assert narrow < 0.8 * wide

    def test_the_seed_of_torch_decides(self, fitted: Elementwise):
        for seed, same in ((0, True), (1, False)):
            torch.manual_seed(seed)
            again = make(*data())
            assert torch.equal(again.conditioner.values, fitted.conditioner.values) is same

    def test_a_stored_forest_is_the_same(self, fitted: Elementwise):
        twin, c = Forest(2, LAW, Logistic(1), 60, 150).double(), data(50, 4)[1]
        twin.load_state_dict(fitted.conditioner.state_dict())
        assert torch.equal(twin(c), fitted.conditioner(c))

    def test_stored_weights_that_no_forest_has_are_refused(self, fitted: Elementwise):
        for name, value in (("left", -1), ("right", 1000), ("feature", 2), ("depth", 1 << 30)):
            stored = {key: each.clone() for key, each in fitted.conditioner.state_dict().items()}
            stored[name].view(-1)[0] = value
            with pytest.raises(RuntimeError, match=f"{name}: expected numbers from 0"):
                Forest(2, LAW, Logistic(1), 60, 150).double().load_state_dict(stored)

    def test_copies_of_a_row_do_not_count_as_unseen(self):
        x, c = data(60)
        forest = Forest(2, LAW, Logistic(1), 20, 60).double()
        _, unseen = forest._grown(torch.cat((c, c)).float().numpy(), torch.cat((x, x))[:, 0].numpy(), 0)
        once = unseen.view(2, 60, -1)
        assert torch.equal(once[0], once[1])
        assert float(unseen.isinf().double().mean()) > 0.8  # 1 - e^-2 of the trees have seen a row or its copy

    def test_a_target_of_one_value_in_every_leaf(self):
        _, c = data(60)
        x = (c[:, 1:] > 0).double()
        layer = make(x, c, 20, 30)
        h, log_det = layer(x, c)
        assert h.isfinite().all()
        assert log_det.isfinite().all()
        torch.testing.assert_close(layer.inverse(h, c)[0], x)


def test_quantiles_are_those_of_the_first_numbers():
    ordered = torch.tensor([[0.0, 1.0, 2.0, 3.0], [5.0, 7.0, math.inf, math.inf]])
    found = quantiles(ordered, torch.tensor([0.0, 0.5, 1.0]), torch.tensor([4.0, 2.0]))
    torch.testing.assert_close(found, torch.tensor([[0.0, 1.5, 3.0], [5.0, 6.0, 7.0]]))


class TestInAMixture:
    @pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
    @torch.no_grad()
    def test_the_fast_form_computes_the_same(self, fitted: Elementwise, weight: float):
        flow, (x, c) = mixture(fitted, weight), data(20, 3)
        torch.testing.assert_close(lower(flow).log_prob(x, c), flow.log_prob(x, c))

    @torch.no_grad()
    def test_a_prediction_agrees_with_itself(self, fitted: Elementwise):
        ahead = Predictive(mixture(fitted), data(5, 4)[1])
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
    def test_draws_follow_the_prediction(self, fitted: Elementwise):
        flow, c = mixture(fitted), torch.tensor([0.5, -1.0], dtype=torch.float64)
        drawn = flow.sample(4000, c, generator=torch.Generator().manual_seed(0))[:, 0]
        for x in (drawn, Predictive(flow, c[None]).sample(4000, torch.Generator().manual_seed(1))[0]):
            below = Predictive(flow, c.expand(len(x), 2)).cdf(x)
            assert float((below.sort().values - torch.linspace(0, 1, len(x))).abs().max()) < 0.03
