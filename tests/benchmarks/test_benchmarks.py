"""Every command of `python -m benchmarks`, on tiny data; speed is not tested."""

import json
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import bench, compare, cost, table_speed, vae
from benchmarks.__main__ import PROGRAM, app
from benchmarks.peers import PEERS, SPLINES, installed
from nicest import cli

CPU = torch.device("cpu")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a command and returns its exit code, standard output and standard error."""
    monkeypatch.setattr(compare, "PRELOADED", ("benchmarks.compare",))

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["benchmarks/__main__.py", *map(str, words)])
        with pytest.raises(SystemExit) as exit:
            cli.main(app, PROGRAM)
        return exit.value.code or 0, *capsys.readouterr()  # type: ignore[return-value]

    return call


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("classification", "logistic regression"),
        ("density", "kernels"),
        ("imputation", "KNN"),
        ("outliers", "LOF"),
        ("regression", "forest"),
        ("synthesis", "copula"),
    ],
)
def test_comparisons(name: str, method: str, run: Callable, tmp_path: Path):
    np.savez(tmp_path / "one.npz", X=np.random.default_rng(0).normal(size=(60, 3)), y=np.arange(60) % 3 == 0)
    asked = ("compare", name, "one", "--data", tmp_path, "--method", method, "--seeds", 1, "--out", tmp_path / "r.json")
    code, out, err = run(*asked)
    assert code == 0, err
    assert "| first places | 1 of 1 |" in out.splitlines()
    kept = json.loads((tmp_path / "r.json").read_text())
    assert [(each["table"], each["method"]) for each in kept["trials"]] == [("one", method)]
    assert kept["command"].startswith(f"{PROGRAM} compare {name} one --data ")
    assert kept.keys() >= {"commit", "date", "device", "cpu", "cores", "versions", "digests", "seeds"}
    code, out, _ = run(*asked, "--json")
    assert json.loads(out)["trials"] == kept["trials"]


def test_an_error_is_one_line(run: Callable, tmp_path: Path):
    code, _, err = run("compare", "density", "--data", tmp_path)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("error: expected tables (")
    code, _, err = run("bench", "--batch", -1)
    assert (code, err.count("\n")) == (2, 1)
    assert "see python -m benchmarks bench --help" in err


@pytest.mark.skipif(find_spec("sbi") is not None, reason="sbi is installed: the comparison takes an hour")
def test_posteriors_need_sbi(run: Callable):
    assert "pip install 'nicest[sbi]'" in run("compare", "posteriors", "two_moons")[2]


def test_bench(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "import_milliseconds", partial(bench.import_milliseconds, 1))
    asked = ("--net", "small", "--net", "spline", "--batch", 8, "--windows", 1, "--seconds", 0, "--device", "cpu")
    code, out, _ = run("bench", *asked, "--out", tmp_path / "bench.json")
    assert code == 0
    assert "| net | batch | what | lib | microseconds | floor_ratio |" in out.splitlines()
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    for net, peers in (("small", PEERS), ("spline", SPLINES)):
        steps = {row["lib"] for row in rows if row["what"] == "training step" and row["net"] == net}
        assert steps == {"nicest", "nicest + average", "floor", *installed(peers)}
    assert all(row["microseconds"] > 0 for row in rows)


def test_cost(run: Callable, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cost, "AXES", {"D": (6, 8), "width": (4, 8), "depth": (1, 2), "batch": (2, 4)})
    monkeypatch.setattr(cost, "ROWS", (10, 20, 30))
    code, out, _ = run("cost", "--small", "--windows", 1, "--seconds", 0, "--device", "cpu")
    assert code == 0
    assert out.count("| width |") == 2


def test_table_speed(monkeypatch: pytest.MonkeyPatch):
    cases = {"one": table_speed.CASES["one"], "all, busy cores": table_speed.CASES["all, busy cores"]}
    monkeypatch.setattr(table_speed, "CASES", cases)
    monkeypatch.setattr(table_speed, "measured", dict)  # its own process would train for seconds
    monkeypatch.setattr(table_speed, "in_process", lambda function, threads: ({"threads were": threads}, ""))
    rows = table_speed.study([30]).found["rows"]
    assert [(row["threads"], row["rows"], row["threads were"]) for row in rows] == [
        ("one", 30, 1),
        ("all, busy cores", 30, None),
    ]


def test_vae(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in {"WIDTH": 80, "LATENT": 8, "DRAWS": 2, "IMPORTANCE_DRAWS": 8}.items():
        monkeypatch.setattr(vae, name, value)
    code, _, _ = run(
        "vae", "--recipe", "digits", "--seeds", 2, "--steps", 60, "--device", "cpu", "--out", tmp_path / "v"
    )
    assert code == 0
    kept = json.loads((tmp_path / "v").read_text())
    assert kept["command"].startswith("python -m benchmarks vae --recipe digits --seeds 2")
    assert all(each["importance_nats"] > each["test_nats"] for each in kept["runs"])
    nats = {(each["model"], each["seed"]): each["test_nats"] for each in kept["runs"]}
    for row in kept["rows"]:
        gain = [nats[row["model"], seed] - nats["plain", seed] for seed in (0, 1)]
        assert row["gain_nats"] == pytest.approx(sum(gain) / 2, abs=1e-9)
        assert row["gain_sd"] == pytest.approx(abs(gain[0] - gain[1]) / 2**0.5, abs=1e-9)
    size = {row["model"]: row["parameters"] for row in kept["rows"]}
    assert 0.97 * size["posterior"] < size["wider"] <= size["posterior"]


def test_the_operations_of_a_step_are_those_of_its_products():
    one = 4 * 16 + 16 * 16 + 16 * 4
    assert cost.step_flops(bench.recipe_of("small", 10).override("model.width=16")) == 2 * 10 * (3 * 4 * one - 4 * 16)


def test_the_median_of_windows_is_reported(monkeypatch: pytest.MonkeyPatch):
    now, durations = [0.0], iter([0.5] + [0.1] * 3 + [0.1] * 3 + [0.9] * 3 + [0.2] * 3)

    def run() -> None:
        now[0] += next(durations)

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    assert bench.measure([run], CPU, windows=3, seconds=0.3) == [pytest.approx(0.2e6)]
