"""Add files from outside docs/ to the site: the README as its first page, other pages of the root, and results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root, and every file in results/ that a page links to."""
    pages = (ROOT / "docs").glob("*.md")
    linked = {name for page in pages for name in re.findall(r"\]\(\.\./(results/[^)]+)\)", page.read_text("utf-8"))}
    for name in sorted(linked):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for name in PAGES:
        files.append(File.generated(config, name, content=moved((ROOT / name).read_text("utf-8"))))
    files.append(File.generated(config, "index.md", content=moved((ROOT / "README.md").read_text("utf-8"))))
    return files


def moved(text: str) -> str:
    """Return a page of the root as a page of docs/, with its links adapted."""
    return re.sub(r"(\]\(|src=\")docs/", r"\1", text)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Make links from docs/ to the root lead to the files that were added."""
    return re.sub(r"\]\(\.\./", "](", markdown)
