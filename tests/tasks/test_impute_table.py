"""Tables with their missing cells filled in: observed cells as they were, hidden ones as the model has them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.datasets import load_wine
from typer.testing import CliRunner

import nicest
from nicest import Run
from nicest.cli import app
from nicest.inference.impute import Imputed, impute_rows
from nicest.recipes import load_recipe
from nicest.tasks.impute_table import impute_table
from nicest.train.fit import train

QUICK = {"draws": 80, "steps": 120}


def frame(n: int, seed: int = 0) -> pd.DataFrame:
    """y follows x; kind is the sign of x; count is about 3 z."""
    random = np.random.default_rng(seed)
    x, z = 2 * random.choice([-1, 1], n) + 0.5 * random.standard_normal(n), random.random(n)
    return pd.DataFrame(
        {
            "x": x,
            "y": 100 + 20 * x + random.standard_normal(n),
            "kind": np.where(x > 0, "plus", "minus"),
            "count": np.floor(12 * z).astype(int),
            "z": z + 0.01 * random.standard_normal(n),
        }
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("impute")
    frame(1500).to_parquet(folder / "rows.parquet")
    settings = (
        "train.epochs=25",
        "model.law=additive",
        "model.couplings=4",
        "model.width=48",
        "train.lr=3e-3",
        "train.patience=0",
    )
    train(load_recipe("table"), folder / "run", overrides=(f"data.name={folder / 'rows.parquet'}", *settings))
    return nicest.open(folder / "run")


@pytest.fixture(scope="module")
def holes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame, pd.DataFrame]:
    """A table with holes, in all formats, and what was there before; one column more than the model has."""
    whole = frame(60, 1).assign(note=[f"row {i}, {i}" for i in range(60)])
    hidden = pd.DataFrame(False, index=whole.index, columns=whole.columns)
    for i, name in enumerate(("x", "y", "kind", "count")):
        hidden.loc[i::6, name] = True
    holed = whole.mask(hidden)
    folder = tmp_path_factory.mktemp("holes")
    holed = holed.assign(count=holed["count"].astype("Int64"))
    holed.to_csv(folder / "holes.csv", index=False)
    holed.to_parquet(folder / "holes.parquet")
    holed.to_feather(folder / "holes.feather")
    return folder, whole, hidden


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".feather"])
def test_hidden_cells_are_near_the_truth_and_the_rest_is_as_it_was(
    run: Run, holes: tuple[Path, pd.DataFrame, pd.DataFrame], tmp_path: Path, suffix: str
):
    folder, whole, hidden = holes
    out, cells = tmp_path / f"whole{suffix}", tmp_path / "cells.csv"
    result = impute_table(run, folder / f"holes{suffix}", out=out, cells=cells, **QUICK)
    assert (result["rows"], result["rows_filled"], result["filled"]) == (60, 40, 40)
    read = {".csv": pd.read_csv, ".parquet": pd.read_parquet, ".feather": pd.read_feather}[suffix]
    before, after = read(folder / f"holes{suffix}"), read(out)
    assert list(after) == list(before)
    assert (after.dtypes == before.dtypes).all() or suffix == ".csv"
    for name in after:
        kept = ~hidden[name]
        assert after.loc[kept, name].tolist() == before.loc[kept, name].tolist()  # bit for bit
        assert not after[name].isna().any()
    assert np.abs(after["y"] - whole["y"])[hidden["y"]].mean() < 5  # 20 by guessing the mean
    assert (after["kind"] == whole["kind"])[hidden["kind"]].mean() > 0.8
    assert np.abs(after["count"].astype(float) - whole["count"])[hidden["count"]].mean() < 1.5
    lines = pd.read_csv(cells)
    assert len(lines) == 40
    numbers = lines[lines["column"].isin(["x", "y", "count"])]
    assert (numbers["low"].astype(float) <= numbers["high"].astype(float)).all()
    truth = np.array([float(whole.loc[row, name]) for row, name in zip(numbers["row"], numbers["column"], strict=True)])
    inside = (numbers["low"].astype(float) <= truth) & (truth <= numbers["high"].astype(float))
    assert inside.mean() > 0.6
    texts = lines[lines["column"] == "kind"]
    assert texts[["low", "high"]].isna().all(axis=None)
    assert texts["share"].between(0.5, 1).all()  # of two values
    assert lines[lines["column"] == "y"]["share"].isna().all()


def test_text_of_observed_cells_is_untouched(run: Run, tmp_path: Path):
    (tmp_path / "a.csv").write_text("x,y,kind,count,z\n1.50,,plus,7,0.600\n-.5,90e0,minus,,.25\n")
    impute_table(run, tmp_path / "a.csv", out=tmp_path / "b.csv", **QUICK)
    first, second = (line.split(",") for line in (tmp_path / "b.csv").read_text().splitlines()[1:])
    assert [*first[:1], *first[2:]] == ["1.50", "plus", "7", "0.600"]
    assert [*second[:3], second[4]] == ["-.5", "90e0", "minus", ".25"]
    assert 100 < float(first[1]) < 160
    assert 0 <= int(float(second[3])) <= 11


def test_same_seed_same_cells(run: Run, holes: tuple, tmp_path: Path):
    for name in ("one.csv", "two.csv"):
        impute_table(run, holes[0] / "holes.csv", out=tmp_path / name, seed=3, **QUICK)
    assert (tmp_path / "one.csv").read_bytes() == (tmp_path / "two.csv").read_bytes()


def test_rows_of_values_never_seen_are_left_as_they_are(run: Run, tmp_path: Path):
    (tmp_path / "a.csv").write_text("x,y,kind,count,z\n1.5,,never,7,0.6\n1.5,,plus,7,0.6\n")
    result = impute_table(run, tmp_path / "a.csv", out=tmp_path / "b.csv", **QUICK)
    assert (result["unknown"], result["filled"]) == (1, 1)
    assert (tmp_path / "b.csv").read_text().splitlines()[1] == "1.5,,never,7,0.6"


class TestRefused:
    def test_other_columns(self, run: Run, tmp_path: Path, refusal: Callable[..., str]):
        (tmp_path / "a.csv").write_text("x,y\n1,\n")
        assert "lacks 'kind'" in refusal(impute_table, run, tmp_path / "a.csv", out=tmp_path / "b.csv")

    def test_a_model_that_is_not_of_a_table(self, digits_run: Run, refusal: Callable[..., str]):
        assert "is not a model of a table" in refusal(impute_table, digits_run, "a.csv")

    def test_a_result_in_the_place_of_the_table(self, run: Run, holes: tuple, refusal: Callable[..., str]):
        path = holes[0] / "holes.csv"
        assert "a separate file" in refusal(impute_table, run, path, out=path)

    def test_one_file_for_two_results(self, run: Run, holes: tuple, tmp_path: Path, refusal: Callable[..., str]):
        (tmp_path / "x.csv").write_text("precious")
        assert "expected two files" in refusal(
            impute_table, run, holes[0] / "holes.csv", out=tmp_path / "x.csv", cells=tmp_path / "." / "x.csv"
        )
        assert (tmp_path / "x.csv").read_text() == "precious"

    def test_what_is_no_table(self, run: Run, holes: tuple, refusal: Callable[..., str]):
        assert "ends in .csv" in refusal(impute_table, run, holes[0] / "holes.csv", out="x.png")


def test_on_the_command_line(run: Run, holes: tuple, tmp_path: Path):
    words = ["impute", str(run.path), str(holes[0] / "holes.csv"), "--out", str(tmp_path / "b.csv"), "--json"]
    words += ["--draws", "40", "--steps", "40", "--device", "cpu"]
    end = CliRunner().invoke(app, words, catch_exceptions=False)
    assert json.loads(end.stdout)["filled"] == 40


@pytest.mark.parametrize("interval", [0.01, 0.5, 0.9])
def test_an_integer_is_the_median_of_its_draws_and_lies_in_its_interval(
    run: Run, holes: tuple, tmp_path: Path, interval: float, monkeypatch: pytest.MonkeyPatch
):
    drawn: list[np.ndarray] = []

    def heard(*arguments: Any, **options: Any) -> Imputed:
        found = impute_rows(*arguments, **options)
        drawn.append(found.draws.numpy())
        return found

    monkeypatch.setattr("nicest.tasks.impute_table.impute_rows", heard)
    how = QUICK | {"interval": interval}
    impute_table(run, holes[0] / "holes.csv", out=tmp_path / "a.csv", cells=tmp_path / "c.csv", **how)
    lines = pd.read_csv(tmp_path / "c.csv")
    counts = lines[lines["column"] == "count"]
    value, low, high = (counts[name].astype(float).to_numpy() for name in ("value", "low", "high"))
    assert ((low <= value) & (value <= high)).all()
    (draws,) = drawn  # of the rows with holes; the hidden counts vary from draw to draw
    draws = draws[:, :, 3][:, np.ptp(draws[:, :, 3], 0) > 0]
    assert value.tolist() == np.floor(np.median(draws, 0)).tolist()
    assert counts["share"].tolist() == pytest.approx((draws == value).mean(0))
    texts = lines[lines["column"] == "kind"]
    assert set(texts["value"]) <= {"plus", "minus"}
    assert texts["share"].between(0.5, 1).all()


def test_wines_are_found_again_more_closely_than_by_the_most_frequent_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Proline, an integer from 278 to 1680: of 400 draws hardly any two are alike."""
    wine = load_wine(as_frame=True).data
    wine["proline"] = wine["proline"].astype(int)
    wine[40:].to_csv(tmp_path / "wine.csv", index=False)
    wine.assign(proline=pd.Series(dtype="Int64")).to_csv(tmp_path / "holes.csv", index=False)
    settings = (f"data.name={tmp_path / 'wine.csv'}", "train.epochs=60", "train.effort=low", "model.law=additive")
    train(load_recipe("table"), tmp_path / "run", overrides=settings, device="cpu")
    wines, frequent = nicest.open(tmp_path / "run"), []

    def heard(*arguments: Any, **options: Any) -> Imputed:
        found = impute_rows(*arguments, **options)
        frequent.append(stats.mode(found.draws.numpy(), axis=0).mode[:, -1] + int(wine["proline"][40:].min()))
        return found

    monkeypatch.setattr("nicest.tasks.impute_table.impute_rows", heard)
    impute_table(wines, tmp_path / "holes.csv", out=tmp_path / "a.csv", steps=150)
    medians = pd.read_csv(tmp_path / "a.csv")["proline"]
    by_median, by_frequency = (np.sqrt(np.mean((each - wine["proline"]) ** 2)) for each in (medians, frequent[0]))
    assert by_median < 0.97 * by_frequency


