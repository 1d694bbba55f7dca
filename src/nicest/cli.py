"""The command line: it parses, calls one function, and prints. torch is imported by the commands, not by --help."""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from nicest import __version__
from nicest.errors import NicestError
from nicest.files import to_json

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Exact-likelihood density models by invertible coupling layers (NICE).",
    epilog="Any command takes --debug, for a traceback where there would be one line.",
)
data_app = typer.Typer(no_args_is_help=True, help="The data sets: what there is, fetch one, check one.")
app.add_typer(data_app, name="data")


class RunFirst(TyperGroup):
    """Commands of a run that take it before their name too: `latent RUN sphere` is `latent sphere RUN`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if len(args) > 1 and args[1] in self.commands and args[0] not in self.commands:
            args = [args[1], args[0], *args[2:]]
        return super().parse_args(ctx, args)


latent_app = typer.Typer(
    cls=RunFirst,
    no_args_is_help=True,
    help="Look inside a trained model: its spectrum, a sphere, ways between images, codes cut short.",
    epilog="The run may stand first: nicest latent runs/demo sphere",
)
app.add_typer(latent_app, name="latent")
reproduce_app = typer.Typer(no_args_is_help=True, help="The paper's tables and figures, from nothing.")
app.add_typer(reproduce_app, name="reproduce")
compare_app = typer.Typer(no_args_is_help=True, help="NICE beside what people use for tables instead.")
app.add_typer(compare_app, name="compare")

Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting, repeatable: train.epochs=50. `nicest recipes NAME` lists all."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1; auto takes a GPU where there is one.")]
Run = Annotated[Path, typer.Argument(help="A run folder.", show_default=False)]
Verify = Annotated[
    bool, typer.Option("--verify", help="Refuse a model that is not the file training wrote, by its SHA-256.")
]
Seed = Annotated[int, typer.Option(help="Seed of the random numbers.")]
Tables = Annotated[list[str] | None, typer.Argument(help="Which tables.", show_default="all of them")]
Splittings = Annotated[int, typer.Option(min=1, help="Splits of each table.")]
Record = Annotated[Path | None, typer.Option(help="A JSON file to write.", show_default=False)]


class Split(StrEnum):
    train = "train"
    valid = "valid"
    test = "test"


class Preset(StrEnum):
    ours = "ours"
    authors = "authors"


class Direction(StrEnum):
    adam = "adam"
    gradient = "gradient"


class Basis(StrEnum):
    random = "random"
    top = "top"


class Way(StrEnum):
    straight = "straight"
    spherical = "spherical"


def _figure(look: str) -> Any:
    """The option of a picture that goes into the run folder unless told otherwise."""
    return typer.Option(help="A picture, or arrays (.npz).", show_default=f"RUN/figures/{look}.png")


def verifiable(command: Callable[..., None]) -> Callable[..., None]:
    """A command of a run, which takes --verify too."""

    @functools.wraps(command)
    def verified(*, verify: bool, **given: Any) -> None:
        if verify:
            from nicest.train.checkpoint import RunFolder

            RunFolder(given["run"]).verify()
        command(**given)

    signature = inspect.signature(command, eval_str=True)
    option = inspect.Parameter("verify", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Verify)
    verified.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), option]
    )
    return verified


def main() -> None:
    """Run the command line; an error is one line on standard error, and a traceback only with --debug."""
    debug = "--debug" in sys.argv
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    arguments = [each for each in sys.argv[1:] if each != "--debug"]
    if not _is_first("LOCAL_RANK"):  # one process speaks for all of a machine, unless another alone fails
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    try:
        app(arguments)
    except NicestError as error:
        if debug:
            raise
        _fail(str(error))
    except Exception as error:
        if debug:
            raise
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
            _fail(f"out of memory: ask for less at once, or choose --device cpu ({_one_line(error)})")
        _fail(f"{type(error).__name__}: {_one_line(error)} (this should not happen: --debug shows where)")


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"nicest {__version__}")
        raise typer.Exit


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
        _interrupted(result["training"], as_json)
    _emit(result, as_json, _show_demo)


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
        _emit({"name": recipe.name, "toml": recipe.to_toml()}, as_json, lambda result: print(result["toml"], end=""))
        return
    fields = ("name", "title", "reading", "paper_nats", "expected_nats")
    rows = [{field: getattr(load_recipe(each), field) for field in fields} for each in names()]
    _emit({"recipes": rows}, as_json, _show_recipes)


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
    device: Device = "auto",
    as_json: Json = False,
    verify: Verify = False,
) -> None:
    """Train a model; Ctrl-C saves and leaves, --resume goes on exactly where it stopped.

    Example: nicest train mnist --set train.epochs=50

    On several GPUs: torchrun --nproc-per-node 8 -m nicest train tfd
    """
    from nicest.recipes import load_recipe

    loaded = load_recipe(recipe)
    overrides = list(change or [])
    if data:
        path = Path(data)
        name = str(path.resolve()) if path.exists() else data
        overrides.append(f"data.name={json.dumps(name, ensure_ascii=False)}")
    folder = out or Path("runs") / loaded.name
    if verify and not resume:
        raise NicestError("--verify is of the run that --resume goes on with: a new one has nothing to check")
    from nicest.train.checkpoint import LAST, MODEL, RunFolder  # after the recipe: it takes two seconds
    from nicest.train.loop import train as run_training

    if verify:
        RunFolder(folder).verify(LAST, MODEL)
    result = run_training(loaded, folder, overrides=tuple(overrides), resume=resume, device=device)
    if not result["finished"]:
        _interrupted(result, as_json)
    if RunFolder(folder).columns() and os.environ.get("RANK", "0") == "0":
        from nicest.tasks.score import remember_scores

        remember_scores(folder, device=device)
    _emit(result, as_json, _show_training)


@app.command()
@verifiable
def evaluate(
    run: Run,
    split: Annotated[Split, typer.Option(help="Which examples.")] = Split.test,
    draws: Annotated[int, typer.Option(min=1, help="Draws of the dequantisation noise to average over.")] = 8,
    baselines: Annotated[bool, typer.Option(help="Fit the linear baselines and score them beside.")] = True,
    seed: Seed = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """The log-likelihood of a trained model, term by term, beside linear baselines.

    Example: nicest evaluate runs/demo
    """
    from nicest.tasks.evaluate import evaluate as run_evaluation

    result = run_evaluation(run, split=split, draws=draws, seed=seed, device=device, with_baselines=baselines)
    _emit(result, as_json, _show_evaluation)


@app.command()
@verifiable
def sample(
    run: Run,
    n: Annotated[int, typer.Option("-n", min=1, help="How many.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="Multiplies the scale of the prior.")] = 1.0,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="A grid (.png), an array (.npy, .npz) or a table (.csv, .parquet).")] = Path(
        "samples.png"
    ),
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Draw samples from a trained model.

    Example: nicest sample runs/demo -n 100 --out grid.png
    """
    from nicest.tasks.sample import sample as run_sampling

    result = run_sampling(run, n, temperature=temperature, seed=seed, out=out, device=device)
    _emit(result, as_json, lambda result: print(f"{result['n']} samples in {result['out']}"))


