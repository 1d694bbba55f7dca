"""Conversion of tensors that older versions of nicest wrote."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nicest.flows import Affine, AffineSpline, Law, Mixture, Standardise
from nicest.flows.features import SIZE
from nicest.recipes.recipe import DataSettings

FORMAT = 3


class Origin(NamedTuple):
    """Where a tensor of today was in format 2, and the function that converts it."""

    name: str
    convert: Callable[[Tensor], Tensor] = lambda tensor: tensor


def origins(flow: Any, data: DataSettings) -> dict[str, Origin]:
    """Return the origin of every tensor of a flow, by its name.

    Format 2 differs from format 3 in this: (1) the bijection of a flow was `chain`; a mixture had the others in
    `others`, with common units and prior. (2) Flows of targets were of all columns: units had all of them, and layers
    other than couplings were wrapped. A label was the last column of a wrapped chain. (3) Affine parameters came first,
    those of all components, one kind after the other.
    """
    found = {}
    orders = dict(parameter_orders(flow))
    columns = dict(_column_orders(flow, data))
    for name in flow.state_dict():
        k, rest = 0, name
        if match := re.fullmatch(r"members\.(\d+)\.(.*)", name):
            k, rest = int(match[1]), match[2]
        part, _, inner = rest.partition(".")
        convert = _chosen(orders[name]) if name in orders else Origin("").convert
        if part == "bijection":
            chain = f"others.{k - 1}" if k else "chain"
            found[name] = Origin(f"{chain}.{_old_layer(inner, data)}", columns.get(name, convert))
            if inner == "layers.bounds.ends" and data.targets:
                found[name] = found[name]._replace(convert=_chosen(data.targets))
        elif part == "units":
            found[name] = Origin(rest, _chosen(data.targets) if data.targets else convert)
        elif part == "embedding":
            found[name] = Origin(f"units.{inner}", _chosen(_context(data)))
        elif part == "prior":
            found[name] = Origin(f"prior.prior.{inner}" if data.targets or data.classes else rest)
        elif name == "weights":
            found[name] = Origin("share", partial(_weights, members=len(flow.members)))
        else:
            found[name] = Origin(rest)
    return found


def convert(tensors: Mapping[str, Tensor], flow: Any, data: DataSettings) -> dict[str, Tensor]:
    """Convert the weights of a flow from format 2; what has no origin there keeps its name.

    A tensor of the wrong shape is left out, so that the weights do not fit the flow.
    """
    tensors = dict(tensors)
    if isinstance(flow, Mixture):
        tensors.setdefault("share", torch.full_like(flow.weights, 1 / len(flow.members)))
    known = origins(flow, data)
    used = {origin.name for origin in known.values()}
    found = {}
    for name, origin in known.items():
        if origin.name in tensors:
            with suppress(IndexError, RuntimeError):
                found[name] = origin.convert(tensors[origin.name])
    return found | {name: tensor for name, tensor in tensors.items() if name not in used}


def convert_state(
    tensors: Mapping[str, Tensor], flow: Any, data: DataSettings, trained: Iterable[nn.Parameter]
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


def _old_layer(name: str, data: DataSettings) -> str:
    """Return the name of a tensor of a bijection in format 2."""
    if data.classes:
        name = f"inner.{name}"
        return re.sub(r"\.conditioner\.(weight|bias)$", lambda m: ".b" if m[1] == "bias" else ".weight", name)
    if not data.targets:
        return name
    name = name.replace(".conditioner.", ".network.")
    layer = name.split(".")[1]
    if layer in ("bounds", "forest") or layer.startswith("coupling"):
        return name
    return name.replace(f"layers.{layer}.", f"layers.{layer}.inner.", 1)


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


def _column_orders(flow: nn.Module, data: DataSettings) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Yield tensors of networks that read columns: targets now come after the context, not in the table's order."""
    if len(data.targets) < 2:
        return
    for name, layer in flow.named_modules():
        if not hasattr(layer, "partition") or not hasattr(getattr(layer, "network", None), "features"):
            continue
        read = [*_context(data), *(data.targets[i] for i in layer.partition.i1)]
        numbers = [i for i in read if not data.categories[i]]
        order = [sorted(numbers).index(i) for i in numbers]
        for each in ("frequency", "mixture", "missing"):
            yield f"{name}.network.features.{each}", _chosen(order)
        inner = layer.network.network
        first = next(key for key, each in inner.named_modules() if isinstance(each, nn.Linear))
        width = len(inner.get_submodule(first).weight.mT)
        blocks = [k * (1 + SIZE) + j for k in order for j in range(1 + SIZE)]
        inputs = torch.tensor([*blocks, *range(len(blocks), width)])
        yield f"{name}.network.network.{first}.weight", partial(torch.Tensor.index_select, dim=1, index=inputs)


def _context(data: DataSettings) -> list[int]:
    return [i for i in range(data.dim) if i not in data.targets]


def _chosen(index: Iterable[int] | Tensor) -> Callable[[Tensor], Tensor]:
    rows = index if isinstance(index, Tensor) else torch.tensor(list(index), dtype=torch.long)
    return lambda tensor: tensor[rows.to(tensor.device)] if tensor.ndim else tensor


def _weights(share: Tensor, members: int) -> Tensor:
    """Return the weights of members, the last of which is a forest with this weight; or 1/K of K others."""
    if share.ndim:  # uniform weights
        return share
    return torch.cat((((1 - share) / (members - 1)).expand(members - 1), share[None]))
