"""The server: which runs it serves, what it refuses, clients that stall, and `nicest studio` as a process."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nicest.studio import api, images, limits
from nicest.studio.guard import HEADERS, PATIENCE
from nicest.studio.images import Images
from nicest.studio.limits import Desk
from nicest.studio.served import Served, name_runs
from nicest.studio.server import PAGE, bind, create_app, is_loopback, make_server, names, serve
from studio.conftest import DIGITS, TOP, Ask, asking, packed, png


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


class TestRuns:
    def test_named_runs_are_listed(self, ask: Ask, digits: Path):
        found = ask("GET", "/api/runs").json()
        one, table, young = found["runs"]
        assert (one["id"], one["kind"], one["shape"], one["levels"]) == ("digits", "images", [8, 8], 17)
        assert (table["id"], table["kind"], table["dim"]) == ("people", "table", 3)
        assert not young["ready"]
        assert "nicest train" in young["why"]
        assert found["masks"][0] == "top"
        assert list(name_runs([digits, digits, digits])) == ["digits", "digits-2", "digits-3"]

    def test_a_run_without_a_model_says_so_and_has_its_metrics(self, ask: Ask):
        answer = ask("GET", "/api/runs/young/samples")
        assert answer.status_code == 409
        assert "has no model yet" in answer.json()["error"]
        assert ask("GET", "/api/runs/young/metrics").json() == {
            "process": {"here": False, "running": False, "failed": False, "said": ""},
            "rows": [],
            "idle_seconds": None,
            "epochs": 0,
            "patience": 0,
            "best_epoch": None,
            "finished": False,
        }

    def test_a_model_that_is_damaged_replaced_or_deleted(self, digits: Path, table: Path, tmp_path: Path):
        run = Path(shutil.copytree(digits, tmp_path / "run"))
        ask = asking(create_app([run]))
        form = {"nicest-form": ask("GET", "/api/runs").json()["runs"][0]["form"]}
        model = run / "model.safetensors"
        content = model.read_bytes()
        for time_of_change in (0, 1):  # the same model in another file, as training writes it, disturbs nobody
            os.utime(model, ns=(time_of_change, time_of_change))
            assert ask("GET", "/api/runs/run/samples?n=1", headers=form).status_code == 200
        with model.open("r+b") as file:  # in place: the same inode
            file.write(b"junk" * 1000)
        damaged = ask("GET", "/api/runs/run/samples?n=1", headers=form)
        assert damaged.status_code == 409
        assert "damaged" in damaged.json()["error"]
        assert "damaged" in ask("GET", "/api/runs").json()["runs"][0]["why"]
        model.write_bytes(content)
        assert ask("GET", "/api/runs/run/samples?n=1", headers=form).status_code == 200
        shutil.rmtree(run)
        shutil.copytree(table, run)
        replaced = ask("GET", "/api/runs/run/rows?n=1", headers=form)
        assert replaced.status_code == 409
        assert "replaced" in replaced.json()["error"]
        assert ask("GET", "/api/runs/run/rows?n=1").status_code == 200
        model.unlink()
        assert "resume the training to write it again" in ask("GET", "/api/runs/run/rows?n=1").json()["error"]
        (run / "last.safetensors").unlink()
        assert "is gone: put it back" in ask("GET", "/api/runs/run/rows?n=1").json()["error"]
        shutil.rmtree(run)
        assert "folder of this run" in ask("GET", "/api/runs").json()["runs"][0]["why"]

    def test_metrics_come_after_a_step_and_the_spectrum_falls(self, ask: Ask):
        rows = ask("GET", f"{DIGITS}/metrics").json()["rows"]
        assert len(rows) == 10
        assert ask("GET", f"{DIGITS}/metrics", params={"after": rows[-2]["step"]}).json()["rows"] == rows[-1:]
        found = ask("GET", f"{DIGITS}/spectrum").json()
        for values in (found["sigma"], found["pca"]):
            assert (len(values), values) == (64, sorted(values, reverse=True))

    def test_a_run_that_stopped_early_is_finished(self, digits: Path, tmp_path: Path):
        served = Served("run", Path(shutil.copytree(digits, tmp_path / "run")))
        run = served.open(Images).run
        run.recipe = replace(run.recipe, train=replace(run.recipe.train, epochs=1500, patience=20))
        nats = {10: 1.0, 20: 3.0, 30: 2.0, 40: 2.5}
        rows = [{"epoch": epoch, "step": 10 * epoch, "valid_nats": value} for epoch, value in nats.items()]
        for count, finished in ((3, False), (4, True)):
            (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
            found = served.metrics(after=200)
            assert (found["best_epoch"], found["finished"], found["epochs"]) == (20, finished, 1500)
            assert [row["epoch"] for row in found["rows"]] == [30, 40][: count - 2]

    def test_what_cannot_be_served_is_refused_at_the_start(
        self, digits: Path, tmp_path: Path, refusal: Callable[..., str]
    ):
        array = tmp_path / "rows.npy"
        array.touch()
        assert "found no" in refusal(create_app, [tmp_path / "none"])
        assert f"got the file {array}" in refusal(serve, [array], port=0)
        assert f"got the file {array}" in refusal(serve, [digits], folder=array, port=0)
        for host in ("", "http://studio.example", "two words", "[::1]", "studio.example:8000"):
            assert "without http:// or port" in refusal(serve, [digits], host=host, port=0)
            assert "without http:// or port" in refusal(serve, [digits], allowed=[host], port=0)
        for host in ("192.0.2.1", "no-such-machine.invalid"):
            assert "choose another --host" in refusal(serve, [digits], host=host, port=0)
        for host in ("0.0.0.0", "::"):
            assert "--allow-host" in refusal(names, host, [])
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            assert "choose another --port" in refusal(serve, [digits], port=taken.getsockname()[1])
        assert all(is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"))
        assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.168.1.2", "example.org", ""))


class TestGuard:
    def test_every_answer_has_its_headers(self, ask: Ask):
        for path in ("/", "/docs", "/api/runs", "/api/nothing", "/page/app.js"):
            answer = ask("GET", path)
            assert {name: answer.headers[name] for name in HEADERS} == HEADERS
        assert "unsafe" not in HEADERS["content-security-policy"]

    @pytest.mark.parametrize(
        "headers",
        [
            {"origin": "http://elsewhere.example"},
            {"origin": "null"},
            {"origin": "http://127.0.0.1:9000"},
            {"origin": "https://127.0.0.1:8000"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
        ],
    )
    def test_a_page_of_another_origin_may_not_post(self, ask: Ask, headers: dict[str, str]):
        for path in (f"{DIGITS}/score", "/api/train/data", "/api/train", "/api/runs/x/stop"):
            assert ask("POST", path, json={}, headers=headers).status_code == 403

    def test_pages_elsewhere_may_only_link_here(self, ask: Ask):
        for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
            assert ask("GET", f"{DIGITS}/samples?n=1", headers={"sec-fetch-site": site}).status_code == status
            assert ask("GET", "/", headers={"sec-fetch-site": site}).status_code == 200
        own = {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}
        assert ask("POST", f"{DIGITS}/upload", content=png(np.zeros((8, 8), np.uint8)), headers=own).status_code == 200

    def test_hosts_and_tokens(self, digits: Path, ask: Ask):
        for host in ("attacker.example", "a@127.0.0.1", "[::1", ""):
            assert ask("GET", "/api/runs", headers={"host": host}).status_code == 400
        assert ask("GET", "/api/runs", headers={"host": "localhost:8000"}).status_code == 200
        assert names("192.168.1.2", [])[0] == "192.168.1.2"
        ask = asking(create_app([digits], hosts=names("0.0.0.0", ["Studio.example"]), token="secret"))
        host = {"host": "studio.example:8000"}
        assert ask("GET", "/", headers={"host": "attacker.example"}).status_code == 400
        for path in ("/", "/api/runs", "/page/app.js", "/?token=wrong", "/api/runs?token=secret"):
            answer = ask("GET", path, headers=host)
            assert answer.status_code == 401
            assert "token" in answer.json()["error"]
        assert ask("POST", "/api/train/data", content=b"a,b\n1,2\n", headers=host).status_code == 401
        opened = ask("GET", "/?token=secret", headers=host)
        assert (opened.status_code, opened.headers["location"]) == (303, "/")
        cookie = opened.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=lax"} <= set(cookie.split("; "))
        for known in ({"cookie": f"a=b; {cookie.split(';')[0]}"}, {"authorization": "Bearer secret"}):
            assert ask("GET", "/api/runs", headers=host | known).status_code == 200
        assert ask("GET", "/api/runs", headers=host | {"cookie": "nicest-8000=wrong"}).status_code == 401

    @pytest.mark.parametrize("megabytes", [9, 20, 2000])
    def test_a_body_of_unknown_size_is_cut_off(self, ask: Ask, megabytes: int):
        sent = []

        async def endless() -> Any:
            for _ in range(megabytes):
                sent.append(2**20)
                yield bytes(2**20)

        for content in (endless(), bytes(limits.BODY + 1)):
            answer = ask("POST", f"{DIGITS}/upload", content=content)
            assert answer.status_code == 413
            assert "8 MB" in answer.json()["error"]
        assert sum(sent) <= 2**20 + PATIENCE * limits.BODY

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"not an image",
            b"\x89PNG\r\n\x1a\n" + bytes(40),
            b"%!PS-Adobe-3.0",
            png(np.zeros((1, 5000), np.uint8)),
        ],
    )
    def test_what_is_no_image_is_refused_in_words(self, ask: Ask, content: bytes):
        answer = ask("POST", f"{DIGITS}/upload", content=content)
        assert answer.status_code == 422
        assert "expected a picture" in answer.json()["error"]
        assert " object at 0x" not in answer.json()["error"]

    def test_broken_json_is_named(self, ask: Ask):
        for content, at in ((b"{'a': 1}", 1), (b'{"pictures": [', 14)):
            headers = {"content-type": "application/json"}
            answer = ask("POST", f"{DIGITS}/score", content=content, headers=headers)
            assert answer.status_code == 422
            assert "expected JSON in the body, got something else" in answer.json()["error"]
            assert f"at character {at}" in answer.json()["error"]

    def test_a_bug_is_one_clear_line(self, ask: Ask, monkeypatch: pytest.MonkeyPatch, capfd: Any):
        def broken(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError("two\nlines")

        monkeypatch.setattr(Images, "samples", broken)
        assert ask("GET", f"{DIGITS}/samples").status_code == 500
        said = capfd.readouterr().err
        assert said.startswith(f"error: GET {DIGITS}/samples failed with ZeroDivisionError: two lines (a bug in nicest")
        assert said.count("\n") == 1

    @pytest.mark.parametrize(
        "path",
        [
            "/page/../server.py",
            "/page/%2e%2e/server.py",
            "/page/..%2fserver.py",
            "/page//etc/passwd",
            "/page/%2fetc%2fpasswd",
            "/page/app.js%00",
            "/../../etc/passwd",
            "/api/runs/..%2f..%2fetc/samples",
            "/api/runs/%2e%2e/samples",
            "/api/runs/digits%2f..%2fdigits/samples",
        ],
    )
    def test_no_path_reaches_outside(self, ask: Ask, path: str):
        answer = ask("GET", path)
        assert answer.status_code == 404
        assert "error" in answer.json()

    def test_the_page_is_small_and_names_no_other_host(self):
        files = list(PAGE.iterdir())
        assert sum(file.stat().st_size for file in files) < 250_000
        for file in files:
            assert "://" not in file.read_text().replace("http://www.w3.org/2000/svg", "")


@pytest.fixture
def listening(digits: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A real server with two slots and little patience."""
    for name, value in {"HEAD_SECONDS": 2, "BODY_SECONDS": 1, "SEND_SECONDS": 1, "CONNECTIONS": 20}.items():
        monkeypatch.setattr(limits, name, value)
    monkeypatch.setattr(images, "SECONDS", 0)  # every step is a frame that is sent at once:
    monkeypatch.setattr(api, "FRAME", 0)  # soon there is more than the buffers hold
    server, found = make_server(create_app([digits], desk=Desk(jobs=2))), bind("127.0.0.1", 0)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    thread = threading.Thread(target=server.run, args=([found],))
    thread.start()
    yield found.getsockname()
    server.should_exit = True
    thread.join(20)
    found.close()


