"""The contract of a layer (NICE §3.1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]


class Bijection(nn.Module, ABC):
    """An invertible map f of R^D with a tractable Jacobian determinant.

    To write one, define `forward` and `inverse`. Do not mutate arguments and do not cache. Set `dim` in the constructor
    if the layer works for one D only. Then add one line to the zoo in `tests/flows/zoo.py`, which tests its properties.

    The base class checks shapes around both methods: x and y are (B, D), log-determinants are (B,).

    Attributes
    ----------
    dim : int or None
        Number of features D; None if the layer accepts any number.
    elementwise : bool
        True if every y_d is an increasing function of x_d alone.
    whitens : bool
        True if the layer is fitted so that its outputs are uncorrelated with variance 1.
    """

    dim: int | None = None
    elementwise = False
    whitens = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in {"forward", "inverse"} & vars(cls).keys():
            setattr(cls, name, _checked(vars(cls)[name]))

    @abstractmethod
    def forward(self, x: Tensor, context: Tensor | None = None) -> Pair:
        """Map data towards the latent space.

        Parameters
        ----------
        x : Tensor of shape (B, D)
        context : Tensor of shape (B, C), optional
            What the map is conditioned on.

        Returns
        -------
        y : Tensor of shape (B, D)
        log_det : Tensor of shape (B,)
            log |det dy/dx|, in the dtype and on the device of x.
        """

    @abstractmethod
    def inverse(self, y: Tensor, context: Tensor | None = None) -> Pair:
        """Map latents towards the data: the inverse of `forward` at the same context.

        Returns
        -------
        x : Tensor of shape (B, D)
        log_det : Tensor of shape (B,)
            log |det dx/dy|.
        """

    def initialise(self, x: Tensor, context: Tensor | None = None) -> None:
        """Set the layer's data-dependent start from rows x; the default has none."""


def _checked(method: Callable[..., Pair]) -> Callable[..., Pair]:
    """Wrap `forward` or `inverse` with checks of the shapes that go in and come out."""

    @wraps(method)
    def check(self: Bijection, x: Tensor, context: Tensor | None = None) -> Pair:
        name = type(self).__name__
        if x.ndim != 2:
            raise ValueError(f"{name}: expected rows (B, D), got shape {tuple(x.shape)}")
        if self.dim is not None and x.shape[1] != self.dim:
            raise ValueError(f"{name}: expected {self.dim} features, got {x.shape[1]}")
        y, log_det = method(self, x, context)
        if y.shape != x.shape or log_det.shape != x.shape[:1]:
            raise ValueError(
                f"{name}.{method.__name__} must return shapes {tuple(x.shape)} and {tuple(x.shape[:1])},"
                f" got {tuple(y.shape)} and {tuple(log_det.shape)}"
            )
        return y, log_det

    return check


def check_context(context: Tensor | None, expected: int) -> None:
    """Raise ValueError unless the context has the expected number of features (0 for none)."""
    if (got := 0 if context is None else context.shape[-1]) != expected:
        raise ValueError(f"expected a context of {expected} numbers, got {got or 'none'}")
