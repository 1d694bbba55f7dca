"""How values, names and errors appear in messages."""

import pytest

from nicest.messages import brief, listed, nearest, one_line, shown


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("one\n  two. Three"), "one two. Three"),
        (ValueError("bell \a and escape \x1b[31m"), r"bell \x07 and escape \x1b[31m"),
        (ValueError(), "ValueError"),
        (ValueError("x" * 1000), "x" * 300),
    ],
)
def test_an_error_on_one_line(error: Exception, expected: str):
    assert one_line(error) == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError("The file ends early.\nGet it again."), "The file ends early"),
        (KeyError(), "KeyError"),
        ("not an error. But text", "not an error"),
        (ValueError("x" * 1000), "x" * 200),
    ],
)
def test_brief_is_the_first_sentence(error: object, expected: str):
    assert brief(error) == expected


def test_brief_of_a_given_length():
    assert brief("x" * 100, 7) == "x" * 7


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("name", "'name'"),
        ("two\nlines", r"'two\nlines'"),
        ([1, 2.5, None], "[1, 2.5, None]"),
        ("x" * 100, f"'{'x' * 79}..."),
    ],
)
def test_values_are_shown_as_python_writes_them(value: object, expected: str):
    assert shown(value) == expected


def test_what_python_cannot_write_is_not_shown():
    assert shown(10**5000) == "an oversized int"
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "an oversized list"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], "none"),
        (["a"], "'a'"),
        ([3, 14], "3, 14"),
        (list("abcde"), "'a', 'b', 'c', 'd', 'e'"),
        (list("abcdefg"), "'a', 'b', 'c', 'd', 'e' and 2 more"),
    ],
)
def test_names_are_listed_up_to_five(names: list, expected: str):
    assert listed(names) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("mnits", " (did you mean 'mnist'?)"), ("MNIST", " (did you mean 'mnist'?)"), ("zzzz", ""), ("", "")],
)
def test_the_nearest_name_is_suggested(name: str, expected: str):
    assert nearest(name, ["cifar10", "mnist", "svhn"]) == expected
