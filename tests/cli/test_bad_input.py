"""Bad input: one line that says what was expected, what came and what to do, and nothing that was there is harmed."""

import gzip
import json
import math
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import save_file
from scipy.io import savemat

RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((60, 4)).astype(np.float32)
TINY = [f"--set={each}" for each in ("model.width=8", "model.hidden_layers=1", "train.epochs=1", "train.batch=20")]


def changed(row: int, column: int, value: float) -> np.ndarray:
    rows = ROWS.copy()
    rows[row, column] = value
    return rows


def constant(*columns: int) -> np.ndarray:
    rows = ROWS.copy()
    rows[:, columns] = 3.0
    return rows


def idx(images: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{images.ndim}I", 0, 0, 8, images.ndim, *images.shape) + images.tobytes()


def images(folder: Path, *sizes: tuple[int, int], mode: str = "L") -> None:
    folder.mkdir()
    for i, size in enumerate(sizes):
        Image.new(mode, size).save(folder / f"{i}.png")


def cut(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


def write_cut_npy(path: Path) -> None:
    np.save(path, ROWS)
    cut(path, 0.7)


def write_cut_npz(path: Path) -> None:
    np.savez(path, images=ROWS)
    cut(path, 0.7)


def write_cut_npz_member(path: Path) -> None:
    np.savez_compressed(path, images=ROWS)
    whole = bytearray(path.read_bytes())
    whole[200:260] = b"\0" * 60
    path.write_bytes(whole)


# what is at the path -> how it comes there, and words of the refusal
BAD_DATA: dict[str, tuple[str, Callable[[Path], object], list[str]]] = {
    "a NaN": ("a.npy", lambda p: np.save(p, changed(7, 2, np.nan)), ["finite", "1 NaN", "row 7", "column 2", "drop"]),
    "an infinity": ("a.npy", lambda p: np.save(p, changed(3, 0, -np.inf)), ["finite", "row 3", "column 0", "drop"]),
    "a number beyond float32": ("a.npy", lambda p: np.save(p, ROWS.astype(np.float64) * 1e300), ["finite", "float32"]),
    "one row": ("a.npy", lambda p: np.save(p, ROWS[:1]), ["at least 3 rows", "got 1", "give more rows"]),
    "no row": ("a.npy", lambda p: np.save(p, ROWS[:0]), ["expected rows", "empty", "(0, 4)"]),
    "one column": ("a.npy", lambda p: np.save(p, ROWS[:, :1]), ["at least 2 features", "got 1"]),
    "a constant column": ("a.npy", lambda p: np.save(p, constant(1)), ["1 of 4 columns", "constant", "drop"]),
    "constant columns": ("a.npy", lambda p: np.save(p, constant(0, 3)), ["2 of 4", "columns 0, 3", "drop"]),
    "words": ("a.npy", lambda p: np.save(p, np.array([["a", "b"]] * 9)), ["expected numbers", "<U1", "float32"]),
    "negative integers": ("a.npy", lambda p: np.save(p, np.full((9, 2), -4)), ["0..255", "-4..-4", "uint8"]),
    "objects": (
        "a.npy",
        lambda p: np.save(p, np.array([{}, 1], dtype=object), allow_pickle=True),
        ["expected a whole .npy file of numbers"],
    ),
    "a cut npy": ("a.npy", write_cut_npy, ["expected a whole .npy file", "1088 bytes", "got 761"]),
    "a cut npz": ("a.npz", write_cut_npz, ["expected a whole .npz file", "bytes"]),
    "a damaged npz": ("a.npz", write_cut_npz_member, ["expected a whole .npz file"]),
    "an npz with other keys": ("a.npz", lambda p: np.savez(p, y=ROWS, z=ROWS), ["train and test", "got 'y', 'z'"]),
    "a cut idx": (
        "a-idx3-ubyte",
        lambda p: p.write_bytes(idx(np.zeros((9, 4, 4), np.uint8))[:-20]),
        ["expected 160 bytes", "got 140", "get it again"],
    ),
    "a cut gzipped idx": (
        "a-idx3-ubyte.gz",
        lambda p: p.write_bytes(gzip.compress(idx(RNG.integers(0, 256, (9, 4, 4), np.uint8)))[:-30]),
        ["expected 160 bytes", "got ", "get it again"],
    ),
    "idx in name only": ("a-idx3-ubyte", lambda p: p.write_bytes(b"<html>"), ["magic number", "3c 68 74 6d"]),
    "an empty folder": ("a", lambda p: p.mkdir(), ["expected images", "found none"]),
    "images of two sizes": ("a", lambda p: images(p, (4, 4), (5, 4)), ["one size", "4x4", "5x4", "resize"]),
    "images with transparency": ("a", lambda p: images(p, (4, 4), mode="RGBA"), ["grey or RGB", "RGBA", "convert"]),
    "an image that is none": (
        "a",
        lambda p: (p.mkdir(), (p / "x.png").write_bytes(b"no image")),
        ["expected an image", "x.png", "remove"],
    ),
    "an unknown kind of file": ("a.txt", lambda p: p.write_text("1,2\n"), ["expected .csv", ".npy", "a.txt"]),
    "nothing": ("a.npy", lambda p: None, ["expected a file or folder", "a.npy"]),
}


class TestData:
    @pytest.mark.parametrize("name", BAD_DATA)
    def test_that_is_bad_is_refused_by_name(self, nicest: Callable, tmp_path: Path, untouched: Callable, name: str):
        file, write, words = BAD_DATA[name]
        (tmp_path / "data").mkdir()
        write(tmp_path / "data" / file)
        with untouched(tmp_path / "data"):
            line = nicest("train", "digits", "--data", tmp_path / "data" / file, "--out", tmp_path / "run").refusal
        for word in [*words, file.removesuffix(".npy").removesuffix(".npz")]:
            assert word in line, word
        assert not (tmp_path / "run" / "model.safetensors").exists()

    def test_that_is_bad_can_be_put_right_in_the_same_run_folder(self, nicest: Callable, tmp_path: Path):
        path, run = tmp_path / "a.npy", tmp_path / "run"
        np.save(path, changed(0, 0, np.nan))
        assert nicest("train", "digits", "--data", path, "--out", run, *TINY).code == 1
        np.save(path, ROWS)
        assert nicest("train", "digits", "--data", path, "--out", run, *TINY).code == 0

    @pytest.mark.parametrize("command", ["evaluate", "certify"])
    @pytest.mark.parametrize(
        ("now", "words"),
        [(ROWS[:, :3], ["(3,)", "(4,)"]), ((ROWS * 9 + 99).astype(np.uint8), ["256", "levels"])],
        ids=["fewer features", "levels for numbers"],
    )
    def test_that_changed_under_a_run_is_refused(
        self, nicest: Callable, own_table: Path, untouched: Callable, command: str, now: np.ndarray, words: list[str]
    ):
        np.save(own_table.parent / "rows.npy", now)
        with untouched(own_table.parent):
            line = nicest(command, own_table).refusal
        for word in [*words, "rows.npy", "as in training", "provide the same data"]:
            assert word in line, word

    def test_that_is_gone_is_refused_though_samples_can_still_be_drawn(self, nicest: Callable, own_table: Path):
        (own_table.parent / "rows.npy").unlink()
        assert "rows.npy" in nicest("evaluate", own_table).refusal
        assert nicest("sample", own_table, "--out", own_table.parent / "a.npy").code == 0

    def test_with_dependent_columns_takes_two_baselines_and_leaves_the_rest(self, nicest: Callable, tmp_path: Path):
        np.save(tmp_path / "a.npy", np.concatenate((ROWS, ROWS[:, :1]), axis=1))
        assert nicest("train", "digits", "--data", tmp_path / "a.npy", "--out", tmp_path / "run", *TINY).code == 0
        shown = nicest("evaluate", tmp_path / "run")
        assert shown.code == 0
        assert shown.out.count("dependent columns, or too few rows") == 2
        scores = json.loads(nicest("evaluate", tmp_path / "run", "--json").out)["baselines"]
        assert scores["full_gaussian"] is scores["zca_logistic"] is None
        assert scores["diagonal_gaussian"] is not None

    def test_that_grew_since_training_is_refused(self, nicest: Callable, tmp_path: Path):
        """Its split is another one: rows that were trained on would be tested on."""
        np.save(tmp_path / "a.npy", ROWS)
        assert nicest("train", "digits", "--data", tmp_path / "a.npy", "--out", tmp_path / "run", *TINY).code == 0
        np.save(tmp_path / "a.npy", np.concatenate((ROWS, ROWS[:1] + 1)))
        assert "a.npy has changed since the run was trained" in nicest("evaluate", tmp_path / "run").refusal

    def test_far_from_zero_for_its_spread_is_refused(self, nicest: Callable, tmp_path: Path):
        np.save(tmp_path / "a.npy", ROWS + np.array([0, 1e7, 0, 0]))
        line = nicest("train", "digits", "--data", tmp_path / "a.npy", "--out", tmp_path / "run", *TINY).refusal
        assert all(word in line for word in ("column 1", "float32", "subtract an offset"))
        assert not (tmp_path / "run").exists()

    def test_of_other_levels_than_are_said_is_refused(self, nicest: Callable, tmp_path: Path):
        np.save(tmp_path / "a.npy", np.arange(200, dtype=np.uint8).reshape(50, 4) % 17)
        said = ("train", "digits", "--data", tmp_path / "a.npy", *TINY)
        line = nicest(*said, "--out", tmp_path / "run", "--set", "data.levels=9").refusal
        assert "has values up to 16: data.levels=9 does not fit it" in line
        assert nicest(*said, "--out", tmp_path / "run", "--set", "data.levels=17").code == 0
        assert json.loads(nicest("evaluate", tmp_path / "run", "--json").out)["level_terms"] == {
            "dequantise": pytest.approx(-4 * math.log(17), rel=1e-6)
        }

    def test_of_ones_own_is_not_compared_with_the_paper(self, nicest: Callable, tmp_path: Path):
        np.save(tmp_path / "a.npy", ROWS)
        code = nicest("train", "mnist", "--data", tmp_path / "a.npy", "--out", tmp_path / "run", *TINY).code
        assert code == 0
        shown = nicest("evaluate", tmp_path / "run").out
        assert "paper" not in shown
        assert "a.npy, test split" in shown
        assert "in the units of the data" in shown


class TestDataHome:
    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("NICEST_DATA", str(tmp_path / "home"))
        return tmp_path / "home"

    def test_without_the_data_set_says_how_to_get_it(self, nicest: Callable, home: Path, tmp_path: Path):
        line = nicest("train", "mnist", "--out", tmp_path / "run").refusal
        for word in ("train-images-idx3-ubyte.gz", str(home / "mnist"), "nicest data get mnist"):
            assert word in line, word

    def test_offline_says_where_each_file_comes_from_and_goes(
        self, nicest: Callable, home: Path, monkeypatch: pytest.MonkeyPatch
    ):
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        line = nicest("data", "get", "mnist").refusal
        for word in ("cannot download train-images-idx3-ubyte.gz", f"put it in {home / 'mnist'}", "https://"):
            assert word in line, word
        assert not list((home / "mnist").glob("*"))

    def test_with_a_damaged_file_fails_the_check_and_leaves_the_file(
        self, nicest: Callable, home: Path, untouched: Callable
    ):
        (home / "mnist").mkdir(parents=True)
        (home / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"damaged")
        with untouched(home):
            done = nicest("data", "check", "mnist")
            files = nicest("data", "check", "mnist", "--json").json["files"]
        assert (done.code, done.err) == (1, "")
        (row,) = [line for line in done.out.splitlines() if "t10k-labels" in line]
        assert "wrong checksum" in row
        assert "expected ec29112dd5afa0611ce80d1b7f02629c" in row
        assert [each["status"].split(":")[0] for each in files] == ["missing", "missing", "missing", "wrong checksum"]

    def test_with_a_cut_mat_file_says_to_get_it_again(self, nicest: Callable, home: Path, tmp_path: Path):
        (home / "svhn").mkdir(parents=True)
        for part in ("train", "test"):
            pixels = RNG.integers(0, 256, (32, 32, 3, 20), np.uint8)
            savemat(home / "svhn" / f"{part}_32x32.mat", {"X": pixels}, do_compression=True)
        cut(home / "svhn" / "train_32x32.mat", 0.5)
        line = nicest("train", "svhn", "--out", tmp_path / "run").refusal
        for word in ("train_32x32.mat", "expected a MATLAB file", "bytes", "get it again"):
            assert word in line, word

    @pytest.mark.parametrize("command", ["get", "check"])
    def test_an_unknown_set_is_refused_with_the_known_ones(self, nicest: Callable, command: str):
        line = nicest("data", command, "minst").refusal
        assert "did you mean 'mnist'?" in line
        assert "cifar10, digits, fer2013, mnist, svhn, tfd" in line


BAD_RECIPES = {
    "an unknown recipe": (["mnits"], ["no recipe 'mnits'", "did you mean 'mnist'?", "cifar10", ".toml"]),
    "a recipe file that is not there": (["x.toml"], ["no recipe file x.toml", "mnist"]),
    "an unknown key": (["digits", "--set", "train.epoch=3"], ["unknown key", "'train.epoch'", "'train.epochs'"]),
    "an unknown section": (["digits", "--set", "training.lr=3"], ["unknown key", "'training'"]),
    "a word for a number": (["digits", "--set", "train.epochs=many"], ["train.epochs", "int", "'many'"]),
    "a number without a meaning": (["digits", "--set", "train.epochs=0"], ["train.epochs", "at least 1", "got 0"]),
    "an unknown choice": (["digits", "--set", "model.law=afine"], ["additive", "'afine'", "did you mean 'affine'?"]),
    "no value": (["digits", "--set", "train.epochs"], ["KEY=VALUE", "train.epochs=50", "'train.epochs'"]),
    "a device that is not here": (["digits", "--device", "toaster"], ["no device 'toaster'", "try cpu"]),
}


class TestRecipe:
    @pytest.mark.parametrize("name", BAD_RECIPES)
    def test_that_is_bad_is_refused(self, nicest: Callable, here: Path, name: str):
        arguments, words = BAD_RECIPES[name]
        line = nicest("train", *arguments).refusal
        for word in words:
            assert word in line, word
        assert not list(here.rglob("*.safetensors"))

    def test_data_in_place_of_a_recipe_or_of_a_run(self, nicest: Callable, tmp_path: Path):
        table = tmp_path / "people.csv"
        table.write_text("a,b\n1,2\n")
        assert "expected one data set" in nicest("train", table, "--data", table).refusal
        assert "is a table, not a model: train one" in nicest("studio", table).refusal
        (tmp_path / "recipe.toml").touch()
        assert "no recipe" in nicest("train", tmp_path).refusal

    def test_file_with_a_bad_key_is_named(self, nicest: Callable, tmp_path: Path):
        (tmp_path / "own.toml").write_text("[model]\nwitdh = 3\n")
        line = nicest("train", tmp_path / "own.toml", "--out", tmp_path / "run").refusal
        assert all(word in line for word in ("own.toml", "'model.witdh'", "'model.width'"))

    @pytest.mark.parametrize("content", [b"[model\n", b"\xff\xfe\x00"], ids=["broken TOML", "no text"])
    def test_file_that_cannot_be_read_is_named(self, nicest: Callable, tmp_path: Path, content: bytes):
        (tmp_path / "own.toml").write_bytes(content)
        assert "own.toml" in nicest("train", tmp_path / "own.toml", "--out", tmp_path / "run").refusal


class TestRun:
    @pytest.mark.parametrize("command", ["evaluate", "certify", "sample", "inpaint", "latent"])
    @pytest.mark.parametrize("there", ["an empty folder", "nothing"])
    def test_that_is_none_is_refused(
        self, nicest: Callable, tmp_path: Path, untouched: Callable, command: str, there: str
    ):
        path = tmp_path if there == "an empty folder" else tmp_path / "nothing"
        with untouched(tmp_path):
            line = nicest(command, path, *(["spectrum"] if command == "latent" else [])).refusal
        for word in ("expected a run folder", "model.safetensors", str(path), "nicest train"):
            assert word in line, word
        assert ("does not exist" in line) == (there == "nothing")

    @pytest.mark.parametrize("command", ["evaluate", "sample"])
    @pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.99])
    def test_with_a_cut_model_is_refused_and_left_alone(
        self, nicest: Callable, table: Path, tmp_path: Path, untouched: Callable, command: str, keep: float
    ):
        run = Path(shutil.copytree(table, tmp_path / "run"))
        cut(run / "model.safetensors", keep)
        with untouched(tmp_path):
            line = nicest(command, run).refusal
        assert "model.safetensors" in line
        assert "truncated or damaged" in line

    def test_with_a_cut_state_is_not_resumed_and_left_alone(
        self, nicest: Callable, table: Path, tmp_path: Path, untouched: Callable
    ):
        run = Path(shutil.copytree(table, tmp_path / "run"))
        cut(run / "last.safetensors", 0.5)
        with untouched(tmp_path):
            line = nicest("train", "digits", "--out", run, "--resume").refusal
        assert "last.safetensors" in line
        assert "truncated or damaged" in line

    @pytest.mark.parametrize(
        ("written", "words"),
        [("nicest 99", ["format 99", "up to", "upgrade"]), ("pt", ["not written by nicest", "'nicest ", "'pt'"])],
        ids=["a newer format", "another program's format"],
    )
    def test_of_a_format_we_do_not_read_is_refused(
        self, nicest: Callable, table: Path, tmp_path: Path, written: str, words: list[str]
    ):
        with safe_open(table / "model.safetensors", framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        save_file(tensors, tmp_path / "model.safetensors", metadata | {"format": written})
        line = nicest("evaluate", tmp_path).refusal
        for word in words:
            assert word in line, word

    def test_whose_weights_are_of_another_recipe_is_refused(self, nicest: Callable, table: Path, tmp_path: Path):
        with safe_open(table / "model.safetensors", framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        recipe = metadata["recipe"].replace("width = 8 ", "width = 9 ")
        assert recipe != metadata["recipe"]
        save_file(tensors, tmp_path / "model.safetensors", metadata | {"recipe": recipe})
        assert "do not fit the recipe" in nicest("evaluate", tmp_path).refusal

    def test_that_is_there_already_is_not_written_over(
        self, nicest: Callable, table: Path, tmp_path: Path, untouched: Callable
    ):
        run = Path(shutil.copytree(table, tmp_path / "run"))
        with untouched(run):
            line = nicest("train", "digits", "--out", run, *TINY).refusal
        for word in ("holds a run already", "resume it", "another folder"):
            assert word in line, word

    def test_that_has_nothing_to_resume_is_refused(self, nicest: Callable, tmp_path: Path, untouched: Callable):
        with untouched(tmp_path):
            line = nicest("train", "digits", "--out", tmp_path / "run", "--resume").refusal
        assert "nothing to resume" in line

    def test_as_a_process_is_refused_in_one_line(self, process: Callable, tmp_path: Path):
        np.save(tmp_path / "a.npy", changed(1, 1, np.nan))
        line = process("train", "digits", "--data", tmp_path / "a.npy", "--out", tmp_path / "run").refusal
        assert "row 1, column 1" in line


class TestMemory:
    """That runs out; on a CPU, by raising what a GPU raises."""

    @pytest.fixture
    def tight(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], None]:
        """Of so many rows at once, in one method of a flow."""
        from torch import OutOfMemoryError

        from nicest.flows import Flow

        def of(rows: int, method: str) -> None:
            real = getattr(Flow, method)

            def tight(flow: Flow, x: np.ndarray, *rest: object, **options: bool) -> object:
                if len(x) > rows:
                    raise OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB")
                return real(flow, x, *rest, **options)

            monkeypatch.setattr(Flow, method, tight)

        return of

    @pytest.mark.filterwarnings("ignore:out of memory with")  # validation halves its batches
    def test_names_the_batch_that_would_fit_and_trains_with_it(self, nicest: Callable, tmp_path: Path, tight: Callable):
        tight(50, "forward")
        asked = ("train", "digits", "--out", tmp_path / "run", "--device", "cpu", *TINY)
        line = nicest(*asked, "--set=train.batch=400").refusal
        assert line.endswith("with a batch of 400: a batch of 50 would fit: --set train.batch=50")
        assert nicest(*asked, "--set=train.batch=50").code == 0

    @pytest.mark.filterwarnings("always:out of memory")
    @pytest.mark.parametrize(
        ("command", "method"), [(["evaluate"], "terms"), (["sample", "-n", 300, "--out", "a.npy"], "decode")]
    )
    def test_lets_evaluation_and_samples_go_on_with_fewer_rows(
        self, nicest: Callable, digits: Path, here: Path, tight: Callable, command: list, method: str
    ):
        tight(100, method)
        done = nicest(command[0], digits, "--device", "cpu", *command[1:])
        assert done.code == 0
        first, *_ = done.err.splitlines()
        assert first.startswith("warning: out of memory with ")
        assert " rows at once: going on with " in first

    def test_anywhere_else_is_one_line(self, nicest: Callable, digits: Path, tight: Callable, tmp_path: Path):
        tight(0, "log_prob")
        line = nicest("inpaint", digits, "--steps", 1, "--out", tmp_path / "a.npz", "--device", "cpu").refusal
        assert line.startswith("out of memory: ask for less at once, or choose --device cpu (CUDA out of memory. Tried")


class TestOut:
    @pytest.mark.parametrize("name", ["a.jpg", "a", "a.npy.txt"])
    def test_of_samples_of_another_kind_is_refused(self, nicest: Callable, table: Path, tmp_path: Path, name: str):
        line = nicest("sample", table, "--out", tmp_path / name).refusal
        assert ".png, .npy, .npz" in line
        assert list(tmp_path.iterdir()) == []

    def test_of_rows_as_a_picture_is_refused(self, nicest: Callable, table: Path, tmp_path: Path):
        line = nicest("sample", table, "--out", tmp_path / "a.png").refusal
        assert "rows of 4 numbers are not images" in line
        assert "samples.npy" in line

    def test_of_a_spectrum_of_another_kind_is_refused(self, nicest: Callable, table: Path, tmp_path: Path):
        line = nicest("latent", table, "spectrum", "--out", tmp_path / "a.xyz").refusal
        assert "expected a picture such as .png" in line
        assert "a.xyz" in line


def mount(folder: Path, options: str) -> None:
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command: no disk of our own to fill or to close")
    if done.returncode:
        reason = done.stderr.partition("\n")[0].rpartition(": ")[2]
        pytest.skip(f"a disk of our own needs the right to mount one ({reason})")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 200 kB."""
    disk = tmp_path / "disk"
    mount(disk, "size=200k")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture
def closed_disk(tmp_path: Path, digits: Path) -> Iterator[Path]:
    """A disk that holds a run and a picture, and takes nothing more."""
    disk = tmp_path / "disk"
    mount(disk, "size=10m")
    shutil.copytree(digits, disk / "run")
    (disk / "a.png").write_bytes(b"before")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path, spare: int = 0) -> None:
    """Take what room there is, but for `spare` bytes."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize
    (disk / "filler").write_bytes(b"\0" * (free - spare))


class TestFullDisk:
    def test_stops_training_before_it_starts_and_leaves_no_half_file(self, nicest: Callable, small_disk: Path):
        fill(small_disk, spare=16_384)
        line = nicest("train", "digits", "--out", small_disk / "run", *TINY).refusal
        assert "last.safetensors" in line
        assert "No space left on device" in line
        assert not list((small_disk / "run").glob("*.safetensors"))
        assert not list((small_disk / "run").glob(".*.tmp"))

    @pytest.mark.parametrize(
        ("command", "name"),
        [
            (["sample", "RUN", "--out", "a.png"], "a.png"),
            (["sample", "RUN", "--out", "a.npy", "-n", "900"], "a.npy"),
            (["latent", "RUN", "spectrum", "--out", "a.png"], "a.png"),
        ],
    )
    def test_leaves_what_was_there_before(
        self, nicest: Callable, digits: Path, small_disk: Path, untouched: Callable, command: list[str], name: str
    ):
        (small_disk / name).write_bytes(b"before")
        fill(small_disk)
        places = {"RUN": digits, name: small_disk / name}
        with untouched(small_disk):
            line = nicest(*(places.get(each, each) for each in command)).refusal
        assert f"cannot write {small_disk / name}: No space left on device" in line
        assert "untouched" in line

    def test_leaves_the_run_it_was_to_go_on_with(self, nicest: Callable, table: Path, small_disk: Path):
        run = Path(shutil.copytree(table, small_disk / "run"))
        before = (run / "last.safetensors").read_bytes()
        fill(small_disk, spare=8192)
        data = table.parent / "rows.npy"
        done = nicest("train", "digits", "--out", run, "--resume", "--data", data, "--set=train.epochs=9")
        assert done.code == 1
        assert done.err.splitlines()[-1].startswith("error: cannot write")
        assert "No space left on device" in done.err
        assert (run / "last.safetensors").read_bytes() == before
        assert nicest("evaluate", run, "--data", data, "--no-baselines").code == 0
        (small_disk / "filler").unlink()
        assert nicest("train", "digits", "--out", run, "--resume", "--data", data, "--set=train.epochs=3").code == 0

    def test_of_a_process_with_a_limit_on_files_is_one_line(self, process: Callable, tmp_path: Path):
        run = tmp_path / "run"
        limit = "import resource, sys; sys.dont_write_bytecode = True; "
        limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (7000, 7000))"
        line = process("train", "digits", "--out", run, *TINY, first=limit).refusal
        assert f"cannot write {run / 'last.safetensors'}" in line
        assert not list(run.glob("*.safetensors"))
        assert not list(run.glob(".*.tmp"))


