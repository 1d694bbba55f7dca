"""The bench runs, and its numbers are sane; how fast is not a matter of tests."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

from nicest import cli
from nicest.errors import NicestError
from nicest.flows import ConvNet
from nicest.recipes.build import build
from nicest.studies import bench as bench_task
from nicest.studies import cost as study
from nicest.studies import peers
from nicest.studies.bench import bench, measure
from nicest.studies.peers import GLOWS, PEERS, SPLINES, build_glow, build_peer, installed

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    picture = tmp_path_factory.mktemp("bench") / "bench.png"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_task, "import_milliseconds", partial(bench_task.import_milliseconds, 1))
        return bench(["small"], [16], windows=2, seconds=0.01, device="cpu", out=picture)


def test_every_library_does_everything_at_every_batch(result: dict):
    seen = {(row["lib"], row["what"], row["batch"]) for row in result["rows"]}
    whats = ("training step", "log_prob", "sample")
    libraries = ("nicest", "floor", *installed())
    expected = [(lib, what) for lib in libraries for what in whats]
    expected += [("nicest + average", "training step")]
    expected += [(f"{way}, after noise", "log_prob") for way in ("nicest", "nicest plain", "by hand")]
    assert seen == {(lib, what, batch) for lib, what in expected for batch in (16,)}
    assert len(result["rows"]) == len(seen)


def test_times_are_sane(result: dict):
    for row in result["rows"]:
        assert 0 < row["microseconds"] < 1e7
        assert row["floor_ratio"] == 1 if row["lib"] == "floor" else row["floor_ratio"] > 0
    assert {row["lib"] for row in result["startup"]} == {"nicest", *installed()}


def test_the_loop_by_hand_is_the_same_model():
    flow, y = build(bench_task.recipe_of("small", 8)), torch.rand(8, 8)
    torch.testing.assert_close(bench_task.by_hand(flow, y)(), flow.log_density(y))


def test_warps_are_measured_where_there_are_images():
    recipe = bench_task.recipe_of("mnist", 4).override("model.width=8", "model.hidden_layers=1")
    groups = bench_task.variants(recipe, CPU)
    runs = {(what, name): run for group in groups for what, name, run in group}
    assert runs.keys() == {("training step", "nicest + average"), ("training step", "nicest + average, warps")}
    for run in runs.values():
        run()


def test_the_cost_of_the_import_is_there(result: dict):
    assert 0 < result["import_ms"] < 5000


class TestStudy:
    def test_every_size_is_varied_and_figures_are_sane(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(study, "AXES", {"D": (6, 8), "width": (4, 8), "depth": (1, 2), "batch": (2, 4)})
        monkeypatch.setattr(study, "ROWS", (10, 20, 30, 40))
        result = study.study(windows=1, seconds=0.0, device="cpu", out=tmp_path / "study.png", small=True)
        assert [(row["axis"], row["value"]) for row in result["steps"]] == [
            (axis, value) for axis, values in study.AXES.items() for value in values
        ]
        assert all(row["microseconds"] > 0 and 0 < row["utilisation"] < 1 for row in result["steps"])
        assert [(row["what"], row["n"]) for row in result["rows"]] == [
            (what, n) for n in (10, 20, 30) for what in ("log_prob", "sample")
        ]
        assert (tmp_path / "study.png").stat().st_size > 1000

    def test_the_operations_of_a_step_are_those_of_its_products(self):
        recipe = bench_task.recipe_of("small", 10).override("model.width=16")
        one = 4 * 16 + 16 * 16 + 16 * 4
        assert study.step_flops(recipe) == 2 * 10 * (3 * 4 * one - 4 * 16)

    def test_a_training_of_the_paper_is_projected_from_its_step(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(study, "step_microseconds", lambda recipe, *_: 100.0)
        row = study.projected("mnist", CPU, 1, 0.0)
        assert row["steps"] == 250 * 1500
        assert row["hours"] == pytest.approx(375_000 * 1e-4 / 3600)


def test_the_picture_is_there(result: dict):
    with Image.open(result["out"]) as picture:
        assert picture.width > 300


def test_it_says_on_what_it_ran(result: dict):
    assert result["device"]
    assert result["precision"] == "float32"
    assert set(result["versions"]) >= {"nicest", "torch"}


def test_an_unknown_net_is_refused():
    with pytest.raises(NicestError, match="expected nets of mnist, cifar10, small, spline, glow, got lenet"):
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
    peer = build_peer(library, 6, (16, 16))
    networks = 4 * (3 * 16 + 16 + 16 * 16 + 16 + 16 * 3 + 3)
    assert networks <= sum(p.numel() for p in peer.flow.parameters()) <= networks + 2 * 6
    assert peer.log_prob(torch.randn(5, 6)).shape == (5,)
    assert peer.sample(7).shape == (7, 6)


@pytest.mark.peers
@pytest.mark.parametrize("library", SPLINES)
def test_a_peer_has_the_same_splines(library: str):
    if library not in installed(SPLINES):
        pytest.skip(f"{library} is not installed: nicest[bench]")
    peer = build_peer(library, 6, (16, 16), bins=5)
    networks = 8 * (3 * 16 + 16 + 16 * 16 + 16 + 16 * 3 * 14 + 3 * 14)
    assert sum(p.numel() for p in peer.flow.parameters()) == networks
    assert peer.log_prob(torch.randn(5, 6)).shape == (5,)
    assert peer.sample(7).shape == (7, 6)
    far = torch.full((1, 6), 9.0)  # beyond the tails, where a spline is the identity
    torch.testing.assert_close(peer.log_prob(far), -0.5 * (far.square() + math.log(2 * math.pi)).sum(1))


def test_splines_are_benched_beside_those_of_peers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_task, "import_milliseconds", lambda: 1.0)
    result = bench(["spline"], [16], windows=1, seconds=0.0, device="cpu")
    steps = {row["lib"] for row in result["rows"] if row["what"] == "training step"}
    assert steps == {"nicest", "nicest + average", "floor", *installed(SPLINES)}
    recipe = bench_task.recipe_of("spline", 512)
    assert (recipe.data.dim, recipe.model.couplings, recipe.model.law, recipe.model.bins) == (16, 8, "spline", 8)


def test_a_window_is_the_mean_of_its_runs_and_the_median_of_windows_counts(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    durations = iter([0.5] + [0.1] * 3 + [0.1] * 3 + [0.9] * 3 + [0.2] * 3)

    def run() -> None:
        now[0] += next(durations)

    monkeypatch.setattr(bench_task.time, "perf_counter", lambda: now[0])
    assert measure([run], CPU, windows=3, seconds=0.3) == [pytest.approx(0.2e6)]


def test_the_recipe_of_a_net_is_the_papers():
    recipe = bench_task.recipe_of("cifar10", 1000)
    assert (recipe.data.dim, recipe.model.hidden_layers, recipe.model.width) == (3072, (4,), 2000)
    assert recipe.train.batch == 1000


@pytest.mark.parametrize("as_json", [True, False])
def test_on_the_command_line(
    as_json: bool, result: dict, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    asked = []
    monkeypatch.setattr(bench_task, "bench", lambda *words, **options: asked.append((*words, options)) or result)
    quick = ["bench", "--net", "small", "--batch", "8", "--windows", "1", "--seconds", "0", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["nicest", *quick, *(["--json"] if as_json else [])])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert not exit.value.code
    out = capsys.readouterr().out
    assert asked == [(["small"], [8], {"windows": 1, "seconds": 0.0, "device": "cpu", "out": None})]
    assert set(json.loads(out)) >= {"device", "rows"} if as_json else "times the floor" in out


@pytest.mark.peers
@pytest.mark.parametrize("library", GLOWS)
def test_a_peer_has_a_glow_of_the_same_size(library: str, monkeypatch: pytest.MonkeyPatch):
    if library not in installed(GLOWS):
        pytest.skip(f"{library} is not installed")
    for module in (peers, bench_task):
        monkeypatch.setattr(module, "STEPS", 1)
        monkeypatch.setattr(module, "WIDTH", 8)
    recipe = bench_task.recipe_of("glow", 2)
    ours = sum(p.numel() for net in build(recipe).modules() if isinstance(net, ConvNet) for p in net.parameters())
    peer = build_glow(library, (3, 32, 32))
    theirs = sum(p.numel() for net in peer.flow.modules() if isinstance(net, ConvNet) for p in net.parameters())
    assert ours == theirs
    x = peer.sample(3)
    assert x.shape == (3, 3072)
    assert peer.log_prob(x).shape == (3,)


def test_a_glow_is_benched_beside_those_of_peers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_task, "import_milliseconds", lambda: 0.0)
    for module in (peers, bench_task):
        monkeypatch.setattr(module, "STEPS", 1)
        monkeypatch.setattr(module, "WIDTH", 8)
    result = bench(["glow"], [2], windows=1, seconds=0.0, device="cpu")
    steps = {row["lib"] for row in result["rows"] if row["what"] == "training step"}
    assert {"nicest", "floor", *installed(GLOWS)} <= steps
    assert all(row["microseconds"] > 0 for row in result["rows"])
