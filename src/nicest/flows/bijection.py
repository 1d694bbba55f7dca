"""What a layer is (NICE §3.1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from torch import Tensor, nn


def check_features(x: Tensor, dim: int) -> None:
    """Refuse x of another number of features than dim, also where it would broadcast."""
    if x.shape[-1] != dim:
        raise ValueError(f"expected {dim} features, got {x.shape[-1]}")


def check_context(context: Tensor | None, expected: int) -> None:
    if (got := 0 if context is None else context.shape[-1]) != expected:
        raise ValueError(f"expected a context of {expected} numbers, got {got or 'none'}")


class Bijection(nn.Module, ABC):
    """An invertible map of R^D whose Jacobian determinant is easy to compute.

    `y, log_det = layer(x)` goes from data to latent, the paper's encoder f; `layer.inverse(y)` goes back and
    returns x alone. x and y are (B, D); log_det = log |det dy/dx| is (B,), in the dtype and on the device of x.

    To write one, define `forward` and `inverse`, mutate no argument, cache nothing, and add one line to the zoo in
    `tests/flows/zoo.py`: that tests its properties. Only coupling networks and `Elementwise` look at `context`.
    The other methods have defaults that are right for every layer.
    """

    whitens = False  # whether its output is uncorrelated, each dimension of variance 1
    fits_all_rows = False  # whether `fit` is given all rows, where some thousands are enough for most layers
    elementwise = False  # whether every y_d is an increasing function of x_d alone

    @abstractmethod
    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor: ...

    def inverse_and_log_det(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x = f⁻¹(y), and log |det dy/dx| there."""
        x = self.inverse(y, context)
        return x, self(x, context)[1]

    def walk(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """f(x), and the log-det of every layer inside by its name; that of a single layer has none."""
        y, log_det = self(x, context)
        return y, {"": log_det}

    def carry(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor] | None:
        """Mean and covariance of f(x) from those of x; None where they do not follow."""
        return None

    def fit(self, x: Tensor) -> Self:
        """Fit to rows x, (N, D), what is fitted before training, to be held or trained on; most layers have none."""
        return self
