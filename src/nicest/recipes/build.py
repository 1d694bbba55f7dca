"""Build the model of a recipe: the network of a table, or units, the layers of its blocks, and a prior."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

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
    Density,
    DiagonalScaling,
    Elementwise,
    Flow,
    Gaussian,
    Law,
    Logistic,
    Logit,
    Mixing,
    OneHot,
    Partition,
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

if TYPE_CHECKING:
    from nicest.data.columns import Schema

WIDEST = 6000  # columns that are whitened
Pixels = tuple[int, int] | None  # height and width of the images that a network reads, if it does


def build(recipe: Recipe, schema: Schema | None = None) -> Density:
    """Build the untrained model of a recipe.

    Parameters
    ----------
    recipe : Recipe
        With data.shape and data.levels, which `describe` takes from the data.
    schema : Schema, optional
        The columns of a table.
    """
    if recipe.own_flow:
        raise NicestError("this run holds a density built by hand: build it again, then nicest.open(path, flow=it)")
    if recipe.data.kind == "table":
        return _table_model(recipe, schema)
    model, data = recipe.model, recipe.data
    prior: Prior = {"logistic": Logistic, "gaussian": Gaussian}[model.prior](data.dim, learned=model.learned_prior)
    embedding = OneHot(len(data.classes)) if data.classes else None
    chain = _chain(recipe, prior, enumerate(model.layers, 1), data.shape)
    return Flow(units_of(data), chain, prior, embedding)


def _table_model(recipe: Recipe, schema: Schema | None) -> Density:
    """Build the network of a table with these columns."""
    from nicest.tables import TableModel  # not needed for images

    if schema is None:
        raise NicestError("a table model needs its columns: open the run folder, which has them in columns.json")
    model: Density = TableModel(schema.heads(), recipe.table, [schema.index(name) for name in recipe.table.targets])
    return model


def units_of(data: DataSettings) -> Units:
    """Return the map from the data as it is stored to real numbers of a sensible size."""
    if not data.levels:
        return Units.continuous(data.dim)
    low, high = data.interval
    try:
        return Units.pixels(data.dim, data.levels, (low, high))
    except ValueError as error:
        raise NicestError(f"data.interval: {error}") from error


def _chain(
    recipe: Recipe,
    prior: Prior,
    blocks: Iterator[tuple[int, Block]],
    shape: tuple[int, ...],
) -> Chain:
    """Build the layers of these blocks, numbered, for examples of this shape; stored weights have their names."""
    layers: dict[str, Bijection] = {}
    count: Counter[str] = Counter()
    for name, layer in _layers(recipe, prior, blocks, shape):
        count[name] += 1
        layers[f"{name}{count[name]}" if count[name] > 1 or name == "coupling" else name] = layer
    return Chain(layers)


def _layers(
    recipe: Recipe,
    prior: Prior,
    blocks: Iterator[tuple[int, Block]],
    shape: tuple[int, ...],
) -> Iterator[tuple[str, Bijection]]:
    """Yield the layers of all blocks, each with its name; those after a factor-out are in a chain of their own."""
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
                if dim < 2:
                    remedy = f"leave out block {i}" if listed else "set model.couplings=0"
                    raise NicestError(f"a coupling needs two parts, and this data has one column: {remedy}")
                law = _law(law_settings, f"model.blocks, block {i}: law")
                for _ in range(repeat):  # the roles of the two sets alternate
                    last = partitions.get((split, shape))
                    partition = partitions[split, shape] = last.swap() if last else _partition(split, shape, i)
                    if mixing:
                        yield "mixing", ChannelMixing(_image(shape, f"block {i}: mixing"))
                    pixels = _pixels(split, shape) if isinstance(network, ConvNetwork) else None
                    sizes = (len(partition.i1), len(partition.i2), len(data.classes))
                    yield "coupling", Coupling(partition, law, NETWORKS[network.kind](network, *sizes, law, pixels))
            case ElementwiseBlock(law_settings):
                law = _law(law_settings, f"model.blocks, block {i}: law")
                conditioner = None
                if data.classes:
                    conditioner = nn.Linear(len(data.classes), dim * law.size)
                    nn.init.zeros_(conditioner.weight)
                    nn.init.zeros_(conditioner.bias)
                yield "elementwise", Elementwise(law, dim, conditioner)
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


def _law(settings: LawSettings, where: str) -> Law:
    """Build a law, whose settings are the fields of its class."""
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
    """Return channels, height and width of images; raise a NicestError for other data."""
    if len(shape) not in (2, 3):
        raise NicestError(f"{what} is for images, (H, W) or (C, H, W); these examples are {shape}")
    height, width = shape[-2:]
    return (shape[0] if len(shape) == 3 else 1), height, width


def _pixels(split: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return height and width of the images that the sets of a partition form, for a network that convolves them."""
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
        raise NicestError("network conv is for images; these are columns of numbers")
    area = math.prod(pixels)
    shape = (inputs // area, *pixels)
    options = {"context_dim": context, "dropout": settings.dropout}
    return ConvNet(shape, changed // area, law.size, settings.width, settings.blocks, **options)  # type: ignore[arg-type]


# coupling functions, by kind: settings, inputs, changed components, size of the context, law, size of the images
NETWORKS: dict[str, Callable[[Any, int, int, int, Law, Pixels], nn.Module]] = {
    "mlp": _mlp,
    "residual": _residual,
    "conv": _conv,
}
