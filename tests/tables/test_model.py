"""The table model against enumeration, quadrature and closed forms; untrained models with strong random weights."""

import itertools
import math

import numpy as np
import pytest
import torch
from exact import all_rows, nodes, small_model
from scipy import stats
from sklearn.decomposition import FactorAnalysis
from torch import Tensor

from nicest.data.columns import Head
from nicest.flows.noise import Part, part_of_batch
from nicest.tables.factors import Factors
from nicest.tables.model import TableModel, systematic

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")

NAN = math.nan
ORDERED = Head(categories=3, values=(-1.2, 0.0, 1.2))
GRID = Head(step=0.5, atoms=(0.0,), low=-1.0, high=1.0, knots=(-0.5, 0.5), scale=2.0)
DISCRETE = (Head(categories=2), GRID, ORDERED)
VALUES = ([0, 1], [-1, -0.5, 0, 0.5, 1], [0, 1, 2])
ROWS = all_rows(*VALUES)
FOUR = (*DISCRETE, Head(knots=(-1.0, 0.0, 1.0), scale=3.0))


def chain(model: TableModel, order: list[int], given: dict[int, float], asked: Tensor = ROWS) -> Tensor:
    """Return p(the other cells | given) of rows by the chain rule in an order, written out by `conditional`."""
    x, seen, total = asked.clone(), torch.zeros_like(asked), torch.zeros(len(asked), dtype=torch.float64)
    for i, value in given.items():
        x[:, i], seen[:, i] = value, 1
    for i in order:
        if i not in given:
            total += model.conditional(x, seen, i).log_prob(model.cells(x, i)).reshape(-1)
            seen = seen.index_fill(1, torch.tensor(i), 1.0)
    return total.exp()


def counted(rows: Tensor) -> np.ndarray:
    """How often each row of ROWS comes."""
    found = (rows[:, None] == ROWS).all(-1)
    assert found.any(1).all()
    return found.double().sum(0).numpy()


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    """The p-value of counts, of rows expected five times at least."""
    p = p / p.sum()
    often = p * counts.sum() > 5
    assert counts[p == 0].sum() == 0
    observed, expected = np.append(counts[often], counts[~often].sum()), np.append(p[often], p[~often].sum())
    kept = expected > 0
    return stats.chisquare(observed[kept], expected[kept] * counts.sum()).pvalue


