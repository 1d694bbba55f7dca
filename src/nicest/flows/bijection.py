"""What a layer is, and how layers compose (NICE §3.1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

from torch import Tensor, nn


def check_features(x: Tensor, dim: int) -> None:
    """Refuse x of another number of features than dim, also where it would broadcast."""
    if x.shape[-1] != dim:
        raise ValueError(f"expected {dim} features, got {x.shape[-1]}")


class Bijection(nn.Module, ABC):
    """An invertible map of R^D whose Jacobian determinant is easy to compute.

    `y, log_det = layer(x)` goes from data to latent, the paper's encoder f; `layer.inverse(y)` goes back and
    returns x alone. x and y are (B, D); log_det = log |det dy/dx| is (B,), in the dtype and on the device of x.

    Implementing a bijection: write `forward` and `inverse`, mutate no argument, cache nothing, and add one line to
    the zoo in `tests/flows/zoo.py`; its properties are then tested. Only coupling networks look at `context`.
    """

    @abstractmethod
    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor: ...


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
        x, terms = self.walk(x, context)
        return x, sum(terms.values(), start=x.new_zeros(x.shape[0]))

    def walk(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """f(x), and the log-det of every layer under its name."""
        terms = {}
        for name, layer in self.layers.items():
            x, terms[name] = layer(x, context)
        return x, terms

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        for layer in reversed(self):
            y = layer.inverse(y, context)
        return y

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Bijection]:
        return iter(self.layers.values())  # type: ignore[arg-type]

    def __reversed__(self) -> Iterator[Bijection]:
        return reversed(list(self))

    def __getitem__(self, part: slice) -> Chain:
        return Chain(dict(list(self.layers.items())[part]))  # type: ignore[arg-type]
