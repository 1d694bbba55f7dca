"""Where and how a flow runs: device, precision, batches of bounded size."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch

from nicest.runs.runtime import choose_device, environment, rows_to

Refusal = Callable[..., str]
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["quantum", "cuda:99", ""])
def test_a_device_that_is_not_here_is_refused(refusal: Refusal, name: str):
    message = refusal(choose_device, name)
    assert f"no device {name!r} here" in message
    assert message.endswith("try cpu")


def test_auto_takes_a_gpu_where_there_is_one():
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu") == CPU


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_rows_keep_their_values(dtype: type):
    rows = np.array([[0, 1], [250, 255]], dtype)
    assert rows_to(rows, CPU).tolist() == rows.tolist()


def test_sixteen_bit_levels_are_whole_to_the_last():
    assert rows_to(np.array([[0, 65535]], np.uint16), CPU).tolist() == [[0, 65535]]


def test_the_environment_names_versions_and_device():
    found = environment(CPU)
    assert found["versions"].keys() == {"nicest", "torch", "numpy", "safetensors"}
    assert found["versions"]["numpy"] == np.__version__
    assert "CPU" in found["device"]
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/usr/bin/nicest", "train", "a b"], "nicest train 'a b'"),
        (["/src/nicest/__main__.py", "train"], "nicest train"),
        (["job.py", "--password", "x"], None),
        (["/jupyter/ipykernel_launcher.py", "-f", "connection.json"], None),
        ([""], None),
    ],
)
def test_the_command_is_kept_only_if_it_is_ours(argv: list[str], command: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", argv)
    assert environment(CPU)["command"] == command
