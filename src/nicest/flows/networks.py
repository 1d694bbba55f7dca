"""Coupling functions m (NICE §5.1): deep rectified networks with linear output units."""

from __future__ import annotations

from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from nicest.flows import shares
from nicest.flows.reduced import Buffers, rectified, shifted

Initialisation = Literal["torch", "uniform", "zero-last"]


class MLP(nn.Module):
    """m: R^inputs -> R^outputs, `hidden` rectified layers and a linear one (NICE §5.1).

    `context_dim` numbers of context, where given, stand beside the inputs. `dropout` follows every rectifier.
    `initialisation`: "torch" is torch's own for linear layers; "uniform" is the authors' code, weights
    U(-0.01, 0.01) and biases 0; "zero-last" is torch's with the last layer 0, so that a coupling starts as identity.
    Hooks of the layers inside do not run, those of the MLP do.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        hidden: tuple[int, ...] = (1000, 1000, 1000, 1000, 1000),
        *,
        context_dim: int = 0,
        dropout: float = 0.0,
        initialisation: Initialisation = "torch",
    ) -> None:
        super().__init__()
        if initialisation not in get_args(Initialisation):
            raise ValueError(f"initialisation is one of {get_args(Initialisation)}, got {initialisation!r}")
        layers: list[nn.Module] = []
        width = inputs + context_dim
        for units in hidden:
            layers += [nn.Linear(width, units), nn.ReLU()]
            layers += [nn.Dropout(dropout)] if dropout else []
            width = units
        last = nn.Linear(width, outputs)
        self.layers = nn.Sequential(*layers, last)
        self.dropout = dropout
        self.buffers_in_use: Buffers | None = None  # of whoever writes copies of the weights for `reduced`
        self.register_load_state_dict_post_hook(_forget)
        if initialisation == "uniform":
            for name, parameter in self.named_parameters():
                nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.uniform_(parameter, -0.01, 0.01)
        elif initialisation == "zero-last":
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    @property
    def linears(self) -> list[nn.Linear]:
        return [layer for layer in self.layers if isinstance(layer, nn.Linear)]

    def forward(self, x1: Tensor, context: Tensor | None = None) -> Tensor:
        *hidden, last = self.linears
        x = _beside(x1, context)
        for layer in hidden:  # without the layers' own calls, each of which costs as much as a small product
            x = functional.linear(x, layer.weight, layer.bias).relu_()
            if self.dropout and self.training:
                x = shares.dropout(x, self.dropout)
        return functional.linear(x, last.weight, last.bias)

    def reduced(self, x1: Tensor, context: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """x1 rounded to a grid, and m of it, computed in `dtype`: see `flows/reduced.py`."""
        x, b = rectified(
            _beside(x1, context), *self._parts(), dtype, dropout=self._dropout, buffers=self.buffers_in_use
        )
        return x[:, : x1.shape[1]], b

    def reduced_shift(self, x: Tensor, layout: tuple[bool, bool, int], sign: int, dtype: torch.dtype) -> Tensor:
        """A whole additive coupling with this network, on a GPU: see `flows/reduced.py`."""
        return shifted(x, layout, sign, *self._parts(), dtype, dropout=self._dropout, buffers=self.buffers_in_use)

    def _parts(self) -> tuple[list[Tensor], list[Tensor]]:
        linears = self.linears
        return [layer.weight for layer in linears], [layer.bias for layer in linears]

    def _apply(self, *arguments: Any, **options: Any) -> Self:
        _forget(self)
        return super()._apply(*arguments, **options)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"buffers_in_use": None}

    @property
    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0


def _forget(network: MLP, *_: Any) -> None:
    """Weights that are moved, copied or loaded leave the copies that were made of them behind."""
    network.buffers_in_use = None


def _beside(x1: Tensor, context: Tensor | None) -> Tensor:
    return x1 if context is None else torch.cat((x1, context.to(x1.dtype)), dim=-1)
