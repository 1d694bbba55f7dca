"""Tables, compressed by a trained model, and back: CSV files to the byte, others to every cell and type."""

from __future__ import annotations

import base64
import hashlib
import io
import lzma
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nicest.data.cells import as_in_training, codes, codes_of, decoded, numbers_as
from nicest.data.columns import Column, columns_to_json, require_columns
from nicest.data.lines import CsvLines, Written, as_float
from nicest.data.reading import reading
from nicest.data.tables import TableFile, from_stream, write_table
from nicest.errors import NicestError
from nicest.files import replacing, to_json
from nicest.flows import Flow
from nicest.inference.codec import MISSING, Codec, stored, unstored
from nicest.inference.coded_cells import Grain
from nicest.inference.stack import Damaged
from nicest.messages import listed
from nicest.runs.run import Run

BLOCK = 1 << 15  # rows of a block
MOST_DECIMALS, ENOUGH = 9, 0.98  # decimals of a column, and the share of its numbers that must have no more
START = struct.Struct("<5I")  # rows, bytes of the code, rows stored as they are, their bytes, and packed


class Form(ABC):
    """Rows of a file, in the file's own form, from whole numbers by the grains of its columns; and back."""

    columns: list[Column]
    grains: list[Grain]

    @abstractmethod
    def says(self) -> dict[str, Any]:
        """What `restored` needs, as JSON."""

    @abstractmethod
    def rows(self, places: np.ndarray) -> Any:
        """Rows of these whole numbers."""

    @abstractmethod
    def differ(self, one: Any, other: Any) -> np.ndarray:
        """Which rows differ, in any bit."""

    @abstractmethod
    def chosen(self, rows: Any, which: np.ndarray) -> Any:
        """Some of the rows, by their numbers."""

    @abstractmethod
    def joined(self, parts: Sequence[Any]) -> Any:
        """Rows after rows."""

    @abstractmethod
    def to_bytes(self, rows: Any) -> bytes:
        """Rows as they are."""

    @abstractmethod
    def from_bytes(self, data: bytes) -> Any:
        """The rows that `to_bytes` was given."""

    @abstractmethod
    def write(self, path: Path, rows: Any) -> None:
        """The file that rows are from."""


class CsvForm(Form):
    """Lines of text."""

    def __init__(self, columns: list[Column], grains: list[Grain], says: dict[str, Any]) -> None:
        self.columns, self.grains, self.kept = columns, grains, says
        self.end, self.written = str(says["end"]), [Written(*each) for each in says["written"]]
        self.head, self.ended = base64.b64decode(says["head"]), bool(says["ended"])
        if (
            self.end not in ("", "\r")
            or len(self.written) != len(columns)
            or not all(each.known for each in self.written)
        ):
            raise ValueError("no form of a CSV file")

    def says(self) -> dict[str, Any]:
        return self.kept

    def rows(self, places: np.ndarray) -> list[bytes]:
        texts = []
        for d, (column, grain, written) in enumerate(zip(self.columns, self.grains, self.written, strict=True)):
            found, back = np.unique(places[:, d], return_inverse=True)
            cells = [written.cell(None if k == MISSING else _value(k, column, grain)) for k in found.tolist()]
            texts.append([cells[i] for i in back.tolist()])
        return [",".join(cells).encode() + self.end.encode() for cells in zip(*texts, strict=True)]

    def differ(self, one: list[bytes], other: list[bytes]) -> np.ndarray:
        return np.array([a != b for a, b in zip(one, other, strict=True)], dtype=bool)

    def chosen(self, rows: list[bytes], which: np.ndarray) -> list[bytes]:
        return [rows[i] for i in which.tolist()]

    def joined(self, parts: Sequence[list[bytes]]) -> list[bytes]:
        return [line for part in parts for line in part]

    def to_bytes(self, rows: list[bytes]) -> bytes:
        return b"\n".join(rows)

    def from_bytes(self, data: bytes) -> list[bytes]:
        return data.split(b"\n")

    def write(self, path: Path, rows: list[bytes]) -> None:
        with replacing(path) as temporary:
            temporary.write_bytes(b"\n".join([self.head, *rows, *([b""] if self.ended else [])]))


