"""Bijections of some components, and bijections at a fixed context."""

from __future__ import annotations

from torch import Tensor, nn

from nicest.flows.bijection import Bijection
from nicest.flows.chain import Ledger, ledger
from nicest.flows.coupling import Partition


class Within(Bijection):
    """A bijection f of the components I2 alone: the general coupling whose law is itself a flow (NICE §3.2).

        y_I1 = x_I1,   y_I2 = f(x_I2; m(x_I1)),   log |det dy/dx| = log |det df/dx_I2|

    m(x_I1) is the context of f; without a `network` m, f has the context of the whole, if any.
    """

    def __init__(self, partition: Partition, inner: Bijection, network: nn.Module | None = None) -> None:
        super().__init__()
        self.dim, self.partition, self.inner, self.network = partition.dim, partition, inner, network

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x1, x2 = self.partition.split(x)
        y2, log_det = self.inner(x2, self.m(x1, context))
        return self.partition.merge(x1, y2), log_det

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y1, y2 = self.partition.split(y)
        x2, log_det = self.inner.inverse(y2, self.m(y1, context))
        return self.partition.merge(y1, x2), log_det

    def initialise(self, x: Tensor, context: Tensor | None = None) -> None:
        """Initialise f with x_I2 and its context."""
        x1, x2 = self.partition.split(x)
        self.inner.initialise(x2, self.m(x1, context))

    def ledger(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Ledger]:
        """Return the output and the log-determinant of every layer of f, by name."""
        x1, x2 = self.partition.split(x)
        y2, terms = ledger(self.inner, x2, self.m(x1, context))
        return self.partition.merge(x1, y2), terms

    def m(self, x1: Tensor, context: Tensor | None) -> Tensor | None:
        """Return the context of f at x_I1."""
        if self.network is None:
            return context
        found: Tensor = self.network(x1) if context is None else self.network(x1, context)
        return found


class AtContext(Bijection):
    """A bijection with a fixed context: a bijection without one.

    Parameters
    ----------
    inner : Bijection
    context : Tensor of shape (1, C)
        The context of all rows.
    """

    context: Tensor

    def __init__(self, inner: Bijection, context: Tensor) -> None:
        super().__init__()
        self.dim, self.inner = inner.dim, inner
        self.register_buffer("context", context, persistent=False)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.inner(x, self.context.expand(len(x), -1))

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.inner.inverse(y, self.context.expand(len(y), -1))

    def ledger(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Ledger]:
        """Return the output and the log-determinant of every layer inside, by name."""
        return ledger(self.inner, x, self.context.expand(len(x), -1))
