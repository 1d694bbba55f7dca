"""What watches a training: the progress bar, loggers, and whatever you write."""

from __future__ import annotations

import os
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
        """Handle the start: before the first step, and when a run is resumed."""

    def stepped(self, row: Mapping[str, Any]) -> None:
        """Handle epoch, step, train_nats and train_bits_per_dim, every hundred steps and at the end of an epoch."""

    def validated(self, row: Mapping[str, Any]) -> None:
        """Handle the row of metrics of a validation."""

    def note(self, text: str) -> None:
        """Show one line to the user."""

    def ended(self) -> None:
        """Handle the end of training: by itself, by a signal or by an error."""


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


class Logger(Callback):
    """Curves of a training for a logger, in a folder: `log` gets every figure by its name."""

    needs, extra = "", ""  # the module, and the extra that has it

    def __init__(self, folder: str | Path) -> None:
        if find_spec(self.needs) is None:
            raise NicestError(f"{type(self).__name__} is not installed: pip install 'nicest[{self.extra}]'")
        self.folder = Path(folder)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def stepped(self, row: Mapping[str, Any]) -> None:
        self.log({"train/nats": row["train_nats"]}, row["step"])

    def validated(self, row: Mapping[str, Any]) -> None:
        names = ("valid_nats", "valid_bits_per_dim", "lr")
        self.log({name.replace("_", "/", 1): row[name] for name in names}, row["step"])


class TensorBoard(Logger):
    """Curves for TensorBoard: `tensorboard --logdir FOLDER`."""

    needs, extra = "tensorboard", "loggers"

    def started(self, training: Begun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder), purge_step=training.step + 1)  # rows of a resumed run come once

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def ended(self) -> None:
        self.writer.close()


class MLflow(Logger):
    """Curves for MLflow, as files: `MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri FOLDER`.

    A training that is resumed is another run of the experiment, from its step on.
    """

    needs, extra = "mlflow", "mlflow"

    def started(self, training: Begun) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow wants a data base else
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(tracking_uri=self.folder.absolute().as_uri())
        known = self.client.get_experiment_by_name(training.name)
        experiment = known.experiment_id if known else self.client.create_experiment(training.name)
        tags = {"first_step": str(training.step + 1)}
        self.run = self.client.create_run(experiment, tags=tags, run_name=training.name).info.run_id

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self.client.log_metric(self.run, name, value, step=step)

    def ended(self) -> None:
        self.client.set_terminated(self.run)


class WandB(Logger):
    """Curves for Weights & Biases, offline: `wandb sync FOLDER/wandb/offline-run-*` uploads them.

    A training that is resumed is another run of the group, from its step on.
    """

    needs, extra = "wandb", "wandb"

    def started(self, training: Begun) -> None:
        import wandb

        quiet: dict[str, Any] = {"silent": True, "console": "off", "disable_git": True, "save_code": False}
        quiet |= {"x_disable_stats": True, "x_disable_meta": True}  # nor anything about this machine
        self.folder.mkdir(parents=True, exist_ok=True)
        where: dict[str, Any] = {"mode": "offline", "dir": str(self.folder), "project": "nicest"}
        name = {"group": training.name, "name": f"{training.name} from step {training.step + 1}"}
        self.run = wandb.init(**where, **name, settings=wandb.Settings(**quiet))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self.run.log(dict(figures), step=step)

    def ended(self) -> None:
        self.run.finish()


LOGGERS: dict[str, type[Logger]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
