"""Commands of a run: make one, and what can be done with it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nicest.cli import options, show
from nicest.cli.base import Result, app, command, emit, located, opened, train_on
from nicest.errors import NicestError
from nicest.remote import place


@command(app, show.demo)
def demo(
    out: Annotated[Path, options.out_folder("The run folder.")] = Path("runs/demo"), device: options.Device = "auto"
) -> Result:
    """Train on the bundled 8 x 8 digits, evaluate, certify and draw the figures.

    Example: nicest demo
    """
    from nicest.tasks.demo import demo as run_demo

    result = run_demo(out, device=device)
    return result if result["training"]["finished"] else result["training"]


@command(app, show.recipes)
def recipes(
    name: Annotated[str | None, options.given("Print this recipe with every setting and its meaning.", str)] = None,
) -> Result:
    """List the recipes and the log-likelihood to expect from each.

    Example: nicest recipes mnist
    """
    from nicest.recipes import load_recipe, names

    if name:
        recipe = load_recipe(name)
        return {"name": recipe.name, "toml": recipe.to_toml()}
    fields = ("name", "title", "reading", "paper_nats", "expected_nats")
    return {"recipes": [{field: getattr(load_recipe(each), field) for field in fields} for each in names()]}


@command(app, show.models)
def models(
    name: Annotated[
        str | None, typer.Argument(help="A model whose card to print.", show_default="all, in a table")
    ] = None,
) -> Result:
    """List the trained models that come with nicest; every command takes their names in place of a run folder.

    Example: nicest models && nicest sample digits-conv -n 100 --out grid.png
    """
    from nicest.messages import nearest
    from nicest.runs.shipped import card, shipped

    found = shipped()
    if name is not None and name not in found:
        raise NicestError(f"no model {name!r}{nearest(name, found)}; there are {', '.join(found) or 'none'}")
    chosen = [name] if name else list(found)
    return {"models": [{"name": each, **card(found[each])} for each in chosen], "whole": name is not None}


@command(app, show.packed, also=("targets", "labels"))
def pack(
    run: Any,
    out: Annotated[Path, options.out_folder("The folder of the copy.", show_default=False)],
    about: Annotated[str, typer.Option(help="A line for the card.", show_default="the title of the recipe")] = "",
    data: options.Moved = None,
) -> Result:
    """Write a small copy of a model to share: networks in bfloat16, no training state, and a card with its figures.

    Example: nicest pack runs/demo --out small
    """
    from nicest.tasks.pack import pack as run_packing

    return run_packing(run, out, about=about)


@command(app, show.pushed, also=("targets", "labels"))
def push(
    run: Any,
    repository: Annotated[str, typer.Argument(help="Where to, as OWNER/NAME.", show_default=False)],
    about: Annotated[str, typer.Option(help="A line for the card.", show_default="the title of the recipe")] = "",
    private: Annotated[bool, typer.Option("--private", help="Make a new repository a private one.")] = False,
    data: options.Moved = None,
) -> Result:
    """Upload a small copy of a model to the Hugging Face Hub, with a card that has its figures.

    Example: nicest push runs/demo me/digits
    """
    from nicest.tasks.hub import push as run_push

    return run_push(run, repository, about=about, private=private)


@command(app, show.pulled)
def pull(
    repository: Annotated[str, typer.Argument(help="What, as OWNER/NAME.", show_default=False)],
    revision: Annotated[
        str | None, typer.Option(help="A commit, a branch or a tag.", show_default="the newest commit")
    ] = None,
    out: Annotated[Path | None, options.out_folder("The run folder.", show_default="runs/NAME")] = None,
) -> Result:
    """Download a model from the Hugging Face Hub, and check the SHA-256 of every file.

    Example: nicest pull me/digits --out digits && nicest sample digits
    """
    from nicest.tasks.hub import pull as run_pull

    return run_pull(repository, revision=revision, out=out)


@command(app, show.exported, also=("targets", "labels"))
def export(
    run: Any,
    to: Annotated[options.GraphFormat, typer.Option(help="For onnxruntime, or for torch.")] = "onnx",
    out: Annotated[
        Path | None, options.out_folder("The folder of the graphs.", show_default="RUN/onnx or RUN/torch-export")
    ] = None,
    label: options.Label = None,
) -> Result:
    """Write a model as graphs that run without nicest: score, sample and encode, for any number of rows.

    Example: nicest export runs/demo --to onnx
    """
    from nicest.tasks.export import export as run_export

    return run_export(run, to, out)


@command(app, show.training)
def train(
    recipe: Annotated[str, options.given("The name of a recipe, or a .toml file.", str, show_default=False)],
    data: Annotated[
        str | None,
        typer.Option(
            parser=options.to_read,
            help="Your own data: a table (.csv, .parquet, .arrow), an array (.npy, .npz) or a folder of images.",
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(help="A column to predict from the others, with `nicest predict`; repeatable."),
    ] = None,
    out: Annotated[Path | None, options.out_folder("The run folder.", show_default="runs/RECIPE")] = None,
    change: options.Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in the folder.")] = False,
    logger: Annotated[
        options.Logger | None, typer.Option(help="Write curves for this logger to RUN/LOGGER; nothing is uploaded.")
    ] = None,
    private: Annotated[
        bool,
        typer.Option("--private", help="Record no command, host name, user name or absolute path in the run folder."),
    ] = False,
    device: options.Device = "auto",
    verify: options.Verify = None,
) -> Result:
    """Train a model. Ctrl-C saves and stops; --resume continues exactly where it stopped.

    Example: nicest train mnist --set train.epochs=50

    On your own table: nicest train table --data people.csv --out runs/people

    On several GPUs: torchrun --nproc-per-node 8 -m nicest train tfd
    """
    from nicest.recipes import load_recipe, names

    named = Path(recipe)
    there = named.is_file() or (named.is_dir() and not (named / "recipe.toml").exists())
    if there and named.suffix != ".toml" and recipe not in names():
        raise NicestError(f"{recipe} is data, not a recipe: {train_on(recipe)}")
    loaded = load_recipe(recipe)
    overrides = list(change or [])
    if data:
        overrides.append(f"data.name={json.dumps(located(data), ensure_ascii=False)}")
    if target:
        overrides.append(f"data.target={json.dumps(target, ensure_ascii=False)}")
    options.to_read(loaded.override(*overrides).data.name)
    folder = out or Path("runs") / loaded.name
    if data and folder.resolve() == place(data).resolve():
        raise NicestError(f"expected a separate folder for the run, got {folder}, which holds the data: choose another")
    if verify and not resume:
        raise NicestError("--verify checks a run that is resumed: add --resume, or leave out --verify")
    if private and resume:
        raise NicestError("--private is for a new run: leave it out, the resumed run keeps its setting")
    if private and logger:
        raise NicestError("loggers record names of host, user or paths: leave out --logger or --private")
    from nicest.runs.folder import RunFolder  # after the recipe: it takes two seconds
    from nicest.train.callbacks import LOGGERS, ProgressBar
    from nicest.train.fit import train as run_training

    callbacks: list[Any] = [ProgressBar(), *([LOGGERS[logger](folder / logger)] if logger else [])]
    asked: dict[str, Any] = {"resume": resume, "device": device, "callbacks": callbacks}
    asked |= {"verify": verify, "private": private}
    result = run_training(loaded, folder, overrides=tuple(overrides), **asked)
    if result["finished"] and RunFolder(folder).columns() and os.environ.get("RANK", "0") == "0":
        from nicest.tasks.score import score_quantiles

        model = opened(folder, device, data=data)
        score_quantiles(model, model.draws())  # now, while the data is at hand
    return result


@command(app, show.evaluation, also=("targets", "labels"))
def evaluate(
    run: Any,
    split: options.Split = "test",
    draws: options.Draws = 8,
    baselines: Annotated[bool, typer.Option(help="Fit linear baselines and score them, too.")] = True,
    label: options.Label = None,
    data: options.Moved = None,
    seed: options.Seed = 0,
) -> Result:
    """Report the log-likelihood of a model, term by term, next to linear baselines.

    Example: nicest evaluate runs/demo
    """
    from nicest.tasks.evaluate import evaluate as run_evaluation

    return run_evaluation(run, split=split, draws=draws, seed=seed, with_baselines=baselines)


@command(app, show.samples, also=("labels",))
def sample(
    run: Any,
    n: Annotated[int, options.integer(1, 10**8, "Number of samples.", "-n")] = 100,
    where: Annotated[
        str | None,
        typer.Option(
            help="Conditions on columns of a table, joined by and: =, !=, <, <=, >, >=, in (...).", show_default=False
        ),
    ] = None,
    temperature: Annotated[float, options.real(0, 1000, "Multiplies the scale of the prior.")] = 1.0,
    label: options.Label = None,
    seed: options.Seed = 0,
    out: Annotated[
        Path | None,
        options.out_file(
            "A grid (.png), an array (.npy, .npz) or a table (.csv, .parquet).",
            rows=True,
            show_default="samples.png, samples.npy or samples.csv, depending on the data",
        ),
    ] = None,
) -> Result:
    """Draw samples from a trained model.

    Example: nicest sample runs/demo -n 100 --out grid.png

    Of a table: nicest sample runs/people -n 1000 --where 'age >= 30 and sex = "F" and income > 50000' --out rows.csv
    """
    from nicest.tasks.sample import sample as run_sampling

    return run_sampling(run, n, where=where, temperature=temperature, seed=seed, out=out)


@command(app, show.classification, also=("labels",))
def classify(
    run: Any,
    files: Annotated[
        list[Path] | None,
        options.given(
            "Arrays, images or folders of images.", show_default="a split of the run, whose labels are known"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        options.out_file(
            "A line per image (.csv, .parquet), or a figure (.png, .svg, .pdf) for a split.",
            show_default="classes.csv, or RUN/figures/classify.png",
        ),
    ] = None,
    split: options.Split = "test",
    draws: options.Draws = 8,
    data: options.Moved = None,
    seed: options.Seed = 0,
) -> Result:
    """Classify images by Bayes' rule, from their exact log-likelihood under each label.

    Example: nicest train digits-labels && nicest classify runs/digits-labels
    """
    from nicest.tasks.classify import classify as run_classification

    return run_classification(run, files or (), out=out, split=split, draws=draws, seed=seed)


@command(app, show.scores, also=("targets",))
def score(
    run: Any,
    files: Annotated[
        list[Path], options.given("Tables, arrays, images or folders of images.", place, show_default=False)
    ],
    out: Annotated[Path, options.out_file("The scores: .csv or .parquet.", rows=True)] = Path("scores.csv"),
    label: options.Label = None,
    draws: options.Draws = 8,
    seed: options.Seed = 0,
) -> Result:
    """Compute the log-density and the outlier score of every row or image.

    Example: nicest score runs/table new.parquet --out scores.parquet
    """
    from nicest.tasks.score import score as run_scoring

    return run_scoring(run, files, out=out, draws=draws, seed=seed)


@command(app, show.compressed, also=("labels",))
def compress(
    run: Any,
    files: Annotated[
        list[Path], options.given("Arrays, idx files or folders of images, or one table.", show_default=False)
    ],
    out: Annotated[Path, options.out_file("The compressed file.")] = Path("packed.nicest"),
    jobs: options.Jobs = 0,
) -> Result:
    """Compress images or a table without loss. You need the same model to decompress. Needs the extra `codec`.

    Example: nicest compress digits-conv images.npy --out packed.nicest
    """
    from nicest.codec.files import compress_files

    return compress_files(run, files, out=out, jobs=jobs)


@command(app, show.decompressed)
def decompress(
    packed: Annotated[Path, options.given("A file of `nicest compress`.", show_default=False)],
    out: Annotated[Path, options.out_file("Images as an array, .npy; a table in the format that it had.")] = Path(
        "images.npy"
    ),
    model: Annotated[
        Path | None, typer.Option("--run", help="The run that compressed it.", show_default="as the file says")
    ] = None,
    device: options.Device = "auto",
    jobs: options.Jobs = 0,
) -> Result:
    """Decompress a file of `nicest compress`. Rows in damaged blocks are left out, and the rest is written.

    Example: nicest decompress packed.nicest --out images.npy
    """
    from nicest.codec.files import decompress_file

    return decompress_file(packed, out=out, run=model, device=device, jobs=jobs)


@command(app, show.imputation, also=("labels",))
def impute(
    run: Any,
    table: Annotated[Path, options.given("A table with missing cells.", place, show_default=False)],
    out: Annotated[Path, options.out_file("The completed table.", rows=True)] = Path("imputed.csv"),
    cells: Annotated[
        Path | None, options.out_file("One line per imputed cell: value, interval, R-hat.", rows=True)
    ] = None,
    draws: Annotated[int, options.integer(16, 100_000, "Draws per row, a multiple of 4.")] = 400,
    steps: Annotated[int, options.integer(4, 1_000_000, "Maximum steps of each of a row's four MCMC chains.")] = 1000,
    interval: Annotated[float, options.real(0, 1, "Probability of the credible interval.")] = 0.9,
    seed: options.Seed = 0,
) -> Result:
    """Impute the missing cells of a table, with credible intervals. Observed cells stay as they are.

    Example: nicest impute runs/table holes.csv --out whole.csv --cells cells.csv
    """
    from nicest.tasks.impute_table import impute_table

    how: dict[str, Any] = {"draws": draws, "steps": steps, "interval": interval, "seed": seed}
    return impute_table(run, table, out=out, cells=cells, **how)


@command(app, show.predictions, also=("targets", "labels"))
def predict(
    run: Any,
    table: Annotated[Path, options.given("A table with the columns to predict from.", place, show_default=False)],
    out: Annotated[Path, options.out_file("The predictions.", rows=True)] = Path("predictions.csv"),
    interval: Annotated[float, options.real(0, 1, "Probability of the prediction interval.")] = 0.9,
    draws: Annotated[int, options.integer(0, 10_000, "Draws of the targets per row.")] = 0,
    picture: Annotated[Path | None, options.out_file("A figure of the intervals, for a numeric target.")] = None,
    seed: options.Seed = 0,
) -> Result:
    """Predict the target columns of a table: mean, median and interval, or probabilities for categories.

    Example: nicest train table --data houses.csv --target price --out runs/price && nicest predict runs/price new.csv
    """
    from nicest.tasks.predict import predict as run_prediction

    return run_prediction(run, table, out=out, level=interval, draws=draws, seed=seed, picture=picture)


@command(app, show.calibration)
def calibrate(
    run: Any,
    table: Annotated[
        Path | None,
        typer.Option(
            "--data",
            parser=lambda text: Path(options.to_read(text)),
            metavar="<path>",
            help="Rows that training has not seen: a table, an array, images.",
            show_default="the test split of the run",
        ),
    ] = None,
    out: Annotated[
        Path | None, options.out_folder("For calibration.png and calibration.json.", show_default="RUN/calibration")
    ] = None,
    cells: Annotated[int, options.integer(0, 1_000_000, "How many cells to hide and check.")] = 1000,
    draws: Annotated[int, options.integer(16, 100_000, "Draws per cell, a multiple of 4.")] = 100,
    steps: Annotated[int, options.integer(4, 1_000_000, "Steps of each of the four MCMC chains of a cell.")] = 200,
    label: options.Label = None,
    seed: options.Seed = 0,
) -> Result:
    """Check on held-out rows whether the credible intervals of a model contain the share of values they claim.

    Example: nicest calibrate runs/table --data new.parquet
    """
    from nicest.tasks.calibrate import calibrate as run_calibration

    return run_calibration(run, table, out=out, cells=cells, draws=draws, steps=steps, seed=seed)


@command(app, show.certificate, also=("labels",))
def certify(
    run: Any,
    n: Annotated[int, options.integer(2, 10_000, "Examples for the round trip: half data, half samples.", "-n")] = 200,
    jacobians: Annotated[int, options.integer(1, 1000, "Examples whose full Jacobian is computed.")] = 4,
    seed: options.Seed = 0,
) -> Result:
    """Measure how exactly a model inverts, and the error of its log-determinant, in every precision.

    Example: nicest certify runs/demo
    """
    from nicest.tasks.certify import certify as run_certification

    return run_certification(run, n=n, jacobians=jacobians, seed=seed)


@command(app, show.inpainting)
def inpaint(
    run: Any,
    mask: Annotated[
        list[str] | None,
        typer.Option(
            parser=options.to_read,
            help="What to hide: top, left, middle-rows, random:75, rows:0-14, box:7-21,7-21, several of them"
            " joined by +, an image or an .npy file; repeatable.",
            show_default="paper, the ten masks of its figure",
        ),
    ] = None,
    n: Annotated[int, options.integer(1, 100_000, "Images per mask.", "-n")] = 10,
    chains: Annotated[int, options.integer(1, 100, "Fillings of each image, each from its own start.")] = 1,
    draws: Annotated[
        bool,
        typer.Option("--draws", help="Draw fillings from the model's density given the rest, by MCMC chains."),
    ] = False,
    preset: Annotated[
        options.Preset, typer.Option(help="The schedule of the ascent: ours, or that of the authors' code.")
    ] = "ours",
    steps: Annotated[int | None, options.integer(1, 1_000_000, "Iterations.", show_default="the preset's")] = None,
    direction: Annotated[
        options.Direction | None,
        typer.Option(help="Follow the gradient, or Adam's direction.", show_default="the preset's"),
    ] = None,
    gradient_scale: Annotated[
        float | None, options.real(0, 1000, "Multiplies the direction.", show_default="the preset's")
    ] = None,
    noise: Annotated[
        float | None, options.real(0, 1000, "Multiplies the noise; 0 for none.", show_default="the preset's")
    ] = None,
    label: options.Label = None,
    split: options.Images = "test",
    data: options.Moved = None,
    seed: options.Seed = 0,
    out: Annotated[
        list[Path] | None,
        options.out_file(
            "The figure (.png, .svg, .pdf), an animation (.gif) or arrays (.npz); repeatable.",
            show_default="inpaint.png",
        ),
    ] = None,
) -> Result:
    """Hide part of each image and fill it in, by maximising the log-likelihood or by draws.

    Example: nicest inpaint runs/demo --mask left --mask random:75 --chains 4 --out a.png --out a.gif
    Example: nicest inpaint digits-conv --mask bottom --draws --chains 4
    """
    from nicest.tasks.inpaint import inpaint as run_inpainting

    ascent: dict[str, Any] = {"steps": steps, "direction": direction, "gradient_scale": gradient_scale, "noise": noise}
    which: dict[str, Any] = {"mask": mask or "paper", "n": n, "split": split, "out": out or "inpaint.png"}
    return run_inpainting(run, **which, chains=chains, draws=draws, preset=preset, seed=seed, **ascent)


@app.command()
def studio(
    runs: Annotated[list[Path], options.given("Run folders.", show_default=False)] = [Path("mnist")],  # noqa: B006
    host: Annotated[
        str, typer.Option(help="The address to listen on. Addresses that other machines can reach need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, options.integer(0, 65535, "The port; 0 picks a free one.")] = 8000,
    allow_host: Annotated[
        list[str],
        typer.Option(help="A name or address under which people reach the server; needed with --host 0.0.0.0."),
    ] = [],  # noqa: B006
    folder: Annotated[
        Path, typer.Option(help="Where trainings from the page keep their data and runs; those are served, too.")
    ] = Path("runs/studio"),
    browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    as_json: options.Json = False,
) -> None:
    """Open models of images and tables in the browser: inpaint, sample, score, impute, and train new ones.

    Without a run, you see the model of MNIST that comes with nicest. Example: nicest studio runs/demo --open
    """
    for run in runs:
        if run.is_file() and run.suffix.lower() in (".csv", ".parquet", ".arrow", ".feather", ".xlsx", ".xls"):
            raise NicestError(
                f"{run} is a table, not a model: train one with `nicest train table --data {run}`, or start"
                " `nicest studio --open` and drop the file under New model"
            )
    from nicest.studio.server import is_loopback, serve

    def ready(url: str) -> None:
        if not is_loopback(host):
            print(
                f"warning: on {host} anyone who knows the address and its token can use the studio, and the connection"
                " is not encrypted; with 127.0.0.1 only you can",
                file=sys.stderr,
            )
        result = {"url": url, "runs": [str(run) for run in runs]}
        emit(result, as_json, lambda result: print(f"{result['url']}  (Ctrl-C stops it)"))
        sys.stdout.flush()

    debug = "--debug" in sys.argv
    serve(runs, folder=folder, host=host, port=port, allowed=allow_host, browser=browser, debug=debug, ready=ready)
