"""The published sets by name, splits by seed, and the names and paths that are refused."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from published import (
    cifar10_rows,
    cut,
    write_cifar10,
    write_fer2013,
    write_idx,
    write_mnist,
    write_svhn,
    write_tfd,
)
from sklearn.datasets import load_digits

from nicest.data import Splits, download, load

Refusal = Callable[..., str]
PARTS = ("train", "valid", "test")


def _sizes(splits: Splits) -> list[int]:
    return [len(splits.split(part)) for part in PARTS]


def test_digits() -> None:
    splits = load("digits")
    assert _sizes(splits) == [1437, 180, 180]
    assert (splits.name, splits.shape, splits.dim, splits.levels) == ("digits", (8, 8), 64, 17)
    assert splits.train.dtype == np.uint8
    assert splits.train.max() == 16
    assert _sizes(load("digits", valid=0.2, test=0.3)) == [899, 359, 539]


def test_splits_by_seed_are_disjoint_and_repeatable(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(200, dtype=np.uint16).reshape(100, 2))
    path = str(tmp_path / "x.npy")
    once, again, other = load(path, seed=1), load(path, seed=1), load(path, seed=2)
    assert _sizes(once) == [80, 10, 10]
    for part in PARTS:
        np.testing.assert_array_equal(once.split(part), again.split(part))
        assert not np.array_equal(once.split(part), other.split(part))
    firsts = np.concatenate([once.split(part)[:, 0] for part in PARTS])
    assert sorted(firsts) == list(range(0, 200, 2))


@pytest.mark.parametrize(
    "options", [{"valid": 0.0}, {"test": -0.1}, {"valid": 0.6, "test": 0.4}, {"valid": float("nan")}]
)
def test_bad_fractions(refusal: Refusal, options: dict[str, float]) -> None:
    assert "expected fractions above 0 whose sum is below 1" in refusal(load, "digits", **options)


def test_bad_seed_and_split(refusal: Refusal) -> None:
    assert "expected a seed of 0 or more, got -1" in refusal(load, "digits", seed=-1)
    assert "train, valid, test, got 'dev'" in refusal(load("digits").split, "dev")


@pytest.mark.parametrize("suffix", [".gz", ""])
def test_mnist(home: Path, suffix: str) -> None:
    train, test = write_mnist(home / "mnist", 12, 4, suffix)
    splits = load("mnist", seed=9)
    assert (splits.name, splits.shape, splits.levels, splits.dim) == ("mnist", (28, 28), 256, 784)
    np.testing.assert_array_equal(splits.train, train[:10].reshape(10, 784))
    np.testing.assert_array_equal(splits.valid, train[10:].reshape(2, 784))
    np.testing.assert_array_equal(splits.test, test.reshape(4, 784))


def test_mnist_damaged(home: Path, refusal: Refusal) -> None:
    write_mnist(home / "mnist")
    path = home / "mnist" / "train-images-idx3-ubyte.gz"
    cut(path, 100)
    assert f"{path}: expected a whole gzip file" in refusal(load, "mnist")
    write_mnist(home / "mnist", n_train=5)
    assert "got none in valid" in refusal(load, "mnist")
    write_idx(path, np.zeros((12, 8, 8), np.uint8))
    assert "expected splits of one kind" in refusal(load, "mnist")
    write_idx(home / "mnist" / "t10k-images-idx3-ubyte.gz", np.zeros((12, 8, 8), np.uint8))
    assert "expected images of 28 x 28, got (8, 8)" in refusal(load, "mnist")


def test_cifar10(home: Path) -> None:
    rows = cifar10_rows()
    write_cifar10(home / "cifar10", rows)
    splits = load("cifar10")
    assert (splits.shape, splits.levels, splits.dim, _sizes(splits)) == ((3, 32, 32), 256, 3072, [12, 3, 3])
    first = np.concatenate([rows[f"data_batch_{i}.bin"] for i in range(1, 5)])
    np.testing.assert_array_equal(splits.train, first[:, 1:])
    np.testing.assert_array_equal(splits.valid, rows["data_batch_5.bin"][:, 1:])
    np.testing.assert_array_equal(splits.test, rows["test_batch.bin"][:, 1:])
    assert all(splits.split(part).flags.writeable for part in PARTS)


def test_svhn_validation_is_the_last_tenth_and_not_trained_on(home: Path) -> None:
    train, test = write_svhn(home / "svhn", 20, 5)
    splits = load("svhn")
    planar = train.transpose(3, 2, 0, 1).reshape(20, 3072)
    assert (splits.shape, splits.levels) == ((3, 32, 32), 256)
    np.testing.assert_array_equal(splits.train, planar[:18])
    np.testing.assert_array_equal(splits.valid, planar[18:])
    np.testing.assert_array_equal(splits.test, test.transpose(3, 2, 0, 1).reshape(5, 3072))


def test_tfd_uses_the_unlabeled_images_of_its_first_fold(home: Path) -> None:
    faces, folds = write_tfd(home / "tfd")
    splits = load("tfd")
    assert (splits.shape, splits.dim, splits.levels) == ((48, 48), 2304, 256)
    for part, code in (("train", 0), ("valid", 2), ("test", 3)):
        np.testing.assert_array_equal(splits.split(part), faces[folds[:, 0] == code].reshape(3, 2304))


@pytest.mark.parametrize("suffix", [".csv", ".npz"])
def test_fer2013_is_split_by_its_usage(home: Path, suffix: str) -> None:
    faces, usage = write_fer2013(home / "fer2013", suffix=suffix)
    splits = load("fer2013")
    assert (splits.name, splits.shape, splits.dim, splits.levels) == ("fer2013", (48, 48), 2304, 256)
    for part, use in zip(PARTS, ("Training", "PublicTest", "PrivateTest"), strict=True):
        np.testing.assert_array_equal(splits.split(part), faces[usage == use].reshape(3, 2304))
    assert all(splits.split(part).flags.writeable for part in PARTS)


def test_fer2013_as_published_comes_before_what_stands_in_its_place(home: Path) -> None:
    write_fer2013(home / "fer2013", n=9, suffix=".npz")
    write_fer2013(home / "fer2013", n=6)
    assert _sizes(load("fer2013")) == [2, 2, 2]


@pytest.mark.parametrize(
    ("name", "file", "advice"),
    [
        ("mnist", "train-images-idx3-ubyte.gz", "nicest data get mnist"),
        ("cifar10", "data_batch_1.bin", "nicest data get cifar10"),
        ("svhn", "train_32x32.mat", "nicest data get svhn"),
        ("tfd", "TFD_48x48.mat", "ask the University of Toronto"),
        ("fer2013", "fer2013.csv", "log in to Kaggle"),
    ],
)
def test_absent_sets(home: Path, refusal: Refusal, name: str, file: str, advice: str) -> None:
    message = refusal(load, name)
    for part in (file, str(home / name), advice):
        assert part in message


class TestLabels:
    def test_of_digits_are_those_of_scikit_learn_and_the_split_stays(self) -> None:
        plain, splits, digits = load("digits"), load("digits", labels=True), load_digits()
        label = {image.tobytes(): int(t) for image, t in zip(digits.data.astype(np.uint8), digits.target, strict=True)}
        for part in PARTS:
            rows = splits.split(part)
            np.testing.assert_array_equal(rows[:, :-1], plain.split(part))
            assert rows[:, -1].tolist() == [label[image.tobytes()] for image in plain.split(part)]
        assert splits.classes == tuple(np.bincount(splits.train[:, -1]))
        assert (splits.shape, splits.levels, plain.classes) == ((8, 8), 17, ())
        assert splits.digest() != plain.digest()

    def test_of_the_mnist_layout(self, home: Path) -> None:
        train, test = write_mnist(home / "mnist")
        labels = np.arange(12, dtype=np.uint8) % 3
        write_idx(home / "mnist" / "train-labels-idx1-ubyte.gz", labels)
        for name in ("mnist", str(home / "mnist")):
            splits = load(name, labels=True)
            assert splits.classes == (4, 3, 3)
            np.testing.assert_array_equal(splits.train, np.column_stack((train.reshape(12, -1), labels))[:10])
            np.testing.assert_array_equal(splits.test[:, :-1], test.reshape(4, -1))
            assert splits.test[:, -1].tolist() == [0] * 4

    def test_that_do_not_fit_or_are_not_there_are_refused(self, tmp_path: Path, refusal: Refusal) -> None:
        folder = tmp_path / "layout"
        write_mnist(folder)
        file = folder / "train-labels-idx1-ubyte.gz"
        write_idx(file, np.zeros(11, np.uint8))
        assert "expected 12 labels, integers from 0 to 255; got uint8 of shape (11,)" in refusal(
            load, str(folder), labels=True
        )
        write_idx(file, np.full(12, -1, np.int8))
        assert "got int8 of shape (12,), -1 to -1" in refusal(load, str(folder), labels=True)
        write_idx(file, np.full(12, 2, np.uint8))
        assert "training images of every label 0 to 2, got none of 0" in refusal(load, str(folder), labels=True)
        file.unlink()
        assert "expected train-labels* and t10k-labels*" in refusal(load, str(folder), labels=True)
        np.save(tmp_path / "images.npy", np.zeros((9, 4, 4), np.uint8))
        for name in ("cifar10", str(tmp_path / "images.npy")):
            assert "expected data with labels, which are digits, mnist" in refusal(load, name, labels=True)
        assert "unknown data set 'mnits'" in refusal(load, "mnits", labels=True)


def test_unknown_names_and_missing_paths(tmp_path: Path, refusal: Refusal) -> None:
    message = refusal(load, "mnits")
    assert "unknown data set 'mnits' (did you mean 'mnist'?)" in message
    assert "cifar10, digits, fer2013, mnist, svhn, tfd" in message
    assert "unknown data set 'zzzzzz'; known" in refusal(load, "zzzzzz")
    for missing in (tmp_path / "none.npy", tmp_path / "none", Path("none.npz")):
        assert f"found no {missing}" in refusal(load, str(missing))
    assert "cannot be read (File name too long)" in refusal(load, "x" * 300)
    (tmp_path / "table.txt").write_text("1 2 3")
    (tmp_path / "table.ods").touch()
    assert "save the sheet as CSV" in refusal(load, str(tmp_path / "table.ods"))
    assert ".npy, .npz, an idx file, or a folder" in refusal(load, str(tmp_path / "table.txt"))


def test_a_name_on_disk_is_a_path_but_a_known_name_comes_first(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    monkeypatch.chdir(tmp_path)
    write_mnist(tmp_path / "garments")
    write_mnist(tmp_path / "mnist")
    assert load("garments").shape == (28, 28)
    assert "nicest data get mnist" in refusal(load, "mnist")
    assert load("./mnist").name == "mnist"


def test_importing_data_is_light() -> None:
    heavy = "torch, sklearn, scipy, PIL, pooch, requests, rich"
    code = f"import sys, nicest.data.download; print([m for m in '{heavy}'.split(', ') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def _load_real(name: str) -> Splits:
    listing = next(row for row in download.list_sets() if row.name == name)
    if not listing.present:
        pytest.skip(f"{name} is not in {listing.folder}; {download.find_set(name).how}")
    return load(name)


def test_real_mnist() -> None:
    splits = _load_real("mnist")
    assert _sizes(splits) == [50_000, 10_000, 10_000]
    five = splits.train[0].reshape(28, 28)
    np.testing.assert_array_equal(np.flatnonzero(five.any(axis=1))[[0, -1]], [5, 24])
    np.testing.assert_array_equal(five[5, 12:24], [3, 18, 18, 18, 126, 136, 175, 26, 166, 255, 247, 127])
    assert splits.train.mean() / 255 == pytest.approx(0.1307, abs=3e-4)
