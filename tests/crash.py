"""The crash test: real trainings, killed by SIGKILL at random instants and inside their writes, end as if untouched.

`make crash-test` runs it; the tests run a short version. Results are kept in a file after every run, so that several
sittings with the same seed add up: `python tests/crash.py --kills 1000 --out FILE`, as often as it takes.
"""

import argparse
import hashlib
import json
import multiprocessing
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
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nicest.errors import NicestError
from nicest.files import to_json, write_text
from nicest.runs.folder import LAST, METRICS, MODEL, RECIPE, RunFolder, read_tensors
from nicest.runs.runtime import environment
from small_runs import SMALL, people

SETTINGS = (  # a few seconds of training; every source of randomness is used, and the best epoch is not the last
    *SMALL,
    "model.width=256",
    "train.epochs=30",
    "train.lr=3e-2",
    "train.schedule=constant",
    "augment.share=0.5",
    "augment.rotation=0.1",
)
WAYS = ("anywhere", "training", "write", "write", "after")  # when: at any instant, in training, inside or after a write
TARGETS = (LAST, LAST, MODEL, "")  # inside the write of which file; "": of any
HASTY = "from nicest.cli import main\nfrom nicest.train.loop import Saver\nSaver.late = lambda saver: True\nmain()\n"
PATIENCE = 900  # seconds: a process that takes longer hangs


@dataclass(frozen=True)
class Case:
    """A kind of training: a recipe with settings, of digits or of a table with missing cells; maybe under torchrun."""

    recipe: str
    settings: tuple[str, ...]
    processes: int = 0  # started by torchrun; 0 without it

    def command(self, out: Path, program: list[str], *, resume: bool) -> list[str]:
        """The words that start it, or go on with it."""
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.processes}"]
        words = [*(launch if self.processes else []), *program, "train", self.recipe]
        words += ["--resume"] if resume else [word for each in self.settings for word in ("--set", each)]
        data = ["--data", str(out.parent / "people.csv")] if self.recipe == "table" and not resume else []
        return [sys.executable, *words, *data, "--out", str(out), "--device", "cpu"]


CASES = {
    "images": Case("digits", SETTINGS),
    "table": Case(
        "table", ("table.width=64", "table.members=1", "train.epochs=40", "train.evaluate_every=2", "train.patience=0")
    ),
    "torchrun": Case("digits", (*SETTINGS, "train.epochs=20"), processes=2),
    "large": Case(  # its states have more than 100 MB
        "digits",
        (
            *SETTINGS,
            "model.couplings=2",
            "model.hidden_layers=2",
            "model.width=2048",
            "train.epochs=5",
            "train.batch=400",
            "train.lr=1e-3",
        ),
    ),
}
ORDER = ("images", "table", "torchrun", "images", "table", "large")  # of the runs


class Lost(Exception):
    """What cannot be got back after a kill."""


@dataclass
class Tally:
    """What happened to the runs of a case, counted."""

    kills: int = 0
    ways: Counter[str] = field(default_factory=Counter)
    inside: int = 0  # kills after which temporary files were there
    files: Counter[str] = field(default_factory=Counter)  # which
    half: int = 0  # of these, those that were not whole yet
    resumes: int = 0
    starts: int = 0  # of runs killed before their first state was written, once more from the beginning
    runs: int = 0
    identical: int = 0
    left_over: int = 0  # temporary files in the folders of finished runs
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ways, self.files = Counter(self.ways), Counter(self.files)

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def well(self) -> bool:
        return not self.lost and not self.left_over and self.identical == self.runs

    def __str__(self) -> str:
        return "\n".join(
            (
                f"kills {self.kills}, inside a write {self.inside}",
                f"resumes {self.resumes}, killed before there was a state and started again {self.starts}",
                f"lost runs {len(self.lost)}, temporary files left over {self.left_over}",
                f"final weights identical {self.identical} of {self.runs}",
                *self.lost,
            )
        )


