"""Tables on disk: every kind of file, in batches; every broken one is refused in one line."""

import datetime
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, feather, parquet

from nicest.data import tables
from nicest.data.columns import Category, Integer, Real
from nicest.data.tables import SUFFIXES, TableFile, is_table, read_table, write_table, writing

Refusal = Callable[..., str]
TABLE = pa.table(
    {
        "x": np.random.default_rng(0).normal(size=300),
        "n": pa.array([None, *range(299)], pa.int16()),
        "c": pa.array(["red", "green", None] * 100).dictionary_encode(),
    }
)


def write_stream(table: pa.Table, path: Path, compression: str | None = None, rows: int | None = None) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(path, table.schema, options=options) as writer:
        writer.write_table(table, rows)


def write_ipc(table: pa.Table, path: Path, compression: str | None = None, rows: int | None = None) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(path, table.schema, options=options) as writer:
        writer.write_table(table, rows)


WRITERS: dict[str, tuple[str, Callable[[pa.Table, Path], object]]] = {
    "parquet": ("t.parquet", lambda t, p: parquet.write_table(t, p)),
    "parquet in row groups": ("t.parquet", lambda t, p: parquet.write_table(t, p, row_group_size=70)),
    "parquet zstd": ("t.PARQUET", lambda t, p: parquet.write_table(t, p, compression="zstd", use_dictionary=False)),
    "parquet delta": (
        "t.parquet",
        lambda t, p: parquet.write_table(
            t.set_column(2, "c", t["c"].cast("string")),
            p,
            use_dictionary=False,
            column_encoding={"c": "DELTA_BYTE_ARRAY", "n": "DELTA_BINARY_PACKED"},
        ),
    ),
    "parquet by pandas": ("t.parquet", lambda t, p: t.to_pandas().to_parquet(p)),
    "stream": ("t.arrow", lambda t, p: write_stream(t, p)),
    "stream lz4 in batches": ("t.arrow", lambda t, p: write_stream(t, p, "lz4", 70)),
    "file": ("t.arrow", lambda t, p: write_ipc(t, p)),
    "file zstd in batches": ("t.arrow", lambda t, p: write_ipc(t, p, "zstd", 70)),
    "feather": ("t.feather", lambda t, p: feather.write_feather(t, str(p))),
    "feather plain": ("t.feather", lambda t, p: feather.write_feather(t, str(p), compression="uncompressed")),
}


def all_rows(path: Path, names: list[str] | None = None) -> dict[str, list]:
    file = TableFile(path)
    batches = list(file.batches(names or file.names))
    return {name: [cell for b in batches for cell in b.column(name).to_pylist()] for name in names or file.names}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_of_file_gives_its_rows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "BATCH", 64)
    name, write = WRITERS[kind]
    write(TABLE, tmp_path / name)
    file = TableFile(tmp_path / name)
    assert is_table(file.path)
    assert file.names == ["x", "n", "c"]
    got = all_rows(tmp_path / name)
    assert got["x"] == TABLE["x"].to_pylist()
    assert got["c"] == TABLE["c"].to_pylist()
    if "pandas" not in kind:  # who has no whole numbers with gaps
        assert got["n"] == TABLE["n"].to_pylist()
    assert all(batch.num_rows <= 64 for batch in file.batches(["x"]))
    assert all_rows(tmp_path / name, ["c", "x"]).keys() == {"c", "x"}


def test_the_parts_of_a_file_are_its_rows(tmp_path: Path) -> None:
    parquet.write_table(TABLE, tmp_path / "t.parquet", row_group_size=70)
    file = TableFile(tmp_path / "t.parquet")
    assert file.counts == (70, 70, 70, 70, 20)
    assert (file.groups, file.count) == (5, 300)
    parts = [cell for g in range(5) for b in file.batches(["x"], g) for cell in b.column("x").to_pylist()]
    assert parts == TABLE["x"].to_pylist()
    csv.write_csv(TABLE, tmp_path / "t.csv")
    assert (TableFile(tmp_path / "t.csv").groups, TableFile(tmp_path / "t.csv").count) == (1, None)


