"""The log-density of every row of files: of tables, arrays and images, by one process and by several."""

import io
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import csv, parquet
from typer.testing import CliRunner

import nicest
from nicest import Run
from nicest.cli import app
from nicest.data import load
from nicest.data.scan import scan
from nicest.data.tables import TableFile, write_table
from nicest.recipes import load_recipe
from nicest.tasks import score as module
from nicest.tasks.certify import certify
from nicest.tasks.evaluate import evaluate
from nicest.tasks.impute_table import impute_table
from nicest.tasks.sample import sample
from nicest.tasks.score import CAVEAT, score
from nicest.train.fit import train

Refusal = Callable[..., str]
TINY = (
    *("model.law=additive", "model.width=8", "model.couplings=3", "model.hidden_layers=1"),
    *("train.epochs=3", "train.patience=0"),
)
N = 500


def continuous_table(n: int = N) -> pa.Table:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(n, 4)) @ rng.normal(size=(4, 4)) * [1, 10, 0.1, 3] + [5, -20, 1e5, 1]
    return pa.table(list(rows.T), names=["a", "b", "c", "d"])


def mixed_table(n: int = N) -> pa.Table:
    rng = np.random.default_rng(1)
    kinds = rng.integers(0, 3, n)
    return pa.table(
        {
            "x": rng.normal(size=n) + kinds,
            "count": kinds * 10 + rng.integers(0, 4, n) * 5,
            "kind": pa.array(np.array(["red", "green", "blue"])[kinds]),
            "is": pa.array(rng.random(n) < 0.3),
            "same": pa.array(["one"] * n),
            "day": pa.array(rng.integers(0, 900, n).astype(np.int32)).cast(pa.date32()),
        }
    )


def trained(folder: Path, table: pa.Table, *settings: str) -> Run:
    """A run in a folder, beside its data."""
    parquet.write_table(table, folder / "table.parquet", row_group_size=90)
    own = (f'data.name="{folder / "table.parquet"}"', *TINY, *settings)
    train(load_recipe("table"), folder / "run", overrides=own, device="cpu")
    return nicest.open(folder / "run")


def copied(run: Run, folder: Path) -> Run:
    shutil.copy(run.recipe.data.name, folder)  # beside it, as it was
    return nicest.open(shutil.copytree(run.path, folder / "run"))


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A table of continuous columns."""
    return trained(tmp_path_factory.mktemp("plain"), continuous_table())


@pytest.fixture(scope="session")
def mixed_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A table of columns of every kind."""
    return trained(tmp_path_factory.mktemp("mixed"), mixed_table())


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def scores(path: Path) -> dict[str, list]:
    """A file of scores, however written."""
    table = csv.read_csv(path) if path.suffix == ".csv" else parquet.read_table(path)
    return table.to_pydict()


# ---- what is scored


def test_continuous_rows_have_the_density_of_the_flow(plain_run: Run, in_tmp: Path) -> None:
    result = score(plain_run, [plain_run.path.parent / "table.parquet"], out="s.parquet")
    flow = plain_run.flow_in(torch.float64)
    low = np.array([column.low for column in plain_run.columns])
    rows = np.stack(continuous_table().columns, 1) - low
    expected = flow.log_prob(torch.from_numpy(rows)).detach().numpy()
    got = scores(in_tmp / "s.parquet")
    assert list(got) == ["row", "log_density", "outlier_score"]
    assert got["row"] == list(range(N))
    np.testing.assert_allclose(got["log_density"], expected, atol=2e-4)
    assert result.mean_nats == pytest.approx(expected.mean(), abs=1e-4)
    assert (result.rows, result.missing, result.unknown, result.draws) == (N, 0, 0, 1)
    assert result.caveat == CAVEAT


