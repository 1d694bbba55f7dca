"""A flow of some components given the others: couplings whose law is itself a flow, and conditional densities."""

from __future__ import annotations

from torch import Tensor, nn

from nicest.flows.bijection import Bijection, check_features
from nicest.flows.coupling import Partition


class Within(Bijection):
    """A bijection f of the components I2 alone: the general coupling whose law is itself a flow (NICE §3.2).

        y_I1 = x_I1,   y_I2 = f(x_I2; m(x_I1)),   log |det dy/dx| = log |det df/dx_I2|

    m(x_I1) is the context of f; without a `network` m, f is the same for every x_I1. Under a `PartPrior` that scores
    I2 alone, log_prob is log p(x_I2 | x_I1).
    """

    def __init__(self, partition: Partition, inner: Bijection, network: nn.Module | None = None) -> None:
        super().__init__()
        self.partition, self.inner, self.network = partition, inner, network

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x1, x2 = self.partition.split(x)
        y2, log_det = self.inner(x2, self.m(x1, context))
        return self.partition.merge(x1, y2), log_det

    def inside(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """What f is given: x_I2, and its context."""
        x1, x2 = self.partition.split(x)
        return x2, self.m(x1, context)

    def inside_moments(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and covariance of x_I2 from those of x."""
        part = list(self.partition.i2)
        return mean[part], covariance[part][:, part]

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        y1, y2 = self.partition.split(y)
        return self.partition.merge(y1, self.inner.inverse(y2, self.m(y1, context)))

    def inverse_and_log_det(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y1, y2 = self.partition.split(y)
        x2, log_det = self.inner.inverse_and_log_det(y2, self.m(y1, context))
        return self.partition.merge(y1, x2), log_det

    def walk(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        x1, x2 = self.partition.split(x)
        y2, terms = self.inner.walk(x2, self.m(x1, context))
        return self.partition.merge(x1, y2), terms

    def m(self, x1: Tensor, context: Tensor | None) -> Tensor | None:
        if self.network is None:
            return context
        found: Tensor = self.network(x1) if context is None else self.network(x1, context)
        return found


class At(Bijection):
    """A bijection f that keeps I1, at one value c of x_I1: a bijection of x_I2 alone.

        y_I2 = f(c, x_I2)_I2,   log |det dy_I2/dx_I2| = log |det df/dx|

    `given` is c, (C,). Of a flow of x given a condition it makes one of x.
    """

    given: Tensor

    def __init__(self, partition: Partition, inner: Bijection, given: Tensor) -> None:
        super().__init__()
        if given.shape != (len(partition.i1),):
            raise ValueError(f"expected {len(partition.i1)} numbers that are given, got shape {tuple(given.shape)}")
        self.partition, self.inner = partition, inner
        self.register_buffer("given", given)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, log_det = self.inner(self.beside(x), context)
        return self.partition.split(y)[1], log_det

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        return self.partition.split(self.inner.inverse(self.beside(y), context))[1]

    def inverse_and_log_det(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, log_det = self.inner.inverse_and_log_det(self.beside(y), context)
        return self.partition.split(x)[1], log_det

    def walk(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        y, terms = self.inner.walk(self.beside(x), context)
        return self.partition.split(y)[1], terms

    def beside(self, x: Tensor) -> Tensor:
        """Rows of which x is I2, beside c."""
        check_features(x, len(self.partition.i2))
        return self.partition.merge(self.given.to(x).expand(len(x), -1), x)