def raw(address: tuple[str, int], text: bytes, *, small: bool = False) -> socket.socket:
    client = socket.socket()
    if small:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.settimeout(20)
    client.connect(address)
    client.sendall(text)
    return client


class TestStalling:
    """Clients that hold on to what they were given lose it, and the others never notice."""

    HEAD = b"POST /api/runs/digits/%s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"

    def test_a_client_that_does_not_read_loses_its_slot(self, listening: tuple[str, int]):
        asked = {"picture": packed(np.zeros(64)), "mask": TOP}
        body = json.dumps(asked | {"steps": limits.STEPS, "chains": 8}).encode()
        text = self.HEAD % b"inpaint" + b"Content-Length: %d\r\n\r\n" % len(body) + body
        stalled = [raw(listening, text, small=True) for _ in range(2)]
        with httpx.Client(base_url=f"http://127.0.0.1:{listening[1]}", timeout=30) as client:
            until(lambda: client.get("/api/status").json()["ascents"] == 2)
            assert client.post("/api/runs/digits/inpaint", json=asked).status_code == 429
            until(lambda: client.get("/api/status").json()["ascents"] == 0)
            assert client.post("/api/runs/digits/inpaint", json=asked | {"steps": 1}).status_code == 200
        for each in stalled:
            each.close()

    def test_slow_heads_slow_bodies_and_too_many_clients(self, listening: tuple[str, int]):
        head = raw(listening, b"GET / HTTP/1.1\r\nHost: 127")
        body = raw(listening, self.HEAD % b"score" + b"Content-Length: 99\r\n\r\n{")
        assert b" 408 " in body.recv(200)
        assert head.recv(100) == b""
        many = [raw(listening, b"") for _ in range(20)]
        with pytest.raises(httpx.TransportError):  # one too many
            httpx.get(f"http://127.0.0.1:{listening[1]}/api/status")
        assert all(each.recv(1) == b"" for each in many)  # silent clients are dropped
        assert httpx.get(f"http://127.0.0.1:{listening[1]}/api/status").status_code == 200
        for each in (head, body, *many):
            each.close()


