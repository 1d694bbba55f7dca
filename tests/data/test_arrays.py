"""Arrays and NumPy files: the rule of levels and shapes, and one line for every bad array."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from published import cut

from nicest.data import Splits, load
from nicest.data.arrays import as_rows

Refusal = Callable[..., str]
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (20, 4, 5), np.uint8)
TABLE = RNG.normal(size=(20, 4))


def _load(path: Path, array: np.ndarray, **options: float) -> Splits:
    np.save(path / "x.npy", array)
    return load(str(path / "x.npy"), **options)  # type: ignore[arg-type]


def _all_rows(splits: Splits) -> np.ndarray:
    rows = np.concatenate([splits.train, splits.valid, splits.test])
    return rows[np.lexsort(rows.T[::-1])]


@pytest.mark.parametrize(
    ("array", "dtype", "levels"),
    [
        (PIXELS, np.uint8, 256),
        (PIXELS.astype(np.uint16) * 200, np.uint16, 65536),
        (PIXELS.astype(">u2"), np.uint16, 65536),
        (PIXELS > 127, np.uint8, 2),
        (PIXELS.astype(np.int64), np.uint8, 256),
        (PIXELS.astype(np.int16), np.uint8, 256),
        (PIXELS.astype(np.float64), np.float32, None),
        (PIXELS.astype(">f4"), np.float32, None),
        (PIXELS.astype(np.float16), np.float32, None),
    ],
)
def test_levels(tmp_path: Path, array: np.ndarray, dtype: type, levels: int | None) -> None:
    splits = _load(tmp_path, array)
    assert (splits.levels, splits.shape, splits.dim, splits.name) == (levels, (4, 5), 20, "x")
    assert splits.train.dtype == dtype
    assert splits.train.dtype.isnative
    expected = array.astype(dtype).reshape(20, 20)
    np.testing.assert_array_equal(_all_rows(splits), expected[np.lexsort(expected.T[::-1])])


def test_shapes() -> None:
    colour = RNG.integers(0, 256, (6, 4, 5, 3), np.uint8)
    planar = colour.transpose(0, 3, 1, 2)
    for array in (colour, planar, np.ascontiguousarray(planar)):
        rows = as_rows(array, "x")
        assert rows.shape == (3, 4, 5)
        assert rows.values[5, 1 * 20 + 2 * 5 + 3] == colour[5, 2, 3, 1]
        assert rows.values.flags.c_contiguous
    for grey in (colour[..., :1], planar[:, :1], colour[..., 0]):
        rows = as_rows(grey, "x")
        assert rows.shape == (4, 5)
        np.testing.assert_array_equal(rows.values, colour[..., 0].reshape(6, -1))
    assert as_rows(TABLE, "x").shape == (4,)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros(5), ["expected (N, D)", "(5,)"]),
        (np.float32(1.0), ["expected (N, D)", "()"]),
        (np.zeros((2, 2, 2, 2, 2)), ["got shape (2, 2, 2, 2, 2)"]),
        (np.zeros((3, 4, 4, 2), np.uint8), ["1 or 3 channels", "(3, 4, 4, 2)"]),
        (np.zeros((0, 4)), ["empty array", "(0, 4)"]),
        (np.zeros((4, 0)), ["empty array", "(4, 0)"]),
        (TABLE[:, :1], ["expected at least 2 features, got 1"]),
        (np.array([["a", "b"]] * 4), ["expected numbers, got dtype <U1"]),
        (np.zeros((4, 2), complex), ["expected numbers, got dtype complex128"]),
        (np.array([[0, 256]] * 4), ["int64 values in 0..256", "uint16", "float32"]),
        (np.array([[-1, 6]] * 4), ["values in -1..6"]),
        (TABLE[:2], ["at least 3 rows", "got 2"]),
        (TABLE[:1], ["at least 3 rows", "got 1"]),
    ],
)
def test_bad_arrays(tmp_path: Path, refusal: Refusal, array: np.ndarray, words: list[str]) -> None:
    message = refusal(_load, tmp_path, array)
    for word in words:
        assert word in message


def test_non_finite_values_are_counted_and_placed(tmp_path: Path, refusal: Refusal) -> None:
    table = TABLE.copy()
    table[3, 2], table[7, 0], table[9, 1] = np.nan, np.inf, 1e300  # the last is inf in float32
    message = refusal(_load, tmp_path, table)
    assert str(tmp_path / "x.npy") in message
    assert "got 3 NaN or inf, the first in row 3, column 2" in message


def test_constant_columns_are_named(tmp_path: Path, refusal: Refusal) -> None:
    table = RNG.normal(size=(20, 9))
    table[:, [1, 4]] = 0.5
    message = refusal(_load, tmp_path, table)
    assert "2 of 9 columns are constant" in message
    assert "(columns 1, 4)" in message
    assert "drop them" in message
    assert "columns 0, 1, 2, 3, 4 and 4 more)" in refusal(_load, tmp_path, np.ones((20, 9)))
    assert _load(tmp_path, np.ones((20, 9), np.uint8)).levels == 256  # levels get noise: no harm


def test_npz_with_its_own_splits(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    np.savez_compressed(path, train=PIXELS[:10], valid=PIXELS[10:14], test=PIXELS[14:])
    splits = load(str(path), seed=5)
    for part, rows in (("train", PIXELS[:10]), ("valid", PIXELS[10:14]), ("test", PIXELS[14:])):
        np.testing.assert_array_equal(splits.split(part), rows.reshape(len(rows), -1))

    np.savez(path, train=PIXELS[:10], test=PIXELS[14:])
    splits = load(str(path), valid=0.2)
    assert (len(splits.train), len(splits.valid)) == (8, 2)
    np.testing.assert_array_equal(splits.test, PIXELS[14:].reshape(6, -1))
    carved = {row.tobytes() for row in np.concatenate([splits.train, splits.valid])}
    assert carved == {row.tobytes() for row in PIXELS[:10]}
    assert not np.array_equal(load(str(path), valid=0.2, seed=1).valid, splits.valid)


@pytest.mark.parametrize("key", ["images", "x", "data", "X"])
def test_npz_of_one_array(tmp_path: Path, key: str) -> None:
    np.savez(tmp_path / "a.npz", **{key: PIXELS, "labels": np.zeros(20)})  # type: ignore[arg-type]
    np.savez(tmp_path / "b.npz", anything=PIXELS)
    np.testing.assert_array_equal(load(str(tmp_path / "a.npz")).train, load(str(tmp_path / "b.npz")).train)


def test_bad_npz(tmp_path: Path, refusal: Refusal) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, a=PIXELS, b=PIXELS)
    assert "expected the keys train and test, or one of images, x, data, X, got 'a', 'b'" in refusal(load, str(path))
    np.savez(path)
    assert "got none" in refusal(load, str(path))
    np.savez(path, train=PIXELS, valid=PIXELS[:, :2], test=PIXELS)
    assert "valid of shape (2, 5)" in refusal(load, str(path))
    np.savez(path, train=PIXELS, valid=PIXELS / 255, test=PIXELS)
    assert "valid of shape (4, 5) and levels None" in refusal(load, str(path))
    np.savez(path, train=PIXELS[:1], test=PIXELS)
    assert "got none in train" in refusal(load, str(path))
    np.savez(path, train=PIXELS, test=PIXELS[:0])
    assert "x.npz [test]: expected rows" in refusal(load, str(path))


def test_damaged_npz(tmp_path: Path, refusal: Refusal) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, x=PIXELS)
    data = bytearray(path.read_bytes())
    data[300] ^= 0xFF
    path.write_bytes(data)
    assert "Bad CRC-32" in refusal(load, str(path))
    np.save(tmp_path / "x.npy", PIXELS)
    (tmp_path / "x.npy").replace(path)
    assert "it is a .npy file" in refusal(load, str(path))


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_truncated_npy_says_its_bytes(tmp_path: Path, refusal: Refusal, version: tuple[int, int]) -> None:
    path = tmp_path / "x.npy"
    with path.open("wb") as file:
        np.lib.format.write_array(file, TABLE, version=version)
    whole = path.stat().st_size
    message = refusal(load, str(cut(path)))
    assert f"{path}: expected a whole .npy file of numbers, got {whole - 7} bytes" in message
    assert f"its header says {whole} bytes" in message
