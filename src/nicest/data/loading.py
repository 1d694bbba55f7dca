"""Data sets by name and own data by path: how their rows are read, and which of them train, validate and test."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from nicest.data import download, images
from nicest.data.arrays import Rows, as_rows, read_npy, read_npz
from nicest.data.splits import PARTS, Splits, assemble, by_seed, permuted, take
from nicest.data.tables import SUFFIXES, is_table
from nicest.errors import NicestError
from nicest.remote import Remote, looked_from, place

IDX_IMAGES = re.compile(r"(idx[23](-\w+)?|\.idx)(\.gz)?$")


def load(
    name_or_path: str,
    *,
    seed: int = 0,
    valid: float = 0.1,
    test: float = 0.1,
    drop: Sequence[str] = (),
    bounds: Sequence[str] = (),
    labels: bool = False,
    fit: images.Fit = images.Fit(),  # noqa: B008
) -> Splits:
    """Load a data set by name (digits, mnist, cifar10, svhn, tfd, fer2013) or own data by path; a name comes first.

    Nothing is downloaded. The published sets, folders in MNIST's layout and archives with the keys train, valid and
    test have a split of their own; an archive without valid has that taken from its train.

    Parameters
    ----------
    name_or_path : str
        A name; or the path of a table (.csv, .parquet, .arrow, .feather), of a .npy, .npz or idx file, or of a folder
        of idx files or images.
    seed, valid, test : int, float, float
        Seed of the split of data that has none of its own, and its fractions.
    drop, bounds : sequence of str
        Columns of a table to leave out, and bounds of others.
    labels : bool
        Whether every row ends with its label: for digits, MNIST and folders in its layout.
    fit : Fit
        How to crop and resize the images of a folder.
    """
    if seed < 0:
        raise NicestError(f"expected a seed of 0 or more, got {seed}")
    if not (valid > 0 and test > 0 and valid + test < 1):
        raise NicestError(f"expected fractions above 0 whose sum is below 1, got valid {valid} and test {test}")
    try:
        if name_or_path == "digits":
            images, classes = _digits()
            digits = as_rows(images, "digits")._replace(levels=17)
            if not labels:
                return by_seed("digits", digits, seed, valid, test)
            return _counted(by_seed("digits", _labelled(digits, classes, "digits"), seed, valid, test))
        path = place(name_or_path).expanduser()
        in_layout = name_or_path == "mnist" or (path.is_dir() and all(_mnist_files(path, "images")))
        if labels and not in_layout and (name_or_path in PUBLISHED or path.exists()):
            raise NicestError(
                f"{name_or_path}: expected data with labels, which are digits, mnist and folders in MNIST's layout:"
                " set data.labels=false"
            )
        if name_or_path == "mnist":
            return _mnist(labels=labels)
        if name_or_path in PUBLISHED:
            return PUBLISHED[name_or_path]()
        if path.exists() or path.suffix or "/" in name_or_path:
            if is_table(path):
                return _load_table(path, seed, valid, test, drop, bounds)
            if isinstance(path, Remote) and path.suffix not in (".npy", ".npz"):
                raise NicestError(
                    f"{path}: expected a table or an array at an address; copy images to this machine first"
                )
            return _load_path(path, seed, valid, test, fit, labels=labels)
    except OSError as error:
        raise NicestError(f"{name_or_path}: cannot be read ({error.strerror or error})") from error
    raise download.unknown(name_or_path)


def _mnist(*, labels: bool = False) -> Splits:
    """Load MNIST, 50,000 / 10,000 / 10,000."""
    paths = download.locate("mnist", ["train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte.gz"])
    names = ["train-labels-idx1-ubyte.gz", "t10k-labels-idx1-ubyte.gz"] if labels else []
    splits = _mnist_layout("mnist", paths, download.locate("mnist", names))
    if splits.shape != (28, 28):
        raise NicestError(f"{paths[0]}: expected images of 28 x 28, got {splits.shape}: not MNIST")
    return splits


def _mnist_layout(name: str, files: Sequence[Path], labels: Sequence[Path] = ()) -> Splits:
    """Load a training file, whose last sixth validates, and a test file, perhaps with files of their labels."""
    train, test = (_read_idx([file]) for file in files)
    if not labels:
        return _last_validates(name, train, test, 6)
    train, test = (_labelled(r, images.read_idx(f), str(f)) for r, f in zip((train, test), labels, strict=True))
    return _counted(_last_validates(name, train, test, 6))


def _mnist_files(folder: Path, what: str) -> list[Path | None]:
    """Return the training and the test file of a folder in MNIST's layout, of images or labels."""
    found = (sorted(filter(Path.is_file, folder.glob(f"{part}-{what}*"))) for part in ("train", "t10k"))
    return [files[0] if files else None for files in found]


