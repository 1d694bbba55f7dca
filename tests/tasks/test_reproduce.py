"""Tables and figures from recipes and data: trained if missing, kept if there, named if they cannot be made."""

import json
import os
import signal
from pathlib import Path

import pytest
from PIL import Image

from nicest import cli
from nicest.tasks import reproduce
from nicest.tasks.evaluate import evaluate
from nicest.tasks.reproduce import PLAN, figures, results_page, table
from nicest.train import loop

QUICK = ("model.width=16", "model.hidden_layers=1", "train.epochs=4", "train.evaluate_every=2")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reproduce")
    table(
        ["digits"],
        runs=folder / "runs",
        seeds=2,
        overrides=QUICK,
        out=folder / "results" / "table.json",
        page=folder / "docs" / "results.md",
        device="cpu",
    )
    return folder


def row(folder: Path, recipe: str = "digits") -> dict:
    rows = json.loads((folder / "results" / "table.json").read_text())["rows"]
    return next(each for each in rows if each["recipe"] == recipe)


def test_a_row_is_the_mean_of_its_seeds_as_evaluate_gives_them(made: Path):
    digits = row(made)
    scores = [evaluate(made / "runs" / f"digits-{seed}", device="cpu")["mean_nats"] for seed in (0, 1)]
    assert [each["mean_nats"] for each in digits["seeds"]] == pytest.approx(scores)
    assert digits["nats"] == pytest.approx(sum(scores) / 2)
    assert digits["spread"] == pytest.approx(abs(scores[0] - scores[1]) / 2**0.5)
    assert [each["seed"] for each in digits["seeds"]] == [0, 1]
    assert digits["seeds"][0]["epochs"] == 4
    assert digits["baselines"]["zca_logistic"] > digits["nats"]  # it was trained for a moment
    assert digits["command"] == "nicest reproduce table --recipe digits"


def test_what_is_there_is_not_trained_again(made: Path, monkeypatch: pytest.MonkeyPatch):
    before = (made / "results" / "table.json").read_text()
    monkeypatch.setattr(reproduce, "train", lambda *_, **__: pytest.fail("trained again"))
    table(["digits"], runs=made / "runs", seeds=2, out=made / "results" / "table.json", device="cpu")
    assert (made / "results" / "table.json").read_text() == before


def test_data_that_is_not_here_is_named_and_the_rest_is_made(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NICEST_DATA", str(tmp_path / "empty"))
    result = table(["tfd", "digits"], runs=made / "runs", seeds=1, out=tmp_path / "table.json", device="cpu")
    tfd, digits = result["rows"]
    assert "ask the University of Toronto" in tfd["missing"]
    assert str(tmp_path) not in tfd["missing"]
    assert digits["nats"]
    drawn = figures(["svhn"], runs=tmp_path / "runs", out=tmp_path / "figures", device="cpu")
    assert "nicest data get svhn" in drawn["recipes"][0]["missing"]


def test_what_was_measured_where_the_data_was_stays(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measured = row(made) | {"recipe": "mnist"}
    (tmp_path / "table.json").write_text(json.dumps({"rows": [measured]}))
    monkeypatch.setenv("NICEST_DATA", str(tmp_path / "empty"))
    result = table(["mnist"], runs=tmp_path / "runs", out=tmp_path / "table.json", device="cpu")
    assert result["rows"] == [measured]


def test_an_interrupted_training_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rates = loop.set_rates

    def interrupt(*arguments: object) -> float:
        if arguments[2] == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return rates(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "set_rates", interrupt)
    asked = {"runs": tmp_path / "runs", "seeds": 1, "overrides": QUICK, "out": tmp_path / "table.json", "device": "cpu"}
    first = table(["digits"], **asked)
    assert "goes on" in first["rows"][0]["unfinished"]
    monkeypatch.undo()
    second = table(["digits"], **asked)
    assert second["rows"][0]["seeds"][0]["epochs"] == 4
    assert "unfinished" not in second["rows"][0]


def test_the_page_shows_every_row_and_its_figures(made: Path, tmp_path: Path):
    page = (made / "docs" / "results.md").read_text()
    digits = row(made)
    assert f"**{digits['nats']:.1f}** ± {digits['spread']:.1f}" in page
    assert "| Deep MFA | 5250 | 3622 |" in page
    (tmp_path / "results" / "figures" / "digits").mkdir(parents=True)
    Image.new("L", (8, 8)).save(tmp_path / "results" / "figures" / "digits" / "samples.png")
    text = results_page({"rows": [digits], "out": str(tmp_path / "results" / "table.json")}, Path("docs"))
    assert "### digits: samples" in text


def test_links_of_the_page_lead_from_its_folder_to_the_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    Path("results/figures/digits").mkdir(parents=True)
    Path("docs").mkdir()
    Image.new("L", (8, 8)).save("results/figures/digits/samples.png")
    text = results_page({"rows": [], "out": "results/table.json"}, Path("docs"))
    assert "![samples](../results/figures/digits/samples.png)" in text


def test_every_figure_is_drawn(made: Path, tmp_path: Path):
    (drawn,) = figures(["digits"], runs=made / "runs", out=tmp_path, device="cpu")["recipes"]
    names = {Path(path).name for path in drawn["figures"]}
    stills = ("likelihood", "samples", "inpaint", "sphere-random", "sphere-top", "spectrum", "interpolate", "truncate")
    assert names == {*(f"{name}.png" for name in stills), "inpaint.gif"}
    for path in drawn["figures"]:
        with Image.open(path) as picture:
            assert picture.width > 200


def test_the_plan_has_every_column_in_every_reading():
    assert {entry.recipe for entry in PLAN} >= {
        *(f"{name}{reading}" for name in ("mnist", "tfd", "svhn", "cifar10") for reading in ("", "-released")),
        "mnist-best",
        "mnist-plain",
        "mnist-affine",
        "cifar10-best",
        "fer2013",
    }


@pytest.mark.parametrize("as_json", [True, False])
def test_on_the_command_line(
    made: Path, as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    asked = ["--recipe", "digits", "--seeds", "2", "--runs", str(made / "runs"), "--out", str(tmp_path / "t.json")]
    monkeypatch.setattr("sys.argv", ["nicest", "reproduce", "table", *asked, *(["--json"] if as_json else [])])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert not exit.value.code
    out = capsys.readouterr().out
    assert json.loads(out)["rows"][0]["recipe"] == "digits" if as_json else "digits" in out


def test_the_vae_study_on_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    asked = ["--recipe", "digits", "--seeds", "1", "--steps", "3", "--out", str(tmp_path / "vae.json")]
    monkeypatch.setattr("sys.argv", ["nicest", "reproduce", "vae", *asked, "--device", "cpu"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert not exit.value.code
    kept = json.loads((tmp_path / "vae.json").read_text())
    assert [each["model"] for each in kept["rows"]] == ["plain", "posterior", "prior"]
    assert "gain over plain" in capsys.readouterr().out
