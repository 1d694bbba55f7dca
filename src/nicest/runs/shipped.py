"""Trained models that come with nicest, opened by their names."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

from nicest.data.download import data_home
from nicest.files import replacing, writing
from nicest.runs.folder import MODEL

CARD = "card.json"  # beside each model: what it is of, how good it is, where it ends


def shipped() -> dict[str, Path]:
    """Return the folders of all models that come with nicest, by name."""
    home = Path(str(resources.files("nicest"))) / "models"
    return {path.parent.name: path.parent for path in sorted(home.glob(f"*/{CARD}"))}


def card(folder: Path) -> dict[str, Any]:
    """Read the card of a model."""
    found: dict[str, Any] = json.loads((folder / CARD).read_text("utf-8"))
    return found


def fetched(path: str | Path) -> Path:
    """Return a path, or, if nothing is there, the folder of a model that comes with nicest by that name.

    That is a copy in the user's cache, where scores and figures that belong to it have a place; where no copy can be
    made, it is the model itself.
    """
    asked = Path(path)
    if asked.exists() or str(path) not in (models := shipped()):
        return asked
    source, target = models[str(path)], data_home() / "models" / str(path)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for file in sorted(source.iterdir(), key=lambda file: file.name == MODEL):  # the model last
            if not (target / file.name).exists() or (target / file.name).read_bytes() != file.read_bytes():
                with writing(target), replacing(target / file.name) as temporary:
                    shutil.copyfile(file, temporary)
    except Exception:  # such as a home that cannot be written
        return source
    return target
