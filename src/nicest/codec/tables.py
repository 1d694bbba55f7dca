"""Encode and decode the rows of table files: CSV files to the byte, other formats to every cell and type."""

from __future__ import annotations

import base64
import hashlib
import io
import lzma
import struct
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nicest.codec.cells import MISSING, Quantizer
from nicest.codec.codec import Codec, compress_lzma, decompress_lzma
from nicest.codec.stack import Corrupt
from nicest.data.cells import as_in_training, codes, codes_of, decoded, numbers_as
from nicest.data.columns import Column, columns_to_json, require_columns
from nicest.data.lines import CsvLines, Written, as_float
from nicest.data.reading import reading
from nicest.data.tables import TableFile, from_stream, write_table
from nicest.errors import NicestError
from nicest.files import replacing, to_json
from nicest.flows import Flow
from nicest.messages import listed

BLOCK = 1 << 15  # rows of a block
MAX_DECIMALS, MIN_FRACTION = 9, 0.98  # a column has p <= 9 decimals if 98 % of its numbers have no more
UNREADABLE = (
    *(ArithmeticError, ValueError, LookupError, TypeError, NotImplementedError, MemoryError, OSError),
    *(struct.error, lzma.LZMAError, Corrupt),
)
START = struct.Struct("<5I")  # rows, bytes of the codec's block, stored rows, their bytes, those bytes compressed


class CsvFormat:
    """Rows as lines of text, and how to rebuild a line from its values.

    `columns` and `quantizers` are in the order of the file. `header` has its first line, line ends and notation.
    """

    def __init__(self, columns: list[Column], quantizers: list[Quantizer], header: dict[str, Any]) -> None:
        self.columns, self.quantizers = columns, quantizers
        self.header = {key: header[key] for key in ("head", "end", "ended", "written")}
        self.end, self.written = str(header["end"]), [Written(*each) for each in header["written"]]
        self.head, self.ended = base64.b64decode(header["head"]), bool(header["ended"])
        known = len(self.written) == len(columns) and all(each.known for each in self.written)
        if self.end not in ("", "\r") or not known:
            raise ValueError("not the notation of a CSV file")

    def rows(self, values: np.ndarray) -> list[bytes]:
        """Write the lines of values (n, D)."""
        texts = []
        for k, column, quantizer, written in zip(values.T, self.columns, self.quantizers, self.written, strict=True):
            distinct, index = np.unique(k, return_inverse=True)
            cells = [written.cell(_cell(each, column, quantizer)) for each in distinct.tolist()]
            texts.append([cells[each] for each in index.tolist()])
        return [",".join(cells).encode() + self.end.encode() for cells in zip(*texts, strict=True)]

    def differ(self, one: list[bytes], other: list[bytes]) -> np.ndarray:
        """Return True for rows that differ."""
        return np.array([a != b for a, b in zip(one, other, strict=True)], dtype=bool)

    def take(self, rows: list[bytes], index: np.ndarray) -> list[bytes]:
        """Select rows."""
        return [rows[i] for i in index.tolist()]

    def concat(self, parts: Sequence[list[bytes]]) -> list[bytes]:
        """Concatenate rows."""
        return [line for part in parts for line in part]

    def to_bytes(self, rows: list[bytes]) -> bytes:
        """Serialise rows."""
        return b"\n".join(rows)

    def from_bytes(self, data: bytes) -> list[bytes]:
        """Invert `to_bytes`."""
        return data.split(b"\n")

    def write(self, path: Path, rows: list[bytes]) -> None:
        """Write a file of these rows."""
        with replacing(path) as temporary:
            temporary.write_bytes(b"\n".join([self.head, *rows, *([b""] if self.ended else [])]))


