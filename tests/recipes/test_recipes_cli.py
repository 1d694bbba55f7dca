"""Every recipe through the real command line: build, one step, save, load, at reduced width on few images."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from published import cifar10_rows, write_cifar10, write_fer2013, write_idx, write_mnist, write_svhn, write_tfd
from typer.testing import CliRunner

import nicest
from nicest.cli import app
from nicest.recipes import load_recipe, names

ONE_STEP = ("train.epochs=1", "train.batch=100")
NARROW = ("--set", "model.width=8")
CONVOLUTIONAL = {name for name in names() if name.endswith("-conv")}
LABELLED = {name for name in names() if name.endswith("-labels")}
EXACT_ZCA = ("svhn", "svhn-best", "cifar10", "cifar10-best")
SHAPES = {"mnist": (28, 28), "tfd": (48, 48), "fer2013": (48, 48), "svhn": (3, 32, 32), "cifar10": (3, 32, 32)}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data home with a few images of each set, in the published layouts."""
    home = tmp_path_factory.mktemp("home")
    write_mnist(home / "mnist")
    write_tfd(home / "tfd")
    write_fer2013(home / "fer2013")
    write_svhn(home / "svhn")
    write_cifar10(home / "cifar10", cifar10_rows())
    return home


def settings(*assignments: str) -> list[str]:
    return [word for assignment in assignments for word in ("--set", assignment)]


def train_and_load(name: str, out: Path, *arguments: str) -> tuple[nicest.Flow, nicest.recipes.Recipe]:
    """Train one step by the command line; the model that it saved, which scores its training data."""
    result = CliRunner().invoke(
        app,
        ["train", name, "--out", str(out), "--device", "cpu", "--json", *settings(*ONE_STEP), *arguments],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["step"] == 1
    run = nicest.open(out)
    assert run.figures["epoch"] == 1
    assert run.flow(*run.recipe.data.split(run.rows("train"))).isfinite().all()
    assert load_recipe(str(out / "recipe.toml")) == run.recipe
    return run.flow, run.recipe


@pytest.mark.parametrize(
    "name", sorted({*names()} - CONVOLUTIONAL - LABELLED - {"digits", *EXACT_ZCA, "images", "rows", "table"})
)
def test_recipe_on_its_published_layout(name: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NICEST_DATA", str(home))
    flow, recipe = train_and_load(name, tmp_path / "run", *NARROW)
    assert (recipe.name, recipe.model.width) == (name, 8)
    assert (recipe.data.shape, recipe.data.levels) == (SHAPES[recipe.data.name], 256)
    assert recipe.model.hidden_layers == load_recipe(name).model.hidden_layers
    assert ("whitening" in flow.bijection.layers) == (name in ("tfd", "fer2013", "fer2013-tfd"))


@pytest.mark.parametrize("name", EXACT_ZCA)
def test_recipe_with_exact_zca_on_smaller_images(name: str, tmp_path: Path):
    """The eigenvectors of 3072 dimensions take ten seconds; the published layouts are read in the test above."""
    images = np.random.default_rng(0).integers(0, 256, (50, 5, 4, 3), np.uint8)
    np.save(tmp_path / "images.npy", images)
    flow, recipe = train_and_load(name, tmp_path / "run", "--data", str(tmp_path / "images.npy"), *NARROW)
    assert (recipe.name, recipe.data.shape, recipe.data.interval) == (name, (3, 5, 4), load_recipe(name).data.interval)
    assert "zca" in flow.bijection.layers


@pytest.mark.parametrize("name", sorted(CONVOLUTIONAL - {"svhn-conv"}))  # whose model is that of cifar10-conv
def test_convolutional_recipe_on_smaller_images(name: str, tmp_path: Path):
    """Grey or colour, of any even shape that may be halved as often as the recipe does it."""
    shape = (8, 16, 3) if "cifar" in name or "svhn" in name else (4, 8)
    np.save(tmp_path / "images.npy", np.random.default_rng(0).integers(0, 256, (10, *shape), np.uint8))
    flow, recipe = train_and_load(name, tmp_path / "run", "--data", str(tmp_path / "images.npy"))
    assert recipe.model == load_recipe(name).model
    layers, left = flow.bijection.layers, flow.dim
    while "rest" in layers:  # half of the channels go no further
        layers, left = layers["rest"].inner.layers, left // 2
    assert (layers["coupling1"].partition.dim, left) == (left, flow.dim // (4 if len(shape) == 3 else 2))


@pytest.mark.parametrize("name", sorted(LABELLED))
def test_labelled_recipe_on_smaller_images_in_the_layout_of_mnist(name: str, tmp_path: Path):
    rng, folder = np.random.default_rng(0), tmp_path / "images"
    for part, n in (("train", 12), ("t10k", 4)):
        write_idx(folder / f"{part}-images-idx3-ubyte", rng.integers(0, 256, (n, 4, 8), np.uint8))
        write_idx(folder / f"{part}-labels-idx1-ubyte", np.arange(n, dtype=np.uint8) % 3)
    flow, recipe = train_and_load(name, tmp_path / "run", "--data", str(folder))
    assert (recipe.data.classes, recipe.data.shape, flow.dim) == ((4, 3, 3), (4, 8), 32)
    assert recipe.model == load_recipe(name).model
    assert flow.sample(2, torch.tensor([[0.0], [2.0]])).shape == (2, 32)


def test_digits_by_the_installed_command(tmp_path: Path):
    command = [Path(sys.executable).with_name("nicest"), "train", "digits", "--out", "run", "--json", "--device", "cpu"]
    done = subprocess.run(
        [*command, *settings("model.width=8", "train.epochs=1", "train.batch=100")],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["step"], result["best_epoch"], result["finished"], result["run"]) == (14, 1, True, "run")
    assert nicest.load(tmp_path / "run").sample(3).shape == (3, 64)
    assert "epoch 1/1" in done.stderr


def test_a_recipe_of_ones_own_on_a_table(tmp_path: Path):
    """Continuous rows, affine law, learned prior, whitening: what no shipped recipe has."""
    np.save(tmp_path / "table.npy", np.random.default_rng(0).normal(3, 2, (60, 5)).astype(np.float32))
    (tmp_path / "mine.toml").write_text(
        '[model]\npreprocess = "zca"\nlaw = "affine"\nhidden_layers = 1\nlearned_prior = true\npartition = "halves"\n'
    )
    flow, recipe = train_and_load(
        str(tmp_path / "mine.toml"), tmp_path / "run", "--data", str(tmp_path / "table.npy"), *NARROW
    )
    assert (recipe.name, recipe.data.shape, recipe.data.levels) == ("mine", (5,), 0)
    assert next(iter(flow.bijection.layers)) == "zca"
    assert flow.units.standardise
    assert flow.prior.learned
