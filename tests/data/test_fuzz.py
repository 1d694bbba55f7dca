"""Hostile files, in short: `make fuzz` has the long version."""

import resource
import time
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
ELSEWHERE = ("recipe", "--set", "safetensors", "model", "metrics", "columns")  # tests/train/test_fuzz_files.py


@pytest.mark.parametrize("name", [each for each in fuzz.READERS if each not in ELSEWHERE])
def test_hostile_files(name: str) -> None:
    reader = fuzz.READERS[name]()
    forged = [data for data in reader.forged if name in ("npz", "parquet") or len(data) < BOMB]
    tally = fuzz.fuzz(name, replace(reader, forged=forged), len(forged) + len(reader.real) + 60)
    assert tally.said == []
    assert tally.counts["clear"] > 20
    assert tally.counts["right"] >= len(reader.real)


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
    assert peak < 1.5 * most < 1 << 30


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


def test_the_harness_sees_what_it_looks_for(tmp_path: Path) -> None:
    """A reader that does all that none may do; the limits are lifted again."""

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
                np.ones(1 << 29, np.uint8)  # more than this process ever used
            case b"code":
                fuzz.CANARY.touch()
            case b"lines":
                raise fuzz.NicestError("two\nlines")
            case b"wrong":
                fuzz.require(False, "other values")
            case b"clear":
                raise fuzz.NicestError("expected this, got that")

    reader, before = fuzz.Reader("x", [], [], bad), resource.getrlimit(resource.RLIMIT_AS)
    tally, began = fuzz.Tally(), time.process_time()
    with fuzz.limits(), pytest.MonkeyPatch.context() as patch:
        assert resource.getrlimit(resource.RLIMIT_AS) != before
        patch.setattr(fuzz, "WAIT", 0.5)
        patch.setattr(fuzz, "SECONDS", 0.3)
        patch.setattr(fuzz, "MEMORY", 1 << 24)
        for data in (b"slow", b"traceback", b"hang", b"memory", b"code", b"lines", b"wrong", b"clear", b"right"):
            tally.feed(reader, tmp_path, data)
        tally.feed(reader, tmp_path, b"clear", sound=True)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    expected = {"traceback": 1, "hang": 2, "memory": 1, "code": 1, "wrong": 3, "clear": 1, "right": 1}
    assert dict(tally.counts) == {"cases": 10, **expected}


def test_every_part_has_other_cases_and_the_same_ones_each_time() -> None:
    def fed(part: int) -> set[bytes]:
        seen: set[bytes] = set()
        reader = replace(fuzz.READERS["metrics"](), check=lambda path, data: seen.add(data))
        fuzz.fuzz("metrics", reader, 100, 0, part)
        return seen

    first, second = fed(1), fed(2)
    assert fed(1) == first
    assert len(first & second) < 0.2 * len(first)  # short ones may come twice
