"""calibrate: coverage and PITs of cells, against a model that is right, and ones that are not."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import nicest
from nicest import Run
from nicest.tasks.calibrate import calibrate, ks_distance, summary
from nicest.tasks.sample import sample


def test_a_model_is_calibrated_on_its_own_samples(table_run: Run, tmp_path: Path):
    sample(table_run, 1500, out=tmp_path / "own.csv")
    result = calibrate(table_run, tmp_path / "own.csv", out=tmp_path / "c")
    assert [row["level"] for row in result.coverage] == [0.5, 0.8, 0.9, 0.95]
    assert all(abs(row["share"] - row["level"]) < 0.06 for row in result.coverage)
    assert result.ks < 0.06
    assert set(result.columns) == {"x", "count"}
    assert 0 <= result.gap < 0.15
    assert (result.rows, result.cells) == (1500, 3000)
    kept = json.loads((tmp_path / "c" / "calibration.json").read_text())
    assert kept == {key: value for key, value in result.to_dict().items() if key != "out"}
    assert (tmp_path / "c" / "calibration.png").stat().st_size > 10_000


def test_rows_of_another_law_are_noticed(table_run: Run, tmp_path: Path):
    rng = np.random.default_rng(0)
    count = rng.integers(0, 12, 400)
    rows = pd.DataFrame({"x": count + 4 * rng.normal(size=400), "count": count})
    rows["half"], rows["third"] = np.where(count < 6, "low", "high"), np.array(list("abc"))[count // 4]
    rows.to_csv(tmp_path / "wide.csv", index=False)
    assert calibrate(table_run, tmp_path / "wide.csv", out=tmp_path / "c").verdict.startswith("overconfident")


def test_the_test_split_is_taken_by_default(table_run: Run, tmp_path: Path):
    result = calibrate(table_run, out=tmp_path / "c")
    assert result.rows == len(table_run.splits.test)


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "calibrated"), (1.9, "overconfident"), (0.5, "underconfident")])
def test_the_verdict(scale: float, verdict: str):
    """Truths that are normal, of this standard deviation, against a standard normal."""
    from scipy.stats import norm

    pit = norm.cdf(scale * np.random.default_rng(0).normal(size=2000))
    found = summary({"x": pit}, 2000)
    assert found["verdict"].startswith(verdict)
    inside = norm.cdf(norm.ppf(0.95) / scale) - norm.cdf(-norm.ppf(0.95) / scale)
    assert found["coverage"][2]["share"] == pytest.approx(inside, abs=0.03)


def test_ks_distance_is_scipys():
    from scipy.stats import kstest

    pit = np.random.default_rng(0).random(300) ** 1.3
    assert ks_distance(pit) == pytest.approx(kstest(pit, "uniform").statistic)


def test_the_data_may_be_gone(table_run: Run, tmp_path: Path, refusal):
    run = nicest.open(table_run.path, data=str(tmp_path / "gone.csv"))
    assert "name a table as data" in refusal(calibrate, run, out=tmp_path / "c")
    assert list(tmp_path.iterdir()) == []
