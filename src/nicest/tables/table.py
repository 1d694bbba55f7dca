"""A trained table: its schema and its model, and every question that can be asked of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nicest.data.columns import Schema
from nicest.data.where import where as parsed
from nicest.errors import NicestError
from nicest.messages import shown
from nicest.tables.heads import Categories, Interval, Numbers
from nicest.tables.marginal import Marginal
from nicest.tables.model import TableModel

Unseen = Literal["inf", "missing"]
BATCH = 4_000  # rows that the network reads at once
LEVELS = (0.5, 0.8, 0.9, 0.95)  # of the intervals that `calibration` counts
PARTICLES = 4  # rows drawn for each row that is asked for under several conditions


class Drawn(NamedTuple):
    """Sampled rows, the probability of their conditions, and the effective number of draws behind them."""

    rows: np.ndarray
    probability: float
    effective_size: float


class Table:
    """A trained table; rows are encoded, (N, D) float32 with NaN for missing cells, see `encode` and `decode`.

    Parameters
    ----------
    schema : Schema
    model : TableModel
    """

    def __init__(self, schema: Schema, model: TableModel) -> None:
        self.schema, self.model = schema, model.eval()
        self.device = model.device

    def encode(self, data: Any, source: str | Path = "X", *, unseen: Unseen = "inf") -> np.ndarray:
        """Encode a data frame, an Arrow table or an array as rows; see `Schema.encode`."""
        return self.schema.encode(data, source, unseen=unseen)

    def decode(self, rows: np.ndarray) -> Any:
        """Decode rows to a table like that of training."""
        return self.schema.decode(rows)

    def score(self, rows: np.ndarray, *, told: Callable[[int], None] | None = None) -> np.ndarray:
        """Return the log-density of each row, (N,): of its observed cells; discrete columns have probabilities."""
        return self._batched(self.model.log_prob, rows, told)

    def surprise(self, rows: np.ndarray) -> np.ndarray:
        """Return log p(cell | all other observed cells) of every cell, (N, D); NaN where it is missing."""

        def of(x: Tensor) -> Tensor:
            known = (~x.isnan()).to(x)
            found = torch.full_like(x, math.nan)
            for i in range(x.shape[1]):
                seen = known.clone()
                seen[:, i] = 0
                nats = self.model.conditional(x, seen, i).log_prob(self.model.cells(x, i)).reshape(-1)
                found[:, i] = torch.where(known[:, i] > 0, nats, math.nan)
            return found

        return self._batched(of, rows)

    @torch.no_grad()
    def marginals(self, rows: np.ndarray, columns: Sequence[int]) -> list[Marginal]:
        """Return p(x_i | the observed cells outside `columns`) for each of these columns, by one pass."""

        def of(x: Tensor) -> list[Numbers | Categories]:
            seen = (~x.isnan()).to(x)
            seen[:, list(columns)] = 0
            heads = self.model.heads_of(x, seen, columns)
            return [heads[i].exact() for i in columns]

        parts = [of(part) for part in self._parts(rows)]
        joined = [type(each[0]).joined(each) for each in zip(*parts, strict=True)]
        return [Marginal(self.schema[i], head) for i, head in zip(columns, joined, strict=True)]

    def impute(self, rows: np.ndarray, *, draw: bool = False, seed: int = 0) -> np.ndarray:
        """Return rows without missing cells.

        The best guess of each cell by itself: the mean of a density, the median of steps, the likeliest category. With
        `draw`, one joint draw of all missing cells of a row given the observed ones.
        """
        if draw:
            generator = torch.Generator(self.device).manual_seed(seed)
            return self._batched(lambda x: self.model.complete(x, generator=generator), rows)
        filled = rows.copy()
        for i, marginal, missing in self.missing(rows):
            filled[missing, i] = marginal.best()
        return filled

    @torch.no_grad()
    def missing(self, rows: np.ndarray) -> list[tuple[int, Marginal, np.ndarray]]:
        """Return, for each column with missing cells, its number, their distributions, and the mask of their rows.

        The distributions of a row come from one pass, each given all observed cells.
        """
        holes = np.isnan(rows)
        found: dict[int, list[Any]] = {}
        for start in range(0, len(rows), BATCH):
            some = slice(start, start + BATCH)
            incomplete = holes[some].any(1)
            if not incomplete.any():
                continue
            x = torch.from_numpy(rows[some][incomplete]).to(self.device)
            columns = np.flatnonzero(holes[some].any(0)).tolist()
            heads = self.model.heads_of(x, (~x.isnan()).to(x), columns)
            for i in columns:
                found.setdefault(i, []).append(heads[i].rows(x[:, i].isnan()).exact())
        return [(i, Marginal(self.schema[i], type(found[i][0]).joined(found[i])), holes[:, i]) for i in sorted(found)]

    def sample(self, n: int, where: str = "", *, seed: int = 0) -> Drawn:
        """Draw n rows, of those that meet the conditions `where` if there are any.

        Exact values are observed; ranges are drawn inside, weighted by their probability and resampled. The
        probability is that of the ranges given the exact values.
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        if not where:
            parts = [self.model.sample(min(BATCH, n - at), generator=generator) for at in range(0, n, BATCH)]
            return Drawn(_array(torch.cat(parts)) if parts else self._none(), 1.0, float(n))
        observed, ranges = self.conditions(where)
        size = n if len(ranges) < 2 else max(PARTICLES * n, 1_000)
        kept, log_p, effective = [], [], []
        for at in range(0, size, 5 * BATCH):
            some = min(5 * BATCH, size - at)
            drawn, nats, ess = self.model.sample_where(some, observed, ranges, generator=generator)
            kept.append(_array(drawn))
            log_p.append(nats)
            effective.append(ess)
        probability = float(np.exp(log_p).mean()) if log_p else 1.0
        if probability <= 0:
            raise NicestError(f"no row of the model meets {shown(where)}: its probability is 0")
        rows = np.concatenate(kept) if kept else self._none()
        chosen = np.random.default_rng(seed).permutation(len(rows))[:n]
        return Drawn(rows[chosen], probability, min(float(n), sum(effective)))

    def conditions(self, where: str) -> tuple[dict[int, float], dict[int, Sequence[Interval]]]:
        """Return the exact values and the ranges, by column, of a condition such as 'age >= 30 and sex = "F"'."""
        observed, ranges = dict[int, float](), dict[int, Sequence[Interval]]()
        for i, intervals in parsed(where, self.schema).items():
            if len(intervals) == 1 and intervals[0][0] == intervals[0][1]:
                observed[i] = intervals[0][0]
            else:
                ranges[i] = intervals
        return observed, ranges

    def calibration(self, rows: np.ndarray, *, hidden: float = 0.2, seed: int = 0) -> dict[str, Any]:
        """Hide a part of the cells of rows and compare their distributions with the truth.

        Returns
        -------
        dict
            `coverage`: share of the hidden numbers inside the central intervals, by level. `pit`: P(X <= truth) of
            the hidden numbers, made continuous at atoms and steps by a uniform share of their probability. `gap`:
            mean absolute difference between P(X <= truth) by single passes and by joint draws.
        """
        rng = np.random.default_rng(seed)
        mask = (rng.random(rows.shape) < hidden) & ~np.isnan(rows)
        holed = np.where(mask, np.nan, rows).astype(np.float32)
        draws = np.stack([self.impute(holed, draw=True, seed=seed + k) for k in range(20)])
        pits, gaps = [], []
        for i, marginal, missing in self.missing(holed):
            tested = mask[:, i][missing]
            if not marginal.numeric or not tested.any():
                continue
            truth = np.where(tested, rows[missing, i], np.nan)
            upper, lower = marginal.cdf_of(truth), marginal.cdf_of(truth, strict=True)
            pit = lower + rng.random(len(truth)) * (upper - lower)
            drawn = draws[:, missing, i]
            share = ((drawn < truth).mean(0) + (drawn <= truth).mean(0)) / 2
            pits.append(pit[tested])
            gaps.append(np.abs(share - (lower + upper) / 2)[tested])
        pit = np.concatenate(pits) if pits else np.empty(0)
        coverage = {level: float(np.mean(np.abs(pit - 0.5) <= level / 2)) if len(pit) else math.nan for level in LEVELS}
        return {"coverage": coverage, "pit": pit, "gap": float(np.concatenate(gaps).mean()) if gaps else math.nan}

    def _parts(self, rows: np.ndarray) -> list[Tensor]:
        """Return rows as tensors of at most BATCH rows; at least one."""
        return list(torch.from_numpy(rows).to(self.device).split(BATCH))

    @torch.no_grad()
    def _batched(
        self, function: Callable[[Tensor], Tensor], rows: np.ndarray, told: Callable[[int], None] | None = None
    ) -> np.ndarray:
        found = []
        for part in self._parts(rows):
            found.append(_array(function(part)))
            if told:
                told(sum(map(len, found)))
        return np.concatenate(found)

    def _none(self) -> np.ndarray:
        return np.empty((0, len(self.schema)), np.float32)


def _array(values: Tensor) -> np.ndarray:
    return values.cpu().numpy()
