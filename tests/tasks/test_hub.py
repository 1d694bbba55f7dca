"""Push and pull, with a local server that speaks as much of the hub's API as they need."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import nicest
from nicest import Run
from nicest.runs.folder import MODEL
from nicest.tasks.hub import SUMS, pull, push

pytestmark = pytest.mark.filterwarnings("ignore")  # of the hub's client


@pytest.fixture(autouse=True)
def _client() -> None:
    pytest.importorskip("huggingface_hub")


class Hub(BaseHTTPRequestHandler):
    """Repositories in memory: each a list of commits, each the files by name."""

    protocol_version = "HTTP/1.1"
    repos: dict[str, list[tuple[str, dict[str, bytes]]]]
    objects: dict[str, bytes]
    cut: str  # the name of a file that comes incomplete

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, body: Any = None, status: int = 200, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def fail(self, status: int, code: str) -> None:
        self.answer({"error": code}, status, X_Error_Code=code)

    def commit_of(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commits = self.repos[repo]
        if revision == "main":
            return commits[-1]
        return next((each for each in commits if each[0] == revision), None)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/(.+))?", path):
            repo, revision = match[1], match[2] or "main"
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo, revision = match[1], match[2]
        else:
            return self.answer({}, 404)
        if not self.repos.get(repo):
            return self.fail(404, "RepoNotFound")
        if (commit := self.commit_of(repo, revision)) is None:
            return self.fail(404, "RevisionNotFound")
        if path.startswith("/api"):
            names = [{"rfilename": name} for name in commit[1]]
            return self.answer({"id": repo, "modelId": repo, "sha": commit[0], "siblings": names})
        content = commit[1][match[3]]
        told = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit[0]}
        told["Content-Length"] = str(len(content))
        if match[3] == self.cut and self.command == "GET":
            self.close_connection = True
            self.send_response(200)
            for name, value in told.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            return None
        return self.answer(content, **{name.replace("-", "_"): value for name, value in told.items()})

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        self.objects[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        if self.headers.get("Authorization") != "Bearer hf_mine":
            return self.answer({"error": "no"}, 401)
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.repos.setdefault(repo, [])
            return self.answer({"url": f"{self.server_url}/{repo}"})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if "/preupload/" in path:
            modes = [
                {"path": each["path"], "uploadMode": "lfs" if "safetensors" in each["path"] else "regular"}
                for each in json.loads(body)["files"]
            ]
            return self.answer({"files": [each | {"shouldIgnore": False} for each in modes]})
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                each | {"actions": {"upload": {"href": f"{self.server_url}/objects/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            files = dict(self.repos[match[1]][-1][1]) if self.repos[match[1]] else {}
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.objects[value["oid"]]
            oid = hashlib.sha1(body).hexdigest()
            self.repos[match[1]].append((oid, files))
            return self.answer({"commitUrl": f"{self.server_url}/{match[1]}/commit/{oid}", "commitOid": oid})
        return self.answer({}, 404)

    @property
    def server_url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    class Mine(Hub):
        repos: dict[str, Any] = {}  # noqa: RUF012
        objects: dict[str, bytes] = {}  # noqa: RUF012
        cut = ""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Mine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # a storage of its own, beside LFS
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    yield Mine
    server.shutdown()
    server.server_close()


def changed(hub: type[Hub], name: str, content: bytes | None) -> None:
    """A commit in which a file is another, or gone."""
    files = dict(hub.repos["me/digits"][-1][1])
    files.pop(name)
    hub.repos["me/digits"].append(
        (f"{len(hub.repos['me/digits']):040}", files if content is None else files | {name: content})
    )


def test_what_was_pushed_comes_back(hub: type[Hub], digits_run: Run, tmp_path: Path):
    pushed = push(digits_run, "me/digits", about="small digits")
    ((revision, files),) = hub.repos["me/digits"]
    assert pushed.revision == revision
    assert {MODEL, "card.json", "README.md", SUMS} <= files.keys()
    assert hashlib.sha256(files[MODEL]).hexdigest() == pushed.sha256
    readme = files["README.md"].decode()
    assert f"{pushed.test_nats:.2f} ± {pushed.test_stderr:.2f} (standard error) | nats per image" in readme
    assert "of a density of pixels on [0.0, 1.0]" in readme
    assert "180 test images, 8 draws" in readme
    pulled = pull("me/digits")
    assert pulled.revision == revision
    assert sorted(path.name for path in Path(pulled.out).iterdir()) == sorted(files.keys() - {"README.md", SUMS})
    x = digits_run.flow.sample(5)
    some, other = nicest.open("runs/digits", verify=True).flow, digits_run.flow
    assert torch.allclose(some.log_prob(x, noise=False), other.log_prob(x, noise=False), rtol=2e-2)  # of bfloat16
    again = push(nicest.open("runs/digits"), "me/copy")  # as it is, without its data
    assert again.sha256 == pushed.sha256


def test_a_revision_is_pinned_and_one_that_vanished_is_named(hub: type[Hub], digits_run: Run, refusal: Callable):
    first = push(digits_run, "me/digits").revision
    changed(hub, "card.json", b"{}")
    pull("me/digits", revision=first, out="first")
    assert nicest.open("first", verify=True).flow.dim == 64
    hub.repos["me/digits"].pop(0)
    assert f"me/digits has no revision '{first}', or no longer" in refusal(
        pull, "me/digits", revision=first, out="gone"
    )
    assert "the hub has no repository me/other" in refusal(pull, "me/other")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("card.json", b"{}", "card.json is not the file that was pushed"),
        (MODEL, None, "holds no run that `nicest push` wrote: it lacks 'model.safetensors'"),
        (SUMS, None, "it lacks 'SHA256SUMS'"),
        ("recipe.toml", b"evil = 1", "recipe.toml is not the file that was pushed"),
    ],
)
def test_what_is_not_whole_is_refused(
    name: str, content: bytes | None, said: str, hub: type[Hub], digits_run: Run, refusal: Callable
):
    push(digits_run, "me/digits")
    changed(hub, name, content)
    assert said in refusal(pull, "me/digits")
    assert not list(Path("runs").glob("*")) if Path("runs").exists() else True


def test_a_card_without_figures_is_refused_even_if_its_digest_fits(hub: type[Hub], digits_run: Run, refusal: Callable):
    push(digits_run, "me/digits")
    sums = hub.repos["me/digits"][-1][1][SUMS].decode()
    files, bare = hub.repos["me/digits"][-1][1], b'{"about": "nothing"}'
    old = hashlib.sha256(files["card.json"]).hexdigest()
    changed(hub, SUMS, sums.replace(old, hashlib.sha256(bare).hexdigest()).encode())
    changed(hub, "card.json", bare)
    assert "card.json has no figures, it lacks 'test_nats'" in refusal(pull, "me/digits", revision="main")


def test_a_download_that_is_cut_off_leaves_nothing(hub: type[Hub], digits_run: Run, refusal: Callable):
    push(digits_run, "me/digits")
    hub.cut = MODEL
    assert "the exchange with the hub failed" in refusal(pull, "me/digits")
    assert list(Path("runs").iterdir()) == []
    hub.cut = ""
    assert pull("me/digits").test_rows == 180
    assert "holds a run already" in refusal(pull, "me/digits")


def test_refusals_are_one_line(hub: type[Hub], digits_run: Run, monkeypatch: pytest.MonkeyPatch, refusal: Callable):
    assert "expected a repository as OWNER/NAME, got '../x'" in refusal(push, digits_run, "../x")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert "log in with `hf auth login` and a token that may write" in refusal(push, digits_run, "me/digits")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert "the exchange with the hub failed" in refusal(pull, "me/digits")
