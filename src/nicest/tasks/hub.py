"""Share trained models: small copies with a card, pushed to and pulled from the Hugging Face Hub."""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from nicest.data.download import SETS
from nicest.errors import NicestError, needing
from nicest.files import to_json, write_text, writing
from nicest.messages import brief, listed, shown
from nicest.recipes.defaults import IN_MEMORY
from nicest.recipes.recipe import DataSettings
from nicest.runs.digests import ENVIRONMENT, sha256
from nicest.runs.folder import COLUMNS, FORMAT, METRICS, MODEL, RECIPE, RunFolder
from nicest.runs.run import Run
from nicest.runs.runtime import environment
from nicest.runs.shipped import CARD, card
from nicest.runs.sinks import Saved
from nicest.tasks.evaluate import evaluate
from nicest.tasks.options import About, argument, option, out_folder
from nicest.tasks.results import Result, plus_minus

LIMITS = "It knows what was in its training data and nothing else; a high likelihood does not mean typical."
README, SUMS = "README.md", "SHA256SUMS"
NEEDED = (MODEL, CARD, RECIPE, ENVIRONMENT)
FILES = (*NEEDED, COLUMNS, METRICS)  # nothing else is pushed or pulled; weights are safetensors
FIGURES = ("test_nats", "test_stderr", "bits_per_dim", "test_rows")


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
    out: Annotated[str | Path, out_folder("The folder of the copy.", show_default=False)],
    *,
    about: About = "",
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
    tensors = {
        name: tensor.to(torch.bfloat16) if ".network." in name and tensor.ndim > 1 else tensor
        for name, tensor in run.tensors.items()
    }
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


@dataclass(frozen=True, kw_only=True)
class Shared(Card):
    """A model on the hub: its repository, its commit, and its card."""

    repo: str
    revision: str
    sha256: str

    def lines(self) -> Iterator[Any]:
        if self.out:
            yield f"{self.out}: {self.about}"
        nats = f"{plus_minus(self.test_nats, self.test_stderr)} nats on {self.test_rows:,} test rows"
        yield f"{self.repo}, revision {self.revision}: {self.bytes / 1e6:.1f} MB, {nats}"


def push(
    run: Run,
    repository: Annotated[str, argument(help="Where to, as OWNER/NAME.", show_default=False)],
    *,
    about: About = "",
    private: Annotated[bool, option("--private", help="Make a new repository a private one.")] = False,
) -> Shared:
    """Upload a small copy of a model to the Hugging Face Hub, with a card that has its metrics.

    The files are those of `nicest pack`, with their SHA-256, in one commit. The repository is made if there is none.

    Example: nicest push runs/demo me/digits
    """
    api, repo = hub_api(), require_name(repository)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        if (run.path / CARD).is_file():
            folder.mkdir()
            for name in FILES:
                if (run.path / name).is_file():
                    shutil.copyfile(run.path / name, folder / name)
        else:
            pack(run, folder, about=about)
        figures = require_figures(folder, str(run.path))
        write_text(folder / README, model_card(repo, figures, run.recipe.data))
        names = [name for name in FILES if (folder / name).is_file()]
        write_text(folder / SUMS, "".join(f"{sha256(folder / name)}  {name}\n" for name in names))
        with one_line(repo):
            api.create_repo(repo, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                allow_patterns=[*names, README, SUMS],
                commit_message=f"{figures['about']}: {figures['test_nats']:.2f} nats",
            )
        return Shared(repo=repo, revision=commit.oid, sha256=sha256(folder / MODEL), **known(figures))


def pull(
    repository: Annotated[str, argument(help="What, as OWNER/NAME.", show_default=False)],
    *,
    revision: Annotated[
        str | None, option(help="A commit, a branch or a tag.", show_default="the newest commit")
    ] = None,
    out: Annotated[str | Path | None, out_folder("The run folder.", show_default="runs/NAME")] = None,
) -> Shared:
    """Download a model from the Hugging Face Hub, and check the SHA-256 of every file.

    The run folder appears once all files are there and the model opens.

    Example: nicest pull me/digits --out digits && nicest sample digits
    """
    api, repo = hub_api(), require_name(repository)
    folder = Path(out or Path("runs") / repo.partition("/")[2])
    RunFolder(folder).refuse_existing()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise NicestError(f"expected a new folder for the model, but {folder} is there already: choose another")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        with one_line(repo, revision):
            info = api.model_info(repo, revision=revision)
            there = {each.rfilename for each in info.siblings or []}
            if missing := [name for name in (*NEEDED, SUMS) if name not in there]:
                raise NicestError(f"{repo} holds no run that `nicest push` wrote: it lacks {listed(missing)}")
            with writing(folder):
                temporary.mkdir(parents=True)
            for name in (SUMS, *(name for name in FILES if name in there)):
                api.hf_hub_download(repo, name, revision=info.sha, local_dir=temporary)
        require_sums(temporary, f"{repo} at {info.sha}")
        figures = require_figures(temporary, f"{repo} at {info.sha}")
        shutil.rmtree(temporary / ".cache", ignore_errors=True)  # left by the hub's client
        try:
            Run(temporary, verify=True)
        except NicestError as error:
            raise NicestError(str(error).replace(str(temporary), f"{repo} at {info.sha}")) from error
        with writing(folder):
            temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    told: dict[str, Any] = {"revision": str(info.sha), "out": str(folder), "sha256": sha256(folder / MODEL)}
    return Shared(repo=repo, **told, **known(figures))


