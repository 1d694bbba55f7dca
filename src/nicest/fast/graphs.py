"""CUDA graphs: what a function does on a GPU, recorded once and replayed."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def capture(
    function: Callable[[], Any], device: torch.device, warm_up: int = 3, *, generator: torch.Generator | None = None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a function as a CUDA graph, after some warm-up runs; return the graph and the function's output.

    Every replay draws new numbers from the device's generator, and from `generator` if the function uses it.
    """
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            function()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    # with other processes, a thread of NCCL looks at the device meanwhile
    mode = "thread_local" if torch.distributed.is_available() and torch.distributed.is_initialized() else "global"
    with _undisturbed(), torch.cuda.graph(graph, stream=side, capture_error_mode=mode):
        output = function()
    # before it captures, torch writes the seed on that stream: late, it would overwrite the seed of the first replay
    torch.cuda.current_stream(device).wait_stream(side)
    return graph, output


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Disable garbage collection: it may free an older graph, which would invalidate the capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # when memory runs out at its first step
            yield
    finally:
        if collects:
            gc.enable()