class ArrowForm(Form):
    """An Arrow table."""

    def __init__(self, columns: list[Column], grains: list[Grain], schema: Any) -> None:
        self.columns, self.grains, self.schema = columns, grains, schema

    def says(self) -> dict[str, Any]:
        return {"schema": base64.b64encode(self.schema.serialize()).decode()}

    def rows(self, places: np.ndarray) -> Any:
        import pyarrow as pa

        arrays = []
        for d, (column, grain, field) in enumerate(zip(self.columns, self.grains, self.schema, strict=True)):
            k, missing = places[:, d], places[:, d] == MISSING
            if column.kind == "real":
                arrays.append(numbers_as(grain.numbers(np.where(missing, 0, k)), missing, field.type))
            else:
                numbers = np.where(missing, np.nan, k.astype(np.float64))
                arrays.append(decoded(numbers, replace(column, type=str(field.type))))
        return pa.Table.from_arrays(
            [array.cast(f.type) for array, f in zip(arrays, self.schema, strict=True)], schema=self.schema
        )

    def differ(self, one: Any, other: Any) -> np.ndarray:
        found = np.zeros(one.num_rows, dtype=bool)
        for a, b in zip(one.columns, other.columns, strict=True):
            found |= ~_same(a, b)
        return found

    def chosen(self, rows: Any, which: np.ndarray) -> Any:
        return rows.take(which)

    def joined(self, parts: Sequence[Any]) -> Any:
        import pyarrow as pa

        return pa.concat_tables([self.schema.empty_table(), *parts]).unify_dictionaries().combine_chunks()

    def to_bytes(self, rows: Any) -> bytes:
        import pyarrow as pa

        file = io.BytesIO()
        with pa.ipc.new_stream(file, self.schema) as writer:
            writer.write_table(rows)
        return file.getvalue()

    def from_bytes(self, data: bytes) -> Any:
        return from_stream(data, self.schema)

    def write(self, path: Path, rows: Any) -> None:
        write_table(path, rows)


def _value(k: int, column: Column, grain: Grain) -> str | float:
    if column.values:
        value = column.values[k]
        return value if isinstance(value, str) else float(value)
    if column.kind == "steps":
        return column.low + k * column.step
    return float(grain.numbers(np.array([k]))[0])


def _same(one: Any, other: Any) -> np.ndarray:
    """Which cells of two columns are the same, bit for bit."""
    from pyarrow import compute, types

    a, b = (each.dictionary_decode() if types.is_dictionary(each.type) else each for each in map(_whole, (one, other)))
    gone, lost = (each.is_null().to_numpy(zero_copy_only=False) for each in (a, b))
    if types.is_floating(a.type):
        a, b = (each.fill_null(0).to_numpy(zero_copy_only=False) for each in (a, b))
        equal = a.view(f"i{a.itemsize}") == b.view(f"i{b.itemsize}")
    else:
        equal = compute.fill_null(compute.equal(a, b), False).to_numpy(zero_copy_only=False)
    found: np.ndarray = (gone & lost) | (~gone & ~lost & equal)
    return found


def _whole(cells: Any) -> Any:
    """A column in one piece."""
    import pyarrow as pa

    cells = cells.combine_chunks()
    return cells.chunk(0) if isinstance(cells, pa.ChunkedArray) else cells


def exact(run: Run) -> Flow:
    """The flow of a run from the numbers that were stored, which are the same on every machine."""
    return run.flow if run.dtype == torch.float64 else run.flow_in(torch.float64)


