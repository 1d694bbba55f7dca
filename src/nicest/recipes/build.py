"""From a recipe to a flow: units, the layers of its blocks, and a prior."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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
    ChannelMixing,
    ConvNet,
    Coupling,
    DiagonalScaling,
    Elementwise,
    FeatureNetwork,
    Features,
    Flow,
    ForestCoupling,
    Gaussian,
    Law,
    Logistic,
    Logit,
    MixedUnits,
    Mixing,
    Mixture,
    OneHot,
    Partition,
    PartPrior,
    Prior,
    ResidualMLP,
    SinhArcsinh,
    Squeeze,
    TriangularAffine,
    Units,
    Within,
    channels,
    checkerboard,
    halves,
    odd_even,
)
from nicest.recipes.blocks import (
    Block,
    ConvNetwork,
    CouplingBlock,
    ElementwiseBlock,
    FactorOutBlock,
    LawSettings,
    LogitBlock,
    MixingBlock,
    MLPNetwork,
    ResidualNetwork,
    ScalingBlock,
    SinhArcsinhBlock,
    SqueezeBlock,
    TriangularBlock,
    ZCABlock,
    of_kind,
)
from nicest.recipes.recipe import DataSettings, Recipe

WIDEST = 6000  # columns that are whitened
Pixels = tuple[int, int] | None  # height and width of the images that a network reads, if it does


def build(recipe: Recipe, splits: Splits | None = None) -> Flow:
    """The flow of a recipe whose data.shape and data.levels are known, untrained; whitening is still the identity.

    `splits` tell which values the columns of a table have; without them stored weights must.
    """
    if recipe.own_flow:
        raise NicestError("expected a recipe with a [model], got one of a flow built by hand: train it with nicest.fit")
    model, data = recipe.model, recipe.data
    part = _given(data)
    dim = len(part.i2) if part else data.dim
    prior: Prior = {"logistic": Logistic, "gaussian": Gaussian}[model.prior](dim, learned=model.learned_prior)
    units = units_of(data, splits)
    if model.members > 1 and (data.levels or data.classes):
        raise NicestError(f"model.members is for tables: expected 1 for images, got {model.members}")
    if part and data.classes:
        within = _chain(recipe, prior, enumerate(model.layers, 1), data.shape)
        return Flow(units, Within(part, within, OneHot(len(data.classes))), PartPrior(prior, part))

    def chain() -> Chain:
        shape = (dim,) if part else data.shape
        return _chain(recipe, prior, enumerate(model.layers, 1), shape, units.first_layers(), part)

    whole = PartPrior(prior, part) if part else prior
    if model.trees and (part is None or dim != 1):
        raise NicestError(f"model.trees is for tables with one target: expected 0 here, got {model.trees}")
    if model.members == 1 and not model.trees:
        return Flow(units, chain(), whole)
    chains = [chain() for _ in range(model.members)]
    if part is None or not model.trees:
        return Mixture(units, chains, whole)
    forest = ForestCoupling(part, model.bins, prior, model.trees, model.leaves)
    return Mixture(units, chains, whole, Chain({**units.first_layers(), "forest": forest}))


def _given(data: DataSettings) -> Partition | None:
    """The columns that are given, or the label, and what is modelled; None where all is."""
    if data.classes:
        return Partition([data.dim], data.row_dim)
    return Partition(set(range(data.dim)) - set(data.targets), data.dim) if data.targets else None


def units_of(data: DataSettings, splits: Splits | None = None) -> Units:
    """From the data as it is stored to real numbers of a sensible size."""
    if data.levels:
        low, high = data.interval
        try:
            return Units.pixels(data.row_dim, data.levels, (low, high), as_they_are=range(data.dim, data.row_dim))
        except ValueError as error:
            raise NicestError(f"data.interval: {error}") from error
    dim = data.dim
    as_codes = [i for i, count in enumerate(data.categories) if count]  # given: a network reads them
    if not data.atoms:
        steps = (splits and splits.steps) or (float(data.discrete > 0),) * dim
        among = data.targets or range(dim)
        return Units.columns([step if i in among else 0.0 for i, step in enumerate(steps)], as_they_are=as_codes)
    found = (splits and splits.support) or Support(
        (0.0,) * dim, ((),) * dim, (False,) * dim, (False,) * dim, ((-math.inf, math.inf),) * dim
    )
    options = {"categories": found.categories, "unordered": found.unordered, "bounds": found.bounds, "room": data.atoms}
    return MixedUnits(found.steps, found.atoms, as_they_are=as_codes, **options)  # type: ignore[arg-type]


def _chain(
    recipe: Recipe,
    prior: Prior,
    blocks: Iterator[tuple[int, Block]],
    shape: tuple[int, ...],
    first: Mapping[str, Bijection] | None = None,
    part: Partition | None = None,
) -> Chain:
    """The layers of these blocks, numbered, for examples of this shape; stored weights have the names of layers.

    With a `part`, they are of its I2 alone, and couplings read I1 besides.
    """
    layers = dict(first or {})
    count: Counter[str] = Counter()
    for name, layer in _layers(recipe, prior, blocks, shape, part):
        if part and name != "coupling":
            layer = Within(part, layer)
        count[name] += 1
        layers[f"{name}{count[name]}" if count[name] > 1 or name == "coupling" else name] = layer
    return Chain(layers)


def _layers(
    recipe: Recipe,
    prior: Prior,
    blocks: Iterator[tuple[int, Block]],
    shape: tuple[int, ...],
    part: Partition | None = None,
) -> Iterator[tuple[str, Bijection]]:
    """The layers of all blocks, each with its name; those after a factor-out are in a chain of their own."""
    data, dim, listed = recipe.data, math.prod(shape), bool(recipe.model.blocks)
    partitions: dict[Any, Partition] = {}
    for i, block in blocks:
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
            case CouplingBlock(repeat, split, law_settings, network, mixing):
                if dim < 2 and not part:
                    remedy = f"leave out block {i}" if listed else "set model.couplings=0"
                    raise NicestError(f"a coupling needs two parts, and this data has one column: {remedy}")
                law = _law(law_settings, f"model.blocks, block {i}: law")
                for _ in range(repeat):  # the roles of the two sets alternate
                    last = partitions.get((split, shape))
                    if part:
                        inner = None if dim < 2 else last.swap() if last else _partition(split, shape, i)
                        partitions[split, shape] = inner or part
                        yield "coupling", _coupling_with_given(data, part, inner, law, network)
                        continue
                    partition = partitions[split, shape] = last.swap() if last else _partition(split, shape, i)
                    if mixing:
                        yield "mixing", ChannelMixing(_image(shape, f"block {i}: mixing"))
                    pixels = _pixels(split, shape) if isinstance(network, ConvNetwork) else None
                    sizes = (len(partition.i1), len(partition.i2), len(data.classes))
                    m = NETWORKS[network.kind](network, *sizes, law, pixels)
                    yield "coupling", Coupling(partition, law, m)
            case ElementwiseBlock(law_settings):
                law = _law(law_settings, f"model.blocks, block {i}: law")
                yield "elementwise", Elementwise(law, dim, len(data.classes))
            case MixingBlock():
                if dim > 1:
                    yield "mixing", Mixing(dim)
            case SqueezeBlock(by):
                try:
                    layer = Squeeze(_image(shape, f"block {i}: squeeze"), (by, by))
                except ValueError as error:
                    remedy = "crop or resize the images, set by to a number that divides both, or leave out the block"
                    raise NicestError(f"block {i}: squeeze: {error}: {remedy}") from error
                shape = layer.squeezed
                yield "squeeze", layer
            case FactorOutBlock():
                count, height, width = _image(shape, f"block {i}: factor-out")
                if count < 2:
                    raise NicestError(f"block {i}: factor-out takes half of the channels, got 1: squeeze first")
                out = count // 2
                kept = Partition(range(out * height * width), dim)
                yield "rest", Within(kept, _chain(recipe, prior, blocks, (count - out, height, width)))
            case ScalingBlock(initialisation):
                scaling = DiagonalScaling(dim)
                if initialisation == "prior":
                    torch.nn.init.constant_(scaling.s, math.log(prior.standard_deviation))
                yield "scaling", scaling


def _coupling_with_given(
    data: DataSettings, part: Partition, inner: Partition | None, law: Law, network: Any
) -> Coupling:
    """A coupling that changes targets, those in I2 of `inner` or all, and reads all else."""
    changed = {part.i2[i] for i in (inner.i2 if inner else range(len(part.i2)))}
    partition = Partition(set(range(data.dim)) - changed, data.dim)
    features = Features([data.categories[i] for i in partition.i1], [i in part.i1 for i in partition.i1])
    make = NETWORKS[network.kind]
    m = FeatureNetwork(features, lambda inputs: make(network, inputs, len(changed), 0, law, None))
    return Coupling(partition, law, m)


def _law(settings: LawSettings, where: str) -> Law:
    """The law of a coupling, whose settings are the fields of its class."""
    try:
        law: Law = of_kind(settings.table(), LAWS, f"{where}.")
        with torch.device("cpu"):  # where a flow is only sketched, on "meta", sums would import torch's compiler
            law.forward(torch.zeros(1, 1), torch.zeros(1, 1, law.size))
    except ValueError as error:
        raise NicestError(f"{where}: {error}") from error
    return law


def _partition(split: str, shape: tuple[int, ...], block: int) -> Partition:
    if split == "checkerboard":
        count, height, width = _image(shape, "a checkerboard")
        return checkerboard(height, width, count)
    if split == "channels":
        count, height, width = _image(shape, f"block {block}: partition channels")
        if count < 2:
            raise NicestError(f"block {block}: one channel cannot be split: squeeze first, or use a checkerboard")
        return channels(count, height, width)
    dim = math.prod(shape)
    return halves(dim) if split == "halves" else odd_even(dim)


def _image(shape: tuple[int, ...], what: str) -> tuple[int, int, int]:
    """Channels, height and width of images, which alone this is for."""
    if len(shape) not in (2, 3):
        raise NicestError(f"{what} is for images, (H, W) or (C, H, W); these examples are {shape}")
    height, width = shape[-2:]
    return (shape[0] if len(shape) == 3 else 1), height, width


def _pixels(split: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Height and width of the images in which the sets of a partition lie, for a network that convolves them."""
    _, height, width = _image(shape, "network conv")
    if split == "checkerboard" and width % 2 == 0:
        return height, width // 2
    if split == "channels":
        return height, width
    wanted = "images of even width" if split == "checkerboard" else "partition channels or checkerboard"
    got = f"{height} x {width}" if split == "checkerboard" else split
    raise NicestError(f"network conv takes {wanted}; got {got}")


