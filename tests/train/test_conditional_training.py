"""Training models that predict some columns from the others: what validates, and runs that go on."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import nicest
from nicest.flows import Mixture
from nicest.inference.engine import Engine
from nicest.train.fit_table import fit_table
from small_runs import counters, digests, interrupt_at, people, resume, run, same_run

Refusal = Callable[..., str]
MEMBERS = ("model.members=2", "model.law=affine-spline", "model.couplings=1", "model.preprocess=none", "train.batch=40")


def settings(folder: Path, *target: str, n: int = 400) -> tuple[str, ...]:
    """A table with missing cells, and columns of it to predict."""
    data = folder / "people.csv"
    if not data.exists():
        people(data, n)
    return (f"data.name={data}", f"data.target={json.dumps(target)}", *MEMBERS)


@pytest.mark.parametrize("target", [["height"], ["weight"], ["colour"], ["height", "colour"]], ids=str)
def test_validation_scores_the_mixture(tmp_path: Path, target: list[str]):
    """Not the mean of the logarithms of its members, which is what they are trained by."""
    chosen = settings(tmp_path, *target)
    run(tmp_path / "run", *chosen, "train.lr=0.1", "train.ema=0")
    opened = nicest.open(tmp_path / "run")
    assert isinstance(opened.flow, Mixture)
    torch.manual_seed(0)
    draws = 100 if opened.flow.units.discrete else 1
    x, context = opened.recipe.data.split(opened.rows("valid"))
    found = float(torch.stack([opened.engine.log_prob(x, context).mean() for _ in range(draws)]).mean())
    with torch.no_grad():
        each = [[one.log_prob(x, context).mean() for _ in range(draws)] for one in opened.flow.members]
        alone = [torch.stack(several).mean() for several in each]
    assert found > float(torch.stack(alone).mean()) + 1e-4
    limit = 1e-5 if draws == 1 else 0.2  # the noise of one draw counts
    assert opened.figures["valid_nats"] == pytest.approx(found, abs=limit)


def test_rows_without_the_target_do_not_train(tmp_path: Path):
    chosen = settings(tmp_path, "height")
    run(tmp_path / "run", *chosen)
    opened = nicest.open(tmp_path / "run")
    counted = sum(len(opened.splits.split(part)) for part in ("train", "valid", "test"))
    lines = (tmp_path / "people.csv").read_text().splitlines()[1:]
    assert counted == sum(not line.startswith(",") for line in lines) < len(lines)
    assert opened.recipe.data.targets == (0,)
    assert opened.recipe.data.categories == (0, 0, 2, 2)
    assert opened.recipe.data.discrete == 0


@pytest.mark.parametrize("target", [["height"], ["weight", "colour"]], ids=str)
def test_an_interrupted_run_resumes_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: list[str]):
    chosen = settings(tmp_path, *target)
    run(tmp_path / "straight", *chosen)
    interrupt_at(11, signal.SIGINT, monkeypatch)
    run(tmp_path / "stopped", *chosen)
    monkeypatch.undo()
    assert counters(tmp_path / "stopped")["step"] == 12
    assert resume(tmp_path / "stopped")["finished"]
    assert same_run(tmp_path / "stopped", tmp_path / "straight")


@pytest.mark.parametrize(
    "changed", ['data.target=["weight"]', "data.target=[]", 'data.target=["height", "weight"]', "model.members=3"]
)
def test_a_resumed_run_keeps_its_target(tmp_path: Path, refusal: Refusal, changed: str):
    run(tmp_path / "run", *settings(tmp_path, "height"), "train.epochs=1")
    before = digests(tmp_path / "run")
    assert "a resumed run keeps its data, model" in refusal(resume, tmp_path / "run", changed)
    assert digests(tmp_path / "run") == before


def test_the_recipe_is_chosen_by_short_trainings_on_the_mixture():
    """Rows in memory, of which the last column is predicted; given cells may be missing."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(120, 3)).astype(np.float32)
    rows[:, 2] = rows[:, 0] + 0.1 * rows[:, 2]
    rows[::7, 1] = np.nan
    given = {"model": {"width": 8, "members": 2}, "train": {"effort": "low", "epochs": 3}}
    columns = [nicest.data.columns.Column(name, "double", "real") for name in "abc"]
    fitted = fit_table(rows, seed=0, given=given, columns=columns, targets=[2])
    assert isinstance(fitted.flow, Mixture)
    assert fitted.recipe.data.targets == (2,)
    nats = Engine(fitted.flow).log_prob(*fitted.recipe.data.split(torch.from_numpy(rows).double()))
    assert nats.isfinite().all()
    assert float(nats.mean()) > -2


@pytest.mark.parametrize("n", [2, 3, 5, 7])
def test_very_few_rows_train(n: int):
    rows = np.random.default_rng(0).normal(size=(n, 2)).astype(np.float32)
    given = {"model": {"width": 4}, "train": {"effort": "low", "epochs": 2}}
    columns = [nicest.data.columns.Column(name, "double", "real") for name in "ab"]
    fitted = fit_table(rows, seed=0, given=given, columns=columns, targets=[1])
    assert Engine(fitted.flow).log_prob(*fitted.recipe.data.split(torch.from_numpy(rows).double())).isfinite().all()
