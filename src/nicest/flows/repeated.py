"""Rows that differ in nothing that a coupling function reads: it is computed once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

_runs = 1  # rows that follow each other and differ in nothing that a coupling function reads


@contextmanager
def repeated(n: int) -> Iterator[None]:
    """Inside, rows come n at a time that differ in nothing that a coupling function reads: it is computed once."""
    global _runs
    before, _runs = _runs, n
    try:
        yield
    finally:
        _runs = before


def once(network: Callable[..., Tensor], x1: Tensor, context: Tensor | None) -> Tensor:
    """A network at x1, computed once for rows that are `repeated`."""
    n = _runs
    inputs = [each[::n] if n > 1 else each for each in (x1, context) if each is not None]
    b = network(*inputs)
    return b.repeat_interleave(n, 0) if n > 1 else b