class TableCodec:
    """A model of tables as a code of rows in the form of their file."""

    def __init__(self, run: Run, form: Form) -> None:
        names = [column.name for column in form.columns]
        self.order = [names.index(column.name) for column in run.columns]  # of the model's columns in the file
        grains = [form.grains[d] for d in self.order]
        self.codec, self.form = Codec(exact(run), grains), form
        self.device = self.codec.device
        named = to_json(columns_to_json(run.columns), indent=None)
        self.digest = hashlib.sha256(f"{self.codec.digest}\n{named}".encode()).hexdigest()

    def encode(self, rows: Any, places: np.ndarray, odd: np.ndarray) -> bytes:
        """A block of rows; those that are `odd` are stored as they are."""
        kept, others = np.flatnonzero(~odd), np.flatnonzero(odd)
        code = self.codec.encode(places[kept][:, self.order])
        rest = (
            others.astype("<u4").tobytes() + self.form.to_bytes(self.form.chosen(rows, others)) if len(others) else b""
        )
        packed = stored(rest) if rest else b""
        content = START.pack(len(places), len(code), len(others), len(rest), len(packed)) + code + packed
        if self.form.differ(self._restored(places[kept], others, rest), rows).any():
            raise NicestError("a block did not decode to what was coded; nothing was written")
        return content

    def decode(self, block: bytes, expected: int) -> Any:
        """The rows of a block, which must be so many."""
        try:
            count, size, odd, rest, packed = START.unpack_from(block)
            if count != expected or START.size + size + packed != len(block):
                raise ValueError
            found = self.codec.decode(block[START.size : START.size + size], expected)
            places = np.empty_like(found)
            places[:, self.order] = found
            raw = unstored(block[START.size + size :], rest)
            if len(places) + odd != count:
                raise ValueError
            return self._restored(places, np.frombuffer(raw, "<u4", odd).astype(np.int64), raw)
        except (
            ArithmeticError,
            ValueError,
            LookupError,
            TypeError,
            NotImplementedError,
            struct.error,
            lzma.LZMAError,
            Damaged,
            OSError,
            MemoryError,
        ) as error:
            raise NicestError("this block cannot be decoded by this model") from error

    def _restored(self, places: np.ndarray, others: np.ndarray, rest: bytes) -> Any:
        """All rows: those of whole numbers, and those that were stored."""
        rows = self.form.rows(places)
        if not len(others):
            return rows
        order = np.empty(len(places) + len(others), dtype=np.int64)
        order[np.setdiff1d(np.arange(len(order)), others)] = np.arange(len(places))
        order[others] = len(places) + np.arange(len(others))
        return self.form.chosen(self.form.joined([rows, self.form.from_bytes(rest[4 * len(others) :])]), order)


def grain_of(numbers: np.ndarray, column: Column) -> Grain:
    """What whole numbers of a column are: steps, categories, decimals where nearly all numbers have few, or floats."""
    if column.kind != "real":
        return Grain()
    known = numbers[np.isfinite(numbers)]
    for decimals in range(MOST_DECIMALS + 1):
        grain = Grain(decimals, column.taken_off)
        few = (np.abs(known) < 2.0**50 / 10.0**decimals).all()
        if few and (not len(known) or np.mean(grain.exact(known)) >= ENOUGH):
            return grain
    return Grain(-1, column.taken_off)


def opened(run: Run, path: Path) -> tuple[Form, Any, np.ndarray, np.ndarray]:
    """A table: its form, its rows, their whole numbers, and which rows are not what these stand for."""
    return _from_csv(run.columns, path) if path.suffix.lower() == ".csv" else _from_arrow(run.columns, path)


def _from_csv(columns: Sequence[Column], path: Path) -> tuple[Form, Any, np.ndarray, np.ndarray]:
    file = CsvLines(path, columns)
    odd = np.array([cells is None for cells in file.cells], dtype=bool)
    empty = [None] * len(file.columns)
    texts = list(zip(*(cells or empty for cells in file.cells), strict=True)) or [()] * len(file.columns)
    places, grains = np.empty((len(odd), len(file.columns)), np.int64), []
    for d, (column, cells) in enumerate(zip(file.columns, texts, strict=True)):
        missing = np.array([text is None for text in cells], dtype=bool)
        if column.values and isinstance(column.values[0], str):
            known = {value: k for k, value in enumerate(column.values)}
            found = np.array([known.get(text, -1) if text is not None else 0 for text in cells], dtype=np.int64)
            new, grain = found < 0, Grain()
        else:
            each = {text: as_float(text) for text in set(cells) if text is not None}
            numbers = np.array(
                [np.nan if text is None or each[text] is None else each[text] for text in cells], dtype=float
            )
            grain = grain_of(numbers, column)
            found, new = _places(numbers, column, grain)
            new |= np.isnan(numbers) & ~missing
        places[:, d] = np.where(missing, MISSING, np.where(new, 0, found))
        grains.append(grain)
        odd |= new
    says = {
        "head": base64.b64encode(file.head).decode(),
        "end": file.end,
        "ended": file.ended,
        "written": [list(asdict(each).values()) for each in file.written],
    }
    form = CsvForm(file.columns, grains, says)
    places[odd] = MISSING
    return form, file.lines, places, odd | form.differ(form.rows(places), file.lines)


