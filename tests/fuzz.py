"""Hostile files: every reader gets real ones damaged, forged and random ones; it answers right or with a clear error.

`make fuzz` runs it, 20,000 cases for each reader; the tests run a short version. The cases come in parts, each with a
seed of its own. With --out, every part that is done is written down, and the next sitting goes on after it:

    python tests/fuzz.py --cases 1000000 --minutes 60 --out results/fuzz.json   # again and again, until all are done
"""

import argparse
import atexit
import gzip
import hashlib
import io
import json
import lzma
import math
import multiprocessing
import os
import pickle
import platform
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import PIL
import pyarrow as pa
import safetensors
import scipy
import torch
from PIL import ExifTags, Image
from pyarrow import csv, feather, parquet

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent / "data")]  # of `draws` and `published`

from published import cifar10_rows, idx_bytes, write_fer2013, write_svhn, write_tfd

import draws as st
import nicest
from draws import Some
from nicest.codec import container as coded
from nicest.data import Splits, images, load
from nicest.data.arrays import read_npy, read_npz
from nicest.data.columns import Schema
from nicest.data.tables import TableFile, read_table
from nicest.errors import NicestError
from nicest.files import write_text
from nicest.flows import Density
from nicest.recipes import Recipe, load_recipe, parse
from nicest.recipes.build import build
from nicest.recipes.recipe import TABLES
from nicest.runs.folder import RunFolder, read_tensors, write_tensors
from nicest.runs.sinks import Saved

SECONDS = 5  # of processor time; a case that takes more hangs, whatever else the machine does
WAIT = 60  # seconds after which a case that waits is broken off
ADDRESSES = 4 << 30  # bytes of memory that a case may ask for
MEMORY = 1 << 30  # bytes of memory that a case may use
LINE = 1000  # characters of a message beside the path of its file
EXTREMES = (0, 1, 2, 127, 128, 255, 256, 32767, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
REST = ("wrong", "traceback", "hang", "memory", "code")
OUTCOMES = ("cases", "clear", "right", *REST)
CANARY = Path(tempfile.gettempdir()) / f"nicest-fuzz-{os.getpid()}"  # what code in a file would make
MEMORY_DISK = Path("/dev/shm")  # for the files of the cases, where there is one


class Hang(BaseException):
    """Too long; no reader may catch it."""


class Wrong(Exception):
    """An answer that is not right."""


def require(holds: object, what: str) -> None:
    if not holds:
        raise Wrong(what)


@dataclass
class Reader:
    """A reader, real files for it, forged ones, and a draw of more; `check` reads a file and judges the answer."""

    name: str
    file: str
    real: list[bytes]
    forged: list[bytes]
    shaped: Some
    check: Callable[[Path, bytes], None]


@dataclass
class Tally:
    """What became of the cases of one reader."""

    counts: Counter[str] = field(default_factory=Counter)
    said: list[str] = field(default_factory=list)  # of the rest, what and why
    keep: Path | None = None

    @property
    def rest(self) -> int:
        return sum(self.counts[each] for each in REST)

    def feed(self, reader: Reader, folder: Path, data: bytes, *, sound: bool = False) -> None:
        """One case."""
        path = folder / reader.file
        try:
            file = open(path, "wb")  # noqa: SIM115, PTH123
        except FileNotFoundError:
            path.parent.mkdir(parents=True)
            file = path.open("wb")
        with file:
            file.write(data)
        outcome, why = judge(reader, path, data)
        if sound and outcome == "clear":
            outcome = "wrong"
        self.counts["cases"] += 1
        self.counts[outcome] += 1
        if outcome in REST:
            self.said.append(f"{reader.name}: {outcome}: {why[:300]}")
            if self.keep:
                self.keep.mkdir(parents=True, exist_ok=True)
                digest = hashlib.blake2b(data, digest_size=6).hexdigest()
                (self.keep / f"{reader.name}-{digest}".replace(" ", "-")).write_bytes(data)


def judge(reader: Reader, path: Path, data: bytes) -> tuple[str, str]:
    """What became of one case, and what was said."""
    before, began = MEMORY_USED.base(), processor_time()
    signal.setitimer(signal.ITIMER_REAL, WAIT)
    try:
        try:
            reader.check(path, data)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        outcome, why = "right", ""
    except NicestError as error:
        why = str(error).replace(str(path), "FILE").replace(str(path.parent), "FOLDER")
        outcome = "clear" if why.isprintable() and 0 < len(why) < LINE else "wrong"
    except Wrong as error:
        outcome, why = "wrong", str(error)
    except Hang:
        outcome, why = "hang", f"broken off after {WAIT} s"
    except MemoryError as error:
        outcome, why = "memory", repr(error)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        outcome, why = "traceback", repr(error)
    if (used := processor_time() - began) > SECONDS:
        outcome, why = "hang", f"{used:.1f} s of processor time"
    if (taken := MEMORY_USED.most() - before) > MEMORY:
        outcome, why = "memory", f"{taken / 2**20:.0f} MiB"
    if os.path.exists(CANARY):  # noqa: PTH110
        CANARY.unlink()
        outcome, why = "code", "a file was executed"
    return outcome, why


def processor_time() -> float:
    """Of this process and of those that a reader started and saw end."""
    return time.process_time() + sum(os.times()[2:4]) + (0 if MATLAB is None else MATLAB.seconds)


class MemoryUsed:
    """Bytes of memory that this process uses, where the system tells; asked for twice a case, so a cheap question.

    The most so far costs a microsecond. It is set back to what is in use, which costs more, only where it has risen.
    """

    def __init__(self) -> None:
        self.process, self.used = 0, 0

    def base(self) -> int:
        """What is in use, or at most an eighth of what a case may use below it."""
        if self.process != os.getpid() or self.most() - self.used > MEMORY // 8:
            self.process = os.getpid()
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_bytes(b"5")
                status = Path("/proc/self/status").read_bytes()
                self.used = 1024 * int(status.partition(b"VmRSS:")[2].split()[0])
        return self.used

    def most(self) -> int:
        """The most since it was set back."""
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if self.used else 0


MEMORY_USED = MemoryUsed()


@contextmanager
def limits() -> Iterator[None]:
    """Bounds of time and memory; no warnings, nor what libraries say past Python."""

    def alarm(*_: object) -> None:
        raise Hang

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(OSError):  # only Linux tells
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + ADDRESSES, hard))
    handler, stderr = signal.signal(signal.SIGALRM, alarm), os.dup(2)
    try:
        with Path(os.devnull).open("w") as nowhere, warnings.catch_warnings():
            os.dup2(nowhere.fileno(), 2)
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def fuzz(reader: Reader, cases: int, seed: int, keep: Path | None = None, part: int = 0) -> Tally:
    """Feed a reader: in the first part what is real and what is forged, then drawn and damaged files, in turn."""
    tally, rng = Tally(keep=keep), random.Random(f"{seed} {reader.name} {part}")
    disk = MEMORY_DISK if os.access(MEMORY_DISK, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=disk) as name, limits(), warm_matlab() if part else nullcontext():
        folder = Path(name)
        for data in () if part else reader.real:
            tally.feed(reader, folder, data, sound=True)
        for data in () if part else reader.forged:
            tally.feed(reader, folder, data)
        for i in range(cases - tally.counts["cases"]):
            tally.feed(reader, folder, damaged(rng, reader.real) if i % 2 else reader.shaped.draw(rng))
    return tally


def damaged(rng: random.Random, files: list[bytes]) -> bytes:
    """A real file, damaged once or a few times; once in a while nothing but noise."""
    if rng.random() < 0.03:
        return rng.randbytes(rng.randrange(4000))
    data = bytearray(rng.choice(files))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        at, size = _place(rng, len(data)), rng.choice((1, 1, 2, 4, 8, 64, 500))
        match rng.randrange(9):
            case 0:
                del data[at:]
            case 1 | 2:
                if data:
                    data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
            case 3:
                data[at:at] = rng.randbytes(size)
            case 4:
                del data[at : at + size]
            case 5 | 6:
                width, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
                data[at : at + width] = (rng.choice(EXTREMES) % 256**width).to_bytes(width, order)
            case 7:
                data[at : at + size] = bytes(size)
            case 8:
                other = rng.choice(files)
                start = _place(rng, len(other))
                data[at : at + size] = other[start : start + size]
    return bytes(data)


def _place(rng: random.Random, size: int) -> int:
    """Anywhere in a file, but more often near its ends, where its headers are."""
    near = rng.randrange(200)
    return min(size, max(0, rng.choice((near, near, size - near, rng.randrange(size + 1)))))


class Touch:
    """What executes, where a pickle is loaded."""

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (CANARY,))


def _file(write: Callable[[Path], object]) -> bytes:
    """The bytes of a file that something writes."""
    with tempfile.TemporaryDirectory() as name:
        write(Path(name) / "file")
        return next(path for path in Path(name).rglob("*") if path.is_file()).read_bytes()


def _stream(write: Callable[[io.BytesIO], object]) -> bytes:
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()


# ---- bombs


def zeros(before: bytes, count: int) -> bytes:
    """A deflate stream of some bytes and `count` times 16 MiB of zeros, about a thousandth of that."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = deflate.compress(before) + deflate.flush(zlib.Z_FULL_FLUSH)
    return first + _block() * count + deflate.flush()


@cache
def _block() -> bytes:
    """16 MiB of zeros, to be put anywhere in a deflate stream."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    return deflate.compress(bytes(1 << 24)) + deflate.flush(zlib.Z_FULL_FLUSH)


def gzip_bomb(before: bytes, count: int) -> bytes:
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + zeros(before, count) + bytes(8)


def zip_bomb(name: str, before: bytes, count: int, size: int | None = None, method: int = 8) -> bytes:
    """A .zip of one member; `size` is what it says of itself."""
    body, written = zeros(before, count), name.encode()
    size = len(before) + (count << 24) if size is None else size
    common = struct.pack("<HHHHHIIIHH", 20, 0, method, 0, 33, 0, len(body), size, len(written), 0)
    local = b"PK\3\4" + common + written + body
    central = b"PK\1\2" + struct.pack("<H", 20) + common + struct.pack("<HHHII", 0, 0, 0, 0, 0) + written
    return local + central + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local), 0)


# ---- the answers


