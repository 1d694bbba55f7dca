"""Whether rows are distributed as a model says: PITs, the coverage of credible intervals, and a verdict on both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from nicest.inference.impute import MIXED
from nicest.messages import shown

LEVELS = (0.5, 0.8, 0.9, 0.95)  # of the credible intervals
CHANCE = 0.01  # that a check fails though the model is calibrated
FEW = 50  # rows below which hardly anything can be told
CURVE = np.linspace(0.01, 0.99, 99)  # levels at which the reliability curve is drawn
WORST = 2  # columns that are drawn


class Cells(NamedTuple):
    """Cells that were hidden one at a time, (n,) each: where they are, and their PIT given the rest of their row."""

    row: np.ndarray
    column: np.ndarray
    pit: np.ndarray
    r_hat: np.ndarray  # of the chains that drew the cell


class Coverage(NamedTuple):
    """The share of some cells that lie in their central interval of a level, and from where to where chance takes it.

    Beyond `low` and `high` it is in CHANCE of all calibrated models, at any of the levels and in any of the columns.
    """

    level: float
    share: float
    low: float
    high: float
    cells: int

    @property
    def allowed(self) -> bool:
        return self.low <= self.share <= self.high

    @property
    def deviation(self) -> float:
        """In standard deviations of a binomial share."""
        return (self.share - self.level) / float(np.sqrt(self.level * (1 - self.level) / self.cells))

    @property
    def text(self) -> str:
        return f"{self.level:.0%} intervals hold {self.share:.0%}"

    @property
    def chance(self) -> str:
        return f"chance allows {self.low:.0%} to {self.high:.0%}"


class Uniformity(NamedTuple):
    """How far PITs are from uniform: their KS distance, what chance allows it to be, and its p-value."""

    ks: float
    limit: float
    p: float

    @property
    def text(self) -> str:
        return f"KS distance {self.ks:.3f}; chance allows {self.limit:.3f}"


@dataclass(frozen=True)
class Calibration:
    """How rows that a model has not seen lie in the distributions that it gives them; `verdict` says it in a line.

    A PIT is the share of draws of the model below a value, in which ties are broken at random: uniform on [0, 1] if
    the model is right. `pit` (N, D) is of the cells in their columns, `density_pit` (N,) of the rows' log-densities
    among those of `samples` fresh samples, `code_ks` (D,) the KS distance of each latent coordinate of the rows from
    those of the samples, which the prior gives. `cells` are of the conditional distributions: a cell given the other
    cells of its row. `coverage` is read from them. Of images there is neither `pit` nor `cells`.

    `missing` and `unknown` rows were left out: they lack cells, or hold values that training never saw.
    """

    columns: tuple[str, ...]
    samples: int
    pit: np.ndarray
    density_pit: np.ndarray
    code_ks: np.ndarray
    cells: Cells
    missing: int = 0
    unknown: int = 0

    @property
    def coverage(self) -> list[Coverage]:
        """Of the intervals of all cells, at each of LEVELS."""
        return [self._coverage(level, slice(None), CHANCE / len(LEVELS)) for level in LEVELS if len(self.cells.pit)]

    def coverage_of(self, column: str) -> list[Coverage]:
        """Of the intervals of the cells of one column."""
        own = self.cells.column == self.columns.index(column)
        chance = CHANCE / len(LEVELS) / len(self.columns)
        return [self._coverage(level, own, chance) for level in LEVELS if own.any()]

    def _coverage(self, level: float, which: Any, chance: float) -> Coverage:
        pit, rows = self.cells.pit[which], self.cells.row[which]
        share = float(covered(pit, level).mean())
        low, high = (float(end) for end in band(np.array(level), effective(covered(pit, level), rows), chance))
        return Coverage(level, share, low, high, len(pit))

    @property
    def density(self) -> Uniformity:
        """Of `density_pit`."""
        return self._uniformity(float(ks_distance(self.density_pit[:, None])[0]), 1)

    @property
    def codes(self) -> Uniformity:
        """Of the worst latent coordinate."""
        return self._uniformity(float(self.code_ks.max()), len(self.code_ks))

    @property
    def marginals(self) -> dict[str, Uniformity]:
        """Of `pit`, by column, the worst first."""
        distances = ks_distance(self.pit)
        worst = np.argsort(-distances, kind="stable")
        return {self.columns[i]: self._uniformity(float(distances[i]), len(self.columns)) for i in worst}

    def _uniformity(self, ks: float, times: int) -> Uniformity:
        """Of the largest of so many distances: its limit and its p-value are Bonferroni's."""
        n = self.independent
        p = min(1.0, times * float(stats.kstwo.sf(ks, n)))
        return Uniformity(ks, float(stats.kstwo.isf(CHANCE / times, n)), p)

    @property
    def independent(self) -> int:
        """Draws of a known distribution that tell as much as the rows do beside the samples."""
        n = len(self.density_pit)
        return max(1, round(n * self.samples / (n + self.samples)))

    @property
    def poor(self) -> int:
        """Cells whose chains do not agree."""
        return int((self.cells.r_hat >= MIXED).sum())

    @property
    def verdict(self) -> str:
        """One line: the gravest of what chance does not explain, if anything."""
        return self._found() or self._nothing_found()

    def _found(self) -> str:
        if not all(each.allowed for each in self.coverage):
            gravest = max(self.coverage, key=lambda each: abs(each.deviation) * (not each.allowed))
            name, worst = self._worst_column(gravest)
            in_it = f"worst column: {shown(name)}, {worst.share:.0%}"
            return f"{_word(gravest)}: {gravest.text} of the cells ({gravest.chance}); {in_it}"
        each = [(name, one) for name in self.columns for one in self.coverage_of(name) if not one.allowed]
        if each:
            name, one = max(each, key=lambda pair: abs(pair[1].deviation))
            return f"{_word(one)} in column {shown(name)}: {one.text} of its cells ({one.chance})"
        if self.density.ks > self.density.limit:
            middle = float(np.median(self.density_pit))
            word, than = ("overconfident", "lower") if middle < 0.5 else ("underconfident", "higher")
            return (
                f"{word} in the joint: rows have a {than} log-density than samples of the model ({self.density.text})"
            )
        if self.marginals:
            name, one_column = next(iter(self.marginals.items()))
            if one_column.ks > one_column.limit:
                return f"not calibrated: column {shown(name)} is not distributed as in samples ({one_column.text})"
        if self.codes.ks > self.codes.limit:
            return f"not calibrated: a latent coordinate does not follow the prior ({self.codes.text})"
        return ""

    def _nothing_found(self) -> str:
        n = len(self.density_pit)
        start = "calibrated" if n >= FEW else f"calibrated, as far as {n} rows can tell"
        if not self.coverage:
            return f"{start}: log-densities and codes are distributed as in samples of the model ({self.density.text})"
        one = self.coverage[LEVELS.index(0.9)]
        return f"{start}: {one.text} of the cells ({one.chance}), and all PITs are uniform within chance"

    def _worst_column(self, gravest: Coverage) -> tuple[str, Coverage]:
        """The column that is farthest off, at the level and to the side of a coverage."""
        place, side = LEVELS.index(gravest.level), np.sign(gravest.deviation)
        found = {name: self.coverage_of(name) for name in self.columns}
        ones = {name: each[place] for name, each in found.items() if each}
        name = max(ones, key=lambda each: side * ones[each].deviation)
        return name, ones[name]

    def summary(self) -> dict[str, Any]:
        """All figures, as JSON has them."""
        density, codes = self.density._asdict(), self.codes._asdict()
        columns = {
            name: each._asdict() | {"coverage": [one._asdict() for one in self.coverage_of(name)]}
            for name, each in self.marginals.items()
        }
        return {
            "verdict": self.verdict,
            "rows": len(self.density_pit),
            "dim": len(self.code_ks),
            "missing": self.missing,
            "unknown": self.unknown,
            "samples": self.samples,
            "coverage": [each._asdict() for each in self.coverage],
            "cells": len(self.cells.pit),
            "not_mixed": self.poor,
            "log_density": density | {"mean": float(self.density_pit.mean())},
            "codes": codes | {"worst": int(self.code_ks.argmax())},
            "columns": columns,
        }

    def plot(self, path: str | Path) -> None:
        """The reliability curve, and histograms of the PITs of the log-density and of the worst columns."""
        from nicest.plots import calibration_figure, save_figure  # an estimator that draws nothing needs no matplotlib

        curves, marked = {}, []
        pit, rows, column = self.cells.pit, self.cells.row, self.cells.column
        low = high = np.zeros(0)
        if len(pit):
            marked = [(each.level, each.share) for each in self.coverage]
            curves["all cells"] = curve(pit)
            worst, _ = self._worst_column(max(self.coverage, key=lambda each: abs(each.deviation)))
            curves[f"worst column: {worst}"] = curve(pit[column == self.columns.index(worst)])
            n = [effective(covered(pit, level), rows) for level in CURVE]
            low, high = band(CURVE, np.array(n), CHANCE / len(LEVELS))
        panels = {f"log-density of rows\n{self.density.text}": self.density_pit}
        for name, one in list(self.marginals.items())[:WORST]:
            panels[f"{name}\n{one.text}"] = self.pit[:, self.columns.index(name)]
        figure = calibration_figure(
            CURVE, curves, (low, high), marked, panels, independent=self.independent, title=self.verdict
        )
        save_figure(figure, Path(path))


