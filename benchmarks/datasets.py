"""Tables for the comparisons: files in a folder, tables of scikit-learn, and draws from formulas."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats
from sklearn import datasets

from nicest.data import tables
from nicest.data.arrays import ARRAY_KEYS, read_members, read_npy
from nicest.data.cells import as_numbers, family
from nicest.data.columns import Column
from nicest.data.scan import read_table
from nicest.errors import NicestError
from nicest.messages import listed

Generator = np.random.Generator
SUFFIXES = (*tables.SUFFIXES, ".csv.gz", ".npy", ".npz")
FEWEST = 20  # complete rows that a table needs


class Table(NamedTuple):
    """Complete rows of numbers (N, D), their column names, and labels if the file has them separately.

    Errors of different columns share a unit if `one_unit` is true, as for pixels. If `columns` is not empty, the rows
    hold the encoded values of those columns.
    """

    rows: np.ndarray
    names: tuple[str, ...] = ()
    labels: np.ndarray | None = None
    left_out: tuple[str, ...] = ()
    one_unit: bool = False
    columns: tuple[Column, ...] = ()


Read = Callable[[Generator], Table]


def tables_in(folder: Path) -> dict[str, Path]:
    """Return the table files of a folder by their stem, or by their full name if two have the same stem."""
    if folder.is_file():
        raise NicestError(f"expected a folder of tables, got the file {folder}: put it into a separate folder")
    if not folder.is_dir():
        raise NicestError(f"expected a folder of tables, found no {folder}; looked from {Path.cwd()}")
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name.lower().endswith(SUFFIXES))
    if not files:
        raise NicestError(f"expected tables ({', '.join(SUFFIXES)}) in {folder}, found none")
    names = [path.name[: -len(max((s for s in SUFFIXES if path.name.lower().endswith(s)), key=len))] for path in files]
    each = zip(names, files, strict=True)
    return {name if names.count(name) == 1 else path.name: path for name, path in each}


def read_file(path: Path) -> Table:
    """Read the numeric columns of a file. Strings, constant columns and incomplete rows are left out.

    A .npz file holds the array X, and optionally labels y.
    """
    if path.suffix.lower() in (".npy", ".npz"):
        parts = {"X": read_npy(path)} if path.suffix.lower() == ".npy" else read_members(path, _keys)
        if parts["X"].ndim != 2 or parts["X"].dtype.kind not in "fiub":
            got = f"shape {parts['X'].shape} of {parts['X'].dtype}"
            raise NicestError(f"{path}: expected an array (rows, columns) of numbers, got {got}")
        columns = {f"x{i + 1}": column for i, column in enumerate(parts["X"].astype(np.float64).T)}
        labels = parts.get("y")
    else:
        with unpacked(path) as file:
            columns, labels = _columns(file), None
    varies = {name: len(np.unique(column[np.isfinite(column)])) > 1 for name, column in columns.items()}
    names = tuple(name for name, is_kept in varies.items() if is_kept)
    if not names:
        raise NicestError(f"{path}: expected columns of numbers that vary, got none among {listed(list(columns))}")
    rows = np.column_stack([columns[name] for name in names])
    whole = np.isfinite(rows).all(1)
    if whole.sum() < FEWEST:
        raise NicestError(f"{path}: expected at least {FEWEST} complete rows of numbers, got {whole.sum()}")
    labels = None if labels is None else np.asarray(labels).ravel()[whole]
    return Table(rows[whole], names, labels, tuple(name for name in columns if name not in names))


def read_mixed(path: Path) -> Table:
    """Read all columns of a file, as `nicest train table` does; incomplete rows are left out."""
    if path.suffix.lower() in (".npy", ".npz"):
        return read_file(path)
    with unpacked(path) as file:
        rows, _, columns = read_table(file)
    if len(rows) < FEWEST:
        raise NicestError(f"{path}: expected at least {FEWEST} complete rows, got {len(rows)}")
    return Table(rows, tuple(column.name for column in columns), columns=columns)


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Yield the file itself, or a temporary copy of the content of a .gz file."""
    if path.suffix.lower() != ".gz":
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / path.stem
        with gzip.open(path) as packed, plain.open("wb") as file:
            shutil.copyfileobj(packed, file)
        try:
            yield plain
        except NicestError as error:
            raise NicestError(str(error).replace(str(plain), str(path))) from error


