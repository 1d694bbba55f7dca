"""The crash test: real trainings, killed by SIGKILL at random instants and inside their writes, end as if untouched.

`make crash-test` runs it; the tests run a short version.
"""

import argparse
import itertools
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nicest.errors import NicestError
from nicest.files import to_json, write_text
from nicest.runs.folder import LAST, MODEL, RunFolder, read_tensors
from nicest.runs.runtime import environment
from small_runs import SMALL

SETTINGS = (  # a few seconds of training; every source of randomness is used, and the best epoch is not the last
    *SMALL,
    "model.width=256",
    "train.epochs=30",
    "train.lr=3e-2",
    "train.schedule=constant",
    "augment.share=0.5",
    "augment.rotation=0.1",
)
METRICS = "metrics.jsonl"
WAYS = ("anywhere", "training", "write", "write", "after")  # when: at any instant, in training, inside or after a write
TARGETS = (LAST, LAST, MODEL, "")  # inside the write of which file; "": of any
HASTY = "from nicest.cli import main; from nicest.train.loop import Saver; Saver.late = lambda saver: True; main()"
PATIENCE = 120  # seconds: a process that takes longer hangs


class Lost(Exception):
    """What cannot be got back after a kill."""


@dataclass
class Tally:
    """What happened, counted."""

    kills: int = 0
    ways: Counter[str] = field(default_factory=Counter)
    inside: Counter[str] = field(default_factory=Counter)  # kills after which a temporary file was there, by its name
    half: int = 0  # of these, files that were not whole yet
    resumes: int = 0
    starts: int = 0  # of victims killed before their first state was written, once more from the beginning
    runs: int = 0
    identical: int = 0
    left_over: int = 0  # temporary files in the folders of finished runs
    lost: list[str] = field(default_factory=list)

    def well(self) -> bool:
        return not self.lost and not self.left_over and self.identical == self.runs

    def __str__(self) -> str:
        return "\n".join(
            (
                f"kills {self.kills}, inside a write {self.inside.total()}",
                f"resumes {self.resumes}, killed before there was a state and started again {self.starts}",
                f"lost runs {len(self.lost)}, temporary files left over {self.left_over}",
                f"final weights identical {self.identical} of {self.runs}",
                *self.lost,
            )
        )


class Reference:
    """A finished run that nothing interrupted: how it ended, and how long it took."""

    def __init__(self, out: Path, settings: tuple[str, ...], seconds: float) -> None:
        self.settings = settings
        self.end, self.files, self.seconds = ending(out), names(out), seconds
        self.training, self.steps = rows(out)[-1]["seconds"], rows(out)[-1]["step"]


def undisturbed(out: Path) -> Reference:
    began = time.perf_counter()
    finish(start(out, SETTINGS))
    return Reference(out, SETTINGS, time.perf_counter() - began)


def crash_test(
    folder: Path, reference: Reference, kills: int, seed: int, say: Callable[[str], None] = lambda line: None
) -> Tally:
    """Kill trainings, one to four times each, until there were so many kills; let all of them finish."""
    chance, tally = random.Random(seed), Tally()
    for i in itertools.count(1):
        if tally.kills >= kills:
            break
        out, before = folder / f"victim{i}", (tally.kills, tally.inside.total(), tally.resumes)
        ways = [chance.choice(WAYS) for _ in range(min(chance.randint(1, 4), kills - tally.kills))]
        loss = None
        try:
            victim(out, ways, chance, reference, tally)
            shutil.rmtree(out)
        except Lost as error:
            loss = error
            tally.lost.append(f"{out.name}: {loss}")
        after = (tally.kills, tally.inside.total(), tally.resumes)
        killed, inside, resumed = (now - then for now, then in zip(after, before, strict=True))
        if killed or loss:  # one that came to its end before its instant does not count
            tally.runs += 1
            tally.identical += loss is None
        say(f"{out.name}: kills {killed}, inside a write {inside}, resumes {resumed}: {loss or 'identical'}")
        if len(tally.lost) > 9:
            break
    return tally


