"""The paper's tables and figures, from recipes and data: trains what is missing, goes on with what was cut off."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nicest.data.download import SETS, list_sets
from nicest.files import to_json, write_text
from nicest.plots import likelihood_figure, save_figure
from nicest.recipes import Recipe, load_recipe, parse
from nicest.tasks.evaluate import evaluate
from nicest.tasks.inpaint import inpaint
from nicest.tasks.latent import interpolate, spectrum, sphere, truncate
from nicest.tasks.sample import sample
from nicest.train.checkpoint import LAST, RunFolder
from nicest.train.loop import train


class Entry(NamedTuple):
    """A row of the table: a recipe, with how many seeds, and what is changed for the table."""

    recipe: str
    seeds: int = 1
    overrides: tuple[str, ...] = ()


PLAN = (
    Entry("mnist"),
    Entry("mnist-released"),
    Entry("mnist-best", 3),
    Entry("mnist-plain", 3),
    Entry("mnist-affine"),
    Entry("mnist-fast"),
    # the best by validation comes within the first tens of epochs; what follows only overfits
    Entry("cifar10", overrides=("train.patience=100",)),
    Entry("cifar10-released", overrides=("train.patience=100",)),
    Entry("cifar10-best", 3),
    Entry("fer2013"),
    Entry("tfd"),
    Entry("tfd-released"),
    Entry("svhn"),
    Entry("svhn-released"),
)
DONE = "evaluation.json"  # in a run folder: trained to its end, and this is what it scores on the test split
FIGURES = ("mnist-best", "cifar10-best", "fer2013")
PUBLISHED = {"tfd": {"Deep MFA": 5250.0, "GRBM": 2413.0}, "cifar10": {"Deep MFA": 3622.0, "GRBM": 2365.0}}


def table(
    recipes: Sequence[str] = (),
    *,
    runs: str | Path = "runs/reproduce",
    seeds: int = 0,
    overrides: tuple[str, ...] = (),
    out: str | Path = "results/table.json",
    page: str | Path | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Every row of the plan, or of the recipes asked for, trained, evaluated and written; `seeds` overrides the plan's.

    The file is written after every row. A row whose data is not here says so and the rest is made. What is in the
    file already and not asked for stays.
    """
    path, rows = Path(out), {}
    if path.exists():
        rows = {row["recipe"]: row for row in json.loads(path.read_text())["rows"]}
    result: dict[str, Any] = {}
    for entry in planned(recipes):
        row = make_row(entry._replace(seeds=seeds or entry.seeds), Path(runs), overrides, device)
        if "nats" in row or "nats" not in rows.get(entry.recipe, {}):  # what was measured elsewhere stays
            rows[entry.recipe] = row
        order = dict.fromkeys([*(each.recipe for each in PLAN), *rows])
        result = {"rows": [rows[name] for name in order if name in rows], "published": PUBLISHED, "out": str(path)}
        write_text(path, to_json(result))
        if page:
            write_text(Path(page), results_page(result, Path(page).parent))
        if row.get("unfinished"):
            break
    return result


def planned(recipes: Sequence[str]) -> list[Entry]:
    """The plan, or the part of it that was asked for; other recipes get one seed."""
    known = {entry.recipe: entry for entry in PLAN}
    return [known.get(name, Entry(name)) for name in recipes] if recipes else list(PLAN)


