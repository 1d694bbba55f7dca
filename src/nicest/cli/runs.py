"""Commands of a run: make one, and what can be done with it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nicest.cli.base import (
    Device,
    Direction,
    Json,
    Moved,
    Preset,
    Run,
    Seed,
    Set,
    Split,
    Verify,
    app,
    emit,
    interrupted,
    located,
    opened,
)
from nicest.cli.show import (
    show_certificate,
    show_demo,
    show_evaluation,
    show_imputation,
    show_inpainting,
    show_recipes,
    show_scores,
    show_training,
)
from nicest.errors import NicestError


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The run folder.")] = Path("runs/demo"),
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train on the embedded digits, evaluate, certify, and draw the figures.

    Example: nicest demo
    """
    from nicest.tasks.demo import demo as run_demo

    result = run_demo(out, device=device)
    if not result["training"]["finished"]:
        interrupted(result["training"], as_json)
    emit(result, as_json, show_demo)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Show one recipe whole, every field with its meaning.")] = None,
    as_json: Json = False,
) -> None:
    """List the recipes, with the figures expected of them.

    Example: nicest recipes mnist
    """
    from nicest.recipes import load_recipe, names

    if name:
        recipe = load_recipe(name)
        emit({"name": recipe.name, "toml": recipe.to_toml()}, as_json, lambda result: print(result["toml"], end=""))
        return
    fields = ("name", "title", "reading", "paper_nats", "expected_nats")
    rows = [{field: getattr(load_recipe(each), field) for field in fields} for each in names()]
    emit({"recipes": rows}, as_json, show_recipes)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe by name, or a .toml file.", show_default=False)],
    data: Annotated[
        str | None,
        typer.Option(help="Your own data: a table (.csv, .parquet, .arrow), .npy, .npz, a folder of images."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder.", show_default="runs/RECIPE")] = None,
    change: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard", help="Write curves for TensorBoard to RUN/tensorboard; needs the extra `loggers`."
        ),
    ] = False,
    private: Annotated[
        bool,
        typer.Option("--private", help="Record no command, host name, user name or absolute path in the run folder."),
    ] = False,
    device: Device = "auto",
    as_json: Json = False,
    verify: Verify = None,
) -> None:
    """Train a model; Ctrl-C saves and leaves, --resume goes on exactly where it stopped.

    Example: nicest train mnist --set train.epochs=50

    On several GPUs: torchrun --nproc-per-node 8 -m nicest train tfd
    """
    from nicest.recipes import load_recipe

    loaded = load_recipe(recipe)
    overrides = list(change or [])
    if data:
        overrides.append(f"data.name={json.dumps(located(data), ensure_ascii=False)}")
    folder = out or Path("runs") / loaded.name
    if verify and not resume:
        raise NicestError("--verify is of the run that --resume goes on with: a new one has nothing to check")
    if private and resume:
        raise NicestError("--private is for a new run: a resumed one stays as it was begun; leave --private out")
    if private and tensorboard:
        raise NicestError("TensorBoard names its files after the host: leave out --tensorboard or --private")
    from nicest.runs.folder import RunFolder  # after the recipe: it takes two seconds
    from nicest.train.callbacks import ProgressBar, TensorBoard
    from nicest.train.fit import train as run_training

    callbacks: list[Any] = [ProgressBar()]
    if tensorboard:
        callbacks.append(TensorBoard(folder / "tensorboard"))
    asked = {"resume": resume, "device": device, "callbacks": callbacks, "verify": verify, "private": private}
    result = run_training(loaded, folder, overrides=tuple(overrides), **asked)  # type: ignore[arg-type]
    if not result["finished"]:
        interrupted(result, as_json)
    if RunFolder(folder).columns() and os.environ.get("RANK", "0") == "0":
        from nicest.tasks.score import training_quantiles

        model = opened(folder, device, data=data)
        training_quantiles(model, model.draws())  # now, while the data is at hand
    emit(result, as_json, show_training)


