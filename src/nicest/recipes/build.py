"""From a recipe to a flow: units, the layers of its blocks, and a prior."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nicest.data import Splits
from nicest.errors import NicestError
from nicest.flows import (
    LAWS,
    MLP,
    ZCA,
    AffineSpline,
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
    Gaussian,
    Law,
    Logistic,
    Logit,
    MixedUnits,
    Mixing,
    Mixture,
    OneHot,
    Partition,
    Prior,
    ResidualMLP,
    SinhArcsinh,
    Squeeze,
    Standardiser,
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
from nicest.recipes.forest import STEEPEST, Forest
from nicest.recipes.recipe import DataSettings, Recipe

WIDEST = 6000  # columns that are whitened
Pixels = tuple[int, int] | None  # height and width of the images that a network reads, if it does


def build(recipe: Recipe, splits: Splits | None = None) -> Flow | Mixture:
    """Build the untrained flow of a recipe whose data.shape and data.levels are known; whitening is the identity.

    Parameters
    ----------
    recipe : Recipe
    splits : Splits, optional
        Tell which values the columns of a table have; without them stored weights must.
    """
    if recipe.own_flow:
        raise NicestError("this run holds a flow built by hand: build it again, then nicest.open(path, flow=it)")
    model, data = recipe.model, recipe.data
    dim = len(data.targets) or data.dim
    prior: Prior = {"logistic": Logistic, "gaussian": Gaussian}[model.prior](dim, learned=model.learned_prior)
    units = units_of(data, splits)
    if model.members > 1 and (data.levels or data.classes):
        raise NicestError(f"model.members is for tables: expected 1 for images, got {model.members}")
    if model.trees and len(data.targets) != 1:
        raise NicestError(f"model.trees is for tables with one target: expected 0 here, got {model.trees}")
    shape = (dim,) if data.targets else data.shape
    embedding: nn.Module | None = None
    if data.classes:
        embedding = OneHot(len(data.classes))
    elif data.targets:
        embedding = Standardiser(_context_categories(data))

    def member() -> Flow:
        chain = _chain(recipe, prior, enumerate(model.layers, 1), shape, units.first_layers())
        return Flow(units, chain, prior, embedding)

    if model.members == 1 and not model.trees:
        return member()
    members = [member() for _ in range(model.members)]
    if not model.trees:
        return Mixture(members)
    law = AffineSpline(model.bins, 5.0, STEEPEST)
    forest = Forest(data.dim - 1, law, prior, model.trees, model.leaves)
    grown = Flow(units, Chain({**units.first_layers(), "forest": Elementwise(law, 1, forest)}), prior, embedding)
    return Mixture([*members, grown], [1 / model.members] * model.members + [0.0])


def _context_categories(data: DataSettings) -> list[int]:
    """Return the number of categories of each column that is not a target, 0 for numbers."""
    return [count for i, count in enumerate(data.categories) if i not in data.targets]


def units_of(data: DataSettings, splits: Splits | None = None) -> Units:
    """Return the map from the data as it is stored to real numbers of a sensible size; of targets alone, if any."""
    if data.levels:
        low, high = data.interval
        try:
            return Units.pixels(data.dim, data.levels, (low, high))
        except ValueError as error:
            raise NicestError(f"data.interval: {error}") from error
    among = data.targets or range(data.dim)
    if not data.atoms:
        every = (splits and splits.steps) or (float(data.discrete > 0),) * data.dim
        return Units.columns([every[i] for i in among])
    if splits is None or splits.support is None:
        dim = len(among)
        return MixedUnits((0.0,) * dim, ((),) * dim, room=data.atoms)
    found = splits.support
    options = {"categories": found.categories, "unordered": found.unordered, "bounds": found.bounds}
    chosen = {name: [values[i] for i in among] for name, values in options.items()}
    steps, atoms = [found.steps[i] for i in among], [found.atoms[i] for i in among]
    return MixedUnits(steps, atoms, room=data.atoms, **chosen)  # type: ignore[arg-type]


def _chain(
    recipe: Recipe,
    prior: Prior,
    blocks: Iterator[tuple[int, Block]],
    shape: tuple[int, ...],
    first: Mapping[str, Bijection] | None = None,
) -> Chain:
    """Return the layers of these blocks, numbered, for examples of this shape; stored weights have their names."""
    layers = dict(first or {})
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
                if dim < 2 and not data.targets:
                    remedy = f"leave out block {i}" if listed else "set model.couplings=0"
                    raise NicestError(f"a coupling needs two parts, and this data has one column: {remedy}")
                law = _law(law_settings, f"model.blocks, block {i}: law")
                for _ in range(repeat):  # the roles of the two sets alternate
                    if dim < 2:
                        yield "coupling", Elementwise(law, 1, _reads_columns(data, 0, 1, law, network))
                        continue
                    last = partitions.get((split, shape))
                    partition = partitions[split, shape] = last.swap() if last else _partition(split, shape, i)
                    if mixing:
                        yield "mixing", ChannelMixing(_image(shape, f"block {i}: mixing"))
                    pixels = _pixels(split, shape) if isinstance(network, ConvNetwork) else None
                    sizes = (len(partition.i1), len(partition.i2), len(data.classes))
                    m: nn.Module
                    if data.targets:
                        m = _reads_columns(data, sizes[0], sizes[1], law, network)
                    else:
                        m = NETWORKS[network.kind](network, *sizes, law, pixels)
                    yield "coupling", Coupling(partition, law, m)
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


def _reads_columns(data: DataSettings, read: int, changed: int, law: Law, network: Any) -> FeatureNetwork:
    """Return a network that reads the context columns, and `read` targets, for laws of `changed` targets."""
    context = _context_categories(data)
    features = Features([*context, *[0] * read], [True] * len(context) + [False] * read)
    make = NETWORKS[network.kind]
    return FeatureNetwork(features, lambda inputs: make(network, inputs, changed, 0, law, None))


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
