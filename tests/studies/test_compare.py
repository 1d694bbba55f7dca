"""What every comparison shares: tables from files, jobs in processes, results that outlive a kill, who is best."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from nicest.cli import app
from nicest.cli.base import outcome
from nicest.studies import compare as module
from nicest.studies.compare import Comparison, compare, markdown, standings, summary
from nicest.studies.datasets import AS_STORED, TABLES, Table, read_file, tables_in

ROOT = Path(__file__).parents[2]
ROWS = np.random.default_rng(0).normal(size=(60, 3))


@pytest.fixture(autouse=True, scope="module")
def _light_workers() -> Iterator[None]:
    """Workers start with what the comparison itself needs, not with what only real methods need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PRELOADED", ("nicest.studies.compare",))
        yield


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_continuous_and_come_from_their_seed(name: str):
    x, again = (TABLES[name](np.random.default_rng(3)).rows for _ in range(2))
    assert np.array_equal(x, again)
    assert np.isfinite(x).all()
    assert (x.std(0) > 0).all()


def test_digits_have_one_unit_and_their_levels_as_they_are():
    table = AS_STORED["digits"](np.random.default_rng(0))
    assert table.one_unit
    assert np.array_equal(table.rows, table.rows.round())


def text(rows: np.ndarray, names: str = "a,b,c") -> str:
    return "\n".join([names, *(",".join(map(repr, row)) for row in rows.tolist())]) + "\n"


class TestFiles:
    def write(self, path: Path) -> None:
        if path.suffix == ".csv":
            path.write_text(text(ROWS))
        elif path.suffix == ".gz":
            path.write_bytes(gzip.compress(text(ROWS).encode()))
        elif path.suffix == ".parquet":
            parquet.write_table(pa.table(dict(zip("abc", ROWS.T, strict=True))), path)
        elif path.suffix == ".npy":
            np.save(path, ROWS)
        else:
            np.savez(path, X=ROWS, y=np.arange(60) % 2)

    @pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet", ".npy", ".npz"])
    def test_every_format_gives_the_same_rows(self, tmp_path: Path, suffix: str):
        self.write(tmp_path / f"one{suffix}")
        assert tables_in(tmp_path) == {"one": tmp_path / f"one{suffix}"}
        table = read_file(tmp_path / f"one{suffix}")
        assert np.array_equal(table.rows, ROWS)
        assert table.left_out == ()
        assert (table.labels is not None) == (suffix == ".npz")

    def test_text_constants_and_incomplete_rows_are_left_out(self, tmp_path: Path):
        lines = [f"{a!r},red,,5,{b!r}" for a, b, _ in ROWS.tolist()]
        lines[3], lines[7] = "NA,blue,,5,1.5", "0.5,blue,,5,inf"
        (tmp_path / "t.csv").write_text("\n".join(["a,colour,empty,five,b", *lines]))
        table = read_file(tmp_path / "t.csv")
        assert table.names == ("a", "b")
        assert table.left_out == ("colour", "empty", "five")
        assert np.array_equal(table.rows, np.delete(ROWS[:, :2], [3, 7], axis=0))

    def test_labels_follow_their_rows(self, tmp_path: Path):
        rows, labels = ROWS.copy(), np.arange(60)
        rows[5, 0] = np.nan
        np.savez(tmp_path / "t.npz", X=rows, y=labels)
        assert np.array_equal(read_file(tmp_path / "t.npz").labels, np.delete(labels, 5))

    def test_integers_are_numbers_like_others(self, tmp_path: Path):
        np.savez(tmp_path / "t.npz", X=np.arange(120, dtype=np.int16).reshape(60, 2) - 3000)
        assert read_file(tmp_path / "t.npz").rows[0].tolist() == [-3000, -2999]

    def test_two_files_of_one_name_keep_their_endings(self, tmp_path: Path):
        for suffix in (".csv", ".npy"):
            self.write(tmp_path / f"one{suffix}")
        (tmp_path / "README.md").write_text("not a table")
        assert list(tables_in(tmp_path)) == ["one.csv", "one.npy"]

    @pytest.mark.parametrize(
        ("name", "content", "reason"),
        [
            ("words.csv", "a,b\n" + "x,y\n" * 30, "expected columns of numbers that vary, got none among 'a', 'b'"),
            ("few.csv", text(ROWS[:9]), "expected at least 20 complete rows of numbers, got 9"),
            ("semicolons.csv", text(ROWS).replace(",", ";"), "expected cells separated by commas"),
        ],
    )
    def test_a_bad_table_is_refused_by_its_own_name(
        self, tmp_path: Path, name: str, content: str, reason: str, refusal: Callable[..., str]
    ):
        (tmp_path / name).write_text(content)
        assert f"{tmp_path / name}: {reason}" in refusal(read_file, tmp_path / name)
        packed = tmp_path / f"{name}.gz"
        packed.write_bytes(gzip.compress(content.encode()))
        assert f"{packed}: {reason}" in refusal(read_file, packed)

    def test_arrays_that_are_no_tables_are_refused(self, tmp_path: Path, refusal: Callable[..., str]):
        np.savez(tmp_path / "keys.npz", a=ROWS, b=ROWS)
        assert "expected an array called X" in refusal(read_file, tmp_path / "keys.npz")
        np.save(tmp_path / "flat.npy", np.arange(9.0))
        assert "expected an array (rows, columns) of numbers, got shape (9,)" in refusal(
            read_file, tmp_path / "flat.npy"
        )

    def test_a_folder_without_tables_is_refused(self, tmp_path: Path, refusal: Callable[..., str]):
        (tmp_path / "old.csv").mkdir()  # it is named like a table, and is none
        os.mkfifo(tmp_path / "pipe.csv")
        assert "found none" in refusal(tables_in, tmp_path)
        assert "expected a folder of tables, found no" in refusal(tables_in, tmp_path / "nowhere")
        (tmp_path / "t.csv").write_text("a\n1\n")
        assert "expected a folder of tables, got the file" in refusal(tables_in, tmp_path / "t.csv")


