"""Written whole or not at all: full disks, read-only disks, folders that may not be written."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from nicest.files import replacing, write_text
from nicest.recipes import Recipe
from nicest.runs.folder import LAST, MODEL, RunFolder, read_tensors, write_tensors
from nicest.runs.sinks import Saved
from small_runs import SMALL, counters, digests, digits_file, resume, run

Refusal = Callable[..., str]
BIG = 1_000_000


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses to let any file of this process grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_big_text(folder: Path) -> None:
    write_text(folder / "old", "x" * BIG)


def write_big_tensors(folder: Path) -> None:
    write_tensors(folder / "old", Saved({"a": torch.zeros(BIG // 4)}, Recipe(), {}))


both = pytest.mark.parametrize("write", [write_big_text, write_big_tensors])


class TestFailedWrite:
    """The old file stays, no temporary one does, and the error is one line."""

    @both
    def test_when_a_file_may_not_grow(self, refusal: Refusal, tmp_path: Path, write: Callable[[Path], None]):
        write_text(tmp_path / "old", "old")
        with files_of_at_most(BIG // 2):
            message = refusal(write, tmp_path)
        assert f"cannot write {tmp_path / 'old'}: " in message
        assert "File too large" in message
        assert message.endswith("what was there before is untouched")
        assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]

    @both
    def test_when_the_disk_is_full(self, refusal: Refusal, small_disk: Path, write: Callable[[Path], None]):
        write_text(small_disk / "old", "old")
        assert "No space left on device" in refusal(write, small_disk)
        assert [path.read_text() for path in small_disk.iterdir()] == ["old"]

    @both
    def test_when_the_disk_has_turned_read_only(
        self, refusal: Refusal, small_disk: Path, write: Callable[[Path], None]
    ):
        write_text(small_disk / "old", "old")
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        assert "Read-only file system" in refusal(write, small_disk)
        assert [path.read_text() for path in small_disk.iterdir()] == ["old"]

    def test_when_the_process_is_interrupted(self, tmp_path: Path):
        def interrupted() -> None:
            with replacing(tmp_path / "old") as temporary:
                temporary.write_text("half of the n")
                raise KeyboardInterrupt

        write_text(tmp_path / "old", "old")
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]

    def test_the_file_is_on_the_disk_before_it_is_renamed_and_the_folder_after(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        done: list[str] = []
        fsync, rename = os.fsync, Path.replace

        def flushed(descriptor: int) -> None:
            done.append(f"fsync {Path(f'/proc/self/fd/{descriptor}').resolve().name}")
            fsync(descriptor)

        def renamed(path: Path, target: Path) -> Path:
            done.append(f"rename {path.name}")
            return rename(path, target)

        monkeypatch.setattr(os, "fsync", flushed)
        monkeypatch.setattr(Path, "replace", renamed)
        write_text(tmp_path / "file", "new")
        temporary = f".file.{os.getpid()}.tmp"
        assert done == [f"fsync {temporary}", f"rename {temporary}", f"fsync {tmp_path.name}"]

    def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(self, tmp_path: Path):
        write_text(tmp_path / "file", "old")
        with replacing(tmp_path / "file") as temporary:
            temporary.write_text("new")
            assert (tmp_path / "file").read_text() == "old"
        assert [path.read_text() for path in tmp_path.iterdir()] == ["new"]


class TestTraining:
    def test_on_a_disk_that_fills_up_keeps_what_it_had(self, refusal: Refusal, small_disk: Path):
        out = small_disk / "run"
        message = refusal(run, out, "model.width=64")  # the state outgrows the disk with the optimiser's moments
        assert f"cannot write {out / LAST}" in message
        assert "No space left on device" in message
        assert counters(out)["step"] == 0
        assert {path.name for path in out.iterdir()} == {
            *(".lock", "environment.json", LAST, MODEL, "metrics.jsonl", "recipe.toml")
        }
        subprocess.run(["mount", "-o", "remount,size=2m", small_disk], check=True)
        assert resume(out)["finished"]

    def test_metrics_that_cannot_be_written_are_one_line(self, refusal: Refusal, tmp_path: Path):
        folder = RunFolder(tmp_path)
        folder.append_metrics({"step": 1})
        with files_of_at_most((tmp_path / "metrics.jsonl").stat().st_size + 3):
            assert "metrics.jsonl: File too large" in refusal(folder.append_metrics, {"step": 2})
        assert folder.metrics() == [{"step": 1}]  # half a row is none

    def test_in_a_read_only_folder_is_refused(self, refusal: Refusal, request: pytest.FixtureRequest, tmp_path: Path):
        if os.geteuid() == 0:  # whom no mode keeps out
            folder = request.getfixturevalue("small_disk")
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        else:
            folder = tmp_path / "locked"
            folder.mkdir(mode=0o555)
        message = refusal(run, folder / "run")
        assert f"cannot write in {folder / 'run'}: " in message
        assert message.endswith("; choose another folder")

    def test_where_a_file_is_in_the_way_is_refused(self, refusal: Refusal, tmp_path: Path):
        (tmp_path / "run").write_text("a file")
        assert f"cannot write in {tmp_path / 'run'}: " in refusal(run, tmp_path / "run")
        assert (tmp_path / "run").read_text() == "a file"


class TestLock:
    def test_is_held_while_writing_and_free_after(self, refusal: Refusal, tmp_path: Path):
        first, second = RunFolder(tmp_path), RunFolder(tmp_path)
        with first.open_for_writing():
            message = refusal(lambda: second.open_for_writing().__enter__())
            assert f"{tmp_path} is being written by another process; wait, or choose another folder" in message
        with second.open_for_writing():
            pass

    def test_is_free_after_a_failure(self, tmp_path: Path):
        with pytest.raises(ZeroDivisionError), RunFolder(tmp_path).open_for_writing():
            _ = 1 / 0
        with RunFolder(tmp_path).open_for_writing():
            pass

    def test_a_locked_run_is_not_touched(self, refusal: Refusal, tmp_path: Path):
        run(tmp_path, "train.epochs=1")
        before = digests(tmp_path)
        with RunFolder(tmp_path).open_for_writing():
            refusal(resume, tmp_path, "train.epochs=2")
        assert digests(tmp_path) == before

    def test_reading_needs_no_lock(self, tmp_path: Path):
        run(tmp_path, "train.epochs=1")
        with RunFolder(tmp_path).open_for_writing():
            assert read_tensors(tmp_path / MODEL)[2]["epoch"] == 1


@pytest.mark.parametrize("log", ["/dev/full", "a closed pipe"])
def test_a_log_that_cannot_be_written_ends_no_training(tmp_path: Path, log: str):
    read, write = os.pipe()
    os.close(read)
    stderr = write if log == "a closed pipe" else os.open(log, os.O_WRONLY)
    own = (f"data.name={digits_file(tmp_path / 'rows.npy')}", "train.epochs=2")
    settings = [word for each in (*SMALL, *own) for word in ("--set", each)]
    out = ["--out", str(tmp_path / "run"), "--device", "cpu"]
    command = [sys.executable, "-m", "nicest", "train", "digits", *out, *settings]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=120, check=False)
    os.close(stderr)
    assert done.returncode == 0
    assert "best" in done.stdout
    assert len(RunFolder(tmp_path / "run").metrics()) == 2


def test_what_safetensors_left_of_a_killed_write_is_removed(tmp_path: Path):
    tmp_path.joinpath(".tmpAb3xQ9").write_bytes(b"half")
    with RunFolder(tmp_path).open_for_writing():
        assert not tmp_path.joinpath(".tmpAb3xQ9").exists()
