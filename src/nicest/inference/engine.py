"""Score and sample any number of rows: in batches of one size, and on a GPU through captured graphs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nicest.fast import capture, copy_weights, lower
from nicest.flows import Density, Flow, Mixture
from nicest.flows.noise import Part, part_of_batch

Method = str | Callable[..., Any]
BATCH = 2000  # rows that are scored or decoded at once, whatever their number


@dataclass(frozen=True)
class Share:
    """The rows of every batch that one of `size` processes has: every `size`-th row from row `rank` on."""

    rank: int = 0
    size: int = 1

    def rows(self, batch: Tensor) -> Tensor:
        """Return the rows of a global batch that this process has."""
        return batch[self.rank :: self.size]

    def of(self, total: int, *, copies: int = 1) -> AbstractContextManager[None]:
        """Treat the rows that a flow is given as this share of a batch of `total`, repeated `copies` times."""
        return part_of_batch(Part(total, self.rank, self.size, copies))


class Engine:
    """A density for any number of rows, in bounded memory.

        engine = Engine(flow)
        engine.log_prob(rows)                 # (n,), equal to flow.log_prob(rows)
        engine.sample(100_000)                # (n, D)

    A flow runs in its fast form (`lower`). On a GPU the work on one batch is captured once and replayed, which saves
    the launches.

    Parameters
    ----------
    flow : Density
        A flow, a mixture or any other density.
    batch : int, optional
        Rows that are processed at once; 2,000 by default.
    precision : torch.dtype, optional
        The dtype of the coupling functions, by default that of the flow. With torch.bfloat16 on a GPU the engine is
        several times as fast, rounds like a model that was trained in it, and keeps copies of the weights (`refresh`).
    share : Share
        The rows of each batch that this process computes.
    captured : bool
        Whether to capture the work on a GPU.
    """

    def __init__(
        self,
        flow: Density,
        *,
        batch: int | None = None,
        precision: torch.dtype | None = None,
        share: Share = Share(),
        captured: bool = True,
    ) -> None:
        self.flow, self.batch, self.share = flow, batch or BATCH, share
        self.device, self.captured = flow.device, captured and flow.captures
        self.fast = lower(flow, precision)
        self.graphs: dict[Any, Graph] = {}
        self.copies = precision not in (None, flow.dtype) and self.device.type == "cuda"
        self.refresh()

    def log_prob(self, x: Tensor, context: Tensor | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Return log p of every row, (n,), on the device of the density; the generator is the source of the noise."""
        return self._gathered(self.each("log_prob", x, context, generator=generator), ())

    def validation_log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Return `Density.validation_log_prob` of every row, (n,)."""
        return self._gathered(self.each("validation_log_prob", x, context), ())

    def sample(self, n: int, context: Tensor | None = None, **options: Any) -> Tensor:
        """Draw n rows, (n, D), on the device of the density; the options are those of `draws`."""
        return self._gathered(self.draws(n, context, **options), (self.flow.dim,))

    def _gathered(self, parts: Iterator[Tensor], shape: tuple[int, ...]) -> Tensor:
        """Concatenate batches along the rows; `shape` is that of one row, for when there are none."""
        kept = list(parts)
        if not kept:
            return torch.zeros(0, *shape, dtype=self.flow.dtype, device=self.device)
        return kept[0] if len(kept) == 1 else torch.cat(kept)

    @torch.no_grad()
    def draws(
        self,
        n: int,
        context: Tensor | None = None,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Yield n samples in batches, each for its row of the context (n, C), if there is one."""
        rows, flow = self.batch, self.flow  # memory may require smaller batches on the way
        latents = None
        if isinstance(flow, Flow):
            latents = flow.prior.rsample
        elif isinstance(flow, Mixture) and flow.shares_units and flow.shares_prior:
            latents = flow.sample_latent
        options = {} if temperature == 1 else {"temperature": temperature}  # known to flows alone
        for start in range(0, n, rows):
            size = min(rows, n - start)
            some = None if context is None else context[start : start + size]
            if latents is None:
                yield flow.sample(size, some, generator=generator, **options)
                continue
            h = latents(size, temperature=temperature, generator=generator)
            yield from self.each("decode", h, some, of=n)

    @torch.no_grad()
    def each(
        self,
        method: Method,
        x: Tensor,
        context: Tensor | None = None,
        *,
        of: int = 0,
        generator: torch.Generator | None = None,
        **options: bool,
    ) -> Iterator[Any]:
        """Apply a method of the density to x and its context in batches; yield each result, in its own memory.

        Parameters
        ----------
        method : str or callable
            The name of a method, or a function whose first argument is the density.
        x, context : Tensor
            Rows (n, ...), with a context each.
        of : int
            Number of rows that the batch size is chosen for, by default n.
        generator : torch.Generator, optional
            Source of random numbers in place of torch's own, which is then left unchanged.
        """
        batch, start = self._size(of or len(x)), 0
        while start < len(x):
            some = slice(start, start + batch)
            entire = (x[some],) if context is None else (x[some], context[some])
            try:
                with drawing_from(generator, self.device):
                    result = self._one(method, entire, batch, options)
            except RuntimeError as error:
                # processes that share their batches halve none: they would draw other numbers than the rest
                if batch == 1 or self.share.size > 1 or not out_of_memory(error):
                    raise
                result = None
            if result is None:  # out of the handler, since the error holds on to the memory of what failed
                batch = self._fewer(batch)
                continue
            start += len(entire[0])
            yield result

    def _one(self, method: Method, entire: tuple[Tensor, ...], batch: int, options: dict[str, bool]) -> Any:
        """Apply a method to this process's rows of one batch, the last of which may have fewer rows."""
        parts = [self.share.rows(each).to(self.device) for each in entire]
        if self.device.type != "cuda":
            return self._apply(method, options, *parts, whole=len(entire[0]))
        key = (method, *options.items(), batch, *((p.shape[1:], p.dtype) for p in parts), self.flow.training)
        if key not in self.graphs:
            size = len(range(self.share.rank, batch, self.share.size))
            function = partial(self._apply, method, options, whole=batch)
            self.graphs[key] = Graph(function, size, parts, captured=self.captured)
        return self.graphs[key](*parts)

    def _fewer(self, batch: int) -> int:
        """Halve the batch for good, after memory ran out; return its size."""
        self.batch = batch // 2
        self.graphs.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        warnings.warn(f"out of memory with {batch} rows at once: going on with {self.batch}", stacklevel=3)
        return self.batch

    def _apply(self, method: Method, options: dict[str, bool], *parts: Tensor, whole: int) -> Any:
        """Apply a method of the flow to this process's rows of a batch of `whole` rows."""
        with self.share.of(whole):
            function = getattr(self.fast, method) if isinstance(method, str) else partial(method, self.fast)
            return function(*parts, **options)

    def refresh(self) -> None:
        """Copy the current weights; only an engine in reduced precision on a GPU keeps copies."""
        if self.copies:
            copy_weights(self.fast)

    def _size(self, n: int) -> int:
        """Return the batch size for n rows: on a GPU a power of two, since each size has a graph."""
        return min(self.batch, n if self.device.type != "cuda" else 1 << (n - 1).bit_length()) if n else 1


