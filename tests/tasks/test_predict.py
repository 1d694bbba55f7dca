"""predict: any column from the others, with metrics that others compute from the file too."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn import metrics

from nicest import Run
from nicest.tasks.predict import predict


@pytest.fixture(scope="session")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """New rows of the law of the table, some with missing cells."""
    rng, path = np.random.default_rng(7), tmp_path_factory.mktemp("new") / "new.csv"
    count = rng.integers(0, 12, 300)
    rows = pd.DataFrame({"x": count + rng.normal(size=300), "count": count})
    rows["half"], rows["third"] = np.where(count < 6, "low", "high"), np.array(list("abc"))[count // 4]
    rows.loc[:20, "half"] = None
    rows.to_csv(path, index=False)
    return path


def test_a_number_has_its_mean_median_and_interval(table_run: Run, people: Path, tmp_path: Path):
    result = predict(table_run, people, target=["x"], out=tmp_path / "p.csv", picture=tmp_path / "p.png")
    truth, found = pd.read_csv(people)["x"], pd.read_csv(tmp_path / "p.csv")
    assert list(found) == ["row", "x_mean", "x_median", "x_low", "x_high", "log_density"]
    assert list(found["row"]) == list(range(300))
    told = result.targets["x"]
    assert told["rmse"] == pytest.approx(metrics.root_mean_squared_error(truth, found["x_mean"]), rel=1e-3)
    assert told["mae"] == pytest.approx(metrics.mean_absolute_error(truth, found["x_median"]), rel=1e-3)
    inside = (truth >= found["x_low"]) & (truth <= found["x_high"])
    assert told["coverage"] == pytest.approx(inside.mean(), abs=0.005)
    assert result.mean_nats == pytest.approx(found["log_density"].mean(), rel=1e-6)
    # x given the count is normal around it, with standard deviation 1, CRPS 0.56 and entropy 1.42
    assert 0.9 < told["rmse"] < 1.3
    assert 0.5 < told["crps"] < 0.75
    assert 0.8 < told["coverage"] < 1
    assert -1.9 < result.mean_nats < -1.3
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_a_category_has_the_probability_of_each_value(table_run: Run, people: Path, tmp_path: Path):
    result = predict(table_run, people, target=["half"], out=tmp_path / "p.csv")
    truth, found = pd.read_csv(people)["half"], pd.read_csv(tmp_path / "p.csv")
    p = found[["half=high", "half=low"]].to_numpy()
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-5)
    assert list(found["half"]) == list(np.array(["high", "low"])[p.argmax(1)])
    known = truth.notna()
    told = result.targets["half"]
    assert told["accuracy"] == pytest.approx((found["half"] == truth)[known].mean())
    assert told["log_loss"] == pytest.approx(metrics.log_loss(truth[known], p[known]), rel=1e-3)
    assert told["accuracy"] > 0.97
    assert found["log_density"].isna().sum() == 21


def test_numbers_with_few_values_have_both(table_run: Run, people: Path, tmp_path: Path):
    result = predict(table_run, people, target=["count"], out=tmp_path / "p.parquet")
    found = pd.read_parquet(tmp_path / "p.parquet")
    values = sorted(float(name.split("=")[1]) for name in found if "=" in name)
    assert values == list(range(12))
    p = found[[f"count={value}" for value in values]].to_numpy()
    np.testing.assert_allclose(found["count_mean"], p @ values, rtol=1e-4)
    assert set(found["count_median"]) <= set(values)
    truth = pd.read_csv(people)["count"].to_numpy()
    # E|X - y| - E|X - X'| / 2
    gaps = np.abs(np.subtract.outer(np.array(values), np.array(values)))
    crps = (p * np.abs(np.array(values) - truth[:, None])).sum(1) - (p @ gaps * p).sum(1) / 2
    assert result.targets["count"]["crps"] == pytest.approx(crps.mean(), rel=1e-3)
    assert {"rmse", "mae", "crps", "coverage", "accuracy", "log_loss"} == result.targets["count"].keys()


def test_several_targets_are_hidden_together_and_judged_by_the_chain_rule(table_run: Run, people: Path, tmp_path: Path):
    predict(table_run, people, target=["third"], out=tmp_path / "one.csv")
    result = predict(table_run, people, target=["third", "count"], out=tmp_path / "two.csv")
    one, two = (pd.read_csv(tmp_path / name) for name in ("one.csv", "two.csv"))
    assert one["third=a"].std() > two["third=a"].std()  # the count, which decides it, is hidden, too
    # once the count is known, the third adds nothing: log p(third, count) is log p(count)
    predict(table_run, people, target=["count"], out=tmp_path / "count.csv")
    assert result.mean_nats < 0
    assert len(two) == 300


def test_the_table_may_lack_the_target_and_have_other_columns(table_run: Run, people: Path, tmp_path: Path):
    table = pd.read_csv(people)
    table.drop(columns="x").assign(key=1).to_csv(tmp_path / "new.csv", index=False)
    result = predict(table_run, tmp_path / "new.csv", target=["x"], out=tmp_path / "p.csv")
    predict(table_run, people, target=["x"], out=tmp_path / "with.csv")
    found, other = pd.read_csv(tmp_path / "p.csv"), pd.read_csv(tmp_path / "with.csv")
    assert (result.targets, result.mean_nats) == ({"x": {}}, None)
    np.testing.assert_allclose(found["x_mean"], other["x_mean"], rtol=1e-5)


def test_values_that_training_never_saw(table_run: Run, tmp_path: Path):
    (tmp_path / "new.csv").write_text("x,count,half,third\n1,1,odd,a\n1,1,low,z\n1,1,low,a\n")
    result = predict(table_run, tmp_path / "new.csv", target=["third"], out=tmp_path / "p.csv")
    assert (result.unseen, result.unknown) == (1, 1)
    assert list(pd.read_csv(tmp_path / "p.csv")["log_density"] == -np.inf) == [False, True, False]
    assert result.targets["third"]["accuracy"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"target": ["y"]}, "found no column 'y'"),
        ({}, "name a target"),
        ({"target": ["x", "x"]}, "every target once"),
        ({"target": ["x"], "interval": 0.0}, "between 0 and 1"),
        ({"target": ["x"], "out": "p.txt"}, "expected a table"),
        ({"target": ["half"], "picture": "p.png"}, "one target that is a number"),
    ],
)
def test_refusals_leave_nothing_behind(
    table_run: Run, people: Path, tmp_path: Path, refusal: Callable[..., str], options: dict, says: str
):
    named = {key: tmp_path / value if key in ("out", "picture") else value for key, value in options.items()}
    assert says in refusal(predict, table_run, people, **({"out": tmp_path / "p.csv"} | named))
    assert list(tmp_path.iterdir()) == []
