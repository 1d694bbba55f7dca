"""Several processes under a real torchrun: they follow the run of one, share its files, and outlive each other."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from nicest.cli import main
from nicest.recipes import load_recipe
from nicest.train.distributed import World
from nicest.train.fit import train
from small_runs import (
    SMALL,
    counters,
    digits_file,
    interrupt_at,
    last,
    metrics,
    model,
    people,
    resume,
    run,
    same_run,
    wait_for,
)

HERE = Path(__file__).parent
NOISY = (
    *SMALL,
    "data.levels=17",
    "train.epochs=2",
    "train.batch=198",  # which two and three processes share
    "model.couplings=3",
)  # 14 steps, with dropout and an average
WARPED = (
    *NOISY,
    *("augment.share=0.7", "augment.rotation=0.2", "augment.elastic=0.5", "model.law=affine", "model.dropout=0"),
    *("model.preprocess=triangular", "train.optimizer=rmsprop", "train.weight_decay=0", "train.ema=0"),
    *("train.clip=0.2", "train.lr=1e-3", "model.learned_prior=true"),
)
FULL = "train.sharding=full"
TABLE = ("table.width=16", "table.members=1", "train.batch=42", "train.epochs=4", "train.evaluate_every=1")
SIZED = ("model.couplings=3", "model.width=8", "train.batch=12", "train.epochs=4")
LONG = (*SMALL, "data.levels=17", "train.epochs=12", "model.couplings=3")  # 168 steps


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def torchrun(processes: int, *command: str, restarts: int = 0) -> subprocess.Popen[str]:
    """`torchrun --nproc-per-node ... COMMAND`, in a process of its own."""
    options = ["--standalone", f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, *command],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> Ended:
    """How it ended, in time or by force, which torchrun passes on to its workers."""
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate()
        pytest.fail(f"torchrun did not end in time:\n{out}\n{err}")
    return Ended(process.returncode, out, err)


def together(processes: int, folder: Path, jobs: list[dict[str, Any]], device: str = "cpu") -> Ended:
    """Do jobs as together.py does them."""
    path = folder / f"jobs{processes}.json"
    for job in jobs:
        if "copy" not in job:
            job["set"] = [f"data.name={folder}/rows.npy", *job["set"]]
    path.write_text(json.dumps([{"device": device} | job for job in jobs], default=str))
    return ended(torchrun(processes, str(HERE / "together.py"), str(path)))


def training(out: Path, *settings: str, device: str = "cpu") -> list[str]:
    """The words of `-m nicest train`."""
    asked = [word for each in settings for word in ("--set", each)]
    data = ["--data", str(out.parent / "rows.npy")]
    return ["-m", "nicest", "train", "digits", *data, "--out", str(out), "--device", device, *asked]


def follows(out: Path, straight: Path, *, nats: float = 1e-3, weights: float = 1e-4) -> None:
    """Require that two runs had the same losses and ended with the same weights, to rounding."""
    some, others = metrics(out), metrics(straight)
    assert [row["step"] for row in some] == [row["step"] for row in others]
    for name in ("train_nats", "valid_nats"):
        assert [row[name] for row in some] == pytest.approx([row[name] for row in others], rel=0, abs=nats)
    for read in (last, model):
        found, expected = read(out), read(straight)
        assert {name: (t.shape, t.dtype) for name, t in found.items()} == {
            name: (t.shape, t.dtype) for name, t in expected.items()
        }
        for name, tensor in found.items():
            torch.testing.assert_close(
                tensor, expected[name], rtol=1e-3, atol=weights, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert torch.equal(last(out)["random.cpu"], last(straight)["random.cpu"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of this file are; the runs of one process are made here at once."""
    folder = tmp_path_factory.mktemp("together")
    digits_file(folder / "rows.npy")
    for name, settings in (("noisy", NOISY), ("warped", WARPED), ("long", LONG)):
        run(folder / name, f"data.name={folder}/rows.npy", settings=settings)
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(4, signal.SIGTERM, patch)
        run(folder / "stopped1", f"data.name={folder}/rows.npy", settings=NOISY)
    np.save(folder / "many.npy", np.random.default_rng(0).normal(size=(1_200, 2)) ** 3)
    train(load_recipe("rows"), folder / "sized", overrides=(f"data.name={folder}/many.npy", *SIZED), device="cpu")
    table = (f'data.name="{people(folder / "people.csv")}"', *TABLE)
    train(load_recipe("table"), folder / "table", overrides=table, device="cpu")
    return folder


