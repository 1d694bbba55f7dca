"""Data sets as train, validation and test rows: the published ones by name, own data by path."""

import functools
import hashlib
import importlib.util
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nicest.data import copula, download, images
from nicest.data.arrays import Rows, as_rows, read_npy, read_npz, require_density
from nicest.data.columns import Column, Support, leave_out, support
from nicest.data.scan import read_table
from nicest.data.tables import SUFFIXES, TableFile, is_table
from nicest.errors import NicestError
from nicest.messages import listed, shown
from nicest.remote import Remote, looked_from, place

PARTS = ("train", "valid", "test")
IN_MEMORY = "rows in memory"  # name of data that comes from no file
FEW = 30  # complete rows to validate on, below which incomplete ones validate, too
WIDEST = 200  # columns of a table whose incomplete rows are trained on
IDX_IMAGES = re.compile(r"(idx[23](-\w+)?|\.idx)(\.gz)?$")


@dataclass(frozen=True)
class Splits:
    """Train, validation and test rows of one data set, each (N, D), uint8/uint16 levels or float32.

    `shape` is that of one row: (H, W) grey, (C, H, W) colour, channel-planar, (D,) plain rows. `levels` is the number
    of grey levels, None where the data is continuous. A table has its `columns`, and of each the `steps` in which
    its numbers are whole: 1, or 0 of a continuous one. `train`, `valid` and `test` are complete rows; a table may
    have `incomplete` ones beside them, with NaN where a value is missing, those with the fewest NaN first. The first
    `n_incomplete_valid` of these validate, where there are too few complete rows for that; the others train.

    With `targets`, columns that a model predicts from the others, rows are complete that have these: in the other
    columns, which are given, NaN are cells like any other.

    With `classes`, how many training images have each label, a row ends with its label, after an image of `shape`.
    """

    name: str
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    shape: tuple[int, ...]
    levels: int | None
    steps: tuple[float, ...] = ()
    columns: tuple[Column, ...] = ()
    incomplete: np.ndarray | None = None
    n_incomplete_valid: int = 0
    targets: tuple[int, ...] = ()
    classes: tuple[int, ...] = ()

    @property
    def dim(self) -> int:
        return int(self.train.shape[1])

    def digest(self) -> str:
        """A fingerprint of all rows and of the part each is in."""
        fingerprint = hashlib.blake2b(digest_size=8)
        parts = {part: self.split(part) for part in PARTS}
        if self.incomplete is not None:
            parts["holed"] = self.incomplete  # the word is in the fingerprints of stored runs
        for part, rows in parts.items():
            fingerprint.update(f"{part} {rows.shape} {rows.dtype}".encode())
            fingerprint.update(np.ascontiguousarray(rows).data)
        return fingerprint.hexdigest()

    @functools.cached_property
    def filled(self) -> np.ndarray:
        """The incomplete rows with initial values, drawn given the complete rows that train; none without them."""
        if self.incomplete is None:
            return self.train[:0]
        return copula.fill(self.train, self.incomplete, np.array(self.steps or [0.0] * self.dim) > 0)

    @property
    def support(self) -> Support | None:
        """Which values the columns have that are modelled, of a table; those that are given count as numbers."""
        return support(self.columns, self.targets) if self.columns else None

    @property
    def categories(self) -> tuple[int, ...]:
        """For each column that is given, how many categories it has, 0 if it holds numbers; 0 for all others."""
        given = set(range(self.dim)) - set(self.targets) if self.targets else set()
        return tuple(len(column.values) if i in given else 0 for i, column in enumerate(self.columns))

    @property
    def training(self) -> np.ndarray:
        """All rows that train: the complete ones, then the incomplete ones with initial values.

        With incomplete rows, this is a new array each time: training changes the values that are missing.
        """
        if self.incomplete is None:
            return self.train
        return np.concatenate([self.train, self.filled[self.n_incomplete_valid :]])

    @property
    def validating(self) -> np.ndarray:
        """All rows that decide when to stop: the complete ones, and some incomplete ones if those are few."""
        if self.valid is self.train:
            return self.train if len(self.train) >= FEW else self.training
        if not self.n_incomplete_valid:
            return self.valid
        return np.concatenate([self.valid, self.filled[: self.n_incomplete_valid]])

    @property
    def n_training(self) -> int:
        return len(self.train) + len(self.missing)

    @property
    def n_fitted(self) -> int:
        """How many rows train or validate."""
        return self.n_training + (0 if self.valid is self.train else len(self.validating))

    @property
    def missing(self) -> np.ndarray:
        """Which values are missing in the incomplete rows that train, which are the last of `training`."""
        rows = np.empty((0, self.dim)) if self.incomplete is None else self.incomplete[self.n_incomplete_valid :]
        return np.isnan(rows)

    @property
    def fewest_observed(self) -> int:
        """How many values are observed in the column of the training rows that has the fewest."""
        return self.n_training - int(self.missing.sum(0).max())

    def of_label(self, label: int) -> "Splits":
        """The images of one label alone, without it."""
        rows = {part: self.split(part)[self.split(part)[:, -1] == label, :-1] for part in PARTS}
        if empty := [part for part in PARTS if not len(rows[part])]:
            raise NicestError(f"{self.name}: expected images of label {label} in every split, got none in {empty[0]}")
        return replace(self, **rows, classes=())  # type: ignore[arg-type]

    def split(self, name: str) -> np.ndarray:
        if name not in PARTS:
            raise NicestError(f"expected a split of {', '.join(PARTS)}, got '{name}'")
        rows: np.ndarray = getattr(self, name)
        return rows


