"""The surprise of each pixel given all the others: exact conditionals, by the density along one axis at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nicest.errors import NicestError
from nicest.inference.engine import Engine

ALL = 64  # levels that are all looked at; of more, some
EVEN = 17  # of those, evenly spaced
ROWS = 2048  # that are scored at once


class Surprise(NamedTuple):
    """Of some dimensions of a row: -log p(x_d | all others), and its expectation, the entropy of x_d given them."""

    dims: Tensor
    nats: Tensor
    entropy: Tensor


def surprise(engine: Engine, row: Tensor, levels: int, *, rows: int = ROWS) -> Iterator[Surprise]:
    """Yield the surprise of every dimension of a row (D,) of levels, some dimensions at a time.

    p(x_d = l | others) = p(x with l in d) / Σ p(x with l' in d), each level at its middle. With up to 64 levels the sum
    is of all. With more it is a trapezoid rule whose nodes lie close together at the level of the row and at the most
    likely one, where alone the density is sharp: right to a tenth of a nat for Gaussians of any width.
    """
    if levels < 2:
        raise NicestError("this model is not of images with levels, whose conditionals can be summed")
    dims = torch.arange(len(row)).split(max(1, rows // (levels if levels <= ALL else 3 * EVEN)))
    for part in dims:
        own = row[part].long()[:, None]

        def scored(nodes: Tensor, part: Tensor = part) -> Tensor:
            x = row.expand(nodes.numel(), -1).clone()
            x[torch.arange(nodes.numel()), part.repeat_interleave(nodes.shape[1])] = nodes.flatten().to(row)
            each = list(engine.each("log_prob", x, noise=False))
            return torch.cat(each).double().cpu().view(nodes.shape)

        nodes, heights = _nodes(own, levels, scored)
        weights = _widths(nodes, levels)
        log_p = heights - torch.logsumexp(heights + weights.log(), 1, keepdim=True)
        expected = -(weights * log_p.exp() * torch.where(weights > 0, log_p, 0.0)).sum(1)
        yield Surprise(part, -log_p.gather(1, (nodes == own).long().argmax(1, keepdim=True))[:, 0], expected)


def _nodes(own: Tensor, levels: int, scored: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return levels (n, K) in increasing order, the row's own (n, 1) among them, and their log-densities."""
    if levels <= ALL:
        nodes = torch.arange(levels).expand(len(own), -1)
        return nodes, scored(nodes)
    steps = 2 ** torch.arange((levels - 1).bit_length())
    near = torch.cat((-steps.flip(0), steps))
    even = torch.linspace(0, levels - 1, EVEN).round().long().expand(len(own), -1)
    first = torch.cat((own, own + near, even), 1).clamp(0, levels - 1)
    heights = scored(first)
    peak = first.gather(1, heights.argmax(1, keepdim=True))
    second = (peak + near).clamp(0, levels - 1)
    nodes, order = torch.cat((first, second), 1).sort(1)
    return nodes, torch.cat((heights, scored(second)), 1).gather(1, order)


def _widths(nodes: Tensor, levels: int) -> Tensor:
    """Return how many levels each node stands for: half the way to its neighbours; the sum is `levels`."""
    ends = torch.tensor([-1, levels]).expand(len(nodes), 2)
    wide = torch.cat((ends[:, :1], nodes, ends[:, 1:]), 1).double()
    wide[:, 0], wide[:, -1] = -1.0 - wide[:, 1], 2.0 * levels - 1 - wide[:, -2]  # what lies beyond belongs to the ends
    return (wide[:, 2:] - wide[:, :-2]) / 2
