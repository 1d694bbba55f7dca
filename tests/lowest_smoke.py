"""Every command once, on small data, with the packages that are installed; `make test-lowest` runs this.

Where a command needs an extra that is not installed, it must end in one line that names the extra.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib import metadata
from pathlib import Path

import numpy as np
import typer

from nicest.cli import app

STORED = Path(__file__).parent / "fixtures" / "format-1"
CPU = ("--device", "cpu")
SMALL = tuple(f"--set={each}" for each in ("train.epochs=2", "model.couplings=2", "model.width=16"))
ESTIMATOR = """
import numpy as np
from nicest import NICE
rows = np.random.default_rng(0).normal(size=(60, 3)) @ np.array([[1, 0.9, 0], [0, 0.5, 0], [0, 0, 1]])
model = NICE(random_state=0).fit(rows)
assert model.score_samples(rows).shape == (60,)
assert model.sample(5).shape == (5, 3)
rows[0, 1] = np.nan
assert np.isfinite(model.impute(rows)).all()
"""
LIBRARIES = {  # where an extra adds no command
    "pyro": """
import nicest, torch
from nicest.pyro import PyroFlow
flow = nicest.Flow(nicest.Units.continuous(2), nicest.Chain(), nicest.Gaussian(2))
assert PyroFlow(flow)().shape == (2,)
""",
    "sbi": """
import torch
from nicest.sbi import NICEPosterior
from sbi.inference import NPE
theta = torch.randn(100, 2)
inference = NPE(density_estimator=NICEPosterior(members=1, couplings=2, width=8), show_progress_bars=False)
inference.append_simulations(theta, theta + torch.randn(100, 2)).train(max_num_epochs=2)
assert inference.build_posterior().sample((3,), x=torch.zeros(2), show_progress_bars=False).shape == (3, 2)
""",
    "ray": """
import ray.data
from nicest.integrations import Worker
scores = ray.data.read_parquet("samples.parquet").map_batches(Worker("table"), batch_format="pyarrow").take_all()
assert len(scores) == 50 and all("outlier_score" in row for row in scores)
""",
    "pyspark": """
