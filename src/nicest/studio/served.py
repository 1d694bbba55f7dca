"""One run as the studio serves it: pictures in base64 in and out, and a task of the library in between."""

from __future__ import annotations

import base64
import binascii
import functools
import itertools
import math
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nicest.data.cells import decode, encode
from nicest.data.columns import Column
from nicest.data.tables import TableFile
from nicest.errors import NicestError
from nicest.flows import Flow
from nicest.plots import animation, image_grid
from nicest.recipes.units import INPUT_LAYERS, bits_per_dim, interval_nats
from nicest.studio import limits
from nicest.studio.messages import (
    Between,
    ColumnInfo,
    Film,
    ImputedCell,
    ImputedRow,
    Inpainting,
    Metrics,
    Move,
    Moved,
    Pictures,
    Row,
    RowScore,
    RunInfo,
    Score,
    Scores,
    Spectrum,
    Sphere,
    Table,
    TableScores,
    TrainingScores,
)
from nicest.tasks.fill import OURS, ascend
from nicest.tasks.impute_table import fill as fill_cells
from nicest.tasks.inpaint import spread
from nicest.tasks.latent import Model, even_points, principal
from nicest.tasks.masks import hidden_by
from nicest.tasks.pictures import fit_picture
from nicest.tasks.score import CAVEAT, chunks, ledgers, log_densities, outlier_scores, plan, training_quantiles
from nicest.train.checkpoint import RunFolder
from nicest.train.engine import Engine
from nicest.train.runtime import rows_to

FRAMES = 150  # looks at an ascent, at least
SECONDS = 1 / 25  # that pass between two looks, at most
DRAWS = 8  # of the noise
_noise = threading.Lock()  # the seed of the noise is the process's


class Served:
    """A run folder, whose model is read when it is first asked for, and again when training has replaced it."""

    def __init__(self, id: str, path: Path) -> None:
        self.id, self.folder, self.name = id, RunFolder(path), path.resolve().name
        self.lock = threading.RLock()
        self.loaded: Loaded | None = None

    def open(self) -> Loaded:
        with self.lock:
            found = self.folder.model
            stamp = found.stat().st_ino if found.is_file() else 0  # training replaces the file by another
            if self.loaded is None or self.loaded.stamp != stamp:
                self.close()
                self.loaded = Loaded(self.folder, stamp)
            return self.loaded

    def close(self) -> None:
        if self.loaded:
            self.loaded.close()

    def info(self) -> RunInfo:
        try:
            return self.open().info(self.id, self.name)
        except NicestError as error:
            return RunInfo(id=self.id, name=self.name, ready=False, why=str(error), data="")

    def metrics(self, after: int) -> Metrics:
        """The rows of metrics after a step; a training that goes on writes more."""
        rows = [row for row in self.folder.metrics() if row["step"] > after]
        path = self.folder.path / "metrics.jsonl"
        idle = max(0.0, time.time() - path.stat().st_mtime) if path.is_file() else None
        try:
            epochs = self.open().model.recipe.train.epochs
        except NicestError:
            epochs = 0
        return Metrics(rows=[_plain(row) for row in rows], idle_seconds=idle, epochs=epochs)


