"""Coupling laws g(a; b): what a coupling layer does to the components it changes (NICE §3.2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class Law(ABC):
    """A coupling law g(a; b), invertible in a for every b; b holds `size` numbers for each number of a.

    g(a; 0) = a: a coupling whose network gives 0 is the identity. To add a law, write a frozen dataclass, whose
    fields are its settings in a recipe, and one line in `LAWS`; the zoo of the tests then holds it to all this.
    """

    size: int = 1

    @abstractmethod
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """g(a; b) and log |det dg/da|, (B,)."""

    @abstractmethod
    def inverse(self, y: Tensor, b: Tensor) -> Tensor:
        """The a with g(a; b) = y."""


@dataclass(frozen=True)
class Additive(Law):
    """g(a; b) = a + b, with unit Jacobian determinant (NICE §3.2, additive coupling layer)."""

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a + b, a.new_zeros(len(a))

    def inverse(self, y: Tensor, b: Tensor) -> Tensor:
        return y - b


@dataclass(frozen=True)
class Multiplicative(Law):
    """g(a; b) = a ⊙ exp(l(b)), l(b) = bound · tanh(b / bound); log det = Σ l(b) (NICE §3.2, multiplicative law).

    DIFFERS: the paper asks for a factor b ≠ 0 and leaves it there. Ours is exp(l), never zero, equal to 1 where
    the network gives 0, and |l| < bound keeps one layer from scaling by more than e^±bound: no overflow, no NaN.
    """

    bound: float = 2.0

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise ValueError(f"expected a positive bound, got {self.bound}")

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        log_scale = self.log_scale(b)
        return a * log_scale.exp(), log_scale.sum(-1)

    def inverse(self, y: Tensor, b: Tensor) -> Tensor:
        return y * torch.exp(-self.log_scale(b))

    def log_scale(self, b: Tensor) -> Tensor:
        return self.bound * torch.tanh(b / self.bound)


@dataclass(frozen=True)
class Affine(Law):
    """g(a; b) = a ⊙ exp(l(b1)) + b2 with b = (b1, b2); log det = Σ l(b1) (NICE §3.2, affine law).

    The factor is bounded as in `Multiplicative`, and for the same reason.
    """

    bound: float = 2.0
    size = 2

    def __post_init__(self) -> None:
        Multiplicative(self.bound)  # which refuses a bound that is not positive

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        b1, b2 = b.chunk(2, dim=-1)
        y, log_det = Multiplicative(self.bound).forward(a, b1)
        return y + b2, log_det

    def inverse(self, y: Tensor, b: Tensor) -> Tensor:
        b1, b2 = b.chunk(2, dim=-1)
        return Multiplicative(self.bound).inverse(y - b2, b1)


LAWS: dict[str, type[Law]] = {"additive": Additive, "multiplicative": Multiplicative, "affine": Affine}
