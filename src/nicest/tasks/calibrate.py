"""How far a trained model can be trusted: held-out rows beside what it says of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nicest.data.cells import Batch
from nicest.data.columns import Column
from nicest.errors import NicestError
from nicest.files import require_writable, to_json, write_text
from nicest.flows import Flow, Mixture, members
from nicest.inference.calibration import Calibration, Cells, ks_distance, own_ranks, randomised_ranks
from nicest.inference.engine import Engine, drawing_from
from nicest.inference.impute import in_parts
from nicest.progress import Bar
from nicest.recipes.splits import load_splits
from nicest.runs.folder import require_own_file
from nicest.runs.run import DRAWS, Run
from nicest.runs.runtime import rows_to
from nicest.tasks.impute_table import draw_hidden
from nicest.tasks.score import chunks, log_densities, plan

MOST = 10_000  # rows that are looked at, and samples beside them


def calibrate(
    run: Run,
    table: str | Path | None = None,
    *,
    out: str | Path | None = None,
    cells: int = 1000,
    draws: int = 100,
    steps: int = 200,
    seed: int = 0,
) -> dict[str, Any]:
    """Write calibration.json and calibration.png: PITs and coverage on the test split, or on the rows of a file.

    `cells` of the rows are hidden one at a time and drawn by the chains of `impute`, of `steps` and `draws` each.
    Images have no such cells and no columns: only their log-densities and codes are looked at.
    """
    folder = Path(out) if out else run.path / "calibration"
    files = {kind: folder / f"calibration.{kind}" for kind in ("json", "png")}
    for file in files.values():
        require_own_file(file, run.recipe, *([Path(table)] if table else []))
        require_writable(file)
    images = run.kind == "images"
    columns = () if images else run.columns or plain_columns(run.recipe.data.dim)
    rows = held_out(run, table)
    how: dict[str, Any] = {"cells": 0 if images else cells, "draws": draws, "steps": steps, "seed": seed}
    with Bar("calibrating", 1000) as bar:
        found = calibration(
            run.flow, rows, columns, watch=lambda share: bar.update(round(1000 * share)), engine=run.engine, **how
        )
    found.plot(files["png"])
    result = found.summary() | {"data": str(table or run.recipe.data.name), "seed": seed}
    write_text(files["json"], to_json(result))
    return result | {"out": [str(file) for file in files.values()]}


def held_out(run: Run, table: str | Path | None) -> Batch:
    """The rows of a file, or the test split of the run; of the file that the run was trained on, the test split."""
    if table is None:
        try:
            return _all_known(run.splits.test)
        except NicestError as error:
            raise NicestError(f"{run.path} has no held-out rows at hand: give some as data ({error})") from error
    if (own := own_test_rows(run, Path(table))) is not None:
        Bar("", 1).note(f"{table} is what the run was trained on: the rows of its test split are taken")
        return _all_known(own)
    parts = [chunk for part in plan([Path(table)], run.columns) for chunk in chunks(part, run.columns, run.recipe)]
    if not parts:
        raise NicestError(f"{table}: expected rows, got only column names")
    return Batch(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def own_test_rows(run: Run, path: Path) -> np.ndarray | None:
    """The test split, if the file has the rows that the run was trained on."""
    data = run.recipe.data
    if path.is_file() and Path(data.name).is_file() and path.samefile(data.name):
        return run.splits.test
    moved = replace(run.recipe, data=replace(data, name=str(path.absolute())))
    if not data.digest or not path.exists():
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return load_splits(moved).test
    except NicestError:
        return None


def _all_known(rows: np.ndarray) -> Batch:
    return Batch(rows, np.zeros(len(rows), dtype=bool))


def plain_columns(dim: int) -> tuple[Column, ...]:
    """The columns of rows that have no names."""
    return tuple(Column(f"x{i}", "double", "real") for i in range(dim))


@torch.no_grad()
def calibration(
    flow: Flow,
    rows: Batch,
    columns: Sequence[Column],
    *,
    cells: int = 1000,
    draws: int = 100,
    steps: int = 200,
    seed: int = 0,
    watch: Callable[[float], None] = lambda share: None,
    engine: Engine | None = None,
) -> Calibration:
    """PITs and coverage of rows of the model's numbers; without columns, as of images, only the joint PITs."""
    if any(getattr(each, "embedding", None) is not None for each in members(flow)):
        raise NicestError("expected a density of all columns, got one given a condition: it cannot be sampled alone")
    missing = np.isnan(rows.rows).any(1) if rows.rows.dtype.kind == "f" else np.zeros(len(rows.rows), dtype=bool)
    complete = rows.rows[~missing & ~rows.unknown]
    if len(complete) < 2:
        got = f"{len(complete)} of {len(rows.rows)}" if len(rows.rows) != len(complete) else len(complete)
        raise NicestError(f"expected 2 rows or more that are complete and of values known in training, got {got}")
    rng, engine = np.random.default_rng(seed), engine or Engine(flow)
    x = complete[rng.permutation(len(complete))[:MOST]]
    with drawing_from(torch.Generator(flow.device).manual_seed(int(rng.integers(1 << 62))), flow.device):
        samples = engine.sample(MOST).cpu().numpy()
        for i, column in enumerate(columns):
            if column.discrete:  # as `sample` gives them
                samples[:, i] = samples[:, i].clip(0, column.most)
        nats = [log_densities(engine, _all_known(each.astype(x.dtype)), _draws(flow)) for each in (x, samples)]
        codes = [encoded(engine, each.astype(x.dtype)) for each in (x, samples)]
    code_pits = (randomised_ranks(h, drawn, rng) for h, drawn in zip(codes[0].T, codes[1].T, strict=True))
    code_ks = np.array([ks_distance(pit[:, None])[0] for pit in code_pits])
    values = as_drawn(flow, x) if columns else x
    marginal = [randomised_ranks(values[:, i], samples[:, i], rng) for i in range(len(columns))]
    return Calibration(
        tuple(column.name for column in columns),
        len(samples),
        np.column_stack(marginal) if columns else np.empty((len(x), 0)),
        randomised_ranks(nats[0], nats[1], rng),
        code_ks,
        hidden_cells(flow, x, columns, cells, rng, draws=draws, steps=steps, watch=watch),
        missing=int(missing.sum()),
        unknown=int((rows.unknown & ~missing).sum()),
    )


