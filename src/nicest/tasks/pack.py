"""A small copy of a trained model to hand on: networks in bfloat16, and a card that says what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nicest.data.columns import columns_to_json
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
from nicest.tasks.evaluate import evaluate

LIMITS = "It knows what was in its training data and nothing else; a high likelihood is not typicality."


def pack(run: Run, out: str | Path, *, about: str = "", limits: str = LIMITS) -> dict[str, Any]:
    """Write a run folder with the model alone, its coupling functions rounded to bfloat16.

    The card's nats are of the rounded weights, on the test split. Invertibility does not suffer: encoder and decoder
    use the same rounded networks.
    """
    folder, recipe = RunFolder(out), run.recipe
    if recipe.data.name == IN_MEMORY:
        raise NicestError(
            "this model was fitted to rows in memory, so no card can be written: train it with `nicest train`"
        )
    folder.refuse_existing()
    run.rows("test")  # the card is made by these: without them nothing is written
    tensors = {name: _small(name, tensor) for name, tensor in run.tensors.items()}
    made = environment(run.device, private=True) | {"format": f"nicest {FORMAT}", "private": True}
    files = {ENVIRONMENT: to_json(made)}
    if run.columns:
        files[COLUMNS] = to_json(columns_to_json(run.columns))
    with folder.open_for_writing():
        folder.begin(recipe, files)
        folder.save_model(Saved(tensors, recipe, run.figures))
        for row in run.metrics:
            folder.append_metrics(row)
    (folder.path / ".lock").unlink()
    packed = evaluate(Run(folder.path, device=run.device, data=recipe.data.name), with_baselines=False)
    own = SETS.get(recipe.data.name)
    card = {
        "about": about or recipe.title,
        "data": own.title if own else Path(recipe.data.name).name,
        "licence": own.licence if own else "",
        "recipe": recipe.name,
        "seed": recipe.train.seed,
        "epochs": run.figures.get("epoch"),
        "test_nats": packed["mean_nats"],
        "test_stderr": packed["stderr_nats"],
        "bits_per_dim": packed["bits_per_dim"],
        "test_rows": packed["n"],
        "draws": packed["draws"],
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "bytes": folder.model.stat().st_size,
        "limits": limits,
    }
    write_text(folder.path / CARD, to_json(card))
    return {"out": str(folder.path), **card}


def _small(name: str, tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if ".network." in name and tensor.ndim > 1 else tensor
