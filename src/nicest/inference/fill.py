"""Fill in hidden pixels by climbing the log-likelihood, tensors in and tensors out (NICE §5.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from nicest.errors import NicestError
from nicest.fast import capture, copy_weights, lower
from nicest.flows import Flow
from nicest.inference.engine import frozen

BATCH = 2000  # rows that climb at once, whatever their number

Direction = Literal["adam", "gradient"]


@dataclass(frozen=True)
class Schedule:
    """x_H <- P[x_H + a_i (gradient_scale g + noise ε)], g = ∂ log p/∂x_H, a_i = 10/(100 + i) (NICE §5.2).

    ε ~ N(0, I), and P projects onto the interval of the data. In the text both factors are 1, and a step then crosses
    the whole interval; the authors' code climbs the mean of its 100 images, which is a gradient scale of 1/100.

    DIFFERS: in the direction "adam", g is averaged over a few iterations and divided by the root of its mean square,
    pixel by pixel. On MNIST a border pixel starts with some 45 times the gradient of a central one: plain steps short
    enough for the border to settle barely move the digit, and very many are needed (benchmarks/log.md).
    """

    steps: int
    direction: Direction
    gradient_scale: float
    noise: float

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise NicestError(f"expected at least 1 step, got {self.steps}")
        if self.direction not in get_args(Direction):
            raise NicestError(f"expected a direction of {', '.join(get_args(Direction))}, got {self.direction!r}")
        if not 0 < self.gradient_scale < math.inf:
            raise NicestError(f"expected a gradient scale above 0, such as 1, got {self.gradient_scale}")
        if not 0 <= self.noise < math.inf:
            raise NicestError(f"expected noise of 0, for none, or more, got {self.noise}")


OURS = Schedule(steps=1000, direction="adam", gradient_scale=1.0, noise=0.03)
PRESETS = {
    "ours": OURS,
    "authors": Schedule(steps=111_895, direction="gradient", gradient_scale=0.01, noise=1.0),
}
BETAS = (0.9, 0.99)  # Adam's averaging factors


@dataclass(frozen=True)
class Filled:
    """Rows with what was hidden filled in, by every chain, after each number of iterations in `looks`.

    `states` (looks, chains, B, D) are in the space and dtype of the rows, whole levels of pixels; `nats` (looks,
    chains, B) are of the real numbers that the ascent moves, in the data's own space as in `Flow`.
    """

    looks: tuple[int, ...]
    states: Tensor
    nats: Tensor

    @property
    def result(self) -> Tensor:
        """The last states, (chains, B, D)."""
        return self.states[-1]


class Ascent:
    """The state of the ascent, and one iteration of it.

    All that an iteration reads or writes keeps its shape and its place on the device, its number i included, so that
    `iteration` can be captured as one CUDA graph and replayed.
    """

    def __init__(
        self,
        flow: Flow,
        y: Tensor,
        hidden: Tensor,
        box: tuple[Tensor, Tensor],
        schedule: Schedule,
        generator: torch.Generator,
    ) -> None:
        self.flow, self.hidden, self.schedule, self.generator = flow, hidden, schedule, generator
        self.lower, self.upper = box
        self.noise, self.mean, self.square = (torch.zeros_like(y) for _ in range(3))
        self.i = y.new_zeros(())
        self.z = torch.where(hidden, self.draw(y), y).requires_grad_()

    @property
    def y(self) -> Tensor:
        """Rows in the flow's space."""
        return self.z.detach()

    def draw(self, y: Tensor) -> Tensor:
        """Draw where the hidden start: uniform between finite bounds, as the authors' do, else N(0, 1)."""
        uniform = torch.rand(y.shape, generator=self.generator, dtype=y.dtype, device=y.device)
        normal = torch.randn(y.shape, generator=self.generator, dtype=y.dtype, device=y.device)
        width = self.upper - self.lower
        return torch.where(width.isfinite(), self.lower + width * uniform, normal.clamp(self.lower, self.upper))

    def iteration(self) -> None:
        """Take one step uphill."""
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self.flow.log_density(self.z).sum(), self.z)
        with torch.no_grad():
            change = self.schedule.gradient_scale * self.direction(gradient)
            if self.schedule.noise:
                change += self.schedule.noise * self.noise.normal_(generator=self.generator)
            moved = (self.z + 10 / (100 + self.i) * change).clamp(self.lower, self.upper)
            self.z.copy_(torch.where(self.hidden, moved, self.z))
            self.i += 1

    def captured(self, precision: torch.dtype = torch.bfloat16) -> Callable[[], None]:
        """Return `iteration`, on a GPU as one CUDA graph to replay; capturing changes no state and draws no number.

        There the coupling functions compute in `precision`, enough for a direction; reported nats are float32's.
        """
        self.flow = lower(self.flow, precision if self.z.is_cuda else None)  # holds what the graph reads
        if not self.z.is_cuda:
            return self.iteration
        copy_weights(self.flow)
        state = (self.z, self.i, self.mean, self.square)
        before, random = [each.detach().clone() for each in state], self.generator.get_state()
        graph, _ = capture(self.iteration, self.z.device, generator=self.generator)
        with torch.no_grad():
            for each, kept in zip(state, before, strict=True):
                each.copy_(kept)
        self.generator.set_state(random)
        return graph.replay

    def direction(self, gradient: Tensor) -> Tensor:
        """Return the gradient, or Adam's direction."""
        if self.schedule.direction == "gradient":
            return gradient
        (beta1, beta2), count = BETAS, self.i + 1
        self.mean.lerp_(gradient, 1 - beta1)
        self.square.lerp_(gradient.square(), 1 - beta2)
        size = (self.square / (1 - beta2**count)).sqrt().clamp_min(torch.finfo(gradient.dtype).tiny)
        return self.mean / (1 - beta1**count) / size