def test_names_with_dots_and_odd_characters(tmp_path: Path) -> None:
    odd = {"a": [1, 2], "a.b": [3, 4], "é \U0001f600": [5, 6], "": [7, 8], 'q",\n': [9, 10], " ": [11, 12]}
    for name in ("t.parquet", "t.arrow", "t.csv"):
        if name == "t.csv":
            (tmp_path / name).write_text('a,a.b,é \U0001f600,,"q"",\n", \n1,3,5,7,9,11\n2,4,6,8,10,12\n')
        else:
            write_table(tmp_path / name, pa.table(odd))
        assert all_rows(tmp_path / name, ["a.b", "a"]).keys() == {"a.b", "a"}
        got = all_rows(tmp_path / name)
        assert {key: [int(cell) for cell in cells] for key, cells in got.items()} == odd


# ---- .csv: text, and what people write


def text_rows(path: Path, text: str | bytes) -> dict[str, list]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return all_rows(path)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("a,b\r\n1,2\r\n", {"a": ["1"], "b": ["2"]}),
        ("\ufeffa,b\n1,2\n", {"a": ["1"], "b": ["2"]}),
        ("a,b\n1,2", {"a": ["1"], "b": ["2"]}),
        ("a,b\n\n1,2\n\n\n3,4\n", {"a": ["1", "3"], "b": ["2", "4"]}),
        ('a,b\n"x\ny",2\n"q""r",4\n', {"a": ["x\ny", 'q"r'], "b": ["2", "4"]}),
        ('a,b\n"1,234",2\n', {"a": ["1,234"], "b": ["2"]}),
        ("a,b\nNA,nan\nNaN,null\n,N/A\n", {"a": [None] * 3, "b": [None] * 3}),
        ("a,b\ninf,-Infinity\n", {"a": ["inf"], "b": ["-Infinity"]}),
        ("a,\n1,2\n", {"a": ["1"], "": ["2"]}),
        ("ä,日\n1,é\n", {"ä": ["1"], "日": ["é"]}),
        ("a,b\n", {"a": [], "b": []}),
        ("a;b\n1,5;x\n", {"a": ["1.5"], "b": ["x"]}),
        ("a;b\n1.234.567,5;1.234\n", {"a": ["1234567.5"], "b": ["1.234"]}),
        ("a;b\nin 3,5 h;-2,5e3\n", {"a": ["in 3,5 h"], "b": ["-2.5e3"]}),
        ("a\tb\n1\tx, y\n2\tz\n", {"a": ["1", "2"], "b": ["x, y", "z"]}),
        ("a|b\n1|2\n", {"a": ["1"], "b": ["2"]}),
        ("name, first;n\nx, y;1\nz;2\n", {"name, first": ["x, y", "z"], "n": ["1", "2"]}),
        ("a\n1\n2\n", {"a": ["1", "2"]}),
        ("a,b\né,2\n".encode("utf-16"), {"a": ["é"], "b": ["2"]}),
        ("a,b\né,2\n".encode("utf-16-le"), {"a": ["é"], "b": ["2"]}),
        ("a;ö\né;€\n".encode("cp1252"), {"a": ["é"], "ö": ["€"]}),
        (b"a,b\n" + b"x,1\n" * 3_000_000 + "é,2\n".encode("latin-1"), None),
    ],
)
def test_csv(tmp_path: Path, text: str | bytes, rows: dict | None) -> None:
    got = text_rows(tmp_path / "t.csv", text)
    assert got == rows if rows is not None else got["a"][-1] == "é"


