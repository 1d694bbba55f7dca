"""Hostile data files, in short: `make fuzz` has the long version."""

import resource
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fuzz
from nicest.data import images
from nicest.data.arrays import read_npz

Refusal = Callable[..., str]
BOMB = 1 << 19  # bytes: forged files above are bombs, which take a second each


def short(name: str, cases: int, *, bombs: bool = True) -> fuzz.Tally:
    """A run of few cases, the same every time."""
    reader = fuzz.READERS[name]()
    forged = [data for data in reader.forged if bombs or len(data) < BOMB]
    return fuzz.fuzz(replace(reader, forged=forged), len(forged) + len(reader.real) + cases, seed=0)


@pytest.mark.parametrize("name", ["idx", "cifar10", "fer2013 csv", "npy", "npz", "fer2013 npz", "image"])
def test_hostile_files(name: str) -> None:
    tally = short(name, 50, bombs=name == "npz")
    assert tally.said == []
    assert tally.rest == 0
    assert tally.counts["clear"] > 20
    assert tally.counts["right"] >= len(fuzz.READERS[name]().real)


@pytest.mark.parametrize("name", ["csv table", "parquet", "arrow", "feather"])
def test_hostile_tables(name: str) -> None:
    tally = short(name, 80, bombs=name == "parquet")
    assert tally.said == []
    assert tally.rest == 0
    assert tally.counts["clear"] > 20
    assert tally.counts["right"] >= len(fuzz.READERS[name]().real)


def test_hostile_matlab_files() -> None:
    """Few: a child process reads each."""
    tally = short("svhn", 10, bombs=False)
    assert tally.said == []
    assert tally.counts["clear"] > 10
    assert tally.counts["right"] >= 3


@pytest.mark.parametrize("name", ["idx.gz", "image folder"])
def test_more_hostile_files(name: str) -> None:
    assert short(name, 40, bombs=False).said == []


def test_a_gzip_bomb_is_refused_within_its_bounds(tmp_path: Path, refusal: Refusal) -> None:
    path = tmp_path / "x-idx3-ubyte.gz"
    path.write_bytes(fuzz.gzip_bomb(fuzz.header_idx(8, [1 << 11, 1 << 10, 1 << 10]), 128))
    most = (1 << 26) + 200 * path.stat().st_size
    tracemalloc.start()
    try:
        message = refusal(images.read_idx, path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert f"{path}: expected at most {most} bytes from a file of {path.stat().st_size}" in message
    assert "gunzip it" in message
    assert peak < 1.5 * most < 1 << 30


def test_an_archive_that_unpacks_to_gigabytes_is_refused_unread(tmp_path: Path, refusal: Refusal) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(fuzz.zip_bomb("x.npy", fuzz.npy_of("|u1", (1 << 11, 1 << 10, 1 << 10)), 128))
    assert "save it with np.savez, which does not pack" in refusal(read_npz, path)


def test_a_variable_that_unpacks_to_gigabytes_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(fuzz.mat_forged("X")[5])
    assert "MemoryError" in refusal(images.read_svhn, path)


def test_what_packs_well_is_read(tmp_path: Path) -> None:
    """A hundred times is what real data can do."""
    rows = np.zeros((1000, 64, 64), np.uint8)
    rows[::7, ::9] = 1
    np.savez_compressed(tmp_path / "x.npz", x=rows)
    assert rows.nbytes > 100 * (tmp_path / "x.npz").stat().st_size
    np.testing.assert_array_equal(read_npz(tmp_path / "x.npz")["all"], rows)


def test_pictures_are_read_by_the_named_formats_alone(tmp_path: Path, refusal: Refusal) -> None:
    """Pillow would run Ghostscript for this one."""
    Image.new("L", (8, 8)).save(tmp_path / "x.png", "EPS")
    assert "cannot identify image file" in refusal(images.read_images, [tmp_path / "x.png"])


def test_the_limits_are_lifted_again() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with fuzz.limits():
        assert resource.getrlimit(resource.RLIMIT_AS) != before
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_the_harness_sees_what_it_looks_for(tmp_path: Path) -> None:
    """A reader that does all that none may do."""

    def bad(path: Path, data: bytes) -> None:
        match data:
            case b"traceback":
                raise ValueError("no")
            case b"hang":
                while True:
                    pass
            case b"memory":
                np.ones(1 << 27, np.uint8)  # so much that it never comes from what was freed before
            case b"code":
                fuzz.CANARY.touch()
            case b"lines":
                raise fuzz.NicestError("two\nlines")
            case b"wrong":
                fuzz.require(False, "other values")
            case b"clear":
                raise fuzz.NicestError("expected this, got that")

    reader = fuzz.Reader("bad", "x", [], [], fuzz.noise, bad)
    tally = fuzz.Tally()
    with fuzz.limits(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzz, "SECONDS", 0.5)
        patch.setattr(fuzz, "MEMORY", 1 << 24)
        for data in (b"traceback", b"hang", b"memory", b"code", b"lines", b"wrong", b"clear", b"right"):
            tally.feed(reader, tmp_path, data)
        tally.feed(reader, tmp_path, b"clear", sound=True)
    assert dict(tally.counts) == {
        "cases": 9, "traceback": 1, "hang": 1, "memory": 1, "code": 1, "wrong": 3, "clear": 1, "right": 1
    }  # fmt: skip