@contextmanager
def studio(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "nicest", "studio", *arguments, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


class TestCommand:
    def test_it_warns_prints_its_token_and_ends_quietly_while_it_inpaints(self, digits: Path):
        with studio(str(digits), "--host", "0.0.0.0", "--allow-host", "127.0.0.1") as process:
            assert process.stdout
            assert process.stderr
            url = json.loads(process.stdout.readline())["url"]
            home, _, token = url.partition("/?token=")
            assert len(token) > 20
            with httpx.Client(base_url=home, timeout=60, follow_redirects=True) as browser:
                assert browser.get("/").status_code == 401
                assert "<title>nicest studio</title>" in browser.get(url).text
                ask = {"picture": packed(np.zeros(64)), "mask": TOP, "steps": 5000}
                with browser.stream("POST", "/api/runs/digits/inpaint", json=ask) as answer:
                    assert next(answer.iter_lines()) == "event: start"
                    process.send_signal(signal.SIGINT)
                    assert process.wait(30) == 0
            warning = process.stderr.read()
            assert warning.startswith("warning: on 0.0.0.0 anyone who knows the address and its token")
            assert warning.count("\n") == 1

    def test_without_a_run_it_serves_the_included_model_of_mnist(self, tmp_path: Path):
        with studio("--folder", str(tmp_path)) as process:
            assert process.stdout
            with httpx.Client(base_url=json.loads(process.stdout.readline())["url"], timeout=60) as browser:
                run = browser.get("/api/runs").json()["runs"][0]
                assert (run["id"], run["kind"], run["shape"]) == ("mnist", "images", [28, 28])
                assert len(browser.get("/api/runs/mnist/samples?n=24").json()["pictures"]) == 24


STRANGE = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=20), st.lists(st.none())
)


