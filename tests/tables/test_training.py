"""A table trained in a run folder: killed by SIGKILL it goes on to the bit, and the folder answers questions."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from nicest.estimators.table import NICETable
from nicest.recipes import load_recipe
from nicest.train.fit import train
from small_runs import counters, people, same_run

SETTINGS = (
    "table.width=8",
    "table.depth=1",
    "table.components=3",
    "table.dropout=0.2",
    "table.members=2",
    "table.targets=['weight']",
    "train.epochs=6",
    "train.batch=50",
    "train.evaluate_every=2",
)
# saves the state often, and dies in the middle of step 17
KILLED = """
import os, signal, sys, torch
from nicest.recipes import load_recipe
from nicest.train import loop
from nicest.train.fit import train
torch.set_num_threads(1)
loop.Saver.late = lambda saver: True
set_rates = loop.set_rates
def dying(optimizer, settings, now, *rest):
    if now == 17:
        os.kill(os.getpid(), signal.SIGKILL)
    return set_rates(optimizer, settings, now, *rest)
loop.set_rates = dying
train(load_recipe("table"), sys.argv[1], overrides=sys.argv[2:], device="cpu", callbacks=[])
"""


def test_a_killed_training_goes_on_to_the_bit(tmp_path: Path):
    settings = (f"data.name={people(tmp_path / 'people.csv')}", *SETTINGS)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    train(load_recipe("table"), straight, overrides=settings, device="cpu", callbacks=[])
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(killed), *settings], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert process.returncode == -signal.SIGKILL
    assert 0 < counters(killed)["step"] < counters(straight)["step"]
    torch.manual_seed(99)
    train(load_recipe("table"), killed, resume=True, device="cpu", callbacks=[])
    assert same_run(killed, straight)
    first, second = (NICETable.load(each) for each in (straight, killed))
    drawn = first.sample(20, random_state=0)
    assert set(drawn.column_names) == {"height", "weight", "colour", "member"}
    scores = first.score_samples(drawn)
    assert np.isfinite(scores).all()
    np.testing.assert_array_equal(second.score_samples(drawn), scores)