def test_the_outlier_score_is_the_share_of_training_rows_that_are_denser(plain_run: Run, in_tmp: Path) -> None:
    rows = load(str(plain_run.path.parent / "table.parquet")).train
    nats = plain_run.flow.log_prob(torch.from_numpy(rows)).detach().numpy()
    score(plain_run, [plain_run.path.parent / "table.parquet"], out="s.parquet")
    got = scores(in_tmp / "s.parquet")
    share = [(nats > each).mean() for each in got["log_density"]]
    np.testing.assert_allclose(got["outlier_score"], share, atol=2 / len(nats))
    far = continuous_table(3).set_column(0, "a", pa.array([1e3, 5.0, math.inf]))
    write_table(in_tmp / "far.parquet", far)
    score(plain_run, ["far.parquet"], out="s.parquet")
    got = scores(in_tmp / "s.parquet")
    assert got["outlier_score"][0] == got["outlier_score"][2] == 1
    assert got["log_density"][2] == -math.inf
    assert 0 < got["outlier_score"][1] < 1


def test_rows_that_are_absurd_have_no_density(plain_run: Run, in_tmp: Path) -> None:
    values = [1e30, -1e30, 3e38, 1e300, -1e300]
    write_table(in_tmp / "t.arrow", continuous_table(5).set_column(1, "b", pa.array(values)))
    result = score(plain_run, ["t.arrow"], out="s.csv")
    got = scores(in_tmp / "s.csv")
    assert result.missing == 0
    assert all(each < -1e6 for each in got["log_density"])
    assert got["outlier_score"] == [1.0] * 5


def test_missing_cells_and_unknown_values(mixed_run: Run, in_tmp: Path) -> None:
    table = mixed_table(6)
    kind = pa.array(["red", None, "violet", "green", "violet", "blue"])
    x = pa.array([0.5, 1.0, 2.0, None, None, 0.0])
    table = table.set_column(2, "kind", kind).set_column(0, "x", x)
    for name in ("t.parquet", "t.csv", "t.feather"):  # dates and booleans are texts in .csv
        write_table(in_tmp / name, table)
        for out in ("s.csv", "s.parquet"):
            result = score(mixed_run, [name], out=out)
            assert (result.rows, result.missing, result.unknown) == (6, 3, 1)
            got = scores(in_tmp / out)
            assert [each is None for each in got["log_density"]] == [False, True, False, True, True, False]
            assert got["log_density"][2] == -math.inf
            assert got["outlier_score"][1:4] == [None, 1.0, None]
    text = (in_tmp / "s.csv").read_text().splitlines()
    assert text[2] == "1,,"
    assert text[3] == "2,-inf,1.000000"


def test_a_table_without_one_whole_row(mixed_run: Run, in_tmp: Path) -> None:
    nothing = pa.table({name: pa.nulls(3) for name in mixed_table(1).column_names})
    write_table(in_tmp / "t.arrow", nothing)
    result = score(mixed_run, ["t.arrow"])
    assert (result.rows, result.missing, result.mean_nats) == (3, 3, None)
    write_table(in_tmp / "t.parquet", mixed_table().slice(0, 0))
    assert score(mixed_run, ["t.parquet"]).rows == 0
    assert (in_tmp / "scores.csv").read_text() == "row,log_density,outlier_score\n"


def test_several_files(mixed_run: Run, in_tmp: Path) -> None:
    names = ["one, two.parquet", "b.csv", "c.feather"]
    for name in names:
        write_table(in_tmp / name, mixed_table(7))
    for out in ("s.csv", "s.parquet"):
        score(mixed_run, names, out=out)
        got = scores(in_tmp / out)
        assert got["file"] == [name for name in names for _ in range(7)]
        assert got["row"] == list(range(7)) * 3


def test_columns_in_another_order_and_more_of_them(mixed_run: Run, in_tmp: Path, capfd: Any) -> None:
    table = mixed_table(20)
    shuffled = table.select(["day", "kind", "x", "same", "is", "count"]).append_column("label", pa.array([[1]] * 20))
    write_table(in_tmp / "a.parquet", table)
    write_table(in_tmp / "b.parquet", shuffled)
    score(mixed_run, ["a.parquet"], out="a.csv")
    score(mixed_run, ["b.parquet"], out="b.csv")
    assert (in_tmp / "a.csv").read_text() == (in_tmp / "b.csv").read_text()
    assert "b.parquet: ignoring 'label', which the training data did not have" in capfd.readouterr().err


