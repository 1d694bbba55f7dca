"""Check a built site: every link and anchor leads somewhere inside it, and no page loads anything from another host.

    python docs/check_site.py site

Links to other hosts that a reader may click are listed, not followed.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src"), ("video", "src")}
STYLE_URL = re.compile(r"""(?:url\(|@import\s+)["']?((?:https?:)?//[^"')\s]+)""")


class Page(HTMLParser):
    """A page: its ids, the addresses it links to and those it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = STYLE_URL.findall(text)
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Record ids, links and loads of an element."""
        found = {name: value for name, value in attributes if value}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        for name in ("href", "src"):
            if name in found:
                (self.loads if (tag, name) in LOADS and found.get("rel") != "canonical" else self.links).append(
                    found[name]
                )


def problems(site: Path) -> list[str]:
    """Return a line for every broken link, and for everything that is loaded from another host."""
    pages = {path.resolve(): Page(path.read_text("utf-8")) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        where = path.relative_to(site.resolve())
        for link in [*page.loads, *page.links]:
            parts = urlsplit(link)
            if parts.netloc or parts.scheme in ("mailto", "data"):
                if link in page.loads and parts.scheme != "data":
                    found.append(f"{where} loads {link}")
                continue
            if where.name == "404.html":  # its links start at the root of a server
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                found.append(f"{where} links to {link}, which is not there")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids | {"__skip"}:
                found.append(f"{where} links to {link}, which has no such place")
    for style in site.rglob("*.css"):
        found += [f"{style.relative_to(site)} loads {url}" for url in STYLE_URL.findall(style.read_text("utf-8"))]
    return found


def main() -> None:
    """Check the site named on the command line."""
    site = Path(sys.argv[1])
    if found := problems(site):
        sys.exit("\n".join(found))
    count = len(list(site.rglob("*.html")))
    print(f"{count} pages: all links lead somewhere, nothing is loaded from another host")


if __name__ == "__main__":
    main()
