"""Settings, each with its type and the rule that its value must obey (no torch here)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, fields
from functools import cache
from inspect import signature
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from nicest.errors import NicestError
from nicest.messages import nearest, shown

Scalar = bool | int | float | str


class Rule(NamedTuple):
    """What the value of a setting must be, in words and as a predicate."""

    expected: str
    holds: Callable[[Any], bool]


def at_least(least: float) -> Rule:
    return Rule(f"at least {least}", lambda value: value >= least)


def within(low: float, high: float) -> Rule:
    return Rule(f"from {low} to {high}", lambda value: low <= value <= high)


ANYTHING = Rule("anything", lambda value: True)
POSITIVE = Rule("positive", lambda value: value > 0)
NOT_NEGATIVE = Rule("not negative", lambda value: value >= 0)
BELOW_ONE = Rule("in [0, 1)", lambda value: 0 <= value < 1)


def setting(default: Any, help: str, rule: Rule = ANYTHING) -> Any:
    """Declare a setting: its default, its meaning, and a rule beyond its type."""
    return field(default=default, metadata={"help": help, "rule": rule})


class Settings:
    """A table of settings. Each has its rule beside it; `rules` are those that hold between several."""

    def rules(self) -> Iterator[tuple[str, str, bool]]:
        """Yield names of settings, what they must be, and whether they are."""
        yield from ()

    def broken(self) -> Iterator[tuple[str, Any, str]]:
        """Yield settings that break a rule: their names, their values, and what they must be."""
        for each in fields(self):  # type: ignore[arg-type]
            value, rule = getattr(self, each.name), each.metadata.get("rule", ANYTHING)
            if not rule.holds(value):
                yield each.name, value, rule.expected
            if isinstance(value, Settings):
                yield from ((f"{each.name}.{name}", *rest) for name, *rest in value.broken())
        yield from ((name, attrgetter(name)(self), expected) for name, expected, holds in self.rules() if not holds)


@cache
def types_of(made: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the fields of a class or of the arguments of a function, by name."""
    return get_type_hints(made, include_extras=True)


@cache
def defaults_of(made: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of a class or a function that have a default, with it."""
    arguments = signature(made).parameters.values()
    return {each.name: each.default for each in arguments if each.default is not each.empty}


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


def coerce(value: Any, kind: Any, where: str) -> Any:
    """Convert a value to a type; raise a NicestError that says what was expected.

    `Annotated[type, rule]` has a rule, and `Annotated[type, function]` a function that converts by itself.
    """
    origin, args = _parts(kind)
    if origin is Annotated and not isinstance(args[1], Rule):
        return args[1](value, f"{where}.")
    if origin is Annotated:
        made, rule = coerce(value, args[0], where), args[1]
        if not rule.holds(made):
            raise NicestError(f"{where} must be {rule.expected}; got {shown(made)}")
        return made
    if origin is Literal:
        if value in args:
            return value
        near = nearest(value, args) if isinstance(value, str) else ""
        raise NicestError(f"{where} is one of {', '.join(args)}; got {shown(value)}{near}")
    if origin is tuple:
        of, several = args[0], value if isinstance(value, list | tuple) else [value]
        if get_origin(of) is Annotated:  # blocks
            return tuple(of.__metadata__[0](each, f"{where}, block {i}: ") for i, each in enumerate(several, 1))
        if isinstance(value, str) and of is not str:
            raise NicestError(f"{where} is of type {of.__name__}; got {shown(value)}; several are written as [1,2]")
        return tuple(coerce(each, of, where) for each in several)
    kinds = [each for each in (args or (kind,)) if each is not type(None)]
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise NicestError(f"{where} must be a number below 2^63; got {shown(value)}")
    if isinstance(value, str) and not value.isascii() and any("\ud800" <= each <= "\udfff" for each in value):
        raise NicestError(f"{where} must be of characters that UTF-8 can write; got {shown(value)}")
    if kinds == [float] and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise NicestError(f"{where} must be a finite number; got {value}")
    if type(value) in kinds:
        return value
    raise NicestError(f"{where} is of type {' or '.join(each.__name__ for each in kinds)}; got {shown(value)}")


def settings_of(
    table: Any, registry: Mapping[str, Callable[..., Any]], where: str
) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """Return the kind and the checked settings of a table whose `kind` names a class or a function of a registry.

    The settings are the arguments that have a default.
    """
    kinds, name = ", ".join(registry), where.rstrip(".: ")
    if not isinstance(table, dict) or "kind" not in table:
        raise NicestError(f"{name} is a table with a kind, one of {kinds}; got {shown(table)}")
    kind = table["kind"]
    if not isinstance(kind, str) or kind not in registry:
        near = nearest(kind, registry) if isinstance(kind, str) else ""
        raise NicestError(f"{where}kind is one of {kinds}; got {shown(kind)}{near}")
    hints, known = types_of(registry[kind]), defaults_of(registry[kind])
    values = {}
    for key, value in table.items():
        if key in known:
            values[key] = coerce(value, hints[key], where + key)
        elif key != "kind":
            raise NicestError(f"{name}: unknown key {shown(key)} of kind {kind}{nearest(key, known)}")
    return kind, tuple((known | values).items())
