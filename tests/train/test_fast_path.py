"""The captured step in bfloat16 learns what eager float32 learns: three seeds each on MNIST, on a GPU."""

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from nicest.data import load
from nicest.errors import NicestError
from nicest.recipes import load_recipe
from nicest.runs.folder import RunFolder
from nicest.train import loop
from nicest.train.fit import train
from nicest.train.step import TrainingStep

SETTINGS = ("train.epochs=30", "train.ema=0.999", "train.evaluate_every=30")


class EagerStep(TrainingStep):
    """The same lines, one by one."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments, captured=False)  # type: ignore[arg-type]


def valid_nats(precision: str, seed: int, out: Path) -> float:
    loop.TrainingStep = TrainingStep if precision == "bfloat16" else EagerStep
    settings = (*SETTINGS, f"train.precision={precision}", f"train.seed={seed}")
    train(load_recipe("mnist"), out, overrides=settings, device="cuda")
    return RunFolder(out).metrics()[-1]["valid_nats"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_validation_nats_agree_over_three_seeds(tmp_path: Path):
    try:
        load("mnist")
    except NicestError as error:
        pytest.skip(f"needs MNIST: {error}")
    runs = [(precision, seed) for precision in ("bfloat16", "float32") for seed in range(3)]
    with ProcessPoolExecutor(
        3, mp_context=get_context("spawn")
    ) as pool:  # three at once: eager steps wait for the host
        ends = [pool.submit(valid_nats, *run, tmp_path / f"{run[0]}{run[1]}") for run in runs]
        nats = [each.result() for each in ends]
    print(json.dumps({f"{precision}, seed {seed}": each for (precision, seed), each in zip(runs, nats, strict=True)}))
    assert sum(nats[:3]) == pytest.approx(sum(nats[3:]), rel=3e-3)
    assert min(nats) > 1800  # they did learn
