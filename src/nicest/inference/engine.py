"""Scoring and sampling any number of rows: in batches of one size, and on a GPU through captured graphs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nicest.flows import MLP, Coupling, Flow
from nicest.flows.reduced import Buffers
from nicest.flows.shares import Share

BATCH = 2000  # rows that are scored or decoded at once, whatever their number


class Engine:
    """A flow for any number of rows, with memory bounded whatever their number.

        engine = Engine(flow)
        engine.log_prob(rows)                 # (n,), as flow.log_prob gives it
        engine.sample(100_000)                # (n, D)

    On a GPU the work on one batch is captured once and replayed, which spares the launches. `precision` is what the
    coupling functions compute in: with torch.bfloat16 the engine is several times as fast, rounds like a model that
    is trained so, and keeps copies of the weights it found; with float32 it reads the weights as they are.
    Of several processes, each gives what it has a `share` in.
    """

    def __init__(
        self,
        flow: Flow,
        *,
        batch: int | None = None,
        precision: torch.dtype = torch.float32,
        share: Share = Share(),
        captured: bool = True,
    ) -> None:
        self.flow, self.batch, self.precision, self.share = flow, batch or BATCH, precision, share
        self.device = flow.prior.loc.device
        self.captured = captured
        self.graphs: dict[Any, Graph] = {}
        self.couplings = [layer for layer in flow.modules() if isinstance(layer, Coupling)]
        self.networks = [layer for layer in flow.modules() if isinstance(layer, MLP)]
        self.copies: dict[MLP, Buffers] = {}
        if precision != torch.float32 and self.device.type == "cuda":
            self.copies = {network: padded_copies(network, precision) for network in self.networks}

    def log_prob(self, x: Tensor) -> Tensor:
        """log p of every row, (n,), on the device of the flow."""
        return self._gathered(self.each("log_prob", x), ())

    def sample(self, n: int, *, temperature: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """n draws, (n, D), on the device of the flow."""
        return self._gathered(self.draws(n, temperature=temperature, generator=generator), (self.flow.prior.dim,))

    def _gathered(self, parts: Iterator[Tensor], shape: tuple[int, ...]) -> Tensor:
        on_gpu = self.device.type == "cuda"  # where a graph writes its next batch over the one before
        kept = [part.clone() if on_gpu else part for part in parts]
        if not kept:
            return self.flow.prior.loc.new_zeros(0, *shape)
        return kept[0] if len(kept) == 1 else torch.cat(kept)

    @torch.no_grad()
    def draws(self, n: int, *, temperature: float = 1.0, generator: torch.Generator | None = None) -> Iterator[Tensor]:
        """n draws in batches, each to be used before the next is asked for."""
        rows = self.batch  # of which memory may want fewer on the way
        for start in range(0, n, rows):
            size = min(rows, n - start)
            h = self.flow.prior.rsample(size, temperature=temperature, generator=generator)
            yield from self.each("decode", h, self._size(n))

    @torch.no_grad()
    def each(self, method: str, x: Tensor, batch: int = 0) -> Iterator[Any]:
        """What a method of the flow gives for x, batch by batch, each to be used before the next is asked for."""
        batch, start = batch or self._size(len(x)), 0
        while start < len(x):
            entire = x[start : start + batch]
            try:
                result = self._one(method, entire, batch)
            except RuntimeError as error:
                # processes that share their batches halve none: they would draw other numbers than the rest
                if batch == 1 or self.share.size > 1 or not out_of_memory(error):
                    raise
                result = None
            if result is None:  # out of the handler, since the error holds on to the memory of what failed
                batch = self._fewer(batch)
                continue
            start += len(entire)
            yield result

    def _one(self, method: str, entire: Tensor, batch: int) -> Any:
        """What a method gives for the own rows of one batch, or of the first rows of one."""
        part = self.share.rows(entire).to(self.device)
        if self.device.type != "cuda":
            return self._apply(method, part, len(entire))
        key = (method, batch, part.shape[1:], part.dtype, self.flow.training)
        if key not in self.graphs:
            size = len(range(self.share.rank, batch, self.share.size))
            function = partial(self._apply, method, whole=batch)
            self.graphs[key] = Graph(function, (size, *part.shape[1:]), part, captured=self.captured)
        return self.graphs[key](part)

    def _fewer(self, batch: int) -> int:
        """Half the batch, from now on: memory ran out."""
        self.batch = batch // 2
        self.graphs.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        warnings.warn(f"out of memory with {batch} rows at once: going on with {self.batch}", stacklevel=3)
        return self.batch

    def _apply(self, method: str, x: Tensor, whole: int) -> Any:
        """A method of the flow at the own rows of a batch that has so many as a whole."""
        with self.prepared(), self.share.of(whole):
            return getattr(self.flow, method)(x)

    def refresh(self) -> None:
        """Take the weights as they are now; only an engine in reduced precision on a GPU keeps copies of its own."""
        for network, buffers in self.copies.items():
            for (w, b), (new_w, new_b) in zip(
                buffers.copies, padded_copies(network, self.precision).copies, strict=True
            ):
                w.copy_(new_w)
                b.copy_(new_b)

    def _size(self, n: int) -> int:
        """The batch for n rows: on a GPU one of few, since each has a graph."""
        return min(self.batch, n if self.device.type != "cuda" else 1 << (n - 1).bit_length()) if n else 1

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """The flow as this engine wants it; others find it as it was."""
        precisions = [layer.precision for layer in self.couplings]
        buffers = [network.buffers_in_use for network in self.networks]
        try:
            for layer in self.couplings:
                layer.precision = None if self.precision == torch.float32 else self.precision
            for network in self.networks:
                network.buffers_in_use = self.copies.get(network)
            yield
        finally:
            for layer, precision in zip(self.couplings, precisions, strict=True):
                layer.precision = precision
            for network, before in zip(self.networks, buffers, strict=True):
                network.buffers_in_use = before


def padded_shapes(network: MLP) -> list[tuple[int, int]]:
    """Shapes that a GPU likes for the weights of a network: hidden units in multiples of 64, or of 8 if few."""

    def padded(width: int) -> int:
        unit = 64 if width >= 512 else 8
        return -(-width // unit) * unit

    shapes = [layer.weight.shape for layer in network.linears]
    widths = [shapes[0][1], *(padded(rows) for rows, _ in shapes[:-1]), shapes[-1][0]]
    return [(rows, columns) for columns, rows in pairwise(widths)]


def padded_copies(network: MLP, dtype: torch.dtype) -> Buffers:
    """Copies of the weights of a network for `MLP.reduced`, in such shapes."""
    copies = []
    for layer, (rows, columns) in zip(network.linears, padded_shapes(network), strict=True):
        w = torch.zeros(rows, columns, dtype=dtype, device=layer.weight.device)
        b = torch.zeros(rows, dtype=dtype, device=layer.weight.device)
        w[: layer.weight.shape[0], : layer.weight.shape[1]] = layer.weight.detach()
        b[: len(layer.bias)] = layer.bias.detach()
        copies.append((w, b))
    return Buffers(copies)


class Graph:
    """A function of one batch, captured; rows of a smaller batch stand before those of the batch before it.

    Not captured, it is called afresh, but at as many rows, so that it draws the same random numbers.
    """

    def __init__(
        self, function: Callable[[Tensor], Any], shape: tuple[int, ...], example: Tensor, *, captured: bool = True
    ) -> None:
        self.function, self.graph = function, None
        self.x = example.new_zeros(shape)
        self.x[: len(example)] = example
        if captured:
            random = torch.cuda.get_rng_state(example.device)
            self.graph, self.output = capture(lambda: function(self.x), example.device)
            torch.cuda.set_rng_state(random, example.device)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Any:
        self.x[: len(x)].copy_(x)
        if self.graph is None:
            self.output = self.function(self.x)
        else:
            self.graph.replay()
        if isinstance(self.output, dict):
            return {name: values[: len(x)] for name, values in self.output.items()}
        return self.output[: len(x)]


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is that memory ran out, or came of it, as when a capture is broken off."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def capture(
    function: Callable[[], Any], device: torch.device, warm_up: int = 3, *, generator: torch.Generator | None = None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A function as one CUDA graph, after some runs that load what it needs; with it, what the function returns.

    Every replay draws anew from the device's own generator, and from `generator` where the function draws from one.
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
    # where there are other processes, a thread of NCCL's looks at the device meanwhile
    mode = "thread_local" if torch.distributed.is_available() and torch.distributed.is_initialized() else "global"
    with torch.cuda.graph(graph, capture_error_mode=mode):
        output = function()
    return graph, output
