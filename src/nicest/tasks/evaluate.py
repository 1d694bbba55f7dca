"""The log-likelihood of a trained model, term by term, with its error and linear baselines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from nicest.flows import bits_per_dim
from nicest.progress import Bar, track
from nicest.runs.run import Run
from nicest.tasks.baselines import baselines as linear_baselines
from nicest.tasks.options import Noise, Seed, Split, option
from nicest.tasks.results import Result, cell, columns, plus_minus

WHY_POSITIVE = (
    "Nats are the logarithm of a density on the interval of the pixels, not of a probability. They are positive where"
    " the density exceeds 1. Bits/dim do not depend on the interval."
)
WHY_POSITIVE_CONTINUOUS = (
    "Real columns count by the logarithm of their density, which is positive where the density exceeds 1; discrete"
    " columns by that of their probability. If you multiply a real column by c, nats fall by log c."
)
ROWS = 10_000  # rows of a table evaluated at once


@dataclass(frozen=True, kw_only=True)
class Evaluation(Result):
    """Log-likelihood of a split.

    `terms` sum to `mean_nats`, on the recipe's interval. `level_terms` are the log-determinants of the layers between
    the levels of the data and that interval; with them the sum is `level_nats`, in the data's own space, from which
    `bits_per_dim` is computed. Tables have `columns`: the mean log-density of each cell given the rest of its row.
    """

    dataset: str
    split: str
    n: int
    dim: int
    draws: int
    mean_nats: float
    stderr_nats: float
    bits_per_dim: float
    non_finite: int
    terms: dict[str, float]
    level_terms: dict[str, float]
    level_nats: float
    baselines: dict[str, float]
    paper_nats: float | None
    recipe: str
    interval: list[float] | None
    epoch: int | None
    columns: dict[str, float] | None = None

    def lines(self) -> Iterator[Any]:
        noise = f", noise drawn {self.draws} times" if self.draws > 1 else ""
        yield f"{Path(self.dataset).name}, {self.split} split: {self.n} examples{noise}, D = {self.dim}"
        unit = f"on {self.interval}" if self.interval else "in the units of the data"
        ledger = columns("", ">nats")
        for name, value in self.terms.items():
            ledger.add_row(name, f"{value:+.2f}")
        ledger.add_row(f"[bold]log-likelihood {unit}[/]", f"[bold]{plus_minus(self.mean_nats, self.stderr_nats)}[/]")
        for name, value in self.level_terms.items():
            ledger.add_row(name, f"{value:+.2f}")
        if self.level_terms:
            ledger.add_row("log-likelihood of the levels", f"{self.level_nats:.2f}")
        ledger.add_row("[bold]bits/dim[/]", f"[bold]{self.bits_per_dim:.4f}[/]")
        yield ledger
        if self.columns:
            each = columns("column", ">nats given the others")
            for name, value in sorted(self.columns.items(), key=lambda pair: pair[1])[:10]:
                each.add_row(cell(name), f"{value:.2f}")
            yield each
        others = {name.replace("_", " "): nats for name, nats in self.baselines.items()}
        others |= {} if self.paper_nats is None else {"the paper's figure": self.paper_nats}
        ahead = columns("baseline", ">nats", ">this model is ahead by")
        for name, nats in others.items():
            cells = (f"{nats:.2f}", f"{self.mean_nats - nats:+.2f}")
            ahead.add_row(name, *cells if math.isfinite(nats) else ("–", "dependent columns, or too few rows"))
        if others:
            yield ahead
        yield WHY_POSITIVE if self.interval else WHY_POSITIVE_CONTINUOUS
        if self.non_finite:
            yield f"{self.non_finite} examples have a non-finite likelihood, and so has the mean"


def evaluate(
    run: Run,
    *,
    split: Split = "test",
    draws: Noise = 8,
    baselines: Annotated[bool, option(help="Score simple baselines, too.")] = True,
    seed: Seed = 0,
) -> Evaluation:
    """Report the mean log-likelihood of a model, term by term, next to baselines (NICE §5.1).

    Images are evaluated with several draws of the dequantisation noise, next to linear models. Tables are evaluated
    exactly, next to the same model with independent columns.

    Example: nicest evaluate runs/demo
    """
    recipe = run.recipe
    told: dict[str, Any] = {"dataset": recipe.data.name, "split": split, "recipe": recipe.name}
    told |= {"paper_nats": recipe.paper_nats, "epoch": run.figures.get("epoch")}
    if run.kind == "table":
        return _evaluate_table(run, told, baselines=baselines)
    return _evaluate_flow(run, told, run.draws(draws), seed, baselines=baselines)


@torch.no_grad()  # not inference_mode: the engine that is made here stays with the run
def _evaluate_flow(run: Run, told: dict[str, Any], draws: int, seed: int, *, baselines: bool) -> Evaluation:
    flow, recipe, split, rows = run.flow, run.recipe, told["split"], run.rows(told["split"])
    generator = torch.Generator(run.device).manual_seed(seed)
    sums: dict[str, float] = {}
    nats = torch.zeros(draws, len(rows), dtype=torch.float64)
    for draw in track(range(draws), "evaluating", draws):
        start = 0
        for terms in run.engine.each("terms", *recipe.data.split(rows), generator=generator):
            for name, term in terms.items():
                nats[draw, start : start + len(term)] += term.double().cpu()
                sums[name] = sums.get(name, 0.0) + float(term.double().sum())
            start += len(term)
    means = {name: value / nats.numel() for name, value in sums.items()}
    levels = flow.units.terms() if flow.units.levels else {}  # between levels and the interval nats are reported on
    terms = {name: value for name, value in means.items() if name not in levels}
    found = {}
    if baselines and not recipe.data.conditional:
        found = linear_baselines(run.splits, split, recipe.data, run.device, generator, draws=draws)
    return Evaluation(
        **told,
        **_summary(nats.mean(0).numpy(), flow.dim, draws),
        mean_nats=sum(terms.values()),
        non_finite=int((~nats.isfinite()).any(0).sum()),
        terms=terms,
        level_terms={name: means[name] for name in levels},
        baselines=found,
        interval=list(recipe.data.interval) if recipe.data.levels else None,
    )


def _evaluate_table(run: Run, told: dict[str, Any], *, baselines: bool) -> Evaluation:
    table, rows = run.table, run.splits.split(told["split"])
    dim = rows.shape[1]
    parts: list[list[np.ndarray]] = [[], [], []]
    with Bar("evaluating", len(rows)) as bar:
        for start in range(0, len(rows), ROWS):
            some = rows[start : start + ROWS]
            parts[0].append(table.score(some))
            parts[1].append(table.surprise(some))
            if baselines:
                marginals = table.marginals(some, range(dim))  # hides all columns
                alone = [marginal.log_prob_of(some[:, i]) for i, marginal in enumerate(marginals)]
                parts[2].append(np.where(np.isnan(some), 0.0, np.stack(alone, 1)).sum(1))
            bar.update(start)
    nats, given = np.concatenate(parts[0]), np.concatenate(parts[1])
    there = ~np.isnan(given)
    means = np.where(there, given, 0.0).sum(0) / np.maximum(there.sum(0), 1)
    return Evaluation(
        **told,
        **_summary(nats, dim, draws=1),
        mean_nats=float(nats.mean()),
        non_finite=int((~np.isfinite(nats)).sum()),
        terms={},
        level_terms={},
        baselines={"independent_columns": float(np.concatenate(parts[2]).mean())} if baselines else {},
        interval=None,
        columns=dict(zip(run.table.schema.names, means.tolist(), strict=True)),
    )


def _summary(nats: np.ndarray, dim: int, draws: int) -> dict[str, Any]:
    """Return the metrics of log-densities (N,) in the data's own space."""
    n, mean = len(nats), float(nats.mean())
    with np.errstate(invalid="ignore"):  # of a model without finite densities
        error = float(nats.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    found = {"n": n, "dim": dim, "draws": draws, "level_nats": mean, "stderr_nats": error}
    return found | {"bits_per_dim": bits_per_dim(mean, dim)}
