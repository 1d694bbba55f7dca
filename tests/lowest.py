"""A fresh environment in build/lowest, every dependency at the lowest version that pyproject.toml allows.

`make test-lowest` runs every command in it, first without the extras, then with all that users install.
"""

import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "lowest"
OURS = ("dev", "dist", "docs")  # extras for working on nicest itself


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: each for name, each in project["optional-dependencies"].items() if name not in OURS}
    floors = FOLDER / "requirements-lowest.txt"
    FOLDER.mkdir(parents=True, exist_ok=True)
    lines = [each.replace(">=", "==") for part in (project["dependencies"], *extras.values()) for each in part]
    floors.write_text("\n".join([*lines, ""]))
    venv.create(FOLDER / "env", clear=True, with_pip=True)
    python = FOLDER / "env" / "bin" / "python"
    for chosen in ("", f"[{','.join(extras)}]"):
        print(f"\nnicest{chosen}", flush=True)
        install = [python, "-m", "pip", "install", "--quiet", "--constraint", floors, f"{ROOT}{chosen}"]
        for command in (install, [python, "-P", ROOT / "tests" / "lowest_smoke.py", floors]):
            if code := subprocess.run(command).returncode:
                sys.exit(code)


if __name__ == "__main__":
    main()
