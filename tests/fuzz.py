"""Hostile files: each reader gets real ones damaged, forged and random ones; it answers right or with a clear error.

`make fuzz` runs it, 20,000 cases for each reader; the tests run a short version. The cases come in parts, each with a
seed of its own. With --out, every part that is done is written down, and the next run goes on after it.
"""

import argparse
import gzip
import hashlib
import io
import json
import math
import multiprocessing
import os
import pickle
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import ExifTags, Image
from pyarrow import csv, parquet

sys.path.append(str(Path(__file__).parent / "data"))  # of `published`

from nicest.tasks.pictures import fit_picture
from published import idx_bytes

import nicest
from nicest.codec import compress
from nicest.codec.container import CompressedFile, decompress
from nicest.data import Splits, images, load
from nicest.data.arrays import read_npy, read_npz
from nicest.data.columns import Schema
from nicest.data.tables import TableFile, read_table
from nicest.errors import NicestError
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
LINE = 1000  # characters of a message, without the path of its file
PART = 2000  # cases of a reader between two entries in the results
EXTREMES = (0, 1, 2, 127, 128, 255, 256, 32767, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
BAD = ("wrong", "traceback", "hang", "memory", "code")
CANARY = Path(tempfile.gettempdir()) / f"nicest-fuzz-{os.getpid()}"  # what code in a file would create

Check = Callable[[Path, bytes], None]
Draw = Callable[[random.Random], bytes]


class Hang(BaseException):
    """Too long; no reader may catch it."""


class Wrong(Exception):
    """An answer that is not right."""


def require(holds: object, what: str) -> None:
    if not holds:
        raise Wrong(what)


@dataclass
class Reader:
    """A reader: real files for it, forged ones, and perhaps a draw of more; `check` reads a file and judges it."""

    file: str
    real: list[bytes]
    forged: list[bytes]
    check: Check
    draw: Draw | None = None


@dataclass
class Tally:
    """What became of the cases of one reader."""

    counts: Counter[str] = field(default_factory=Counter)
    said: list[str] = field(default_factory=list)  # of bad cases, what and why

    def feed(self, reader: Reader, folder: Path, data: bytes, *, sound: bool = False) -> None:
        """Judge one case; a `sound` file must be read."""
        path = folder / reader.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        outcome, why = judge(reader.check, path, data)
        if sound and outcome == "clear":
            outcome = "wrong"
        self.counts.update(["cases", outcome])
        if outcome in BAD:
            digest = hashlib.blake2b(data, digest_size=6).hexdigest()
            self.said.append(f"{reader.file} {digest}: {outcome}: {why[:300]}")


def judge(check: Check, path: Path, data: bytes) -> tuple[str, str]:
    """Return what became of one case, and what was said."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    signal.setitimer(signal.ITIMER_REAL, WAIT)
    try:
        try:
            check(path, data)
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
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        outcome, why = "traceback", repr(error)
    if (used := time.process_time() - began) > SECONDS:
        outcome, why = "hang", f"{used:.1f} s of processor time"
    if (taken := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) > MEMORY >> 10:
        outcome, why = "memory", f"{taken >> 10} MiB"
    if CANARY.exists():
        CANARY.unlink()
        outcome, why = "code", "a file was executed"
    return outcome, why


@contextmanager
def limits() -> Iterator[None]:
    """Bound time and memory; silence warnings, and what libraries write past Python."""

    def alarm(*_: object) -> None:
        raise Hang

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(OSError):  # only Linux has this file
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


def fuzz(name: str, reader: Reader, cases: int, seed: int = 0, part: int = 0) -> Tally:
    """Feed a reader: in the first part the real and the forged files, then damaged and drawn ones."""
    tally, rng = Tally(), random.Random(f"{seed} {name} {part}")
    with tempfile.TemporaryDirectory() as folder, limits():
        for data in () if part else reader.real:
            tally.feed(reader, Path(folder), data, sound=True)
        for data in () if part else reader.forged:
            tally.feed(reader, Path(folder), data)
        for i in range(cases - tally.counts["cases"]):
            drawn = reader.draw(rng) if reader.draw and i % 2 else damaged(rng, reader.real)
            tally.feed(reader, Path(folder), drawn)
    return tally


def damaged(rng: random.Random, files: list[bytes]) -> bytes:
    """Return a real file, damaged once or a few times; once in a while nothing but noise."""
    if rng.random() < 0.03:
        return rng.randbytes(rng.randrange(4000))
    data = bytearray(rng.choice(files))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        near, size = rng.randrange(200), rng.choice((1, 1, 2, 4, 8, 64, 500))
        at = min(len(data), max(0, rng.choice((near, near, len(data) - near, rng.randrange(len(data) + 1)))))
        match rng.randrange(8):
            case 0:
                del data[at:]
            case 1 | 2:
                data[at : at + 1] = bytes([data[at] ^ 1 << rng.randrange(8)]) if at < len(data) else b"\0"
            case 3:
                data[at:at] = rng.randbytes(size)
            case 4:
                del data[at : at + size]
            case 5 | 6:
                width, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
                data[at : at + width] = (rng.choice(EXTREMES) % 256**width).to_bytes(width, order)
            case 7:
                data[at : at + size] = bytes(size)
    return bytes(data)


class Touch:
    """What executes when a pickle is loaded."""

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (CANARY,))


PICKLE = pickle.dumps(Touch())


def stream(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def of_file(write: Callable[[Path], object]) -> bytes:
    with tempfile.TemporaryDirectory() as name:
        write(Path(name) / "file")
        return (Path(name) / "file").read_bytes()


# ---- odd values, as JSON and TOML may have them

ODD: list[Any] = [None, True, -1, 0, 1, 0.5, math.nan, math.inf, 10**400, 2**63, "", "x", "\x1b[31m", "9" * 5000]
ODD += ["\ud800", [], [1], [[]], {}, {"a": 1}, [-1] * 6, ["b", "a"], "../" * 2000, "2026-01-01", "\0"]
WORDS = ["", "nan", "inf", "-1", "0", "2" * 30, "1e400", "0x" + "f" * 5000, "9" * 5000, "''", '"""', "[]", "{}", "[1]"]
WORDS += ["[" * 3000, "{a=" * 300, '"\\ud800"', '"\\u0000"', "07:32:00", "9999-99-99", "'\x1b[31m'", "1 # x"]
TEXTS = [*WORDS, '{"a": NaN}', '{"step": "x"}', "__import__('os').system('x')", "[" * 100_000, "x" * 100_000]


def utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def odd_json(rng: random.Random, value: Any) -> Any:
    """Replace, remove or double something deep inside a JSON value."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice([*value])
        changed = value | {key: odd_json(rng, value[key])}
        if rng.random() < 0.1:
            changed[rng.choice(("x", "name", "step"))] = changed.pop(key)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.8:
        i = rng.randrange(len(value))
        return [*value[:i], odd_json(rng, value[i]), *value[i + rng.choice((0, 1, 1, 1)) :]]
    return rng.choice(ODD)


# ---- bombs


def zeros(before: bytes, count: int) -> bytes:
    """Return a deflate stream of some bytes and `count` times 16 MiB of zeros, about a thousandth of that."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = deflate.compress(before) + deflate.flush(zlib.Z_FULL_FLUSH)
    return first + _block() * count + deflate.flush()


@cache
def _block() -> bytes:
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    return deflate.compress(bytes(1 << 24)) + deflate.flush(zlib.Z_FULL_FLUSH)


def gzip_bomb(before: bytes, count: int) -> bytes:
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + zeros(before, count) + bytes(8)


def zip_bomb(name: str, before: bytes, count: int, size: int | None = None, method: int = 8) -> bytes:
    """Return a .zip of one member; `size` is what its header claims."""
    body, written = zeros(before, count), name.encode()
    size = len(before) + (count << 24) if size is None else size
    common = struct.pack("<HHHHHIIIHH", 20, 0, method, 0, 33, 0, len(body), size, len(written), 0)
    local = b"PK\3\4" + common + written + body
    central = b"PK\1\2" + struct.pack("<H", 20) + common + struct.pack("<HHHII", 0, 0, 0, 0, 0) + written
    return local + central + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local), 0)


