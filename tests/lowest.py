"""A fresh environment in build/lowest, every dependency at the lowest version that pyproject.toml allows.

`make test-lowest` runs every command in it: without the extras; with all that need no pandas, and without it; with all.
"""

import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "lowest"
OURS = ("dev", "dist", "docs")  # extras for working on nicest itself


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: each for name, each in project["optional-dependencies"].items() if name not in OURS}
    floors = FOLDER / "requirements-lowest.txt"
    FOLDER.mkdir(parents=True, exist_ok=True)
    venv.create(FOLDER / "env", clear=True, with_pip=True)
    python = FOLDER / "env" / "bin" / "python"
    light = [name for name, needs in extras.items() if not any(each.startswith("pandas") for each in needs)]
    for chosen in ([], light, list(extras)):
        print(f"\nnicest[{','.join(chosen)}]", flush=True)
        needed = [each for part in (project["dependencies"], *map(extras.get, chosen)) for each in part]
        floors.write_text("\n".join([*lowest(needed), ""]))
        install = [python, "-m", "pip", "install", "--quiet", "--constraint", floors, f"{ROOT}[{','.join(chosen)}]"]
        for command in (install, [python, "-P", ROOT / "tests" / "lowest_smoke.py", floors]):
            if code := subprocess.run(command).returncode:
                sys.exit(code)


def lowest(needed: Iterable[str]) -> list[str]:
    """The lowest versions that requirements of the form `name>=version` allow together, as `name==version`."""
    found: dict[str, str] = {}
    for each in needed:
        name, _, version = each.partition(">=")
        found[name] = max(version, found.get(name, version), key=lambda text: [int(part) for part in text.split(".")])
    return [f"{name}=={version}" for name, version in found.items()]


if __name__ == "__main__":
    main()
