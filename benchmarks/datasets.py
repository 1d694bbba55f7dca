"""Tables for the comparisons: files in a folder, tables of scikit-learn, and draws from formulas."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from scipy import stats
from sklearn import datasets

from nicest.data import tables
from nicest.data.cells import as_numbers
from nicest.data.columns import Category, Schema
from nicest.data.infer import infer
from nicest.errors import NicestError
from nicest.messages import listed

Generator = np.random.Generator
SUFFIXES = (*tables.SUFFIXES, ".csv.gz", ".npy", ".npz")
FEWEST = 20  # complete rows that a table needs
NO_TEXTS: Mapping[int, Category] = MappingProxyType({})


class Table(NamedTuple):
    """Complete rows of numbers (N, D), the names of their columns, and labels (N,) if there are some.

    Errors of different columns share a unit if `one_unit` is true, as for pixels. `texts` are the columns of texts and
    booleans, whose cells are indices of their values.
    """

    rows: np.ndarray
    names: tuple[str, ...] = ()
    labels: np.ndarray | None = None
    left_out: tuple[str, ...] = ()
    one_unit: bool = False
    texts: Mapping[int, Category] = NO_TEXTS

    def frame(self, rows: np.ndarray) -> Any:
        """Return rows (N, D) as an Arrow table with the texts themselves."""
        import pyarrow as pa

        cells = [self.texts[i].decode(each) if i in self.texts else each for i, each in enumerate(rows.T)]
        return pa.table(cells, names=list(self.names))

    def numbers(self, frame: Any) -> np.ndarray:
        """Return an Arrow table as rows: the inverse of `frame`."""
        cells = frame.columns
        return np.column_stack(
            [self.texts[i].encode(each) if i in self.texts else each for i, each in enumerate(cells)]
        )


Read = Callable[[Generator], Table]


def tables_in(folder: Path) -> dict[str, Path]:
    """Return the table files of a folder by their names without suffix."""
    if folder.is_file():
        raise NicestError(f"expected a folder of tables, got the file {folder}: put it into a separate folder")
    if not folder.is_dir():
        raise NicestError(f"expected a folder of tables, found no {folder}; looked from {Path.cwd()}")
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name.lower().endswith(SUFFIXES))
    if not files:
        raise NicestError(f"expected tables ({', '.join(SUFFIXES)}) in {folder}, found none")
    return {path.name.removesuffix(".gz").rpartition(".")[0]: path for path in files}


def read_numbers(path: Path, *, texts: bool = False) -> Table:
    """Read the columns of numbers of a file, and with `texts` those of texts and booleans, too.

    Constant columns and incomplete rows are left out. A .npz file holds the array X, and labels y if it has some.
    """
    labels = None
    if path.suffix.lower() in (".npy", ".npz"):
        with np.load(path, allow_pickle=False) if path.suffix.lower() == ".npz" else _one(np.load(path)) as file:
            if "X" not in file:
                raise NicestError(f"{path}: expected an array called X, and labels called y if there are any")
            array, labels = np.asarray(file["X"], dtype=float), file.get("y")
        all_names, schema = [f"x{i + 1}" for i in range(array.shape[1])], Schema()
        columns = dict(zip(all_names, array.T, strict=True))
    else:
        with unpacked(path) as plain:
            file = tables.TableFile(plain)
            table = file.table(all_names := file.names)
        schema, columns = infer(table, source=path)[0], {}
        for column in schema:
            if not isinstance(column, Category) or column.numeric:
                columns[column.name] = as_numbers(table.column(column.name))[0]
            elif texts:
                columns[column.name] = column.encode(table.column(column.name))
    columns = {name: cells for name, cells in columns.items() if len(np.unique(cells[np.isfinite(cells)])) > 1}
    if not columns:
        raise NicestError(f"{path}: expected columns of numbers that vary, got none among {listed(all_names)}")
    rows, names = np.column_stack(list(columns.values())), tuple(columns)
    whole = np.isfinite(rows).all(1)
    if whole.sum() < FEWEST:
        raise NicestError(f"{path}: expected at least {FEWEST} complete rows of numbers, got {whole.sum()}")
    kinds = {each.name: each for each in schema if isinstance(each, Category) and not each.numeric}
    words = {i: kinds[name] for i, name in enumerate(names) if name in kinds}
    labels = None if labels is None else np.asarray(labels).ravel()[whole]
    return Table(rows[whole], names, labels, tuple(each for each in all_names if each not in names), texts=words)


read_mixed = partial(read_numbers, texts=True)


@contextmanager
def _one(array: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
    yield {"X": array}


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
        yield plain


def split(rows: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return four fifths of the rows for training, and the others."""
    test, train = np.split(np.random.default_rng(seed).permutation(rows), [len(rows) // 5])
    return train, test


def standardised(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Standardise both by the training rows; columns that are constant in training keep their unit."""
    mean, deviation = train.mean(0), deviations(train)
    return (train - mean) / deviation, (test - mean) / deviation


def deviations(rows: np.ndarray) -> np.ndarray:
    """Return the standard deviations of columns, (D,); 1 of constant ones."""
    found = rows.std(0)
    return np.where(found > 0, found, 1.0)


def _of_sklearn(
    name: str, rng: Generator, *, step: float | tuple[float, ...] = 0, without: tuple[int, ...] = ()
) -> Table:
    """Load a table of scikit-learn, with its target as labels.

    Values that were rounded to multiples of `step` get uniform noise: otherwise their density would be infinite.
    """
    found = getattr(datasets, f"load_{name}")(**({"scaled": False} if name == "diabetes" else {}))
    x = np.delete(np.asarray(found.data, dtype=np.float64), without, axis=1)
    x = x + np.array(step) * rng.uniform(-0.5, 0.5, x.shape) if step else x
    return _named(x, labels=found.target, one_unit=name == "digits")


def _named(rows: np.ndarray, **more: Any) -> Table:
    return Table(rows, tuple(f"x{i + 1}" for i in range(rows.shape[1])), **more)


def _moons(rng: Generator) -> Table:
    return _named(datasets.make_moons(1_000, noise=0.1, random_state=int(rng.integers(1 << 31)))[0])


def _copula(rng: Generator, n: int = 2_000, dim: int = 8) -> Table:
    """Draw a Gaussian copula with Student's t marginals (2.5 degrees of freedom), in columns of different units."""
    mixing = rng.normal(size=(dim, dim + 2))
    covariance = mixing @ mixing.T
    spread = np.sqrt(covariance.diagonal())
    z = rng.multivariate_normal(np.zeros(dim), covariance / np.outer(spread, spread), size=n)
    return _named(stats.t(2.5).ppf(stats.norm.cdf(z)) * 10.0 ** rng.uniform(-1, 2, dim))


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
    return _named(np.column_stack([income, age, rooms, bedrooms, people, each, latitude, longitude, value]))


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
    name: partial(_of_sklearn, name) for name in ("breast_cancer", "wine", "diabetes", "digits", "iris")
}
