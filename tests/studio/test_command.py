"""`nicest studio` as a person starts it."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx


@contextmanager
def studio(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "nicest", "studio", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_it_says_where_it_listens_serves_and_ends_quietly(digits: Path):
    with studio(str(digits), "--port", "0", "--json") as process:
        assert process.stdout
        assert process.stderr
        url = json.loads(process.stdout.readline())["url"]
        assert url.startswith("http://127.0.0.1:")
        page = httpx.get(url, timeout=30)
        assert "<title>nicest studio</title>" in page.text
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr.read() == ""


def test_another_host_is_warned_of(digits: Path):
    with studio(str(digits), "--port", "0", "--host", "0.0.0.0") as process:
        assert process.stderr
        assert "anyone who reaches this machine" in process.stderr.readline()


def test_a_port_that_is_taken_is_named(digits: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with studio(str(digits), "--port", str(taken.getsockname()[1])) as process:
            out, error = process.communicate(timeout=60)
        assert process.returncode == 1
        assert out == ""
        assert "choose another --port" in error
