"""The command line with good input: what it prints, where, how fast, and with which exit code."""

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image

import small_runs
from nicest import __version__
from nicest.errors import NicestError
from nicest.files import to_json
from nicest.inference import fill
from nicest.inference.fill import PRESETS
from nicest.recipes import names
from nicest.runs.folder import RunFolder
from nicest.runs.run import Run
from nicest.runs.sinks import Saved
from nicest.tasks.masks import FIGURE
from nicest.tasks.training import data_kind

LATENT = [f"latent {look}" for look in ("spectrum", "sphere", "interpolate", "truncate")]
COMMANDS = ["demo", "recipes", "train", "evaluate", "sample", "inpaint", "certify", *LATENT]
EVALUATE = {
    *("dataset", "split", "n", "dim", "draws", "mean_nats", "stderr_nats", "bits_per_dim", "non_finite"),
    *("terms", "baselines", "paper_nats"),
}
TABLE = [*(f"--set=table.{each}" for each in ("width=16", "depth=1", "components=2")), "--set=train.epochs=5"]
TINY = [f"--set={each}" for each in ("model.width=8", "model.hidden_layers=1", "train.epochs=1", "train.batch=40")]


class TestHelp:
    def test_lists_every_command(self, process: Callable):
        done = process("--help")
        assert (done.code, done.err) == (0, "")
        assert all(f" {command.split()[0]} " in done.out for command in [*COMMANDS, "data"])

    def test_is_what_no_arguments_give_with_the_code_of_bad_usage(self, nicest: Callable):
        done = nicest()
        assert done.code == 2
        assert "Usage" in done.out + done.err

    @pytest.mark.parametrize("command", [*COMMANDS, "data list", "data get", "data check"])
    def test_of_every_command_has_json_and_an_account_of_itself(self, nicest: Callable, command: str):
        done = nicest(*command.split(), "--help")
        assert done.code == 0
        assert "--json" in done.out
        assert nicest(*command.split(), "-h").out == done.out

    @pytest.mark.parametrize("command", COMMANDS)
    def test_of_every_command_has_an_example(self, nicest: Callable, command: str):
        assert f"Example: nicest {command}" in " ".join(nicest(*command.split(), "--help").out.split())

    @pytest.mark.alone
    def test_answers_in_under_three_tenths_of_a_second(self):
        """On a slow machine: in less than twice the time that Typer and rich take to be imported there."""

        def seconds(*arguments: str) -> float:
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
            return time.perf_counter() - start

        ours, theirs = [], []
        while len(ours) < 5 or (min(ours) >= max(0.3, 2 * min(theirs)) and len(ours) < 25):
            ours.append(seconds("-m", "nicest", "--help"))
            theirs.append(seconds("-c", "import typer.rich_utils, rich.markdown"))
        assert min(ours) < max(0.3, 2 * min(theirs)), (min(ours), min(theirs))

    @pytest.mark.parametrize(
        "arguments",
        [
            "--help",
            "latent -h",
            "inpaint -h",
            "train --help",
            "evaluate --help",
            "recipes",
            "recipes mnist",
            "--version",
            "data list",
        ],
    )
    def test_and_what_else_needs_no_model_loads_no_torch(self, arguments: str):
        code = (
            "import sys, atexit\n"
            "loaded = lambda: [name for name in ('torch', 'matplotlib') if name in sys.modules]\n"
            "atexit.register(lambda: print(loaded(), file=sys.stderr))\n"
            f"sys.argv = ['nicest', *{arguments.split()!r}]\n"
            "from nicest.cli import main\n"
            "main()"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.strip()) == (0, "[]")
        assert done.stdout

    def test_is_reached_by_the_installed_script(self):
        script = shutil.which("nicest", path=str(Path(sys.executable).parent))
        if script is None:
            pytest.skip("nicest is not installed beside this Python: no script to run")
        done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == f"nicest {__version__}\n"


