"""Looking inside a trained model: the spectrum of its scaling layer (NICE App. A)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nicest.plots import save_figure, spectrum_figure
from nicest.train.checkpoint import load_with_recipe


def spectrum(run: str | Path, *, out: str | Path | None = None) -> dict[str, Any]:
    """σ_d = exp(-s_d), times the prior's scale where that is learned, from the largest (NICE App. A)."""
    flow, recipe, _ = load_with_recipe(run)
    scale = flow.prior.log_scale.detach().exp()
    sigma = np.sort((flow.chain.layers["scaling"].sigma * scale).numpy())[::-1]  # type: ignore[operator]
    path = Path(out) if out else Path(run) / "figures" / "spectrum.png"
    save_figure(spectrum_figure(sigma, title=f"{recipe.name}: spectrum of the scaling layer"), path)
    return {"out": str(path), "sigma": [float(each) for each in sigma], "recipe": recipe.name}
