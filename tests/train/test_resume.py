"""A run that was killed, interrupted or extended goes on as if nothing had happened: to the bit."""

import itertools
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch import Tensor

import nicest
from nicest.errors import NicestError
from nicest.inference.engine import Engine
from nicest.recipes import load_recipe
from nicest.runs.folder import LAST, MODEL, RunFolder, read_tensors, write_tensors
from nicest.runs.sinks import Saved
from nicest.train import loop
from nicest.train.fit import train
from nicest.train.loop import State, interruptible
from small_runs import counters, digests, interrupt_at, metrics, people, resume, run, same_run, start, wait_for

Refusal = Callable[..., str]


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a run of four epochs of 240 steps, so that there is time to stop it; with dropout and averages."""
    rows = tmp_path_factory.mktemp("data") / "rows.npy"
    np.save(rows, np.random.default_rng(0).integers(0, 17, (1500, 16), np.uint8))
    return ["train.epochs=4", "train.batch=5", f"data.name={rows}"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, long: list[str]) -> Path:
    """Four epochs at once."""
    out = tmp_path_factory.mktemp("straight")
    run(out, *long)
    return out


class Stopped(NamedTuple):
    """A real process that a signal stopped, at some moment after its first validation."""

    out: Path
    code: int
    stdout: str
    stderr: str
    refused: list[str]  # how training in the folder was refused while the process lived
    seconds: float  # from the signal to the end


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, long: list[str]) -> dict[str, Stopped]:
    """Three processes that train side by side, each stopped by its own signal at a random moment."""
    folder = tmp_path_factory.mktemp("stopped")

    def stop(number: signal.Signals) -> Stopped:
        out = folder / number.name
        process = start(out, *long)
        wait_for((out / "metrics.jsonl").exists, process)
        refused = [refusal_of(run, out), refusal_of(resume, out)]
        time.sleep(random.uniform(0, 0.15))
        process.send_signal(number)
        sent = time.monotonic()
        stdout, stderr = process.communicate(timeout=60)
        return Stopped(out, process.returncode, stdout, stderr, refused, time.monotonic() - sent)

    signals = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
    with ThreadPoolExecutor(len(signals)) as pool:
        return {number.name: result for number, result in zip(signals, pool.map(stop, signals), strict=True)}


def refusal_of(attempt: Callable[[Path], object], out: Path) -> str:
    try:
        attempt(out)
    except NicestError as error:
        return str(error)
    return "not refused"


@pytest.mark.alone
class TestSignals:
    def test_a_second_process_is_refused_while_the_first_lives(self, stopped: dict[str, Stopped]):
        for each in stopped.values():
            again, resumed = each.refused
            assert "holds a run already: resume it, or choose another folder" in again
            assert "is being written by another process" in resumed

    def test_a_killed_run_resumes_to_the_bit(self, stopped: dict[str, Stopped], straight: Path):
        killed = stopped["SIGKILL"]
        assert killed.code == -signal.SIGKILL
        assert counters(killed.out)["step"] in (0, 240, 480, 720)  # 0: in the middle of the first validation's writes
        assert resume(killed.out)["step"] == 4 * 240  # and is no longer locked
        assert same_run(killed.out, straight)

    @pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
    def test_an_interrupted_run_saves_leaves_and_resumes_to_the_bit(
        self, stopped: dict[str, Stopped], straight: Path, name: str
    ):
        each = stopped[name]
        assert each.code == 130
        assert each.seconds < 5
        assert each.stdout.count("\n") == 1
        step = counters(each.out)["step"]
        assert each.stdout.startswith(f"stopped at step {step}, all saved in {each.out}: --resume continues it")
        assert "Traceback" not in each.stderr
        assert 240 <= step < 4 * 240
        assert resume(each.out)["finished"]
        assert same_run(each.out, straight)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reference")
    run(out)
    return out


class TestInterrupt:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
    @pytest.mark.parametrize("step", [0, 13, 17])  # of 14 in an epoch
    def test_the_state_of_the_very_step_is_saved(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Path, number: signal.Signals, step: int
    ):
        usual = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup make test` ignores, as training then does
        handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
        interrupt_at(step, number, monkeypatch)
        try:
            result = run(tmp_path)
        finally:
            signal.signal(signal.SIGHUP, usual)
        assert (result["step"], result["finished"]) == (step + 1, False)
        assert counters(tmp_path)["step"] == step + 1
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
        monkeypatch.undo()
        assert resume(tmp_path)["finished"]
        assert same_run(tmp_path, reference)

    @pytest.mark.parametrize("epoch", [1, 3])  # 3 is the last
    def test_a_validation_is_broken_off_and_made_by_the_resumed_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Path, epoch: int
    ):
        monkeypatch.setattr(loop, "SCORED_AT_ONCE", 100)
        run(tmp_path / "straight")
        calls, log_prob = [], Engine.log_prob

        def interrupt(engine: Engine, rows: Tensor, _: Tensor | None) -> Tensor:
            calls.append(len(rows))
            if len(calls) == 2 * epoch - 1:  # the first 100 rows of 179
                os.kill(os.getpid(), signal.SIGTERM)
            return log_prob(engine, rows)

        monkeypatch.setattr(Engine, "validation_log_prob", interrupt)
        result = run(tmp_path / "run")
        assert (result["step"], result["finished"], result["unscored"]) == (14 * epoch, False, True)
        assert len(calls) == 2 * epoch - 1
        assert [row["epoch"] for row in metrics(tmp_path / "run")] == list(range(1, epoch))
        monkeypatch.setattr(Engine, "validation_log_prob", log_prob)
        assert resume(tmp_path / "run")["finished"]
        assert same_run(tmp_path / "run", tmp_path / "straight")

    def test_a_broken_off_validation_that_was_made_and_not_saved_is_in_the_metrics_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Path
    ):
        interrupt_at(13, signal.SIGINT, monkeypatch)
        assert run(tmp_path)["unscored"]
        monkeypatch.undo()
        monkeypatch.setattr(loop.Saver, "due", lambda saver: False)
        interrupt = iter([False] * 5 + [True])

        def killed(*_: object) -> bool:
            if next(interrupt):
                raise KeyboardInterrupt
            return False

        monkeypatch.setattr(loop.Saver, "late", killed)
        monkeypatch.setattr(loop, "CHECK_EVERY", 1)
        with pytest.raises(KeyboardInterrupt):
            resume(tmp_path)
        assert [row["epoch"] for row in metrics(tmp_path)] == [1]
        assert counters(tmp_path)["unscored"]
        monkeypatch.undo()
        resume(tmp_path)
        assert same_run(tmp_path, reference)

    def test_twice_in_one_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Path):
        for step in (5, 20):
            interrupt_at(step, signal.SIGINT, monkeypatch)
            (resume if step == 20 else run)(tmp_path)
            monkeypatch.undo()
        assert counters(tmp_path)["step"] == 21
        resume(tmp_path)
        assert same_run(tmp_path, reference)

    @pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
    def test_with_every_optimizer_and_whitening(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str):
        more = (f"train.optimizer={optimizer}", "model.preprocess=triangular", "train.ema=0", "train.epochs=7")
        more += ("train.weight_decay=0",)
        run(tmp_path / "straight", *more)
        interrupt_at(75, signal.SIGINT, monkeypatch)  # in the sixth epoch, when RMSProp has momentum
        run(tmp_path / "stopped", *more)
        monkeypatch.undo()
        resume(tmp_path / "stopped")
        assert same_run(tmp_path / "stopped", tmp_path / "straight")

    def test_the_second_signal_acts_as_usual(self):
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with interruptible() as event:
            assert not event.is_set()
            signal.raise_signal(signal.SIGINT)
            assert event.is_set()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        signal.signal(signal.SIGINT, before)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_that_is_ignored_stays_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
    ):
        before = signal.signal(number, signal.SIG_IGN)  # as background jobs of a script are started
        try:
            interrupt_at(5, number, monkeypatch)
            assert run(tmp_path, "train.epochs=1")["finished"]
            assert signal.getsignal(number) == signal.SIG_IGN
        finally:
            signal.signal(number, before)

    def test_training_works_in_a_thread_where_there_are_no_signals(self, tmp_path: Path):
        results: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: results.append(run(tmp_path, "train.epochs=1")))
        thread.start()
        thread.join()
        assert results[0]["finished"]


class Crash(BaseException):
    """The end of the process, as far as the loop can tell."""


class TestClock:
    """The time of day may go back, or be wrong altogether: nothing asks it but the date in environment.json."""

    def test_that_goes_back_changes_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Path):
        hours = itertools.count()
        monkeypatch.setattr(time, "time", lambda: 1e9 - 3600 * next(hours))
        monkeypatch.setattr(time, "time_ns", lambda: 10**18 - 3600 * 10**9 * next(hours))
        interrupt_at(17, signal.SIGINT, monkeypatch)
        run(tmp_path)
        assert resume(tmp_path)["finished"]
        seconds = [row["seconds"] for row in RunFolder(tmp_path).metrics()]
        assert 0 < seconds[0] < seconds[1] < seconds[2] < 60
        assert same_run(tmp_path, reference)

    def test_a_run_whose_files_are_of_the_future_is_gone_on_with(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Path
    ):
        interrupt_at(17, signal.SIGINT, monkeypatch)
        run(tmp_path)
        monkeypatch.undo()
        for path in (tmp_path, *tmp_path.iterdir()):
            os.utime(path, (4e9, 4e9))  # in the year 2096
        assert resume(tmp_path)["finished"]
        assert same_run(tmp_path, reference)

    def test_only_dates_are_taken_from_the_time_of_day(self):
        sources = {path: path.read_text() for path in Path(loop.__file__).parents[1].rglob("*.py")}
        asking = re.compile(r"time\.time\b|st_mtime|getmtime|utcnow|\.now\(")
        found = {
            f"{path.name}: {line.strip()}"
            for path, text in sources.items()
            for line in text.splitlines()
            if asking.search(line)
        }
        dated = '"date": datetime.now(UTC).isoformat(timespec="seconds"),'
        shown = (
            "served.py: idle = max(0.0, time.time() - path.stat().st_mtime) if path.is_file() else None"  # to a person
        )
        compared = "served.py: return found.st_ino, found.st_size, found.st_mtime_ns"  # with itself
        assert found == {f"runtime.py: {dated}", shown, compared}


class TestTwoProcesses:
    def test_that_start_at_once_do_not_mix(self, tmp_path: Path):
        """One trains, the other is told; nothing is left of the other."""
        out = tmp_path / "run"
        both = [start(out) for _ in range(2)]
        ends = [(*process.communicate(timeout=120), process.returncode) for process in both]
        (told,) = [said for _, said, code in ends if code == 1]
        assert [code for *_, code in ends].count(0) == 1
        assert re.search(r"is being written by another process|holds a run already", told)
        assert [row["epoch"] for row in metrics(out)] == [1, 2, 3]
        assert not list(out.glob("*.tmp"))


class TestCrash:
    """Between any two writes of a validation, the third epoch's: the resumed run has every row, once."""

    @pytest.mark.parametrize(
        ("owner", "method", "call"),
        [(RunFolder, "save_model", 3), (RunFolder, "append_metrics", 3), (State, "save", 4)],
    )
    @pytest.mark.parametrize("moment", ["before", "after"])
    def test_resumes_to_the_bit(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        reference: Path,
        owner: type,
        method: str,
        call: int,
        moment: str,
    ):
        write, calls = getattr(owner, method), []

        def crash(*arguments: Any) -> None:
            calls.append(method)
            if len(calls) < call or moment == "after":
                write(*arguments)
            if len(calls) == call:
                raise Crash

        monkeypatch.setattr(owner, method, crash)
        with pytest.raises(Crash):
            run(tmp_path)
        monkeypatch.undo()
        resume(tmp_path)
        assert same_run(tmp_path, reference)

    def test_a_torn_row_is_dropped(self, tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch):
        interrupt_at(17, signal.SIGINT, monkeypatch)
        run(tmp_path)
        monkeypatch.undo()
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"epoch": 2, "step": 28, "train_n')
        resume(tmp_path)
        assert same_run(tmp_path, reference)


