"""What a recipe may say: every field with its meaning, read from TOML and checked (no torch here)."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from nicest.errors import NicestError
from nicest.messages import nearest, shown

TABLES = ("data", "model", "augment", "train")
LONGEST = 1 << 13  # characters of a recipe: the time that tomllib takes grows with the square of a dotted key


def setting(default: Any, help: str) -> Any:
    """A field of a recipe: its default and what it means."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class DataSettings:
    """[data]: what is modelled."""

    name: str = setting("digits", "a data set by name, or a path to a table, to idx, npy, npz or image files")
    kind: Literal["auto", "images", "table"] = setting(
        "auto", "what the data must be: a folder of images, a table, or whatever its name says"
    )
    crop: tuple[int, ...] = setting((), "height and width of the middle that is kept of every image of a folder")
    resize: tuple[int, ...] = setting((), "height and width to which images of a folder are then resized")
    drop: tuple[str, ...] = setting((), "columns of a table to leave out")
    interval: tuple[float, ...] = setting((0.0, 1.0), "where dequantised pixels lie; nats are reported on it")
    valid: float = setting(0.1, "share held out for validation, where the data set has no split of its own")
    test: float = setting(0.1, "share held out for testing, where the data set has no split of its own")
    seed: int = setting(0, "seed of that split")
    shape: tuple[int, ...] = setting((), "shape of one example; taken from the data")
    levels: int = setting(0, "number of grey levels, 0 for continuous numbers; taken from the data unless given")
    discrete: int = setting(0, "columns of a table that hold whole steps or few values; taken from the data")
    digest: str = setting("", "fingerprint of all rows and their split; taken from the data")

    @property
    def dim(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelSettings:
    """[model]: the flow."""

    preprocess: Literal["none", "zca", "triangular", "logit"] = setting(
        "none", "exact ZCA, approximate whitening (App. B, closed form), or logit, as a layer of the flow"
    )
    shrinkage: float = setting(0.0, "share of every correlation that whitening does not believe, against few rows")
    marginals: Literal["none", "sinh-arcsinh"] = setting(
        "none", "before the whitening, bend each column until its skew and tails are a Gaussian's, as a layer"
    )
    couplings: int = setting(4, "number of coupling layers; their roles alternate; none for a single column")
    partition: Literal["odd-even", "halves", "checkerboard"] = setting("odd-even", "how components are split")
    law: Literal["additive", "multiplicative", "affine"] = setting("additive", "the coupling law")
    bound: float = setting(2.0, "largest absolute log-scale of the multiplicative and affine laws")
    hidden_layers: tuple[int, ...] = setting((5,), "hidden layers of each coupling function, or one number for all")
    width: int = setting(1000, "units of every hidden layer")
    dropout: float = setting(0.0, "dropout after every rectifier")
    initialisation: Literal["torch", "uniform", "zero-last", "whitened"] = setting(
        "torch",
        "torch's own; weights U(-0.01, 0.01) and biases 0; torch's with the last layer 0; or that, and the scaling"
        " such that whitened data has the variance of the prior",
    )
    prior: Literal["logistic", "gaussian"] = setting("logistic", "the factorial prior")
    learned_prior: bool = setting(False, "learn location and scale of the prior in every dimension")


@dataclass(frozen=True)
class AugmentSettings:
    """[augment]: how training images are varied."""

    share: float = setting(0.0, "share of every batch that is warped; 0 for none")
    rotation: float = setting(0.0, "largest rotation, in radians")
    scale: float = setting(0.0, "largest absolute log-scale of each axis")
    shear: float = setting(0.0, "largest shear, in pixels to the side for each pixel down")
    shift: float = setting(0.0, "largest shift along each axis, in pixels")
    elastic: float = setting(0.0, "standard deviation of the elastic displacements, in pixels")
    grid: int = setting(5, "control points of the elastic displacements along each axis")
    flip: bool = setting(False, "mirror left and right with probability 1/2")
    contrast: float = setting(1.0, "factor of warped levels about the middle grey; above 1 undoes the blur of warping")
    padding: Literal["zeros", "border", "reflection"] = setting("zeros", "what lies outside the image")


@dataclass(frozen=True)
class TrainSettings:
    """[train]: how it is trained."""

    epochs: int = setting(1500, "passes over the training data")
    batch: int = setting(200, "examples in a step")
    optimizer: Literal["adam", "rmsprop"] = setting("adam", "Adam, or the released code's RMSProp with momentum")
    lr: float = setting(1e-3, "learning rate")
    betas: tuple[float, ...] = setting((0.9, 0.99), "Adam's averaging factors, in today's notation")
    eps: float = setting(1e-4, "Adam's epsilon")
    weight_decay: float = setting(0.0, "Adam's decoupled decay (AdamW), of weight matrices only")
    schedule: Literal["constant", "cosine", "exponential"] = setting(
        "constant", "the learning rate over the steps: as it is, to 0 by a cosine, or divided by lr_decay each step"
    )
    warmup: int = setting(0, "steps over which the learning rate rises from 0")
    lr_decay: float = setting(1.0005, "exponential schedule: the divisor of each step")
    lr_floor: float = setting(0.0, "exponential schedule: the least learning rate")
    loss: Literal["nats", "nats-per-dim"] = setting(
        "nats", "unit of the loss that is differentiated; Adam's eps and clip see it"
    )
    clip: float = setting(0.0, "largest norm of the gradient; 0 for no clipping")
    ema: float = setting(0.0, "decay of the moving average of the weights that is evaluated and kept; 0 for none")
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "dtype inside the coupling functions; auto is bfloat16 on a GPU and float32 on a CPU"
    )
    sharding: Literal["none", "full"] = setting(
        "none", "under torchrun: each process holds all weights, or, for models beyond one GPU, its part of them"
    )
    evaluate_every: int = setting(1, "epochs between two validations; the best model by validation is kept")
    patience: int = setting(0, "epochs without a better validation after which training stops; 0 to run them all")
    seed: int = setting(0, "seed of the initialisation, the order of examples and the noise")