def known(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a card, without those that a newer nicest may have added."""
    return {field.name: figures.get(field.name) for field in fields(Card) if field.name != "out"}


def model_card(repo: str, figures: dict[str, Any], data: DataSettings) -> str:
    """Return the README of a model on the hub."""
    what, unit = ("image", f"of a density of pixels on {list(data.interval)}") if data.levels else ("row", "")
    unit = unit or "of a density in the units of the columns; of integers and categories, of a probability"
    nats = f"{figures['test_nats']:.2f} ± {figures['test_stderr']:.2f}"
    rows = f"{figures['test_rows']:,} test {what}s, {figures['draws']} draws of the dequantisation noise"
    return f"""---
library_name: nicest
tags: [normalizing-flow, density-estimation]
---
# {repo.partition("/")[2]}

{figures["about"]}. A normalizing flow with exact likelihoods, trained with nicest.

| figure | value | unit |
|---|---|---|
| log-likelihood | {nats} (standard error) | nats per {what}, {unit} |
| bits per dimension | {figures["bits_per_dim"]:.4f} | bits |
| parameters | {figures["parameters"]:,} | |

The figures are of these weights, on {rows}.

- Data: {figures["data"]}
- Licence of the data: {figures["licence"] or "not stated"}
- Recipe `{figures["recipe"]}`, seed {figures["seed"]}, {figures["epochs"]} epochs
- Limits: {figures["limits"]}

```sh
pip install 'nicest[hub]'
nicest pull {repo}
nicest sample runs/{repo.partition("/")[2]} -n 100
```

Weights are safetensors; nothing in the files is executed. `sha256sum -c {SUMS}` checks them.
"""


def hub_api() -> Any:
    """Return a client of the hub."""
    with needing("hub"):
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars
    disable_progress_bars()
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


def require_name(repo: str) -> str:
    """Return OWNER/NAME; refuse other texts."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", repo):
        raise NicestError(f"expected a repository as OWNER/NAME, got {shown(repo)}")
    return repo


def require_figures(folder: Path, where: str) -> dict[str, Any]:
    """Read the card of a model; refuse one without metrics."""
    try:
        found = card(folder)
        lacks = [each for each in FIGURES if not math.isfinite(float(found[each]))]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise NicestError(f"{where}: {CARD} cannot be read ({brief(error)}): pack the run again") from error
    except KeyError as error:
        lacks = [str(error.args[0])]
    if lacks:
        raise NicestError(f"{where}: {CARD} has no figures, it lacks {listed(lacks)}: pack the run again")
    return found


def require_sums(folder: Path, where: str) -> None:
    """Refuse files that differ from those that were pushed."""
    lines = (folder / SUMS).read_text("utf-8", errors="replace").splitlines()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for path in sorted(each for each in folder.iterdir() if each.name in FILES):
        if sums.get(path.name) != (found := sha256(path)):
            raise NicestError(
                f"{where}: {path.name} is not the file that was pushed: expected SHA-256 {sums.get(path.name)}, got"
                f" {found}: pull again, or ask its owner"
            )
    (folder / SUMS).unlink()


@contextmanager
def one_line(repo: str, revision: str | None = None) -> Iterator[None]:
    """Turn errors of the hub into one line."""
    from huggingface_hub import errors

    try:
        yield
    except NicestError:
        raise
    except Exception as error:
        if isinstance(error, errors.RevisionNotFoundError):
            what = f"{repo} has no revision {shown(revision)}, or no longer: leave it out for the newest one"
        elif isinstance(error, errors.RepositoryNotFoundError):
            what = f"the hub has no repository {repo} that you may read: check its name, or log in with `hf auth login`"
        elif not isinstance(error, errors.HfHubHTTPError):  # network errors, incomplete files
            what = f"{repo}: the exchange with the hub failed ({brief(error)}): try again"
        elif (status := error.response.status_code) in (401, 403):
            what = f"{repo}: the hub refused it: log in with `hf auth login` and a token that may write"
        else:
            what = f"{repo}: the hub answered {status}: {brief(error)}"
        raise NicestError(what) from error