def _mlp(settings: MLPNetwork, inputs: int, changed: int, context: int, law: Law, _: Pixels) -> nn.Module:
    hidden, outputs = (settings.width,) * settings.hidden_layers, law.size * changed
    options = {"dropout": settings.dropout, "initialisation": settings.initialisation}
    return MLP(inputs, outputs, hidden, context_dim=context, **options)  # type: ignore[arg-type]


def _residual(settings: ResidualNetwork, inputs: int, changed: int, context: int, law: Law, _: Pixels) -> nn.Module:
    options = {"context_dim": context, "dropout": settings.dropout, "initialisation": settings.initialisation}
    return ResidualMLP(inputs, law.size * changed, settings.width, settings.blocks, **options)  # type: ignore[arg-type]


def _conv(settings: ConvNetwork, inputs: int, changed: int, context: int, law: Law, pixels: Pixels) -> nn.Module:
    if pixels is None:
        raise NicestError("network conv is for images; these are columns of a table")
    area = math.prod(pixels)
    shape = (inputs // area, *pixels)
    options = {"context_dim": context, "dropout": settings.dropout}
    return ConvNet(shape, changed // area, law.size, settings.width, settings.blocks, **options)  # type: ignore[arg-type]


# coupling functions: of so many numbers, to what the law takes for those that are changed, with a context of so many
NETWORKS: dict[str, Callable[[Any, int, int, int, Law, Pixels], nn.Module]] = {
    "mlp": _mlp,
    "residual": _residual,
    "conv": _conv,
}
