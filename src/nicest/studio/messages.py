"""What the page and the server say to each other, typed."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from nicest.studio import limits
from nicest.tasks.pictures import LARGEST

Picture = Annotated[
    str,
    Field(
        max_length=2**20,
        description="The numbers of one image in the run's `dtype`, little-endian, channel by channel, in base64.",
        examples=["AAAFDQkBAAA="],
    ),
]
Seed = Annotated[int, Field(ge=0, lt=2**31, description="Seed of the random numbers.")]
Temperature = Annotated[float, Field(ge=0, le=3, description="Multiplies the scale of the prior.")]
Reference = Annotated[
    Literal["validation", "training"],
    Field(description="The rows that scores are compared with: held-out ones, if there are enough."),
]
MaskName = Literal[
    "top", "bottom", "odd", "even", "left", "right", "middle-rows", "middle-columns", "random:75", "random:90"
]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class Problem(BaseModel):
    """Why a request was refused: what was expected, what came, what to do."""

    error: str


class Limits(BaseModel):
    body: int = limits.BODY
    side: int = LARGEST
    pictures: int = limits.PICTURES
    wall: int = limits.WALL
    rows: int = limits.ROWS
    steps: int = limits.STEPS
    chains: int = limits.CHAINS
    components: int = limits.COMPONENTS
    walk: Annotated[int, Field(description="Dimensions of a model that makes exact draws, at most.")] = limits.WALK
    jobs: int = limits.JOBS


class RunInfo(BaseModel):
    """A run that is served. Without a model, `why` says what is wanting.

    `form` stands for what the model is of. A request that names it in the header `nicest-form` is refused (409) once
    the run has been replaced by one of another form.
    """

    id: str
    name: str
    ready: bool
    why: str = ""
    form: str = ""
    recipe: str = ""
    dataset: str = ""
    kind: Literal["images", "rows", "table", "unknown"] = "unknown"
    shape: list[int] = []
    dim: int = 0
    levels: int = 0
    dtype: Literal["uint8", "uint16", "float32"] = "uint8"
    brightest: float = 255
    interval: list[float] | None = None
    data: str = Field("", description="Why the data is not at hand; empty where it is.")
    imputes: bool = False
    classes: Annotated[int, Field(description="How many labels the model knows, each served as a run.")] = 0


class Runs(BaseModel):
    version: str
    runs: list[RunInfo]
    limits: Limits
    masks: list[str]
    folder: str = Field(description="Where trainings from the page keep their data and runs.")


class Status(BaseModel):
    """What the server is doing."""

    ascents: int
    most_ascents: int
    requests: int


class Pictures(BaseModel):
    pictures: list[Picture]
    total: int | None = None
    nats: list[float | None] = []


class One(BaseModel):
    picture: Picture


class Mask(BaseModel):
    mask: Picture


class Inpainting(Message):
    """What is hidden of a picture, and how to find it: an ascent of the log-likelihood, or exact draws of what is
    hidden given the rest."""

    picture: Picture
    mask: Annotated[str, Field(max_length=2**20, description="A byte for each pixel, 1 where hidden, in base64.")]
    method: Literal["ascent", "draws"] = "ascent"
    chains: Annotated[int, Field(ge=1, le=limits.CHAINS)] = 1
    steps: Annotated[int, Field(ge=1, le=limits.STEPS)] = 1000
    noise: Annotated[float, Field(ge=0, le=10, description="Of an ascent.")] = 0.03
    seed: Seed = 0


class Sample(Message):
    """One of the samples of a seed, by its place among them."""

    seed: Seed = 0
    temperature: Temperature = 1.0
    index: Annotated[int, Field(ge=0, lt=limits.WALL)]


Basis = Literal["random", "top"]
SphereSize = Annotated[int, Field(ge=2, le=400)]


class SpherePoint(Message):
    """One of the n points of a sphere, by its place among them."""

    basis: Basis = "top"
    seed: Seed = 0
    n: SphereSize = 200
    index: Annotated[int, Field(ge=0, lt=400)]


class Origin(Message):
    """Where a code comes from: a picture, each level at its middle; a sample or a point of a sphere, whose code is
    that it was made of."""

    picture: Picture | None = None
    sample: Sample | None = None
    sphere: SpherePoint | None = None

    @model_validator(mode="after")
    def one_of_them(self) -> Origin:
        if sum(each is not None for each in (self.picture, self.sample, self.sphere)) != 1:
            raise ValueError("expected a picture or a sample or a point of a sphere, and one of them only")
        return self


class Direction(Message):
    """From the mean code of a label's training images, or of all labels, to that of another label."""

    start: Annotated[int | None, Field(ge=0, description="A label; null for the mean of all labels.")] = None
    end: Annotated[int, Field(ge=0, description="A label.")]
    amount: Annotated[float, Field(ge=-4, le=4, description="1 goes as far as from one mean to the other.")]


