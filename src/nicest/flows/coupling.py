"""Coupling layers: partitions, laws, and the layer itself (NICE §3.2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nicest.flows.bijection import Bijection, check_features


class Partition(nn.Module):
    """Two sets of components, I1 that a coupling reads and I2 that it changes, which together make 0..D-1.

    Components are counted from 0 here and from 1 in the paper: its odd components are our 0, 2, 4, ...
    A set with a constant stride is kept as a slice, so that splitting is a view and costs nothing; any other is an
    index on the device of the flow.
    """

    select1: slice | Tensor
    select2: slice | Tensor

    def __init__(self, i1: Iterable[int], dim: int) -> None:
        super().__init__()
        read = sorted(i1)
        changed = sorted(set(range(dim)) - set(read))
        if len(set(read)) != len(read) or not read or not changed or read[0] < 0 or read[-1] >= dim:
            raise ValueError(
                f"I1 and I2 must be two non-empty sets that make 0..{dim - 1}: I1 has {len(read)} entries"
                f" ({len(set(read))} distinct), which leaves {len(changed)} for I2"
            )
        self.dim, self.i1, self.i2 = dim, tuple(read), tuple(changed)
        for name, indices in (("select1", self.i1), ("select2", self.i2)):
            stride = indices[1] - indices[0] if len(indices) > 1 else 1
            if tuple(range(indices[0], indices[-1] + 1, stride)) == indices:
                setattr(self, name, slice(indices[0], indices[-1] + 1, stride))
            else:
                self.register_buffer(name, torch.tensor(indices), persistent=False)

    def swap(self) -> Partition:
        """The same two sets with their roles exchanged, for the next layer (NICE §3.2)."""
        return Partition(self.i2, self.dim)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x_I1 and x_I2."""
        check_features(x, self.dim)
        return x[:, self.select1], x[:, self.select2]

    def merge(self, x1: Tensor, x2: Tensor) -> Tensor:
        """The x whose parts are x_I1 and x_I2."""
        x = x1.new_empty(x1.shape[0], self.dim)
        x[:, self.select1] = x1
        x[:, self.select2] = x2
        return x

    def extra_repr(self) -> str:
        return f"reads {len(self.i1)} of {self.dim}, changes {len(self.i2)}"


def odd_even(dim: int) -> Partition:
    """I1 the odd components as the paper counts them (0, 2, 4, ... here), I2 the even ones (NICE §5.1)."""
    return Partition(range(0, dim, 2), dim)


def halves(dim: int) -> Partition:
    """I1 the first half (the larger, for odd D), I2 the second."""
    return Partition(range((dim + 1) // 2), dim)


def checkerboard(height: int, width: int, channels: int = 1) -> Partition:
    """I1 the pixels whose row plus column is even, in every channel of a channel-planar image, I2 the others."""
    plane = height * width
    white = [r * width + c for r in range(height) for c in range(width) if (r + c) % 2 == 0]
    return Partition([k * plane + i for k in range(channels) for i in white], channels * plane)


class Law(ABC):
    """A coupling law g(a; b), invertible in a given b (NICE §3.2); b has `size` numbers for each of a's."""

    size: int = 1

    @abstractmethod
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """g(a; b) and log |det dg/da|, which is (B,)."""

    @abstractmethod
    def inverse(self, y: Tensor, b: Tensor) -> Tensor:
        """The a with g(a; b) = y."""


@dataclass(frozen=True)
class Additive(Law):
    """g(a; b) = a + b, with unit Jacobian determinant (NICE §3.2, additive coupling layer)."""

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a + b, a.new_zeros(a.shape[0])

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

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        b1, b2 = b.chunk(2, dim=-1)
        y, log_det = Multiplicative(self.bound).forward(a, b1)
        return y + b2, log_det

    def inverse(self, y: Tensor, b: Tensor) -> Tensor:
        b1, b2 = b.chunk(2, dim=-1)
        return Multiplicative(self.bound).inverse(y - b2, b1)


class Coupling(Bijection):
    """A coupling layer with coupling function m and coupling law g (NICE §3.2, eq. 3 and 4).

        y_I1 = x_I1                    x_I1 = y_I1
        y_I2 = g(x_I2; m(x_I1))        x_I2 = g⁻¹(y_I2; m(y_I1))
        log |det dy/dx| = log |det dg/dx_I2|

    m is `network`: any module from |I1| numbers to law.size · |I2|, called as network(x_I1), or
    network(x_I1, context) where a context is given. `precision`, if set, is the dtype m alone computes in; the
    stream x -> y and the log-dets keep theirs.
    """

    def __init__(self, partition: Partition, law: Law, network: nn.Module) -> None:
        super().__init__()
        self.partition, self.law, self.network = partition, law, network
        self.precision: torch.dtype | None = None

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x1, x2 = self.partition.split(x)
        y2, log_det = self.law.forward(x2, self.m(x1, context))
        return self.partition.merge(x1, y2), log_det

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        y1, y2 = self.partition.split(y)
        return self.partition.merge(y1, self.law.inverse(y2, self.m(y1, context)))

    def m(self, x1: Tensor, context: Tensor | None = None) -> Tensor:
        """The coupling function at x_I1, in the dtype of x_I1."""
        inputs = (x1,) if context is None else (x1, context)
        if self.precision is None:
            b = self.network(*inputs)
        else:
            with torch.autocast(x1.device.type, self.precision):
                b = self.network(*inputs)
        expected = (x1.shape[0], self.law.size * len(self.partition.i2))
        if b.shape != expected:
            raise ValueError(f"the coupling network must give {expected}, got {tuple(b.shape)}")
        return b.to(x1.dtype)

    def extra_repr(self) -> str:
        return str(self.law)
