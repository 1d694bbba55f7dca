"""The comparisons in general: tables from files, jobs in processes, results that survive an interruption, rankings."""

import gzip
import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from benchmarks import compare as module
from benchmarks.compare import Comparison, compare, markdown, standings, summary
from benchmarks.datasets import AS_STORED, Table, read_mixed, read_numbers, tables_in
from benchmarks.report import Report

ROOT = Path(__file__).parents[2]
ROWS = np.random.default_rng(0).normal(size=(60, 3))


@pytest.fixture(autouse=True, scope="module")
def _light_workers() -> Iterator[None]:
    """Do not preload the modules of the real methods in workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PRELOADED", ("benchmarks.compare",))
        yield


def text(rows: np.ndarray) -> str:
    return "\n".join(["a,b,c", *(",".join(map(repr, row)) for row in rows.tolist())]) + "\n"


def test_tables_have_their_columns_of_numbers_and_complete_rows(tmp_path: Path, refusal: Callable[..., str]):
    lines = [f"{a!r},red,,5,{b!r}" for a, b, _ in ROWS.tolist()]
    lines[3], lines[7] = "NA,blue,,5,1.5", "0.5,blue,,5,"
    (tmp_path / "one.csv.gz").write_bytes(gzip.compress("\n".join(["a,colour,empty,five,b", *lines]).encode()))
    np.savez(tmp_path / "two.npz", X=np.where(np.arange(60)[:, None] == 3, np.nan, ROWS), y=np.arange(60))
    assert tables_in(tmp_path) == {"one": tmp_path / "one.csv.gz", "two": tmp_path / "two.npz"}
    one, two = map(read_numbers, tables_in(tmp_path).values())
    assert (one.names, one.left_out) == (("a", "b"), ("colour", "empty", "five"))
    assert np.array_equal(one.rows, np.delete(ROWS[:, :2], [3, 7], axis=0))
    assert np.array_equal(two.rows, np.delete(ROWS, 3, axis=0))
    assert np.array_equal(two.labels, np.delete(np.arange(60), 3))
    (tmp_path / "few.csv").write_text(text(ROWS[:9]))
    mixed = read_mixed(tmp_path / "one.csv.gz")
    assert (mixed.names, {i: each.values for i, each in mixed.texts.items()}) == (
        ("a", "colour", "b"),
        {1: ("blue", "red")},
    )
    assert set(mixed.frame(mixed.rows)["colour"].to_pylist()) == {"red"}
    assert np.array_equal(mixed.numbers(mixed.frame(mixed.rows)), mixed.rows)
    few = refusal(read_numbers, tmp_path / "few.csv")
    assert f"{tmp_path / 'few.csv'}: expected at least 20 complete rows of numbers, got 9" in few
    assert "expected a folder of tables, found no" in refusal(tables_in, tmp_path / "nowhere")


# The methods of the comparison in these tests. Workers import this module to find them.


def first_cell(table: Table, seed: int) -> float:
    return float(table.rows[0, 0]) + seed


def fails(table: Table, seed: int) -> float:
    raise ValueError("a reason\nof two lines")


def crashes(table: Table, seed: int) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def diverges(table: Table, seed: int) -> float:
    return float("nan")


def trial(method: Callable[[Table, int], float], table: Table, seed: int) -> Mapping[str, dict[str, float]]:
    return {"": {"cell": method(table, seed)}}


def toy(*methods: Callable[[Table, int], float]) -> Comparison:
    named = {method.__name__: method for method in methods}
    return Comparison("toy", "The first cell", {"cell": 3, "seconds": 1}, True, AS_STORED, named, trial)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for name, shift in (("one", 0), ("two", 10)):
        (tmp_path / "data" / f"{name}.csv").write_text(text(ROWS + shift))
    return tmp_path / "data"


def test_a_failed_job_is_recorded_and_the_others_run(folder: Path):
    (folder / "bad.csv").write_text("a,b\n1,2\n")
    result = compare(toy(first_cell, fails, crashes, diverges), data=folder, seeds=1, jobs=2)
    reasons = {(each["table"], each["method"]): each.get("failed", "") for each in result["trials"]}
    assert all("expected rows, at least 3" in why for (table, _), why in reasons.items() if table == "bad")
    assert reasons["two", "first_cell"] == ""
    assert reasons["two", "fails"] == "ValueError: a reason of two lines"
    assert "killed by signal 9" in reasons["two", "crashes"]
    assert reasons["two", "diverges"] == "its cell is nan"
    assert Report(found=result).exit_code == 1
    lines = markdown(result).splitlines()
    assert "| bad | failed | – |" in lines
    assert "Failed on one: its cell is nan (diverges, seed 0)" in lines


def test_a_second_run_keeps_the_results_and_runs_the_rest(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "r.json"
    first = compare(toy(first_cell, fails), data=folder, seeds=1, out=out)
    (folder / "two.csv").write_text(text(ROWS + 20))
    second = compare(toy(first_cell, fails), data=folder, seeds=2, jobs=2, out=out)
    assert "already holds 1 of 8 results" in capsys.readouterr().err  # neither failures nor the table that changed
    assert second["trials"][0] == first["trials"][0]
    cells = [(each["table"], each["seed"], each["cell"]) for each in second["trials"] if "cell" in each]
    assert cells == [(n, s, ROWS[0, 0] + shift + s) for n, shift in (("one", 0), ("two", 20)) for s in (0, 1)]
    assert json.loads(out.read_text())["trials"] == second["trials"]


def test_an_interrupted_run_keeps_its_results(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run_jobs = module.run_jobs

    def interrupted(*arguments: object) -> Iterator[object]:
        yield next(run_jobs(*arguments))  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_jobs", interrupted)
    result = compare(toy(first_cell), data=folder, seeds=1, jobs=1, out=tmp_path / "r.json")
    assert result["unfinished"].startswith(f"stopped after 1 of 2 results, kept in {tmp_path / 'r.json'}")
    assert Report(found=result).exit_code == 130
    assert len(json.loads((tmp_path / "r.json").read_text())["trials"]) == 1


def test_other_files_and_unknown_names_are_refused(folder: Path, tmp_path: Path, refusal: Callable[..., str]):
    out = tmp_path / "r.json"
    out.write_text('{"comparison": "density", "trials": [], "digests": {}}')
    assert "choose another file" in refusal(compare, toy(first_cell), data=folder, out=out)
    no_table = refusal(compare, toy(first_cell), data=folder, tables=["onee"])
    assert "no table 'onee'; there are one, two (did you mean 'one'?)" in no_table
    without = toy(first_cell, fails)._replace(needs={"fails": "no_such_package"})
    expected = "cannot run fails: it needs no_such_package: pip install no_such_package"
    assert refusal(compare, without, data=folder, methods=["fails"]) == expected


def test_means_ranks_wins_and_gaps_are_those_of_the_trials():
    cells = {
        ("x", "A"): [1.0, 3.0],  # 2
        ("x", "B"): [2.004, 2.0],  # 2.002, printed like A: a tie
        ("x", "C"): [1.0, 1.0],
        ("y", "A"): [5.0, 5.0],
        ("y", "B"): [9.0, 9.0],
    }
    trials = [
        {"table": table, "seed": seed, "method": method, "n": 9, "dim": 2, "cell": value, "seconds": 1.0}
        for (table, method), values in cells.items()
        for seed, value in enumerate(values)
    ]
    trials.append({"table": "y", "seed": 0, "method": "C", "failed": "why"})
    found = summary(trials, {"cell": 2, "seconds": 1}, True)
    assert [row["sd"] for row in found["rows"]] == pytest.approx([2**0.5, 0.002 * 2**0.5, 0, 0, 0], abs=1e-12)
    expected = {"A": (1.75, 1, 4.0, "y", 2.0), "B": (1.25, 2, 0.0, "x", 2.0), "C": (3.0, 0, 1.0, "x", 1.0)}
    keys = ("mean_rank", "wins", "worst_gap", "worst_table", "mean")
    assert {each["method"]: tuple(each[key] for key in keys) for each in found["standings"]} == expected
    lowest = standings(found["rows"], "cell", 2, False)
    assert [(each["method"], each["wins"], each["mean"]) for each in lowest] == [("A", 1, 2), ("B", 0, 2), ("C", 1, 1)]
    about = {"unit": "u", "figures": {"cell": 2, "seconds": 1}, "highest_is_best": True, "trials": trials}
    lines = markdown(about | found).splitlines()
    assert "| x | 9 x 2 | **2.00** ± 1.41 | **2.00** ± 0.00 | 1.00 ± 0.00 |" in lines
    assert "| y | 9 x 2 | 5.00 ± 0.00 | **9.00** ± 0.00 | – |" in lines
    assert "| first places | 1 of 2 | 2 of 2 | 0 of 2 |" in lines
    assert lines[-1] == "Failed on y: why (C, seed 0)"


def test_the_page_shows_the_measurements_that_it_names():
    page = re.sub("<!--.*?-->", "", (ROOT / "docs" / "tables-measured.md").read_text(), flags=re.DOTALL)
    for file in (ROOT / "results").glob("tables-*.json"):
        if file.name in page:
            assert markdown(json.loads(file.read_text())).split("\n\n")[1] in page, file.name
