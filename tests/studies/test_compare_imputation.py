"""compare_imputation: every method on the same hidden cells, figures that mean what they say, and the page's table."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from nicest.cli import app
from nicest.inference import impute
from nicest.studies import compare_imputation
from nicest.studies.compare_imputation import Guess, ends, few_levels, imputation, markdown, measures, others, summary

ROOT = Path(__file__).parents[2]
SHORT = {"draws": 16, "steps": 20, "warmup": 20}


@pytest.mark.parametrize("holes", [False, True])
def test_a_small_comparison_has_every_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holes: bool):
    monkeypatch.setattr(compare_imputation, "POSTERIOR_DRAWS", 2)
    monkeypatch.setattr(impute.impute_rows, "__kwdefaults__", impute.impute_rows.__kwdefaults__ | SHORT)
    result = imputation(["wine"], [3], holes=holes, out=tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == result
    rows = {row["method"]: row for row in result["rows"]}
    assert list(rows) == ["column mean", "KNN", "iterative", "iterative, draws", "NICE, mean", "NICE, mode"]
    assert rows["NICE, mean"]["rmse"] < rows["column mean"]["rmse"]
    assert {name for name, row in rows.items() if "coverage" in row} == {"iterative, draws", "NICE, mean"}
    assert rows["NICE, mean"]["rows"] == 36
    assert result["holes_in_training"] == holes
    assert len(markdown(result).splitlines()) == 8


def test_measures_are_of_the_hidden_cells_in_units_of_the_scale():
    truth, missing = np.array([[1.0, 10], [2, 20]]), np.array([[True, False], [False, True]])
    guess = Guess(truth + np.array([[1, 99], [99, 10]]), truth - 1, truth + np.array([[1, 1], [1, -0.5]]))
    found = measures(guess, truth, missing, np.array([1.0, 10]))
    assert found == pytest.approx({"rmse": 1.0, "coverage": 0.5, "width": (2 + 0.05) / 2})


def test_intervals_of_few_draws_hold_a_further_draw():
    draws = np.random.default_rng(0).normal(size=(20, 20_000))
    low, high = ends(draws[:19])
    assert ((low <= draws[19]) & (draws[19] <= high)).mean() == pytest.approx(0.9, abs=0.01)


def test_chained_regressions_make_more_than_one_round():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, 1)) @ np.ones((1, 4)) + 0.1 * rng.normal(size=(300, 4))
    holes = np.where(rng.random((60, 4)) < 0.4, np.nan, rows[:60])
    values = others(rows[60:], holes, 0)["iterative"]().values
    hard = np.isnan(holes).sum(1) == 2
    assert np.abs(values - rows[:60])[hard].max() < 0.6


def test_columns_of_few_whole_numbers_are_levels():
    rows = np.stack([np.arange(40) % 3, np.arange(40), np.arange(40) % 3 + 0.5], 1)
    assert few_levels(rows).tolist() == [True, False, False]


def test_the_summary_is_the_mean_over_seeds():
    records = [{"set": "a", "method": "b", "seed": k, "rmse": float(k), "seconds": 2.0} for k in (1, 3)]
    assert summary(records) == [{"set": "a", "method": "b", "rmse": 2.0, "seconds": 2.0, "rmse_sd": 1.0}]


def test_an_unknown_table_is_refused(refusal: Callable[..., str]):
    assert "got 'iris'" in refusal(imputation, ["iris"])


@pytest.mark.parametrize("name", ["tables-imputation", "tables-imputation-holes"])
def test_the_page_shows_what_was_measured(name: str):
    result = json.loads((ROOT / "results" / f"{name}.json").read_text())
    assert markdown(result) in (ROOT / "docs" / "tables.md").read_text()


def test_the_command_asks_for_what_it_was_told(monkeypatch: pytest.MonkeyPatch):
    asked: list = []
    row = {"set": "wine", "method": "KNN", "rmse": 0.5, "rmse_sd": 0.1, "seconds": 1.0}
    monkeypatch.setattr(compare_imputation, "imputation", lambda *a, **k: asked.append((*a, k)) or {"rows": [row]})
    end = CliRunner().invoke(app, ["compare", "imputation", "wine", "--seeds", "2", "--holes"])
    assert asked == [(["wine"], range(2), {"holes": True, "out": None})]
    assert "| wine | KNN | 0.500 ± 0.100 |" in end.output
