"""score: log-densities and outlier scores of tables, arrays and images, by one process and by several."""

import io
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import csv, parquet

import nicest
from nicest import Run
from nicest.data import load
from nicest.data.tables import write_table
from nicest.recipes import load_recipe
from nicest.tasks import score as module
from nicest.tasks.score import CAVEAT, score
from nicest.train.fit import train

Refusal = Callable[..., str]
SMALL = ("table.width=32", "table.depth=1", "table.components=3", "train.epochs=5", "train.batch=50", "train.lr=0.01")
N = 500


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


def trained(folder: Path, table: pa.Table) -> Run:
    """A run in a folder, beside its data."""
    parquet.write_table(table, folder / "table.parquet", row_group_size=90)
    own = (f'data.name="{folder / "table.parquet"}"', *SMALL)
    train(replace(load_recipe("table"), sized=False), folder / "run", overrides=own, device="cpu")
    return nicest.open(folder / "run")


def copied(run: Run, folder: Path) -> Run:
    shutil.copy(run.recipe.data.name, folder)  # beside it, as it was
    return nicest.open(shutil.copytree(run.path, folder / "run"), data=str(folder / "table.parquet"))


@pytest.fixture(scope="session")
def mixed_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A table of columns of every kind."""
    return trained(tmp_path_factory.mktemp("mixed"), mixed_table())


def scores(path: Path) -> dict[str, list]:
    """A file of scores, however written."""
    table = csv.read_csv(path) if path.suffix == ".csv" else parquet.read_table(path)
    return table.to_pydict()


# ---- tables


def test_rows_have_the_density_of_the_model(mixed_run: Run, here: Path):
    table = mixed_table()
    result = score(mixed_run, [mixed_run.path.parent / "table.parquet"], out="s.parquet")
    expected = mixed_run.flow.log_prob(torch.from_numpy(mixed_run.schema.encode(table))).detach().numpy()
    got = scores(here / "s.parquet")
    assert list(got) == ["row", "log_density", "outlier_score"]
    assert got["row"] == list(range(N))
    np.testing.assert_allclose(got["log_density"], expected, atol=1e-4)
    assert result.mean_nats == pytest.approx(expected.mean(), abs=1e-4)
    assert (result.rows, result.missing, result.unknown, result.draws) == (N, 0, 0, 1)
    assert result.caveat == CAVEAT


def test_the_outlier_score_is_the_fraction_of_training_rows_that_are_denser(mixed_run: Run, here: Path):
    train = mixed_run.splits.train
    nats = mixed_run.table.score(train)
    score(mixed_run, [mixed_run.path.parent / "table.parquet"], out="s.parquet")
    got = scores(here / "s.parquet")
    share = [(nats > each).mean() for each in got["log_density"]]
    np.testing.assert_allclose(got["outlier_score"], share, atol=2 / len(nats))
    odd = mixed_table(2).set_column(0, "x", pa.array([50.0, 0.5]))
    write_table(here / "odd.parquet", odd)
    score(mixed_run, ["odd.parquet"], out="s.parquet")
    assert scores(here / "s.parquet")["outlier_score"][0] > 0.99


def test_missing_cells_and_unknown_values(mixed_run: Run, here: Path):
    table = mixed_table(6)
    table = table.set_column(0, "x", pa.array([None, 1.0, 1e300, None, 0.0, 0.0]))
    table = table.set_column(2, "kind", pa.array(["red", "pink", "red", None, "red", "red"]))
    table = table.set_column(1, "count", pa.array([0, 0, 0, 0, 0.5, 0]))
    write_table(here / "t.parquet", table)
    result = score(mixed_run, ["t.parquet"], out="s.parquet")
    got = scores(here / "s.parquet")
    assert (result.rows, result.missing) == (6, 2)
    assert np.isneginf(got["log_density"]).tolist() == [False, True, True, False, True, False]
    assert result.unknown == 3
    rows = mixed_run.schema.encode(table)
    known = [0, 3, 5]
    expected = mixed_run.flow.log_prob(torch.from_numpy(rows[known])).detach().numpy()
    np.testing.assert_allclose(np.array(got["log_density"])[known], expected, atol=1e-4)
    assert all(0 <= got["outlier_score"][k] <= 1 for k in range(6))


def test_rows_with_missing_cells_compare_with_complete_ones(mixed_run: Run, here: Path):
    """Hiding a typical cell changes the outlier score little, on the mean over rows."""
    table = mixed_table(200)
    write_table(here / "whole.parquet", table)
    write_table(here / "holes.parquet", table.set_column(0, "x", pa.nulls(200, pa.float64())))
    means = []
    for name in ("whole", "holes"):
        score(mixed_run, [f"{name}.parquet"], out="s.parquet")
        means.append(np.mean(scores(here / "s.parquet")["outlier_score"]))
    assert means[0] == pytest.approx(means[1], abs=0.05)


def test_the_most_surprising_cell_is_named(mixed_run: Run, here: Path):
    table = mixed_table(3).set_column(0, "x", pa.array([40.0, 1.0, None]))
    table = table.set_column(2, "kind", pa.array(["red", "pink", "red"]))
    write_table(here / "t.parquet", table)
    score(mixed_run, ["t.parquet"], out="s.parquet", cells=True)
    got = scores(here / "s.parquet")
    assert got["cell"][:2] == ["x", "kind"]
    surprise = -mixed_run.table.surprise(mixed_run.schema.encode(table, unseen="missing"))
    assert got["cell_surprise"][0] == pytest.approx(surprise[0, 0], rel=1e-5)
    assert got["cell_surprise"][1] == math.inf
    assert got["cell_surprise"][2] == pytest.approx(np.nanmax(surprise[2]), rel=1e-5)
    assert got["cell"][2] != "x"


def test_several_files_in_any_order_of_columns(mixed_run: Run, here: Path, capfd: pytest.CaptureFixture[str]):
    table = mixed_table(9)
    write_table(here / "a.csv", table)
    write_table(here / "b.feather", table.select(table.column_names[::-1]).append_column("more", pa.array([1] * 9)))
    result = score(mixed_run, ["a.csv", "b.feather"], out="s.csv")
    got = scores(here / "s.csv")
    assert got["file"] == ["a.csv"] * 9 + ["b.feather"] * 9
    assert got["row"] == [*range(9), *range(9)]
    assert got["log_density"][:9] == got["log_density"][9:]
    assert result.rows == 18
    assert "ignoring 'more'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("files", "options", "says"),
    [
        (["gone.csv"], {}, "found no gone.csv"),
        (["fewer.csv"], {}, "lacks 'day'"),
        (["cut.parquet"], {}, "cut.parquet: expected a whole"),
        (["words.csv"], {}, "expected numbers in column 'x'"),
        (["t.csv"], {"out": "s.txt"}, "ends in .csv or .parquet"),
        (["t.csv"], {"out": "t.csv"}, "t.csv"),
        (["x.npy"], {}, "expected rows of 6 numbers"),
        (["x.png"], {}, "the model is of a table"),
    ],
)
def test_refusals_leave_nothing_behind(
    mixed_run: Run, here: Path, refusal: Refusal, files: Any, options: Any, says: str
):
    table = mixed_table(5)
    for name, each in {
        "t.csv": table,
        "cut.parquet": table,
        "fewer.csv": table.drop_columns("day"),
        "words.csv": table.set_column(0, "x", pa.array(["much"] * 5)),
    }.items():
        write_table(here / name, each)
    (here / "cut.parquet").write_bytes((here / "cut.parquet").read_bytes()[:-20])
    np.save("x.npy", np.zeros((2, 3)))
    Image.new("L", (2, 2)).save("x.png")
    before = {path: path.read_bytes() for path in here.iterdir()}
    assert says in refusal(score, mixed_run, files, **options)
    assert {path: path.read_bytes() for path in here.iterdir()} == before


def test_without_the_data_of_training_there_are_no_outlier_scores(mixed_run: Run, here: Path, capfd: Any):
    run = nicest.open(shutil.copytree(mixed_run.path, here / "run"), data=str(here / "gone.parquet"))
    (run.path / "training-scores.npy").unlink(missing_ok=True)
    write_table(here / "t.csv", mixed_table(5))
    score(run, ["t.csv"], out="s.parquet")
    assert scores(here / "s.parquet")["outlier_score"] == [None] * 5
    assert "no outlier scores: " in capfd.readouterr().err


def test_kept_training_scores(mixed_run: Run, here: Path):
    run = copied(mixed_run, here)
    write_table(here / "t.csv", mixed_table(9))
    path = run.path / "training-scores.npy"
    path.unlink(missing_ok=True)
    score(run, ["t.csv"], out="a.csv")
    kept = path.read_bytes()
    assert np.load(io.BytesIO(kept)).shape == (2 + module.QUANTILES,)
    stamp = path.stat().st_mtime_ns
    score(run, ["t.csv"], out="b.csv")
    assert path.stat().st_mtime_ns == stamp
    flipped = [kept[:at] + bytes([kept[at] ^ 64]) + kept[at + 1 :] for at in range(len(kept) - 7, 200, -1900)]
    for junk in (b"", kept[:99], b"junk" * 999, *flipped):
        path.write_bytes(junk)
        score(run, ["t.csv"], out="c.csv")
        assert path.read_bytes() == kept
    assert (here / "a.csv").read_text() == (here / "b.csv").read_text() == (here / "c.csv").read_text()


# ---- arrays and images


def test_arrays_of_an_array_model(rows_run: Run, correlated: np.ndarray, here: Path, refusal: Refusal) -> None:
    expected = rows_run.flow.log_prob(torch.from_numpy(correlated[:9])).detach().numpy()
    np.save("x.npy", correlated[:9])
    np.savez("x.npz", train=correlated[:6], test=correlated[6:9])
    for name in ("x.npy", "x.npz"):
        score(rows_run, [name], out="s.parquet")
        np.testing.assert_allclose(scores(here / "s.parquet")["log_density"], expected, rtol=1e-5, atol=1e-5)
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
    write_table(here / "t.csv", mixed_table(3))
    assert "t.csv is a table, but" in refusal(score, rows_run, ["t.csv"])
    Path("x.txt").write_text("no rows")
    assert "x.txt: expected .csv" in refusal(score, rows_run, ["x.txt"])


@pytest.mark.parametrize("out", ["s.csv", "s.parquet"])
def test_images_of_a_folder_are_named(colour_run: Run, colour_images: np.ndarray, here: Path, out: str) -> None:
    """Each by its path from the folder; an array of the images in the order of these names has the same scores."""
    names = ["b.png", "z/a, 1.png", "a/2.png", "a/10.png"]
    for name, image in zip(names, colour_images, strict=False):
        (here / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(here / "folder" / name)
    score(colour_run, ["folder"], out=out)
    got = scores(here / out)
    assert sorted(got["file"]) == sorted(names)
    np.save("x.npy", colour_images[[names.index(name) for name in got["file"]]])
    score(colour_run, ["x.npy"], out=f"array-{out}")
    assert got == {"file": got["file"], **scores(here / f"array-{out}")}
    assert len(set(got["log_density"])) == 4
    score(colour_run, ["folder", "x.npy"], out=out)
    assert scores(here / out)["file"] == [f"folder/{name}" for name in got["file"]] + ["x.npy"] * 4


def test_images_of_an_image_model(colour_run: Run, colour_images: np.ndarray, here: Path, refusal: Refusal) -> None:
    (here / "folder").mkdir()
    for i in range(3):
        Image.fromarray(colour_images[i]).save(here / "folder" / f"{i}.png")
    np.save("x.npy", colour_images[:3])
    score(colour_run, ["folder"], out="a.csv")
    score(colour_run, ["x.npy"], out="b.csv")
    assert scores(here / "a.csv") == {"file": ["0.png", "1.png", "2.png"], **scores(here / "b.csv")}
    result = score(colour_run, ["folder/1.png", "folder/0.png"], out="c.csv", draws=64)
    assert (result.rows, result.draws) == (2, 64)
    flow = colour_run.flow_in(torch.float64)
    planar = torch.from_numpy(colour_images[[1, 0]].transpose(0, 3, 1, 2).reshape(2, -1).copy())
    expected = torch.stack([flow.log_prob(planar) for _ in range(64)]).mean(0).detach().numpy()
    np.testing.assert_allclose(scores(here / "c.csv")["log_density"], expected, rtol=0.02)
    Image.fromarray(colour_images[0][:, :5]).save("small.png")
    assert "expected shape (3, 4, 6) of 256 levels, as in training; got (3, 4, 5)" in refusal(
        score, colour_run, ["small.png"]
    )
    Path("broken.png").write_bytes(b"no image")
    assert "broken.png" in refusal(score, colour_run, ["broken.png"])


def test_levels_beyond_those_of_training(digits_run: Run, here: Path, refusal: Refusal) -> None:
    rows = load("digits").test.reshape(-1, 8, 8)
    np.save("x.npy", rows[:5])
    assert score(digits_run, ["x.npy"]).rows == 5
    np.save("x.npy", np.full((2, 8, 8), 17, np.uint8))
    assert "expected levels 0..16, got 17" in refusal(score, digits_run, ["x.npy"])


# ---- several processes, and files of any size


def joined(folder: Path, out: str, size: int) -> tuple[list[str], list[int]]:
    """The lines of all parts in order, under one header, and the rows in each."""
    path = Path(out)
    parts = [folder / f"{path.stem}-{rank:05d}-of-{size:05d}{path.suffix}" for rank in range(size)]
    each = [part.read_text().splitlines() for part in parts]
    assert len({lines[0] for lines in each}) == 1
    return [each[0][0], *(line for lines in each for line in lines[1:])], [len(lines) - 1 for lines in each]


def test_parts_of_several_processes_are_the_whole(mixed_run: Run, here: Path):
    """Real processes, and a run folder that has no training scores yet."""
    parquet.write_table(mixed_table(130), here / "a.parquet", row_group_size=30)
    write_table(here / "b.csv", mixed_table(41))
    write_table(here / "c.feather", mixed_table(11))
    files = ["a.parquet", "b.csv", "c.feather"]
    score(mixed_run, files, out="whole.csv")
    run = copied(mixed_run, here)
    (run.path / "training-scores.npy").unlink()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    asked = ["-m", "nicest", "score", run.path, *files, "--out", "s.csv", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, *torchrun, *asked],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines, rows = joined(here, "s.csv", 2)
    assert lines == (here / "whole.csv").read_text().splitlines()
    assert sum(rows) == 182
    assert min(rows) > 0


def test_more_processes_than_parts(mixed_run: Run, here: Path, monkeypatch: pytest.MonkeyPatch):
    """Some write a file of no rows, which can be read."""
    parquet.write_table(mixed_table(50), here / "a.parquet", row_group_size=30)
    score(mixed_run, ["a.parquet"], out="s.csv")
    for rank in range(5):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "5")
        score(mixed_run, ["a.parquet"], out="s.csv")
    lines, rows = joined(here, "s.csv", 5)
    assert lines == (here / "s.csv").read_text().splitlines()
    assert sorted(rows) == [0, 0, 0, 20, 30]


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
    block = pa.table(list(np.random.default_rng(0).normal(size=(20_000, 4)).T), names=[f"c{i}" for i in range(4)])
    write_table(tmp_path / "train.parquet", block.slice(0, 300))
    tiny = ("table.width=2", "table.depth=0", "table.components=1", "table.orders=1", "train.epochs=1")
    own = (f'data.name="{tmp_path / "train.parquet"}"', *tiny)
    train(replace(load_recipe("table"), sized=False), tmp_path / "run", overrides=own, device="cpu")
    paths, blocks = [tmp_path / "few.parquet", tmp_path / "many.parquet"], (1, 8)
    for path, count in zip(paths, blocks, strict=True):
        with parquet.ParquetWriter(path, block.schema, compression="none") as writer:
            for _ in range(count):
                writer.write_table(block, row_group_size=10_000)
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
    assert parquet.ParquetFile(f"{paths[1]}.scores.parquet").metadata.num_rows == 160_000
    assert many - few < 160_000 * 4 * 8
