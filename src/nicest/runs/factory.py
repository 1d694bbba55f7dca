"""Flows of your own in a file: the name of the function that builds one, its arguments, and the weights; no pickle."""

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
from nicest.flows import Flow
from nicest.messages import brief, shown
from nicest.recipes import Recipe
from nicest.recipes.defaults import IN_MEMORY
from nicest.recipes.recipe import DataSettings
from nicest.runs.folder import RunFolder, filled, write_tensors
from nicest.runs.sinks import Saved

NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def save(flow: Flow, path: str | Path, *, factory: str, arguments: Mapping[str, Any] | None = None) -> None:
    """Write a flow of your own to a folder, or to a file that ends in .safetensors, for `nicest.load`.

    `factory` names a function that can be imported, "package.module:function". Called with `arguments`, which JSON must
    hold, it builds such a flow; the file keeps both, and the weights. The code is not stored.
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
    levels, steps = flow.units.levels, 0 if flow.units.levels else int((flow.units.step > 0).sum())
    data = DataSettings(name=IN_MEMORY, shape=(flow.dim,), levels=levels, discrete=steps)
    recipe = Recipe("own", "a flow built by hand", own_flow=True, data=data)
    folder.path.mkdir(parents=True, exist_ok=True)
    write_tensors(folder.model, Saved(tensors, recipe, {"factory": factory, "arguments": text}))


def from_factory(figures: Mapping[str, Any], trust: bool | str, source: str) -> Flow | None:
    """The flow that the factory of a file builds, if it names one and the caller trusts it; its weights come later."""
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


def built(factory: str, arguments: dict[str, Any], source: str) -> Flow:
    """The flow that a function gives, called by its name."""
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
    if not isinstance(flow, Flow):
        raise NicestError(f"{source}: expected the factory {factory} to give a Flow, got {shown(type(flow).__name__)}")
    return flow
