"""What columns hold: the kind of each, its numbers and back, and every cell that no model can take."""

import datetime
import json
import math
import shlex
import warnings
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv, parquet

from nicest.data import load
from nicest.data.cells import arrow_type, as_numbers, cell_values, codes_of, decode, encode
from nicest.data.columns import Column, columns_from_json, columns_to_json, require_columns, support
from nicest.data.scan import FEW, FINEST, MOST_VALUES, read_table, scan
from nicest.data.tables import TableFile, write_table
from nicest.errors import NicestError
from nicest.recipes import load_recipe

Refusal = Callable[..., str]
RNG = np.random.default_rng(0)
N = 40
FRACTIONS = RNG.normal(size=N)


def write(path: Path, **columns: Any) -> Path:
    """A Parquet or Arrow table, with a column of fractions beside."""
    write_table(path, pa.table(columns | {"other": FRACTIONS[: len(next(iter(columns.values())))]}))
    return path


def one(path: Path, cells: Any) -> Column:
    """What a column of these cells is taken for."""
    return scan(write(path / "t.arrow", a=cells))[0]


def back(path: Path, cells: Any) -> pa.Array:
    """Cells that were written, read as the model's numbers, and decoded."""
    file = write(path / "t.arrow", a=cells)
    columns = scan(file)
    (batch,) = TableFile(file).batches([column.name for column in columns])
    rows, unknown = encode(batch, columns, file)
    assert not unknown.any()
    return decode(rows, columns)["a"].combine_chunks()