# ---- arrays

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 4, 5), np.uint8)
NUMBERS = np.random.default_rng(1).normal(size=(20, 4))


def check_splits(path: Path, _: bytes = b"") -> None:
    """Judge what a user gets from a path."""
    splits = load(str(path))
    require(isinstance(splits, Splits), "no splits")
    dtypes = {None: np.float32, 2: np.uint8, 256: np.uint8, 65536: np.uint16}
    for part in ("train", "valid", "test"):
        rows = splits.split(part)
        require(rows.ndim == 2 and rows.shape[1] == math.prod(splits.shape) and len(rows), "rows")
        require(rows.dtype == dtypes[splits.levels] and rows.dtype.isnative, "dtype of rows")
        require(splits.levels is None or rows.max() < splits.levels, "level beyond levels")
        require(splits.levels is not None or not np.isinf(rows).any(), "not finite")
        require(splits.schema is not None or splits.levels is not None or not np.isnan(rows).any(), "missing")


def check_idx(path: Path, data: bytes) -> None:
    got = images.read_idx(path)
    require(idx_bytes(got) == (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data), "other values")
    check_splits(path)


def check_npy(path: Path, data: bytes) -> None:
    got = read_npy(path)
    require(not got.dtype.hasobject and (got.tobytes() in data or got.tobytes("F") in data), "other values")
    check_splits(path)