# methods of a comparison that is made for these tests; workers import this module to find them


def first_cell(table: Table, seed: int) -> float:
    return float(table.rows[0, 0]) + seed


def fails(table: Table, seed: int) -> float:
    raise ValueError("a reason\nof two lines")


def crashes(table: Table, seed: int) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def diverges(table: Table, seed: int) -> float:
    return float("nan")


def waits(table: Table, seed: int) -> float:
    """Says who it is, and waits until it may go on."""
    folder = Path(os.environ["WAITING_ROOM"])
    (folder / "pid").write_text(str(os.getpid()))
    while not (folder / "go").exists():
        time.sleep(0.05)
    return -1.0


def trial(method: Callable[[Table, int], float], table: Table, seed: int) -> Mapping[str, dict[str, float]]:
    return {"": {"cell": method(table, seed)}}


def toy(*methods: Callable[[Table, int], float]) -> Comparison:
    return Comparison(
        name="toy",
        unit="The first cell",
        figures={"cell": 3, "seconds": 1},
        highest=True,
        tables=AS_STORED,
        methods={method.__name__: method for method in methods},
        trial=trial,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for name, shift in (("one", 0), ("two", 10)):
        (tmp_path / "data" / f"{name}.csv").write_text(text(ROWS + shift))
    return tmp_path / "data"


def test_every_method_runs_on_every_split_of_every_table(folder: Path, tmp_path: Path):
    result = compare(toy(first_cell), data=folder, seeds=2, jobs=2, out=tmp_path / "r.json")
    cells = [(each["table"], each["seed"], each["cell"]) for each in result["trials"]]
    assert cells == [(n, s, ROWS[0, 0] + shift + s) for n, shift in (("one", 0), ("two", 10)) for s in (0, 1)]
    assert json.loads((tmp_path / "r.json").read_text())["trials"] == result["trials"]
    assert [row["cell"] for row in result["rows"]] == [ROWS[0, 0] + 0.5, ROWS[0, 0] + 10.5]
    assert result["rows"][0]["sd"] == pytest.approx(0.5**0.5)


def test_what_fails_is_a_trial_with_its_reason_and_the_rest_is_done(folder: Path):
    (folder / "bad.csv").write_text("a,b\n1,2\n")
    result = compare(toy(first_cell, fails, crashes, diverges), data=folder, seeds=1, jobs=2)
    reasons = {(each["table"], each["method"]): each.get("failed", "") for each in result["trials"]}
    assert all("numbers that vary" in why for (table, _), why in reasons.items() if table == "bad")
    for table in ("one", "two"):
        assert reasons[table, "first_cell"] == ""
        assert reasons[table, "fails"] == "ValueError: a reason of two lines"
        assert "killed by signal 9" in reasons[table, "crashes"]
        assert reasons[table, "diverges"] == "its cell is nan"
    assert result["failed"][:2] == ["bad: crashes", "bad: diverges"]
    assert outcome(result) == 1
    assert outcome(compare(toy(first_cell), tables=["one"], data=folder, seeds=1)) == 0
    shown = markdown(result).splitlines()
    assert "| bad | failed | – |" in shown
    assert "Failed on one: its cell is nan (diverges, seed 0)" in shown


def test_a_comparison_in_which_all_fails_still_says_why(folder: Path):
    result = compare(toy(fails), data=folder, seeds=1)
    assert result["rows"] == result["standings"] == []
    assert "Failed on two: ValueError: a reason of two lines (fails, seed 0)" in markdown(result)


def test_a_second_run_keeps_what_is_there_and_does_the_rest(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "r.json"
    first = compare(toy(first_cell, fails), data=folder, seeds=1, out=out)
    (folder / "two.csv").write_text(text(ROWS + 20))
    second = compare(toy(first_cell, fails), data=folder, seeds=2, out=out)
    assert "already holds 1 of 8 results" in capsys.readouterr().err  # not what failed, not the table that changed
    kept = [each for each in second["trials"] if (each["table"], each["seed"]) == ("one", 0)]
    assert kept[0] == first["trials"][0]
    assert [each["cell"] for each in second["trials"] if each["table"] == "two" and "cell" in each] == [
        ROWS[0, 0] + 20,
        ROWS[0, 0] + 21,
    ]


@pytest.mark.parametrize("content", ["", "[1]", '{"comparison": "density", "trials": [], "digests": {}}'])
def test_another_file_is_not_overwritten(folder: Path, tmp_path: Path, content: str, refusal: Callable[..., str]):
    (tmp_path / "r.json").write_text(content)
    assert "choose another file" in refusal(compare, toy(first_cell), data=folder, out=tmp_path / "r.json")
    assert (tmp_path / "r.json").read_text() == content


def test_unknown_names_are_refused(folder: Path, refusal: Callable[..., str]):
    asked = {"data": folder, "seeds": 1}
    assert "no table 'onee'; there are one, two (did you mean 'one'?)" in refusal(
        compare, toy(first_cell), tables=["onee"], **asked
    )
    assert "no method 'fails'; there are first_cell" in refusal(compare, toy(first_cell), methods=["fails"], **asked)
    without = toy(first_cell)._replace(absent={"fails": "it is not installed"})
    assert refusal(compare, without, methods=["fails"], **asked) == "cannot run fails: it is not installed"


class TestInterrupted:
    def start(self, folder: Path, room: Path) -> subprocess.Popen[str]:
        code = (
            "from test_compare import *; module.PRELOADED = ('test_compare',);"
            f"r = compare(toy(first_cell, waits), data=Path({str(folder)!r}), tables=['one'], seeds=1, jobs=2,"
            f" out=Path({str(room / 'r.json')!r})); print(r.get('unfinished'))"
        )
        path = os.pathsep.join([str(ROOT / "src"), str(Path(__file__).parent)])
        environment = os.environ | {"PYTHONPATH": path, "WAITING_ROOM": str(room)}
        return subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def until(self, true: Callable[[], bool]) -> None:
        for _ in range(3600):
            if true():
                return
            time.sleep(0.05)
        pytest.fail("waited for three minutes")

    def half_done(self, folder: Path, room: Path) -> tuple[subprocess.Popen[str], int]:
        (room / "pid").unlink(missing_ok=True)
        process = self.start(folder, room)
        self.until(lambda: (room / "r.json").exists() and (room / "pid").exists())
        self.until(lambda: (room / "pid").read_text() != "")
        return process, int((room / "pid").read_text())

    def is_gone(self, pid: int) -> bool:
        """Whether a process has ended; it may wait for someone to ask how."""
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    def trials(self, room: Path) -> list[dict]:
        return json.loads((room / "r.json").read_text())["trials"]

    @pytest.mark.skipif(not Path("/proc").is_dir(), reason="asks /proc whether a process is there")
    def test_killed_and_stopped_nothing_is_lost_and_nobody_works_on(self, folder: Path, tmp_path: Path):
        """One comparison: killed, then stopped by Ctrl-C, then finished."""
        room = tmp_path / "room"
        room.mkdir()
        process, worker = self.half_done(folder, room)
        process.kill()
        process.communicate()
        before = self.trials(room)
        assert [each["method"] for each in before] == ["first_cell"]
        self.until(lambda: self.is_gone(worker))

        process, worker = self.half_done(folder, room)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=180)
        assert out.startswith(f"stopped after 1 of 2 results, kept in {room / 'r.json'}")
        assert "already holds 1 of 2 results" in err
        assert "Traceback" not in err
        assert self.trials(room) == before
        self.until(lambda: self.is_gone(worker))

        (room / "go").touch()
        again = self.start(folder, room)
        out, _ = again.communicate(timeout=180)
        assert again.returncode == 0
        assert out.strip() == "None"
        assert self.trials(room)[0] == before[0]
        assert [each["cell"] for each in self.trials(room)] == [ROWS[0, 0], -1]


def test_the_command_says_that_it_is_unfinished(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nicest.studies.compare.run_jobs", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert CliRunner().invoke(app, ["compare", "density", "iris"]).exit_code == 130


def test_means_ranks_wins_and_gaps_are_those_of_the_trials():
    cells = {
        ("x", "A"): [1.0, 3.0],  # 2
        ("x", "B"): [2.004, 2.0],  # 2.002: prints as A does, a tie
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
    expected = {
        "A": (1.75, 1, 4.0, "y", 2.0),
        "B": (1.25, 2, 0.0, "x", 2.0),
        "C": (3.0, 0, 1.0, "x", 1.0),
    }
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


@pytest.mark.parametrize(
    "name", ["density", "imputation", "imputation-holes", "imputation-uci", "outliers", "synthesis"]
)
def test_the_page_shows_what_was_measured(name: str):
    result = json.loads((ROOT / "results" / f"tables-{name}.json").read_text())
    assert markdown(result) in (ROOT / "docs" / "tables.md").read_text()


def test_comparing_needs_only_what_density_models_need(folder: Path):
    """On a machine with torch, scikit-learn and pyarrow, but nothing for images, plots or downloads."""
    blocked = ("matplotlib", "PIL", "pooch", "requests", "fastapi", "pandas")
    argv = [
        "nicest",
        "compare",
        "density",
        "one",
        "--data",
        str(folder),
        "--method",
        "kernels",
        "--seeds",
        "1",
        "--jobs",
        "1",
    ]
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); sys.argv = {argv!r};"
    code += "from nicest.cli import main; main()"
    end = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert end.returncode == 0, end.stderr
    assert "| first places | 1 of 1 |" in end.stdout