def test_quoted_newlines_at_the_edge_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "LONGEST_LINE", 64)
    cells = [f"line\n{i}" for i in range(100)]
    text = "a,b\n" + "".join(f'"{cell}",{i}\n' for i, cell in enumerate(cells))
    assert text_rows(tmp_path / "t.csv", text)["a"] == cells


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["got an empty file"]),
        (b"PK\x03\x04\0\0,", ["Excel file", "name it .xlsx"]),
        (b"\xd0\xcf\x11\xe0\0,", ["Excel file"]),
        (b"a,b\n1,\0\n", ["expected text in UTF-8, UTF-16 or Latin-1, got other bytes"]),
        ("\n\n", ["expected a whole .csv table"]),
        ("a,b\n1,2\n1,2,3\n", ["Expected 2 columns, got 3"]),
        ("a,b\n1\n", ["Expected 2 columns, got 1"]),
        ("a,b,a\n1,2,3\n", ["columns of different names", "'a' twice", "rename one"]),
        ("a,,\n1,2,3\n", ["columns of different names", "'' twice"]),
        (b"a,b\n\xff\x81,2\n", ["expected text in UTF-8, UTF-16 or Latin-1"]),
        ("a,b\n" + "x" * 17_000_000 + ",1\n", ["expected a whole .csv table"]),
        ('a,b\n"x,1\n' + "y,2\n" * 3_000_000, ["expected a whole .csv table"]),
    ],
)
def test_csv_that_is_no_table(tmp_path: Path, refusal: Refusal, text: str | bytes, words: list[str]) -> None:
    message = refusal(text_rows, tmp_path / "t.csv", text)
    assert all(word in message for word in words), message


# ---- refused


def cut(path: Path, share: float = 0.5) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("share", [0.0, 0.97])
def test_a_file_that_was_cut(kind: str, share: float, tmp_path: Path, refusal: Refusal) -> None:
    name, write = WRITERS[kind]
    write(TABLE, tmp_path / name)
    cut(tmp_path / name, share)
    message = refusal(read_table, tmp_path / name)
    assert f"{tmp_path / name}: expected a whole {(tmp_path / name).suffix} table" in message
    assert f"got {(tmp_path / name).stat().st_size} bytes" in message


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_no_table(suffix: str, tmp_path: Path, refusal: Refusal) -> None:
    path = tmp_path / f"t{suffix}"
    assert f"found no {path}" in refusal(TableFile, path)
    path.mkdir()
    assert f"found no {path}" in refusal(TableFile, path)
    path.rmdir()
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 9)
    assert f"{path}: expected " in refusal(read_table, path)


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow", "t.feather", "t.csv"])
def test_empty_tables(name: str, tmp_path: Path, refusal: Refusal) -> None:
    write_table(tmp_path / name, TABLE.slice(0, 0))
    assert "got only the names of 3 columns" in refusal(read_table, tmp_path / name)


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow"])
def test_tables_without_columns_or_with_two_of_a_name(name: str, tmp_path: Path, refusal: Refusal) -> None:
    write_table(tmp_path / name, pa.table({}))
    assert "expected columns, got an empty table" in refusal(TableFile, tmp_path / name)
    write_table(tmp_path / name, pa.table([[1], [2], [3]], names=["a", "b", "a"]))
    assert "'a' twice" in refusal(TableFile, tmp_path / name)


def test_without_pyarrow(tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    assert "pip install 'nicest[tables]'" in refusal(TableFile, tmp_path / "t.csv")


# ---- bombs


def test_a_column_that_unpacks_to_gigabytes(tmp_path: Path, refusal: Refusal) -> None:
    zeros = pa.table({"a": np.zeros(40_000_000), "b": np.zeros(40_000_000, bool)})
    parquet.write_table(zeros, tmp_path / "t.parquet", compression="zstd", use_dictionary=False)
    write_ipc(zeros, tmp_path / "t.arrow", "zstd")
    for name in ("t.parquet", "t.arrow"):
        message = refusal(TableFile, tmp_path / name)
        assert f"bytes from a file of {(tmp_path / name).stat().st_size}" in message
        assert "write it again, as .csv or without compression" in message


def test_a_long_text_in_many_rows_is_not_repeated(tmp_path: Path, refusal: Refusal) -> None:
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(50_000, np.int32)), ["x" * 1_000_000])
    table = pa.table({"a": texts, "b": np.arange(50_000)})
    parquet.write_table(table, tmp_path / "t.parquet", store_schema=False)
    assert str(TableFile(tmp_path / "t.parquet").schema.field("a").type) == "string"
    write_ipc(table, tmp_path / "t.arrow", "lz4")
    for name in ("t.parquet", "t.arrow"):
        before = pa.total_allocated_bytes()
        schema, _, notes = read_table(tmp_path / name)
        assert "texts of more than 1000 characters" in notes[0]
        assert schema.names == ["b"]
        assert pa.total_allocated_bytes() - before < 1 << 24


