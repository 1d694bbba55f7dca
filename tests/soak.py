"""The soak: a studio under load and trainings beside it for an hour, with kills and full disks; `make soak` runs it.

A real `nicest studio` serves three runs: a finished one, and two that are trained, resumed, finished, compared with an
undisturbed reference and trained again, one after the other, in folders on a small disk. The trainings are killed as
in the crash test, or their disk is filled; the studio is killed in the first half of the time, and started again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import torch

from crash import CASES, WAYS, Lost, Reference, Tally, Training, kill, undisturbed, victim
from load import Load, examples, resident, start_studio
from nicest.files import to_json, write_text
from nicest.runs.folder import RunFolder
from nicest.runs.runtime import environment
from small_runs import people

DISK = 32  # megabytes; the folders of the runs take less than a tenth
WARM_UP = 10  # minutes of a studio, before its memory counts
LIMIT = 20.0  # megabytes an hour, by which its memory may grow
SHORTEST = 15  # minutes, over which growth can be told from noise
CLIENTS = {  # of each run: how many, what they ask for and how often, and which answers are fine
    "finished": (2, Load.kinds, {200, 429}),
    "images": (
        1,
        {"metrics": 40, "score": 40, "samples": 18, "inpaint": 2},
        {200, 422, 429},
    ),  # 422: it has no model yet
    "table": (1, {"metrics": 50, "rows": 50}, {200, 422, 429}),
}


class Clients(Load):
    """Clients that continue while the server is down."""

    def __init__(self, end: float, kinds: dict[str, int], *of: Any) -> None:
        super().__init__(*of)
        self.end, self.kinds = end, kinds  # type: ignore[misc]
        self.failed: list[tuple[float, float, str]] = []  # from when to when, and how
        self.refused: Counter[str] = Counter()

    async def ask(self, client: httpx.AsyncClient, what: str) -> Any:
        began = time.perf_counter()
        try:
            answer = await super().ask(client, what)
            if answer.status_code != 200:
                self.refused[f"{answer.status_code}: {answer.json()['error']}"] += 1
        except httpx.TransportError as error:
            self.failed.append((began, time.perf_counter(), f"{what}: {type(error).__name__}"))
            await asyncio.sleep(1)


class Studio:
    """A studio that is killed and restarted; records when it was down, and its memory in each life."""

    def __init__(self, runs: list[Path], log: Path) -> None:
        self.runs, self.log, self.port = runs, log.open("w"), 0
        self.down: list[tuple[float, float]] = []
        self.lives: list[list[tuple[float, float]]] = []
        self.start()

    def start(self) -> None:
        self.process, self.url = start_studio(*self.runs, port=self.port, log=self.log)
        self.port = urlsplit(self.url).port or 0
        self.lives.append([])

    def kill(self) -> None:
        began = time.perf_counter()
        self.process.kill()
        self.process.communicate()
        self.start()
        self.down.append((began, time.perf_counter()))

    def keep(self, end: float, kills: list[float]) -> None:
        """Measure the memory until the end, and kill the studio at these times."""
        while (now := time.perf_counter()) < end:
            if self.process.poll() is not None:
                raise Lost(f"the studio ended by itself, with exit code {self.process.returncode}")
            self.lives[-1].append((now, resident(self.process.pid)))
            if kills and now > kills[0]:
                kills.pop(0)
                self.kill()
            time.sleep(1)

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


class Disk:
    """A small disk that can be filled; where mounting is not allowed, a limit on file sizes instead."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}m", "tmpfs", str(folder)]
        self.folder, self.ballast = folder, folder / "ballast"
        self.mounted = bool(shutil.which("mount")) and subprocess.run(command, capture_output=True).returncode == 0

    def __str__(self) -> str:
        return f"a tmpfs of {DISK} MB, filled" if self.mounted else "RLIMIT_FSIZE (mounting is not allowed here)"

    def fill(self, pid: int) -> None:
        if not self.mounted:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, 4096))
        with suppress(OSError), self.ballast.open("wb", buffering=0) as file:
            while self.mounted:
                file.write(bytes(2**12))

    def empty(self) -> None:
        self.ballast.unlink(missing_ok=True)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", self.folder], check=True)

    def stop(self, training: Training, way: str, chance: random.Random, reference: Reference, done: float) -> bool:
        """Kill a training, or fill its disk at a random instant; False if it came to its end before."""
        if way != "full":
            return kill(training, way, chance, reference, done)
        training.pause(chance.uniform(0, reference.seconds - reference.training * done))
        self.fill(training.process.pid)
        for _ in training.living():
            time.sleep(0.05)
        self.empty()
        if training.process.poll() is None:
            raise Lost("training hangs on a full disk")
        if training.process.returncode == 0:
            return False
        said = training.process.stderr.read().strip().splitlines() or [""]
        if not any(each in said[-1] for each in ("No space left on device", "File too large")):
            raise Lost(f"refused on a full disk: {said[-1]}")
        return True


def train_until(end: float, disk: Disk, references: dict[str, Reference], chance: random.Random) -> Tally:
    """Train, stop, resume and finish one run after the other; one that differs from its reference is lost."""
    total, names = Tally(), cycle(references)
    while time.perf_counter() < end and not total.lost:
        name = next(names)
        out, tally = disk.folder / name, Tally(runs=1)
        ways = [chance.choice((*WAYS, "full", "full")) for _ in range(chance.randint(1, 4))]
        try:
            victim(out, ways, chance, references[name], tally, disk.stop)
            tally.identical = 1
            clear(out)
        except Lost as error:
            tally.lost.append(f"{name}, run {total.runs + 1}: {error}")
        total += tally
        print(f"{name}: {', '.join(ways)}: {', '.join(tally.lost) or 'identical'}; runs {total.runs}", flush=True)
    return total