@pytest.fixture(scope="module")
def pool() -> Any:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def jobs(folder: Path, pool: ThreadPoolExecutor) -> Future[Ended]:
    """Runs of three processes, while other tests go on; those that are killed and terminated below are of two."""
    plain = [
        {"out": folder / "noisy3", "set": NOISY},
        {"out": folder / "warped3", "set": WARPED},
        {"out": folder / "sharded3", "set": (*NOISY, FULL)},
        {"out": folder / "warped-sharded3", "set": (*WARPED, FULL)},
        {"out": folder / "sized3", "recipe": "rows", "set": (f"data.name={folder}/many.npy", *SIZED)},
        {"out": folder / "table3", "recipe": "table", "set": (f'data.name="{folder}/people.csv"', *TABLE)},
    ]
    stops = [
        {"out": folder / "stopped", "set": NOISY, "stop": 4},
        {"out": folder / "stopped-sharded", "set": (*NOISY, FULL), "stop": 4},
        {"copy": folder / "stopped", "out": folder / "resumed3", "resume": True},
        {"copy": folder / "stopped-sharded", "out": folder / "resumed-sharded3", "resume": True},
        {"copy": folder / "stopped1", "out": folder / "resumed-more3", "resume": True},
        {"copy": folder / "stopped1", "out": folder / "resumed-full3", "resume": True, "set": [FULL]},
    ]
    wrong = [
        {"out": folder / "sick", "set": NOISY, "sick": [10]},
        {"out": folder / "twice-sick", "set": (*NOISY, FULL), "sick": [10, *range(15, 20)]},
        {"out": folder / "odd", "set": (*NOISY, "train.batch=100")},
        {"out": folder / "noisy", "set": NOISY},
    ]
    return pool.submit(together, 3, folder, [*plain, *stops, *wrong])


@pytest.fixture(scope="module")
def killed(folder: Path, pool: ThreadPoolExecutor) -> Future[Ended]:
    return pool.submit(kill_one, folder / "killed")


@pytest.fixture(scope="module")
def terminated(folder: Path, pool: ThreadPoolExecutor) -> Future[Ended]:
    def do() -> Ended:
        """Tell torchrun to stop after the first validation."""
        process = torchrun(2, *training(folder / "terminated", *LONG))
        wait_for((folder / "terminated" / "metrics.jsonl").exists, process)
        process.terminate()
        return ended(process)

    return pool.submit(do)


@pytest.fixture(scope="module", autouse=True)
def _begun(jobs: object, killed: object, terminated: object) -> None:
    """Start all of them at the first test."""


def kill_one(out: Path, *settings: str, device: str = "cpu") -> Ended:
    """Kill the second of two processes after the first validation."""
    process = torchrun(2, *training(out, *LONG, *settings, device=device), restarts=1)
    wait_for((out / "metrics.jsonl").exists, process)
    os.kill(worker(process.pid, rank=1), signal.SIGKILL)
    return ended(process)


def worker(parent: int, rank: int) -> int:
    """The process of a rank, by torchrun's own."""
    for each in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if f"RANK={rank}" in Path(f"/proc/{each}/environ").read_text().split("\0"):
            return int(each)
    raise AssertionError(f"torchrun has no worker of rank {rank}")


