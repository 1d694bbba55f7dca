"""demo: from nothing to every figure, through the command line, and again from what is there."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nicest import Run
from nicest.cli import main
from nicest.errors import NicestError
from nicest.recipes import Recipe, load_recipe
from nicest.tasks.demo import demo
from nicest.tasks.latent import spectrum

FIGURES = ["data.png", "samples.png", "likelihood.png", "spectrum.png", "contact-sheet.png"]
MNIST = ["mnist-samples.png", "mnist-inpaint.png"]


def tiny(name: str) -> Recipe:
    assert name == "digits"
    few = ("model.width=16", "model.hidden_layers=1", "train.epochs=20", "train.evaluate_every=10")
    return load_recipe(name).override(*few)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the demonstration ran twice, and what it said in JSON."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nicest.tasks.demo.load_recipe", tiny)
        patch.setattr("nicest.tasks.demo.SAMPLES", 4)
        patch.setattr("nicest.tasks.demo.STEPS", 10)
        patch.setattr(sys, "argv", ["nicest", "demo", "--out", str(folder / "run"), "--json", "--device", "cpu"])
        for name in ("first.json", "second.json"):
            with (folder / name).open("w") as file:
                patch.setattr(sys, "stdout", file)
                with pytest.raises(SystemExit) as exit:
                    main()
                assert exit.value.code == 0
            (folder / f"{name}.model").write_bytes((folder / "run" / "model.safetensors").read_bytes())
    return folder


def said(shown: Path, name: str = "first.json") -> dict:
    return json.loads((shown / name).read_text())


def test_the_json_is_complete(shown: Path):
    result = said(shown)
    assert list(result) == ["training", "evaluation", "certificate", "figures"]
    assert result["training"]["finished"] is True
    assert result["training"]["epochs"] == 20
    assert result["evaluation"]["n"] == 180
    assert len(result["evaluation"]["baselines"]) == 4
    assert result["certificate"]["dtype"] == ["float64", "float32"]
    assert result["certificate"]["max_roundtrip"][0] < 1e-10


def test_every_figure_exists_and_shows_something(shown: Path, picture_at: Callable):
    files = [Path(path) for path in said(shown)["figures"]]
    assert [file.name for file in files] == [*FIGURES, *MNIST]
    assert {file.parent for file in files} == {shown / "run" / "figures"}
    for file in files:
        picture = picture_at(file)
        assert min(picture.size) > (400 if file.name in FIGURES else 100), file
        assert len(np.unique(np.asarray(picture.convert("L")))) > 15, file


def test_samples_are_not_the_data(shown: Path, picture_at: Callable):
    data, samples = (np.asarray(picture_at(shown / "run" / "figures" / f"{name}.png")) for name in ("data", "samples"))
    assert data.shape == samples.shape
    assert (data != samples).mean() > 0.2


def test_again_it_takes_the_run_that_is_there(shown: Path):
    first, second = said(shown), said(shown, "second.json")
    assert second["training"] == first["training"]
    assert second["evaluation"] == first["evaluation"]
    assert (shown / "second.json.model").read_bytes() == (shown / "first.json.model").read_bytes()
    assert len((shown / "run" / "metrics.jsonl").read_text().splitlines()) == 2  # epochs 10 and 20, once each


def test_it_does_not_go_on_with_a_run_of_other_data(rows_run: Run, copy_of: Callable[[Run], Run]):
    run = copy_of(rows_run).path
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with pytest.raises(NicestError, match=r"digits.*rows\.npy.*another folder"):
        demo(run, device="cpu")
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_the_spectrum_is_the_sorted_inverse_of_the_scaling(any_run: Run, tmp_path: Path, picture_at: Callable):
    result = spectrum(any_run, out=tmp_path / "a.png")
    s = any_run.flow.bijection.layers["scaling"].s.detach().numpy()
    np.testing.assert_allclose(result.sigma, np.sort(np.exp(-s))[::-1], rtol=1e-6)
    assert result.sigma == sorted(result.sigma, reverse=True)
    assert picture_at(tmp_path / "a.png").size == (1170, 468)