class TestGoingOn:
    def test_a_finished_run_stays_as_it_is(self, tmp_path: Path):
        before = run(tmp_path)
        files = digests(tmp_path)
        assert resume(tmp_path) == before
        assert digests(tmp_path) == files

    def test_more_epochs_extend_it_and_are_remembered(self, tmp_path: Path):
        constant = "train.schedule=constant"
        run(tmp_path / "a", "train.epochs=4", constant)
        run(tmp_path / "b", "train.epochs=2", constant)
        result = resume(tmp_path / "b", "train.epochs=4")
        assert (result["step"], result["epochs"], result["finished"]) == (56, 4, True)
        assert same_run(tmp_path / "a", tmp_path / "b")
        assert load_recipe(str(tmp_path / "b" / "recipe.toml")).train.epochs == 4

    def test_the_rest_of_train_may_change(self, tmp_path: Path):
        run(tmp_path, "train.epochs=1")
        resume(tmp_path, "train.epochs=2", "train.lr=1e-5", "train.schedule=constant")
        assert metrics(tmp_path)[1]["lr"] == 1e-5

    @pytest.mark.parametrize(
        "changed",
        [
            "model.width=9",
            "model.prior=gaussian",
            "data.seed=1",
            "train.batch=50",
            "train.optimizer=rmsprop",
            "train.ema=0",
        ],
    )
    def test_another_model_or_data_or_state_is_refused(self, refusal: Refusal, reference: Path, changed: str):
        before = digests(reference)
        message = refusal(resume, reference, changed, "train.weight_decay=0")
        assert "a resumed run keeps its data, model, batch, optimizer" in message
        assert digests(reference) == before

    def test_one_value_that_changed_in_the_data_is_noticed_and_nothing_is_lost(
        self, refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        path, out = tmp_path / "rows.npy", tmp_path / "run"
        rows = np.random.default_rng(0).integers(0, 256, (300, 4), np.uint8)
        np.save(path, rows)
        settings = (f"data.name={path}", "train.batch=10", "train.epochs=3")
        run(tmp_path / "straight", *settings)
        interrupt_at(30, signal.SIGINT, monkeypatch)
        run(out, *settings)
        monkeypatch.undo()
        before = digests(out)
        changed = rows.copy()
        changed[123, 2] ^= 1
        np.save(path, changed)
        message = refusal(resume, out)
        assert f"{path} has changed since the run was trained" in message
        assert message.endswith("provide the same data, or train again")
        assert digests(out) == before
        np.save(path, rows)
        assert resume(out)["finished"]
        assert same_run(out, tmp_path / "straight")

    def test_a_run_of_before_there_were_digests_of_data_is_gone_on_with(self, tmp_path: Path):
        run(tmp_path, "train.epochs=1")
        tensors, recipe, figures, _ = read_tensors(tmp_path / LAST)
        assert len(recipe.data.digest) == 16
        recipe = replace(recipe, data=replace(recipe.data, digest=""))
        figures.pop("unscored")  # nor was that known
        write_tensors(tmp_path / LAST, Saved(tensors, recipe, figures))
        assert resume(tmp_path, "train.epochs=2")["finished"]

    def test_data_of_another_shape_is_refused(self, refusal: Refusal, tmp_path: Path):
        rows = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
        np.save(tmp_path / "rows.npy", rows)
        run(tmp_path / "run", f"data.name={tmp_path}/rows.npy")
        np.save(tmp_path / "rows.npy", rows[:, :3])
        message = refusal(resume, tmp_path / "run", "train.epochs=5")
        assert "expected 4 features, shape (4,), 0 levels, as in training; got 3 features" in message

    def test_data_that_moved_is_found_again_if_it_is_the_same(
        self, refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        rows = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
        np.save(tmp_path / "rows.npy", rows)
        run(tmp_path / "straight", f"data.name={tmp_path}/rows.npy")
        interrupt_at(3, signal.SIGINT, monkeypatch)
        run(tmp_path / "run", f"data.name={tmp_path}/rows.npy")
        monkeypatch.undo()
        (tmp_path / "rows.npy").rename(tmp_path / "moved.npy")
        np.save(tmp_path / "other.npy", rows + 1)
        assert "other.npy has changed since" in refusal(resume, tmp_path / "run", f"data.name={tmp_path}/other.npy")
        assert resume(tmp_path / "run", f"data.name={tmp_path}/moved.npy")["finished"]
        assert same_run(tmp_path / "run", tmp_path / "straight")
        opened = nicest.open(tmp_path / "straight", data=str(tmp_path / "moved.npy"))
        assert len(opened.splits.test) == 30
        with pytest.raises(NicestError, match=r"other\.npy has changed since"):
            nicest.open(tmp_path / "straight", data=str(tmp_path / "other.npy")).splits  # noqa: B018

    @pytest.mark.parametrize("epochs", [3, 5])
    @pytest.mark.parametrize("how", ["gone", "damaged", "of another run"])
    def test_a_best_model_that_is_lost_is_said_and_made_anew(self, tmp_path: Path, how: str, epochs: int):
        run(tmp_path / "run")
        model = tmp_path / "run" / MODEL
        if how == "of another run":
            run(tmp_path / "other", "train.epochs=1", "train.seed=5")
            shutil.copy(tmp_path / "other" / MODEL, model)
        else:
            model.unlink() if how == "gone" else model.write_bytes(model.read_bytes()[:100])
        with pytest.warns(UserWarning, match="the best model, of epoch 3, is gone, damaged or not of this run"):
            resume(tmp_path / "run", f"train.epochs={epochs}")
        assert nicest.open(tmp_path / "run").figures["epoch"] >= 3
        assert [row["epoch"] for row in metrics(tmp_path / "run")] == list(range(1, epochs + 1))

    def test_metrics_that_are_lost_are_said(self, tmp_path: Path):
        run(tmp_path)
        (tmp_path / "metrics.jsonl").unlink()
        with pytest.warns(UserWarning, match="metrics of earlier epochs are gone"):
            resume(tmp_path, "train.epochs=4")
        assert [row["epoch"] for row in metrics(tmp_path)] == [4]

    def test_columns_that_are_damaged_are_written_anew(self, tmp_path: Path):
        table = people(tmp_path / "people.csv")
        train(
            load_recipe("table"),
            tmp_path / "run",
            overrides=(f"data.name={table}", "table.members=1", "train.epochs=2"),
            device="cpu",
        )
        kept = (tmp_path / "run" / "columns.json").read_text()
        (tmp_path / "run" / "columns.json").write_text(kept[:50])
        train(load_recipe("table"), tmp_path / "run", resume=True, overrides=("train.epochs=3",), device="cpu")
        assert (tmp_path / "run" / "columns.json").read_text() == kept

    def test_nothing_cannot_be_resumed(self, refusal: Refusal, tmp_path: Path):
        assert f"nothing to resume: {tmp_path / 'none'} holds no last" in refusal(resume, tmp_path / "none")
        assert not (tmp_path / "none").exists()

    def test_a_run_is_never_trained_over(self, refusal: Refusal, tmp_path: Path):
        run(tmp_path, "train.epochs=1")
        before = digests(tmp_path)
        assert f"{tmp_path} holds a run already" in refusal(run, tmp_path)
        assert digests(tmp_path) == before


def test_a_state_saved_at_the_end_of_an_epoch_has_its_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run(tmp_path / "straight")
    monkeypatch.setattr(loop.Saver, "late", lambda saver: True)
    append = RunFolder.append_metrics

    def killed(folder: RunFolder, row: dict) -> None:
        if row["epoch"] == 2:
            raise KeyboardInterrupt  # after the validation, before its row
        append(folder, row)

    monkeypatch.setattr(RunFolder, "append_metrics", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed")
    monkeypatch.undo()
    resume(tmp_path / "killed")
    assert same_run(tmp_path / "killed", tmp_path / "straight")


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path):
    run(tmp_path, "train.epochs=1")
    for name in (".recipe.toml.123.tmp", ".last.safetensors.7.tmp", ".environment.json.99.tmp"):
        (tmp_path / name).write_text("half")
    (tmp_path / ".mine.tmp").write_text("the user's")
    resume(tmp_path, "train.epochs=2")
    assert [path.name for path in tmp_path.glob(".*.tmp")] == [".mine.tmp"]
