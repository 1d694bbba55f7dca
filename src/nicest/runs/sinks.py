"""What a training saves, and memory to save it in; `RunFolder` saves it on disk, by the same methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from nicest.recipes import Recipe
from nicest.runs.formats import FORMAT


class Saved(NamedTuple):
    """Tensors by name, the recipe they belong to, the metrics they were saved with, and the version of the format."""

    tensors: dict[str, Tensor]
    recipe: Recipe
    figures: dict[str, Any]
    version: int = FORMAT


class Memory:
    """A sink that keeps everything in memory, and loses it with the process.

    With `handles_signals`, for a process whose training is saved elsewhere, signals stop the training cleanly.
    """

    def __init__(self, *, handles_signals: bool = False) -> None:
        self.handles_signals = handles_signals
        self.state: Saved | None = None
        self.model: Saved | None = None
        self.rows: list[dict[str, Any]] = []

    def __str__(self) -> str:
        return "memory"

    @contextmanager
    def open_for_writing(self) -> Iterator[None]:
        yield

    def read_state(self) -> Saved | None:
        """The last state, from which a training goes on exactly where it stopped; None if there is none yet."""
        return self.state

    def save_state(self, saved: Saved) -> None:
        self.state = _copied(saved)

    def forget_state(self) -> None:
        """Before the first step: the training may begin anew with other settings."""
        self.state = None

    def read_model(self) -> Saved:
        """The best model so far."""
        if self.model is None:
            raise ValueError("there is no model yet")
        return self.model

    def save_model(self, saved: Saved) -> None:
        self.model = _copied(saved)

    def metrics(self) -> list[dict[str, Any]]:
        return list(self.rows)

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))

    def drop_metrics_after(self, step: int) -> None:
        """Forget rows beyond the state that training goes on from."""
        self.rows = [row for row in self.rows if row["step"] <= step]

    def refuse_existing(self) -> None:
        """A new training in the same memory takes the place of the old one."""

    def begin(self, recipe: Recipe, files: Mapping[str, str]) -> None:
        """Keep text files that describe a training; in memory nothing does but its recipe."""

    def hand_over(self, sink: Any, recipe: Recipe) -> None:
        """Let another sink have it all, as a training of this recipe; first the state, which a resume needs."""
        if self.state is None:
            raise ValueError("there is no state yet")
        sink.save_state(self.state._replace(recipe=recipe))
        for row in self.rows:
            sink.append_metrics(row)
        sink.save_model(self.read_model()._replace(recipe=recipe))


def _copied(saved: Saved) -> Saved:
    """What training goes on to change must not change here."""
    return saved._replace(tensors={name: t.detach().to("cpu", copy=True) for name, t in saved.tensors.items()})
