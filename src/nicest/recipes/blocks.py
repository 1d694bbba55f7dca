"""What settings are, each with its rule, and the blocks that a recipe may list as its layers (no torch here)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

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
            blocks = enumerate(value, 1) if isinstance(value, tuple) else ()
            for prefix, inner in ((f"{each.name}.", value), *((f"{each.name}, block {i}: ", b) for i, b in blocks)):
                if isinstance(inner, Settings):
                    yield from ((prefix + name, *rest) for name, *rest in inner.broken())
        yield from ((name, attrgetter(name)(self), expected) for name, expected, holds in self.rules() if not holds)


class Kind(Settings):
    """Settings that a recipe writes as a table with their `kind`."""

    kind: ClassVar[str]

    def table(self) -> dict[str, Any]:
        return {"kind": self.kind} | {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class LawSettings:
    """A coupling law: its kind and settings, sorted by name. `build` checks them against the class in `LAWS`."""

    kind: str
    settings: tuple[tuple[str, Any], ...] = ()

    def table(self) -> dict[str, Any]:
        return {"kind": self.kind} | dict(self.settings)


class Network(Kind):
    """A coupling function; `nicest.recipes.build.NETWORKS` builds it."""

    n_layers: int  # linear layers inside


@dataclass(frozen=True)
class MLPNetwork(Network):
    kind = "mlp"
    hidden_layers: int = setting(5, "hidden layers", within(0, 1000))
    width: int = setting(1000, "units of every hidden layer", within(1, 100_000))
    dropout: float = setting(0.0, "dropout after every rectifier", BELOW_ONE)
    initialisation: Literal["torch", "uniform", "zero-last"] = setting(
        "torch", "torch's own; weights U(-0.01, 0.01) and biases 0; or torch's with the last layer 0"
    )

    @property
    def n_layers(self) -> int:  # type: ignore[override]
        return self.hidden_layers + 1


@dataclass(frozen=True)
class ResidualNetwork(Network):
    kind = "residual"
    blocks: int = setting(2, "residual blocks, of two linear layers each", NOT_NEGATIVE)
    width: int = setting(128, "units of every hidden layer", at_least(1))
    dropout: float = setting(0.0, "dropout inside every block", BELOW_ONE)
    initialisation: Literal["torch", "uniform", "zero-last"] = setting("zero-last", "as of mlp")

    @property
    def n_layers(self) -> int:  # type: ignore[override]
        return 2 * self.blocks + 2


@dataclass(frozen=True)
class ConvNetwork(Network):
    kind = "conv"
    blocks: int = setting(2, "gated residual blocks, of two convolutions each", within(0, 1000))
    width: int = setting(64, "channels inside", within(1, 10_000))
    dropout: float = setting(0.0, "dropout inside every block", BELOW_ONE)

    @property
    def n_layers(self) -> int:  # type: ignore[override]
        return 2 * self.blocks + 2


class Block(Kind):
    """One layer of a flow, or several alike.

    To add a kind, write a frozen dataclass, list it in `BLOCKS`, and say in `nicest.recipes.build` what it builds.
    """

    n_layers = 0  # linear layers inside


@dataclass(frozen=True)
class LogitBlock(Block):
    kind = "logit"


@dataclass(frozen=True)
class SinhArcsinhBlock(Block):
    kind = "sinh-arcsinh"


@dataclass(frozen=True)
class ZCABlock(Block):
    kind = "zca"
    shrinkage: float = setting(0.0, "how far correlations are shrunk towards 0, against few rows", within(0, 1))


@dataclass(frozen=True)
class TriangularBlock(Block):
    kind = "triangular"
    shrinkage: float = setting(0.0, "how far correlations are shrunk towards 0, against few rows", within(0, 1))


@dataclass(frozen=True)
class SqueezeBlock(Block):
    kind = "squeeze"
    by: int = setting(2, "height and width of the tiles that become a pixel each", within(2, 1000))


@dataclass(frozen=True)
class FactorOutBlock(Block):
    kind = "factor-out"


@dataclass(frozen=True)
class CouplingBlock(Block):
    kind = "coupling"
    repeat: int = setting(1, "number of coupling layers", within(1, 1000))
    partition: Literal["odd-even", "halves", "checkerboard", "channels"] = setting(
        "odd-even", "how components are split; the roles of the two sets alternate from layer to layer"
    )
    law: LawSettings = setting(LawSettings("additive"), "the coupling law")  # noqa: RUF009
    network: Network = setting(MLPNetwork(), "the coupling function")  # noqa: RUF009
    mixing: bool = setting(False, "before every coupling, a learned linear layer of the channels of a pixel")

    @property
    def n_layers(self) -> int:  # type: ignore[override]
        return self.repeat * self.network.n_layers


@dataclass(frozen=True)
class ElementwiseBlock(Block):
    kind = "elementwise"
    law: LawSettings = setting(LawSettings("spline", (("bins", 32),)), "the law in every dimension")  # noqa: RUF009


@dataclass(frozen=True)
class MixingBlock(Block):
    kind = "mixing"


@dataclass(frozen=True)
class ScalingBlock(Block):
    kind = "scaling"
    initialisation: Literal["identity", "prior"] = setting(
        "identity", "start at 1, or where data of variance 1 gets the variance of the prior"
    )


def _by_kind(*classes: type[Kind]) -> dict[str, type[Kind]]:
    return {each.kind: each for each in classes}


BLOCKS = _by_kind(
    LogitBlock,
    SinhArcsinhBlock,
    ZCABlock,
    TriangularBlock,
    ElementwiseBlock,
    SqueezeBlock,
    CouplingBlock,
    FactorOutBlock,
    MixingBlock,
    ScalingBlock,
)
NETWORKS = _by_kind(MLPNetwork, ResidualNetwork, ConvNetwork)


@cache
def types_of(made: type) -> dict[str, Any]:
    """Return the types of the fields of a class, by name."""
    return get_type_hints(made)


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


def coerce(value: Any, kind: Any, where: str) -> Any:
    """Convert a value to a type; raise a NicestError that says what was expected."""
    origin, args = _parts(kind)
    if origin is Literal:
        if value in args:
            return value
        near = nearest(value, args) if isinstance(value, str) else ""
        raise NicestError(f"{where} is one of {', '.join(args)}; got {shown(value)}{near}")
    if origin is tuple:
        of, several = args[0], value if isinstance(value, list | tuple) else [value]
        if of is Block:
            return tuple(of_kind(each, BLOCKS, f"{where}, block {i}: ") for i, each in enumerate(several, 1))
        if isinstance(value, str) and of is not str:
            raise NicestError(f"{where} is of type {of.__name__}; got {shown(value)}; several are written as [1,2]")
        return tuple(coerce(each, of, where) for each in several)
    if kind is Network:
        return of_kind(value, NETWORKS, f"{where}.")
    if kind is LawSettings:
        return _law(value, where)
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


def of_kind(table: Any, registry: Mapping[str, type], where: str) -> Any:
    """Build what a table describes: `kind` names a dataclass of a registry, the other keys are its fields."""
    kinds, name = ", ".join(registry), where.rstrip(".: ")
    if not isinstance(table, dict) or "kind" not in table:
        raise NicestError(f"{name} is a table with a kind, one of {kinds}; got {shown(table)}")
    kind = table["kind"]
    if not isinstance(kind, str) or kind not in registry:
        near = nearest(kind, registry) if isinstance(kind, str) else ""
        raise NicestError(f"{where}kind is one of {kinds}; got {shown(kind)}{near}")
    made = registry[kind]
    hints, known = types_of(made), [each.name for each in fields(made)]
    values = {}
    for key, value in table.items():
        if key in known:
            values[key] = coerce(value, hints[key], where + key)
        elif key != "kind":
            raise NicestError(f"{name}: unknown key {shown(key)} of kind {kind}{nearest(key, known)}")
    return made(**values)


def _law(value: Any, where: str) -> LawSettings:
    """Parse a law: its keys are words, and its values are numbers, words, or lists of them."""
    if not isinstance(value, dict) or "kind" not in value:
        raise NicestError(f'{where} is a table with a kind, such as {{ kind = "affine" }}; got {shown(value)}')
    settings = {}
    for key, each in value.items():
        if not (key.isascii() and key.isidentifier()):
            raise NicestError(f"{where}: unknown key {shown(key)}")
        expected: Any = str if key == "kind" else tuple[Scalar, ...] if isinstance(each, list) else Scalar
        settings[key] = coerce(each, expected, f"{where}.{key}")
    return LawSettings(settings.pop("kind"), tuple(sorted(settings.items())))
