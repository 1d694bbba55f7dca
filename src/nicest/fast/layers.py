"""Elementwise layers and learned linear layers of channels in their fast form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nicest.fast.derivatives import first_only
from nicest.fast.gpu import kernels_for
from nicest.fast.networks import FastMLP, FastResidual, reduced
from nicest.fast.spline import FastAffineSpline, FastSpline, fast_law
from nicest.flows import Bijection, ChannelMixing, Elementwise


class FastElementwise(Bijection):
    """A law in every dimension; on a CPU, the knots of a spline that all rows share are found once."""

    def __init__(self, layer: Elementwise, dtype: torch.dtype) -> None:
        super().__init__()
        self.dim, self.plain, self.law, self.dtype = layer.dim, layer, fast_law(layer.law), dtype
        network = layer.conditioner
        fast = None if network is None else FastMLP.of(network, dtype) or FastResidual.of(network, dtype)
        self.fast = [fast]  # in a list: no submodule
        if fast:
            fast.by_columns = isinstance(self.law, FastSpline | FastAffineSpline)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        b = self.parameters_at(x, context)
        shared = self.plain.conditioner is None and len(x) > 1 and not kernels_for(x)
        y, log_slope = self.law.forward(x, b[:1] if shared else b)
        return y, log_slope.sum(-1)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, log_slope = self.law.inverse(y, self.parameters_at(y, context))
        return x, log_slope.sum(-1)

    def parameters_at(self, x: Tensor, context: Tensor | None) -> Tensor:
        """Return the parameters of every row, (B, dim, size)."""
        network = self.fast[0]
        if network is None or context is None:
            with reduced(x, self.dtype):
                return self.plain.parameters_at(x, context)
        b = network.read(context.to(x.dtype), None)[1]
        return b.unflatten(1, (self.plain.dim, self.law.size))


class FastChannelMixing(Bijection):
    """A learned linear layer of the channels, as one product with images as they lie in memory."""

    def __init__(self, layer: ChannelMixing) -> None:
        super().__init__()
        self.dim, self.plain = layer.dim, layer

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        layer, mixing = self.plain, self.plain.mixing
        log_det = (layer.pixels * mixing.log_diagonal.sum()).expand(len(x))
        kernels = kernels_for(x)
        if kernels and len(mixing.b) <= kernels.MOST_CHANNELS:
            return _Mixed.apply(x, mixing.lu, mixing.log_diagonal, mixing.b, mixing.order), log_det
        images, matrix = x.unflatten(-1, (-1, layer.pixels)), mixing.matrix.expand(len(x), -1, -1)
        return torch.baddbmm(mixing.b[:, None], matrix, images).flatten(1), log_det

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.plain.inverse(y)


class _Mixed(torch.autograd.Function):
    """W x + b at every pixel, on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lu: Tensor, log_diagonal: Tensor, b: Tensor, order: Tensor) -> Tensor:
        kernels: Any = kernels_for(x)
        matrix = kernels.mixing_matrix(lu, log_diagonal, order)
        ctx.save_for_backward(x, matrix, lu, log_diagonal, order)
        return kernels.mix_channels(x, matrix, b)

    @staticmethod
    @first_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kernels: Any = kernels_for(gradient)
        x, matrix, *factors = ctx.saved_tensors
        gx, g_matrix, g_bias = kernels.mix_channels_back(gradient, x, matrix)
        return gx, *kernels.mixing_matrix_back(g_matrix.sum(0), *factors), g_bias.sum(0), None
