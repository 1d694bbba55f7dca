"""Refuse Parquet and Arrow files that would unpack to far more than their size, before anything is unpacked."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from nicest.data.reading import require_modest
from nicest.remote import Remote

MAGIC = b"ARROW1"  # of an Arrow file, first and last
END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream
REWRITE = "write it again, as .csv or without compression"


def require_modest_parquet(path: Path, metadata: Any, most: int | None = None) -> tuple[tuple[int, ...], int]:
    """Return the rows of each row group, and the bytes of all, if they are in proportion to the size of the file."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    counts = tuple(group.num_rows for group in groups)
    sizes = [group.total_byte_size for group in groups]  # not of each column: of a damaged one Arrow ends the process
    if min((*counts, *sizes), default=0) < 0 or metadata.num_rows != sum(counts):
        raise ValueError("its metadata is inconsistent")
    unpacked = max(sum(sizes), sum(counts) * metadata.num_columns)
    require_modest(path, unpacked, REWRITE, most)
    return counts or (0,), unpacked


def require_modest_ipc(path: Path, most: int | None = None) -> int:
    """Return the bytes that an Arrow file unpacks to, if they are in proportion to its size."""
    import pyarrow as pa

    unpacked = columns = 0
    for message in pa.ipc.MessageReader.open_stream(messages(path)):
        if message.type == "schema":
            columns = len(pa.ipc.read_schema(message))
        else:
            unpacked += _unpacked(message, columns)
            require_modest(path, unpacked, REWRITE, most)
    return unpacked


def messages(path: Path) -> Any:
    """Open the stream in an Arrow file, or a file that is a stream; refuse one whose end was cut off."""
    import pyarrow as pa

    source = pa.PythonFile(path.open("rb"), "r") if isinstance(path, Remote) else pa.memory_map(str(path))
    size = source.size()
    framed = source.read(8)[:6] == MAGIC
    source.seek(max(0, size - 8))
    end = source.read(8)
    if end[2:] != MAGIC if framed else end != END:
        raise ValueError("its end is missing: it was cut off, or is something else")
    source.seek(8 if framed else 0)
    return source


def _unpacked(message: Any, columns: int) -> int:
    """Return the bytes of the buffers of a message when unpacked, or its cells, if those are more.

    Follows the flatbuffer of Arrow's Message.fbs, since pyarrow reads it only together with the buffers.
    """
    data, body = memoryview(message.metadata), message.body

    def number(form: str, at: int) -> int:
        return int(struct.unpack_from("<" + form, data, at)[0])

    def field(table: int, i: int) -> int:
        """Return where the i-th field of a table lies, 0 if it is absent."""
        index = table - number("i", table)
        offset = number("H", index + 4 + 2 * i) if 4 + 2 * i < number("H", index) else 0
        return table + offset if offset else 0

    def follow(at: int) -> int:
        return at + number("I", at)

    header = field(follow(0), 2)
    if not header:
        return 0
    record = follow(header)
    if message.type == "dictionary":
        record = follow(field(record, 1))
    rows = number("q", field(record, 0)) if field(record, 0) else 0
    if rows < 0:
        raise ValueError("its metadata is inconsistent")
    total = 0
    if field(record, 3):  # packed: every buffer begins with its size
        buffers = follow(field(record, 2))
        for i in range(number("I", buffers)):
            at, length = number("q", buffers + 4 + 16 * i), number("q", buffers + 12 + 16 * i)
            if length >= 8 and 0 <= at <= len(body) - 8:
                total += max(length, int(struct.unpack_from("<q", body, at)[0]))
    return max(total, rows * (columns if message.type == "record batch" else 1))
