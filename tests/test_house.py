"""How the sources are built: what one room may know of another."""

import re
from pathlib import Path

import nicest

SOURCES = Path(nicest.__file__).parent
CLASSES = ("MLP", "Coupling", "Dequantize", "Rescale", "ZCA", "Partition")


def asked(source: str) -> list[str]:
    """Every `isinstance(...)` of a source, to its closing bracket."""
    found = []
    for match in re.finditer(r"\bisinstance\(", source):
        depth, end = 1, match.end()
        while depth and end < len(source):
            depth += {"(": 1, ")": -1}.get(source[end], 0)
            end += 1
        found.append(source[match.start() : end])
    return found


def test_only_flows_and_lowering_ask_for_the_class_of_a_layer():
    """Elsewhere a chain is anybody's layers: what they can do is asked of them, by the methods of `Bijection`."""
    names = re.compile(rf"\b({'|'.join(CLASSES)})\b")
    for path in sorted(SOURCES.rglob("*.py")):
        if path.relative_to(SOURCES).parts[0] not in ("flows", "fast"):
            bad = [call for call in asked(path.read_text()) if names.search(call)]
            assert not bad, f"{path.relative_to(SOURCES)}: {bad}"


def test_the_search_finds_what_it_looks_for():
    assert asked("if isinstance(f(x), (A, MLP)) or isinstance(y, B):") == [
        "isinstance(f(x), (A, MLP))",
        "isinstance(y, B)",
    ]
