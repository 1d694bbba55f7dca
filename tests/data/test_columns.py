"""What columns hold: the kind of each, its numbers and back, and every cell that no model can take."""

import datetime
import json
import math
import shlex
import tomllib
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nicest.data.cells import arrow_type, as_cells, as_numbers
from nicest.data.columns import Category, Column, Head, Integer, Moment, Number, Real, Schema, parsed_bounds
from nicest.data.infer import FEW, FINEST, MOST_VALUES, infer, schema_of
from nicest.errors import NicestError

Refusal = Callable[..., str]
RNG = np.random.default_rng(0)
N = 40
FRACTIONS = RNG.normal(size=N)
SOME = list(range(N))
NAN, INF = math.nan, math.inf


def one(cells: Any, **options: Any) -> Column:
    """Infer a column of these cells."""
    return infer(pa.table({"a": cells}), **options)[0][0]


# ---- every type of Arrow's

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
UNITS = ("s", "ms", "us", "ns")
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
        for zone in (None, "UTC", "Europe/Berlin", "+02:00")
    },
}
EXACT: dict[str, pa.Array] = {
    **{str(kind): pa.array([i % 100 for i in SOME], kind) for kind in INTEGERS},
    **{str(kind): pa.array([i % 3 for i in SOME], kind) for kind in (pa.float32(), pa.float64())},
    "half": pa.array([np.float16(0.5 + i % 3) for i in SOME], pa.float16()),
    "float with decimals": pa.array([0.1 + i / 8 for i in SOME], pa.float32()),
    "decimal64": pa.array([Decimal(i) for i in SOME], pa.decimal64(12, 3)),
    "decimal128": pa.array([Decimal(i % 3) / 10 for i in SOME], pa.decimal128(10, 2)),
    "decimal256": pa.array([Decimal(i) / 10 for i in SOME], pa.decimal256(50, 2)),
    "bool": pa.array([i % 3 == 0 for i in SOME]),
    "string": pa.array(["ab"[i % 2] for i in SOME]),
    "large_string": pa.array(["ab"[i % 2] for i in SOME], pa.large_string()),
    "string_view": pa.array(["ab"[i % 2] for i in SOME], pa.string_view()),
    "dictionary": pa.array(["ab"[i % 2] for i in SOME]).dictionary_encode(),
    "dictionary of numbers": pa.array([i % 5 for i in SOME]).dictionary_encode(),
    "ordered dictionary": pa.DictionaryArray.from_arrays(
        pa.array([i % 2 for i in SOME], pa.uint8()), pa.array(["lo", "hi"], pa.large_string()), ordered=True
    ),
    "no text": pa.array(["", "a"] * (N // 2)),
    "leading zeros": pa.array([f"0{i % 9}" for i in SOME]),
    **MOMENTS,
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("missing", [False, True], ids=["complete", "gaps"])
def test_every_type_comes_back(name: str, missing: bool) -> None:
    cells = EXACT[name]
    if missing:
        cells = pa.concat_arrays([cells[:1], pa.nulls(1, cells.type), cells[1:-1]])
    table = pa.table({"a": cells})
    schema = schema_of(table)
    assert arrow_type(schema[0].type) == cells.type
    got = schema.decode(schema.encode(table))["a"].combine_chunks()
    assert got.type == cells.type
    assert got.to_pylist() == cells.to_pylist()


def test_unused_entries_of_a_dictionary_do_not_count() -> None:
    cells = pa.DictionaryArray.from_arrays(pa.array([i % 2 for i in SOME], pa.int8()), ["1", "2", "no"])
    assert one(cells).values == (1.0, 2.0)  # type: ignore[attr-defined]
    with_null = pa.DictionaryArray.from_arrays(pa.array([i % 3 for i in SOME], pa.int8()), ["a", None, "b"])
    assert one(with_null).values == ("a", "b")  # type: ignore[attr-defined]


def test_samples_stay_within_their_type() -> None:
    def written(kind: str) -> list:
        return as_cells(np.array([-1e30, 1e30, 2.6]), np.zeros(3, bool), kind).to_pylist()

    assert written("uint8") == [0, 255, 3]
    assert written("int8") == [-128, 127, 3]
    assert written("uint64") == [0, 2**64 - 2048, 3]
    assert written("int64") == [-(2**63), 2**63 - 1024, 3]
    assert written("time32[s]") == [datetime.time(0), datetime.time(23, 59, 59), datetime.time(0, 0, 3)]
    assert written("decimal128(5, 2)") == [Decimal("-999.99"), Decimal("999.99"), Decimal("2.60")]


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (pa.array([[1]] * N), "expected numbers or strings, got list<"),
        (pa.array([{"b": 1}] * N), "got struct<"),
        (pa.array([b"x"] * N), "got binary"),
        (pa.array([(1, 2, 3)] * N, pa.month_day_nano_interval()), "got month_day_nano_interval"),
        (pa.array([True] * N).dictionary_encode(), "got dictionary<values=bool"),
        (pa.nulls(N), "missing in all rows"),
        (pa.array([NAN] * N), "missing in all rows"),
        ([""] * N, None),
        (pa.array([10**15 + i for i in SOME], pa.int64()).cast(pa.timestamp("s")), "outside the years"),
        ([f"t{i}" for i in SOME], "free text or identifiers: 40 different texts such as 't0'"),
        ([f"{i} kg" for i in SOME], "write numbers as 1234.5, without units"),
        (["x" * 1001, "y"] * (N // 2), "free text: texts of more than 1000 characters"),
    ],
)
def test_columns_of_which_no_model_is_made_are_left_out(cells: Any, reason: str | None, refusal: Refusal) -> None:
    table = pa.table({"a": cells, "other": FRACTIONS})
    schema, notes = infer(table, source="t")
    if reason is None:
        assert notes == []
        return
    assert schema.names == ["other"]
    assert len(notes) == 1
    assert notes[0].startswith("t: left out 1 of 2 columns: 'a' (")
    assert reason in notes[0]
    assert reason in refusal(schema_of, table.select(["a"]))
    assert infer(table, drop=["a"])[1] == []


def test_many_columns_that_are_left_out_are_one_line() -> None:
    table = pa.table({f"c{i}": pa.nulls(9) for i in range(50)} | {"x": FRACTIONS[:9]})
    with pytest.warns(UserWarning, match=r"left out 50 of 51 columns: 'c0' \(missing in all rows\), .* and 45 more"):
        assert schema_of(table).names == ["x"]


def test_the_names_of_all_types_are_understood(refusal: Refusal) -> None:
    for name in ("", "x", "timestamp[parsecs, tz=UTC]", "decimal128(99, 1)", "decimal999(3, 1)", "list<item: int64>"):
        assert "expected a type of Arrow's" in refusal(arrow_type, name)


# ---- kinds

REPEATED = np.repeat(np.arange(60), 5)


@pytest.mark.parametrize(
    ("cells", "kind", "detail"),
    [
        (np.arange(N) * 10 - 200, Integer, 10.0),
        (np.arange(N) * 6 + 4, Integer, 6.0),
        (np.arange(N).astype(float), Integer, 1.0),
        (np.arange(N) % 2 * 15, Category, (0.0, 15.0)),
        (np.full(N, 7), Category, (7.0,)),
        (np.arange(N) % 4 / 4, Category, (0.0, 0.25, 0.5, 0.75)),
        (np.arange(N) % 5, Integer, 1.0),  # five values, each in fewer than ten rows
        (np.arange(N) % 5 / 4, Integer, 0.25),
        (FRACTIONS, Real, 0.0),
        (REPEATED * 0.05 + 1.2, Integer, 0.05),
        (np.round(REPEATED - 17.176944, 4), Integer, 1.0),
        ([float(f"{each:.4g}") for each in REPEATED - 17.176944], Integer, 1.0),  # rounded to significant digits
        (np.append(np.arange(N - 1), FINEST), Integer, 1.0),
        (np.append(np.arange(N - 1), FINEST + 1) * 7, Real, 0.0),
        (2**53 + np.arange(N) * 2, Real, 0.0),
        (2**62 + np.arange(N) * 2**50, Real, 0.0),
        (np.full(N, True), Category, (True,)),
        (["b", "a"] * (N // 2), Category, ("a", "b")),
        (["1", "2"] * (N // 2), Category, (1.0, 2.0)),
        ([" 1 ", "+2"] * (N // 2), Category, (1.0, 2.0)),
        (["1", "a", "b", "c"] * (N // 4), Category, ("1", "a", "b", "c")),
        (["0.5", ".75"] * (N // 2), Category, (0.5, 0.75)),
        (["01", "20"] * (N // 2), Category, ("01", "20")),
        (MOMENTS["date32"], Moment, 1.0),
        (["2026-01-31", "2026-02-02"] * 5, Moment, 2.0),
        (["2026-01-31"] * N, Moment, 0.0),
        (["2026-01-31 10:00", "2026-02-02"] * 5, Moment, 136800.0),
        (["2026-01-31", "soon"] * (N // 2), None, None),
        (["12026-01-31", "12026-02-01"] * 20, Category, ("12026-01-31", "12026-02-01")),
    ],
)
def test_kinds(cells: Any, kind: type[Column] | None, detail: Any, refusal: Refusal) -> None:
    if kind is None:
        kind, detail = Category, tuple(sorted(set(cells)))
    got = one(cells)
    assert type(got) is kind
    assert got.step == pytest.approx(detail) if isinstance(got, Number) else got.values == detail  # type: ignore[attr-defined]
    assert got.constant == (len(set(np.asarray(cells).tolist())) == 1)
    found = Schema([got])
    table = pa.table({"a": cells})
    rows = found.encode(table)
    assert np.isfinite(rows).all()
    np.testing.assert_allclose(found.encode(found.decode(rows)), rows, rtol=1e-5, atol=1e-6)


def test_only_types_make_columns_discrete() -> None:
    cells = {"few": np.arange(N) % 4 / 4, "zeros": np.maximum(FRACTIONS, 0), "n": np.arange(N) % 4, "c": ["a"] * N}
    schema = schema_of(pa.table(cells), discrete="types")
    assert [type(column) for column in schema] == [Real, Real, Category, Category]
    assert schema[1].head().atoms == ()
    arrays = schema_of(np.column_stack([cells["few"], cells["zeros"]]), discrete="types")
    assert [type(column) for column in arrays] == [Real, Real]


def test_few_numbers_and_many_texts_end_at_some_number() -> None:
    many = np.repeat(np.arange(FEW + 1) ** 1.5, 10)
    assert isinstance(one(many[10:]), Category)
    assert isinstance(one(many), Real)
    texts = [f"t{i % MOST_VALUES}" for i in range(2 * MOST_VALUES)]
    assert len(one(texts).values) == MOST_VALUES  # type: ignore[attr-defined]
    assert infer(pa.table({"a": [*texts, "one more"], "b": [0.5] * (len(texts) + 1)}))[0].names == ["b"]


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([1.5, INF, 2.0], "expected finite numbers, got inf in column 'a'"),
        (["1", "-inf", "3"], "got -inf in column 'a'"),
        (["1", "1e999", "3"], "got inf in column 'a'"),
        (["1", "x7", "3"], "expected numbers in column 'a', got 'x7' among them; correct the cell"),
        (["1", "?", "3"], "got '?' among them"),
        (["1", "1_000", "3"], "got '1_000' among them"),
        (["1", "\x1b[31m", "3"], "got '\\x1b[31m' among them"),
        ([1.7e308, -1.7e308, 1.0], "a range too small or too large for float64"),
        ([1], "at least 3 to train, validate and test on, got 1"),
        (pa.array([], pa.int64()), "got only the names of 1 columns"),
    ],
)
def test_bad_columns(cells: Any, said: str, refusal: Refusal) -> None:
    message = refusal(schema_of, pa.table({"a": cells}), source="t.csv")
    assert message.startswith("t.csv: ")
    assert said in message
    assert message.isprintable()


@pytest.mark.parametrize("name", ["a b", "it's", 'say "x"', "\x1b[31m", "\U0005199d\xad", "é", "back\\slash", ""])
def test_what_is_said_of_a_column_can_be_copied(name: str, refusal: Refusal) -> None:
    message = refusal(schema_of, pa.table({name: ["1", "x", "3"]}))
    assert message.isprintable()
    said = shlex.split(message.partition(": set ")[2])[0]
    assert tomllib.loads(said)["data"]["drop"] == [name]
    assert len(refusal(schema_of, pa.table({name * 9999: ["1", "x", "3"]}))) < 500


def test_notes_on_what_looks_odd() -> None:
    table = pa.table({"id": np.arange(60) + 7, "when": ["1/2/2026", "3/4/2026", "5/6/2026"] * 20, "age": REPEATED[:60]})
    notes = infer(table, source="t")[1]
    assert len(notes) == 2
    assert "t: column 'id' holds the consecutive integers 7 to 66, as row numbers do" in notes[0]
    assert "'when' holds 3 different texts such as '1/2/2026': they are treated as unordered" in notes[1]


# ---- numbers in texts, the same for Arrow and for us


@given(st.text(alphabet="0123456789+-.eEinfatyNx_ \u0663,", max_size=7))
@settings(max_examples=200, deadline=None)
def test_a_number_is_what_arrow_reads(text: str) -> None:
    numbers, words = as_numbers(pa.array([text, "1", "word"]))
    try:
        expected = pa.array([text.strip()]).cast(pa.float64())[0].as_py()
    except pa.ArrowInvalid:
        assert words[0]
        assert np.isnan(numbers[0])
    else:
        np.testing.assert_array_equal(numbers[0], expected)
        assert not words[0]
    assert list(words[1:]) == [False, True]


# ---- encode, then decode: the identity on training rows


def cells_of(kind: pa.DataType, values: st.SearchStrategy) -> st.SearchStrategy[pa.Array]:
    cells = st.lists(values | st.none() if kind != pa.string() else values, min_size=3, max_size=25)
    return cells.map(lambda cells: pa.array(cells, kind))


SOME_CELLS = st.one_of(
    cells_of(pa.int8(), st.integers(-128, 127)),
    cells_of(pa.int64(), st.integers(-(2**19), 2**19)),
    cells_of(pa.int64(), st.integers(0, 50).map(lambda i: 10**12 + 1000 * i)),
    cells_of(pa.float64(), st.integers(-1000, 1000).map(float)),
    cells_of(pa.float64(), st.decimals(-100, 100, places=2).map(float)),
    cells_of(pa.float32(), st.decimals(0, 1, places=3).map(float)),
    cells_of(pa.bool_(), st.booleans()),
    cells_of(pa.string(), st.sampled_from(["a", "b", "", "é\n", "x y", "07"])),
    cells_of(pa.timestamp("us", "UTC"), st.integers(0, 2**20).map(lambda i: i * 10**6)),
    cells_of(pa.date32(), st.integers(0, 40_000).map(lambda i: datetime.date(1970, 1, 1) + datetime.timedelta(i))),
)


@given(st.lists(SOME_CELLS, min_size=1, max_size=5))
@settings(max_examples=150, deadline=None)
def test_rows_of_training_come_back(cells: list[pa.Array]) -> None:
    n = min(map(len, cells))
    table = pa.table({f"c{i}": each[:n] for i, each in enumerate(cells)})
    try:
        schema, _ = infer(table)
    except NicestError as error:
        assert "missing in all rows" in str(error)  # noqa: PT017
        return
    rows = schema.encode(table)
    assert not np.isinf(rows).any()
    assert schema.decode(rows).equals(table.select(schema.names))
    assert Schema.from_json(json.loads(json.dumps(schema.to_json())), "x") == schema
    drawn = schema.plausible(RNG.normal(size=(20, len(schema))).astype(np.float32) * 3)
    again = schema.encode(schema.decode(drawn))  # whatever is drawn can be written and read again
    assert not np.isnan(again).any()
    assert not any(np.isinf(again[:, i]).any() for i, c in enumerate(schema) if not c.constant)


@pytest.mark.parametrize(("offset", "scale"), [(0, 1), (1e12, 1), (0, 1e300), (0, 1e-300), (-5e300, 1e300)])
@pytest.mark.parametrize("outlier", [0.0, 1e6])
def test_codes_are_about_standard(offset: float, scale: float, outlier: float) -> None:
    numbers = np.random.default_rng(1).normal(size=2000)
    numbers[0] += outlier
    schema = schema_of((offset + scale * numbers)[:, None])
    codes = schema.encode((offset + scale * numbers)[:, None])[:, 0]
    assert np.isfinite(codes).all()
    assert abs(codes[1:].mean()) < 0.1
    assert codes[1:].std() == pytest.approx(1, abs=0.1)
    back = schema[0].plain(codes)
    digits = max(2e-6, 2 * np.spacing(offset) / scale)
    np.testing.assert_allclose(
        (back - offset) / scale, (offset + scale * numbers - offset) / scale, rtol=2e-6, atol=digits
    )
    head = schema.heads()[0]
    assert head.scale == pytest.approx(scale, rel=0.1)
    assert 3 < len(head.knots) <= 16
    assert list(head.knots) == sorted(set(head.knots))


# ---- heads: spikes, bounds and grids


def mixed(n: int = 2000) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    u = rng.random((n, 5))
    return {
        "gain": np.where(u[:, 0] < 0.7, 0.0, -500.125 * np.log(u[:, 1])),
        "capped": np.minimum(0.1 + 4.1 * u[:, 1], 4.00001),
        "count": np.where(u[:, 2] < 0.5, 0, np.floor(90 * u[:, 3])).astype(int),
        "share": u[:, 4],
        "weight": 60 + 9 * rng.standard_normal(n),
        "price": np.round(4 + rng.integers(0, 90, n) * 0.05, 2),
        "kind": rng.choice(["c", "a", "b"], n),
        "rate": rng.choice([0.1, 0.25, 1.5], n),
    }


@pytest.mark.parametrize("order", ["mixed", "ascending", "descending"])
def test_spikes_and_bounds_do_not_depend_on_the_order_of_rows(order: str) -> None:
    columns = mixed()
    if order != "mixed":
        columns = {name: np.sort(cells)[:: 1 if order == "ascending" else -1] for name, cells in columns.items()}
    schema = schema_of(pa.table(columns))
    assert schema == schema_of(pa.table(mixed()))
    found = dict(zip(schema.names, schema, strict=True))
    assert {name: c.spikes for name, c in found.items() if isinstance(c, Number) and c.spikes} == {
        "gain": (0.0,),
        "capped": (4.00001,),  # fewer than a twentieth, but at the end
        "count": (0.0,),
    }
    bounds = {name: column.bounds for name, column in found.items() if isinstance(column, Number)}
    assert bounds["gain"] == bounds["count"] == (0.0, INF)
    assert bounds["capped"][1] == 4.00001
    assert bounds["share"] == (0.0, 1.0)
    assert bounds["weight"] == bounds["price"] == (-INF, INF)


def test_heads() -> None:
    table = pa.table(mixed())
    schema = schema_of(table)
    rows = schema.encode(table)
    heads = dict(zip(schema.names, schema.heads(), strict=True))
    assert heads["kind"] == Head(categories=3)
    assert heads["rate"].categories == 3
    assert np.mean(heads["rate"].values) == pytest.approx(0)
    assert np.std(heads["rate"].values) == pytest.approx(1)
    for name in ("gain", "capped"):
        (atom,) = heads[name].atoms
        assert np.mean(rows[:, schema.index(name)] == np.float32(atom)) > 0.02
    for name, step in (("count", 1), ("price", 0.05)):
        head, codes = heads[name], rows[:, schema.index(name)]
        assert head.step * head.scale == pytest.approx(step)
        np.testing.assert_allclose(codes / head.step, np.round(codes / head.step), atol=1e-4)
    assert heads["count"].low == heads["count"].atoms[0] == pytest.approx(rows[:, 2].min())
    assert Real("a", "double", 2.0, 2.0).constant


def test_a_spike_comes_back_to_its_last_digit_and_from_float32() -> None:
    schema = schema_of(pa.table(mixed()))
    column = schema[1]
    code = np.float32(column.head().atoms[0])
    assert column.plain(np.array([code])).tolist() == [4.00001]
    np.testing.assert_array_equal(np.float32(column.encode(np.array([4.00001], np.float32))), [code])


def test_drawn_values_are_plausible() -> None:
    schema = schema_of(pa.table(mixed()))
    rows = schema.decode(schema.plausible(np.full((1, len(schema)), -50, np.float32))).to_pylist()[0]
    assert (rows["weight"], rows["price"], rows["count"]) == (0.0, 4.0, 0)
    observed = pa.table(mixed()).slice(0, 1).set_column(4, "weight", [[-3.5]])  # decoding alone changes nothing
    assert schema.decode(schema.encode(observed))["weight"].to_pylist() == [-3.5]


def test_given_bounds() -> None:
    schema = schema_of(pa.table(mixed()), bounds=parsed_bounds(["0 <= weight <= 200", "-1 <= share"]))
    assert schema[4].bounds == (0.0, 200.0)  # type: ignore[attr-defined]
    assert schema[3].bounds == (-1.0, INF)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("weight > 3", "expected bounds such as"),
        ("a <= weight", "expected bounds such as"),
        ("0 <= height", "found no column 'height' to bound"),
        ("80 <= weight", "beyond its bounds 80 and inf"),
        ("3 <= weight <= 2", "expected a finite lower bound"),
        ("-inf <= weight", "expected a finite lower bound"),
        ("0 <= kind", "holds 'a', 'b', 'c', few distinct values, so bounds do not apply"),
    ],
)
def test_wrong_bounds(text: str, said: str) -> None:
    with pytest.raises(NicestError, match=said):
        schema_of(pa.table(mixed()), bounds=parsed_bounds([text]))


# ---- other tables than that of training

TRAINED = {
    "n": pa.array(np.arange(N) * 10),
    "x": pa.array(FRACTIONS),
    "c": pa.array(["a", "b"] * (N // 2)),
    "t": pa.array(np.arange(N) * 86400, pa.int64()).cast(pa.timestamp("s")),
    "f": pa.array([True, False] * (N // 2)),
    "v": pa.array([0.1, 0.7] * (N // 2), pa.float32()),
    "k": pa.array([2.5] * 5 + [None] * (N - 5)),
}
SCHEMA = infer(pa.table(TRAINED))[0]


def values(name: str, cells: Any) -> list:
    """Return cells as the column of training decodes them; infinity for those that it cannot have."""
    column = SCHEMA[SCHEMA.index(name)]
    codes = column.encode(cells)
    return np.where(np.isinf(codes), INF, column.plain(codes)).tolist()


@pytest.mark.parametrize(
    ("name", "cells", "expected"),
    [
        ("n", pa.array([20, 25, -10, None, 4000]), [20, INF, INF, NAN, 4000]),
        ("n", pa.array([20.0, 20.5, 29.999]), [20, INF, INF]),
        ("n", pa.array(["20", " 30 ", None]), [20, 30, NAN]),
        ("n", pa.array([20.0, INF, -INF]), [20, INF, INF]),
        ("n", pa.array([20, 30]).dictionary_encode(), [20, 30]),
        ("n", pa.nulls(2), [NAN, NAN]),
        ("n", np.array([20.0, NAN]), [20, NAN]),
        ("c", pa.array(["b", "z", None, "a"], pa.large_string()), ["b", INF, None, "a"]),
        ("c", pa.array(["b", "z", None]).dictionary_encode(), ["b", INF, None]),
        ("c", pa.DictionaryArray.from_arrays([0, 1, None], pa.array(["b", None])), ["b", None, None]),
        ("c", pa.nulls(1), [None]),
        ("c", np.array(["a", "z", None], dtype=object), ["a", INF, None]),
        ("t", pa.array([86_400_000], pa.int64()).cast(pa.timestamp("ms")), [86400]),
        ("t", pa.array([86_400_000_000_000], pa.int64()).cast(pa.timestamp("ns", "UTC")), [86400]),
        ("t", pa.array(["1970-01-02", None]), [86400, NAN]),
        ("t", pa.array([2], pa.int32()).cast(pa.date32()), [2 * 86400]),
        ("f", pa.array(["true", "False", None]), [True, False, None]),
        ("v", pa.array([0.1, 0.7, 0.3, None, INF]), [np.float32(0.1), np.float32(0.7), INF, NAN, INF]),
        ("v", pa.array(["0.7", "0.10"]), [np.float32(0.7), np.float32(0.1)]),
        ("k", pa.array([2.5, 2.6, None]), [2.5, INF, NAN]),
    ],
)
def test_other_cells(name: str, cells: Any, expected: list) -> None:
    got = values(name, cells)
    same = [a == b or a is b or (a != a and b != b) for a, b in zip(got, expected, strict=True)]
    assert all(same), got


@pytest.mark.parametrize(
    ("name", "cells", "words"),
    [
        ("n", pa.array(["1", "many"]), "t.csv: expected numbers in column 'n', as in training, got 'many'"),
        ("n", pa.array([True]), "got bool"),
        ("n", TRAINED["t"], "got timestamp[s]"),
        ("n", pa.array([[1]]), "got list"),
        ("x", pa.array([{"a": 1}]), "got struct"),
        ("c", pa.array([1]), "expected texts in column 'c', as in training, got int64"),
        ("c", pa.array([True]), "expected texts in column 'c', as in training, got bool"),
        ("f", pa.array([1]), "expected booleans in column 'f', as in training, got int64"),
        ("f", pa.array(["maybe"]), "expected booleans in column 'f', as in training, got string"),
        ("t", pa.array([1]), "expected timestamp[s] in column 't', as in training, got int64"),
        ("t", pa.array(["soon"]), "expected timestamp[s] in column 't', as in training, got 'soon'"),
        ("t", pa.array([1], pa.duration("s")), "got duration[s]"),
        ("v", pa.array(["much"]), "got 'much'"),
    ],
)
def test_other_types(name: str, cells: pa.Array, words: str, refusal: Refusal) -> None:
    schema = Schema([SCHEMA[SCHEMA.index(name)]])
    assert words in refusal(schema.encode, pa.table({name: cells}), "t.csv")


def test_other_columns(refusal: Refusal) -> None:
    message = refusal(SCHEMA.encode, pa.table({"n": [1], "z": [2]}), "u.csv")
    assert (
        "u.csv: lacks 'x', 'c', 't', 'f', 'v' and 1 more, which training had, and has 'z', which it had not" in message
    )
    assert Schema(SCHEMA[1:3]).require_in(SCHEMA.names, "") == ["n", "t", "f", "v", "k"]
    assert "found no column 'N' (did you mean 'n'?)" in refusal(SCHEMA.index, "N")
    assert "expected 7 columns, got an array of shape (3, 2)" in refusal(SCHEMA.encode, np.zeros((3, 2)))


def test_unseen_values_may_count_as_missing() -> None:
    table = pa.table({"c": ["a", "z"], "n": [25, 20]})
    schema = Schema([SCHEMA[2], SCHEMA[0]])
    np.testing.assert_array_equal(np.isinf(schema.encode(table)), [[False, True], [True, False]])
    np.testing.assert_array_equal(np.isnan(schema.encode(table, unseen="missing")), [[False, True], [True, False]])


def test_arrays_need_no_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.column_stack([np.arange(N) % 3, FRACTIONS.round(3), np.full(N, NAN)])
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.warns(UserWarning, match="left out 1 of 3 columns: 'x2'"):
        schema = schema_of(rows)
    np.testing.assert_array_equal(schema.decode(schema.encode(rows)), rows[:, :2])  # without x2, by its names


# ---- columns.json

SOUND = {"kind": "integer", "name": "a", "type": "int64", "low": 0, "high": 9, "step": 1, "knots": [0.5]}
REAL = {"kind": "real", "name": "a", "type": "double", "low": 0, "high": 9}
UNSOUND: list[Any] = [None, 1, "x", {"a": 1}, [1], ["x"], [None], [[]], [{}], [{"name": "a"}], [SOUND, SOUND]]
UNSOUND += [[SOUND | {key: None}] for key in SOUND if key != "knots"] + [
    [SOUND | {key: [1]}] for key in SOUND if key != "knots"
]
UNSOUND += [[SOUND | {key: bad}] for key in ("low", "high", "step", "scale", "offset") for bad in (NAN, 10**400, INF)]
UNSOUND += [[SOUND | extra] for extra in ({"step": 0}, {"step": -1}, {"low": 10}, {"kind": "x"}, {"kind": "real"})]
UNSOUND += [
    [SOUND | extra] for extra in ({"more": 1}, {"scale": 0}, {"decimals": 99}, {"floor": 5}, {"spikes": [2, 1]})
]
UNSOUND += [[SOUND | {"knots": 5}], [SOUND | {"knots": ["a"]}], [SOUND | {"knots": [2, 1]}], [REAL | {"step": 1}]]
VALUES = ([], ["b", "a"], ["a", "a"], ["a", 1], [[1]], [None], [{}], [NAN, 1.0], [INF], "ab", 5, [1])
UNSOUND += [[{"kind": "category", "name": "a", "type": "string", "values": values}] for values in VALUES]


@pytest.mark.parametrize("rows", UNSOUND)
def test_columns_that_nicest_never_wrote(rows: Any, refusal: Refusal) -> None:
    assert "x: expected the columns of a table, got something else" in refusal(Schema.from_json, rows, "x")
