"""`nicest studio` as a person starts it."""

import json
import signal
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


def test_it_warns_gives_its_token_serves_and_ends_quietly_while_it_inpaints(digits: Path):
    """On every address of the machine, by one name, until Ctrl-C."""
    with studio(str(digits), "--port", "0", "--json", "--host", "0.0.0.0", "--allow-host", "127.0.0.1") as process:
        assert process.stdout
        assert process.stderr
        url = json.loads(process.stdout.readline())["url"]
        assert url.startswith("http://127.0.0.1:")
        home, _, token = url.partition("/?token=")
        assert len(token) > 20
        with httpx.Client(base_url=home, timeout=60, follow_redirects=True) as browser:
            assert browser.get("/").status_code == 401
            assert "<title>nicest studio</title>" in browser.get(url).text
            picture = browser.get("/api/runs/digits/pictures?n=1").json()["pictures"][0]
            mask = browser.get("/api/runs/digits/mask?name=top").json()["mask"]
            ask = {"picture": picture, "mask": mask, "steps": 5000}
            with browser.stream("POST", "/api/runs/digits/inpaint", json=ask) as answer:
                lines = answer.iter_lines()
                assert next(lines) == "event: start"
                process.send_signal(signal.SIGINT)
                assert "event: end" not in list(lines)
        assert process.wait(30) == 0
        warning = process.stderr.read()
        assert warning.startswith("warning: on 0.0.0.0 anyone who knows the address and its token")
        assert warning.count("\n") == 1


def test_without_a_run_it_serves_the_model_of_mnist_that_comes_with_nicest(tmp_path: Path):
    """And opens with samples, since the data does not come with it."""
    with studio("--port", "0", "--json", "--folder", str(tmp_path)) as process:
        assert process.stdout
        with httpx.Client(base_url=json.loads(process.stdout.readline())["url"], timeout=60) as browser:
            run = browser.get("/api/runs").json()["runs"][0]
            assert (run["id"], run["kind"], run["shape"]) == ("mnist", "images", [28, 28])
            assert len(browser.get("/api/runs/mnist/samples?n=24").json()["pictures"]) == 24
