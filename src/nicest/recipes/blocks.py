"""The layers that a recipe may list, each built by a function whose arguments with a default are its settings.

To add a layer or a network, write and decorate such a function. torch is imported when the first one is built.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import nicest
from nicest.errors import NicestError
from nicest.messages import shown
from nicest.recipes.checks import BELOW_ONE, Scalar, coerce, settings_of, within

if TYPE_CHECKING:
    import nicest.flows
    from nicest.flows import Chain, Law, Partition, Prior
    from nicest.recipes.settings import DataSettings

Kinds = dict[str, Callable[..., Any]]
LAYERS: Kinds = {}  # functions of a `Stack`, which yield layers with their names
NETWORKS: Kinds = {}  # functions of a `Join`
WIDEST = 6000  # columns that are whitened


@dataclass(frozen=True)
class Block:
    """What a recipe writes as a table with its `kind`: a layer, a coupling law or a coupling function."""

    kind: str
    settings: tuple[tuple[str, Any], ...] = ()

    def table(self) -> dict[str, Any]:
        return {"kind": self.kind} | dict(self.settings)

    def __getitem__(self, name: str) -> Any:
        return dict(self.settings)[name]

    @property
    def n_layers(self) -> int:
        """The number of linear layers inside."""
        if self.kind == "coupling":
            return self["repeat"] * self["network"].n_layers
        return self["hidden_layers"] + 1 if self.kind == "mlp" else 2 * dict(self.settings).get("blocks", -1) + 2


def read(kinds: Kinds, table: Any, where: str) -> Block:
    """Check a table and make it a block, with all its settings."""
    return table if isinstance(table, Block) else Block(*settings_of(table, kinds, where))


def _make(kinds: Kinds, kind: str, **settings: Any) -> Block:
    return read(kinds, {"kind": kind} | settings, f"{kind}: ")


# make checked blocks: layer_of("zca", shrinkage=0.1); what is left out has its default
layer_of, network_of = partial(_make, LAYERS), partial(_make, NETWORKS)


def read_law(table: Any, where: str) -> Block:
    """Make a table a law, whose keys are words; its class in `LAWS` checks the settings when it is built."""
    name = where.rstrip(".")
    if isinstance(table, Block):
        return table
    if not isinstance(table, Mapping) or "kind" not in table:
        raise NicestError(f'{name} is a table with a kind, such as {{ kind = "affine" }}; got {shown(table)}')
    if odd := [key for key in table if not (key.isascii() and key.isidentifier())]:
        raise NicestError(f"{name}: unknown key {shown(odd[0])}")
    types = {key: tuple[Scalar, ...] if isinstance(each, list) else Scalar for key, each in table.items()}
    made = {key: coerce(each, str if key == "kind" else types[key], where + key) for key, each in table.items()}
    return Block(made.pop("kind"), tuple(sorted(made.items())))


def kind(kinds: Kinds, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the decorated function the builder of a kind of block."""
    return lambda builder: kinds.setdefault(name, builder)


Layer = Annotated[Block, partial(read, LAYERS)]
Network = Annotated[Block, partial(read, NETWORKS)]
LawBlock = Annotated[Block, read_law]
Starts = Literal["torch", "uniform", "zero-last"]
ADDITIVE, MARGINAL = Block("additive"), Block("spline", (("bins", 32),))
Fraction = Annotated[float, within(0, 1)]
Rate = Annotated[float, BELOW_ONE]
Depth = Annotated[int, within(0, 1000)]
Width = Annotated[int, within(1, 100_000)]