@dataclass(frozen=True)
class Recipe:
    """Everything needed to train one model."""

    name: str = setting("", "the recipe's name")
    title: str = setting("", "one line about it")
    reading: Literal["text", "released", "best", "ours"] = setting(
        "ours", "which source it follows: the paper's text, the authors' released code, or neither"
    )
    paper_nats: float | None = setting(None, "the paper's test log-likelihood for this data set")
    expected_nats: float | None = setting(None, "what we measured on the test set with this recipe")
    own_flow: bool = setting(False, "the flow was built by hand: [model] does not describe it")
    sized: bool = setting(False, "choose model and train, but for what is set, from the rows and columns of the data")
    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    augment: AugmentSettings = field(default_factory=AugmentSettings)
    train: TrainSettings = field(default_factory=TrainSettings)

    def __post_init__(self) -> None:
        _check(self)

    def changed(self, table: Mapping[str, Any], source: str) -> Recipe:
        """The recipe with the settings of a table of tables, such as {"train": {"epochs": 50}}, checked."""
        return _merge(self, dict(table), source)

    def override(self, *assignments: str) -> Recipe:
        """The recipe with `key=value` settings changed, such as `train.epochs=50`; values are TOML, or plain words."""
        table: dict[str, Any] = {}
        for assignment in assignments:
            key, equals, text = assignment.partition("=")
            if not equals or len(assignment) > LONGEST:
                raise NicestError(f"expected KEY=VALUE, such as train.epochs=50, got {shown(assignment)}")
            try:
                value = tomllib.loads(f"value = {text}")["value"]
            except (ValueError, RecursionError):  # no TOML, or numbers and lists beyond all bounds
                value = text
            *path, last = key.strip().split(".")
            inner = table
            for name in path:
                inner = inner.setdefault(name, {})
                if not isinstance(inner, dict):
                    raise NicestError(f"{shown(name)} is set twice, once as a table: {shown(assignment)}")
            inner[last] = value
        changed = _merge(self, table, "--set")
        if (changed.data.name, changed.data.interval) == (self.data.name, self.data.interval):
            return changed
        # figures and title were of the data the recipe came with
        title = f"recipe {self.name} on {Path(changed.data.name).name}"
        return replace(changed, title=title, reading="ours", paper_nats=None, expected_nats=None)

    def to_toml(self) -> str:
        """The recipe as TOML, every setting written out with its meaning."""
        sections = (["", f"[{part}]", *_lines(getattr(self, part))] for part in TABLES)
        return "\n".join([*_lines(self), *(line for section in sections for line in section), ""])


