"""The comparison on tables."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from nicest.studies import compare
from nicest.studies.compare import CLASSICAL, compare_density, markdown, standardised_split
from nicest.studies.datasets import TABLES


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_continuous_and_come_from_their_seed(name: str):
    x, again = (TABLES[name](np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(x, again)
    assert np.isfinite(x).all()
    assert (x.std(0) > 0).all()


def test_nats_are_in_the_units_of_the_table():
    train, test, log_det = standardised_split("iris", 0)
    rng = np.random.default_rng(0)
    x = TABLES["iris"](rng)
    x = x[rng.permutation(len(x))]
    exact = multivariate_normal(x[30:].mean(0), np.cov(x[30:].T, bias=True)).logpdf(x[:30])
    np.testing.assert_allclose(CLASSICAL["Gaussian"](train, test, 0) + log_det, exact)


@pytest.mark.parametrize("method", CLASSICAL)
def test_every_method_scores_every_row(method: str):
    train, test, _ = standardised_split("iris", 0)
    scores = CLASSICAL[method](train, test, 0)
    assert scores.shape == (30,)
    assert np.isfinite(scores).all()


@pytest.mark.peers
@pytest.mark.parametrize("method", compare.PEERS)
def test_peers_do_too(method: str):
    pytest.importorskip("zuko")
    train, test, _ = standardised_split("iris", 0)
    assert np.isfinite(compare.PEERS[method](train[:40], test, 0)).all()


def test_one_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(compare, "PEERS", {})
    result = compare_density(tables=("iris",), seeds=1, out=tmp_path / "density.json")
    assert json.loads((tmp_path / "density.json").read_text())["rows"] == result["rows"]
    assert [row["method"] for row in result["rows"]] == ["NICE", *CLASSICAL]
    assert markdown(result).count("**") == 2


def test_an_unknown_table(refusal):
    assert "no table 'irises'; there are iris, wine" in refusal(compare_density, tables=("irises",))