class Move(Origin):
    """A code that is changed: first components put to places, a direction added, all but `keep` components put to the
    mode."""

    places: Annotated[list[Annotated[float, Field(ge=-8, le=8)]], Field(max_length=limits.COMPONENTS)] = []
    direction: Direction | None = None
    keep: Annotated[int | None, Field(ge=0)] = None
    ends: Annotated[bool, Field(description="Whether to show what each place does, 3 deviations either way.")] = False


class Moved(BaseModel):
    picture: Picture
    nats: float | None
    places: list[float] = Field(description="First components of the code, in standard deviations from the mode.")
    sigma: list[float]
    radius: float = Field(description="The distance of the code from the mode, in standard deviations.")
    typical_radius: float = Field(description="Where nearly all draws lie.")
    ends: list[list[Picture]] = Field([], description="For each place, the pictures with it at -3 and at 3.")


class Labels(BaseModel):
    """Labels of the training images: of each, the picture of its mean code. None where the data has no labels, or is
    not at hand."""

    means: list[Picture]


class Between(Message):
    start: Origin
    end: Origin
    count: Annotated[int, Field(ge=2, le=24)] = 9
    way: Literal["straight", "spherical"] = "straight"


class Plane(Message):
    """Points of the plane through three codes, which are (0, 0), (1, 0) and (0, 1)."""

    corners: Annotated[list[Origin], Field(min_length=3, max_length=3)]
    points: Annotated[
        list[Annotated[list[Annotated[float, Field(ge=-2, le=3)]], Field(min_length=2, max_length=2)]],
        Field(min_length=1, max_length=limits.WALL),
    ]
    way: Literal["straight", "spherical"] = "straight"


class Sphere(BaseModel):
    points: list[list[float]]
    pictures: list[Picture]
    radius: float = Field(description="In standard deviations of the prior.")


class Whose(Message):
    """A picture that something is asked of."""

    picture: Picture


class ToScore(Message):
    pictures: Annotated[list[Picture], Field(min_length=1, max_length=limits.PICTURES)]


class Score(BaseModel):
    """`terms` sum to `nats`, on the recipe's interval; with `level_terms` to nats of the levels.

    Of images with levels, `nats` is the mean over draws of the noise, a lower bound, and `nats_error` its standard
    error. The noise of a picture is fixed, so that it has the same score wherever it stands.
    """

    nats: float | None
    nats_error: float | None = Field(description="0 where there is no noise.")
    level_nats: float | None
    bits_per_dim: float | None
    terms: dict[str, float | None]
    level_terms: dict[str, float | None]
    denser_share: float | None = Field(description="The share of the rows of `reference` that have a higher density.")


class Scores(BaseModel):
    scores: list[Score]
    draws: int
    reference: Reference
    caveat: str
    unit: str


class ReferenceScores(BaseModel):
    """Quantiles of the nats of held-out rows, from the lowest; none while they are counted, or without the data."""

    quantiles: list[float]
    counting: bool
    reference: Reference


class Histogram(BaseModel):
    """How often a column has its values; of numbers, how often they lie in bins of one width from `low` to `high`."""

    column: str
    counts: list[int]
    values: list[Any] = Field(description="Of a categorical column, beside the counts.")
    low: Any
    high: Any


