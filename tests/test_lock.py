"""The lock file pins all that is installed for nicest, to the very version."""

import re
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
LATER = {
    "dist": "twine",
    "docs": "mkdocs",
    "export": "onnxruntime",
    "hub": "huggingface_hub",
    "mlflow": "mlflow",
    "pyro": "pyro",
    "ray": "ray",
    "sbi": "sbi",
    "spark": "pyspark",
    "wandb": "wandb",
}  # extras that `make test` does without; a module of each
PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([0-9][0-9A-Za-z.]*)")


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [PIN.fullmatch(line) for line in lines]
    assert all(pins), [line for line, pin in zip(lines, pins, strict=True) if not pin]
    return {plain(pin[1]): pin[2] for pin in pins if pin}


Found = dict[tuple[str, frozenset[str]], str]


def needed(name: str, extras: frozenset[str], seen: Found, exact: set[str]) -> Found:
    """All that a package needs here, directly or not, with the version installed; `exact`: what its needer pins."""
    for line in metadata.requires(name) or []:
        requirement = Requirement(line)
        if requirement.marker and not any(requirement.marker.evaluate({"extra": each}) for each in extras | {""}):
            continue
        key = plain(requirement.name), frozenset(requirement.extras)
        if [each.operator for each in requirement.specifier] == ["=="]:
            exact.add(key[0])
        if key not in seen:
            seen[key] = metadata.version(requirement.name).partition("+")[0]  # torch 2.13.0+cpu is pinned as 2.13.0
            needed(*key, seen, exact)
    return seen


def test_every_dependency_of_every_extra_is_pinned_to_what_is_installed():
    extras = frozenset(metadata.metadata("nicest").get_all("Provides-Extra"))
    assert extras == {
        "bench",
        "codec",
        "dev",
        "dist",
        "docs",
        "excel",
        "export",
        "hub",
        "loggers",
        "mlflow",
        "pyro",
        "ray",
        "sbi",
        "spark",
        "studio",
        "tables",
        "wandb",
    }
    extras -= {extra for extra, name in LATER.items() if not find_spec(name)}
    exact: set[str] = set()
    found = {name: version for (name, _), version in needed("nicest", extras, {}, exact).items() if name != "nicest"}
    assert len(found) > 50
    assert found.keys() >= {"torch", "numpy", "sympy", "mpmath", "setuptools"}  # the last three of others
    pins = locked()
    for name in exact - pins.keys():  # CUDA's libraries, which a CUDA build of torch pins itself
        found.pop(name)
    assert {name: pins.get(name) for name in found} == found


def test_nothing_is_pinned_twice_or_by_a_range():
    names = [plain(line.partition("==")[0]) for line in (ROOT / "requirements.lock").read_text().splitlines()]
    assert len(names) == len(set(names)) == len(locked())


def test_the_lock_is_what_make_lock_writes():
    recipe = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "pip freeze" in line)
    options = recipe.partition("pip freeze ")[2].partition(" |")[0].split()
    frozen = subprocess.run(
        [sys.executable, "-m", "pip", "freeze", *options], capture_output=True, text=True, check=True
    ).stdout
    written = {line.partition("+")[0] for line in frozen.splitlines() if not line.startswith(("#", "-e"))}
    pins = set((ROOT / "requirements.lock").read_text().splitlines())
    here = {line.partition("==")[0] for line in written}
    assert {pin for pin in pins if pin.partition("==")[0] in here} <= written
    if all(map(find_spec, LATER.values())):
        assert pins <= written
