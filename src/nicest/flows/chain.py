"""How layers compose (NICE §3.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce

import torch
from torch import Tensor, nn

from nicest.flows.bijection import Bijection
from nicest.flows.coupling import Coupling, Partition


class Chain(Bijection):
    """Layers in the order data meets them: f = f_L ∘ ... ∘ f_1 (NICE §3.1).

    log |det df/dx| = Σ_l log |det df_l/dh_(l-1)|. Takes layers, which are named by their position and class, and
    mappings of names to layers. A chain among them lends its layers, so that every term of the log-det has its own
    name. A slice of a chain is a chain that shares its layers.
    """

    def __init__(self, *layers: Bijection | Mapping[str, Bijection]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for i, layer in enumerate(layers):
            named = layer if isinstance(layer, Mapping) else {f"{i}_{type(layer).__name__.lower()}": layer}
            for name, each in named.items():
                self._append(name, each)

    def _append(self, name: str, layer: Bijection) -> None:
        if isinstance(layer, Chain):
            for inner, each in layer.layers.items():
                self._append(f"{name}_{inner}", each)  # type: ignore[arg-type]
            return
        if not isinstance(layer, Bijection):
            raise TypeError(f"a chain is made of Bijections, got {type(layer).__name__} for {name!r}")
        if name in self.layers:
            raise ValueError(f"two layers of a chain have the name {name!r}")
        self.layers[name] = layer

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, terms = self._walk(x, context)
        counted = [term for term in terms.values() if term is not None]
        return x, reduce(torch.add, counted) if counted else x.new_zeros(x.shape[0])

    def walk(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """f(x), and the log-det of every layer under its name."""
        x, terms = self._walk(x, context)
        return x, {name: x.new_zeros(x.shape[0]) if term is None else term for name, term in terms.items()}

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        stream = _Stream(y)
        for layer in reversed(self):
            if type(layer) is Coupling and not layer.at_once(y, context):  # a subclass may do something else
                stream.parts = layer.uncouple(*stream.split(layer.partition), context)
            else:
                stream = _Stream(layer.inverse(stream.whole(), context))
        return stream.whole()

    def _walk(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, dict[str, Tensor | None]]:
        """f(x) and the terms, None where a layer keeps volume; between couplings x stays apart in its two parts."""
        terms: dict[str, Tensor | None] = {}
        stream = _Stream(x)
        for name, layer in self.layers.items():
            if type(layer) is Coupling and not layer.at_once(x, context):  # a subclass may do something else
                y1, y2, terms[name] = layer.couple(*stream.split(layer.partition), context)
                stream.parts = y1, y2
            else:
                x, terms[name] = layer(stream.whole(), context)
                stream = _Stream(x)
        return stream.whole(), terms

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Bijection]:
        return iter(self.layers.values())  # type: ignore[arg-type]

    def __reversed__(self) -> Iterator[Bijection]:
        return reversed(list(self))

    def __getitem__(self, part: slice) -> Chain:
        return Chain(dict(list(self.layers.items())[part]))  # type: ignore[arg-type]


class _Stream:
    """x, whole, or in the parts that the last coupling left it in, so that the next need not split it again."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.partition: Partition | None = None
        self.parts: tuple[Tensor, Tensor]

    def split(self, partition: Partition) -> tuple[Tensor, Tensor]:
        before, self.partition = self.partition, partition
        if before is None:
            self.parts = partition.split(self.x)
        elif partition.i1 is before.i2 and partition.i2 is before.i1:  # as `swap` leaves them
            self.parts = self.parts[1], self.parts[0]
        elif partition is not before:
            self.parts = partition.split(before.merge(*self.parts))
        return self.parts

    def whole(self) -> Tensor:
        return self.x if self.partition is None else self.partition.merge(*self.parts)