def check_npz(path: Path, data: bytes) -> None:
    require(not any(got.dtype.hasobject for got in read_npz(path).values()), "no numbers")
    check_splits(path)


def header_idx(code: int, sizes: list[int]) -> bytes:
    return struct.pack(f">BBBB{len(sizes)}I", 0, 0, code, len(sizes), *sizes)


def idx() -> Reader:
    real = [idx_bytes(each) for each in (PIXELS, NUMBERS.astype("f4"), NUMBERS, PIXELS[:, 0].astype("i2"))]
    forged = [b"", PICKLE, *(header_idx(8, [1] * rank) + b"x" for rank in (1, 2, 8, 9, 32, 33, 255))]
    forged += [header_idx(8, [size] * rank) for size in (2**31 - 1, 2**32 - 1) for rank in (1, 2, 3, 4, 255)]
    forged += [header_idx(14, [2**32 - 1, 2**32 - 1, 2**32 - 1, 0][-rank:]) for rank in (1, 2, 3, 4)]
    return Reader("x-idx3-ubyte", real, forged, check_idx)


def idx_gz() -> Reader:
    plain = idx()
    real, forged = ([gzip.compress(each, mtime=0) for each in some] for some in (plain.real, plain.forged))
    bomb = gzip_bomb(b"", 1)[:-8] * 64
    forged += [gzip_bomb(header_idx(8, [2048, 1024, 1024]), 128), bomb, gzip.compress(real[0]), b"\x1f\x8b\x08"]
    return Reader("x-idx3-ubyte.gz", real, forged, check_idx)


def header_npy(text: str, version: int = 1) -> bytes:
    """Return the opening of a .npy file with any header at all."""
    written = text.encode("utf-8" if version == 3 else "latin1", "replace")
    width = "<H" if version == 1 else "<I"
    size = struct.pack(width, len(written) & (256 ** struct.calcsize(width) - 1))
    return b"\x93NUMPY" + bytes([version, 0]) + size + written


def npy_of(descr: object, shape: object, version: int = 1) -> bytes:
    return header_npy(f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}\n", version)


DESCRS: list[Any] = ["|u1", "<f4", ">u2", "|b1", "<u8", "<f2", "<f16", "<c8", "|O", "<U3", "<U0", "|V0", "|V7"]
DESCRS += ["<M8[ns]", "<U536870912", "", ",", [("a", "<f4")], ("|u1", (2, 3)), [["a"]], 5, None, [("\x1b[31m", "<i4")]]
HEADERS = ["(" * 9000, "-" * 9000 + "1", "{'descr': ", "9" * 5000, "1" + "**9" * 99, "__import__('os').system('x')"]
HEADERS += ["{1: 2}", "\\", "{'a': 0L}", "\0", " " * 9999, "#" * 60_000, "x" * 70_000]
SHAPES: list[Any] = [(2**62, 2), (2**63,), (2**64, 2), (2**32, 2**32), (-1, 4), (-2, -2), (10**12, 4), (1,) * 70]


def npy() -> Reader:
    arrays = [PIXELS, NUMBERS, NUMBERS.astype(">f4"), PIXELS.astype(">u2"), PIXELS > 99, np.asfortranarray(NUMBERS)]
    real = [stream(lambda file, a=a: np.save(file, a)) for a in arrays]
    forged = [npy_of(descr, (2, 2), version) + bytes(64) for descr in DESCRS for version in (1, 2, 3)]
    forged += [header_npy(text, version) for text in HEADERS for version in (1, 2, 3)]
    forged += [npy_of(descr, shape) + bytes(64) for shape in SHAPES for descr in ("|u1", "<f8", "<U0", "|O")]
    forged += [b"\x93NUMPY\2\0\xff\xff\xff\xff", PICKLE, stream(lambda file: np.save(file, np.array([Touch()])))]
    return Reader("x.npy", real, forged, check_npy)


