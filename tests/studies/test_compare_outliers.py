"""The comparison of outlier scores."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from nicest import NICE
from nicest.cli import app
from nicest.studies import compare_outliers as module
from nicest.studies.compare_outliers import (
    DENSITY,
    DETECTORS,
    SETS,
    TYPICALITY,
    area,
    by_table,
    compare_outliers,
    markdown,
    standardised_sides,
    typicality,
    verdict,
)

ROOT = Path(__file__).parents[2]
METHODS = [DENSITY, TYPICALITY, "IsolationForest", "LocalOutlierFactor", "OneClassSVM", "GaussianMixture"]


@pytest.mark.parametrize("name", SETS)
def test_training_rows_are_inliers_and_come_from_their_seed(name: str):
    train, test, is_inlier = standardised_sides(name, 1)
    again = standardised_sides(name, 1)
    assert np.array_equal(train, again[0])
    assert np.array_equal(test, again[1])
    assert is_inlier.sum() == (len(train) + is_inlier.sum()) // 3
    assert np.allclose(train.mean(0), 0, atol=1e-9)
    assert not {row.tobytes() for row in train} & {row.tobytes() for row in test}


def test_shuffled_columns_keep_their_values():
    inliers, outliers = SETS["copula"](np.random.default_rng(0))
    whole = module.TABLES["copula"](np.random.default_rng(0))
    assert np.array_equal(np.sort(outliers, 0), np.sort(whole[len(inliers) :], 0))
    assert not np.array_equal(outliers, whole[len(inliers) :])


def test_the_area_counts_ties_half_and_takes_minus_infinity():
    is_inlier = np.array([True, True, False, False])
    assert area(is_inlier, np.array([2.0, 1.0, 1.0, -np.inf])) == pytest.approx(3.5 / 4)
    with pytest.raises(ValueError, match="NaN"):
        area(is_inlier, np.array([2.0, 1.0, np.nan, 0.0]))


def test_typicality_is_that_of_the_estimator():
    x = np.random.default_rng(0).normal(size=(40, 3))
    model = NICE(random_state=0).fit(x)
    np.testing.assert_allclose(typicality(model.score_samples(x), model.score_samples(x)), model.typicality(x))


def test_one_command(tmp_path: Path):
    result = compare_outliers(tables=("iris",), seeds=1, out=tmp_path / "outliers.json")
    assert json.loads((tmp_path / "outliers.json").read_text()) == result
    assert [row["method"] for row in result["rows"]] == METHODS
    assert all(row["mean_auc"] > 0.7 for row in result["rows"])
    assert "not typicality" in result["caveat"]


def test_density_fails_inside_and_typicality_does_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "DETECTORS", DETECTORS[:1])
    found = by_table(compare_outliers(tables=("inside",), seeds=1))["inside"]
    assert found[DENSITY]["mean_auc"] < 0.1
    assert found[TYPICALITY]["mean_auc"] > 0.9


def test_the_best_is_bold_and_so_are_its_equals():
    about = {"table": "a", "train": 6, "inliers": 3, "outliers": 2, "dim": 4, "sd_auc": 0.01}
    areas = {DENSITY: 0.9, TYPICALITY: 0.95, "other": 0.9502}
    result = {"rows": [about | {"method": name, "mean_auc": each} for name, each in areas.items()]}
    line = "| a | 9 + 2, 4 | 0.900 ± 0.010 | **0.950** ± 0.010 | **0.950** ± 0.010 |"
    assert markdown(result).splitlines()[-1] == line
    assert verdict(result).splitlines() == [
        "NICE, density: the best on 0 of 1 tables; not on a.",
        "NICE, typicality: the best on 1 of 1 tables.",
    ]


def test_the_command_prints_table_verdict_and_caveat(monkeypatch: pytest.MonkeyPatch):
    result = json.loads((ROOT / "results" / "tables-outliers.json").read_text())
    monkeypatch.setattr(module, "compare_outliers", lambda **_: result)
    end = CliRunner().invoke(app, ["compare", "outliers", "iris"])
    assert all(part in end.output for part in (markdown(result), verdict(result), result["caveat"]))


def test_an_unknown_table(refusal: Callable[..., str]):
    assert "no table 'irises'; there are iris, wine" in refusal(compare_outliers, tables=("irises",))


def test_the_page_shows_what_was_measured():
    result = json.loads((ROOT / "results" / "tables-outliers.json").read_text())
    page = (ROOT / "docs" / "tables.md").read_text()
    assert markdown(result) in page
    assert all(line in page for line in verdict(result).splitlines())
    assert "Nalisnick" in page