def check_splits(path: Path) -> None:
    """What a user does with a path."""
    splits = load(str(path))
    require(isinstance(splits, Splits), "no splits")
    dtypes = {None: (np.float32,), 2: (np.uint8,), 256: (np.uint8,), 65536: (np.uint16,)}[splits.levels]
    for part in ("train", "valid", "test"):
        rows = splits.split(part)
        fewest = 1 if splits.schema is not None else 2
        require(rows.ndim == 2 and rows.shape[1] == math.prod(splits.shape) >= fewest and len(rows), "rows")
        require(rows.dtype in dtypes and rows.dtype.isnative, "dtype of rows")
        require(splits.levels is None or rows.max() < splits.levels, "level beyond levels")
        require(splits.levels is not None or not np.isinf(rows).any(), "not finite")
        require(splits.schema is not None or not np.isnan(rows).any(), "missing")


def check_idx(path: Path, data: bytes) -> None:
    got = images.read_idx(path)
    require(got.dtype.isnative, "byte order")
    require(idx_bytes(got) == (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data), "other values")
    check_splits(path)


def check_cifar10(path: Path, data: bytes) -> None:
    got = images.read_cifar10(path)
    require(got.shape == (len(data) // 3073, 3, 32, 32) and got.dtype == np.uint8, "shape or dtype")
    require(b"".join(data[i + 1 : i + 3073] for i in range(0, len(data), 3073)) == got.tobytes(), "other values")


def check_svhn(path: Path, data: bytes) -> None:
    got = images.read_svhn(path)
    require(got.ndim == 4 and got.shape[1:] == (3, 32, 32) and got.dtype == np.uint8, "shape or dtype")


def check_tfd(path: Path, data: bytes) -> None:
    faces, folds = images.read_tfd(path)
    require(faces.ndim == 3 and faces.shape[1:] == (48, 48) and faces.dtype == np.uint8, "shape or dtype")
    require(folds.shape == (len(faces), 5), "shape of folds")


def check_fer2013(path: Path, data: bytes) -> None:
    faces, usage = images.read_fer2013(path)
    require(len(faces) and faces.shape[1:] == (48, 48) and faces.dtype == np.uint8, "shape or dtype")
    require(usage.shape == (len(faces),) and set(usage.tolist()) <= set(images.FER2013_USAGES), "usage")


def check_npy(path: Path, data: bytes) -> None:
    got = read_npy(path)
    require(isinstance(got, np.ndarray) and not got.dtype.hasobject, "no numbers")
    whole = got.tobytes() in data or got.tobytes("F") in data
    require(whole, "other values")
    check_splits(path)


def check_npz(path: Path, data: bytes) -> None:
    for got in read_npz(path).values():
        require(isinstance(got, np.ndarray) and not got.dtype.hasobject, "no numbers")
    check_splits(path)


def check_image(path: Path, data: bytes) -> None:
    got = images.read_images([path])
    require(got.ndim in (3, 4) and len(got) == 1 and got.shape[3:] in ((), (3,)), "shape")
    require(got.dtype in (np.bool_, np.uint8, np.uint16), "dtype")


def check_folder(path: Path, data: bytes) -> None:
    """A folder in which one image of four, the first, is suspect."""
    if not (path.parent / "3.png").exists():
        for i in (1, 2, 3):
            Image.fromarray(PIXELS[i]).save(path.parent / f"{i}.png")
    check_splits(path.parent)


def check_table(path: Path, data: bytes) -> None:
    """A table is trained on, scored and sampled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_splits(path)
    schema, rows, _ = read_table(path)
    require(rows.shape[1] == len(schema) and not np.isinf(rows).any(), "columns")
    again = schema.encode(schema.decode(rows[:100]), path)
    require(not np.isinf(again).any(), "a sample of unknown values")
    discrete = np.array([column.discrete for column in schema])
    np.testing.assert_array_equal(again[:, discrete], rows[:100][:, discrete])
    file = TableFile(path)
    parts = [batch.num_rows for group in range(file.groups) for batch in file.batches(file.names, group)]
    require(file.count in (None, sum(parts)) and len(rows) <= sum(parts), "other rows")


def check_columns(path: Path, data: bytes) -> None:
    schema = RunFolder(path.parent).schema()
    require(Schema.from_json(schema.to_json(), "x") == schema, "the columns are others when written and read")
    schema.heads()
    if schema:
        schema.decode(np.zeros((2, len(schema)), np.float32))


def check_recipe(path: Path, data: bytes) -> None:
    same_written(load_recipe(str(path)))


def check_set(path: Path, data: bytes) -> None:
    same_written(SMALL.override(data.decode("utf-8", "surrogateescape")))


def same_written(recipe: Recipe) -> None:
    require(isinstance(recipe, Recipe), "no recipe")
    text = recipe.to_toml()
    text.encode()
    require(parse(text, recipe.name) == recipe, "the recipe is another when written and read")


def check_tensors(path: Path, data: bytes) -> None:
    tensors, recipe, figures, _ = read_tensors(path)
    require(all(isinstance(each, torch.Tensor) for each in tensors.values()), "no tensors")
    require(isinstance(figures, dict), "no figures")
    same_written(recipe)


def check_model(path: Path, data: bytes) -> None:
    flow = nicest.load(path)
    require(isinstance(flow, Density), "no density")
    require(flow.log_prob(torch.zeros(2, flow.dim)).shape == (2,), "no log-density")
    require(all(p.dtype == torch.float32 for p in flow.parameters()), "dtype")


# ---- the readers


def header_idx(code: int, sizes: list[int]) -> bytes:
    return struct.pack(f">BBBB{len(sizes)}I", 0, 0, code, len(sizes), *sizes)


PIXELS = np.random.default_rng(0).integers(0, 256, (20, 4, 5), np.uint8)
TABLE = np.random.default_rng(1).normal(size=(20, 4))
sizes = st.sampled_from((0, 1, 2, 3, 4, 5, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1))
noise = st.binary(max_size=200)
bits = st.one_of(sizes, st.integers(0, 2**32 - 1))


@st.composite
def shaped_idx(draw: Any) -> bytes:
    shape = draw(st.lists(sizes, max_size=5))
    header = header_idx(draw(st.sampled_from([*images.IDX_DTYPES, 0, 7, 255])), shape)
    whole = math.prod(shape) * 8 < 4000 and draw(st.booleans())
    if whole:
        width = np.dtype(images.IDX_DTYPES.get(header[2], "u1")).itemsize
        size = math.prod(shape) * width
        return header + draw(Some(lambda rng: rng.randbytes(size)))
    return draw(st.sampled_from((b"", b"\0", header[:2]))) + header + draw(noise)


def idx() -> Reader:
    real = [idx_bytes(each) for each in (PIXELS, TABLE.astype("f4"), TABLE, PIXELS[:, 0].astype("i2"))]
    forged = [
        b"",
        *(header_idx(8, [1] * rank) + b"x" for rank in (1, 2, 8, 9, 32, 33, 64, 65, 255)),
        *(header_idx(8, [size] * rank) for size in (2**31 - 1, 2**32 - 1) for rank in (1, 2, 3, 4, 255)),
        *(header_idx(14, [2**32 - 1, 2**32 - 1, 2**32 - 1, 0][-rank:]) for rank in (1, 2, 3, 4)),
        pickle.dumps(Touch()),
    ]
    return Reader("idx", "x-idx3-ubyte", real, forged, shaped_idx(), check_idx)


def idx_gz() -> Reader:
    plain = idx()
    many = header_idx(8, [128 << 24 >> 20, 1024, 1024])
    forged = [gzip.compress(each, mtime=0) for each in plain.forged]
    forged += [gzip_bomb(many, 128), gzip_bomb(plain.real[0], 128), gzip_bomb(b"", 128)]
    forged += [gzip_bomb(b"", 1)[:-8] * 64, gzip.compress(gzip.compress(plain.real[0])), gzip.compress(b"") * 1000]
    real = [gzip.compress(each, mtime=0) for each in plain.real]
    real += [gzip.compress(plain.real[0][:50], mtime=0) + gzip.compress(plain.real[0][50:], mtime=0)]
    shaped = st.one_of(
        shaped_idx().map(lambda data: gzip.compress(data, mtime=0)), noise.map(lambda data: b"\x1f\x8b\x08" + data)
    )
    return Reader("idx.gz", "x-idx3-ubyte.gz", real, forged, shaped, check_idx)


def cifar10() -> Reader:
    rows = cifar10_rows(2)["data_batch_1.bin"].tobytes()
    forged = [b"", b"\x0a" + bytes(3072), bytes(3072), bytes(3074), pickle.dumps(Touch())]
    shaped = st.tuples(
        st.integers(0, 255) | st.integers(0, 9),
        st.integers(0, 255),
        st.integers(0, 4),
        st.just(b"") | noise,
    ).map(lambda parts: (bytes([parts[0]]) + bytes([parts[1]]) * 3072) * parts[2] + parts[3])
    return Reader("cifar10", "batch.bin", [rows, rows[:3073]], forged, shaped, check_cifar10)


MAT5 = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"


def element(kind: int, data: bytes, size: int | None = None) -> bytes:
    return struct.pack("<II", kind, len(data) if size is None else size) + data + bytes(-len(data) % 8)


def matrix(name: bytes, kind: int, shape: tuple[int, ...], *parts: bytes, size: int | None = None) -> bytes:
    """A variable of a MATLAB 5 file."""
    dims = struct.pack(f"<{len(shape)}I", *shape)
    flags = element(6, struct.pack("<II", kind, 0))
    return element(14, flags + element(5, dims) + element(1, name) + b"".join(parts), size)


def cells(name: bytes, depth: int) -> bytes:
    """Cells in cells in cells; each level but the outermost is without a name."""
    inner = matrix(b"", 9, (1, 1), element(2, b"\1"))
    level = len(matrix(b"", 1, (1, 1)))
    levels = [matrix(b"", 1, (1, 1), size=len(inner) + level * (i + 1) - 8) for i in reversed(range(depth))]
    outer = matrix(name, 1, (1, 1))
    return matrix(name, 1, (1, 1), size=len(outer) - 8 + level * depth + len(inner)) + b"".join(levels) + inner


def packed(data: bytes) -> bytes:
    return element(15, zlib.compress(data))


def mat_bomb(before: bytes) -> bytes:
    body = b"\x78\xda" + zeros(before, 64) + bytes(4)
    return MAT5 + struct.pack("<II", 15, len(body)) + body


@st.composite
def shaped_mat(draw: Any, names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> bytes:
    parts = []
    for name, shape in zip(names, shapes, strict=True):
        dims = draw(st.just(shape) | st.lists(sizes, max_size=6).map(tuple))
        kind = draw(st.just(9) | st.integers(0, 20))
        count = math.prod(dims) if math.prod(dims) < 50_000 else 10
        values = element(draw(st.just(2) | st.integers(0, 20)), bytes(count), draw(st.none() | bits))
        variable = matrix(name.encode(), kind, dims, values, draw(noise), size=draw(st.none() | bits))
        parts.append(packed(variable) if draw(st.booleans()) else variable)
    order = draw(st.sampled_from((b"\x00\x01IM", b"\x00\x01IM", b"\x01\x00MI", b"\x00\x02IM", b"\0\0\0\0")))
    return MAT5[:124] + order + b"".join(parts)


def mat_forged(name: str) -> list[bytes]:
    text = name.encode()
    vast = struct.pack("<5i", 0, 2**31 - 1, 2**31 - 1, 0, len(text) + 1) + text + b"\0"
    back = struct.pack("<5i", 0, -4, 8, 0, 2) + b"Z\0"  # a variable of version 4 that ends before it begins
    flags = element(6, struct.pack("<II", 9, 0)) + element(5, struct.pack("<2I", 1 << 16, 1 << 15))
    start = struct.pack("<II", 14, 2**31) + flags
    return [
        b"",
        MAT5,
        MAT5 + cells(text, 30_000),
        MAT5 + packed(cells(text, 30_000)),
        MAT5 + cells(b"Z", 30_000),
        mat_bomb(start + element(1, text) + struct.pack("<II", 2, 2**31)),
        mat_bomb(start + struct.pack("<II", 1, 2**32 - 1)),
        mat_bomb(b""),
        MAT5 + matrix(text, 9, (2**31, 2**31), element(2, b"", 2**32 - 1)),
        MAT5 + matrix(text, 5, (2**31, 2**31), element(2, b"", 2**32 - 1)),  # sparse
        MAT5 + matrix(text, 17, (1, 1), element(2, b"")),
        MAT5 + matrix(text, 4, (4, 65535, 256), element(2, b"")),  # characters: 20 seconds to join
        MAT5 + packed(packed(packed(matrix(text, 9, (1, 1), element(2, b"\1"))))),
        vast,
        back,
        back * 2,
        b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + bytes(400),
        pickle.dumps(Touch()),
    ]


MATLAB_SERVER = """
import io, json, os, struct, sys, time, traceback, types
import numpy, scipy.io
code = compile(sys.argv[1], "-c", "exec")
while pid := os.fork():
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0:
        sys.exit()
    os.write(1, struct.pack("<idII", status, 0, 0, 0))
while request := os.read(0, 1 << 16):
    sys.argv, out, error, began = ["-c", *json.loads(request)], io.BytesIO(), "", time.process_time()
    stdout, sys.stdout = sys.stdout, types.SimpleNamespace(buffer=out)
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as exit:
        error = str(exit)
    except BaseException:
        error = traceback.format_exc()
    sys.stdout, found, said = stdout, out.getvalue(), error.encode(errors="replace")
    reply = struct.pack("<idII", bool(said), time.process_time() - began, len(found), len(said)) + found + said
    while reply:
        reply = reply[os.write(1, reply):]
os._exit(0)
"""


class Matlab:
    """The child process of the readers of .mat files, kept: it runs the same script, and another one if it crashes.

    To start one takes half a second. It is the child of a process that has imported scipy, and is forked again.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        command = [sys.executable, "-P", "-c", MATLAB_SERVER, images.MAT_TO_NPZ]
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def run(self, command: list[Any], **_: Any) -> SimpleNamespace:
        """What `subprocess.run` answers."""
        assert command[:4] == [sys.executable, "-P", "-c", images.MAT_TO_NPZ]
        assert self.server.stdin
        self.server.stdin.write(json.dumps([str(each) for each in command[4:]]).encode())
        code, seconds, *sizes = struct.unpack("<idII", self._read(20))
        self.seconds += seconds
        found, said = map(self._read, sizes)
        return SimpleNamespace(returncode=code, stdout=found, stderr=said)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            assert self.server.stdout
            part = self.server.stdout.read(size - len(data))
            assert part, "the server of .mat files ended"
            data += part
        return data


MATLAB: Matlab | None = None


@contextmanager
def warm_matlab() -> Iterator[None]:
    """No process for each .mat file, but one that is there already."""
    global MATLAB

    def run(command: list[Any], **options: Any) -> SimpleNamespace:
        global MATLAB
        MATLAB = MATLAB or Matlab()
        try:
            return MATLAB.run(command)
        except BaseException:  # broken off in the middle
            MATLAB.server.kill()
            MATLAB.server.wait()
            MATLAB = None
            raise

    images.subprocess = SimpleNamespace(run=run)  # type: ignore[assignment]
    try:
        yield
    finally:
        images.subprocess = subprocess


def svhn() -> Reader:
    def write(path: Path, compressed: bool) -> None:
        pixels = np.random.default_rng(3).integers(0, 256, (32, 32, 3, 2), np.uint8)
        scipy.io.savemat(path, {"y": np.ones((2, 1)), "X": pixels}, do_compression=compressed, appendmat=False)

    real = [_file(lambda path, c=c: write(path, c)) for c in (True, False)]
    real.append(_file(lambda path: write_svhn(path.parent, 2, 1)))
    shaped = shaped_mat(("X",), ((32, 32, 3, 2),))
    return Reader("svhn", "train_32x32.mat", real, mat_forged("X"), shaped, check_svhn)


def tfd() -> Reader:
    real = [_file(lambda path: write_tfd(path.parent, 3))]
    shaped = shaped_mat(("images", "folds"), ((3, 48, 48), (3, 5)))
    return Reader("tfd", "TFD_48x48.mat", real, mat_forged("images"), shaped, check_tfd)


# ---- tables


def arrow_table(n: int = 20) -> pa.Table:
    """Numbers, texts and moments, of which some are missing."""
    rng = np.random.default_rng(4)
    days = pa.array(rng.integers(0, 9000, n).astype(np.int32)).cast(pa.date32())
    return pa.table(
        {
            "x": rng.normal(size=n),
            "n": pa.array([None, *range(n - 1)], pa.int16()),
            "text": pa.array(["red", "green"] * (n // 2)),
            "entry": pa.array(["a", "b"] * (n // 2)).dictionary_encode(),
            "day": days,
            "is": pa.array([True, False] * (n // 2)),
        }
    )


def parquet_of(table: pa.Table, **options: Any) -> bytes:
    return _stream(lambda file: parquet.write_table(table, file, **options))


def ipc_of(table: pa.Table, compression: str | None = None, *, stream: bool = False, rows: int = 1 << 30) -> bytes:
    def write(file: io.BytesIO) -> None:
        options = pa.ipc.IpcWriteOptions(compression=compression)
        opened = pa.ipc.new_stream if stream else pa.ipc.new_file
        with opened(file, table.schema, options=options) as writer:
            writer.write_table(table, rows)

    return _stream(write)


def nested(depth: int) -> pa.Table:
    kind = pa.int8()
    for _ in range(depth):
        kind = pa.list_(kind)
    return pa.table({"a": pa.nulls(3, kind), "b": [1, 2, 3]})


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def thrift(*fields: tuple[int, int, bytes]) -> bytes:
    """A struct in Thrift's compact protocol; fields are (number, type, what is written)."""
    out, last = b"", 0
    for number, kind, written in fields:
        out, last = out + bytes([(number - last) << 4 | kind]) + written, number
    return out + b"\0"


def thrift_list(kind: int, count: int, items: bytes) -> bytes:
    return bytes([0xF0 | kind]) + varint(count) + items


def zigzag(value: int) -> bytes:
    return varint((value << 1 ^ value >> 63) & (2**64 - 1))


def footer(schema: bytes, elements: int, rows: int = 1, groups: bytes = b"", count: int = 0) -> bytes:
    """A Parquet file of nothing but its metadata."""
    whole = thrift(
        (1, 5, zigzag(2)),
        (2, 9, thrift_list(12, elements, schema)),
        (3, 6, zigzag(rows)),
        (4, 9, thrift_list(12, count, groups)),
    )
    return b"PAR1" + whole + struct.pack("<I", len(whole)) + b"PAR1"


ONE_PAGE = {"row_group_size": 1 << 26, "data_page_size": 1 << 30, "write_batch_size": 1 << 26}
ONE_PAGE |= {"max_rows_per_page": 1 << 26}


def parquet_forged() -> list[bytes]:
    def element(name: bytes, children: int = 0) -> bytes:
        text, required = (4, 8, varint(len(name)) + name), (3, 5, zigzag(0))
        return (
            thrift(required, text, (5, 5, zigzag(children))) if children else thrift((1, 5, zigzag(1)), required, text)
        )

    two = element(b"r", 2) + element(b"a") + element(b"b")
    zeros, many = np.zeros(10_000_000), np.zeros(40_000_000, bool)
    long = pa.DictionaryArray.from_arrays(pa.array(np.zeros(40_000, np.int32)), ["x" * 500_000])
    whole = parquet_of(arrow_table())
    aborting = parquet_of(arrow_table(), row_group_size=7, compression="zstd", write_page_index=True)
    return [
        b"",
        b"PAR1",
        b"PAR1" * 3,
        b"PARE" + whole[4:-4] + b"PARE",
        *(b"PAR1" + bytes(40) + struct.pack("<I", size) + b"PAR1" for size in (0, 1, 39, 2**31 - 1, 2**32 - 1)),
        *(footer(two, 3, rows) for rows in (0, 1, -1, 2**31, 2**62, -(2**63))),
        *(footer(two, elements) for elements in (0, 1, 2, 4, 2**20, 2**31 - 1, 2**32)),
        *(footer(two, 3, 1, b"", count) for count in (1, 2**20, 2**31 - 1, 2**40)),
        *(footer(element(b"r", children) + element(b"a"), 2) for children in (0, 2, 2**31 - 1)),
        *(
            footer(element(b"r", 1) + element(b"x", 1) * depth + element(b"a"), depth + 2)
            for depth in (90, 9000, 300_000)
        ),
        footer(element(b"r", 100_000) + element(b"a") * 100_000, 100_001),
        footer(element(b"r", 2) + element(b"a" * 1_000_000) + element(b"\xff\x1b"), 3),
        parquet_of(nested(60)),
        parquet_of(pa.table({"a": zeros, "b": zeros}), compression="zstd", use_dictionary=False),
        parquet_of(pa.table({"a": many, "b": many}), compression="zstd", **ONE_PAGE),
        parquet_of(pa.table({"a": long, "b": np.arange(40_000)}), store_schema=False),
        parquet_of(pa.table({"a": pa.nulls(20_000_000), "b": pa.nulls(20_000_000)})),
        parquet_of(pa.table({})),
        *(aborting[:at] + bytes([kind]) + aborting[at + 1 :] for at in range(2100, 2140, 4) for kind in (4, 12)),
        parquet_of(pa.table([[1], [2]], names=["a", "a"])),
        pickle.dumps(Touch()),
    ]


def ipc_forged() -> list[bytes]:
    zeros = np.zeros(10_000_000)
    long = pa.DictionaryArray.from_arrays(pa.array(np.zeros(40_000, np.int32)), ["x" * 500_000])
    forged = [
        b"",
        b"ARROW1",
        b"ARROW1\0\0ARROW1",
        b"\xff" * 4 + bytes(4),
        b"FEA1" + bytes(40) + b"FEA1",
        pickle.dumps(Touch()),
    ]
    for size in (0, 1, 8, 2**31 - 1, 2**32 - 1):
        forged += [b"\xff" * 4 + struct.pack("<I", size) + bytes(24) + b"\xff" * 4 + bytes(4)]
        forged += [b"ARROW1\0\0" + b"\xff" * 4 + struct.pack("<I", size) + bytes(24) + b"ARROW1"]
    for stream in (False, True):
        forged.append(ipc_of(pa.table({"a": zeros, "b": zeros}), "zstd", stream=stream))
        forged.append(ipc_of(pa.table({"a": long, "b": np.arange(40_000)}), "zstd", stream=stream))
        forged += [ipc_of(nested(60), stream=stream), ipc_of(pa.table({}), stream=stream)]
        forged.append(ipc_of(pa.table([[1], [2]], names=["a", "a"]), stream=stream))
        packed_rows = ipc_of(arrow_table(8), "lz4", stream=stream)
        plain_rows = ipc_of(pa.table({"a": pa.nulls(7), "b": pa.nulls(7)}), stream=stream)
        for size in (2**31, 2**40, 2**62, 2**63 - 1, 2**64 - 1):
            written = struct.pack("<Q", size)
            forged.append(plain_rows.replace(struct.pack("<Q", 7), written))  # rows of nothing
            for before in (8, 16, 64):  # sizes of buffers
                forged.append(packed_rows.replace(struct.pack("<Q", before), written))
    return forged


COLUMN_VALUES: list[Some] = [
    st.integers(-128, 127),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.sampled_from((0.5, 1.5, math.nan, math.inf, 1e300, 1e-300)),
    st.booleans(),
    st.text(max_size=5),
    st.sampled_from(("1", "2", "inf", "nan", "x", "", "1_0", "1e999", "\x1b[31m")),
    st.dates(),
    st.datetimes(),
    st.times(),
    st.timedeltas(),
    st.decimals(),
    st.binary(max_size=3),
    st.lists(st.integers(0, 9), max_size=2),
]


@st.composite
def some_table(draw: Any) -> pa.Table:
    n, columns = draw(st.integers(0, 12)), {}
    for name in draw(st.lists(st.text(max_size=4), max_size=4, unique=True)):
        values = draw(st.sampled_from(COLUMN_VALUES))
        cells = draw(st.lists(st.none() | values if draw(st.booleans()) else values, min_size=n, max_size=n))
        with suppress(pa.ArrowException, OverflowError, UnicodeEncodeError):
            array = pa.array(cells)
            with suppress(pa.ArrowException):
                array = array.dictionary_encode() if draw(st.booleans()) else array
            columns[name.encode("utf-8", "replace").decode()] = array
    return pa.table(columns)


@st.composite
def shaped_table(draw: Any, write: Callable[..., bytes], **options: Some) -> bytes:
    """A table of anything, of which a few bytes are changed."""
    try:
        data = bytearray(write(draw(some_table()), **{name: draw(option) for name, option in options.items()}))
    except pa.ArrowException:
        return b""
    for _ in range(draw(st.sampled_from((0, 0, 1, 2)))):
        at, width = draw(st.integers(0, len(data))), draw(st.sampled_from((1, 2, 4, 8)))
        data[at : at + width] = (draw(bits | st.sampled_from(EXTREMES)) % 256**width).to_bytes(width, "little")
    return bytes(data)


def parquet_table() -> Reader:
    table = arrow_table()
    real = [parquet_of(table), parquet_of(table, row_group_size=7, compression="zstd", write_page_index=True)]
    real += [parquet_of(table, use_dictionary=False, compression="none", data_page_version="2.0", version="1.0")]
    real += [
        parquet_of(
            table, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY", "n": "DELTA_BINARY_PACKED"}
        )
    ]
    shaped = shaped_table(
        parquet_of,
        compression=st.sampled_from(("none", "snappy", "zstd", "gzip")),
        use_dictionary=st.booleans(),
        row_group_size=st.sampled_from((3, 100)),
    )
    return Reader("parquet", "x.parquet", real, parquet_forged(), shaped, check_table)


def arrow_ipc(name: str, file: str) -> Reader:
    table = arrow_table()
    real = [ipc_of(table, kind, stream=stream, rows=8) for kind in (None, "lz4", "zstd") for stream in (False, True)]
    real += [_file(lambda path: feather.write_feather(table, str(path)))]
    shaped = shaped_table(ipc_of, compression=st.sampled_from((None, "lz4", "zstd")), stream=st.booleans())
    return Reader(name, file, real, ipc_forged(), shaped, check_table)


CELLS = st.sampled_from(
    ("0", "1", "2.5", "-3", "1e3", "1e400", "inf", "NaN", "NA", "", "x", "y", '"', '"a\nb"', "\0", "9" * 400)
)


@st.composite
def shaped_csv_table(draw: Any) -> bytes:
    width = draw(st.integers(0, 4))
    line = st.lists(
        CELLS | st.text(max_size=4), min_size=width, max_size=draw(st.sampled_from((width, width, 5))) or width
    )
    header = draw(st.just([f"c{i}" for i in range(width)]) | line) if width <= 5 else []
    lines = [header, *draw(st.lists(line, max_size=8))]
    text = draw(st.sampled_from(("\n", "\r\n", "\r"))).join(
        draw(st.sampled_from((",", ",", ",", ";"))).join(x) for x in lines
    )
    return (draw(st.sampled_from(("", "", "\ufeff"))) + text).encode("utf-8", "surrogatepass")


def csv_table() -> Reader:
    def write(path: Path) -> None:
        csv.write_csv(arrow_table().cast(pa.schema([(f.name, f.type) for f in arrow_table().schema])), path)

    real = [_file(write), b"a,b\r\n" + b"1,2.5\r\n3,4.5\r\n5,0.25\r\n9,0.125\r\n", "\ufeffa,b\n1,x\n2,y\n3,x".encode()]
    real += [b'a,"b\nc"\n1,"x\ny"\n2,y\n3,x\n']
    forged = [
        b"",
        b"\n" * (1 << 20),
        b"," * 100_000 + b"\n" + b"," * 100_000,
        ",".join(f"c{i}" for i in range(100_000)).encode() + b"\n" + (b"1," * 99_999 + b"1\n") * 3,
        b"a,b\n" + b"1" * (1 << 25) + b",1\n",
        b"a" * (1 << 25),
        b'a,b\n"' + b"1,2\n" * (1 << 23),
        b"a,b\n" + b'"1""' * (1 << 20) + b'",1\n',
        b"a,b\n" + b"x,1\n" * (1 << 18),
        b"a,b\n" + b"\0,\0\n" * 1000,
        "a,b\n1,2\n".encode("utf-16"),
        gzip.compress(b"a,b\n1,2\n"),
        b"a,b\n\xff,2\n3,4\n5,6\n",
        b"\xff,b\n1,2\n3,4\n5,6\n",
        b"a,b\n" + b"".join(b"%d,%s\n" % (i, b"x" * (i % 5000)) for i in range(2000)),
        pickle.dumps(Touch()),
    ]
    return Reader("csv table", "x.csv", real, forged, shaped_csv_table(), check_table)


def columns_file() -> Reader:
    with tempfile.TemporaryDirectory() as name:
        parquet.write_table(arrow_table(), Path(name) / "x.parquet")
        rows = read_table(Path(name) / "x.parquet")[0].to_json()
    real = [json.dumps(rows).encode(), json.dumps(rows[:2], indent=2).encode(), b"[]"]
    forged = [text.encode("utf-8", "surrogatepass") for text in (*FIGURES, *ODD)]
    odd = [
        None,
        True,
        1,
        -1,
        0.5,
        math.nan,
        math.inf,
        10**400,
        "",
        "x",
        "\x1b[31m",
        "9" * 5000,
        [],
        [1],
        ["b", "a"],
        {},
        [[]],
    ]
    for row in rows:
        forged += [json.dumps([row | {key: value}]).encode() for key in (*row, "values", "more") for value in odd]
    forged += [json.dumps([rows[0] | {"type": kind}]).encode() for kind in KINDS_OF_CELLS]
    forged += [json.dumps([rows[0] | {"name": str(i)} for i in range(20_000)]).encode(), b"[" * 100_000]
    keys = sorted({"values"}.union(*rows))
    item = st.tuples(st.sampled_from(rows), st.sampled_from(keys), st.sampled_from(odd)).map(
        lambda parts: parts[0] | {parts[1]: parts[2]}
    )
    shaped = st.lists(item, max_size=3).map(lambda each: json.dumps(each).encode())
    return Reader("columns", "columns.json", real, forged, shaped, check_columns)


KINDS_OF_CELLS = [
    "list<item: int64>",
    "struct<>",
    "binary",
    "null",
    "decimal128(0, 0)",
    "decimal128(99, -99)",
    "time32[ns]",
]
KINDS_OF_CELLS += [
    "timestamp[s, tz=\x1b]",
    "timestamp[s, tz=" + "x" * 9000 + "]",
    "dictionary<values=x, indices=y, ordered=1>",
]
KINDS_OF_CELLS += ["dictionary<values=string, indices=string, ordered=0>", "halffloat", "bool", "string", "date64[ms]"]


words = st.sampled_from(
    ("0", "255", "256", "-1", "1e3", "9" * 5000, "\0", '"', "\ufeff", "Training", "", " ", ",", "\n")
)


@st.composite
def shaped_csv(draw: Any) -> bytes:
    columns = draw(st.just(["emotion", "pixels", "Usage"]) | st.lists(words | st.text(max_size=8), max_size=5))
    lines = [",".join(columns)]
    for _ in range(draw(st.integers(0, 3))):
        pixels = " ".join([draw(words), *["7"] * draw(st.sampled_from((0, 2302, 2303, 2304, 30_000)))])
        usage = draw(st.sampled_from(("Training", "PublicTest", "PrivateTest")) | words | st.text(max_size=8))
        lines.append(f"0,{pixels},{usage}")
    return draw(st.sampled_from(("\n", "\r\n", "\r"))).join(lines).encode("utf-8", "surrogatepass")


def fer2013() -> Reader:
    real = [_file(lambda path: write_fer2013(path.parent, 3))]
    line = b"0," + b"0 " * 2304 + b",Training\n"
    start = b"emotion,pixels,Usage\n"
    forged = [
        b"",
        start,
        start + line + b'"' + b"0\n" * 99_999,
        b"x" * (1 << 22),
        b"\n" * (1 << 22),
        start + b"\n" * (1 << 20) + line,
        start + line + b"0," + b"0 " * 2304 + b"," + b"x" * 20_000 + b"\n" + line * 500,
        (b"," * 30_000 + b"\n") * 100,
        b'"' * 30_000 + b"\n" + start,
        start + b"0," + "\u0663 ".encode() * 2304 + b",Training\n",
        pickle.dumps(Touch()),
    ]
    return Reader("fer2013 csv", "fer2013.csv", real, forged, shaped_csv(), check_fer2013)


def header_npy(text: str, version: int = 1) -> bytes:
    """The opening of a .npy file with any header at all."""
    written = text.encode("utf-8" if version == 3 else "latin1", "replace")
    width = "<H" if version == 1 else "<I"
    return (
        b"\x93NUMPY"
        + bytes([version, 0])
        + struct.pack(width, len(written) & (256 ** struct.calcsize(width) - 1))
        + written
    )


def npy_of(descr: object, shape: object, order: object = False, version: int = 1) -> bytes:
    return header_npy(f"{{'descr': {descr!r}, 'fortran_order': {order!r}, 'shape': {shape!r}, }}\n", version)


DESCRS = [
    "|u1",
    "<f4",
    ">f8",
    "<u2",
    ">u2",
    "|b1",
    "<i8",
    "<u8",
    "<f2",
    "<f16",
    "<c8",
    "|O",
    "<U3",
    "<U0",
    "|V0",
    "|V7",
]
DESCRS += ["<M8[ns]", "<m8[s]", "|S0", "<U536870912", "", "f", ",", "(3,)f4", [("a", "<f4")], [("a", "<f4", (2, 2))]]
DESCRS += [
    ("|u1", (2, 3)),
    ("|u1", (2**31 - 1,)),
    [["a"]],
    {"names": []},
    5,
    None,
    ("<f4", "<f4"),
    [("\x1b[31m", "<i4")],
]
some_descr = st.sampled_from(DESCRS[:10]) | st.sampled_from(DESCRS) | st.text(max_size=5)
some_shape = st.one_of(
    st.sampled_from([(20, 4), (20, 2, 2), (4, 2, 2, 3)]),
    st.lists(st.sampled_from((0, 1, 2, 3, 4, -1, -4, 2**31, 2**32, 2**62, 2**63, 2**64, True)), max_size=5).map(tuple),
    st.just((1,) * 70) | st.just(5) | st.just("x") | st.just((1.5, 2)),
)


@st.composite
def shaped_npy(draw: Any) -> bytes:
    version = draw(st.sampled_from((1, 1, 1, 2, 3, 0, 4, 255)))
    if draw(st.integers(0, 4)) == 0:
        opening = header_npy(draw(st.text(max_size=60) | st.sampled_from(HEADERS)), version)
    else:
        opening = npy_of(draw(some_descr), draw(some_shape), draw(st.sampled_from((False, True, 0, None))), version)
    return opening + draw(st.sampled_from((b"", bytes(80), PIXELS.tobytes(), TABLE.tobytes()))) + draw(noise)


HEADERS = ["(" * 9000, "[" * 200, "-" * 9000 + "1", "{" * 99, "{'descr': ", "'" * 3, "9" * 5000, "1" + "**9" * 99]
HEADERS += ["__import__('os').system('x')", "{1: 2}", "{'descr', 'shape'}", "\\", "\n  x", "0L", "{'a': 0L}", "\0"]
HEADERS += ["{'descr': '|u1', 'fortran_order': False, 'shape': (2L, 2L), }", " " * 9999, "#" * 60_000, "x" * 70_000]


def npy() -> Reader:
    arrays = [PIXELS, TABLE, TABLE.astype(">f4"), PIXELS.astype(">u2"), PIXELS > 99, np.asfortranarray(TABLE)]
    real = [_stream(lambda file, a=a: np.save(file, a)) for a in arrays]
    real.append(_stream(lambda file: np.lib.format.write_array(file, TABLE, version=(2, 0))))
    forged = [npy_of(descr, (2, 2), version=version) + bytes(64) for descr in DESCRS for version in (1, 2, 3)]
    forged += [header_npy(text, version) for text in HEADERS for version in (1, 2, 3)]
    for shape in (
        (2**62, 2),
        (2**63,),
        (2**64, 2),
        (2**32, 2**32),
        (-1, 4),
        (-2, -2),
        (10**12, 4),
        (1,) * 70,
        (0, 2**63),
    ):
        forged += [npy_of(descr, shape) + bytes(64) for descr in ("|u1", "<f8", "<U0", "|O")]
    forged += [b"\x93NUMPY\x02\x00\xff\xff\xff\xff", _stream(lambda file: np.save(file, np.array([Touch()] * 4)))]
    forged += [pickle.dumps(Touch())]
    return Reader("npy", "x.npy", real, forged, shaped_npy(), check_npy)


def zipped(members: list[tuple[str, bytes]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    def write(file: io.BytesIO) -> None:
        with zipfile.ZipFile(file, "w", method) as archive:
            for name, data in members:
                archive.writestr(zipfile.ZipInfo(name), data, method)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names may come twice
        return _stream(write)


some_name = st.sampled_from(
    ("x.npy", "train.npy", "test.npy", "valid.npy", "images.npy", "usage.npy", "x", "../x.npy", "")
)


def shaped_npz() -> Some:
    member = st.tuples(some_name | st.text("ab/\\.\n\x1b", max_size=6), shaped_npy() | noise)
    rare = (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)  # which take a millisecond
    methods = st.sampled_from((zipfile.ZIP_STORED,) * 20 + (zipfile.ZIP_DEFLATED,) * 10 + rare)
    return st.tuples(st.lists(member, max_size=4), methods).map(lambda parts: zipped(*parts))


def npz_forged(name: str, array: np.ndarray) -> list[bytes]:
    """Bombs and worse; `name` is of the array that is read first."""
    many = npy_of("|u1", (128 << 24 >> 20, 1024, 1024))
    inner = _stream(lambda file: np.save(file, array))
    return [
        b"",
        zip_bomb(name, many, 128),
        zip_bomb(name, many, 128, size=200),
        zip_bomb(name, many, 128, size=2**32 - 1),
        zip_bomb(name, many, 0, size=2**32 - 1),
        zip_bomb(name, inner, 0, method=14),
        zip_bomb(name, inner, 0, method=99),
        zip_bomb(name, b"no array", 0),
        zipped([(name, zipped([(name, inner)]))]),
        zipped([(f"{i}.npy", b"") for i in range(3000)]),
        zipped([(name, inner)] * 50),
        zipped([("\x1b[31m\n.npy", inner), ("b.npy", inner)]),
        zipped([(name, inner)], zipfile.ZIP_LZMA),
        zipped([(name, inner)], zipfile.ZIP_BZIP2),
        zipped([(name, _stream(lambda file: np.save(file, np.array([Touch()] * 4))))]),
        zipped([(name, pickle.dumps(Touch()))]),
        *(zipped([(name, npy_of(descr, (2, 2)) + bytes(64))]) for descr in DESCRS),
        inner,
        pickle.dumps(Touch()),
    ]


def npz() -> Reader:
    real = [
        _stream(lambda file: np.savez(file, x=PIXELS, labels=np.zeros(20))),
        _stream(lambda file: np.savez_compressed(file, train=PIXELS[:10], test=PIXELS[10:])),
        _stream(lambda file: np.savez_compressed(file, train=TABLE[:9], valid=TABLE[9:13], test=TABLE[13:])),
    ]
    return Reader("npz", "x.npz", real, npz_forged("x.npy", PIXELS), shaped_npz(), check_npz)


def fer2013_npz() -> Reader:
    faces = np.zeros((3, 48, 48), np.uint8)
    usage = np.array(["Training", "PublicTest", "PrivateTest"])
    real = [
        _file(lambda path: write_fer2013(path.parent, 3, ".npz")),
        _stream(lambda file: np.savez_compressed(file, images=faces, usage=usage)),
    ]
    inner = _stream(lambda file: np.save(file, faces))
    bad = npy_of("<U2", (3,)) + b"\xff" * 24  # no characters at all
    forged = npz_forged("images.npy", faces)
    forged += [zipped([("images.npy", inner), ("usage.npy", each)]) for each in (bad, npy_of("<U0", (3,)), b"", inner)]
    return Reader("fer2013 npz", "fer2013.npz", real, forged, shaped_npz(), check_fer2013)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes, depth: int = 8, colour: int = 0, more: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + more + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def exif_entry(kind: int, count: int, at: int) -> bytes:
    """EXIF whose orientation is of some type, says how many values it has, and where they are."""
    return b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHIII", 274, kind, count, at, 0)


def picture_forged() -> list[bytes]:
    bomb = b"\x78\xda" + zeros(b"", 64) + bytes(4)
    text = b"c\0\0" + zlib.compress(bytes(1 << 24))
    extremes = [
        (1, 2**31 - 1),
        (2**31 - 1, 1),
        (2**31 - 1, 2**31 - 1),
        (2**32 - 1, 4),
        (0, 0),
        (1, 2**20),
        (40_000, 40_000),
    ]
    tiff = b"II*\0\x08\0\0\0" + struct.pack("<H", 3)
    turned = exif_entry(3, 1, 6)
    broken = [b"", b"II", b"II*\0" + b"\xff" * 8, turned[:-6], turned[:-4] + b"\x08\0\0\0", turned[:14] + b"\xff" * 12]
    orientations = [exif_entry(kind, count, at) for kind in range(14) for count in (0, 1, 2**32 - 1) for at in (6, 8)]
    return [
        b"",
        *(png(*size, zlib.compress(bytes(100))) for size in extremes),
        *(png(13_000, 13_000, bomb, colour=colour) for colour in (0, 2, 3, 4, 6)),
        png(8, 8, zlib.compress(bytes(72)), more=chunk(b"zTXt", text) * 40),
        png(8, 8, zlib.compress(bytes(72)), more=chunk(b"iCCP", text)),
        *(png(8, 8, zlib.compress(bytes(72)), more=chunk(b"eXIf", each)) for each in (*broken, *orientations)),
        png(8, 8, zlib.compress(bytes(72)), more=chunk(b"acTL", struct.pack(">II", 2**32 - 1, 0))),
        b"GIF89a"
        + struct.pack("<HH", 65535, 65535)
        + b"\x80\0\0"
        + bytes(6)
        + b",\0\0\0\0\xff\xff\xff\xff\0\x02\x02L\x01\0;",
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 2**31 - 1, -(2**31), 1, 24, 0, 0, 0, 0, 0, 0),
        tiff + b"".join(struct.pack("<HHII", tag, 4, 1, 2**31 - 1) for tag in (256, 257, 273)) + bytes(4),
        tiff + b"".join(struct.pack("<HHII", tag, 4, 2**32 - 1, 8) for tag in (256, 257, 273)) + struct.pack("<I", 8),
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n("
        + str(CANARY).encode()
        + b") (w) file\n%%EOF\n",
        pickle.dumps(Touch()),
    ]


def pictures() -> list[bytes]:
    colours, wide = np.stack([PIXELS[0]] * 2 + [PIXELS[1]], -1), PIXELS[0].astype(np.uint16) * 200
    grey = np.random.default_rng(2).integers(0, 256, (16, 16), np.uint8)
    made = [
        (PIXELS[0], "PNG"),
        (colours, "PNG"),
        (wide, "PNG"),
        (PIXELS[0] > 99, "PNG"),
        (grey, "JPEG"),
        (colours, "JPEG"),
    ]
    made += [(colours, "BMP"), (PIXELS[0], "GIF"), (colours, "WEBP"), (wide, "TIFF"), (colours, "TIFF")]
    files = [_stream(lambda file, a=a, f=f: Image.fromarray(a).save(file, f)) for a, f in made]
    for packing in ("tiff_lzw", "tiff_deflate", "packbits"):
        files.append(_stream(lambda file, p=packing: Image.fromarray(colours).save(file, "TIFF", compression=p)))
    files.append(_stream(lambda file: Image.fromarray(PIXELS[0] > 99).save(file, "TIFF", compression="group4")))
    files.append(_stream(lambda file: Image.fromarray(colours).quantize(4).save(file, "PNG")))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.Make] = 6, "a camera"
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        files.append(_stream(lambda file, kind=kind: Image.fromarray(colours).save(file, kind, exif=exif)))
    return files


@st.composite
def shaped_picture(draw: Any) -> bytes:
    kind = draw(st.sampled_from(("png", "gif", "bmp", "tiff", "noise")))
    side = st.sampled_from((0, 1, 4, 5, 8, 255)) | sizes
    width, height = draw(side), draw(side)
    if kind == "png":
        body = zlib.compress(bytes(draw(st.sampled_from((0, 24, 72, 1000, 70_000)))))
        depth, colour = draw(st.sampled_from((1, 2, 4, 8, 16, 3))), draw(st.integers(0, 7))
        name = draw(
            st.sampled_from((b"PLTE", b"tRNS", b"gAMA", b"pHYs", b"eXIf", b"iTXt", b"zTXt", b"fcTL", b"acTL", b"iCCP"))
        )
        return png(width, height, draw(st.just(body) | noise), depth, colour, chunk(name, draw(noise)))
    if kind == "gif":
        frame = b"," + struct.pack("<4H", *(draw(sizes) % 65536 for _ in range(4))) + draw(noise)
        return b"GIF89a" + struct.pack("<HH", width % 65536, height % 65536) + draw(noise) + frame
    if kind == "bmp":
        rest = (draw(bits) for _ in range(6))
        depth, packing = draw(st.sampled_from((1, 4, 8, 16, 24, 32, 7))), draw(st.integers(0, 6))
        return b"BM" + struct.pack("<7IHH7I", 54, 0, 54, 40, width, height, 0, 1, depth, packing, *rest) + draw(noise)
    if kind == "tiff":
        tags = st.sampled_from((256, 257, 258, 259, 262, 273, 277, 278, 279, 284, 317, 320, 322, 323, 324, 338, 339))
        entry = st.tuples(tags, st.integers(0, 13), st.sampled_from((0, 1, 2, 3, 2**31, 2**32 - 1)), bits)
        entries = [(256, 4, 1, width), (257, 4, 1, height), *draw(st.lists(entry, max_size=12))]
        table = b"".join(struct.pack("<HHII", *each) for each in entries)
        return b"II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + table + bytes(4) + draw(noise)
    return draw(
        st.sampled_from((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"RIFF\0\0\0\0WEBPVP8L", b"MM\0*"))
    ) + draw(noise)


def image() -> Reader:
    return Reader("image", "x.png", pictures(), picture_forged(), shaped_picture(), check_image)


def image_folder() -> Reader:
    grey = _stream(lambda file: Image.fromarray(PIXELS[4]).save(file, "PNG"))
    return Reader("image folder", "folder/0.png", [grey], picture_forged(), shaped_picture(), check_folder)


SMALL = load_recipe("digits").override(
    "model.couplings=3", "model.hidden_layers=1", "model.width=4", "data.shape=[2, 3]", "data.levels=17"
)
KEYS = [each.name for each in fields(Recipe)]
KEYS += [f"{table}.{each.name}" for table in TABLES for each in fields(getattr(SMALL, table))]
ODD = [
    "nan",
    "inf",
    "-inf",
    "1e400",
    "0x" + "f" * 5000,
    "9" * 5000,
    "-1",
    "0",
    "2" * 30,
    "1_0",
    "0b1",
    "true",
    "''",
    '"""',
    "[]",
]
ODD += [
    "{}",
    "{a.b=1}",
    "[" * 3000,
    "{a=" * 300,
    "[[1]]",
    '"\\u007f"',
    '"\\ud800"',
    '"\\u0000"',
    "1979-05-27",
    "07:32:00",
]
ODD += [
    "9999-99-99",
    "1979-05-27T07:32:00+99:99",
    '"a\\nb"',
    "'\x1b[31m'",
    "__import__('os').system('x')",
    "1 # x",
    "[1, 'a']",
]
numbers = st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.sampled_from(EXTREMES), st.integers(0, 5)).map(str)
values = st.recursive(
    st.one_of(
        numbers, st.sampled_from(ODD), st.booleans().map(lambda b: str(b).lower()), st.text(max_size=12).map(json.dumps)
    ),
    lambda inner: st.lists(inner, max_size=4).map(lambda each: f"[{', '.join(each)}]"),
)
some_key = st.one_of(st.sampled_from(KEYS), st.sampled_from(KEYS), st.text(max_size=10), st.just("a." * 500 + "a"))
assignment = st.tuples(some_key, st.sampled_from(("=", " = ", "=", "")), values).map("".join)


def shaped_toml() -> Some:
    lines = st.lists(assignment | st.sampled_from([f"[{table}]" for table in TABLES]), max_size=6, unique=True)
    return lines.map("\n".join) | st.text(max_size=60)


def recipe() -> Reader:
    names = ("digits", "mnist", "cifar10-best", "tfd-released")
    real = [load_recipe(name).to_toml().encode() for name in names] + [SMALL.to_toml().encode()]
    forged = [f"{key} = {value}".encode("utf-8", "surrogatepass") for key in KEYS for value in ODD]
    forged += [b"", b"\xff\xfe", b"\xef\xbb\xbf", b"a." * 8000 + b"a=1", b"a." * 80_000 + b"a=1", b"#" * (1 << 20)]
    forged += [
        b"[" + b"a." * 4000 + b"a]\n" + b"b." * 4000 + b"b=1",
        b"data.name" + b".a" * 4000 + b" = 1",
        b"[[data]]\n" * 900,
    ]
    forged += [b"name = '" + b"x" * (1 << 20) + b"'", b"title = '" + b"x" * 12_000 + b"'", pickle.dumps(Touch())]
    shaped = shaped_toml().map(lambda text: text.encode("utf-8", "surrogatepass"))
    return Reader("recipe", "own.toml", real, forged, shaped, check_recipe)


def set_option() -> Reader:
    real = [
        b"train.epochs=50",
        b"model.hidden_layers=[1, 2, 3]",
        b"data.name=own/data.npz",
        b"train.lr = 1e-3",
        b"name='x'",
    ]
    forged = [f"{key}={value}".encode() for key in KEYS for value in ODD]
    forged += [
        b"",
        b"=",
        b"==",
        b".",
        b".=1",
        b"data=1",
        b"data.name\xff=\xff",
        b"data.name=\xff",
        b"a." * 80_000 + b"a=1",
    ]
    forged += [b"train.epochs=1\ntrain.lr=2", b"data.name" + b".a" * 6000 + b"=1", b"data.name=" + b"x" * (1 << 20)]
    return Reader(
        "--set", "text", real, forged, assignment.map(lambda text: text.encode("utf-8", "surrogatepass")), check_set
    )


def written(recipe: Recipe) -> bytes:
    def write(path: Path) -> None:
        torch.manual_seed(0)
        write_tensors(path, Saved(build(recipe).state_dict(), recipe, {"epoch": 3, "valid_nats": -1.5, "step": None}))

    return _file(write)


def joined(header: object, body: bytes, size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text) if size is None else size) + text + body


def taken_apart(data: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


DTYPES = (
    "F64",
    "F32",
    "F16",
    "BF16",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
    "F4",
    "F6_E2M3",
    "I64",
    "I8",
    "U8",
    "U16",
    "U64",
    "BOOL",
)
DTYPES += ("C64", "", "X", "f32")
FIGURES = [
    "",
    "{",
    "[]",
    "null",
    "3",
    '"x"',
    "NaN",
    '{"a": NaN}',
    "[" * 100_000,
    '{"a":' * 5000,
    "9" * 5000,
    '{"a": [1]}',
]
FIGURES += ['{"step": "x"}', '{"a": {"__reduce__": "x"}}', "\x1b", "__import__('os').system('x')", "x" * 100_000, "{}"]
FORMATS = [
    "",
    "nicest",
    "nicest 0",
    "nicest 1",
    "nicest 2",
    "nicest 4",
    "nicest \u00b2",
    "nicest \u0661",
    "nicest " + "9" * 5000,
    "pt",
    "nicest -1",
]
FORMATS += ["nicest 1 ", " nicest 1", "\x1b[31m", "x" * 100_000]
ABSURD = [
    "model.couplings=1000",
    "model.width=100000",
    "model.hidden_layers=1000",
    "data.shape=[1000000000]",
]
ABSURD += [
    "data.shape=[]",
    "data.shape=[1]",
    "data.shape=[2,2,2,2]",
    "data.levels=0",
    "data.levels=65536",
    "model.law=affine",
]
ABSURD += [
    "model.preprocess=zca",
    "model.preprocess=logit",
    "model.preprocess=triangular",
    "model.partition=checkerboard",
]
ABSURD += ["model.partition=halves", "model.learned_prior=true", "model.dropout=0.5", "data.interval=[-1e308,1e308]"]
ABSURD += [
    "data.interval=[0,1e-300]",
    "model.bound=1e-300",
    "model.hidden_layers=0",
    "model.couplings=90",
    "model.width=9000",
]
ABSURD += ["data.shape=[30000]", "data.shape=[9223372036854775807,9223372036854775807]", "model.hidden_layers=[1,0,2]"]
ABSURD_RECIPES = [SMALL.override(each).to_toml() for each in ABSURD]


@st.composite
def shaped_tensors(draw: Any) -> bytes:
    model = draw(st.sampled_from(range(len(MODELS))))
    header, body = dict(APART[model][0]), APART[model][1]
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from([*header, "x"]))
        entry = dict(header.get(name) or {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
        what = draw(st.sampled_from(("dtype", "shape", "offset", "gone", "new", "recipe", "figures", "format", "meta")))
        metadata = header["__metadata__"] = dict(header.get("__metadata__") or {})
        if what == "dtype":
            dtype = draw(st.sampled_from(DTYPES))
            header[name] = entry | {"dtype": dtype}
        elif what == "shape":
            header[name] = entry | {"shape": draw(st.lists(bits | st.integers(-5, 5), max_size=4))}
        elif what == "offset":
            header[name] = entry | {"data_offsets": draw(st.lists(bits, max_size=3))}
        elif what == "gone":
            header.pop(name, None)
        elif what == "new":
            header[draw(st.text(max_size=9))] = draw(
                st.just(entry) | st.none() | st.just([]) | st.just({"dtype": "F32"})
            )
        elif what == "recipe":
            metadata["recipe"] = draw(st.sampled_from(ABSURD_RECIPES) | shaped_toml())
        elif what == "figures":
            metadata["figures"] = draw(st.sampled_from(FIGURES) | st.text(max_size=20))
        elif what == "format":
            metadata["format"] = draw(st.sampled_from(FORMATS) | st.text(max_size=9))
        else:
            header["__metadata__"] = draw(st.none() | st.just({}) | st.just({"recipe": 3}) | st.just([]))
    size = draw(st.none() | st.sampled_from(EXTREMES)) if draw(st.integers(0, 9)) == 0 else None
    return joined(header, body, size)


MODELS = [
    written(SMALL.override(*overrides))
    for overrides in ((), ("model.preprocess=zca", "model.law=affine"), ("data.levels=0", "model.learned_prior=true"))
]
APART = [taken_apart(model) for model in MODELS]


def tensors_forged() -> list[bytes]:
    header, body = taken_apart(MODELS[0])
    named = next(name for name in header if name != "__metadata__")

    def with_metadata(**changes: str) -> bytes:
        return joined(header | {"__metadata__": header["__metadata__"] | changes}, body)

    forged = [struct.pack("<Q", size) + b"{}" for size in EXTREMES]
    forged += [joined(b"{" * size, b"") for size in (1, 100, 10**6)]
    forged += [joined(b'{"a":' + b"[" * 10**6, b""), joined(b" " * 10**6 + b"{}", b""), joined({}, b""), b""]
    forged += [with_metadata(recipe=SMALL.override(each).to_toml()) for each in ABSURD]
    forged += [with_metadata(figures=each) for each in FIGURES]
    forged += [with_metadata(format=each) for each in FORMATS]
    forged += [
        with_metadata(recipe="a." * 80_000 + "a=1"),
        with_metadata(recipe="[" * 5000),
        with_metadata(recipe="\0"),
    ]
    for dtype in DTYPES:
        forged.append(joined(header | {named: header[named] | {"dtype": dtype}}, body))
        forged.append(joined(header | {"more": {"dtype": dtype, "shape": [0], "data_offsets": [len(body)] * 2}}, body))
        start, end = header[named]["data_offsets"]
        for width in (1, 2, 8):
            shape = [max(1, (end - start) // width)]
            forged.append(joined(header | {named: header[named] | {"dtype": dtype, "shape": shape}}, body))
    for shape in ([0, 2**63], [2**64 - 1, 0], [2**32, 2**32], [-1], [1.5], [[1]], [0] * 5000, [1] * 70):
        forged.append(
            joined(header | {"more": {"dtype": "F32", "shape": shape, "data_offsets": [len(body)] * 2}}, body)
        )
    many = {f"{i}\x1b": {"dtype": "F32", "shape": [0], "data_offsets": [len(body)] * 2} for i in range(20_000)}
    forged += [joined(header | many, body), joined({"__metadata__": header["__metadata__"]} | many, b"")]
    forged += [_file(lambda path: torch.save({"weights": Touch()}, path)), pickle.dumps(Touch())]
    return forged


def tensors() -> Reader:
    return Reader("safetensors", "last.safetensors", MODELS, tensors_forged(), shaped_tensors(), check_tensors)


def model() -> Reader:
    return Reader("model", "model.safetensors", MODELS, tensors_forged(), shaped_tensors(), check_model)


def check_metrics(path: Path, data: bytes) -> None:
    run = RunFolder(path.parent)
    rows = run.metrics()
    run.drop_metrics_after(2)
    require(run.metrics() == [row for row in rows if row["step"] <= 2], "other rows")


def metrics() -> Reader:
    rows = [{"epoch": i, "step": i, "valid_nats": -1.5 * i, "lr": 1e-3, "seconds": 0.5} for i in range(1, 4)]
    lines = [json.dumps(row).encode() for row in rows]
    real = [b"\n".join(lines) + b"\n", lines[0] + b"\n" + lines[1][:20], b""]
    forged = [text.encode("utf-8", "surrogatepass") + b"}\n" for text in (*FIGURES, *ODD)]
    forged += [
        b"{" * 100_000 + b"}" * 100_000,
        b'{"step": "x"}',
        b'{"step": 1e999}',
        b"\xff}",
        b"\0}",
        b"}",
        b'{"step": NaN}',
    ]
    forged += [
        b'{"step": ' + b"9" * 5000 + b"}",
        b'{"step": 1, "a": ' + b"[" * 9999 + b"]" * 9999 + b"}",
        pickle.dumps(Touch()),
    ]
    row = st.tuples(st.sampled_from(("step", "epoch")) | st.text(max_size=4), values).map(
        lambda pair: f'{{"{pair[0]}": {pair[1]}}}'
    )
    shaped = st.lists(row | st.text(max_size=20), max_size=4).map(
        lambda each: "\n".join(each).encode("utf-8", "surrogatepass")
    )
    return Reader("metrics", "metrics.jsonl", real, forged, shaped, check_metrics)


# ---- files of `nicest compress`


class Apart(NamedTuple):
    """A compressed file in its parts; `whole` gives it checksums that are right."""

    says: Any
    blocks: list[bytes]

    @classmethod
    def of(cls, data: bytes) -> "Apart":
        size = coded.START.unpack_from(data)[2]
        says = json.loads(data[coded.START.size : coded.START.size + size])
        end = coded.START.size + size + coded.ENTRY.size * -(-says["rows"] // says["block"])
        table = coded.ENTRY.iter_unpack(data[coded.START.size + size : end])
        return cls(says, [data[offset : offset + length] for offset, length, _ in table])

    def whole(self, change: Callable[[tuple[int, int, int]], tuple[int, int, int]] = lambda entry: entry) -> bytes:
        text = json.dumps(self.says).encode("utf-8", "surrogatepass")
        at, table = coded.START.size + len(text) + coded.ENTRY.size * len(self.blocks), b""
        for block in self.blocks:
            table += coded.ENTRY.pack(*change((at, len(block), zlib.crc32(block))))
            at += len(block)
        start = coded.START.pack(coded.MAGIC, coded.VERSION, len(text), zlib.crc32(text + table))
        return start + text + table + b"".join(self.blocks)


NONSENSE = st.sampled_from(
    [
        *(None, True, -1, 0, 1, 3, 65_536, 1 << 40, 1 << 64, math.inf, -math.inf, math.nan, 0.5, [], {}, [[1]]),
        *("", "x", "\0", "\n\x1b[31m", "\ud800", "x" * 5000, "../" * 2000, ".csv", ".npy", ".parquet", "AAAA", "9" * 8),
        *([["999999999", "", False]] * 6, [["r", "x" * 5000, True]] * 6, [-1] * 6, [8, 8], [1 << 40, 0], [*range(6)]),
        *([math.inf] * 6, [None] * 6, [0] * 6, ["x"] * 6),
    ]
)


@st.composite
def shaped_compressed(draw: Any, real: list[bytes]) -> bytes:
    """Right checksums, but one thing in the header, a block, or where the table says that blocks are, is not right."""
    rng = draw(Some(lambda rng: rng))
    apart = Apart.of(rng.choice(real))
    match rng.randrange(4):
        case 0:
            among = apart.says["table"] if "table" in apart.says and rng.random() < 0.6 else apart.says
            key = rng.choice([*among])
            among[key] = draw(NONSENSE)
            if rng.random() < 0.2:
                del among[key]
            return apart.whole()
        case 1:
            k = rng.randrange(3)
            return apart.whole(lambda entry: (*entry[:k], rng.choice(EXTREMES) % (1 << 32), *entry[k + 1 :]))
    if apart.blocks:
        k = rng.randrange(len(apart.blocks))
        apart.blocks[k] = damaged(rng, [apart.blocks[k]])
    return apart.whole()


def compressed() -> Reader:
    """Images, and tables of every format, by two small models that are trained here."""
    from codec_trial import Quick, Trial, small_digits

    from nicest.codec import files, tables

    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    digits, (things, table) = small_digits(folder), Trial.things(folder)
    images = load("digits").test[:50].reshape(-1, 8, 8)
    np.save(folder / "images.npy", images)
    kinds = pa.array(["red", "never seen", None, "green", "red", "red", "light blue"])
    some = table.slice(0, 7).set_column(3, "kind", kinds)
    for name, rows in (("all", table.slice(0, 7)), ("odd", some), ("none", table.slice(0, 0))):
        csv.write_csv(rows, folder / f"{name}.csv")
        parquet.write_table(rows, folder / f"{name}.parquet")
    quick, file = Quick(), io.BytesIO()
    coded.write_rows(file, quick(digits.flow), images, shape=(8, 8), block=20)
    real, expected = [file.getvalue()], {file.getvalue(): (digits, folder / "images.npy")}
    with mock.patch.object(tables, "BLOCK", 3):
        for name in (f"{name}.{suffix}" for name in ("all", "odd", "none") for suffix in ("csv", "parquet")):
            files.compress_files(things, [folder / name], out=folder / "x.nicest")
            real.append((folder / "x.nicest").read_bytes())
            expected[real[-1]] = things, folder / name
    headers = {data[: coded.START.size + coded.START.unpack_from(data)[2]]: each for data, each in expected.items()}

    def check(path: Path, data: bytes) -> None:
        suffix = re.search(rb'"suffix": "([.]\w{1,8})"', data)
        out = path.with_name("back" + (suffix[1].decode() if suffix else ".npy"))
        size = coded.START.unpack_from(data)[2] if len(data) >= coded.START.size else 0
        run, file = headers.get(data[: coded.START.size + size], (digits if not suffix else things, None))
        with mock.patch.object(files, "Codec", quick), mock.patch.object(tables, "Codec", quick):
            result = files.decompress_file(path, out=out, run=run)
        require(out.exists() and isinstance(result["rows"], int) and result["rows"] >= 0, "no answer")
        if file is not None:  # only blocks may be damaged
            size, lost = (20 if run is digits else 3), result.get("lost_blocks", [])
            rows = [row for i, row in enumerate(rows_in(file)) if i // size not in lost]
            require(rows_in(out) == rows, "other rows")

    forged = [b"", coded.MAGIC, coded.MAGIC + bytes(12), coded.MAGIC + b"\xff" * 40, pickle.dumps(Touch())]
    for data in real:
        for rows, block in ((1 << 62, 1), (1 << 40, 65_536), (10**6, 1), (-1, 4), (5, 0), (5, 65_537)):
            apart = Apart.of(data)
            apart.says.update(rows=rows, block=block)
            forged.append(apart.whole())
        apart = Apart.of(data)
        forged += [Apart({}, apart.blocks).whole(), Apart([], apart.blocks).whole(), data + bytes(1 << 20)]
        forged += [Apart({**apart.says, "rows": 65_536, "block": 65_536}, [bomb]).whole() for bomb in block_bombs()]
    return Reader("compressed", "x.nicest", real, forged, shaped_compressed(real), check)


def rows_in(path: Path) -> list[Any]:
    """The rows of an array, a .csv or a .parquet file."""
    if path.suffix == ".npy":
        return [each.tobytes() for each in np.load(path)]
    return parquet.read_table(path).to_pylist() if path.suffix == ".parquet" else path.read_bytes().splitlines()[1:]


@cache
def block_bombs() -> list[bytes]:
    """Blocks that say they hold 65,536 rows of which nothing or next to nothing is there."""
    squeezed = lzma.compress(bytes(1 << 26), lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 6}])
    found = []
    for odd in (0, 65_536):
        for raw, mask in ((0, 0), (len(squeezed), 0), (0, len(squeezed)), (2**32 - 1, 2**32 - 1)):
            head = struct.pack("<6I", 65_536, 1 - bool(odd), odd, raw, mask, 0)
            body = head + np.arange(odd, dtype="<u4").tobytes() + (b"\xff\xff" if not odd else b"") + squeezed
            found += [body, struct.pack("<5I", 65_536, len(body), 0, 0, 0) + body]
    found.append(struct.pack("<5I", 65_536, 24, 65_536, 2**32 - 1, len(squeezed)) + bytes(24) + squeezed)
    return found


READERS: dict[str, Callable[[], Reader]] = {
    "idx": idx,
    "idx.gz": idx_gz,
    "cifar10": cifar10,
    "svhn": svhn,
    "tfd": tfd,
    "fer2013 csv": fer2013,
    "fer2013 npz": fer2013_npz,
    "npy": npy,
    "npz": npz,
    "image": image,
    "image folder": image_folder,
    "recipe": recipe,
    "--set": set_option,
    "safetensors": tensors,
    "model": model,
    "metrics": metrics,
    "csv table": csv_table,
    "parquet": parquet_table,
    "arrow": lambda: arrow_ipc("arrow", "x.arrow"),
    "feather": lambda: arrow_ipc("feather", "x.feather"),
    "columns": columns_file,
    "compressed": compressed,
}


PART = 2000  # cases of a reader between two entries in the results
SHOWN = 10  # seconds between two lines of progress
TASKS = 200  # parts after which a process is replaced by a new one


class Done(NamedTuple):
    """A part that came to its end."""

    counts: Counter[str]
    said: list[str]
    seconds: float


@cache
def reader_of(name: str) -> Reader:
    """A reader that has read a file: what it imports on that occasion is no case's time."""
    reader = READERS[name]()
    with tempfile.TemporaryDirectory() as folder:
        Tally().feed(reader, Path(folder), reader.real[0])
    return reader


def one_part(name: str, part: int, seed: int, keep: Path | None) -> Done:
    """A part of the cases of one reader, in a process of its own."""
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    reader, began = reader_of(name), processor_time()
    tally = fuzz(reader, PART, seed, keep, part)
    return Done(tally.counts, tally.said, processor_time() - began)


class Results:
    """What all sittings found so far, by reader; written down about every second."""

    def __init__(self, out: Path | None, seed: int, names: list[str], cases: int) -> None:
        self.out, self.names, self.written = out, names, 0.0
        self.all: dict[str, Any] = {"seed": seed, "part": PART, "sittings": [], "readers": {}, "said": []}
        if out and out.exists():
            found = json.loads(out.read_text())
            if (found.get("seed"), found.get("part")) == (seed, PART):
                self.all = found
            else:
                print(f"{out} is of another seed or kind: it is begun anew")
        for name in READERS:
            self.all["readers"].setdefault(name, {"parts": 0, "seconds": 0.0} | dict.fromkeys(OUTCOMES, 0))
        versions = {each.__name__: each.__version__ for each in (nicest, np, scipy, PIL, pa, torch, safetensors)}
        date, versions["python"] = datetime.now(UTC).isoformat(timespec="seconds"), platform.python_version()
        self.sitting = {"date": date, "versions": versions, "cases": 0, "seconds": 0.0}
        self.all["sittings"].append(self.sitting)
        self.started = {name: self.parts(name) for name in names}  # the part that is next
        self.ahead: dict[tuple[str, int], Done] = {}  # parts that are done before an earlier one is
        rows = {name: self.all["readers"][name] for name in names}
        self.wanted = {n: row["parts"] + math.ceil(max(0, cases - row["cases"]) / PART) for n, row in rows.items()}

    def parts(self, name: str) -> int:
        return int(self.all["readers"][name]["parts"])

    def next(self) -> tuple[str, int] | None:
        """The part whose turn it is, of the reader that is behind the most."""
        left = [name for name in self.names if self.started[name] < self.wanted[name]]
        if not left:
            return None
        name = min(left, key=self.started.__getitem__)
        self.started[name] += 1
        return name, self.started[name] - 1

    def add(self, name: str, part: int, done: Done) -> None:
        """Count a part, once all before it are counted: the next sitting goes on after the last."""
        self.ahead[name, part] = done
        row = self.all["readers"][name]
        while done := self.ahead.pop((name, row["parts"]), None):
            row["parts"] += 1
            row["seconds"] = round(row["seconds"] + done.seconds, 1)
            for outcome in OUTCOMES:
                row[outcome] += done.counts[outcome]
            self.sitting["cases"] += done.counts["cases"]
            self.sitting["seconds"] = round(self.sitting["seconds"] + done.seconds, 1)
            self.all["said"] = [*self.all["said"], *done.said][:100]
        if time.monotonic() - self.written > 1:
            self.write()

    def write(self) -> None:
        self.written = time.monotonic()
        if self.out:
            write_text(self.out, json.dumps(self.all, indent=2) + "\n")

    def progress(self, jobs: int) -> str:
        """How far it is, and how long it takes still by the pace of this sitting."""
        rows = [self.all["readers"][name] for name in self.names]
        done, cases, wanted = sum(row["parts"] for row in rows), sum(row["cases"] for row in rows), self.wanted.values()
        pace = self.sitting["seconds"] / max(1, self.sitting["cases"])
        seconds = pace * PART * (sum(wanted) - done) / jobs
        left = timedelta(seconds=round(seconds)) if pace or sum(wanted) == done else "an unknown time"
        bad = sum(row[each] for row in rows for each in REST)
        return f"{done} of {sum(wanted)} parts, {cases:,} cases, {bad} bad, {left} left"

    def table(self) -> str:
        lines = [f"{'reader':<14}{'cases':>10}{'clear errors':>14}{'right answers':>15}{'the rest':>10}{'seconds':>9}"]
        for name in self.names:
            row = self.all["readers"][name]
            cells = (row["cases"], row["clear"], row["right"], sum(row[each] for each in REST), round(row["seconds"]))
            lines.append(name.ljust(14) + "".join(f"{c:>{w}}" for c, w in zip(cells, (10, 14, 15, 10, 9), strict=True)))
        return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20_000, help="for each reader, in all sittings together")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of this sitting, after which no part begins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", action="append", choices=list(READERS), help="only this one; may come again")
    parser.add_argument("--out", type=Path, help="a .json file that keeps the counts; a later sitting adds to it")
    parser.add_argument("--keep", type=Path, help="a folder for the files that were read badly")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="readers at once, each in a process")
    asked = parser.parse_args()
    results = Results(asked.out, asked.seed, asked.reader or list(READERS), asked.cases)
    print(results.progress(asked.jobs), flush=True)
    sit(results, asked, time.monotonic() + 60 * asked.minutes)
    results.write()
    print(results.progress(asked.jobs), results.table(), *results.all["said"], sep="\n")
    return 1 if results.all["said"] else 0


def sit(results: Results, asked: argparse.Namespace, end: float) -> None:
    """Parts, as many at once as there are jobs, until all are done or the time is over."""
    context, shown = multiprocessing.get_context("spawn"), time.monotonic()
    running: dict[Future[Done], tuple[str, int]] = {}
    with ProcessPoolExecutor(asked.jobs, context, max_tasks_per_child=TASKS) as pool:
        try:
            while True:
                while time.monotonic() < end and len(running) < asked.jobs and (part := results.next()):
                    running[pool.submit(one_part, *part, asked.seed, asked.keep)] = part
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    results.add(*running[future], future.result())
                    del running[future]
                if time.monotonic() - shown > SHOWN:
                    shown = time.monotonic()
                    print(results.progress(asked.jobs), flush=True)
        except BrokenProcessPool:
            suspects = list(running.values())
        except KeyboardInterrupt:
            print("stopped; the parts that were running are not counted")
            pool.shutdown(wait=False, cancel_futures=True)
            return
    for name, part in suspects:  # each alone, to tell which of them it was
        with ProcessPoolExecutor(1, context) as pool:
            try:
                done = pool.submit(one_part, name, part, asked.seed, asked.keep).result()
            except BrokenProcessPool:
                done = Done(Counter(traceback=1), [f"{name}: the process ended in the middle of part {part}"], 0.0)
        results.add(name, part, done)
    sit(results, asked, end)


if __name__ == "__main__":
    sys.exit(main())
