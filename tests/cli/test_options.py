"""Options and arguments beyond all bounds: one line, within seconds, before anything is opened, computed or written."""

import ast
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import nicest as library
from nicest.cli import explained
from nicest.errors import NicestError

LONG = "x" * 300
TINY = [f"--set={each}" for each in ("model.width=8", "model.hidden_layers=1", "train.epochs=1", "train.batch=40")]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class TestNumbers:
    @pytest.mark.parametrize(
        "arguments",
        [
            "sample RUN -n 99999999999999",
            "sample RUN -n 1.5",
            "sample RUN -n " + "9" * 5000,  # which Python itself refuses to read
            "sample RUN --temperature inf",
            "sample RUN --seed 99999999999999999999999",
            "sample RUN --seed -1",
            "certify RUN -n 99999999999",
            "certify RUN --jacobians 9999999",
            "evaluate RUN --draws 99999999",
            "score RUN FILE --draws 99999999",
            "impute RUN FILE --draws 99999999",
            "impute RUN FILE --interval nan",
            "predict RUN FILE --interval 2",
            "calibrate RUN --seed -1",
            "inpaint RUN --chains 99999999",
            "inpaint RUN --steps 99999999999",
            "inpaint RUN --noise inf",
            "inpaint RUN --gradient-scale nan",
            "inpaint RUN -n 99999999999",
            "latent sphere RUN --grid 99999999",
            "latent sphere RUN --radius inf",
            "latent interpolate RUN --steps 99999999999",
            "latent interpolate RUN --from -1 --to 1",
            "latent truncate RUN -n 99999999999",
            "reproduce table --seeds 99999999999",
            "studio RUN --port 99999999999",
        ],
    )
    def test_out_of_range_are_usage_errors(self, nicest: Callable, arguments: str):
        *_, option, value = arguments.split() if "--to" not in arguments else arguments.split()[:-2]
        line = nicest(*arguments.split()).misuse
        assert line.startswith(f"Invalid value for '{option}': expected a")
        assert re.search(r" from [\d,]+ to [\d,]+, got ", line)
        assert value[:30] in line
        assert len(line) < 250

    @pytest.mark.parametrize("arguments", ["sample RUN -n 1", "sample RUN -n 100000000 --seed 1000000000000"])
    def test_at_the_ends_of_a_range_are_taken(self, nicest: Callable, arguments: str):
        assert "expected a run folder" in nicest(*arguments.split()).refusal

    def test_of_samples_beyond_memory_are_refused_before_any_is_drawn(
        self, nicest: Callable, digits: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr("nicest.inference.engine.Engine.draws", lambda *_, **__: pytest.fail("it draws"))
        line = nicest("sample", digits, "-n", 99_999_999).refusal
        assert "expected 1 to 16,777,216 samples of 64 numbers, got 99,999,999" in line
        assert list(Path().iterdir()) == []

    def test_of_inpainted_images_beyond_memory_are_refused(
        self, nicest: Callable, digits: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr("nicest.tasks.inpaint.LARGEST", 2 * 10 * 3 * 64 * 2)
        ask = ("inpaint", digits, "--mask", "top", "--mask", "left", "--steps", 1, "--chains")
        line = nicest(*ask, 4).refusal
        assert line == "expected at most 7,680 numbers to keep, got 10,240: use fewer images or chains"
        assert nicest(*ask, 3).code == 0

    def test_of_jacobians_are_at_most_those_of_examples(self, nicest: Callable, digits: Path):
        line = nicest("certify", digits, "-n", 10, "--jacobians", 11).refusal
        assert "at most as many Jacobians as there are examples, 10, got 11" in line

    @pytest.mark.parametrize(
        ("setting", "says"),
        [
            ("model.couplings=1000000000", "model.couplings must be from 0 to 1000; got 1000000000"),
            ("model.hidden_layers=1000000000", "from 0 to 1000; got [1000000000]"),
            ("model.width=1000000000", "model.width must be from 1 to 100000; got 1000000000"),
            ("model.width=90000", "model.width must be small enough for 2^32 weights in all; got 90000"),
            ("data.seed=-1", "data.seed must be from 0 to 1000000000000; got -1"),
            ("augment.shift=1e300", "augment.shift must be from 0 to 10000; got 1e+300"),
        ],
    )
    def test_of_settings_are_bounded(self, nicest: Callable, setting: str, says: str):
        assert says in nicest("train", "mnist", "--set", setting).refusal
        assert list(Path().iterdir()) == []


class TestDevice:
    @pytest.mark.parametrize("name", ["meta", "mps", "hpu", "cuda:99999999999", "", "toaster"])
    @pytest.mark.parametrize("command", ["train digits", "sample RUN", "reproduce table --recipe digits"])
    def test_that_is_not_here_is_one_short_line(self, nicest: Callable, digits: Path, command: str, name: str):
        if name == "mps" and torch.backends.mps.is_available():
            pytest.skip("it is here")
        words = [digits if word == "RUN" else word for word in command.split()]
        line = nicest(*words, "--device", name).refusal
        assert line.startswith(f"no device {name!r} here: ")
        assert line.endswith("; try cpu")
        assert len(line) < 200
        assert list(Path().iterdir()) == []


WRITERS = [
    "sample RUN --out",
    "score RUN FILE --out",
    "impute RUN FILE --out",
    "impute RUN FILE --cells",
    "inpaint RUN --out",
    "latent spectrum RUN --out",
    "latent sphere RUN --out",
    "latent interpolate RUN --out",
    "latent truncate RUN --out",
    "reproduce table --out",
    "reproduce table --page",
]
FILLERS = [
    "calibrate RUN --out",
    "train digits --out",
    "demo --out",
    "reproduce table --runs",
    "reproduce figures --out",
]


class TestOutput:
    """Outputs are looked at when they are parsed: before a run that is not there."""

    @pytest.mark.parametrize("command", WRITERS)
    @pytest.mark.parametrize(
        ("out", "says"),
        [
            ("", "expected the name of a file or folder, got an empty string"),
            ("folder", "cannot write folder: it is a folder"),
            ("pipe", "cannot write pipe: it is a pipe or a device"),
            ("file/a.png", "cannot write file/a.png: Not a directory; choose another place"),
            (f"{LONG}.png", "File name too long"),
            (f"{LONG}/a.png", "File name too long"),
        ],
    )
    def test_that_cannot_be_written_is_refused(self, nicest: Callable, command: str, out: str, says: str):
        Path("folder").mkdir()
        Path("file").touch()
        os.mkfifo("pipe")
        assert says in nicest(*command.split(), out).refusal
        assert sorted(path.name for path in Path().iterdir()) == ["file", "folder", "pipe"]

    @pytest.mark.parametrize("command", FILLERS)
    @pytest.mark.parametrize(
        ("out", "says"),
        [
            ("", "got an empty string"),
            ("file", "cannot write file/.lock: Not a directory"),
            (LONG, "File name too long"),
        ],
    )
    def test_folder_that_cannot_be_filled_is_refused(self, nicest: Callable, command: str, out: str, says: str):
        Path("file").touch()
        assert says in nicest(*command.split(), out).refusal
        assert [path.name for path in Path().iterdir()] == ["file"]

    def test_is_no_folder_that_was_made_in_vain(self, nicest: Callable):
        assert "expected a run folder" in nicest("sample", "RUN", "--out", "new/deep/a.png").refusal
        assert list(Path().iterdir()) == []

    def test_is_made_in_new_folders(self, nicest: Callable, digits: Path):
        assert nicest("sample", digits, "-n", 1, "--out", "new/deep/a.png").code == 0
        assert Path("new/deep/a.png").is_file()

    @pytest.fixture
    def images(self) -> Path:
        Path("images").mkdir()
        rng = np.random.default_rng(0)
        for i in range(30):
            Image.fromarray(rng.integers(0, 256, (4, 4), np.uint8)).save(f"images/{i}.png")
        return Path("images")

    def test_is_not_among_the_images_that_are_read(self, nicest: Callable, images: Path, untouched: Callable):
        with untouched(images):
            line = nicest("train", "images", "--data", images, "--out", images).refusal
            assert "expected a separate folder for the run, got images, which holds the data" in line
            assert nicest("train", "images", "--data", images, "--out", "run", *TINY).code == 0
            for command in ("sample", "inpaint", "latent spectrum", "latent sphere"):
                for name in ("0.png", "new.png", "deep/new.png"):
                    line = nicest(*command.split(), "run", "--out", images / name).refusal
                    assert line.startswith("expected a picture outside the images that are read, in ")
            assert "it is a folder" in nicest("score", "run", images, "--out", images).refusal
        assert nicest("score", "run", images, "--out", "scores.csv").code == 0
        assert nicest("sample", "run", "--out", "a.png").code == 0

    def test_beside_a_folder_called_as_the_data_set_is_is_written(self, nicest: Callable, digits: Path):
        Path("digits").mkdir()
        assert nicest("sample", digits, "-n", 1, "--out", "digits/a.png").code == 0


class TestInput:
    @pytest.mark.parametrize(
        "arguments",
        [
            "evaluate SOURCE",
            "evaluate RUN --data SOURCE",
            "train digits --data SOURCE",
            "train digits --set data.name=SOURCE",
            "train SOURCE",
            "recipes SOURCE",
            "score RUN SOURCE",
            "impute RUN SOURCE",
            "calibrate RUN --data SOURCE",
            "inpaint RUN --mask SOURCE",
            "studio SOURCE",
        ],
    )
    @pytest.mark.parametrize("source", ["pipe.npy", "/dev/zero", LONG, ""])
    def test_that_never_ends_or_has_no_name_is_refused(
        self, nicest: Callable, digits: Path, arguments: str, source: str
    ):
        os.mkfifo("pipe.npy")
        places = {"RUN": str(digits), "SOURCE": source}
        words = [places.get(word, word).replace("SOURCE", source) for word in arguments.split()]
        line = nicest(*words).refusal
        says = {"": "got an empty string", LONG: "File name too long"}
        assert says.get(source, f"got {source}, a pipe or a device: write its content to a file") in line

    def test_with_a_line_break_in_its_name_is_shown_on_one_line(self, nicest: Callable, digits: Path):
        Path("a\nb.csv").write_text("a,b\n1,2\n")
        assert nicest("score", digits, "a\nb.csv").refusal.startswith(r"a\nb.csv is a table")

    @pytest.mark.parametrize(
        "command",
        [
            "sample DIGITS -n 1 --out OUT.png",
            "sample PEOPLE -n 4 --out OUT.csv",
            "latent spectrum DIGITS --no-pca --out OUT.png",
            "latent sphere DIGITS --grid 1 --out OUT.npz",
            "latent interpolate DIGITS --steps 2 --out OUT.npz",
            "latent truncate DIGITS --out OUT.npz",
            "inpaint DIGITS --mask top -n 1 --steps 2 --out OUT.npz",
            "score DIGITS IN.npy --draws 1 --out OUT.csv",
            "impute PEOPLE IN.csv --out OUT.csv",
            "predict PEOPLE IN.csv --out OUT.csv",
            "calibrate PEOPLE --out OUT",
            "train digits --out OUT --set train.epochs=1 --set model.width=8 --set model.hidden_layers=1",
            "pack DIGITS --out OUT",
            "compress DIGITS IN.npy --out OUT",
        ],
    )
    def test_with_a_line_break_in_its_name_leaves_the_result_on_its_line(
        self, nicest: Callable, digits: Path, people: Path, command: str
    ):
        np.save("IN.npy", np.zeros((5, 8, 8), np.uint8))
        Path("IN.csv").write_text("height,weight,colour,member\n1,2,red,true\n170,,red,true\n")
        places = {"DIGITS": str(digits), "PEOPLE": str(people)}
        plain, broken = (
            nicest(*(places.get(word, word.replace("OUT", name)) for word in command.split())) for name in ("a", "a\nb")
        )
        assert (plain.code, broken.code) == (0, 0)
        assert "a\\nb" in broken.out
        assert broken.out.count("\n") == plain.out.count("\n")

    def test_that_is_no_table_is_not_imputed(self, nicest: Callable, people: Path):
        np.save("rows.npy", np.zeros((3, 4)))
        line = nicest("impute", people, "rows.npy").refusal
        assert line == "expected a table, a file that ends in .csv, .tsv, .parquet, .arrow, .feather, got 'rows.npy'"


class TestExtras:
    """What is not installed is named with the extra that has it."""

    @pytest.mark.parametrize(
        ("module", "extra", "command"),
        [
            ("pyarrow", "tables", "sample PEOPLE --out a.csv"),
            ("pyarrow", "tables", "score DIGITS rows.npy --out a.parquet"),
            ("pyarrow", "tables", "impute PEOPLE a.csv"),
            ("fastapi", "studio", "studio DIGITS"),
            ("uvicorn", "studio", "studio DIGITS"),
            ("huggingface_hub", "hub", "pull me/digits"),
            ("onnxscript", "export", "export DIGITS --out graphs"),
            ("tensorboard", "loggers", "train digits --logger tensorboard --out run"),
            ("mlflow", "mlflow", "train digits --logger mlflow --out run"),
            ("wandb", "wandb", "train digits --logger wandb --out run"),
        ],
    )
    def test(
        self,
        nicest: Callable,
        digits: Path,
        people: Path,
        monkeypatch: pytest.MonkeyPatch,
        module: str,
        extra: str,
        command: str,
    ):
        for name in [name for name in sys.modules if name.startswith(("nicest.studio", f"{module}."))]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.setattr("nicest.train.callbacks.find_spec", lambda name: None)
        np.save("rows.npy", np.zeros((3, 8, 8), np.uint8))
        Path("a.csv").write_text("height,weight,colour,member\n1,2,red,true\n")
        places = {"DIGITS": str(digits), "PEOPLE": str(people)}
        line = nicest(*(places.get(word, word) for word in command.split())).refusal
        assert f"pip install 'nicest[{extra}]'" in line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (NicestError("expected this, got that"), "expected this, got that"),
        (PermissionError(13, "Permission denied", "a.npy"), "Permission denied: a.npy"),
        (OSError(5, "Input/output error"), "Input/output error"),
        (MemoryError("9 GiB"), "out of memory: ask for less at once, or choose --device cpu (9 GiB)"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
            "out of memory: ask for less at once, or choose --device cpu"
            " (DefaultCPUAllocator: can't allocate memory: 9 bytes)",
        ),
        (
            ModuleNotFoundError("?", name="pyarrow.csv"),
            "pyarrow.csv, which is not installed: pip install 'nicest[tables]'",
        ),
        (ModuleNotFoundError("No module named 'x'", name="x"), "ModuleNotFoundError: No module named 'x' (a bug in"),
        (KeyError("x"), "KeyError: 'x' (a bug in nicest: --debug shows where, please report it)"),
    ],
)
def test_every_error_is_explained(error: Exception, line: str):
    assert line in explained(error)


