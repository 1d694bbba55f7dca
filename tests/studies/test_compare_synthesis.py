"""The comparison of synthetic rows with real ones."""

import gzip
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from nicest.data.columns import Column
from nicest.studies import compare_synthesis
from nicest.studies.compare_synthesis import METHODS, SYNTHESIS, numbers, snapped, told_apart, trial
from nicest.studies.datasets import Table, read_mixed
from nicest.train.fit_table import fit_table

MIXED = ["NICE", "mixture", "copula", "training rows"]


def text(n: int) -> str:
    """A real column, an integer one that follows it, and strings that say its sign."""
    x = np.random.default_rng(0).normal(size=n)
    lines = [f"{each:.4f},{int(np.floor(3 * each))},{'plus' if each > 0 else 'minus'}" for each in x]
    return "\n".join(["x,count,sign", *lines, ",1,plus", ""])


@pytest.fixture
def table(tmp_path: Path) -> Table:
    (tmp_path / "t.csv").write_text(text(400))
    return read_mixed(tmp_path / "t.csv")


def test_files_come_with_their_strings_and_without_incomplete_rows(
    table: Table, tmp_path: Path, refusal: Callable[..., str]
):
    assert table.rows.shape == (400, 3)
    assert [column.kind for column in table.columns] == ["real", "steps", "values"]
    (tmp_path / "g.csv.gz").write_bytes(gzip.compress(text(400).encode()))
    assert np.array_equal(read_mixed(tmp_path / "g.csv.gz").rows, table.rows)
    np.save(tmp_path / "n.npy", table.rows)
    assert [column.kind for column in numbers(read_mixed(tmp_path / "n.npy"))[1]] == ["real", "steps", "steps"]
    (tmp_path / "few.csv.gz").write_bytes(gzip.compress(text(10).encode()))
    assert "few.csv.gz: expected at least 20 complete rows, got 10" in refusal(read_mixed, tmp_path / "few.csv.gz")


def test_the_area_is_that_of_the_best_classifier():
    """Of N(0, 1) and N(1, 1) it is Φ(1/√2) = 0.760, of the same distribution 0.5."""
    rng, columns = np.random.default_rng(0), (Column("x", "double", "real"), Column("y", "double", "real"))
    real, same, moved = rng.normal(size=(3, 3000, 2))
    moved[:, 0] += 1
    assert told_apart(real, moved, columns, 0) == pytest.approx(0.760, abs=0.03)
    assert told_apart(real, same, columns, 0) < 0.53


def test_real_rows_are_those_that_no_method_sees(table: Table):
    seen = []

    def method(train: np.ndarray, columns: Sequence[Column], n: int, seed: int) -> np.ndarray:
        seen.append(train)
        return train[:n] + np.array([100, 0, 0])

    figures = trial(method, table, 0)[""]
    assert figures["auc"] > 0.99
    assert figures["outside"] == 1
    assert len(seen[0]) == 320


@pytest.mark.parametrize("method", MIXED)
def test_every_method_draws_steps_and_categories_of_training(
    method: str, table: Table, monkeypatch: pytest.MonkeyPatch
):
    low = partial(fit_table, given={"train": {"effort": "low", "epochs": 3}})
    monkeypatch.setattr(compare_synthesis, "fit_table", low)
    drawn = METHODS[method](table.rows, table.columns, 50, 1)
    assert drawn.shape == (50, 3)
    assert np.isfinite(drawn).all()
    assert np.isin(drawn[:, 1], np.arange(table.columns[1].most + 1)).all()
    assert set(drawn[:, 2]) == {0, 1}


def test_what_is_snapped_is_whole_and_within():
    columns = (Column("n", "int64", "steps", 5, 8, 1), Column("x", "double", "real"))
    drawn = snapped(np.array([[-2.0, -2.5], [1.4, 9.25], [7.0, 0.0]]), columns)
    assert drawn.tolist() == [[0, -2.5], [1, 9.25], [3, 0]]


def test_what_is_not_installed_is_said():
    assert set(SYNTHESIS.methods) | set(SYNTHESIS.absent) == set(METHODS)
    assert set(SYNTHESIS.absent) <= {"CTGAN", "TVAE"}
