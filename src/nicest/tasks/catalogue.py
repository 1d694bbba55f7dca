"""Lists of recipes, trained models and data sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from nicest.errors import NicestError
from nicest.messages import nearest
from nicest.tasks.options import DataSet, argument, given
from nicest.tasks.results import Result, columns, plus_minus


@dataclass(frozen=True, kw_only=True)
class RecipeList(Result):
    """All recipes, or one with its settings as TOML."""

    recipes: list[dict[str, Any]] | None = None
    name: str | None = None
    toml: str | None = None

    def lines(self) -> Iterator[Any]:
        table = columns("recipe", "reading", ">paper, nats", ">measured, nats", "what it is")
        for row in self.recipes or []:
            nats = ["–" if row[key] is None else f"{row[key]:.2f}" for key in ("paper_nats", "expected_nats")]
            table.add_row(row["name"], row["reading"], *nats, row["title"])
        yield table

    def show(self) -> None:
        if self.toml is None:
            super().show()
        else:
            print(self.toml, end="")


def recipes(
    name: Annotated[str | None, given("Print this recipe with every setting and its meaning.", str)] = None,
) -> RecipeList:
    """List the recipes and the log-likelihood to expect from each.

    Example: nicest recipes mnist
    """
    from nicest.recipes import load_recipe, names

    if name:
        recipe = load_recipe(name)
        return RecipeList(name=recipe.name, toml=recipe.to_toml())
    keys = ("name", "title", "reading", "paper_nats", "expected_nats")
    return RecipeList(recipes=[{key: getattr(load_recipe(each), key) for key in keys} for each in names()])


@dataclass(frozen=True, kw_only=True)
class ModelList(Result):
    """The cards of trained models."""

    models: list[dict[str, Any]]
    whole: bool

    def lines(self) -> Iterator[Any]:
        if self.whole:
            yield from (f"{name.replace('_', ' ')}: {value}" for name, value in self.models[0].items())
            return
        table = columns("model", ">test nats", ">bits/dim", ">MB", "what it is")
        for row in self.models:
            size, nats = f"{row['bytes'] / 1e6:.1f}", plus_minus(row["test_nats"], row["test_stderr"])
            table.add_row(row["name"], nats, f"{row['bits_per_dim']:.3f}", size, row["about"])
        yield table
        yield "nicest models NAME prints one card; commands take NAME in place of a run folder: nicest sample NAME"


def models(
    name: Annotated[str | None, argument(help="A model whose card to print.", show_default="all, in a table")] = None,
) -> ModelList:
    """List the trained models that come with nicest; every command takes their names in place of a run folder.

    Example: nicest models && nicest sample digits-conv -n 100 --out grid.png
    """
    from nicest.runs.shipped import card, shipped

    found = shipped()
    if name is not None and name not in found:
        raise NicestError(f"no model {name!r}{nearest(name, found)}; there are {', '.join(found) or 'none'}")
    chosen = [name] if name else list(found)
    return ModelList(models=[{"name": each, **card(found[each])} for each in chosen], whole=name is not None)


@dataclass(frozen=True, kw_only=True)
class DataSets(Result):
    """The published data sets."""

    sets: list[dict[str, Any]]

    def lines(self) -> Iterator[Any]:
        table = columns("data set", ">D", ">examples", "here", "what it is")
        for row in self.sets:
            here = "yes" if row["present"] else "no"
            table.add_row(row["name"], str(row["dim"]), str(row["n"]), here, row["title"])
        yield table


def data_list() -> DataSets:
    """List the data sets and whether each is here."""
    from nicest.data.download import list_sets

    return DataSets(sets=[row._asdict() for row in list_sets()])


@dataclass(frozen=True, kw_only=True)
class DataFolder(Result):
    """Where a data set is."""

    name: str
    folder: str

    def lines(self) -> Iterator[Any]:
        yield f"{self.name} in {self.folder}"


def data_get(name: DataSet) -> DataFolder:
    """Download a data set and verify its checksums.

    Example: nicest data get mnist
    """
    from nicest.data.download import get

    return DataFolder(name=name, folder=str(get(name)))


@dataclass(frozen=True, kw_only=True)
class DataCheck(Result):
    """The state of each file of a data set."""

    name: str
    files: list[dict[str, Any]]

    @property
    def exit_code(self) -> int:
        return int(not all(each["good"] for each in self.files))

    def lines(self) -> Iterator[Any]:
        yield from (f"{row['status']:8} {row['file']}" for row in self.files)
        if any(row["status"] == "rebuilt" for row in self.files):
            yield "rebuilt: the same images, cut anew from the originals; not the published bytes"
        if not self.files:
            yield f"{self.name} comes with nicest: nothing to check"


def data_check(name: DataSet) -> DataCheck:
    """Verify the checksums of a data set."""
    from nicest.data.download import GOOD, check

    found = [{"file": file, "status": status, "good": status in GOOD} for file, status in check(name)]
    return DataCheck(name=name, files=found)
