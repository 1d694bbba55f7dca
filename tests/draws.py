"""Random values, composed: what hypothesis's strategies describe, drawn a hundred times as fast and never shrunk."""

import datetime as dt
import math
import random
import struct
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

ODD_FLOATS = (0.0, -0.0, 0.5, 1.5, math.nan, math.inf, -math.inf, 1e300, -1e-300, 5e-324, 2.0**53, 1e400)
CHARACTERS = (*((32, 126),) * 3, (0, 31), (127, 255), (256, 0xFFFF), (0x10000, 0x10FFFF))  # from, to


class Some:
    """A value to be drawn; `a | b` is either of them, and `map` makes another of it."""

    def __init__(self, draw: Callable[[random.Random], Any]) -> None:
        self.draw = draw

    def __or__(self, other: "Some") -> "Some":
        return one_of(self, other)

    def map(self, make: Callable[[Any], Any]) -> "Some":
        return Some(lambda rng: make(self.draw(rng)))


def composite(function: Callable[..., Any]) -> Callable[..., Some]:
    """A function whose first argument draws, as a function without it that returns what is to be drawn."""

    def made(*args: Any, **options: Any) -> Some:
        return Some(lambda rng: function(lambda some: some.draw(rng), *args, **options))

    return made


def just(value: Any) -> Some:
    return Some(lambda rng: value)


def none() -> Some:
    return just(None)


def one_of(*several: Some) -> Some:
    return Some(lambda rng: rng.choice(several).draw(rng))


def sampled_from(values: Sequence[Any]) -> Some:
    return Some(lambda rng: rng.choice(values))


def booleans() -> Some:
    return sampled_from((False, True))


def integers(low: int, high: int) -> Some:
    return Some(lambda rng: rng.randint(low, high))


def binary(max_size: int) -> Some:
    return Some(lambda rng: rng.randbytes(rng.randint(0, max_size)))


def tuples(*several: Some) -> Some:
    return Some(lambda rng: tuple(each.draw(rng) for each in several))


def lists(item: Some, *, min_size: int = 0, max_size: int, unique: bool = False) -> Some:
    def draw(rng: random.Random) -> list[Any]:
        drawn = [item.draw(rng) for _ in range(rng.randint(min_size, max_size))]
        return list(dict.fromkeys(drawn)) if unique else drawn

    return Some(draw)


def text(alphabet: str = "", *, max_size: int) -> Some:
    """Letters mostly; controls, other scripts, surrogates and what lies beyond them now and then."""

    def character(rng: random.Random) -> str:
        if alphabet:
            return rng.choice(alphabet)
        return chr(rng.randint(*rng.choice(CHARACTERS)))

    return Some(lambda rng: "".join(character(rng) for _ in range(rng.randint(0, max_size))))


def floats() -> Some:
    """Any bits at all, usual ones, and the odd ones."""
    bits = Some(lambda rng: struct.unpack("<d", rng.randbytes(8))[0])
    return one_of(bits, Some(lambda rng: rng.gauss(0, 10)), sampled_from(ODD_FLOATS))


def dates() -> Some:
    return integers(1, dt.date.max.toordinal()).map(dt.date.fromordinal)


def datetimes() -> Some:
    seconds = int((dt.datetime.max - dt.datetime.min).total_seconds())
    parts = tuples(integers(0, seconds), sampled_from((0, 1, 999_999)))
    return parts.map(lambda each: dt.datetime.min + dt.timedelta(seconds=each[0], microseconds=each[1]))


def times() -> Some:
    return datetimes().map(dt.datetime.time)


def timedeltas() -> Some:
    days = one_of(integers(-999_999_999, 999_999_999), integers(-5, 5))
    return tuples(days, integers(0, 86_399_999_999)).map(lambda each: dt.timedelta(each[0], microseconds=each[1]))


def decimals() -> Some:
    """With two places."""
    return integers(-(10**11), 10**11).map(lambda cents: Decimal(cents).scaleb(-2))


def recursive(leaf: Some, extend: Callable[[Some], Some], depth: int = 3) -> Some:
    """A leaf, or what `extend` makes of leaves and of itself."""
    inner = leaf
    for _ in range(depth):
        inner = one_of(leaf, leaf, leaf, extend(inner))
    return inner