class Results:
    """What all sittings found, in a file that is replaced after every run."""

    def __init__(self, path: Path | None, seed: int) -> None:
        self.path, self.seed, self.runs = path, seed, 0
        self.cases: dict[str, Tally] = {name: Tally() for name in CASES}
        self.sittings: list[dict[str, Any]] = []
        if path and path.exists():
            kept = json.loads(path.read_text())
            if kept.get("seed") != seed or kept.get("settings") != plain(self.settings()):
                raise SystemExit(f"{path} is of another crash test: move it away, or choose another --out or --seed")
            self.runs, self.sittings = kept["runs_begun"], kept["sittings"]
            self.cases |= {name: Tally(**each) for name, each in kept["cases"].items()}

    @property
    def total(self) -> Tally:
        return sum(self.cases.values(), Tally())

    def settings(self) -> dict[str, Any]:
        return {name: vars(case) for name, case in CASES.items()}

    def begin_sitting(self) -> None:
        here = environment(torch.device("cpu"))
        self.sittings.append(
            {
                "date": here["date"],
                "hardware": f"{platform.machine()} CPU, one thread a process",
                "platform": f"{platform.system()}, Python {here['python']}",
                "versions": here["versions"],
                "kills": 0,
                "seconds": 0.0,
            }
        )

    def save(self) -> None:
        if self.path:
            write_text(self.path, to_json(self.report()))

    def report(self) -> dict[str, Any]:
        total = self.total
        return {
            "command": f"PYTHONPATH=tests python tests/crash.py --kills {total.kills} --seed {self.seed}",
            "seed": self.seed,
            "kills": total.kills,
            "kills_by_aim": dict(sorted(total.ways.items())),
            "kills_inside_a_write": total.inside,
            "files_in_the_write": dict(sorted(total.files.items())),
            "files_half_written": total.half,
            "resumes": total.resumes,
            "started_again": total.starts,
            "runs": total.runs,
            "lost_runs": len(total.lost),
            "losses": total.lost,
            "temporary_files_left_over": total.left_over,
            "final_weights_identical": total.identical,
            "seconds": round(sum(each["seconds"] for each in self.sittings), 1),
            "sittings": self.sittings,
            "runs_begun": self.runs,
            "cases": {name: vars(each) for name, each in self.cases.items()},
            "settings": self.settings(),
        }


def plain(value: Any) -> Any:
    """What JSON makes of it."""
    return json.loads(to_json(value))


class Reference:
    """A finished run of a case that nothing interrupted: how it ended, and how long it took."""

    def __init__(self, case: Case, out: Path, seconds: float) -> None:
        self.case, self.seconds = case, seconds
        self.end, self.files = ending(out), names(out)
        self.training, self.steps = rows(out)[-1]["seconds"], rows(out)[-1]["step"]


def undisturbed(case: Case, out: Path) -> Reference:
    began = time.perf_counter()
    Training(case, out).finish()
    return Reference(case, out, time.perf_counter() - began)


def crash_test(
    folder: Path,
    references: dict[str, Reference],
    results: Results,
    kills: int,
    say: Callable[[str], None] = lambda line: None,
    jobs: int = 1,
) -> None:
    """Kill runs, one to four times each, until there were so many kills in all; let all of them finish."""
    began, first = time.perf_counter(), results.total.kills
    order = [name for name in ORDER if name in references]
    results.begin_sitting()
    running: dict[Future[Tally], tuple[str, int]] = {}  # by case, with the kills it may have
    processes = partial(ProcessPoolExecutor, mp_context=multiprocessing.get_context("spawn"))
    with (processes if jobs > 1 else ThreadPoolExecutor)(jobs) as pool:
        while True:
            while len(running) < jobs and len(results.total.lost) < 10:
                left = kills - results.total.kills - sum(most for _, most in running.values())
                if left < 1:
                    break
                name, chance = order[results.runs % len(order)], random.Random(f"{results.seed} {results.runs}")
                results.runs += 1
                ways = [chance.choice(WAYS) for _ in range(min(chance.randint(1, 4), left))]
                out = folder / f"{name}-{results.runs}"
                running[pool.submit(one_run, out, ways, chance, references[name])] = name, len(ways)
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name, _ = running.pop(future)
                tally = future.result()
                results.cases[name] += tally
                seconds, done = time.perf_counter() - began, results.total.kills
                results.sittings[-1] |= {"kills": done - first, "seconds": round(seconds, 1)}
                results.save()
                minutes = seconds / max(1, done - first) * (kills - done) / 60
                what = f"kills {tally.kills}, inside a write {tally.inside}, resumes {tally.resumes}"
                end = ", ".join(tally.lost) or "identical"
                say(f"{name}: {what}: {end}; {done} of {kills} kills, about {minutes:.0f} min left")


