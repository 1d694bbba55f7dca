"""Training is tested on one thread, in this process and in others: so all their numbers are the same to the bit."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nicest.errors import NicestError


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def refusal() -> Callable[..., str]:
    """Call something that must be refused, and return the refusal, which is one line."""

    def call(function: Callable[..., object], *args: object, **options: object) -> str:
        with pytest.raises(NicestError) as caught:
            function(*args, **options)
        message = str(caught.value)
        assert "\n" not in message
        return message

    return call


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
