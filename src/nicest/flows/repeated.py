"""Rows that differ in nothing that a coupling function reads: it is computed once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

Network = Callable[..., Tensor]


class Repetition(NamedTuple):
    """How many rows that follow each other are the same to a coupling function, and what such functions gave."""

    n: int = 1
    known: dict[Network, Tensor] | None = None


ALONE = Repetition()
_repetition = ContextVar("repetition", default=ALONE)  # each thread has its own


@contextmanager
def repeated(n: int, known: dict[Network, Tensor] | None = None) -> Iterator[None]:
    """Inside, rows come n at a time that differ in nothing that a coupling function reads: it is computed once.

    With a dictionary `known`, results are kept in it, and are taken from it the next time: use it for the same rows
    and the same weights alone.
    """
    token = _repetition.set(Repetition(n, known))
    try:
        yield
    finally:
        _repetition.reset(token)


def once(network: Network, x1: Tensor, context: Tensor | None) -> Tensor:
    """A network at x1, computed once for rows that are `repeated`."""
    if torch.compiler.is_compiling():
        return network(x1) if context is None else network(x1, context)
    n, known = _repetition.get()
    if known is None or network not in known:
        b = network(*(each[::n] if n > 1 else each for each in (x1, context) if each is not None))
        if known is not None:
            known[network] = b
    else:
        b = known[network]
    return b.repeat_interleave(n, 0) if n > 1 else b