def test_many_rows_are_filled_in_by_parts_with_other_draws_each(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two rows alike in two parts: one memory for both, and not the same numbers."""
    monkeypatch.setattr("nicest.inference.impute.AT_ONCE", 1)
    (tmp_path / "a.csv").write_text("x,y,kind,count,z\n" + "2.0,,plus,7,0.6\n" * 2)
    impute_table(run, tmp_path / "a.csv", out=tmp_path / "b.csv", cells=tmp_path / "c.csv", **QUICK)
    first, second = pd.read_csv(tmp_path / "c.csv")["value"]
    assert first != second
    assert abs(first - second) < 2


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".feather"])
def test_nothing_to_fill_in_gives_the_table_and_no_cells(run: Run, tmp_path: Path, suffix: str):
    frame(5).to_parquet(tmp_path / "a.parquet")
    impute_table(run, tmp_path / "a.parquet", out=tmp_path / f"b{suffix}", cells=tmp_path / "c.parquet", **QUICK)
    read = {".csv": pd.read_csv, ".parquet": pd.read_parquet, ".feather": pd.read_feather}[suffix]
    after, before = read(tmp_path / f"b{suffix}"), pd.read_parquet(tmp_path / "a.parquet")
    pd.testing.assert_frame_equal(after, before)
    assert len(pd.read_parquet(tmp_path / "c.parquet")) == 0


def test_a_table_without_rows_is_refused_and_nothing_written(run: Run, tmp_path: Path, refusal: Callable[..., str]):
    (tmp_path / "a.csv").write_text("x,y,kind,count,z\n")
    (tmp_path / "b.csv").write_text("kept")
    assert "expected rows to fill in" in refusal(impute_table, run, tmp_path / "a.csv", out=tmp_path / "b.csv")
    assert (tmp_path / "b.csv").read_text() == "kept"