import os, sys
os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark.sql import SparkSession
from nicest.integrations import Worker
session = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
rows, worker = session.read.parquet("samples.parquet"), Worker("table")
assert rows.mapInArrow(worker.map, worker.schema(rows.schema)).where("log_density is not null").count() == 50
""",
}
tried: set[str] = set()


def nicest(*words: str, needs: str = "") -> None:
    """Run a command to its end; without the module that it `needs`, it must say in a line what to install."""
    tried.update((words[0], " ".join(words[:2])))
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "nicest", *words], capture_output=True, text=True)
    print(f"{time.monotonic() - began:6.1f} s  nicest {' '.join(words)}", flush=True)
    if not needs or importlib.util.find_spec(needs):
        assert done.returncode == 0, f"ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("error:") and "pip install 'nicest[" in line, line  # noqa: PT018
    print(f"          {line}", flush=True)


def studio(run: str) -> None:
    """Serve a run until its page has come, then end it as Ctrl-C does."""
    if not importlib.util.find_spec("fastapi"):
        nicest("studio", run, needs="fastapi")
        return
    tried.add("studio")
    command = [sys.executable, "-m", "nicest", "studio", run, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        url = json.loads(process.stdout.readline())["url"]
        with urllib.request.urlopen(url, timeout=60) as page:
            assert "<title>nicest studio</title>" in page.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    print(f"          nicest studio {run}: {url}", flush=True)


def write_table(path: Path) -> None:
    """Real numbers, integers, texts and dates, some of them missing."""
    rng, lines = np.random.default_rng(0), ["size,count,colour,day"]
    for i in range(90):
        size, count = f"{rng.normal():.4f}", str(rng.integers(0, 40))
        kept = (size if i % 9 else "", count if i % 13 else "", ("red", "green")[i % 2], f"2026-01-{1 + i % 28:02d}")
        lines.append(",".join(kept))
    path.write_text("\n".join([*lines, ""]))


def run_every_command() -> None:
    np.save("digits.npy", np.random.default_rng(0).integers(0, 17, (4, 8, 8), np.uint8))
    write_table(Path("table.csv"))
    nicest("--help")
    for command in sorted(every_command()):
        nicest(*command.split(), "--help")
    tried.clear()  # what only told of itself
    nicest("recipes")
    nicest("recipes", "digits")
    nicest("data", "list")
    nicest("data", "get", "digits")
    nicest("data", "check", "digits")
    nicest("demo", "--out", "demo", *CPU)
    nicest("train", "digits", "--out", "digits", *SMALL, *CPU)
    nicest("train", "digits", "--out", "digits", "--resume", "--set=train.epochs=3", *CPU)
    for logger in ("tensorboard", "mlflow", "wandb"):
        nicest("train", "digits", "--out", f"logged-{logger}", "--logger", logger, *SMALL, *CPU, needs=logger)
    nicest("evaluate", "digits", *CPU)
    nicest("certify", "digits", *CPU)
    nicest("sample", "digits", "-n", "9", "--out", "samples.png", *CPU)
    nicest("sample", "digits", "-n", "9", "--out", "samples.npy", *CPU)
    nicest("score", "digits", "digits.npy", "--out", "scores.csv", *CPU)
    nicest("calibrate", "digits", *CPU)
    nicest("pack", "digits", "--out", "packed", *CPU)
    nicest("evaluate", "packed", *CPU)
    nicest("models")
    nicest("models", "wine")
    nicest("sample", "digits-conv", "-n", "4", "--out", "shipped.png", *CPU)
    nicest("train", "digits-labels", "--out", "labels", *SMALL, *CPU)
    nicest("classify", "labels", *CPU)
    nicest("sample", "labels", "-n", "4", "--label", "3", "--out", "threes.png", *CPU)
    nicest("compress", "digits", "digits.npy", "--out", "digits.nicest", *CPU, needs="constriction")
    tried.add("decompress")
    if importlib.util.find_spec("constriction"):
        nicest("decompress", "digits.nicest", "--run", "digits", "--out", "again.npy")
        assert (np.load("again.npy").reshape(4, 8, 8) == np.load("digits.npy")).all()
    pictures = ("--out", "in.png", "--out", "in.gif", "--out", "in.npz")
    nicest("inpaint", "digits", "-n", "2", "--steps", "5", *pictures, *CPU)
    nicest("latent", "spectrum", "digits")
    nicest("latent", "sphere", "digits", *CPU)
    nicest("latent", "interpolate", "digits", *CPU)
    nicest("latent", "truncate", "digits", *CPU)
    tried.update(("push", "pull"))  # which need a server: tests/tasks/test_hub.py has one
    if not importlib.util.find_spec("huggingface_hub"):
        nicest("push", "digits", "me/digits", *CPU, needs="huggingface_hub")
        nicest("pull", "me/digits", needs="huggingface_hub")
    nicest("export", "digits", "--to", "torch-export", *CPU)
    nicest("export", "digits", *CPU, needs="onnxruntime")
    studio("digits")
    nicest("train", "table", "--data", "table.csv", "--out", "table", "--set=train.epochs=2", *CPU, needs="pyarrow")
    run, table = "table", "table.csv"
    if not importlib.util.find_spec("pyarrow"):
        run, table = str(STORED / "table"), str(STORED / "people.csv")
    nicest("impute", run, table, "--draws", "40", "--steps", "60", "--cells", "cells.csv", *CPU, needs="pyarrow")
    chains = ("--cells", "20", "--draws", "40", "--steps", "60")
    nicest("calibrate", run, "--data", table, *chains, "--out", "calibration", *CPU, needs="pyarrow")
    for suffix in (".csv", ".parquet", ".arrow"):
        nicest("sample", run, "-n", "50", "--out", f"samples{suffix}", *CPU, needs="pyarrow")
    for suffix in (".csv", ".parquet"):
        nicest("score", run, table, "--out", f"scores{suffix}", *CPU, needs="pyarrow")
    to_predict = ("train", "table", "--data", "table.csv", "--target", "size", "--out", "sizes")
    nicest(*to_predict, "--set=train.epochs=2", *CPU, needs="pyarrow")
    tried.add("predict")
    if importlib.util.find_spec("pyarrow"):
        nicest("predict", "sizes", "table.csv", "--out", "predicted.csv", *CPU)
    nicest("reproduce", "table", "--recipe", "digits", "--seeds", "1", *SMALL, "--out", "table.json", *CPU)
    nicest("reproduce", "figures", "--recipe", "digits", *SMALL, "--out", "figures", *CPU)
    subprocess.run([sys.executable, "-c", ESTIMATOR], check=True)
    for module, code in LIBRARIES.items():
        if importlib.util.find_spec(module):
            subprocess.run([sys.executable, "-c", code], check=True)
            print(f"          the library with {module}", flush=True)


def every_command() -> set[str]:
    """The commands of the command line; those of a topic as "topic command"."""
    commands = vars(typer.main.get_command(app))["commands"]
    topics = {name: vars(command).get("commands") for name, command in commands.items()}
    return {f"{name} {each}".rstrip() for name, inner in topics.items() for each in inner or [""]}


def main() -> None:
    """Run it all, after a look at the versions: argv[1] lists them as `name==version`."""
    on_clusters = any(map(importlib.util.find_spec, ("ray", "pyspark")))
    assert on_clusters or not importlib.util.find_spec("pandas"), "pandas is installed, which nothing else may need"
    for line in Path(sys.argv[1]).read_text().split():
        name, _, version = line.partition("==")
        try:
            found = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue  # of an extra
        assert found.split(".")[: version.count(".") + 1] == version.split("."), f"{line} expected, got {found}"
        print(f"{name} {found}", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the work is small: threads would only wait for one another
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        run_every_command()
    assert every_command() <= tried, f"not tried: {every_command() - tried}"
    print(f"all {len(every_command())} commands ran", flush=True)


if __name__ == "__main__":
    main()
