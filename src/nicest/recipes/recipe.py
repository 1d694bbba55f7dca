"""Recipes: all settings of a training, read from TOML, checked and written (no torch here)."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from nicest.errors import NicestError
from nicest.messages import nearest, shown
from nicest.recipes.blocks import Block
from nicest.recipes.checks import Settings, coerce, setting, types_of
from nicest.recipes.settings import (
    SHORT,
    AugmentSettings,
    DataSettings,
    ModelSettings,
    TableSettings,
    TrainSettings,
)

__all__ = [
    "AugmentSettings",
    "DataSettings",
    "ModelSettings",
    "Recipe",
    "TableSettings",
    "TrainSettings",
    "load_recipe",
    "names",
    "parse",
]

TABLES = ("data", "model", "table", "augment", "train")
# settings of earlier versions: dropped at the value that turned them off, None for any value
GONE: dict[str, dict[str, Any]] = {
    "data": {"target": [], "targets": [], "categories": [], "atoms": 0, "discrete": None},
    "model": {"members": 1, "trees": 0, "leaves": None},
}
LONGEST = 1 << 16  # characters of a recipe
DOTS = 2000  # in a line of it: the time that tomllib takes grows with the square of a dotted key


@dataclass(frozen=True)
class Recipe(Settings):
    """Everything needed to train one model."""

    name: str = setting("", "the name of the recipe")
    title: str = setting("", "a one-line description")
    reading: Literal["text", "released", "best", "ours"] = setting(
        "ours", "what it follows: the text of the paper, the authors' released code, or neither"
    )
    paper_nats: float | None = setting(None, "the paper's test log-likelihood for this data set")
    expected_nats: float | None = setting(None, "our test log-likelihood with this recipe")
    own_flow: bool = setting(False, "the density was built by hand: [model] does not describe it")
    sized: bool = setting(False, "choose the settings that are not set here from the size of the data")
    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    table: TableSettings = field(default_factory=TableSettings)
    augment: AugmentSettings = field(default_factory=AugmentSettings)
    train: TrainSettings = field(default_factory=TrainSettings)

    def __post_init__(self) -> None:
        """Validate the types and values of all settings."""
        for table in TABLES:
            object.__setattr__(self, table, _typed(getattr(self, table), f"{self.name or 'recipe'}: {table}"))
        for name, value, expected in self.broken():
            whose = shown(self.name)[1:-1] or "recipe"
            got = shown(list(value) if isinstance(value, tuple) else value)
            raise NicestError(f"{whose}: {name} must be {expected}; got {got}")
        _require_short(self.to_toml(), "recipe")

    def rules(self) -> Iterator[tuple[str, str, bool]]:
        allowed = self.data.interval == (0.0, 1.0) or self.model.layers[0].kind != "logit"
        name, what = ("blocks", "free of logit") if self.model.blocks else ("preprocess", "not logit")
        yield f"model.{name}", f"{what} unless data.interval is [0, 1]", allowed
        yield (
            "data.labels",
            "false where the settings are chosen from the size of the data",
            not (self.sized and self.data.labels),
        )
        other, what = ("model", "images and arrays") if self.data.kind == "table" else ("table", "tables")
        default: Any = ModelSettings() if other == "model" else TableSettings()
        for each in fields(default):
            kept = getattr(getattr(self, other), each.name) == getattr(default, each.name)
            yield f"{other}.{each.name}", f"left out: [{other}] is of {what}", kept
        several = self.data.labels and len(self.data.classes) != 1
        yield "train.label_weight", "0 for data without labels, or with one", self.train.label_weight == 0 or several

    def changed(self, table: Mapping[str, Any], source: str) -> Recipe:
        """Return the recipe with other settings, such as {"train": {"epochs": 50}}, checked."""
        return _merge(self, dict(table), source)

    def override(self, *assignments: str) -> Recipe:
        """Return the recipe with `key=value` settings changed, such as `train.epochs=50`.

        Values are TOML, or plain words.
        """
        table: dict[str, Any] = {}
        for assignment in assignments:
            key, equals, text = assignment.partition("=")
            if not equals or len(assignment) > LONGEST or text.count(".") > DOTS:
                raise NicestError(f"expected KEY=VALUE, such as train.epochs=50, got {shown(assignment)}")
            try:
                value = tomllib.loads(f"value = {text}")["value"]
            except (ValueError, RecursionError):  # no TOML, or numbers and lists beyond all bounds
                value = text
            *path, last = key.strip().split(".")
            inner = table
            for name in path:
                inner = inner.setdefault(name, {})
                if not isinstance(inner, dict):
                    raise NicestError(f"{shown(name)} is set twice, once as a table: {shown(assignment)}")
            inner[last] = value
        changed = _merge(self, table, "settings")
        before, after = ((each.name, each.interval, each.labels) for each in (self.data, changed.data))
        if before == after:
            return changed
        # figures and title were of the data the recipe came with
        title = f"recipe {self.name} on {Path(changed.data.name).name}{' with labels' * changed.data.labels}"
        return replace(changed, title=title, reading="ours", paper_nats=None, expected_nats=None)

    def located(self, folder: Path) -> Recipe:
        """Return the recipe of a file in this folder: a data path that starts with ./ or ../ is relative to it.

        If nothing is there, but something is relative to the working directory, the path stays.
        """
        path = Path(self.data.name)
        if not self.data.name.startswith(("./", "../")) or (path.exists() and not (folder / path).exists()):
            return self
        return replace(self, data=replace(self.data, name=os.path.normpath(folder.resolve() / path)))

    def to_toml(self) -> str:
        """Write the recipe as TOML, every setting with its meaning."""
        other = ("model", "augment") if self.data.kind == "table" else ("table",)
        sections = (["", f"[{part}]", *_lines(getattr(self, part))] for part in TABLES if part not in other)
        return "\n".join([*_lines(self), *(line for section in sections for line in section), ""])


def _typed(settings: Any, where: str) -> Any:
    """Convert the values of settings to their types, numbers of numpy included."""
    hints = types_of(settings.__class__)
    values = {each.name: getattr(settings, each.name) for each in fields(settings)}
    plain = {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}
    made = {n: v if n == "blocks" else coerce(v, hints[n], f"{where}.{n}") for n, v in plain.items()}
    same = made == values and all(type(made[name]) is type(values[name]) for name in made)
    return settings if same else replace(settings, **made)


def names() -> list[str]:
    """Return the names of the recipes that come with nicest."""
    folder = resources.files("nicest.recipes")
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def load_recipe(name: str) -> Recipe:
    """Load a recipe by its name, or from a TOML file."""
    if name in names():
        return parse((resources.files("nicest.recipes") / f"{name}.toml").read_text(), name)
    path = Path(name)
    if path.suffix == ".toml":
        if not path.is_file():
            raise NicestError(f"no recipe file {path}; the recipes that come with nicest are {', '.join(names())}")
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise NicestError(f"{path} cannot be read as a recipe: {error}") from error
        return parse(text, str(path)).located(path.parent)
    raise NicestError(f"no recipe {name!r}{nearest(name, names())}; there are {', '.join(names())}, or a .toml file")


def parse(text: str, source: str) -> Recipe:
    """Parse the text of a TOML file; `source` is named in errors."""
    _require_short(text, source)
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for numbers of too many digits and lists in lists in lists
        raise NicestError(f"{source} is not valid TOML: {error}") from error
    table.setdefault("name", Path(source).stem)
    for part, gone in GONE.items():
        if isinstance(settings := table.get(part), dict):
            kept = {k: v for k, v in settings.items() if k not in gone or gone[k] not in (None, v)}
            table[part] = kept
    return _merge(Recipe(), table, source)


def _require_short(text: str, source: str) -> None:
    """Refuse a text that takes TOML long to read."""
    dots = max(line.count(".") for line in text.split("\n"))
    for most, what, got in ((LONGEST, "characters", len(text)), (DOTS, "dots in a line", dots)):
        if got > most:
            raise NicestError(f"{source}: expected a recipe of at most {most} {what}, got {got}: shorten it")


def _merge(settings: Any, table: dict[str, Any], source: str, prefix: str = "") -> Any:
    """Return `settings` with the values of `table`; raise a NicestError for unknown names and wrong types."""
    hints = types_of(settings.__class__)
    changes = {}
    for key, value in table.items():
        if key not in hints:
            raise NicestError(f"{source}: unknown key {shown(prefix + key)}{_nearest_key(prefix + key)}")
        current = getattr(settings, key)
        if is_dataclass(current):
            if not isinstance(value, dict):
                raise NicestError(f"{source}: {prefix + key!r} is a table of settings, got {shown(value)}")
            changes[key] = _merge(current, value, source, f"{prefix}{key}.")
        else:
            changes[key] = coerce(value, hints[key], f"{source}: {prefix + key}")
    return settings.changed(changes) if isinstance(settings, ModelSettings) else replace(settings, **changes)


def _nearest_key(key: str) -> str:
    """Return a hint at the setting that was probably meant, also where its table was left out."""
    recipe = Recipe()
    known = [each.name for each in fields(recipe)]
    known += [f"{table}.{each.name}" for table in TABLES for each in fields(getattr(recipe, table))]
    last = key.rpartition(".")[2]
    return nearest(next((each for each in known if each.rpartition(".")[2] == last), key), known)


def _lines(settings: Any) -> list[str]:
    """Write one table as TOML; blocks come last, and the settings that they replace are left out."""
    blocks = getattr(settings, "blocks", ())
    values = ((each, getattr(settings, each.name)) for each in fields(settings))
    lines = [
        f"{each.name} = {_toml(value)}  # {each.metadata['help']}"
        for each, value in values
        if "help" in each.metadata and value is not None and not (blocks and each.name in (*SHORT, "blocks"))
    ]
    for block in blocks:
        lines += ["", "[[model.blocks]]", *(f"{key} = {_toml(value)}" for key, value in block.table().items())]
    return lines


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # else JSON's strings are TOML's
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, Block):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.table().items()) + " }"
    return repr(value)
