"""What a training saves, and a sink in memory; `RunFolder` is the sink on disk, with the same methods."""

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
        return self.state

    def save_state(self, saved: Saved) -> None:
        self.state = _copied(saved)

    def forget_state(self) -> None:
        self.state = None

    def read_model(self) -> Saved:
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
        self.rows = [row for row in self.rows if row["step"] <= step]

    def refuse_existing(self) -> None:
        """Do nothing: a new training in the same memory replaces the old one."""

    def begin(self, recipe: Recipe, files: Mapping[str, str]) -> None:
        """Do nothing: in memory no text files describe a training."""


def _copied(saved: Saved) -> Saved:
    """Copy tensors to the CPU: training goes on to change them."""
    return saved._replace(tensors={name: t.detach().to("cpu", copy=True) for name, t in saved.tensors.items()})
