"""The space in which what is hidden of a row is found: standardised columns, or the interval of the pixels."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nicest.errors import NicestError
from nicest.flows import Dequantize, Flow, Rescale


class Space:
    """Where the ascent runs: the interval of the pixels, or standardised columns.

    It lies behind the layers that only change units, `Dequantize` and `Rescale`; `flow` is what follows them, and
    `log_det` what they add to its log-likelihood. A level enters as its middle, (x + 1/2)/levels: the noise that the
    model was trained under has its mean there, and nothing observed depends on a draw.
    """

    def __init__(self, flow: Flow) -> None:
        count = len(list(itertools.takewhile(lambda layer: isinstance(layer, Dequantize | Rescale), flow.chain)))
        first = next(iter(flow.chain), None)
        self.levels = first.levels if isinstance(first, Dequantize) else 0
        self.units, self.rescale = flow.chain[:count], flow.chain[bool(self.levels) : count]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whoever made this flow was warned then
            self.flow = Flow(flow.chain[count:], flow.prior)
        self.dim, self.like = flow.prior.dim, flow.prior.loc.detach()
        origin = self.like.new_zeros(1, self.dim)
        self.log_det = float(self.rescale(origin)[1]) - self.dim * math.log(self.levels or 1)

    def enter(self, x: Tensor) -> Tensor:
        """Rows of data as points of the space."""
        x = x.to(torch.promote_types(x.dtype, self.like.dtype))  # float64 has digits that the flow has not
        return self.place(x + (0.5 if self.levels else 0.0)).to(self.like)

    def place(self, x: Tensor) -> Tensor:
        """Real numbers in units of the data as points of the space; a level x has its edges at x and x + 1."""
        return self.rescale(x / (self.levels or 1))[0]

    def leave(self, y: Tensor) -> Tensor:
        """Points of the space as rows of data, in whole levels where it has levels."""
        return self.units.inverse(y)

    def box(self, bounds: tuple[Tensor | float, Tensor | float] | None) -> tuple[Tensor, Tensor]:
        """The lower and the upper corner, (1, D) each, of where the ascent may go."""
        low, high = bounds or ((0, self.levels) if self.levels else (-math.inf, math.inf))
        ends = (torch.as_tensor(end).to(self.like).expand(1, self.dim) for end in (low, high))
        lower, upper = (self.place(end) for end in ends)
        if not bool((lower < upper).all()):
            raise NicestError("expected every lower bound below its upper bound; one is not, or is not a number")
        return lower, upper

    @torch.no_grad()
    def nats(self, y: Tensor) -> Tensor:
        """log p of points, (B,), in nats of the data's own space."""
        return self.flow.log_prob(y).double() + self.log_det


@contextmanager
def frozen(flow: Flow) -> Iterator[None]:
    """No gradients but in x, and every layer in evaluation mode; all is as it was afterwards."""
    learned = [parameter for parameter in flow.parameters() if parameter.requires_grad]
    training = [module for module in flow.modules() if module.training]
    try:
        flow.eval().requires_grad_(False)
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True