def make_row(entry: Entry, runs: Path, overrides: tuple[str, ...], device: str) -> dict[str, Any]:
    """One row: every seed trained and evaluated."""
    recipe = load_recipe(entry.recipe)
    row: dict[str, Any] = {
        "recipe": recipe.name,
        "title": recipe.title,
        "dataset": recipe.data.name,
        "reading": recipe.reading,
        "paper_nats": recipe.paper_nats,
        "augmented": bool(recipe.augment.share),
        "command": f"nicest reproduce table --recipe {recipe.name}",
    }
    if why := absent(recipe):
        return row | {"missing": why}
    made = []
    for seed in range(entry.seeds):
        folder = runs / f"{recipe.name}-{seed}"
        if not ensure(recipe, folder, (*entry.overrides, *overrides, f"train.seed={seed}"), device):
            return row | {"unfinished": f"{folder} was interrupted: the same command goes on with it"}
        made.append(json.loads((folder / DONE).read_text()))
    nats = [each["mean_nats"] for each in made]
    return row | {
        "nats": statistics.fmean(nats),
        "spread": statistics.stdev(nats) if len(nats) > 1 else None,
        "stderr": made[0]["stderr_nats"],
        "bits_per_dim": statistics.fmean(each["bits_per_dim"] for each in made),
        "seeds": made,
        "baselines": made[0]["baselines"],
    }


def absent(recipe: Recipe) -> str:
    """Why the data of a recipe cannot be had here, or nothing."""
    name = recipe.data.name
    listed = {row.name: row for row in list_sets()}
    if name in listed and not listed[name].present:
        return f"needs its data: {SETS[name].how}"
    return ""


def ensure(recipe: Recipe, folder: Path, settings: tuple[str, ...], device: str) -> bool:
    """A trained and evaluated run in the folder: made, gone on with, or found; False if it was interrupted."""
    if (folder / DONE).exists():
        return True
    resume = (folder / LAST).exists()
    if not train(recipe, folder, overrides=() if resume else settings, resume=resume, device=device)["finished"]:
        return False
    result, rows = evaluate(folder, device=device), RunFolder(folder).metrics()
    environment = json.loads((folder / "environment.json").read_text())
    kept = ("mean_nats", "stderr_nats", "bits_per_dim", "terms", "baselines", "epoch", "draws", "n")
    figures = {key: result[key] for key in kept} | {
        "seed": parse((folder / "recipe.toml").read_text(), str(folder)).train.seed,
        "epochs": rows[-1]["epoch"],
        "valid_nats": max(row["valid_nats"] for row in rows),
        "seconds": rows[-1]["seconds"],
        "device": environment["device"],
        "torch": environment["versions"]["torch"],
    }
    write_text(folder / DONE, to_json(figures))
    return True


def figures(
    recipes: Sequence[str] = (),
    *,
    runs: str | Path = "runs/reproduce",
    overrides: tuple[str, ...] = (),
    out: str | Path = "results/figures",
    device: str = "auto",
) -> dict[str, Any]:
    """The paper's figures and ours of every recipe asked for: samples, inpainting, sphere, spectrum and more."""
    made: list[dict[str, Any]] = []
    for name in recipes or FIGURES:
        recipe = load_recipe(name)
        if why := absent(recipe):
            made.append({"recipe": name, "missing": why})
            continue
        folder = Path(runs) / f"{name}-0"
        if not ensure(recipe, folder, overrides, device):
            made.append({"recipe": name, "unfinished": f"{folder} was interrupted: the same command goes on with it"})
            break
        made.append({"recipe": name, "figures": [str(path) for path in draw(folder, Path(out) / name, device)]})
    return {"recipes": made}


def draw(run: Path, folder: Path, device: str) -> Iterator[Path]:
    """Every figure of one run, in the order of the paper, then ours."""
    metrics, kept = RunFolder(run).metrics(), json.loads((run / DONE).read_text())
    title = f"{run.name}: {kept['mean_nats']:.1f} nats, {kept['bits_per_dim']:.3f} bits/dim on test"
    curve = likelihood_figure(metrics, title=title, baselines=kept["baselines"])
    save_figure(curve, folder / "likelihood.png")
    yield folder / "likelihood.png"
    sample(run, 100, out=folder / "samples.png", device=device)
    yield folder / "samples.png"
    inpaint(run, out=[folder / "inpaint.png", folder / "inpaint.gif"], device=device)
    yield from (folder / "inpaint.png", folder / "inpaint.gif")
    for basis in ("random", "top"):
        sphere(run, basis=basis, out=folder / f"sphere-{basis}.png", device=device)
        yield folder / f"sphere-{basis}.png"
    for look in (spectrum, interpolate, truncate):
        look(run, out=folder / f"{look.__name__}.png", device=device)
        yield folder / f"{look.__name__}.png"


