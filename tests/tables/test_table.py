"""A table's answers against the conditionals of its model, and trained models against a known truth."""

import math
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from exact import small_model
from scipy import stats

import nicest
from nicest.data.infer import schema_of
from nicest.recipes.recipe import TrainSettings
from nicest.tables import table as module
from nicest.tables.model import TableModel
from nicest.tables.table import Table


def people(n: int = 300, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    age = rng.integers(18, 90, n)
    return pa.table(
        {
            "sex": rng.choice(["F", "M"], n),
            "age": age,
            "income": np.where(rng.random(n) < 0.2, 0.0, rng.lognormal(3, 0.5, n) + age),
            "children": rng.integers(0, 4, n),
            "height": rng.normal(1.7, 0.1, n),
        }
    )


@pytest.fixture(scope="module")
def table() -> Table:
    data = people()
    schema = schema_of(data)
    model = small_model(schema.heads(), members=2, strength=0.2).float()
    model.initialise(torch.from_numpy(schema.encode(data)))
    return Table(schema, model)


@pytest.fixture(scope="module")
def rows(table: Table) -> np.ndarray:
    """Rows, a fifth of whose cells are missing."""
    rows = table.encode(people(60, seed=1))
    return np.where(np.random.default_rng(0).random(rows.shape) < 0.2, np.float32(np.nan), rows)


def given_the_rest(table: Table, row: np.ndarray, i: int):
    """p(x_i | the observed other cells) of one row, by the model itself."""
    x = torch.from_numpy(row[None])
    seen = (~x.isnan()).float()
    seen[:, i] = 0
    return table.model.conditional(x, seen, i)


class TestAnswers:
    def test_scores(self, table: Table, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch):
        expected = table.model.log_prob(torch.from_numpy(rows)).detach().numpy()
        np.testing.assert_array_equal(table.score(rows), expected)
        monkeypatch.setattr(module, "BATCH", 7)
        told: list[int] = []
        np.testing.assert_allclose(table.score(rows, told=told.append), expected, rtol=1e-4, atol=1e-4)
        assert told[-1] == 60
        assert table.score(rows[:0]).shape == (0,)

    def test_surprises(self, table: Table, rows: np.ndarray):
        found = table.surprise(rows)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(rows))
        for n, i in np.argwhere(~np.isnan(rows))[::17]:
            cell = table.model.cells(torch.from_numpy(rows[n : n + 1]), i)
            nats = given_the_rest(table, rows[n], i).log_prob(cell).item()
            assert found[n, i] == pytest.approx(nats, abs=1e-4)

    def test_marginals(self, table: Table, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(module, "BATCH", 25)
        for i in range(5):
            (marginal,) = table.marginals(rows, [i])
            assert len(marginal) == 60
            truth = rows[:, i].astype(np.float64)
            known = np.flatnonzero(~np.isnan(truth))
            np.testing.assert_allclose(marginal.log_prob_of(truth)[known], table.surprise(rows)[known, i], atol=1e-4)
        both = table.marginals(rows, [1, 2])
        hidden = rows.copy()
        hidden[:, [1, 2]] = np.nan
        alone = [table.marginals(hidden, [i])[0] for i in (1, 2)]
        for one, other in zip(both, alone, strict=True):
            np.testing.assert_allclose(one.mean(), other.mean(), rtol=1e-4)

    def test_distributions_of_missing_cells(self, table: Table, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch):
        found = table.missing(rows)
        assert [i for i, _, _ in found] == np.flatnonzero(np.isnan(rows).any(0)).tolist()
        monkeypatch.setattr(module, "BATCH", 11)
        for (i, marginal, missing), (_, parts, _) in zip(found, table.missing(rows), strict=True):
            np.testing.assert_array_equal(missing, np.isnan(rows[:, i]))
            alone = table.marginals(rows, [i])[0]
            np.testing.assert_allclose(marginal.best(), alone.best()[missing], atol=1e-4)
            np.testing.assert_allclose(parts.best(), marginal.best(), atol=1e-4)
        assert table.missing(table.encode(people(5))) == []

    def test_filled_cells(self, table: Table, rows: np.ndarray):
        best, first, again, other = (
            table.impute(rows),
            *(table.impute(rows, draw=True, seed=seed) for seed in (1, 1, 2)),
        )
        known = ~np.isnan(rows)
        for filled in (best, first, other):
            assert np.isfinite(filled).all()
            np.testing.assert_array_equal(filled[known], rows[known])
            assert np.isfinite(table.score(filled)).all()
        np.testing.assert_array_equal(first, again)
        assert (first != other).any()
        for i, marginal, missing in table.missing(rows):
            np.testing.assert_array_equal(best[missing, i], marginal.best().astype(np.float32))

    def test_samples(self, table: Table):
        drawn = table.sample(500, seed=3)
        assert (drawn.probability, drawn.effective_size) == (1.0, 500)
        np.testing.assert_array_equal(drawn.rows, table.sample(500, seed=3).rows)
        assert np.isfinite(table.score(drawn.rows)).all()
        again = table.encode(table.decode(drawn.rows))
        discrete = [i for i, column in enumerate(table.schema) if column.discrete]
        np.testing.assert_array_equal(again[:, discrete], drawn.rows[:, discrete])
        age = table.marginals(drawn.rows, [1])[0]
        for found in (age.median(), age.quantile(0.9), age.sample(1)):  # whole numbers, to the last digit
            np.testing.assert_array_equal(found % 1, 0)
        assert len(table.sample(0).rows) == len(table.sample(0, "age > 30 and sex = F").rows) == 0

    def test_samples_that_meet_conditions(self, table: Table, refusal):
        drawn = table.sample(2_000, 'sex = "F" and age >= 60 and children in (0, 2) and income > 0', seed=1)
        found = table.decode(drawn.rows).to_pydict()
        assert set(found["sex"]) == {"F"}
        assert min(found["age"]) >= 60
        assert set(found["children"]) == {0, 2}
        assert min(found["income"]) > 0
        # the same by drawing without conditions
        torch.manual_seed(0)
        women = torch.tensor([[0.0, *[math.nan] * 4]]).repeat(40_000, 1)
        free = table.decode(table.model.complete(women, [1, 3, 2, 4]).numpy()).to_pydict()
        met = (np.array(free["age"]) >= 60) & np.isin(free["children"], (0, 2)) & (np.array(free["income"]) > 0)
        assert drawn.probability == pytest.approx(met.mean(), rel=0.1)
        assert 200 < drawn.effective_size <= 2_000
        for name in ("age", "height"):
            one, other = np.array(found[name]), np.array(free[name])[met]
            assert one.mean() == pytest.approx(other.mean(), abs=6 * one.std() * math.sqrt(1 / 200 + 1 / met.sum()))
        assert "holds no '7'" in refusal(table.sample, 3, "children = 7")
        assert "no column" in refusal(table.sample, 3, "size > 7")

    def test_calibration_of_rows_of_the_model(self, table: Table):
        """Rows drawn from the model have uniform probability integral transforms, whatever the model."""
        found = table.calibration(table.sample(600, seed=5).rows, hidden=0.03, seed=1)
        assert stats.kstest(found["pit"], "uniform").pvalue > 1e-3
        assert found["coverage"][0.8] == pytest.approx(0.8, abs=0.15)
        assert 0 <= found["gap"] < 0.2
        schema = table.schema[3:4]  # of few values: its transforms are made continuous
        one = Table(type(table.schema)(schema), small_model([each.head() for each in schema]).float())
        pit = one.calibration(one.sample(2_000, seed=5).rows, hidden=0.5)["pit"]
        assert stats.kstest(pit, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("what", ["Gaussian", "mixture"])
class TestKnownTruth:
    """1,000 rows of a known density, and a short fit: nats below the truth on new rows."""

    def rows(self, what: str, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and their log-densities."""
        rng = np.random.default_rng(seed)
        if what == "Gaussian":
            truth = stats.multivariate_normal(np.zeros(3), [[1, 0.8, 0.3], [0.8, 1, -0.1], [0.3, -0.1, 1]])
            x = truth.rvs(n, random_state=rng)
            return x.astype(np.float32), truth.logpdf(x)
        parts = [stats.multivariate_normal(mean, 0.1 * np.eye(2)) for mean in ([-1.0, -1.0], [1.0, 1.0])]
        x = np.where(rng.random((n, 1)) < 0.4, *(part.rvs(n, random_state=rng) for part in parts))
        return x.astype(np.float32), np.log(0.4 * parts[0].pdf(x) + 0.6 * parts[1].pdf(x))

    def fitted(self, rows: np.ndarray) -> TableModel:
        sizes = {"width": 32, "depth": 1, "components": 6, "dropout": 0.1, "members": 1, "orders": 4, "favour": 0.0}
        model = TableModel([nicest.data.columns.Head(knots=(-1.0, 0.0, 1.0))] * rows.shape[1], SimpleNamespace(**sizes))
        settings = TrainSettings(epochs=25, batch=50, lr=5e-3, schedule="cosine", ema=0.98, clip=2.0, evaluate_every=5)
        nicest.fit(model, rows[100:], valid=rows[:100], settings=settings, device="cpu", callbacks=[])
        return model.eval()

    def test_complete_rows(self, what: str):
        model = self.fitted(self.rows(what, 1_000, 0)[0])
        x, truth = self.rows(what, 2_000, 1)
        gap = truth.mean() - model.log_prob(torch.from_numpy(x)).mean().item()
        assert -0.02 < gap < 0.06

    def test_half_of_the_cells_missing(self, what: str):
        rows = self.rows(what, 1_000, 0)[0]
        rows[np.random.default_rng(2).random(rows.shape) < 0.5] = np.nan
        model = self.fitted(rows)
        x, truth = self.rows(what, 2_000, 1)
        gap = truth.mean() - model.log_prob(torch.from_numpy(x)).mean().item()
        assert -0.02 < gap < 0.2
