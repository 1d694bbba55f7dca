"""The SHA-256 of model and state is kept in environment.json, whatever is killed when; a changed file is refused."""

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import nicest
from nicest.errors import NicestError
from nicest.recipes import Recipe
from nicest.runs import digests
from nicest.runs.digests import ENVIRONMENT, verify
from nicest.runs.folder import LAST, METRICS, MODEL, RunFolder, write_tensors
from nicest.runs.sinks import Saved
from small_runs import resume, run

Refusal = Callable[..., str]


class Killed(BaseException):
    """The end of the process, as far as it can tell."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    run(out, "train.epochs=2")
    return out


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def kept(out: Path) -> dict[str, list[str]]:
    return json.loads((out / ENVIRONMENT).read_text())["sha256"]


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_run_keeps_the_digests_of_its_model_its_state_and_its_metrics(trained: Path):
    expected = {name: [hashlib.sha256((trained / name).read_bytes()).hexdigest()] for name in (MODEL, LAST, METRICS)}
    assert kept(trained) == expected
    assert "versions" in json.loads((trained / ENVIRONMENT).read_text())
    assert isinstance(nicest.load(trained, verify=True), nicest.Flow)
    nicest.load(trained / MODEL, verify=True)


def test_one_bit_is_told_unless_it_is_not_to_be_checked(refusal: Refusal, copy: Path):
    flip(copy / MODEL)
    nicest.load(copy, verify=False)
    assert refusal(nicest.load, copy) == (message := refusal(nicest.load, copy, verify=True))
    assert f"{copy / MODEL} has changed since it was written: expected SHA-256 {kept(copy)[MODEL][0]}, got " in message
    assert message.endswith(": restore a copy of it, or train again")


def test_a_good_file_of_another_run_is_told(refusal: Refusal, copy: Path, tmp_path: Path):
    run(tmp_path / "other", "train.epochs=1", "train.seed=1")
    shutil.copy(tmp_path / "other" / MODEL, copy / MODEL)
    assert "has changed since it was written" in refusal(nicest.load, copy, verify=True)


@pytest.mark.parametrize(
    "content", ["{}", "[]", "{", "\xff", '{"sha256": 3}', '{"sha256": {"model.safetensors": 3}}', ""]
)
def test_a_run_without_digests_loads_but_cannot_be_verified(refusal: Refusal, copy: Path, content: str):
    (copy / ENVIRONMENT).write_text(content, encoding="latin-1")
    nicest.load(copy)
    message = refusal(nicest.load, copy, verify=True)
    assert f"{copy / ENVIRONMENT} keeps no SHA-256 of {MODEL}" in message
    assert resume(copy, "train.epochs=3")["finished"]
    RunFolder(copy, verify=True).read_state()  # from its next save on it has one


def test_an_older_run_that_is_killed_while_it_saves_can_be_verified(copy: Path, monkeypatch: pytest.MonkeyPatch):
    """Its files had no digests when it was resumed."""
    (copy / ENVIRONMENT).write_text("{}")
    monkeypatch.setattr(Path, "replace", fail_for(LAST, MODEL))
    with pytest.raises(Killed):
        write_tensors(copy / LAST, Saved({"a": torch.zeros(3)}, Recipe(), {}))
    monkeypatch.undo()
    verify(copy / LAST)


def fail_for(*names: str) -> Callable[[Path, Path], Path]:
    replace = Path.replace

    def fail(path: Path, target: Path) -> Path:
        if target.name in names:
            raise Killed
        return replace(path, target)

    return fail


@pytest.mark.parametrize("moment", ["before the rename", "after it"])
def test_whichever_file_a_kill_leaves_is_known_time_after_time(
    copy: Path, monkeypatch: pytest.MonkeyPatch, moment: str
):
    keep, before = digests._keep, (copy / MODEL).read_bytes()

    def killed(folder: Path, known: dict[str, list[str]]) -> None:
        if len(known[MODEL]) == 1:  # the new one alone: it is in its place
            raise Killed
        keep(folder, known)

    if moment == "before the rename":
        monkeypatch.setattr(Path, "replace", fail_for(MODEL))
    else:
        monkeypatch.setattr(digests, "_keep", killed)
    for k in range(4):
        with pytest.raises(Killed):
            write_tensors(copy / MODEL, Saved({"a": torch.full((3,), k)}, Recipe(), {}))
        verify(copy / MODEL)
        assert ((copy / MODEL).read_bytes() == before) == (moment == "before the rename")
    monkeypatch.undo()
    write_tensors(copy / MODEL, Saved({"a": torch.zeros(3)}, Recipe(), {}))
    assert len(kept(copy)[MODEL]) == 1
    verify(copy / MODEL)
    flip(copy / MODEL)
    with pytest.raises(NicestError, match="has changed"):
        verify(copy / MODEL)


def test_a_file_that_is_replaced_while_it_is_verified_is_not_called_changed(copy: Path):
    stop = threading.Event()

    def replace() -> None:
        k = 0
        while not stop.is_set():
            write_tensors(copy / MODEL, Saved({"a": torch.full((1000,), k)}, Recipe(), {}))
            k += 1

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        for _ in range(200):
            verify(copy / MODEL)
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("of", ["a figure", "its step", "a row"])
def test_metrics_that_were_changed_are_refused_by_a_resume(refusal: Refusal, copy: Path, of: str):
    before = (copy / METRICS).read_text()
    lines = before.splitlines(keepends=True)
    if of == "a row":
        after = lines[1]
    elif of == "its step":
        after = before.replace('"step": 14,', '"step": 999,')
    else:
        digit = re.search(r'"valid_nats": -?\d*\.\d', before).end()
        after = before[:digit] + str((int(before[digit]) + 1) % 10) + before[digit + 1 :]
    assert after != before
    (copy / METRICS).write_text(after)
    said = refusal(resume, copy, "train.epochs=3")
    assert said == f"{copy / METRICS} has changed since it was written: restore a copy of it, or delete it"
    (copy / METRICS).write_text(before)
    assert resume(copy, "train.epochs=3")["finished"]
    assert (copy / METRICS).read_text().startswith(before)


def test_digests_that_several_processes_keep_are_all_there(copy: Path):
    def write(name: str) -> None:
        for k in range(20):
            write_tensors(copy / name, Saved({"a": torch.full((3,), k)}, Recipe(), {}))

    writers = [threading.Thread(target=write, args=[f"{k}.safetensors"]) for k in range(4)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    for k in range(4):
        verify(copy / f"{k}.safetensors")


def test_nothing_is_kept_where_there_is_no_run(tmp_path: Path):
    write_tensors(tmp_path / "a.safetensors", Saved({"a": torch.zeros(3)}, Recipe(), {}))
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
