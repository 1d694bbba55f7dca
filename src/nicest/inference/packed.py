"""The file of compressed rows: a header, a table of blocks with checksums, and the blocks, each decoded by itself.

8 bytes     magic
u32 u32 u32 version, bytes of the header, CRC-32 of header and table
header      JSON: the model's SHA-256, shape, levels, rows, rows of a block, what else the writer says
table       for each block: u64 offset, u32 bytes, u32 CRC-32
blocks
"""

from __future__ import annotations

import io
import json
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import torch

from nicest.errors import NicestError
from nicest.files import to_json
from nicest.flows import Flow
from nicest.inference.codec import MOST_ROWS, Codec
from nicest.inference.workers import mapped, workers_for
from nicest.messages import shown

MAGIC, VERSION = b"\x89NICEST\n", 1
BLOCK = 4096  # rows of a block
START, ENTRY = struct.Struct("<8s3I"), struct.Struct("<QII")


def compress(flow: Flow, rows: np.ndarray, *, block: int = BLOCK, jobs: int = 1) -> bytes:
    """Rows of grey levels, (n, D) or (n, ...) with D numbers in each, without loss as bytes.

    `block` rows at most are decoded together. `jobs` processes code blocks side by side, 0 for one per core; the bytes
    are the same. As with all processes of Python, a script that starts some has to have `if __name__ == "__main__":`.
    The flow must be the same, to the bit, when the rows are decompressed.
    """
    file = io.BytesIO()
    pack(Codec(flow), rows, file, block=block, jobs=jobs)
    return file.getvalue()


def decompress(flow: Flow, data: bytes, *, partial: bool = False, jobs: int = 1) -> np.ndarray:
    """The rows that `compress` was given; if `partial`, those of intact blocks of a damaged file. `jobs` as there."""
    codec = Codec(flow)
    packed = Packed(data, codec)
    parts = list(packed.blocks(jobs))
    if not partial:
        packed.require_all()
    return joined(packed, codec, [part.rows for part in parts if part.rows is not None])


