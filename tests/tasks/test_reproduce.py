"""Tables and figures of the paper: missing runs are trained, finished ones reused, missing data is reported."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import nicest
from nicest import cli
from nicest.errors import NicestError
from nicest.tasks import reproduce
from nicest.tasks.evaluate import evaluate
from nicest.tasks.reproduce import Entry, figures, results_page, table
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
    scores = [evaluate(nicest.open(made / "runs" / f"digits-{seed}")).mean_nats for seed in (0, 1)]
    assert [each["mean_nats"] for each in digits["runs"]] == pytest.approx(scores)
    assert digits["test_mean_nats"] == pytest.approx(sum(scores) / 2)
    assert digits["test_sd"] == pytest.approx(abs(scores[0] - scores[1]) / 2**0.5)
    assert [each["seed"] for each in digits["runs"]] == [0, 1]
    assert digits["epochs"] == 4
    assert digits["baselines"]["zca_logistic"] > digits["test_mean_nats"]  # it was trained for a moment
    assert digits["changed"] == list(QUICK)
    assert digits["command"].startswith("nicest reproduce table --recipe digits --set model.width=16")
    assert "`digits` was run with `model.width=16`" in (made / "docs" / "results.md").read_text()


def test_what_is_there_is_not_trained_again(made: Path, monkeypatch: pytest.MonkeyPatch):
    before = (made / "results" / "table.json").read_text()
    monkeypatch.setattr(reproduce, "train", lambda *_, **__: pytest.fail("trained again"))
    again = {"runs": made / "runs", "seeds": 2, "overrides": QUICK, "device": "cpu"}
    table(["digits"], out=made / "results" / "table.json", **again)
    assert (made / "results" / "table.json").read_text() == before


def test_data_that_is_not_here_is_named_and_the_rest_is_made(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NICEST_DATA", str(tmp_path / "empty"))
    asked = {"runs": made / "runs", "seeds": 1, "overrides": QUICK, "device": "cpu"}
    result = table(["tfd", "digits"], out=tmp_path / "table.json", **asked)
    tfd, digits = result.rows
    assert "ask the University of Toronto" in tfd["missing"]
    assert str(tmp_path) not in tfd["missing"]
    assert digits["test_mean_nats"]
    drawn = figures(["svhn"], runs=tmp_path / "runs", out=tmp_path / "figures", device="cpu")
    assert "nicest data get svhn" in drawn.recipes[0]["missing"]


def test_what_was_measured_where_the_data_was_stays(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measured = row(made) | {"recipe": "mnist"}
    (tmp_path / "table.json").write_text(json.dumps({"rows": [measured]}))
    monkeypatch.setenv("NICEST_DATA", str(tmp_path / "empty"))
    result = table(["mnist"], runs=tmp_path / "runs", out=tmp_path / "table.json", device="cpu")
    assert result.rows == [measured]


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = loop.set_rates

    def interrupt(*arguments: object) -> float:
        if arguments[2] == step:
            os.kill(os.getpid(), signal.SIGINT)
        return rates(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "set_rates", interrupt)


def test_an_interrupted_training_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    interrupt_at(30, monkeypatch)
    asked = {"runs": tmp_path / "runs", "seeds": 1, "overrides": QUICK, "out": tmp_path / "table.json", "device": "cpu"}
    first = table(["digits", "svhn"], **asked)
    assert [each["recipe"] for each in first.rows] == ["digits"]  # what follows waits
    assert "resumes it" in first.unfinished
    assert "resumes it" in first.rows[0]["unfinished"]
    before = (tmp_path / "runs" / "digits-0" / "metrics.jsonl").read_text()
    assert before.count("epoch") == 1
    monkeypatch.undo()
    second = table(["digits"], **asked)
    assert second.rows[0]["epochs"] == 4
    assert "unfinished" not in second.rows[0]
    after = (tmp_path / "runs" / "digits-0" / "metrics.jsonl").read_text()
    assert after.startswith(before)  # its seconds, too: it was not begun anew


def test_an_interrupted_command_exits_as_train_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    settings = [word for each in QUICK for word in ("--set", each)]
    for look, out in (("table", "t.json"), ("figures", "figures")):
        interrupt_at(5, monkeypatch)
        places = ["--runs", str(tmp_path / look), "--out", str(tmp_path / out), "--device", "cpu"]
        monkeypatch.setattr("sys.argv", ["nicest", "reproduce", look, "--recipe", "digits", *places, *settings])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        assert exit.value.code == 130
        assert "the same command resumes it" in " ".join(capsys.readouterr().out.split())
        monkeypatch.undo()


def test_a_run_with_other_settings_is_not_taken_for_this_one(made: Path, tmp_path: Path):
    shutil.copytree(made / "runs", tmp_path / "runs")
    result = table(["digits"], runs=tmp_path / "runs", seeds=1, out=tmp_path / "table.json", device="cpu")
    assert "other settings than asked for" in result.rows[0]["failed"]
    with pytest.raises(NicestError, match="other settings"):
        figures(["digits"], runs=tmp_path / "runs", out=tmp_path / "figures", device="cpu")


def test_the_plans_own_changes_reach_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reproduce, "PLAN", (Entry("digits", overrides=("train.patience=7",)),))
    table(["digits"], runs=tmp_path / "runs", overrides=QUICK, out=tmp_path / "table.json", device="cpu")
    assert "patience = 7" in (tmp_path / "runs" / "digits-0" / "recipe.toml").read_text()
    drawn = figures(["digits"], runs=tmp_path / "runs", overrides=QUICK, out=tmp_path / "figures", device="cpu")
    assert drawn.recipes[0]["figures"]  # from the same run


def test_a_row_that_fails_says_so_and_the_rest_is_made(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def sick(*_: object, **__: object) -> None:
        raise NicestError("non-finite loss at step 3")

    monkeypatch.setattr(reproduce, "train", sick)
    shutil.copytree(made / "runs" / "digits-0", tmp_path / "runs" / "digits-0")
    (tmp_path / "own.toml").write_text('title = "own"\n[data]\nname = "digits"\n')
    asked = {"runs": tmp_path / "runs", "seeds": 1, "overrides": QUICK, "out": tmp_path / "t.json", "device": "cpu"}
    result = table([str(tmp_path / "own.toml"), "digits"], **asked)
    rows = {each["recipe"]: each for each in result.rows}
    assert rows["own"]["failed"] == "non-finite loss at step 3"
    assert rows["digits"]["test_mean_nats"]


def test_another_file_is_not_overwritten(tmp_path: Path):
    for text in ("{}", "no json", "[1]"):
        (tmp_path / "mine.json").write_text(text)
        with pytest.raises(NicestError, match=r"expected a table of `nicest reproduce` in .*mine\.json"):
            table(["digits"], out=tmp_path / "mine.json")
        assert (tmp_path / "mine.json").read_text() == text


def test_rows_of_numbers_are_refused_before_they_are_trained(tmp_path: Path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(60, 6)))
    (tmp_path / "own.toml").write_text(f'title = "own"\n[data]\nname = "{tmp_path}/rows.npy"\n')
    drawn = figures([str(tmp_path / "own.toml")], runs=tmp_path / "runs", out=tmp_path / "figures", device="cpu")
    assert "not images" in drawn.recipes[0]["missing"]
    assert not (tmp_path / "runs").exists()


def test_the_page_shows_every_row_and_what_belongs_to_it(made: Path, here: Path):
    digits = row(made)
    best = (
        digits
        | {"recipe": "cifar10-best", "column": "cifar10", "paper_nats": 5371.78, "reading": "best"}
        | {"augmented": True}
    )
    missing = {"recipe": "tfd", "reading": "text", "column": "tfd", "paper_nats": 5514.71, "missing": "ask | them"}
    for name in ("samples.png", "inpaint.gif"):
        Path("results/figures/cifar10-best").mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(Path("results/figures/cifar10-best") / name)
    page = results_page({"rows": [digits, best, missing], "out": "results/table.json"}, Path("docs"))
    nats = f"**{digits['test_mean_nats']:.1f}** ± {digits['test_sd']:.1f}"
    assert f"| digits | ours | – | {nats} |" in page
    assert f"| cifar10-best (augmented) | best | 5371.78 | {nats} |" in page
    assert "| tfd | text | 5514.71 | ask / them | | | | | | |" in page
    assert "| Deep MFA | 5250 | 3622 |" in page
    assert f"| cifar10-best, ours | – | {digits['test_mean_nats']:.2f} |" in page
    assert page.index("cifar10-best: samples") < page.index("cifar10-best: inpainting, the ascent")
    assert "(../results/figures/cifar10-best/samples.png)" in page
    assert "`../results/table.json`" in page


@pytest.mark.parametrize("folder", ["docs", "/elsewhere/docs", "../up", "."])
def test_links_lead_from_the_page_to_the_figures(folder: str, here: Path):
    Path("results/figures/digits").mkdir(parents=True)
    Image.new("L", (8, 8)).save("results/figures/digits/samples.png")
    only = {"recipe": "digits", "reading": "ours", "column": "digits", "paper_nats": None, "missing": "no"}
    page = results_page({"rows": [only], "out": "results/table.json"}, Path(folder))
    link = page.partition("![samples](")[2].partition(")")[0]
    assert os.path.abspath(Path(folder) / link) == str(here / "results/figures/digits/samples.png")  # noqa: PTH100


def test_every_figure_is_drawn(made: Path, tmp_path: Path):
    (drawn,) = figures(["digits"], runs=made / "runs", overrides=QUICK, out=tmp_path, device="cpu").recipes
    names = {Path(path).name for path in drawn["figures"]}
    stills = ("likelihood", "samples", "inpaint", "sphere-random", "sphere-top", "spectrum", "interpolate", "truncate")
    assert names == {*(f"{name}.png" for name in stills), "inpaint.gif"}
    for path in drawn["figures"]:
        with Image.open(path) as picture:
            assert picture.width > 200
    top, random = ((tmp_path / "digits" / f"sphere-{basis}.png").read_bytes() for basis in ("top", "random"))
    assert top != random


def test_on_the_command_line(
    made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    asked = ["--recipe", "digits", "--seeds", "2", "--runs", str(made / "runs"), "--out", str(tmp_path / "t.json")]
    asked += [word for each in QUICK for word in ("--set", each)]
    for more in ([], ["--json"]):
        monkeypatch.setattr("sys.argv", ["nicest", "reproduce", "table", *asked, *more])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        assert not exit.value.code
        out = capsys.readouterr().out
        if more:
            assert json.loads(out)["rows"] == [row(made)]
        else:
            assert f"{row(made)['test_mean_nats']:.1f} ±" in out
