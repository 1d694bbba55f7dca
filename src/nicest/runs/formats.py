"""Conversion of tensors that older versions of nicest wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from nicest.flows import Flow, Law

FORMAT = 3
Conversion = Callable[[Tensor], Tensor]


def conversions(flow: Flow) -> dict[str, Conversion]:
    """Return the functions that convert tensors of formats 1 and 2, by the name of the tensor.

    Up to format 2, affine parameters came first: those of all components, one kind after the other. Since format 3 all
    parameters of a component are consecutive.
    """
    found: dict[str, Conversion] = {}
    for name, layer in flow.named_modules():
        law = getattr(layer, "law", None)
        if not isinstance(law, Law):
            continue
        if isinstance(network := getattr(layer, "network", None), nn.Module):
            outputs = [key for key, each in network.named_modules() if isinstance(each, nn.Linear | nn.Conv2d)][-1:]
            for key in outputs:
                components = len(network.get_submodule(key).weight) // law.size  # type: ignore[arg-type]
                convert = partial(_reordered, order=_old_order(law.size, components))
                found |= {f"{name}.network.{key}.{each}": convert for each in ("weight", "bias")}
        elif isinstance(dim := getattr(layer, "dim", None), int):
            order = _old_order(law.size, dim)
            found |= {f"{name}.{each}": partial(_reordered, order=order) for each in ("b", "weight")}
    return found


def convert(tensors: Mapping[str, Tensor], flow: Flow) -> dict[str, Tensor]:
    """Convert the weights of a flow from format 1 or 2."""
    known = conversions(flow)
    return {name: known[name](tensor) if name in known else tensor for name, tensor in tensors.items()}


def convert_state(tensors: Mapping[str, Tensor], flow: Flow, trained: Iterable[nn.Parameter]) -> dict[str, Tensor]:
    """Convert the state of a training from format 1 or 2; `trained` are the parameters in the optimiser's order."""
    known, found = conversions(flow), dict(tensors)
    names = {parameter: name for name, parameter in flow.named_parameters()}
    order = [names[parameter] for parameter in trained]
    for key, tensor in tensors.items():
        kind, _, name = key.partition(".")
        if kind == "optimizer" and tensor.ndim:
            name = order[int(name.partition(".")[0])]
        if kind in ("flow", "average", "optimizer") and name in known:
            found[key] = known[name](tensor)
    return found


def _reordered(tensor: Tensor, *, order: Tensor) -> Tensor:
    return tensor[order]


def _old_order(size: int, components: int) -> Tensor:
    """Return where the parameters of each component were, (components · size,).

    Laws with an affine part have 2 parameters, or 3 bins + 1; splines have 3 bins - 1.
    """
    affine = 2 if size == 2 or (size % 3 == 1 and size > 1) else 0
    at = torch.arange(components)[:, None]
    first = at + components * torch.arange(affine)
    rest = components * affine + at * (size - affine) + torch.arange(size - affine)
    return torch.cat((first, rest), 1).flatten()