@app.command()
@verifiable
def score(
    run: Run,
    files: Annotated[
        list[Path], typer.Argument(help="Tables, arrays, images or folders of images.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The scores: .csv or .parquet.")] = Path("scores.csv"),
    draws: Annotated[int, typer.Option(min=1, help="Draws of the dequantisation noise to average over.")] = 8,
    seed: Seed = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """The log-density of every row or image of files, and how it lies among those of training.

    Example: nicest score runs/table new.parquet --out scores.parquet
    """
    from nicest.tasks.score import score as run_scoring

    result = run_scoring(run, files, out=out, draws=draws, seed=seed, device=device)
    _emit(result, as_json, _show_scores)


@app.command()
@verifiable
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
    as_json: Json = False,
) -> None:
    """Fill in the missing cells of a table, with their uncertainty; what is there stays as it is.

    Example: nicest impute runs/table holes.csv --out whole.csv --cells cells.csv
    """
    from nicest.tasks.impute_table import impute_table

    result = impute_table(
        run,
        table,
        out=out,
        cells=cells,
        draws=draws,
        steps=steps,
        interval=interval,
        seed=seed,
        device=device,
    )
    _emit(result, as_json, _show_imputation)


@app.command()
@verifiable
def certify(
    run: Run,
    n: Annotated[int, typer.Option("-n", min=2, help="Examples for the round trip, half real, half sampled.")] = 200,
    jacobians: Annotated[int, typer.Option(min=1, help="Examples whose whole Jacobian is computed.")] = 4,
    seed: Seed = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure that a model inverts and counts its volume right, at every precision it is used in.

    Example: nicest certify runs/demo
    """
    from nicest.tasks.certify import certify as run_certification

    result = run_certification(run, n=n, jacobians=jacobians, seed=seed, device=device)
    _emit(result, as_json, _show_certificate)


@app.command()
@verifiable
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
    seed: Seed = 0,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            help="The figure (.png, .svg, .pdf), a film of it (.gif) or arrays (.npz); repeatable.",
            show_default="inpaint.png",
        ),
    ] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Hide a part of images and find it again, by climbing the log-likelihood in what is hidden.

    Example: nicest inpaint runs/demo --mask left --mask random:75 --chains 4 --out a.png --out a.gif
    """
    from nicest.tasks.inpaint import inpaint as run_inpainting

    result = run_inpainting(
        run,
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
        device=device,
    )
    _emit(result, as_json, _show_inpainting)


@latent_app.command()
@verifiable
def spectrum(
    run: Run,
    pca: Annotated[bool, typer.Option(help="The spectrum of a PCA of the training data beside it.")] = True,
    out: Annotated[Path | None, _figure("spectrum")] = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """The sorted sigma_d of the scaling layer: how much each component may vary.

    Example: nicest latent spectrum runs/demo
    """
    from nicest.tasks.latent import spectrum as run_spectrum

    result = run_spectrum(run, pca=pca, out=out, device=device)
    _emit(result, as_json, lambda result: print(f"spectrum in {result['out']}"))


@latent_app.command()
@verifiable
def sphere(
    run: Run,
    basis: Annotated[
        Basis, typer.Option(help="Around which axes: random ones, or the components of largest sigma_d.")
    ] = Basis.random,
    radius: Annotated[
        float | None, typer.Option(help="In units of the prior.", show_default="the typical norm of its draws")
    ] = None,
    grid: Annotated[int, typer.Option(min=1, help="Images a side.")] = 10,
    seed: Seed = 0,
    out: Annotated[Path | None, _figure("sphere")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """A sphere of three dimensions in latent space, decoded: neighbours on it are neighbours in the picture.

    Example: nicest latent sphere runs/demo --basis top
    """
    from nicest.tasks.latent import sphere as run_sphere

    result = run_sphere(run, basis=basis, radius=radius, grid=grid, seed=seed, out=out, device=device)
    _emit(result, as_json, lambda result: print(f"sphere of radius {result['radius']:.2f} in {result['out']}"))


@latent_app.command()
@verifiable
def interpolate(
    run: Run,
    start: Annotated[
        list[int] | None,
        typer.Option("--from", help="An image by its place in the split; repeatable.", show_default="0, 2, 4, 6, 8"),
    ] = None,
    end: Annotated[
        list[int] | None,
        typer.Option("--to", help="Where the way from it ends; as often.", show_default="1, 3, 5, 7, 9"),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Images of a way, both ends among them.")] = 10,
    way: Annotated[
        Way, typer.Option(help="A straight line of codes, or one that turns around the prior's mode.")
    ] = Way.straight,
    split: Annotated[Split, typer.Option(help="Which examples.")] = Split.test,
    out: Annotated[Path | None, _figure("interpolate")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """From one image to another through latent space, and beside it through pixels.

    Example: nicest latent interpolate runs/demo --from 3 --to 8 --from 4 --to 5
    """
    from nicest.tasks.latent import interpolate as run_interpolation

    if len(start or []) != len(end or []):
        raise NicestError(f"expected as many --to as --from, got {len(end or [])} and {len(start or [])}")
    pairs = list(zip(start or [], end or [], strict=True)) or None
    result = run_interpolation(run, pairs=pairs, steps=steps, way=way, split=split, out=out, device=device)
    _emit(result, as_json, lambda result: print(f"{len(result['pairs'])} ways in {result['out']}"))


@latent_app.command()
@verifiable
def truncate(
    run: Run,
    n: Annotated[int, typer.Option("-n", min=1, help="Images in the picture.")] = 8,
    keep: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Components to keep, repeatable.", show_default="0, 1, 2, 5, 10, ... 200, all"),
    ] = None,
    split: Annotated[Split, typer.Option(help="Which examples.")] = Split.test,
    out: Annotated[Path | None, _figure("truncate")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """What is left of images when only the components of largest sigma_d are kept, beside a PCA's.

    Example: nicest latent truncate runs/demo -n 8
    """
    from nicest.tasks.latent import truncate as run_truncation

    _emit(run_truncation(run, n=n, kept=keep, split=split, out=out, device=device), as_json, _show_truncation)


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
        _emit(result, as_json, lambda result: print(f"{result['url']}  (Ctrl-C ends it)"))
        sys.stdout.flush()

    serve(runs, host=host, port=port, browser=browser, ready=ready)


@app.command()
def bench(
    net: Annotated[list[str] | None, typer.Option(help="mnist (the default), cifar10 or small; repeatable.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Batch size, 200 by default; repeatable.")] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows whose median is taken.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.0, help="Length of a window.")] = 0.3,
    study: Annotated[bool, typer.Option("--study", help="How cost grows with each size, instead.")] = False,
    out: Annotated[Path | None, typer.Option(help="A picture of it.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Time this library, the installed peers (nicest[bench]) and the floor of the hardware, in one run.

    Example: nicest bench --net mnist --batch 200 --batch 2048
    """
    from nicest.tasks.bench import bench as run_bench

    asked = {"windows": windows, "seconds": seconds, "device": device, "out": out}
    if study:
        from nicest.tasks.study import study as run_study

        small = net == ["small"]
        _emit(run_study(**asked, small=small), as_json, _show_study)  # type: ignore[arg-type]
        return
    _emit(run_bench(net or ["mnist"], batch or [200], **asked), as_json, _show_bench)  # type: ignore[arg-type]


@compare_app.command("density")
def compare_density(
    tables: Tables = None,
    seeds: Splittings = 3,
    out: Record = None,
    as_json: Json = False,
) -> None:
    """Log-density of held-out rows: NICE, Gaussians, mixtures, kernels, and zuko's flows if it is installed.

    Example: nicest compare density iris wine
    """
    from nicest.tasks.compare import compare_density as run_comparison
    from nicest.tasks.compare import markdown

    result = run_comparison(tables=tuple(tables or ()), seeds=seeds, out=out)
    _emit(result, as_json, lambda result: print(markdown(result)))


@compare_app.command("imputation")
def compare_imputation(
    tables: Tables = None,
    seeds: Splittings = 3,
    out: Record = None,
    as_json: Json = False,
) -> None:
    """Missing cells found again: NICE, column means, nearest neighbours, chained regressions. It takes minutes.

    Example: nicest compare imputation wine --seeds 1
    """
    from nicest.tasks.compare_imputation import SETS, imputation, markdown

    result = imputation(tables or SETS, range(seeds), out=out)
    _emit(result, as_json, lambda result: print(markdown(result)))


@compare_app.command("outliers")
def compare_outliers(
    tables: Tables = None,
    seeds: Splittings = 3,
    out: Record = None,
    as_json: Json = False,
) -> None:
    """Outliers found, as ROC AUC: NICE's density and typicality, and four detectors of scikit-learn.

    Example: nicest compare outliers wine moons
    """
    from nicest.tasks.compare_outliers import compare_outliers as run_comparison
    from nicest.tasks.compare_outliers import markdown, verdict

    result = run_comparison(tables=tuple(tables or ()), seeds=seeds, out=out)
    _emit(result, as_json, lambda result: print(markdown(result), verdict(result), result["caveat"], sep="\n\n"))


@reproduce_app.command("table")
def reproduce_table(
    recipe: Annotated[list[str] | None, typer.Option(help="One row of the table; repeatable. All by default.")] = None,
    seeds: Annotated[int, typer.Option(min=0, help="Seeds of every row; 0 for the plan's own numbers.")] = 0,
    runs: Annotated[Path, typer.Option(help="Where the runs are, or will be.")] = Path("runs/reproduce"),
    overrides: Set = None,
    out: Annotated[Path, typer.Option(help="The figures, as JSON.")] = Path("results/table.json"),
    page: Annotated[Path | None, typer.Option(help="A page of them, in Markdown.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train and evaluate every row of the paper's tables, in the text's reading, the released code's and ours.

    What is there is kept, what was cut off goes on, and what cannot be made here is named.

    Example: nicest reproduce table --recipe mnist-best --page docs/results.md
    """
    from nicest.tasks.reproduce import table

    asked = {"seeds": seeds, "runs": runs, "out": out, "page": page, "device": device}
    result = table(recipe or [], overrides=tuple(overrides or ()), **asked)  # type: ignore[arg-type]
    _emit(result, as_json, _show_results)
    _leave_unfinished(result)


@reproduce_app.command("figures")
def reproduce_figures(
    recipe: Annotated[list[str] | None, typer.Option(help="Whose figures; repeatable. Ours by default.")] = None,
    runs: Annotated[Path, typer.Option(help="Where the runs are, or will be.")] = Path("runs/reproduce"),
    overrides: Set = None,
    out: Annotated[Path, typer.Option(help="A folder for the pictures.")] = Path("results/figures"),
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Draw every figure of the paper: samples, inpainting, spheres, spectra; and interpolation, truncation, curves.

    Example: nicest reproduce figures --recipe digits
    """
    from nicest.tasks.reproduce import figures

    asked = {"runs": runs, "out": out, "device": device}
    result = figures(recipe or [], overrides=tuple(overrides or ()), **asked)  # type: ignore[arg-type]
    _emit(result, as_json, _show_figures)
    _leave_unfinished(result)


@reproduce_app.command("vae")
def reproduce_vae(
    recipe: Annotated[str, typer.Option(help="Whose data.")] = "mnist",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each model.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each training.")] = 10_000,
    out: Annotated[Path, typer.Option(help="The figures, as JSON.")] = Path("results/vae.json"),
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train a VAE as NICE (App. C), and with a NICE posterior or prior, alike, and compare their bounds.

    Example: nicest reproduce vae --recipe digits --seeds 1
    """
    from nicest.files import to_json, write_text
    from nicest.tasks.vae import study

    write_text(out, to_json({}))  # what cannot be written is refused before anything is trained
    result = study(recipe, seeds=range(seeds), steps=steps, device=device)
    write_text(out, to_json({"command": shlex.join(["nicest", *sys.argv[1:]])} | result))
    _emit(result | {"out": str(out)}, as_json, _show_vae)


@data_app.command("list")
def data_list(as_json: Json = False) -> None:
    """The data sets by name, and which are here."""
    from nicest.data.download import list_sets

    _emit({"sets": [row._asdict() for row in list_sets()]}, as_json, _show_sets)


@data_app.command("get")
def data_get(name: Annotated[str, typer.Argument(help="A data set by name.")], as_json: Json = False) -> None:
    """Fetch a data set and check it against its published checksums.

    Example: nicest data get mnist
    """
    from nicest.data.download import get

    _emit({"name": name, "folder": str(get(name))}, as_json, lambda result: print(f"{name} in {result['folder']}"))


@data_app.command("check")
def data_check(name: Annotated[str, typer.Argument(help="A data set by name.")], as_json: Json = False) -> None:
    """Check the files of a data set against their published checksums."""
    from nicest.data.download import check

    files = [{"file": file, "status": status} for file, status in check(name)]
    _emit({"name": name, "files": files}, as_json, _show_check)
    if any(each["status"] != "ok" for each in files):
        raise typer.Exit(1)


def _is_first(variable: str) -> bool:
    """Whether this is the only process, or the first of those that torchrun counts by a variable."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get(variable, "0") == "0"


def _emit(result: Mapping[str, Any], as_json: bool, show: Callable[[Any], None]) -> None:
    if not _is_first("RANK"):
        return
    if as_json:
        print(to_json(result, indent=None), end="")
    else:
        show(result)


def _fail(message: str, code: int = 1) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _leave_unfinished(result: Mapping[str, Any]) -> None:
    if "unfinished" in result:
        raise typer.Exit(130)


def _interrupted(training: Mapping[str, Any], as_json: bool) -> NoReturn:
    text = f"stopped at step {training['step']}, all saved in {training['run']}: --resume goes on"
    _emit(training, as_json, lambda _: print(text))
    raise typer.Exit(130)


NUMBERS = {"nats", "this model is ahead by", "D", "examples", "paper, nats", "measured, nats"}
NUMBERS |= {"start, nats", "end, nats", "truth, nats", "gain, nats", "above truth", "kept", "NICE", "PCA"}
NUMBERS |= {"batch", "microseconds", "times the floor", "seconds to the first step"}


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(header_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in NUMBERS else "left")
    return table


def _print(*items: Any) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for item in items:
        console.print(item)


def _show_training(result: Mapping[str, Any]) -> None:
    best = f"{result['best_nats']:.2f} nats on validation, epoch {result['best_epoch']} of {result['epochs']}"
    print(f"{result['run']}: best {best}, {result['seconds']:.0f} s")
    print(f"next: nicest evaluate {result['run']}")


def _show_scores(result: Mapping[str, Any]) -> None:
    mean = "" if result["mean_nats"] is None else f", {result['mean_nats']:.3f} nats in mean"
    print(f"{result['rows']:,} rows scored in {result['out']}{mean}")
    if result["missing"]:
        print(f"{result['missing']:,} rows have missing cells and no score: `nicest impute` fills them in")
    if result["unknown"]:
        print(f"{result['unknown']:,} rows hold a value that training never saw: -inf")
    print(result["caveat"])


def _show_imputation(result: Mapping[str, Any]) -> None:
    print(f"{result['filled']:,} cells of {result['rows_filled']:,} rows filled in, in {result['out']}")
    if result["unknown"]:
        print(f"{result['unknown']:,} rows hold a value that training never saw, and were left as they are")
    if result["not_mixed"]:
        print(f"the chains of {result['not_mixed']:,} rows did not agree (R-hat above 1.1): take more --steps")


def _show_evaluation(result: Mapping[str, Any]) -> None:
    from nicest.tasks.evaluate import WHY_POSITIVE, WHY_POSITIVE_CONTINUOUS

    unit = f"on {result['interval']}" if result["interval"] else "in the units of the data"
    ledger = _table("", "nats")
    for name, value in result["terms"].items():
        ledger.add_row(name, f"{value:+.2f}")
    error = f" ± {result['stderr_nats']:.2f}" if math.isfinite(result["stderr_nats"]) else ""
    ledger.add_row(f"[bold]log-likelihood {unit}[/]", f"[bold]{result['mean_nats']:.2f}{error}[/]")
    for name, value in result["level_terms"].items():
        ledger.add_row(name, f"{value:+.2f}")
    if result["level_terms"]:
        ledger.add_row("log-likelihood of the levels", f"{result['level_nats']:.2f}")
    ledger.add_row("[bold]bits/dim[/]", f"[bold]{result['bits_per_dim']:.4f}[/]")
    beside = _table("beside it", "nats", "this model is ahead by")
    rows = {name.replace("_", " "): nats for name, nats in result["baselines"].items()}
    if result["paper_nats"] is not None:
        rows["the paper's figure"] = result["paper_nats"]
    for name, nats in rows.items():
        if math.isfinite(nats):
            beside.add_row(name, f"{nats:.2f}", f"{result['mean_nats'] - nats:+.2f}")
        else:
            beside.add_row(name, "–", "dependent columns, or too few rows")
    data = f"{Path(result['dataset']).name}, {result['split']} split"
    print(f"{data}: {result['n']} examples, noise drawn {result['draws']} times, D = {result['dim']}")
    _print("", ledger, "", *([beside, ""] if rows else []))
    _print(WHY_POSITIVE if result["interval"] else WHY_POSITIVE_CONTINUOUS)
    if result["non_finite"]:
        _print(f"[bold red]{result['non_finite']} examples have a non-finite likelihood, and so has the mean[/]")


def _show_certificate(result: Mapping[str, Any]) -> None:
    table = _table("precision", "round trip", "log-det error, nats")
    for row in zip(result["dtype"], result["max_roundtrip"], result["max_logdet_error"], strict=True):
        table.add_row(row[0], f"{row[1]:.1e}", f"{row[2]:.1e}")
    data = Path(result["dataset"]).name
    print(f"{data}: round trip of {result['n']} examples, half real, half sampled; {result['jacobians']} Jacobians")
    _print("", table, "")


def _show_inpainting(result: Mapping[str, Any]) -> None:
    from rich.markup import escape

    table = _table("mask", "start, nats", "end, nats", "truth, nats", "gain, nats", "above truth")
    for row in result["masks"]:
        means = (f"{row[f'mean_{name}_nats']:.2f}" for name in ("start", "end", "truth"))
        count = f"{row['images_above_truth']} of {len(row['images'])}"
        table.add_row(escape(row["mask"]), *means, f"{row['mean_gain_nats']:+.2f}", count)
    data, way = Path(result["dataset"]).name, f"{result['steps']} steps, noise {result['noise']:g}"
    print(f"{data}, {result['split']} split: {result['n']} images under each mask, chains {result['chains']}; {way}")
    _print("", table, "")
    print("Nats are means; an image counts as above its truth where its likeliest chain ends so.")
    print(f"written in {result['seconds']:.1f} s:", *result["out"])


def _show_truncation(result: Mapping[str, Any]) -> None:
    table = _table("kept", "NICE", "PCA")
    for k, *errors in zip(result["kept"], result["nice_errors"], result["pca_errors"], strict=True):
        table.add_row(str(k), *(f"{error:.5f}" for error in errors))
    print(f"mean squared error of {result['examples']} images of the {result['split']} split")
    _print("", table, "")
    print(f"truncate in {result['out']}")


def _show_demo(result: Mapping[str, Any]) -> None:
    _show_training(result["training"])
    _show_evaluation(result["evaluation"])
    _show_certificate(result["certificate"])
    print("figures:", *result["figures"], sep="\n  ")


def _show_bench(result: Mapping[str, Any]) -> None:
    print(f"{result['device']}, {result['precision']}, torch {result['versions']['torch']}")
    table = _table("net", "batch", "what", "library", "microseconds", "times the floor")
    for row in result["rows"]:
        figures = f"{row['microseconds']:,.0f}", f"{row['floor_ratio']:.2f}"
        table.add_row(row["net"], str(row["batch"]), row["what"], row["lib"], *figures)
    starts = _table("net", "batch", "library", "seconds to the first step")
    for row in result["startup"]:
        starts.add_row(row["net"], str(row["batch"]), row["lib"], f"{row['seconds']:.2f}")
    _print("", table, "", starts)
    print(f"`import nicest` adds {result['import_ms']:.1f} ms to importing torch")
    if "out" in result:
        print(f"picture in {result['out']}")


def _show_study(result: Mapping[str, Any]) -> None:
    print(f"{result['device']}, large products at {result['peak_flops'] / 1e12:.3g} TFLOP/s")
    steps = _table("size", "value", "microseconds a step", "of the device's speed")
    for row in result["steps"]:
        steps.add_row(row["axis"], f"{row['value']:,}", f"{row['microseconds']:,.0f}", f"{row['utilisation']:.1%}")
    rows = _table("what", "rows", "seconds", "MiB beside them")
    for row in result["rows"]:
        memory = f"{row['bytes'] / 2**20:,.0f}" if "bytes" in row else "–"
        rows.add_row(row["what"], f"{row['n']:,}", f"{row['seconds']:.4f}", memory)
    trainings = _table("the paper's training", "steps", "microseconds a step", "hours")
    for row in result["trainings"]:
        trainings.add_row(row["recipe"], f"{row['steps']:,}", f"{row['microseconds']:,.0f}", f"{row['hours']:.2f}")
    _print("", steps, "", rows, "", trainings)
    if "out" in result:
        print(f"picture in {result['out']}")


def _show_results(result: Mapping[str, Any]) -> None:
    from nicest.tasks.reproduce import why

    rows = _table("recipe", "reading", "paper, nats", "ours, nats", "bits/dim", "seeds", "minutes each")
    for row in result["rows"]:
        paper = f"{row['paper_nats']:.2f}" if row["paper_nats"] else "–"
        if "runs" not in row:
            rows.add_row(row["recipe"], row["reading"], paper, why(row), "", "", "")
            continue
        spread = row["test_stderr"] if row["test_sd"] is None else row["test_sd"]
        minutes = row["train_seconds"] / 60
        figures = f"{row['test_mean_nats']:.1f} ± {spread:.1f}", f"{row['bits_per_dim']:.4f}", str(row["seeds"])
        name = row["recipe"] + (" (augmented)" if row["augmented"] else "")
        rows.add_row(name, row["reading"], paper, *figures, f"{minutes:.1f}")
    _print(rows)
    print(f"figures in {result['out']}")


def _show_figures(result: Mapping[str, Any]) -> None:
    for row in result["recipes"]:
        print(f"{row['recipe']}:", *row.get("figures", [row.get("missing") or row.get("unfinished")]), sep="\n  ")


def _spread(sd: float | None) -> str:
    return "" if sd is None else f" ± {sd:.1f}"


def _show_vae(result: Mapping[str, Any]) -> None:
    rows = _table("model", "parameters", "test bound, nats", "gain over plain", "seconds")
    for row in result["rows"]:
        gain = "–" if row["model"] == "plain" else f"{row['gain_nats']:+.1f}{_spread(row['gain_sd'])}"
        bound = f"{row['test_nats']:.1f}{_spread(row['test_sd'])}"
        rows.add_row(row["model"], f"{row['parameters']:,}", bound, gain, f"{row['seconds']:.0f}")
    _print(rows)
    print(f"figures in {result['out']}")


def _show_recipes(result: Mapping[str, Any]) -> None:
    table = _table("recipe", "reading", "paper, nats", "measured, nats", "what it is")
    for row in result["recipes"]:
        figures = [f"{row[key]:.2f}" if row[key] is not None else "–" for key in ("paper_nats", "expected_nats")]
        table.add_row(row["name"], row["reading"], *figures, row["title"])
    _print(table)


def _show_sets(result: Mapping[str, Any]) -> None:
    table = _table("data set", "D", "examples", "here", "what it is")
    for row in result["sets"]:
        table.add_row(row["name"], str(row["dim"]), str(row["n"]), "yes" if row["present"] else "no", row["title"])
    _print(table)


def _show_check(result: Mapping[str, Any]) -> None:
    for row in result["files"]:
        print(f"{row['status']:8} {row['file']}")
    if not result["files"]:
        print(f"{result['name']} comes with nicest: nothing to check")
