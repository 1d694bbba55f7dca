"""What the studio asks of a model of images: pictures in base64 in and out, and a task of the library in between."""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nicest.errors import NicestError
from nicest.flows import bits_per_dim
from nicest.inference.fill import OURS, ascend
from nicest.inference.impute import split_r_hat
from nicest.inference.surprise import surprise
from nicest.runs.runtime import rows_to
from nicest.studio import limits, messages
from nicest.studio.films import Films
from nicest.studio.messages import number, numbers
from nicest.studio.served import Loaded, noise
from nicest.tasks.inpaint import spread
from nicest.tasks.latent import even_points
from nicest.tasks.masks import hidden_by
from nicest.tasks.pictures import fit_picture
from nicest.tasks.score import CAVEAT, ledger, outlier_scores

DRAWS = 32  # of the noise, that the score of a picture is the mean over
FRAMES = 150  # looks at an ascent, at least
SECONDS = 1 / 25  # that pass between two looks, at most
KEPT = 100  # states of a chain, that its R-hat is of

Look = tuple[int, Tensor, Tensor, dict[str, Any]]  # steps done, states (chains, D), their nats, and what else is known
Events = Generator[tuple[str, dict[str, Any]], None, None]  # what an event is called, and what it says


class Images:
    """A model of images."""

    def __init__(self, loaded: Loaded) -> None:
        if len(loaded.data.shape) == 1:
            raise NicestError(f"this model is of rows of {loaded.data.dim} numbers, not of images")
        self.loaded, self.data, self.model, self.units = loaded, loaded.data, loaded.model, loaded.run.flow.units

    def packed(self, rows: Tensor) -> list[str]:
        """Rows (N, D) as pictures."""
        return [base64.b64encode(row.tobytes()).decode() for row in rows.cpu().numpy().astype(self.loaded.kind)]

    def row(self, picture: str) -> np.ndarray:
        """A picture as a row (D,), checked."""
        values = np.frombuffer(_bytes(picture), np.uint8)
        if values.size != self.data.dim * self.loaded.kind.itemsize:
            raise NicestError(
                f"expected a picture of {self.data.dim} numbers of {self.loaded.dtype}, as this model is of;"
                f" got {values.size} bytes"
            )
        row = values.view(self.loaded.kind).astype(self.loaded.kind.newbyteorder("="))
        if self.data.levels and int(row.max()) >= self.data.levels:
            raise NicestError(f"expected levels 0 to {self.data.levels - 1}, got {int(row.max())}")
        if not np.isfinite(row).all():
            raise NicestError("expected finite numbers, got a picture with others")
        return row

    def tensor(self, *pictures: str) -> Tensor:
        return rows_to(np.stack([self.row(each) for each in pictures]), self.model.device)

    def test_images(self, first: int, n: int) -> messages.Pictures:
        if self.loaded.no_data:
            raise NicestError(self.loaded.no_data)
        rows = self.loaded.run.splits.test
        chosen = rows_to(rows[first : first + n], self.model.device)
        return messages.Pictures(pictures=self.packed(chosen) if len(chosen) else [], total=len(rows))

    def samples(self, n: int, temperature: float, seed: int) -> messages.Pictures:
        return self.pictures_of(self.drawn(temperature, seed)[:n])

    def drawn(self, temperature: float, seed: int) -> Tensor:
        """Codes of samples: as many as may be asked for, so that each has its place whatever their number."""
        return self.model.draw(limits.WALL, temperature=temperature, seed=seed)

    def pictures_of(self, h: Tensor) -> messages.Pictures:
        return messages.Pictures(pictures=self.packed(self.model.decode(h)), nats=numbers(self.model.code_nats(h)))

    def code(self, origin: messages.Origin) -> Tensor:
        """The code (1, D) of a sample, as it was drawn, or of a picture."""
        if origin.sample:
            asked = origin.sample
            return self.drawn(asked.temperature, asked.seed)[asked.index, None]
        if origin.sphere:
            point = origin.sphere
            if point.index >= point.n:
                raise NicestError(f"expected one of the points 0 to {point.n - 1} of the sphere, got {point.index}")
            return self.on_sphere(point.basis, point.seed, even_points(point.n)[point.index, None])
        return self.model.encode(self.tensor(origin.picture or ""))

    def upload(self, content: bytes, inverted: bool) -> str:
        return self.packed(torch.from_numpy(fit_picture(content, self.data, inverted=inverted))[None])[0]

    def mask(self, name: str, seed: int) -> str:
        hidden = hidden_by(name, self.data.shape[-2:], seed=seed)
        return base64.b64encode(hidden.astype(np.uint8).tobytes()).decode()

    def hidden(self, mask: str) -> Tensor:
        """What a mask hides of a picture, (1, D)."""
        bits = np.frombuffer(_bytes(mask), np.uint8)
        height, width = self.data.shape[-2:]
        if bits.size != height * width:
            raise NicestError(f"expected a mask of {height * width} bytes, one for each pixel, got {bits.size}")
        return torch.from_numpy(hidden_by(bits.reshape(height, width), self.data.shape).reshape(1, -1))

    def inpainting(self, ask: messages.Inpainting, films: Films) -> Events:
        """The events of an inpainting: its start, frames, and its end; what is wrong with it is said at once."""
        x, hidden = self.tensor(ask.picture), self.hidden(ask.mask)
        truth = float(self.model.nats(x)[0])
        if not math.isfinite(truth):
            raise NicestError("the model gives this picture no finite likelihood: choose another")
        marks, last = set(spread(ask.steps, FRAMES)), time.perf_counter()

        def due(i: int) -> bool:
            """When to look: often at the start, and never later than a frame's time after the last look."""
            return i in marks or time.perf_counter() - last > SECONDS

        climbs = ask.method == "ascent"
        looks = self.climb(ask, x, hidden, due) if climbs else self.wander(ask, x, hidden, due)

        def events() -> Events:
            nonlocal last
            self.loaded.climbers(+1)
            film_id, film = films.begin(self.loaded.brightest)
            try:
                yield "start", {"truth_nats": truth, "steps": ask.steps, "film": film_id}
                for step, states, heights, more in looks:
                    nats = [round(each + self.units.interval_nats, 3) for each in heights.tolist()]
                    film.add(states.cpu().numpy().reshape(-1, *self.data.shape))
                    yield "frame", {"step": step, "nats": nats, "pictures": self.packed(states), **more}
                    last = time.perf_counter()
                yield "end", {"steps": ask.steps}
            finally:
                self.loaded.climbers(-1)

        return events()

    def climb(self, ask: messages.Inpainting, x: Tensor, hidden: Tensor, due: Callable[[int], bool]) -> Iterator[Look]:
        """Looks at the ascent of NICE §5.2."""
        schedule = replace(OURS, steps=ask.steps, noise=ask.noise)
        climb = ascend(self.model.flow, x, hidden, due, schedule=schedule, chains=ask.chains, seed=ask.seed)
        return ((each.looks[0], each.result[:, 0], each.nats[0, :, 0], {}) for each in climb)

    def wander(self, ask: messages.Inpainting, x: Tensor, hidden: Tensor, due: Callable[[int], bool]) -> Iterator[Look]:
        """Looks at exact chains through what is hidden given the rest. A quarter of the steps is the warm-up; all
        states after it make the spread, the standard deviation of every pixel as a share of the brightest."""
        chains = self.loaded.chains(ask.chains, ask.seed)
        warmup = max(1, ask.steps // 4)
        steps = max(1, ask.steps - warmup)
        keep = {round((k + 1) * steps / KEPT) for k in range(KEPT)}

        def looks() -> Iterator[Look]:
            sums, kept = torch.zeros(3, x.shape[1], dtype=torch.float64), []  # of ones, of levels, of their squares
            for i, at in chains.walk(x, hidden, warmup=warmup, steps=steps):
                y = at.y[0]
                states = torch.where(hidden, self.units.leave(y).to(x), x)
                if i > 0:
                    sums += torch.stack([states.double() ** k for k in range(3)]).sum(1)
                if i in keep:
                    kept.append(y.double())
                if i == steps or due(i + warmup):
                    nats = at.height[0].double() + self.units.log_det(y)
                    yield i + warmup, states, nats, self.spread(sums, kept, hidden) if i == steps else {}

        return looks()

    def spread(self, sums: Tensor, kept: list[Tensor], hidden: Tensor) -> dict[str, Any]:
        """The standard deviation of every pixel, and the worst split R-hat."""
        variance = (sums[2] / sums[0] - (sums[1] / sums[0]).square()).clamp_min(0)
        pixels = variance.view(-1, *self.data.shape[-2:]).mean(0).sqrt() / self.loaded.brightest
        r_hat = float(split_r_hat(torch.stack(kept, 1)[None])[0, hidden[0]].max()) if len(kept) > 3 else math.nan
        return {"spread": [round(each, 4) for each in pixels.flatten().tolist()], "r_hat": number(r_hat)}

    def move(self, ask: messages.Move) -> messages.Moved:
        model = self.model
        if ask.keep is not None and ask.keep > self.data.dim:
            raise NicestError(f"expected to keep at most {self.data.dim} components, got {ask.keep}")
        if len(ask.places) > self.data.dim:
            raise NicestError(f"expected at most {self.data.dim} places, got {len(ask.places)}")
        h = self.code(ask)
        h = model.put(h, torch.tensor([ask.places])) if ask.places else h
        h = h if ask.direction is None else h + self.direction(ask.direction)
        h = h if ask.keep is None else model.cut(h, ask.keep)
        still = ask.picture is not None and not ask.places and ask.direction is None and ask.keep is None
        shown = self.tensor(ask.picture or "") if still else model.decode(h)
        places = model.places(h)[0]
        k = min(limits.COMPONENTS, self.data.dim)
        ends: list[list[str]] = []
        if ask.ends:
            both = places[:k].repeat(2 * k, 1)
            both[torch.arange(2 * k), torch.arange(k).repeat_interleave(2)] = (
                torch.tensor([-3.0, 3.0]).repeat(k).to(both)
            )
            pictures = self.packed(model.decode(model.put(h.expand(2 * k, -1), both)))
            ends = [pictures[i : i + 2] for i in range(0, 2 * k, 2)]
        return messages.Moved(
            picture=self.packed(shown)[0],
            nats=number(float(model.code_nats(h)[0])),
            places=[round(each, 4) for each in places[:k].tolist()],
            sigma=(model.deviation * model.sigma[model.order[:k]]).tolist(),
            radius=float(places.norm()),
            typical_radius=math.sqrt(self.data.dim),
            ends=ends,
        )

    def labels(self) -> messages.Labels:
        means = self.loaded.label_means
        return messages.Labels(means=self.packed(self.model.decode(means)) if len(means) else [])

    def direction(self, ask: messages.Direction) -> Tensor:
        """From one mean code to another, (D,), so many times."""
        means = self.loaded.label_means
        for label in (ask.start or 0, ask.end):
            if label >= len(means):
                raise NicestError(f"expected one of the {len(means)} labels of this run's data, got {label}")
        start = means.mean(0) if ask.start is None else means[ask.start]
        return ask.amount * (means[ask.end] - start)

    def between(self, ask: messages.Between) -> messages.Pictures:
        h0, h1 = self.code(ask.start), self.code(ask.end)
        return self.pictures_of(self.model.between(h0, h1, ask.count, ask.way)[0])

    def plane(self, ask: messages.Plane) -> messages.Pictures:
        corners = torch.cat([self.code(each) for each in ask.corners])
        return self.pictures_of(self.model.plane(corners, torch.tensor(ask.points), ask.way))

    def classes(self, origin: messages.Origin, others: list[Images]) -> messages.Pictures:
        """One code, as models of other labels decode it."""
        h = self.code(origin)
        each = [other.pictures_of(h) for other in others]
        return messages.Pictures(pictures=[one.pictures[0] for one in each], nats=[one.nats[0] for one in each])

    def on_sphere(self, basis: str, seed: int, points: np.ndarray) -> Tensor:
        return self.model.on_sphere(points, self.model.axes(basis, seed), self.model.typical_radius(basis))

    def sphere(self, basis: str, seed: int, n: int) -> messages.Sphere:
        points = even_points(n)
        x = self.model.decode(self.on_sphere(basis, seed, points))
        deviations = self.model.typical_radius(basis) / self.model.deviation
        return messages.Sphere(points=points.round(4).tolist(), pictures=self.packed(x), radius=deviations)

    def score(self, pictures: list[str]) -> messages.Scores:
        rows = [self.row(each) for each in pictures]
        reference = self.loaded.reference()
        scores = [self.score_row(row, reference) for row in rows]
        return messages.Scores(
            scores=scores,
            draws=DRAWS if self.units.discrete else 1,
            reference=self.loaded.compared_with,
            caveat=CAVEAT,
            unit=self.loaded.unit,
        )

    def surprise(self, picture: str) -> Events:
        """Events of a surprise map: of each pixel, -log p(its level | all others) less the entropy there, in nats."""
        row = self.tensor(picture)[0]
        height, width = self.data.shape[-2:]
        parts = surprise(self.loaded.engine, row, self.data.levels)
        first = next(parts)  # what is wrong is said at once

        def events() -> Events:
            yield "start", {"pixels": height * width}
            for part in itertools.chain([first], parts):
                excess = (part.nats - part.entropy).tolist()
                pixels = (part.dims % (height * width)).tolist()
                yield "frame", {"pixels": pixels, "excess": [round(each, 3) for each in excess]}
            yield "end", {}

        return events()

    def score_row(self, row: np.ndarray, reference: np.ndarray | None) -> messages.Score:
        """Means over draws of noise that is the picture's own, so that its score does not depend on what is beside."""
        draws = DRAWS if self.units.discrete else 1
        generator = torch.Generator(self.loaded.run.device)
        generator.manual_seed(int.from_bytes(hashlib.sha256(row.tobytes()).digest()[:7]))
        with noise:
            terms = ledger(self.loaded.engine, row, draws, generator)
        each = np.sum(list(terms.values()), axis=0)
        nats, means = float(each.mean()), {name: float(term.mean()) for name, term in terms.items()}
        levels = self.units.terms() if self.units.levels else {}
        return messages.Score(
            nats=number(nats + self.units.interval_nats),
            nats_error=number(float(each.std(ddof=1)) / math.sqrt(draws)) if draws > 1 else 0.0,
            level_nats=number(nats),
            bits_per_dim=number(bits_per_dim(nats, self.data.dim)),
            terms={name: number(mean) for name, mean in means.items() if name not in levels},
            level_terms={name: number(mean) for name, mean in means.items() if name in levels},
            denser_share=number(float(outlier_scores(np.array([nats]), reference)[0])),
        )


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise NicestError("expected base64, got something else") from error