@dataclass
class Stack:
    """The blocks that are still to be built, numbered, and what they are built for."""

    data: DataSettings
    prior: Prior
    listed: bool  # in model.blocks
    blocks: Iterator[tuple[int, Block]]
    shape: tuple[int, ...]  # of the examples that reach this block
    number: int = 0  # of this block
    partitions: dict[Any, Partition] = field(default_factory=dict)  # the last of each kind

    @property
    def dim(self) -> int:
        return math.prod(self.shape)

    @property
    def context(self) -> int:
        return len(self.data.classes)

    def chain(self) -> Chain:
        """Build the blocks that are left; stored weights have the names of the layers."""
        layers: dict[str, Any] = {}
        count: Counter[str] = Counter()
        for number, block in self.blocks:
            self.number = number
            for name, layer in LAYERS[block.kind](self, **dict(block.settings)):
                count[name] += 1
                layers[f"{name}{count[name]}" if count[name] > 1 or name == "coupling" else name] = layer
        return nicest.flows.Chain(layers)

    def without(self, setting: str) -> str:
        """Return how to do without this block."""
        return f"leave out block {self.number}" if self.listed else f"set model.{setting}"

    def image(self, what: str) -> tuple[int, int, int]:
        """Return channels, height and width of images; raise a NicestError for other data."""
        if len(self.shape) not in (2, 3):
            raise NicestError(f"{what} is for images, (H, W) or (C, H, W); these examples are {self.shape}")
        count, height, width = (1, *self.shape)[-3:]
        return count, height, width

    def law(self, block: Block) -> Law:
        """Build a law, whose settings are the fields of its class."""
        import torch

        laws, where = nicest.flows.LAWS, f"model.blocks, block {self.number}: law"
        try:
            kind, settings = settings_of(block.table(), laws, f"{where}.")
            law = laws[kind](**dict(settings))
            with torch.device("cpu"):  # where a flow is only sketched, on "meta", sums would import torch's compiler
                law.forward(torch.zeros(1, 1), torch.zeros(1, 1, law.size))
        except ValueError as error:
            raise NicestError(f"{where}: {error}") from error
        return law

    def partition(self, split: str) -> Partition:
        """Return the next partition of a kind: the roles of the two sets alternate."""
        if last := self.partitions.get((split, self.shape)):
            return last.swap()
        if split == "checkerboard":
            count, height, width = self.image("a checkerboard")
            return nicest.flows.checkerboard(height, width, count)
        if split == "channels":
            count, height, width = self.image(f"block {self.number}: partition channels")
            if count < 2:
                remedy = "squeeze first, or use a checkerboard"
                raise NicestError(f"block {self.number}: one channel cannot be split: {remedy}")
            return nicest.flows.channels(count, height, width)
        return (nicest.flows.halves if split == "halves" else nicest.flows.odd_even)(self.dim)


Layers = Iterator[tuple[str, Any]]


@kind(LAYERS, "logit")
def _logit(at: Stack) -> Layers:
    if not at.data.levels:
        what = f"block {at.number}: logit" if at.listed else "preprocess = logit"
        raise NicestError(f"{what} is for pixels in [0, 1]; this data is continuous")
    yield "logit", nicest.flows.Logit()


@kind(LAYERS, "sinh-arcsinh")
def _sinh_arcsinh(at: Stack) -> Layers:
    yield "marginals", nicest.flows.SinhArcsinh(at.dim)


@kind(LAYERS, "zca")
def _zca(at: Stack, shrinkage: Fraction = 0.0) -> Layers:
    if at.dim > WIDEST:
        remedy = at.without("preprocess=none")
        raise NicestError(f"whitening {at.dim} columns takes hours, beyond {WIDEST}: {remedy}")
    yield "zca", nicest.flows.ZCA(at.dim, shrinkage=shrinkage)


@kind(LAYERS, "triangular")
def _triangular(at: Stack, shrinkage: Fraction = 0.0) -> Layers:
    # fitted in closed form, then held: App. B learns the whitening before NICE, not with it
    yield "whitening", nicest.flows.TriangularAffine(at.dim, shrinkage=shrinkage).requires_grad_(False)


@kind(LAYERS, "elementwise")
def _elementwise(at: Stack, law: LawBlock = MARGINAL) -> Layers:
    made, conditioner = at.law(law), None
    if at.context:
        linear = nicest.flows.MLP(at.context, at.dim * made.size, (), initialisation="zero-last")
        conditioner = linear.layers[0]
    yield "elementwise", nicest.flows.Elementwise(made, at.dim, conditioner)


@kind(LAYERS, "squeeze")
def _squeeze(at: Stack, by: Annotated[int, within(2, 1000)] = 2) -> Layers:
    try:
        layer = nicest.flows.Squeeze(at.image(f"block {at.number}: squeeze"), (by, by))
    except ValueError as error:
        remedy = "crop or resize the images, set by to a number that divides both, or leave out the block"
        raise NicestError(f"block {at.number}: squeeze: {error}: {remedy}") from error
    at.shape = layer.squeezed
    yield "squeeze", layer


