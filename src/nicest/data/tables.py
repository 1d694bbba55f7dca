"""Tables on disk: their columns by name, their rows in batches or all at once, and how tables are written."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from nicest.data.cells import NUMBER, has_pyarrow
from nicest.data.columns import Schema, parsed_bounds
from nicest.data.delimited import form_of, sheet_rows, with_points
from nicest.data.guards import messages, require_modest_ipc, require_modest_parquet
from nicest.data.infer import infer
from nicest.data.reading import reading
from nicest.errors import NicestError
from nicest.files import replacing
from nicest.messages import listed, shown
from nicest.remote import Remote, looked_from, place

SUFFIXES = (".csv", ".tsv", ".parquet", ".arrow", ".feather")  # read and written
EXCEL = ".xlsx"
TEXTS = (".csv", ".tsv")
IN_MEMORY = Path("batch")  # names a table without a file in error messages
BATCH = 50_000  # rows that are read at once, or fewer of a wide table
CELLS = 2_000_000  # of a batch, at most
WIDEST = 20_000  # columns
AT_ONCE = 1 << 32  # bytes of a table that are in memory while its columns are inferred
LONGEST_LINE = 1 << 23  # bytes of a text file that are read at once; no line is longer than two such blocks


def is_table(path: Path) -> bool:
    """Return True if a file is a table, by its suffix."""
    return path.suffix.lower() in (*SUFFIXES, EXCEL)


def read_table(
    path: Path, drop: Sequence[str] = (), bounds: Sequence[str] = ()
) -> tuple[Schema, np.ndarray, list[str]]:
    """Read a table, infer its columns and encode its rows.

    The file is read once; one that is too large for memory is read some columns at a time.

    Parameters
    ----------
    path : Path
        A file that `TableFile` reads.
    drop : sequence of str
        Columns to leave out.
    bounds : sequence of str
        Bounds of columns, such as "0 <= rate <= 1".

    Returns
    -------
    schema : Schema
        The columns of which a model can be made.
    rows : numpy.ndarray
        (N, D) float32, NaN where a cell is missing, without rows whose cells are all missing.
    notes : list of str
        What the user should know, a line each.
    """
    file = TableFile(path)
    columns = _Columns(file, [name for name in file.names if name not in set(drop)])
    types = {field.name: field.type for field in file.schema}
    schema, notes = infer(columns, drop=drop, bounds=parsed_bounds(bounds), source=path, types=types)
    if file.suffix in TEXTS and all(re.match(NUMBER, name.strip(), re.IGNORECASE) for name in file.names):
        notes.append(
            f"{path}: the first line gives the names of the columns, and all of them are numbers, such as"
            f" {shown(file.names[0])}: if it is a row, put a line of names before it"
        )
    rows = np.concatenate([schema.encode(batch, path) for batch in columns.batches(schema.names)])
    return schema, rows[~np.isnan(rows).all(1)], notes


class _Columns(Mapping[str, Any]):
    """Cells of the columns of a file, which is read when they are looked up, as many columns at once as fit."""

    def __init__(self, file: TableFile, names: list[str]) -> None:
        parts = 1 + file.bytes // AT_ONCE
        self.file, self.part = file, {name: i * parts // len(names) for i, name in enumerate(names)}
        self.table: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.table:
            names = [each for each, part in self.part.items() if part == self.part[name]]
            self.table = dict(zip(names, self.file.table(names).columns, strict=True))
        return self.table[name]

    def batches(self, names: Sequence[str]) -> Iterable[Any]:
        """Return the rows of some columns; the file is read again if not all columns are in memory."""
        if self.table.keys() < self.part.keys():
            return self.file.batches(names)
        import pyarrow as pa

        return [pa.table(self.table)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.file.names)

    def __len__(self) -> int:
        return len(self.file.names)


class TableFile:
    """A table on disk: its columns by name and type, and its rows in batches, with memory bounded whatever its size.

    Text files (.csv, .tsv) may be separated by commas, semicolons, tabs or bars, in UTF-8, UTF-16 or Latin-1; the
    first line names the columns; empty cells, NA, NaN, null and their like are missing. Parquet is read a row group at
    a time, and each can be read alone; every other file is one part. Its footer is read once. Of an Excel file the
    first sheet is read.

    Parameters
    ----------
    path : Path
        A local file or a `Remote`.
    most : int, optional
        Refuse a compressed file that unpacks to more bytes.
    """

    def __init__(self, path: Path, *, most: int | None = None) -> None:
        self.path, self.suffix, self.most = path, path.suffix.lower(), most
        if not path.exists() or path.is_dir():
            kinds = ", ".join((*SUFFIXES, EXCEL))
            raise NicestError(f"expected a table ({kinds}), found no {path}{looked_from(path)}")
        require_pyarrow()
        self.counts: tuple[int | None, ...] = (None,)  # rows of each part that can be read alone, where they are known
        self.footer: Any = None  # of a Parquet file
        with self._reading():
            self.bytes = 2 * path.stat().st_size  # of the table in memory, about
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
                self.footer = file.metadata
                self.counts, self.bytes = require_modest_parquet(self.path, file.metadata, self.most)
                return file.schema_arrow
        if self.suffix == EXCEL:
            import pyarrow as pa

            with closing(sheet_rows(self.path)) as rows:
                return pa.schema([(name, pa.string()) for name in next(rows)])
        if self.suffix in TEXTS:
            self.form = form_of(self.path)
            require_narrow(self.path, self.form.columns)
            with self._csv() as reader:
                return reader.schema
        self.bytes = max(self.bytes, require_modest_ipc(self.path, self.most))
        with self._ipc() as reader:
            return reader.schema

    def _parquet(self, texts: Sequence[str] = ()) -> Any:
        """Open a Parquet file; `texts` are kept as dictionaries, so that a long text in many rows is there once."""
        from pyarrow import parquet

        how = {"metadata": self.footer, "buffer_size": 1 << 14, "read_dictionary": list(texts)}
        return parquet.ParquetFile(self._source(), **how)

    def _source(self) -> Any:
        """Return what Arrow reads: a local path, or an opened file."""
        return self.path.open("rb") if isinstance(self.path, Remote) else self.path

    def _csv(self) -> Any:
        """Open a text file with all cells as text: what a column holds is known when all of it was seen."""
        import pyarrow as pa
        from pyarrow import csv

        parse = csv.ParseOptions(delimiter=self.form.separator, newlines_in_values=True)
        read = csv.ReadOptions(block_size=LONGEST_LINE, encoding=self.form.encoding)
        with csv.open_csv(self._source(), read_options=read, parse_options=parse) as reader:
            names = reader.schema.names
        convert = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True)
        return csv.open_csv(self._source(), read_options=read, parse_options=parse, convert_options=convert)

    def _ipc(self) -> Any:
        import pyarrow as pa

        return pa.ipc.open_stream(messages(self.path))

    def table(self, names: Sequence[str]) -> Any:
        """Read all rows of the named columns; texts may come as dictionaries."""
        import pyarrow as pa

        batches = list(self.batches(names))
        columns = []
        for i, name in enumerate(names):
            chunks = [batch.column(i) for batch in batches]
            if len({each.type for each in chunks}) > 1:  # dictionaries, then plain texts: see `_row_group`
                chunks = [each.cast("large_string") for each in chunks]
            columns.append(pa.chunked_array(chunks, None if chunks else self.schema.field(name).type))
        return pa.table(columns, names=list(names))

    def batches(self, names: Sequence[str], group: int | None = None) -> Iterator[Any]:
        """Yield validated record batches of the named columns, of all rows or of one row group."""
        rows = max(1, min(BATCH, CELLS // max(1, len(names))))
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
        if self.suffix == EXCEL:
            yield from self._sheet(names, rows)
            return
        with self._csv() if self.suffix in TEXTS else self._ipc() as reader:
            for batch in reader:
                found = batch.select(names)
                if self.suffix in TEXTS and self.form.separator != ",":  # in whose countries numbers have commas
                    found = type(found).from_arrays([with_points(each) for each in found.columns], names=names)
                yield found

    def _sheet(self, names: list[str], size: int) -> Iterator[Any]:
        import pyarrow as pa

        with closing(sheet_rows(self.path)) as rows:
            header = next(rows)
            while some := list(islice(rows, size)):
                cells = dict(zip(header, zip(*some, strict=True), strict=True))
                yield pa.record_batch([pa.array(cells[name], pa.string()) for name in names], names=names)

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
    """Return files by their names; a folder, or an address with `*` in its last part, stands for its Parquet files.

    These are sorted; names that begin with `_` or `.` are left out, since interrupted writers leave such files.
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


