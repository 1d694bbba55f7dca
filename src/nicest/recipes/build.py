"""From a recipe to a flow: units, the layers of its blocks, and a prior."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from nicest.data import Splits
from nicest.data.columns import Support
from nicest.errors import NicestError
from nicest.flows import (
    LAWS,
    MLP,
    ZCA,
    Bijection,
    Chain,
    Coupling,
    DiagonalScaling,
    Elementwise,
    Flow,
    Gaussian,
    Law,
    Logistic,
    Logit,
    MixedUnits,
    Mixing,
    Partition,
    Prior,
    ResidualMLP,
    SinhArcsinh,
    TriangularAffine,
    Units,
    checkerboard,
    halves,
    odd_even,
)
from nicest.recipes.blocks import (
    CouplingBlock,
    ElementwiseBlock,
    LawSettings,
    LogitBlock,
    MixingBlock,
    MLPNetwork,
    ResidualNetwork,
    ScalingBlock,
    SinhArcsinhBlock,
    TriangularBlock,
    ZCABlock,
    of_kind,
)
from nicest.recipes.recipe import DataSettings, Recipe

WIDEST = 6000  # columns that are whitened


def build(recipe: Recipe, splits: Splits | None = None) -> Flow:
    """The flow of a recipe whose data.shape and data.levels are known, untrained; whitening is still the identity.

    `splits` tell which values the columns of a table have; without them stored weights must.
    """
    if recipe.own_flow:
        raise NicestError("this run holds a flow built by hand: build it again, then nicest.open(path, flow=it)")
    model = recipe.model
    prior = {"logistic": Logistic, "gaussian": Gaussian}[model.prior](recipe.data.dim, learned=model.learned_prior)
    units = units_of(recipe.data, splits)
    layers = units.first_layers()
    count: Counter[str] = Counter()
    for name, layer in _layers(recipe, prior):
        count[name] += 1
        layers[f"{name}{count[name]}" if count[name] > 1 or name == "coupling" else name] = layer
    return Flow(units, Chain(layers), prior)


def units_of(data: DataSettings, splits: Splits | None = None) -> Units:
    """From the data as it is stored to real numbers of a sensible size."""
    if data.levels:
        low, high = data.interval
        try:
            return Units.pixels(data.dim, data.levels, (low, high))
        except ValueError as error:
            raise NicestError(f"data.interval: {error}") from error
    dim = data.dim
    if not data.atoms:
        return Units.columns((splits and splits.steps) or (float(data.discrete > 0),) * dim)
    found = (splits and splits.support) or Support(
        (0.0,) * dim, ((),) * dim, (False,) * dim, ((-math.inf, math.inf),) * dim
    )
    return MixedUnits(found.steps, found.atoms, categories=found.categories, bounds=found.bounds, room=data.atoms)


def _layers(recipe: Recipe, prior: Prior) -> Iterator[tuple[str, Bijection]]:
    """The layers of all blocks, each with its name in the chain, which stored weights have too."""
    data, dim, listed = recipe.data, recipe.data.dim, bool(recipe.model.blocks)
    partitions: dict[str, Partition] = {}
    for i, block in enumerate(recipe.model.layers, 1):
        match block:
            case LogitBlock():
                if not data.levels:
                    what = f"block {i}: logit" if listed else "preprocess = logit"
                    raise NicestError(f"{what} is for pixels in [0, 1]; this data is continuous")
                yield "logit", Logit()
            case SinhArcsinhBlock():
                yield "marginals", SinhArcsinh(dim)
            case ZCABlock(shrinkage):
                if dim > WIDEST:
                    remedy = f"leave out block {i}" if listed else "set model.preprocess=none"
                    raise NicestError(f"whitening {dim} columns takes hours, beyond {WIDEST}: {remedy}")
                yield "zca", ZCA(dim, shrinkage=shrinkage)
            case TriangularBlock(shrinkage):
                # fitted in closed form, then held: App. B learns the whitening before NICE, not with it
                yield "whitening", TriangularAffine(dim, shrinkage=shrinkage).requires_grad_(False)
            case CouplingBlock(repeat, split, law_settings, network):
                if dim < 2:
                    remedy = f"leave out block {i}" if listed else "set model.couplings=0"
                    raise NicestError(f"a coupling needs two parts, and this data has one column: {remedy}")
                law = _law(law_settings, f"model.blocks, block {i}: law")
                for _ in range(repeat):  # the roles of the two sets alternate
                    partition = partitions[split].swap() if split in partitions else _partition(split, data.shape)
                    partitions[split] = partition
                    yield "coupling", Coupling(partition, law, NETWORKS[network.kind](network, partition, law.size))
            case ElementwiseBlock(law_settings):
                yield "elementwise", Elementwise(_law(law_settings, f"model.blocks, block {i}: law"), dim)
            case MixingBlock():
                yield "mixing", Mixing(dim)
            case ScalingBlock(initialisation):
                scaling = DiagonalScaling(dim)
                if initialisation == "prior":
                    torch.nn.init.constant_(scaling.s, math.log(prior.standard_deviation))
                yield "scaling", scaling


def _law(settings: LawSettings, where: str) -> Law:
    """The law of a coupling, whose settings are the fields of its class."""
    try:
        law: Law = of_kind(settings.table(), LAWS, f"{where}.")
        law.forward(torch.zeros(1, 1), torch.zeros(1, law.size))
    except ValueError as error:
        raise NicestError(f"{where}: {error}") from error
    return law


def _partition(split: str, shape: tuple[int, ...]) -> Partition:
    dim = math.prod(shape)
    if split == "halves":
        return halves(dim)
    if split == "checkerboard":
        if len(shape) not in (2, 3):
            raise NicestError(f"a checkerboard is for images, (H, W) or (C, H, W); these examples are {shape}")
        *channels, height, width = shape
        return checkerboard(height, width, *channels)
    return odd_even(dim)


def _mlp(settings: MLPNetwork, partition: Partition, size: int) -> nn.Module:
    hidden = (settings.width,) * settings.hidden_layers
    inputs, outputs = len(partition.i1), size * len(partition.i2)
    return MLP(inputs, outputs, hidden, dropout=settings.dropout, initialisation=settings.initialisation)


def _residual(settings: ResidualNetwork, partition: Partition, size: int) -> nn.Module:
    inputs, outputs = len(partition.i1), size * len(partition.i2)
    options = {"dropout": settings.dropout, "initialisation": settings.initialisation}
    return ResidualMLP(inputs, outputs, settings.width, settings.blocks, **options)  # type: ignore[arg-type]


# coupling functions from |I1| numbers to size · |I2|
NETWORKS: dict[str, Callable[[Any, Partition, int], nn.Module]] = {"mlp": _mlp, "residual": _residual}