class TestUsage:
    @pytest.mark.parametrize(
        ("arguments", "word"),
        [
            ("sing", "sing"),
            ("train mnist --fast", "--fast"),
            ("train", "recipe"),
            ("evaluate", "run"),
            ("evaluate RUN --draws 0", "--draws"),
            ("evaluate RUN --draws two", "--draws"),
            ("evaluate RUN --split dev", "--split"),
            ("sample RUN -n 0", "-n"),
            ("sample RUN --temperature -1", "--temperature"),
            ("sample RUN --temperature nan", "--temperature"),
            ("certify RUN -n 1", "-n"),
            ("certify RUN --jacobians 0", "--jacobians"),
            ("latent RUN sphere-of-cheese", "no such command"),
            ("latent sphere", "run"),
            ("latent sphere RUN --basis north", "--basis"),
            ("latent interpolate RUN --way around", "--way"),
            ("latent interpolate RUN --steps 1", "--steps"),
            ("latent truncate RUN --keep -1", "--keep"),
            ("inpaint RUN --preset paper", "--preset"),
            ("inpaint RUN --direction up", "--direction"),
            ("inpaint RUN --noise -1", "--noise"),
            ("inpaint RUN --chains 0", "--chains"),
            ("data fetch mnist", "fetch"),
            ("data get", "name"),
        ],
    )
    def test_bad_is_exit_code_2_that_names_the_culprit(self, nicest: Callable, here: Path, arguments: str, word: str):
        assert word in nicest(*arguments.split()).misuse.lower()
        assert list(here.iterdir()) == []

    def test_training_without_a_recipe_says_what_to_type(self, nicest: Callable, here: Path):
        Path("faces").mkdir()
        assert nicest("train", "--data", "my x.csv").misuse.endswith("nicest train 'my x.csv'")
        assert nicest("train", "--data", "faces", "--out", "run").misuse.endswith("nicest train faces")
        assert nicest("train").misuse.endswith("`nicest recipes` lists them all")

    def test_bad_is_exit_code_2_of_the_process_too(self, process: Callable):
        assert [process("sing").code, process("recipes", "--fast").code] == [2, 2]


def test_version(nicest: Callable):
    assert nicest("--version") == (0, f"nicest {__version__}\n", "")


class TestRecipes:
    def test_are_listed_with_their_figures(self, nicest: Callable):
        rows = {row["name"]: row for row in nicest("recipes", "--json").json["recipes"]}
        assert list(rows) == names()
        assert rows["cifar10"]["paper_nats"] == 5371.78
        table = nicest("recipes").out
        assert all(name in table for name in names())
        assert "1980.50" in table

    def test_one_is_shown_whole_as_a_file_that_trains(self, nicest: Callable, tmp_path: Path):
        shown = nicest("recipes", "mnist")
        (tmp_path / "copy.toml").write_text(shown.out)
        again = nicest("recipes", tmp_path / "copy.toml")
        assert again.code == 0
        assert again.out == shown.out
        assert nicest("recipes", "mnist", "--json").json == {"name": "mnist", "toml": shown.out}