def victim(out: Path, ways: list[str], chance: random.Random, reference: Reference, tally: Tally) -> None:
    """A training that is killed in these ways, one after the other, and then finishes; Lost if anything is."""
    step = -1  # of the state; none yet
    for i, way in enumerate([*ways, ""]):
        tally.resumes += step >= 0
        tally.starts += step < 0 < i
        process = start(out, reference.settings if step < 0 else None, hasty=chance.random() < 0.5)
        try:
            if not way or not kill(process, out, way, chance, reference, max(step, 0) / reference.steps):
                finish(process)
                break
        finally:
            process.kill()
        tally.kills += 1
        tally.ways[way] += 1
        for temporary in temporaries(out, process.pid):
            tally.inside[temporary.name.removeprefix(".").removesuffix(f".{process.pid}.tmp")] += 1
            tally.half += not whole(temporary)
        step = survived(out, step)
    end = ending(out)
    differing = [part for part in end if end[part] != reference.end[part]]
    if differing:
        raise Lost(f"the end differs in {', '.join(differing)}")
    tally.left_over += len(temporaries(out))
    missing = reference.files - names(out)
    if missing:
        raise Lost(f"{', '.join(sorted(missing))} is missing")


def start(out: Path, settings: tuple[str, ...] | None, *, hasty: bool = False) -> subprocess.Popen[str]:
    """A real `nicest train` in a process of its own; without settings, one that goes on with what its folder holds.

    One that is hasty saves the state whenever it may, also in the middle of epochs, as others do after some minutes.
    """
    program = ["-c", HASTY] if hasty else ["-m", "nicest"]
    words = ["--resume"] if settings is None else [word for each in settings for word in ("--set", each)]
    return subprocess.Popen(
        [sys.executable, *program, "train", "digits", "--out", str(out), "--device", "cpu", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    """Let a process come to its end, which must be a good one."""
    try:
        _, said = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.communicate()
        raise Lost("training hangs") from error
    if process.returncode != 0:
        raise Lost(f"refused: {(said.strip().splitlines() or ['without a word'])[-1]}")


def kill(
    process: subprocess.Popen[str], out: Path, way: str, chance: random.Random, reference: Reference, done: float
) -> bool:
    """Kill a process at a random instant of the share that is not done yet; False if it came to its end before."""
    training = reference.training * (1 - done)
    if way == "anywhere":
        pause(process, chance.uniform(0, reference.seconds - reference.training + training))
    else:
        old = inodes(out)
        if way == "training" or chance.random() < 0.7:  # else in or after one of its first writes
            await_change(process, out, old)  # the first state is written, or the metrics are cut to the state
            pause(process, chance.uniform(0, training))
        if way == "write":
            stop_in_write(process, out, chance)
        if way == "after":
            await_change(process, out, inodes(out))
            time.sleep(chance.uniform(0, 0.01))
    process.kill()
    process.wait()
    if process.returncode != -signal.SIGKILL:
        return False
    assert process.stderr
    process.stderr.close()
    return True


def stop_in_write(process: subprocess.Popen[str], out: Path, chance: random.Random) -> None:
    """Stop a process at a random instant at which a temporary file of its own is there."""
    target = chance.choice(TARGETS)
    for _ in living(process):
        if not temporaries(out, process.pid, target):
            time.sleep(0.0001)  # a write takes some milliseconds
            continue
        time.sleep(chance.choice((0, chance.uniform(0, 0.005))))
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if temporaries(out, process.pid, target):
            return
        process.send_signal(signal.SIGCONT)  # too late, the file has taken its place: the next one


def await_change(process: subprocess.Popen[str], out: Path, old: list[int]) -> None:
    """Wait until the state or the metrics are replaced."""
    for _ in living(process):
        if inodes(out) != old:
            break
        time.sleep(0.0005)


def living(process: subprocess.Popen[str]) -> Iterator[None]:
    """As long as the process lives and does not hang."""
    until = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < until:
        yield


def pause(process: subprocess.Popen[str], seconds: float) -> None:
    """Wait, but not for a process that has ended."""
    until = time.monotonic() + seconds
    for _ in living(process):
        left = until - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(left, 0.05))


def survived(out: Path, before: int) -> int:
    """The step of the state after a kill, -1 if none was written yet; all files are whole, and it never goes back."""
    if not (out / LAST).exists():
        if before >= 0 or (out / MODEL).exists() or (out / METRICS).exists():
            raise Lost("the state is gone")
        return -1
    try:
        step = read_tensors(out / LAST)[2]["step"]
        if (out / MODEL).exists():
            read_tensors(out / MODEL)
        kept = RunFolder(out, verify=True)
        kept.read_state()
        if (out / MODEL).exists():
            kept.read_model()
    except NicestError as error:
        raise Lost(str(error)) from error
    if step < before:
        raise Lost(f"the state went back from step {before} to {step}")
    return step


def ending(out: Path) -> dict[str, Any]:
    """All that a run leaves, to the bit, but for the seconds it took."""
    try:
        state, model = read_tensors(out / LAST), read_tensors(out / MODEL)
        return {
            "the state": bits(state[0]),
            "the counters": timeless(state[2]),
            "the model": bits(model[0]),
            "the figures of the model": timeless(model[2]),
            "the metrics": [timeless(row) for row in rows(out)],
            "the recipe": (state[1], model[1], (out / "recipe.toml").read_text()),
        }
    except (NicestError, OSError) as error:
        raise Lost(str(error)) from error


def bits(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {name: (tensor.dtype, tensor.shape, tensor.numpy().tobytes()) for name, tensor in tensors.items()}


def timeless(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if name != "seconds"}


def rows(out: Path) -> list[dict[str, Any]]:
    """Every line of the metrics; none may be torn."""
    try:
        return [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    except json.JSONDecodeError as error:
        raise Lost(f"the metrics are torn: {error}") from error


def names(out: Path) -> set[str]:
    return {path.name for path in out.iterdir()}


def temporaries(out: Path, pid: int | str = "", target: str = "") -> list[Path]:
    """The temporary files of a folder; of one process, if it is given, and for one file."""
    ending = f".{pid}.tmp" if pid else ".tmp"
    try:
        found = os.listdir(out)  # noqa: PTH208 - in a loop that must be quick
    except FileNotFoundError:
        return []
    return [out / name for name in found if name.startswith(f".{target}") and name.endswith(ending)]


def inodes(out: Path) -> list[int]:
    """Which files the state and the metrics are: others, once they are replaced."""
    return [path.stat().st_ino if path.exists() else 0 for path in (out / LAST, out / METRICS)]


def whole(path: Path) -> bool:
    """Whether a temporary file could be read as the one it was to become."""
    try:
        if ".safetensors." in path.name:
            read_tensors(path)
    except NicestError:
        return False
    return path.stat().st_size > 0


def report(tally: Tally, reference: Reference, arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """What goes into results/."""
    here = environment(torch.device("cpu"))
    return {
        "command": f"PYTHONPATH=tests python tests/crash.py --kills {arguments.kills} --seed {arguments.seed}",
        "date": here["date"],
        "hardware": f"{platform.machine()} CPU, one thread a run",
        "platform": f"{platform.system()}, Python {here['python']}",
        "versions": here["versions"],
        "settings": list(SETTINGS),
        "seed": arguments.seed,
        "seconds": round(seconds, 1),
        "reference_seconds": round(reference.seconds, 1),
        "reference_training_seconds": round(reference.training, 1),
        "kills": tally.kills,
        "kills_by_aim": dict(sorted(tally.ways.items())),
        "kills_inside_a_write": tally.inside.total(),
        "files_in_the_write": dict(sorted(tally.inside.items())),
        "files_half_written": tally.half,
        "resumes": tally.resumes,
        "started_again": tally.starts,
        "runs": tally.runs,
        "lost_runs": len(tally.lost),
        "losses": tally.lost,
        "temporary_files_left_over": tally.left_over,
        "final_weights_identical": tally.identical,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the runs are made; lost ones stay there")
    parser.add_argument("--out", type=Path, help="a file for the result")
    arguments = parser.parse_args()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="crash-", dir=arguments.runs))
    began = time.perf_counter()
    reference = undisturbed(folder / "reference")
    tally = crash_test(folder, reference, arguments.kills, arguments.seed, lambda line: print(line, flush=True))
    print(tally)
    if arguments.out:
        write_text(arguments.out, to_json(report(tally, reference, arguments, time.perf_counter() - began)))
    if not tally.well():
        print(f"what is left of the runs is in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
