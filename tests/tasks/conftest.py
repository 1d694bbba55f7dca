"""Tiny trained runs that all tests of the tasks share: grey levels, continuous rows, colour images, a mixed table."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import nicest
from nicest import Run
from nicest.flows import Flow
from nicest.recipes import Recipe, load_recipe
from nicest.recipes.build import build
from nicest.runs.folder import RunFolder
from nicest.runs.sinks import Saved
from nicest.train.fit import train

TINY = (
    *("model.width=16", "model.hidden_layers=1", "train.epochs=3", "train.batch=50"),
    *("train.lr=0.02", "train.warmup=0", "train.evaluate_every=1"),
)
SMALL_TABLE = (
    *("table.width=32", "table.depth=1", "table.components=4", "train.epochs=40", "train.batch=50"),
    *("train.lr=0.01", "train.evaluate_every=10"),
)

SaveRun = Callable[..., Run]


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 x 8 grey images of 17 levels on [0, 1]."""
    out = tmp_path_factory.mktemp("runs") / "digits"
    train(load_recipe("digits"), out, overrides=TINY, device="cpu")
    return out


@pytest.fixture(scope="session")
def correlated() -> np.ndarray:
    """400 rows of 5 correlated numbers, none of them centred or of unit size."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((400, 5)) @ rng.standard_normal((5, 5)) * [1, 10, 0.1, 3, 1] + [5, -20, 0, 1, 2]
    return rows.astype(np.float32)


@pytest.fixture(scope="session")
def rows_folder(tmp_path_factory: pytest.TempPathFactory, correlated: np.ndarray) -> Path:
    """Continuous rows, and an affine law, whose couplings have a log-det."""
    folder = tmp_path_factory.mktemp("runs")
    np.save(folder / "rows.npy", correlated)
    own = (f'data.name="{folder / "rows.npy"}"', "model.law=affine", "model.dropout=0.0")
    train(load_recipe("digits"), folder / "rows", overrides=(*TINY, *own), device="cpu")
    return folder / "rows"


@pytest.fixture(scope="session")
def colour_images() -> np.ndarray:
    """60 images, 4 high and 6 wide, (N, H, W, C): red grows to the right, green downwards, blue is noise."""
    rng = np.random.default_rng(1)
    images = np.zeros((60, 4, 6, 3))
    images[..., 0] = np.arange(6) * 40
    images[..., 1] = np.arange(4)[:, None] * 60
    return np.clip(images + rng.normal(20, 15, images.shape), 0, 255).astype(np.uint8)


@pytest.fixture(scope="session")
def colour_folder(tmp_path_factory: pytest.TempPathFactory, colour_images: np.ndarray) -> Path:
    """A folder of PNG files on [-1, 1], whitened by ZCA."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "images").mkdir()
    for i, image in enumerate(colour_images):
        Image.fromarray(image).save(folder / "images" / f"{i:03}.png")
    own = (f'data.name="{folder / "images"}"', "data.interval=[-1, 1]", "model.preprocess=zca", "train.batch=16")
    train(load_recipe("digits"), folder / "colour", overrides=(*TINY, *own), device="cpu")
    return folder / "colour"


@pytest.fixture(scope="session")
def table_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of a real column, an integer column and two categorical columns that go with it."""
    folder, rng = tmp_path_factory.mktemp("runs"), np.random.default_rng(2)
    count = rng.integers(0, 12, 400)
    lines = [f"{c + rng.normal():.4f},{c},{'low' if c < 6 else 'high'},{'abc'[c // 4]}" for c in count]
    (folder / "table.csv").write_text("\n".join(["x,count,half,third", *lines]) + "\n")
    recipe = replace(load_recipe("table"), sized=False)
    train(recipe, folder / "table", overrides=(f'data.name="{folder / "table.csv"}"', *SMALL_TABLE), device="cpu")
    return folder / "table"


@pytest.fixture
def table_run(table_folder: Path) -> Run:
    return nicest.open(table_folder)


@pytest.fixture
def digits_run(digits_folder: Path) -> Run:
    return nicest.open(digits_folder)


@pytest.fixture
def rows_run(rows_folder: Path) -> Run:
    return nicest.open(rows_folder)


@pytest.fixture
def colour_run(colour_folder: Path) -> Run:
    return nicest.open(colour_folder)


@pytest.fixture(params=["digits", "rows", "colour"])
def any_run(request: pytest.FixtureRequest) -> Run:
    """Each of the three runs."""
    return nicest.open(request.getfixturevalue(f"{request.param}_folder"))


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Run], Run]:
    """A copy of a run, for tests that write into it."""

    def copy(run: Run) -> Run:
        return nicest.open(shutil.copytree(run.path, tmp_path / run.path.name), data=run.recipe.data.name)

    return copy


@pytest.fixture
def save_run(tmp_path: Path) -> SaveRun:
    """Write a flow that was made by hand as a run folder, in float64, and open it."""

    def save(name: str, flow: Flow, recipe: Recipe, dtype: torch.dtype = torch.float32) -> Run:
        (tmp_path / name).mkdir()
        RunFolder(tmp_path / name).save_model(Saved(flow.double().state_dict(), recipe, {"epoch": 1}))
        return nicest.open(tmp_path / name, dtype=dtype)

    return save


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[Flow, Recipe]]:
    """An untrained tiny flow of four couplings in float64 for an array, with its recipe; `own` are its settings."""

    def make(array: np.ndarray, *own: str) -> tuple[Flow, Recipe]:
        path = tmp_path / "data.npy"
        np.save(path, array)
        levels = {"uint8": 256, "float32": 0}[array.dtype.name]
        recipe = load_recipe("digits").override(*TINY, f'data.name="{path}"', *own)
        recipe = replace(recipe, data=replace(recipe.data, shape=array.shape[1:], levels=levels))
        return build(recipe).double().eval(), recipe

    return make


@pytest.fixture
def picture_at() -> Callable[[Path], Image.Image]:
    """A picture on disk, read whole."""

    def picture_at(path: Path) -> Image.Image:
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            return picture.copy()

    return picture_at


@pytest.fixture
def in_float64(any_run: Run) -> Run:
    """Each of the three runs, in float64."""
    return nicest.open(any_run.path, dtype=torch.float64)


@pytest.fixture
def half_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the dequantisation noise by its mean, so that numpy knows it too."""
    monkeypatch.setattr(torch, "rand", lambda shape, generator, **options: torch.full(shape, 0.5, **options))


@pytest.fixture
def log2e() -> float:
    """Bits in a nat."""
    return 1 / math.log(2)