def joined(packed: Packed, codec: Codec, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Blocks of rows as one array, in the shape of what was compressed."""
    if math.prod(packed.shape) != codec.dim:
        raise NicestError(
            f"{packed.source}: expected rows of {codec.dim} numbers, as the model has, got {packed.shape}"
        )
    values = np.concatenate([np.empty((0, codec.dim), codec.dtype), *parts])
    values = values.reshape(len(values), *packed.shape)
    return values.astype(values.dtype.newbyteorder("="))


def pack(
    codec: Codec,
    rows: np.ndarray,
    file: IO[bytes],
    *,
    shape: Sequence[int] = (),
    block: int = BLOCK,
    says: dict[str, Any] | None = None,
    done: Callable[[int], None] = lambda rows: None,
    jobs: int = 1,
) -> None:
    """Write rows to a file that can be wound back; `done` hears how many are written."""
    rows = np.asarray(rows)
    shape = tuple(shape or rows.shape[1:])
    if rows.ndim < 2 or math.prod(shape) != codec.dim or math.prod(rows.shape[1:]) != codec.dim:
        raise NicestError(f"expected rows of {codec.dim} numbers, as the model has, got shape {rows.shape}")
    if rows.dtype.kind not in "biu" or (rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < codec.levels):
        got = f"{rows.dtype}" + (f" from {rows.min()} to {rows.max()}" if rows.size else "")
        raise NicestError(f"expected integers from 0 to {codec.levels - 1}, as the model has, got {got}")
    if not 1 <= block <= MOST_ROWS:
        raise NicestError(f"expected blocks of 1 to {MOST_ROWS} rows, got {block}")
    header = {"model": codec.digest, "shape": shape, "levels": codec.levels, "rows": len(rows), "block": block}
    rows = rows.reshape(len(rows), codec.dim)
    inputs = [(rows[first : first + block],) for first in range(0, len(rows), block)]
    blocks = mapped(Codec.encode, codec, inputs, workers_for(jobs, len(inputs), codec.device))
    write(file, {**(says or {}), **header}, blocks, done)


def write(
    file: IO[bytes],
    header: dict[str, Any],
    blocks: Iterable[bytes],
    done: Callable[[int], None] = lambda rows: None,
) -> None:
    """Write blocks to a file that can be wound back."""
    text = to_json(header, indent=None).encode()
    count, block = header["rows"], header["block"]
    entries, at = [], START.size + len(text) + ENTRY.size * -(-count // block)
    file.seek(at)
    for first, content in zip(range(0, count, block), blocks, strict=True):
        file.write(content)
        entries.append(ENTRY.pack(at, len(content), zlib.crc32(content)))
        at += len(content)
        done(min(first + block, count))
    table = b"".join(entries)
    file.seek(0)
    file.write(START.pack(MAGIC, VERSION, len(text), zlib.crc32(text + table)) + text + table)


class Block(NamedTuple):
    """Rows of a file from `first` on; None where they are lost."""

    first: int
    rows: Any


class Decoder(Protocol):
    """What decodes blocks: a model, named by its digest."""

    digest: str
    device: torch.device

    def decode(self, block: bytes, expected: int) -> Any: ...


class Packed:
    """A file of compressed rows; `says` is its header."""

    codec: Decoder

    def __init__(self, data: bytes, codec: Decoder | None = None, source: str = "the data") -> None:
        self.data, self.source, self.lost = data, source, list[tuple[int, int]]()
        if not data:
            raise NicestError(f"{source}: expected a file of `nicest compress`, got an empty one")
        if data[:8] != MAGIC:
            raise NicestError(f"{source}: expected a file of `nicest compress`, got something else")
        try:
            _, version, size, check = START.unpack_from(data)
            if version != VERSION:
                raise NicestError(f"{source}: format {version} is of a newer nicest: update nicest to read it")
            self.says = json.loads(data[START.size : START.size + size])
            self.count, self.size, self.model = int(self.says["rows"]), int(self.says["block"]), str(self.says["model"])
            self.shape = tuple(map(int, self.says["shape"]))
            blocks = -(-self.count // self.size)
            end = START.size + size + ENTRY.size * blocks
            intact = zlib.crc32(data[START.size : end]) == check and end <= len(data)
        except (struct.error, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
            intact = False
        if not intact or not 0 < self.size <= MOST_ROWS or self.count < 0:
            raise NicestError(f"{source}: its header is damaged or cut short: get the file again")
        self.table = list(ENTRY.iter_unpack(data[START.size + size : end]))
        if codec is not None:
            self.open(codec)

    def open(self, codec: Decoder) -> None:
        """Be decoded by this model, which must be the one that coded it."""
        if self.model != codec.digest:
            raise NicestError(
                f"{self.source}: expected the model that compressed it, SHA-256 {shown(self.model)}, got"
                f" {codec.digest}; name that model by --run (in Python: nicest.open(run, dtype=torch.float64))"
            )
        self.codec = codec

    def blocks(self, jobs: int = 1) -> Iterator[Block]:
        """Every block in turn, decoded by so many processes, or one per core (0); `lost` then has the damaged ones."""
        inputs = (self._input(k) for k in range(len(self.table)))
        workers = workers_for(jobs, len(self.table), self.codec.device)
        for k, rows in enumerate(mapped(_decoded, self.codec, inputs, workers)):
            yield self._found(k, rows)

    def block(self, k: int) -> Block:
        """Block k, decoded by itself."""
        return self._found(k, _decoded(self.codec, *self._input(k)))

    def _input(self, k: int) -> tuple[bytes, int, int, int]:
        offset, size, check = self.table[k]
        return self.data[offset : offset + size], size, check, min(self.size, self.count - k * self.size)

    def _found(self, k: int, rows: Any) -> Block:
        first = k * self.size
        if rows is None:
            self.lost.append((k, first))
        return Block(first, rows)

    def require_all(self) -> None:
        if self.lost:
            raise NicestError(f"{self.source}: {self.missing()}: get the file again, or take the rest")

    def missing(self) -> str:
        """The blocks that are lost, in words."""
        ranges = [f"{k} (rows {first}..{min(first + self.size, self.count) - 1})" for k, first in self.lost]
        return f"{len(self.lost)} of {len(self.table)} blocks are damaged or cut off: {', '.join(ranges[:5])}" + (
            f" and {len(ranges) - 5} more" if len(ranges) > 5 else ""
        )


def _decoded(codec: Decoder, content: bytes, size: int, check: int, expected: int) -> Any:
    """The rows of a block, or None if it is damaged."""
    if len(content) != size or zlib.crc32(content) != check:
        return None
    try:
        rows = codec.decode(content, expected)
    except NicestError:
        return None
    return rows if len(rows) == expected else None
