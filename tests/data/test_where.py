"""Conditions on columns: what they ask for, and one clear line for each that cannot be met."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from nicest.data.columns import Column
from nicest.data.where import parse, where

COLUMNS = (
    Column("age", "int64", "steps", low=17, high=90, step=1),
    Column("sex", "string", "values", high=1, step=1, values=("F", "M", "it's 3")),
    Column("income", "double", "real", low=100, high=9e4, origin=1000.3, spikes=(5000.0,), floor=0.0),
    Column("share", "double", "real", low=-1, high=1),
    Column("rate", "double", "values", high=2, step=1, values=(0.1, 0.25, 1.5)),
    Column("member", "bool", "values", high=1, step=1, values=(False, True)),
    Column("day", "date32[day]", "steps", low=18262, high=18992, step=1),
    Column("hours per week", "int64", "steps", low=0, high=98, step=2),
)
INF = math.inf


def ranges(text: str) -> dict[int, tuple]:
    return where(text, COLUMNS).ranges


def at(number: float, side: int = 0) -> tuple[float, int]:
    return number, side


LOW, HIGH = at(-INF), at(INF)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("age = 30", {0: ((at(13), at(13)),)}),
        ("age == 30.0", {0: ((at(13), at(13)),)}),
        ("age >= 30 AND age < 40", {0: ((at(13), at(22)),)}),
        ("age > 29.5", {0: ((at(13), HIGH),)}),
        ("age <= 17", {0: ((LOW, at(0)),)}),
        ("age >= 17 and age <= 90", {0: ((LOW, HIGH),)}),
        ("age != 30", {0: ((LOW, at(12)), (at(14), HIGH))}),
        ("age in (20, 21, 90)", {0: ((at(3), at(3)), (at(4), at(4)), (at(73), HIGH))}),
        ('sex = "F"', {1: ((LOW, at(0)),)}),
        ("sex = F and age=30", {1: ((LOW, at(0)),), 0: ((at(13), at(13)),)}),
        ("sex = 'it''s 3'", {1: ((at(2), HIGH),)}),
        ('sex != "M"', {1: ((LOW, at(0)), (at(2), HIGH))}),
        ('sex in ("M", F)', {1: ((LOW, at(1)),)}),
        ("share > 0.5 and share <= 0.75", {3: ((at(1.5, 1), at(1.75)),)}),
        ("share = 0.5", {3: ((at(1.5), at(1.5)),)}),
        ("share >= 0.5 and share <= 0.5", {3: ((at(1.5), at(1.5)),)}),
        ("share != 0", {3: ((LOW, at(1, -1)), (at(1, 1), HIGH))}),
        ("income >= 0", {2: ((LOW, HIGH),)}),
        ("rate > 0.1", {4: ((at(1), HIGH),)}),
        ("rate = 0.25", {4: ((at(1), at(1)),)}),
        ("member = TRUE", {5: ((at(1), HIGH),)}),
        ("day >= 2020-02-01 and day < '2020-03-01'", {6: ((at(31), at(59)),)}),
        ('"hours per week" >= 39 and `hours per week` < 45', {7: ((at(20), at(22)),)}),
    ],
)
def test_ranges_of_the_models_numbers(text: str, expected: dict):
    assert ranges(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected the name of a column, got the end at character 1"),
        ("age", "one of =, !=, <, <=, >, >=, in after 'age', got the end at character 4"),
        ("age ~ 30", "got '~' at character 5"),
        ("age = ", "a value after =, got the end"),
        ("age = 30 or age = 40", "`and` or the end, got 'or' at character 10"),
        ("age = 30 and", "the name of a column, got the end at character 13"),
        ("30 <= age <= 40", "`and` or the end, got '<=' at character 11"),
        ('sex = "F', "the quote to be closed, got '\"F' at character 7"),
        ("sex in F", "a list such as"),
        ("sex in (F M)", "a comma or a closing parenthesis, got 'M' at character 11"),
        ("age ! 30", "a name, a value or an operator, got '! 30' at character 5"),
        ("agee = 30", "no column 'agee' (did you mean 'age'?)"),
        ("zzz = 30", "no column 'zzz'; the columns are 'age', "),
        ("sex = X", "column 'sex' holds no 'X'; it holds 'F', 'M'"),
        ("sex > F", "'sex' holds texts, which have no order"),
        ("member < true", "'member' holds booleans"),
        ("member = 3", "true or false for column 'member', got '3'"),
        ("sex = 3", "a text for column 'sex', got the number 3"),
        ("age = thirty", "a number for column 'age', got 'thirty'"),
        ("income > inf", "a number for column 'income', got 'inf'"),
        ("rate = 0.3", "column 'rate' holds no 0.3; it holds 0.1, 0.25, 1.5"),
        ("rate > 2", "no row can meet rate > 2: column 'rate' holds 0.1, 0.25, 1.5"),
        ("age > 90", "no row can meet age > 90: column 'age' holds 17 to 90, in steps of 1"),
        ("age = 30.5", "no row can meet age = 30.5"),
        ('"hours per week" = 39', "holds 0 to 98, in steps of 2"),
        ("age > 50 and sex = F and age < 30", "no row can meet age > 50 and age < 30: they contradict each other"),
        ("sex = F and sex = M", "sex = F and sex = M: they contradict"),
        ("share > 1 and share < 1", "contradict"),
        ("income < 0", "no row can meet income < 0: column 'income' has no values below 0"),
        ("share in (0.1, 0.2)", "one number for the continuous column 'share', got 2"),
        ("day = someday", "expected date32[day] for column 'day', such as 2026-01-31, got 'someday'"),
        ("day > 2030-01-01", "holds 2020-01-01 to 2021-12-31"),
    ],
)
def test_refusals(refusal: Callable[..., str], text: str, says: str):
    assert says in refusal(where, text, COLUMNS)


def test_a_spike_may_be_among_others_and_numbers_are_exact():
    asked = where("income in (5000)", COLUMNS)
    assert asked.ranges == {2: (((5000.0 - 1000.3, 0),) * 2,)}
    given = where("income = 0.1", COLUMNS)
    assert given.columns[2].spikes == (0.1,)
    assert given.columns[0] is COLUMNS[0]
    assert where("income > 5000", COLUMNS).columns[2].spikes == ()
    assert where("income >= 5000", COLUMNS).columns[2].spikes == (5000.0,)


def test_clipped_cells_lie_inside_and_only_continuous_ones_are_clipped():
    asked = where("income > 5000 and age >= 30", COLUMNS)
    rows = np.zeros((3, len(COLUMNS)), np.float32)
    rows[:, 2] = np.float32(5000 - 1000.3), 3000, 6000
    clipped = asked.clip(rows)
    values = clipped[:, 2] + 1000.3
    assert (values > 5000).all()
    assert values[0] == pytest.approx(5000, rel=1e-12)
    assert values[2] == 7000.3
    assert (clipped[:, 0] == 0).all()


def test_clauses_keep_how_they_were_written():
    texts = [clause.text for clause in parse('age>=30 and sex in ( "F" ,M ) and `hours per week` = 40')]
    assert texts == ["age>=30", 'sex in ( "F" ,M )', "`hours per week` = 40"]
