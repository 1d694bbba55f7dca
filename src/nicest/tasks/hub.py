"""Models on the Hugging Face Hub: push a small copy with its card, pull one that is what its writer wrote."""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nicest.errors import NicestError, needing
from nicest.files import write_text, writing
from nicest.messages import brief, listed, shown
from nicest.recipes.recipe import DataSettings
from nicest.runs.digests import ENVIRONMENT, sha256
from nicest.runs.folder import COLUMNS, METRICS, MODEL, RECIPE, RunFolder
from nicest.runs.run import Run
from nicest.runs.shipped import CARD, card
from nicest.tasks.pack import pack

README, SUMS = "README.md", "SHA256SUMS"
NEEDED = (MODEL, CARD, RECIPE, ENVIRONMENT)
FILES = (*NEEDED, COLUMNS, METRICS)  # nothing else is pushed or pulled: weights come as safetensors alone
FIGURES = ("test_nats", "test_stderr", "bits_per_dim", "test_rows")


def push(run: Run, repo: str, *, about: str = "", private: bool = False) -> dict[str, Any]:
    """Upload a model to OWNER/NAME on the hub, in one commit; the repository is made if there is none.

    What goes there is what `pack` writes, with a model card made of its figures, and the SHA-256 of every file. A
    folder that was packed or pulled goes as it is.
    """
    with needing("hub"):
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    require_name(repo)
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
            api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
            api.create_repo(repo, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                allow_patterns=[*names, README, SUMS],
                commit_message=f"{figures['about']}: {figures['test_nats']:.2f} nats",
            )
        return {"repo": repo, "revision": commit.oid, "sha256": sha256(folder / MODEL), **figures}


def pull(repo: str, *, revision: str | None = None, out: str | Path | None = None) -> dict[str, Any]:
    """Download a model that `push` uploaded, of a revision or of the newest, to a run folder, runs/NAME by default.

    The revision is resolved to its commit once. All files must have the SHA-256 that they were pushed with, and the
    model must open; only then does the folder appear under its name.
    """
    with needing("hub"):
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    folder = Path(out or Path("runs") / require_name(repo).partition("/")[2])
    RunFolder(folder).refuse_existing()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise NicestError(f"expected a new folder for the model, but {folder} is there already: choose another")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        with one_line(repo, revision):
            info = HfApi(endpoint=endpoint).model_info(repo, revision=revision)
            there = {each.rfilename for each in info.siblings or []}
            if missing := [name for name in (*NEEDED, SUMS) if name not in there]:
                raise NicestError(f"{repo} holds no run that `nicest push` wrote: it lacks {listed(missing)}")
            with writing(folder):
                temporary.mkdir(parents=True)
            for name in (SUMS, *(name for name in FILES if name in there)):
                hf_hub_download(repo, name, revision=info.sha, local_dir=temporary, endpoint=endpoint)
        require_sums(temporary, f"{repo} at {info.sha}")
        figures = require_figures(temporary, f"{repo} at {info.sha}")
        shutil.rmtree(temporary / ".cache", ignore_errors=True)  # notes of the hub's client
        try:
            Run(temporary, verify=True)
        except NicestError as error:
            raise NicestError(str(error).replace(str(temporary), f"{repo} at {info.sha}")) from error
        with writing(folder):
            temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {"repo": repo, "revision": info.sha, "out": str(folder), "sha256": sha256(folder / MODEL), **figures}


def model_card(repo: str, figures: dict[str, Any], data: DataSettings) -> str:
    """The README of a model on the hub."""
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


def require_name(repo: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", repo):
        raise NicestError(f"expected a repository as OWNER/NAME, got {shown(repo)}")
    return repo


def require_figures(folder: Path, where: str) -> dict[str, Any]:
    """The card of a model, which has its figures."""
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
    """Refuse files that are not those that were pushed."""
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
    """What the hub refuses, said in one line."""
    from huggingface_hub import errors

    try:
        yield
    except NicestError:
        raise
    except errors.RevisionNotFoundError as error:
        raise NicestError(
            f"{repo} has no revision {shown(revision)}, or no longer: leave it out for the newest one"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise NicestError(
            f"the hub has no repository {repo} that you may read: check its name, or log in with `hf auth login`"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        what = "refused it: log in with `hf auth login` and a token that may write" if status in (401, 403) else ""
        raise NicestError(f"{repo}: the hub {what or f'answered {status}: {brief(error)}'}") from error
    except Exception as error:  # of the network, and of files that came incomplete
        raise NicestError(f"{repo}: the exchange with the hub failed ({brief(error)}): try again") from error
