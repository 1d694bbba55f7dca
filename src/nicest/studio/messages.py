"""What the page and the server say to each other, typed."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from nicest.studio import limits

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
MaskName = Literal[
    "top", "bottom", "odd", "even", "left", "right", "middle-rows", "middle-columns", "random:75", "random:90"
]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Problem(BaseModel):
    """Why a request was refused: what was expected, what came, what to do."""

    error: str


class Limits(BaseModel):
    body: int = limits.BODY
    pictures: int = limits.PICTURES
    wall: int = limits.WALL
    rows: int = limits.ROWS
    steps: int = limits.STEPS
    chains: int = limits.CHAINS
    components: int = limits.COMPONENTS
    film: int = limits.FILM
    jobs: int = limits.JOBS


class RunInfo(BaseModel):
    """A run that is served. Without a model, `why` says what is wanting."""

    id: str
    name: str
    ready: bool
    why: str = ""
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


class Runs(BaseModel):
    version: str
    runs: list[RunInfo]
    limits: Limits
    masks: list[str]


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
    """An ascent: what is hidden of a picture, and how to climb."""

    picture: Picture
    mask: Annotated[str, Field(max_length=2**20, description="A byte for each pixel, 1 where hidden, in base64.")]
    chains: Annotated[int, Field(ge=1, le=limits.CHAINS)] = 1
    steps: Annotated[int, Field(ge=1, le=limits.STEPS)] = 1000
    noise: Annotated[float, Field(ge=0, le=10)] = 0.03
    seed: Seed = 0


class Move(Message):
    """A picture whose code is changed: first components put to places, all but `keep` components put to the mode."""

    picture: Picture
    places: Annotated[list[Annotated[float, Field(ge=-8, le=8)]], Field(max_length=limits.COMPONENTS)] = []
    keep: Annotated[int | None, Field(ge=0)] = None


class Moved(BaseModel):
    picture: Picture
    nats: float | None
    places: list[float] = Field(description="First components of the code, in standard deviations from the mode.")
    sigma: list[float]
    radius: float
    typical_radius: float


class Between(Message):
    start: Picture
    end: Picture
    count: Annotated[int, Field(ge=2, le=24)] = 9
    way: Literal["straight", "spherical"] = "straight"


class Sphere(BaseModel):
    points: list[list[float]]
    pictures: list[Picture]
    radius: float


class ToScore(Message):
    pictures: Annotated[list[Picture], Field(min_length=1, max_length=limits.PICTURES)]


class Score(BaseModel):
    """`terms` sum to `nats`, on the recipe's interval; with `level_terms` to nats of the levels."""

    nats: float | None
    level_nats: float | None
    bits_per_dim: float | None
    terms: dict[str, float | None]
    level_terms: dict[str, float | None]
    denser_share: float | None = Field(description="The share of training rows that have a higher density.")


class Scores(BaseModel):
    scores: list[Score]
    draws: int
    caveat: str
    unit: str


class TrainingScores(BaseModel):
    """Quantiles of the nats of the training rows, from the lowest; none while they are counted, or without the data."""

    quantiles: list[float]
    counting: bool


class Film(Message):
    """Frames of an animation, each of as many pictures as there are chains."""

    frames: Annotated[
        list[Annotated[list[Picture], Field(min_length=1, max_length=limits.CHAINS)]],
        Field(min_length=1, max_length=limits.FILM),
    ]


class Table(BaseModel):
    columns: list[str]
    rows: list[list[Any]]


class RowScore(BaseModel):
    row: int
    nats: float | None
    denser_share: float | None
    why: str = ""


class TableScores(BaseModel):
    columns: list[str]
    cells: list[list[Any]]
    scores: list[RowScore]
    total: int
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

    cells: Annotated[dict[str, str | bool | int | float | None], Field(max_length=500)]
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


class Spectrum(BaseModel):
    sigma: list[float]
    deviation: float
    pca: list[float] | None
    whitened: bool


class Metrics(BaseModel):
    rows: list[dict[str, Any]]
    idle_seconds: float | None = Field(description="Since the last row was written.")
    epochs: int


def number(value: float) -> float | None:
    """What JSON has a word for."""
    return value if math.isfinite(value) else None


def numbers(values: Tensor) -> list[float | None]:
    return [number(each) for each in values.double().tolist()]
