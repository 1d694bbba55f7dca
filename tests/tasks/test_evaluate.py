"""evaluate: the ledger, its units, its noise and its errors, against closed forms and numpy."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import nicest
from nicest import Run
from nicest.data import Splits
from nicest.data import load as load_data
from nicest.errors import NicestError
from nicest.flows import Flow
from nicest.recipes import Recipe, load_recipe, splits
from nicest.recipes.build import build
from nicest.runs.folder import RunFolder
from nicest.tasks.certify import certify
from nicest.tasks.evaluate import evaluate


def plain(run: Run, **options: object) -> dict:
    return evaluate(run, baselines=False, **options).to_dict()


def test_terms_sum_to_nats_and_bits_are_of_a_level(any_run: Run):
    result, data = plain(any_run, draws=2), any_run.recipe.data
    assert sum(result["terms"].values()) == pytest.approx(result["mean_nats"], abs=1e-9)
    assert result["mean_nats"] + sum(result["level_terms"].values()) == pytest.approx(result["level_nats"], abs=1e-9)
    low, high = data.interval
    level_bits = math.log2(data.levels / (high - low)) if data.levels else 0
    expected = level_bits - result["mean_nats"] / math.log(2) / data.dim
    assert result["bits_per_dim"] == pytest.approx(expected, abs=1e-6)
    assert result["interval"] == ([low, high] if data.levels else None)
    assert result["non_finite"] == 0
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    kept = any_run.engine.fast.state_dict(keep_vars=True)  # good for gradients
    assert [name for name, tensor in kept.items() if tensor.is_inference()] == []


def test_the_ledger_names_every_layer_and_the_prior(colour_run: Run):
    result = plain(colour_run, draws=1)
    couplings = ["coupling1", "coupling2", "coupling3", "coupling4"]
    assert list(result["terms"]) == ["zca", *couplings, "scaling", "prior"]
    levels = {"dequantise": -72 * math.log(256), "interval": 72 * math.log(2)}
    assert result["level_terms"] == pytest.approx(levels, rel=1e-6)


def test_level_nats_are_the_mean_of_log_prob(in_float64: Run):
    result = plain(in_float64, draws=3, seed=7)
    torch.manual_seed(7)
    with torch.no_grad():
        drawn = torch.stack([in_float64.flow.log_prob(in_float64.rows("test")) for _ in range(result["draws"])])
    assert result["level_nats"] == pytest.approx(float(drawn.mean()), abs=1e-9)


@pytest.mark.usefixtures("half_noise")
def test_mean_nats_are_what_numpy_computes_from_the_weights(digits_folder: Path):
    run = nicest.open(digits_folder, dtype=torch.float64)
    weights = {name: t.numpy() for name, t in run.flow.state_dict().items()}
    h = (load_data("digits").test.astype(np.float64) + 0.5) / 17
    for k in range(4):
        read, change = (slice(0, None, 2), slice(1, None, 2)) if k % 2 == 0 else (slice(1, None, 2), slice(0, None, 2))
        names = sorted(name for name in weights if name.startswith(f"bijection.layers.coupling{k + 1}."))
        b0, w0, b1, w1 = (weights[name] for name in names)
        h[:, change] += np.maximum(h[:, read] @ w0.T + b0, 0) @ w1.T + b1
    s = weights["bijection.layers.scaling.s"]
    nats = stats.logistic.logpdf(h * np.exp(s)).sum(1) + s.sum()
    result = plain(run, draws=1)
    assert result["mean_nats"] == pytest.approx(nats.mean(), abs=1e-9)
    assert result["stderr_nats"] == pytest.approx(nats.std(ddof=1) / math.sqrt(len(nats)), abs=1e-12)


def test_stderr_is_over_examples_whose_draws_are_averaged_first(digits_folder: Path):
    run = nicest.open(digits_folder, dtype=torch.float64)
    result = plain(run, draws=4, seed=3)
    torch.manual_seed(3)
    with torch.no_grad():
        each = torch.stack([run.flow.log_prob(run.rows("test")) for _ in range(4)]).numpy().mean(0)
    assert result["stderr_nats"] == pytest.approx(each.std(ddof=1) / math.sqrt(len(each)), abs=1e-12)


class TestBitsPerDim:
    def test_on_0_1_of_256_levels(self, make: Callable, save_run: Callable, log2e: float):
        flow, recipe = make(np.random.default_rng(0).integers(0, 256, (30, 6), np.uint8))
        result = plain(save_run("run", flow, recipe, torch.float64), draws=1)
        assert result["bits_per_dim"] == pytest.approx(8 - result["mean_nats"] * log2e / 6, abs=1e-12)

    def test_of_the_uniform_density_are_8(self, make: Callable, save_run: Callable):
        # the logit of a uniform number is logistic: couplings at 0 and a logistic prior make [0, 1]^D uniform
        data = np.random.default_rng(0).integers(0, 256, (30, 6), np.uint8)
        flow, recipe = make(data, "model.preprocess=logit", "model.initialisation=zero-last")
        result = plain(save_run("uniform", flow, recipe, torch.float64), draws=3)
        margin = -math.log2(1 - 2e-6)  # what the logit's margin leaves outside [0, 1]
        assert result["bits_per_dim"] == pytest.approx(8 + margin, abs=1e-9)
        assert result["stderr_nats"] < 1e-9


def on_minus_1_1(flow: Flow, recipe: Recipe) -> tuple[Flow, Recipe]:
    """The same function of the levels, expressed on [-1, 1]: every layer is told z = 2 y - 1 instead of y."""
    recipe = replace(recipe, data=replace(recipe.data, interval=(-1.0, 1.0)))
    other = build(recipe).double().eval()
    other.bijection.load_state_dict(flow.bijection.state_dict())
    other.prior.load_state_dict(flow.prior.state_dict())
    with torch.no_grad():
        for k in range(4):
            first, *_, last = other.bijection.layers[f"coupling{k + 1}"].network.layers
            first.bias += first.weight.sum(1) / 2
            first.weight /= 2
            last.weight *= 2
            last.bias *= 2
        other.bijection.layers["scaling"].s -= math.log(2)
        other.prior.loc -= flow.bijection.layers["scaling"].s.exp() / 2
    return other, recipe


def test_the_same_model_scores_D_ln_2_less_on_minus_1_1_and_the_same_bits(make: Callable, save_run: Callable):
    flow, recipe = make(np.random.default_rng(0).integers(0, 256, (50, 7), np.uint8), "model.learned_prior=true")
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    unit = plain(save_run("unit", flow, recipe, torch.float64), draws=2)
    wide = plain(save_run("wide", *on_minus_1_1(flow, recipe), torch.float64), draws=2)
    assert (unit["interval"], wide["interval"]) == ([0.0, 1.0], [-1.0, 1.0])
    assert unit["mean_nats"] - wide["mean_nats"] == pytest.approx(7 * math.log(2), abs=1e-9)
    assert unit["level_nats"] == pytest.approx(wide["level_nats"], abs=1e-9)
    assert unit["bits_per_dim"] == pytest.approx(wide["bits_per_dim"], abs=1e-9)


class TestNoise:
    def test_each_draw_is_new(self, digits_run: Run):
        one, two = plain(digits_run, draws=1), plain(digits_run, draws=2)
        assert one["mean_nats"] != two["mean_nats"]
        assert one["mean_nats"] == pytest.approx(two["mean_nats"], abs=1)

    def test_each_example_has_its_own(self, make: Callable, save_run: Callable):
        flow, recipe = make(np.full((40, 6), 100, np.uint8))  # one image forty times
        with torch.no_grad():
            flow.bijection.layers["scaling"].s.fill_(5.0)
        assert plain(save_run("run", flow, recipe), draws=1)["stderr_nats"] > 1e-4

    def test_a_seed_gives_the_same_figures_again_and_another_seed_others(self, digits_run: Run):
        first, again, other = (plain(digits_run, draws=2, seed=seed) for seed in (5, 5, 6))
        assert first == again
        assert first["mean_nats"] != other["mean_nats"]

    def test_more_draws_bring_the_error_of_the_noise_down(self, digits_run: Run):
        few = np.std([plain(digits_run, draws=1, seed=seed)["mean_nats"] for seed in range(12)])
        many = np.std([plain(digits_run, draws=9, seed=seed)["mean_nats"] for seed in range(12)])
        assert many < 0.7 * few  # a third of it, but for chance

    def test_continuous_data_has_none(self, rows_run: Run):
        first, other = plain(rows_run, draws=8, seed=0), plain(rows_run, draws=3, seed=1)
        assert first["draws"] == other["draws"] == 1
        assert first == other


class TestNonFinite:
    def test_weights_make_every_example_count_and_no_mean(self, digits_run: Run, save_run: Callable):
        flow, recipe = digits_run.flow, digits_run.recipe
        with torch.no_grad():
            flow.bijection.layers["coupling2"].network.layers[0].weight.fill_(math.nan)
        result = plain(save_run("sick", flow, recipe), draws=2)
        assert result["non_finite"] == result["n"] == 180
        assert math.isnan(result["mean_nats"])
        assert math.isnan(result["bits_per_dim"])

    @pytest.mark.parametrize("value", [math.nan, -math.inf])
    def test_one_example_in_one_draw_is_counted_and_not_left_out_of_the_mean(
        self, digits_run: Run, monkeypatch: pytest.MonkeyPatch, value: float
    ):
        honest, spoilt = Flow.terms, iter([value])

        def terms(self: Flow, x: torch.Tensor) -> dict[str, torch.Tensor]:
            result = honest(self, x)
            result["prior"][3] = next(spoilt, result["prior"][3])
            return result

        monkeypatch.setattr(Flow, "terms", terms)
        result = plain(digits_run, draws=2)
        assert result["non_finite"] == 1
        assert not math.isfinite(result["mean_nats"])
        assert not math.isfinite(result["terms"]["prior"])


class TestSplit:
    def test_the_named_one_is_scored(self, digits_run: Run):
        whole = load_data("digits")
        sizes = {part: plain(digits_run, split=part, draws=1)["n"] for part in ("train", "valid", "test")}
        assert sizes == {"train": len(whole.train), "valid": len(whole.valid), "test": len(whole.test)}
        assert sum(sizes.values()) == 1797

    def test_an_unknown_one_is_refused_with_the_known_ones(self, digits_run: Run):
        with pytest.raises(NicestError, match=r"train, valid, test.*'dev'"):
            plain(digits_run, split="dev")


def test_one_example_has_a_mean_and_no_standard_error(make: Callable, save_run: Callable):
    flow, recipe = make(np.random.default_rng(0).integers(0, 256, (9, 6), np.uint8))
    result = plain(save_run("run", flow, recipe))
    assert result["n"] == 1
    assert math.isfinite(result["mean_nats"])
    assert math.isnan(result["stderr_nats"])


def test_more_rows_than_one_batch_are_all_scored(digits_run: Run, monkeypatch: pytest.MonkeyPatch):
    whole = plain(digits_run, split="train", draws=1)
    monkeypatch.setattr("nicest.inference.engine.BATCH", 100)
    parts = plain(nicest.open(digits_run.path), split="train", draws=1)
    assert parts["n"] == whole["n"] == 1437
    assert parts["non_finite"] == 0
    assert parts["mean_nats"] == pytest.approx(whole["mean_nats"], abs=0.1)  # other noise


def test_figures_of_the_paper_and_of_the_recipe_come_with_it(digits_run: Run, save_run: Callable):
    quoted = save_run("run", digits_run.flow, replace(digits_run.recipe, paper_nats=1980.5))
    result = plain(quoted, draws=1)
    assert (result["paper_nats"], result["recipe"], result["dataset"]) == (1980.5, "digits", "digits")
    assert plain(digits_run, draws=1)["paper_nats"] is None


def test_every_recipe_of_the_paper_carries_the_paper_s_figure():
    figures = {name: load_recipe(name).paper_nats for name in ("mnist", "tfd", "svhn", "cifar10")}
    assert figures == {"mnist": 1980.50, "tfd": 5514.71, "svhn": 11496.55, "cifar10": 5371.78}


def test_baselines_stand_beside_on_request_only(rows_run: Run):
    with_them = evaluate(rows_run).baselines
    assert set(with_them) == {"diagonal_gaussian", "factorial_logistic", "full_gaussian", "zca_logistic"}
    assert plain(rows_run)["baselines"] == {}


def test_of_an_opened_run_the_model_and_the_data_are_read_once(
    digits_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    read: list[str] = []
    read_model, load = RunFolder.read_model, splits.load

    def reading(folder: RunFolder) -> tuple:
        read.append("model")
        return read_model(folder)

    def loading(name: str, **options: object) -> Splits:
        read.append("data")
        return load(name, **options)

    monkeypatch.setattr(RunFolder, "read_model", reading)
    monkeypatch.setattr(splits, "load", loading)
    run = nicest.open(shutil.copytree(digits_folder, tmp_path / "run"))
    assert read == ["model"]
    for part in ("valid", "test"):
        evaluate(run, split=part, draws=1)
        certify(run, n=4, jacobians=1)
    assert read == ["model", "data"]
