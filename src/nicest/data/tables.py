"""Tables on disk (.csv, .parquet, .arrow, .feather): their columns by name, their rows in batches."""

from __future__ import annotations

import csv
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nicest.data.reading import reading, require_modest
from nicest.errors import NicestError
from nicest.files import replacing
from nicest.messages import listed
from nicest.remote import Remote, looked_from, place

SUFFIXES = (".csv", ".parquet", ".arrow", ".feather")
BATCH = 50_000  # rows that are read at once, or fewer of a wide table
IN_MEMORY = Path("batch")  # names a table without a file in error messages
CELLS = 2_000_000  # of a batch, at most
WIDEST = 20_000  # columns
EXCEL = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")  # how .xlsx and .xls files begin
LONGEST_LINE = 1 << 23  # bytes of a .csv file that are read at once; no line is longer than two such blocks
MAGIC = b"ARROW1"  # of an Arrow file, first and last
END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream
REWRITE = "write it again, as .csv or without compression"


def is_table(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


class TableFile:
    """A table on disk: its columns by name and type, and its rows in batches, with memory bounded whatever its size.

    The first line of a .csv file names its columns; empty cells, NA, NaN, null and their like are missing. Parquet is
    read a row group at a time, and each can be read alone; every other file is one part. Its footer is read once.
    A compressed file that unpacks to more than `most` bytes is refused.
    """

    def __init__(self, path: Path, *, most: int | None = None) -> None:
        self.path, self.suffix, self.most = path, path.suffix.lower(), most
        if not path.exists() or path.is_dir():
            raise NicestError(f"expected a table ({', '.join(SUFFIXES)}), found no {path}{looked_from(path)}")
        require_pyarrow()
        self.counts: tuple[int | None, ...] = (None,)  # rows of each part that can be read alone, where they are known
        self.footer: Any = None  # of a Parquet file
        with self._reading():
            self.schema = self._schema()
            self.names: list[str] = self.schema.names
        self.groups = len(self.counts)
        self.count = None if None in self.counts else sum(each or 0 for each in self.counts)
        if twice := [name for name, count in Counter(self.names).items() if count > 1]:
            raise NicestError(f"{path}: expected columns of different names, got {listed(twice)} twice; rename one")
        if not self.names:
            raise NicestError(f"{path}: expected columns, got an empty table")
        require_narrow(path, len(self.names))

    def _reading(self) -> AbstractContextManager[None]:
        return reading(self.path, f"a whole {self.path.suffix} table")

    def _schema(self) -> Any:
        if self.suffix == ".parquet":
            with self._parquet() as file:
                self.counts, self.footer = require_modest_parquet(self.path, file.metadata, self.most), file.metadata
                return file.schema_arrow
        if self.suffix == ".csv":
            with self._csv() as reader:
                return reader.schema
        require_modest_ipc(self.path, self.most)
        with self._ipc() as reader:
            return reader.schema

    def _parquet(self, texts: Sequence[str] = ()) -> Any:
        """`texts` are kept as their dictionary: a long one that stands in many rows is there once."""
        from pyarrow import parquet

        how = {"metadata": self.footer, "buffer_size": 1 << 14, "read_dictionary": list(texts)}
        return parquet.ParquetFile(self._source(), **how)

    def _source(self) -> Any:
        """What Arrow reads: a local path, or an opened file."""
        return self.path.open("rb") if isinstance(self.path, Remote) else self.path

    def _csv(self) -> Any:
        """All cells as text: what a column holds is known when all of it was seen."""
        import pyarrow as pa
        from pyarrow import csv

        with self.path.open("rb") as file:
            first = file.readline(LONGEST_LINE)
        if not first:
            raise NicestError(f"{self.path}: expected column names and rows, got an empty file")
        if first.startswith(EXCEL):
            raise NicestError(f"{self.path}: this is an Excel file, not CSV; save it from Excel as CSV UTF-8")
        if b"\0" in first:
            raise NicestError(f"{self.path}: expected text in UTF-8, got another encoding; save it as CSV in UTF-8")
        if b"," not in first and (other := [each for each in ";\t|" if each.encode() in first]):
            raise NicestError(
                f"{self.path}: expected cells separated by commas, got {other[0]!r} between them;"
                " save it with commas, and numbers with a decimal point"
            )
        require_narrow(self.path, first.count(b","))
        parse = csv.ParseOptions(newlines_in_values=True)
        read = csv.ReadOptions(block_size=LONGEST_LINE)
        with csv.open_csv(self._source(), read_options=read, parse_options=parse) as reader:
            names = reader.schema.names
        convert = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True)
        return csv.open_csv(self._source(), read_options=read, parse_options=parse, convert_options=convert)

    def _ipc(self) -> Any:
        import pyarrow as pa

        return pa.ipc.open_stream(_messages(self.path))

    def batches(self, names: Sequence[str], group: int | None = None) -> Iterator[Any]:
        """Yield validated record batches of the named columns, of all rows or of one part."""
        rows = batch_rows(len(names))
        with self._reading():
            for batch in self._batches(list(names), group, rows):
                for start in range(0, batch.num_rows, rows):
                    part = batch.slice(start, rows)
                    part.validate(full=True)
                    yield part

    def _batches(self, names: list[str], group: int | None, rows: int) -> Iterator[Any]:
        if self.suffix == ".parquet":
            groups = range(self.groups if self.count else 0)
            for each in groups if group is None else groups[group : group + 1]:  # one by one, for memory's sake
                found = 0
                for batch in self._row_group(names, each, rows):
                    found += batch.num_rows
                    yield batch
                if found != self.counts[each]:
                    raise ValueError(f"a row group of {self.counts[each]} rows holds {found}")
            return
        with self._csv() if self.suffix == ".csv" else self._ipc() as reader:
            for batch in reader:
                yield batch.select(names)

    def _row_group(self, names: list[str], group: int, rows: int) -> Iterator[Any]:
        texts = [name for name in names if str(self.schema.field(name).type) in ("string", "large_string")]
        done = 0
        for kept in (texts, []):
            try:
                with self._parquet(kept) as file:
                    skip, done = done, 0
                    for batch in file.iter_batches(batch_size=rows, row_groups=[group], columns=names):
                        yield batch.select(names).slice(min(max(0, skip - done), batch.num_rows))
                        done += batch.num_rows
                return
            except OSError as error:  # encoded in a way that Arrow cannot keep as a dictionary: read it without
                if not kept or "Not yet implemented" not in str(error):
                    raise


