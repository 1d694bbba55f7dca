"""Modules that are not there: extras that are not installed, and what Windows does not have."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nicest import Run
from nicest.tasks.export import export
from nicest.tasks.hub import pull, push

IMAGES = Path(__file__).parent / "fixtures" / "format-1" / "images"
EVERY_MODULE = """
import pkgutil, sys
sys.modules["fcntl"] = sys.modules["resource"] = None
import nicest
from nicest.errors import NicestError
for module in pkgutil.walk_packages(nicest.__path__, "nicest."):
    if module.name == "nicest.__main__":
        continue
    try:
        __import__(module.name)
    except (NicestError, ModuleNotFoundError) as error:  # an extra that is not installed
        assert "fcntl" not in str(error) and "resource" not in str(error), error
    print(module.name)
with nicest.RunFolder(sys.argv[1]).open_for_writing():
    pass
"""


@pytest.mark.parametrize("module", ["onnxruntime", "onnxscript"])
def test_export_names_its_extra(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", sys)  # any module: it is not used
    monkeypatch.setitem(sys.modules, "onnxscript", sys)
    monkeypatch.setitem(sys.modules, module, None)
    wanted = f"this needs {module}, which is not installed: pip install 'nicest[export]'"
    assert refusal(export, Run(IMAGES), out=tmp_path) == wanted


def test_the_hub_names_its_extra(monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    wanted = "this needs huggingface_hub, which is not installed: pip install 'nicest[hub]'"
    assert refusal(push, Run(IMAGES), "me/digits") == refusal(pull, "me/digits") == wanted


def test_every_module_can_be_imported_without_those_that_windows_lacks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EVERY_MODULE, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "nicest.runs.folder" in done.stdout
