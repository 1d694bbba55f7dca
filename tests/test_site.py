"""The site: its examples run, every public name has one, and it builds without a warning."""

import doctest
import importlib.util
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nicest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
REFERENCE = ("reference", "reference-flows")
SMALLER = {'effort="medium"': 'effort="low", epochs=20', "4000": "400", "300": "60"}  # the gallery, in seconds


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text("utf-8")


def run_page(text: str) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        return runpy.run_path(str(DOCS / "run_page.py"))["run"](text)


@pytest.mark.parametrize("name", REFERENCE)
def test_examples_of_the_reference_give_what_they_show(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = "\n".join(re.findall(r"^```pycon\n(.*?)^```$", page(name), re.S | re.M))
    test = doctest.DocTestParser().get_doctest(text, {"__name__": "page"}, name, None, 0)
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
    assert result.attempted > 50
    assert result.failed == 0, capsys.readouterr().out


def entries() -> dict[str, str]:
    """Every name that the reference documents, and what stands between it and the next."""
    parts = [re.split(r"^(?:::: (\S+)|## .*)$", page(name), flags=re.M)[1:] for name in REFERENCE]
    return {each: text for part in parts for each, text in zip(part[::2], part[1::2], strict=True) if each}


def test_every_public_name_is_in_the_reference_with_an_example():
    from nicest import data, flows, recipes

    found = {name.rpartition(".")[2] for name in entries()}
    public = {*nicest.__all__, *flows.__all__, *data.__all__, *recipes.__all__} - {"__version__"}
    assert public - found == set()
    for name, text in entries().items():
        assert "```pycon" in text, f"{name} has no example"


def test_names_of_the_reference_exist():
    for name in entries():
        assert pkgutil.resolve_name(name) is not None


def test_the_first_flow_comes_near_the_truth():
    names = run_page(page("first-flow"))
    assert names["nats"] == pytest.approx(float(names["truth"].mean()), abs=0.1)
    assert float(names["gaussian"].mean()) < names["nats"] - 1
    assert (names["back"] - names["test"]).abs().max() < 1e-4


def test_nats_go_with_the_units_as_the_page_says():
    names = run_page(page("likelihood"))
    assert names["gap"] == pytest.approx(2 * names["np"].log(100), abs=0.01)
    assert names["bits_per_dim"] == pytest.approx(4.36, abs=0.005)


def test_the_gallery_draws_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import matplotlib

    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    text = page("gallery")
    for large, small in SMALLER.items():
        assert large in text
        text = text.replace(large, small)
    run_page(text)
    drawn = re.findall(r"\]\(images/(gallery-[^)]+)\)", text)
    assert len(drawn) == 3
    assert all((tmp_path / name).is_file() and (DOCS / "images" / name).is_file() for name in drawn)


def test_every_page_is_in_the_navigation():
    nav = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    added = {"index.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}
    assert nav == {path.name for path in DOCS.glob("*.md")} | added


@pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="no mkdocs here: make docs installs it")
def test_it_builds_without_a_warning_and_its_links_lead_somewhere(tmp_path: Path):
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert problems(tmp_path / "site") == []
    (page,) = (tmp_path / "site").glob("tables.html")
    page.write_text(page.read_text().replace("likelihood.html#", "likelihood.html#no-"))
    assert len(problems(tmp_path / "site")) > 0


def problems(site: Path) -> list[str]:
    return runpy.run_path(str(DOCS / "check_site.py"))["problems"](site)


def test_broken_links_and_scripts_from_elsewhere_are_found(tmp_path: Path):
    (tmp_path / "a.html").write_text('<a href="b.html">b</a> <a href="https://example.org">elsewhere</a> <p id="here">')
    assert problems(tmp_path) == ["a.html links to b.html, which is not there"]
    (tmp_path / "b.html").write_text('<a href="a.html#here">a</a>')
    assert problems(tmp_path) == []
    (tmp_path / "b.html").write_text('<a href="a.html#there">a</a><script src="https://example.org/x.js"></script>')
    assert problems(tmp_path) == [
        "b.html loads https://example.org/x.js",
        "b.html links to a.html#there, which has no such place",
    ]
    shutil.copy(tmp_path / "a.html", tmp_path / "b.html")
    (tmp_path / "c.css").write_text("@font-face { src: url('https://example.org/f.woff2') }")
    assert problems(tmp_path) == ["c.css loads https://example.org/f.woff2"]


def test_the_citation_has_the_version():
    assert f"\nversion: {nicest.__version__}\n" in (ROOT / "CITATION.cff").read_text()