class Table(BaseModel):
    columns: list[str]
    rows: list[list[Any]]
    histograms: list[Histogram] = []
    share: Annotated[float | None, Field(description="The probability of the conditions, where they have one.")] = None
    r_hat: Annotated[float, Field(description="Near 1 where the chains of conditional draws agree.")] = 1.0


class RowScore(BaseModel):
    row: int
    nats: float | None
    denser_share: float | None
    why: str = ""


class TableScores(BaseModel):
    columns: list[str]
    cells: list[list[Any]]
    scores: list[RowScore]
    total: int | None = Field(description="Rows of the file; null where it has more than were read.")
    reference: Reference
    caveat: str


class ColumnInfo(BaseModel):
    name: str
    kind: Literal["real", "steps", "values"]
    moment: bool = Field(description="Whether cells are dates or times, which are written as text.")
    low: Any
    high: Any
    values: list[Any]


class Columns(BaseModel):
    columns: list[ColumnInfo]


class Row(Message):
    """A row by its columns; what is null or left out is to be found."""

    cells: Annotated[dict[str, str | bool | int | float | None], Field(max_length=limits.COLUMNS)]
    seed: Seed = 0


class ImputedCell(BaseModel):
    """`low` and `high` are the ends of the interval that holds nine of ten draws."""

    column: str
    value: Any
    low: Any
    high: Any
    known: bool


class ImputedRow(BaseModel):
    """`r_hat` is near 1 where the chains agree."""

    cells: list[ImputedCell]
    r_hat: float | None


class CellSurprise(BaseModel):
    """A cell beside draws of it given all the others.

    `tail` is the probability of values as far out, or, of categories, as rare; `low` and `high` are the ends of the
    interval that holds nine of ten draws.
    """

    column: str
    tail: float
    likely: Any
    low: Any
    high: Any


class CellSurprises(BaseModel):
    cells: list[CellSurprise]
    draws: int


class Spectrum(BaseModel):
    sigma: list[float]
    deviation: float
    pca: list[float] | None
    whitened: bool


ColumnKind = Literal["real", "integer", "categorical", "date or time"]


class FoundColumn(BaseModel):
    name: str
    kind: ColumnKind
    low: Any
    high: Any
    values: list[str] = Field(description="The first of the values of a categorical column.")
    distinct: int


class Found(BaseModel):
    """Data that was sent to be trained on. `id` names it until the training begins."""

    id: str = ""
    name: str
    kind: Literal["table", "images"]
    rows: int
    incomplete: Annotated[int, Field(description="Rows with missing values: they train too, and never test.")] = 0
    shape: list[int]
    columns: list[FoundColumn] = []
    preview: Annotated[list[list[Any]], Field(description="The first rows of a table.")] = []
    warnings: list[str] = []


class Begin(Message):
    """A training on data that was sent before."""

    id: Annotated[str, Field(max_length=40)]
    name: Annotated[str, Field(min_length=1, max_length=80)]
    effort: Literal["low", "medium", "high"] = "low"
    epochs: Annotated[int | None, Field(ge=1, le=100_000, description="Instead of those chosen by the effort.")] = None


class Begun(BaseModel):
    run: str


class Process(BaseModel):
    """The training of a run that was begun from the page."""

    here: bool = False
    running: bool = False
    failed: bool = False
    said: str = ""


class Metrics(BaseModel):
    process: Process = Process()
    rows: list[dict[str, Any]]
    idle_seconds: float | None = Field(description="Since the last row was written.")
    epochs: int = Field(description="At most; 0 where that is not known.")
    patience: int = Field(description="Epochs without a better validation after which training stops; 0 for all.")
    best_epoch: int | None
    finished: bool


def number(value: float) -> float | None:
    """What JSON has a word for."""
    return value if math.isfinite(value) else None


def numbers(values: Tensor) -> list[float | None]:
    return [number(each) for each in values.double().tolist()]
