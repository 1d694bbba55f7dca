"""The documentation says what is so."""

import ast
import functools
import importlib
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
TAG = re.compile(r"NICE (?:eq\. \d|§[\d.]*\d|App\. [A-C])")


def paper_map() -> list[list[str]]:
    lines = (ROOT / "docs/paper-map.md").read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| NICE")]


def resolve(symbol: str) -> object:
    """The object of a dotted name whose first parts are modules."""
    parts = symbol.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"no module in {symbol}")


def defined(path: Path) -> set[str]:
    """`function`, `Class` and `Class::method` of a test file."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def test_the_map_has_rows_for_every_tag_in_the_sources():
    used = {tag for file in (ROOT / "src").rglob("*.py") for tag in TAG.findall(file.read_text())}
    mapped = {row[0] for row in paper_map()}
    assert len(used) > 8
    assert used <= mapped


@pytest.mark.parametrize("row", paper_map(), ids=lambda row: f"{row[0]}: {row[1]}")
def test_symbols_and_tests_of_the_map_exist(row: list[str]):
    _, _, symbols, tests = row
    if symbols == "*open*":
        assert tests == "*open*"
        return
    named = re.findall(r"`([^`]+)`", symbols)
    assert named
    for symbol in named:
        assert resolve(symbol) is not None
    held_by = re.findall(r"`([^`]+)`", tests)
    assert held_by
    for test in held_by:
        file, _, name = test.partition("::")
        assert name in defined(ROOT / file) if name else (ROOT / file).is_file(), test


def faults() -> list[list[str]]:
    lines = (ROOT / "docs/reliability.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return rows[1:]


@pytest.mark.parametrize("row", faults(), ids=lambda row: row[0])
def test_tests_of_the_faults_exist(row: list[str]):
    assert all(row)
    held_by = re.findall(r"`([^`]+)`", row[2])
    assert held_by
    for test in held_by:
        file, _, name = test.partition("::")
        assert name in defined(ROOT / file), test


@functools.cache
def templates() -> list[re.Pattern]:
    """Every text of the sources that is long enough to be known, with anything where an f-string has a value."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            values = node.values if isinstance(node, ast.JoinedStr) else [node]
            found.add(
                tuple(each.value for each in values if isinstance(each, ast.Constant) and str(each.value) == each.value)
            )
    return [re.compile(".*".join(map(re.escape, each))) for each in found if 20 <= sum(map(len, each)) <= 400]


@pytest.mark.parametrize("row", faults(), ids=lambda row: row[0])
def test_messages_of_the_faults_are_those_of_the_sources(row: list[str]):
    begins = r"error: |warning: |ValueError: |stopped at |non-finite |the training scores "
    for message in re.findall(rf"`((?:{begins})[^`]+)`", row[1]):
        said = message.replace("--set ", "set ")  # the command line makes an option of it
        assert any(each.search(said) for each in templates()), message


def test_faults_and_their_rules_are_all_there():
    page = (ROOT / "docs/reliability.md").read_text()
    assert len(faults()) > 20
    for test in re.findall(r"`(tests/[^`]+)`", page):
        file, _, name = test.partition("::")
        assert name in defined(ROOT / file), test


def test_cli_page_is_made_from_help():
    generate = runpy.run_path(str(ROOT / "docs/generate.py"))
    assert (ROOT / "docs/cli.md").read_text() == generate["page"](), "run `make docs`"


def test_cli_page_has_every_command():
    from nicest.cli import app

    page = (ROOT / "docs/cli.md").read_text()
    groups = [("", app), *((f"{group.name} ", group.typer_instance) for group in app.registered_groups)]
    names = [
        prefix + (command.name or command.callback.__name__)
        for prefix, group in groups
        for command in group.registered_commands
    ]
    assert len(names) > 25
    assert all(f"\n## nicest {name}\n" in page for name in names)


def python_of(page: Path) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.S | re.M)


def test_the_examples_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    table, flow = python_of(ROOT / "README.md")
    scope: dict = {}
    exec(table, scope)
    assert scope["odd"].shape == (178, 14)
    assert not scope["whole"].isna().any(axis=None)
    assert np.allclose(scope["chances"].sum(1), 1, atol=1e-4)
    assert (scope["strong"]["alcohol"] > 14).all()
    assert (scope["strong"]["target"] == 0).all()
    exec(flow, scope)
    assert scope["samples"].shape == (100, 4)
    assert scope["log_p"].isfinite().all()


def test_the_questions_of_the_page_of_tables_have_answers():
    scope: dict = {}
    asked, classified = python_of(ROOT / "docs" / "tables.md")
    exec(asked, scope)
    known, holes = scope["known"], scope["holes"]
    assert not scope["whole"].isna().any(axis=None)
    assert len(scope["draws"]) == 5
    assert scope["whole"].where(holes.notna()).equals(holes)  # observed cells stay
    assert (np.diff(scope["low_high"]) > 0).all()
    error = scope["alcohol"] - scope["new"]["alcohol"]
    assert float((error**2).mean()) < 0.6 * float(known["alcohol"].var())
    assert set(scope["strong"]["cultivar"]) == {"Barolo"}
    assert (scope["strong"]["alcohol"] > 13.5).all()
    exec(classified, scope)
    assert (scope["classifier"].predict(scope["new"][scope["X"].columns]) == scope["new"]["cultivar"]).mean() > 0.9


PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
]


def anchors(page: Path) -> set[str]:
    """Return the anchors that the site gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M), re.M)
    plain = (re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", heading)).strip().lower() for heading in headings)
    return {re.sub(r"[\s-]+", "-", each) for each in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files_and_headings(page: Path):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_has_two_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) < 120
