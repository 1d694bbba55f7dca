"""Where and how a flow runs: device, precision, batches of bounded size."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nicest.errors import NicestError
from nicest.messages import brief
from nicest.runs.paths import command_line


def choose_device(name: str = "auto") -> torch.device:
    """Return the GPU if there is one, or the device that was asked for."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()  # fails on devices that hold no numbers, such as meta
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # kernels and graphs go to the device that is set
    except (RuntimeError, AssertionError, ImportError) as error:
        raise NicestError(f"no device {name!r} here: {brief(error, 100)}; try cpu") from error
    return device


def training_precision(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype that a recipe's train.precision means on a device."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def rows_to(rows: np.ndarray, device: torch.device | str = "cpu") -> Tensor:
    """Convert an array of examples to a tensor on the device, in its own dtype."""
    return torch.from_numpy(rows if rows.dtype != np.uint16 else rows.astype(np.int32)).to(device)


def describe_device(device: torch.device) -> str:
    """Describe the device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"


def environment(device: torch.device, *, private: bool = False) -> dict[str, Any]:
    """Describe the machine and the packages of a run; `private` leaves out the command."""
    packages = ("nicest", "torch", "numpy", "safetensors")
    return {
        "command": None if private else _command(),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": describe_device(device),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
    }


def _command() -> str | None:
    """Return the command line, if it is ours: that of another program may hold secrets."""
    program = Path(sys.argv[0])
    ours = program.name == "nicest" or (program.name, program.parent.name) == ("__main__.py", "nicest")
    return command_line(["nicest", *sys.argv[1:]]) if ours else None


def _commit() -> str | None:
    """Return the commit of the source tree that this runs from, if it is one."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        found = subprocess.run([*git, "--show-prefix"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    commit, _, prefix = found.stdout.partition("\n")
    return commit if prefix.strip() == "src/nicest/runs/" else None  # else it is installed inside some other project


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "from source"
