"""Small files in the published layouts, and data sets that consist of them."""

import gzip
import hashlib
import io
import struct
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from nicest.data.download import SETS, DataSet, File

IDX_CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}
CIFAR10_BATCHES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]


def idx_bytes(array: np.ndarray) -> bytes:
    code = IDX_CODES[array.dtype.str[1:]]
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_idx(path: Path, array: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = idx_bytes(array)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_mnist(folder: Path, n_train: int = 12, n_test: int = 4, suffix: str = ".gz") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    train, test = (rng.integers(0, 256, (n, 28, 28), np.uint8) for n in (n_train, n_test))
    write_idx(folder / f"train-images-idx3-ubyte{suffix}", train)
    write_idx(folder / f"t10k-images-idx3-ubyte{suffix}", test)
    write_idx(folder / f"train-labels-idx1-ubyte{suffix}", np.zeros(n_train, np.uint8))
    write_idx(folder / f"t10k-labels-idx1-ubyte{suffix}", np.zeros(n_test, np.uint8))
    return train, test


def cifar10_rows(n: int = 3) -> dict[str, np.ndarray]:
    """Rows of each batch, label first; every batch differs."""
    rng = np.random.default_rng(2)
    rows = {name: rng.integers(0, 256, (n, 3073), np.uint8) for name in CIFAR10_BATCHES}
    for batch in rows.values():
        batch[:, 0] %= 10
    return rows


def write_cifar10(folder: Path, rows: dict[str, np.ndarray]) -> None:
    (folder / "cifar-10-batches-bin").mkdir(parents=True)
    for name, batch in rows.items():
        (folder / "cifar-10-batches-bin" / name).write_bytes(batch.tobytes())


def write_cifar10_tar(path: Path, rows: dict[str, np.ndarray]) -> Path:
    """The archive as published: the batches, and two files more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    contents = {name: batch.tobytes() for name, batch in rows.items()}
    contents |= {"readme.html": b"<html>", "../outside.txt": b"no"}
    with tarfile.open(path, "w:gz") as tar:
        for name, data in contents.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_svhn(folder: Path, n_train: int = 20, n_test: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """X (32, 32, 3, N): height, width, colour, image."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    train, test = (rng.integers(0, 256, (32, 32, 3, n), np.uint8) for n in (n_train, n_test))
    savemat(folder / "train_32x32.mat", {"X": train, "y": np.ones((n_train, 1))}, do_compression=True)
    savemat(folder / "test_32x32.mat", {"X": test, "y": np.ones((n_test, 1))}, do_compression=True)
    return train, test


def write_tfd(folder: Path, n: int = 12) -> tuple[np.ndarray, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    faces = np.random.default_rng(4).integers(0, 256, (n, 48, 48), np.uint8)
    folds = np.stack([np.arange(n) % 4, *np.zeros((4, n))], axis=1).astype(np.int8)
    savemat(folder / "TFD_48x48.mat", {"images": faces, "folds": folds, "labs_ex": np.zeros((n, 1))})
    return faces, folds


def write_fer2013(folder: Path, n: int = 9, suffix: str = ".csv") -> tuple[np.ndarray, np.ndarray]:
    """As published, all training images come first; here the usages take turns."""
    folder.mkdir(parents=True, exist_ok=True)
    faces = np.random.default_rng(5).integers(0, 256, (n, 48, 48), np.uint8)
    usage = np.resize(np.array(["Training", "PublicTest", "PrivateTest"]), n)
    if suffix == ".npz":
        np.savez(folder / "fer2013.npz", images=faces, usage=usage, emotion=np.zeros(n, np.uint8))
        return faces, usage
    rows = [f"0,{' '.join(map(str, face.ravel()))},{use}" for face, use in zip(faces, usage, strict=True)]
    (folder / "fer2013.csv").write_text("\n".join(["emotion,pixels,Usage", *rows, ""]))
    return faces, usage


def publish(monkeypatch: pytest.MonkeyPatch, mirror: Path, name: str, *addresses: str) -> DataSet:
    """Replace the checksums of a data set by those of the files in a folder, and their addresses by these."""

    def file(old: File) -> File:
        path = mirror / old.path
        return replace(old, md5=hashlib.md5(path.read_bytes()).hexdigest() if path.is_file() else old.md5)

    old = SETS[name]
    archive, mirrors = file(old.archive) if old.archive else None, tuple(f"{address}/" for address in addresses)
    new = replace(old, files=tuple(map(file, old.files)), archive=archive, mirrors=mirrors)
    monkeypatch.setitem(SETS, name, new)
    return SETS[name]


def cut(path: Path, drop: int = 7) -> Path:
    """Cut the last bytes off a file."""
    path.write_bytes(path.read_bytes()[:-drop])
    return path
