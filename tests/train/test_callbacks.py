"""What watches a training: the callbacks are told everything, in order, and TensorBoard reads what was written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nicest.errors import NicestError
from nicest.recipes import load_recipe
from nicest.train import callbacks
from nicest.train.callbacks import Begun, Callback, TensorBoard
from nicest.train.fit import train
from small_runs import PER_EPOCH, SMALL, metrics


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
    assert set(found.Tags()["scalars"]) == {"train/nats", "valid/nats", "valid/bits_per_dim", "lr"}


def test_without_tensorboard_the_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(callbacks, "find_spec", lambda name: None)
    with pytest.raises(NicestError, match=r"pip install 'nicest\[loggers\]'"):
        TensorBoard(tmp_path)