def _labelled(rows: Rows, labels: np.ndarray, source: str) -> Rows:
    """Append the labels of images as the last column."""
    if not rows.levels:
        raise NicestError(f"{source}: expected labels of images with grey levels, got those of continuous numbers")
    if (
        labels.shape != (len(rows.values),)
        or labels.dtype.kind not in "iu"
        or not 0 <= labels.min() <= labels.max() < 256
    ):
        got = f"{labels.dtype} of shape {labels.shape}, {labels.min()} to {labels.max()}"
        raise NicestError(f"{source}: expected {len(rows.values)} labels, integers from 0 to 255; got {got}")
    return rows._replace(values=np.column_stack((rows.values, labels.astype(rows.values.dtype))))


def _counted(splits: Splits) -> Splits:
    """Count the training images of each label."""
    most = max(int(splits.split(part)[:, -1].max()) for part in PARTS)
    counts = np.bincount(splits.train[:, -1], minlength=most + 1)
    if (none := np.flatnonzero(counts == 0)).size:
        raise NicestError(f"{splits.name}: expected training images of every label 0 to {most}, got none of {none[0]}")
    return replace(splits, classes=tuple(counts.tolist()))


def _last_validates(name: str, train: Rows, test: Rows, parts: int) -> Splits:
    """Take the last of `parts` parts of the training rows for validation."""
    start = len(train.values) - len(train.values) // parts
    return assemble(name, take(train, slice(start)), take(train, slice(start, None)), test)


def _cifar10() -> Splits:
    """Load CIFAR-10, 40,000 / 10,000 / 10,000: the fifth batch validates."""
    batches = [f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)]
    paths = download.locate("cifar10", [*batches, "cifar-10-batches-bin/test_batch.bin"])
    *first, fifth, last = [images.read_cifar10(path) for path in paths]
    train, valid, test = (as_rows(array, "cifar10") for array in (np.concatenate(first), fifth, last))
    return assemble("cifar10", train, valid, test)


def _svhn() -> Splits:
    """Load SVHN cropped, 65,932 / 7,325 / 26,032: the last tenth of the training file validates."""
    paths = download.locate("svhn", ["train_32x32.mat", "test_32x32.mat"])
    train, test = (as_rows(images.read_svhn(path), str(path)) for path in paths)
    return _last_validates("svhn", train, test, 10)


def _tfd() -> Splits:
    """Load the Toronto Face Dataset by its first fold: the unlabeled images train, as in the paper."""
    (path,) = download.locate("tfd", ["TFD_48x48.mat"])
    faces, folds = images.read_tfd(path)
    rows, fold = as_rows(faces, str(path)), folds[:, 0]
    return assemble("tfd", take(rows, fold == 0), take(rows, fold == 2), take(rows, fold == 3))


def _fer2013() -> Splits:
    """Load FER2013, 28,709 / 3,589 / 3,589: the challenge's training images, its public and its private test.

    As published, 280 of the validation images and 288 of the test images are exact copies of training images.
    """
    (path,) = download.locate("fer2013", ["fer2013.csv"])
    faces, usage = images.read_fer2013(path)
    rows = as_rows(faces, str(path))
    train, valid, test = (take(rows, usage == part) for part in images.FER2013_USAGES)
    return assemble("fer2013", train, valid, test)


PUBLISHED: dict[str, Callable[[], Splits]] = {
    "cifar10": _cifar10,
    "svhn": _svhn,
    "tfd": _tfd,
    "fer2013": _fer2013,
}


