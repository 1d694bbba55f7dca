"""Endpoints of a model of a table, and trainings from the page, asked in this process."""

import io
import json
import os
import signal
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import nicest
from nicest.recipes import load_recipe
from nicest.studio import limits
from nicest.studio.server import create_app
from nicest.studio.trainer import Trainer
from nicest.train.fit import train
from studio.conftest import DIGITS, PEOPLE, Ask, asking


class TestRows:
    def test_columns_are_described(self, ask: Ask):
        height, _, colour = ask("GET", f"{PEOPLE}/columns").json()["columns"]
        assert (height["name"], height["kind"], height["values"]) == ("height", "real", [])
        assert 130 < height["low"] < 150 < 190 < height["high"] < 210
        assert (colour["kind"], colour["values"], colour["low"]) == ("category", ["blue", "red"], None)

    def test_draws_have_histograms_and_meet_conditions(self, ask: Ask, table: Path):
        """Weight is 0.4 of height plus N(0, 1)."""
        found = ask("GET", f"{PEOPLE}/rows?n=3&of=500").json()
        assert found["columns"] == ["height", "weight", "colour"]
        assert (len(found["rows"]), found["probability"], found["effective_size"]) == (3, 1, 500)
        assert [sum(each["counts"]) for each in found["histograms"]] == [500, 500, 500]
        assert set(found["histograms"][2]["values"]) == {"red", "blue"}
        asked = {"n": 50, "of": 400, "where": 'height > 175 and `colour` = "red"'}
        tall = ask("GET", f"{PEOPLE}/rows", params=asked).json()
        assert all(row[0] > 175 and row[2] == "red" for row in tall["rows"])
        assert tall["histograms"][2]["counts"] == [400, 0]
        assert np.mean([row[1] for row in tall["rows"]]) == pytest.approx(72, abs=2)
        samples = nicest.open(table).table.sample(20_000).rows
        column = nicest.open(table).schema[0]
        assert tall["probability"] == pytest.approx(np.mean(column.plain(samples[:, 0]) > 175), rel=0.15)
        assert 20 < tall["effective_size"] <= 400
        for where, line in (("nose = 1", "found no column"), ("height >", "expected conditions"), ("x" * 2001, "2000")):
            answer = ask("GET", f"{PEOPLE}/rows", params={"where": where})
            assert answer.status_code == 422
            assert line in answer.json()["error"]

    def test_each_column_is_predicted_from_the_others(self, ask: Ask):
        found = ask("POST", f"{PEOPLE}/row", json={"cells": {"height": 185, "colour": "red"}}).json()["cells"]
        height, weight, colour = found
        assert (height["value"], height["known"], colour["value"], colour["known"]) == (185, True, "red", True)
        assert (weight["known"], weight["tail"]) == (False, None)
        assert weight["value"] == pytest.approx(74, abs=1.5)
        assert weight["low"] < weight["value"] < weight["high"]
        assert weight["high"] - weight["low"] == pytest.approx(3.3, rel=0.5)  # 90 % of N(0, 1)
        assert sum(weight["histogram"]["counts"]) == pytest.approx(0.99, abs=0.01)
        assert weight["histogram"]["low"] < weight["low"] < weight["high"] < weight["histogram"]["high"]
        assert colour["tail"] > 0.3
        assert (colour["low"], sum(colour["histogram"]["counts"])) == (None, pytest.approx(1, abs=1e-3))
        odd = ask("POST", f"{PEOPLE}/row", json={"cells": {"height": 170, "weight": 90, "colour": "red"}}).json()
        assert odd["cells"][1]["tail"] < 0.02
        assert odd["cells"][1]["high"] < 90

    @pytest.mark.parametrize(
        ("cells", "line"),
        [
            ({"nose": 1}, "expected columns of the model, got 'nose'"),
            ({"height": "tall"}, "expected a number in column 'height', got 'tall'"),
            ({"height": True}, "expected a number in column 'height', got 'True'"),
            ({"height": 1e30}, "choose a value like those of training"),
            ({"height": 1e999}, "finite number"),
            ({"colour": "green"}, "column 'colour' holds"),
            (dict.fromkeys(map(str, range(3000))), "expected columns of the model"),
        ],
    )
    def test_a_wrong_row_is_refused(self, ask: Ask, cells: dict[str, Any], line: str):
        typed = {"Content-Type": "application/json"}
        answer = ask("POST", f"{PEOPLE}/row", content=json.dumps({"cells": cells}), headers=typed)
        assert answer.status_code == 422
        assert line in answer.json()["error"]

    def test_dates_grids_and_flags(self, tmp_path: Path):
        """A date, a column in steps of 2, a few numbers and a flag: described, predicted and refused in words."""
        rng = np.random.default_rng(0)
        lines = [
            f"2024-{1 + i % 12:02d}-{1 + i % 28:02d},{2 * rng.integers(500)},{rng.integers(3) / 2},{rng.random() < 0.5}"
            for i in range(400)
        ]
        (tmp_path / "mixed.csv").write_text("\n".join(["day,steps,few,flag", *lines]).lower())
        own = (f'data.name="{tmp_path / "mixed.csv"}"', "train.epochs=2")
        train(load_recipe("table"), tmp_path / "mixed", overrides=own, device="cpu")
        ask, run = asking(create_app([tmp_path / "mixed"])), "/api/runs/mixed"
        kinds = [each["kind"] for each in ask("GET", f"{run}/columns").json()["columns"]]
        assert kinds == ["moment", "integer", "category", "category"]
        known = {"day": "2024-03-05", "steps": 500, "few": 0.5, "flag": "true"}
        for name in known:
            cells = {other: value for other, value in known.items() if other != name}
            found = ask("POST", f"{run}/row", json={"cells": cells}).json()["cells"][list(known).index(name)]
            assert isinstance(found["value"], type(known[name]))
        for cell, line in (
            ({"day": "soon"}, "'day', got 'soon'"),
            ({"steps": 3}, "steps of 2"),
            ({"few": 0.3}, "0.5"),
            ({"flag": True}, ""),
        ):
            assert line in ask("POST", f"{run}/row", json={"cells": cell}).json().get("error", "")
        assert len(ask("GET", f"{run}/rows?of=50&where=flag = true").json()["histograms"]) == 4