def zipped(*members: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    def write(file: io.BytesIO) -> None:
        with zipfile.ZipFile(file, "w", method) as archive:
            for name, data in members:
                archive.writestr(zipfile.ZipInfo(name), data, method)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names may come twice
        return stream(write)


def npz() -> Reader:
    real = [
        stream(lambda file: np.savez(file, x=PIXELS, labels=np.zeros(20))),
        stream(lambda file: np.savez_compressed(file, train=PIXELS[:10], test=PIXELS[10:])),
        stream(lambda file: np.savez_compressed(file, train=NUMBERS[:9], valid=NUMBERS[9:13], test=NUMBERS[13:])),
    ]
    inner, many = stream(lambda file: np.save(file, PIXELS)), npy_of("|u1", (2048, 1024, 1024))
    forged = [zip_bomb("x.npy", many, 128, size) for size in (None, 200, 2**32 - 1)] + [b"", inner, PICKLE]
    forged += [zip_bomb("x.npy", inner, 0, method=method) for method in (14, 99)]
    forged += [zipped(("x.npy", each)) for each in (zipped(("x.npy", inner)), PICKLE, b"no array")]
    forged += [zipped(("x.npy", npy_of(descr, (2, 2)) + bytes(64))) for descr in DESCRS]
    forged += [zipped(*([("x.npy", inner)] * 50)), zipped(("\x1b[31m\n.npy", inner), ("b.npy", inner))]
    forged += [zipped(("x.npy", inner), method=method) for method in (zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2)]
    return Reader("x.npz", real, forged, check_npz)


# ---- pictures


def check_image(path: Path, data: bytes) -> None:
    got = images.read_images([path])
    require(got.ndim in (3, 4) and len(got) == 1 and got.shape[3:] in ((), (3,)), "shape")
    require(got.dtype in (np.bool_, np.uint8, np.uint16), "dtype")


def check_upload(path: Path, data: bytes) -> None:
    """Judge a picture that the studio is sent."""
    row = fit_picture(data, SMALL.data)
    require(row.shape == (SMALL.data.dim,) and row.max() < SMALL.data.levels, "no levels")


def check_folder(path: Path, data: bytes) -> None:
    """Judge a folder in which one image of four, the first, is suspect."""
    for i in (1, 2, 3):
        if not (path.parent / f"{i}.png").exists():
            Image.fromarray(PIXELS[i]).save(path.parent / f"{i}.png")
    check_splits(path.parent)


def png(width: int, height: int, data: bytes, colour: int = 0, **more: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0))]
    parts += [(kind.encode(), each) for kind, each in more.items()] + [(b"IDAT", data), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in parts)


def picture_forged() -> list[bytes]:
    bomb, plain, text = b"\x78\xda" + zeros(b"", 64) + bytes(4), zlib.compress(bytes(72)), zlib.compress(bytes(1 << 24))
    start, vast = b"II*\0\x08\0\0\0", 2**31 - 1
    turned = [start + struct.pack("<HHHIII", 1, 274, kind, n, 6, 0) for kind in range(14) for n in (0, 1, vast)]
    tags = [[struct.pack("<HHII", tag, 4, n, vast) for tag in (256, 257, 273)] for n in (1, vast)]
    return [
        *(b"", PICKLE, b"II*\0" + b"\xff" * 8, b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBPVP8L"),
        *(png(w, h, plain) for w, h in ((1, vast), (vast, 1), (vast, vast), (0, 0), (40_000, 40_000))),
        *(png(13_000, 13_000, bomb, colour) for colour in (0, 2, 3, 4, 6)),
        *(png(8, 8, plain, zTXt=b"c\0\0" + text, iCCP=b"c\0\0" + text, eXIf=each) for each in (b"", b"II", *turned)),
        png(8, 8, plain, acTL=struct.pack(">II", 2**32 - 1, 0)),
        b"GIF89a\xff\xff\xff\xff\x80\0\0" + bytes(6) + b",\0\0\0\0\xff\xff\xff\xff\0\x02\x02L\x01\0;",
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, vast, -(2**31), 1, 24, 0, 0, 0, 0, 0, 0),
        *(start + b"\3\0" + b"".join(each) + bytes(4) for each in tags),
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(" + bytes(CANARY) + b") (w) file\n%%EOF\n",
    ]  # fmt: skip


def grey() -> bytes:
    return stream(lambda file: Image.fromarray(PIXELS[4]).save(file, "PNG"))


def pictures() -> list[bytes]:
    colours, wide = np.stack([PIXELS[0]] * 2 + [PIXELS[1]], -1), PIXELS[0].astype(np.uint16) * 200
    made = [(PIXELS[0], "PNG"), (colours, "PNG"), (wide, "PNG"), (PIXELS[0] > 99, "PNG"), (PIXELS[0], "JPEG")]
    made += [(colours, "BMP"), (PIXELS[0], "GIF"), (colours, "WEBP"), (wide, "TIFF"), (colours, "TIFF")]
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    packed = [stream(lambda file, a=a, kind=kind: Image.fromarray(a).save(file, kind, exif=exif)) for a, kind in made]
    return [*packed, stream(lambda file: Image.fromarray(colours).quantize(4).save(file, "PNG"))]