def clear(out: Path) -> None:
    """Remove the files of a run, but not its folder, which is served."""
    for each in out.iterdir():
        each.unlink()


def growth(life: list[tuple[float, float]]) -> dict[str, Any]:
    """Fit a line to the memory of a studio after its warm-up; return its slope in megabytes per hour."""
    began = life[0][0]
    warm = [each for each in life if each[0] - began > 60 * WARM_UP] or life[-1:]
    seconds, megabytes = np.array(warm).T
    minutes = (seconds[-1] - seconds[0]) / 60
    slope = float(np.polyfit(seconds / 3600, megabytes, 1)[0]) if minutes >= SHORTEST else None
    return {
        "minutes": round((life[-1][0] - began) / 60, 1),
        "megabytes_after_warm_up": round(float(megabytes[0]), 1),
        "megabytes_at_the_end": round(float(megabytes[-1]), 1),
        "megabytes_most": round(max(each for _, each in life), 1),
        "megabytes_an_hour": None if slope is None else round(slope, 1),  # None: too short to tell
        "every_five_minutes": [round(each, 1) for _, each in life[::300]],
    }


def failures(failed: list[tuple[float, float, str]], down: list[tuple[float, float]]) -> list[str]:
    """Return the requests that failed although the server was up."""
    return [how for began, ended, how in failed if not any(start < ended and began < end for start, end in down)]


def soak(folder: Path, minutes: float, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    disk = Disk(folder / "disk")
    studio = None
    try:
        people(disk.folder / "people.csv")
        references = {}
        for name in ("images", "table"):
            references[name] = undisturbed(CASES[name], disk.folder / name)
            print(f"{name}: {references[name].seconds:.0f} s undisturbed", flush=True)
        shutil.copytree(disk.folder / "images", folder / "finished")
        for name in references:
            clear(disk.folder / name)
        served = [folder / "finished", *(disk.folder / name for name in references)]
        studio = Studio(served, folder / "studio.log")
        _, *asked = examples(studio.url)
        begin = time.perf_counter()
        end = begin + 60 * minutes
        loads = {name: Clients(end, kinds, studio.url, name, *asked) for name, (_, kinds, _) in CLIENTS.items()}

        async def clients() -> None:
            await asyncio.gather(*(load.client() for name, load in loads.items() for _ in range(CLIENTS[name][0])))

        kills = sorted(begin + 60 * minutes * chance.uniform(0.05, 0.45) for _ in range(1 + int(minutes) // 15))
        with ThreadPoolExecutor() as pool:
            keeping = pool.submit(studio.keep, end, kills)
            asking = pool.submit(asyncio.run, clients())
            tally = train_until(end, disk, references, chance)
            keeping.result()
            asking.result()
        code = studio.end()
        RunFolder(folder / "finished", verify=True).read_model()
    finally:
        if studio and studio.process.poll() is None:
            studio.process.kill()
        disk.close()
    log = (folder / "studio.log").read_text().replace(f"{folder}/", "")
    lives = [growth(life) for life in studio.lives]
    grown = lives[-1]["megabytes_an_hour"]
    wrong = [each for load in loads.values() for each in failures(load.failed, studio.down)]
    failed = sum(len(load.failed) for load in loads.values()) - len(wrong)
    for name, load in loads.items():
        wrong += [f"{name}: {each}" for each in load.refused if int(each.partition(":")[0]) not in CLIENTS[name][2]]
    flat = None if grown is None else grown <= LIMIT
    return {
        "minutes": minutes,
        "requests_answered": sum(sum(load.statuses.values()) for load in loads.values()),
        "requests_that_failed_while_the_studio_was_down": failed,
        "requests_that_failed_else": wrong,
        "answers": {name: dict(sorted(load.statuses.items())) for name, load in loads.items()},
        "refusals": {n: {k.replace(f"{folder}/", ""): v for k, v in each.refused.items()} for n, each in loads.items()},
        "kills_of_the_studio": len(studio.down),
        "seconds_to_its_return": [round(end - begin, 1) for begin, end in studio.down],
        "lines_of_its_log": log.splitlines(),
        "its_exit_code": code,
        "memory_of_its_lives": lives,
        "memory_may_grow_megabytes_an_hour": LIMIT,
        "memory_is_flat": flat,
        "kills_of_trainings": tally.kills - tally.ways["full"],
        "full_disks": tally.ways["full"],
        "disk": str(disk),
        "stopped_by": dict(sorted(tally.ways.items())),
        "resumes": tally.resumes,
        "runs": tally.runs,
        "runs_lost": len(tally.lost),
        "losses": tally.lost,
        "runs_identical": tally.identical,
        "temporary_files_left_over": tally.left_over,
        "well": tally.well() and not wrong and not code and "Traceback" not in log and flat is not False,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the runs are made; lost ones stay there")
    parser.add_argument("--out", type=Path, help="a file for the result")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    command = f"python tests/soak.py --minutes {asked.minutes:g} --seed {asked.seed}"
    about = environment(torch.device("cpu")) | {"command": command}
    asked.runs.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=asked.runs.resolve()))
    result = soak(folder, asked.minutes, asked.seed)
    text = to_json(about | result)
    print(text, end="")
    if asked.out:
        write_text(asked.out, text)
    if not result["well"]:
        print(f"what is left of it is in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