def load(
    name_or_path: str,
    *,
    seed: int = 0,
    valid: float = 0.1,
    test: float = 0.1,
    drop: Sequence[str] = (),
    bounds: Sequence[str] = (),
    target: Sequence[str] = (),
    labels: bool = False,
    fit: images.Fit = images.Fit(),  # noqa: B008
) -> Splits:
    """Load a data set by name (digits, mnist, cifar10, svhn, tfd, fer2013) or own data by path; a name comes first.

    A path is a table (.csv, .parquet, .arrow, .feather), without the columns in `drop`, with `bounds` of others, and
    maybe with `target` columns, which are to be predicted; a .npy, .npz or idx file; or a folder of idx files or of
    images, which `fit` crops and resizes. Digits and own data are split by a permutation from `seed`, with the
    fractions `valid` and `test`. The other sets, folders in MNIST's layout and archives with the keys train, valid and
    test have a split of their own and ignore all three; an archive without valid has that carved from its train.
    Nothing is downloaded. With `labels`, which digits, MNIST and folders in its layout have, every row ends with its
    label.
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
                return _load_table(path, seed, valid, test, drop, bounds, target)
            if isinstance(path, Remote) and path.suffix not in (".npy", ".npz"):
                raise NicestError(
                    f"{path}: expected a table or an array at an address; copy images to this machine first"
                )
            if target:
                raise NicestError(f"{path}: a target is a column of a table, but this is not a table")
            return _load_path(path, seed, valid, test, fit, labels=labels)
    except OSError as error:
        raise NicestError(f"{name_or_path}: cannot be read ({error.strerror or error})") from error
    raise download.unknown(name_or_path)


def by_seed(
    name: str, rows: Rows, seed: int, valid: float, test: float, incomplete: np.ndarray | None = None
) -> Splits:
    """Split rows by a permutation from a seed, with at least one row in each part.

    With incomplete rows, the fractions are of all rows, but take no more than a quarter of the complete ones.
    """
    n, wanted = len(rows.values), valid
    if incomplete is not None:
        wanted = valid * (n + len(incomplete)) / n
        valid, test = (max(each, min(each * (n + len(incomplete)) / n, 0.25)) for each in (valid, test))
    n_valid, n_test = max(1, round(n * valid)), max(1, round(n * test))
    if n_valid + n_test >= n:
        raise NicestError(
            f"{name}: expected at least 3 rows, and 1 left to train on, got {n}: validation takes {n_valid} "
            f"and test {n_test}; give more rows or smaller fractions"
        )
    order = np.random.default_rng(seed).permutation(n)
    parts = [_take(rows, each) for each in np.split(order, [n_test, n_test + n_valid])]
    splits = _assemble(name, parts[2], parts[1], parts[0], incomplete)
    return splits if incomplete is None else with_incomplete(splits, incomplete, seed, round(n * wanted))


def in_memory(
    name: str,
    rows: np.ndarray,
    seed: int,
    valid: float,
    columns: Sequence[Column] = (),
    copies: np.ndarray | None = None,
    targets: Sequence[int] = (),
) -> Splits:
    """Rows (N, D) of numbers, without a test part; with `valid` = 0 the training rows validate, too.

    `copies` says how often to take each row: all of them go to the same part. `targets` are in all rows.
    """
    missing = np.isnan(rows).any(1) & (not targets)
    complete, incomplete = np.flatnonzero(~missing), np.flatnonzero(missing)
    wanted = max(1, round(len(rows) * valid)) if valid else 0
    n_valid = min(wanted, len(complete) // 4 if len(incomplete) else len(complete) - 1)
    order = complete[np.random.default_rng(seed).permutation(len(complete))]

    def taken(which: np.ndarray) -> np.ndarray:
        return rows[which if copies is None else np.repeat(which, copies[which])]

    train, steps = taken(order[n_valid:]), tuple(float(column.discrete) for column in columns)
    held_out = taken(order[:n_valid]) if wanted else train
    splits = Splits(name, train, held_out, rows[:0], rows.shape[1:], None, steps, tuple(columns))
    splits = replace(splits, targets=tuple(targets))
    if len(incomplete):
        splits = with_incomplete(splits, taken(incomplete), seed, wanted)
    return splits if len(splits.valid) or splits.n_incomplete_valid else replace(splits, valid=train)


def given(
    train: np.ndarray, valid: np.ndarray | None, levels: int, steps: Sequence[float], *, context: int = 0
) -> Splits:
    """Rows (N, ...) that are split already, checked; without validation rows the training rows validate, too.

    They hold grey levels 0..levels-1, or, without levels, numbers that are multiples of their `steps`, where that is
    not 0. Training rows may have NaN where a value is missing. The last `context` columns are not modelled.
    """
    shape = train.shape[1:]
    if valid is not None and valid.shape[1:] != shape:
        raise NicestError(f"expected validation rows of the training rows' shape {shape}, got {valid.shape[1:]}")
    if not train.size or (valid is not None and not valid.size):
        raise NicestError("expected at least 1 row to train and to validate on, got none")
    parts = [np.ascontiguousarray(each.reshape(len(each), -1)) for each in (train, valid) if each is not None]
    parts = [each if levels and each.dtype.kind in "ui" else each.astype(np.float32) for each in parts]
    if len(steps) != parts[0].shape[1]:
        raise NicestError(f"expected rows of {len(steps)} numbers, as the flow has dimensions, got {parts[0].shape[1]}")
    for name, each in zip(("training", "validation"), parts, strict=False):
        _require_stored(each, name, levels, steps)
    missing = np.isnan(parts[0][:, : len(steps) - context]).any(1)
    kept = parts[0][~missing] if missing.any() else parts[0]
    modelled = slice(len(steps) - context)
    require_density(Rows(parts[0][:, modelled], shape, levels or None, tuple(steps[modelled])), IN_MEMORY)
    tail = (shape, levels or None, () if levels else tuple(steps))
    splits = Splits(IN_MEMORY, kept, kept if valid is None else parts[1], parts[0][:0], *tail)
    return with_incomplete(splits, parts[0][missing], 0, 0) if missing.any() else splits


def _require_stored(rows: np.ndarray, name: str, levels: int, steps: Sequence[float]) -> None:
    """Refuse rows that hold what the units of a flow are not of."""
    if name == "training" and (empty := np.flatnonzero(np.isnan(rows).all(0))).size:
        raise NicestError(f"expected numbers in every column of the {name} rows, got only NaN in column {empty[0]}")
    if np.isinf(rows).any() or (name == "validation" and np.isnan(rows).any()):
        raise NicestError(f"expected finite numbers in the {name} rows, got inf or NaN")
    pixels = rows[:, np.array(steps) > 0] if levels else rows
    if levels and not ((pixels >= 0) & (pixels < levels) & (pixels == np.floor(pixels)) | np.isnan(pixels)).all():
        got = f"{np.nanmin(pixels):g} to {np.nanmax(pixels):g}"
        raise NicestError(f"expected whole levels 0 to {levels - 1} in the {name} rows, got numbers from {got}")
    if not levels and any(steps):
        count = rows / np.array([step or 1.0 for step in steps])
        off = (np.abs(count - np.round(count)) > 1e-3) & (np.array(steps) > 0)
        if off.any():
            column = int(off.any(0).argmax())
            raise NicestError(f"expected multiples of {steps[column]:g} in column {column} of the {name} rows")


def _take(rows: Rows, index: np.ndarray | slice) -> Rows:
    return rows._replace(values=rows.values[index])


def _assemble(name: str, train: Rows, valid: Rows, test: Rows, incomplete: np.ndarray | None = None) -> Splits:
    """Put three parts of one kind together; incomplete rows may train with the first."""
    for part, rows in zip(PARTS, (train, valid, test), strict=True):
        if len(rows.values) == 0:
            raise NicestError(f"{name}: expected at least 1 row in each split, got none in {part}: too few images")
        if rows[1:] != train[1:]:
            raise NicestError(
                f"{name}: expected splits of one kind, got train of shape {train.shape} and levels {train.levels}, "
                f"{part} of shape {rows.shape} and levels {rows.levels}"
            )
    training = train if incomplete is None else train._replace(values=np.concatenate([train.values, incomplete]))
    require_density(training, name)
    parts = (train.values, valid.values, test.values)
    return Splits(name, *parts, train.shape, train.levels, train.steps, targets=train.targets)


def _mnist(*, labels: bool = False) -> Splits:
    """MNIST, 50,000 / 10,000 / 10,000."""
    paths = download.locate("mnist", ["train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte.gz"])
    names = ["train-labels-idx1-ubyte.gz", "t10k-labels-idx1-ubyte.gz"] if labels else []
    splits = _mnist_layout("mnist", paths, download.locate("mnist", names))
    if splits.shape != (28, 28):
        raise NicestError(f"{paths[0]}: expected images of 28 x 28, got {splits.shape}: not MNIST")
    return splits


def _mnist_layout(name: str, files: Sequence[Path], labels: Sequence[Path] = ()) -> Splits:
    """A training file whose last sixth validates, and a test file; maybe files of their labels."""
    train, test = (_read_idx([file]) for file in files)
    if not labels:
        return _last_validates(name, train, test, 6)
    train, test = (_labelled(r, images.read_idx(f), str(f)) for r, f in zip((train, test), labels, strict=True))
    return _counted(_last_validates(name, train, test, 6))


def _mnist_files(folder: Path, what: str) -> list[Path | None]:
    """The files of a folder in MNIST's layout, of training and test, that hold images or labels."""
    found = (sorted(filter(Path.is_file, folder.glob(f"{part}-{what}*"))) for part in ("train", "t10k"))
    return [files[0] if files else None for files in found]


