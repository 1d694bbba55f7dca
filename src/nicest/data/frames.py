"""Data frames of pandas, polars and Arrow, and numpy arrays: as tables, and results back as what they came as."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from nicest.data.cells import has_pyarrow
from nicest.errors import NicestError
from nicest.messages import brief, listed

Back = Callable[[Any], Any]


def is_frame(X: Any) -> bool:
    """Return whether X is a data frame, of any library, and not an array."""
    return any(hasattr(X, each) for each in ("columns", "to_arrow", "__arrow_c_stream__"))


def as_table(X: Any) -> tuple[list[str], Any, Back]:
    """Convert a data frame or an array to what a `Schema` encodes.

    Parameters
    ----------
    X : array-like or data frame
        Anything of two dimensions that numpy reads as numbers; a frame of pandas or polars; or an object with
        `__arrow_c_stream__` or `to_arrow`.

    Returns
    -------
    names : list of str
        Column names; those of an array are x0, x1, ...
    table : pyarrow.Table or numpy.ndarray
        An array for arrays of numbers, and for frames where pyarrow is absent.
    back : callable
        Converts a table like this one, such as decoded rows, to the library of X.
    """
    library = type(X).__module__.partition(".")[0]
    if not is_frame(X):
        return _of_array(X)
    if not has_pyarrow():
        if library != "pandas":
            raise NicestError(f"tables of {library} need pyarrow, which is not installed: pip install 'nicest[tables]'")
        names, table, _ = _of_array(X.to_numpy())
        return _distinct([str(name) for name in X.columns]), table, lambda found: type(X)(found, columns=X.columns)
    import pyarrow as pa

    try:
        if library == "pandas":
            _distinct([str(name) for name in X.columns])
            table = pa.Table.from_pandas(X, preserve_index=False)
        elif isinstance(X, pa.Table | pa.RecordBatch):
            table = pa.table(X) if isinstance(X, pa.Table) else pa.Table.from_batches([X])
        else:
            table = pa.table(X) if hasattr(X, "__arrow_c_stream__") else X.to_arrow()
        names = _distinct(table.schema.names)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise NicestError(f"expected a table with columns of one type each ({brief(error)})") from error
    return names, table, {"pandas": lambda found: _to_pandas(found, X), "polars": _to_polars}.get(library, lambda t: t)


def _of_array(X: Any) -> tuple[list[str], np.ndarray, Back]:
    array = np.asarray(X)
    if array.ndim != 2:
        raise NicestError(
            f"expected a table or an array (rows, columns), got {brief(type(X).__name__)} of shape {array.shape}"
        )
    if array.dtype.kind not in "biuf":
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise NicestError(f"expected an array of numbers, or a data frame ({brief(error)})") from error
    return [f"x{i}" for i in range(array.shape[1])], array, _to_array


def _distinct(names: list[str]) -> list[str]:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise NicestError(f"expected columns of different names, got {listed(twice)} twice; rename one")
    return names


def _to_array(table: Any) -> np.ndarray:
    if isinstance(table, np.ndarray):
        return table
    return np.column_stack([each.cast("float64", safe=False).to_numpy() for each in table.columns])


def _to_pandas(table: Any, like: Any) -> Any:
    """Return a pandas frame with the dtypes of another one, and its index if it has as many rows."""
    frame = table.to_pandas()
    for given, name in zip(like.columns, map(str, like.columns), strict=True):
        if name in frame.columns and frame[name].dtype != like[given].dtype:
            try:
                frame[name] = frame[name].astype(like[given].dtype)
            except (TypeError, ValueError):  # such as integers, where the result has missing cells
                continue
    if len(frame) == len(like):
        frame.index = like.index
    names = {str(name): name for name in like.columns}
    return frame.rename(columns=names)


def _to_polars(table: Any) -> Any:
    return import_module("polars").from_arrow(table)
