"""The results of `nicest reproduce table` as a Markdown page."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

PUBLISHED = {"tfd": {"Deep MFA": 5250.0, "GRBM": 2413.0}, "cifar10": {"Deep MFA": 3622.0, "GRBM": 2365.0}}


def results_page(result: dict[str, Any], folder: Path) -> str:
    """Return the table and the figures next to its file as a Markdown page for `folder`."""
    rows, here = result["rows"], Path(result["out"]).parent
    lines = [
        "# Results",
        "",
        "`nicest reproduce table --page docs/results.md` writes this page. *paper* and *ours* are test",
        "log-likelihoods in nats, on the paper's interval of pixel values. Ours is the mean over the test set, 8",
        "draws of the noise and all seeds; ± is the standard deviation over seeds or, with one seed, the standard",
        "error over the test set. The model is that of the epoch with the best validation log-likelihood.",
        "*settings* says what a recipe follows: the text of the paper (`text`), the authors' released code",
        "(`released`), or our own choices (`best`). Recipes marked *augmented* train on randomly warped images.",
        "[Reading a likelihood](likelihood.md) explains the units. All numbers:",
        f"`{_link(Path(result['out']), folder)}`.",
        "",
        "| recipe | settings | paper | ours | bits/dim | seeds | best epoch | epochs | minutes | device |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for row in rows:
        paper = f"{row['paper_nats']:.2f}" if row["paper_nats"] else "–"
        if row.get("changed"):
            notes.append(f"`{row['recipe']}` was run with {', '.join(f'`{each}`' for each in row['changed'])}.")
        if "runs" not in row:
            lines.append(f"| {row['recipe']} | {row['reading']} | {paper} | {why(row)} | | | | | | |")
            continue
        made = row["runs"]
        sd = row["test_stderr"] if row["test_sd"] is None else row["test_sd"]
        marked = " (augmented)" if row["augmented"] else ""
        epochs = ", ".join(str(each["epoch"]) for each in made)
        lines.append(
            f"| {row['recipe']}{marked} | {row['reading']} | {paper} | **{row['test_mean_nats']:.1f}** ± {sd:.1f} |"
            f" {row['bits_per_dim']:.4f} | {row['seeds']} | {epochs} | {row['epochs']} |"
            f" {row['train_seconds'] / 60:.1f} | {row['device']} |"
        )
    lines += ["", *notes, *(NOTES[row["recipe"]] for row in rows if row["recipe"] in NOTES and "runs" in row)]
    lines += ["", *near_the_paper(rows), *([result["note"]] if "note" in result else [])]
    lines += ["", "## Linear models of the same data", ""]
    lines += ["| data | " + " | ".join(NAMES.values()) + " |", "|---" * (len(NAMES) + 1) + "|"]
    for dataset, row in {row["column"]: row for row in rows if "baselines" in row}.items():
        scores = [row["baselines"].get(name) for name in NAMES]
        cells = ["–" if score is None or math.isnan(score) else f"{score:.1f}" for score in scores]
        lines.append(f"| {dataset} | " + " | ".join(cells) + " |")
    lines += ["", "## Published results and ours", "", "| model | TFD | CIFAR-10 |", "|---|---|---|"]
    lines += ["| NICE, as published | 5514.71 | 5371.78 |"]
    for column, place in (("cifar10", "– | {:.2f}"), ("tfd", "{:.2f} | –")):
        measured = [row for row in rows if row["column"] == column and "runs" in row]
        lines += [f"| {row['recipe']}, ours | {place.format(row['test_mean_nats'])} |" for row in measured]
    for model in ("Deep MFA", "GRBM"):
        lines.append(f"| {model} | {PUBLISHED['tfd'][model]:.0f} | {PUBLISHED['cifar10'][model]:.0f} |")
    lines += ["", "The log-likelihoods of Deep MFA are lower bounds (Tang et al. 2012, as cited by the paper).", ""]
    for name in dict.fromkeys(row["recipe"] for row in rows):
        for title, file in PICTURES.items():
            picture = here / "figures" / name / file
            if picture.exists():
                lines += [f"### {name}: {title}", "", f"![{title}]({_link(picture, folder)})", ""]
    return "\n".join(lines).rstrip() + "\n"


def near_the_paper(rows: list[dict[str, Any]]) -> list[str]:
    """Return a sentence about which readings of the paper come within 1 % of its log-likelihood."""
    readings = [row for row in rows if "runs" in row and row["paper_nats"] and row["reading"] in ("text", "released")]
    off = {row["recipe"]: 100 * (row["test_mean_nats"] / row["paper_nats"] - 1) for row in readings}
    found = {name: f"`{name}` ({percent:+.1f} %)" for name, percent in off.items()}
    near, far = (
        ", ".join(text for name, text in found.items() if (abs(off[name]) <= 1) == close) or "none"
        for close in (True, False)
    )
    return [f"Within 1 % of the paper: {near}. Further away: {far}."] if off else []


PICTURES = {
    "samples": "samples.png",
    "inpainting": "inpaint.png",
    "inpainting by the authors' schedule": "inpaint-authors.png",
    "inpainting, the ascent": "inpaint.gif",
    "inpainting by draws": "draws.png",
    "a sphere in a random subspace of latent space": "sphere-random.png",
    "a sphere in the three components of largest scale": "sphere-top.png",
    "spectrum": "spectrum.png",
    "interpolation": "interpolate.png",
    "how many components an image needs": "truncate.png",
    "log-likelihood while training": "likelihood.png",
}
NOTES = {
    "fer2013": "FER2013 is not the Toronto Face Dataset; 288 of its 3,589 test images are copies of training images.",
    "svhn": "Our copy of SVHN was rebuilt from the published full-number images and their bounding boxes; `nicest data "
    "check svhn` reports it as rebuilt. Of the 30.7 million numbers of the first 10,000 test images, 88 differ from "
    "the published files, each by 1.",
}
NAMES = {
    "diagonal_gaussian": "diagonal Gaussian",
    "factorial_logistic": "factorial logistic",
    "full_gaussian": "full Gaussian",
    "zca_logistic": "ZCA + logistic",
}


def why(row: dict[str, Any]) -> str:
    """Return why a row has no result."""
    reason = row.get("missing") or row.get("unfinished") or f"failed: {row.get('failed')}"
    return str(reason).replace("|", "/")


def _link(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()
