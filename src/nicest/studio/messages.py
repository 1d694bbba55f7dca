"""Request bodies, checked by pydantic before anything is computed."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field, model_validator

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
Count = Annotated[int, Query(ge=1, le=limits.WALL)]
SeedQuery = Annotated[Seed, Query()]
Basis = Literal["random", "top"]
Way = Literal["straight", "spherical"]
SphereSize = Annotated[int, Field(ge=2, le=400)]
MaskName = Literal[
    "top", "bottom", "odd", "even", "left", "right", "middle-rows", "middle-columns", "random:75", "random:90"
]


class Message(BaseModel):
    """A JSON body: strict types, no unknown keys, finite numbers."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class Problem(BaseModel):
    """The answer to a refused request: what was expected, what was found, what to do."""

    error: str


class Inpainting(Message):
    """An image with a hidden part, to be filled in by an ascent of the log-likelihood or by exact draws."""

    picture: Picture
    mask: Annotated[str, Field(max_length=2**20, description="A byte per pixel, 1 where hidden, in base64.")]
    method: Literal["ascent", "draws"] = "ascent"
    chains: Annotated[int, Field(ge=1, le=limits.CHAINS)] = 1
    steps: Annotated[int, Field(ge=1, le=limits.STEPS)] = 1000
    noise: Annotated[float, Field(ge=0, le=10, description="Of an ascent.")] = 0.03
    seed: Seed = 0


class Sample(Message):
    """One of the samples of a seed, by its index."""

    seed: Seed = 0
    temperature: Temperature = 1.0
    index: Annotated[int, Field(ge=0, lt=limits.WALL)]


class SpherePoint(Message):
    """One of the n points of a sphere, by its index."""

    basis: Basis = "top"
    seed: Seed = 0
    n: SphereSize = 200
    index: Annotated[int, Field(ge=0, lt=400)]


class Origin(Message):
    """The source of a latent code: an image (levels at their middle), or the code that made a sample or a point."""

    picture: Picture | None = None
    sample: Sample | None = None
    sphere: SpherePoint | None = None

    @model_validator(mode="after")
    def exactly_one(self) -> Origin:
        """Check that there is one source."""
        if sum(each is not None for each in (self.picture, self.sample, self.sphere)) != 1:
            raise ValueError("expected a picture or a sample or a point of a sphere, and one of them only")
        return self


class Direction(Message):
    """A direction from the mean code of one label's training images to that of another label."""

    start: Annotated[int | None, Field(ge=0, description="A label; null for the mean of all labels.")] = None
    end: Annotated[int, Field(ge=0, description="A label.")]
    amount: Annotated[float, Field(ge=-4, le=4, description="1 is the distance between the two means.")]


class Move(Origin):
    """A change of a code: set its first components, add a direction, set all but `keep` components to the mode."""

    places: Annotated[list[Annotated[float, Field(ge=-8, le=8)]], Field(max_length=limits.COMPONENTS)] = []
    direction: Direction | None = None
    keep: Annotated[int | None, Field(ge=0)] = None
    ends: Annotated[bool, Field(description="Also decode every component at -3 and 3 deviations.")] = False


class Between(Message):
    """An interpolation between two codes."""

    start: Origin
    end: Origin
    count: Annotated[int, Field(ge=2, le=24)] = 9
    way: Way = "straight"


class Plane(Message):
    """Points of the plane through three codes, which are (0, 0), (1, 0) and (0, 1)."""

    corners: Annotated[list[Origin], Field(min_length=3, max_length=3)]
    points: Annotated[
        list[Annotated[list[Annotated[float, Field(ge=-2, le=3)]], Field(min_length=2, max_length=2)]],
        Field(min_length=1, max_length=limits.WALL),
    ]
    way: Way = "straight"


class OnePicture(Message):
    """An image."""

    picture: Picture


class ToScore(Message):
    """Images to be scored."""

    pictures: Annotated[list[Picture], Field(min_length=1, max_length=limits.PICTURES)]


class Row(Message):
    """A row of a table by its columns; cells that are null or left out are unknown."""

    cells: Annotated[dict[str, str | bool | int | float | None], Field(max_length=limits.COLUMNS)]


class Begin(Message):
    """A training on data that was uploaded before."""

    id: Annotated[str, Field(max_length=40)]
    name: Annotated[str, Field(min_length=1, max_length=80)]
    effort: Literal["low", "medium", "high"] = "low"
    epochs: Annotated[int | None, Field(ge=1, le=100_000, description="Instead of those of the effort.")] = None