# ---- refused, and nothing lost


def test_other_tables_get_one_line(mixed_run: Run, plain_run: Run, in_tmp: Path, refusal: Refusal) -> None:
    table = mixed_table(5)
    write_table(in_tmp / "t.parquet", table.drop_columns(["kind", "x"]))
    assert "lacks 'x', 'kind', which training had" in refusal(score, mixed_run, ["t.parquet"])
    write_table(in_tmp / "t.parquet", table.set_column(0, "x", pa.array(list("abcde"))))
    assert "expected numbers in column 'x', as in training, got 'a'" in refusal(score, mixed_run, ["t.parquet"])
    write_table(in_tmp / "t.parquet", table.set_column(2, "kind", pa.array(range(5))))
    assert "expected texts in column 'kind', as in training, got int64" in refusal(score, mixed_run, ["t.parquet"])
    assert "found no gone.csv" in refusal(score, plain_run, ["gone.csv"])
    np.savez("rows.npz", np.zeros((3, 4)))
    assert "the model is of a table; expected .csv" in refusal(score, plain_run, ["rows.npz"])
    np.save("rows.npy", np.zeros((3, len(mixed_run.columns))))
    assert "expected texts in column 'kind', as in training, got double" in refusal(score, mixed_run, ["rows.npy"])
    assert "ends in .csv or .parquet, got 's.txt'" in refusal(score, plain_run, ["t.parquet"], out="s.txt")
    assert not list(in_tmp.glob("*.tmp")) + list(in_tmp.glob(".*"))


def test_the_file_that_is_scored_is_not_written_over(plain_run: Run, in_tmp: Path, refusal: Refusal) -> None:
    write_table(in_tmp / "t.csv", continuous_table(5))
    before = (in_tmp / "t.csv").read_bytes()
    (in_tmp / "link.csv").symlink_to(in_tmp / "t.csv")
    for out in ("t.csv", "./t.csv", "link.csv"):
        assert "expected a separate file for the result" in refusal(score, plain_run, ["t.csv"], out=out)
    assert (in_tmp / "t.csv").read_bytes() == before


def test_the_table_of_training_is_not_written_over(in_tmp: Path, refusal: Refusal) -> None:
    run = trained(in_tmp, continuous_table(50))
    write_table(in_tmp / "t.csv", continuous_table(5))
    before = (in_tmp / "table.parquet").read_bytes()
    for task, *words in ((score, run, ["t.csv"]), (sample, run), (impute_table, run, "t.csv")):
        assert "on which the run was trained" in refusal(task, *words, out="table.parquet")
    assert "on which the run was trained" in refusal(impute_table, run, "t.csv", out="w.csv", cells="table.parquet")
    assert (in_tmp / "table.parquet").read_bytes() == before


def test_scores_of_discrete_rows_come_up_to_their_log_probability(in_tmp: Path) -> None:
    """By quadrature of the density over the unit cell of each, which is the probability that the flow gives to it."""
    rng = np.random.default_rng(0)
    kind, count = rng.integers(0, 3, N), rng.poisson(3, N)
    table = pa.table({"kind": np.array(["a", "b", "c"])[kind], "count": count + kind})
    run = trained(in_tmp, table)
    cells = [(k, n) for k in range(3) for n in range(2, 6)]
    few = pa.table({"kind": ["abc"[k] for k, _ in cells], "count": [n for _, n in cells]})
    parquet.write_table(few, "cells.parquet")
    flow = run.flow_in(torch.float64).requires_grad_(False)
    low = min(table["count"].to_pylist())
    middles = (torch.arange(64).double() + 0.5) / 64
    grid = torch.cartesian_prod(middles, middles)
    rows = (torch.tensor([[float(k), n - low]]).double().expand(len(grid), 2) for k, n in cells)
    points = [flow.units.enter(each, noise=grid) for each in rows]
    truth = [float((flow.log_density(y) + flow.units.log_det(y)).exp().mean().log()) for y in points]

    def found(draws: int, seed: int = 0) -> np.ndarray:
        score(run, ["cells.parquet"], out="s.csv", draws=draws, seed=seed)
        return np.array(scores(Path("s.csv"))["log_density"])

    many = found(4096)
    np.testing.assert_allclose(many, truth, atol=0.15)
    assert abs(np.mean(many - truth)) < 0.03
    assert np.mean([found(1, seed) for seed in range(20)]) < np.mean(truth)


