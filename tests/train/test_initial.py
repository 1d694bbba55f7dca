"""A recipe that is chosen for the rows it is to train on."""

from pathlib import Path

import numpy as np
import pytest
import torch

from nicest.flows import Flow
from nicest.recipes import Recipe, load_recipe, parse
from nicest.recipes.defaults import WORK, recipe_for_rows, settings_given
from nicest.recipes.splits import load_splits
from nicest.train.fit import fit_splits, train
from nicest.train.initial import sized
from small_runs import last

N = 400


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two columns with long tails that go together."""
    random = np.random.default_rng(0)
    x = random.standard_t(2, size=(N, 1)) + 0.3 * random.standard_t(2, size=(N, 2))
    path = tmp_path_factory.mktemp("start") / "rows.npy"
    np.save(path, x)
    return f'data.name="{path}"'


def chosen(*overrides: str) -> Recipe:
    recipe = load_recipe("rows").override(*overrides)
    return sized(recipe, load_splits(recipe), settings_given(recipe, overrides))


def test_size_and_rows_decide(rows: str):
    recipe = chosen(rows)
    wanted = recipe_for_rows(360, 2, {"model": {}, "train": {}})
    assert recipe.train == wanted.train
    assert (recipe.model.width, recipe.model.couplings) == (wanted.model.width, wanted.model.couplings)
    assert recipe.model.marginals == "sinh-arcsinh"  # of which there would be none without the tails
    assert not recipe.sized
    assert recipe.data.name in rows


@pytest.mark.parametrize(("n", "dim", "law"), [(39, 1, "additive"), (399, 20, "additive"), (400, 20, "spline")])
def test_few_rows_for_their_columns_get_additive_couplings(n: int, dim: int, law: str):
    assert recipe_for_rows(n, dim, {"model": {}, "train": {}}).model.law == law


def test_what_is_set_stays_be_it_the_default(rows: str):
    default = Recipe().model
    same = (
        f"model.couplings={default.couplings}",
        f"model.width={default.width}",
        f"train.batch={Recipe().train.batch}",
    )
    recipe = chosen(rows, *same, "model.marginals=none", "train.seed=3", "model.hidden_layers=[1]")
    assert (recipe.model.couplings, recipe.model.width) == (default.couplings, default.width)
    assert recipe.train.batch == Recipe().train.batch
    assert (recipe.model.marginals, recipe.train.seed, recipe.model.hidden_layers) == ("none", 3, (1,))


def test_what_a_file_sets_stays():
    recipe = parse("sized = true\n[model]\nwidth = 77\n[train]\nbetas = [0.8, 0.9]\n", "own")
    assert settings_given(recipe, ()) == {"model": {"width": 77}, "table": {}, "train": {"betas": [0.8, 0.9]}}


def test_the_run_has_it_written_out_and_goes_on(rows: str, tmp_path: Path):
    short = (rows, "train.epochs=4", "train.evaluate_every=1")
    train(load_recipe("rows"), tmp_path / "whole", overrides=short, device="cpu")
    written = load_recipe(str(tmp_path / "whole" / "recipe.toml"))
    assert not written.sized
    assert written.model == chosen(*short).model
    train(load_recipe("rows"), tmp_path / "half", overrides=(*short, "train.epochs=2"), device="cpu")
    assert set(last(tmp_path / "half")) == set(last(tmp_path / "whole"))
    resumed = train(load_recipe("rows"), tmp_path / "half", resume=True, device="cpu")
    assert resumed["finished"]


def test_estimators_fit_constants_to_validation_rows_too(rows: str, monkeypatch: pytest.MonkeyPatch):
    splits, seen = load_splits(load_recipe("rows").override(rows)), []
    fitted = Flow.initialise
    monkeypatch.setattr(Flow, "initialise", lambda flow, rows, _: (seen.append(len(rows)), fitted(flow, rows)))
    fit_splits(chosen(rows, "train.epochs=1"), splits, torch.device("cpu"))
    assert seen == [len(splits.train) + len(splits.valid)]


@pytest.mark.parametrize(
    ("n", "dim", "effort", "lr"),
    [(1_999, 2, "medium", 1e-3), (2_000, 2, "medium", 2e-3), (2_000, 2, "high", 1e-3), (2_000, 41, "low", 1e-3)],
)
def test_many_rows_are_learnt_at_a_higher_rate(n: int, dim: int, effort: str, lr: float):
    recipe = recipe_for_rows(n, dim, {"model": {}, "train": {"effort": effort}})
    assert recipe.train.lr == lr
    assert recipe.train.betas == (0.9, 0.95 if lr > 1e-3 else 0.999)
    own = recipe_for_rows(n, dim, {"model": {}, "train": {"effort": effort, "lr": 0.01}})
    assert own.train.lr == 0.01


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
@pytest.mark.parametrize("dim", [1, 2, 5, 30, 200, 2000])
@pytest.mark.parametrize("n", [2, 49, 50, 300, 5_000, 10**6])
def test_there_are_recipes_for_every_size_and_their_work_is_bounded(n: int, dim: int, effort: str):
    recipe = recipe_for_rows(n, dim, {"model": {}, "train": {"effort": effort}})
    model, settings = recipe.model, recipe.train
    per_epoch = max(1, round(0.9 * n) // settings.batch)
    weights = model.couplings * model.width * (dim * (1 + 3 * model.bins * (model.law == "spline")) / 2 + model.width)
    most = 2 * max(300, WORK[effort] / (settings.batch * max(1, weights)))
    assert settings.epochs == 1 or settings.epochs * per_epoch < most + per_epoch


def test_pictures_are_whitened_with_shrinkage(tmp_path: Path):
    random = np.random.default_rng(0)
    smooth = random.normal(size=(120, 4)) @ random.normal(size=(4, 48))
    levels = (128 + 30 * smooth + random.normal(size=(120, 48))).clip(0, 255).astype(np.uint8)
    np.save(tmp_path / "rows.npy", levels.reshape(120, 6, 8))
    recipe = load_recipe("images").override(f'data.name="{tmp_path / "rows.npy"}"', "model.width=7")
    found = sized(recipe, load_splits(recipe), settings_given(recipe, ("model.width=7",)))
    assert (found.model.preprocess, found.model.marginals, found.model.width) == ("zca", "none", 7)
    assert 0 < found.model.shrinkage <= 0.1
    assert (found.train.batch, found.train.epochs) == (20, 400)  # 5 steps of 108 images, 2,000 in all
