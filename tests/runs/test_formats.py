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
from nicest.recipes import load_recipe, parse
from nicest.runs.folder import MODEL
from nicest.tasks.evaluate import evaluate
from nicest.train.fit import train
from small_runs import metrics

FIXTURES = Path(__file__).parents[1] / "fixtures"


class Kept(NamedTuple):
    """Copies of runs, and what they gave then."""

    folder: Path
    expected: dict[str, Any]


@pytest.fixture(params=["format-1", "format-2"])
def kept(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    folder = Path(shutil.copytree(FIXTURES / request.param, tmp_path / "runs"))
    monkeypatch.chdir(folder)
    return Kept(folder, json.loads((folder / "expected.json").read_text()))


def test_the_likelihood_is_what_it_was_term_by_term(kept: Kept):
    found, then = (
        vars(evaluate(nicest.open(kept.folder / "images", verify=True))),
        kept.expected["images"]["evaluation"],
    )
    for key in ("mean_nats", "bits_per_dim", "level_nats", "stderr_nats"):
        assert found[key] == pytest.approx(then[key], abs=1e-5)
    for key in ("terms", "level_terms", "baselines"):
        assert found[key] == pytest.approx(then[key], abs=1e-5)
    same = ("n", "dim", "draws", "epoch")
    assert [found[key] for key in same] == [then[key] for key in same]


def test_a_tensor_of_the_wrong_shape_is_refused(kept: Kept, refusal: Callable[..., str], tmp_path: Path):
    with safe_open(kept.folder / "images" / MODEL, framework="pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for key in (key for key in tensors if "interval" not in key):  # a constant, not read from format 1
        save_file(tensors | {key: torch.zeros(0)}, tmp_path / MODEL, metadata)
        assert "the weights do not fit the recipe" in refusal(nicest.load, tmp_path / MODEL)


def test_samples_are_what_they_were(kept: Kept):
    flow = nicest.open(kept.folder / "images", dtype=torch.float64).flow
    drawn, then = flow.sample(2, generator=torch.Generator().manual_seed(0)), kept.expected["images"]["sample"]
    torch.testing.assert_close(drawn, torch.tensor(then, dtype=torch.float64), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "changes",
    [
        {'kind = "auto"': 'kind = "table"'},
        {"atoms = 0": "atoms = 3"},
        {"members = 1": "members = 5"},
        {"targets = []": "targets = [1]"},
    ],
    ids=lambda changes: next(iter(changes.values())),
)
def test_a_table_model_of_before_must_be_trained_again(tmp_path: Path, refusal: Callable[..., str], changes: dict):
    text = (
        '[data]\nname = "t"\nkind = "auto"\nshape = [3]\ntarget = []\ntargets = []\natoms = 0\ndiscrete = 0\n'
        "[model]\nmembers = 1\ntrees = 0\nleaves = 64\n"
    )
    assert parse(text, "x").data.shape == (3,)  # what is off is read
    for old, new in changes.items():
        text = text.replace(old, new)
    metadata = {"format": "nicest 3", "recipe": text, "figures": "{}"}
    save_file({"weights": torch.zeros(1)}, tmp_path / MODEL, metadata)
    said = refusal(nicest.load, tmp_path)
    assert said == (
        f'{tmp_path / MODEL} holds a table model of an earlier version: train it again with "nicest train FILE"'
    )


@pytest.fixture
def _dropout_of_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own, also on a CPU: it takes other random numbers, and the noise of later rows comes after them."""
    monkeypatch.setattr(noise, "_mask", lambda out, p: functional.dropout(out.fill_(1), p))


@pytest.mark.usefixtures("_dropout_of_their_time")
def test_a_stopped_run_goes_on_to_the_end_it_would_have_had(kept: Kept):
    torch.manual_seed(99)
    out = kept.folder / "images-stopped"
    assert train(load_recipe("digits"), out, resume=True, device="cpu")["finished"]
    for row, then in zip(metrics(out), kept.expected["images"]["metrics"], strict=True):
        assert row == pytest.approx(then, abs=1e-4)
    assert nicest.open(out, verify=True).figures["epoch"] == kept.expected["images"]["evaluation"]["epoch"]


def test_a_stopped_run_goes_on_with_the_dropout_of_today(kept: Kept):
    """The random numbers are others than then. What was validated stays, and as many steps are made."""
    out, then = kept.folder / "images-stopped", kept.expected["images"]["metrics"]
    stopped = len(metrics(out))
    assert train(load_recipe("digits"), out, resume=True, device="cpu")["finished"]
    found = metrics(out)
    assert [row["step"] for row in found] == [row["step"] for row in then]
    assert found[:stopped] == then[:stopped]