@pytest.mark.parametrize("out", ["s.csv", "s.parquet"])
def test_an_error_on_the_way_leaves_what_was_there(plain_run: Run, in_tmp: Path, refusal: Refusal, out: str) -> None:
    lines = ["a,b,c,d", *["1,2,100000,4"] * 3, "1,2,x,4"]
    (in_tmp / "t.csv").write_text("\n".join(lines) + "\n")
    write_table(in_tmp / "good.csv", continuous_table(9))
    (in_tmp / out).write_bytes(b"before")
    assert "expected numbers in column 'c'" in refusal(score, plain_run, ["good.csv", "t.csv"], out=out)
    assert (in_tmp / out).read_bytes() == b"before"
    assert sorted(file.name for file in in_tmp.iterdir()) == sorted(["t.csv", "good.csv", out])


def test_a_run_that_may_only_be_read(plain_run: Run, in_tmp: Path, capfd: Any, monkeypatch: Any) -> None:
    run = copied(plain_run, in_tmp)
    (run.path / "training-scores.npy").unlink(missing_ok=True)

    def refused(path: Path) -> Path:
        raise module.NicestError(f"cannot write {path}: Permission denied")

    real = module.replacing
    monkeypatch.setattr(module, "replacing", lambda path: refused(path) if path.parent == run.path else real(path))
    write_table(in_tmp / "t.csv", continuous_table(5))
    assert score(run, ["t.csv"], out="s.csv").rows == 5
    assert "the training scores are not kept: cannot write" in capfd.readouterr().err
    assert None not in scores(in_tmp / "s.csv")["outlier_score"]


def test_without_the_data_of_training_there_are_no_outlier_scores(plain_run: Run, in_tmp: Path, capfd: Any) -> None:
    run = trained(in_tmp, continuous_table(60))
    (in_tmp / "table.parquet").unlink()
    write_table(in_tmp / "t.csv", continuous_table(5))
    score(run, ["t.csv"], out="s.parquet")
    assert scores(in_tmp / "s.parquet")["outlier_score"] == [None] * 5
    assert "no outlier scores: found no " in capfd.readouterr().err


def test_kept_training_scores(plain_run: Run, mixed_run: Run, in_tmp: Path) -> None:
    run = copied(mixed_run, in_tmp)
    write_table(in_tmp / "t.csv", mixed_table(9))
    path = run.path / "training-scores.npy"
    path.unlink(missing_ok=True)
    score(run, ["t.csv"], out="a.csv")
    kept = path.read_bytes()
    assert np.load(io.BytesIO(kept)).shape == (2 + module.QUANTILES,)
    stamp = path.stat().st_mtime_ns
    score(run, ["t.csv"], out="b.csv")
    assert path.stat().st_mtime_ns == stamp
    flipped = [kept[:at] + bytes([kept[at] ^ 64]) + kept[at + 1 :] for at in range(len(kept) - 7, 200, -900)]
    for junk in (b"", kept[:99], b"junk" * 999, _npy(np.zeros(3)), _npy(np.zeros(2 + module.QUANTILES)), *flipped):
        path.write_bytes(junk)
        score(run, ["t.csv"], out="c.csv")
        assert path.read_bytes() == kept
    score(run, ["t.csv"], out="d.csv", draws=2)  # of other noise
    assert path.read_bytes() != kept
    assert (in_tmp / "a.csv").read_text() == (in_tmp / "b.csv").read_text() == (in_tmp / "c.csv").read_text()


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize("change", ["fewer", "other kinds", "damaged", "gone"])
def test_columns_that_are_not_of_the_model(plain_run: Run, in_tmp: Path, refusal: Refusal, change: str) -> None:
    run = copied(plain_run, in_tmp)
    rows = json.loads((run.path / "columns.json").read_text())
    other = [rows[0] | {"kind": "steps", "step": 1.0}, *rows[1:]]
    texts = {"fewer": json.dumps(rows[:3]), "other kinds": json.dumps(other), "damaged": "[{"}
    (run.path / "columns.json").write_text(texts[change]) if change in texts else (run.path / "columns.json").unlink()
    write_table(in_tmp / "t.csv", continuous_table(5))
    words = {"damaged": "columns.json cannot be read", "gone": "lacks its columns.json: train it on a table first"}
    assert words.get(change, "columns.json is not of this model") in refusal(score, run, ["t.csv"])


