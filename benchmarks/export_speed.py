"""CPU time of exported graphs and of the flow itself, on one thread.

    python -m benchmarks.export_speed digits-conv mnist

A name is that of a run, or of a recipe, whose untrained flow is timed for images of 28 x 28.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import onnxruntime
import torch

import nicest
from nicest.fast import lower
from nicest.recipes import load_recipe, names
from nicest.recipes.build import build
from nicest.recipes.recipe import DataSettings
from nicest.tasks.export import examples, graphs, quiet, written


def milliseconds(function: Callable[[], object]) -> float:
    """Return the CPU time of a call: the mean of the calls in a window, for the fastest of five windows."""
    function()  # onnxruntime plans its memory in the first call
    windows = []
    for _ in range(5):
        start, calls = time.process_time(), 0
        while time.process_time() - start < 0.5:
            function()
            calls += 1
        windows.append((time.process_time() - start) / calls)
    return 1000 * min(windows)


def flow_of(name: str) -> Any:
    """Load the flow of a run, or build the untrained flow of a recipe."""
    if name not in names():
        return nicest.load(name)
    recipe = load_recipe(name)
    return build(replace(recipe, data=replace(recipe.data, shape=(28, 28), levels=256)))


@torch.no_grad()
def main() -> None:
    """Print the milliseconds of every graph."""
    torch.set_num_threads(1)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    for name in sys.argv[1:]:
        flow = flow_of(name).float().eval().requires_grad_(False)
        data = DataSettings(shape=(flow.dim,))
        rows, plain = examples(flow, data), graphs(flow, conditional=False)
        for graph, fast in graphs(lower(flow), conditional=False).items():
            inputs = {each: rows[each] for each in fast.inputs}
            with quiet():
                session = onnxruntime.InferenceSession(written(fast, inputs, "onnx"), options)
            for n in (64, 1000):
                many = {each: torch.cat([value] * 16)[:n].contiguous() for each, value in inputs.items()}
                arrays = {each: value.numpy() for each, value in many.items()}
                times = {
                    "onnxruntime": milliseconds(partial(session.run, None, arrays)),
                    "flow": milliseconds(partial(plain[graph], **many)),
                    "lowered flow": milliseconds(partial(fast, **many)),
                }
                print(name, graph, n, {each: round(value, 2) for each, value in times.items()}, flush=True)


if __name__ == "__main__":
    main()
