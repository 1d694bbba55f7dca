"""A model of images: pictures in base64 in and out."""

from __future__ import annotations

import base64
import copy
import functools
import hashlib
import itertools
import math
import secrets
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from typing import Annotated

import numpy as np
import torch
from fastapi import Query
from torch import Tensor

from nicest.errors import NicestError
from nicest.flows import bits_per_dim
from nicest.inference.fill import OURS, ascend
from nicest.inference.langevin import SAMPLES, Chains, split_r_hat
from nicest.inference.surprise import surprise
from nicest.runs.run import Run
from nicest.runs.runtime import rows_to
from nicest.studio import limits, messages
from nicest.studio.api import Events, File, Json, bytes_in, endpoint
from nicest.studio.explorer import Explorer, decoded
from nicest.studio.film import Film
from nicest.studio.messages import Count, SeedQuery
from nicest.studio.opened import number
from nicest.studio.pictures import fit_picture
from nicest.tasks.inpaint import spread
from nicest.tasks.masks import hidden_by
from nicest.tasks.score import CAVEAT, outlier_scores

DRAWS = 32  # of the dequantisation noise; the score of an image is their mean
FRAMES = 150  # of an inpainting, at least
SECONDS = 1 / 25  # between two frames, at most
KEPT = 100  # states of a chain, from which R-hat is computed
FILMS = 6  # films that keep their frames
NOISE = threading.Lock()  # an engine swaps torch's own generator, which belongs to all threads

Looks = Generator[tuple[int, Tensor, Tensor, Json], None, None]  # steps, states (chains, D), their nats, extra fields
Due = Callable[[int], bool]


