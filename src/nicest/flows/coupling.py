"""Coupling layers: partitions, laws, and the layer itself (NICE §3.2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nicest.flows.bijection import Bijection, check_features
from nicest.flows.gpu import kernels_for
from nicest.flows.networks import MLP


class Partition(nn.Module):
    """Two sets of components, I1 that a coupling reads and I2 that it changes, which together make 0..D-1.

    Components are counted from 0 here and from 1 in the paper: its odd components are our 0, 2, 4, ...
    Every other component, and a first or last part, are split off as views and put together in one pass over memory,
    forward and backward; any other set takes an index on the device of the flow.
    """

    order: Tensor
    back: Tensor

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
        self.turned = self.i1[0] > self.i2[0]  # I2 has component 0
        first = self.i2 if self.turned else self.i1
        self.interleaved = dim % 2 == 0 and first == tuple(range(0, dim, 2))
        self.regular = self.interleaved or first == tuple(range(len(first)))
        if not self.regular:
            order = torch.tensor(self.i1 + self.i2)
            self.register_buffer("order", order, persistent=False)
            self.register_buffer("back", order.argsort(), persistent=False)

    @property
    def layout(self) -> tuple[bool, bool, int]:
        """Of a regular partition: whether its sets alternate, whether I2 has component 0, and the size of that set."""
        return self.interleaved, self.turned, len(self.i2 if self.turned else self.i1)

    def swap(self) -> Partition:
        """The same two sets with their roles exchanged, for the next layer (NICE §3.2)."""
        swapped = Partition(self.i2, self.dim)
        swapped.i1, swapped.i2 = self.i2, self.i1  # the same objects, which are compared at once
        return swapped

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x_I1 and x_I2."""
        check_features(x, self.dim)
        if not self.regular:
            x1, x2 = x[:, self.order].split((len(self.i1), len(self.i2)), -1)
            return x1, x2
        if self.interleaved:
            first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        else:
            first, second = x.tensor_split((len(self.i2 if self.turned else self.i1),), -1)
        return (second, first) if self.turned else (first, second)

    def merge(self, x1: Tensor, x2: Tensor) -> Tensor:
        """The x whose parts are x_I1 and x_I2."""
        if not self.regular:
            return torch.cat((x1, x2), -1)[:, self.back]
        parts = (x2, x1) if self.turned else (x1, x2)
        return torch.stack(parts, -1).flatten(-2) if self.interleaved else torch.cat(parts, -1)

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
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor | None]:
        """g(a; b) and log |det dg/da|, which is (B,), or None for a law that keeps volume."""

    @abstractmethod
    def inverse(self, y: Tensor, b: Tensor) -> Tensor:
        """The a with g(a; b) = y."""


@dataclass(frozen=True)
class Additive(Law):
    """g(a; b) = a + b, with unit Jacobian determinant (NICE §3.2, additive coupling layer)."""

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, None]:
        return a + b, None

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
    stream x -> y and the log-dets keep theirs. An `MLP` in reduced precision puts the numbers it reads, and those it
    gives, on a grid of 2^-17, so that a stack of additive couplings undoes itself (`flows/reduced.py`).
    """

    def __init__(self, partition: Partition, law: Law, network: nn.Module) -> None:
        super().__init__()
        self.partition, self.law, self.network = partition, law, network
        self.precision: torch.dtype | None = None

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.at_once(x, context):
            return self._shift(x, 1), x.new_zeros(len(x))
        y1, y2, log_det = self.couple(*self.partition.split(x), context)
        return self.partition.merge(y1, y2), x.new_zeros(len(x)) if log_det is None else log_det

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        if self.at_once(y, context):
            return self._shift(y, -1)
        return self.partition.merge(*self.uncouple(*self.partition.split(y), context))

    def couple(self, x1: Tensor, x2: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """y_I1, y_I2 and the log-det, None for 0."""
        x1, b = self.read(x1, context)
        return x1, *self.law.forward(x2, b)

    def uncouple(self, y1: Tensor, y2: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """x_I1 and x_I2."""
        y1, b = self.read(y1, context)
        return y1, self.law.inverse(y2, b)

    def m(self, x1: Tensor, context: Tensor | None = None) -> Tensor:
        """The coupling function at x_I1, in the dtype of x_I1."""
        return self.read(x1, context)[1]

    def read(self, x1: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x_I1 as m reads it, and m of it, both in the dtype of x_I1."""
        if self.precision is None:
            b = self.network(x1) if context is None else self.network(x1, context)
        elif isinstance(self.network, MLP):
            x1, b = self.network.reduced(x1, context, self.precision)
        else:
            with torch.autocast(x1.device.type, self.precision):
                b = self.network(x1) if context is None else self.network(x1, context)
        expected = (x1.shape[0], self.law.size * len(self.partition.i2))
        if b.shape != expected:
            raise ValueError(f"the coupling network must give {expected}, got {tuple(b.shape)}")
        return x1, b.to(x1.dtype)

    def at_once(self, x: Tensor, context: Tensor | None) -> bool:
        """Whether there is a kernel for the whole layer: additive, on a GPU, in reduced precision."""
        return (
            self.precision is not None
            and kernels_for(x) is not None
            and x.dtype == torch.float32
            and isinstance(self.law, Additive)
            and isinstance(self.network, MLP)
            and self.partition.regular
            and context is None
        )

    def _shift(self, x: Tensor, sign: int) -> Tensor:
        check_features(x, self.partition.dim)
        return self.network.reduced_shift(x, self.partition.layout, sign, self.precision)  # type: ignore[operator]

    def extra_repr(self) -> str:
        return str(self.law)