@app.command()
def evaluate(
    run: Run,
    split: Annotated[Split, typer.Option(help="Which examples.")] = Split.test,
    draws: Annotated[int, typer.Option(min=1, help="Draws of the dequantisation noise to average over.")] = 8,
    baselines: Annotated[bool, typer.Option(help="Fit the linear baselines and score them beside.")] = True,
    data: Moved = None,
    seed: Seed = 0,
    device: Device = "auto",
    verify: Verify = None,
    as_json: Json = False,
) -> None:
    """The log-likelihood of a trained model, term by term, beside linear baselines.

    Example: nicest evaluate runs/demo
    """
    from nicest.tasks.evaluate import evaluate as run_evaluation

    result = run_evaluation(
        opened(run, device, verify, data), split=split, draws=draws, seed=seed, with_baselines=baselines
    )
    emit(result, as_json, show_evaluation)


@app.command()
def sample(
    run: Run,
    n: Annotated[int, typer.Option("-n", min=1, help="How many.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="Multiplies the scale of the prior.")] = 1.0,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A grid (.png), an array (.npy, .npz) or a table (.csv, .parquet).",
            show_default="samples.png, .npy or .csv, by what the model is of",
        ),
    ] = None,
    device: Device = "auto",
    verify: Verify = None,
    as_json: Json = False,
) -> None:
    """Draw samples from a trained model.

    Example: nicest sample runs/demo -n 100 --out grid.png
    """
    from nicest.tasks.sample import sample as run_sampling

    result = run_sampling(opened(run, device, verify), n, temperature=temperature, seed=seed, out=out)
    emit(result, as_json, lambda result: print(f"{result['n']} samples in {result['out']}"))


@app.command()
def score(
    run: Run,
    files: Annotated[
        list[Path], typer.Argument(help="Tables, arrays, images or folders of images.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The scores: .csv or .parquet.")] = Path("scores.csv"),
    draws: Annotated[int, typer.Option(min=1, help="Draws of the dequantisation noise to average over.")] = 8,
    seed: Seed = 0,
    device: Device = "auto",
    verify: Verify = None,
    as_json: Json = False,
) -> None:
    """The log-density of every row or image of files, and how it lies among those of training.

    Example: nicest score runs/table new.parquet --out scores.parquet
    """
    from nicest.tasks.score import own_device
    from nicest.tasks.score import score as run_scoring

    result = run_scoring(opened(run, own_device(device), verify), files, out=out, draws=draws, seed=seed)
    emit(result, as_json, show_scores)


@app.command()
def impute(
    run: Run,
    table: Annotated[Path, typer.Argument(help="A table with missing cells.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The table filled in.")] = Path("imputed.csv"),
    cells: Annotated[Path | None, typer.Option(help="A line for each cell: value, low, high, R-hat.")] = None,
    draws: Annotated[int, typer.Option(min=16, help="Draws of each row, a multiple of 4.")] = 400,
    steps: Annotated[int, typer.Option(min=4, help="Steps of each of the four chains of a row.")] = 1500,
    interval: Annotated[float, typer.Option(min=0.0, max=1.0, help="Probability between low and high.")] = 0.9,
    seed: Seed = 0,
    device: Device = "auto",
    verify: Verify = None,
    as_json: Json = False,
) -> None:
    """Fill in the missing cells of a table, with their uncertainty; what is there stays as it is.

    Example: nicest impute runs/table holes.csv --out whole.csv --cells cells.csv
    """
    from nicest.tasks.impute_table import impute_table

    result = impute_table(
        opened(run, device, verify),
        table,
        out=out,
        cells=cells,
        draws=draws,
        steps=steps,
        interval=interval,
        seed=seed,
    )
    emit(result, as_json, show_imputation)


