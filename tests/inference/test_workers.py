"""Worker processes: results in order, bounded memory, and what happens when one dies or the user stops."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import nicest
from nicest.inference import workers
from nicest.inference.workers import mapped

ROOT = Path(__file__).parents[2]


def waits(tool: str, seconds: float, k: int) -> int:
    time.sleep(seconds)
    return k


def stays(tool: str, k: int) -> None:
    """Leaves its process id, and works for long."""
    (Path(tool) / f"{os.getpid()}.tmp").touch()
    (Path(tool) / f"{os.getpid()}.tmp").rename(Path(tool) / f"{os.getpid()}.pid")
    time.sleep(600)


def dies(tool: str, k: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuses(tool: str, k: int) -> None:
    raise nicest.NicestError("no such block")


def fails(tool: str, k: int) -> float:
    return k / 0


def test_results_come_in_order_and_few_inputs_are_taken_ahead():
    taken = list[int]()

    def inputs() -> Iterator[tuple[float, int]]:
        for k in range(12):
            taken.append(k)
            yield 0.2 if k % 4 == 0 else 0.0, k

    seen = []
    for k in mapped(waits, "tool", inputs(), 2):
        seen.append(k)
        assert len(taken) <= len(seen) + 2 * workers.AHEAD
    assert seen == list(range(12))


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (dies, "a worker process was killed, perhaps for lack of memory: try again with fewer --jobs"),
        (refuses, "no such block"),
        (fails, "a worker process failed: ZeroDivisionError: division by zero"),
    ],
)
def test_a_worker_that_fails_is_one_clear_line(function, match: str):
    before = {child.pid for child in multiprocessing.active_children()}
    with pytest.raises(nicest.NicestError, match=match):
        list(mapped(function, "tool", [(0,), (1,), (2,)], 2))
    assert {child.pid for child in multiprocessing.active_children()} <= before


def test_what_cannot_be_sent_is_coded_here():
    assert list(mapped(lambda tool, k: k + 1, "tool", [(0,), (1,)], 2)) == [1, 2]


@pytest.mark.parametrize(
    ("jobs", "blocks", "device", "expected"),
    [
        (0, 1, "cpu", 1),
        (0, 99, "cpu", 6),
        (3, 99, "cpu", 3),
        (3, 2, "cuda", 2),
        (0, 7, "cuda", 1),
        (0, 99, "cuda", 4),
    ],
)
def test_how_many(jobs: int, blocks: int, device: str, expected: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "cores", lambda: 6)
    assert workers.workers_for(jobs, blocks, torch.device(device)) == expected


def alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_process_that_started_them(stop: signal.Signals, tmp_path: Path):
    code = "from test_workers import *; list(mapped(stays, TOOL, [(0,), (1,), (2,)], 2))"
    path = os.pathsep.join([str(ROOT / "src"), str(Path(__file__).parent)])
    process = subprocess.Popen(
        [sys.executable, "-c", code.replace("TOOL", repr(str(tmp_path)))],
        env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        until = time.monotonic() + 60
        while len(found := [int(each.stem) for each in tmp_path.glob("*.pid")]) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        assert len(found) == 2
        process.send_signal(stop)
        process.wait(timeout=30)
        while any(map(alive, found)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(map(alive, found))
    finally:
        process.kill()