# ---- every type of Arrow's

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
UNITS = ("s", "ms", "us", "ns")
ZONES = (None, "UTC", "Europe/Berlin", "+02:00")
SOME = list(range(N))
DAY = 86_400_000
MOMENTS: dict[str, pa.Array] = {
    "date32": pa.array([18_000 + i for i in SOME], pa.int32()).cast(pa.date32()),
    "date64": pa.array([DAY * (18_000 + i * i) for i in SOME], pa.int64()).cast(pa.date64()),
    "time32[s]": pa.array([i * 60 for i in SOME], pa.int32()).cast(pa.time32("s")),
    "time32[ms]": pa.array([i * 1000 for i in SOME], pa.int32()).cast(pa.time32("ms")),
    "time64[us]": pa.array([i * 1_000_000 for i in SOME], pa.int64()).cast(pa.time64("us")),
    "time64[ns]": pa.array([i * 1_000_000_000 for i in SOME], pa.int64()).cast(pa.time64("ns")),
    **{f"duration[{u}]": pa.array([i * 7 for i in SOME], pa.int64()).cast(pa.duration(u)) for u in UNITS},
    **{
        f"timestamp[{unit}, {zone}]": pa.array([1_000 * i for i in SOME], pa.int64()).cast(pa.timestamp(unit, zone))
        for unit in UNITS
        for zone in ZONES
    },
}
EXACT: dict[str, pa.Array] = {
    **{str(kind): pa.array([i % 100 for i in SOME], kind) for kind in INTEGERS},
    **{str(kind): pa.array([i % 3 for i in SOME], kind) for kind in (pa.float32(), pa.float64())},
    "half": pa.array([np.float16(i % 3) for i in SOME], pa.float16()),
    "half fractions": pa.array([np.float16(0.5 + i % 3) for i in SOME], pa.float16()),
    "decimal32": pa.array([Decimal(i % 3) / 4 for i in SOME], pa.decimal32(5, 2)),
    "decimal64": pa.array([Decimal(i) for i in SOME], pa.decimal64(12, 3)),
    "decimal128": pa.array([Decimal(i % 3) / 10 for i in SOME], pa.decimal128(10, 2)),
    "decimal256": pa.array([Decimal(i % 3) / 10 for i in SOME], pa.decimal256(50, 2)),
    "bool": pa.array([i % 3 == 0 for i in SOME]),
    "string": pa.array(["ab"[i % 2] for i in SOME]),
    "large_string": pa.array(["ab"[i % 2] for i in SOME], pa.large_string()),
    "string_view": pa.array(["ab"[i % 2] for i in SOME], pa.string_view()),
    "dictionary": pa.array(["ab"[i % 2] for i in SOME]).dictionary_encode(),
    "dictionary of numbers": pa.array([i % 5 for i in SOME]).dictionary_encode(),
    "dictionary of fractions": pa.array([i % 4 / 8 for i in SOME]).dictionary_encode(),
    "ordered dictionary": pa.DictionaryArray.from_arrays(
        pa.array([i % 2 for i in SOME], pa.uint8()), pa.array(["lo", "hi"], pa.large_string()), ordered=True
    ),
    "unused entries": pa.DictionaryArray.from_arrays(pa.array([i % 2 for i in SOME], pa.int8()), ["1", "2", "no"]),
    "no text": pa.array(["", "a"] * (N // 2)),
    **MOMENTS,
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("missing", [False, True], ids=["whole", "gaps"])
def test_every_type_comes_back(name: str, missing: bool, tmp_path: Path) -> None:
    cells = EXACT[name]
    if missing:
        cells = pa.concat_arrays([cells[:1], pa.nulls(1, cells.type), cells[1:-1]])
    got = back(tmp_path, cells)
    if name == "unused entries":  # all of whose cells are numbers: that is what they become
        assert [each and str(int(each)) for each in got.to_pylist()] == cells.to_pylist()
        return
    assert got.type == cells.type
    assert got.cast(cells.type).equals(cells) or got.to_pylist() == cells.to_pylist()


@pytest.mark.parametrize("name", EXACT)
def test_every_type_can_be_written_as_csv_and_parquet(name: str, tmp_path: Path) -> None:
    columns = scan(write(tmp_path / "t.arrow", a=EXACT[name]))
    rows = read_table(tmp_path / "t.arrow")[0]
    for file in ("s.csv", "s.parquet", "s.feather"):
        write_table(tmp_path / file, decode(rows, columns))
        assert sum(batch.num_rows for batch in TableFile(tmp_path / file).batches(["a"])) == N


def test_fractions_come_back_rounded_to_float32(tmp_path: Path) -> None:
    far = 1e6 + FRACTIONS
    for kind in (pa.float64(), pa.float32(), pa.decimal128(20, 10)):
        cells = pa.array(far).cast(kind, safe=False)
        got = back(tmp_path, cells)
        assert got.type == kind
        np.testing.assert_allclose(got.cast(pa.float64()), cells.cast(pa.float64()), atol=1e-6)


def test_samples_stay_within_their_type() -> None:
    names = ["uint8", "int8", "uint32", "uint64", "int64", "time32[s]", "time64[ns]", "date32[day]", "decimal128(5, 2)"]
    columns = [Column(name, name, "real", -1.0, 1e9, origin=0.0) for name in names]
    rows = np.array([[-1e30] * len(names), [1e30] * len(names), [2.6] * len(names)], np.float32)
    got = decode(rows, columns)
    assert got["uint8"].to_pylist() == [0, 255, 3]
    assert got["int8"].to_pylist() == [-128, 127, 3]
    assert got["uint32"].to_pylist() == [0, 2**32 - 1, 3]
    assert got["uint64"].to_pylist() == [0, 2**64 - 2048, 3]
    assert got["int64"].to_pylist() == [-(2**63), 2**63 - 1024, 3]
    assert got["time32[s]"].to_pylist() == [datetime.time(0), datetime.time(23, 59, 59), datetime.time(0, 0, 3)]
    assert got["decimal128(5, 2)"].to_pylist() == [Decimal("-999.99"), Decimal("999.99"), Decimal("2.60")]
    steps = [Column("a", "int8", "steps", -5, 5, 5.0), Column("b", "string", "values", 0, 1, 1.0, ("x", "y"))]
    assert decode(np.array([[-3, -3], [9, 9], [1, 1]]), steps).to_pydict() == {"a": [-5, 5, 0], "b": ["x", "y", "y"]}


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (pa.array([[1]] * N), "list<"),
        (pa.array([{"b": 1}] * N), "struct<"),
        (pa.array([b"x"] * N), "binary"),
        (pa.array([b"12"] * N, pa.binary(2)), "fixed_size_binary"),
        (pa.array([(1, 2, 3)] * N, pa.month_day_nano_interval()), "month_day_nano_interval"),
        (pa.array([True] * N).dictionary_encode(), "dictionary<values=bool"),
        (pa.array([[("k", 1)]] * N, pa.map_(pa.string(), pa.int64())), "map<"),
    ],
)
def test_types_of_which_no_model_is_made(cells: pa.Array, kind: str, tmp_path: Path, refusal: Refusal) -> None:
    message = refusal(one, tmp_path, cells)
    assert "expected numbers or strings in column 'a', got " + kind in message
    assert """leave it out: set 'data.drop=["a"]'""" in message
    assert [column.name for column in scan(tmp_path / "t.arrow", ["a"])] == ["other"]


def test_the_names_of_all_types_are_understood(refusal: Refusal) -> None:
    for cells in EXACT.values():
        assert arrow_type(str(cells.type)) == cells.type
    for name in ("", "x", "timestamp[parsecs, tz=UTC]", "decimal128(99, 1)", "decimal999(3, 1)", "list<item: int64>"):
        assert "expected a type of Arrow's" in refusal(arrow_type, name)


# ---- kinds


@pytest.mark.parametrize(
    ("cells", "kind", "step", "values"),
    [
        (np.arange(N) * 10 - 200, "steps", 10.0, ()),
        (np.arange(N) * 6 + 4, "steps", 6.0, ()),
        (np.arange(N) % 2 * 15, "steps", 15.0, ()),
        (np.full(N, 7), "steps", 1.0, ()),
        (np.arange(N).astype(float), "steps", 1.0, ()),
        (np.full(N, 2.0), "steps", 1.0, ()),
        (np.full(N, 0.5), "values", 1.0, (0.5,)),
        (np.arange(N) % 4 / 4, "values", 1.0, (0.0, 0.25, 0.5, 0.75)),
        (np.arange(N) % 5 / 4, "real", 0.0, ()),  # five values, of which none is in ten rows
        (FRACTIONS, "real", 0.0, ()),
        (np.append(np.arange(N - 1), FINEST), "steps", 1.0, ()),
        (np.append(np.arange(N - 1), FINEST + 1), "real", 0.0, ()),
        (np.append(np.arange(N - 1), FINEST + 1) * 7, "real", 0.0, ()),
        (2**53 + np.arange(N) * 2, "real", 0.0, ()),
        (2**62 + np.arange(N) * 2**50, "real", 0.0, ()),
        (np.full(N, True), "values", 1.0, (True,)),
        (["a"] * N, "values", 1.0, ("a",)),
        (["b", "a"] * (N // 2), "values", 1.0, ("a", "b")),
        (["1", "2"] * (N // 2), "steps", 1.0, ()),
        ([" 1 ", "+2"] * (N // 2), "steps", 1.0, ()),
        (["1", "a", "b", "c"] * (N // 4), "values", 1.0, ("1", "a", "b", "c")),
        (["0.5", ".75"] * (N // 2), "values", 1.0, (0.5, 0.75)),
    ],
)
def test_kinds(cells: Any, kind: str, step: float, values: tuple, tmp_path: Path) -> None:
    got = one(tmp_path, cells)
    assert (got.kind, got.step, got.values, got.discrete) == (kind, step, values, kind != "real")
    if kind != "values":
        numbers = np.array([float(cell) for cell in cells])
        assert (got.low, got.high) == (numbers.min(), numbers.max())


def test_few_values_end_at_some_number(tmp_path: Path) -> None:
    many = np.repeat(np.arange(FEW + 1) + 0.5, 10)
    write_table(tmp_path / "t.parquet", pa.table({"a": many[10:], "b": many[:-10]}))
    assert {column.kind for column in scan(tmp_path / "t.parquet")} == {"values"}
    write_table(tmp_path / "t.parquet", pa.table({"a": many}))
    assert scan(tmp_path / "t.parquet")[0].kind == "real"


def test_texts_end_at_some_number(tmp_path: Path, refusal: Refusal) -> None:
    texts = [f"t{i}" for i in range(MOST_VALUES + 1)]
    write_table(tmp_path / "t.parquet", pa.table({"a": texts[1:], "b": texts[:-1]}))
    assert [len(column.values) for column in scan(tmp_path / "t.parquet")] == [MOST_VALUES] * 2
    write_table(tmp_path / "t.parquet", pa.table({"a": texts}))
    assert "column 'a' holds more than 100 different strings, such as 't0'" in refusal(scan, tmp_path / "t.parquet")
    write_table(tmp_path / "t.parquet", pa.table({"a": ["x" * 1001, "y"]}))
    assert "column 'a' holds strings of more than 1000 characters" in refusal(scan, tmp_path / "t.parquet")


def test_a_column_is_known_when_all_batches_were_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row is the only odd one."""
    monkeypatch.setattr("nicest.data.tables.BATCH", 7)
    n = 64
    last = np.arange(n) == n - 1
    table = {
        "step": np.arange(n) * 4 + 2 * last,
        "fraction": np.arange(n) + 0.5 * last,
        "text": pa.array(np.where(last, "inf", "x")),
        "late": pa.array([None] * (n - 1) + [3]),
        "words": pa.array(["a"] * 40 + ["7"] * 24),
    }
    write_table(tmp_path / "t.parquet", pa.table(table))
    step, fraction, text, late, words = scan(tmp_path / "t.parquet")
    assert (step.step, step.high) == (2.0, 254.0)
    assert (fraction.kind, fraction.high) == ("real", 63.5)
    assert text.values == ("inf", "x")
    assert (late.kind, late.low, late.high) == ("steps", 3.0, 3.0)
    assert words.values == ("7", "a")


def test_long_spans_of_days_stay_exact(tmp_path: Path) -> None:
    """A day is 86,400,000 ms: counts of days fit float32, milliseconds do not."""
    days = RNG.integers(0, FINEST, 1000)
    days[:2] = 0, FINEST
    cells = pa.array(days * DAY, pa.int64()).cast(pa.date64())
    write_table(tmp_path / "t.arrow", pa.table({"a": cells, "b": RNG.normal(size=1000)}))
    rows, _, columns = read_table(tmp_path / "t.arrow")
    np.testing.assert_array_equal(rows[:, 0], days)
    assert decode(rows, columns)["a"].combine_chunks().equals(cells)


# ---- numbers in texts, the same for Arrow and for us


@given(st.text(alphabet="0123456789+-.eEinfatyNx_ \u0663,", max_size=7))
@settings(max_examples=300, deadline=None)
def test_a_number_is_what_arrow_reads(text: str) -> None:
    numbers, words = as_numbers(pa.array([text, "1", "word"]))
    try:
        expected = pa.array([text.strip()]).cast(pa.float64())[0].as_py()
    except pa.ArrowInvalid:
        assert words[0]
        assert np.isnan(numbers[0])
    else:
        assert not words[0]
        np.testing.assert_array_equal(numbers[0], expected)
    assert list(words[1:]) == [False, True]


# ---- encode, then decode: the identity on training rows


def cells_of(kind: pa.DataType, values: st.SearchStrategy) -> st.SearchStrategy[pa.Array]:
    return st.lists(values | st.none() if kind != pa.string() else values, min_size=3, max_size=25).map(
        lambda cells: pa.array(cells, kind)
    )


SOME_CELLS = st.one_of(
    cells_of(pa.int8(), st.integers(-128, 127)),
    cells_of(pa.int64(), st.integers(-(2**19), 2**19)),
    cells_of(pa.int64(), st.integers(0, 50).map(lambda i: 10**12 + 1000 * i)),
    cells_of(pa.uint32(), st.integers(0, 1000).map(lambda i: 3 * i)),
    cells_of(pa.float64(), st.integers(-1000, 1000).map(float)),
    cells_of(pa.bool_(), st.booleans()),
    cells_of(pa.string(), st.sampled_from(["a", "b", "", "é\n", "x y"])),
    cells_of(pa.timestamp("us", "UTC"), st.integers(0, 2**20).map(lambda i: i * 10**6)),
    cells_of(pa.date32(), st.integers(0, 40_000).map(lambda i: datetime.date(1970, 1, 1) + datetime.timedelta(i))),
)


@given(st.lists(SOME_CELLS, min_size=1, max_size=5))
@settings(max_examples=150, deadline=None)
def test_rows_of_training_come_back(tmp_path_factory: pytest.TempPathFactory, cells: list[pa.Array]) -> None:
    n = min(map(len, cells))
    table = pa.table({f"c{i}": each[:n] for i, each in enumerate(cells)})
    path = tmp_path_factory.getbasetemp() / "any.arrow"
    write_table(path, table)
    try:
        columns = scan(path)
    except NicestError as error:
        assert "is missing in all rows" in str(error)  # noqa: PT017
        return
    (batch,) = TableFile(path).batches(table.column_names)
    rows, unknown = encode(batch, columns, path)
    assert not unknown.any()
    assert decode(rows, columns).equals(table)


# ---- missing cells


def test_rows_with_missing_cells_are_apart_from_whole_ones(tmp_path: Path) -> None:
    table = {"a": pa.array([1, None, *range(2, N)]), "b": pa.array([*("xy" * (N // 2 - 1)), None, "x"])}
    table["c"] = pa.array([*FRACTIONS[:-1], math.nan])
    write_table(tmp_path / "t.parquet", pa.table(table))
    rows, holed, columns = read_table(tmp_path / "t.parquet")
    assert (len(rows), len(holed), len(columns)) == (N - 3, 3, 3)
    np.testing.assert_array_equal(np.isnan(holed), [[True, False, False], [False, True, False], [False, False, True]])
    splits = load(str(tmp_path / "t.parquet"))
    assert sum(len(splits.split(part)) for part in ("train", "valid", "test")) == N - 3
    assert splits.steps == (1.0, 1.0, 0.0)


# ---- bad tables


def table_of(**columns: Any) -> Callable[[Path], None]:
    return lambda path: write_table(path.with_suffix(".parquet"), pa.table(columns))


BAD: dict[str, tuple[str | dict[str, Any], list[str]]] = {
    "one row": ("a,b\n1,2\n", ["at least 3 rows", "got 1"]),
    "only a header": ("a,b\n", ["expected rows, got only", "2 columns"]),
    "one column": ("a\n1\n2\n", ["at least 2 columns, got 1", "separated by commas"]),
    "semicolons": ("a;b\n1,5;2\n2,5;3\n", ["expected cells separated by commas, got ';' between them"]),
    "tabs": ("a\tb\n1\t2\n", ["expected cells separated by commas, got '\\t' between them"]),
    "UTF-16": ("a,b\n1,2\n".encode("utf-16"), ["expected text in UTF-8"]),
    "a column that is missing": ("a,b\n1,\n2,\n3,\n", ["column 'b' is missing in all rows", 'data.drop=["b"]']),
    "a column of NaN": ({"a": [1, 2, 3], "b": [math.nan] * 3}, ["column 'b' is missing in all rows"]),
    "a column of nothing": ({"a": [1, 2, 3], "b": pa.nulls(3)}, ["column 'b' is missing in all rows"]),
    "a gap in each row": ("a,b\n1,\n,2\n3,\n", ["at least 3 complete rows", "got 0 of 3", "data.drop"]),
    "infinity": ({"a": [1.5, math.inf, 2], "b": [1, 2, 3]}, ["finite numbers, got inf in column 'a'", "drop those"]),
    "minus infinity in text": ("a,b\n1,-inf\n2,3\n3,4\n", ["finite numbers, got -inf in column 'b'"]),
    "beyond float64 in text": ("a,b\n1,1e999\n2,3\n3,4\n", ["finite numbers, got inf in column 'b'"]),
    "a word among numbers": (
        "a,b\n1,2\n2,x7\n3,4\n",
        ["expected numbers in column 'b', got 'x7' among", "correct the cell"],
    ),
    "underscores": ("a,b\n1,2\n2,1_000\n3,4\n", ["got '1_000' among them"]),
    "digits of another script": ("a,b\n1,2\n2,\u0663\n3,4\n", ["got '\u0663' among them"]),
    "a terminal code": ("a,b\n1,2\n2,\x1b[31m\n3,4\n", ["got '\\\\x1b[31m' among them"]),
    "a fraction that is constant": ({"a": [0.5] * 5, "b": [1, 2, 3, 4, 5]}, ["column 'a' is constant, 0.5"]),
    "beyond float32": ({"a": [1e300, 2.5e300, 0], "b": [1, 2, 3]}, ["'a' has numbers from 0 to 2.5e+300", "unit"]),
    "below float32": ({"a": [1e-40, 2e-40, 3e-41], "b": [1, 2, 3]}, ["'a' has numbers from 3e-41 to 2e-40", "unit"]),
    "thousands": ("a,b\n" + "".join(f'{i},"{i},000"\n' for i in range(200)), ["more than 100 different strings"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tables(name: str, tmp_path: Path, refusal: Refusal) -> None:
    what, words = BAD[name]
    path = tmp_path / ("t.csv" if isinstance(what, str | bytes) else "t.parquet")
    if isinstance(what, str | bytes):
        path.write_bytes(what if isinstance(what, bytes) else what.encode())
    else:
        write_table(path, pa.table(what))
    message = refusal(load, str(path))
    assert str(path.stem) in message
    assert message.isprintable()
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("cells", "kind", "step", "first"),
    [
        (["2026-01-31", "2026-02-02", ""], "date32[day]", 2.0, "2026-01-31"),
        (["2026-01-31 10:00", "2026-01-31 10:30"], "timestamp[s]", 1800.0, "2026-01-31 10:00:00"),
        (["2026-01-31T10:00:00.5", "2026-01-31T10:00:01"], "timestamp[us]", 500_000.0, "2026-01-31 10:00:00.500000"),
        (["2026-01-31T10:00:00Z", "2026-01-31T10:00:10Z"], "timestamp[s, tz=UTC]", 10.0, "2026-01-31 10:00:00Z"),
    ],
)
def test_dates_of_a_text_file_are_dates(cells: list, kind: str, step: float, first: str, tmp_path: Path) -> None:
    lines = [f"{each},{i}.5" for i, each in enumerate(cells * 3)]
    (tmp_path / "t.csv").write_text("\n".join(["when,x", *lines]) + "\n")
    rows, _, columns = read_table(tmp_path / "t.csv")
    assert (columns[0].kind, columns[0].type, columns[0].step) == ("steps", kind, step)
    assert set(rows[:, 0]) == {0.0, 1.0}
    write_table(tmp_path / "out.csv", decode(rows, columns))
    assert (tmp_path / "out.csv").read_text().splitlines()[1].split(",")[0] == first


@pytest.mark.parametrize("last", ["soon", "2026-01-31 10:00", "7"])
def test_dates_among_other_texts_are_texts(last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nicest.data.tables.BATCH", 3)
    lines = [f"{each},{i}.5" for i, each in enumerate(["2026-01-31", "2026-02-02", "2026-02-03"] * 3 + [last])]
    (tmp_path / "t.csv").write_text("\n".join(["when,x", *lines]) + "\n")
    with pytest.warns(UserWarning, match="treated as unordered categories"):
        assert scan(tmp_path / "t.csv")[0].values == tuple(sorted(["2026-01-31", "2026-02-02", "2026-02-03", last]))


@pytest.mark.parametrize("text", ["{}%", "${},000", "{}/1/2026", "{} kg"])
def test_texts_that_are_numbers_to_a_person_are_told(text: str, tmp_path: Path) -> None:
    write_table(tmp_path / "t.parquet", pa.table({"p": [text.format(i) for i in range(N)], "x": FRACTIONS}))
    with pytest.warns(UserWarning, match="column 'p' holds 40 different strings.*write numbers as 1234.5"):
        assert scan(tmp_path / "t.parquet")[0].kind == "values"


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_row_numbers_are_told(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nicest.data.tables.BATCH", 7)
    path, x = tmp_path / f"t.{suffix}", np.random.default_rng(0).normal(size=60)
    write_table(path, pa.table({"id": np.arange(60) * 3, "x": x}))
    with pytest.warns(UserWarning, match=r"'id' rises from row to row.*beyond 177.*data\.drop=\[\"id\"\]"):
        scan(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scan(path, drop=["id"])
        write_table(path, pa.table({"age": np.arange(60) % 50, "x": x}))
        scan(path)


def test_a_first_line_of_numbers_is_told(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("1.5,2\n1.7,3\n1.2,5\n")
    with pytest.warns(UserWarning, match="all of them are numbers, such as '1.5'"):
        scan(tmp_path / "t.csv")


def test_columns_that_are_dropped_may_hold_anything(tmp_path: Path, refusal: Refusal) -> None:
    table = {"a": [[1]] * N, "b": ["x" + f"{i}" * 2 for i in range(N)], "c": pa.nulls(N), "d": FRACTIONS, "e": SOME}
    write_table(tmp_path / "t.parquet", pa.table(table))
    assert [column.name for column in scan(tmp_path / "t.parquet", ["a", "c"])] == ["b", "d", "e"]
    assert load(str(tmp_path / "t.parquet"), drop=("a", "b", "c")).shape == (2,)
    assert "found no column 'z' to drop; it has 'a', 'b', 'c', 'd', 'e'" in refusal(
        load, str(tmp_path / "t.parquet"), drop=("z",)
    )


@pytest.mark.parametrize(
    "name", ["a b", "it's", 'say "x"', "\x1b[31m", "\U0005199d\xad", "é", "\x7f", "back\\slash", ""]
)
def test_what_is_said_of_a_column_can_be_copied(name: str, tmp_path: Path, refusal: Refusal) -> None:
    write_table(tmp_path / "t.parquet", pa.table({name: pa.nulls(9), "b": FRACTIONS[:9], "c": FRACTIONS[9:18]}))
    message = refusal(load, str(tmp_path / "t.parquet"))
    assert message.isprintable()
    said = shlex.split(message.partition(": set ")[2])[0]
    assert load_recipe("table").override(said).data.drop == (name,)
    write_table(tmp_path / "t.parquet", pa.table({name * 9999: pa.nulls(9), "b": FRACTIONS[:9]}))
    assert len(refusal(load, str(tmp_path / "t.parquet"))) < len(str(tmp_path)) + 999


def test_thousands_of_columns(tmp_path: Path) -> None:
    names, rows = [f"c{i}" for i in range(3_000)], RNG.normal(size=(12, 3_000)).round(3)
    table = pa.table(list(rows.T), names=names)
    parquet.write_table(table, tmp_path / "t.parquet")
    got, _, columns = read_table(tmp_path / "t.parquet")
    assert got.shape == (12, 3_000)
    low = np.array([column.low for column in columns])
    np.testing.assert_allclose(got + low, rows, atol=1e-5)
    assert require_columns(names, columns[:5], "t.parquet") == names[5:]


def test_thousands_of_columns_of_text(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(3_000)]
    csv.write_csv(pa.table([[0, i % 7, 1] for i in range(3_000)], names=names), tmp_path / "t.csv")
    assert read_table(tmp_path / "t.csv")[0].shape == (3, 3_000)


# ---- other tables than that of training

TRAINED = {
    "n": pa.array(np.arange(N) * 10),
    "x": pa.array(FRACTIONS),
    "c": pa.array(["a", "b"] * (N // 2)),
    "t": pa.array(np.arange(N) * 86400, pa.int64()).cast(pa.timestamp("s")),
    "f": pa.array([True, False] * (N // 2)),
    "v": pa.array([0.1, 0.7] * (N // 2), pa.float32()),
}


def codes(path: Path, name: str, cells: Any) -> tuple[np.ndarray, np.ndarray]:
    """The model's numbers of other cells in a column of training."""
    write_table(path / "t.parquet", pa.table(TRAINED))
    columns = [column for column in scan(path / "t.parquet") if column.name == name]
    write_table(path / "u.arrow", pa.table({name: cells}))
    (batch,) = TableFile(path / "u.arrow").batches([name])
    rows, unknown = encode(batch, columns, path / "u.arrow")
    return rows[:, 0], unknown


NAN = math.nan


@pytest.mark.parametrize(
    ("name", "cells", "expected", "unknown"),
    [
        ("n", pa.array([20, 25, -10, None]), [2, 0, 0, NAN], [0, 1, 1, 0]),
        ("n", pa.array([20.0, 20.5, 29.999]), [2, 0, 0], [0, 1, 1]),
        ("n", pa.array(["20", " 30 ", None]), [2, 3, NAN], [0, 0, 0]),
        ("n", pa.array([20.0, math.inf, -math.inf, 1e300]), [2, 0, 0, 0], [0, 1, 1, 1]),
        ("n", pa.array([20, 30]).dictionary_encode(), [2, 3], [0, 0]),
        ("n", pa.nulls(2), [NAN, NAN], [0, 0]),
        ("c", pa.array(["b", "z", None, "a"], pa.large_string()), [1, 0, NAN, 0], [0, 1, 0, 0]),
        ("c", pa.array(["b", "z", None, "a"]).dictionary_encode(), [1, 0, NAN, 0], [0, 1, 0, 0]),
        ("c", pa.DictionaryArray.from_arrays([0, 1, None], pa.array(["b", None])), [1, NAN, NAN], [0, 0, 0]),
        ("c", pa.nulls(1), [NAN], [0]),
        ("t", pa.array([86_400_000], pa.int64()).cast(pa.timestamp("ms")), [1], [0]),
        ("t", pa.array([86_400_000_000_000], pa.int64()).cast(pa.timestamp("ns", "UTC")), [1], [0]),
        ("t", pa.array(["1970-01-02", None]), [1, NAN], [0, 0]),
        ("t", pa.array([2], pa.int32()).cast(pa.date32()), [2], [0]),
        ("f", pa.array(["true", "False", None]), [1, 0, NAN], [0, 0, 0]),
        ("v", pa.array([0.1, 0.7, 0.3, None, math.inf]), [0, 1, 0, NAN, 0], [0, 0, 1, 0, 1]),
        ("v", pa.array(["0.7", "0.10"]), [1, 0], [0, 0]),
    ],
)
def test_other_cells(name: str, cells: pa.Array, expected: list, unknown: list, tmp_path: Path) -> None:
    got, new = codes(tmp_path, name, cells)
    np.testing.assert_array_equal(got, np.array(expected, np.float32))
    np.testing.assert_array_equal(new, np.array(unknown, bool))


@pytest.mark.parametrize(
    ("name", "cells", "words"),
    [
        ("n", pa.array(["1", "many"]), "expected numbers in column 'n', as in training, got 'many'"),
        ("n", pa.array([True]), "got bool"),
        ("n", TRAINED["t"], "got timestamp[s]"),
        ("n", pa.array([[1]]), "got list"),
        ("x", pa.array([{"a": 1}]), "got struct"),
        ("c", pa.array([1]), "expected texts in column 'c', as in training, got int64"),
        ("c", pa.array([True]), "expected texts in column 'c', as in training, got bool"),
        ("f", pa.array([1]), "expected bool in column 'f', as in training, got int64"),
        ("f", pa.array(["maybe"]), "expected bool in column 'f', as in training, got string"),
        ("t", pa.array([1]), "expected timestamp[ms] in column 't', as in training, got int64"),
        ("t", pa.array(["soon"]), "expected timestamp[ms] in column 't', as in training, got 'soon'"),
        ("t", pa.array([1], pa.duration("s")), "got duration[s]"),
        ("v", pa.array(["much"]), "got 'much'"),
    ],
)
def test_other_types(name: str, cells: pa.Array, words: str, tmp_path: Path, refusal: Refusal) -> None:
    assert words in refusal(codes, tmp_path, name, cells)


def test_tables_of_other_columns(tmp_path: Path, refusal: Refusal) -> None:
    write_table(tmp_path / "t.parquet", pa.table(TRAINED))
    columns = scan(tmp_path / "t.parquet")
    write_table(tmp_path / "u.parquet", pa.table({"n": [1], "z": [2]}))
    message = refusal(require_columns, TableFile(tmp_path / "u.parquet").names, columns, "u.parquet")
    assert "lacks 'x', 'c', 't', 'f', 'v', which training had, and has 'z', which it had not" in message
    assert require_columns(TableFile(tmp_path / "t.parquet").names, columns[1:3], "") == ["n", "t", "f", "v"]


# ---- columns.json


def test_columns_as_json(tmp_path: Path) -> None:
    write_table(tmp_path / "t.parquet", pa.table(TRAINED))
    columns = scan(tmp_path / "t.parquet")
    assert columns_from_json(json.loads(json.dumps(columns_to_json(columns))), "x") == columns
    assert columns_from_json([], "x") == ()


SOUND = {"name": "a", "type": "int64", "kind": "steps", "low": 0, "high": 9, "step": 1}
UNSOUND: list[Any] = [None, 1, "x", {}, {"a": 1}, [1], ["x"], [None], [[]], [{}], [{"name": "a"}], [SOUND, SOUND]]
UNSOUND += [[SOUND | {key: None}] for key in SOUND] + [[SOUND | {key: [1]}] for key in SOUND]
UNSOUND += [[SOUND | {key: NAN}] for key in ("low", "high", "step")] + [[SOUND | {"more": 1}]]
UNSOUND += [[SOUND | {key: 10**400}] for key in ("low", "high", "step")]
UNSOUND += [[SOUND | {"step": 0}], [SOUND | {"step": -1}], [SOUND | {"low": 10}], [SOUND | {"kind": "x"}]]
UNSOUND += [[SOUND | {"kind": "real"}], [SOUND | {"values": ["a"]}], [SOUND | {"kind": "values"}]]
VALUES = ([], ["b", "a"], ["a", "a"], ["a", 1], [[1]], [None], [{}], [NAN, 1.0], [math.inf], "ab", 5, [1])
UNSOUND += [[SOUND | {"kind": "values", "values": values}] for values in VALUES]


@pytest.mark.parametrize("rows", UNSOUND)
def test_columns_that_nicest_never_wrote(rows: Any, refusal: Refusal) -> None:
    assert "x: expected what nicest writes about columns, got something else" in refusal(columns_from_json, rows, "x")


class TestSupport:
    """Spikes, bounds and the values of categories, as the cells show them or as they are given."""

    def columns(self, tmp_path: Path, **bounds: list[str]) -> dict[str, Column]:
        rng = np.random.default_rng(0)
        n, u = 2000, rng.random((2000, 5))
        frame = {
            "gain": np.where(u[:, 0] < 0.7, 0.0, -500.125 * np.log(u[:, 1])),
            "capped": np.minimum(0.1 + 5 * u[:, 1], 4.00001),
            "count": np.where(u[:, 2] < 0.5, 0, np.floor(90 * u[:, 3])).astype(int),
            "share": u[:, 4],
            "weight": 60 + 9 * rng.standard_normal(n),
            "kind": rng.choice(["c", "a", "b"], n),
        }
        path = tmp_path / "t.parquet"
        parquet.write_table(pa.table(frame), path)
        return {column.name: column for column in load(str(path), **bounds).columns}

    def test_are_found(self, tmp_path: Path):
        found = self.columns(tmp_path)
        assert {name: column.spikes for name, column in found.items() if column.spikes} == {
            "gain": (0.0,),
            "capped": (4.00001,),
            "count": (0.0,),
        }
        ends = {name: (column.floor, column.ceiling) for name, column in found.items()}
        assert ends["gain"] == ends["count"] == (0.0, None)
        assert ends["share"] == (0.0, 1.0)
        assert ends["weight"] == ends["kind"] == (None, None)
        assert columns_from_json(columns_to_json(list(found.values())), "x") == tuple(found.values())

    @pytest.mark.parametrize("ascending", [True, False])
    def test_do_not_depend_on_the_order_of_rows(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ascending: bool):
        monkeypatch.setattr("nicest.data.tables.BATCH", 500)
        rng, n = np.random.default_rng(0), 6_000
        often = np.concatenate([np.repeat([2.5, 7.25], [330, 360]), 10 + rng.random(n - 690)])  # 5.5 % and 6 %
        columns = {
            "zeros": np.where(rng.random(n) < 0.4, 0.0, rng.exponential(size=n)),
            "share": rng.random(n),
            "far": 5 + rng.random(n),
            "often": often,
            "rare": np.concatenate([np.repeat(3.5, 280), rng.normal(size=n - 280)]),  # 4.7 %
            "count": rng.poisson(3, n),
        }
        mixed = {name: rng.permutation(cells) for name, cells in columns.items()}
        in_order = {name: np.sort(cells)[:: 1 if ascending else -1] for name, cells in columns.items()}
        paths = [tmp_path / "mixed.parquet", tmp_path / "in_order.parquet"]
        for path, each in zip(paths, (mixed, in_order), strict=True):
            parquet.write_table(pa.table(each), path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that sorted integers look like row numbers
            found = [scan(path) for path in paths]
        assert found[0] == found[1]
        named = {column.name: column for column in found[0]}
        assert (named["zeros"].spikes, named["zeros"].floor) == ((0.0,), 0.0)
        assert (named["share"].floor, named["share"].ceiling) == (0.0, 1.0)
        assert (named["far"].spikes, named["far"].floor) == ((), None)
        assert named["often"].spikes == (2.5, 7.25)
        assert named["rare"].spikes == ()

    def test_are_what_the_units_are_made_of(self, tmp_path: Path):
        found = support(tuple(self.columns(tmp_path).values()))
        assert found.steps == (0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
        assert found.categories == (False, False, False, False, False, True)
        assert found.atoms[5] == (0.0, 1.0, 2.0)
        assert found.most_atoms == 3

    def test_a_spike_comes_back_to_its_last_digit(self, tmp_path: Path):
        column = self.columns(tmp_path)["capped"]
        code = np.float32(column.code(4.00001))
        assert cell_values(np.array([code], np.float32), column).tolist() == [4.00001]

    def test_what_breaks_a_bound_is_unknown(self, tmp_path: Path):
        codes, unknown = codes_of(np.array([-1.0, 0.0, 3.0, np.nan]), self.columns(tmp_path)["gain"])
        assert unknown.tolist() == [True, False, False, False]
        assert np.isnan(codes[3])

    def test_no_number_changes_its_sign(self, tmp_path: Path):
        column = self.columns(tmp_path)["weight"]
        assert cell_values(np.array([-1000.0]), column).tolist() == [0.0]

    def test_given_ones_come_first(self, tmp_path: Path):
        found = self.columns(tmp_path, bounds=["0 <= weight <= 200", "-1 <= share"])
        assert (found["weight"].floor, found["weight"].ceiling) == (0.0, 200.0)
        assert (found["share"].floor, found["share"].ceiling) == (-1.0, None)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("weight > 3", "expected bounds such as"),
            ("a <= weight", "expected bounds such as"),
            ("0 <= height", "found no column 'height' to bound"),
            ("80 <= weight", "beyond its bounds 80 and inf"),
            ("3 <= weight <= 2", "expected a finite lower bound"),
            ("-inf <= weight", "expected a finite lower bound"),
            ("0 <= kind", "holds only 3 distinct values, so bounds do not apply"),
        ],
    )
    def test_wrong_ones_are_refused(self, tmp_path: Path, text: str, said: str):
        with pytest.raises(NicestError, match=said):
            self.columns(tmp_path, bounds=[text])