class TestTrain:
    def test_prints_one_object_on_stdout_and_its_progress_on_stderr(self, nicest: Callable, tmp_path: Path):
        done = nicest("train", "digits", "--out", tmp_path / "run", "--json", *TINY)
        assert done.code == 0
        assert done.json["finished"] is True
        assert done.json["run"] == str(tmp_path / "run")
        assert math.isfinite(done.json["best_nats"])
        assert "epoch 1/1" in done.err

    def test_writes_to_runs_by_name_unless_told_otherwise(self, nicest: Callable, here: Path):
        done = nicest("train", "digits", *TINY)
        assert done.code == 0
        assert "nats on validation" in done.out
        assert "nicest evaluate runs/digits" in done.out
        assert (here / "runs" / "digits" / "model.safetensors").is_file()

    def test_resumes_with_more_epochs(self, nicest: Callable, tmp_path: Path):
        assert nicest("train", "digits", "--out", tmp_path / "run", *TINY).code == 0
        done = nicest("train", "digits", "--out", tmp_path / "run", "--resume", "--set=train.epochs=2", "--json")
        assert (done.code, done.json["epochs"]) == (0, 2)
        rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [row["epoch"] for row in rows] == [1, 2]

    @pytest.mark.parametrize("name", ["rows.npy", "sp ace.npy", "naïve'\".npy", "雪😀.npy"])
    def test_takes_own_data_whatever_its_name_and_from_any_folder(
        self, nicest: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ):
        np.save(tmp_path / name, np.random.default_rng(0).standard_normal((50, 3)))
        monkeypatch.chdir(tmp_path)
        assert nicest("train", "digits", "--data", name, "--out", "run", *TINY).code == 0
        monkeypatch.chdir("/")
        done = nicest("evaluate", tmp_path / "run", "--json")
        assert (done.code, done.json["dim"], done.json["dataset"]) == (0, 3, str(tmp_path / name))

    def test_that_was_interrupted_is_exit_code_130_with_the_way_on(
        self, nicest: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        stopped = {"run": "runs/x", "finished": False, "step": 7, "epochs": 9, "best_epoch": 0, "best_nats": 1.5}
        stopped |= {"seconds": 2.0, "rolled_back": False, "unscored": False}
        monkeypatch.setattr("nicest.train.fit.train", lambda *args, **options: stopped)
        done = nicest("train", "digits", "--out", tmp_path / "run")
        assert done.code == 130
        assert "step 7" in done.out
        assert "--resume" in done.out
        assert nicest("train", "digits", "--out", tmp_path / "run", "--json") == (130, json.dumps(stopped) + "\n", "")


class TestEvaluate:
    def test_as_a_process_prints_one_object_and_nothing_else(self, process: Callable, digits: Path):
        done = process("evaluate", digits, "--json", "--draws", 2)
        assert (done.code, done.err) == (0, "")
        assert done.json.keys() >= EVALUATE
        assert (done.json["n"], done.json["dim"], done.json["draws"], done.json["split"]) == (180, 64, 2, "test")
        assert len(done.json["baselines"]) == 4

    def test_prints_the_ledger_the_baselines_and_why_nats_may_be_positive(self, nicest: Callable, digits: Path):
        done = nicest("evaluate", digits, "--draws", 1)
        figures = nicest("evaluate", digits, "--draws", 1, "--json").json
        assert done.code == 0
        for row in ("coupling4", "scaling", "prior", "dequantise", "bits/dim", "full gaussian", "zca logistic"):
            assert row in done.out, row
        assert f"{figures['mean_nats']:.2f} ± {figures['stderr_nats']:.2f}" in done.out
        assert f"{figures['bits_per_dim']:.4f}" in done.out
        assert "density" in done.out
        for name, nats in figures["baselines"].items():
            (row,) = [line for line in done.out.splitlines() if line.startswith(name.replace("_", " "))]
            assert row.split()[-2:] == [f"{nats:.2f}", f"{figures['mean_nats'] - nats:+.2f}"]

    def test_takes_split_seed_and_no_baselines(self, nicest: Callable, digits: Path):
        first, again, other = (
            nicest("evaluate", digits, "--split", "valid", "--no-baselines", "--seed", seed, "--json").json
            for seed in (1, 1, 2)
        )
        assert first == again
        assert first["mean_nats"] != other["mean_nats"]
        assert (first["split"], first["baselines"]) == ("valid", {})

    def test_of_a_sick_model_counts_it_prints_null_and_warns(self, nicest: Callable, digits: Path, tmp_path: Path):
        run = Run(digits)
        with torch.no_grad():
            run.flow.bijection.layers["scaling"].s[0] = math.nan
        RunFolder(tmp_path).save_model(Saved(run.flow.state_dict(), run.recipe, {}))
        done = nicest("evaluate", tmp_path, "--draws", 1, "--no-baselines", "--json")
        assert done.code == 0
        assert done.json["non_finite"] == done.json["n"] == 180
        assert done.json["mean_nats"] is None
        assert done.json["bits_per_dim"] is None
        assert done.json["terms"]["scaling"] is None
        assert "180 examples have a non-finite" in nicest("evaluate", tmp_path, "--draws", 1, "--no-baselines").out


class TestSample:
    def test_makes_a_grid(self, nicest: Callable, digits: Path, tmp_path: Path):
        done = nicest("sample", digits, "-n", 9, "--out", tmp_path / "grid.png")
        assert done == (0, f"9 samples in {tmp_path / 'grid.png'}\n", "")
        with Image.open(tmp_path / "grid.png") as grid:
            assert grid.size[0] == grid.size[1]

    def test_makes_an_array_with_its_options(self, nicest: Callable, digits: Path, tmp_path: Path):
        out = tmp_path / "a.npy"
        done = nicest("sample", digits, "-n", 3, "--temperature", 0, "--seed", 4, "--out", out, "--json")
        assert done.code == 0
        assert (done.json["n"], done.json["temperature"], done.json["seed"], done.json["out"]) == (3, 0.0, 4, str(out))
        drawn = np.load(out)
        assert drawn.shape == (3, 8, 8)
        assert (drawn == drawn[0]).all()

    def test_writes_samples_png_here_unless_told_otherwise(self, nicest: Callable, digits: Path, here: Path):
        assert nicest("sample", digits).code == 0
        assert [file.name for file in here.iterdir()] == ["samples.png"]


class TestCertify:
    def test_prints_a_row_for_every_precision_and_keeps_the_certificate(
        self, nicest: Callable, digits: Path, tmp_path: Path
    ):
        run = Path(shutil.copytree(digits, tmp_path / "run"))
        done = nicest("certify", run, "-n", 10, "--jacobians", 2)
        assert done.code == 0
        assert "float64" in done.out
        assert "float32" in done.out
        stored = json.loads((run / "certificate.json").read_text())
        done = nicest("certify", run, "-n", 10, "--jacobians", 2, "--json")
        assert done.json == stored
        assert {"dtype", "max_roundtrip", "max_logdet_error", "n"} <= done.json.keys()
        assert (done.json["n"], done.json["jacobians"]) == (10, 2)


class TestInpaint:
    def test_prints_a_row_for_every_mask_and_writes_every_file(self, nicest: Callable, digits: Path, tmp_path: Path):
        outs = [tmp_path / f"a.{kind}" for kind in ("png", "gif", "npz")]
        masks = ["--mask", "left", "--mask", "random:75+rows:0"]
        files = [each for out in outs for each in ("--out", out)]
        options = [*masks, "-n", 3, "--chains", 2, "--steps", 40, "--noise", 0, *files]
        done = nicest("inpaint", digits, *options)
        assert (done.code, done.err) == (0, "")
        assert all(out.stat().st_size > 500 for out in outs)
        figures = nicest("inpaint", digits, *options, "--json").json
        assert (figures["noise"], figures["steps"], figures["chains"], figures["n"]) == (0.0, 40, 2, 3)
        for row in figures["masks"]:
            (line,) = [line for line in done.out.splitlines() if line.startswith(row["mask"])]
            start, end = (np.mean(row[f"{name}_nats"]) for name in ("start", "end"))
            truth = np.array(row["truth_nats"])
            above = int((np.max(row["end_nats"], 0) > truth).sum())
            assert line.split()[1:] == [
                *(f"{nats:.2f}" for nats in (start, end, truth.mean())),
                f"{end - start:+.2f}",
                *(str(above), "of", "3"),
            ]

    def test_shows_the_papers_masks_here_unless_told_otherwise(self, nicest: Callable, digits: Path, here: Path):
        figures = nicest("inpaint", digits, "-n", 1, "--steps", 2, "--json").json
        assert [row["mask"] for row in figures["masks"]] == list(FIGURE)
        assert (figures["direction"], figures["noise"]) == ("adam", 0.03)
        assert [file.name for file in here.iterdir()] == ["inpaint.png"]

    def test_takes_every_option_of_the_ascent(self, nicest: Callable, digits: Path, tmp_path: Path):
        done = nicest(
            *("inpaint", digits, "--mask", "top", "-n", 1, "--preset", "authors", "--steps", 3, "--split", "valid"),
            *("--direction", "adam", "--gradient-scale", 0.5, "--seed", 7, "--out", tmp_path / "a.npz", "--json"),
        ).json
        asked = {"steps": 3, "direction": "adam", "gradient_scale": 0.5, "noise": 1.0, "seed": 7, "split": "valid"}
        assert done.items() >= asked.items()

    def test_offers_what_the_ascent_offers(self, nicest: Callable):
        text = nicest("inpaint", "--help").out
        assert f"<{'|'.join(PRESETS)}>" in text
        assert f"<{'|'.join(get_args(fill.Direction))}>" in text


class TestLatent:
    def test_spectrum_draws_a_picture(self, nicest: Callable, digits: Path, tmp_path: Path):
        out = tmp_path / "spectrum.png"
        assert nicest("latent", "spectrum", digits, "--out", out) == (0, f"spectrum in {out}\n", "")
        assert out.stat().st_size > 5000
        done = nicest("latent", "spectrum", digits, "--out", out, "--json").json
        assert len(done["sigma"]) == len(done["pca"]) == 64
        assert "pca" not in nicest("latent", "spectrum", digits, "--no-pca", "--out", out, "--json").json

    def test_takes_the_run_first_too(self, nicest: Callable, digits: Path, tmp_path: Path):
        out = tmp_path / "a.png"
        first, last = (nicest("latent", *words, "--out", out) for words in ((digits, "sphere"), ("sphere", digits)))
        assert first == last == (0, f"sphere of radius 14.51 in {out}\n", "")

    def test_sphere_takes_its_options(self, nicest: Callable, digits: Path, tmp_path: Path):
        options = ["--basis", "top", "--radius", 2.5, "--grid", 4, "--seed", 3, "--out", tmp_path / "a.npz"]
        done = nicest("latent", "sphere", digits, *options, "--json").json
        asked = {"basis": "top", "radius": 2.5, "grid": 4, "seed": 3, "out": str(tmp_path / "a.npz")}
        assert done.items() >= asked.items()

    def test_interpolate_takes_several_pairs(self, nicest: Callable, digits: Path, tmp_path: Path):
        out = tmp_path / "a.png"
        pairs = ["--from", 3, "--to", 8, "--from", 0, "--to", 5]
        assert nicest("latent", "interpolate", digits, *pairs, "--out", out) == (0, f"2 interpolations in {out}\n", "")
        options = [*pairs, "--steps", 4, "--way", "spherical", "--split", "valid", "--out", out, "--json"]
        done = nicest("latent", "interpolate", digits, *options).json
        assert done.items() >= {"pairs": [[3, 8], [0, 5]], "steps": 4, "way": "spherical", "split": "valid"}.items()
        assert "as many --to as --from" in nicest("latent", "interpolate", digits, "--from", 3, "--out", out).refusal

    def test_truncate_prints_the_errors_by_what_is_kept(self, nicest: Callable, digits: Path, tmp_path: Path):
        options = ["-n", 2, "--keep", 64, "--keep", 3, "--out", tmp_path / "a.png"]
        figures = nicest("latent", "truncate", digits, *options, "--json").json
        assert figures["kept"] == [3, 64]
        lines = nicest("latent", "truncate", digits, *options).out.splitlines()
        nice, pca = (f"{figures[f'{name}_errors'][0]:.5f}" for name in ("nice", "pca"))
        assert ["3", nice, pca] in [line.split() for line in lines]
        assert ["64", "0.00000", "0.00000"] in [line.split() for line in lines]


class TestData:
    @pytest.fixture(autouse=True)
    def _home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NICEST_DATA", str(tmp_path / "home"))

    def test_list_says_what_is_here(self, nicest: Callable):
        rows = {row["name"]: row for row in nicest("data", "list", "--json").json["sets"]}
        assert {name: row["present"] for name, row in rows.items()} == {
            "digits": True,
            "mnist": False,
            "cifar10": False,
            "svhn": False,
            "tfd": False,
            "fer2013": False,
        }
        assert rows["mnist"]["dim"] == 784
        assert "3072" in nicest("data", "list").out

    def test_get_of_what_needs_no_getting_is_done_at_once(self, nicest: Callable, tmp_path: Path):
        assert nicest("data", "get", "digits", "--json").json["folder"] == str(tmp_path / "home" / "digits")

    def test_check_of_a_set_that_is_whole_is_exit_code_0(self, nicest: Callable, tmp_path: Path):
        (tmp_path / "home" / "tfd").mkdir(parents=True)
        (tmp_path / "home" / "tfd" / "TFD_48x48.mat").write_bytes(b"no checksum is published")
        assert nicest("data", "check", "tfd") == (0, "ok       TFD_48x48.mat\n", "")

    def test_check_of_missing_files_is_exit_code_1_and_names_them(self, nicest: Callable):
        done = nicest("data", "check", "mnist")
        assert done.code == 1
        assert done.out.count("missing") == 4
        files = nicest("data", "check", "mnist", "--json").json["files"]
        assert [each["status"] for each in files] == ["missing"] * 4


class TestErrors:
    """What becomes of an exception inside a command."""

    @staticmethod
    def breaking(error: BaseException) -> Callable[..., None]:
        def broken(*args: object, **options: object) -> None:
            raise error

        return broken

    def test_that_is_meant_for_the_user_is_one_line_and_exit_code_1(
        self, nicest: Callable, digits: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr("nicest.tasks.evaluate.evaluate", self.breaking(NicestError("expected this, got that")))
        assert nicest("evaluate", digits) == (1, "", "error: expected this, got that\n")

    def test_that_nobody_foresaw_is_one_line_too_and_says_so(
        self, nicest: Callable, digits: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr("nicest.tasks.evaluate.evaluate", self.breaking(ZeroDivisionError("a\nb\n" + "x" * 5000)))
        done = nicest("evaluate", digits)
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
        assert done.err.startswith("error: ZeroDivisionError: a b xxx")
        assert "--debug" in done.err
        assert len(done.err) < 500

    def test_with_debug_is_raised_as_it_is(self, digits: Path, monkeypatch: pytest.MonkeyPatch):
        from nicest.cli import main

        monkeypatch.setattr(sys, "argv", ["nicest", "evaluate", str(digits), "--debug"])
        for error in (NicestError("x"), ZeroDivisionError("y")):
            monkeypatch.setattr("nicest.tasks.evaluate.evaluate", self.breaking(error))
            with pytest.raises(type(error), match=str(error)):
                main()

    def test_interruption_is_exit_code_130_without_a_traceback(
        self, nicest: Callable, digits: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr("nicest.tasks.evaluate.evaluate", self.breaking(KeyboardInterrupt()))
        done = nicest("evaluate", digits)
        assert done.code == 130
        assert "Traceback" not in done.err

    @pytest.mark.parametrize("place", [0, 1, 3])
    def test_debug_may_stand_anywhere(self, nicest: Callable, place: int):
        arguments = ["recipes", "mnist", "--json"]
        arguments.insert(place, "--debug")
        assert nicest(*arguments).json["name"] == "mnist"

    def test_of_a_process_is_one_line_and_a_traceback_with_debug_only(self, process: Callable, tmp_path: Path):
        plain, debug = process("evaluate", tmp_path), process("evaluate", tmp_path, "--debug")
        assert "no run folder" in plain.refusal
        assert debug.code == 1
        assert debug.err.startswith("Traceback")
        assert "NicestError: " in debug.err.splitlines()[-1]


def test_json_has_no_nan_no_infinity_and_no_paths():
    value = {"a": [math.nan, 1.5, (math.inf, -math.inf)], "b": Path("x") / "y", "c": {"d": True, "e": None, "f": 3}}
    assert json.loads(to_json(value)) == {
        "a": [None, 1.5, [None, None]],
        "b": str(Path("x") / "y"),
        "c": {"d": True, "e": None, "f": 3},
    }


class TestVerify:
    """One option of every command that loads a run."""

    COMMANDS = (
        ["evaluate", "RUN", "--draws", 1, "--no-baselines"],
        ["latent", "RUN", "sphere", "--grid", 2, "--out", "a.png"],
    )

    @pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(map(str, command[:3])))
    def test_takes_a_good_run_and_refuses_a_changed_one(
        self, nicest: Callable, digits: Path, here: Path, command: list
    ):
        run = Path(shutil.copytree(digits, here / "run"))
        words = [str(run) if word == "RUN" else word for word in command]
        assert nicest(*words, "--verify").code == 0
        content = bytearray((run / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (run / "model.safetensors").write_bytes(content)
        for more in ([], ["--verify"]):
            line = nicest(*words, *more).refusal
            assert f"{run / 'model.safetensors'} has changed since it was written: expected SHA-256 " in line
        assert nicest(*words, "--no-verify").code == 0

    def test_is_in_the_help_of_every_command_with_a_run(self, nicest: Callable):
        import inspect

        from nicest.cli import app, latent_app

        with_a_run = [
            command.callback
            for group in (app, latent_app)
            for command in group.registered_commands
            if "run" in inspect.signature(command.callback).parameters and command.name != "decompress"
        ]
        assert len(with_a_run) > 15
        assert all("verify" in inspect.signature(each).parameters for each in with_a_run)

    def test_a_changed_state_is_not_gone_on_with(self, nicest: Callable, digits: Path, tmp_path: Path):
        run = Path(shutil.copytree(digits, tmp_path / "run"))
        content = bytearray((run / "last.safetensors").read_bytes())
        content[-1] ^= 1
        (run / "last.safetensors").write_bytes(content)
        line = nicest("train", "digits", "--out", run, "--resume").refusal
        assert f"{run / 'last.safetensors'} has changed since it was written" in line

    def test_a_new_run_has_nothing_to_verify(self, nicest: Callable, tmp_path: Path):
        line = nicest("train", "digits", "--out", tmp_path / "run", "--verify").refusal
        assert "only a run that is resumed can be verified" in line
        assert not (tmp_path / "run").exists()


class TestPrivate:
    def test_a_private_run_says_so_and_records_no_command(self, nicest: Callable, tmp_path: Path):
        assert nicest("train", "digits", "--private", "--out", tmp_path / "run", *TINY).code == 0
        kept = json.loads((tmp_path / "run" / "environment.json").read_text())
        assert (kept["private"], kept["command"]) == (True, None)

    def test_it_is_for_new_runs(self, nicest: Callable, digits: Path):
        assert "private is for a new run" in nicest("train", "digits", "--private", "--resume", "--out", digits).refusal

    def test_loggers_would_name_the_host(self, nicest: Callable, tmp_path: Path):
        line = nicest("train", "digits", "--private", "--logger", "tensorboard", "--out", tmp_path / "run").refusal
        assert "leave out the logger or private" in line
        assert not (tmp_path / "run").exists()


class TestTables:
    """Tasks on tables; tests/tasks has what they compute."""

    def test_a_table_trains_without_a_recipe(self, nicest: Callable, here: Path):
        data = small_runs.people(here / "people.csv", 60)
        done = nicest("train", data, "--target", "weight", "--effort", "low", *TABLE, "--device", "cpu")
        assert done.code == 0, done.err
        recipe = (here / "runs" / "people" / "recipe.toml").read_text()
        assert 'targets = ["weight"]' in recipe
        assert 'effort = "low"' in recipe
        assert (here / "runs" / "people" / "training-scores.npy").exists()

    @pytest.mark.parametrize(
        ("command", "says"),
        [
            ("evaluate RUN", "independent columns"),
            ("score RUN DATA --cells", "log-density of the observed cells"),
            ("impute RUN DATA --cells c.csv", "imputed in imputed.csv"),
            ("predict RUN DATA", "intervals hold"),
            ("sample RUN -n 9 --where height>150", "effective sample size"),
            ("calibrate RUN --out c", "written: c/calibration.json c/calibration.png"),
        ],
    )
    def test_says_in_words_and_in_json(self, nicest: Callable, people: Path, here: Path, command: str, says: str):
        words = [{"RUN": str(people), "DATA": str(people.parent / "people.csv")}.get(w, w) for w in command.split()]
        done = nicest(*words)
        assert (done.code, says in done.out) == (0, True), done
        assert isinstance(nicest(*words, "--json").json, dict)

    @pytest.mark.parametrize(
        ("command", "says"),
        [
            ("score RUN gone.csv", "found no gone.csv"),
            ("impute RUN cut.parquet", "cut.parquet: expected a whole"),
            ("impute RUN other.csv", "lacks 'weight', 'colour', 'member'"),
            ("predict RUN DATA --target hight", "found no column 'hight' (did you mean 'height'?)"),
            ("sample RUN --where height>x", "where:"),
            ("sample RUN --where colour=green", "where:"),
            ("certify RUN", "is a model of a table, but certify needs a flow"),
            ("latent sphere RUN", "is a model of a table, but latent space needs a flow"),
            ("inpaint RUN", "is a model of a table, but inpainting needs a flow"),
            ("export RUN", "is a model of a table, but export needs a flow"),
            ("compress RUN DATA", "is a model of a table, but compression needs a flow"),
            ("train nothing.csv", "missing in all rows"),
        ],
    )
    def test_bad_input_is_one_line(self, nicest: Callable, people: Path, here: Path, command: str, says: str):
        Path("cut.parquet").write_bytes(b"PAR1" + bytes(50))
        Path("other.csv").write_text("height\n" + "170\n180\n" * 9)
        Path("nothing.csv").write_text("a,b\n" + ",\n" * 9)
        words = [{"RUN": str(people), "DATA": str(people.parent / "people.csv")}.get(w, w) for w in command.split()]
        before = sorted(path.name for path in here.iterdir())
        assert says in nicest(*words).refusal
        assert sorted(path.name for path in here.iterdir()) == before

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("a.csv", "table"),
            ("a.tsv", "table"),
            ("s3://bucket/a.parquet", "table"),
            ("rows.npy", "rows"),
            ("images.npy", "images"),
            ("folder", "images"),
            ("run", ""),
            ("mnist", ""),
            ("own.toml", ""),
        ],
    )
    def test_the_recipe_of_own_data(self, here: Path, name: str, kind: str):
        np.save("rows.npy", np.zeros((5, 3)))
        np.save("images.npy", np.zeros((5, 3, 3), np.uint8))
        for folder in ("folder", "run"):
            Path(folder).mkdir()
        Path("run/recipe.toml").touch()
        Path("own.toml").touch()
        assert data_kind(name) == kind
