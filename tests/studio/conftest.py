"""Tiny runs that the studio serves: images, a table, and one without a model; and the application around them."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nicest.recipes import load_recipe
from nicest.train.fit import train

pytest.importorskip("fastapi", reason="the studio is not installed: pip install 'nicest[studio]'")
import httpx

from nicest.studio.guard import Guard
from nicest.studio.limits import Desk
from nicest.studio.server import create_app

TINY = ("model.width=16", "model.hidden_layers=1", "train.batch=50", "train.lr=0.02", "train.warmup=0")
Ask = Callable[..., httpx.Response]


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
    folder = tmp_path_factory.mktemp("studio")
    rng = np.random.default_rng(0)
    height = rng.normal(170, 10, 300)
    lines = [f"{h:.2f},{h * 0.4 + rng.normal():.2f},{rng.choice(['red', 'blue'])}" for h in height]
    (folder / "people.csv").write_text("\n".join(["height,weight,colour", *lines]) + "\n")
    own = (f'data.name="{folder / "people.csv"}"', "train.epochs=3", "train.evaluate_every=1")
    train(load_recipe("digits"), folder / "people", overrides=(*TINY, *own), device="cpu")
    return folder / "people"


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which training has not got to a model."""
    out = tmp_path_factory.mktemp("studio") / "young"
    out.mkdir()
    return out


@pytest.fixture(scope="session")
def app(digits: Path, table: Path, empty: Path, tmp_path_factory: pytest.TempPathFactory) -> Guard:
    return create_app([digits, table, empty], folder=tmp_path_factory.mktemp("studio") / "trained", desk=Desk(jobs=2))


@pytest.fixture(scope="session")
def ask(app: Guard) -> Ask:
    return asking(app)


def asking(app: Guard) -> Ask:
    """Ask the application, in this process."""

    def ask(method: str, path: str, **options: Any) -> httpx.Response:
        async def once() -> httpx.Response:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
                return await client.request(method, path, **options)

        return asyncio.run(once())

    return ask
