"""What watches a training: the progress bar, TensorBoard, and whatever you write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nicest.errors import NicestError
from nicest.progress import Bar


@dataclass(frozen=True)
class Begun:
    """What a training is about when it begins, or goes on."""

    name: str
    steps: int
    step: int
    epochs: int


class Callback:
    """Override what you want to hear of. Rows of figures are in nats per example, as `evaluate` reports them."""

    def started(self, training: Begun) -> None:
        """Before the first step, and when a run is resumed."""

    def stepped(self, row: Mapping[str, Any]) -> None:
        """Every hundred steps and at the end of an epoch: epoch, step, train_nats, train_bits_per_dim."""

    def validated(self, row: Mapping[str, Any]) -> None:
        """After every validation: the row that goes into the metrics."""

    def note(self, text: str) -> None:
        """One line for the user."""

    def ended(self) -> None:
        """Training is over, by itself, by a signal or by an error."""


class ProgressBar(Callback):
    """A bar with the time left on a terminal; elsewhere a line for each validation."""

    def __init__(self) -> None:
        self.bar = Bar("", 1)  # for notes before training

    def started(self, training: Begun) -> None:
        self.epochs = training.epochs
        self.bar = Bar(training.name, training.steps, training.step).__enter__()

    def stepped(self, row: Mapping[str, Any]) -> None:
        figures = f"{row['train_nats']:.1f} nats, {row['train_bits_per_dim']:.3f} bits/dim"
        self.bar.update(row["step"], f"epoch {row['epoch']}/{self.epochs} {figures}")

    def validated(self, row: Mapping[str, Any]) -> None:
        if not self.bar.console.is_terminal:
            nats = f"train {row['train_nats']:.2f}  valid {row['valid_nats']:.2f} nats"
            self.bar.note(f"epoch {row['epoch']}/{self.epochs}  {nats}")

    def note(self, text: str) -> None:
        self.bar.note(text)

    def ended(self) -> None:
        self.bar.__exit__()


class TensorBoard(Callback):
    """Curves of every figure for TensorBoard, in a folder: `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: str | Path) -> None:
        if find_spec("tensorboard") is None:
            raise NicestError("TensorBoard is not installed: pip install 'nicest[loggers]'")
        self.folder = Path(folder)

    def started(self, training: Begun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder), purge_step=training.step + 1)  # rows of a resumed run come once

    def stepped(self, row: Mapping[str, Any]) -> None:
        self.writer.add_scalar("train/nats", row["train_nats"], row["step"])

    def validated(self, row: Mapping[str, Any]) -> None:
        for name in ("valid_nats", "valid_bits_per_dim", "lr"):
            self.writer.add_scalar(name.replace("_", "/", 1), row[name], row["step"])

    def ended(self) -> None:
        self.writer.close()
