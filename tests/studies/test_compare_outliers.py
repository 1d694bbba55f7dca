"""The comparison of outlier scores."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from nicest import NICE, NICEDetector
from nicest.studies import compare_density, compare_outliers
from nicest.studies.compare_outliers import METHODS, OUTLIERS, SETS, area, labelled, trial
from nicest.studies.datasets import TABLES, Table, read_file

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _low_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (compare_density, compare_outliers):
        monkeypatch.setattr(each, "NICE", partial(NICE, effort="low", law="additive"))


def sides(name: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rows, is_outlier = labelled(SETS[name](np.random.default_rng(seed)))
    return rows[~is_outlier], rows[is_outlier]


@pytest.mark.parametrize("name", SETS)
def test_sets_have_both_kinds_and_come_from_their_seed(name: str):
    (inliers, outliers), again = sides(name), sides(name)
    assert np.array_equal(np.concatenate([inliers, outliers]), np.concatenate(again))
    assert len(inliers) > len(outliers) > 0


def test_half_of_the_inliers_train_and_all_else_is_tested():
    rows = np.random.default_rng(0).normal(size=(50, 2))
    labels = np.arange(50) % 5 == 0
    rows[labels] += 100
    seen = []

    def method(train: np.ndarray, test: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        seen.append((train, test))
        return {"": -np.abs(test).sum(1)}

    assert trial(method, Table(rows, labels=labels.astype(int)), 0) == {"": {"auc": 1.0}}
    train, test = seen[0]
    assert (len(train), len(test)) == (20, 30)
    np.testing.assert_allclose([train.mean(0), train.std(0)], [[0, 0], [1, 1]], atol=1e-12)
    assert not {row.tobytes() for row in train} & {row.tobytes() for row in test}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_finds_far_rows(method: str):
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(size=(120, 3)), rng.normal([6, -6, 6], size=(20, 3))])
    table = Table(rows, labels=np.repeat([0, 1], [120, 20]))
    assert trial(METHODS[method], table, 0)[""]["auc"] > 0.99


def test_neighbours_score_by_the_distance_to_the_fifth():
    train, test = np.random.default_rng(0).normal(size=(40, 3)), np.random.default_rng(1).normal(size=(7, 3))
    distances = np.sort(np.linalg.norm(test[:, None] - train, axis=2), axis=1)
    np.testing.assert_allclose(METHODS["KNN"](train, test, 0)[""], -distances[:, 4])


def test_labels_come_from_the_archive_or_a_column(tmp_path: Path, refusal: Callable[..., str]):
    rows, labels = np.random.default_rng(0).normal(size=(30, 2)), np.arange(30) % 3 == 0
    np.savez(tmp_path / "t.npz", X=rows, y=labels.astype(np.int32))
    lines = [f"{a!r},{int(label)},{b!r}" for (a, b), label in zip(rows.tolist(), labels, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(["a,outlier,b", *lines]))
    for name in ("t.npz", "t.csv"):
        found, is_outlier = labelled(read_file(tmp_path / name))
        assert np.array_equal(found, rows)
        assert np.array_equal(is_outlier, labels)
    assert "expected labels y in a .npz file, or a column outlier or y" in refusal(labelled, Table(rows, ("a", "b")))
    assert "got [0, 1, 2]" in refusal(labelled, Table(rows, labels=np.arange(30) % 3))


def test_shuffled_columns_keep_their_values():
    inliers, outliers = sides("copula")
    whole = TABLES["copula"](np.random.default_rng(0)).rows
    assert np.array_equal(np.sort(outliers, 0), np.sort(whole[len(inliers) :], 0))
    assert not np.array_equal(outliers, whole[len(inliers) :])


def test_the_area_counts_ties_half_and_takes_minus_infinity():
    is_inlier = np.array([True, True, False, False])
    assert area(is_inlier, np.array([2.0, 1.0, 1.0, -np.inf])) == pytest.approx(3.5 / 4)
    with pytest.raises(ValueError, match="NaN"):
        area(is_inlier, np.array([2.0, 1.0, np.nan, 0.0]))


def test_scores_are_those_of_the_estimator_and_of_the_detector():
    x = np.random.default_rng(0).normal(size=(40, 3))
    scores, model = METHODS["NICE"](x, x, 0), NICE(random_state=0)
    np.testing.assert_allclose(scores["typicality"], model.fit(x).typicality(x))
    np.testing.assert_allclose(scores["density"], model.score_samples(x))
    np.testing.assert_allclose(scores[""], -NICEDetector(model).fit(x).decision_function(x))


def test_density_fails_inside_and_typicality_does_not():
    found = trial(METHODS["NICE"], SETS["inside"](np.random.default_rng(0)), 0)
    assert found["density"]["auc"] < 0.1
    assert found["typicality"]["auc"] > 0.9
    assert "does not mean typical" in OUTLIERS.about["caveat"]
    assert "Nalisnick" in (ROOT / "docs" / "tables.md").read_text()