class Loaded:
    """The model of a run, ready for any number of threads."""

    def __init__(self, folder: RunFolder, stamp: int) -> None:
        self.folder, self.stamp = folder, stamp
        self.model = Model(folder.model, "cpu")
        self.model.flow.requires_grad_(False)
        self.data, self.columns = self.model.data, folder.columns()
        self.engine = Engine(self.model.flow)
        self.lock = threading.Lock()
        self.closed, self.idle, self.climbing = threading.Event(), threading.Event(), 0
        self.idle.set()
        self.counter: threading.Thread | None = None
        self.quantiles: np.ndarray | None = None
        self.dtype: Any = "float32" if not self.data.levels else "uint8" if self.data.levels <= 256 else "uint16"
        self.kind = np.dtype(self.dtype).newbyteorder("<")
        self.draws = DRAWS if self.data.levels or self.data.discrete else 1

    def info(self, id: str, name: str) -> RunInfo:
        kind: Any = "table" if self.columns else "rows" if len(self.data.shape) == 1 else "images"
        recipe = self.model.recipe
        return RunInfo(
            id=id,
            name=name,
            ready=True,
            recipe=recipe.name,
            dataset=Path(self.data.name).name,
            kind=kind,
            shape=list(self.data.shape),
            dim=self.data.dim,
            levels=self.data.levels,
            dtype=self.dtype,
            brightest=self.brightest,
            interval=list(self.data.interval) if self.data.levels else None,
            data=self.no_data,
            imputes=bool(self.columns),
        )

    @functools.cached_property
    def no_data(self) -> str:
        """Why the data of the run is not at hand; empty where it is."""
        try:
            with self.lock:
                self.model.splits  # noqa: B018
        except NicestError as error:
            return str(error)
        return ""

    @functools.cached_property
    def brightest(self) -> float:
        if self.data.levels:
            return self.data.levels - 1
        return 1.0 if self.no_data else float(np.abs(self.model.splits.train).max()) or 1.0

    def packed(self, rows: Tensor) -> list[str]:
        """Rows (N, D) as pictures."""
        return [base64.b64encode(row.tobytes()).decode() for row in rows.cpu().numpy().astype(self.kind)]

    def row(self, picture: str) -> np.ndarray:
        """A picture as a row (D,), checked."""
        values = np.frombuffer(_bytes(picture), np.uint8)
        if values.size != self.data.dim * self.kind.itemsize:
            raise NicestError(
                f"expected a picture of {self.data.dim} numbers of {self.dtype}, as this model is of;"
                f" got {values.size} bytes"
            )
        row = values.view(self.kind).astype(self.kind.newbyteorder("="))
        if self.data.levels and int(row.max()) >= self.data.levels:
            raise NicestError(f"expected levels 0 to {self.data.levels - 1}, got {int(row.max())}")
        if not np.isfinite(row).all():
            raise NicestError("expected finite numbers, got a picture with others")
        return row

    def tensor(self, *pictures: str) -> Tensor:
        return rows_to(np.stack([self.row(each) for each in pictures]), self.model.device)

    def images_only(self) -> None:
        if len(self.data.shape) == 1:
            raise NicestError(f"this model is of rows of {self.data.dim} numbers, not of images")

    def test_images(self, first: int, n: int) -> Pictures:
        self.images_only()
        if self.no_data:
            raise NicestError(self.no_data)
        rows = self.model.splits.test
        chosen = rows_to(rows[first : first + n], self.model.device)
        return Pictures(pictures=self.packed(chosen) if len(chosen) else [], total=len(rows))

    def samples(self, n: int, temperature: float, seed: int) -> Pictures:
        self.images_only()
        x = self.model.decode(self.model.draw(n, temperature=temperature, seed=seed))
        return Pictures(pictures=self.packed(x), nats=_numbers(self.model.nats(x)))

    def upload(self, content: bytes, inverted: bool) -> str:
        return self.packed(torch.from_numpy(fit_picture(content, self.data, inverted=inverted))[None])[0]

    def mask(self, name: str, seed: int) -> str:
        self.images_only()
        hidden = hidden_by(name, self.data.shape[-2:], seed=seed)
        return base64.b64encode(hidden.astype(np.uint8).tobytes()).decode()

    def ascent(self, ask: Inpainting) -> Iterator[tuple[str, dict[str, Any]]]:
        """The events of an ascent: its start, frames, and its end; what is wrong with the request is said at once."""
        self.images_only()
        x = self.tensor(ask.picture)
        bits = np.frombuffer(_bytes(ask.mask), np.uint8)
        height, width = self.data.shape[-2:]
        if bits.size != height * width:
            raise NicestError(f"expected a mask of {height * width} bytes, one for each pixel, got {bits.size}")
        hidden = hidden_by(bits.reshape(height, width), self.data.shape).reshape(1, -1)
        schedule = replace(OURS, steps=ask.steps, noise=ask.noise)
        truth = float(self.model.nats(x)[0])
        if not math.isfinite(truth):
            raise NicestError("the model gives this picture no finite likelihood: choose another")
        pace = Pace(ask.steps)
        looks = ascend(
            self.model.flow, x, torch.from_numpy(hidden), pace.due, schedule=schedule, chains=ask.chains, seed=ask.seed
        )
        return self._events(looks, pace, truth, ask.steps)

    def _events(self, looks: Any, pace: Pace, truth: float, steps: int) -> Iterator[tuple[str, dict[str, Any]]]:
        self._climbers(+1)
        try:
            yield "start", {"truth_nats": truth, "steps": steps}
            unit = interval_nats(self.data)
            for filled in looks:
                nats = [round(each + unit, 3) for each in filled.nats[0, :, 0].tolist()]
                yield "frame", {"step": filled.looks[0], "nats": nats, "pictures": self.packed(filled.result[:, 0])}
                pace.go_on()
            yield "end", {"steps": steps}
        finally:
            self._climbers(-1)

    def _climbers(self, change: int) -> None:
        """Count the ascents; while there are any, the counting of training scores rests."""
        with self.lock:
            self.climbing += change
            self.idle.clear() if self.climbing else self.idle.set()

    def move(self, ask: Move) -> Moved:
        self.images_only()
        model = self.model
        if ask.keep is not None and ask.keep > self.data.dim:
            raise NicestError(f"expected to keep at most {self.data.dim} components, got {ask.keep}")
        if len(ask.places) > self.data.dim:
            raise NicestError(f"expected at most {self.data.dim} places, got {len(ask.places)}")
        x = self.tensor(ask.picture)
        h = model.encode(x)
        if ask.places:
            h = model.put(h, torch.tensor([ask.places]))
        if ask.keep is not None:
            h = model.cut(h, ask.keep)
        changed = bool(ask.places) or ask.keep is not None
        shown = model.decode(h) if changed else x
        places = model.places(h)[0]
        k = min(limits.COMPONENTS, self.data.dim)
        return Moved(
            picture=self.packed(shown)[0],
            nats=_number(float(model.nats(shown)[0])),
            places=[round(each, 4) for each in places[:k].tolist()],
            sigma=(model.deviation * model.sigma[model.order[:k]]).tolist(),
            radius=float(places.norm()),
            typical_radius=math.sqrt(self.data.dim),
        )

    def between(self, ask: Between) -> Pictures:
        self.images_only()
        h0, h1 = self.model.encode(self.tensor(ask.start, ask.end)).split(1)
        x = self.model.decode(self.model.between(h0, h1, ask.count, ask.way)[0])
        return Pictures(pictures=self.packed(x), nats=_numbers(self.model.nats(x)))

    def sphere(self, basis: str, seed: int, n: int) -> Sphere:
        self.images_only()
        points, radius = even_points(n), self.model.typical_radius(basis)
        h = self.model.on_sphere(points, self.model.axes(basis, seed), radius)
        return Sphere(points=points.round(4).tolist(), pictures=self.packed(self.model.decode(h)), radius=radius)

    def score(self, pictures: list[str]) -> Scores:
        self.images_only()
        rows = np.stack([self.row(each) for each in pictures])
        with _noise:
            torch.manual_seed(0)
            terms = ledgers(self.engine, rows, self.draws)
        level_nats = np.sum(list(terms.values()), axis=0)
        shares = outlier_scores(level_nats, self.reference())
        scores = []
        for i, nats in enumerate(level_nats.tolist()):
            each = {name: _number(float(values[i])) for name, values in terms.items()}
            scores.append(
                Score(
                    nats=_number(nats + interval_nats(self.data)),
                    level_nats=_number(nats),
                    bits_per_dim=_number(bits_per_dim(nats, self.data.dim)),
                    terms={name: value for name, value in each.items() if name not in INPUT_LAYERS},
                    level_terms={name: value for name, value in each.items() if name in INPUT_LAYERS},
                    denser_share=_number(float(shares[i])),
                )
            )
        return Scores(scores=scores, draws=self.draws, caveat=CAVEAT, unit=self.unit)

    @property
    def unit(self) -> str:
        low, high = self.data.interval
        return f"nats on [{low:g}, {high:g}]" if self.data.levels else "nats in the units of the data"

    def reference(self) -> np.ndarray | None:
        """Quantiles of the nats of the training rows; None while they are counted, and where the data is gone.

        Of many rows and a large network that takes minutes, once in the life of a model: who asks first starts it.
        """
        with self.lock:
            first = self.counter is None
            if first:
                self.counter = threading.Thread(target=self._count)
                self.counter.start()
        if first and self.counter:
            self.counter.join(2)
        return self.quantiles

    def _count(self) -> None:
        with suppress(OSError, AttributeError):  # behind all who wait for an answer, where threads may be told so
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        engine, step = Patient(self.model.flow, self.closed, self.idle), int(self.model.figures.get("step", 0))
        with suppress(Closed):
            self.quantiles = training_quantiles(self.folder.path, self.model.recipe, step, engine, self.draws)

    def close(self) -> None:
        """Break off what is going on behind the requests."""
        self.closed.set()
        self.idle.set()
        if self.counter:
            self.counter.join()

    def training_scores(self) -> TrainingScores:
        found = self.reference()
        counting = found is None and self.counter is not None and self.counter.is_alive()
        kept = [] if found is None else (found[::10] + interval_nats(self.data)).tolist()
        return TrainingScores(quantiles=kept, counting=counting)

    def spectrum(self) -> Spectrum:
        model = self.model
        pca = None
        if not self.no_data and not model.whitens:
            pca = self.principal_deviations
        sigma = model.sigma[model.order].tolist()
        return Spectrum(sigma=sigma, deviation=model.deviation, pca=pca, whitened=model.whitens)

    @functools.cached_property
    def principal_deviations(self) -> list[float]:
        with self.lock:
            return [float(each) for each in principal(self.model.space, self.model.rows("train"))[1]]

    def film(self, ask: Film) -> bytes:
        """The frames of an ascent as a GIF, its chains side by side."""
        self.images_only()
        frames = []
        for frame in ask.frames:
            images = np.stack([self.row(each) for each in frame]).reshape(-1, *self.data.shape)
            frames.append(image_grid(images, brightest=self.brightest, columns=len(images), size=160 * len(images)))
        if len({frame.size for frame in frames}) > 1:
            raise NicestError("expected as many pictures in every frame, got different numbers")
        return animation(frames, milliseconds=40)

    def table_only(self) -> tuple[Column, ...]:
        if not self.columns:
            raise NicestError("this model is not of a table: train one on a .csv or .parquet file")
        return self.columns

    def sample_rows(self, n: int, temperature: float, seed: int) -> Table:
        rows = self.model.decode(self.model.draw(n, temperature=temperature, seed=seed)).cpu().numpy()
        if not self.columns:
            names = [f"x{i + 1}" for i in range(self.data.dim)]
            return Table(columns=names, rows=[_cells(row) for row in rows.tolist()])
        table = decode(rows, self.columns)
        return Table(columns=table.column_names, rows=_rows_of(table))

    def column_infos(self) -> list[ColumnInfo]:
        return [
            ColumnInfo(name=c.name, kind=c.kind, low=c.low, high=c.high, values=list(c.values))
            for c in self.table_only()
        ]

    def score_table(self, content: bytes, suffix: str) -> TableScores:
        """The log-density of every row of a table, the first rows of which are shown."""
        columns = self.table_only()
        names = [column.name for column in columns]
        with tempfile.NamedTemporaryFile(suffix=suffix) as file:
            file.write(content)
            file.flush()
            path = Path(file.name)
            try:
                parts = [chunk for part in plan([path], columns) for chunk in chunks(part, columns, self.model.recipe)]
                shown = [row for batch in TableFile(path).batches(names) for row in _rows_of(batch)][: limits.ROWS]
            except NicestError as error:
                raise NicestError(str(error).replace(str(path), "the table")) from error
        with _noise:
            torch.manual_seed(0)
            nats = np.concatenate([log_densities(self.engine, part, self.draws) for part in parts] or [np.zeros(0)])
        shares = outlier_scores(nats, self.reference())
        scores = [
            RowScore(row=i, nats=_number(value), denser_share=_number(share), why=_why(value))
            for i, (value, share) in enumerate(zip(nats.tolist(), shares.tolist(), strict=True))
        ]
        return TableScores(
            columns=names,
            cells=shown,
            scores=scores[: limits.ROWS],
            total=len(nats),
            caveat=CAVEAT,
        )

    def impute(self, ask: Row) -> ImputedRow:
        """The missing cells of a row, drawn from what the model says of them given the known ones."""
        import pyarrow as pa

        columns = self.table_only()
        if strange := [name for name in ask.cells if name not in {column.name for column in columns}]:
            raise NicestError(f"expected columns of the model, got {strange[0][:80]!r}")
        cells = [_typed(ask.cells.get(column.name), column) for column in columns]
        batch = pa.record_batch(cells, names=[column.name for column in columns])
        rows, unknown = encode(batch, columns, Path("the row"))
        if unknown.any():
            raise NicestError("the row holds a value that training never saw: choose one that is listed")
        hidden = np.isnan(rows)
        found = fill_cells(self.model.flow, rows, hidden, columns, draws=200, steps=400, interval=0.9, seed=ask.seed)
        known = ~hidden[0]
        tables = [_rows_of(decode(each, columns))[0] for each in (np.where(hidden, found.value, rows), *found[1:3])]
        each = zip(columns, *tables, known.tolist(), strict=True)
        r_hat = float(np.nan_to_num(found.r_hat, nan=1.0).max())
        return ImputedRow(
            cells=[ImputedCell(column=c.name, value=v, low=low, high=high, known=k) for c, v, low, high, k in each],
            r_hat=_number(r_hat),
        )


