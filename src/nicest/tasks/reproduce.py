"""Reproduce the tables and figures of the paper: train the missing runs, resume the interrupted ones."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from nicest.data.download import SETS, list_sets
from nicest.errors import NicestError
from nicest.files import to_json, write_text
from nicest.messages import printable
from nicest.plots import likelihood_figure, save_figure
from nicest.recipes import Recipe, load_recipe, parse
from nicest.recipes.splits import load_splits
from nicest.runs.folder import LAST
from nicest.runs.run import Run
from nicest.runs.runtime import choose_device
from nicest.tasks.evaluate import evaluate
from nicest.tasks.inpaint import inpaint
from nicest.tasks.latent import interpolate, spectrum, sphere, truncate
from nicest.tasks.options import Device, Runs, Set, integer, option, out_file, out_folder
from nicest.tasks.results import Result, columns
from nicest.tasks.results_page import PUBLISHED, results_page, why
from nicest.tasks.sample import sample
from nicest.train.fit import train


class Entry(NamedTuple):
    """A row of the table: a recipe, the number of seeds, and settings that override those of the recipe."""

    recipe: str
    seeds: int = 1
    overrides: tuple[str, ...] = ()


PLAN = (
    Entry("mnist", 3, overrides=("train.patience=100",)),
    Entry("mnist-released"),
    Entry("mnist-best", 3),
    Entry("mnist-plain", 3),
    Entry("mnist-affine"),
    Entry("mnist-fast"),
    Entry("mnist-conv"),
    # the best epoch by validation is among the first tens; later epochs overfit
    Entry("cifar10", 3, overrides=("train.patience=100",)),
    Entry("cifar10-released", overrides=("train.patience=100",)),
    Entry("cifar10-best", 3),
    Entry("cifar10-conv"),
    Entry("fer2013"),
    Entry("fer2013-tfd"),
    Entry("tfd"),
    Entry("tfd-released"),
    Entry("svhn", 3, overrides=("train.patience=40",)),
    Entry("svhn-released", overrides=("train.epochs=200",)),
    Entry("svhn-best", 3),
    Entry("svhn-conv"),
)
DONE = "evaluation.json"  # test metrics in a run folder; written once training has finished
FIGURES = ("mnist-best", "mnist-conv", "cifar10-best", "cifar10-conv", "fer2013", "tfd", "svhn-best", "svhn-conv")


@dataclass(frozen=True, kw_only=True)
class Reproduction(Result):
    """The content of the table's file.

    Rows without data have the reason under `missing`. `failed` maps the recipes that failed to the reason;
    `unfinished` is present if training was interrupted.
    """

    rows: list[dict[str, Any]]
    published: dict[str, dict[str, float]]
    out: str
    note: str | None = None
    failed: dict[str, str] | None = None
    unfinished: str | None = None

    @property
    def exit_code(self) -> int:
        return 130 if self.unfinished else int(bool(self.failed))

    def lines(self) -> Iterator[Any]:
        found = columns("recipe", "settings", ">paper, nats", "ours, nats", "bits/dim", "seeds", "minutes each")
        for row in self.rows:
            paper = f"{row['paper_nats']:.2f}" if row["paper_nats"] else "–"
            cells = [why(row), "", "", ""]
            if "runs" in row:
                error = row["test_stderr"] if row["test_sd"] is None else row["test_sd"]
                cells = [f"{row['test_mean_nats']:.1f} ± {error:.1f}", f"{row['bits_per_dim']:.4f}", str(row["seeds"])]
                cells += [f"{row['train_seconds'] / 60:.1f}"]
            name = row["recipe"] + (" (augmented)" if row["augmented"] and "runs" in row else "")
            found.add_row(name, row["reading"], paper, *cells)
        yield found
        yield f"results in {self.out}"

    def show(self) -> None:
        super().show()
        for name, reason in (self.failed or {}).items():
            print(f"{name} failed: {printable(reason)}", file=sys.stderr)


def table(
    recipe: Annotated[Sequence[str], option(help="A row of the table; repeatable.", show_default="all")] = (),
    *,
    seeds: Annotated[int, integer(0, 100, "Seeds per row; 0 for the number planned for each row.")] = 0,
    runs: Runs = "runs/reproduce",
    overrides: Set = (),  # type: ignore[assignment]
    out: Annotated[str | Path, out_file("The results, as JSON.")] = "results/table.json",
    page: Annotated[str | Path | None, out_file("The results as a Markdown page.")] = None,
    device: Device = "auto",
) -> Reproduction:
    """Train and evaluate the rows of the paper's tables: as in its text, as in the released code, and our own recipes.

    Finished rows are kept, interrupted ones resume, and rows without data are listed. The results are written after
    each row.

    Example: nicest reproduce table --recipe mnist-best --page docs/results.md
    """
    choose_device(device)  # otherwise every row would fail
    path = Path(out)
    before = known_table(path)
    rows = {row["recipe"]: row for row in before.get("rows", ())}
    for target in (path, Path(page or path)):
        target.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {}
    row: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for entry in planned(recipe):
        row = make_row(entry._replace(seeds=seeds or entry.seeds), Path(runs), tuple(overrides), device)
        if "failed" in row:
            failed[row["recipe"]] = row["failed"]
        if "runs" in row or "runs" not in rows.get(row["recipe"], {}):  # keep rows measured where the data was
            rows[row["recipe"]] = row
        order = dict.fromkeys([*(each.recipe for each in PLAN), *rows])
        made = {"rows": [rows[name] for name in order if name in rows], "published": PUBLISHED, "out": str(path)}
        result = before | made
        write_text(path, to_json(result))
        if page:
            write_text(Path(page), results_page(result, Path(page).parent))
        if "unfinished" in row:
            break
    found = {key: result[key] for key in ("rows", "published", "out", "note") if key in result}
    unfinished = row.get("unfinished")
    return Reproduction(**found, unfinished=unfinished, failed=None if unfinished else failed or None)


def known_table(path: Path) -> dict[str, Any]:
    """Read the table in a file, or return {} if there is no file."""
    if not path.exists():
        return {}
    try:
        table: dict[str, Any] = json.loads(path.read_text())
        if all(isinstance(row["recipe"], str) for row in table["rows"]):
            return table
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise NicestError(f"expected a table of `nicest reproduce` in {path}, got something else: choose another file")


def planned(recipes: Sequence[str]) -> list[Entry]:
    """Return the entries of the given recipes, or all of `PLAN`. Recipes outside of the plan get one seed."""
    known = {entry.recipe: entry for entry in PLAN}
    return [known.get(name, Entry(name)) for name in recipes] if recipes else list(PLAN)


def make_row(entry: Entry, runs: Path, overrides: tuple[str, ...], device: str) -> dict[str, Any]:
    """Train and evaluate every seed of a row, and return the row with the means over the seeds."""
    recipe = load_recipe(entry.recipe)
    changed = (*entry.overrides, *overrides)
    settings = [word for each in overrides for word in ("--set", each)]
    row: dict[str, Any] = {
        "column": recipe.data.name,
        "reading": recipe.reading,
        "recipe": recipe.name,
        "title": recipe.title,
        "paper_nats": recipe.paper_nats,
        "augmented": bool(recipe.override(*changed).augment.share),
        "changed": list(changed),
        "command": shlex.join(["nicest", "reproduce", "table", "--recipe", entry.recipe, *settings]),
    }
    if why := absent(recipe):
        return row | {"missing": why}
    made = []
    for seed in range(entry.seeds):
        folder = runs / f"{recipe.name}-{seed}"
        try:
            if unfinished := ensure(recipe, folder, (*changed, f"train.seed={seed}"), device):
                return row | {"unfinished": unfinished}
        except NicestError as error:
            return row | {"failed": str(error)}
        made.append(json.loads((folder / DONE).read_text()))
    nats = [each["mean_nats"] for each in made]
    return row | {
        "seeds": len(made),
        "test_mean_nats": statistics.fmean(nats),
        "test_sd": statistics.stdev(nats) if len(nats) > 1 else None,
        "test_stderr": made[0]["stderr_nats"],
        "bits_per_dim": statistics.fmean(each["bits_per_dim"] for each in made),
        "epochs": made[0]["epochs"],
        "train_seconds": statistics.fmean(each["seconds"] for each in made),
        "device": made[0]["device"],
        "baselines": made[0]["baselines"],
        "runs": made,
    }


def absent(recipe: Recipe) -> str:
    """Return how to get the data of a recipe, or "" if it is here."""
    name = recipe.data.name
    present = {row.name: row.present for row in list_sets()}
    return "" if present.get(name, True) else f"needs its data: {SETS[name].how}"


def ensure(recipe: Recipe, folder: Path, settings: tuple[str, ...], device: str) -> str:
    """Train or resume a run, and evaluate it. Return "", or a message if the training was interrupted."""
    resume = (folder / LAST).exists()
    if resume:
        found, wanted = parse((folder / "recipe.toml").read_text(), str(folder)), recipe.override(*settings)
        if (found.model, found.augment, found.train) != (wanted.model, wanted.augment, wanted.train):
            raise NicestError(
                f"{folder} holds a run with other settings than asked for: remove it, or choose another folder"
            )
    if (folder / DONE).exists():
        return ""
    ended = train(recipe, folder, overrides=() if resume else settings, resume=resume, device=device)
    if not ended["finished"]:
        return f"{folder} was interrupted: the same command resumes it"
    keep_metrics(Run(folder, device=device))
    return ""


def keep_metrics(run: Run) -> None:
    """Evaluate a run on its test split, and write the metrics of its table row into its folder."""
    folder, result, rows = run.path, evaluate(run).to_dict(), run.metrics
    environment = json.loads((folder / "environment.json").read_text())
    kept = ("mean_nats", "stderr_nats", "bits_per_dim", "terms", "baselines", "epoch", "draws", "n")
    metrics = {key: result[key] for key in kept} | {
        "seed": run.recipe.train.seed,
        "epochs": rows[-1]["epoch"],
        "valid_nats": max(row["valid_nats"] for row in rows),
        "seconds": rows[-1]["seconds"],
        "torch": environment["versions"]["torch"],
    }
    metrics |= {key: environment.get(key) for key in ("device", "date", "commit")}
    write_text(folder / DONE, to_json(metrics))


@dataclass(frozen=True, kw_only=True)
class Figures(Result):
    """The files of each recipe, or why there are none."""

    recipes: list[dict[str, Any]]
    unfinished: str | None = None

    @property
    def exit_code(self) -> int:
        return 130 if self.unfinished else 0

    def lines(self) -> Iterator[Any]:
        for row in self.recipes:
            yield f"{row['recipe']}:"
            yield from (f"  {each}" for each in row.get("figures", [row.get("missing") or row.get("unfinished")]))


def figures(
    recipe: Annotated[Sequence[str], option(help="A recipe; repeatable.", show_default="our own recipes")] = (),
    *,
    runs: Runs = "runs/reproduce",
    overrides: Set = (),  # type: ignore[assignment]
    out: Annotated[str | Path, out_folder("The folder for the figures.")] = "results/figures",
    device: Device = "auto",
) -> Figures:
    """Draw the figures of the paper (samples, inpainting, spheres, spectra), interpolations, truncations, curves.

    Runs are trained if they are missing. Each recipe gets a folder.

    Example: nicest reproduce figures --recipe digits
    """
    made: list[dict[str, Any]] = []
    for entry in planned(recipe or FIGURES):
        loaded = load_recipe(entry.recipe)
        if gone := absent(loaded) or ("its rows are not images" if len(load_splits(loaded).shape) == 1 else ""):
            made.append({"recipe": loaded.name, "missing": gone})
            continue
        folder, pictures = Path(runs) / f"{loaded.name}-0", Path(out) / loaded.name
        pictures.mkdir(parents=True, exist_ok=True)
        if unfinished := ensure(loaded, folder, (*entry.overrides, *overrides, "train.seed=0"), device):
            made.append({"recipe": loaded.name, "unfinished": unfinished})
            return Figures(recipes=made, unfinished=unfinished)
        made.append({"recipe": loaded.name, "figures": list(map(str, draw(Run(folder, device=device), pictures)))})
    return Figures(recipes=made)


def draw(run: Run, folder: Path) -> list[Path]:
    """Draw every figure of a run, and return the paths."""
    metrics, kept = run.metrics, json.loads((run.path / DONE).read_text())
    title = f"{run.path.name}: {kept['mean_nats']:.1f} nats, {kept['bits_per_dim']:.3f} bits/dim on test"
    curve = likelihood_figure(metrics, title=title, baselines=kept["baselines"])
    made = [folder / name for name in ("likelihood.png", "samples.png", "inpaint.png", "inpaint.gif")]
    save_figure(curve, made[0])
    sample(run, 100, out=made[1])
    inpaint(run, out=made[2:])
    if run.recipe.model.blocks:  # draws of a convolutional flow look like images
        made.append(folder / "draws.png")
        inpaint(run, mask=("bottom", "left"), n=4, chains=3, draws=True, out=made[-1])
    for basis in ("random", "top"):
        made.append(folder / f"sphere-{basis}.png")
        sphere(run, basis=basis, out=made[-1])
    for look in (spectrum, interpolate, truncate):
        made.append(folder / f"{look.__name__}.png")
        look(run, out=made[-1])
    return made