class TestClosedDisk:
    """A folder without the right to write in it; for root, who has every right, a disk that is read-only."""

    @pytest.mark.parametrize(
        ("command", "culprit"),
        [
            (["train", "digits", "--out", "new"], "new"),
            (["train", "digits", "--out", "run", "--resume", "--set=train.epochs=9"], "run"),
            (["sample", "run", "--out", "a.png"], "a.png"),
            (["latent", "run", "spectrum"], "spectrum.png"),
            (["certify", "run", "-n", "4", "--jacobians", "1"], "certificate.json"),
        ],
        ids=lambda value: value if isinstance(value, str) else value[0],
    )
    def test_takes_nothing_and_says_so(
        self,
        nicest: Callable,
        closed_disk: Path,
        untouched: Callable,
        monkeypatch: pytest.MonkeyPatch,
        command: list[str],
        culprit: str,
    ):
        monkeypatch.chdir(closed_disk)
        with untouched(closed_disk):
            line = nicest(*command).refusal
        assert "cannot write" in line
        assert culprit in line
        assert "Read-only file system" in line

    def test_lets_a_run_be_evaluated(self, nicest: Callable, closed_disk: Path):
        assert nicest("evaluate", closed_disk / "run", "--draws", 1, "--json").json["n"] == 180

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere: the read-only disk stands for it")
    def test_by_its_rights_takes_nothing_either(self, nicest: Callable, tmp_path: Path):
        (tmp_path / "closed").mkdir(mode=0o555)
        line = nicest("train", "digits", "--out", tmp_path / "closed" / "run", *TINY).refusal
        assert "Permission denied" in line
        assert str(tmp_path / "closed" / "run") in line
