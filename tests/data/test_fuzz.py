"""Hostile data files, in short: `make fuzz` has the long version."""

import json
import resource
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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


def test_hostile_compressed_files() -> None:
    pytest.importorskip("constriction", reason="compression needs constriction: install nicest[codec]")
    reader = fuzz.READERS["compressed"]()
    tally = fuzz.fuzz(replace(reader, forged=reader.forged[::7]), 300, seed=0)
    assert tally.said == []
    assert tally.rest == 0
    assert tally.counts["clear"] > 100
    assert tally.counts["right"] > 50


def test_hostile_matlab_files() -> None:
    with fuzz.warm_matlab():
        tally = short("svhn", 50, bombs=False)
    assert tally.said == []
    assert tally.counts["clear"] > 5
    assert tally.counts["right"] >= 3


def test_a_kept_process_reads_matlab_files_like_a_new_one(tmp_path: Path, refusal: Refusal) -> None:
    """The same values and the same words, also after a file that crashes it."""
    reader, names = fuzz.reader_of("svhn"), ("real", "cut", "cells", "crash")
    cases = [reader.real[0], reader.real[0][:300], fuzz.MAT5 + fuzz.cells(b"X", 30_000), fuzz.mat_forged("X")[12]]
    files = [tmp_path / f"{name}.mat" for name in names]
    for file, data in zip(files, cases, strict=True):
        file.write_bytes(data)
    new = [images.read_svhn(files[0]), *(refusal(images.read_svhn, file) for file in files[1:])]
    with fuzz.warm_matlab():
        for _ in range(2):
            np.testing.assert_array_equal(images.read_svhn(files[0]), new[0])
            assert [refusal(images.read_svhn, file) for file in files[1:]] == new[1:]
    assert any("the reader crashed" in each for each in new[1:])


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
                time.sleep(60)
            case b"slow":
                while time.process_time() < began + 0.4:
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
    tally, began = fuzz.Tally(), time.process_time()
    with fuzz.limits(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzz, "WAIT", 0.5)
        patch.setattr(fuzz, "SECONDS", 0.3)
        patch.setattr(fuzz, "MEMORY", 1 << 24)
        for data in (b"slow", b"traceback", b"hang", b"memory", b"code", b"lines", b"wrong", b"clear", b"right"):
            tally.feed(reader, tmp_path, data)
        tally.feed(reader, tmp_path, b"clear", sound=True)
    assert dict(tally.counts) == {
        "cases": 10, "traceback": 1, "hang": 2, "memory": 1, "code": 1, "wrong": 3, "clear": 1, "right": 1
    }  # fmt: skip


def test_sittings_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many parts in two sittings as in one, with the same counts; what is done is not done again."""
    monkeypatch.setattr(fuzz, "PART", 250)
    reader = fuzz.READERS["metrics"]()

    def sit(out: Path | None, cases: int) -> dict[str, Any]:
        results = fuzz.Results(out, 0, ["metrics"], cases)
        parts = list(iter(results.next, None))
        for name, part in reversed(parts):  # as they may come of several processes
            tally = fuzz.fuzz(reader, fuzz.PART, 0, part=part)
            results.add(name, part, fuzz.Done(tally.counts, tally.said, 1.0))
        results.write()
        assert "0 bad, 0:00:00 left" in results.progress(1)
        return results.all

    once = sit(None, 750)
    sit(tmp_path / "r.json", 250)
    sit(tmp_path / "r.json", 750)
    twice = json.loads((tmp_path / "r.json").read_text())
    assert twice["readers"] == once["readers"]
    assert twice["readers"]["metrics"] | {"clear": 0, "right": 0} == {
        **dict.fromkeys(fuzz.OUTCOMES, 0), "parts": 3, "seconds": 3.0, "cases": 750,
    }  # fmt: skip
    assert [each["cases"] for each in twice["sittings"]] == [250, 500]


def test_every_part_has_other_cases_and_the_same_ones_each_time() -> None:
    def fed(part: int) -> set[bytes]:
        seen: set[bytes] = set()
        reader = replace(fuzz.READERS["metrics"](), check=lambda path, data: seen.add(data))
        fuzz.fuzz(reader, 100, 0, part=part)
        return seen

    first, second = fed(1), fed(2)
    assert fed(1) == first
    assert len(first & second) < 0.2 * len(first)  # short ones may come twice
