"""The tutorial runs from top to bottom and says what is so."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "tutorial-tables.md").read_text("utf-8")


@pytest.fixture(scope="module")
def output() -> str:
    """What the tutorial prints, in a process and a folder of its own."""
    asked = [sys.executable, str(DOCS / "run_page.py"), "tutorial-tables"]
    end = subprocess.run(asked, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, encoding="utf-8")
    assert end.returncode == 0, end.stderr[-2000:]
    return end.stdout


def test_it_runs_and_every_command_is_in_it(output: str):
    asked = re.findall(r"^\$ nicest (\w+)", output, re.M)
    assert asked == ["train", "evaluate", "score", "impute", "sample", "sample"]


def test_it_finds_what_it_says(output: str):
    """Loosely: other machines round otherwise."""
    spoilt, others = map(int, re.findall(r"flagged: (\d) of 6 spoilt rows, (\d+) of 60", output)[0])
    assert spoilt >= 5
    assert others <= 6
    held, cells = map(int, re.findall(r"(\d+) of (\d+) intervals hold", output)[0])
    assert held / cells > 0.7
    right, strings, guessed = map(int, re.findall(r"(\d+) of (\d+) strings are right, (\d+) of", output)[0])
    assert strings == 30
    assert right > guessed - 3
    for real, synthetic in re.findall(r" = \d+: ([\d.]+) of the real rows, ([\d.]+) of the synthetic", output):
        assert abs(float(real) - float(synthetic)) < 0.05
    assert "outliers: 6 of 6 spoilt rows" in output


def test_what_is_shown_was_printed_in_that_form(output: str):
    """Every line of output on the page is in the output, figures aside."""

    def form(text: str) -> list[str]:
        return [re.sub(r"[-+]?[\d.]+", "0", " ".join(line.split())) for line in text.splitlines() if line.strip()]

    shown = [line for block in re.findall(r"^```text\n(.*?)^```$", PAGE, re.S | re.M) for line in form(block)]
    assert len(shown) > 10
    assert set(shown) - {"0"} <= set(form(output))


def test_the_pictures_are_there_and_small():
    drawn = re.findall(r'savefig\("([^"]+)"', PAGE)
    assert re.findall(r"\]\(images/([^)]+)\)", PAGE) == drawn
    assert all((DOCS / "images" / name).stat().st_size < 60_000 for name in drawn)


def test_every_block_that_is_code_runs():
    languages = re.findall(r"^```(\w+)$", PAGE, re.M)
    blocks = runpy.run_path(str(DOCS / "run_page.py"))["blocks"](PAGE)
    assert len(blocks) == sum(each != "text" for each in languages)