class ArrowFormat:
    """Rows as Arrow tables with the schema of the file; methods as in `CsvFormat`."""

    def __init__(self, columns: list[Column], quantizers: list[Quantizer], schema: Any) -> None:
        self.columns, self.quantizers, self.schema = columns, quantizers, schema
        self.header = {"schema": base64.b64encode(schema.serialize()).decode()}

    def rows(self, values: np.ndarray) -> Any:
        """Build a table from values (n, D)."""
        import pyarrow as pa

        arrays = []
        for k, column, quantizer, field in zip(values.T, self.columns, self.quantizers, self.schema, strict=True):
            missing = k == MISSING
            if column.kind == "real":
                array = numbers_as(quantizer.numbers(np.where(missing, 0, k)), missing, field.type)
            else:
                array = decoded(np.where(missing, np.nan, k.astype(np.float64)), replace(column, type=str(field.type)))
            arrays.append(array.cast(field.type))
        return pa.Table.from_arrays(arrays, schema=self.schema)

    def differ(self, one: Any, other: Any) -> np.ndarray:
        """Return True for rows that differ in any bit."""
        return np.any([np.zeros(one.num_rows, bool), *map(_cells_differ, one.columns, other.columns)], axis=0)

    def take(self, rows: Any, index: np.ndarray) -> Any:
        """Select rows."""
        return rows.take(index)

    def concat(self, parts: Sequence[Any]) -> Any:
        """Concatenate rows."""
        import pyarrow as pa

        return pa.concat_tables([self.schema.empty_table(), *parts]).unify_dictionaries().combine_chunks()

    def to_bytes(self, rows: Any) -> bytes:
        """Serialise rows."""
        import pyarrow as pa

        file = io.BytesIO()
        with pa.ipc.new_stream(file, self.schema) as writer:
            writer.write_table(rows)
        return file.getvalue()

    def from_bytes(self, data: bytes) -> Any:
        """Invert `to_bytes`."""
        return from_stream(data, self.schema)

    def write(self, path: Path, rows: Any) -> None:
        """Write a file of these rows."""
        write_table(path, rows)


def _cell(k: int, column: Column, quantizer: Quantizer) -> str | float | None:
    """Return the text or number of a cell of a CSV file."""
    if k == MISSING:
        return None
    if column.values:
        value = column.values[k]
        return value if isinstance(value, str) else float(value)
    return column.low + k * column.step if column.kind == "steps" else float(quantizer.numbers(np.array([k]))[0])


def _cells_differ(one: Any, other: Any) -> np.ndarray:
    """Compare two Arrow columns, floats by their bits."""
    from pyarrow import compute, types

    a, b = (each.dictionary_decode() if types.is_dictionary(each.type) else each for each in map(_array, (one, other)))
    null_a, null_b = (each.is_null().to_numpy(zero_copy_only=False) for each in (a, b))
    if types.is_floating(a.type):
        a, b = (each.fill_null(0).to_numpy(zero_copy_only=False) for each in (a, b))
        equal = a.view(f"i{a.itemsize}") == b.view(f"i{b.itemsize}")
    else:
        equal = compute.fill_null(compute.equal(a, b), False).to_numpy(zero_copy_only=False)
    found: np.ndarray = (null_a != null_b) | (~null_a & ~equal)
    return found


def _array(cells: Any) -> Any:
    """Return a column as a single array."""
    import pyarrow as pa

    cells = cells.combine_chunks()
    return cells.chunk(0) if isinstance(cells, pa.ChunkedArray) else cells


