"""Readers of image files: idx (MNIST), CIFAR-10's binary batches, the .mat files of SVHN and TFD, FER2013, folders."""

import csv
import gzip
import io
import math
import os
import struct
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nicest.data.arrays import read_members
from nicest.data.reading import most_unpacked, read_bytes, reading, require_modest
from nicest.errors import NicestError
from nicest.messages import brief, listed

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF")  # Pillow knows others, and runs Ghostscript for one
CIFAR10_ROW = 1 + 3 * 32 * 32  # one label, then the red, green and blue planes
FER2013_SIDE = 48
FER2013_USAGES = ("Training", "PublicTest", "PrivateTest")
IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
IDX_RANK = 8
MAT_MEMORY = 1 << 30  # bytes that the child process may take before it reads anything
MAT_TO_NPZ = """
import contextlib, sys
import numpy, scipy.io
path, memory, *names = sys.argv[1:]
with contextlib.suppress(ImportError, ValueError):  # Windows has no memory limits; other systems may refuse one
    import resource
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (int(memory) if hard < 0 else min(int(memory), hard), hard))
# a damaged file of a few bytes may announce millions of characters, which take scipy 20 seconds to join
kinds = {name: kind for name, _, kind in scipy.io.whosmat(path)}
for name in names:
    if kinds.get(name) == "char":
        sys.exit(f"{name} is text")
found = scipy.io.loadmat(path, variable_names=names)
missing = [name for name in names if name not in found]
if missing:
    sys.exit(f"it lacks {' and '.join(missing)}")
numpy.savez(sys.stdout.buffer, **{name: found[name] for name in names})
"""
AGAIN = "the file is damaged or cut short: get it again"