class Join(NamedTuple):
    """Where a coupling function stands: the parts that it joins, and the law whose parameters it returns."""

    at: Stack
    split: str  # the kind of the partition
    part: Partition
    law: Law

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers that go in, without the context, and those that come out."""
        return len(self.part.i1), self.law.size * len(self.part.i2)


@kind(NETWORKS, "mlp")
def _mlp(
    join: Join, hidden_layers: Depth = 5, width: Width = 1000, dropout: Rate = 0.0, initialisation: Starts = "torch"
) -> Any:
    options: dict[str, Any] = {"dropout": dropout, "initialisation": initialisation, "context_dim": join.at.context}
    return nicest.flows.MLP(*join.sizes, (width,) * hidden_layers, **options)


@kind(NETWORKS, "residual")
def _residual(
    join: Join, blocks: Depth = 2, width: Width = 128, dropout: Rate = 0.0, initialisation: Starts = "zero-last"
) -> Any:
    options: dict[str, Any] = {"dropout": dropout, "initialisation": initialisation, "context_dim": join.at.context}
    return nicest.flows.ResidualMLP(*join.sizes, width, blocks, **options)


@kind(NETWORKS, "conv")
def _conv(join: Join, blocks: Depth = 2, width: Annotated[int, within(1, 10_000)] = 64, dropout: Rate = 0.0) -> Any:
    _, height, columns = join.at.image("network conv")
    if join.split not in ("channels", "checkerboard"):
        raise NicestError(f"network conv takes partition channels or checkerboard; got {join.split}")
    if join.split == "checkerboard":
        if columns % 2:
            raise NicestError(f"network conv takes images of even width; got {height} x {columns}")
        columns //= 2  # the sets form images of half the width
    inputs, changed = (len(each) // (height * columns) for each in (join.part.i1, join.part.i2))
    options: dict[str, Any] = {"dropout": dropout, "context_dim": join.at.context}
    return nicest.flows.ConvNet((inputs, height, columns), changed, join.law.size, width, blocks, **options)


PLAIN = network_of("mlp")


@kind(LAYERS, "coupling")
def _coupling(
    at: Stack,
    repeat: Annotated[int, within(1, 1000)] = 1,
    partition: Literal["odd-even", "halves", "checkerboard", "channels"] = "odd-even",
    law: LawBlock = ADDITIVE,
    network: Network = PLAIN,
    mixing: bool = False,
) -> Layers:
    if at.dim < 2:
        raise NicestError(f"a coupling needs two parts, and this data has one column: {at.without('couplings=0')}")
    made = at.law(law)
    for _ in range(repeat):
        part = at.partitions[partition, at.shape] = at.partition(partition)
        if mixing:
            yield "mixing", nicest.flows.ChannelMixing(at.image(f"block {at.number}: mixing"))
        function = NETWORKS[network.kind](Join(at, partition, part, made), **dict(network.settings))
        yield "coupling", nicest.flows.Coupling(part, made, function)


@kind(LAYERS, "factor-out")
def _factor_out(at: Stack) -> Layers:
    count, height, width = at.image(f"block {at.number}: factor-out")
    if count < 2:
        raise NicestError(f"block {at.number}: factor-out takes half of the channels, got 1: squeeze first")
    out = count // 2
    kept = nicest.flows.Partition(range(out * height * width), at.dim)
    rest = replace(at, shape=(count - out, height, width), partitions={})  # takes the blocks that are left
    yield "rest", nicest.flows.Within(kept, rest.chain())


@kind(LAYERS, "mixing")
def _mixing(at: Stack) -> Layers:
    if at.dim > 1:
        yield "mixing", nicest.flows.Mixing(at.dim)


@kind(LAYERS, "scaling")
def _scaling(at: Stack, initialisation: Literal["identity", "prior"] = "identity") -> Layers:
    layer = nicest.flows.DiagonalScaling(at.dim)
    if initialisation == "prior":  # data of variance 1 gets the variance of the prior
        layer.s.data.fill_(math.log(at.prior.standard_deviation))
    yield "scaling", layer