def _labelled(rows: Rows, labels: np.ndarray, source: str) -> Rows:
    """Images with their labels as the last column."""
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
    """The splits with the number of training images of each label."""
    most = max(int(splits.split(part)[:, -1].max()) for part in PARTS)
    counts = np.bincount(splits.train[:, -1], minlength=most + 1)
    if (none := np.flatnonzero(counts == 0)).size:
        raise NicestError(f"{splits.name}: expected training images of every label 0 to {most}, got none of {none[0]}")
    return replace(splits, classes=tuple(counts.tolist()))


def _last_validates(name: str, train: Rows, test: Rows, parts: int) -> Splits:
    """The last of so many parts of the training rows validates, and is not trained on."""
    start = len(train.values) - len(train.values) // parts
    return _assemble(name, _take(train, slice(start)), _take(train, slice(start, None)), test)


def _cifar10() -> Splits:
    """CIFAR-10, 40,000 / 10,000 / 10,000: the fifth batch validates."""
    batches = [f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)]
    paths = download.locate("cifar10", [*batches, "cifar-10-batches-bin/test_batch.bin"])
    *first, fifth, last = [images.read_cifar10(path) for path in paths]
    train, valid, test = (as_rows(array, "cifar10") for array in (np.concatenate(first), fifth, last))
    return _assemble("cifar10", train, valid, test)


