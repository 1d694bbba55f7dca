"""Data frames of several libraries, and arrays, as tables and back."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from nicest.data.frames import as_table
from nicest.data.infer import infer

N = 60


def frame() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "int": pd.array([1, 2, None] * 20, dtype="Int64"),
            "text": ["x", "y", None] * 20,
            "kind": pd.Categorical(["u", "v", "w"] * 20),
            "day": pd.date_range("2026-01-01", periods=N),
            "small": np.round(np.random.default_rng(0).random(N), 2).astype("float32"),
            "whole": np.arange(N) % 7,
            7: [True, False] * 30,
        },
        index=range(100, 100 + N),
    )


def through(X: Any) -> Any:
    """Encode a table, decode it, and give it back to its library."""
    names, table, back = as_table(X)
    schema = infer(table)[0]
    assert schema.names == names
    return back(schema.decode(schema.encode(table)))


def test_pandas_keeps_types_index_and_names() -> None:
    pd.testing.assert_frame_equal(through(frame()), frame())


def test_arrow_and_other_libraries() -> None:
    table = pa.Table.from_pandas(frame(), preserve_index=False)
    assert through(table).equals(table)
    assert through(table.combine_chunks().to_batches()[0]).equals(table)

    class Stream:
        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            return table.__arrow_c_stream__(requested_schema)

    class Converts:
        def to_arrow(self) -> pa.Table:
            return table

    assert through(Stream()).equals(table)
    assert through(Converts()).equals(table)


def test_polars() -> None:
    polars = pytest.importorskip("polars")
    given = polars.DataFrame({"a": [1, 2, 3] * 20, "b": ["x", None, "z"] * 20, "c": [0.5, 1.25, None] * 20})
    assert through(given).equals(given)


@pytest.mark.parametrize("dtype", [float, np.float32, int, bool])
def test_arrays(dtype: type) -> None:
    array = (np.random.default_rng(0).integers(0, 2, (N, 3)) * (N - np.arange(3))).astype(dtype)
    assert as_table(array)[0] == ["x0", "x1", "x2"]
    np.testing.assert_array_equal(through(array), array)
    assert through(array.tolist()).shape == (N, 3)


@pytest.mark.parametrize(
    ("X", "said"),
    [
        (pd.DataFrame({"a": [1, "x", 2.5]}), "expected a table with columns of one type each"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "expected columns of different names, got 'a' twice"),
        (pd.DataFrame([[1, 2]], columns=[1, "1"]), "got '1' twice"),
        (pa.table([[1], [2]], names=["a", "a"]), "got 'a' twice"),
        (np.zeros(3), "got ndarray of shape (3,)"),
        ([["a", "b"]], "expected an array of numbers, or a data frame"),
        ("abc", "got str of shape ()"),
        (None, "got NoneType of shape ()"),
    ],
)
def test_what_is_no_table(X: Any, said: str, refusal: Callable[..., str]) -> None:
    assert said in refusal(as_table, X)


def test_without_pyarrow(monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]) -> None:
    numbers = pd.DataFrame({"a": np.arange(N) % 3, "b": np.arange(N) / 8})
    table = pa.table({"a": [1]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    names, array, back = as_table(numbers)
    assert (names, array.shape, list(back(array).columns)) == (["a", "b"], (N, 2), ["a", "b"])
    np.testing.assert_array_equal(through(numbers.to_numpy()), numbers)
    assert "pip install 'nicest[tables]'" in refusal(as_table, table)
