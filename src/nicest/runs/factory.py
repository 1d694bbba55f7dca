"""Densities of your own in a file: the weights, and the name of the function that builds one; no pickle."""

from __future__ import annotations

import importlib
import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nicest.errors import NicestError
from nicest.flows import Density
from nicest.messages import brief, shown
from nicest.recipes import Recipe
from nicest.recipes.defaults import IN_MEMORY
from nicest.recipes.recipe import DataSettings
from nicest.runs.folder import RunFolder, filled, write_tensors
from nicest.runs.sinks import Saved

NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def save(flow: Density, path: str | Path, *, factory: str, arguments: Mapping[str, Any] | None = None) -> None:
    """Write a density of your own to a folder, or to a file that ends in .safetensors, for `nicest.load`.

    The file keeps the weights, and the name and arguments of the function that builds the density; not its code.

    Parameters
    ----------
    flow : Density
    path : str or Path
    factory : str
        "package.module:function", the name of a function that can be imported.
    arguments : mapping, optional
        Keyword arguments of the function, which JSON can hold.
    """
    folder, source = RunFolder(path), str(path)
    if folder.model.exists():
        raise NicestError(f"{folder.model} is there already: choose another path")
    if factory.startswith("__main__:"):
        raise NicestError(f"expected a factory that others can import, got {factory}: put the function in a module")
    try:
        text = json.dumps(dict(arguments or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise NicestError(f"expected arguments that JSON can hold, got {shown(arguments)} ({brief(error)})") from error
    tensors = {name: tensor.detach().cpu() for name, tensor in flow.state_dict().items()}
    filled(built(factory, json.loads(text), source).double(), tensors, f"{factory} builds another flow than this one")
    levels = getattr(getattr(flow, "units", None), "levels", 0)
    data = DataSettings(name=IN_MEMORY, shape=(flow.dim,), levels=levels)
    recipe = Recipe("own", "a flow built by hand", own_flow=True, data=data)
    folder.path.mkdir(parents=True, exist_ok=True)
    write_tensors(folder.model, Saved(tensors, recipe, {"factory": factory, "arguments": text}))


def from_factory(figures: Mapping[str, Any], trust: bool | str, source: str) -> Density | None:
    """Build the density whose factory a file names, without its weights; None if it names none.

    Raises
    ------
    NicestError
        If the caller does not trust the factory.
    """
    if (factory := figures.get("factory")) is None:
        return None
    if trust is not True and trust != factory:
        raise NicestError(
            f"{source} holds a flow that the function {shown(factory)} builds: allow it to be called with"
            f" nicest.load(path, trust={shown(factory)}); trust=True calls whatever function a file names"
        )
    try:
        arguments = json.loads(figures.get("arguments", ""))
    except (TypeError, ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise NicestError(f"{source}: expected the arguments of {shown(factory)} in JSON: restore a copy of the file")
    return built(str(factory), arguments, source)


def built(factory: str, arguments: dict[str, Any], source: str) -> Density:
    """Call a function by its name and return the density that it builds."""
    if not NAME.fullmatch(factory):
        raise NicestError(f"{source}: expected a factory such as 'package.module:function', got {shown(factory)}")
    module, _, name = factory.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise NicestError(
            f"{source}: cannot import the factory {factory} ({brief(error)}): install it, or put it on PYTHONPATH"
        ) from error
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever built it first was warned then
        flow = function(**arguments)
    if not isinstance(flow, Density):
        got = shown(type(flow).__name__)
        raise NicestError(f"{source}: expected the factory {factory} to return a Density, got {got}")
    return flow