def one_run(out: Path, ways: list[str], chance: random.Random, reference: Reference) -> Tally:
    """A victim's tally; its folder stays if it is lost."""
    tally = Tally()
    try:
        victim(out, ways, chance, reference, tally)
        shutil.rmtree(out)
    except Lost as error:
        tally.lost.append(f"{out.name}: {error}")
    if tally.kills or tally.lost:  # one that came to its end before its instant does not count
        tally.runs, tally.identical = 1, int(not tally.lost)
    return tally


def victim(
    out: Path,
    ways: list[str],
    chance: random.Random,
    reference: Reference,
    tally: Tally,
    stop: Callable[..., bool] | None = None,
) -> None:
    """A training that is killed in these ways, one after the other, and then finishes; Lost if anything is.

    `stop` knows other ways than `kill` to stop it.
    """
    step = -1  # of the state; none yet
    for i, way in enumerate([*ways, ""]):
        tally.resumes += step >= 0
        tally.starts += step < 0 < i
        training = Training(reference.case, out, resume=step >= 0, hasty=chance.random() < 0.5)
        try:
            if not way or not (stop or kill)(training, way, chance, reference, max(step, 0) / reference.steps):
                training.finish()
                break
        finally:
            training.end()
        tally.kills += 1
        tally.ways[way] += 1
        written = temporaries(out, training.writer) if training.writer else []
        tally.inside += bool(written)
        for temporary in written:
            tally.files[temporary.name.removeprefix(".").removesuffix(f".{training.writer}.tmp")] += 1
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


class Training:
    """A real `nicest train` in a process of its own, or under torchrun; `resume` goes on with what its folder holds.

    One that is `hasty` saves the state whenever it may, also in the middle of epochs, as others do after some minutes.
    """

    def __init__(self, case: Case, out: Path, *, resume: bool = False, hasty: bool = False) -> None:
        self.case, self.out, self.writer = case, out, 0
        program = ["-m", "nicest"]
        if hasty:
            program = [str(out.parent / "hasty.py")]
            Path(program[0]).write_text(HASTY)
        self.process = subprocess.Popen(
            case.command(out, program, resume=resume),
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if not case.processes:
            self.writer = self.process.pid

    def workers(self) -> list[int]:
        """The processes that torchrun has started."""
        parent = self.process.pid
        with suppress(OSError):  # torchrun has just ended
            return [int(each) for each in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
        return []

    def worker(self, rank: int) -> int:
        """The process of a rank that torchrun has started; 0 if there is none yet."""
        for each in self.workers():
            with suppress(OSError):  # it has just ended
                if f"RANK={rank}" in Path(f"/proc/{each}/environ").read_text().split("\0"):
                    return each
        return 0

    def living(self) -> Iterator[None]:
        """As long as the process lives and does not hang; what writes is known then, once there is such a process."""
        until = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < until:
            self.writer = self.writer or self.worker(0)
            yield

    def pause(self, seconds: float) -> None:
        """Wait, but not for a process that has ended."""
        until = time.monotonic() + seconds
        for _ in self.living():
            left = until - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(left, 0.05))

    def await_change(self, old: list[int]) -> None:
        """Wait until the state or the metrics are replaced."""
        for _ in self.living():
            if inodes(self.out) != old:
                break
            time.sleep(0.0005)

    def stop_in_write(self, chance: random.Random) -> None:
        """Stop what writes at a random instant at which a temporary file of its own is there."""
        target = chance.choice(TARGETS)
        for _ in self.living():
            if not self.writer or not temporaries(self.out, self.writer, target):
                time.sleep(0.0001)  # a write takes some milliseconds
                continue
            time.sleep(chance.choice((0, chance.uniform(0, 0.005))))
            try:
                os.kill(self.writer, signal.SIGSTOP)
                while state_of(self.writer) not in "TZX":
                    time.sleep(0.0001)
                if temporaries(self.out, self.writer, target):
                    return
                os.kill(self.writer, signal.SIGCONT)  # too late, the file has taken its place: the next one
            except ProcessLookupError:
                return

    def kill(self, rank: int | None = None) -> bool:
        """Kill all processes, or that of a rank, after which torchrun ends; whether there was anything to kill."""
        process = self.process
        one = self.worker(rank) if rank is not None else 0
        if process.poll() is None and one:
            os.kill(one, signal.SIGKILL)
            try:
                process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired as error:
                raise Lost("torchrun does not end when one of its processes is killed") from error
            return process.returncode != 0
        self.end()
        return process.returncode == -signal.SIGKILL

    def finish(self) -> None:
        """Let it come to its end, which must be a good one."""
        try:
            _, said = self.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired as error:
            raise Lost("training hangs") from error
        finally:
            self.end()
        if self.process.returncode != 0:
            lines = said.strip().splitlines() or [f"without a word, with exit code {self.process.returncode}"]
            raise Lost(f"refused: {next((line for line in lines if line.startswith('error:')), lines[-1])}")

    def end(self) -> None:
        """Kill what is left of it, at once: torchrun stands still while its processes are found."""
        if self.process.poll() is None and self.case.processes:
            self.process.send_signal(signal.SIGSTOP)
            while state_of(self.process.pid) not in "TZX":
                time.sleep(0.0001)
        workers = self.workers()
        for each in workers:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        if self.process.stderr:
            self.process.stderr.close()
        while any(state_of(each) not in "ZX" for each in workers):
            time.sleep(0.001)  # one that was killed may hold the lock for a moment


def kill(training: Training, way: str, chance: random.Random, reference: Reference, done: float) -> bool:
    """Kill a training at a random instant of the share that is not done yet; False if it came to its end before.

    Under torchrun all processes are killed, or one; inside a write and after it, all or the one that writes.
    """
    left = reference.training * (1 - done)
    ranks: list[int | None] = [None]
    if training.case.processes:
        ranks += [0] if way in ("write", "after") else range(training.case.processes)
    if way == "anywhere":
        training.pause(chance.uniform(0, reference.seconds - reference.training + left))
    else:
        old = inodes(training.out)
        if way == "training" or chance.random() < 0.7:  # else in or after one of its first writes
            training.await_change(old)  # the first state is written, or the metrics are cut to the state
            training.pause(chance.uniform(0, left))
        if way == "write":
            training.stop_in_write(chance)
        if way == "after":
            training.await_change(inodes(training.out))
            time.sleep(chance.uniform(0, 0.01))
    return training.kill(chance.choice(ranks))


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
            "the recipe": (state[1], model[1], (out / RECIPE).read_text()),
        }
    except (NicestError, OSError) as error:
        raise Lost(str(error)) from error


