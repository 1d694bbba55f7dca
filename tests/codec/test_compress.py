"""`nicest compress` and `nicest decompress`: files, and what is said of those that do not fit."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import nicest
from nicest.cli import app
from nicest.codec.codec import Codec
from nicest.codec.container import write_blocks
from nicest.codec.files import compress, decompress
from nicest.data import load
from nicest.errors import NicestError
from nicest.runs.run import Run

pytest.importorskip("constriction", reason="compression needs constriction: install nicest[codec]")


@pytest.fixture(scope="module")
def run() -> Run:
    return Run("digits-conv")


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return load("digits").test[:5].reshape(-1, 8, 8)


def test_files_come_back_in_one_array(run: Run, images: np.ndarray, tmp_path: Path):
    np.save(tmp_path / "some.npy", images[:3])
    idx = struct.pack(">BBBB3I", 0, 0, 8, 3, 2, 8, 8) + images[3:].tobytes()
    (tmp_path / "others-idx3-ubyte").write_bytes(idx)
    out = tmp_path / "packed.nicest"
    result = compress(run, [tmp_path / "some.npy", tmp_path / "others-idx3-ubyte"], out=out)
    assert result.rows == 5
    assert result.bytes == out.stat().st_size
    assert result.raw_bytes == 5 * 64
    assert str(tmp_path).encode() not in out.read_bytes()
    asked = ["decompress", str(out), "--out", str(tmp_path / "back.npy"), "--json"]
    answer = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert json.loads(answer.stdout)["files"] == [
        {"name": "some.npy", "rows": 3},
        {"name": "others-idx3-ubyte", "rows": 2},
    ]
    back = np.load(tmp_path / "back.npy")
    assert back.dtype == np.uint8
    assert np.array_equal(back, images)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "back.npy",
        "others-idx3-ubyte",
        "packed.nicest",
        "some.npy",
    ]


def test_a_failure_leaves_what_was_there(run: Run, images: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "packed.nicest"
    out.write_text("before")
    np.save(tmp_path / "some.npy", images[:2])
    monkeypatch.setattr(Codec, "decode", lambda self, block, expected=0: np.zeros((2, 64), np.uint8))
    with pytest.raises(NicestError, match="a block did not decode"):
        compress(run, [tmp_path / "some.npy"], out=out)
    assert out.read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 2


def test_other_files_are_refused(run: Run, images: np.ndarray, tmp_path: Path):
    path, out = tmp_path / "some.npy", tmp_path / "packed.nicest"
    for array, match in [
        (np.zeros((3, 9, 9), np.uint8), r"expected shape \(8, 8\)"),
        (images + np.uint8(100), "expected levels 0..16"),
        (images.astype(np.float32), "continuous"),
    ]:
        np.save(path, array)
        with pytest.raises(NicestError, match=match):
            compress(run, [path], out=out)
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(NicestError, match=r"expected images or an array .* got a table"):
        compress(run, [tmp_path / "t.csv"], out=out)
    path.write_bytes(b"")
    with pytest.raises(NicestError, match="0 bytes"):
        compress(run, [path], out=out)
    with pytest.raises(NicestError, match="got an empty one"):
        decompress(path, out=tmp_path / "back.npy")
    assert not out.exists()


def test_models_of_another_kind_are_refused(run: Run, images: np.ndarray, tmp_path: Path):
    path, out = tmp_path / "some.npy", tmp_path / "packed.nicest"
    np.save(path, images[:2])
    with pytest.raises(NicestError, match="is a model given labels, which cannot compress"):
        compress(nicest.open("mnist-labels"), [path], out=out)
    compress(run, [path], out=out)
    with pytest.raises(NicestError, match="expected the model that compressed it"):
        decompress(out, out=tmp_path / "back.npy", run="svhn-conv")
    assert not (tmp_path / "back.npy").exists()


def test_a_table_of_an_earlier_version_is_refused(tmp_path: Path):
    path = tmp_path / "packed.nicest"
    header = {"run": "wine", "model": "0" * 64, "shape": [3], "rows": 0, "block": 1, "table": {"suffix": ".csv"}}
    with path.open("wb") as file:
        write_blocks(file, header, [])
    with pytest.raises(NicestError, match="holds a table, which nicest no longer compresses"):
        decompress(path, out=tmp_path / "back.csv")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "\ud800", "", "nowhere/at all", 7, None])
def test_a_file_that_names_no_model_is_refused(name: object, tmp_path: Path):
    path = tmp_path / "packed.nicest"
    with path.open("wb") as file:
        write_blocks(file, {"run": name, "model": "0" * 64, "shape": [8, 8], "rows": 0, "block": 1}, [])
    with pytest.raises(NicestError, match=r"which is not here|does not say which model") as found:
        decompress(path, out=tmp_path / "back.npy")
    assert str(found.value).isprintable()
    assert len(str(found.value)) < len(str(path)) + 1000
