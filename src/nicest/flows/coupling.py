"""Coupling layers: partitions of the components, and the layer itself (NICE §3.2)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nicest.flows.bijection import Bijection
from nicest.flows.laws import Law


class Partition(nn.Module):
    """A split of the components 0..D-1 into I1, which a coupling reads, and I2, which it changes.

    Components are counted from 0 here and from 1 in the paper: its odd components are our 0, 2, 4, ... Alternating
    sets, and a first and a last part, are split without a copy and merged in one pass over memory; any other set is
    gathered by an index.
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
        """Return whether the sets alternate, whether I2 has component 0, and the size of the set that has it."""
        return self.interleaved, self.turned, len(self.i2 if self.turned else self.i1)

    def swap(self) -> Partition:
        """Exchange the roles of the two sets, for the next layer (NICE §3.2)."""
        swapped = Partition(self.i2, self.dim)
        swapped.i1, swapped.i2 = self.i2, self.i1  # the same tuples, so that comparing them is fast
        return swapped

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split x into x_I1 and x_I2."""
        if not self.regular:
            x1, x2 = x[:, self.order].split((len(self.i1), len(self.i2)), -1)
            return x1, x2
        if self.interleaved:
            first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        else:
            first, second = x.tensor_split((len(self.i2 if self.turned else self.i1),), -1)
        return (second, first) if self.turned else (first, second)

    def merge(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Merge the two parts (inverse of `split`)."""
        if not self.regular:
            return torch.cat((x1, x2), -1)[:, self.back]
        parts = (x2, x1) if self.turned else (x1, x2)
        return torch.stack(parts, -1).flatten(-2) if self.interleaved else torch.cat(parts, -1)

    def extra_repr(self) -> str:
        return f"reads {len(self.i1)} of {self.dim}, changes {len(self.i2)}"


def odd_even(dim: int) -> Partition:
    """Split by parity: I1 holds the odd components as the paper counts them (0, 2, 4, ... here) (NICE §5.1)."""
    return Partition(range(0, dim, 2), dim)


def halves(dim: int) -> Partition:
    """Split in halves; I1 is the first, and the larger one for odd D."""
    return Partition(range((dim + 1) // 2), dim)


def checkerboard(height: int, width: int, channels: int = 1) -> Partition:
    """Split the pixels of a channel-planar image; I1 holds those whose row plus column is even, in every channel."""
    plane = height * width
    white = [r * width + c for r in range(height) for c in range(width) if (r + c) % 2 == 0]
    return Partition([k * plane + i for k in range(channels) for i in white], channels * plane)


def channels(count: int, height: int, width: int) -> Partition:
    """Split the channels of an image in halves; I1 is the first, and the larger one for an odd number."""
    plane = height * width
    return Partition(range((count + 1) // 2 * plane), count * plane)


class Coupling(Bijection):
    """A coupling layer with coupling function m and coupling law g (NICE §3.2, eq. 3 and 4).

        y_I1 = x_I1                    x_I1 = y_I1
        y_I2 = g(x_I2; m(x_I1))        x_I2 = g⁻¹(y_I2; m(y_I1))
        log |det dy/dx| = Σ log dg/dx_I2

    Parameters
    ----------
    partition : Partition
        The sets I1 and I2.
    law : Law
        The coupling law g.
    network : nn.Module
        The coupling function m. It is called as network(x_I1), or as network(x_I1, context) if there is a context, and
        returns (B, |I2| · law.size): `size` consecutive numbers for every component of I2.
    """

    def __init__(self, partition: Partition, law: Law, network: nn.Module) -> None:
        super().__init__()
        self.dim, self.partition, self.law, self.network = partition.dim, partition, law, network

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x1, x2 = self.partition.split(x)
        y2, log_slope = self.law.forward(x2, self.m(x1, context))
        return self.partition.merge(x1, y2), log_slope.sum(-1)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y1, y2 = self.partition.split(y)
        x2, log_slope = self.law.inverse(y2, self.m(y1, context))
        return self.partition.merge(y1, x2), log_slope.sum(-1)

    def m(self, x1: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the parameters of the law at x_I1, (B, |I2|, size)."""
        b: Tensor = self.network(x1) if context is None else self.network(x1, context)
        expected = (len(x1), len(self.partition.i2) * self.law.size)
        if b.shape != expected:
            raise ValueError(f"the coupling network must return {expected}, got {tuple(b.shape)}")
        return b.to(x1.dtype).unflatten(1, (-1, self.law.size))

    def extra_repr(self) -> str:
        return str(self.law)