def bits(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, str]]:
    def digest(tensor: Tensor) -> str:
        return hashlib.sha256(tensor.contiguous().numpy().data).hexdigest()

    return {name: (tensor.dtype, tensor.shape, digest(tensor)) for name, tensor in tensors.items()}


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
    try:
        found = os.listdir(out)  # noqa: PTH208 - in a loop that must be quick
    except FileNotFoundError:
        return []
    if not pid:  # also those of safetensors
        return [out / name for name in found if name.startswith(".") and (".tmp" in name)]
    return [out / name for name in found if name.startswith(f".{target}") and name.endswith(f".{pid}.tmp")]


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


def state_of(pid: int) -> str:
    """The letter that the kernel has for what a process does: R, S, D, T (stopped), Z or X (ended)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=60, help="in all sittings together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the runs are made; lost ones stay there")
    parser.add_argument("--out", type=Path, help="a file for the result, to which the next sitting adds")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, each watched by a process")
    arguments = parser.parse_args(words)
    results = Results(arguments.out, arguments.seed)
    if results.total.kills >= arguments.kills:
        print(f"{results.total}\n{arguments.out} has as many kills already: ask for more --kills")
        return 0 if results.total.well() else 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    arguments.runs.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="crash-", dir=arguments.runs.resolve()))
    people(folder / "people.csv")
    lost = len(results.total.lost)
    try:
        references = {}
        for name, case in CASES.items():
            references[name] = undisturbed(case, folder / name)
            size = (folder / name / LAST).stat().st_size / 1e6
            print(f"{name}: {references[name].seconds:.0f} s undisturbed, a state of {size:.1f} MB", flush=True)
            shutil.rmtree(folder / name)
        crash_test(folder, references, results, arguments.kills, lambda line: print(line, flush=True), arguments.jobs)
    except KeyboardInterrupt:
        print("stopped: the same command resumes", flush=True)
        return 130
    finally:
        if len(results.total.lost) > lost:
            print(f"what is left of the runs is in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)  # after Ctrl-C a run may still be writing
    print(results.total)
    return 0 if results.total.well() else 1


if __name__ == "__main__":
    sys.exit(main())