@app.command()
def certify(
    run: Run,
    n: Annotated[int, typer.Option("-n", min=2, help="Examples for the round trip, half real, half sampled.")] = 200,
    jacobians: Annotated[int, typer.Option(min=1, help="Examples whose whole Jacobian is computed.")] = 4,
    seed: Seed = 0,
    device: Device = "auto",
    verify: Verify = None,
    as_json: Json = False,
) -> None:
    """Measure that a model inverts and counts its volume right, at every precision it is used in.

    Example: nicest certify runs/demo
    """
    from nicest.tasks.certify import certify as run_certification

    result = run_certification(opened(run, device, verify), n=n, jacobians=jacobians, seed=seed)
    emit(result, as_json, show_certificate)


@app.command()
def inpaint(
    run: Run,
    mask: Annotated[
        list[str] | None,
        typer.Option(
            help="What is hidden, repeatable: top, left, middle-rows, random:75, rows:0-14, box:7-21,7-21, several"
            " joined by +, a picture, an .npy file.",
            show_default="paper, the ten of the figure",
        ),
    ] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Images under each mask.")] = 10,
    chains: Annotated[int, typer.Option(min=1, help="Ascents of every image, each from its own start.")] = 1,
    preset: Annotated[Preset, typer.Option(help="How to climb: our way, or as the authors' code does.")] = Preset.ours,
    steps: Annotated[int | None, typer.Option(min=1, help="Iterations.", show_default="the preset's")] = None,
    direction: Annotated[
        Direction | None, typer.Option(help="The gradient, or Adam's.", show_default="the preset's")
    ] = None,
    gradient_scale: Annotated[
        float | None, typer.Option(help="Multiplies the direction.", show_default="the preset's")
    ] = None,
    noise: Annotated[
        float | None, typer.Option(min=0.0, help="Multiplies the noise, 0 for none.", show_default="the preset's")
    ] = None,
    split: Annotated[Split, typer.Option(help="Which examples.")] = Split.test,
    data: Moved = None,
    seed: Seed = 0,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            help="The figure (.png, .svg, .pdf), a film of it (.gif) or arrays (.npz); repeatable.",
            show_default="inpaint.png",
        ),
    ] = None,
    device: Device = "auto",
    verify: Verify = None,
    as_json: Json = False,
) -> None:
    """Hide a part of images and find it again, by climbing the log-likelihood in what is hidden.

    Example: nicest inpaint runs/demo --mask left --mask random:75 --chains 4 --out a.png --out a.gif
    """
    from nicest.tasks.inpaint import inpaint as run_inpainting

    result = run_inpainting(
        opened(run, device, verify, data),
        mask=mask or "paper",
        n=n,
        chains=chains,
        preset=preset,
        steps=steps,
        direction=direction,
        gradient_scale=gradient_scale,
        noise=noise,
        split=split,
        seed=seed,
        out=out or "inpaint.png",
    )
    emit(result, as_json, show_inpainting)


@app.command()
def studio(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", show_default=False)],
    host: Annotated[
        str, typer.Option(help="The address to listen on; others than this machine's own are warned of.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for any that is free.")] = 8000,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    as_json: Json = False,
) -> None:
    """Models in the browser: paint and fill in, walk the manifold, read the likelihood of your own images.

    Example: nicest studio runs/demo --open
    """
    try:
        from nicest.studio.server import is_loopback, serve
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("nicest"):
            raise
        raise NicestError(f"the studio needs {error.name}: pip install 'nicest[studio]'") from error
    if not is_loopback(host):
        print(
            f"warning: on {host} anyone who reaches this machine may use the studio; 127.0.0.1 is for you alone",
            file=sys.stderr,
        )

    def ready(url: str) -> None:
        result = {"url": url, "runs": [str(run) for run in runs]}
        emit(result, as_json, lambda result: print(f"{result['url']}  (Ctrl-C ends it)"))
        sys.stdout.flush()

    serve(runs, host=host, port=port, browser=browser, ready=ready)
