"""The package itself: what it offers, and that it offers it without loading torch first."""

import pydoc
import subprocess
import sys
from importlib import metadata

import pytest

import nicest


def test_version_is_the_one_that_is_installed():
    assert nicest.__version__ == metadata.version("nicest")


@pytest.mark.parametrize("name", nicest.__all__)
def test_every_public_name_is_there(name: str):
    assert getattr(nicest, name) is not None


def test_public_names_are_the_things_themselves():
    from nicest.errors import NicestError
    from nicest.flows import Flow
    from nicest.runs.run import Run, load

    assert (nicest.Flow, nicest.NicestError, nicest.Run) == (Flow, NicestError, Run)
    assert (nicest.load, nicest.open) == (load, Run)


def test_parts_are_reached_from_the_package():
    code = "import nicest; print(*(getattr(nicest, part).__name__ for part in %r))"
    parts = ["flows", "fast", "data", "recipes", "inference", "runs", "train", "tasks", "plots"]
    done = subprocess.run([sys.executable, "-c", code % parts], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"nicest.{part}" for part in parts]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        _ = nicest.nothing
    assert not hasattr(nicest, "nothing")


def test_tab_completion_and_help_show_the_public_names():
    assert {*nicest.__all__, "open", "flows", "__doc__"} <= set(dir(nicest))
    assert not {"importlib", "TYPE_CHECKING", "Any"} & set(dir(nicest))
    shown = pydoc.plain(pydoc.render_doc(nicest))
    assert "class NICE(" in shown
    assert "fit(flow: " in shown


def test_importing_it_loads_neither_torch_nor_numpy():
    code = "import nicest, sys; dir(nicest); print([m for m in ('torch', 'numpy', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
