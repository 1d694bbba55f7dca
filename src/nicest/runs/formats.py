"""Conversion of files that older versions of nicest wrote.

Format 4 has tables in one network; runs of tables in older formats are refused. Formats 3 and 4 are the same for
images. Format 2 differs from format 3 in this: (1) the bijection of a flow was `chain`; (2) with labels, the chain was
wrapped, and the label was the last column; (3) affine parameters came first, those of all components, one kind after
the other. In format 1 the units of the data were the first layers of the chain.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nicest.errors import NicestError
from nicest.flows import Affine, AffineSpline, Law, Standardise
from nicest.recipes.recipe import DataSettings

FORMAT = 4
NAMES_OF_TODAY = 3  # the first version whose tensors have the names and the order of today


def refuse_table(text: str, version: int, path: Path) -> None:
    """Raise a NicestError if a recipe, as TOML, is that of a table in a format before 4."""
    try:
        recipe = tomllib.loads(text) if version < FORMAT else {}
    except (ValueError, RecursionError):  # whoever parses the recipe says what is wrong with it
        return
    data, model = (each if isinstance(each := recipe.get(part), dict) else {} for part in ("data", "model"))
    steps = bool(data.get("discrete")) and not recipe.get("own_flow")
    several = model.get("members", 1) != 1 or model.get("trees")
    if data.get("kind") == "table" or data.get("atoms") or data.get("targets") or steps or several:
        raise NicestError(f'{path} holds a table model of an earlier version: train it again with "nicest train FILE"')


class Origin(NamedTuple):
    """Where a tensor of today was in format 2, and the function that converts it."""

    name: str
    convert: Callable[[Tensor], Tensor] = lambda tensor: tensor


def origins(flow: nn.Module, data: DataSettings) -> dict[str, Origin]:
    """Return the origin of every tensor of a flow, by its name."""
    found, orders = {}, dict(parameter_orders(flow))
    for name in flow.state_dict():
        part, _, inner = name.partition(".")
        convert = _chosen(orders[name]) if name in orders else Origin("").convert
        if part == "bijection":
            found[name] = Origin(f"chain.{_old_layer(inner, data)}", convert)
        elif part == "prior" and data.classes:
            found[name] = Origin(f"prior.prior.{inner}")
        else:
            found[name] = Origin(name, convert)
    return found


def convert(tensors: Mapping[str, Tensor], flow: nn.Module, data: DataSettings) -> dict[str, Tensor]:
    """Convert the weights of a flow from format 2; what has no origin there keeps its name.

    A tensor of the wrong shape is left out, so that the weights do not fit the flow.
    """
    known = origins(flow, data)
    used = {origin.name for origin in known.values()}
    found = {}
    for name, origin in known.items():
        if origin.name in tensors:
            with suppress(IndexError, RuntimeError):
                found[name] = origin.convert(tensors[origin.name])
    return found | {name: tensor for name, tensor in tensors.items() if name not in used}


def convert_state(
    tensors: Mapping[str, Tensor], flow: nn.Module, data: DataSettings, trained: Iterable[nn.Parameter]
) -> dict[str, Tensor]:
    """Convert the state of a training from format 2; `trained` are the parameters in the optimiser's order."""
    found = {key: each for key, each in tensors.items() if key.partition(".")[0] not in ("flow", "average")}
    for kind in ("flow", "average"):
        prefix = f"{kind}."
        stored = {key.removeprefix(prefix): each for key, each in tensors.items() if key.startswith(prefix)}
        if stored:
            found |= {f"{prefix}{name}": each for name, each in convert(stored, flow, data).items()}
    known, names = origins(flow, data), {parameter: name for name, parameter in flow.named_parameters()}
    order = [names[parameter] for parameter in trained]
    for key, tensor in tensors.items():
        kind, _, rest = key.partition(".")
        if kind == "optimizer" and tensor.ndim:
            found[key] = known[order[int(rest.partition(".")[0])]].convert(tensor)
    return found


def upgraded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the tensors of format 1 to those of format 2."""
    found = {}
    for name, tensor in tensors.items():
        prefix, layers, rest = name.rpartition("chain.layers.")
        layer, _, what = rest.partition(".")
        if not layers or layer not in ("interval", "standardise"):
            found[name] = tensor
        elif layer == "standardise" and what == "scale":
            with suppress(KeyError, RuntimeError):  # without them, weights of a damaged file do not fit the flow
                found[f"{prefix}units.loc"] = -tensors[f"{prefix}chain.layers.standardise.shift"] / tensor
                found[f"{prefix}units.scale"] = 1 / tensor
                found[f"{prefix}units.step"] = torch.zeros_like(tensor)
    return found


def _old_layer(name: str, data: DataSettings) -> str:
    """Return the name of a tensor of a bijection in format 2."""
    if not data.classes:
        return name
    name = f"inner.{name}"
    return re.sub(r"\.conditioner\.(weight|bias)$", lambda m: ".b" if m[1] == "bias" else ".weight", name)


def parameter_orders(flow: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names of tensors whose rows were in another order in format 2, and where each row was."""
    for name, layer in flow.named_modules():
        law, dim = getattr(layer, "law", None), getattr(layer, "dim", None)
        if not isinstance(law, Law) or not isinstance(dim, int):
            continue
        attribute = "network" if hasattr(layer, "network") else "conditioner"
        network = getattr(layer, attribute, None)
        if network is None:
            yield f"{name}.b", _old_order(law, dim)
            continue
        for key in [key for key, each in network.named_modules() if isinstance(each, nn.Linear | nn.Conv2d)][-1:]:
            rows = len(network.get_submodule(key).weight) if key else len(network.weight)
            order = _old_order(law, rows // law.size)
            for each in ("weight", "bias"):
                yield ".".join(filter(None, (name, attribute, key, each))), order


def _old_order(law: Law, components: int) -> Tensor:
    """Return where the parameters of each component were, (components · size,)."""
    size, affine = law.size, 2 if isinstance(law, Affine | AffineSpline | Standardise) else 0
    at = torch.arange(components)[:, None]
    first = at + components * torch.arange(affine)
    rest = components * affine + at * (size - affine) + torch.arange(size - affine)
    return torch.cat((first, rest), 1).flatten()


def _chosen(rows: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[rows.to(tensor.device)] if tensor.ndim else tensor
