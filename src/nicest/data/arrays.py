"""NumPy files, and how any array becomes rows with their levels."""

import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from nicest.data.reading import reading, require_modest
from nicest.errors import NicestError
from nicest.messages import brief, listed

ARRAY_KEYS = ("images", "x", "data", "X")


class Rows(NamedTuple):
    """Rows of an array.

    Attributes
    ----------
    values : numpy.ndarray
        (N, D) levels, or float32 numbers.
    shape : tuple of int
        Shape of one row as an image.
    levels : int or None
        Number of grey levels; None for continuous numbers.
    steps : tuple of float
        Step of each column whose numbers are multiples of it, 0 for continuous columns; empty if all are.
    """

    values: np.ndarray
    shape: tuple[int, ...]
    levels: int | None
    steps: tuple[float, ...] = ()


def as_rows(array: np.ndarray, source: str) -> Rows:
    """Flatten an array (N, D), (N, H, W), (N, H, W, C) or (N, C, H, W), C being 1 or 3; channels become planar."""
    if array.size == 0:
        raise NicestError(f"{source}: expected rows of at least 2 features, got an empty array of shape {array.shape}")
    values, levels = _with_levels(_planar(array, source), source)
    shape = values.shape[1:]
    dim = math.prod(shape)
    if dim < 2:
        raise NicestError(f"{source}: expected at least 2 features, got {dim}: a coupling needs two parts")
    rows = np.ascontiguousarray(values.reshape(len(values), dim))
    if levels is None:
        _require_finite(rows, source)
    return Rows(rows, shape, levels)


def _planar(array: np.ndarray, source: str) -> np.ndarray:
    """Put the channels of colour images before their pixels, and drop the channel axis of grey ones."""
    if array.ndim not in (2, 3, 4):
        raise NicestError(f"{source}: expected (N, D), (N, H, W) or (N, H, W, C), got shape {array.shape}")
    if array.ndim < 4:
        return array
    if array.shape[3] in (1, 3):
        array = array.transpose(0, 3, 1, 2)
    if array.shape[1] not in (1, 3):
        raise NicestError(f"{source}: expected images of 1 or 3 channels, first or last, got shape {array.shape}")
    return array[:, 0] if array.shape[1] == 1 else array


def _with_levels(array: np.ndarray, source: str) -> tuple[np.ndarray, int | None]:
    """Convert an array to uint8, uint16 or float32; return also its number of levels."""
    if array.dtype == np.bool_:
        return array.astype(np.uint8), 2
    if array.dtype == np.uint8:
        return array, 256
    if np.issubdtype(array.dtype, np.uint16):
        return array.astype(np.uint16, copy=False), 65536
    if np.issubdtype(array.dtype, np.floating):
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes inf, which _require_finite reports
            return array.astype(np.float32, copy=False), None
    if array.dtype.kind not in "iu":  # spans of time are integers to issubdtype
        raise NicestError(f"{source}: expected numbers, got dtype {brief(array.dtype)}; save it as uint8 or float32")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > 255:
        raise NicestError(
            f"{source}: expected integers in 0..255, got {array.dtype} values in {low}..{high}; "
            "save levels as uint8 or uint16, or continuous values as float32"
        )
    return array.astype(np.uint8), 256


def _require_finite(rows: np.ndarray, source: str) -> None:
    """Refuse NaN and inf; the message says how many there are and where the first one is."""
    bad = ~np.isfinite(rows)
    if bad.any():
        row, column = np.unravel_index(int(bad.argmax()), bad.shape)
        raise NicestError(
            f"{source}: expected finite float32 values, got {bad.sum()} NaN or inf, the first in row {row}, "
            f"column {column}; drop those rows or fill them in"
        )


def require_density(rows: Rows, source: str) -> None:
    """Refuse continuous columns that are constant, whose density is infinite, or too far from 0 for float32."""
    if rows.levels is not None:
        return
    continuous = np.array(rows.steps or [0.0] * rows.values.shape[1]) == 0
    low, high = rows.values.min(0), rows.values.max(0)
    constant = np.flatnonzero((low == high) & continuous)
    if constant.size:
        raise NicestError(
            f"{source}: {constant.size} of {len(low)} columns are constant over the {len(rows.values)} training rows"
            f" (columns {listed(constant.tolist())}): their density is infinite; drop them, or give integer levels as"
            " uint8"
        )
    deviation = rows.values.std(axis=0, dtype=np.float64)
    coarse = np.flatnonzero((np.spacing(np.maximum(-low, high)) > 1e-3 * deviation) & continuous)
    if coarse.size:
        first = coarse[0]
        raise NicestError(
            f"{source}: column {first} has values near {high[first]:g} and a standard deviation of"
            f" {deviation[first]:.2g}, for which float32 has too few digits; subtract an offset from it"
        )


def read_npy(path: Path) -> np.ndarray:
    """Read one array of plain numbers from a .npy file."""
    with reading(path, "a whole .npy file of numbers"):
        return _read_array(lambda: path.open("rb"), path.stat().st_size)


def _read_array(opened: Callable[[], IO[bytes]], size: int) -> np.ndarray:
    """Read an array, after a check that the file has as many bytes as its header says."""
    with opened() as file:
        expected = _npy_size(file)
    if expected is not None and expected > size:
        raise ValueError(f"its header says {expected} bytes")
    with opened() as file:  # again: a member of an archive that was wound back has no checksum any more
        return np.lib.format.read_array(file, allow_pickle=False)


def _npy_size(file: IO[bytes]) -> int | None:
    """Return the bytes of a whole .npy file, by its header; None if it holds Python objects, which have no size."""
    formats = np.lib.format
    headers = {1: formats.read_array_header_1_0, 2: formats.read_array_header_2_0, 3: formats.read_array_header_2_0}
    shape, _, dtype = headers[formats.read_magic(file)[0]](file)
    if min(shape, default=0) < 0:
        raise ValueError(f"its header says a shape of {shape}")
    return None if dtype.hasobject else file.tell() + math.prod(shape) * dtype.itemsize


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read the splits of a .npz file (train, test and perhaps valid), or its one array under the key "all"."""
    return read_members(path, _npz_keys)


def read_members(path: Path, choose: Callable[[list[str], Path], dict[str, str]]) -> dict[str, np.ndarray]:
    """Read arrays of a .npz file; `choose` maps their new names to keys of the file."""
    with reading(path, "a whole .npz file of numbers"), path.open("rb") as file:
        if file.read(6) == np.lib.format.MAGIC_PREFIX:
            raise ValueError("it is a .npy file, name it so")
        with zipfile.ZipFile(file) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            chosen = {name: members[key] for name, key in choose(list(members), path).items()}
            return {name: _read_member(path, archive, info) for name, info in chosen.items()}


def _read_member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """Read one array of an archive that numpy wrote."""
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("it is packed in a way that numpy does not write")
    require_modest(path, info.file_size, "save it with np.savez, which does not pack")
    return _read_array(lambda: archive.open(info), info.file_size)


def _npz_keys(keys: list[str], path: Path) -> dict[str, str]:
    """Choose which keys of an archive to read, and under which names."""
    if {"train", "test"} <= set(keys):
        return {split: split for split in ("train", "valid", "test") if split in keys}
    if known := [key for key in ARRAY_KEYS if key in keys] or (len(keys) == 1 and keys):
        return {"all": known[0]}
    raise NicestError(
        f"{path}: expected the keys train and test, or one of {', '.join(ARRAY_KEYS)}, got {listed(keys)}"
    )
