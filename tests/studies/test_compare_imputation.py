"""The comparison of imputations: the same hidden cells for every method, and figures that mean what they say."""

from functools import partial

import numpy as np
import pytest
from typer.testing import CliRunner

from nicest.cli import app
from nicest.data.columns import Column
from nicest.estimator import NICE
from nicest.inference import impute
from nicest.studies import compare_imputation as module
from nicest.studies.compare_imputation import METHODS, Guess, encoded_cells, ends, imputation, measures, trial
from nicest.studies.datasets import AS_STORED, Table

SHORT = {"draws": 16, "steps": 20, "warmup": 20}


@pytest.fixture(autouse=True)
def _low_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NICE", partial(NICE, law="additive", effort="low"))


@pytest.fixture(scope="module")
def line() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows along a line, some of them with missing cells, and what these were."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, 1)) @ np.ones((1, 4)) + 0.1 * rng.normal(size=(300, 4))
    return rows[60:], np.where(rng.random((60, 4)) < 0.4, np.nan, rows[:60]), rows[:60]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_but_the_mean_finds_cells_on_a_line(method: str, line, monkeypatch: pytest.MonkeyPatch):
    if method == "miceforest":
        pytest.importorskip("miceforest")
    monkeypatch.setattr(impute.impute_rows, "__kwdefaults__", impute.impute_rows.__kwdefaults__ | SHORT)
    train_rows, rows, truth = line
    found = METHODS[method](train_rows, rows, 0)
    assert list(found) == (["", "mode"] if method == "NICE" else [""])
    for guess in found.values():
        np.testing.assert_allclose(guess.values[~np.isnan(rows)], rows[~np.isnan(rows)])
        some = np.isnan(rows) & (np.isnan(rows).sum(1) < 4)[:, None]
        error = np.sqrt(np.mean((guess.values - truth)[some] ** 2))
        assert error > 0.8 if method == "column mean" else error < 0.25
    assert (found[""].low is not None) == (method in ("iterative, draws", "NICE"))


@pytest.mark.parametrize("holes", [False, True])
def test_a_fifth_of_the_cells_of_a_fifth_of_the_rows_is_hidden(holes: bool):
    table, seen = AS_STORED["wine"](np.random.default_rng(0)), []

    def method(train_rows: np.ndarray, rows: np.ndarray, seed: int) -> dict[str, Guess]:
        seen.append((train_rows, rows))
        return {"": Guess(np.zeros_like(rows), about={"chains": 3.0})}

    found = trial(method, table, 3, holes=holes)
    train_rows, rows = seen[0]
    assert (len(train_rows), len(rows)) == (142, 36)
    assert np.isnan(rows).mean() == pytest.approx(0.2, abs=0.04)
    assert np.isnan(train_rows).mean() == pytest.approx(0.2 if holes else 0, abs=0.03)
    assert found[""].keys() == {"rmse", "chains"}


def test_errors_of_pixels_are_in_one_unit_and_a_constant_column_keeps_its_own():
    rows = np.stack([np.zeros(50), np.arange(50.0)], 1)

    def off_by_one(train_rows: np.ndarray, rows: np.ndarray, seed: int) -> dict[str, Guess]:
        return {"": Guess(truth[1] + 1)}

    order = np.random.default_rng(0).permutation(50)
    truth = rows[order[10:]], rows[order[:10]]
    one = trial(off_by_one, Table(rows, one_unit=True), 0, holes=False)[""]["rmse"]
    assert one == pytest.approx(1 / truth[0].std())
    each = trial(off_by_one, Table(rows), 0, holes=False)[""]["rmse"]
    assert 1 / truth[0].std(0)[1] < each < 1


def test_measures_are_of_the_hidden_cells_in_units_of_the_scale():
    truth, missing = np.array([[1.0, 10], [2, 20]]), np.array([[True, False], [False, True]])
    guess = Guess(truth + np.array([[1, 99], [99, 10]]), truth - 1, truth + np.array([[1, 1], [1, -0.5]]))
    found = measures(guess, truth, missing, np.array([1.0, 10]))
    assert found == pytest.approx({"rmse": 1.0, "coverage": 0.5, "width": (2 + 0.05) / 2})


def test_intervals_of_few_draws_hold_a_further_draw():
    draws = np.random.default_rng(0).normal(size=(20, 20_000))
    low, high = ends(draws[:19])
    assert ((low <= draws[19]) & (draws[19] <= high)).mean() == pytest.approx(0.9, abs=0.01)


def test_nice_finds_levels_where_columns_hold_few_integers(monkeypatch: pytest.MonkeyPatch):
    """As `NICE(discrete="values")` does: it trains with new noise in every step, and its columns have bounds."""
    monkeypatch.setattr(impute.impute_rows, "__kwdefaults__", impute.impute_rows.__kwdefaults__ | SHORT)
    fitted: list[NICE] = []
    fit = NICE.fit
    monkeypatch.setattr(NICE, "fit", lambda model, X: (fitted.append(model), fit(model, X))[1])
    rng = np.random.default_rng(0)
    rows = np.stack([rng.integers(0, 4, 120), rng.normal(size=120)], 1).astype(float)
    holes = np.where(rng.random((20, 2)) < 0.5, np.nan, rows[:20])
    found = METHODS["NICE"](rows[20:], holes, 0)
    assert fitted[0].flow_.units.discrete
    assert set(found["mode"].values[:, 0]) <= {0.0, 1.0, 2.0, 3.0}
    assert ((found[""].values[:, 0] >= 0) & (found[""].values[:, 0] <= 3)).all()


def test_a_value_that_training_never_saw_counts_as_missing():
    columns = (Column("a", "double", "values", values=(1.0, 5.0)), Column("b", "double", "real"))
    found = encoded_cells(np.array([[5.0, 2], [7, 3], [np.nan, 4]]), columns)
    np.testing.assert_array_equal(found, [[1, 2], [np.nan, 3], [np.nan, 4]])


def test_what_is_not_installed_is_said():
    assert ("miceforest" in imputation().methods) != ("miceforest" in module.ABSENT)


def test_the_command_asks_for_what_it_was_told(monkeypatch: pytest.MonkeyPatch):
    asked: list = []
    monkeypatch.setattr("nicest.studies.compare.compare", lambda *a, **k: asked.append((*a, k)) or {})
    words = ["wine", "--seeds", "2", "--holes", "--jobs", "3", "--method", "KNN", "--json"]
    CliRunner().invoke(app, ["compare", "imputation", *words])
    (comparison, rest) = asked[0]
    assert comparison.about["holes_in_training"] is True
    expected = {"tables": ["wine"], "data": None, "methods": ["KNN"], "seeds": 2, "jobs": 3, "out": None}
    assert rest == expected
