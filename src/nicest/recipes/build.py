"""From a recipe to a flow: units, [whitening, couplings ..., DiagonalScaling], and a prior."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields

import torch

from nicest.errors import NicestError
from nicest.flows import (
    LAWS,
    MLP,
    ZCA,
    Bijection,
    Chain,
    Coupling,
    DiagonalScaling,
    Flow,
    Gaussian,
    Logistic,
    Logit,
    Partition,
    SinhArcsinh,
    TriangularAffine,
    Units,
    checkerboard,
    halves,
    odd_even,
)
from nicest.recipes.recipe import DataSettings, ModelSettings, Recipe

WIDEST = 6000  # columns that are whitened


def build(recipe: Recipe, steps: Sequence[float] = ()) -> Flow:
    """The flow of a recipe whose data.shape and data.levels are known, untrained; whitening is still the identity.

    `steps` are of the columns of a table, where some hold whole steps (data.discrete).
    """
    dim, settings = recipe.data.dim, recipe.model
    if recipe.own_flow:
        raise NicestError("this run holds a flow built by hand: build it again, then nicest.open(path, flow=it)")
    if settings.preprocess == "logit" and not recipe.data.levels:
        raise NicestError("preprocess = logit is for pixels in [0, 1]; this data is continuous")
    if settings.preprocess == "zca" and dim > WIDEST:
        raise NicestError(f"whitening {dim} columns takes hours, beyond {WIDEST}: set model.preprocess=none")
    if settings.couplings and dim < 2:
        raise NicestError("a coupling needs two parts, and this data has one column: set model.couplings=0")
    layers = _preprocessing(settings, dim)
    for k, partition in enumerate(_partitions(settings, recipe.data.shape)):
        layers[f"coupling{k + 1}"] = _coupling(settings, partition, k)
    layers["scaling"] = scaling = DiagonalScaling(dim)
    prior = {"logistic": Logistic, "gaussian": Gaussian}[settings.prior](dim, learned=settings.learned_prior)
    if settings.initialisation == "whitened":
        torch.nn.init.constant_(scaling.s, math.log(prior.standard_deviation))
    return Flow(units_of(recipe.data, steps), Chain(layers), prior)


def units_of(data: DataSettings, steps: Sequence[float] = ()) -> Units:
    """From the data as it is stored to real numbers of a sensible size."""
    if data.levels:
        low, high = data.interval
        try:
            return Units.pixels(data.dim, data.levels, (low, high))
        except ValueError as error:
            raise NicestError(f"data.interval: {error}") from error
    return Units.columns(steps or (float(data.discrete > 0),) * data.dim)


def _preprocessing(settings: ModelSettings, dim: int) -> dict[str, Bijection]:
    layers: dict[str, Bijection] = {}
    if settings.preprocess == "logit":
        layers["logit"] = Logit()
    if settings.marginals == "sinh-arcsinh":
        layers["marginals"] = SinhArcsinh(dim)
    if settings.preprocess == "zca":
        layers["zca"] = ZCA(dim, shrinkage=settings.shrinkage)
    if settings.preprocess == "triangular":
        # fitted in closed form, then held: App. B learns the whitening before NICE, not with it
        layers["whitening"] = TriangularAffine(dim, shrinkage=settings.shrinkage).requires_grad_(False)
    return layers


def _partitions(settings: ModelSettings, shape: tuple[int, ...]) -> Iterator[Partition]:
    """The partition of every coupling: the same two sets, their roles exchanged from one to the next."""
    if settings.couplings:
        yield (partition := _partition(settings, shape))
    for _ in range(settings.couplings - 1):
        yield (partition := partition.swap())


def _partition(settings: ModelSettings, shape: tuple[int, ...]) -> Partition:
    dim = math.prod(shape)
    if settings.partition == "halves":
        return halves(dim)
    if settings.partition == "checkerboard":
        if len(shape) not in (2, 3):
            raise NicestError(f"a checkerboard is for images, (H, W) or (C, H, W); these examples are {shape}")
        *channels, height, width = shape
        return checkerboard(height, width, *channels)
    return odd_even(dim)


def _coupling(settings: ModelSettings, partition: Partition, k: int) -> Coupling:
    kind = LAWS[settings.law]
    law = kind(**({"bound": settings.bound} if "bound" in {each.name for each in fields(kind)} else {}))  # type: ignore[arg-type]
    depth = settings.hidden_layers[k if len(settings.hidden_layers) > 1 else 0]
    network = MLP(
        len(partition.i1),
        law.size * len(partition.i2),
        (settings.width,) * depth,
        dropout=settings.dropout,
        initialisation="zero-last" if settings.initialisation == "whitened" else settings.initialisation,
    )
    return Coupling(partition, law, network)