class Graph:
    """A function of one batch, captured as a CUDA graph and replayed.

    A smaller batch overwrites the first rows of the input; the rest are left from earlier ones. Without `captured`, the
    function is called each time with the same number of rows, so that it draws the same random numbers.
    """

    def __init__(
        self, function: Callable[..., Any], rows: int, examples: Sequence[Tensor], *, captured: bool = True
    ) -> None:
        self.function, self.graph = function, None
        self.inputs = [each.new_zeros(rows, *each.shape[1:]) for each in examples]
        self._put(examples)
        if captured:
            device = examples[0].device
            random = torch.cuda.get_rng_state(device)
            self.graph, self.output = capture(lambda: function(*self.inputs), device)
            torch.cuda.set_rng_state(random, device)

    def _put(self, values: Sequence[Tensor]) -> None:
        for buffer, each in zip(self.inputs, values, strict=True):
            buffer[: len(each)].copy_(each)

    @torch.no_grad()
    def __call__(self, *values: Tensor) -> Any:
        self._put(values)
        if self.graph is None:
            self.output = self.function(*self.inputs)
        else:
            self.graph.replay()
        n = len(values[0])
        # copies: the next replay overwrites the output
        if isinstance(self.output, dict):
            return {name: each[:n].clone() for name, each in self.output.items()}
        return self.output[:n].clone()


@contextmanager
def drawing_from(generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """Let torch's default generator of a device continue from another one, and restore it at the end."""
    if generator is None:
        yield
        return
    own = torch.cuda.default_generators[torch.cuda.current_device()] if device.type == "cuda" else None
    own = own or torch.default_generator
    before = own.get_state()
    own.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(own.get_state())
        own.set_state(before)


def out_of_memory(error: BaseException | None) -> bool:
    """Return True if the error, or one of its causes, is an out-of-memory error."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def frozen(flow: Density) -> Iterator[None]:
    """Disable gradients of parameters and put every layer in evaluation mode; restore both at the end."""
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
