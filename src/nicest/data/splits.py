"""Rows that train, validate and test."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from nicest.data.arrays import Rows, require_density
from nicest.errors import NicestError

if TYPE_CHECKING:
    from nicest.data.columns import Schema

PARTS = ("train", "valid", "test")
IN_MEMORY = "rows in memory"  # name of data that comes from no file


@dataclass(frozen=True)
class Splits:
    """Training, validation and test rows of one data set, (N, D) each.

    Attributes
    ----------
    name : str
    train, valid, test : array
        uint8 or uint16 levels, or float32. Rows of a table are encoded, with NaN for missing cells.
    shape : tuple of int
        Shape of one row: (H, W) grey, (C, H, W) colour with planar channels, (D,) plain rows.
    levels : int or None
        Number of grey levels; None for continuous data.
    schema : Schema or None
        The columns of a table.
    classes : tuple of int
        Number of training images of each label. Rows then end with their label, after an image of `shape`.
    notes : tuple of str
        What the reader of the data should tell the user.
    """

    name: str
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    shape: tuple[int, ...]
    levels: int | None
    schema: Schema | None = None
    classes: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def dim(self) -> int:
        return int(self.train.shape[1])

    @property
    def n_fitted(self) -> int:
        """Number of rows that train or validate."""
        return len(self.train) + (0 if self.valid is self.train else len(self.valid))

    def digest(self) -> str:
        """Return a fingerprint of all rows and of the part each is in."""
        fingerprint = hashlib.blake2b(digest_size=8)
        for part in PARTS:
            rows = self.split(part)
            fingerprint.update(f"{part} {rows.shape} {rows.dtype}".encode())
            fingerprint.update(np.ascontiguousarray(rows).data)
        return fingerprint.hexdigest()

    def of_label(self, label: int) -> Splits:
        """Return the images of one label, without it."""
        rows = {part: self.split(part)[self.split(part)[:, -1] == label, :-1] for part in PARTS}
        if empty := [part for part in PARTS if not len(rows[part])]:
            raise NicestError(f"{self.name}: expected images of label {label} in every split, got none in {empty[0]}")
        return replace(self, **rows, classes=())  # type: ignore[arg-type]

    def split(self, name: str) -> np.ndarray:
        """Return the rows of "train", "valid" or "test"."""
        if name not in PARTS:
            raise NicestError(f"expected a split of {', '.join(PARTS)}, got '{name}'")
        rows: np.ndarray = getattr(self, name)
        return rows


def by_seed(name: str, rows: Rows, seed: int, valid: float, test: float) -> Splits:
    """Split rows by a permutation from a seed, with at least one row in each part."""
    parts = [take(rows, each) for each in permuted(name, len(rows.values), seed, valid, test)]
    return assemble(name, *parts)


def permuted(name: str, n: int, seed: int, valid: float, test: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the indices of the training, validation and test rows."""
    n_valid, n_test = max(1, round(n * valid)), max(1, round(n * test))
    if n_valid + n_test >= n:
        raise NicestError(
            f"{name}: expected at least 3 rows, and 1 left to train on, got {n}: validation takes {n_valid} "
            f"and test {n_test}; give more rows or smaller fractions"
        )
    test_rows, valid_rows, train_rows = np.split(np.random.default_rng(seed).permutation(n), [n_test, n_test + n_valid])
    return train_rows, valid_rows, test_rows


def in_memory(rows: np.ndarray, seed: int, valid: float, schema: Schema | None = None) -> Splits:
    """Split rows (N, D) without a test part; with `valid` = 0 the training rows validate, too."""
    n_valid = min(max(1, round(len(rows) * valid)), len(rows) - 1) if valid else 0
    order = np.random.default_rng(seed).permutation(len(rows))
    train = rows[order[n_valid:]]
    held_out = rows[order[:n_valid]] if n_valid else train
    return Splits(IN_MEMORY, train, held_out, rows[:0], rows.shape[1:], None, schema)


def given(
    train: np.ndarray,
    valid: np.ndarray | None,
    *,
    dim: int,
    levels: int = 0,
    steps: Sequence[float] = (),
    context: int = 0,
    may_miss: bool = False,
) -> Splits:
    """Check rows (N, ...) that are split already; without validation rows the training rows validate, too.

    Parameters
    ----------
    train, valid : array
        Rows of `dim` numbers that are modelled, then `context` numbers that are not.
    levels : int
        If positive, the modelled numbers are grey levels 0..levels-1.
    steps : sequence of float
        Else, for each modelled number, the step that it is a multiple of, or 0.
    may_miss : bool
        Whether numbers may be NaN, for missing cells.
    """
    shape = train.shape[1:]
    if valid is not None and valid.shape[1:] != shape:
        raise NicestError(f"expected validation rows of the training rows' shape {shape}, got {valid.shape[1:]}")
    if not train.size or (valid is not None and not valid.size):
        raise NicestError("expected at least 1 row to train and to validate on, got none")
    parts = [np.ascontiguousarray(each.reshape(len(each), -1)) for each in (train, valid) if each is not None]
    parts = [each if levels and each.dtype.kind in "ui" else each.astype(np.float32) for each in parts]
    if parts[0].shape[1] != dim + context:
        raise NicestError(f"expected rows of {dim + context} numbers, as the model has, got {parts[0].shape[1]}")
    for name, each in zip(("training", "validation"), parts, strict=False):
        if np.isinf(each).any():
            raise NicestError(f"expected finite numbers in the {name} rows, got inf")
        if not may_miss and np.isnan(each).any():
            raise NicestError(
                f"expected numbers in the {name} rows, got NaN: use NICETable for rows with missing cells"
            )
        _require_stored(each[:, :dim], name, levels, steps)
    if not levels and not may_miss:
        require_density(Rows(parts[0][:, :dim], shape, None, tuple(steps)), IN_MEMORY)
    return Splits(IN_MEMORY, parts[0], parts[-1], parts[0][:0], shape, levels or None)  # parts has 1 or 2 arrays


def _require_stored(rows: np.ndarray, name: str, levels: int, steps: Sequence[float]) -> None:
    """Refuse numbers that are not levels or not multiples of their steps."""
    if levels and not ((rows >= 0) & (rows < levels) & (rows == np.floor(rows))).all():
        got = f"{rows.min():g} to {rows.max():g}"
        raise NicestError(f"expected whole levels 0 to {levels - 1} in the {name} rows, got numbers from {got}")
    if not levels and any(steps):
        count = rows / np.array([step or 1.0 for step in steps])
        off = ((np.abs(count - np.round(count)) > 1e-3) & (np.array(steps) > 0)).any(0)
        if off.any():
            column = int(off.argmax())
            raise NicestError(f"expected multiples of {steps[column]:g} in column {column} of the {name} rows")


def take(rows: Rows, index: np.ndarray | slice) -> Rows:
    return rows._replace(values=rows.values[index])


def assemble(name: str, train: Rows, valid: Rows, test: Rows) -> Splits:
    """Put three parts of one kind together."""
    for part, rows in zip(PARTS, (train, valid, test), strict=True):
        if len(rows.values) == 0:
            raise NicestError(f"{name}: expected at least 1 row in each split, got none in {part}: too few images")
        if rows[1:] != train[1:]:
            raise NicestError(
                f"{name}: expected splits of one kind, got train of shape {train.shape} and levels {train.levels}, "
                f"{part} of shape {rows.shape} and levels {rows.levels}"
            )
    require_density(train, name)
    return Splits(name, train.values, valid.values, test.values, train.shape, train.levels)
