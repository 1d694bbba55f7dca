"""Tables some of whose columns are predicted from the others."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nicest.data import load
from nicest.data.splits import Splits

Refusal = Callable[..., str]
N = 200


def frame(n: int = N) -> pd.DataFrame:
    """Reals, integers, texts and booleans, without missing cells."""
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "x": rng.normal(5, 2, n),
            "count": rng.integers(3, 9, n),
            "kind": rng.choice(["a", "b", "c"], n),
            "member": rng.random(n) < 0.3,
            "gain": np.where(rng.random(n) < 0.5, 0.0, rng.exponential(2, n)),
        }
    )


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Path]:
    """Write a table, whose columns may be replaced."""

    def write(suffix: str = ".parquet", **columns: object) -> Path:
        path, rows = tmp_path / f"table{suffix}", frame().assign(**columns)
        rows.to_csv(path, index=False) if suffix == ".csv" else rows.to_parquet(path)
        return path

    return write


def rows(splits: Splits) -> np.ndarray:
    return np.concatenate([splits.train, splits.valid, splits.test])


class TestColumns:
    def test_what_is_given_is_plain_numbers_or_texts_and_booleans(self, table: Callable[..., Path]):
        splits = load(str(table()), target=["x"])
        assert splits.targets == (0,)
        assert [column.kind for column in splits.columns] == ["real", "real", "values", "values", "real"]
        assert splits.categories == (0, 0, 3, 2, 0)
        assert splits.steps == (0.0, 0.0, 1.0, 1.0, 0.0)
        assert all(not column.spikes and column.floor is None for column in splits.columns[1:])

    def test_what_is_predicted_is_what_it_is_without_targets(self, table: Callable[..., Path]):
        plain = load(str(table()))
        for name in ("count", "kind", "member", "gain"):
            splits = load(str(table()), target=[name])
            (place,) = splits.targets
            assert splits.columns[place] == plain.columns[place]
            assert splits.categories[place] == 0
            assert splits.support is not None
            assert splits.support.bounds[place] == plain.support.bounds[place]
            assert splits.support.atoms[place] == plain.support.atoms[place]
            given = [i for i in range(5) if i != place]
            assert all(splits.support.atoms[i] == () and not splits.support.categories[i] for i in given)
            assert all(splits.support.bounds[i] == (-math.inf, math.inf) for i in given)

    def test_several_targets_are_sorted_by_their_place(self, table: Callable[..., Path]):
        assert load(str(table()), target=["gain", "x", "kind"]).targets == (0, 2, 4)
        assert load(str(table()), target=["gain", "x"], drop=["count"]).targets == (0, 3)

    def test_few_different_numbers_that_are_given_are_numbers(self, table: Callable[..., Path]):
        halves = np.tile([0.5, 1.5, 2.5, 4.0], N // 4)
        splits = load(str(table(count=halves)), target=["x"])
        assert splits.columns[1].kind == "real"
        assert sorted(np.unique(rows(splits)[:, 1] + splits.columns[1].taken_off)) == [0.5, 1.5, 2.5, 4.0]


class TestMissing:
    @pytest.mark.parametrize("suffix", [".csv", ".parquet"])
    def test_rows_without_a_target_are_left_out_and_given_cells_may_be_missing(
        self, table: Callable[..., Path], suffix: str
    ):
        x, kind, count = (frame()[name].astype(object) for name in ("x", "kind", "count"))
        x[:10], kind[5:25], count[20:40] = None, None, None
        splits = load(str(table(suffix, x=x.astype(float), kind=kind, count=count.astype("Int64"))), target=["x"])
        found = rows(splits)
        assert splits.incomplete is None
        assert found.shape == (N - 10, 5)
        assert not np.isnan(found[:, 0]).any()
        assert np.isnan(found).sum(0).tolist() == [0, 20, 15, 0, 0]
        assert len(np.unique(found[np.isnan(found)].view(np.uint32))) == 1  # one NaN, for the digest

    def test_a_given_column_may_be_missing_in_all_rows_that_train(self, table: Callable[..., Path]):
        gain = np.full(N, np.nan)
        gain[:3] = 1.0, 2.0, 3.0
        x = frame()["x"].to_numpy().copy()
        x[:3] = np.nan
        splits = load(str(table(gain=gain, x=x)), target=["x"])
        assert np.isnan(rows(splits)[:, 4]).all()

    def test_more_columns_than_are_filled_in_may_have_missing_cells(self, tmp_path: Path):
        wide = np.random.default_rng(0).normal(size=(30, 220))
        wide[:, 1:][np.random.default_rng(1).random((30, 219)) < 0.1] = np.nan
        pd.DataFrame(wide, columns=[f"c{i}" for i in range(220)]).to_csv(tmp_path / "wide.csv", index=False)
        assert len(rows(load(str(tmp_path / "wide.csv"), target=["c0"]))) == 30


class TestGiven:
    @pytest.mark.parametrize("constant", [1.5, 7, True, "a"])
    def test_columns_may_be_constant(self, table: Callable[..., Path], constant: object):
        splits = load(str(table(count=[constant] * N)), target=["x"])
        assert (rows(splits)[:, 1] == rows(splits)[0, 1]).all()

    def test_columns_may_be_constant_in_the_rows_that_train(self, table: Callable[..., Path]):
        """As a rare 1 among zeros is, where it lies in the test rows."""
        for at in range(0, N, 10):
            splits = load(str(table(count=(np.arange(N) == at).astype(int))), target=["x"])
            assert rows(splits)[:, 1].sum() == 1


class TestDigest:
    def test_sees_missing_targets_and_missing_given_cells(self, table: Callable[..., Path]):
        x = frame()["x"].to_numpy().copy()
        x[3] = np.nan

        def digest(target: str, **columns: object) -> str:
            return load(str(table(**columns)), target=[target]).digest()

        whole, again = digest("x"), digest("x")
        without_row, without_cell = digest("x", x=x), digest("kind", x=x)
        assert whole == again
        assert len({whole, without_row, without_cell}) == 3


class TestRefused:
    @pytest.mark.parametrize(
        ("target", "said"),
        [
            (["price"], "found no column 'price' to predict; it has 'x', 'count', 'kind', 'member', 'gain'"),
            (["x", "x"], "expected every target once, got 'x', 'x'"),
            (["x", "count", "kind", "member", "gain"], "expected a column beside 'x', 'count', 'kind'"),
            ([""], "found no column '' to predict"),
        ],
    )
    def test_targets(self, table: Callable[..., Path], refusal: Refusal, target: list[str], said: str):
        assert said in refusal(load, str(table()), target=target)

    def test_a_target_that_is_dropped(self, table: Callable[..., Path], refusal: Refusal):
        said = refusal(load, str(table()), target=["x"], drop=["x"])
        assert "found no column 'x' to predict; it has 'count'" in said

    @pytest.mark.parametrize("constant", [1.5, 7, True, "a"])
    def test_a_constant_target(self, table: Callable[..., Path], refusal: Refusal, constant: object):
        said = refusal(load, str(table(count=[constant] * N)), target=["count"])
        assert "column 'count' is constant" in said

    def test_a_target_that_is_constant_where_it_is_there(self, table: Callable[..., Path], refusal: Refusal):
        cells = np.where(np.arange(N) < 9, 1.0, np.nan)
        assert "column 'gain' is constant" in refusal(load, str(table(gain=cells)), target=["gain"])

    def test_a_category_in_one_row(self, table: Callable[..., Path]):
        kinds = ["a", "b"] * (N // 2)
        kinds[3:5] = ["z", "y"]
        with pytest.warns(UserWarning, match=r"column 'kind' has one row each with 'y', 'z': too few to learn from"):
            load(str(table(kind=kinds)), target=["kind"])
        load(str(table(kind=kinds)), target=["x"])  # it may be given

    def test_a_target_that_is_missing(self, table: Callable[..., Path], refusal: Refusal):
        said = refusal(load, str(table(gain=[np.nan] * N)), target=["gain"])
        assert "column 'gain' is missing in all rows" in said
        cells = np.where(np.arange(N) < 2, np.arange(N) + 0.5, np.nan)
        assert "expected at least 3 rows" in refusal(load, str(table(gain=cells)), target=["gain"])

    def test_arrays_have_no_columns(self, tmp_path: Path, refusal: Refusal):
        np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(30, 3)))
        assert "a target is a column of a table" in refusal(load, str(tmp_path / "rows.npy"), target=["x"])
