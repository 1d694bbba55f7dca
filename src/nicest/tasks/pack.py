"""A small copy of a trained model to share: networks in bfloat16, and a card with its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from nicest.data.download import SETS
from nicest.errors import NicestError
from nicest.files import to_json, write_text
from nicest.recipes.defaults import IN_MEMORY
from nicest.runs.digests import ENVIRONMENT
from nicest.runs.folder import COLUMNS, FORMAT, RunFolder
from nicest.runs.run import Run
from nicest.runs.runtime import environment
from nicest.runs.shipped import CARD
from nicest.runs.sinks import Saved
from nicest.tasks import options
from nicest.tasks.evaluate import evaluate
from nicest.tasks.results import Result, plus_minus

LIMITS = "It knows what was in its training data and nothing else; a high likelihood does not mean typical."


@dataclass(frozen=True, kw_only=True)
class Card(Result):
    """What a shared model is of, and its metrics on the test split, with the rounded weights."""

    about: str
    data: str
    licence: str
    recipe: str
    seed: int
    epochs: int | None
    test_nats: float
    test_stderr: float
    bits_per_dim: float
    test_rows: int
    draws: int
    parameters: int
    bytes: int
    limits: str
    out: str | None = None

    def lines(self) -> Iterator[Any]:
        nats = f"{plus_minus(self.test_nats, self.test_stderr)} nats on {self.test_rows:,} test rows"
        yield f"{self.out}: {self.bytes / 1e6:.1f} MB, {nats}"


def pack(
    run: Run,
    out: Annotated[str | Path, options.out_folder("The folder of the copy.", show_default=False)],
    *,
    about: options.About = "",
) -> Card:
    """Write a small copy of a model to share: networks in bfloat16, no training state, and a card with its metrics.

    A flow stays invertible: encoder and decoder use the same rounded networks.

    Example: nicest pack runs/demo --out small
    """
    folder, recipe = RunFolder(out), run.recipe
    if recipe.data.name == IN_MEMORY:
        raise NicestError(
            "this model was fitted to rows in memory, so no card can be written: train it with `nicest train`"
        )
    folder.refuse_existing()
    run.rows("test")  # needed for the card: without them nothing is written
    tensors = {name: _small(name, tensor) for name, tensor in run.tensors.items()}
    made = environment(run.device, private=True) | {"format": f"nicest {FORMAT}", "private": True}
    files = {ENVIRONMENT: to_json(made)}
    if run.kind == "table":
        files[COLUMNS] = to_json(run.table.schema.to_json())
    with folder.open_for_writing():
        folder.begin(recipe, files)
        folder.save_model(Saved(tensors, recipe, run.figures))
        for row in run.metrics:
            folder.append_metrics(row)
    (folder.path / ".lock").unlink()
    packed = evaluate(Run(folder.path, device=run.device, data=recipe.data.name), baselines=False)
    own = SETS.get(recipe.data.name)
    card = Card(
        about=about or recipe.title,
        data=own.title if own else Path(recipe.data.name).name,
        licence=own.licence if own else "",
        recipe=recipe.name,
        seed=recipe.train.seed,
        epochs=run.figures.get("epoch"),
        test_nats=packed.mean_nats,
        test_stderr=packed.stderr_nats,
        bits_per_dim=packed.bits_per_dim,
        test_rows=packed.n,
        draws=packed.draws,
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        bytes=folder.model.stat().st_size,
        limits=LIMITS,
    )
    write_text(folder.path / CARD, to_json(card.to_dict()))
    return replace(card, out=str(folder.path))


def _small(name: str, tensor: Tensor) -> Tensor:
    """Round the weights of networks to bfloat16."""
    return tensor.to(torch.bfloat16) if ".network." in name and tensor.ndim > 1 else tensor
