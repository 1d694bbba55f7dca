"""The tests that send signals do not depend on how the tests were started: `make test &` of a script ignores SIGINT."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
IGNORING = ("sh", "-c", 'trap "" INT TERM; exec "$@"', "sh")  # what follows is started with both ignored


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name)
def test_a_process_that_a_test_starts_hears_signals(number: signal.Signals):
    code = f"import signal; signal.raise_signal({number:d})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert ended.returncode == -number
    # the counterpart: started with them ignored, it lives on
    ignored = subprocess.run([*IGNORING, sys.executable, "-c", code], capture_output=True, timeout=60)
    assert ignored.returncode == 0


def test_the_process_of_the_tests_hears_signals():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_tests_that_are_started_with_signals_ignored_pass():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_signals.py", "-k", "hear"]
    ended = subprocess.run([*IGNORING, *command], cwd=TESTS, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout
    assert "3 passed" in ended.stdout
