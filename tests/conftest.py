"""Every test starts from the same random state, on one thread: the tensors of tests are small."""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nicest.errors import NicestError

torch.set_num_threads(1)

# files of more than ten seconds of processor time, the slowest first
SLOW = """
    distributed estimator predictors api cli tutorial normalised missing_cells export crash predict impute calibrate
    site frames compress_table labels disk predictive conditional benchmarks reproduce blend own_flows_page resume
    initial score methods compare bad_input detector command convolutions demo own_flow options
""".split()  # noqa: SIM905

# A script's background jobs (`make test &`) are started with SIGINT ignored, which every process hands on to its
# children, and training honours it. Here signals must be heard, by this process and by those that tests start.
# SIGHUP stays as it is: `nohup make test` relies on it. The test that sends it sees to itself.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _usual)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first: tests are shared out by files, and the last one should be short.

    With NICEST_SHUFFLE=seed, put files, the classes in them and their tests in an order that the seed decides.
    """
    slowest = {f"test_{name}": place for place, name in enumerate(SLOW)}
    items.sort(key=lambda item: slowest.get(item.path.stem, len(slowest)))
    if seed := os.environ.get("NICEST_SHUFFLE"):

        def place(item: pytest.Item) -> list[float]:
            parts = item.nodeid.split("::")
            return [random.Random(f"{seed} {parts[: i + 1]}").random() for i in range(len(parts))]

        items.sort(key=place)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
