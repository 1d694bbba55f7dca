"""Rows with missing cells: they train with cells drawn from the model itself, anew every few epochs.

∇ log p(observed) = E[∇ log p(observed, missing)] over p(missing | observed), so that steps on rows whose missing cells
are draws from that law climb the likelihood of what was observed (of whole numbers, its bound). The draws are chains
that go on from where they were while the model learns (stochastic approximation: Gu & Kong 1998, Delyon, Lavielle &
Moulines 1999).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from nicest.data import Splits
from nicest.inference.engine import frozen
from nicest.inference.langevin import SAMPLES, Chains
from nicest.train.state import State

MOVES = 10  # of a chain each time; one in five is a leap
AT_LEAST = 2000  # rows whose chains move, if there are as many


class MissingCells:
    """The missing cells among the rows on the device, (N, D), the last of which have some; changed in place.

    What they are taken for is part of the state, as `state.cells`. They move whenever there was a validation; of many
    rows, as many as cost about what the training since the last one did.
    """

    def __init__(self, state: State, splits: Splits, rows: Tensor) -> None:
        self.state, self.rows = state, rows
        self.missing = torch.from_numpy(splits.missing).to(state.device)
        self.incomplete = rows[len(rows) - len(self.missing) :]
        ends = torch.tensor([column.bounds for column in splits.columns], device=state.device)
        self.bounds = (ends[:, 0], ends[:, 1]) if len(ends) else None
        if len(self.missing) and not len(state.cells):
            state.cells = state.world.sent({"": self.incomplete[self.missing].cpu()})[""].to(state.device)
        self.put()

    def put(self) -> None:
        """Take the cells for what the state says."""
        if len(self.missing):
            self.incomplete[self.missing] = self.state.cells

    def draw(self, epoch: int, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Before an epoch: move the chains on, if it is time; each process does its share.

        Whether that was done to the end: `stopped` is asked in between, and when it says so all cells stay.
        """
        every = self.state.recipe.train.evaluate_every
        if not len(self.missing) or not epoch or epoch % every:
            return True
        state, world, times = self.state, self.state.world, epoch // every
        count = min(len(self.missing), max(AT_LEAST, every * len(self.rows) // MOVES))
        which = (torch.arange(count, device=state.device) + times * count) % len(self.missing)  # all, turn by turn
        generator = torch.Generator(state.device)
        flow = state.whole(state.average)
        with frozen(flow):
            self.seed(generator, epoch, 0)
            some = torch.randint(len(self.rows), (SAMPLES,), generator=generator, device=state.device)
            chains = Chains(flow, self.rows[some], self.bounds, generator)
            parts, moved = which.split(chains.at_once()), {}
            for first in range(0, len(parts), world.size):
                if stopped():
                    return False
                i = first + world.rank
                if i < len(parts):
                    self.seed(generator, epoch, i + 1)  # the same draws, whoever makes them
                    moved[i] = chains.moved(self.incomplete[parts[i]], self.missing[parts[i]], MOVES).cpu()
        for found in world.all_gather(moved):
            for i, rows in found.items():
                self.incomplete[parts[i]] = rows.to(state.device)
        state.cells = self.incomplete[self.missing]
        return True

    def seed(self, generator: torch.Generator, epoch: int, part: int) -> None:
        numbers = np.random.SeedSequence([self.state.recipe.train.seed, epoch, part])
        generator.manual_seed(int(numbers.generate_state(1, np.uint64)[0] >> np.uint64(1)))
