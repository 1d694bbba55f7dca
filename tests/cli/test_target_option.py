"""`nicest train --target` and what can be done with such a run."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nicest import NICE, NicestError

QUICK = ["--set=train.effort=low", "--set=model.width=8", "--set=model.hidden_layers=2", "--set=train.epochs=2"]


def test_the_target_is_kept(height: Path):
    text = (height / "recipe.toml").read_text()
    assert 'target = ["height"]' in text
    assert "targets = [0]" in text


def test_several_targets(nicest: Callable, height: Path, tmp_path: Path):
    asked = ["--target", "height", "--target", "colour", "--out", tmp_path / "run"]
    assert nicest("train", "table", "--data", height.parent / "people.csv", *asked, *QUICK).code == 0
    out = tmp_path / "p.csv"
    result = nicest("predict", tmp_path / "run", height.parent / "people.csv", "--out", out, "--json").json
    assert set(result["targets"]) == {"height", "colour"}
    assert {"height_mean", "colour", "colour=blue", "colour=red"} <= set(out.read_text().split("\n")[0].split(","))


def test_evaluate_and_score_count_the_targets_alone(nicest: Callable, height: Path, tmp_path: Path):
    result = nicest("evaluate", height, "--json").json
    assert result["dim"] == 1
    assert result["baselines"] == {}
    assert result["bits_per_dim"] == pytest.approx(-result["mean_nats"] / np.log(2))
    scored = nicest("score", height, height.parent / "people.csv", "--out", tmp_path / "s.csv", "--json").json
    assert abs(scored["mean_nats"] - result["mean_nats"]) < 0.5


@pytest.mark.parametrize(
    "asked",
    [
        ["sample"],
        ["impute", "people.csv"],
        ["calibrate"],
        ["certify"],
        ["inpaint"],
        ["latent", "spectrum"],
        ["latent", "sphere"],
        ["latent", "interpolate"],
        ["latent", "truncate"],
    ],
    ids=" ".join,
)
def test_what_needs_whole_rows_says_so(
    nicest: Callable, height: Path, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)  # which can be written
    name, *rest = asked
    given = [*rest, height] if name == "latent" else [height, *(height.parent / each for each in rest)]
    line = nicest(name, *given).refusal
    assert line.endswith(
        "is a model of 'height' given the other columns, but this command needs one of all columns:"
        " use `nicest predict`, or train without a target"
    )


def test_the_estimator_of_whole_rows_says_so(height: Path):
    with pytest.raises(NicestError, match="is a model of 'height' given the other columns"):
        NICE.load(height)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["price"], "found no column 'price' to predict; it has 'height', 'weight', 'colour', 'member'"),
        (["height", "height"], "expected every target once"),
        (["height", "weight", "colour", "member"], "expected a column beside"),
    ],
)
def test_targets_that_cannot_be(nicest: Callable, height: Path, tmp_path: Path, targets: list[str], said: str):
    asked = [word for each in targets for word in ("--target", each)]
    line = nicest("train", "table", "--data", height.parent / "people.csv", *asked, "--out", tmp_path / "run").refusal
    assert said in line
    assert not (tmp_path / "run" / "last.safetensors").exists()


def test_targets_are_of_tables(nicest: Callable, tmp_path: Path):
    line = nicest("train", "digits", "--target", "x", "--out", tmp_path / "run", *QUICK).refusal
    assert "digits is no table: expected no target, got 'x'" in line
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(40, 3)))
    asked = ["--data", tmp_path / "rows.npy", "--target", "x", "--out", tmp_path / "run"]
    assert "a target is a column of a table" in nicest("train", "table", *asked).refusal


def test_resume_keeps_the_target(nicest: Callable, height: Path):
    line = nicest("train", "table", "--out", height, "--resume", "--target", "weight").refusal
    assert "a resumed run keeps its data" in line


def test_the_interval_is_a_probability(nicest: Callable, height: Path, tmp_path: Path):
    asked = ["predict", height, height.parent / "people.csv", "--out", tmp_path / "p.csv", "--interval"]
    assert "expected a probability between 0 and 1" in nicest(*asked, "1").refusal
    assert "from 0 to 1" in nicest(*asked, "2").misuse