def table_files(names: Sequence[str | Path]) -> list[Path]:
    """Files by their names; a folder, or an address with `*` in its last part, stands for the Parquet files there.

    They come in the order of their names; those that begin with `_` or `.` are left out: writers that were broken off
    leave such.
    """
    found: list[Path] = []
    for path in map(place, names):
        if isinstance(path, Remote) and "*" in path.name:
            inside = path.with_name("").glob(path.name)
        elif path.is_dir():
            inside = list(path.glob("*.parquet"))
        else:
            found.append(path)
            continue
        if not (inside := sorted((each for each in inside if each.name[0] not in "._"), key=str)):
            raise NicestError(f"expected Parquet files, found none in {path}{looked_from(path)}")
        found += inside
    return found


def batch_rows(columns: int) -> int:
    """Return the number of rows to read at once from a table with this many columns."""
    return max(1, min(BATCH, CELLS // max(1, columns)))


def append_columns(table: Any, new: Any) -> Any:
    """Append the columns of an Arrow table to those of another one."""
    import pyarrow as pa

    if twice := [name for name in new.column_names if name in table.column_names]:
        raise NicestError(f"the result would have two columns {listed(twice)}: rename or drop them in the data")
    return pa.table([*table.columns, *new.columns], names=[*table.column_names, *new.column_names])


def require_narrow(path: Path, columns: int) -> None:
    if columns > WIDEST:
        raise NicestError(f"{path}: expected at most {WIDEST} columns, got {columns}; leave some out, or save as .npy")


def require_modest_parquet(path: Path, metadata: Any, most: int | None = None) -> tuple[int, ...]:
    """The rows of each row group, if what the file says of itself is in proportion to its size."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    counts = tuple(group.num_rows for group in groups)
    sizes = [group.total_byte_size for group in groups]  # not of each column: of a damaged one Arrow ends the process
    if min((*counts, *sizes), default=0) < 0 or metadata.num_rows != sum(counts):
        raise ValueError("its metadata is inconsistent")
    require_modest(path, max(sum(sizes), sum(counts) * metadata.num_columns), REWRITE, most)
    return counts or (0,)


def require_modest_ipc(path: Path, most: int | None = None) -> None:
    """Refuse an Arrow file that would unpack to far more than its size, before its buffers are unpacked."""
    import pyarrow as pa

    unpacked = columns = 0
    for message in pa.ipc.MessageReader.open_stream(_messages(path)):
        if message.type == "schema":
            columns = len(pa.ipc.read_schema(message))
        else:
            unpacked += _unpacked(message, columns)
            require_modest(path, unpacked, REWRITE, most)


def from_stream(data: bytes, schema: Any) -> Any:
    """The table in an Arrow stream of plain buffers, whose bytes are checked."""
    import pyarrow as pa

    messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(data))
    unpacked = sum(_unpacked(message, len(schema)) for message in messages if message.type != "schema")
    if unpacked > 64 * len(data):
        raise ValueError("its buffers are packed")
    table = pa.ipc.open_stream(data).read_all()
    table.validate(full=True)
    if table.schema != schema:
        raise ValueError("its columns are others")
    return table


def _messages(path: Path) -> Any:
    """The stream in an Arrow file, or that is one; a file that was cut is told by its end."""
    import pyarrow as pa

    source = pa.PythonFile(path.open("rb"), "r") if isinstance(path, Remote) else pa.memory_map(str(path))
    whole = source.size()
    framed = source.read(8)[:6] == MAGIC
    source.seek(max(0, whole - 8))
    end = source.read(8)
    if end[2:] != MAGIC if framed else end != END:
        raise ValueError("its end is missing: it was cut off, or is something else")
    source.seek(8 if framed else 0)
    return source


def _unpacked(message: Any, columns: int) -> int:
    """Bytes of the buffers of a message when unpacked, or its cells, if those are more (Arrow's Message.fbs)."""
    data, body = memoryview(message.metadata), message.body

    def number(form: str, at: int) -> int:
        return int(struct.unpack_from("<" + form, data, at)[0])

    def field(table: int, i: int) -> int:
        """Where the i-th field of a table lies, 0 if it is absent."""
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


def require_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise NicestError("tables need pyarrow, which is not installed: pip install 'nicest[tables]'") from error


@contextmanager
def writing(path: Path, schema: Any, *, plain: bool = False) -> Iterator[Callable[[Sequence[Any]], None]]:
    """A function that appends rows to a new table, which replaces `path` once all are written.

    It takes the columns of the rows, lists or Arrow arrays, in the order of `schema`: Arrow's, or pairs of names and
    types. A .csv file quotes all its strings, as Arrow does; a plain one, which does not need pyarrow, writes all
    cells as Python does and quotes only those that need it.
    """
    suffix = path.suffix.lower()
    with replacing(path) as temporary:
        opened = _plain_csv(temporary, schema) if plain and suffix == ".csv" else _arrow(temporary, schema, suffix)
        with opened as append:
            yield append


@contextmanager
def _plain_csv(path: Path, schema: Any) -> Iterator[Callable[[Sequence[Any]], None]]:
    with path.open("w", newline="", encoding="utf-8") as file:
        # the csv module quotes the characters of its line terminator, of which only "\n" is written
        lines = csv.writer(SimpleNamespace(write=lambda line: file.write(line[:-2] + "\n")), lineterminator="\r\n")
        lines.writerow(getattr(schema, "names", None) or [name for name, _ in schema])

        def append(columns: Sequence[Any]) -> None:
            cells = (column if isinstance(column, list) else column.to_pylist() for column in columns)
            lines.writerows(zip(*cells, strict=True))

        yield append


@contextmanager
def _arrow(path: Path, schema: Any, suffix: str) -> Iterator[Callable[[Sequence[Any]], None]]:
    require_pyarrow()
    import pyarrow as pa
    from pyarrow import csv, parquet

    schema = schema if isinstance(schema, pa.Schema) else pa.schema(schema)
    if suffix == ".csv":  # where Arrow cannot write views of strings
        fields = (each.with_type(pa.string()) if str(each.type) == "string_view" else each for each in schema)
        schema = pa.schema(list(fields))

    def append(columns: Sequence[Any]) -> None:
        pairs = zip(columns, schema.types, strict=True)
        arrays = [pa.array(column, of) if isinstance(column, list) else column.cast(of) for column, of in pairs]
        writer.write_table(pa.table(arrays, schema=schema))

    openers: dict[str, Any] = {".csv": csv.CSVWriter, ".parquet": parquet.ParquetWriter}
    with path.open("wb") as file, openers.get(suffix, pa.ipc.new_file)(file, schema) as writer:
        yield append


def write_table(path: Path, table: Any) -> None:
    """Write an Arrow table in the format of the file's suffix."""
    with writing(path, table.schema) as write:
        write(table.columns)
