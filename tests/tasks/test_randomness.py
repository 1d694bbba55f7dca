"""No task and no training reseeds torch's own generators or draws from them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import nicest
from nicest import Run, TrainSettings
from nicest.data import load
from nicest.flows import Units, nice
from nicest.tasks.certify import certify
from nicest.tasks.classify import classify
from nicest.tasks.evaluate import evaluate
from nicest.tasks.sample import sample
from nicest.tasks.score import score

GOLDEN = Path(__file__).parents[1] / "golden"


def fit(_: Run, tmp_path: Path) -> None:
    with torch.random.fork_rng():  # weights are drawn here
        flow = nice(3, hidden=(8,), units=Units.columns([1.0, 0.0, 0.0]))
    rows = np.random.default_rng(0).integers(0, 9, (60, 3)).astype(np.float32)
    nicest.fit(flow, rows, settings=TrainSettings(epochs=1, batch=20), callbacks=[])


def scored(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", load("digits").test[:5].reshape(-1, 8, 8))
    score(run, [tmp_path / "images.npy"], out=tmp_path / "scores.csv")


TASKS: dict[str, Callable[[Run, Path], object]] = {
    "evaluate": lambda run, _: evaluate(run),
    "score": scored,
    "sample": lambda run, tmp_path: sample(run, 4, out=tmp_path / "samples.npy"),
    "certify": lambda run, _: certify(run, n=4, jacobians=2),
    "fit": fit,
}


@pytest.mark.parametrize("task", TASKS)
def test_the_state_of_the_generator_stays(task: str, digits_run: Run, tmp_path: Path):
    before = torch.get_rng_state()
    TASKS[task](digits_run, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_classify_leaves_the_state_of_the_generator(tmp_path: Path):
    run, before = nicest.open(GOLDEN / "labels"), torch.get_rng_state()
    classify(run, draws=1, out=tmp_path / "classes.csv")
    assert torch.equal(torch.get_rng_state(), before)