def test_a_row_that_failed_is_exit_code_1_though_the_others_are_made(nicest: Callable, monkeypatch: pytest.MonkeyPatch):
    def row(entry: object, *_: object) -> dict:
        recipe = entry.recipe  # type: ignore[attr-defined]
        made = {"column": recipe, "reading": "ours", "recipe": recipe, "paper_nats": None, "augmented": False}
        return made | ({"failed": "out of luck"} if recipe == "digits" else {"missing": "needs its data"})

    monkeypatch.setattr("nicest.tasks.reproduce.make_row", row)
    asked = ("reproduce", "table", "--out", "t.json", "--recipe", "mnist")
    assert nicest(*asked).code == 0
    done = nicest(*asked, "--recipe", "digits")
    assert (done.code, done.err) == (1, "digits failed: out of luck\n")
    assert nicest(*asked, "--recipe", "digits", "--json").json["failed"] == {"digits": "out of luck"}
    assert nicest(*asked).code == 0  # what failed before and was not asked for now


WORDS = ("--set", "--data", "--out")  # of commands that are written down, or that the studio runs


def test_the_library_speaks_of_no_options():
    """Who calls it from Python never typed one; a command that is written down is made of them."""
    root = Path(library.__path__[0])
    files = [path for path in root.rglob("*.py") if path.relative_to(root).parts[0] not in ("cli", "tasks", "codec")]
    assert len(files) > 50
    for path in files:
        texts = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        option = re.compile(r"--(out|set|data|device|resume|runs|verify)\b")
        plain = (text for text in texts if text not in WORDS and "nicest " not in str(text))
        assert [text for text in plain if option.search(str(text))] == [], path


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("would fit: set train.batch=50", "would fit: --set train.batch=50"),
        ("leave it out: set 'data.drop=[\"a\"]'", "leave it out: --set 'data.drop=[\"a\"]'"),
        ("or set train.clip (now 0)", "or set train.clip (now 0)"),
        ("set a smaller train.batch", "set a smaller train.batch"),
    ],
)
def test_a_setting_to_be_copied_is_shown_as_an_option(said: str, shown: str):
    assert explained(NicestError(said)) == shown
