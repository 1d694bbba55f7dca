"""What watches a training: the callbacks are told everything, in order, and loggers read what was written."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nicest.errors import NicestError
from nicest.recipes import load_recipe
from nicest.train import callbacks
from nicest.train.callbacks import LOGGERS, Begun, Callback, MLflow, TensorBoard, WandB
from nicest.train.fit import train
from small_runs import PER_EPOCH, SMALL, metrics

FIGURES = {"train/nats", "valid/nats", "valid/bits_per_dim", "lr"}


class Recorder(Callback):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def started(self, training: Begun) -> None:
        self.heard.append(training)

    def stepped(self, row: Mapping[str, Any]) -> None:
        self.heard.append(("stepped", row["step"]))

    def validated(self, row: Mapping[str, Any]) -> None:
        self.heard.append(dict(row))

    def ended(self) -> None:
        self.heard.append("ended")


def go(out: Path, *watching: Callback, overrides: tuple[str, ...] = SMALL, resume: bool = False) -> None:
    train(load_recipe("digits"), out, overrides=overrides, resume=resume, device="cpu", callbacks=watching)


def test_they_hear_of_the_start_of_every_validation_and_of_the_end(tmp_path: Path):
    heard = Recorder()
    go(tmp_path, heard)
    first, *rest, last = heard.heard
    assert first == Begun("digits", 3 * PER_EPOCH, 0, 3)
    assert last == "ended"
    assert rest[::2] == [("stepped", PER_EPOCH * k) for k in (1, 2, 3)]
    assert [{key: value for key, value in row.items() if key != "seconds"} for row in rest[1::2]] == metrics(tmp_path)


def test_they_hear_of_the_end_when_one_of_them_fails(tmp_path: Path):
    class Failing(Callback):
        def validated(self, row: Mapping[str, Any]) -> None:
            raise RuntimeError("mine")

    heard = Recorder()
    with pytest.raises(RuntimeError, match="mine"):
        go(tmp_path, heard, Failing())
    assert heard.heard[-1] == "ended"
    go(tmp_path, overrides=(), resume=True)
    assert len(metrics(tmp_path)) == 3


@pytest.mark.filterwarnings("ignore")  # of TensorBoard's own dependencies
def test_tensorboard_reads_the_curves_and_a_resumed_run_goes_on_in_them(tmp_path: Path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    go(tmp_path / "run", TensorBoard(tmp_path / "run" / "tensorboard"))
    go(tmp_path / "run", TensorBoard(tmp_path / "run" / "tensorboard"), overrides=("train.epochs=4",), resume=True)
    found = events.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    rows = metrics(tmp_path / "run")
    scalars = found.Scalars("valid/nats")
    assert [each.step for each in scalars] == [row["step"] for row in rows]
    assert [each.value for each in scalars] == pytest.approx([row["valid_nats"] for row in rows], rel=1e-6)
    assert set(found.Tags()["scalars"]) == FIGURES


@pytest.mark.filterwarnings("ignore")  # of MLflow's own dependencies
def test_mlflow_reads_the_curves_and_a_resumed_run_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # and taken away again
    tracking = pytest.importorskip("mlflow.tracking")
    for overrides in (SMALL, ("train.epochs=4",)):
        go(tmp_path / "run", MLflow(tmp_path / "mlflow"), overrides=overrides, resume=overrides is not SMALL)
    client = tracking.MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'digits'")
    runs = client.search_runs([experiment.experiment_id])
    runs.sort(key=lambda run: int(run.data.tags["first_step"]))
    assert [run.info.status for run in runs] == ["FINISHED"] * 2
    assert [run.data.tags["first_step"] for run in runs] == ["1", str(3 * PER_EPOCH + 1)]
    assert set(runs[0].data.metrics) == FIGURES
    curve = [each for run in runs for each in client.get_metric_history(run.info.run_id, "valid/nats")]
    rows = metrics(tmp_path / "run")
    assert [(each.step, each.value) for each in curve] == [(row["step"], row["valid_nats"]) for row in rows]


@pytest.mark.filterwarnings("ignore")  # of wandb's own dependencies
def test_wandb_keeps_the_curves_offline(tmp_path: Path):
    pytest.importorskip("wandb")
    go(tmp_path / "run", WandB(tmp_path / "wandb"))
    (stored,) = (tmp_path / "wandb").rglob("*.wandb")
    logged: list[dict[str, Any]] = []
    until = time.monotonic() + 20
    while len(logged) < 3 and time.monotonic() < until:  # wandb's own process writes them
        logged = [{item.nested_key[0]: json.loads(item.value_json) for item in row} for row in history(stored)]
        time.sleep(0.05)
    found = {row["_step"]: row["valid/nats"] for row in logged}
    assert found == {row["step"]: row["valid_nats"] for row in metrics(tmp_path / "run")}
    assert {name for row in logged for name in row} >= FIGURES


def history(path: Path) -> list[Any]:
    """The rows of an offline run: a log as LevelDB has it, blocks of 32 KiB with records of protobuf."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]  # after four bytes of checksum
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record.FromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                found.append(record.history.item)
    return found


@pytest.mark.parametrize("name", LOGGERS)
def test_without_a_logger_the_line_says_how_to_get_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(callbacks, "find_spec", lambda name: None)
    with pytest.raises(NicestError, match=rf"pip install 'nicest\[{LOGGERS[name].extra}\]'"):
        LOGGERS[name](tmp_path)
