"""Classify images by Bayes' rule, from their exact likelihood under each label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from nicest import plots
from nicest.data.tables import writing
from nicest.errors import NicestError
from nicest.progress import Bar
from nicest.runs.run import Run
from nicest.runs.runtime import rows_to
from nicest.tasks.options import Noise, Seed, Split, argument, local, out_file, to_read
from nicest.tasks.results import Result
from nicest.tasks.rows import image_names, model_rows, plain_name, plan, require_outputs

BINS = 15  # of the probability of the most probable label, in which calibration is measured
ROWS = 2000  # images that are classified at once


@dataclass(frozen=True, kw_only=True)
class Classification(Result):
    """Counts and, for a split, whose labels are known, metrics.

    `nll` is the mean of -log p(label | x), `ece` the expected calibration error; `confusion` counts truth by row.
    """

    out: str
    n: int
    draws: int
    seed: int
    dataset: str
    labels: int
    split: str | None = None
    accuracy: float | None = None
    nll: float | None = None
    ece: float | None = None
    confusion: list[list[int]] | None = None

    def lines(self) -> Iterator[Any]:
        yield f"{self.n:,} images classified in {self.out}"
        if self.accuracy is not None:
            metrics = f"negative log-likelihood {self.nll:.3f} nats, calibration error {self.ece:.3f}"
            yield f"accuracy {self.accuracy:.2%}, {metrics} ({self.split} split)"


def classify(
    run: Run,
    files: Annotated[
        Sequence[str | Path],
        argument(
            parser=lambda text: local(to_read(str(text))),
            help="Arrays, images or folders of images.",
            show_default="a split of the run, whose labels are known",
        ),
    ] = (),
    *,
    out: Annotated[
        str | Path | None,
        out_file(
            "A line per image (.csv, .parquet), or a figure (.png, .svg, .pdf) for a split.",
            show_default="classes.csv, or RUN/figures/classify.png",
        ),
    ] = None,
    split: Split = "test",
    draws: Noise = 8,
    seed: Seed = 0,
) -> Classification:
    """Classify images by Bayes' rule, from their exact log-likelihood under each label.

    The prior of a label is its fraction of the training images. Each line has the most probable label and its
    probability, log p(x), and log p(x | label) of every label, in nats.

    Example: nicest train digits-labels && nicest classify runs/digits-labels
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
    require_outputs(run, path, inputs=paths)
    generator = torch.Generator(run.device).manual_seed(seed)
    draws = run.draws(draws)
    parts = _of_files(run, paths) if paths else _of_split(run, split)
    named = len(paths) > 1 or any(image_names(each) for each in paths)
    found, truths = [], []
    schema = [("file", "string")] * named + [("row", "int64")] + [("truth", "int64")] * (not paths)
    schema += [("label", "int64"), ("probability", "float64"), ("log_density", "float64")]
    schema += [(f"log_density_{label}", "float64") for label in range(len(classes))]
    with ExitStack() as stack:
        write = stack.enter_context(writing(path, schema, plain=True)) if lines else None
        bar = stack.enter_context(Bar("classifying", len(paths) or len(run.splits.split(split))))
        for names, first, images, truth, done in parts:
            nats = log_likelihoods(run, images, draws, generator).cpu().numpy()
            if write:
                write(_lines(nats, classes, names if named else None, first, truth))
            found.append(posterior(nats, classes))
            truths.append(truth)
            bar.update(done)
    told: dict[str, Any] = {"out": str(path), "n": sum(map(len, found)), "draws": draws, "seed": seed}
    told |= {"dataset": run.recipe.data.name, "labels": len(classes)}
    if paths:
        return Classification(**told)
    log_p, truth = np.concatenate(found), np.concatenate([each for each in truths if each is not None])
    metrics = judged(log_p, truth)
    if not lines:
        title = f"{plots.heading(run.recipe.data.name, run.recipe.name)}: {split} images classified by Bayes' rule"
        picture = plots.classification_figure(metrics["confusion"], *reliability(log_p, truth), title=title)
        plots.save_figure(picture, path)
    return Classification(**told, split=split, **(metrics | {"confusion": metrics["confusion"].tolist()}))


@torch.no_grad()
def log_likelihoods(run: Run, images: np.ndarray, draws: int, generator: torch.Generator | None = None) -> Tensor:
    """Return log p(x | label) of images (N, D) under every label, (N, labels), in nats on the recipe's interval.

    It is the mean over draws of the dequantisation noise. All labels share the draws, so Bayes' rule holds for each.
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
    """Return log p(label | x), (N, labels), from log p(x | label) and the number of training images of each label."""
    joint = nats + np.log(np.array(classes) / sum(classes))
    return np.asarray(joint - np.logaddexp.reduce(joint, 1, keepdims=True))


def judged(log_p: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """Return metrics of log p(label | x), (N, labels), for images whose labels are known."""
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
    """Return the mean probability of the best label, its accuracy and the fraction of images, in each non-empty bin.

    Guo et al. 2017, "On calibration of modern neural networks".
    """
    p, right = np.exp(log_p.max(1)), log_p.argmax(1) == truth
    bins = np.minimum((p * BINS).astype(int), BINS - 1)
    count = np.bincount(bins, minlength=BINS)
    held = count > 0
    means = [np.bincount(bins, each, BINS)[held] / count[held] for each in (p, right)]
    return means[0], means[1], count[held] / len(p)


Part = tuple[list[str], int, np.ndarray, np.ndarray | None, int]  # names, first row, images, labels, parts done


def _of_files(run: Run, paths: Sequence[Path]) -> Iterator[Part]:
    """Yield the images of files."""
    for done, part in enumerate(plan(paths, run), 1):
        images = model_rows(part.path, run.recipe)
        names = image_names(part.path, whole=len(paths) > 1) or [plain_name(part.path)] * len(images)
        for start in range(0, len(images), ROWS):
            some = slice(start, start + ROWS)
            yield names[some], start, images[some], None, done


def _of_split(run: Run, split: str) -> Iterator[Part]:
    """Yield the images of a split, with their labels."""
    rows = run.splits.split(split)
    for start in range(0, len(rows), ROWS):
        some = rows[start : start + ROWS]
        yield [], start, some[:, :-1], some[:, -1].astype(int), start + len(some)


def _lines(
    nats: np.ndarray, classes: Sequence[int], names: list[str] | None, first: int, truth: np.ndarray | None
) -> list[list[Any]]:
    """Return the columns of the output."""
    log_p = posterior(nats, classes)
    density = (nats + np.log(np.array(classes) / sum(classes)) - log_p)[:, 0]  # log p(x), whichever the label
    columns: list[list[Any]] = [] if names is None else [names]
    columns += [list(range(first, first + len(nats))), *([] if truth is None else [truth.tolist()])]
    columns += [log_p.argmax(1).tolist(), np.exp(log_p.max(1)).tolist(), density.tolist()]
    return columns + nats.T.tolist()
