"""Flows in one line: the paper's, spline couplings for tables, and Glow for images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from nicest.flows.bijection import Bijection
from nicest.flows.chain import Chain
from nicest.flows.coupling import Coupling, Partition, channels, odd_even
from nicest.flows.flow import Flow
from nicest.flows.images import ChannelMixing, ConvNet, Shape, Squeeze
from nicest.flows.laws import Additive, AffineSpline, Law
from nicest.flows.linear import DiagonalScaling, Mixing
from nicest.flows.marginals import Elementwise, Logit
from nicest.flows.networks import MLP, ResidualMLP
from nicest.flows.priors import Gaussian, Logistic, Prior
from nicest.flows.units import Units
from nicest.flows.within import Within


def nice(
    dim: int,
    *,
    couplings: int = 4,
    hidden: Sequence[int] = (1000, 1000, 1000, 1000, 1000),
    law: Law | None = None,
    context: int = 0,
    embedding: nn.Module | None = None,
    units: Units | None = None,
    prior: Prior | None = None,
) -> Flow:
    """Build the flow of the paper: couplings of the odd and the even components, then a diagonal scaling (NICE §5.1).

    Parameters
    ----------
    dim : int
        Number of features, at least 2.
    couplings : int
        Number of coupling layers.
    hidden : sequence of int
        Widths of the hidden layers of each network.
    law : Law, optional
        The coupling law; additive by default.
    context : int
        Size of the context after the embedding; 0 for a flow without context.
    embedding : nn.Module, optional
        Maps the context of `log_prob` and `sample` to `context` numbers.
    units : Units, optional
        Standardised real numbers by default; `Units.pixels(dim)` for images.
    prior : Prior, optional
        Logistic by default.
    """
    law, part = law or Additive(), odd_even(dim)
    layers: list[Bijection] = []
    for _ in range(couplings):
        network = MLP(len(part.i1), law.size * len(part.i2), tuple(hidden), context_dim=context)
        layers.append(Coupling(part, law, network))
        part = part.swap()
    return Flow(units or Units.continuous(dim), Chain(*layers, DiagonalScaling(dim)), prior or Logistic(dim), embedding)


def spline(
    dim: int,
    *,
    couplings: int = 6,
    width: int = 64,
    blocks: int = 2,
    bins: int = 8,
    dropout: float = 0.0,
    context: int = 0,
    embedding: nn.Module | None = None,
    units: Units | None = None,
    prior: Prior | None = None,
    first: Sequence[Bijection] = (),
) -> Flow:
    """Build a neural spline flow: mixing layers and couplings whose law is an affine map and a spline.

    A single feature has one such law for each coupling, whose parameters depend on the context.

    Parameters
    ----------
    dim : int
        Number of features.
    couplings : int
        Number of coupling layers, each after a learned mixing.
    width, blocks, dropout : int, int, float
        The residual network of each coupling.
    bins : int
        Bins of the splines.
    context, embedding, units : optional
        As for `nice`.
    prior : Prior, optional
        Gaussian by default.
    first : sequence of Bijection
        Layers before the others, such as `Bounded`.
    """
    law, layers = AffineSpline(bins), list(first)
    options: dict[str, Any] = {"width": width, "blocks": blocks, "dropout": dropout}
    for i in range(couplings):
        layers.append(Mixing(dim))
        if dim == 1:
            conditioner = ResidualMLP(context, law.size, **options) if context else None
            layers.append(Elementwise(law, 1, conditioner))
            continue
        part = Partition(range(i % 2, dim, 2), dim)
        network = ResidualMLP(len(part.i1), law.size * len(part.i2), context_dim=context, **options)
        layers.append(Coupling(part, law, network))
    return Flow(units or Units.continuous(dim), Chain(*layers), prior or Gaussian(dim), embedding)


def glow(
    shape: Shape,
    *,
    levels: int = 256,
    scales: int = 3,
    steps: int = 4,
    width: int = 64,
    blocks: int = 2,
    dropout: float = 0.0,
    context: int = 0,
    embedding: nn.Module | None = None,
) -> Flow:
    """Build a multi-scale flow of images: squeeze, then steps of channel mixing and convolutional couplings (Glow).

    Half of the channels leave the flow after each scale but the last.

    Parameters
    ----------
    shape : tuple of int
        Channels, height and width; 2 ** scales must divide height and width.
    levels : int
        Grey levels of a pixel.
    scales, steps : int
        Number of scales, and of couplings on each.
    width, blocks, dropout : int, int, float
        The convolutional network of each coupling.
    context, embedding : optional
        As for `nice`.
    """
    law = AffineSpline()

    def scale(shape: Shape, left: int) -> Iterator[Bijection]:
        squeeze = Squeeze(shape)
        yield squeeze
        count, height, breadth = squeeze.squeezed
        for i in range(steps):
            part = channels(count, height, breadth)
            part = part.swap() if i % 2 else part
            read, changed = (len(each) // (height * breadth) for each in (part.i1, part.i2))
            options: dict[str, Any] = {"context_dim": context, "dropout": dropout}
            network = ConvNet((read, height, breadth), changed, law.size, width, blocks, **options)
            yield ChannelMixing(squeeze.squeezed)
            yield Coupling(part, law, network)
        if left > 1:
            out = count // 2
            rest = Chain(*scale((count - out, height, breadth), left - 1))
            yield Within(Partition(range(out * height * breadth), count * height * breadth), rest)

    dim = math.prod(shape)
    bijection = Chain(Logit(), *scale(shape, scales))
    return Flow(Units.pixels(dim, levels), bijection, Gaussian(dim, learned=True), embedding)
