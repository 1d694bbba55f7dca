"""A recipe that is chosen for the rows it is to train on."""

import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from nicest.flows import Flow
from nicest.recipes import Recipe, load_recipe, parse
from nicest.recipes.defaults import conditional, recipes_for, settings_given
from nicest.recipes.splits import load_splits
from nicest.train.callbacks import Callback
from nicest.train.fit import choose, continues, fit_rows, train
from nicest.train.initial import sized
from small_runs import counters, interrupt_at, last, metrics, same_run

N = 400


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two columns with long tails that go together, and one of whole numbers."""
    random = np.random.default_rng(0)
    x = random.standard_t(2, size=(N, 1)) + 0.3 * random.standard_t(2, size=(N, 2))
    path = tmp_path_factory.mktemp("start") / "t.parquet"
    parquet.write_table(pa.table({"a": x[:, 0], "b": x[:, 1], "n": random.poisson(3, N)}), path)
    return f'data.name="{path}"'


def chosen(*overrides: str) -> Recipe:
    recipe = load_recipe("table").override(*overrides)
    return sized(recipe, load_splits(recipe), settings_given(recipe, overrides))[0]


def test_size_and_rows_decide(table: str):
    recipe = chosen(table)
    wanted = recipes_for(360, 3, {"model": {}, "train": {}})[0]
    assert recipe.train == wanted.train
    assert (recipe.model.width, recipe.model.couplings) == (wanted.model.width, wanted.model.couplings)
    assert recipe.model.marginals == "sinh-arcsinh"  # of which there would be none without the tails
    assert not recipe.sized
    assert recipe.data.name in table


def test_what_is_set_stays_be_it_the_default(table: str):
    default = Recipe().model
    same = (
        f"model.couplings={default.couplings}",
        f"model.width={default.width}",
        f"train.batch={Recipe().train.batch}",
    )
    recipe = chosen(table, *same, "model.marginals=none", "train.seed=3", "model.hidden_layers=[1]")
    assert (recipe.model.couplings, recipe.model.width) == (default.couplings, default.width)
    assert recipe.train.batch == Recipe().train.batch
    assert (recipe.model.marginals, recipe.train.seed, recipe.model.hidden_layers) == ("none", 3, (1,))


def test_what_a_file_sets_stays():
    recipe = parse("sized = true\n[model]\nwidth = 77\n[train]\nbetas = [0.8, 0.9]\n", "own")
    assert settings_given(recipe, ()) == {"model": {"width": 77}, "train": {"betas": [0.8, 0.9]}}


def test_the_run_has_it_written_out_and_goes_on(table: str, tmp_path: Path):
    short = (table, "train.epochs=4", "train.evaluate_every=1")
    train(load_recipe("table"), tmp_path / "whole", overrides=short, device="cpu")
    written = load_recipe(str(tmp_path / "whole" / "recipe.toml"))
    assert not written.sized
    tried = load_recipe("table").override(*short)
    among = sized(tried, load_splits(tried), settings_given(tried, short))
    assert written.model in [each.model for each in among]
    same = (*short, "train.epochs=2", f"model.law={written.model.law}")
    train(load_recipe("table"), tmp_path / "half", overrides=same, device="cpu")
    assert set(last(tmp_path / "half")) == set(last(tmp_path / "whole"))
    resumed = train(load_recipe("table"), tmp_path / "half", resume=True, device="cpu")
    assert resumed["finished"]


def test_rows_that_decide_between_recipes_are_not_fitted_before_training(table: str, monkeypatch: pytest.MonkeyPatch):
    overrides, seen = (table, "train.epochs=1"), []
    recipe = load_recipe("table").override(*overrides)
    splits = load_splits(recipe)
    among = sized(recipe, splits, settings_given(recipe, overrides))
    fitted = Flow.initialise
    monkeypatch.setattr(Flow, "initialise", lambda flow, rows, _: (seen.append(len(rows)), fitted(flow, rows)))
    assert choose(among, splits, torch.device("cpu")) in [(each, None) for each in among]  # it starts again
    assert seen == [len(splits.train)] * len(among)
    fit_rows(among[0], splits, torch.device("cpu"))
    assert seen[-1] == len(splits.train) + len(splits.valid)


@pytest.mark.parametrize(
    ("n", "dim", "effort", "lr"),
    [(1_999, 2, "medium", 1e-3), (2_000, 2, "medium", 2e-3), (2_000, 2, "high", 1e-3), (2_000, 41, "low", 1e-3)],
)
def test_many_rows_are_learnt_at_a_higher_rate(n: int, dim: int, effort: str, lr: float):
    recipe = recipes_for(n, dim, {"model": {}, "train": {"effort": effort}})[0]
    assert recipe.train.lr == lr
    assert recipe.train.betas == (0.9, 0.95 if lr > 1e-3 else 0.999)
    own = recipes_for(n, dim, {"model": {}, "train": {"effort": effort, "lr": 0.01}})[0]
    assert own.train.lr == 0.01


@pytest.mark.parametrize(("n", "effort", "lr"), [(1_999, "low", 1e-3), (2_000, "low", 2e-3), (2_000, "high", 1e-3)])
def test_many_rows_are_predicted_from_at_a_higher_rate(n: int, effort: str, lr: float):
    for recipe in conditional(n, 100, 1, {"model": {}, "train": {"effort": effort}}):
        assert (recipe.train.lr, recipe.train.betas) == (lr, (0.9, 0.95 if lr > 1e-3 else 0.999))


def test_a_third_of_a_prediction_s_training_may_bring_nothing():
    for recipe in conditional(10_000, 5, 1, {"model": {}, "train": {}}):
        assert recipe.train.epochs / 3 <= recipe.train.patience < recipe.train.epochs / 2
    for given, patience in ({"patience": 2}, 2), ({"epochs": 900}, 300):
        assert conditional(10_000, 5, 1, {"model": {}, "train": given})[0].train.patience == patience


def test_of_many_rows_the_best_short_training_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nicest.train.fit.TRIAL_STEPS", 40)
    random = np.random.default_rng(0)
    rows = random.normal(size=(1_200, 2))
    np.save(tmp_path / "rows.npy", np.column_stack([rows[:, 0], np.sin(3 * rows[:, 0]) + 0.1 * rows[:, 1]]))
    overrides = (f'data.name="{tmp_path / "rows.npy"}"', "model.couplings=3", "model.width=8")
    overrides += ("train.batch=120", "train.epochs=10")
    recipe = load_recipe("table").override(*overrides)
    splits = load_splits(recipe)
    assert continues(splits)
    among = sized(recipe, splits, settings_given(recipe, overrides))
    chosen, tried = choose(among, splits, torch.device("cpu"), continued=True)
    assert chosen in among
    assert tried is not None
    before = tried.metrics()
    assert (before[-1]["epoch"], before[-1]["step"]) == (6, 48)
    in_memory = fit_rows(chosen, splits, torch.device("cpu"), sink=tried)
    assert in_memory.metrics[: len(before)] == before
    assert in_memory.metrics[-1]["epoch"] == 10
    assert in_memory.figures["valid_nats"] > before[-1]["valid_nats"]

    train(load_recipe("table"), tmp_path / "run", overrides=overrides, device="cpu", callbacks=[])
    assert [row["valid_nats"] for row in metrics(tmp_path / "run")] == [row["valid_nats"] for row in in_memory.metrics]
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(50, signal.SIGTERM, patch)
        train(load_recipe("table"), tmp_path / "stopped", overrides=overrides, device="cpu", callbacks=[])
    assert counters(tmp_path / "stopped")["step"] == 51
    train(load_recipe("table"), tmp_path / "stopped", resume=True, device="cpu", callbacks=[])
    assert same_run(tmp_path / "stopped", tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_short_trainings_says_that_nothing_is_saved(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
):
    notes = []
    watching = Callback()
    monkeypatch.setattr(watching, "note", notes.append)
    interrupt_at(5, number, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train(load_recipe("table"), tmp_path / "run", overrides=(table,), device="cpu", callbacks=[watching])
    assert notes[-1] == "stopped in the short trainings: nothing is saved yet"
    assert not (tmp_path / "run").exists()


def test_pictures_are_whitened_with_shrinkage(tmp_path: Path):
    random = np.random.default_rng(0)
    smooth = random.normal(size=(120, 4)) @ random.normal(size=(4, 48))
    levels = (128 + 30 * smooth + random.normal(size=(120, 48))).clip(0, 255).astype(np.uint8)
    np.save(tmp_path / "rows.npy", levels.reshape(120, 6, 8))
    recipe = load_recipe("images").override(f'data.name="{tmp_path / "rows.npy"}"', "model.width=7")
    (found,) = sized(recipe, load_splits(recipe), settings_given(recipe, ("model.width=7",)))
    assert (found.model.preprocess, found.model.marginals, found.model.width) == ("zca", "none", 7)
    assert 0 < found.model.shrinkage <= 0.1
    assert (found.train.batch, found.train.epochs) == (20, 400)  # 5 steps of 108 images, 2,000 in all
