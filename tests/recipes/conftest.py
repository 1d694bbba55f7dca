"""Recipes are tested on one thread, and through the command line on small files in the published layouts."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nicest.errors import NicestError

sys.path.append(str(Path(__file__).parent.parent / "data"))  # where `published` is


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