class TestWorld:
    def test_one_process_alone_says_what_it_is_told(self):
        world = World()
        assert world.broadcast(5) == 5
        assert world.all_gather(5) == [5]
        assert world.any(True)
        assert not world.any(False)
        assert world.mean(torch.tensor([1.0, 2.0])) == 1.5
        world.require_shares(7)

    def test_a_batch_that_cannot_be_shared_is_refused(self, refusal: Callable[..., str]):
        assert "set train.batch to a multiple of 3, such as 102" in refusal(World(0, 3, "gloo").require_shares, 100)


class TestEquality:
    @pytest.fixture
    def _launched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """This process as torchrun would start one alone."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        told = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "TORCHELASTIC_RUN_ID": "test"}
        for name, value in (told | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}).items():
            monkeypatch.setenv(name, str(value))

    @pytest.mark.usefixtures("_launched")
    def test_torchrun_with_one_process_is_the_plain_run_to_the_bit(self, folder: Path, tmp_path: Path):
        for i in range(2):  # one process may do so twice
            run(tmp_path / str(i), f"data.name={folder}/rows.npy", settings=NOISY)
            assert same_run(tmp_path / str(i), folder / "noisy")
        assert not torch.distributed.is_initialized()

    @pytest.mark.usefixtures("_launched")
    def test_one_process_may_hold_all_shards(self, folder: Path, tmp_path: Path):
        run(tmp_path, FULL, f"data.name={folder}/rows.npy", settings=NOISY)
        follows(tmp_path, folder / "noisy")

    @pytest.mark.parametrize("case", ["noisy", "warped", "sized"])
    def test_processes_follow_the_run_of_one(self, jobs: Future, folder: Path, case: str):
        assert jobs.result().code == 0, jobs.result().err
        follows(folder / f"{case}3", folder / case)

    def test_a_table_trains_as_in_one_process(self, jobs: Future, folder: Path):
        assert jobs.result().code == 0, jobs.result().err
        for some, other in zip(metrics(folder / "table3"), metrics(folder / "table"), strict=True):
            assert some["train_nats"] == pytest.approx(other["train_nats"], abs=1e-3)
            assert some["valid_nats"] == pytest.approx(other["valid_nats"], abs=0.1)

    def test_whitening_is_fitted_once_to_the_bit(self, jobs: Future, folder: Path):
        jobs.result()
        for name, tensor in last(folder / "warped").items():
            if "whitening" in name:
                assert torch.equal(tensor, last(folder / "warped3")[name])

    @pytest.mark.parametrize("case", ["noisy", "warped"])
    def test_sharded_weights_follow_whole_ones(self, jobs: Future, folder: Path, case: str):
        jobs.result()
        sharded = folder / {"noisy": "sharded3", "warped": "warped-sharded3"}[case]
        follows(sharded, folder / f"{case}3")

    def test_without_torchrun_sharded_is_not_sharded(self, folder: Path, tmp_path: Path):
        run(tmp_path, FULL, f"data.name={folder}/rows.npy", settings=NOISY)
        assert metrics(tmp_path) == metrics(folder / "noisy")


class TestFiles:
    def test_the_first_process_alone_writes(self, jobs: Future, folder: Path):
        jobs.result()
        assert {each.name for each in (folder / "noisy3").iterdir()} == {
            each.name for each in (folder / "noisy").iterdir()
        }
        assert json.loads((folder / "noisy3" / "environment.json").read_text())["processes"] == 3

    def test_a_signal_to_any_process_stops_all_at_the_same_step(self, jobs: Future, folder: Path):
        jobs.result()
        assert counters(folder / "stopped")["step"] == counters(folder / "stopped-sharded")["step"] == 5

    @pytest.mark.parametrize("name", ["resumed3", "resumed-sharded3"])
    def test_resumes_to_the_bit_with_as_many(self, jobs: Future, folder: Path, name: str):
        jobs.result()
        assert same_run(folder / name, folder / name.replace("resumed3", "noisy3").replace("resumed-", ""))

    @pytest.mark.parametrize("name", ["resumed-more3", "resumed-full3"])
    def test_resumes_with_more(self, jobs: Future, folder: Path, name: str):
        assert jobs.result().code == 0, jobs.result().err
        follows(folder / name, folder / "noisy")

    @pytest.mark.parametrize("name", ["stopped", "stopped-sharded"])
    def test_resumes_with_one(self, jobs: Future, folder: Path, tmp_path: Path, name: str):
        jobs.result()
        shutil.copytree(folder / name, tmp_path / "run")
        resume(tmp_path / "run", f"data.name={folder}/rows.npy")
        follows(tmp_path / "run", folder / "noisy")


class TestSickness:
    def test_a_nan_of_one_process_takes_all_back(self, jobs: Future, folder: Path):
        assert jobs.result().code == 0, jobs.result().err
        found = {name: value for name, value in counters(folder / "sick").items() if name != "flow"}
        assert found | {"seconds": 0, "best_nats": 0} == {
            **{"step": 14, "best_nats": 0, "best_epoch": 2, "seconds": 0, "rolled_back": True, "unscored": False}
        }
        assert jobs.result().err.count(": back to step 7, with new noise") == 2  # and the run that is sick twice

    def test_the_second_time_one_line_says_where(self, jobs: Future, folder: Path):
        where = "first in the output of layer 'scaling': lower train.lr"
        assert [where in line for line in jobs.result().err.splitlines() if line.startswith("error:")].count(True) == 1


class TestTorchrun:
    def test_a_killed_worker_is_replaced_and_the_run_ends_as_if_undisturbed(self, killed: Future, folder: Path):
        end = killed.result()
        assert end.code == 0, end.err
        follows(folder / "killed", folder / "long")
        errors = [line for line in end.err.splitlines() if line.startswith("error:")]
        assert len(errors) <= 1  # of the one that was left
        assert all("another process of this training died" in line for line in errors)
        assert end.out.count("best") == 1

    def test_termination_is_passed_on_and_all_is_saved(self, terminated: Future, folder: Path, tmp_path: Path):
        end = terminated.result()
        step = counters(folder / "terminated")["step"]
        assert 14 <= step < 12 * 14
        assert (
            end.out.count(f"stopped at step {step}, all saved in {folder / 'terminated'}: --resume continues it") == 1
        )
        shutil.copytree(folder / "terminated", tmp_path / "run")
        resume(tmp_path / "run", f"data.name={folder}/rows.npy")
        follows(tmp_path / "run", folder / "long")

    def test_what_is_wrong_for_all_is_said_once(self, jobs: Future, folder: Path):
        sick, odd, held = (line for line in jobs.result().err.splitlines() if line.startswith("error:"))
        assert "layer 'scaling'" in sick
        assert "expected a batch that 3 processes share evenly, got 100: set train.batch to a multiple of 3" in odd
        assert "holds a run already: resume it" in held
        assert jobs.result().out.count("left with 1") == 3 * 2  # all but the one that says it
        assert not (folder / "odd").exists()

    @pytest.mark.parametrize("how", ["ends", "goes on"])
    def test_when_one_fails_the_others_end_and_one_line_says_which(self, how: str):
        done = ended(torchrun(2, str(HERE / "one_fails.py"), how))  # long before the one that goes on
        assert done.code != 0
        assert [line for line in done.err.splitlines() if line.startswith("error:")] == [
            "error: process 1 of this training failed (the fault of one): what was saved last is kept"
        ]
        assert done.out == "joined False\n"
        assert ("ValueError: the fault of one" in done.err) == (how == "ends")
        assert "another process" not in done.err

    @pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
    def test_what_is_wrong_before_they_join_is_said_by_the_first(
        self, rank: int, lines: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ):
        before = sys.stderr
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, before)  # which main changes
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setattr("nicest.cli.base.time.sleep", lambda seconds: None)  # for the first to speak
        monkeypatch.setattr(sys, "argv", ["nicest", "train", "mnits"])
        with pytest.raises(SystemExit, match="1"):
            main()
        if sys.stderr is not before:
            sys.stderr.close()
        assert capfd.readouterr().err.count("no recipe 'mnits' (did you mean 'mnist'?)") == lines


PRECISIONS = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def on_gpu(folder: Path) -> dict[int, Ended]:
    """Runs of one process and of two on a GPU; those of the plain process are made here."""
    for name in PRECISIONS:
        settings = (*NOISY, f"train.precision={name}", f"data.name={folder}/rows.npy")
        train(load_recipe("digits"), folder / f"gpu-{name}", overrides=settings, device="cuda")

    def jobs(size: int) -> list[dict[str, Any]]:
        plain = {f"gpu-{name}{size}": (f"train.precision={name}",) for name in PRECISIONS}
        more = {f"gpu-full-{name}{size}": (f"train.precision={name}", FULL) for name in PRECISIONS}
        cases = plain | (more if size == 1 else {})  # gloo may not scatter what lies on a GPU
        return [{"out": folder / name, "set": (*NOISY, *settings)} for name, settings in cases.items()]

    def stop(name: str, *settings: str) -> dict[str, Any]:
        return {"out": folder / name, "set": (*NOISY, "train.precision=bfloat16", *settings), "stop": 4}

    def go_on(name: str, out: str, *settings: str) -> dict[str, Any]:
        return {"copy": folder / name, "out": folder / out, "resume": True, "set": settings}

    whole = "train.sharding=none"
    one = [stop("gpu-stopped1", FULL), go_on("gpu-stopped1", "gpu-resumed1")]
    two = [stop("gpu-stopped2"), go_on("gpu-stopped2", "gpu-resumed2"), go_on("gpu-stopped1", "gpu-more", whole)]
    ends = {1: together(1, folder, [*jobs(1), *one], "auto"), 2: together(2, folder, [*jobs(2), *two], "auto")}
    ends[0] = together(1, folder, [go_on("gpu-stopped2", "gpu-fewer", FULL)], "auto")
    return ends


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
class TestGPU:
    """One process by NCCL, and two by gloo that share a GPU, beside the plain run with its one captured graph."""

    def near(self, name: str) -> dict[str, float]:
        return {"nats": 1e-2, "weights": 1e-3} if name == "float32" else {"nats": 0.5, "weights": 3e-2}

    @pytest.mark.parametrize("size", [1, 2])
    @pytest.mark.parametrize("name", PRECISIONS)
    def test_processes_follow_the_run_of_one(self, on_gpu: dict[int, Ended], folder: Path, size: int, name: str):
        assert on_gpu[size].code == 0, on_gpu[size].err
        follows(folder / f"gpu-{name}{size}", folder / f"gpu-{name}", **self.near(name))

    @pytest.mark.parametrize("name", PRECISIONS)
    def test_sharded_weights_follow_whole_ones(self, on_gpu: dict[int, Ended], folder: Path, name: str):
        assert on_gpu[1].code == 0, on_gpu[1].err
        follows(folder / f"gpu-full-{name}1", folder / f"gpu-{name}", **self.near(name))

    @pytest.mark.parametrize(("name", "size"), [("resumed1", 1), ("resumed2", 2), ("more", 2), ("fewer", 0)])
    def test_a_stopped_run_resumes_with_as_many_with_more_and_with_fewer(
        self, on_gpu: dict[int, Ended], folder: Path, name: str, size: int
    ):
        assert on_gpu[size].code == 0, on_gpu[size].err
        assert counters(folder / "gpu-stopped1")["step"] == 7  # asked at the end of an epoch
        follows(folder / f"gpu-{name}", folder / "gpu-bfloat16", **self.near("bfloat16"))

    def test_a_killed_worker_is_replaced(self, folder: Path):
        precise = "train.precision=float32"
        end = kill_one(folder / "gpu-killed", precise, device="auto")
        assert end.code == 0, end.err
        settings = (*LONG, precise, f"data.name={folder}/rows.npy")
        train(load_recipe("digits"), folder / "gpu-long", overrides=settings, device="cuda")
        follows(folder / "gpu-killed", folder / "gpu-long", **self.near("float32"))