def read_idx(path: Path) -> np.ndarray:
    """Read an idx file, plain or gzipped: two zero bytes, a type, a rank, the big-endian sizes, the values."""
    data, whole = _inflated(path)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in IDX_DTYPES or not 1 <= data[3] <= IDX_RANK:
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
    if expected == start:
        raise NicestError(f"{path}: expected values, got none, of shape {shape}; {AGAIN}")
    return np.frombuffer(data, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def _inflated(path: Path) -> tuple[bytes | bytearray, bool]:
    """The bytes of a file, gunzipped if need be, and whether the gzip stream came to its end."""
    raw = read_bytes(path)
    if raw[:2] != b"\x1f\x8b":
        return raw, True
    data, whole = bytearray(), False
    with reading(path, "a whole gzip file", AGAIN), suppress(EOFError), gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
        while part := file.read1(1 << 20):
            data += part
            require_modest(path, len(data), "gunzip it")
        whole = True
    return data, whole


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


def _read_mat(path: Path, *names: str) -> dict[str, np.ndarray]:
    """Read the named variables of a MATLAB file, which must be arrays of numbers.

    A child process reads it, with memory in proportion to the file: scipy's reader crashes on damaged files.
    """
    what = f"a MATLAB file with {' and '.join(names)} of numbers"
    with reading(path, what, "get it again, or save it with -v7"):
        memory = MAT_MEMORY + 2 * most_unpacked(path.stat().st_size)
        child = subprocess.run(
            [sys.executable, "-P", "-c", MAT_TO_NPZ, path, str(memory), *names],
            capture_output=True,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # each of its threads would take from that memory
        )
        if child.returncode:
            raise ValueError(child.stderr.decode(errors="replace").strip().rpartition("\n")[2] or "the reader crashed")
        with np.load(io.BytesIO(child.stdout)) as found:
            return {name: found[name] for name in names}


def read_fer2013(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read FER2013, Kaggle's .csv or a .npz: images (N, 48, 48) uint8, and the usage (N,) of each in words."""
    if path.suffix == ".npz":
        data = read_members(path, _fer2013_keys)
        images, usage = data["images"], data["usage"]
    else:
        images, usage = _read_fer2013_csv(path)
    _require_array(path, "images", images, ("N", FER2013_SIDE, FER2013_SIDE), np.uint8)
    _require_array(path, "usage", usage, (len(images),), str)
    if not len(images) or (odd := sorted(set(usage.tolist()) - set(FER2013_USAGES))):
        got = repr(odd[0][:40]) if len(images) else "no images"
        raise NicestError(f"{path}: expected images of the usages {', '.join(FER2013_USAGES)}, got {got}; {AGAIN}")
    return images, usage


def _fer2013_keys(keys: list[str], path: Path) -> dict[str, str]:
    if not {"images", "usage"} <= set(keys):
        raise NicestError(f"{path}: expected the arrays images and usage, got {listed(keys)}")
    return {"images": "images", "usage": "usage"}


def _read_fer2013_csv(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read the columns pixels, 2304 numbers with blanks between them, and Usage."""
    pixels, usage = bytearray(), list[str]()
    with reading(path, "the columns emotion, pixels and Usage", AGAIN), path.open(encoding="utf-8-sig") as file:
        for row in csv.DictReader(file, skipinitialspace=True):
            image = bytes(map(int, row["pixels"].split()))
            if len(image) != FER2013_SIDE**2:
                raise ValueError(f"image {len(usage)} has {len(image)} pixels")
            pixels += image
            usage.append(row["Usage"].strip())
    images = np.frombuffer(pixels, np.uint8)
    return images.reshape(-1, FER2013_SIDE, FER2013_SIDE), np.array(usage, dtype=str)


def _require_array(path: Path, name: str, array: np.ndarray, shape: tuple[int | str, ...], kind: type) -> None:
    fits = array.ndim == len(shape) and all(w in ("N", n) for w, n in zip(shape, array.shape, strict=True))
    if not fits or not np.issubdtype(array.dtype, kind):
        wanted = f"({', '.join(map(str, shape))}) {kind.__name__}"
        raise NicestError(f"{path}: expected {name} to be {wanted}, got {array.shape} {brief(array.dtype)}")


def image_files(folder: Path) -> list[Path]:
    """The image files in a folder and below it, sorted, hidden ones left out."""
    found = (file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
    return sorted(file for file in found if file.is_file() and not file.name.startswith("."))


class Fit(NamedTuple):
    """What is done to every image where it is asked for: (H, W) of the middle that is kept, (H, W) it is resized to."""

    crop: tuple[int, ...] = ()
    resize: tuple[int, ...] = ()


def read_images(files: list[Path], fit: Fit = Fit()) -> np.ndarray:  # noqa: B008
    """Read image files of one size and mode as (N, H, W), grey, or (N, H, W, 3), colour."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Corrupt EXIF")  # an image is read as if it had none
        images: list[np.ndarray] = []
        for file in files:
            images.append(_read_image(file, fit))
            if (images[-1].dtype, images[-1].shape) != (images[0].dtype, images[0].shape):
                raise _unlike((files[0], images[0]), (file, images[-1]))
    return np.stack(images)


def _unlike(*images: tuple[Path, np.ndarray]) -> NicestError:
    """Return the error for two images of different modes or sizes."""
    modes = {"bool": "black and white", "uint8": "grey", "uint16": "16-bit grey"}
    words = [
        f"{file} of {pixels.shape[1]}x{pixels.shape[0]} {'RGB' if pixels.ndim == 3 else modes[pixels.dtype.name]}"
        for file, pixels in images
    ]
    (_, first), (_, second) = images
    what, advice = "mode", "convert them all to 8-bit grey, mode L, or all to RGB"
    if (first.ndim, first.dtype) == (second.ndim, second.dtype):
        what, advice = "size", "resize them all, for example: set 'data.resize=[32,32]' (height, width), or data.crop"
    return NicestError(f"expected images of one {what}, got {' and '.join(words)}; {advice}")


def _fitted(image: Any, fit: Fit, file: Path) -> Any:
    from PIL import Image

    if fit.resize and image.mode not in ("L", "RGB"):
        raise NicestError(
            f"{file}: expected a grey or RGB image of 8 bits to resize, got mode {image.mode}; convert it to L or RGB"
        )
    if fit.crop:
        height, width = fit.crop
        left, top = (image.width - width) // 2, (image.height - height) // 2
        if min(left, top) < 0:
            raise NicestError(
                f"{file}: expected an image of at least {width}x{height}, for data.crop,"
                f" got {image.width}x{image.height}"
            )
        image = image.crop((left, top, left + width, top + height))
    return image.resize(fit.resize[::-1], Image.Resampling.LANCZOS) if fit.resize else image


def _read_image(file: Path, fit: Fit) -> np.ndarray:
    """Read one image in its own mode, upright; one with a palette is RGB, or grey where it holds nothing else."""
    from PIL import Image

    with reading(file, "an image", "remove it or save it again"), Image.open(file, formats=IMAGE_FORMATS) as image:
        mode = image.mode
        bands = 3 if mode == "P" else len(image.getbands())
        require_modest(file, image.width * image.height * bands, "remove it, or save it smaller")
        if getattr(image, "is_animated", False) and image.format != "MPO":  # a photo, and what cameras add to it
            raise NicestError(
                f"{file}: expected one picture, got an animation or several pages; save one of them, or remove it"
            )
        turn_upright(image)
        values = np.asarray(_fitted(image.convert("RGB") if mode == "P" else image, fit, file))
    if mode not in ("1", "L", "I;16", "I;16B", "P", "RGB"):
        raise NicestError(f"{file}: expected a grey or RGB image, got mode {mode}; convert it to L or RGB")
    if mode == "P" and (values == values[..., :1]).all():
        return values[..., 0]
    return values


def turn_upright(image: Any) -> None:
    """Turn and flip an image as its EXIF orientation says; one that cannot be read is none."""
    from PIL import ImageOps

    image.load()
    with suppress(Exception):  # broken EXIF leads Pillow to errors of every kind
        ImageOps.exif_transpose(image, in_place=True)
