"""Fresh environments in build/lowest, every dependency at the lowest version that pyproject.toml allows.

`make test-lowest` makes one without the extras and one with them all but dev, and runs every command in both.
"""

import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "lowest"


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: each for name, each in project["optional-dependencies"].items() if name != "dev"}
    floors = FOLDER / "requirements-lowest.txt"
    FOLDER.mkdir(parents=True, exist_ok=True)
    lines = [each.replace(">=", "==") for part in (project["dependencies"], *extras.values()) for each in part]
    floors.write_text("\n".join([*lines, ""]))
    for name, chosen in (("plain", ""), ("extras", f"[{','.join(extras)}]")):
        print(f"\nnicest{chosen}", flush=True)
        venv.create(FOLDER / name, clear=True, with_pip=True)
        python = FOLDER / name / "bin" / "python"
        install = [python, "-m", "pip", "install", "--quiet", "--constraint", floors, f"{ROOT}{chosen}"]
        for command in (install, [python, "-P", ROOT / "tests" / "lowest_smoke.py", floors]):
            if code := subprocess.run(command).returncode:
                sys.exit(code)


if __name__ == "__main__":
    main()
