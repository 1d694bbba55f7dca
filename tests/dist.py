"""Build the packages in dist/, check what is in them, and use the wheel as a stranger would.

`make dist` runs this. The wheel is installed without extras in a new environment, build/dist/env. There, in a folder
outside the clone, `nicest demo` runs as a user who can write neither to the package nor to a home. As root that is
another user; otherwise the package is made read-only.
"""

import email
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST, FOLDER = ROOT / "dist", ROOT / "build" / "dist"
MOST = {".whl": 30_000_000, ".gz": 36_000_000}  # bytes; models among them
NOBODY = 65534
NEEDS = {  # commands that need an extra, and the extra
    "tables": ("train", "table", "--data", "table.csv"),
    "studio": ("studio", "runs/demo"),
    "loggers": ("train", "digits", "--logger", "tensorboard", "--out", "runs/logged"),
}


def build() -> tuple[Path, Path]:
    """The source archive, and the wheel that is built from it."""
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", DIST, ROOT], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir()], check=True)
    (source,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return source, wheel


def check_contents(source: Path, wheel: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    package = {each.removeprefix("src/") for each in tracked.split()}
    with zipfile.ZipFile(wheel) as file:
        held = {each for each in file.namelist() if ".dist-info/" not in each}
        (about,) = (each for each in file.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(file.read(about))
    assert held == package, f"the wheel differs from src/ in {sorted(held ^ package)}"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(metadata.get_all("Provides-Extra")) == set(extras)
    with tarfile.open(source) as file:
        names = {each.name.partition("/")[2] for each in file.getmembers()}
    assert names >= {"Makefile", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md"}
    assert {f"src/{each}" for each in package} <= names
    assert not [each for each in names if each.startswith((".ci/", ".github/", "results/figures/", "results/logs/"))]
    for path in (source, wheel):
        size = path.stat().st_size
        assert size < MOST[path.suffix], f"{path.name} has {size:,} bytes, more than {MOST[path.suffix]:,}"
        print(f"{path.name}: {size:,} bytes", flush=True)


def use(wheel: Path) -> None:
    """Install the wheel alone and run it from elsewhere, as a user who can write only to the working folder."""
    venv.create(FOLDER / "env", clear=True, with_pip=True)
    python = FOLDER / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "requirements.lock", wheel]
    subprocess.run(install, check=True)
    asked = [python, "-P", "-c", "import nicest; print(nicest.__file__)"]
    package = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()).parent
    assert FOLDER in package.parents, package
    subprocess.run(["chmod", "-R", "a+rX,a-w", package], check=True)
    with tempfile.TemporaryDirectory() as folder:
        home, inside = Path(folder, "home"), Path(folder, "work")
        home.mkdir(mode=0o555)
        inside.mkdir()
        (inside / "table.csv").write_text("a,b\n1.5,2\n2.5,3\n3.5,4\n")
        Path(folder).chmod(0o755)
        who: dict[str, int] = {}
        if os.geteuid() == 0:
            os.chown(inside, NOBODY, NOBODY)
            who = {"user": NOBODY, "group": NOBODY}

        def nicest(*words: str) -> subprocess.CompletedProcess[str]:
            clean = {"PATH": "/usr/bin:/bin", "HOME": str(home), "OMP_NUM_THREADS": "1"}
            command = [python.with_name("nicest"), *words]
            return subprocess.run(command, cwd=inside, env=clean, capture_output=True, text=True, **who)

        began = time.monotonic()
        done = nicest("demo", "--json")
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert all((inside / each).is_file() for each in result["figures"])
        nats, seconds = result["evaluation"]["mean_nats"], time.monotonic() - began
        print(f"nicest demo: {nats:.2f} nats in {seconds:.0f} s", flush=True)
        for extra, words in NEEDS.items():
            done = nicest(*words)
            assert done.returncode == 1, done.stdout
            (line,) = done.stderr.splitlines()
            assert f"pip install 'nicest[{extra}]'" in line, line
            print(f"nicest {' '.join(words)}: {line}", flush=True)


def main() -> None:
    source, wheel = build()
    check_contents(source, wheel)
    use(wheel)


if __name__ == "__main__":
    main()