# ---- tables


def check_table(path: Path, _: bytes) -> None:
    """Judge a table that is trained on: its rows are decoded and encoded again."""
    check_splits(path)
    schema, rows, _notes = read_table(path)
    require(rows.shape[1] == len(schema) and not np.isinf(rows).any(), "columns")
    again = schema.encode(schema.decode(rows[:100]), path)
    require(not np.isinf(again).any(), "a sample of unknown values")
    discrete = np.array([column.discrete for column in schema])
    np.testing.assert_array_equal(again[:, discrete], rows[:100][:, discrete])
    file = TableFile(path)
    count = sum(batch.num_rows for batch in file.batches(file.names))
    require(file.count in (None, count) and len(rows) <= count, "other rows")


def arrow_table(n: int = 20) -> pa.Table:
    """Return numbers, texts and moments, of which some are missing."""
    rng = np.random.default_rng(4)
    days = pa.array(rng.integers(0, 9000, n).astype(np.int32)).cast(pa.date32())
    columns = {"x": rng.normal(size=n), "n": pa.array([None, *range(n - 1)], pa.int16()), "day": days}
    columns |= {"text": ["red", "green"] * (n // 2), "entry": pa.array(["a", "b"] * (n // 2)).dictionary_encode()}
    return pa.table(columns | {"is": [True, False] * (n // 2)})


def parquet_of(table: pa.Table, **options: Any) -> bytes:
    return stream(lambda file: parquet.write_table(table, file, **options))


def ipc_of(table: pa.Table, compression: str | None = None, *, streams: bool = False) -> bytes:
    def write(file: io.BytesIO) -> None:
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with (pa.ipc.new_stream if streams else pa.ipc.new_file)(file, table.schema, options=options) as writer:
            writer.write_table(table, 8 if len(table) < 100 else 1 << 30)

    return stream(write)


def odd_tables() -> list[pa.Table]:
    """Return tables that pack well, are nested, or are none."""
    kind = pa.int8()
    for _ in range(60):
        kind = pa.list_(kind)
    long = pa.DictionaryArray.from_arrays(pa.array(np.zeros(40_000, np.int32)), ["x" * 500_000])
    tables = [pa.table({"a": pa.nulls(3, kind), "b": [1, 2, 3]}), pa.table({}), pa.table([[1], [2]], names=["a", "a"])]
    return [*tables, pa.table({"a": np.zeros(10_000_000)}), pa.table({"a": long, "b": np.arange(40_000)})]


CELLS = [None, 0, 1, -1, 0.5, 1.5, math.nan, math.inf, 1e300, 5e-324, 2**53, True, "1", "x", "", "nan", "\x1b[31m"]


def drawn_table(rng: random.Random, write: Callable[[pa.Table], bytes]) -> bytes:
    """Draw a small table of anything, perhaps damaged."""
    n, columns = rng.randrange(12), {}
    for name in rng.sample(("a", "b", "x0", "", "\x1b", "\u0663", "c" * 500), rng.randrange(5)):
        some = rng.sample(CELLS, rng.randrange(1, 4))
        with suppress(pa.ArrowException):
            columns[name] = pa.array([rng.choice(some) for _ in range(n)])
    data = write(pa.table(columns))
    return damaged(rng, [data]) if rng.random() < 0.3 else data


def parquet_table() -> Reader:
    table = arrow_table()
    options = [{}, {"row_group_size": 7, "compression": "zstd"}, {"use_dictionary": False, "data_page_version": "2.0"}]
    real = [parquet_of(table, **each) for each in options]
    forged = [parquet_of(each, compression="zstd") for each in odd_tables()] + [b"", b"PAR1", b"PAR1" * 3, PICKLE]
    forged += [b"PAR1" + bytes(40) + struct.pack("<I", size) + b"PAR1" for size in (0, 1, 39, 2**31 - 1, 2**32 - 1)]
    return Reader("x.parquet", real, forged, check_table, lambda rng: drawn_table(rng, parquet_of))


def arrow(file: str) -> Reader:
    kinds = [(kind, streams) for kind in (None, "lz4", "zstd") for streams in (False, True)]
    real = [ipc_of(arrow_table(), kind, streams=streams) for kind, streams in kinds]
    forged = [ipc_of(each, "zstd", streams=streams) for each in odd_tables() for streams in (False, True)]
    forged += [b"", b"ARROW1", b"ARROW1\0\0ARROW1", b"\xff" * 4 + bytes(4), PICKLE]
    for size in (2**31, 2**40, 2**62, 2**63 - 1, 2**64 - 1):  # of buffers
        forged += [real[2].replace(struct.pack("<Q", before), struct.pack("<Q", size)) for before in (8, 16, 64)]
    return Reader(file, real, forged, check_table, lambda rng: drawn_table(rng, ipc_of))


def csv_table() -> Reader:
    real = [of_file(lambda path: csv.write_csv(arrow_table(), path)), b"a,b\r\n1,2.5\r\n3,4.5\r\n5,0.25\r\n9,0.125\r\n"]
    real += [b'a,"b\nc"\n1,"x\ny"\n2,y\n3,x\n', "a;b\n1,5;x\n2,5;y\n3;x".encode("utf-16")]
    forged = [
        *(b"", PICKLE, b"\n" * (1 << 20), b"," * 100_000 + b"\n" + b"," * 100_000, b"a" * (1 << 25)),
        b"a,b\n" + b"1" * (1 << 25) + b",1\n",
        b'a,b\n"' + b"1,2\n" * (1 << 23),
        b"a,b\n" + b'"1""' * (1 << 20) + b'",1\n',
        *(b"a,b\n" + b"\0,\0\n" * 1000, gzip.compress(b"a,b\n1,2\n"), b"a,b\n\xff,2\n3,4\n5,6\n"),
    ]

    def draw(rng: random.Random) -> bytes:
        cells = ("0", "1", "2.5", "1e400", "NaN", "", "x", '"', '"a\nb"', "\0", "9" * 400, "\ud800", "2026-01-31")
        width = rng.randrange(5)
        lines = [[rng.choice(cells) for _ in range(rng.choice((width, width, 3)))] for _ in range(rng.randrange(9))]
        return utf8(rng.choice(("\n", "\r\n")).join(rng.choice(",,;").join(line) for line in lines))

    return Reader("x.csv", real, forged, check_table, draw)


def check_columns(path: Path, data: bytes) -> None:
    schema = RunFolder(path.parent).schema()
    require(schema is not None and Schema.from_json(schema.to_json(), "x") == schema, "other columns")
    schema.heads()
    if schema:
        schema.decode(np.zeros((2, len(schema)), np.float32))


def columns_file() -> Reader:
    with tempfile.TemporaryDirectory() as name:
        parquet.write_table(arrow_table(), Path(name) / "x.parquet")
        rows = read_table(Path(name) / "x.parquet")[0].to_json()
    kinds = ["list<item: int64>", "binary", "decimal128(99, -99)", "time32[ns]", "timestamp[s, tz=\x1b]", "halffloat"]
    kinds += ["timestamp[s, tz=" + "x" * 9000 + "]", "dictionary<values=x, indices=y, ordered=1>", "struct<>"]
    forged = [*map(utf8, TEXTS), *(json.dumps([rows[0] | {"type": kind}]).encode() for kind in kinds)]
    forged += [json.dumps([row | {key: value}]).encode() for row in rows for key in (*row, "more") for value in ODD]
    draw = lambda rng: json.dumps(odd_json(rng, rows)).encode()  # noqa: E731
    return Reader("columns.json", [json.dumps(rows).encode(), b"[]"], forged, check_columns, draw)


# ---- recipes and models

SMALL = load_recipe("digits").override(
    "model.couplings=3", "model.hidden_layers=1", "model.width=4", "data.shape=[2, 3]", "data.levels=17"
)
KEYS = [each.name for each in fields(Recipe)]
KEYS += [f"{table}.{each.name}" for table in TABLES for each in fields(getattr(SMALL, table))]
ABSURD = [f"model.{each}" for each in ("couplings=1000", "width=100000", "hidden_layers=1000", "law=affine")]
ABSURD += [f"model.preprocess={each}" for each in ("zca", "logit", "triangular")] + ["model.hidden_layers=[1,0,2]"]
ABSURD += [f"data.shape={each}" for each in ("[]", "[1]", "[2,2,2,2]", "[1000000000]", "[9223372036854775807,9]")]
ABSURD += ["data.levels=0", "data.levels=65536", "data.interval=[-1e308,1e308]", "data.interval=[0,1e-300]"]


def same_written(recipe: Recipe) -> None:
    require(parse(recipe.to_toml(), recipe.name) == recipe, "the recipe is another when written and read")


def recipe() -> Reader:
    names = ("digits", "mnist", "cifar10-best", "tfd-released")
    real = [load_recipe(name).to_toml().encode() for name in names] + [SMALL.to_toml().encode()]
    forged = [utf8(f"{key} = {value}") for key in KEYS for value in WORDS]
    forged += [b"", b"\xff\xfe", b"\xef\xbb\xbf", b"a." * 80_000 + b"a=1", b"#" * (1 << 20), b"[[a]]\n" * 900, PICKLE]
    forged += [b"[" + b"a." * 4000 + b"a]\n" + b"b." * 4000 + b"b=1", b"name = '" + b"x" * (1 << 20) + b"'"]
    draw = lambda rng: utf8("\n".join(f"{rng.choice(KEYS)} = {rng.choice(WORDS)}" for _ in range(3)))  # noqa: E731
    return Reader("own.toml", real, forged, lambda path, _: same_written(load_recipe(str(path))), draw)


def set_option() -> Reader:
    def check(path: Path, data: bytes) -> None:
        same_written(SMALL.override(data.decode("utf-8", "surrogateescape")))

    real = [b"train.epochs=50", b"model.hidden_layers=[1, 2, 3]", b"data.name=own/data.npz", b"train.lr = 1e-3"]
    forged = [utf8(f"{key}={value}") for key in KEYS for value in WORDS]
    forged += [b"", b"=", b".=1", b"data=1", b"data.name=\xff", b"a." * 80_000 + b"a=1", b"train.epochs=1\ntrain.lr=2"]
    return Reader("text", real, forged, check)


def written(recipe: Recipe) -> bytes:
    torch.manual_seed(0)
    saved = Saved(build(recipe).state_dict(), recipe, {"epoch": 3, "valid_nats": -1.5, "step": None})
    return of_file(lambda path: write_tensors(path, saved))


def joined(header: object, body: bytes, size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else utf8(json.dumps(header))
    return struct.pack("<Q", len(text) if size is None else size) + text + body


def taken_apart(data: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


OVERRIDES = ((), ("model.preprocess=zca", "model.law=affine"), ("data.levels=0", "model.learned_prior=true"))
MODELS = [written(SMALL.override(*each)) for each in OVERRIDES]


def check_tensors(path: Path, _: bytes) -> None:
    tensors, recipe, metrics, _ = read_tensors(path)
    require(all(isinstance(each, torch.Tensor) for each in tensors.values()), "no tensors")
    require(isinstance(metrics, dict), "no metrics")
    same_written(recipe)


def check_model(path: Path, _: bytes) -> None:
    flow = nicest.load(path)
    require(isinstance(flow, Density), "no density")
    require(flow.log_prob(torch.zeros(2, flow.dim)).shape == (2,), "no log-density")
    require(all(p.dtype == torch.float32 for p in flow.parameters()), "dtype")


def tensors(file: str, check: Check) -> Reader:
    header, body = taken_apart(MODELS[0])
    named = next(name for name in header if name != "__metadata__")
    changes = [{"recipe": SMALL.override(each).to_toml()} for each in ABSURD] + [{"figures": each} for each in TEXTS]
    changes += [{"format": each} for each in ("", "nicest", "nicest 0", "nicest \u00b2", "nicest " + "9" * 5000, "pt")]
    changes += [{"recipe": each} for each in ("a." * 80_000 + "a=1", "[" * 5000, "\0")]
    forged = [joined(header | {"__metadata__": header["__metadata__"] | each}, body) for each in changes]
    forged += [struct.pack("<Q", size) + b"{}" for size in EXTREMES] + [b"", joined({}, b""), PICKLE]
    forged += [joined(b"{" * 10**6, b""), joined(b'{"a":' + b"[" * 10**6, b""), joined(b" " * 10**6 + b"{}", b"")]
    for dtype in ("F64", "F16", "BF16", "F8_E4M3", "F4", "I64", "U8", "BOOL", "C64", "", "X"):
        forged.append(joined(header | {named: header[named] | {"dtype": dtype}}, body))
    for shape in ([0, 2**63], [2**64 - 1, 0], [2**32, 2**32], [-1], [1.5], [[1]], [0] * 5000):
        forged.append(joined(header | {named: header[named] | {"shape": shape}}, body))
    many = {f"{i}\x1b": {"dtype": "F32", "shape": [0], "data_offsets": [len(body)] * 2} for i in range(20_000)}
    forged += [joined(header | many, body), of_file(lambda path: torch.save({"weights": Touch()}, path))]

    def draw(rng: random.Random) -> bytes:
        header, body = taken_apart(rng.choice(MODELS))
        return joined(odd_json(rng, header), body)

    return Reader(file, MODELS, forged, check, draw)


def check_metrics(path: Path, _: bytes) -> None:
    run = RunFolder(path.parent)
    rows = run.metrics()
    run.drop_metrics_after(2)
    require(run.metrics() == [row for row in rows if row["step"] <= 2], "other rows")


def metrics() -> Reader:
    rows = [{"epoch": i, "step": i, "valid_nats": -1.5 * i, "lr": 1e-3, "seconds": 0.5} for i in range(1, 4)]
    lines = [json.dumps(row).encode() for row in rows]
    forged = [utf8(text) + b"}\n" for text in TEXTS] + [b'{"step": ' + b"9" * 5000 + b"}", b"\xff}", b"\0}", PICKLE]
    draw = lambda rng: b"\n".join(json.dumps(odd_json(rng, row)).encode() for row in rows)  # noqa: E731
    return Reader(
        "metrics.jsonl", [b"\n".join(lines) + b"\n", lines[0] + b"\n" + lines[1][:20], b""], forged, check_metrics, draw
    )


def compressed() -> Reader:
    """Return files of `nicest compress`, whose checksums are right in the forged ones."""
    torch.manual_seed(0)
    flow, rows = build(SMALL).eval(), np.random.default_rng(0).integers(0, 17, (9, 6), np.uint8)
    real = [compress(flow, rows, block=4), compress(flow, rows[:0])]

    def check(path: Path, data: bytes) -> None:
        got = decompress(flow, data, partial=True)
        require(got.ndim == 2 and got.dtype == np.uint8 and len(got) <= len(rows), "no rows")
        CompressedFile(data).damage()

    return Reader(
        "x.nicest", real, [b"", PICKLE, real[0][:8], real[0][:8] + b"\xff" * 40, real[0] + bytes(1 << 20)], check
    )


READERS: dict[str, Callable[[], Reader]] = {
    "idx": idx,
    "idx.gz": idx_gz,
    "npy": npy,
    "npz": npz,
    "image": lambda: Reader("x.png", pictures(), picture_forged(), check_image),
    "uploaded picture": lambda: Reader("x", pictures(), picture_forged(), check_upload),
    "image folder": lambda: Reader("folder/0.png", [grey()], picture_forged(), check_folder),
    "csv": csv_table,
    "parquet": parquet_table,
    "arrow": lambda: arrow("x.arrow"),
    "columns": columns_file,
    "recipe": recipe,
    "--set": set_option,
    "safetensors": lambda: tensors("last.safetensors", check_tensors),
    "model": lambda: tensors("model.safetensors", check_model),
    "metrics": metrics,
    "compressed": compressed,
}


def one_part(name: str, part: int, seed: int) -> Tally:
    """Feed a part of the cases to one reader, in a process of its own."""
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    reader = READERS[name]()
    with tempfile.TemporaryDirectory() as folder:  # what a reader imports at its first file is no case's time
        Tally().feed(reader, Path(folder), reader.real[0])
    return fuzz(name, reader, PART, seed, part)


def main() -> int:
    """Run the parts that the results lack; return 1 if a case was bad."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20_000, help="for each reader, in all runs together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", action="append", choices=list(READERS), help="only this one; may come again")
    parser.add_argument("--out", type=Path, help="a .json file that keeps the counts; a later run adds to it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="parts at once, each in a process")
    asked = parser.parse_args()
    found: dict[str, Any] = {"seed": asked.seed, "readers": {}, "said": []}
    if asked.out and asked.out.exists() and (before := json.loads(asked.out.read_text()))["seed"] == asked.seed:
        found = before
    names = asked.reader or list(READERS)
    left = [(part, name) for name in names for part in range(-(-asked.cases // PART))]
    left = [each for each in sorted(left) if each[0] >= found["readers"].get(each[1], {}).get("cases", 0) // PART]
    context = multiprocessing.get_context("spawn")
    for start in range(0, len(left), asked.jobs):
        some = left[start : start + asked.jobs]
        with ProcessPoolExecutor(asked.jobs, context) as pool:
            futures = [pool.submit(one_part, name, part, asked.seed) for part, name in some]
        for (part, name), future in zip(some, futures, strict=True):
            try:
                tally = future.result()
            except BrokenProcessPool:
                tally = Tally(Counter(cases=PART, traceback=1), [f"a process ended, perhaps in part {part} of {name}"])
            found["readers"][name] = dict(Counter(found["readers"].get(name, {})) + tally.counts)
            found["said"] = [*found["said"], *tally.said][:100]
        if asked.out:
            asked.out.write_text(json.dumps(found, indent=2) + "\n")
        print(f"{start + len(some)} of {len(left)} parts, {len(found['said'])} bad cases", flush=True)
    print(json.dumps(found, indent=2))
    return 1 if found["said"] else 0


if __name__ == "__main__":
    sys.exit(main())