def fill(
    flow: Flow,
    x: Tensor,
    hidden: Tensor,
    *,
    schedule: Schedule = OURS,
    chains: int = 1,
    looks: Sequence[int] = (),
    seed: int = 0,
    watch: Callable[[float, float], None] = lambda share, mean_nats: None,
) -> Filled:
    """Fill in what is hidden by climbing the log-likelihood; the observed come back bit for bit (NICE §5.2).

    Parameters
    ----------
    flow : Flow
    x : Tensor
        (B, D) rows in the data's own space, ignored where they are hidden. Pixels stay in their interval.
    hidden : Tensor
        (B, D) booleans.
    schedule : Schedule
    chains : int
        Fillings of each row, each with its own start and noise.
    looks : sequence of int
        Iterations whose states are kept, next to the start and the end.
    seed : int
    watch : callable
        Called with the fraction done and the mean nats after every iteration.

    Returns
    -------
    Filled
    """
    require_mask(flow, x, hidden, chains)
    generator = torch.Generator(x.device).manual_seed(seed)
    stops = tuple(sorted({0, *looks, schedule.steps}))
    rows, masks = (each.repeat(chains, 1).split(BATCH) for each in (x, hidden))
    states, nats = [], []

    def tell(part: int, share: float, mean_nats: float) -> None:
        watch((part + share) / len(rows), mean_nats)

    with frozen(flow):
        box = flow.units.box()
        for part, (row, mask) in enumerate(zip(rows, masks, strict=True)):
            climb = _climb(flow, row, mask, box, schedule, generator, set(stops).__contains__, partial(tell, part))
            _, kept, heights = zip(*climb, strict=True)
            states.append(torch.stack(kept))
            nats.append(torch.stack(heights))
    shape = (len(stops), chains, len(x))
    return Filled(stops, torch.cat(states, 1).reshape(*shape, flow.dim), torch.cat(nats, 1).reshape(shape))


def ascend(
    flow: Flow,
    x: Tensor,
    hidden: Tensor,
    look: Callable[[int], bool],
    *,
    schedule: Schedule = OURS,
    chains: int = 1,
    seed: int = 0,
) -> Iterator[Filled]:
    """Yield the looks of `fill` while it climbs: at the start, wherever `look(iterations done)` is true, at the end.

    The rows, of which there may be few, climb together.
    """
    require_mask(flow, x, hidden, chains)
    generator, rows, masks = torch.Generator(x.device).manual_seed(seed), x.repeat(chains, 1), hidden.repeat(chains, 1)
    with frozen(flow):
        for i, state, nats in _climb(flow, rows, masks, flow.units.box(), schedule, generator, look):
            yield Filled((i,), state.view(1, chains, *x.shape), nats.view(1, chains, len(x)))


def require_mask(flow: Flow, x: Tensor, hidden: Tensor, chains: int = 1) -> None:
    """Refuse rows of another width than the flow's, and masks of another shape or type."""
    if x.shape != hidden.shape or x.shape[1:] != (flow.dim,) or hidden.dtype != torch.bool:
        got = f"{tuple(x.shape)} and {tuple(hidden.shape)} of {hidden.dtype}"
        raise NicestError(f"expected rows (N, {flow.dim}) and a boolean mask of that shape, got {got}")
    if chains < 1:
        raise NicestError(f"expected at least 1 chain, got {chains}")


def _climb(
    flow: Flow,
    rows: Tensor,
    hidden: Tensor,
    box: tuple[Tensor, Tensor],
    schedule: Schedule,
    generator: torch.Generator,
    look: Callable[[int], bool],
    watch: Callable[[float, float], None] = lambda share, mean_nats: None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield iterations done, rows and nats at the looks, between which the host reads nothing from the device."""
    ascent = Ascent(flow, flow.units.enter(rows, noise=False), hidden, box, schedule, generator)
    mean_nats, iterate, steps = math.nan, ascent.captured(), schedule.steps
    for i in range(steps + 1):
        if i:
            iterate()
            watch(i / steps, mean_nats)
        if 0 < i < steps and not look(i):
            continue
        y = ascent.y
        with torch.no_grad():
            nats = flow.log_density(y).double() + flow.units.log_det(y)
        mean_nats = float(nats.mean())
        if not math.isfinite(mean_nats):
            cause = "choose a smaller gradient scale" if i else "is every observed value a number?"
            raise NicestError(f"the log-likelihood is not finite after {i} steps: {cause}")
        yield i, torch.where(hidden, flow.units.leave(y).to(rows), rows), nats
