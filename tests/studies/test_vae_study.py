"""The study of NICE inside a VAE: what it trains, what it reports, and what it refuses."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nicest.flows import MLP, VAE, Units
from nicest.studies.vae import FLOOR, build, count, mean_nats, study, widest

SMALL = {"steps": 80, "batch": 100, "width": 80, "latent_dim": 8, "draws": 2, "importance_draws": 8}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return study("digits", seeds=(0, 1), device="cpu", lr=1e-2, **SMALL)


def test_every_model_learns(report: dict[str, Any]):
    assert [(run["model"], run["seed"]) for run in report["runs"]] == [
        (model, seed) for seed in (0, 1) for model in ("plain", "wider", "posterior", "prior")
    ]
    assert all(run["test_nats"] > 0 for run in report["runs"])  # untrained: below -60


def test_bounds_are_ordered(report: dict[str, Any]):
    assert all(run["importance_nats"] > run["test_nats"] for run in report["runs"])


def test_summary_is_of_the_runs(report: dict[str, Any]):
    nats = {(run["model"], run["seed"]): run["test_nats"] for run in report["runs"]}
    for row in report["rows"]:
        own = np.array([nats[row["model"], seed] for seed in (0, 1)])
        gain = own - [nats["plain", seed] for seed in (0, 1)]
        assert row["test_nats"] == pytest.approx(own.mean())
        assert row["test_sd"] == pytest.approx(own.std(ddof=1))
        assert row["gain_nats"] == pytest.approx(gain.mean(), abs=1e-9)
        assert row["gain_sd"] == pytest.approx(gain.std(ddof=1), abs=1e-9)


def test_report_is_json(report: dict[str, Any]):
    assert json.loads(json.dumps(report)) == report
    assert (report["dataset"], report["interval"], report["n"], report["dim"]) == ("digits", [0.0, 1.0], 180, 64)


def test_wider_has_the_parameters_of_the_richest_and_the_rest_have_encoder_and_decoder_alike(report: dict[str, Any]):
    parameters = {row["model"]: row["parameters"] for row in report["rows"]}
    assert parameters["plain"] < parameters["prior"] < parameters["posterior"]
    assert 0.97 * parameters["posterior"] < parameters["wider"] <= parameters["posterior"]
    for model in ("posterior", "prior"):
        layers = build(model, Units.pixels(64, 17), 8, 80).joint.chain.layers
        couplings = sum(
            p.numel() for name in layers if name not in ("encoder", "decoder") for p in layers[name].parameters()
        )
        assert parameters[model] == parameters["plain"] + couplings


def test_one_seed_has_no_spread_and_alone_a_model_no_gain():
    (row,) = study("digits", models=["prior"], seeds=[3], device="cpu", **SMALL | {"steps": 2})["rows"]
    assert (row["test_sd"], row["gain_nats"], row["gain_sd"]) == (None, None, None)


def test_same_seed_same_numbers():
    first, second = (study("digits", seeds=[0], device="cpu", **SMALL | {"steps": 15}) for _ in range(2))
    assert [run["test_nats"] for run in first["runs"]] == [run["test_nats"] for run in second["runs"]]


@pytest.mark.parametrize("model", ["posterior", "prior"])
def test_nice_inside_starts_as_the_identity(model: str):
    vae, x, noise = (
        build(model, Units.continuous(6, standardise=False), 4, 8).double(),
        torch.rand(5, 6).double(),
        torch.randn(5, 4).double(),
    )
    layers = vae.joint.chain.layers
    plain = VAE(vae.units, 4, layers["encoder"].network, layers["decoder"].network, floor=FLOOR).double()
    torch.testing.assert_close(vae.bound(x, noise), plain.bound(x, noise), rtol=0, atol=1e-12)


def test_nats_are_on_the_interval():
    """A model of standard normal pixels, whatever the code: its bound is known in every interval."""
    vae = VAE(Units.pixels(3, 2, (-1.0, 1.0)), 2, MLP(3, 4, ()), MLP(2, 6, ()), floor=-40.0)
    for parameter in vae.parameters():
        torch.nn.init.zeros_(parameter)
    rows = torch.tensor([[0, 1, 1]]).repeat(20_000, 1)
    expected = -1.5 * math.log(2 * math.pi) - 0.5  # the mean square of U[0, 1] and of U[-1, 0] is 1/3
    assert mean_nats(vae, rows, 2) == pytest.approx(expected, abs=0.01)


def test_widest():
    width = widest(64, 8, 40_000)
    assert (
        count(build("plain", Units.pixels(64), 8, width))
        <= 40_000
        < count(build("plain", Units.pixels(64), 8, width + 1))
    )


def test_divergence_is_an_error(refusal: Callable[..., str]):
    message = refusal(study, "digits", models=["plain"], seeds=[0], device="cpu", lr=1e20, **SMALL)
    assert "the plain VAE of seed 0 diverged: non-finite loss" in message


def test_continuous_data_is_refused(refusal: Callable[..., str], tmp_path: Path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32))
    (tmp_path / "own.toml").write_text(f'[data]\nname = "{tmp_path / "rows.npy"}"\n')
    assert "continuous" in refusal(study, str(tmp_path / "own.toml"), device="cpu", **SMALL)
