"""Scoring and sampling any number of rows: in batches of one size, and on a GPU through captured graphs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nicest.fast import LoweredChain, capture, lower
from nicest.flows import Flow
from nicest.flows.shares import Share

BATCH = 2000  # rows that are scored or decoded at once, whatever their number


class Engine:
    """A flow for any number of rows, with memory bounded whatever their number.

        engine = Engine(flow)
        engine.log_prob(rows)                 # (n,), as flow.log_prob gives it
        engine.sample(100_000)                # (n, D)

    It runs the flow in its fast form (`lower`); on a GPU the work on one batch is captured once and replayed, which
    saves the launches. `precision` is the dtype that the coupling functions compute in, by default that of the flow:
    with torch.bfloat16 on a GPU the engine is several times as fast, rounds like a model that was trained so, and
    keeps copies of the weights it found (see `refresh`). Of several processes, each gives what it has a `share` in.
    """

    def __init__(
        self,
        flow: Flow,
        *,
        batch: int | None = None,
        precision: torch.dtype | None = None,
        share: Share = Share(),
        captured: bool = True,
    ) -> None:
        self.flow, self.batch, self.share = flow, batch or BATCH, share
        self.device, self.captured = flow.device, captured
        self.fast = lower(flow, precision)
        self.graphs: dict[Any, Graph] = {}
        self.copies = precision not in (None, flow.units.scale.dtype) and self.device.type == "cuda"
        self.refresh()

    def log_prob(self, x: Tensor) -> Tensor:
        """log p of every row, (n,), on the device of the flow."""
        return self._gathered(self.each("log_prob", x), ())

    def sample(self, n: int, *, temperature: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """n draws, (n, D), on the device of the flow."""
        return self._gathered(self.draws(n, temperature=temperature, generator=generator), (self.flow.dim,))

    def _gathered(self, parts: Iterator[Tensor], shape: tuple[int, ...]) -> Tensor:
        """Concatenate batches along the rows; `shape` is that of one row, for when there are none."""
        kept = list(parts)
        if not kept:
            return self.flow.units.scale.new_zeros(0, *shape)
        return kept[0] if len(kept) == 1 else torch.cat(kept)

    @torch.no_grad()
    def draws(
        self,
        n: int,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        given: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Yield n samples in batches; with `given`, (n, C), one sample for each row of context."""
        rows = self.batch  # of which memory may want fewer on the way
        for start in range(0, n, rows):
            size = min(rows, n - start)
            some = given if given is None else given[start : start + size]
            h = self.flow.draw_latent(size, temperature=temperature, generator=generator, given=some)
            yield from self.each("decode", h, batch=self._size(n))

    @torch.no_grad()
    def each(self, method: str, x: Tensor, *, batch: int = 0, **options: bool) -> Iterator[Any]:
        """Apply a method of the flow to x in batches, and yield each result, in memory of its own."""
        batch, start = batch or self._size(len(x)), 0
        while start < len(x):
            entire = x[start : start + batch]
            try:
                result = self._one(method, entire, batch, options)
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

    def _one(self, method: str, entire: Tensor, batch: int, options: dict[str, bool]) -> Any:
        """What a method gives for the own rows of one batch, or of the first rows of one."""
        part = self.share.rows(entire).to(self.device)
        if self.device.type != "cuda":
            return self._apply(method, options, part, len(entire))
        key = (method, *options.items(), batch, part.shape[1:], part.dtype, self.flow.training)
        if key not in self.graphs:
            size = len(range(self.share.rank, batch, self.share.size))
            function = partial(self._apply, method, options, whole=batch)
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

    def _apply(self, method: str, options: dict[str, bool], x: Tensor, whole: int) -> Any:
        """A method of the flow at the own rows of a batch that has so many as a whole."""
        with self.share.of(whole):
            return getattr(self.fast, method)(x, **options)

    def refresh(self) -> None:
        """Take the weights as they are now; only an engine in reduced precision on a GPU keeps copies of them."""
        if self.copies and isinstance(self.fast.chain, LoweredChain):
            self.fast.chain.copy_weights()

    def _size(self, n: int) -> int:
        """The batch for n rows: on a GPU one of few, since each has a graph."""
        return min(self.batch, n if self.device.type != "cuda" else 1 << (n - 1).bit_length()) if n else 1


class Graph:
    """A function of one batch, captured as a CUDA graph and replayed; smaller batches keep rows of earlier ones behind.

    Without `captured`, the function is called each time with the same number of rows, so that it draws the same random
    numbers.
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
        # copies: the next replay overwrites the output
        if isinstance(self.output, dict):
            return {name: values[: len(x)].clone() for name, values in self.output.items()}
        return self.output[: len(x)].clone()


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is that memory ran out, or came of it, as when a capture is broken off."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def frozen(flow: Flow) -> Iterator[None]:
    """No gradients but in x, and every layer in evaluation mode; all is as it was afterwards."""
    learned = [parameter for parameter in flow.parameters() if parameter.requires_grad]
    training = [module for module in flow.modules() if module.training]
    try:
        flow.eval().requires_grad_(False)
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True
