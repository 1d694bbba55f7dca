"""Composition of layers (NICE §3.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from nicest.flows.bijection import Bijection

Ledger = dict[str, Tensor]


class Chain(Bijection):
    """Layers in the order in which data passes them: f = f_L ∘ ... ∘ f_1 (NICE §3.1).

    log |det df/dx| = Σ_l log |det df_l/dh_(l-1)|.

    Parameters
    ----------
    *layers : Bijection or mapping of names to Bijections
        A layer without a name is named by its position and class, such as "0_logit". `chain[1:3]` is a chain of some of
        the layers; `chain[0]` and `chain["0_logit"]` are one of them.
    """

    def __init__(self, *layers: Bijection | Mapping[str, Bijection]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for i, layer in enumerate(layers):
            named = layer if isinstance(layer, Mapping) else {f"{i}_{type(layer).__name__.lower()}": layer}
            for name, each in named.items():
                if not isinstance(each, Bijection):
                    raise TypeError(f"a chain is made of Bijections, got {type(each).__name__} for {name!r}")
                if name in self.layers:
                    raise ValueError(f"two layers of a chain have the name {name!r}")
                self.layers[name] = each

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x.new_zeros(len(x))
        for layer in self:
            x, log_det = layer(x, context)
            total = total + log_det
        return x, total

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = y.new_zeros(len(y))
        for layer in reversed(self):
            y, log_det = layer.inverse(y, context)
            total = total + log_det
        return y, total

    def initialise(self, x: Tensor, context: Tensor | None = None) -> None:
        """Initialise the layers in turn, each with what the layers before it make of x."""
        layers = list(flattened(self))
        while layers and not initialises(layers[-1]):
            layers.pop()
        for i, layer in enumerate(layers):
            x = layers[i - 1](x, context)[0] if i else x
            layer.initialise(x, context)

    def ledger(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Ledger]:
        """Return f(x) and the log-determinant of every layer, by name."""
        terms: Ledger = {}
        for name, layer in self.layers.items():
            x, inner = ledger(layer, x, context)  # type: ignore[arg-type]
            terms |= {joined(name, key): term for key, term in inner.items()}
        return x, terms

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Bijection]:
        return iter(self.layers.values())  # type: ignore[arg-type]

    def __reversed__(self) -> Iterator[Bijection]:
        return reversed(list(self))

    def __getitem__(self, key: int | str | slice) -> Any:
        if isinstance(key, str):
            return self.layers[key]
        if isinstance(key, slice):
            return Chain(dict(list(self.layers.items())[key]))  # type: ignore[arg-type]
        return list(self)[key]


def joined(*names: str) -> str:
    """Join the names of a layer and of one inside it, either of which may be empty."""
    return "_".join(filter(None, names))


def ledger(layer: Bijection, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Ledger]:
    """Return f(x) and the log-determinants of the layers inside a layer, by name; its own has the name ""."""
    if inside := getattr(layer, "ledger", None):
        found: tuple[Tensor, Ledger] = inside(x, context)
        return found
    y, log_det = layer(x, context)
    return y, {"": log_det}


def flattened(layer: Bijection) -> Iterator[Bijection]:
    """Yield the layers of chains within chains, in the order in which data passes them."""
    for each in layer if isinstance(layer, Chain) else [layer]:
        yield from flattened(each) if isinstance(each, Chain) else [each]


def leaves(layer: Bijection) -> Iterator[Bijection]:
    """Yield the layers that contain no others, in the order in which data passes them."""
    for each in flattened(layer):
        yield from leaves(each.inner) if hasattr(each, "inner") else [each]  # type: ignore[arg-type]


def initialises(layer: Bijection) -> bool:
    """Return True if a layer, or one inside it, has a data-dependent start."""
    return any(type(each).initialise is not Bijection.initialise for each in leaves(layer))
