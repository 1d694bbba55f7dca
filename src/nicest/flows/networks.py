"""Coupling functions m: deep rectified networks with linear output units (NICE §5.1), plain and residual."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from nicest.flows.bijection import check_context
from nicest.flows.noise import Dropout

Initialisation = Literal["torch", "uniform", "zero-last"]


class MLP(nn.Module):
    """m: R^inputs -> R^outputs, `hidden` rectified layers and a linear one (NICE §5.1).

    `context_dim` numbers of context, where given, stand beside the inputs. `dropout` follows every rectifier.
    `initialisation`: "torch" is torch's own for linear layers; "uniform" is the authors' code, weights
    U(-0.01, 0.01) and biases 0; "zero-last" is torch's with the last layer 0, so that a coupling starts as identity.
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
        layers: list[nn.Module] = []
        self.context_dim, width = context_dim, inputs + context_dim
        for units in hidden:
            layers += [nn.Linear(width, units), nn.ReLU(inplace=True)]
            layers += [Dropout(dropout)] if dropout else []
            width = units
        last = nn.Linear(width, outputs)
        self.layers = nn.Sequential(*layers, last)
        _initialise(self, last, initialisation)

    def forward(self, x1: Tensor, context: Tensor | None = None) -> Tensor:
        x: Tensor = self.layers(with_context(x1, context, self.context_dim))
        return x


class ResidualMLP(nn.Module):
    """m: R^inputs -> R^outputs, `blocks` blocks h + W₂ relu(W₁ relu(h)) between two linear layers (He et al. 2016).

    `dropout` stands before W₂. The other settings are those of `MLP`.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        width: int = 128,
        blocks: int = 2,
        *,
        context_dim: int = 0,
        dropout: float = 0.0,
        initialisation: Initialisation = "zero-last",
    ) -> None:
        super().__init__()
        self.context_dim = context_dim
        self.first = nn.Linear(inputs + context_dim, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), Dropout(dropout), nn.Linear(width, width))
            for _ in range(blocks)
        )
        self.last = nn.Linear(width, outputs)
        _initialise(self, self.last, initialisation)

    def forward(self, x1: Tensor, context: Tensor | None = None) -> Tensor:
        h = self.first(with_context(x1, context, self.context_dim))
        for block in self.blocks:
            h = h + block(h)
        b: Tensor = self.last(h.relu())
        return b


class OneHot(nn.Module):
    """Labels (B, 1), of 0..classes-1, as rows (B, classes) of zeros with a one: the context of a label."""

    values: Tensor

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.register_buffer("values", torch.arange(float(classes)), persistent=False)

    def forward(self, label: Tensor) -> Tensor:
        return (label == self.values).to(label.dtype)

    def extra_repr(self) -> str:
        return f"{len(self.values)} labels"


def with_context(x1: Tensor, context: Tensor | None, expected: int) -> Tensor:
    """Concatenate x_I1 with its context, which must have the expected number of features (0 for none)."""
    check_context(context, expected)
    return x1 if context is None else torch.cat((x1, context.to(x1.dtype)), -1)


def _initialise(network: nn.Module, last: nn.Linear, initialisation: Initialisation) -> None:
    if initialisation not in get_args(Initialisation):
        raise ValueError(f"initialisation is one of {get_args(Initialisation)}, got {initialisation!r}")
    if initialisation == "uniform":
        for name, parameter in network.named_parameters():
            nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.uniform_(parameter, -0.01, 0.01)
    elif initialisation == "zero-last":
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