class TestFiles:
    def test_rows_and_cells_are_scored_filled_in_and_predicted(self, ask: Ask):
        lines = "height,weight,colour\n170,68,red\n170,90,red\n,68,red\n170,68,green\n"
        found = ask("POST", f"{PEOPLE}/table?predict=weight", content=lines.encode()).json()
        assert (found["total"], found["unknown"]) == (4, [False, False, False, True])
        assert found["cells"][3] == ["170", "68", "green"]
        assert found["nats"][0] > found["nats"][1]
        assert found["nats"][3] is None
        tails = found["tails"]
        assert min(tails[0]) > 0.05
        assert max(tails[1][:2]) < 0.02 < tails[1][2]
        assert (tails[2][0], tails[3][2]) == (None, 0)
        assert found["filled"][2][0] == pytest.approx(170, abs=3)
        assert found["filled"][2][1:] == [68, "red"]
        for value, low, high in found["predicted"]:
            assert low < value < high
        assert found["predicted"][1][0] == pytest.approx(68, abs=1.5)
        bare = ask("POST", f"{PEOPLE}/table?predict=weight", content=b"height,colour\n170,red\n").json()
        assert bare["predicted"][0][0] == pytest.approx(68, abs=1.5)
        assert (
            "found no column 'wait'" in ask("POST", f"{PEOPLE}/table?predict=wait", content=b"a\n1\n").json()["error"]
        )

    @pytest.mark.parametrize("content", [b"", b"\0\1\2", b"a,b\n1,2\n", b"height,weight,colour\nx,y,z\n"])
    def test_what_is_not_the_table_is_refused_without_a_path(self, ask: Ask, content: bytes):
        answer = ask("POST", f"{PEOPLE}/table", content=content)
        assert answer.status_code == 422
        assert "/tmp" not in answer.json()["error"]

    def test_a_bomb_of_rows_is_cut_before_it_is_read(self, ask: Ask):
        count = 1_000_000
        same = [pa.array([value]).take(pa.array(np.zeros(count, np.int32))) for value in (170.5, 68.0, "red")]
        buffer = io.BytesIO()
        parquet.write_table(pa.table(same, ["height", "weight", "colour"]), buffer)
        assert len(buffer.getvalue()) < 100_000
        tracemalloc.start()
        found = ask("POST", f"{PEOPLE}/table?format=parquet", content=buffer.getvalue()).json()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (found["total"], len(found["nats"]), len(found["cells"])) == (count, limits.ROWS, limits.ROWS)
        assert peak < 1e8
        for rows, total in ((limits.ROWS + 1, None), (limits.ROWS, limits.ROWS)):
            content = b"height,weight,colour\n" + b"170.5,68,red\n" * rows
            cut = ask("POST", f"{PEOPLE}/table", content=content).json()
            assert (cut["total"], len(cut["nats"])) == (total, limits.ROWS)

    def test_a_packed_file_of_too_many_bytes_is_refused(self, ask: Ask):
        """Its size is not suspicious by itself: 270 MB of zeros next to 2 MB of noise."""
        noise = np.zeros(2_000_000)
        noise[: 2**18] = np.frombuffer(np.random.default_rng(0).bytes(2**21))
        zeros = pa.table([np.zeros(2_000_000)] * 17 + [noise], [f"c{i}" for i in range(18)])
        buffer = io.BytesIO()
        with pa.ipc.new_file(buffer, zeros.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as file:
            file.write_table(zeros)
        assert 2**21 < len(buffer.getvalue()) < limits.BODY
        answer = ask("POST", f"{PEOPLE}/table?format=arrow", content=buffer.getvalue())
        assert f"expected at most {limits.UNPACKED} bytes" in answer.json()["error"]

    def test_a_model_of_the_other_kind_says_so(self, ask: Ask):
        for path in ("samples", "spectrum"):
            assert "this model is of a table, not of" in ask("GET", f"{PEOPLE}/{path}").json()["error"]
        assert "this model is of images, not of a table" in ask("GET", f"{DIGITS}/columns").json()["error"]


class TestTraining:
    """Data is uploaded, described and trained on, by a process that outlives its server."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Iterator[Path]:
        yield tmp_path / "own"
        trainer = Trainer(tmp_path / "own")
        for run in trainer.runs():
            if (pid := trainer.pid(run)) is not None:
                os.kill(pid, signal.SIGKILL)

    def until(self, true: Callable[[], Any]) -> Any:
        end = time.monotonic() + 120
        while not (found := true()):
            assert time.monotonic() < end
            time.sleep(0.1)
        return found

    def test_a_table_is_described_trained_on_watched_stopped_and_downloaded(
        self, folder: Path, table: Path, tmp_path: Path
    ):
        ask = asking(create_app([table], folder=folder))
        content = (table.parent / "people.csv").read_bytes()
        assert not folder.exists()
        found = ask("POST", "/api/train/data", params={"name": "../My People!.csv"}, content=content).json()
        assert (found["kind"], found["rows"], found["name"]) == ("table", 1000, "my-people")
        assert [(c["name"], c["kind"]) for c in found["columns"]] == [
            ("height", "real"), ("weight", "real"), ("colour", "category")
        ]  # fmt: skip
        assert len(found["preview"]) == 5
        begun = ask("POST", "/api/train", json={"id": found["id"], "name": "My People", "epochs": 20_000}).json()
        assert begun == {"run": "my-people"}
        assert ask("POST", "/api/train", json={"id": found["id"], "name": "x"}).status_code == 422
        metrics = self.until(
            lambda: (m := ask("GET", "/api/runs/my-people/metrics").json())["rows"] and m["process"]["running"] and m
        )
        assert (metrics["process"]["here"], metrics["process"]["failed"]) == (True, False)
        another = asking(create_app([table], folder=folder))  # the server ends, and another finds the training
        assert [run["id"] for run in another("GET", "/api/runs").json()["runs"]] == ["people", "my-people"]
        assert another("GET", "/api/runs/my-people/metrics").json()["process"]["running"]
        again = another("POST", "/api/train/data", content=content).json()
        assert "one at a time" in another("POST", "/api/train", json={"id": again["id"], "name": "b"}).json()["error"]
        self.until(lambda: another("GET", "/api/runs").json()["runs"][1]["ready"])
        another("POST", "/api/runs/my-people/stop")
        self.until(lambda: not another("GET", "/api/runs/my-people/metrics").json()["process"]["running"])
        for run in ("my-people", "people"):
            assert "not being trained" in another("POST", f"/api/runs/{run}/stop").json()["error"]
        with zipfile.ZipFile(io.BytesIO(another("GET", "/api/runs/my-people/download").content)) as file:
            file.extractall(tmp_path / "elsewhere")
        assert nicest.open(tmp_path / "elsewhere" / "my-people").schema.names == ["height", "weight", "colour"]

    @pytest.mark.parametrize(
        ("array", "line"),
        [
            (np.zeros((60, 100, 100), np.uint8), "at most 4096 numbers"),
            (np.zeros((60, 9), np.uint8), "expected images"),
            (np.zeros((60, 3, 3)), "expected images"),
            (np.arange(45, dtype=np.uint8).reshape(5, 3, 3), "at least 50 rows, got 5"),
            (np.array([{}]), "the data"),
            (np.random.default_rng(0).integers(0, 256, (60, 6, 5), np.uint8), ""),
        ],
    )
    def test_arrays_are_images_or_are_refused_and_deleted(self, folder: Path, array: Any, line: str):
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=True)
        ask = asking(create_app([], folder=folder))
        answer = ask("POST", "/api/train/data?format=npy&name=the data", content=buffer.getvalue()).json()
        if not line:
            assert (answer["kind"], answer["rows"], answer["shape"]) == ("images", 60, [6, 5])
            return
        assert line in answer["error"]
        assert str(folder) not in answer["error"]
        assert list((folder / "data").iterdir()) == []

    def test_bombs_and_heaps_are_kept_out(self, folder: Path):
        ask = asking(create_app([], folder=folder))
        zeros = pa.array([0.5]).take(pa.array(np.zeros(20_000_000, np.int32)))
        buffer = io.BytesIO()
        parquet.write_table(pa.table([zeros, zeros], ["a", "b"]), buffer)
        assert len(buffer.getvalue()) < 200_000
        tracemalloc.start()
        bomb = ask("POST", "/api/train/data?format=parquet", content=buffer.getvalue())
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert "expected at most" in bomb.json()["error"]
        assert peak < 1e7
        rows = b"a,b\n" + b"".join(b"%d,%d\n" % (i % 7, i) for i in range(60))
        ids = [ask("POST", "/api/train/data", content=rows).json()["id"] for _ in range(limits.STAGED + 2)]
        assert len(list((folder / "data").iterdir())) == limits.STAGED
        for id in (ids[0], "../../x"):
            assert "send it again" in ask("POST", "/api/train", json={"id": id, "name": "a"}).json()["error"]

    def test_another_process_with_the_same_number_is_never_stopped(self, folder: Path, refusal: Callable[..., str]):
        (folder / "old").mkdir(parents=True)
        (folder / "old" / "studio.json").write_text(json.dumps({"pid": os.getpid()}))
        (folder / "old" / "train.log").write_text("epoch 1\nerror: out of memory\n")
        trainer = Trainer(folder)
        assert "not being trained" in refusal(trainer.stop, folder / "old")
        found = {"here": True, "running": False, "failed": True, "said": "error: out of memory"}
        assert trainer.state(folder / "old") == found
