"""Runs of every format, written by the versions of their time: they open, evaluate and resume as they did then."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn import functional

import nicest
from nicest.flows import noise
from nicest.recipes import load_recipe
from nicest.runs.folder import MODEL
from nicest.tasks.evaluate import evaluate
from nicest.tasks.score import score
from nicest.train.fit import train
from small_runs import metrics

FIXTURES = Path(__file__).parents[1] / "fixtures"
RECIPES = {"images": "digits", "table": "table"}


class Kept(NamedTuple):
    """Runs in a copy of their own, beside the table that one of them was trained on, and what they gave then."""

    folder: Path
    expected: dict[str, Any]


@pytest.fixture(params=["format-1", "format-2"])
def kept(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    folder = Path(shutil.copytree(FIXTURES / request.param, tmp_path / "runs"))
    monkeypatch.chdir(folder)
    return Kept(folder, json.loads((folder / "expected.json").read_text()))


both = pytest.mark.parametrize("name", RECIPES)


@both
def test_the_likelihood_is_what_it_was_term_by_term(kept: Kept, name: str):
    found, then = evaluate(nicest.open(kept.folder / name, verify=True)), kept.expected[name]["evaluation"]
    for key in ("mean_nats", "bits_per_dim", "level_nats", "stderr_nats"):
        assert found[key] == pytest.approx(then[key], abs=1e-5)
    for key in ("terms", "level_terms", "baselines"):
        assert found[key] == pytest.approx(then[key], abs=1e-5)
    same = ("n", "dim", "draws", "epoch")
    assert [found[key] for key in same] == [then[key] for key in same]


@both
def test_a_tensor_of_the_wrong_shape_is_refused(kept: Kept, name: str, refusal: Callable[..., str], tmp_path: Path):
    with safe_open(kept.folder / name / MODEL, framework="pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for key in (key for key in tensors if "interval" not in key):  # a constant, not read from format 1
        save_file(tensors | {key: torch.zeros(0)}, tmp_path / MODEL, metadata)
        assert "the weights do not fit the recipe" in refusal(nicest.load, tmp_path / MODEL)


@both
def test_samples_are_what_they_were(kept: Kept, name: str):
    flow = nicest.open(kept.folder / name, dtype=torch.float64).flow
    drawn, then = flow.sample(2, generator=torch.Generator().manual_seed(0)), kept.expected[name]["sample"]
    torch.testing.assert_close(drawn, torch.tensor(then, dtype=torch.float64), rtol=0, atol=1e-10)


def test_scores_of_a_table_are_what_they_were(kept: Kept, tmp_path: Path):
    then = kept.expected["table"]
    found = score(nicest.open(kept.folder / "table"), ["people.csv"], out=tmp_path / "scores.csv")
    for key in ("rows", "missing", "unknown"):
        assert found[key] == then["score"][key]
    assert found["mean_nats"] == pytest.approx(then["score"]["mean_nats"], abs=1e-5)
    lines = (tmp_path / "scores.csv").read_text().splitlines()
    for line, before in zip(lines[1:], then["scores"][1:], strict=False):
        for cell, other in zip(line.split(","), before.split(","), strict=True):
            assert cell == other == "" or float(cell) == pytest.approx(float(other), abs=1e-4)


@pytest.fixture
def _dropout_of_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own, also on a CPU: it takes other random numbers, and the noise of later rows comes after them."""
    monkeypatch.setattr(noise, "_mask", lambda out, p: functional.dropout(out.fill_(1), p))


@both
@pytest.mark.usefixtures("_dropout_of_their_time")
def test_a_stopped_run_goes_on_to_the_end_it_would_have_had(kept: Kept, name: str):
    torch.manual_seed(99)
    out = kept.folder / f"{name}-stopped"
    assert train(load_recipe(RECIPES[name]), out, resume=True, device="cpu")["finished"]
    for row, then in zip(metrics(out), kept.expected[name]["metrics"], strict=True):
        assert row == pytest.approx(then, abs=1e-4)
    assert nicest.open(out, verify=True).figures["epoch"] == kept.expected[name]["evaluation"]["epoch"]


@both
def test_a_stopped_run_goes_on_with_the_dropout_of_today(kept: Kept, name: str):
    """The random numbers are others than then. What was validated stays, and as many steps are made."""
    out, then = kept.folder / f"{name}-stopped", kept.expected[name]["metrics"]
    stopped = len(metrics(out))
    assert train(load_recipe(RECIPES[name]), out, resume=True, device="cpu")["finished"]
    found = metrics(out)
    assert [row["step"] for row in found] == [row["step"] for row in then]
    assert found[:stopped] == then[:stopped]
