"""What a layer is (NICE §3.1)."""

from __future__ import annotations

from abc import ABC, abstractmethod

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
