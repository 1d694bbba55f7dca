"""What test_distributed.py lets torchrun start: a training in which the last process alone fails.

Its script either ends by that error, or goes on with something else, by which the others must not be held up.
"""

import os
import sys
import time

import numpy as np
import torch
from torch import Tensor

import nicest
from nicest import flows

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Failing(flows.Bijection):
    passes = 0

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.passes += 1
        if self.passes == 60 and RANK == SIZE - 1:
            raise ValueError("the fault of one")
        return x, x.new_zeros(len(x))

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return y, y.new_zeros(len(y))


if __name__ == "__main__":
    how = sys.argv[1]
    torch.set_num_threads(1)
    rows = np.random.default_rng(0).normal(size=(400, 4)).astype(np.float32)
    chain = nicest.Chain({"failing": Failing(), "scaling": flows.DiagonalScaling(4)})
    flow = nicest.Flow(nicest.Units.continuous(4), chain, nicest.Logistic(4))
    try:
        nicest.fit(flow, rows, settings=nicest.TrainSettings(epochs=50, batch=42), callbacks=())
    except ValueError:
        print(f"joined {torch.distributed.is_initialized()}", flush=True)
        if how == "ends":
            raise
        time.sleep(300)
