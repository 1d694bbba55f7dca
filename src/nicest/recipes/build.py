"""Build the model of a recipe: the network of a table, or units, the layers of its blocks, and a prior."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nicest.errors import NicestError
from nicest.flows import Density, Flow, Gaussian, Logistic, OneHot, Prior, Units
from nicest.recipes.blocks import Stack
from nicest.recipes.recipe import DataSettings, Recipe

if TYPE_CHECKING:
    from nicest.data.columns import Schema

PRIORS: dict[str, type[Prior]] = {"gaussian": Gaussian, "logistic": Logistic}


def build(recipe: Recipe, schema: Schema | None = None) -> Density:
    """Build the untrained model of a recipe.

    Parameters
    ----------
    recipe : Recipe
        With data.shape and data.levels, which `describe` takes from the data.
    schema : Schema, optional
        The columns of a table.
    """
    if recipe.own_flow:
        raise NicestError("this run holds a density built by hand: build it again, then nicest.open(path, flow=it)")
    model, data = recipe.model, recipe.data
    if data.kind == "table":
        from nicest.tables import TableModel  # not needed for images

        if schema is None:
            raise NicestError("a table model needs its columns: open the run folder, which has them in columns.json")
        table: Density = TableModel(schema.heads(), recipe.table, [schema.index(name) for name in recipe.table.targets])
        return table
    prior = PRIORS[model.prior](data.dim, learned=model.learned_prior)
    embedding = OneHot(len(data.classes)) if data.classes else None
    stack = Stack(data, prior, bool(model.blocks), enumerate(model.layers, 1), data.shape)
    return Flow(units_of(data), stack.chain(), prior, embedding)


def units_of(data: DataSettings) -> Units:
    """Return the map from the data as it is stored to real numbers of a sensible size."""
    if not data.levels:
        return Units.continuous(data.dim)
    low, high = data.interval
    try:
        return Units.pixels(data.dim, data.levels, (low, high))
    except ValueError as error:
        raise NicestError(f"data.interval: {error}") from error