def results_page(result: dict[str, Any], folder: Path) -> str:
    """The table and the figures as a page; figures are looked for beside the table's file."""
    rows, beside = result["rows"], Path(result["out"]).parent
    lines = [
        "# Results",
        "",
        "Written by `nicest reproduce table --page docs/results.md`. Test log-likelihood in nats on the interval of",
        "the paper, mean over the test set, 8 draws of the noise and the seeds; ± is the standard deviation over",
        "seeds, or, for one seed, the standard error over the test set. The model is the best by validation. `text`",
        "and `released` are two readings of the paper: its text and the authors' released code. Rows marked",
        f"augmented vary their training images. Raw figures: `{result['out']}`.",
        "",
        "| recipe | reading | paper | ours | bits/dim | seeds | best epoch | of | minutes | device |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        paper = f"{row['paper_nats']:.2f}" if row["paper_nats"] else "–"
        if "nats" not in row:
            lines.append(f"| {row['recipe']} | {row['reading']} | {paper} | {_why(row)} | | | | | | |")
            continue
        made = row["seeds"]
        spread = f"± {row['spread']:.1f}" if row["spread"] is not None else f"± {row['stderr']:.1f}"
        marked = " (augmented)" if row["augmented"] else ""
        epochs = ", ".join(str(each["epoch"]) for each in made)
        minutes = statistics.fmean(each["seconds"] for each in made) / 60
        lines.append(
            f"| {row['recipe']}{marked} | {row['reading']} | {paper} | **{row['nats']:.1f}** {spread} |"
            f" {row['bits_per_dim']:.4f} | {len(made)} | {epochs} | {made[0]['epochs']} | {minutes:.1f} |"
            f" {made[0]['device']} |"
        )
    lines += ["", "## Linear models of the same data", ""]
    lines += ["| data | " + " | ".join(NAMES.values()) + " |", "|---" * (len(NAMES) + 1) + "|"]
    for dataset, row in {row["dataset"]: row for row in rows if "baselines" in row}.items():
        scores = [row["baselines"].get(name) for name in NAMES]
        cells = ["–" if score is None or math.isnan(score) else f"{score:.1f}" for score in scores]
        lines.append(f"| {dataset} | " + " | ".join(cells) + " |")
    lines += ["", "## Published beside them", "", "| model | TFD | CIFAR-10 |", "|---|---|---|"]
    lines += ["| NICE, as published | 5514.71 | 5371.78 |"]
    for model in ("Deep MFA", "GRBM"):
        lines.append(f"| {model} | {PUBLISHED['tfd'][model]:.0f} | {PUBLISHED['cifar10'][model]:.0f} |")
    lines += ["", "Deep MFA's are lower bounds (Tang et al. 2012, as the paper cites them).", ""]
    for picture in sorted((beside / "figures").glob("*/*.png")):
        where = Path(*[".."] * len(folder.parts)) / picture if not picture.is_absolute() else picture
        lines += [f"### {picture.parent.name}: {picture.stem}", "", f"![{picture.stem}]({where.as_posix()})", ""]
    return "\n".join(lines).rstrip() + "\n"


NAMES = {
    "diagonal_gaussian": "diagonal Gaussian",
    "factorial_logistic": "factorial logistic",
    "full_gaussian": "full Gaussian",
    "zca_logistic": "ZCA + logistic",
}


def _why(row: dict[str, Any]) -> str:
    return str(row.get("missing") or row.get("unfinished")).replace("|", "/")
