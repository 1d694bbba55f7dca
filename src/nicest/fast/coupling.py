"""Couplings in their fast form, and the stream of x between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nicest.fast.conv import FastConv
from nicest.fast.derivatives import first_only
from nicest.fast.gpu import kernels_for
from nicest.fast.networks import FastMLP, FastResidual, reduced
from nicest.fast.spline import FastAffineSpline, FastSpline, fast_law
from nicest.flows import Additive, Coupling, Partition


class FastCoupling:
    """A coupling layer by its parts x_I1 and x_I2, or, where there is a kernel for it, at once."""

    def __init__(self, layer: Coupling, dtype: torch.dtype) -> None:
        self.layer, self.dtype = layer, dtype
        self.partition, self.law = layer.partition, fast_law(layer.law)
        network: nn.Module = layer.network
        fast = FastMLP.of(network, dtype) or FastResidual.of(network, dtype)
        if fast and fast.linears[-1].out_features != self.law.size * len(self.partition.i2):
            fast = None  # the plain one says what is wrong
        if fast:
            fast.by_columns = isinstance(self.law, FastSpline | FastAffineSpline)
        self.network = fast if isinstance(fast, FastMLP) else None
        self.residual = fast if isinstance(fast, FastResidual) else None
        self.conv = FastConv.of(network, dtype)
        if self.conv and not self.conv.fits(self.partition, layer.law):
            self.conv = None
        self.additive = type(layer.law) is Additive

    def at_once(self, x: Tensor, context: Tensor | None) -> bool:
        return (
            self.network is not None
            and self.additive
            and self.partition.regular
            and context is None
            and x.dtype == torch.float32 != self.dtype
            and kernels_for(x) is not None
        )

    def convolves(self, x1: Tensor, context: Tensor | None) -> bool:
        """Return True if the fast form of the convolutional network applies to this x_I1.

        It needs a GPU, reduced precision, and a context without gradient.
        """
        if self.conv is None or (0 if context is None else context.shape[-1]) != self.conv.network.context_dim:
            return False
        fits = context is None or not context.requires_grad
        return fits and x1.dtype == torch.float32 != self.dtype and kernels_for(x1) is not None

    def couple(
        self, x1: Tensor, x2: Tensor, context: Tensor | None, *, inverse: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return y_I1, y_I2 and the log-determinant (None where it is 0), or those of the inverse."""
        if self.conv and isinstance(self.law, FastAffineSpline) and self.convolves(x1, context) and not inverse:
            y2, log_slope = self.law.at_pixels(x2, self.conv.planes(x1, context))
            return x1, y2, log_slope.sum(-1)
        x1, b = self.read(x1, context)
        if self.additive:
            return x1, x2 - b if inverse else x2 + b, None
        law = self.law.inverse if inverse else self.law.forward
        y2, log_slope = law(x2, b.unflatten(1, (-1, self.law.size)))
        return x1, y2, log_slope.sum(-1)

    def read(self, x1: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x_I1 as the network reads it, and the network's output (B, |I2| · size)."""
        if fast := self.network or self.residual or (self.conv if self.convolves(x1, context) else None):
            return fast.read(x1, context)
        with reduced(x1, self.dtype):
            return x1, self.layer.m(x1, context).flatten(1)


class Stream:
    """x, whole, or in the parts that the last coupling left it in, so that the next need not split it again."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.partition: Partition | None = None
        self.parts: tuple[Tensor, Tensor]

    def split(self, partition: Partition) -> tuple[Tensor, Tensor]:
        before, self.partition = self.partition, partition
        if before is None:
            self.parts = _split(partition, self.x)
        elif partition.i1 is before.i2 and partition.i2 is before.i1:  # as `swap` leaves them
            self.parts = self.parts[1], self.parts[0]
        elif partition is not before:
            self.parts = _split(partition, _merge(before, *self.parts))
        return self.parts

    def whole(self) -> Tensor:
        return self.x if self.partition is None else _merge(self.partition, *self.parts)


def _split(partition: Partition, x: Tensor) -> tuple[Tensor, Tensor]:
    """Split like `partition.split`, with a fast backward pass for gathered sets."""
    if partition.regular:
        return partition.split(x)
    x1, x2 = _Reordered.apply(x, partition.order, partition.back).split((len(partition.i1), len(partition.i2)), -1)
    return x1, x2


def _merge(partition: Partition, x1: Tensor, x2: Tensor) -> Tensor:
    """Merge like `partition.merge`, with a fast backward pass for gathered sets."""
    if partition.regular:
        return partition.merge(x1, x2)
    return _Reordered.apply(torch.cat((x1, x2), -1), partition.back, partition.order)


class _Reordered(torch.autograd.Function):
    """x with its columns in another order, whose gradient takes the order `back`: no sums, as an index would have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(1, order)

    @staticmethod
    @first_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(1, *ctx.saved_tensors), None, None
