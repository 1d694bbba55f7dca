"""What test_distributed.py lets torchrun start: one training after another, each by all processes together.

Jobs come as JSON: `out`, `recipe`, `set` (overrides), `resume`, `device`; `stop` is the step at which the last process
alone is sent a signal, `sick` the passes at which it alone meets a NaN; `copy` copies one run folder to another before
that.
"""

import json
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nicest.errors import NicestError
from nicest.flows import DiagonalScaling
from nicest.recipes import load_recipe
from nicest.train.fit import train
from small_runs import interrupt_at

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def sicken(passes: list[int], patch: pytest.MonkeyPatch) -> None:
    forward, counted = DiagonalScaling.forward, []

    def sick(layer: DiagonalScaling, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, log_det = forward(layer, x, context)
        if layer.training:
            counted.append(len(counted))
            y = y * float("nan") if counted[-1] in passes else y
        return y, log_det

    patch.setattr(DiagonalScaling, "forward", sick)


def do(job: dict[str, Any]) -> None:
    if "copy" in job and RANK == 0:
        shutil.copytree(job["copy"], job["out"])
    with pytest.MonkeyPatch.context() as patch:
        if "stop" in job and RANK == SIZE - 1:
            interrupt_at(job["stop"], signal.SIGTERM, patch)
        if "sick" in job and RANK == SIZE - 1:
            sicken(job["sick"], patch)
        recipe, overrides = load_recipe(job.get("recipe", "digits")), tuple(job.get("set", ()))
        torch.manual_seed(RANK)  # whatever was drawn before
        train(recipe, job["out"], overrides=overrides, resume=bool(job.get("resume")), device=job["device"])


if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        try:
            do(job)
        except NicestError as error:
            print(f"error: {error}", file=sys.stderr)
        except SystemExit as leaving:
            print(f"left with {leaving.code}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as nicest/__main__.py does, for the same reason
