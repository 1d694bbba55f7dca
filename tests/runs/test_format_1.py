"""Runs of format 1, written by the version before this format: they open, evaluate and resume as they did then."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import nicest
from nicest.recipes import load_recipe
from nicest.tasks.evaluate import evaluate
from nicest.tasks.score import score
from nicest.train.fit import train
from small_runs import metrics

KEPT = Path(__file__).parents[1] / "fixtures" / "format-1"
EXPECTED: dict[str, Any] = json.loads((KEPT / "expected.json").read_text())
RECIPES = {"images": "digits", "table": "table"}
both = pytest.mark.parametrize("name", RECIPES)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the runs, beside the table that one of them was trained on."""
    shutil.copytree(KEPT, tmp_path / "runs")
    monkeypatch.chdir(tmp_path / "runs")
    return tmp_path / "runs"


@both
def test_the_likelihood_is_what_it_was_term_by_term(runs: Path, name: str):
    found, then = evaluate(nicest.open(runs / name)), EXPECTED[name]["evaluation"]
    for key in ("mean_nats", "bits_per_dim", "level_nats", "stderr_nats"):
        assert found[key] == pytest.approx(then[key], abs=1e-5)
    for key in ("terms", "level_terms", "baselines"):
        assert found[key] == pytest.approx(then[key], abs=1e-5)
    assert [found[key] for key in ("n", "dim", "draws", "epoch")] == [
        then[key] for key in ("n", "dim", "draws", "epoch")
    ]


@both
def test_samples_are_what_they_were(runs: Path, name: str):
    flow = nicest.open(runs / name, dtype=torch.float64).flow
    drawn = flow.sample(2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn, torch.tensor(EXPECTED[name]["sample"], dtype=torch.float64), rtol=0, atol=1e-10)


def test_scores_of_a_table_are_what_they_were(runs: Path, tmp_path: Path):
    found = score(nicest.open(runs / "table"), ["people.csv"], out=tmp_path / "scores.csv")
    assert {key: found[key] for key in ("rows", "missing", "unknown")} == {
        key: EXPECTED["table"]["score"][key] for key in ("rows", "missing", "unknown")
    }
    assert found["mean_nats"] == pytest.approx(EXPECTED["table"]["score"]["mean_nats"], abs=1e-5)
    lines = (tmp_path / "scores.csv").read_text().splitlines()
    for line, then in zip(lines[1:], EXPECTED["table"]["scores"][1:], strict=False):
        for cell, other in zip(line.split(","), then.split(","), strict=True):
            assert cell == other == "" or float(cell) == pytest.approx(float(other), abs=1e-4)


@both
def test_a_stopped_run_goes_on_to_the_end_it_would_have_had(runs: Path, name: str):
    torch.manual_seed(99)
    assert train(load_recipe(RECIPES[name]), runs / f"{name}-stopped", resume=True, device="cpu")["finished"]
    for row, then in zip(metrics(runs / f"{name}-stopped"), EXPECTED[name]["metrics"], strict=True):
        assert row == pytest.approx(then, abs=1e-4)
    assert nicest.open(runs / f"{name}-stopped", verify=True).figures["epoch"] == EXPECTED[name]["evaluation"]["epoch"]