def _from_arrow(columns: Sequence[Column], path: Path) -> tuple[Form, Any, np.ndarray, np.ndarray]:
    file = TableFile(path)
    if extra := require_columns(file.names, columns, file.path):
        raise NicestError(f"{path}: expected the columns of training alone, also got {listed(extra)}: leave them out")
    with reading(path, f"a whole {path.suffix} table"):
        with file._parquet() if file.suffix == ".parquet" else file._ipc() as reader:
            rows = reader.read() if file.suffix == ".parquet" else reader.read_all()
        rows.validate(full=True)
    by_name = {column.name: column for column in columns}
    places, odd, grains = np.empty((rows.num_rows, len(columns)), np.int64), np.zeros(rows.num_rows, dtype=bool), []
    for d, field in enumerate(rows.schema):
        column, cells = by_name[field.name], _whole(rows.column(d))
        if column.kind == "real":
            codes(cells, column, path)  # which refuses cells of another kind
            numbers = as_in_training(cells, column)
            grain = grain_of(numbers, column)
            found, new = _places(numbers, column, grain)
            missing = np.isnan(numbers)
        else:
            numbers, new = codes(cells, column, path)
            grain, missing = Grain(), np.isnan(numbers)
            far = np.abs(numbers) >= 2.0**53
            found, new = np.where(missing | far, 0, numbers).round().astype(np.int64), new | far
        places[:, d] = np.where(missing, MISSING, np.where(new, 0, found))
        grains.append(grain)
        odd |= new
    form = ArrowForm([by_name[name] for name in rows.schema.names], grains, rows.schema)
    places[odd] = MISSING
    return form, rows, places, odd | form.differ(form.rows(places), rows)


def _places(numbers: np.ndarray, column: Column, grain: Grain) -> tuple[np.ndarray, np.ndarray]:
    """The whole numbers of numbers of a column, and which numbers are not what these stand for."""
    if column.kind != "real":
        found, new = codes_of(numbers, column)
        far = np.abs(found) >= 2.0**53
        return np.where(far | np.isnan(found), 0.0, found).round().astype(np.int64), new | far
    known = np.nan_to_num(numbers, posinf=0.0, neginf=0.0)
    return grain.places(known), ~grain.exact(known) & ~np.isnan(numbers)


def restored(says: dict[str, Any], columns: Sequence[Column]) -> Form:
    """The form of a table from the header of a compressed one."""
    import pyarrow as pa

    by_name = {column.name: column for column in columns}
    try:
        own = [by_name[name] for name in says["columns"]]
        if len(own) != len(by_name) or len(set(says["columns"])) != len(own):
            raise ValueError("other columns")
        grains = [
            Grain(None if p is None else int(p), column.taken_off if p is not None else 0.0)
            for p, column in zip(says["decimals"], own, strict=True)
        ]
        if says["suffix"] == ".csv":
            return CsvForm(own, grains, says)
        return ArrowForm(own, grains, pa.ipc.read_schema(pa.py_buffer(base64.b64decode(says["schema"]))))
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, OSError, pa.ArrowException) as error:
        raise NicestError("its header does not fit the columns of this model: name the right one by --run") from error


def header(form: Form, suffix: str) -> dict[str, Any]:
    names = [column.name for column in form.columns]
    return {"suffix": suffix, "columns": names, "decimals": [grain.decimals for grain in form.grains], **form.says()}
