"""What packages may know about each other, read from their sources."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import nicest
from nicest import flows

SOURCES = Path(nicest.__file__).parent
MAY_KNOW_LAYERS = (
    "flows/",
    "fast/",
    "codec/",
    "runs/formats.py",  # converts files of older versions
    "tasks/baselines.py",  # known exception: fits a logistic prior, which it made itself, in closed form
)
FOREIGN = ("codec", "compress", "forest", "figure", "plot", "process", "studio", "estimator")


def layer_classes() -> set[str]:
    """Return the public bijections, laws, priors and networks, without the abstract classes they derive from."""
    found = {name: getattr(flows, name) for name in flows.__all__}
    kinds = {name: kind for name, kind in found.items() if isinstance(kind, type)}
    return {
        name
        for name, kind in kinds.items()
        if issubclass(kind, nn.Module | flows.Law)
        and not issubclass(kind, flows.Density | flows.Units)
        and not inspect.isabstract(kind)
    }


def class_checks(source: str, classes: set[str]) -> Iterator[str]:
    """Yield the expressions that compare the class of an object with one of these classes."""
    tree = ast.parse(source)
    aliases = {
        name.asname: name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if name.asname
    }

    def named(node: ast.AST) -> bool:
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        return bool({aliases.get(name, name) for name in names} & classes)

    def is_call(node: ast.AST, *functions: str) -> bool:
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions

    for node in ast.walk(tree):
        if is_call(node, "isinstance", "issubclass"):
            checked = node.args[1:]
        elif isinstance(node, ast.Compare) and any(is_call(n, "type") for n in ast.walk(node)):
            checked = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchClass):
            checked = [node.cls]
        else:
            continue
        if any(named(each) for each in checked):
            yield ast.unparse(node)


def imported(source: str) -> Iterator[str]:
    """Yield the names of the modules that a source imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def sources(under: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the text of every source."""
    for path in sorted((SOURCES / under).rglob("*.py")):
        yield path.relative_to(SOURCES).as_posix(), path.read_text(encoding="utf-8")


def test_the_layer_classes_are_those_of_flows():
    classes = layer_classes()
    assert {"Chain", "Coupling", "ZCA", "Affine", "Gaussian", "Logistic", "MLP", "ConvNet", "Features"} <= classes
    assert classes.isdisjoint({"Density", "Flow", "Mixture", "VAE", "Units"})


def test_other_packages_do_not_check_the_classes_of_layers():
    """Elsewhere a flow may have any layers: what they do is in the methods and attributes of `Bijection`."""
    classes = layer_classes()
    found = {
        path: checks
        for path, source in sources()
        if not path.startswith(MAY_KNOW_LAYERS)
        if (checks := list(class_checks(source, classes)))
    }
    assert found == {}


def test_flows_import_only_each_other():
    for path, source in sources("flows"):
        ours = {name for name in imported(source) if name.split(".")[0] == "nicest"}
        assert {name for name in ours if not name.startswith("nicest.flows")} == set(), path


@pytest.mark.parametrize("word", FOREIGN)
def test_flows_do_not_name_what_is_built_on_them(word: str):
    for path, source in sources("flows"):
        found = [line.strip() for line in source.splitlines() if word in line.lower()]
        assert not found, path


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(layer, Coupling)",
        "isinstance(f(x), (int, flows.MLP))",
        "isinstance(x, int | MLP)",
        "issubclass(kind, MLP)",
        "type(layer) is Coupling",
        "type(layer) in (A, MLP)",
        "from nicest.flows import Coupling as C\nisinstance(x, C)",
        "match layer:\n    case Coupling():\n        pass",
    ],
)
def test_every_check_of_a_class_is_found(source: str):
    assert len(list(class_checks(source, {"Coupling", "MLP"}))) == 1


def test_other_uses_of_a_class_are_no_checks():
    source = "Coupling(part, law, MLP(3, 3))\nisinstance(Coupling(a), int)\ntype(x) is int\nx: MLP | None = None"
    assert list(class_checks(source, {"Coupling", "MLP"})) == []
