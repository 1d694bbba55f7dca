"""The bench runs, and its numbers are sane; how fast is not a matter of tests."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from nicest import cli
from nicest.errors import NicestError
from nicest.tasks import bench as bench_task
from nicest.tasks.bench import bench, measure
from nicest.tasks.peers import PEERS, installed

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    picture = tmp_path_factory.mktemp("bench") / "bench.png"
    return bench(["small"], [16, 32], windows=2, seconds=0.01, device="cpu", out=picture)


def test_every_library_does_everything_at_every_batch(result: dict):
    seen = {(row["lib"], row["what"], row["batch"]) for row in result["rows"]}
    whats = ("training step", "log_prob", "sample")
    libraries = ("nicest", "floor", *installed())
    assert seen == {(lib, what, batch) for lib in libraries for what in whats for batch in (16, 32)}
    assert len(result["rows"]) == len(seen)


def test_times_are_sane(result: dict):
    for row in result["rows"]:
        assert 0 < row["microseconds"] < 1e7
        assert row["floor_ratio"] == 1 if row["lib"] == "floor" else row["floor_ratio"] > 0
    assert {row["lib"] for row in result["startup"]} == {"nicest", *installed()}


def test_the_picture_is_there(result: dict):
    with Image.open(result["out"]) as picture:
        assert picture.width > 300


def test_it_says_on_what_it_ran(result: dict):
    assert result["device"]
    assert result["precision"] == "float32"
    assert set(result["versions"]) == {"nicest", "torch"}


def test_an_unknown_net_is_refused():
    with pytest.raises(NicestError, match="expected nets of mnist, cifar10, small, got lenet"):
        bench(["lenet"])


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bench_task, "measure", lambda *_: pytest.fail("timed before it looked"))
    (tmp_path / "file").write_text("")
    for out, reason in ((tmp_path / "a.xyz", "expected a picture"), (tmp_path / "file" / "a.png", "cannot write")):
        with pytest.raises(NicestError, match=reason):
            bench(["small"], [8], device="cpu", out=out)


@pytest.mark.peers
@pytest.mark.parametrize("library", PEERS)
def test_a_peer_has_the_same_networks(library: str):
    if library not in installed():
        pytest.skip(f"{library} is not installed: nicest[bench]")
    peer = PEERS[library](6, (16, 16))
    networks = 4 * (3 * 16 + 16 + 16 * 16 + 16 + 16 * 3 + 3)
    assert networks <= sum(p.numel() for p in peer.parameters()) <= networks + 2 * 6
    assert peer.log_prob(torch.randn(5, 6)).shape == (5,)
    assert peer.sample(7).shape == (7, 6)


def test_a_window_is_the_mean_of_its_runs_and_the_median_of_windows_counts(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    durations = iter([0.5] + [0.1] * 3 + [0.1] * 3 + [0.9] * 3 + [0.2] * 3)

    def run() -> None:
        now[0] += next(durations)

    monkeypatch.setattr(bench_task.time, "perf_counter", lambda: now[0])
    assert measure(run, CPU, windows=3, seconds=0.3) == pytest.approx(0.2e6)


def test_the_recipe_of_a_net_is_the_papers():
    recipe = bench_task.recipe_of("cifar10", 1000, CPU)
    assert (recipe.data.dim, recipe.model.hidden_layers, recipe.model.width) == (3072, (4,), 2000)
    assert (recipe.train.batch, recipe.train.precision) == (1000, "float32")


@pytest.mark.parametrize("as_json", [True, False])
def test_on_the_command_line(as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    quick = ["bench", "--net", "small", "--batch", "8", "--windows", "1", "--seconds", "0", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["nicest", *quick, *(["--json"] if as_json else [])])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert not exit.value.code
    out = capsys.readouterr().out
    assert set(json.loads(out)) >= {"device", "rows"} if as_json else "times the floor" in out