def append_columns(table: Any, new: Any) -> Any:
    """Append the columns of an Arrow table to those of another one."""
    import pyarrow as pa

    if twice := [name for name in new.column_names if name in table.column_names]:
        raise NicestError(f"the result would have two columns {listed(twice)}: rename or drop them in the data")
    return pa.table([*table.columns, *new.columns], names=[*table.column_names, *new.column_names])


def require_narrow(path: Path, columns: int) -> None:
    """Refuse a table with more columns than `WIDEST`."""
    if columns > WIDEST:
        raise NicestError(f"{path}: expected at most {WIDEST} columns, got {columns}; leave some out, or save as .npy")


def require_pyarrow() -> None:
    """Refuse tables if pyarrow is not installed."""
    if not has_pyarrow():
        raise NicestError("tables need pyarrow, which is not installed: pip install 'nicest[tables]'")


@contextmanager
def writing(path: Path, schema: Any, *, plain: bool = False) -> Iterator[Callable[[Sequence[Any]], None]]:
    """Yield a function that appends rows to a new table, which replaces `path` once all are written.

    It takes the columns of the rows, lists or Arrow arrays, in the order of `schema`: Arrow's, or pairs of names and
    types. A .csv file quotes all its strings, as Arrow does; a `plain` one, which does not need pyarrow, writes all
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
    if suffix in TEXTS:  # where Arrow cannot write views of strings
        fields = (each.with_type(pa.string()) if str(each.type) == "string_view" else each for each in schema)
        schema = pa.schema(list(fields))

    def append(columns: Sequence[Any]) -> None:
        pairs = zip(columns, schema.types, strict=True)
        arrays = [pa.array(column, of) if isinstance(column, list) else column.cast(of) for column, of in pairs]
        writer.write_table(pa.table(arrays, schema=schema))

    tabs = csv.WriteOptions(delimiter="\t")
    openers: dict[str, Any] = {
        ".csv": csv.CSVWriter,
        ".tsv": lambda file, schema: csv.CSVWriter(file, schema, write_options=tabs),
        ".parquet": parquet.ParquetWriter,
    }
    with path.open("wb") as file, openers.get(suffix, pa.ipc.new_file)(file, schema) as writer:
        yield append


def write_table(path: Path, table: Any) -> None:
    """Write an Arrow table in the format of the file's suffix."""
    with writing(path, table.schema) as write:
        write(table.columns)