# ---- arrays and images


def test_arrays_of_an_array_model(rows_run: Run, correlated: np.ndarray, in_tmp: Path, refusal: Refusal) -> None:
    expected = rows_run.flow.log_prob(torch.from_numpy(correlated[:9])).detach().numpy()
    np.save("x.npy", correlated[:9])
    np.savez("x.npz", train=correlated[:6], test=correlated[6:9])
    for name in ("x.npy", "x.npz"):
        score(rows_run, [name], out="s.parquet")
        np.testing.assert_allclose(scores(in_tmp / "s.parquet")["log_density"], expected, rtol=1e-5, atol=1e-5)
    np.save("bad.npy", correlated[:9, :4])
    assert "expected shape (5,) of continuous numbers, as in training; got (4,)" in refusal(
        score, rows_run, ["bad.npy"]
    )
    np.savez("bad.npz", train=correlated[:6], test=correlated[6:9, :4])
    assert "bad.npz: expected arrays of one shape" in refusal(score, rows_run, ["bad.npz"])
    np.save("bad.npy", correlated[:9].round().clip(0, 9).astype(np.uint8))
    assert "got (5,) of 256 levels" in refusal(score, rows_run, ["bad.npy"])
    np.save("bad.npy", np.full((2, 5), np.nan, np.float32))
    assert "expected finite float32 values" in refusal(score, rows_run, ["bad.npy"])
    write_table(in_tmp / "t.csv", continuous_table(3))
    assert "t.csv is a table, and the model is not of one" in refusal(score, rows_run, ["t.csv"])
    Path("x.txt").write_text("no rows")
    assert "x.txt: expected .csv" in refusal(score, rows_run, ["x.txt"])