def names() -> list[str]:
    """The recipes that come with nicest."""
    folder = resources.files("nicest.recipes")
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def load_recipe(name: str) -> Recipe:
    """A recipe by its name, or from a TOML file of your own."""
    if name in names():
        return parse((resources.files("nicest.recipes") / f"{name}.toml").read_text(), name)
    path = Path(name)
    if path.suffix == ".toml":
        if not path.is_file():
            raise NicestError(f"no recipe file {path}; the recipes that come with nicest are {', '.join(names())}")
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise NicestError(f"{path} cannot be read as a recipe: {error}") from error
        return parse(text, str(path))
    raise NicestError(f"no recipe {name!r}{nearest(name, names())}; there are {', '.join(names())}, or a .toml file")


def parse(text: str, source: str) -> Recipe:
    """A recipe from the text of a TOML file; `source` is named in errors."""
    if len(text) > LONGEST:
        raise NicestError(f"{source}: expected a recipe of at most {LONGEST} characters, got {len(text)}: shorten it")
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for numbers of too many digits and lists in lists in lists
        raise NicestError(f"{source} is not valid TOML: {error}") from error
    table.setdefault("name", Path(source).stem)
    return _merge(Recipe(), table, source)


def _merge(settings: Any, table: dict[str, Any], source: str, prefix: str = "") -> Any:
    """`settings` with the values of `table`, which must be of the right names and types."""
    hints = get_type_hints(type(settings))
    changes = {}
    for key, value in table.items():
        if key not in hints:
            raise NicestError(f"{source}: unknown key {shown(prefix + key)}{_nearest_key(prefix + key)}")
        current = getattr(settings, key)
        if is_dataclass(current):
            if not isinstance(value, dict):
                raise NicestError(f"{source}: {prefix + key!r} is a table of settings, got {shown(value)}")
            changes[key] = _merge(current, value, source, f"{prefix}{key}.")
        else:
            changes[key] = _coerce(value, hints[key], f"{source}: {prefix + key}")
    return replace(settings, **changes)


def _coerce(value: Any, kind: Any, where: str) -> Any:
    """`value` as `kind`, or an error that says what was expected."""
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if value in choices:
            return value
        near = nearest(value, choices) if isinstance(value, str) else ""
        raise NicestError(f"{where} is one of {', '.join(choices)}; got {shown(value)}{near}")
    if get_origin(kind) is tuple:
        of = get_args(kind)[0]
        if isinstance(value, str) and of is not str:
            raise NicestError(f"{where} is of type {of.__name__}; got {shown(value)}; several are written as [1,2]")
        return tuple(_coerce(each, of, where) for each in (value if isinstance(value, list) else [value]))
    kinds = [each for each in (get_args(kind) or (kind,)) if each is not type(None)]
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise NicestError(f"{where} must be a number below 2^63; got {shown(value)}")
    if isinstance(value, str) and not value.isascii() and any("\ud800" <= each <= "\udfff" for each in value):
        raise NicestError(f"{where} must be of characters that UTF-8 can write; got {shown(value)}")
    if kinds == [float] and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise NicestError(f"{where} must be a finite number; got {value}")
    if type(value) in kinds:
        return value
    raise NicestError(f"{where} is of type {kinds[0].__name__}; got {shown(value)}")


