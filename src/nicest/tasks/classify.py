"""Which label an image has, by Bayes' rule from its exact likelihood under each, and how far to trust the answer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nicest import plots
from nicest.data.tables import writing
from nicest.errors import NicestError
from nicest.files import require_writable
from nicest.progress import Bar
from nicest.runs.folder import require_own_file
from nicest.runs.run import Run
from nicest.runs.runtime import rows_to
from nicest.tasks.score import chunks, image_names, plain_name, plan

BINS = 15  # of the probability of the most probable label, in which calibration is measured
ROWS = 2000  # images that are classified at once


def classify(
    run: Run,
    files: Sequence[str | Path] = (),
    *,
    out: str | Path | None = None,
    split: str = "test",
    draws: int = 8,
    seed: int = 0,
) -> dict[str, Any]:
    """p(label | x) = p(label) p(x | label) / p(x) of every image, p(label) being the label's share of training images.

    Without files, the images are those of a split, whose labels are known: `accuracy`, `nll` (the mean of
    -log p(label | x)) and `ece`, the expected calibration error, say how good the answers are, and a figure shows it.
    A table has a line for every image: its most probable label, the probability of that, log p(x), and log p(x | label)
    of every label, in nats.
    """
    paths, classes = [Path(file) for file in files], run.recipe.data.classes
    if not classes:
        raise NicestError(f"{run.path} is a model without labels: train one with them, such as digits-labels")
    path = Path(out) if out else Path("classes.csv") if paths else run.path / "figures" / "classify.png"
    lines = path.suffix.lower() in (".csv", ".parquet")
    if paths and not lines:
        raise NicestError(f"expected a file for the classes that ends in .csv or .parquet, got {str(path)!r}")
    if not lines:
        plots.picture_kind(path)
    require_own_file(path, run.recipe, *paths)
    require_writable(path)
    generator = torch.Generator(run.device).manual_seed(seed)
    draws = run.draws(draws)
    parts = _of_files(run, paths) if paths else _of_split(run, split)
    named = len(paths) > 1 or any(image_names(each) for each in paths)
    found, truths = [], []
    with ExitStack() as stack:
        write = (
            stack.enter_context(writing(path, _schema(len(classes), named, not paths), plain=True)) if lines else None
        )
        bar = stack.enter_context(Bar("classifying", len(paths) or len(run.splits.split(split))))
        for names, first, images, truth, done in parts:
            nats = log_likelihoods(run, images, draws, generator).cpu().numpy()
            if write:
                write(_lines(nats, classes, names if named else None, first, truth))
            found.append(posterior(nats, classes))
            truths.append(truth)
            bar.update(done)
    result: dict[str, Any] = {"out": str(path), "n": sum(map(len, found)), "draws": draws, "seed": seed}
    result |= {"dataset": run.recipe.data.name, "labels": len(classes)}
    if paths:
        return result
    log_p, truth = np.concatenate(found), np.concatenate(truths)
    figures = judged(log_p, truth)
    if not lines:
        title = f"{plots.heading(run.recipe.data.name, run.recipe.name)}: {split} images classified by Bayes' rule"
        shown = plots.classification_figure(figures["confusion"], *reliability(log_p, truth), title=title)
        plots.save_figure(shown, path)
    return result | {"split": split} | {name: np.asarray(value).tolist() for name, value in figures.items()}


@torch.no_grad()
def log_likelihoods(run: Run, images: np.ndarray, draws: int, generator: torch.Generator | None = None) -> Tensor:
    """log p(x | label) of images (N, D) under every label, (N, labels), in nats on the recipe's interval.

    It is the mean log-density over draws of the dequantisation noise, as `score` has it, the same for every label. The
    noise does not depend on the label: so Bayes' rule holds for each draw, and their mean is steadier than the log of
    the mean density, which a few draws decide.
    """
    flow, count = run.flow, len(run.recipe.data.classes)
    rows, each = rows_to(images, run.device), []
    for _ in range(draws):
        y = flow.units.enter(rows, generator=generator)
        for label in range(count):
            labels = y.new_full((len(y), 1), label)
            each.append(torch.cat([part.double() for part in run.engine.each("log_density", y, labels)]))
    nats = torch.stack(each, 1).unflatten(1, (draws, count)).mean(1)
    return nats + flow.units.log_det(rows) + flow.units.interval_nats


def posterior(nats: np.ndarray, classes: Sequence[int]) -> np.ndarray:
    """log p(label | x), (N, labels), from log p(x | label) and the number of training images of each label."""
    joint = nats + np.log(np.array(classes) / sum(classes))
    return np.asarray(joint - np.logaddexp.reduce(joint, 1, keepdims=True))


def judged(log_p: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """How good log p(label | x) is, for images whose labels are known; confusion counts truth by row."""
    best = log_p.argmax(1)
    confusion = np.zeros((log_p.shape[1],) * 2, int)
    np.add.at(confusion, (truth, best), 1)
    confidence, right, share = reliability(log_p, truth)
    return {
        "accuracy": float((best == truth).mean()),
        "nll": float(-log_p[np.arange(len(truth)), truth].mean()),
        "ece": float((share * np.abs(confidence - right)).sum()),
        "confusion": confusion,
    }


def reliability(log_p: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """In equal bins of the probability of the best label that hold any: its mean, how often it is right, and the share
    of the images (Guo et al. 2017, "On calibration of modern neural networks")."""
    p, right = np.exp(log_p.max(1)), log_p.argmax(1) == truth
    bins = np.minimum((p * BINS).astype(int), BINS - 1)
    count = np.bincount(bins, minlength=BINS)
    held = count > 0
    means = [np.bincount(bins, each, BINS)[held] / count[held] for each in (p, right)]
    return means[0], means[1], count[held] / len(p)


Part = tuple[list[str], int, np.ndarray, np.ndarray, int]  # names, first row, images, labels if known, parts done


def _of_files(run: Run, paths: Sequence[Path]) -> Any:
    for done, part in enumerate(plan(paths, ()), 1):
        (chunk,) = chunks(part, (), run.recipe)
        names = image_names(part.path, whole=len(paths) > 1) or [plain_name(part.path)] * len(chunk.rows)
        for start in range(0, len(chunk.rows), ROWS):
            some = slice(start, start + ROWS)
            yield names[some], start, chunk.rows[some], None, done


def _of_split(run: Run, split: str) -> Any:
    rows = run.splits.split(split)
    for start in range(0, len(rows), ROWS):
        some = rows[start : start + ROWS]
        yield [], start, some[:, :-1], some[:, -1].astype(int), start + len(some)


def _schema(count: int, named: bool, known: bool) -> list[tuple[str, str]]:
    schema = [("file", "string")] if named else []
    schema += [("row", "int64"), *([("truth", "int64")] if known else []), ("label", "int64")]
    schema += [("probability", "float64"), ("log_density", "float64")]
    return schema + [(f"log_density_{label}", "float64") for label in range(count)]


def _lines(
    nats: np.ndarray, classes: Sequence[int], names: list[str] | None, first: int, truth: np.ndarray | None
) -> list[list[Any]]:
    log_p = posterior(nats, classes)
    density = (nats + np.log(np.array(classes) / sum(classes)) - log_p)[:, 0]  # log p(x), whichever the label
    columns: list[list[Any]] = [] if names is None else [names]
    columns += [list(range(first, first + len(nats))), *([] if truth is None else [truth.tolist()])]
    columns += [log_p.argmax(1).tolist(), np.exp(log_p.max(1)).tolist(), density.tolist()]
    return columns + nats.T.tolist()
