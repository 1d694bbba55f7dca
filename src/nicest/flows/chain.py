"""How layers compose (NICE §3.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from nicest.flows.bijection import Bijection


class Chain(Bijection):
    """Layers in the order data meets them: f = f_L ∘ ... ∘ f_1 (NICE §3.1).

    log |det df/dx| = Σ_l log |det df_l/dh_(l-1)|. Takes layers, which are named by their position and class, and
    mappings of names to layers.
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

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        for layer in reversed(self):
            y = layer.inverse(y, context)
        return y

    def inverse_and_log_det(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = y.new_zeros(len(y))
        for layer in reversed(self):
            y, log_det = layer.inverse_and_log_det(y, context)
            total = total + log_det
        return y, total

    def walk(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        terms: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            x, inner = layer.walk(x, context)  # type: ignore[operator]
            terms |= {"_".join(filter(None, (name, key))): term for key, term in inner.items()}
        return x, terms

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Bijection]:
        return iter(self.layers.values())  # type: ignore[arg-type]

    def __reversed__(self) -> Iterator[Bijection]:
        return reversed(list(self))