def values_of(schema: dict[str, Any], components: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """Return values as a schema describes them, and now and then others."""
    if "$ref" in schema:
        schema = components[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return st.one_of(*(values_of(each, components, depth) for each in schema["anyOf"]))
    if "enum" in schema:
        return st.one_of(st.sampled_from(schema["enum"]), st.text(max_size=8))
    low, high = schema.get("minimum", -(2**40)), schema.get("maximum", 2**40)
    fields = {name: values_of(each, components, depth + 1) for name, each in schema.get("properties", {}).items()}
    plain: dict[Any, st.SearchStrategy[Any]] = {
        "integer": st.integers(int(low), int(high)),
        "number": st.floats(low, high),
        "string": st.one_of(st.sampled_from([TOP, packed(np.zeros(64))]), st.text(max_size=30)),
        "boolean": st.booleans(),
        "object": st.fixed_dictionaries({}, optional=fields),
    }
    kind = schema.get("type")
    if kind == "array":
        found = st.lists(values_of(schema.get("items", {}), components, depth + 1), max_size=3)
    else:
        found = plain.get(kind, st.none())
    return st.one_of(found, found, found, STRANGE) if depth else found


@pytest.fixture(scope="session")
def schema(ask: Ask) -> dict[str, Any]:
    return ask("GET", "/openapi.json").json()


class TestFuzz:
    def test_the_description_names_every_refusal(self, schema: dict[str, Any]):
        for path, methods in schema["paths"].items():
            for method, what in methods.items():
                assert {"413", "422", "429"} <= what["responses"].keys(), (method, path)
                assert what["description"]

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def test_no_request_makes_the_server_fail(self, ask: Ask, schema: dict[str, Any], data: st.DataObject):
        components = schema["components"]["schemas"]
        path = data.draw(st.sampled_from(sorted(schema["paths"])))
        method, what = next(iter(schema["paths"][path].items()))
        run = data.draw(st.sampled_from(["digits", "digits", "people", "people", "young", "none", "%00", "ü"]))
        params = {
            each["name"]: str(data.draw(values_of(each["schema"], components, 1)))
            for each in what.get("parameters", [])
            if each["in"] == "query" and data.draw(st.booleans())
        }
        options: dict[str, Any] = {"params": params}
        content = what.get("requestBody", {}).get("content", {})
        if "application/json" in content:
            body = data.draw(values_of(content["application/json"]["schema"], components))
            if isinstance(body, dict) and isinstance(body.get("steps"), int):
                body["steps"] = min(body["steps"], 5)  # long requests are tested elsewhere
            options |= {"content": json.dumps(body).encode(), "headers": {"content-type": "application/json"}}
        elif content:
            options["content"] = data.draw(st.binary(max_size=200))
        answer = ask(method.upper(), path.replace("{run}", run), **options)
        assert answer.status_code in (200, 404, 409, 422, 413, 429), (answer.status_code, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]
