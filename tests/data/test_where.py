"""Conditions on columns: what they ask for, and one clear line for each that cannot be met."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from nicest.data.columns import Category, Integer, Moment, Real, Schema
from nicest.data.where import parse, where

SCHEMA = Schema(
    [
        Integer("age", "int64", low=17, high=90, offset=40, scale=10, step=1, decimals=0),
        Category("sex", "string", ("F", "M", "it's 3")),
        Real("income", "double", low=100, high=9e4, offset=1000, scale=100, spikes=(5000.0,), floor=0.0, decimals=1),
        Real("share", "double", low=-1, high=1, scale=0.5),
        Category("rate", "double", (0.1, 0.25, 1.5)),
        Category("member", "bool", (False, True)),
        Moment("day", "date32[day]", low=18262, high=18992, offset=18262, scale=1, step=1, decimals=0),
        Integer("hours per week", "int64", low=0, high=98, scale=2, step=2, decimals=0),
        Real("weight", "double", low=30, high=90),
        Category("one", "int64", (7.0,)),
    ]
)
INF = math.inf


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("age = 30", {0: ((-1.0, -1.0),)}),
        ("age == 30.0", {0: ((-1.0, -1.0),)}),
        ("age >= 30 AND age < 40", {0: ((-1.0, -0.1),)}),
        ("age > 29.5", {0: ((-1.0, INF),)}),
        ("age <= 18", {0: ((-INF, -2.2),)}),
        ("age >= 17 and age <= 90", {}),
        ("age != 30", {0: ((-INF, -1.1), (-0.9, INF))}),
        ("age in (20, 21, 89)", {0: ((-2.0, -1.9), (4.9, 4.9))}),
        ('sex = "F"', {1: ((0.0, 0.0),)}),
        ("sex = F and age=30", {1: ((0.0, 0.0),), 0: ((-1.0, -1.0),)}),
        ("sex = 'it''s 3'", {1: ((2.0, 2.0),)}),
        ('sex != "M"', {1: ((0.0, 0.0), (2.0, 2.0))}),
        ('sex in ("M", F)', {1: ((-INF, 1.0),)}),
        ("share <= 0.75 and share >= -0.25", {3: ((-0.5, 1.5),)}),
        ("share = 0.5", {3: ((1.0, 1.0),)}),
        ("share >= 0.5 and share <= 0.5", {3: ((1.0, 1.0),)}),
        ("income >= 0", {}),
        ("income > 1000", {2: ((0.001, INF),)}),  # the next number with one decimal
        ("income < 1000.05", {2: ((-INF, 0.0),)}),
        ("income in (5000)", {2: ((40.0, 40.0),)}),
        ("rate > 0.1", {4: ((1.0, INF),)}),
        ("rate > 0.2", {4: ((1.0, INF),)}),
        ("rate = 0.25", {4: ((1.0, 1.0),)}),
        ("member = TRUE", {5: ((1.0, 1.0),)}),
        ("day >= 2020-02-01 and day < '2020-03-01'", {6: ((31.0, 59.0),)}),
        ('"hours per week" >= 39 and `hours per week` < 45', {7: ((20.0, 22.0),)}),
        ("one = 7 and one < 8", {}),
    ],
)
def test_intervals_of_codes(text: str, expected: dict):
    found = where(text, SCHEMA)
    assert found.keys() == expected.keys()
    for d, intervals in expected.items():
        assert len(found[d]) == len(intervals)
        np.testing.assert_allclose(found[d], intervals, atol=1e-9)
        assert [low == high for low, high in found[d]] == [low == high for low, high in intervals]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected conditions such as age >= 30 and sex in (F, M), got the end"),
        *((text, f"got {text!r} at character 1") for text in ("age", "age ~ 30", "age =", "sex in F", "sex in ()")),
        *((text, "got") for text in ("sex in (F M)", "age ! 30", 'sex = "F', "30 <= age <= 40", "age = 30 and")),
        ("sex = F and age = 30 or age = 40", "got 'age = 30 or age = 40' at character 13"),
        ("agee = 30", "no column 'agee' (did you mean 'age'?)"),
        ("zzz = 30", "no column 'zzz'; the columns are 'age', "),
        ("sex = X", "column 'sex' holds no 'X'; it holds 'F', 'M'"),
        ("sex > F", "column 'sex' has no order, it holds 'F', 'M', \"it's 3\": use =, != or in"),
        ("member < true", "column 'member' has no order"),
        ("member = 3", "true or false for column 'member', got '3'"),
        ("sex = 3", "a text for column 'sex', got the number 3"),
        ("age = thirty", "a number for column 'age', got 'thirty'"),
        ("income > inf", "a number for column 'income', got 'inf'"),
        ("rate = 0.3", "column 'rate' holds no '0.3'; it holds 0.1, 0.25, 1.5"),
        ("rate > 2", "no row can meet rate > 2: column 'rate' holds 0.1, 0.25, 1.5"),
        ("age > 90", "no row can meet age > 90: column 'age' holds 17 to 90, in steps of 1"),
        ("age = 30.5", "no row can meet age = 30.5"),
        ('"hours per week" = 39', "holds 0 to 98, in steps of 2"),
        ("age > 50 and sex = F and age < 30", "no row can meet age > 50 and age < 30: they contradict each other"),
        ("sex = F and sex = M", "sex = F and sex = M: they contradict"),
        ("share > 1 and share < 1", "contradict"),
        ("income < 0", "no row can meet income < 0: column 'income' has no values below 0"),
        ("weight < -1", "column 'weight' has no values below 0"),
        ("share in (0.1, 0.2)", "one number for the continuous column 'share', got 2"),
        ("income in (1, 5000)", "one number for the continuous column 'income', got 2"),
        ("day = someday", "expected date32[day], such as 2026-01-31, for column 'day', got 'someday'"),
        ("day > 2030-01-01", "holds 2020-01-01 to 2021-12-31"),
        ("one > 7", "holds 7.0"),
    ],
)
def test_refusals(refusal: Callable[..., str], text: str, says: str):
    assert says in refusal(where, text, SCHEMA)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("share > 0.1", lambda x: x > 0.1),
        ("share < 0.3", lambda x: x < 0.3),
        ("share >= 0.12345674", lambda x: x >= 0.12345674),
        ("share <= 0.12345676", lambda x: x <= 0.12345676),
    ],
)
def test_what_is_drawn_inside_lies_inside_after_decoding(text: str, fits: Callable):
    (low, high), *_ = where(text, SCHEMA)[3]
    for end in {low, high} - {-INF, INF}:
        assert fits(SCHEMA[3].plain(np.array([end], np.float32)))  # type: ignore[no-untyped-call]
    (_, below), (above, _) = where("income != 5000", SCHEMA)[2]
    assert np.float32(below) < np.float32(40) < np.float32(above)


def test_a_number_that_was_asked_for_comes_back_exactly():
    for text, number in (("share = 0.1", 0.1), ("weight = 61.37", 61.37), ("income = 5000", 5000)):
        ((d, ((code, _),)),) = where(text, SCHEMA).items()
        assert SCHEMA[d].plain(np.array([code], np.float32)).tolist() == [number]


def test_clauses_keep_how_they_were_written():
    texts = [clause.text for clause in parse('age>=30 and sex in ( "F" ,M ) and `hours per week` = 40')]
    assert texts == ["age>=30", 'sex in ( "F" ,M )', "`hours per week` = 40"]
