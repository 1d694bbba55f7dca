"""Readers of image files: idx (MNIST), CIFAR-10's binary batches, the .mat files of SVHN and TFD, FER2013, folders."""

import csv
import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from nicest.errors import NicestError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
CIFAR10_ROW = 1 + 3 * 32 * 32  # one label, then the red, green and blue planes
FER2013_SIDE = 48
FER2013_USAGES = ("Training", "PublicTest", "PrivateTest")
FER2013_LEVELS = {str(level): level for level in range(256)}
FER2013_LINE = 1 << 15  # characters; a line of 2304 pixels has at most 9240
IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
AGAIN = "the file is damaged or cut short: get it again"


def read_idx(path: Path) -> np.ndarray:
    """Read an idx file, plain or gzipped: two zero bytes, a type, a rank, the big-endian sizes, the values."""
    data, whole = _inflated(path)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in IDX_DTYPES or data[3] == 0:
        raise NicestError(
            f"{path}: expected the magic number of an idx file (00 00 type rank), got '{data[:4].hex(' ')}'"
        )
    dtype, start = np.dtype(IDX_DTYPES[data[2]]), 4 + 4 * data[3]
    if len(data) < start:
        raise NicestError(f"{path}: expected a header of {start} bytes, got {len(data)}; {AGAIN}")
    shape = struct.unpack(f">{data[3]}I", data[4:start])
    expected = start + math.prod(shape) * dtype.itemsize
    if len(data) != expected or not whole:
        broken = "" if whole else " before its gzip stream breaks off"
        raise NicestError(f"{path}: expected {expected} bytes by its header, got {len(data)}{broken}; {AGAIN}")
    return np.frombuffer(data, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def _inflated(path: Path) -> tuple[bytes, bool]:
    """The bytes of a file, gunzipped if need be, and whether the gzip stream came to its end."""
    raw = read_bytes(path)
    if raw[:2] != b"\x1f\x8b":
        return raw, True
    try:
        return gzip.decompress(raw), True
    except EOFError:
        return zlib.decompressobj(wbits=31).decompress(raw), False
    except (OSError, zlib.error) as error:
        raise NicestError(f"{path}: expected a whole gzip file, got {len(raw)} bytes ({error}); {AGAIN}") from error


def read_bytes(path: Path) -> bytes:
    """Read a whole file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise NicestError(f"{path}: cannot be read ({error.strerror or error})") from error


def read_cifar10(path: Path) -> np.ndarray:
    """Read one batch of CIFAR-10's binary version as (N, 3, 32, 32) uint8."""
    data = read_bytes(path)
    if not data or len(data) % CIFAR10_ROW:
        whole = len(data) // CIFAR10_ROW
        raise NicestError(
            f"{path}: expected a multiple of {CIFAR10_ROW} bytes (published: {10000 * CIFAR10_ROW}), "
            f"got {len(data)}, {whole} whole images; {AGAIN}"
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, CIFAR10_ROW)
    if rows[:, 0].max() > 9:
        raise NicestError(
            f"{path}: expected labels 0..9, got {rows[:, 0].max()}: not a batch of CIFAR-10's binary version"
        )
    return rows[:, 1:].reshape(-1, 3, 32, 32)


def read_svhn(path: Path) -> np.ndarray:
    """Read a cropped SVHN file, X (32, 32, 3, N), as (N, 3, 32, 32) uint8."""
    images = _read_mat(path, "X")["X"]
    if images.ndim == 3:  # MATLAB drops the last axis of a single image
        images = images[..., None]
    _require_array(path, "X", images, (32, 32, 3, "N"), np.uint8)
    return images.transpose(3, 2, 0, 1)


def read_tfd(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read the Toronto Face Dataset: images (N, 48, 48) uint8, and folds (N, 5) of 0 to 3."""
    data = _read_mat(path, "images", "folds")
    images, folds = data["images"], data["folds"]
    _require_array(path, "images", images, ("N", 48, 48), np.uint8)
    _require_array(path, "folds", folds, (len(images), 5), np.number)
    return images, folds


def _read_mat(path: Path, *names: str) -> dict[str, Any]:
    """Read the named variables of a MATLAB 5 file."""
    from scipy.io import loadmat

    size = path.stat().st_size
    try:
        data = loadmat(path, variable_names=names)
    except NotImplementedError as error:
        raise NicestError(f"{path}: expected a MATLAB 5 file, got version 7.3; save it with -v7") from error
    except Exception as error:  # broken bytes lead scipy to errors of every kind
        raise NicestError(f"{path}: expected a MATLAB 5 file, got {size} bytes that do not parse; {AGAIN}") from error
    for name in names:
        if name not in data:
            raise NicestError(f"{path}: expected the variable {name}, not found in its {size} bytes; {AGAIN}")
    return data


def read_fer2013(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read FER2013, Kaggle's .csv or a .npz: images (N, 48, 48) uint8, and the usage (N,) of each in words."""
    images, usage = (_read_fer2013_npz if path.suffix == ".npz" else _read_fer2013_csv)(path)
    if not len(images):
        raise NicestError(f"{path}: expected images, found none; {AGAIN}")
    return images, usage


def _require_usage(usage: str, where: str) -> None:
    """Refuse a usage that FER2013 does not have."""
    if usage not in FER2013_USAGES:
        raise NicestError(f"{where}: expected a usage of {', '.join(FER2013_USAGES)}, got {usage[:40]!r}")


def _read_fer2013_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read the arrays images and usage, which hold no Python objects."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            data = {name: archive[name] for name in ("images", "usage") if name in archive}
            names = ", ".join(archive) or "none"
    except Exception as error:  # broken bytes lead numpy and zipfile to errors of every kind
        reason = " ".join(str(error).split()).split(". ")[0] or type(error).__name__
        raise NicestError(f"{path}: expected a .npz file, got {size} bytes that do not parse ({reason})") from error
    if len(data) < 2:
        raise NicestError(f"{path}: expected the arrays images and usage, got {names}")
    images, usage = data["images"], data["usage"]
    _require_array(path, "images", images, ("N", FER2013_SIDE, FER2013_SIDE), np.uint8)
    _require_array(path, "usage", usage, (len(images),), str)
    for each in np.unique(usage):
        _require_usage(str(each), str(path))
    return images, usage


def _read_fer2013_csv(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read the columns pixels, 2304 numbers with blanks between them, and Usage, line by line."""
    pixels, usage = bytearray(), []
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        rows = csv.reader(_short_lines(path, file))
        try:
            columns = [name.strip() for name in next(rows, [])]
            if not {"pixels", "Usage"} <= set(columns):
                found = ", ".join(columns)[:80]
                raise NicestError(f"{path}: expected the columns emotion, pixels and Usage, got {found!r}")
            at_pixels, at_usage = columns.index("pixels"), columns.index("Usage")
            for row in filter(None, rows):
                where = f"{path}: line {rows.line_num}"
                if len(row) != len(columns):
                    raise NicestError(f"{where}: expected {len(columns)} columns, got {len(row)}; {AGAIN}")
                pixels += _fer2013_pixels(row[at_pixels], where)
                usage.append(row[at_usage].strip())
                _require_usage(usage[-1], where)
        except csv.Error as error:
            raise NicestError(f"{path}: line {rows.line_num}: expected a line of a .csv file ({error})") from error
    images = np.frombuffer(pixels, np.uint8)
    return images.reshape(-1, FER2013_SIDE, FER2013_SIDE), np.array(usage, dtype=str)


def _short_lines(path: Path, file: TextIO) -> Iterator[str]:
    """The lines of a text file, none of which may be long: what is no text may have no line ends."""
    for number, line in enumerate(iter(lambda: file.readline(FER2013_LINE), ""), start=1):
        if len(line) == FER2013_LINE:
            raise NicestError(f"{path}: line {number}: expected fewer than {FER2013_LINE} characters: not FER2013")
        yield line


def _fer2013_pixels(text: str, where: str) -> bytes:
    """The pixels of one image."""
    words = text.split()
    if len(words) != FER2013_SIDE**2:
        raise NicestError(f"{where}: expected {FER2013_SIDE**2} pixels, got {len(words)}; {AGAIN}")
    try:
        return bytes(map(FER2013_LEVELS.__getitem__, words))
    except KeyError as error:
        raise NicestError(f"{where}: expected pixels in 0..255, got {error.args[0][:40]!r}") from None


def _require_array(path: Path, name: str, array: np.ndarray, shape: tuple[int | str, ...], kind: type) -> None:
    """Require of a variable its published shape and type."""
    fits = array.ndim == len(shape) and all(w in ("N", n) for w, n in zip(shape, array.shape, strict=True))
    if not fits or not np.issubdtype(array.dtype, kind):
        wanted = f"({', '.join(map(str, shape))}) {kind.__name__}"
        raise NicestError(f"{path}: expected {name} to be {wanted}, got {array.shape} {array.dtype}")


def image_files(folder: Path) -> list[Path]:
    """The image files in a folder and below it, sorted, hidden ones left out."""
    found = (file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
    return sorted(file for file in found if file.is_file() and not file.name.startswith("."))


def read_images(files: list[Path]) -> np.ndarray:
    """Read image files of one size and mode as (N, H, W), grey, or (N, H, W, 3), colour."""
    images = [_read_image(files[0])]
    for file in files[1:]:
        images.append(_read_image(file))
        if _kind(images[-1]) != _kind(images[0]):
            raise NicestError(
                f"expected images of one size and mode, got {files[0]} of {_kind(images[0])} "
                f"and {file} of {_kind(images[-1])}; resize or convert them"
            )
    return np.stack(images)


def _read_image(file: Path) -> np.ndarray:
    """Read one image in its own mode; one with a palette is RGB, or grey where it holds nothing else."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            mode = image.mode
            pixels = np.asarray(image.convert("RGB") if mode == "P" else image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise NicestError(f"{file}: cannot be read as an image ({error}); remove it or save it again") from error
    if mode not in ("1", "L", "I;16", "I;16B", "P", "RGB"):
        raise NicestError(f"{file}: expected a grey or RGB image, got mode {mode}; convert it to L or RGB")
    if mode == "P" and (pixels == pixels[..., :1]).all():
        return pixels[..., 0]
    return pixels


def _kind(pixels: np.ndarray) -> str:
    """Width, height and mode of an image, in words."""
    colour = (
        "RGB"
        if pixels.ndim == 3
        else {"bool": "black and white", "uint8": "grey"}.get(pixels.dtype.name, "16-bit grey")
    )
    return f"{pixels.shape[1]}x{pixels.shape[0]} {colour}"