def test_what_packs_well_is_read(tmp_path: Path) -> None:
    rows = pa.table({"a": np.repeat(np.arange(4), 500_000), "b": np.zeros(2_000_000, np.int8)})
    parquet.write_table(rows, tmp_path / "t.parquet", compression="zstd")
    write_ipc(rows, tmp_path / "t.feather", "zstd")
    assert rows.nbytes > 200 * (tmp_path / "t.parquet").stat().st_size
    for name in ("t.parquet", "t.feather"):
        assert sum(batch.num_rows for batch in TableFile(tmp_path / name).batches(["a", "b"])) == 2_000_000


# ---- memory


@pytest.mark.parametrize("kind", ["parquet in row groups", "stream lz4 in batches", "feather plain"])
def test_arrow_holds_but_some_rows_at_once(kind: str, tmp_path: Path) -> None:
    name, _ = WRITERS[kind]
    table = pa.table({f"c{i}": np.random.default_rng(i).normal(size=400_000) for i in range(8)})
    writers = {
        "t.parquet": lambda: parquet.write_table(table, tmp_path / name, row_group_size=20_000),
        "t.arrow": lambda: write_stream(table, tmp_path / name, "lz4", 20_000),
        "t.feather": lambda: feather.write_feather(table, str(tmp_path / name), compression="uncompressed"),
    }
    writers[name]()
    before, most, rows = pa.total_allocated_bytes(), 0, 0
    for batch in TableFile(tmp_path / name).batches(table.column_names):
        most, rows = max(most, pa.total_allocated_bytes() - before), rows + batch.num_rows
    assert rows == 400_000
    assert most < table.nbytes / 3


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "t.arrow", "t.feather"])
@pytest.mark.parametrize("plain", [True, False])
def test_a_table_written_in_parts(tmp_path: Path, name: str, plain: bool) -> None:
    schema = [("n", "int64"), ("x", "float64"), ("s", "string")]
    with writing(tmp_path / name, schema, plain=plain) as write:
        write([[1, 2], [0.5, None], ["a", 'b, "c"']])
        write([pa.array([3], pa.int32()), pa.array([1.5]), pa.chunked_array([["\r"]])])
        assert not (tmp_path / name).exists()
    cells = [row for batch in TableFile(tmp_path / name).batches(["n", "x", "s"]) for row in batch.to_pylist()]
    got = [(int(row["n"]), row["x"] and float(row["x"]), row["s"]) for row in cells]
    assert got == [(1, 0.5, "a"), (2, None, 'b, "c"'), (3, 1.5, "\r")]
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_the_quotes_of_a_csv_file(tmp_path: Path) -> None:
    columns = [[1, 2, 3], ["a", None, "b\nc"], [True, None, False]]
    for plain in (True, False):
        with writing(tmp_path / f"{plain}.csv", [("n", "int64"), ("s", "string"), ("b", "bool")], plain=plain) as write:
            write(columns)
    assert (tmp_path / "True.csv").read_bytes() == b'n,s,b\n1,a,True\n2,,\n3,"b\nc",False\n'
    assert (tmp_path / "False.csv").read_bytes() == b'"n","s","b"\n1,"a",true\n2,,\n3,"b\nc",false\n'


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "t.arrow"])
def test_a_table_that_fails_on_the_way_leaves_what_was_there(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("before")
    with pytest.raises(ZeroDivisionError), writing(tmp_path / name, [("n", "int64")], plain=True) as write:
        write([[1 // 0]])
    assert (tmp_path / name).read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == [name]


# ---- a table in one go: its columns, its rows, and what the user should know


def people(n: int = 60) -> pa.Table:
    rng = np.random.default_rng(0)
    return pa.table(
        {
            "age": rng.integers(18, 90, n),
            "height": rng.normal(170, 10, n).round(3),
            "sex": rng.choice(["f", "m"], n),
            "name": [f"person {i}" for i in range(n)],
            "note": pa.nulls(n, pa.string()),
        }
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("at_once", [1 << 32, 1000], ids=["once", "in parts"])
def test_read_table(suffix: str, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "AT_ONCE", at_once)
    monkeypatch.setattr(tables, "BATCH", 7)
    path, table = tmp_path / f"people{suffix}", people()
    write_table(path, table)
    schema, rows, notes = read_table(path, bounds=["0 <= age <= 120"])
    assert schema.names == ["age", "height", "sex"]
    assert [type(column) for column in schema] == [Integer, Real, Category]
    assert rows.dtype == np.float32
    assert rows.shape == (60, 3)
    assert schema[0].bounds == (0.0, 120.0)  # type: ignore[attr-defined]
    assert schema.decode(rows).cast(table.select(schema.names).schema).equals(table.select(schema.names))
    assert "'name' (free text or identifiers: 60 different texts" in " ".join(notes)
    assert len(notes) == 1
    assert [column.type for column in schema][2] == "string"
    assert read_table(path, drop=["age", "name", "note"])[2] == []


def test_rows_without_any_cell_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1.5,x\n,\n2.5,\nNA,null\n,y\n")
    _, rows, _ = read_table(tmp_path / "t.csv")
    np.testing.assert_array_equal(np.isnan(rows), [[False, False], [False, True], [True, False]])


def test_what_read_table_refuses_and_notes(tmp_path: Path, refusal: Refusal) -> None:
    path = tmp_path / "t.csv"
    write_table(path, people())
    assert "found no column 'z' to drop; it has 'age', 'height'" in refusal(read_table, path, drop=["z"])
    assert "found no column 'size' to bound" in refusal(read_table, path, bounds=["0 <= size"])
    path.write_text("1.5,2\n1.7,3\n1.2,5\n")
    assert "all of them are numbers, such as '1.5'" in read_table(path)[2][0]
    path.write_text("x,y\n,\n,\n,\n")
    assert "no model is made of column 'x' (missing in all rows" in refusal(read_table, path)


def test_excel(tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    openpyxl = pytest.importorskip("openpyxl", reason="Excel files need nicest[excel]")
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.append(["n", "x", "kind", "when", "flag", None])
    for i in range(50):
        day = datetime.datetime(2026, 1, 1 + i % 28)
        sheet.append([i % 30, None if i == 3 else i / 8, "ab"[i % 2], day, i % 2 == 0, None])
    sheet.append([None] * 6)
    book.save(tmp_path / "t.xlsx")
    assert is_table(tmp_path / "t.xlsx")
    monkeypatch.setattr(tables, "BATCH", 7)
    schema, rows, _ = read_table(tmp_path / "t.xlsx")
    assert [column.type for column in schema] == ["int64", "double", "string", "date32[day]", "string"]
    assert rows.shape == (50, 5)
    assert np.isnan(rows).sum() == 1
    assert schema.decode(rows).slice(1, 1).to_pylist() == [
        {"n": 1, "x": 0.125, "kind": "b", "when": datetime.date(2026, 1, 2), "flag": "False"}
    ]
    (tmp_path / "u.xlsx").write_bytes((tmp_path / "t.xlsx").read_bytes()[:900])
    assert "expected a whole .xlsx table, got 900 bytes" in refusal(TableFile, tmp_path / "u.xlsx")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    assert "needs openpyxl, which is not installed: pip install 'nicest[excel]'" in refusal(
        TableFile, tmp_path / "t.xlsx"
    )


def test_twenty_thousand_columns(tmp_path: Path, refusal: Refusal) -> None:
    rows = np.arange(60_000).reshape(3, 20_000)
    names = [f"c{i}" for i in range(20_000)]
    write_table(tmp_path / "t.arrow", pa.table(list(rows.T), names=names))
    schema, encoded, _ = read_table(tmp_path / "t.arrow")
    assert encoded.shape == (3, 20_000)
    assert schema[777].plain(encoded[:, 777]).tolist() == rows[:, 777].tolist()
    (tmp_path / "t.csv").write_text(",".join([*names, "one more"]) + "\n")
    assert "expected at most 20000 columns, got 20001" in refusal(TableFile, tmp_path / "t.csv")