def _keys(keys: list[str], path: Path) -> dict[str, str]:
    for key in (*ARRAY_KEYS, *(keys if len(keys) == 1 else ())):
        if key in keys:
            return {"X": key} | ({"y": "y"} if "y" in keys else {})
    raise NicestError(f"{path}: expected an array called X, and labels called y if there are any, got {listed(keys)}")


def _columns(path: Path) -> dict[str, np.ndarray]:
    """Read the columns of a table as numbers; columns of strings become NaN."""
    file = tables.TableFile(path)
    parts: dict[str, list[np.ndarray]] = {name: [np.empty(0)] for name in file.names}
    texts = {f.name for f in file.schema if not family(f.type)}
    for batch in file.batches(file.names):
        for name in [name for name in file.names if name not in texts]:
            numbers, words = as_numbers(batch.column(name))
            parts[name].append(numbers)
            if words.any():
                texts.add(name)
    length = max(sum(map(len, each)) for each in parts.values())
    return {name: np.full(length, np.nan) if name in texts else np.concatenate(parts[name]) for name in parts}


def _of_sklearn(
    name: str, rng: Generator, *, step: float | tuple[float, ...] = 0, without: tuple[int, ...] = ()
) -> Table:
    """Load a table of scikit-learn, with its classes as labels.

    Values that were rounded to multiples of `step` get uniform noise: otherwise their density would be infinite.
    """
    found = getattr(datasets, f"load_{name}")(**({"scaled": False} if name == "diabetes" else {}))
    x = np.delete(np.asarray(found.data, dtype=np.float64), without, axis=1)
    x = x + np.array(step) * rng.uniform(-0.5, 0.5, x.shape) if step else x
    return Table(x, labels=found.target, one_unit=name == "digits")


def _moons(rng: Generator) -> Table:
    return Table(datasets.make_moons(1_000, noise=0.1, random_state=int(rng.integers(1 << 31)))[0])


def _copula(rng: Generator, n: int = 2_000, dim: int = 8) -> Table:
    """Draw a Gaussian copula with Student's t marginals (2.5 degrees of freedom), in columns of different units."""
    mixing = rng.normal(size=(dim, dim + 2))
    covariance = mixing @ mixing.T
    spread = np.sqrt(covariance.diagonal())
    z = rng.multivariate_normal(np.zeros(dim), covariance / np.outer(spread, spread), size=n)
    return Table(stats.t(2.5).ppf(stats.norm.cdf(z)) * 10.0 ** rng.uniform(-1, 2, dim))


def _houses(rng: Generator, n: int = 4_000) -> Table:
    """Draw rows like California's districts: income, age, rooms, people, location, and values that depend on them."""
    latitude = np.where(rng.random(n) < 0.55, rng.normal(34, 0.6, n), rng.normal(37.8, 0.7, n))
    longitude = -119.5 - 0.85 * (latitude - 36) + rng.normal(0, 0.5, n)
    income = rng.lognormal(1.2, 0.45, n)
    age = np.clip(rng.normal(28, 12, n) - 2 * np.abs(longitude + 119), 1, None) + 3 * rng.random(n)
    rooms = np.exp(1.5 + 0.12 * income**0.7 + rng.normal(0, 0.2, n))
    bedrooms = 0.2 * rooms * np.exp(rng.normal(0, 0.08, n))
    people, each = rng.lognormal(7, 0.7, n), np.exp(1.05 + 0.15 * rng.standard_t(3, n))
    value = np.exp(0.7 * np.log(income) + 0.4 * np.exp(-((latitude - 37.8) ** 2)) + rng.normal(0, 0.3, n))
    return Table(np.column_stack([income, age, rooms, bedrooms, people, each, latitude, longitude, value]))


DIABETES = (1, 0.1, 1, 1, 0.2, 1, 0.01, 0.0001, 1)  # steps of its columns, without the sex
TABLES: dict[str, Read] = {
    "iris": partial(_of_sklearn, "iris", step=0.1),
    "wine": partial(_of_sklearn, "wine", step=0.01),
    "diabetes": partial(_of_sklearn, "diabetes", step=DIABETES, without=(1,)),
    "breast_cancer": partial(_of_sklearn, "breast_cancer"),
    "digits": partial(_of_sklearn, "digits", step=1.0),
    "moons": _moons,
    "copula": _copula,
    "houses": _houses,
}
AS_STORED: dict[str, Read] = {
    name: partial(_of_sklearn, name) for name in ("breast_cancer", "wine", "diabetes", "digits")
}
