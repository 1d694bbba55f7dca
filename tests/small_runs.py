"""Small runs on the embedded digits or a table, and what they leave on disk."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nicest.data import load
from nicest.recipes import load_recipe
from nicest.runs.folder import LAST, MODEL, RunFolder, read_tensors
from nicest.train import loop
from nicest.train.fit import train

PER_EPOCH = 14  # steps: 1437 digits to train on, 100 in a batch
SMALL = (  # all that the recipe may come to say otherwise
    "model.couplings=4",
    "model.hidden_layers=1",
    "model.width=8",
    "model.dropout=0.2",
    "train.epochs=3",
    "train.batch=100",
    "train.optimizer=adam",
    "train.lr=1e-2",
    "train.eps=1e-4",
    "train.weight_decay=0.05",
    "train.schedule=cosine",
    "train.warmup=0",
    "train.loss=nats-per-dim",
    "train.clip=0",
    "train.ema=0.99",
    "train.evaluate_every=1",
)
PLAIN = (*SMALL, "model.dropout=0", "train.ema=0", "train.weight_decay=0", "train.schedule=constant")


def run(out: Path, *overrides: str, settings: tuple[str, ...] = SMALL, recipe: str = "digits") -> dict[str, Any]:
    """Train a small model in this process."""
    return train(load_recipe(recipe), out, overrides=(*settings, *overrides), device="cpu")


def resume(out: Path, *overrides: str) -> dict[str, Any]:
    """Go on with a run, as another process would: without the random state of this one."""
    torch.manual_seed(99)
    return train(load_recipe("digits"), out, overrides=overrides, resume=True, device="cpu")


def start(out: Path, *overrides: str) -> subprocess.Popen[str]:
    """A real `nicest train` in a process of its own."""
    settings = [word for each in (*SMALL, *overrides) for word in ("--set", each)]
    return subprocess.Popen(
        [sys.executable, "-m", "nicest", "train", "digits", "--out", str(out), "--device", "cpu", *settings],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for what a process must bring about before it ends."""
    until = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < until
        time.sleep(0.005)


def digits_file(path: Path) -> Path:
    """The digits as an array, which is read faster than the library that holds them; of 17 levels."""
    digits = load("digits")
    np.save(path, np.concatenate([digits.train, digits.valid, digits.test]).reshape(-1, *digits.shape))
    return path


def last(out: Path) -> dict[str, Tensor]:
    return read_tensors(out / LAST)[0]


def model(out: Path) -> dict[str, Tensor]:
    return read_tensors(out / MODEL)[0]


def counters(out: Path) -> dict[str, Any]:
    return read_tensors(out / LAST)[2]


def metrics(out: Path) -> list[dict[str, Any]]:
    """The rows of a run without the one figure that differs from run to run."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in RunFolder(out).metrics()]


def equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    """Whether two files hold the same tensors, to the bit."""
    return some.keys() == others.keys() and all(
        tensor.dtype == others[name].dtype and torch.equal(tensor, others[name]) for name, tensor in some.items()
    )


def same_run(some: Path, other: Path) -> bool:
    """Whether two runs ended in the same place to the bit: state, model and metrics."""
    return equal(last(some), last(other)) and equal(model(some), model(other)) and metrics(some) == metrics(other)


def digests(folder: Path) -> dict[str, str]:
    """A digest of every file in a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def people(path: Path, n: int = 400, seed: int = 0) -> Path:
    """A table of a real column, whole numbers, texts and booleans, with holes in a fifth of its rows."""
    rng = np.random.default_rng(seed)
    height = rng.normal(170, 10, n)
    cells = [
        [f"{h:.2f}", f"{h * 0.4 + rng.normal():.0f}", rng.choice(["red", "blue"]), rng.choice(["true", "false"])]
        for h in height
    ]
    for row in rng.choice(n, n // 5, replace=False):
        for d in rng.choice(4, rng.integers(1, 4), replace=False):
            cells[row][d] = ""
    path.write_text("\n".join(["height,weight,colour,member", *(",".join(row) for row in cells)]) + "\n")
    return path


def interrupt_at(step: int, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process a real signal while it takes a step."""
    set_rates = loop.set_rates

    def interrupted(optimizer: Any, settings: Any, now: int, epoch: int, total: int) -> float:
        if now == step:
            os.kill(os.getpid(), number)
        return set_rates(optimizer, settings, now, epoch, total)

    monkeypatch.setattr(loop, "set_rates", interrupted)
