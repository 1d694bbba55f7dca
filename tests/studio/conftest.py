"""Small runs for the studio to serve: images, labelled images, a table, and a run without a model."""

import asyncio
import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nicest.recipes import load_recipe
from nicest.train.fit import train

pytest.importorskip("fastapi", reason="the studio is not installed: pip install 'nicest[studio]'")
import httpx

from nicest.studio.guard import Guard
from nicest.studio.limits import Desk
from nicest.studio.server import create_app

TINY = ("model.width=16", "model.hidden_layers=1", "train.batch=50", "train.lr=0.02", "train.warmup=0")
DIGITS, PEOPLE = "/api/runs/digits", "/api/runs/people"
Ask = Callable[..., httpx.Response]


def packed(array: np.ndarray) -> str:
    return base64.b64encode(array.astype(np.uint8).tobytes()).decode()


def levels(picture: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(picture), np.uint8).reshape(8, 8)


def png(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    parts = [part.split("\n") for part in text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]


TOP = packed(np.arange(64) < 32)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("studio") / "digits"
    train(load_recipe("digits"), out, overrides=(*TINY, "train.epochs=20", "train.evaluate_every=2"), device="cpu")
    return out


@pytest.fixture(scope="session")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits given their labels."""
    out = tmp_path_factory.mktemp("studio") / "labelled"
    own = ("model.width=128", "train.epochs=20", "train.weight_decay=0.1", "train.ema=0.95", "train.evaluate_every=5")
    train(load_recipe("digits-labels"), out, overrides=(*TINY, "train.batch=100", *own), device="cpu")
    return out


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """People whose weight is 0.4 of their height plus N(0, 1)."""
    folder = tmp_path_factory.mktemp("studio")
    rng = np.random.default_rng(0)
    height = rng.normal(170, 10, 1000)
    lines = [f"{h:.2f},{h * 0.4 + rng.normal():.2f},{rng.choice(['red', 'blue'])}" for h in height]
    (folder / "people.csv").write_text("\n".join(["height,weight,colour", *lines]) + "\n")
    own = (f'data.name="{folder / "people.csv"}"', "train.epochs=40", "train.evaluate_every=10")
    train(load_recipe("table"), folder / "people", overrides=own, device="cpu")
    return folder / "people"


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder without a model yet."""
    out = tmp_path_factory.mktemp("studio") / "young"
    out.mkdir()
    return out


@pytest.fixture(scope="session")
def app(digits: Path, table: Path, empty: Path, tmp_path_factory: pytest.TempPathFactory) -> Guard:
    return create_app([digits, table, empty], folder=tmp_path_factory.mktemp("studio") / "trained", desk=Desk(jobs=2))


@pytest.fixture(scope="session")
def ask(app: Guard) -> Ask:
    return asking(app)


@pytest.fixture(scope="session")
def test_image(ask: Ask) -> str:
    return ask("GET", f"{DIGITS}/pictures?n=1").json()["pictures"][0]


def asking(app: Guard) -> Ask:
    """Return a function that sends a request to the application, in this process."""

    def ask(method: str, path: str, **options: Any) -> httpx.Response:
        async def once() -> httpx.Response:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
                return await client.request(method, path, **options)

        return asyncio.run(once())

    return ask