def _svhn() -> Splits:
    """SVHN cropped, 65,932 / 7,325 / 26,032: the last tenth of the training file validates."""
    paths = download.locate("svhn", ["train_32x32.mat", "test_32x32.mat"])
    train, test = (as_rows(images.read_svhn(path), str(path)) for path in paths)
    return _last_validates("svhn", train, test, 10)


def _tfd() -> Splits:
    """The Toronto Face Dataset by its first fold: the unlabeled images train, as in the paper."""
    (path,) = download.locate("tfd", ["TFD_48x48.mat"])
    faces, folds = images.read_tfd(path)
    rows, fold = as_rows(faces, str(path)), folds[:, 0]
    return _assemble("tfd", _take(rows, fold == 0), _take(rows, fold == 2), _take(rows, fold == 3))


def _fer2013() -> Splits:
    """FER2013, 28,709 / 3,589 / 3,589: the challenge's training images, its public and its private test.

    As published, 280 of the validation images and 288 of the test images are exact copies of training images.
    """
    (path,) = download.locate("fer2013", ["fer2013.csv"])
    faces, usage = images.read_fer2013(path)
    rows = as_rows(faces, str(path))
    train, valid, test = (_take(rows, usage == part) for part in images.FER2013_USAGES)
    return _assemble("fer2013", train, valid, test)


