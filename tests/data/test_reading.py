"""What is no regular file is refused before it is opened: a pipe that nobody writes to would wait for ever."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nicest.data import images, load
from nicest.data.tables import TableFile, read_table

Refusal = Callable[..., str]
READERS: dict[str, Callable[[Path], Any]] = {
    **{
        f"x{suffix}": lambda path: load(str(path))
        for suffix in (".npy", ".npz", ".csv", ".parquet", ".arrow", ".feather")
    },
    **{name: lambda path: load(str(path)) for name in ("x-idx3-ubyte", "x-idx3-ubyte.gz", "x.idx")},
    "x.bin": images.read_cifar10,
    "train_32x32.mat": images.read_svhn,
    "TFD_48x48.mat": images.read_tfd,
    "fer2013.csv": images.read_fer2013,
    "fer2013.npz": images.read_fer2013,
    "x.png": lambda path: images.read_images([path]),
    "t.csv": read_table,
    "t.parquet": TableFile,
}


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """A reader that opened a pipe is woken up, and its test fails."""

    def late(*_: object) -> None:
        pytest.fail("it waits for a pipe")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", READERS)
def test_a_pipe(tmp_path: Path, refusal: Refusal, name: str) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    message = refusal(READERS[name], path)
    assert message == f"{path}: expected a file, got a pipe; save the data as a file first"


@pytest.mark.parametrize("name", READERS)
def test_a_device_without_an_end(tmp_path: Path, refusal: Refusal, name: str) -> None:
    path = tmp_path / name
    path.symlink_to("/dev/zero")
    assert f"{path}: expected a file, got a device or a socket" in refusal(READERS[name], path)


def test_a_socket(tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the names of sockets are short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("x.npy")
        assert "x.npy: expected a file, got a device or a socket" in refusal(load, "x.npy")


def test_a_folder_in_the_place_of_a_file(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "x.npz").mkdir()
    assert "expected a file, got a folder" in refusal(images.read_cifar10, tmp_path / "x.npz")


def test_pipes_in_a_folder_of_images_are_passed_over(tmp_path: Path, refusal: Refusal) -> None:
    for name in ("a.png", "train-images-idx3-ubyte", "t10k-images-idx3-ubyte"):
        os.mkfifo(tmp_path / name)
    assert "found none in the folder" in refusal(load, str(tmp_path))
