"""The tutorial runs from top to bottom and shows what it prints."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "tutorial-tables.md").read_text("utf-8")
RUN_PAGE = runpy.run_path(str(DOCS / "run_page.py"))


@pytest.fixture(scope="module")
def output() -> str:
    """Run the tutorial in a process and a folder of its own and return what it prints."""
    command = [sys.executable, str(DOCS / "run_page.py"), "tutorial-tables"]
    end = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, encoding="utf-8")
    assert end.returncode == 0, end.stderr[-2000:]
    return end.stdout


def test_every_command_is_in_it(output: str):
    commands = re.findall(r"^\$ nicest (\w+)", output, re.M)
    assert commands == ["train", "evaluate", "score", "impute", "predict", "sample", "calibrate"]


def test_the_spoilt_rows_come_first_with_their_spoilt_cells(output: str):
    (table,) = re.findall(r"^ *row +log_density.*\n((?:.+\n){3})", output, re.M)
    found = {line.split()[0]: line.split()[3] for line in table.splitlines()[:2]}
    assert found == {"0": "bmi", "1": "ratio"}


def test_answers_are_as_good_as_the_page_says(output: str):
    """With tolerances: other machines round otherwise."""
    inside, cells = map(int, re.findall(r"(\d+) of (\d+) intervals hold the truth", output)[0])
    assert inside / cells > 0.8
    imputed, means = map(float, re.findall(r": an error of ([\d.]+) standard", output))
    assert imputed < 0.8 * means
    assert int(re.findall(r"(\d+)% of the intervals hold the progression", output)[0]) > 75


def test_what_is_shown_was_printed_in_that_form(output: str):
    """Every line of output on the page is in the output, apart from its numbers."""
    form = RUN_PAGE["form"]
    shown = {
        form(line) for block in re.findall(r"^```text\n(.*?)^```$", PAGE, re.S | re.M) for line in block.splitlines()
    }
    assert len(shown) > 10
    assert shown - {form(line) for line in output.splitlines()} == set()


def test_its_numbers_are_refreshed_from_the_output():
    page = "```text\na: 1.00\nother\n```\n```python\na = 1\n```\n```text\na: 2\n```"
    assert RUN_PAGE["refreshed"](page, "a: 3.5\nb: 4\na: 5\n") == page.replace("1.00", "3.5").replace("a: 2", "a: 5")


def test_every_block_that_is_code_runs():
    languages = re.findall(r"^```(\w+)$", PAGE, re.M)
    blocks = RUN_PAGE["blocks"](PAGE)
    assert len(blocks) == sum(each != "text" for each in languages)
