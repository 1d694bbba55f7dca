"""The settings of a recipe by table: data, model, table, augment and train, each with its meaning."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from nicest.recipes.blocks import Block, Layer, layer_of, network_of
from nicest.recipes.checks import (
    BELOW_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    Rule,
    Settings,
    at_least,
    setting,
    within,
)

BETAS = Rule(
    "two numbers, in [0, 1) and [0.5, 1); the paper's beta2 = 0.01 weighs the new gradient: today's 0.99",
    lambda betas: len(betas) == 2 and 0 <= betas[0] < 1 and 0.5 <= betas[1] < 1,
)
BINS = Rule("0, or from 2 to 256", lambda bins: bins == 0 or 2 <= bins <= 256)
SIZE = Rule(
    "a height and a width", lambda size: not size or (len(size) == 2 and 1 <= min(size) <= max(size) <= 1 << 14)
)


@dataclass(frozen=True)
class DataSettings(Settings):
    """[data]: what is modelled."""

    name: str = setting("digits", "the name of a data set, or the path to a table, an array or a folder of images")
    kind: Literal["auto", "images", "table"] = setting(
        "auto", "what the data must be: a folder of images, a table, or anything"
    )
    crop: tuple[int, ...] = setting((), "crop the centre of every image in a folder: height, width", SIZE)
    resize: tuple[int, ...] = setting((), "then resize the images: height, width", SIZE)
    drop: tuple[str, ...] = setting((), "columns of a table to leave out")
    bounds: tuple[str, ...] = setting((), 'bounds of columns of a table, such as "0 <= age" or "0 <= share <= 1"')
    labels: bool = setting(False, "model images given their labels; of digits, mnist and folders in MNIST's layout")
    interval: tuple[float, ...] = setting(
        (0.0, 1.0),
        "the interval of dequantised pixels, on which nats are reported",
        Rule("two numbers, the first smaller", lambda pair: len(pair) == 2 and pair[0] < pair[1]),
    )
    valid: float = setting(
        0.1,
        "fraction of validation rows, if the data set has no split",
        Rule("between 0 and 1", lambda share: 0 < share < 1),
    )
    test: float = setting(0.1, "fraction of test rows, if the data set has no split")
    seed: int = setting(0, "seed of that split", within(0, 10**12))
    shape: tuple[int, ...] = setting(
        (),
        "shape of one example; taken from the data",
        Rule("sizes of at least 1", lambda shape: min(shape, default=1) >= 1),
    )
    levels: int = setting(
        0,
        "number of grey levels, 0 for continuous numbers; taken from the data unless given",
        Rule("0, or from 2 to 65536", lambda n: n == 0 or 2 <= n <= 65536),
    )
    classes: tuple[int, ...] = setting((), "with labels: training images of each label; taken from the data")
    context: int = setting(0, "with a flow of your own: columns at the end of a row that it is conditioned on")
    digest: str = setting("", "digest of all rows and their split; taken from the data")

    @property
    def dim(self) -> int:
        return math.prod(self.shape)

    @property
    def conditional(self) -> bool:
        """True if a model of this data is conditioned on labels or on a context."""
        return bool(self.classes or self.context)

    def split(self, rows: Any) -> tuple[Any, Any]:
        """Split stored rows into what is modelled and its context, or None."""
        count = self.context or int(bool(self.classes))
        return (rows[:, :-count], rows[:, -count:]) if count else (rows, None)

    def rules(self) -> Iterator[tuple[str, str, bool]]:
        yield "test", "between 0 and 1, with data.valid below 1 in all", 0 < self.test < 1 - self.valid
        classes = not self.classes or (self.labels and min(self.classes) > 0 and len(self.classes) <= 256)
        yield "classes", "at most 256 counts of at least 1, with data.labels", classes


@dataclass(frozen=True)
class ModelSettings(Settings):
    """[model]: the flow. `blocks` lists its layers; without them, the other settings describe the paper's stack."""

    preprocess: Literal["none", "zca", "triangular", "logit"] = setting(
        "none", "the first layer: exact ZCA whitening, triangular whitening (App. B, closed form), or logit"
    )
    shrinkage: float = setting(
        0.0, "how much whitening shrinks correlations: 0 not at all, 1 ignores them", within(0, 1)
    )
    marginals: Literal["none", "sinh-arcsinh"] = setting(
        "none", "before whitening, transform each column towards the skew and tails of a Gaussian"
    )
    elementwise: int = setting(0, "bins of a learned spline in every column, after `marginals`; 0 for none", BINS)
    mixing: bool = setting(False, "a learned linear layer before every coupling, and after the last")
    couplings: int = setting(4, "number of coupling layers, which take turns; 0 for a single column", within(0, 1000))
    partition: Literal["odd-even", "halves", "checkerboard"] = setting("odd-even", "how components are split")
    law: Literal["additive", "multiplicative", "affine", "spline", "affine-spline"] = setting(
        "additive", "the coupling law"
    )
    bound: float = setting(2.0, "largest absolute log-scale of the multiplicative and affine laws", POSITIVE)
    bins: int = setting(8, "bins of the spline laws", within(2, 256))
    network: Literal["mlp", "residual"] = setting("mlp", "the network of each coupling: plain, or with residual blocks")
    hidden_layers: tuple[int, ...] = setting(
        (5,), "hidden layers of each network, or one number for all; a residual block has two"
    )
    width: int = setting(1000, "units of every hidden layer", within(1, 100_000))
    dropout: float = setting(0.0, "dropout after every rectifier", BELOW_ONE)
    initialisation: Literal["torch", "uniform", "zero-last", "whitened"] = setting(
        "torch",
        "torch's default; weights U(-0.01, 0.01) and biases 0; last layer 0; or that, with the scaling set so that"
        " whitened data has the variance of the prior",
    )
    prior: Literal["logistic", "gaussian"] = setting("logistic", "the factorial prior")
    learned_prior: bool = setting(False, "learn the location and scale of the prior in every dimension")
    blocks: tuple[Layer, ...] = setting(
        (), "the layers, as [[model.blocks]], instead of all settings above except the prior"
    )

    @property
    def layers(self) -> tuple[Block, ...]:
        """The blocks of the model: those listed, or those that the other settings describe."""
        if self.blocks:
            return self.blocks
        spline, zca = Block("spline", (("bins", self.elementwise),)), self.preprocess in ("zca", "triangular")
        listed: list[tuple[str, dict[str, Any]]] = [
            *([("logit", {})] if self.preprocess == "logit" else []),
            *([("sinh-arcsinh", {})] if self.marginals == "sinh-arcsinh" else []),
            *([("elementwise", {"law": spline})] if self.elementwise else []),
            *([(self.preprocess, {"shrinkage": self.shrinkage})] if zca else []),
            *(self._couplings() if self.couplings else []),
            ("scaling", {"initialisation": "prior" if self.initialisation == "whitened" else "identity"}),
        ]
        return tuple(layer_of(kind, **settings) for kind, settings in listed)

    def _couplings(self) -> Iterator[tuple[str, dict[str, Any]]]:
        bins, bound = ("bins", self.bins), self.bound
        special: dict[str, Any] = {"additive": (), "spline": (bins,), "affine-spline": (bins, ("log_scale", bound))}
        law = Block(self.law, special.get(self.law, (("bound", bound),)))
        starts = "zero-last" if self.initialisation == "whitened" else self.initialisation
        options: dict[str, Any] = {"width": self.width, "dropout": self.dropout, "initialisation": starts}
        alike = len(self.hidden_layers) == 1
        mixing: list[tuple[str, dict[str, Any]]] = [("mixing", {})] if self.mixing else []
        for depth in self.hidden_layers * self.couplings if alike and mixing else self.hidden_layers:
            size = {"blocks": depth // 2} if self.network == "residual" else {"hidden_layers": depth}
            network = network_of(self.network, **size, **options)
            repeat = self.couplings if alike and not mixing else 1
            yield from mixing
            yield "coupling", {"repeat": repeat, "partition": self.partition, "law": law, "network": network}
        yield from mixing

    @property
    def n_layers(self) -> int:
        """The number of linear layers in all coupling functions."""
        return sum(block.n_layers for block in self.layers)

    def changed(self, changes: Mapping[str, Any]) -> ModelSettings:
        """Change some settings; a list of blocks replaces the settings that are short for one."""
        if not changes.get("blocks"):
            return replace(self, **changes)
        kept = {"prior": self.prior, "learned_prior": self.learned_prior}
        return ModelSettings(**{**kept, **changes})

    def rules(self) -> Iterator[tuple[str, str, bool]]:
        depths = self.hidden_layers
        expected = f"one number, or one for each of the {self.couplings} couplings, from 0 to 1000"
        yield "hidden_layers", expected, len(depths) in (1, self.couplings) and all(0 <= n <= 1000 for n in depths)
        networks = ((b["repeat"], b["network"]) for b in self.layers if b.kind == "coupling")
        weights = sum(n * (m.n_layers - 2) * m["width"] ** 2 for n, m in networks)
        yield "width", "small enough for 2^32 weights in all", weights <= 1 << 32
        for name in SHORT if self.blocks else ():
            default = getattr(ModelSettings, name)
            yield name, "left out where model.blocks lists the layers", getattr(self, name) == default
        first = all(block.kind != "logit" for block in self.blocks[1:])
        yield "blocks", "free of logit after the first block", first


KEPT = "prior", "learned_prior", "blocks"
SHORT = tuple(e.name for e in fields(ModelSettings) if e.name not in KEPT)


@dataclass(frozen=True)
class TableSettings(Settings):
    """[table]: the network of a table, which gives p(a cell | any observed cells)."""

    width: int = setting(128, "units of every hidden layer", within(1, 100_000))
    depth: int = setting(3, "residual blocks", within(0, 1000))
    components: int = setting(12, "components of the mixture of each column of numbers", within(1, 1000))
    dropout: float = setting(0.1, "dropout inside every block", BELOW_ONE)
    members: int = setting(1, "networks whose distributions are averaged", within(1, 100))
    orders: int = setting(2, "random orders of the columns that a density is averaged over", within(1, 1000))
    targets: tuple[str, ...] = setting((), "columns to predict, which training then favours")
    favour: float = setting(0.5, "with targets: fraction of the masks that hide targets only", within(0, 1))


@dataclass(frozen=True)
class AugmentSettings(Settings):
    """[augment]: how training images are varied."""

    share: float = setting(0.0, "fraction of each batch that is warped; 0 for none", within(0, 1))
    rotation: float = setting(
        0.0, "largest rotation, in radians", Rule("from 0 to pi", lambda angle: 0 <= angle <= math.pi)
    )
    scale: float = setting(0.0, "largest absolute log-scale of each axis", within(0, 2))
    shear: float = setting(0.0, "largest shear, in pixels sideways per pixel down", within(0, 10_000))
    shift: float = setting(0.0, "largest shift along each axis, in pixels", within(0, 10_000))
    elastic: float = setting(0.0, "standard deviation of the elastic displacements, in pixels", within(0, 10_000))
    grid: int = setting(5, "control points of the elastic displacements along each axis", within(2, 64))
    flip: bool = setting(False, "mirror left and right with probability 1/2")
    contrast: float = setting(
        1.0,
        "contrast of warped images; above 1 counteracts the blur of warping",
        Rule("above 0, and at most 10000", lambda factor: 0 < factor <= 10_000),
    )
    padding: Literal["zeros", "border", "reflection"] = setting("zeros", "what lies outside the image")


@dataclass(frozen=True)
class TrainSettings(Settings):
    """[train]: how it is trained."""

    epochs: int = setting(1500, "passes over the training data", at_least(1))
    batch: int = setting(200, "examples per step", at_least(1))
    optimizer: Literal["adam", "rmsprop"] = setting("adam", "Adam, or the released code's RMSProp with momentum")
    lr: float = setting(1e-3, "learning rate", POSITIVE)
    betas: tuple[float, ...] = setting((0.9, 0.99), "decay rates of Adam's averages", BETAS)
    eps: float = setting(1e-4, "Adam's epsilon", POSITIVE)
    weight_decay: float = setting(0.0, "decoupled weight decay (AdamW), of weight matrices only", NOT_NEGATIVE)
    schedule: Literal["constant", "cosine", "exponential"] = setting(
        "constant", "learning rate: constant, down to 0 by a cosine, or divided by lr_decay at each step"
    )
    warmup: int = setting(0, "steps over which the learning rate rises from 0", NOT_NEGATIVE)
    lr_decay: float = setting(1.0005, "exponential schedule: divisor per step", at_least(1))
    lr_floor: float = setting(0.0, "exponential schedule: smallest learning rate")
    loss: Literal["nats", "nats-per-dim"] = setting("nats", "unit of the loss; it matters for eps and clip")
    label_weight: float = setting(
        0.0,
        "of images with labels: weight of -log p(label | image), between the label and another one; doubles the work",
        NOT_NEGATIVE,
    )
    clip: float = setting(0.0, "largest norm of the gradient; 0 for no clipping", NOT_NEGATIVE)
    ema: float = setting(
        0.0, "decay of the average of the weights, which is then evaluated and kept; 0 for none", BELOW_ONE
    )
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "dtype inside the coupling functions; auto is bfloat16 on a GPU and float32 on a CPU"
    )
    sharding: Literal["none", "full"] = setting(
        "none", "under torchrun: each process holds all weights, or a part of them"
    )
    effort: Literal["low", "medium", "high"] = setting(
        "medium", "work for a table with `sized`: seconds, a minute, or minutes"
    )
    evaluate_every: int = setting(1, "epochs between validations; the best model is kept", at_least(1))
    patience: int = setting(0, "stop after this many epochs without improvement; 0 for never", NOT_NEGATIVE)
    seed: int = setting(
        0,
        "seed of initialisation, order of examples and noise",
        Rule("from 0 to 10^12", lambda seed: 0 <= seed <= 10**12),
    )

    def rules(self) -> Iterator[tuple[str, str, bool]]:
        decays = self.optimizer == "adam"
        yield "weight_decay", "0 for rmsprop, which has no decay", self.weight_decay == 0 or decays
        yield "lr_floor", "between 0 and train.lr", 0 <= self.lr_floor <= self.lr