class TableCodec:
    """Lossless coder of the rows of a table file.

    Parameters
    ----------
    flow : Flow
        Flow of the table, in float64.
    columns : sequence of Column
        Columns of the flow.
    format : CsvFormat or ArrowFormat
        Format of the file.
    """

    def __init__(self, flow: Flow, columns: Sequence[Column], format: CsvFormat | ArrowFormat) -> None:
        names = [column.name for column in format.columns]
        self.order = [names.index(column.name) for column in columns]  # of the flow's columns in the file
        self.codec, self.format = Codec(flow, [format.quantizers[d] for d in self.order]), format
        self.device = self.codec.device
        text = f"{self.codec.digest}\n{to_json(columns_to_json(columns), indent=None)}"
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def encode(self, rows: Any, values: np.ndarray, store: np.ndarray) -> bytes:
        """Encode a block of rows from their values; store the rows marked in `store`, (n,), as they are."""
        coded, stored = np.flatnonzero(~store), np.flatnonzero(store)
        block, rest = self.codec.encode(values[coded][:, self.order]), b""
        if len(stored):
            rest = stored.astype("<u4").tobytes() + self.format.to_bytes(self.format.take(rows, stored))
        packed = compress_lzma(rest) if rest else b""
        if self.format.differ(self._merge(values[coded], stored, rest), rows).any():
            raise NicestError("a block did not decode to what was coded; nothing was written")
        return START.pack(len(values), len(block), len(stored), len(rest), len(packed)) + block + packed

    def decode(self, block: bytes, expected: int) -> Any:
        """Decode a block of `expected` rows; raise a NicestError if it is damaged."""
        try:
            count, size, n_stored, rest, packed = START.unpack_from(block)
            if count != expected or START.size + size + packed != len(block):
                raise Corrupt
            found = self.codec.decode(block[START.size : START.size + size], expected)
            values = np.empty_like(found)
            values[:, self.order] = found
            raw = decompress_lzma(block[START.size + size :], rest)
            if len(values) + n_stored != count:
                raise Corrupt
            return self._merge(values, np.frombuffer(raw, "<u4", n_stored).astype(np.int64), raw)
        except UNREADABLE as error:
            raise NicestError("this block cannot be decoded by this model") from error

    def _merge(self, values: np.ndarray, stored: np.ndarray, rest: bytes) -> Any:
        """Return all rows in order: those of `values`, and those at the positions `stored`."""
        rows = self.format.rows(values)
        if not len(stored):
            return rows
        order = np.empty(len(values) + len(stored), dtype=np.int64)
        order[np.setdiff1d(np.arange(len(order)), stored)] = np.arange(len(values))
        order[stored] = len(values) + np.arange(len(stored))
        return self.format.take(self.format.concat([rows, self.format.from_bytes(rest[4 * len(stored) :])]), order)


class Table(NamedTuple):
    """Rows of a file in its format, their values (n, D), and which rows do not follow from their values, (n,)."""

    format: CsvFormat | ArrowFormat
    rows: Any
    values: np.ndarray
    store: np.ndarray


def read_table(path: Path, columns: Sequence[Column]) -> Table:
    """Read a table file with the columns of the model, in any order."""
    if path.suffix.lower() == ".csv":
        file = CsvLines(path, columns)
        broken = np.array([cells is None for cells in file.cells], dtype=bool)
        blank = [None] * len(file.columns)
        texts = list(zip(*(cells or blank for cells in file.cells), strict=True)) or [()] * len(file.columns)
        found = [_from_texts(cells, column) for cells, column in zip(texts, file.columns, strict=True)]
        written = [list(asdict(each).values()) for each in file.written]
        head = base64.b64encode(file.head).decode()
        header = {"head": head, "end": file.end, "ended": file.ended, "written": written}
        format: CsvFormat | ArrowFormat = CsvFormat(file.columns, [each[0] for each in found], header)
        rows: Any = file.lines
    else:
        rows = _read_arrow(path, columns)
        broken, by_name = np.zeros(rows.num_rows, dtype=bool), {column.name: column for column in columns}
        own = [by_name[name] for name in rows.schema.names]
        found = [_from_arrow(_array(rows.column(d)), column, path) for d, column in enumerate(own)]
        format = ArrowFormat(own, [each[0] for each in found], rows.schema)
    values = np.stack([each[1] for each in found], 1)
    store = np.any([broken, *(each[2] for each in found)], axis=0)
    values[store] = MISSING
    return Table(format, rows, values, store | format.differ(format.rows(values), rows))


def _read_arrow(path: Path, columns: Sequence[Column]) -> Any:
    """Read a file that has the columns of training and no others."""
    file = TableFile(path)
    if extra := require_columns(file.names, columns, file.path):
        raise NicestError(f"{path}: expected the columns of training alone, also got {listed(extra)}: leave them out")
    with reading(path, f"a whole {path.suffix} table"):
        with file._parquet() if file.suffix == ".parquet" else file._ipc() as reader:
            rows = reader.read() if file.suffix == ".parquet" else reader.read_all()
        rows.validate(full=True)
    return rows