def _load_path(path: Path, seed: int, valid: float, test: float, fit: images.Fit, *, labels: bool = False) -> Splits:
    """Load own data, in the split it comes with or split by the seed."""
    if not path.exists():
        raise NicestError(f"expected a file or folder of data, found no {path}{looked_from(path)}")
    name = path.resolve().stem
    if path.is_dir():
        found = [file for file in _mnist_files(path, "images") if file]
        beside = [file for file in _mnist_files(path, "labels") if file] if labels else []
        if labels and len(beside) < 2:
            raise NicestError(
                f"{path}: expected train-labels* and t10k-labels* beside the images, as in MNIST's layout"
            )
        if len(found) == 2:
            return _mnist_layout(name, found, beside)
    if path.suffix != ".npz":
        return by_seed(name, read_rows(path, fit), seed, valid, test)
    parts = {part: as_rows(array, f"{path} [{part}]") for part, array in read_npz(path).items()}
    if "all" in parts:
        return by_seed(name, parts["all"], seed, valid, test)
    train = parts["train"]
    if "valid" not in parts:  # it is carved from the training rows
        order = np.random.default_rng(seed).permutation(len(train.values))
        chosen, rest = np.split(order, [max(1, round(len(order) * valid))])
        parts |= {"train": take(train, rest), "valid": take(train, chosen)}
    return assemble(name, parts["train"], parts["valid"], parts["test"])


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Read the images and classes in scikit-learn's file of digits; importing scikit-learn would take a second."""
    (folder,) = importlib.util.find_spec("sklearn").submodule_search_locations  # type: ignore[union-attr, misc]
    rows = np.loadtxt(Path(folder) / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return rows[:, :-1].astype(np.uint8).reshape(-1, 8, 8), rows[:, -1].astype(int)


def _load_table(path: Path, seed: int, valid: float, test: float, drop: Sequence[str], bounds: Sequence[str]) -> Splits:
    """Read a table, encode its rows and split them."""
    from nicest.data.tables import read_table  # with pyarrow, which images do not need

    schema, rows, notes = read_table(path, drop, bounds)
    rows[np.isnan(rows)] = np.nan  # one bit pattern, for the digest
    parts = permuted(str(path), len(rows), seed, valid, test)
    train, held_out, unseen = (rows[index] for index in parts)
    return Splits(path.resolve().stem, train, held_out, unseen, rows.shape[1:], None, schema, notes=tuple(notes))


def read_rows(path: Path, fit: images.Fit = images.Fit()) -> Rows:  # noqa: B008
    """Read all rows of a .npy file, an idx file, or a folder of idx files or of images."""
    if path.is_dir():
        if idx := _idx_files(path):
            return _read_idx(idx)
        if files := images.image_files(path):
            return as_rows(images.read_images(files, fit), str(path))
        kinds = ", ".join(images.IMAGE_SUFFIXES)
        raise NicestError(
            f"{path}: expected images ({kinds}) or idx files (*-idx3-ubyte, *.gz), found none in the folder"
        )
    if any(fit):
        raise NicestError(f"{path}: data.crop and data.resize are for folders of images")
    if path.suffix == ".npy":
        return as_rows(read_npy(path), str(path))
    if IDX_IMAGES.search(path.name):
        return _read_idx([path])
    if path.suffix.lower() in (".xls", ".ods"):
        raise NicestError(f"{path}: spreadsheets are not read; save the sheet as CSV in UTF-8, and train on that")
    kinds = ", ".join(SUFFIXES)
    raise NicestError(f"{path}: expected {kinds}, .npy, .npz, an idx file, or a folder of idx files or of images")


def folder_images(folder: Path) -> list[Path]:
    """List the image files of a folder in the order of its rows; none if it holds idx files."""
    return [] if _idx_files(folder) else images.image_files(folder)


def _idx_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*") if file.is_file() and IDX_IMAGES.search(file.name))


def _read_idx(files: list[Path]) -> Rows:
    """Concatenate the rows of idx files: unsigned bytes are levels, every other type is continuous."""
    arrays = [images.read_idx(file) for file in files]
    for file, array in zip(files, arrays, strict=True):
        if array.ndim not in (2, 3):
            raise NicestError(f"{file}: expected rows or images (rank 2 or 3), got rank {array.ndim}: labels?")
        if array.shape[1:] != arrays[0].shape[1:] or array.dtype != arrays[0].dtype:
            raise NicestError(
                f"expected idx files of one shape and type, got {files[0]} of {arrays[0].shape[1:]} {arrays[0].dtype} "
                f"and {file} of {array.shape[1:]} {array.dtype}; keep them in separate folders"
            )
    values = np.concatenate(arrays)
    return as_rows(values if values.dtype == np.uint8 else values.astype(np.float32), str(files[0]))
