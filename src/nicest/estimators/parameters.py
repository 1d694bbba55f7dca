"""The parameters of `NICE`, and the settings of recipes that they stand for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from nicest.errors import NicestError
from nicest.recipes import Recipe

SAME = ("couplings", "hidden_layers", "width", "bins", "dropout", "law", "prior", "marginals", "shrinkage")
MODEL = {name: name for name in SAME} | {"whitening": "preprocess"}  # parameters, and their names in a recipe
TRAIN = {name: name for name in ("effort", "epochs", "weight_decay", "patience")}
TRAIN |= {"batch_size": "batch", "learning_rate": "lr"}


@contextmanager
def in_words_of_parameters() -> Iterator[None]:
    """Raise errors as ValueError, with settings of recipes as the parameters of NICE."""
    ours = {name: ours for ours, name in (MODEL | TRAIN).items()}
    try:
        yield
    except NicestError as error:
        text = re.sub(r"^(NICE|recipe|rows): | or set train\.clip \([^)]*\)|; the last good state.*", "", str(error))
        text = re.sub(r"\b(?:model|train)\.(\w+)", lambda found: ours.get(found[1], found[1]), text)
        raise ValueError(text) from error


def python_number(value: Any) -> Any:
    """Convert a number of numpy to one of Python."""
    return value.item() if isinstance(value, np.generic) else value


def params_of(recipe: Recipe) -> dict[str, Any]:
    """Return the parameters that a recipe stands for."""
    depths = recipe.model.hidden_layers
    params = {ours: getattr(recipe.model, name) for ours, name in MODEL.items()}
    params |= {ours: getattr(recipe.train, name) for ours, name in TRAIN.items()}
    return params | {"hidden_layers": depths[0] if len(depths) == 1 else list(depths)}