class TestDensity:
    @pytest.mark.parametrize("members", [1, 3])
    @pytest.mark.parametrize("orders", [1, 5])
    def test_probabilities_of_all_rows_sum_to_one(self, members: int, orders: int):
        model = small_model(DISCRETE, members=members, orders=orders)
        assert float(model.log_prob(ROWS).exp().sum().detach()) == pytest.approx(1, abs=1e-12)

    @pytest.mark.parametrize("missing", [(0,), (1,), (0, 2), (0, 1, 2)])
    def test_with_missing_cells_the_observed_ones_sum_to_one(self, missing: tuple[int, ...]):
        model = small_model(DISCRETE, members=2)
        rows = all_rows(*([NAN] if i in missing else each for i, each in enumerate(VALUES)))
        p = model.log_prob(rows).exp()
        assert p.sum().item() == pytest.approx(1, abs=1e-12)
        orders = [[i for i in order if i not in missing] for order in model.orders.tolist()]
        torch.testing.assert_close(p, sum(chain(model, order, {}, rows.nan_to_num(9.0)) for order in orders) / 2)

    def test_densities_integrate_to_one_over_numbers_and_categories(self):
        heads = (Head(low=0.0, atoms=(0.0,), scale=2.0), Head(categories=2), Head(low=-1.0, high=1.0))
        model = small_model(heads, members=2, strength=0.25)
        (x, at_x), (y, at_y) = nodes(0.0, 1e9, 360), nodes(-1.0, 1.0, 120)
        x, at_x = np.append(x, 0.0), np.append(2.0 * at_x, 1.0)  # the density is of 2 x, and 0 has a probability
        weights = np.multiply.outer(np.multiply.outer(at_x, [1, 1]), at_y).reshape(-1)
        with torch.no_grad():
            nats = model.log_prob(all_rows(x, [0, 1], y)).numpy()
        assert np.exp(nats) @ weights == pytest.approx(1, abs=1e-6)

    def test_it_is_the_mean_over_orders_of_the_chain_rule(self):
        model = small_model(DISCRETE, members=2, orders=3)
        means = sum(chain(model, order, {}) for order in model.orders.tolist()) / 3
        torch.testing.assert_close(model.log_prob(ROWS).exp(), means)
        assert len({tuple(order) for order in model.orders.tolist()}) > 1

    def test_the_members_probabilities_are_averaged(self):
        """So a model of one member, whose weights are those of one of several, has a part of their mean."""
        whole, one = small_model(DISCRETE, members=3), small_model(DISCRETE)
        one.load_state_dict(dict(whole.named_buffers()), strict=False)
        seen = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).expand_as(ROWS)
        parts = []
        for m in range(3):
            for several, single in zip(whole.parameters(), one.parameters(), strict=True):
                single.data = several.view(3, *single.view(1, -1).shape)[m].view_as(single).detach()
            parts.append(self.of(one, seen))
        torch.testing.assert_close(self.of(whole, seen), sum(parts) / 3)

    def of(self, model: TableModel, seen: Tensor) -> Tensor:
        """Return p(x_1 | x_0) and p(x_2 | x_0) of all rows."""
        nats = [model.conditional(ROWS, seen, i).log_prob(model.cells(ROWS, i)).view(-1) for i in (1, 2)]
        return torch.stack(nats).exp()

    def test_a_row_has_one_number_in_any_batch(self):
        model = small_model(FOUR, members=2)
        x = torch.cat((ROWS, torch.linspace(-2, 2, len(ROWS)).double()[:, None]), 1)
        x[::3, 0], x[::4, 3], x[5] = NAN, NAN, NAN
        whole = model.log_prob(x)
        torch.testing.assert_close(model.log_prob(x), whole, rtol=0, atol=0)
        torch.testing.assert_close(torch.cat([model.log_prob(each) for each in x.split(1)]), whole)
        assert whole[5] == 0
        assert model.log_prob(x.view(5, 6, 4)).shape == (5, 6)

    def test_beyond_the_support_there_is_nothing(self):
        heads = (Head(categories=2), Head(step=0.5), Head(), Head(low=0.0), GRID)
        for dtype in (torch.float32, torch.float64):
            model = small_model(heads, members=2).to(dtype)
            good = torch.tensor([0.0, 0.5, 0.1, 0.2, 1.0], dtype=dtype)
            assert torch.isfinite(model.log_prob(good[None])).all()
            infinite = [(i, sign * math.inf) for i in range(5) for sign in (1, -1)]
            for i, value in [(0, 2.0), (3, -0.01), (4, 1.5), *infinite]:
                bad = good.clone()
                bad[i] = value
                assert model.log_prob(bad[None]).item() == -math.inf, (dtype, i, value)
            seen = torch.ones(1, 5, dtype=dtype)
            assert torch.isfinite(model.conditional(seen * math.inf, seen, 0).log_probs).all()

    @pytest.mark.parametrize("head", [Head(), Head(step=0.5), Head(atoms=(0.0,))])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_number_that_cannot_be_has_no_density_without_bounds(self, head: Head, dtype: torch.dtype):
        model = small_model([head] * 3, members=2).to(dtype)
        x = torch.tensor([[0.0, 0.5, math.inf], [-math.inf, 0.5, NAN]], dtype=dtype)
        assert torch.isneginf(model.log_prob(x)).all()
        assert torch.isneginf(model.log_prob_in(x, [2, 1, 0])).all()

    def test_a_hidden_cell_is_not_read(self):
        model = small_model(FOUR)
        seen = torch.tensor([[1.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
        one, other = (torch.tensor([[1.0, a, 2.0, b]], dtype=torch.float64) for a, b in ((0.5, 3.0), (-1.0, NAN)))
        for i in range(4):
            first, second = (vars(model.conditional(x, seen, i)) for x in (one, other))
            torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


class TestObjective:
    def expected(self, model: TableModel, x: Tensor) -> float:
        """The mean of log p over all orders."""
        orders = list(itertools.permutations(range(model.dim)))
        return float(sum(model.log_prob_in(x[None], order) for order in orders)) / len(orders)

    def masks(self, present: int, dim: int = 4) -> tuple[Tensor, Tensor]:
        """Every order of D cells, with every number of cells that can be seen."""
        pairs = list(itertools.product(itertools.permutations(range(dim)), range(present)))
        draws = torch.tensor([order for order, _ in pairs]).double() / dim
        return draws[None], ((torch.tensor([k for _, k in pairs]) + 0.5) / present).double()[None]

    @pytest.mark.parametrize("missing", [(), (1,), (0, 3)])
    def test_its_mean_over_all_masks_is_the_mean_over_orders(self, missing: tuple[int, ...]):
        model = small_model(FOUR)
        x = torch.tensor([1.0, 0.5, 2.0, -0.7], dtype=torch.float64)
        x[list(missing)] = NAN
        draws, counts = self.masks(4 - len(missing))
        rows = x.expand(1, counts.shape[1], 4)
        found = model._estimate(rows, draws, counts, torch.zeros_like(counts, dtype=torch.bool))
        assert float(found.mean()) == pytest.approx(self.expected(model, x), abs=1e-10)

    @pytest.mark.parametrize("missing", [(), (1,)])
    def test_training_draws_masks_with_that_mean(self, missing: tuple[int, ...]):
        model = small_model(FOUR).train()
        x = torch.tensor([1.0, 0.5, 2.0, -0.7], dtype=torch.float64)
        x[list(missing)] = NAN
        with torch.no_grad():
            found = model(x.expand(20_000, 4))
        error = float(found.std()) / math.sqrt(len(found))
        assert float(found.mean()) == pytest.approx(self.expected(model, x), abs=4 * error)
        assert error < 0.05

    def test_with_targets_a_share_of_the_masks_hides_them_alone(self):
        model = small_model(FOUR, targets=(1,), favour=0.5).train()
        plain = small_model(FOUR).train()
        x = torch.tensor([1.0, 0.5, 2.0, -0.7], dtype=torch.float64)
        seen = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
        alone = float(model.conditional(x[None], seen[None], 1).log_prob(x[None, 1:2]))
        with torch.no_grad():
            found = model(x.expand(20_000, 4))
        error = float(found.std()) / math.sqrt(len(found))
        expected = 0.5 * alone + 0.5 * self.expected(plain, x)
        assert float(found.mean()) == pytest.approx(expected, abs=4 * error)
        exact = (found - alone).abs() < 1e-12
        assert 0.49 < float(exact.double().mean()) < 0.6

    def test_missing_cells_are_never_seen_and_never_targets(self):
        model = small_model(FOUR, targets=(3,), members=2).train()
        x = torch.tensor([[1.0, 0.5, NAN, 0.3], [NAN, -0.5, 2.0, NAN], [NAN, NAN, NAN, NAN]], dtype=torch.float64)
        seen_of = []
        model.network.register_forward_pre_hook(lambda _, args: seen_of.append(args[1].clone()))
        found = model(x.repeat(20, 1))
        assert not (seen_of[0].reshape(-1, 4)[:60].bool() & x.repeat(20, 1).isnan()).any()
        assert (found.detach().view(20, 3)[:, 2] == 0).all()
        assert torch.isfinite(found).all()
        found.sum().backward()
        assert all(torch.isfinite(each.grad).all() for each in model.parameters())

    @pytest.mark.parametrize("members", [1, 2])
    @pytest.mark.parametrize("dropout", [0.0, 0.3])
    def test_parts_of_a_batch_have_the_objective_of_the_whole(self, members: int, dropout: float):
        model = small_model(FOUR, members=members, dropout=dropout).train()
        x = torch.cat((ROWS, torch.linspace(-2, 2, len(ROWS)).double()[:, None]), 1)[:24]
        torch.manual_seed(5)
        whole = model(x)
        for first in range(3):
            torch.manual_seed(5)
            with part_of_batch(Part(24, first, 3)):
                torch.testing.assert_close(model(x[first::3]), whole[first::3])

    @pytest.mark.parametrize("n", [1, 3, 5])
    def test_rows_that_the_members_cannot_share_evenly(self, n: int):
        model = small_model(DISCRETE, members=4).train()
        assert torch.isfinite(model(ROWS[:n])).all()
        assert model(ROWS[:n]).shape == (n,)

    def test_validation_is_deterministic_and_close_to_the_objective(self):
        model = small_model(DISCRETE, members=2)
        first = model.validation_log_prob(ROWS)
        torch.rand(3)
        torch.testing.assert_close(model.validation_log_prob(ROWS), first, rtol=0, atol=0)
        x = ROWS[7].expand(4_000, 3)
        nats = [float(model.log_prob_in(ROWS[7:8], order)) for order in itertools.permutations(range(3))]
        # the members' probabilities are averaged, as in `log_prob`
        assert float(model.validation_log_prob(x).mean()) == pytest.approx(np.mean(nats), abs=0.05)


class TestStart:
    def test_gaussian_rows_start_from_their_conditionals(self):
        rng = np.random.default_rng(0)
        loadings, noise = rng.normal(size=(4, 1)), np.array([0.3, 0.5, 0.8, 0.4])
        covariance = loadings @ loadings.T + np.diag(noise)
        rows = rng.multivariate_normal(np.zeros(4), covariance, 4_000)
        sizes = {"width": 8, "depth": 1, "components": 12, "dropout": 0.0, "members": 1, "orders": 2, "favour": 0.5}
        model = small_model([Head()] * 4, **sizes)
        with torch.no_grad():
            model.network.leave.weight.zero_()
        model.initialise(torch.from_numpy(rows))
        exact = stats.multivariate_normal(np.zeros(4), covariance).logpdf(rows[:500])
        found = model.log_prob(torch.from_numpy(rows[:500])).detach().numpy()
        assert np.abs(found - exact).mean() < 4 * 0.03  # of each column: twelve logistics are not quite a Gaussian
        assert abs((found - exact).mean()) < 0.02
        mean, variance = (float(each) for each in self.given(model, rows[:1], [0, 2]).moments())
        gain = covariance[1, [0, 2]] @ np.linalg.inv(covariance[np.ix_([0, 2], [0, 2])])
        assert mean == pytest.approx(gain @ rows[0, [0, 2]], abs=0.03)
        assert variance == pytest.approx(covariance[1, 1] - gain @ covariance[[0, 2], 1], rel=0.1)

    def given(self, model: TableModel, x: np.ndarray, columns: list[int]):
        seen = torch.zeros(1, 4, dtype=torch.float64)
        seen[:, columns] = 1
        return model.conditional(torch.from_numpy(x), seen, 1)

    def test_frequencies_of_categories_and_atoms(self):
        model = small_model((Head(categories=2), Head(atoms=(0.0, 2.0)), Head(atoms=(1.0,))))
        x = torch.tensor([[1.0, 0.0, 1.0]] * 60 + [[0.0, 2.0, -0.5]] * 30 + [[0.0, 0.7, 0.3]] * 10, dtype=torch.float64)
        x[:5, 0] = NAN
        with torch.no_grad():
            model.network.leave.weight.zero_()
        model.initialise(x)
        none = torch.zeros(1, 3, dtype=torch.float64)
        p = model.conditional(none, none, 0).log_probs.exp()[0]
        torch.testing.assert_close(p, torch.tensor([41 / 97, 56 / 97], dtype=torch.float64))
        p = model.conditional(none, none, 1).log_atoms.exp().view(-1)
        torch.testing.assert_close(p, torch.tensor([61 / 103, 31 / 103], dtype=torch.float64), rtol=1e-3, atol=0)

    def test_factor_analysis_finds_what_sklearn_finds(self):
        rng = np.random.default_rng(1)
        x = rng.normal(size=(1_500, 2)) @ rng.normal(size=(2, 6)) + 0.7 * rng.normal(size=(1_500, 6))
        x = torch.from_numpy((x - x.mean(0)) / x.std(0))
        found = Factors(6).double()
        found.fit(x, torch.ones_like(x))
        found = found.double()
        sklearn = FactorAnalysis(2, tol=1e-8, max_iter=5_000).fit(x.numpy())
        assert float(found.log_prob(x, torch.ones_like(x)).mean()) == pytest.approx(sklearn.score(x.numpy()), abs=0.005)
        covariance = (found.loadings @ found.loadings.mT + found.noise.diag()).numpy()
        np.testing.assert_allclose(covariance, sklearn.get_covariance(), atol=0.03)

    def test_factor_analysis_with_missing_cells(self):
        rng = np.random.default_rng(2)
        covariance = np.array([[1, 0.8, 0.5], [0.8, 1, 0.4], [0.5, 0.4, 1]])
        x = torch.from_numpy(rng.multivariate_normal(np.zeros(3), covariance, 4_000))
        seen = torch.from_numpy(rng.random(x.shape) > 0.4).double()
        found = Factors(3).double()
        found.fit(x * seen, seen)
        found = found.double()
        fitted = (found.loadings @ found.loadings.mT + found.noise.diag()).numpy()
        np.testing.assert_allclose(fitted, covariance, atol=0.06)
        for columns in ([], [0], [0, 2]):
            observed = torch.zeros(1, 3, dtype=torch.float64)
            observed[:, columns] = 1
            mean, deviation = found(x[:1], observed)
            gain = fitted[1, columns] @ np.linalg.inv(fitted[np.ix_(columns, columns)]) if columns else np.zeros(0)
            assert float(mean[0, 1]) == pytest.approx(gain @ x[0, columns].numpy(), abs=1e-9)
            assert float(deviation[0, 1]) ** 2 == pytest.approx(fitted[1, 1] - gain @ fitted[columns, 1], abs=1e-9)
            among = fitted[np.ix_(columns, columns)]
            nats = stats.multivariate_normal(np.zeros(len(columns)), among).logpdf(x[0, columns]) if columns else 0.0
            assert float(found.log_prob(x[:1], observed)) == pytest.approx(nats, abs=1e-9)


class TestSampling:
    def draws(self, model: TableModel, given: dict[int, float], n: int = 20_000) -> Tensor:
        x = torch.full((n, 3), NAN, dtype=torch.float64)
        for i, value in given.items():
            x[:, i] = value
        return model.complete(x, generator=torch.Generator().manual_seed(1))

    def test_samples_follow_log_prob(self):
        model = small_model(DISCRETE, members=2, orders=3)
        counts = counted(model.sample(20_001, generator=torch.Generator().manual_seed(0)))
        assert chi_square(counts, model.log_prob(ROWS).detach().exp().numpy()) > 1e-4

    @pytest.mark.parametrize("given", [{}, {0: 1.0}, {1: -0.5}, {0: 0.0, 2: 1.0}])
    def test_completed_cells_follow_the_chain_given_the_observed_ones(self, given: dict[int, float]):
        model = small_model(DISCRETE, members=2)
        p = chain(model, model.orders[0].tolist(), given).detach()
        for i, value in given.items():
            p = torch.where(ROWS[:, i] == value, p, 0.0)
        assert float(p.sum()) == pytest.approx(1, abs=1e-12)
        assert chi_square(counted(self.draws(model, given)), p.numpy()) > 1e-4

    @pytest.mark.parametrize(
        ("given", "ranges"),
        [
            ({}, {1: [(0.5, math.inf)]}),
            ({}, {2: [(0.0, 0.0), (2.0, 2.0)], 1: [(-math.inf, 0.0)]}),
            ({0: 1.0}, {1: [(-0.5, 0.5)], 2: [(1.0, math.inf)]}),
        ],
    )
    def test_conditions(self, given: dict[int, float], ranges: dict[int, list[tuple[float, float]]]):
        model = small_model(DISCRETE, members=2)
        order = [*ranges, *(i for i in model.orders[0].tolist() if i not in ranges)]
        p = chain(model, order, given).detach()
        met = torch.ones(len(ROWS), dtype=torch.bool)
        for i, value in given.items():
            met &= ROWS[:, i] == value
        for i, intervals in ranges.items():
            met &= torch.stack([(ROWS[:, i] >= low) & (ROWS[:, i] <= high) for low, high in intervals]).any(0)
        p = torch.where(met, p, 0.0)
        rows, log_p, effective = model.sample_where(40_000, given, ranges, generator=torch.Generator().manual_seed(3))
        assert math.exp(log_p) == pytest.approx(float(p.sum()), rel=0.02)
        assert 1_000 < effective <= 40_000.001
        # resampled rows repeat: their frequencies are compared by distance
        found = counted(rows) / len(rows)
        assert 0.5 * np.abs(found - (p / p.sum()).numpy()).sum() < 0.02

    def test_a_probability_of_one_in_a_billion(self):
        model = small_model([Head(), Head()], members=2, strength=0.25)
        far, near = self.tail(model)
        rows, log_p, effective = model.sample_where(
            40_000, {}, {0: [(far, math.inf)], 1: [(near, math.inf)]}, generator=torch.Generator().manual_seed(0)
        )
        x, weight = nodes(far, 1e9, 4_000)
        x = torch.from_numpy(x)[:, None].expand(-1, 2).contiguous()
        none, first = torch.zeros_like(x), torch.tensor([1.0, 0.0]).double().expand_as(x)
        with torch.no_grad():
            density = model.conditional(x, none, 0).log_prob(x[:, :1]).exp().view(-1)
            p = density * model.conditional(x, first, 1).log_probability([(near, math.inf)]).exp().view(-1)
        exact = float(p @ torch.from_numpy(weight))
        assert 1e-13 < exact < 1e-7
        assert math.exp(log_p) == pytest.approx(exact, rel=0.1)
        assert (rows[:, 0] >= far).all()
        assert (rows[:, 1] >= near).all()
        assert effective > 100

    def tail(self, model: TableModel) -> tuple[float, float]:
        """Numbers that either column exceeds once in 30,000 rows or so."""
        none = torch.zeros(1, 2, dtype=torch.float64)
        share = torch.full((1, 1), 1 - 3e-5, dtype=torch.float64)
        far, near = (float(model.conditional(none, none, i).quantile(share).detach()) for i in (0, 1))
        return far, near

    def test_an_impossible_condition(self):
        model = small_model(DISCRETE)
        for i, interval in ((0, (0.2, 0.8)), (1, (0.1, 0.4)), (1, (1.4, 9.0))):
            rows, log_p, effective = model.sample_where(10, {}, {i: [interval]})
            assert (len(rows), log_p, effective) == (0, -math.inf, 0.0)

    def test_grid_points_are_those_of_the_data(self):
        """In float32 k steps, computed by the model, may differ from what the schema encodes in the last digit."""
        step = 1 / 2.137
        atoms = (3 * step, 7 * step)
        model = small_model([Head(step=step, atoms=atoms), Head(categories=2)]).float()
        x = model.sample(4_000, generator=torch.Generator().manual_seed(0))
        points = np.float32(np.arange(-500, 500) * step)
        assert np.isin(x[:, 0].numpy(), points).mean() > 0.5
        for atom in np.float32(atoms):
            near = (x[:, 0] - float(atom)).abs() < step / 4
            assert near.any()
            assert (x[near, 0] == float(atom)).all()

    def test_systematic_resampling(self):
        weights = torch.tensor([0.5, 0.0, 0.3, 0.2])
        weights = weights.repeat_interleave(100) / 100
        counts = torch.bincount(systematic(weights, torch.Generator().manual_seed(0)), minlength=400)
        assert counts[100:200].sum() == 0
        assert (counts[:100] == 2).all()
        assert (counts - 400 * weights).abs().max() <= 1


def test_one_column_and_columns_without_choice():
    for heads, x in (
        ([Head()], [[0.3]]),
        ([Head(categories=1)], [[0.0]]),
        ([Head(categories=1), Head()], [[0.0, 0.3]]),
    ):
        model = small_model(heads)
        x = torch.tensor(x, dtype=torch.float64)
        assert torch.isfinite(model.train()(x)).all()
        model.initialise(x.repeat(3, 1))
        assert torch.isfinite(model.log_prob(x)).all()
        assert model.sample(5).shape == (5, len(heads))
