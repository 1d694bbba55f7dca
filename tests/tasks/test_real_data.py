"""The real data: the figures that were computed once by other means, and the whole way from MNIST to a certificate.

The reference figures are of a whitening fitted to one draw of noisy training data, and of logistic scales of largest
likelihood on its first 10,000 rows around their mean. The test set and its noise are scored once.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import nicest
from nicest.data import Splits
from nicest.data import load as load_data
from nicest.data.download import data_home, list_sets
from nicest.recipes import load_recipe
from nicest.recipes.recipe import DataSettings
from nicest.tasks.baselines import baselines
from nicest.tasks.certify import certify
from nicest.tasks.evaluate import evaluate
from nicest.tasks.sample import sample
from nicest.train.fit import train

HERE = {row.name for row in list_sets() if row.present}


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(name not in HERE, reason=f"{name} is not in {data_home()}: run `nicest data get {name}`")


@pytest.fixture
def all_cores() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def mnist() -> Splits:
    return load_data("mnist")


@needs("mnist")
@pytest.mark.usefixtures("all_cores")
def test_our_baselines_on_mnist_score_the_references_or_better(mnist: Splits):
    scores = baselines(mnist, "test", DataSettings(name="mnist", shape=(28, 28), levels=256), torch.device("cpu"))
    assert scores["diagonal_gaussian"] == pytest.approx(1017.3, abs=2)
    assert scores["full_gaussian"] == pytest.approx(1471.4, abs=2)
    # exact noise moments, all rows, and the location of largest likelihood too: a little more than the references
    assert 1838.2 - 1 < scores["zca_logistic"] < 1838.2 + 12
    assert scores["factorial_logistic"] > 1484.9 - 1


@needs("mnist")
def test_mnist_goes_all_the_way_from_its_recipe_to_a_certificate(
    mnist: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    few = replace(mnist, train=mnist.train[:6000], valid=mnist.valid[:500], test=mnist.test[:1000])
    monkeypatch.setattr("nicest.recipes.splits.load", lambda name, **options: few)
    settings = ("model.width=32", "train.epochs=2")
    assert train(load_recipe("mnist"), tmp_path / "run", overrides=settings, device="cpu")["finished"]
    run = nicest.open(tmp_path / "run")

    evaluation = evaluate(run, draws=1, baselines=False)
    assert (evaluation.n, evaluation.dim, evaluation.paper_nats) == (1000, 784, 1980.5)
    assert evaluation.non_finite == 0
    assert evaluation.bits_per_dim == pytest.approx(8 - evaluation.mean_nats / (784 * math.log(2)), abs=1e-5)
    first, second = run.metrics
    assert second["valid_nats"] > first["valid_nats"] + 10
    assert evaluation.mean_nats == pytest.approx(second["valid_nats"], abs=30)

    sample(run, 16, out=tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.mode == "L"
        assert grid.size[0] == grid.size[1] >= 720
        assert len(np.unique(np.asarray(grid))) > 50

    certificate = certify(run, n=50, jacobians=2)
    assert certificate.dtype == ["float64", "float32"]
    assert certificate.max_roundtrip[0] < 1e-10
    assert certificate.max_roundtrip[1] < 1e-5
    assert certificate.max_logdet_error[0] < 1e-8 * 784