def _from_texts(cells: Sequence[str | None], column: Column) -> tuple[Quantizer, np.ndarray, np.ndarray]:
    """Return the quantizer of a CSV column, its values, and which cells have no value."""
    missing = np.array([text is None for text in cells], dtype=bool)
    if column.values and isinstance(column.values[0], str):
        known: dict[Any, int] = {value: k for k, value in enumerate(column.values)}
        values = np.array([known.get(text, -1) for text in cells], dtype=np.int64)
        return Quantizer(), np.where(missing, MISSING, values), ~missing & (values < 0)
    parsed: dict[str | None, float | None] = {text: as_float(text) for text in set(cells) if text is not None}
    numbers = np.array([parsed.get(text) for text in cells], dtype=float)  # NaN for None
    if column.kind == "real":
        quantizer, values, unknown = _from_reals(numbers, column)
    else:
        quantizer, (values, unknown) = Quantizer(), _integers(*codes_of(numbers, column))
    return quantizer, np.where(missing, MISSING, values), unknown | (np.isnan(numbers) & ~missing)


def _from_arrow(cells: Any, column: Column, path: Path) -> tuple[Quantizer, np.ndarray, np.ndarray]:
    """Return the quantizer of an Arrow column, its values, and which cells have no value."""
    numbers, unknown = codes(cells, column, path)  # validates the type
    if column.kind == "real":
        return _from_reals(as_in_training(cells, column), column)
    return Quantizer(), *_integers(numbers, unknown)


def _from_reals(numbers: np.ndarray, column: Column) -> tuple[Quantizer, np.ndarray, np.ndarray]:
    """Return a quantizer for real numbers, their values, and which numbers are not exactly their value."""
    quantizer, known = choose_quantizer(numbers, column.taken_off), np.nan_to_num(numbers, posinf=0.0, neginf=0.0)
    missing = np.isnan(numbers)
    return quantizer, np.where(missing, MISSING, quantizer.nearest(known)), ~quantizer.exact(known) & ~missing


def _integers(numbers: np.ndarray, unknown: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Convert encoded values to integers, and mark those beyond the integers of float64 as unknown."""
    far, missing = np.abs(numbers) >= 2.0**53, np.isnan(numbers)
    return np.where(missing, MISSING, np.where(missing | far, 0, numbers).round().astype(np.int64)), unknown | far


def choose_quantizer(numbers: np.ndarray, offset: float) -> Quantizer:
    """Return the quantizer with the fewest decimals that fits nearly all numbers, else that of floats."""
    known = numbers[np.isfinite(numbers)]
    for decimals in range(MAX_DECIMALS + 1):
        quantizer = Quantizer(decimals, offset)
        small = (np.abs(known) < 2.0**50 / 10.0**decimals).all()
        if small and (not len(known) or np.mean(quantizer.exact(known)) >= MIN_FRACTION):
            return quantizer
    return Quantizer(-1, offset)


def format_header(format: CsvFormat | ArrowFormat, suffix: str) -> dict[str, Any]:
    """Return the JSON entries from which `restore_format` rebuilds a format."""
    names = [column.name for column in format.columns]
    return {"suffix": suffix, "columns": names, "decimals": [q.decimals for q in format.quantizers], **format.header}


def restore_format(header: dict[str, Any], columns: Sequence[Column]) -> CsvFormat | ArrowFormat:
    """Rebuild the format of a table from the header of a compressed file; raise a NicestError if it does not fit."""
    import pyarrow as pa

    by_name = {column.name: column for column in columns}
    try:
        own = [by_name[name] for name in header["columns"]]
        if len(own) != len(by_name) or len(set(header["columns"])) != len(own):
            raise ValueError("other columns")
        quantizers = [
            Quantizer(None if p is None else int(p), column.taken_off if p is not None else 0.0)
            for p, column in zip(header["decimals"], own, strict=True)
        ]
        if header["suffix"] == ".csv":
            return CsvFormat(own, quantizers, header)
        return ArrowFormat(own, quantizers, pa.ipc.read_schema(pa.py_buffer(base64.b64decode(header["schema"]))))
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, OSError, pa.ArrowException) as error:
        raise NicestError("its header does not fit the columns of this model: name the right one by --run") from error