def _word(coverage: Coverage) -> str:
    return "overconfident" if coverage.share < coverage.level else "underconfident"


def randomised_ranks(values: np.ndarray, draws: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """PITs (n,) of values (n,) among draws (m,) of them all: (below + U (ties + 1)) / (m + 1), U uniform.

    They are uniform, exactly, if a value and the draws come from one distribution, whether that is continuous or not.
    """
    ordered = np.sort(draws)
    below, up_to = (np.searchsorted(ordered, values, side) for side in ("left", "right"))
    return _ranks(below, up_to - below, len(draws), rng)


def own_ranks(values: np.ndarray, draws: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The same of values that have draws (m, n) of their own."""
    return _ranks((draws < values).sum(0), (draws == values).sum(0), len(draws), rng)


def _ranks(below: np.ndarray, ties: np.ndarray, m: int, rng: np.random.Generator) -> np.ndarray:
    ranks: np.ndarray = (below + rng.random(len(below)) * (ties + 1)) / (m + 1)
    return ranks


def ks_distance(pit: np.ndarray) -> np.ndarray:
    """The largest distance between the empirical distribution of every column (N, D) and the uniform one, (D,)."""
    ordered, steps = np.sort(pit, axis=0), np.arange(len(pit) + 1)[:, None] / len(pit)
    distance: np.ndarray = np.maximum(steps[1:] - ordered, ordered - steps[:-1]).max(0)
    return distance


def covered(pit: np.ndarray, level: float) -> np.ndarray:
    """Which cells lie in their central interval of a level."""
    inside: np.ndarray = np.abs(pit - 0.5) <= level / 2
    return inside


def curve(pit: np.ndarray) -> np.ndarray:
    """The share that is covered at each level of CURVE."""
    return np.array([covered(pit, level).mean() for level in CURVE])


def band(level: np.ndarray, n: np.ndarray | int, chance: float) -> tuple[np.ndarray, np.ndarray]:
    """From where to where the share of n cells lies, but for so small a chance, if each is covered with `level`."""
    low, high = (stats.binom.ppf(end, n, level) / n for end in (chance / 2, 1 - chance / 2))
    return low, high


def effective(inside: np.ndarray, rows: np.ndarray) -> int:
    """How many cells of as many rows would say as much as these, of which several may be of one row.

    Cells of a row that are covered, or not, together make the variance of the share larger than a binomial's.
    """
    off = inside - inside.mean()
    alone, together = np.square(off).sum(), np.square(np.bincount(rows, off)).sum()
    return max(1, round(len(inside) * alone / together)) if together > alone else len(inside)
