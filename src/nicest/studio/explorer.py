"""The latent space of a model of images: samples, one code moved, the way between two, a plane and a sphere."""

from __future__ import annotations

import base64
import binascii
import functools
import math
from contextlib import suppress
from dataclasses import replace
from typing import Annotated

import numpy as np
import torch
from fastapi import Query
from torch import Tensor

from nicest.errors import NicestError
from nicest.recipes.splits import load_splits
from nicest.runs.run import Run
from nicest.runs.runtime import rows_to
from nicest.studio import limits, messages
from nicest.studio.api import Json, endpoint
from nicest.studio.latents import even_points
from nicest.studio.messages import Count, SeedQuery
from nicest.studio.opened import Rows, number, numbers

LABELLED = 100  # training images per label, at most, whose mean code is used


class Explorer(Rows):
    """A flow over images, with its latent space."""

    kind, of = "images", "images"

    def __init__(self, run: Run, stamp: tuple[int, ...]) -> None:
        super().__init__(run, stamp)
        self.dtype = "float32" if not self.data.levels else "uint8" if self.data.levels <= 256 else "uint16"
        self.stored = np.dtype(self.dtype).newbyteorder("<")

    def packed(self, rows: Tensor) -> list[str]:
        """Encode rows (N, D) as pictures."""
        return [base64.b64encode(row.tobytes()).decode() for row in rows.cpu().numpy().astype(self.stored)]

    def row(self, picture: str) -> np.ndarray:
        """Decode and check a picture; return a row (D,)."""
        values = np.frombuffer(decoded(picture), np.uint8)
        if values.size != self.dim * self.stored.itemsize:
            raise NicestError(
                f"expected a picture of {self.dim} numbers of {self.dtype}, as this model is of;"
                f" got {values.size} bytes"
            )
        row = values.view(self.stored).astype(self.stored.newbyteorder("="))
        if self.data.levels and int(row.max()) >= self.data.levels:
            raise NicestError(f"expected levels 0 to {self.data.levels - 1}, got {int(row.max())}")
        if not np.isfinite(row).all():
            raise NicestError("expected finite numbers, got a picture with others")
        return row

    def tensor(self, *pictures: str) -> Tensor:
        """Decode pictures; return rows (N, D) on the device of the model."""
        return rows_to(np.stack([self.row(each) for each in pictures]), self.model.device)

    @endpoint("GET")
    def samples(
        self, n: Count = 24, temperature: Annotated[messages.Temperature, Query()] = 1.0, seed: SeedQuery = 0
    ) -> Json:
        """Draw images; their nats are those before they are rounded to levels."""
        return self.pictures_of(self.drawn(temperature, seed)[:n])

    def drawn(self, temperature: float, seed: int) -> Tensor:
        """Draw the largest number of codes, (WALL, D), so that a sample is the same however many are shown."""
        return self.model.draw(limits.WALL, temperature=temperature, seed=seed)

    def pictures_of(self, h: Tensor) -> Json:
        """Decode codes (N, D)."""
        return {"pictures": self.packed(self.model.decode(h)), "nats": numbers(self.model.code_nats(h))}

    def code(self, origin: messages.Origin) -> Tensor:
        """Return the code (1, D) of an origin."""
        if origin.sample:
            asked = origin.sample
            return self.drawn(asked.temperature, asked.seed)[asked.index, None]
        if origin.sphere:
            point = origin.sphere
            if point.index >= point.n:
                raise NicestError(f"expected one of the points 0 to {point.n - 1} of the sphere, got {point.index}")
            return self.on_sphere(point.basis, point.seed, even_points(point.n)[point.index, None])
        return self.model.encode(self.tensor(origin.picture or ""))

    @endpoint("POST")
    def move(self, ask: messages.Move) -> Json:
        """Change a latent code; return its image, nats, first components and distance from the mode."""
        model = self.model
        if ask.keep is not None and ask.keep > self.dim:
            raise NicestError(f"expected to keep at most {self.dim} components, got {ask.keep}")
        if len(ask.places) > self.dim:
            raise NicestError(f"expected at most {self.dim} places, got {len(ask.places)}")
        h = self.code(ask)
        h = model.put(h, torch.tensor([ask.places])) if ask.places else h
        h = h if ask.direction is None else h + self.direction(ask.direction)
        h = h if ask.keep is None else model.cut(h, ask.keep)
        still = ask.picture is not None and not ask.places and ask.direction is None and ask.keep is None
        shown = self.tensor(ask.picture or "") if still else model.decode(h)
        places = model.places(h)[0]
        k = min(limits.COMPONENTS, self.dim)
        ends: list[list[str]] = []
        if ask.ends:
            both = places[:k].repeat(2 * k, 1)
            both[torch.arange(2 * k), torch.arange(k).repeat_interleave(2)] = torch.tensor([-3.0, 3.0] * k).to(both)
            pictures = self.packed(model.decode(model.put(h.expand(2 * k, -1), both)))
            ends = [pictures[i : i + 2] for i in range(0, 2 * k, 2)]
        return {
            "picture": self.packed(shown)[0],
            "nats": number(float(model.code_nats(h)[0])),
            "places": [round(each, 4) for each in places[:k].tolist()],
            "sigma": (model.deviation * model.sigma[model.order[:k]]).tolist(),
            "radius": float(places.norm()),
            "typical_radius": math.sqrt(self.dim),
            "ends": ends,
        }

    @endpoint("GET", "read")
    def labels(self) -> Json:
        """Decode the mean codes of all labels; of a large model they take seconds, once."""
        means = self.label_means
        return {"means": self.packed(self.model.decode(means)) if len(means) else []}

    @functools.cached_property
    def label_means(self) -> Tensor:
        """Mean codes of training images by label, (K, D).

        K is 0 without labelled data, and for a model conditioned on the label: its codes do not depend on it.
        """
        if not self.no_data and self.run.label is None:
            with suppress(NicestError):  # data without labels
                found = load_splits(replace(self.run.recipe, data=replace(self.data, labels=True, digest="")))
                rows, labels = found.train[:, :-1], found.train[:, -1]
                each = (rows[labels == label][:LABELLED] for label in range(len(found.classes)))
                return torch.stack([self.model.encode(rows_to(some, self.run.device)).mean(0) for some in each])
        return self.model.loc.new_zeros(0, self.dim)

    def direction(self, ask: messages.Direction) -> Tensor:
        """Return a multiple of the difference between two mean codes, (D,)."""
        means = self.label_means
        for label in (ask.start or 0, ask.end):
            if label >= len(means):
                raise NicestError(f"expected one of the {len(means)} labels of this run's data, got {label}")
        start = means.mean(0) if ask.start is None else means[ask.start]
        return ask.amount * (means[ask.end] - start)

    @endpoint("POST")
    def between(self, ask: messages.Between) -> Json:
        """Interpolate between two codes."""
        return self.pictures_of(self.model.between(self.code(ask.start), self.code(ask.end), ask.count, ask.way)[0])

    @endpoint("POST")
    def plane(self, ask: messages.Plane) -> Json:
        """Decode points of the plane through three codes."""
        corners = torch.cat([self.code(each) for each in ask.corners])
        return self.pictures_of(self.model.plane(corners, torch.tensor(ask.points), ask.way))

    def classes(self, origin: messages.Origin, others: list[Explorer]) -> Json:
        """Decode one code by the models of several labels."""
        each = [other.pictures_of(self.code(origin)) for other in others]
        return {key: [one[key][0] for one in each] for key in ("pictures", "nats")}

    def on_sphere(self, basis: str, seed: int, points: np.ndarray) -> Tensor:
        """Return the codes of points (N, 3) of the unit sphere."""
        return self.model.on_sphere(points, self.model.axes(basis, seed), self.model.typical_radius(basis))

    @endpoint("GET")
    def sphere(
        self,
        basis: messages.Basis = "top",
        seed: SeedQuery = 0,
        n: Annotated[messages.SphereSize, Query()] = 200,
    ) -> Json:
        """Decode the points of a sphere; its radius is in standard deviations of the prior."""
        points = even_points(n)
        pictures = self.packed(self.model.decode(self.on_sphere(basis, seed, points)))
        radius = self.model.typical_radius(basis) / self.model.deviation
        return {"points": points.round(4).tolist(), "pictures": pictures, "radius": radius}


def decoded(text: str) -> bytes:
    """Decode base64, or refuse the text."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise NicestError("expected base64, got something else") from error
