"""Training is tested on one thread, in this process and in others: so all their numbers are the same to the bit."""

import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 300 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.fixture
def _without_onednn() -> Iterator[None]:
    """Its bfloat16 kernels use instructions that some virtual machines announce and refuse."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration")
        with torch.backends.mkldnn.flags(enabled=False):
            yield