def _draws(flow: Flow) -> int:
    return DRAWS if flow.units.discrete else 1


def encoded(engine: Engine, rows: np.ndarray) -> np.ndarray:
    """Latent coordinates of rows, in whose steps noise is drawn; of a mixture, those of its first flow."""
    x, flow = rows_to(rows, engine.device), engine.flow
    if isinstance(flow, Mixture):  # data and samples are compared by them, for which any coordinates do
        engine = Engine(flow.members[0])
    found = np.concatenate([part.cpu().numpy() for part in engine.each("encode", x)])
    return np.nan_to_num(found, nan=np.inf)  # too far out for a number


def as_drawn(flow: Flow, rows: np.ndarray) -> np.ndarray:
    """Rows as the flow itself would give them: spikes are, to the last bit, those of its draws."""
    x = rows_to(rows, flow.device)
    return flow.units.leave(flow.units.enter(x, noise=False)).cpu().numpy()


def hidden_cells(
    flow: Flow,
    x: np.ndarray,
    columns: Sequence[Column],
    cells: int,
    rng: np.random.Generator,
    *,
    watch: Callable[[float], None],
    **how: Any,
) -> Cells:
    """PITs of cells given the other cells of their row: as many of every column, in different rows if there are enough.

    A cell of several columns is hidden in one row only if there are fewer rows than cells.
    """
    n, dim = len(x), len(columns)
    count = min(cells, n * dim)
    k, each = np.arange(count), -(-count // max(1, dim))
    column = rng.permutation(dim)[k % dim] if count else k
    row = rng.permutation(n)[(k % dim * each + k // dim) % n] if count else k
    hidden = np.zeros((count, dim), dtype=bool)
    hidden[k, column] = True
    values = as_drawn(flow, x) if count else x
    pit, r_hat = np.empty((2, count))
    parts = in_parts(hidden, int(rng.integers(1 << 62)))
    for i, (part, seed) in enumerate(parts):

        def tell(share: float, before: int = i) -> None:
            watch((before + share) / len(parts))

        found = draw_hidden(flow, x[row[part]], hidden[part], columns, seed=seed, watch=tell, **how)
        drawn = found.draws.cpu().numpy()[:, np.arange(len(part)), column[part]]
        pit[part] = own_ranks(values[row[part], column[part]], drawn, rng)
        r_hat[part] = found.r_hat.cpu().numpy()
    return Cells(row, column, pit, r_hat)
