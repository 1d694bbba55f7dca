"""Coupling layers: how components are partitioned, and the layer itself (NICE §3.2)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nicest.flows.bijection import Bijection, check_features
from nicest.flows.laws import Law
from nicest.flows.repeated import once


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


def channels(count: int, height: int, width: int) -> Partition:
    """I1 the first half of the channels of an image (the larger, for an odd number), I2 the second."""
    plane = height * width
    return Partition(range((count + 1) // 2 * plane), count * plane)


class Coupling(Bijection):
    """A coupling layer with coupling function m and coupling law g (NICE §3.2, eq. 3 and 4).

        y_I1 = x_I1                    x_I1 = y_I1
        y_I2 = g(x_I2; m(x_I1))        x_I2 = g⁻¹(y_I2; m(y_I1))
        log |det dy/dx| = log |det dg/dx_I2|

    m is `network`: any module from |I1| numbers to law.size · |I2|, called as network(x_I1), or
    network(x_I1, context) where a context is given.
    """

    def __init__(self, partition: Partition, law: Law, network: nn.Module) -> None:
        super().__init__()
        self.partition, self.law, self.network = partition, law, network

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x1, x2 = self.partition.split(x)
        y2, log_det = self.law.forward(x2, self.m(x1, context))
        return self.partition.merge(x1, y2), log_det

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        y1, y2 = self.partition.split(y)
        return self.partition.merge(y1, self.law.inverse(y2, self.m(y1, context)))

    def inverse_and_log_det(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y1, y2 = self.partition.split(y)
        b = self.m(y1, context)
        x2 = self.law.inverse(y2, b)
        return self.partition.merge(y1, x2), self.law.forward(x2, b)[1]

    def m(self, x1: Tensor, context: Tensor | None = None) -> Tensor:
        """The coupling function at x_I1."""
        return self.checked(x1, once(self.network, x1, context))

    def checked(self, x1: Tensor, b: Tensor) -> Tensor:
        """What a network gave for x_I1, if it has the right shape, in the dtype of x_I1."""
        expected = (x1.shape[0], self.law.size * len(self.partition.i2))
        if b.shape != expected:
            raise ValueError(f"the coupling network must give {expected}, got {tuple(b.shape)}")
        return b.to(x1.dtype)

    def extra_repr(self) -> str:
        return str(self.law)