class Images(Explorer):
    """A flow over images: everything that is not about its latent space."""

    def __init__(self, run: Run, stamp: tuple[int, ...]) -> None:
        super().__init__(run, stamp)
        self.films: dict[str, Film] = {}

    def info(self) -> Json:
        return super().info() | {
            "dtype": self.dtype,
            "brightest": self.brightest,
            "interval": list(self.data.interval) if self.data.levels else None,
            "classes": len(self.run.trained.data.classes),
        }

    @functools.cached_property
    def brightest(self) -> float:
        """The pixel value that is drawn white."""
        if self.data.levels:
            return self.data.levels - 1
        return 1.0 if self.no_data else float(np.abs(self.run.splits.train).max()) or 1.0

    @endpoint("GET")
    def pictures(self, first: Annotated[int, Query(ge=0)] = 0, n: Count = 24) -> Json:
        """Return images of the test split, and their total number."""
        if self.no_data:
            raise NicestError(self.no_data)
        rows = self.run.splits.test
        chosen = rows_to(rows[first : first + n], self.model.device)
        return {"pictures": self.packed(chosen) if len(chosen) else [], "total": len(rows)}

    @endpoint("POST", "read", **bytes_in("image/*"))
    def upload(self, content: File, inverted: bool = False) -> Json:
        """Fit an image file to the size, colours and levels of the model."""
        row = torch.from_numpy(fit_picture(content, self.data, inverted=inverted))
        return {"picture": self.packed(row[None])[0]}

    @endpoint("GET")
    def mask(self, name: messages.MaskName, seed: SeedQuery = 0) -> Json:
        """Return one of the ten masks of the paper's figure, a byte per pixel."""
        hidden = hidden_by(name, self.data.shape[-2:], seed=seed)
        return {"mask": base64.b64encode(hidden.astype(np.uint8).tobytes()).decode()}

    def hidden(self, mask: str) -> Tensor:
        """Decode a mask; return the hidden pixel values (1, D)."""
        bits = np.frombuffer(decoded(mask), np.uint8)
        height, width = self.data.shape[-2:]
        if bits.size != height * width:
            raise NicestError(f"expected a mask of {height * width} bytes, one for each pixel, got {bits.size}")
        return torch.from_numpy(hidden_by(bits.reshape(height, width), self.data.shape).reshape(1, -1))

    @endpoint("POST", "stream")
    def inpaint(self, ask: messages.Inpainting) -> Events:
        """Fill in the hidden part of an image: server-sent events with the states and nats of every chain.

        The event `start` has the id of the `film`. The last frame of exact draws has their `spread`, the standard
        deviation of every pixel as a fraction of white, and `r_hat`, which is near 1 if the chains agree.
        """
        x, hidden = self.tensor(ask.picture), self.hidden(ask.mask)
        truth = float(self.model.nats(x)[0])
        if not math.isfinite(truth):
            raise NicestError("the model gives this picture no finite likelihood: choose another")
        marks, last = set(spread(ask.steps, FRAMES)), time.perf_counter()

        def due(i: int) -> bool:
            """Return True for frequent steps at the start, and whenever a frame's time has passed."""
            return i in marks or time.perf_counter() - last > SECONDS

        climbs = ask.method == "ascent"
        looks = self.climb(ask, x, hidden, due) if climbs else self.wander(ask, x, hidden, due)
        film_id, film = self.new_film()

        def events() -> Events:
            nonlocal last
            yield "start", {"truth_nats": truth, "steps": ask.steps, "film": film_id}
            with closing(looks):
                for step, states, heights, more in looks:
                    nats = [round(each + self.units.interval_nats, 3) for each in heights.tolist()]
                    film.add(states.cpu().numpy().reshape(-1, *self.data.shape))
                    yield "frame", {"step": step, "nats": nats, "pictures": self.packed(states), **more}
                    last = time.perf_counter()
            yield "end", {"steps": ask.steps}

        return events()

    def climb(self, ask: messages.Inpainting, x: Tensor, hidden: Tensor, due: Due) -> Looks:
        """Yield the states of the ascent of NICE §5.2 that are due."""
        schedule = replace(OURS, steps=ask.steps, noise=ask.noise)
        climb = ascend(self.model.flow, x, hidden, due, schedule=schedule, chains=ask.chains, seed=ask.seed)
        return ((each.looks[0], each.result[:, 0], each.nats[0, :, 0], {}) for each in climb)

    def wander(self, ask: messages.Inpainting, x: Tensor, hidden: Tensor, due: Due) -> Looks:
        """Yield the states of exact chains that are due.

        A quarter of the steps is warm-up. The last look has the standard deviation of every pixel over all later
        states, as a fraction of white, and the worst split R-hat.
        """
        chains = self.chains(ask.chains, ask.seed)
        warmup = max(1, ask.steps // 4)
        steps = max(1, ask.steps - warmup)
        keep = {round((k + 1) * steps / KEPT) for k in range(KEPT)}

        def looks() -> Looks:
            sums, kept = torch.zeros(3, x.shape[1], dtype=torch.float64), []  # sums of the powers 0, 1, 2 of the states
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

    def spread(self, sums: Tensor, kept: list[Tensor], hidden: Tensor) -> Json:
        """Return the standard deviation of every pixel, and the worst split R-hat."""
        variance = (sums[2] / sums[0] - (sums[1] / sums[0]).square()).clamp_min(0)
        pixels = variance.view(-1, *self.data.shape[-2:]).mean(0).sqrt() / self.brightest
        r_hat = float(split_r_hat(torch.stack(kept, 1)[None])[0, hidden[0]].max()) if len(kept) > 3 else math.nan
        return {"spread": [round(each, 4) for each in pixels.flatten().tolist()], "r_hat": number(r_hat)}

    def chains(self, count: int, seed: int) -> Chains:
        """Return exact chains; the Gaussian that preconditions them is fitted once."""
        if self.dim > limits.WALK:
            raise NicestError(
                f"exact draws need a model of at most {limits.WALK} dimensions, this one has {self.dim}: use the ascent"
            )
        made = copy.copy(self.fitted_chains)
        made.chains, made.generator = count, torch.Generator(self.run.device).manual_seed(seed)
        return made

    @functools.cached_property
    def fitted_chains(self) -> Chains:
        """Chains with the moments of samples of the model."""
        with self.lock:
            generator = torch.Generator(self.run.device).manual_seed(0)
            samples = self.engine.sample(SAMPLES, generator=generator)
            return Chains(self.run.flow, samples, generator)

    def new_film(self) -> tuple[str, Film]:
        """Return an empty film and its secret id; the oldest film is dropped."""
        id, film = secrets.token_hex(8), Film(self.brightest)
        with self.lock:
            self.films[id] = film
            for old in list(self.films)[:-FILMS]:
                del self.films[old]
        return id, film

    @endpoint("GET", out="image/gif")
    def film(self, id: Annotated[str, Query(max_length=40)]) -> bytes:
        """Return a recent inpainting as an animated GIF."""
        film = self.films.get(id)
        if film is None or not film.frames:
            raise NicestError(
                f"the frames of this inpainting are not kept any more (only the last {FILMS} are): run it again"
            )
        return film.gif()

    @endpoint("GET")
    def reference_scores(self) -> Json:
        """Return quantiles of the nats of held-out images; none while they are computed, or without data."""
        found = self.reference()
        counting = found is None and self.counter is not None and self.counter.is_alive()
        kept = [] if found is None else (found[::10] + self.units.interval_nats).tolist()
        return {"quantiles": kept, "counting": counting, "reference": self.compared_with}

    @endpoint("POST")
    def score(self, ask: messages.ToScore) -> Json:
        """Score images: log-density term by term, and the fraction of held-out images that are denser.

        `terms` sum to `nats`, a mean over draws of the noise and so a lower bound; `nats_error` is its standard error.
        """
        rows, (low, high) = [self.row(each) for each in ask.pictures], self.data.interval
        reference = self.reference()
        return {
            "scores": [self.score_row(row, reference) for row in rows],
            "draws": DRAWS if self.units.discrete else 1,
            "reference": self.compared_with,
            "caveat": CAVEAT,
            "unit": f"nats on [{low:g}, {high:g}]" if self.data.levels else "nats in the units of the data",
        }

    def score_row(self, row: np.ndarray, reference: np.ndarray | None) -> Json:
        """Score a row (D,), as the mean over draws of noise whose seed is the row's digest."""
        draws = DRAWS if self.units.discrete else 1
        generator = torch.Generator(self.run.device)
        generator.manual_seed(int.from_bytes(hashlib.sha256(row.tobytes()).digest()[:7]))
        with NOISE:
            repeated = rows_to(np.repeat(row[None], draws, axis=0), self.engine.device)
            parts = list(self.engine.each("terms", repeated, generator=generator))
        terms = {name: torch.cat([part[name] for part in parts]).double().cpu().numpy() for name in parts[0]}
        each = np.sum(list(terms.values()), axis=0)
        nats, means = float(each.mean()), {name: number(float(term.mean())) for name, term in terms.items()}
        levels = self.units.terms() if self.units.levels else {}
        return {
            "nats": number(nats + self.units.interval_nats),
            "nats_error": number(float(each.std(ddof=1)) / math.sqrt(draws)) if draws > 1 else 0.0,
            "level_nats": number(nats),
            "bits_per_dim": number(bits_per_dim(nats, self.dim)),
            "terms": {name: mean for name, mean in means.items() if name not in levels},
            "denser_share": number(float(outlier_scores(np.array([nats]), reference)[0])),
        }

    @endpoint("POST", "stream")
    def surprise(self, ask: messages.OnePicture) -> Events:
        """Find surprising pixels: server-sent events with the `excess` of some `pixels`, in nats.

        The excess is -log p(level | all other pixels) minus its expectation, the entropy of the pixel given the
        others. It is exact except that all other pixels stand at the middle of their levels.
        """
        row = self.tensor(ask.picture)[0]
        height, width = self.data.shape[-2:]
        parts = surprise(self.engine, row, self.data.levels)
        first = next(parts)  # raises errors in the request at once

        def events() -> Events:
            yield "start", {"pixels": height * width}
            for part in itertools.chain([first], parts):
                excess = (part.nats - part.entropy).tolist()
                pixels = (part.dims % (height * width)).tolist()
                yield "frame", {"pixels": pixels, "excess": [round(each, 3) for each in excess]}
            yield "end", {}

        return events()
