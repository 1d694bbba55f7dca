"""The file format of compressed rows: independent blocks, each with a checksum.

8 bytes     magic
u32 u32 u32 version, bytes of the header, CRC-32 of header and table
header      JSON: the model's SHA-256, shape, levels, rows, rows of a block, entries of the writer
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
from typing import IO, Any

import numpy as np

from nicest.codec.codec import MAX_ROWS, Codec
from nicest.errors import NicestError
from nicest.files import to_json
from nicest.flows import Flow
from nicest.inference.workers import mapped, workers_for
from nicest.messages import shown

MAGIC, VERSION = b"\x89NICEST\n", 1
BLOCK = 4096  # rows of a block
START, ENTRY = struct.Struct("<8s3I"), struct.Struct("<QII")


def compress(flow: Flow, rows: np.ndarray, *, block: int = BLOCK, jobs: int = 1) -> bytes:
    """Compress rows of grey levels without loss; return the compressed file.

    Parameters
    ----------
    flow : Flow
        A flow of pixels. To decompress, you need the same flow, to the bit.
    rows : ndarray of integers, shape (n, D) or (n, ...) with D numbers in each row
        Grey levels.
    block : int
        Rows that are coded together, 1 to 65,536.
    jobs : int
        Worker processes, 0 for one per core. The bytes do not depend on it. A script that uses more than one needs
        `if __name__ == "__main__":`.

    Raises
    ------
    NicestError
        If the flow cannot compress, or the rows do not fit it.
    """
    file = io.BytesIO()
    write_rows(file, Codec(flow), rows, block=block, jobs=jobs)
    return file.getvalue()


def decompress(flow: Flow, data: bytes, *, partial: bool = False, jobs: int = 1) -> np.ndarray:
    """Decompress what `compress` returned; return the rows, (n, ...).

    Parameters
    ----------
    flow : Flow
        The flow that compressed it.
    data : bytes
        The compressed file.
    partial : bool
        If True, return the rows of intact blocks from a damaged file.
    jobs : int
        Worker processes, 0 for one per core.

    Raises
    ------
    NicestError
        If another flow compressed the file, or a block is damaged and `partial` is False.
    """
    codec, packed = Codec(flow), CompressedFile(data)
    parts = [rows for rows in packed.blocks(codec, jobs) if rows is not None]
    if packed.lost and not partial:
        raise NicestError(f"{packed.source}: {packed.damage()}: get the file again, or take the rest")
    return packed.joined(codec, parts)


def write_rows(
    file: IO[bytes],
    codec: Codec,
    rows: np.ndarray,
    *,
    shape: Sequence[int] = (),
    block: int = BLOCK,
    header: dict[str, Any] | None = None,
    progress: Callable[[int], None] = lambda rows: None,
    jobs: int = 1,
) -> None:
    """Compress rows of grey levels into a seekable file; see `compress` and `write_blocks`."""
    rows = np.asarray(rows)
    shape = tuple(shape or rows.shape[1:])
    if rows.ndim < 2 or math.prod(shape) != codec.dim or math.prod(rows.shape[1:]) != codec.dim:
        raise NicestError(f"expected rows of {codec.dim} numbers, as the model has, got shape {rows.shape}")
    if rows.dtype.kind not in "biu" or (rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < codec.levels):
        got = f"{rows.dtype}" + (f" from {rows.min()} to {rows.max()}" if rows.size else "")
        raise NicestError(f"expected integers from 0 to {codec.levels - 1}, as the model has, got {got}")
    if not 1 <= block <= MAX_ROWS:
        raise NicestError(f"expected blocks of 1 to {MAX_ROWS} rows, got {block}")
    own = {"model": codec.digest, "shape": shape, "levels": codec.levels, "rows": len(rows), "block": block}
    rows = rows.reshape(len(rows), codec.dim)
    inputs = [(rows[first : first + block],) for first in range(0, len(rows), block)]
    blocks = mapped(Codec.encode, codec, inputs, workers_for(jobs, len(inputs), codec.device))
    write_blocks(file, {**(header or {}), **own}, blocks, progress)


def write_blocks(
    file: IO[bytes],
    header: dict[str, Any],
    blocks: Iterable[bytes],
    progress: Callable[[int], None] = lambda rows: None,
) -> None:
    """Write encoded blocks to a seekable file; `progress` is called with the number of rows written so far.

    The header must have the entries "model", "shape", "rows" and "block" (rows in all, and in a block).
    """
    text = to_json(header, indent=None).encode()
    count, block = header["rows"], header["block"]
    entries, at = [], START.size + len(text) + ENTRY.size * -(-count // block)
    file.seek(at)
    for first, content in zip(range(0, count, block), blocks, strict=True):
        file.write(content)
        entries.append(ENTRY.pack(at, len(content), zlib.crc32(content)))
        at += len(content)
        progress(min(first + block, count))
    table = b"".join(entries)
    file.seek(0)
    file.write(START.pack(MAGIC, VERSION, len(text), zlib.crc32(text + table)) + text + table)


class CompressedFile:
    """A compressed file whose header is intact.

    Parameters
    ----------
    data : bytes
        Contents of the file.
    source : str
        Name for messages.

    Attributes
    ----------
    header : dict
        Entries of the header.
    lost : list of int
        Damaged blocks, once `blocks` has read them.
    """

    def __init__(self, data: bytes, source: str = "the data") -> None:
        self.data, self.source, self.lost = data, source, list[int]()
        if data[:8] != MAGIC:
            got = "something else" if data else "an empty one"
            raise NicestError(f"{source}: expected a file of `nicest compress`, got {got}")
        try:
            _, version, size, check = START.unpack_from(data)
            if version != VERSION:
                raise NicestError(f"{source}: format {version} is of a newer nicest: update nicest to read it")
            self.header = json.loads(data[START.size : START.size + size])
            self.rows, self.block = int(self.header["rows"]), int(self.header["block"])
            self.model, self.shape = str(self.header["model"]), tuple(map(int, self.header["shape"]))
            end = START.size + size + ENTRY.size * -(-self.rows // self.block)
            intact = zlib.crc32(data[START.size : end]) == check and end <= len(data)
        except (struct.error, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
            intact = False
        if not intact or not 0 < self.block <= MAX_ROWS or self.rows < 0:
            raise NicestError(f"{source}: its header is damaged or cut short: get the file again")
        self.table = list(ENTRY.iter_unpack(data[START.size + size : end]))

    def blocks(self, codec: Any, jobs: int = 1) -> Iterator[Any]:
        """Decode the blocks in order with the codec of the same model; yield None for damaged ones."""
        if self.model != codec.digest:
            raise NicestError(
                f"{self.source}: expected the model that compressed it, SHA-256 {shown(self.model)}, got"
                f" {codec.digest}; name that model by --run (in Python: nicest.open(run, dtype=torch.float64))"
            )
        inputs = (
            (self.data[offset : offset + size], size, check, self.row_count(k))
            for k, (offset, size, check) in enumerate(self.table)
        )
        for k, rows in enumerate(mapped(_decode, codec, inputs, workers_for(jobs, len(self.table), codec.device))):
            if rows is None:
                self.lost.append(k)
            yield rows

    def row_count(self, k: int) -> int:
        """Return the number of rows in block k."""
        return min(self.block, self.rows - k * self.block)

    def joined(self, codec: Codec, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Concatenate decoded blocks of grey levels, in the shape of what was compressed."""
        if math.prod(self.shape) != codec.dim:
            raise NicestError(
                f"{self.source}: expected rows of {codec.dim} numbers, as the model has, got {self.shape}"
            )
        values = np.concatenate([np.empty((0, codec.dim), codec.dtype), *parts])
        return values.reshape(len(values), *self.shape).astype(values.dtype.newbyteorder("="))

    def damage(self) -> str:
        """Describe the damaged blocks."""
        ranges = [f"{k} (rows {k * self.block}..{k * self.block + self.row_count(k) - 1})" for k in self.lost]
        more = f" and {len(ranges) - 5} more" if len(ranges) > 5 else ""
        return f"{len(ranges)} of {len(self.table)} blocks are damaged or cut off: {', '.join(ranges[:5])}{more}"


def _decode(codec: Any, content: bytes, size: int, check: int, expected: int) -> Any:
    """Return the rows of a block, or None if it is damaged."""
    if len(content) != size or zlib.crc32(content) != check:
        return None
    try:
        rows = codec.decode(content, expected)
    except NicestError:
        return None
    return rows if len(rows) == expected else None