PUBLISHED: dict[str, Callable[[], Splits]] = {
    "cifar10": _cifar10,
    "svhn": _svhn,
    "tfd": _tfd,
    "fer2013": _fer2013,
}


def _load_path(path: Path, seed: int, valid: float, test: float, fit: images.Fit, *, labels: bool = False) -> Splits:
    """Own data: in the split it comes with, or split by the seed."""
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
        parts |= {"train": _take(train, rest), "valid": _take(train, chosen)}
    return _assemble(name, parts["train"], parts["valid"], parts["test"])


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """The images and classes in scikit-learn's file of digits; to import scikit-learn would take a second."""
    (folder,) = importlib.util.find_spec("sklearn").submodule_search_locations  # type: ignore[union-attr, misc]
    rows = np.loadtxt(Path(folder) / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return rows[:, :-1].astype(np.uint8).reshape(-1, 8, 8), rows[:, -1].astype(int)


def _load_table(
    path: Path,
    seed: int,
    valid: float,
    test: float,
    drop: Sequence[str],
    bounds: Sequence[str] = (),
    target: Sequence[str] = (),
) -> Splits:
    """The rows of a table; incomplete ones train, never test, and validate only if there are few complete ones."""
    targets = find_targets([name for name in TableFile(path).names if name not in drop], target, path)
    values, incomplete, columns = read_table(path, drop, bounds, target)
    if len(columns) < 2:
        commas = "; cells are separated by commas" if path.suffix.lower() == ".csv" else ""
        raise NicestError(
            f"{path}: expected at least 2 columns, got {len(columns)}: a coupling needs two parts{commas}"
        )
    if targets:
        values, incomplete = with_targets(np.concatenate([values, incomplete]), targets), incomplete[:0]
        for i in targets:
            if len(values) and (values[:, i] == values[0, i]).all():
                raise NicestError(f"{path}: column {shown(columns[i].name)} is constant: there is nothing to predict")
            codes, counts = np.unique(values[:, i], return_counts=True)
            if columns[i].values and (single := codes[counts == 1]).size:
                alone = listed([str(columns[i].values[int(code)]) for code in single])
                where = f"{path}: column {shown(columns[i].name)}"
                warnings.warn(f"{where} has one row each with {alone}: too few to learn from", stacklevel=2)
    if len(values) < 3 and len(incomplete):
        worst = columns[int(np.isnan(incomplete).sum(0).argmax())].name
        raise NicestError(
            f"{path}: expected at least 3 complete rows, to train, validate and test on, got"
            f" {len(values)} of {len(values) + len(incomplete)}; most are missing in column {shown(worst)}:"
            f" {leave_out(worst)}"
        )
    beside = incomplete if len(incomplete) and len(columns) <= WIDEST else None
    if len(incomplete) and beside is None:
        share = f"{len(incomplete)} of {len(values) + len(incomplete)}"
        warnings.warn(
            f"{path}: {share} rows have missing values and are left out, as in all tables with more than {WIDEST}"
            " columns",
            stacklevel=2,
        )
    steps, names = zip(*((float(column.discrete), column.name) for column in columns), strict=True)
    rows = Rows(values, (len(columns),), None, steps, names, targets)
    splits = by_seed(path.resolve().stem, rows, seed, valid, test, beside)
    return replace(splits, columns=columns)


def find_targets(names: Sequence[str], target: Sequence[str], source: Path | str) -> tuple[int, ...]:
    """The places of the columns that are to be predicted, sorted."""
    if absent := [name for name in target if name not in names]:
        raise NicestError(f"{source}: found no column {listed(absent)} to predict; it has {listed(names)}")
    if len(set(target)) < len(target):
        raise NicestError(f"{source}: expected every target once, got {listed(sorted(target))}")
    if target and len(target) == len(names):
        raise NicestError(f"{source}: expected a column beside {listed(target)} to predict from, got none")
    return tuple(sorted(names.index(name) for name in target))


def with_targets(rows: np.ndarray, targets: Sequence[int]) -> np.ndarray:
    """The rows that have all targets. NaN has many bit patterns: the digest sees one."""
    kept = rows[~np.isnan(rows[:, list(targets)]).any(1)]
    return np.where(np.isnan(kept), kept.dtype.type(np.nan), kept)


def with_incomplete(splits: Splits, rows: np.ndarray, seed: int, valid: int) -> Splits:
    """The splits with incomplete rows added; of all rows, complete or not, `valid` are to validate."""
    rows = rows[np.random.default_rng(seed).permutation(len(rows))]
    rows = rows[np.argsort(np.isnan(rows).sum(1), kind="stable")]
    rows = np.where(np.isnan(rows), np.float32(np.nan), rows)  # NaN has many bit patterns: the digest sees one
    n_valid = min(max(0, min(valid, FEW) - len(splits.valid)), len(rows) // 2)
    return replace(splits, incomplete=rows, n_incomplete_valid=n_valid)


def read_rows(path: Path, fit: images.Fit = images.Fit()) -> Rows:  # noqa: B008
    """All rows of a .npy file, an idx file, or a folder of idx files or of images."""
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
    if path.suffix.lower() in (".xlsx", ".xls", ".ods"):
        raise NicestError(f"{path}: spreadsheets are not read; save the sheet as CSV in UTF-8, and train on that")
    kinds = ", ".join(SUFFIXES)
    raise NicestError(f"{path}: expected {kinds}, .npy, .npz, an idx file, or a folder of idx files or of images")


def folder_images(folder: Path) -> list[Path]:
    """The files whose images are the rows of a folder, in their order; none where it is of idx files."""
    return [] if _idx_files(folder) else images.image_files(folder)


def _idx_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*") if file.is_file() and IDX_IMAGES.search(file.name))


def _read_idx(files: list[Path]) -> Rows:
    """The rows of idx files, one after the other: unsigned bytes are levels, every other type is continuous."""
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