class Closed(Exception):
    """The server ends."""


class Patient(Engine):
    """An engine for work behind the scenes: it rests while someone watches an ascent, and ends with the server."""

    def __init__(self, flow: Flow, closed: threading.Event, idle: threading.Event) -> None:
        super().__init__(flow, batch=200)
        self.closed, self.idle = closed, idle

    def each(self, method: str, x: Tensor, batch: int = 0) -> Iterator[Any]:
        for result in super().each(method, x, batch):
            self.idle.wait(60)
            if self.closed.is_set():
                raise Closed
            yield result


class Pace:
    """When to look at an ascent: often at its start, and never later than a frame's time after the last look."""

    def __init__(self, steps: int) -> None:
        self.looks = set(spread(steps, FRAMES))
        self.last = time.perf_counter()

    def due(self, i: int) -> bool:
        return i in self.looks or time.perf_counter() - self.last > SECONDS

    def go_on(self) -> None:
        self.last = time.perf_counter()


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise NicestError("expected base64, got something else") from error


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _numbers(values: Tensor) -> list[float | None]:
    return [_number(each) for each in values.double().tolist()]


def _why(nats: float) -> str:
    return "a cell is missing" if nats != nats else "a value that training never saw" if nats == -math.inf else ""


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _cells(row: list[Any]) -> list[Any]:
    return [None if isinstance(each, float) and not math.isfinite(each) else each for each in row]


def _rows_of(table: Any) -> list[list[Any]]:
    """The rows of an Arrow table or batch; what JSON has no word for is text."""
    columns = [[_cell(each) for each in column.to_pylist()] for column in table.columns]
    return [list(row) for row in itertools.zip_longest(*columns)]


def _typed(value: Any, column: Column) -> Any:
    """One cell as an Arrow array, of the kind that the column is of."""
    import pyarrow as pa

    if column.values and isinstance(column.values[0], str):
        return pa.array([None if value is None else str(value)], pa.string())
    if column.values and isinstance(column.values[0], bool):
        if value is not None and not isinstance(value, bool):
            raise NicestError(f"expected true or false in column {column.name!r}, got {value!r}")
        return pa.array([value], pa.bool_())
    try:
        number = None if value is None else float(value)
    except (ValueError, OverflowError):
        number = math.inf
    if number is not None and not math.isfinite(number):
        raise NicestError(f"expected a number in column {column.name!r}, got {str(value)[:80]!r}")
    return pa.array([number], pa.float64())


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    return _number(float(f"{value:.7g}")) if isinstance(value, float) else str(value)