def _check(recipe: Recipe) -> None:
    """Refuse values that have the right type and no meaning."""
    data, model, augment, train = recipe.data, recipe.model, recipe.augment, recipe.train
    interval = data.interval
    rules = [
        (
            "data.interval",
            list(interval),
            "two numbers, the first smaller",
            len(interval) == 2 and interval[0] < interval[-1],
        ),
        ("data.crop", list(data.crop), "a height and a width", _is_size(data.crop)),
        ("data.resize", list(data.resize), "a height and a width", _is_size(data.resize)),
        ("data.valid", data.valid, "between 0 and 1", 0 < data.valid < 1),
        ("data.test", data.test, "between 0 and 1, with data.valid below 1 in all", 0 < data.test < 1 - data.valid),
        ("data.shape", list(data.shape), "sizes of at least 1", min(data.shape, default=1) >= 1),
        ("data.levels", data.levels, "0, or from 2 to 65536", data.levels == 0 or 2 <= data.levels <= 65536),
        ("model.shrinkage", model.shrinkage, "from 0 to 1", 0 <= model.shrinkage <= 1),
        ("model.couplings", model.couplings, "not negative", model.couplings >= 0),
        (
            "model.hidden_layers",
            list(model.hidden_layers),
            f"one number, or one for each of the {model.couplings} couplings, none negative",
            len(model.hidden_layers) in (1, model.couplings) and min(model.hidden_layers, default=-1) >= 0,
        ),
        ("model.width", model.width, "at least 1", model.width >= 1),
        ("model.bound", model.bound, "positive", model.bound > 0),
        ("model.dropout", model.dropout, "in [0, 1)", 0 <= model.dropout < 1),
        (
            "model.preprocess",
            model.preprocess,
            "not logit unless data.interval is [0, 1]",
            model.preprocess != "logit" or interval == (0.0, 1.0),
        ),
        ("augment.share", augment.share, "from 0 to 1", 0 <= augment.share <= 1),
        ("augment.rotation", augment.rotation, "from 0 to pi", 0 <= augment.rotation <= math.pi),
        ("augment.scale", augment.scale, "from 0 to 2", 0 <= augment.scale <= 2),
        ("augment.shear", augment.shear, "not negative", augment.shear >= 0),
        ("augment.shift", augment.shift, "not negative", augment.shift >= 0),
        ("augment.elastic", augment.elastic, "not negative", augment.elastic >= 0),
        ("augment.grid", augment.grid, "from 2 to 64", 2 <= augment.grid <= 64),
        ("augment.contrast", augment.contrast, "positive", augment.contrast > 0),
        ("train.epochs", train.epochs, "at least 1", train.epochs >= 1),
        ("train.batch", train.batch, "at least 1", train.batch >= 1),
        ("train.lr", train.lr, "positive", train.lr > 0),
        ("train.eps", train.eps, "positive", train.eps > 0),
        (
            "train.betas",
            list(train.betas),
            "two numbers, in [0, 1) and [0.5, 1); the paper's beta2 = 0.01 weighs the new gradient: today's 0.99",
            len(train.betas) == 2 and 0 <= train.betas[0] < 1 and 0.5 <= train.betas[-1] < 1,
        ),
        ("train.weight_decay", train.weight_decay, "not negative", train.weight_decay >= 0),
        (
            "train.weight_decay",
            train.weight_decay,
            "0 for rmsprop, which has no decay",
            train.weight_decay == 0 or train.optimizer == "adam",
        ),
        ("train.warmup", train.warmup, "not negative", train.warmup >= 0),
        ("train.lr_decay", train.lr_decay, "at least 1", train.lr_decay >= 1),
        ("train.lr_floor", train.lr_floor, "between 0 and train.lr", 0 <= train.lr_floor <= train.lr),
        ("train.clip", train.clip, "not negative", train.clip >= 0),
        ("train.ema", train.ema, "in [0, 1)", 0 <= train.ema < 1),
        ("train.evaluate_every", train.evaluate_every, "at least 1", train.evaluate_every >= 1),
        ("train.patience", train.patience, "not negative", train.patience >= 0),
        ("train.seed", train.seed, "from 0 to 10^12", 0 <= train.seed <= 10**12),
    ]
    for name, value, expected, holds in rules:
        if not holds:
            whose = shown(recipe.name)[1:-1] or "recipe"
            raise NicestError(f"{whose}: {name} must be {expected}; got {shown(value)}")
    if len(text := recipe.to_toml()) > LONGEST:
        raise NicestError(f"expected a recipe of at most {LONGEST} characters, got {len(text)}: shorten its words")


def _is_size(size: tuple[int, ...]) -> bool:
    return not size or (len(size) == 2 and min(size) >= 1 and max(size) <= 1 << 14)


def _nearest_key(key: str) -> str:
    """The setting that was probably meant, also where its table was left out."""
    recipe = Recipe()
    known = [each.name for each in fields(recipe)]
    known += [f"{table}.{each.name}" for table in TABLES for each in fields(getattr(recipe, table))]
    last = key.rpartition(".")[2]
    return nearest(next((each for each in known if each.rpartition(".")[2] == last), key), known)


def _lines(settings: Any) -> list[str]:
    values = ((each, getattr(settings, each.name)) for each in fields(settings))
    return [
        f"{each.name} = {_toml(value)}  # {each.metadata['help']}"
        for each, value in values
        if "help" in each.metadata and value is not None
    ]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # else JSON's strings are TOML's
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)