@pytest.mark.parametrize("out", ["s.csv", "s.parquet"])
def test_images_of_a_folder_are_named(colour_run: Run, colour_images: np.ndarray, in_tmp: Path, out: str) -> None:
    """Each by its path from the folder; an array of the images in the order of these names has the same scores."""
    names = ["b.png", "z/a, 1.png", "a/2.png", "a/10.png"]
    for name, image in zip(names, colour_images, strict=False):
        (in_tmp / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(in_tmp / "folder" / name)
    score(colour_run, ["folder"], out=out)
    got = scores(in_tmp / out)
    assert sorted(got["file"]) == sorted(names)
    np.save("x.npy", colour_images[[names.index(name) for name in got["file"]]])
    score(colour_run, ["x.npy"], out=f"array-{out}")
    assert got == {"file": got["file"], **scores(in_tmp / f"array-{out}")}
    assert len(set(got["log_density"])) == 4
    score(colour_run, ["folder", "x.npy"], out=out)
    assert scores(in_tmp / out)["file"] == [f"folder/{name}" for name in got["file"]] + ["x.npy"] * 4


def test_images_of_an_image_model(colour_run: Run, colour_images: np.ndarray, in_tmp: Path, refusal: Refusal) -> None:
    (in_tmp / "folder").mkdir()
    for i in range(3):
        Image.fromarray(colour_images[i]).save(in_tmp / "folder" / f"{i}.png")
    np.save("x.npy", colour_images[:3])
    score(colour_run, ["folder"], out="a.csv")
    score(colour_run, ["x.npy"], out="b.csv")
    assert scores(in_tmp / "a.csv") == {"file": ["0.png", "1.png", "2.png"], **scores(in_tmp / "b.csv")}
    result = score(colour_run, ["folder/1.png", "folder/0.png"], out="c.csv", draws=64)
    assert (result.rows, result.draws) == (2, 64)
    flow = colour_run.flow_in(torch.float64)
    planar = torch.from_numpy(colour_images[[1, 0]].transpose(0, 3, 1, 2).reshape(2, -1).copy())
    expected = torch.stack([flow.log_prob(planar) for _ in range(64)]).mean(0).detach().numpy()
    np.testing.assert_allclose(scores(in_tmp / "c.csv")["log_density"], expected, rtol=0.02)
    Image.fromarray(colour_images[0][:, :5]).save("small.png")
    assert "expected shape (3, 4, 6) of 256 levels, as in training; got (3, 4, 5)" in refusal(
        score, colour_run, ["small.png"]
    )
    Path("broken.png").write_bytes(b"no image")
    assert "broken.png" in refusal(score, colour_run, ["broken.png"])


def test_levels_beyond_those_of_training(digits_run: Run, in_tmp: Path, refusal: Refusal) -> None:
    rows = load("digits").test.reshape(-1, 8, 8)
    np.save("x.npy", rows[:5])
    assert score(digits_run, ["x.npy"]).rows == 5
    np.save("x.npy", np.full((2, 8, 8), 17, np.uint8))
    assert "expected levels 0..16, got 17" in refusal(score, digits_run, ["x.npy"])


# ---- the same noise whoever scores a row


def test_noise_does_not_depend_on_how_many_rows_come_at_once(
    mixed_run: Run, in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU; the graphs of a GPU draw for whole batches, whose size is a constant."""
    write_table(in_tmp / "t.csv", mixed_table(300))
    score(mixed_run, ["t.csv"], out="a.parquet")
    for batch, engine in ((7, 2000), (50_000, 13), (64, 5)):
        monkeypatch.setattr("nicest.data.tables.BATCH", batch)
        monkeypatch.setattr("nicest.inference.engine.BATCH", engine)
        score(nicest.open(mixed_run.path), ["t.csv"], out="b.parquet")
        one, other = (scores(in_tmp / name)["log_density"] for name in ("a.parquet", "b.parquet"))
        np.testing.assert_allclose(one, other, atol=1e-4)
    score(mixed_run, ["t.csv"], out="c.parquet", seed=1)
    assert np.abs(np.subtract(one, scores(in_tmp / "c.parquet")["log_density"])).max() > 1e-2


def test_more_draws_come_nearer_to_one_another(mixed_run: Run, in_tmp: Path) -> None:
    write_table(in_tmp / "t.csv", mixed_table(100))
    found = []
    for draws in (1, 100):
        for seed in (0, 1):
            score(mixed_run, ["t.csv"], out="s.parquet", draws=draws, seed=seed)
            found.append(np.array(scores(in_tmp / "s.parquet")["log_density"]))
    assert np.abs(found[2] - found[3]).mean() < np.abs(found[0] - found[1]).mean() / 4


def joined(folder: Path, out: str, size: int) -> tuple[list[str], list[int]]:
    """The lines of all parts in order, under one header, and the rows in each."""
    path = Path(out)
    parts = [folder / f"{path.stem}-{rank:05d}-of-{size:05d}{path.suffix}" for rank in range(size)]
    each = [part.read_text().splitlines() for part in parts]
    assert len({lines[0] for lines in each}) == 1
    return [each[0][0], *(line for lines in each for line in lines[1:])], [len(lines) - 1 for lines in each]


def test_parts_of_several_processes_are_the_whole(mixed_run: Run, in_tmp: Path) -> None:
    """Real processes; with discrete columns, so noise, and a run folder that has no training scores yet."""
    parquet.write_table(mixed_table(130), in_tmp / "a.parquet", row_group_size=30)
    write_table(in_tmp / "b.csv", mixed_table(41))
    write_table(in_tmp / "c.feather", mixed_table(11))
    files = ["a.parquet", "b.csv", "c.feather"]
    score(mixed_run, files, out="whole.csv")
    run = copied(mixed_run, in_tmp)
    (run.path / "training-scores.npy").unlink()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "nicest", "score", run.path, *files, "--out", "s.csv", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines, rows = joined(in_tmp, "s.csv", 2)
    assert lines == (in_tmp / "whole.csv").read_text().splitlines()
    assert sum(rows) == 182
    assert min(rows) > 0
    assert (run.path / "training-scores.npy").read_bytes() == (mixed_run.path / "training-scores.npy").read_bytes()


def test_shares_are_all_parts_once(mixed_run: Run, in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More processes than parts: some write a file of no rows, which can be read."""
    parquet.write_table(mixed_table(50), in_tmp / "a.parquet", row_group_size=30)
    for out in ("s.csv", "s.parquet"):
        score(mixed_run, ["a.parquet"], out=out)
        whole, size, rows = scores(in_tmp / out), 5, []
        for rank in range(size):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(size))
            result = score(mixed_run, ["a.parquet"], out=out)
            assert result.out == f"s-{rank:05d}-of-00005{Path(out).suffix}"
            part = scores(in_tmp / result.out)
            rows += list(zip(*part.values(), strict=True))
            assert list(part) == ["row", "log_density", "outlier_score"]
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        assert score(mixed_run, ["a.parquet"], out=out).out == out
        monkeypatch.delenv("RANK")
        monkeypatch.delenv("WORLD_SIZE")
        assert rows == list(zip(*whole.values(), strict=True))
    for parts in range(12):
        every = [module.Part(0, Path("x"), None, i, 0) for i in range(parts)]
        for size in (1, 2, 3, 7, 20):
            assert [each for rank in range(size) for each in module.share(every, rank, size)] == every


def test_a_table_is_opened_once(plain_run: Path, in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its footer grows with its row groups: reading it for each would take time with their square."""
    parquet.write_table(continuous_table(60), in_tmp / "t.parquet", row_group_size=2)
    score(plain_run, ["t.parquet"], out="first.csv")  # for which the run may open the table that it was trained on
    tables, footers, init, open_file = [], [], TableFile.__init__, parquet.ParquetFile

    def counted(path: Path, *given: Any, metadata: Any = None, **options: Any) -> Any:
        footers.extend([path] if metadata is None else [])
        return open_file(path, *given, metadata=metadata, **options)

    monkeypatch.setattr(TableFile, "__init__", lambda self, path: tables.append(path) or init(self, path))
    monkeypatch.setattr(parquet, "ParquetFile", counted)
    assert score(plain_run, ["t.parquet"], out="s.csv").rows == 60
    assert tables == [Path("t.parquet")]
    assert footers == [Path("t.parquet")]


def test_scores_of_arrays_need_no_pyarrow(
    rows_run: Path, correlated: np.ndarray, in_tmp: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    np.save("x.npy", correlated[:3])
    score(rows_run, ["x.npy"], out="before.csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    score(rows_run, ["x.npy"], out="s.csv")
    assert (in_tmp / "s.csv").read_text() == (in_tmp / "before.csv").read_text()
    assert "pip install 'nicest[tables]'" in refusal(score, rows_run, ["x.npy"], out="s.parquet")


# ---- the command


def test_the_command(plain_run: Run, in_tmp: Path) -> None:
    write_table(in_tmp / "t.csv", continuous_table(5).set_column(0, "a", pa.array([1.5, None, 2.5, 3.5, math.inf])))
    words = ["score", str(plain_run.path), "t.csv", "--out", "s.csv", "--device", "cpu", "--json"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert (done.exit_code, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert {key: result[key] for key in ("out", "rows", "missing", "unknown", "draws", "seed", "caveat")} == {
        "out": "s.csv",
        "rows": 5,
        "missing": 1,
        "unknown": 1,
        "draws": 1,
        "seed": 0,
        "caveat": CAVEAT,
    }
    assert result["dataset"] == str(plain_run.path.parent / "table.parquet")
    assert isinstance(result["mean_nats"], float)


def test_the_bar_says_how_many_rows_are_done(plain_run: Run, in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    monkeypatch.setattr(module.Bar, "update", lambda self, done, text=None: said.append((done, text)))
    parquet.write_table(continuous_table(300), in_tmp / "t.parquet", row_group_size=100)
    score(plain_run, ["t.parquet"])
    assert said == [(0, "100 rows"), (1, None), (1, "200 rows"), (2, None), (2, "300 rows"), (3, None)]


# ---- a table larger than memory is streamed

MEASURE = """
import sys
import nicest
from nicest.tasks.score import score
run = nicest.open(sys.argv[1])
for path in sys.argv[2:]:
    score(run, [path], out=f"{path}.scores.parquet")
    print(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_a_table_larger_than_memory_is_streamed(tmp_path: Path) -> None:
    """Peak resident memory of a process: eight times the rows need no more."""
    rng, names = np.random.default_rng(0), [f"c{i}" for i in range(10)]
    block = pa.table(list(rng.normal(size=(50_000, 10)).T), names=names)
    write_table(tmp_path / "train.parquet", block.slice(0, 300))
    small = ("model.law=additive", "model.width=2", "model.couplings=3", "model.hidden_layers=1", "train.epochs=1")
    own = (f'data.name="{tmp_path / "train.parquet"}"', *small)
    train(load_recipe("table"), tmp_path / "run", overrides=own, device="cpu")
    paths, blocks = [tmp_path / "few.parquet", tmp_path / "many.parquet"], (1, 8)
    for path, count in zip(paths, blocks, strict=True):
        with parquet.ParquetWriter(path, block.schema, compression="none") as writer:
            for _ in range(count):
                writer.write_table(block, row_group_size=25_000)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "run"), *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    few, many = (1024 * int(line) for line in done.stdout.split())
    assert parquet.ParquetFile(f"{paths[1]}.scores.parquet").metadata.num_rows == 400_000
    assert many - few < 400_000 * 10 * 8 / 3


# ---- other tasks with a table


def test_evaluate_certify_and_sample(mixed_run: Run, in_tmp: Path) -> None:
    result = evaluate(mixed_run, draws=2)
    assert sum(result.terms.values()) == pytest.approx(result.mean_nats)
    assert result.level_nats == pytest.approx(result.mean_nats, abs=1e-4)
    assert result.terms["columns"] == 0
    assert result.non_finite == 0
    assert all(math.isfinite(each) for each in result.baselines.values()), result.baselines
    run = copied(mixed_run, in_tmp)
    certificate = certify(run, n=20, jacobians=2)
    assert certificate.max_roundtrip[0] < 1e-8
    assert certificate.max_logdet_error[0] < 1e-8
    table = mixed_table()
    for name in ("s.parquet", "s.csv", "s.feather"):
        sample(mixed_run, 200, out=name)
        assert sum(batch.num_rows for batch in TableFile(in_tmp / name).batches(["x"])) == 200
    drawn = parquet.read_table("s.parquet")
    assert drawn.schema.types == table.schema.types
    assert set(drawn["kind"].to_pylist()) <= {"red", "green", "blue"}
    assert set(drawn["same"].to_pylist()) == {"one"}
    assert set(np.array(drawn["count"]) % 5) == {0}
    assert [column.name for column in scan(in_tmp / "s.csv", ["day"])] == ["x", "count", "kind", "is", "same"]
    assert score(mixed_run, ["s.parquet"]).unknown == 0
