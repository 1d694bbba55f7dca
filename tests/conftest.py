"""Every test starts from the same random state, on one thread: the tensors of tests are small."""

from collections.abc import Callable

import pytest
import torch

from nicest.errors import NicestError

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


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
