"""Batches that several processes share: each draws the random numbers of the whole batch, and keeps those of its rows.

So what a row meets does not depend on how many processes there are, nor does the state of the random numbers after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Share:
    """Every `size`-th row of a batch, from the row `rank` on: what one of `size` processes has of it."""

    rank: int = 0
    size: int = 1

    def rows(self, batch: Tensor) -> Tensor:
        """The own rows of a whole batch."""
        return batch[self.rank :: self.size]

    @contextmanager
    def of(self, total: int, *, copies: int = 1) -> Iterator[None]:
        """Inside, what a flow is given are the own rows of a batch of `total`, and so many copies of them, which meet
        the same random numbers.
        """
        global _held
        before = _held
        _held = (self, total, copies) if self.size > 1 or copies > 1 else None
        try:
            yield
        finally:
            _held = before


_held: tuple[Share, int, int] | None = None  # the share this process has now, of how many rows, and how often


def whole(n: int) -> int:
    """How many rows the batch has of which n are here."""
    return n if _held is None else _held[1]


def own(drawn: Tensor) -> Tensor:
    """The rows that belong to those which are here, of what was drawn for the whole batch."""
    if _held is None:
        return drawn
    share, _, copies = _held
    return share.rows(drawn).repeat(copies, *(1,) * (drawn.ndim - 1))


class Dropout(nn.Dropout):
    """torch's dropout of the whole batch, for the rows x that are here."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training else x


def dropout(x: Tensor, p: float, *, inplace: bool = False) -> Tensor:
    """Torch's dropout of the whole batch, for the rows x that are here. A CPU rounds p to 1 / 65536."""
    if not p:
        return x
    if x.device.type == "cpu":
        kept = own(_kept(x.new_empty(whole(len(x)), *x.shape[1:]), p))
    elif _held is None:
        return functional.dropout(x, p, inplace=inplace)
    else:
        kept = own(functional.dropout(x.new_ones(whole(len(x)), *x.shape[1:]), p, inplace=inplace))
    return x.mul_(kept) if inplace else x * kept


def scale(p: float) -> float:
    """The factor of the numbers that dropout keeps, on a CPU."""
    return 2**16 / (2**16 - _dropped(p)) if p < 1 else 0.0


def _dropped(p: float) -> int:
    """How many of 65,536 numbers are dropped: never all."""
    return min(round(p * 2**16), 2**16 - 1)


def _kept(out: Tensor, p: float) -> Tensor:
    """out, filled with `scale(p)`, and with 0 where 16 random bits say so, for a share p of its numbers.

    That takes a third of the time of torch's own dropout.
    """
    bits = torch.empty(-(-out.numel() // 4), dtype=torch.int64, device=out.device).random_(-(2**63), None)
    torch.ge(bits.view(torch.int16)[: out.numel()].view(out.shape), _dropped(p) - 2**15, out=out)
    return out.mul_(scale(p))
