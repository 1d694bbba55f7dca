"""The studio's server, asked in this process: what it gives, what it refuses, and that it stays within its runs."""

import asyncio
import base64
import gc
import io
import json
import os
import shutil
import signal
import socket
import threading
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import nicest
from nicest.data import load
from nicest.data.cells import decode
from nicest.data.columns import Column
from nicest.recipes import load_recipe
from nicest.studio import endpoints, images, limits
from nicest.studio.films import Film
from nicest.studio.guard import HEADERS, PATIENCE, Guard
from nicest.studio.images import Images
from nicest.studio.limits import Desk
from nicest.studio.messages import Move
from nicest.studio.rows import _ends, _typed
from nicest.studio.served import LABELLED, Loaded, Served
from nicest.studio.server import PAGE, bind, create_app, is_loopback, make_server, name_runs, names, serve
from nicest.studio.trainer import Trainer
from nicest.tasks.evaluate import evaluate
from nicest.tasks.latent import Model
from nicest.tasks.score import keep_quantiles
from nicest.train.fit import train
from studio.conftest import asking

Ask = Callable[..., httpx.Response]
DIGITS = "/api/runs/digits"


def levels(picture: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(picture), np.uint8).reshape(8, 8)


def packed(array: np.ndarray) -> str:
    return base64.b64encode(array.astype(np.uint8).tobytes()).decode()


def png(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    parts = [part.split("\n") for part in text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]


@pytest.fixture(scope="session")
def test_image(ask: Ask) -> str:
    return ask("GET", f"{DIGITS}/pictures?n=1").json()["pictures"][0]


TOP = packed(np.arange(64) < 32)


class TestRuns:
    def test_all_that_are_named_are_there_with_what_they_are_of(self, ask: Ask):
        found = ask("GET", "/api/runs").json()
        images, table, young = found["runs"]
        assert (images["id"], images["kind"], images["shape"], images["levels"]) == ("digits", "images", [8, 8], 17)
        assert (table["id"], table["kind"], table["dim"]) == ("people", "table", 3)
        assert not young["ready"]
        assert "nicest train" in young["why"]
        assert found["masks"][0] == "top"

    def test_two_of_one_name_are_told_apart(self, digits: Path):
        assert list(name_runs([digits, digits, digits])) == ["digits", "digits-2", "digits-3"]

    def test_every_label_of_a_run_is_one(self, labelled: Path, digits: Path):
        """Samples of each are what another classifier takes them for."""
        found = name_runs([labelled, digits, labelled])
        assert list(found) == [
            *(f"labelled-label-{k}" for k in range(10)),
            "digits",
            *(f"labelled-2-label-{k}" for k in range(10)),
        ]
        sklearn = load_digits()
        judge = LogisticRegression(max_iter=2000).fit(sklearn.data, sklearn.target)
        ask = asking(create_app([labelled], desk=Desk(jobs=2)))
        runs = ask("GET", "/api/runs").json()["runs"]
        assert [run["name"] for run in runs] == [f"labelled, label {k}" for k in range(10)]
        assert all(run["ready"] and run["dim"] == 64 for run in runs)
        for label in (0, 3):
            given = ask("GET", f"/api/runs/labelled-label-{label}/samples", params={"n": 30}).json()["pictures"]
            rows = np.array([levels(each).flatten() for each in given])
            assert (judge.predict(rows) == label).mean() > 0.6

    def test_a_run_that_is_not_there_is_refused_before_serving(self, refusal: Callable[..., str], tmp_path: Path):
        assert "found no" in refusal(create_app, [tmp_path / "none"])

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

    def test_one_that_predicts_columns_from_the_others_says_so(self, table: Path, tmp_path: Path):
        data = f'data.name="{table.parent / "people.csv"}"'
        small = ("train.effort=low", "train.epochs=1", "model.width=4", "model.members=1")
        train(load_recipe("table"), tmp_path / "run", overrides=(data, 'data.target=["height"]', *small), device="cpu")
        ask = asking(create_app([tmp_path / "run"]))
        answer = ask("GET", "/api/runs/run/samples")
        assert answer.status_code == 409
        assert "is a model of 'height' given the other columns" in answer.json()["error"]
        assert "use `nicest predict`" in ask("GET", "/api/runs").json()["runs"][0]["why"]

    def test_one_that_is_damaged_replaced_or_deleted_says_so(self, digits: Path, table: Path, tmp_path: Path):
        run = Path(shutil.copytree(digits, tmp_path / "run"))
        ask = asking(create_app([run]))
        form = {"nicest-form": ask("GET", "/api/runs").json()["runs"][0]["form"]}
        assert ask("GET", "/api/runs/run/samples?n=1", headers=form).status_code == 200
        model = run / "model.safetensors"
        content = model.read_bytes()
        os.utime(model, ns=(1, 1))  # the same model in another file, as training writes it: nobody is disturbed
        assert ask("GET", "/api/runs/run/samples?n=1", headers=form).status_code == 200
        with model.open("r+b") as file:  # in its place: the same inode
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


class TestPictures:
    def test_test_images_are_those_of_the_data(self, ask: Ask, digits: Path):
        rows = nicest.open(digits).splits.test
        found = ask("GET", f"{DIGITS}/pictures?first=3&n=2").json()
        assert found["total"] == len(rows)
        for picture, row in zip(found["pictures"], rows[3:5], strict=True):
            np.testing.assert_array_equal(levels(picture).ravel(), row)

    def test_samples_depend_on_seed_and_temperature(self, ask: Ask):
        one, again, other, cold = (
            ask("GET", f"{DIGITS}/samples", params={"n": 3, **more}).json()["pictures"]
            for more in ({}, {}, {"seed": 1}, {"temperature": 0})
        )
        assert one == again != other
        assert len(set(cold)) == 1

    def test_an_upload_becomes_an_image_of_the_model(self, ask: Ask):
        picture = ask("POST", f"{DIGITS}/upload", content=png(np.full((50, 70), 255, np.uint8))).json()["picture"]
        np.testing.assert_array_equal(levels(picture), np.full((8, 8), 16))
        colour = png(np.zeros((5, 5, 3), np.uint8))
        inverted = ask("POST", f"{DIGITS}/upload?inverted=true", content=colour).json()["picture"]
        np.testing.assert_array_equal(levels(inverted), np.full((8, 8), 16))

    def test_ink_on_transparency_is_seen(self, ask: Ask):
        clear = np.full((8, 8, 4), 255, np.uint8)
        clear[:, :4, 3] = 0
        shown = levels(ask("POST", f"{DIGITS}/upload", content=png(clear)).json()["picture"])
        assert (shown[:, :4] == 0).all()
        assert (shown[:, 4:] == 16).all()
        clear[..., :3] = 0
        for inverted, ground in (("false", 16), ("true", 0)):
            ink = levels(ask("POST", f"{DIGITS}/upload?inverted={inverted}", content=png(clear)).json()["picture"])
            assert (ink[:, :4] == ground).all()
            assert (ink[:, 4:] == 16 - ground).all()

    @pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n" + bytes(40), b"%!PS-Adobe-3.0"])
    def test_what_is_no_image_is_refused_in_words(self, ask: Ask, content: bytes):
        answer = ask("POST", f"{DIGITS}/upload", content=content)
        assert answer.status_code == 422
        assert "expected a picture" in answer.json()["error"]
        assert " object at 0x" not in answer.json()["error"]

    def test_an_image_of_too_many_pixels_is_refused(self, ask: Ask):
        answer = ask("POST", f"{DIGITS}/upload", content=png(np.zeros((1, 5000), np.uint8)))
        assert answer.status_code == 422
        assert "4096" in answer.json()["error"]

    def test_a_body_that_is_too_large_is_refused(self, ask: Ask):
        answer = ask("POST", f"{DIGITS}/upload", content=bytes(limits.BODY + 1))
        assert answer.status_code == 413
        assert "8 MB" in answer.json()["error"]

    @pytest.mark.parametrize("megabytes", [9, 20, 2000])
    def test_a_body_that_does_not_say_how_large_it_is_is_cut_off(self, ask: Ask, megabytes: int):
        sent = []

        async def endless() -> Any:
            for _ in range(megabytes):
                sent.append(2**20)
                yield bytes(2**20)

        answer = ask("POST", f"{DIGITS}/upload", content=endless())
        assert answer.status_code == 413
        assert "8 MB" in answer.json()["error"]
        assert sum(sent) <= 2**20 + PATIENCE * limits.BODY

    def test_nobody_waits_for_the_large_files_of_others(self, app: Guard, monkeypatch: pytest.MonkeyPatch):
        gate = threading.Event()
        monkeypatch.setattr(Images, "upload", lambda *_: str(gate.wait(30)))

        async def scenario() -> None:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
                waiting = [asyncio.create_task(client.post(f"{DIGITS}/upload", content=b"x")) for _ in range(4)]
                await asyncio.sleep(0.2)
                answer = await asyncio.wait_for(client.get(f"{DIGITS}/samples?n=1"), 20)
                assert answer.status_code == 200
                gate.set()
                assert [each.status_code for each in await asyncio.gather(*waiting)] == [200] * 4

        asyncio.run(scenario())

    def test_masks_are_the_papers(self, ask: Ask):
        for name, count in (("top", 32), ("random:75", 48)):
            mask = levels(ask("GET", f"{DIGITS}/mask", params={"name": name}).json()["mask"])
            assert mask.sum() == count
        assert ask("GET", f"{DIGITS}/mask?name=nose").status_code == 422


class TestInpainting:
    def test_hidden_pixels_change_the_observed_do_not_and_the_likelihood_rises(self, ask: Ask, test_image: str):
        request = {"picture": test_image, "mask": TOP, "chains": 3, "steps": 80}
        (first, *frames, last) = events(ask("POST", f"{DIGITS}/inpaint", json=request).text)
        assert (first[0], last[0]) == ("start", "end")
        assert {name for name, _ in frames} == {"frame"}
        steps = [data["step"] for _, data in frames]
        assert steps == sorted(set(steps))
        assert (steps[0], steps[-1]) == (0, 80)
        truth = levels(test_image)
        for _, data in frames:
            assert len(data["pictures"]) == len(data["nats"]) == 3
            for picture in data["pictures"]:
                np.testing.assert_array_equal(levels(picture)[4:], truth[4:])
        for chain in range(3):
            ends = [levels(data["pictures"][chain])[:4] for data in (frames[0][1], frames[-1][1])]
            assert (ends[0] != ends[1]).any()
            assert frames[-1][1]["nats"][chain] > frames[0][1]["nats"][chain] + 10

    def test_exact_draws_differ_as_samples_of_the_model_do(self, ask: Ask, test_image: str, digits: Path):
        """Where all is hidden, what is left is the model itself, inside the box of the pixels: the spread has the shape
        of that of its samples, and is a little narrower."""
        request = {"picture": test_image, "chains": 8, "steps": 1000, "method": "draws"}
        half = events(ask("POST", f"{DIGITS}/inpaint", json=request | {"mask": TOP, "steps": 60}).text)
        last = half[-2][1]
        for picture in last["pictures"]:
            np.testing.assert_array_equal(levels(picture)[4:], levels(test_image)[4:])
        assert len(set(last["pictures"])) == 8
        assert max(last["spread"][32:]) == 0
        whole = events(ask("POST", f"{DIGITS}/inpaint", json=request | {"mask": packed(np.ones(64))}).text)[-2][1]
        samples = nicest.open(digits).engine.sample(4000).double().clamp(0, 16)
        expected = samples.std(0).numpy() / 16
        assert 0.7 < np.mean(whole["spread"]) / np.mean(expected) < 1.02
        assert np.corrcoef(whole["spread"], expected)[0, 1] > 0.97
        assert whole["r_hat"] < 1.5

    def test_a_seed_is_a_way(self, ask: Ask, test_image: str):
        request = {"picture": test_image, "mask": TOP, "steps": 10}
        ends = [events(ask("POST", f"{DIGITS}/inpaint", json=request | {"seed": seed}).text)[-2] for seed in (1, 1, 2)]
        assert ends[0] == ends[1] != ends[2]

    @pytest.mark.parametrize(
        ("change", "word"),
        [
            ({"steps": limits.STEPS + 1}, "steps"),
            ({"chains": limits.CHAINS + 1}, "chains"),
            ({"chains": 0}, "chains"),
            ({"noise": -1}, "noise"),
            ({"method": "guess"}, "method"),
            ({"mask": packed(np.zeros(64))}, "hides nothing"),
            ({"mask": packed(np.ones(63))}, "64 bytes"),
            ({"mask": "???"}, "base64"),
            ({"picture": packed(np.zeros(63))}, "64 numbers"),
            ({"picture": packed(np.full(64, 17))}, "levels 0 to 16"),
            ({"path": "/etc/passwd"}, "path"),
        ],
    )
    def test_what_is_wrong_is_named(self, ask: Ask, test_image: str, change: dict[str, Any], word: str):
        answer = ask("POST", f"{DIGITS}/inpaint", json={"picture": test_image, "mask": TOP} | change)
        assert answer.status_code == 422
        assert word in answer.json()["error"]

    def test_one_more_than_the_slots_is_told_to_wait_and_a_client_that_leaves_frees_its_own(
        self, app: Guard, test_image: str, monkeypatch: pytest.MonkeyPatch
    ):
        """Through the application itself: two hold its slots, a third is refused; all leave, and all is free."""
        body = json.dumps({"picture": test_image, "mask": TOP, "steps": limits.STEPS}).encode()

        async def scenario() -> tuple[list[int], int]:
            leaving, statuses = asyncio.Event(), []

            async def client() -> None:
                scope = scope_of("POST", f"{DIGITS}/inpaint", len(body))
                sent = False

                async def receive() -> dict[str, Any]:
                    nonlocal sent
                    if not sent:
                        sent = True
                        return {"type": "http.request", "body": body, "more_body": False}
                    await leaving.wait()
                    return {"type": "http.disconnect"}

                async def send(message: dict[str, Any]) -> None:
                    if message["type"] == "http.response.start":
                        statuses.append(message["status"])

                await app(scope, receive, send)

            clients = [asyncio.create_task(client()) for _ in range(3)]
            while len(statuses) < 3:
                await asyncio.sleep(0.01)
            during = (await status(app))["ascents"]
            leaving.set()
            await asyncio.wait_for(asyncio.gather(*clients), 20)
            assert (await status(app))["ascents"] == 0
            return sorted(statuses), during

        climbing: list[int] = []
        climbers = Loaded.climbers
        monkeypatch.setattr(Loaded, "climbers", lambda self, change: (climbing.append(change), climbers(self, change)))
        gc.disable()  # an ascent ends with its client, not when the rubbish is collected
        try:
            statuses, during = asyncio.run(scenario())
            assert sorted(climbing) == [-1, -1, 1, 1]
        finally:
            gc.enable()
        assert statuses == [200, 200, 429]
        assert during == 2

    def test_the_frames_become_a_gif_from_what_the_server_has(self, ask: Ask, test_image: str):
        request = {"picture": test_image, "mask": TOP, "chains": 2, "steps": 30}
        (_, start), *frames, _ = events(ask("POST", f"{DIGITS}/inpaint", json=request).text)
        answer = ask("GET", f"{DIGITS}/film", params={"id": start["film"]})
        with Image.open(io.BytesIO(answer.content)) as film:
            assert film.format == "GIF"
            assert 2 <= film.n_frames <= len(frames)  # type: ignore[attr-defined]  # of which the same follow each other
            assert film.width > 1.8 * film.height
        assert "run it again" in ask("GET", f"{DIGITS}/film?id=none").json()["error"]

    def test_a_film_of_any_length_and_size_stays_small(self):
        for shape, count in (((2, 8, 8), 5000), ((8, 3, 256, 256), 60)):
            film = Film(brightest=2)
            for i in range(count):
                film.add(np.full(shape, i / count))
            assert 5 <= len(film.frames) <= 200
            assert sum(each.nbytes for each in film.frames) <= 2**24
            np.testing.assert_allclose(
                [each.max() / 127.5 for each in film.frames][:3], np.arange(3) * film.every / count, atol=0.01
            )


def scope_of(method: str, path: str, length: int) -> dict[str, Any]:
    headers = [
        (b"host", b"127.0.0.1:8000"),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % length),
    ]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }


async def status(app: Guard) -> dict[str, int]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        return (await client.get("/api/status")).json()


class TestExploring:
    def test_a_picture_moves_with_its_code_and_not_without(self, ask: Ask, test_image: str):
        still = ask("POST", f"{DIGITS}/move", json={"picture": test_image}).json()
        assert still["picture"] == test_image
        assert len(still["places"]) == len(still["sigma"]) == limits.COMPONENTS
        assert still["sigma"] == sorted(still["sigma"], reverse=True)
        same = ask("POST", f"{DIGITS}/move", json={"picture": test_image, "places": still["places"]}).json()
        assert abs(levels(same["picture"]).astype(int) - levels(test_image)).max() <= 1
        moved = ask("POST", f"{DIGITS}/move", json={"picture": test_image, "places": [3.0, -3.0]}).json()
        assert moved["picture"] != test_image
        assert moved["places"][:2] == [3, -3]
        assert moved["places"][2:] == still["places"][2:]

    def test_of_nothing_kept_every_picture_is_the_same(self, ask: Ask):
        pictures = ask("GET", f"{DIGITS}/pictures?n=2").json()["pictures"]
        cut = [ask("POST", f"{DIGITS}/move", json={"picture": each, "keep": 0}).json() for each in pictures]
        assert cut[0]["picture"] == cut[1]["picture"]
        assert cut[0]["radius"] == 0
        assert ask("POST", f"{DIGITS}/move", json={"picture": pictures[0], "keep": 65}).status_code == 422

    def test_a_sample_keeps_the_code_that_made_it(self, ask: Ask, digits: Path):
        """Where draws lie, and not where its rounded picture does."""
        asked = {"seed": 5, "temperature": 1.0}
        pictures = ask("GET", f"{DIGITS}/samples", params={"n": 7, **asked}).json()
        prior = nicest.open(digits).flow.prior
        draws = prior.rsample(limits.WALL, generator=torch.Generator().manual_seed(5)).detach()
        radii = ((draws - prior.mode) / (prior.standard_deviation * prior.log_scale.exp())).norm(dim=1)
        for index in (0, 6):
            found = ask("POST", f"{DIGITS}/move", json={"sample": {**asked, "index": index}}).json()
            assert found["picture"] == pictures["pictures"][index]
            assert found["radius"] == pytest.approx(float(radii[index]), rel=1e-4)
            assert found["nats"] == pytest.approx(pictures["nats"][index], abs=1e-2)
            assert found["typical_radius"] == 8
        assert float(radii.mean()) == pytest.approx(8, rel=0.1)
        ends = [{"sample": {**asked, "index": index}} for index in (0, 6)]
        way = ask("POST", f"{DIGITS}/between", json={"start": ends[0], "end": ends[1], "count": 3}).json()["pictures"]
        assert [way[0], way[2]] == [pictures["pictures"][0], pictures["pictures"][6]]
        both = {"sample": {"index": 0}, "picture": way[0]}
        for wrong in (both, {}, {"sample": {"index": 0}, "sphere": {"index": 0}}):
            assert "a picture or a sample" in ask("POST", f"{DIGITS}/move", json=wrong).json()["error"]

    def test_the_nats_of_a_code_are_those_of_its_point(self, digits: Path):
        """By the change of variables, log p_H(h) - log |det dy/dh|, from the Jacobian of the decoder."""
        run = nicest.open(digits, dtype=torch.float64)
        model = Model(run)
        h = model.draw(1, seed=1)
        jacobian = torch.autograd.functional.jacobian(lambda h: run.flow.bijection.inverse(h[None])[0][0], h[0])
        expected = run.flow.prior.log_prob(h)[0] - torch.linalg.slogdet(jacobian)[1]  # on [0, 1], the recipe's interval
        assert float(model.code_nats(h)[0]) == pytest.approx(float(expected), abs=1e-8)

    def test_a_way_has_its_ends(self, ask: Ask):
        start, end = ask("GET", f"{DIGITS}/pictures?n=2").json()["pictures"]
        for way in ("straight", "spherical"):
            request = {"start": {"picture": start}, "end": {"picture": end}, "count": 5, "way": way}
            found = ask("POST", f"{DIGITS}/between", json=request).json()
            assert len(found["pictures"]) == len(found["nats"]) == 5
            for picture, own in ((found["pictures"][0], start), (found["pictures"][-1], end)):
                assert abs(levels(picture).astype(int) - levels(own)).max() <= 1

    def test_the_plane_of_three_has_them_as_corners_and_their_means_between(self, ask: Ask, digits: Path):
        corners = [{"sample": {"seed": 2, "index": i}} for i in range(3)]
        pictures = ask("GET", f"{DIGITS}/samples?n=3&seed=2").json()["pictures"]
        points = [[0, 0], [1, 0], [0, 1], [0.5, 0.25]]
        found = ask("POST", f"{DIGITS}/plane", json={"corners": corners, "points": points}).json()
        assert found["pictures"][:3] == pictures
        model = Model(nicest.open(digits))
        h = model.draw(limits.WALL, seed=2)[:3]
        between = model.decode((0.25 * h[0] + 0.5 * h[1] + 0.25 * h[2])[None])
        np.testing.assert_array_equal(levels(found["pictures"][3]).ravel(), between[0].numpy())
        around = model.plane(h, torch.tensor(points), "spherical")
        lengths = ((around - model.loc) / model.scale).norm(dim=1)
        assert float(lengths[3]) == pytest.approx(float(lengths[:3] @ torch.tensor([0.25, 0.5, 0.25])), rel=1e-5)
        for wrong in ({"points": [[0, 9]]}, {"points": [[0]]}, {"points": [[0, 0]] * 101}, {"corners": corners[:2]}):
            assert (
                ask("POST", f"{DIGITS}/plane", json={"corners": corners, "points": points} | wrong).status_code == 422
            )

    def test_a_tile_of_a_sphere_is_taken_over_with_its_code(self, ask: Ask):
        sphere = ask("GET", f"{DIGITS}/sphere?n=20&basis=random&seed=3").json()
        point = {"basis": "random", "seed": 3, "n": 20, "index": 7}
        found = ask("POST", f"{DIGITS}/move", json={"sphere": point, "ends": True}).json()
        assert found["picture"] == sphere["pictures"][7]
        assert found["radius"] == pytest.approx(8, rel=1e-4)
        assert len(found["ends"]) == limits.COMPONENTS
        high = ask("POST", f"{DIGITS}/move", json={"sphere": point, "places": [found["places"][0], 3.0]}).json()
        assert abs(levels(high["picture"]).astype(int) - levels(found["ends"][1][1])).max() <= 1
        assert "points 0 to 19" in ask("POST", f"{DIGITS}/move", json={"sphere": point | {"index": 20}}).json()["error"]

    def test_a_direction_leads_from_the_mean_of_a_label_to_that_of_another(self, ask: Ask, digits: Path):
        means = ask("GET", f"{DIGITS}/labels").json()["means"]
        sklearn = load_digits()
        judge = LogisticRegression(max_iter=2000).fit(sklearn.data, sklearn.target)
        assert (judge.predict([levels(each).ravel() for each in means]) == np.arange(10)).sum() >= 8
        rows = load("digits", labels=True).train
        model = Model(nicest.open(digits))
        codes = [model.encode(torch.from_numpy(rows[rows[:, -1] == k, :-1][:LABELLED])).mean(0) for k in range(10)]
        h = model.draw(limits.WALL)[:1]
        for start, first in ((3, codes[3]), (None, torch.stack(codes).mean(0))):
            asked = {"sample": {"index": 0}, "direction": {"start": start, "end": 8, "amount": 1.5}}
            found = levels(ask("POST", f"{DIGITS}/move", json=asked).json()["picture"]).ravel()
            expected = model.decode(h + 1.5 * (codes[8] - first))[0].numpy()
            assert abs(found.astype(int) - expected).max() <= 1
        for wrong in ({"start": 10, "end": 0}, {"start": 0, "end": 10}):
            answer = ask("POST", f"{DIGITS}/move", json={"sample": {"index": 0}, "direction": wrong | {"amount": 1}})
            assert "one of the 10 labels" in answer.json()["error"]

    def test_where_there_are_no_labels_there_are_no_directions(
        self, digits: Path, labelled: Path, tmp_path: Path, refusal: Callable[..., str]
    ):
        """Without the data, with data that has none, and of a model of images given their label."""
        np.save(tmp_path / "images.npy", np.zeros((60, 8, 8), np.uint8))
        gone, bare = Served("gone", digits).open(), Served("bare", digits).open()
        gone.no_data = "gone"
        bare.data = replace(bare.data, name=str(tmp_path / "images.npy"))
        for loaded in (gone, bare, Served("given", labelled, 3).open()):
            assert Images(loaded).labels().means == []
        asked = {"sample": {"index": 0}, "direction": {"end": 0, "amount": 1.0}}
        assert "one of the 0 labels" in refusal(Images(gone).move, Move.model_validate(asked))

    def test_every_view_knows_the_labels_of_a_model(self, labelled: Path, ask: Ask):
        """One code in every class: each is decoded by the model of that label, and none is refused."""
        own = asking(create_app([labelled], desk=Desk(jobs=2)))
        run = "/api/runs/labelled-label-3"
        assert own("GET", "/api/runs").json()["runs"][3]["classes"] == 10
        origin = {"sample": {"seed": 1, "index": 4}}
        found = own("POST", f"{run}/classes", json=origin).json()["pictures"]
        for label in (0, 3, 9):
            alone = own("GET", f"/api/runs/labelled-label-{label}/samples?n=5&seed=1").json()["pictures"]
            assert found[label] == alone[4]
        assert ask("POST", f"{DIGITS}/classes", json=origin).json()["pictures"] == []
        picture = own("GET", f"{run}/pictures?n=1").json()["pictures"][0]
        for path in ("samples?n=1", "sphere?n=4", "spectrum", "metrics", "reference-scores", "mask?name=top"):
            assert own("GET", f"{run}/{path}").status_code == 200
        assert own("POST", f"{run}/score", json={"pictures": [picture]}).status_code == 200
        for method in ("ascent", "draws"):
            asked = {"picture": picture, "mask": TOP, "steps": 8, "method": method}
            assert events(own("POST", f"{run}/inpaint", json=asked).text)[-1][0] == "end"

    def test_a_sphere_has_points_of_length_one(self, ask: Ask):
        found = ask("GET", f"{DIGITS}/sphere?n=20&basis=random").json()
        np.testing.assert_allclose(np.linalg.norm(found["points"], axis=1), 1, atol=1e-3)
        assert len(set(found["pictures"])) > 1
        assert found["radius"] == pytest.approx(8)  # deviations, as everywhere on the page
        assert ask("GET", f"{DIGITS}/sphere?n=2&basis=top").json()["radius"] == pytest.approx(3**0.5)

    def test_the_axes_of_a_sphere_take_no_more_memory_than_they_need(self):
        dim = 10_000
        wide: Any = SimpleNamespace(data=SimpleNamespace(dim=dim), order=torch.arange(dim).flip(0))
        tracemalloc.start()
        axes = Model.axes(wide, "top", 0)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1e6
        assert [np.flatnonzero(each).tolist() for each in axes] == [[dim - 1], [dim - 2], [dim - 3]]


@pytest.fixture(scope="session")
def quantiles(ask: Ask) -> list[float]:
    """Of the reference scores, which are counted behind the requests: a loaded machine takes its time."""
    until = time.monotonic() + 120
    while (found := ask("GET", f"{DIGITS}/reference-scores").json())["counting"] and time.monotonic() < until:
        time.sleep(0.05)
    return found["quantiles"]


@pytest.mark.usefixtures("quantiles")
class TestScoring:
    def test_the_ledger_sums_to_the_nats_that_evaluate_finds(self, ask: Ask, digits: Path):
        total = ask("GET", f"{DIGITS}/pictures?n=1").json()["total"]
        pictures = [
            each
            for first in range(0, total, 100)
            for each in ask("GET", f"{DIGITS}/pictures?first={first}&n=100").json()["pictures"]
        ]
        scores = []
        for first in range(0, total, 16):
            answer = ask("POST", f"{DIGITS}/score", json={"pictures": pictures[first : first + 16]}).json()
            scores += answer["scores"]
        assert "typical" in answer["caveat"]
        for each in scores[:5]:
            assert sum(each["terms"].values()) == pytest.approx(each["nats"], abs=1e-3)
            assert 0 <= each["denser_share"] <= 1
        expected = evaluate(nicest.open(digits), with_baselines=False)
        assert np.mean([each["nats"] for each in scores]) == pytest.approx(expected["mean_nats"], abs=0.5)
        assert np.mean([each["bits_per_dim"] for each in scores]) == pytest.approx(expected["bits_per_dim"], abs=0.02)

    def test_a_picture_has_one_score_wherever_it_stands_and_says_how_sure_it_is(self, ask: Ask, digits: Path):
        pictures = ask("GET", f"{DIGITS}/pictures?n=4").json()["pictures"]
        asked = [pictures[0], pictures[1], pictures[0], *pictures[2:], pictures[0]]
        scores = ask("POST", f"{DIGITS}/score", json={"pictures": asked}).json()["scores"]
        assert scores[0] == scores[2] == scores[5] != scores[1]
        run = nicest.open(digits)
        for picture, score in ((asked[0], scores[0]), (asked[1], scores[1])):
            rows = torch.from_numpy(levels(picture).reshape(1, -1).copy()).repeat(4000, 1)
            draws = run.engine.log_prob(rows).double() + run.flow.units.interval_nats
            assert score["nats_error"] == pytest.approx(float(draws.std()) / 32**0.5, rel=0.5)
            assert abs(score["nats"] - float(draws.mean())) < 5 * score["nats_error"]

    def test_scores_are_compared_with_held_out_images(self, digits: Path, tmp_path: Path, test_image: str):
        """Training images of whatever density do not matter: here they are all black, denser than any other."""
        served = Served("run", Path(shutil.copytree(digits, tmp_path / "run")))
        loaded = served.open()
        (tmp_path / "run" / "validation-scores.npy").unlink(missing_ok=True)
        splits = loaded.run.splits
        loaded.run.splits = replace(splits, train=np.zeros_like(splits.train))
        assert loaded.reference() is not None
        found = Images(loaded).score([test_image])
        assert found.reference == "validation"
        nats = loaded.run.nats(torch.from_numpy(splits.valid)).numpy()
        assert found.scores[0].denser_share == pytest.approx(np.mean(nats > found.scores[0].nats), abs=0.05)
        served.close()

    def test_without_the_data_kept_scores_of_training_stand_in_and_say_so(self, digits: Path, tmp_path: Path):
        served = Served("run", Path(shutil.copytree(digits, tmp_path / "run")))
        loaded = served.open()
        (tmp_path / "run" / "validation-scores.npy").unlink(missing_ok=True)
        step = loaded.run.figures["step"]
        keep_quantiles(tmp_path / "run", np.linspace(-1, 1, 1001), loaded.draws, step)
        loaded.no_data = "gone"
        found = loaded.reference_scores()
        assert found.reference == "training"
        assert len(found.quantiles) == 101

    def test_noise_falls_below_the_held_out_images(self, ask: Ask, quantiles: list[float]):
        noise = packed(np.random.default_rng(0).integers(0, 17, 64))
        score = ask("POST", f"{DIGITS}/score", json={"pictures": [noise]}).json()["scores"][0]
        assert score["nats"] < quantiles[0]
        assert score["denser_share"] == 1

    def test_a_surprise_map_shows_the_pixel_that_was_changed(self, ask: Ask, test_image: str, digits: Path):
        """Its figures are those of all 17 levels of a pixel, scored one by one."""
        odd = levels(test_image).copy()
        odd[0, 0] = 16  # a corner, always dark
        first, *frames, end = events(ask("POST", f"{DIGITS}/surprise", json={"picture": packed(odd)}).text)
        assert (first, end) == (("start", {"pixels": 64}), ("end", {}))
        excess = np.zeros(64)
        for _, data in frames:
            excess[data["pixels"]] += data["excess"]
        assert excess.argmax() == 0
        flow = nicest.open(digits).flow
        for d in (0, 27):
            rows = torch.from_numpy(odd.ravel()).repeat(17, 1)
            rows[:, d] = torch.arange(17)
            log_p = torch.log_softmax(flow.log_prob(rows, noise=False).double(), 0).detach()
            expected = float(-log_p[int(odd.ravel()[d])] + (log_p.exp() * log_p).sum())
            assert excess[d] == pytest.approx(expected, abs=0.01)
        assert "64 numbers" in ask("POST", f"{DIGITS}/surprise", json={"picture": "AAAA"}).json()["error"]

    def test_too_many_at_once_are_refused(self, ask: Ask, test_image: str):
        many = [test_image] * (limits.PICTURES + 1)
        assert ask("POST", f"{DIGITS}/score", json={"pictures": many}).status_code == 422


class TestTables:
    def test_sample_rows_have_the_columns_of_the_table(self, ask: Ask):
        found = ask("GET", "/api/runs/people/rows?n=5").json()
        assert found["columns"] == ["height", "weight", "colour"]
        assert len(found["rows"]) == 5
        assert {row[2] for row in found["rows"]} <= {"red", "blue"}

    def test_histograms_and_conditions(self, ask: Ask, table: Path):
        """Weight is 0.4 of height plus N(0, 1) in the data: of tall people the draws are heavy."""
        found = ask("GET", "/api/runs/people/rows?n=3&of=500").json()
        assert [sum(each["counts"]) for each in found["histograms"]] == [500, 500, 500]
        assert found["histograms"][2]["values"] in (["red", "blue"], ["blue", "red"])
        asked = {"n": 50, "of": 400, "where": 'height > 175 and `colour` = "red"'}
        tall = ask("GET", "/api/runs/people/rows", params=asked).json()
        assert all(row[0] > 175 and row[2] == "red" for row in tall["rows"])
        assert tall["histograms"][2] == {
            "column": "colour", "counts": [400, 0], "values": ["red", "blue"], "low": None, "high": None
        }  # fmt: skip
        run = nicest.open(table)
        samples = decode(run.engine.sample(20_000).numpy(), run.columns).to_pylist()
        share = np.mean([row["height"] > 175 and row["colour"] == "red" for row in samples])
        assert tall["share"] == pytest.approx(share, rel=0.15)
        for where, line in (("nose = 1", "found no column"), ("height >", "expected a value"), ("x" * 2001, "2000")):
            answer = ask("GET", "/api/runs/people/rows", params={"where": where})
            assert answer.status_code == 422
            assert line in answer.json()["error"]

    def test_the_cell_that_does_not_belong_is_the_surprising_one(self, ask: Ask):
        row = {"height": 170, "weight": 68, "colour": "red"}
        usual, odd = (
            ask("POST", "/api/runs/people/cells", json={"cells": row | more}).json() for more in ({}, {"weight": 90})
        )
        assert min(each["tail"] for each in usual["cells"]) > 0.05
        _, weight, colour = odd["cells"]
        assert weight["tail"] < 0.02
        assert weight["high"] < 90
        assert colour["tail"] > 0.2
        assert (colour["low"], colour["likely"] in ("red", "blue")) == (None, True)
        partly = ask("POST", "/api/runs/people/cells", json={"cells": {"height": 170}})
        assert "expected a whole row, got none in column 'weight'" in partly.json()["error"]

    def test_rows_of_a_file_are_scored(self, ask: Ask):
        lines = "height,weight,colour\n170,68,red\n170,20,red\n,68,red\n170,68,green\n"
        found = ask("POST", "/api/runs/people/table", content=lines.encode()).json()
        assert found["total"] == 4
        usual, odd, missing, unknown = found["scores"]
        assert usual["nats"] > odd["nats"]
        assert "missing" in missing["why"]
        assert "never saw" in unknown["why"]
        assert found["cells"][0] == ["170", "68", "red"]
        assert found["cells"][3][2] == "green"

    def test_a_row_is_filled_in_where_it_is_empty(self, ask: Ask):
        found = ask("POST", "/api/runs/people/impute", json={"cells": {"height": 185, "colour": "red"}}).json()
        height, weight, colour = found["cells"]
        assert (height["value"], height["known"], height["low"]) == (185, True, None)
        assert (colour["value"], colour["known"]) == ("red", True)
        assert not weight["known"]
        assert weight["low"] <= weight["value"] <= weight["high"]

    @pytest.mark.parametrize(
        ("cells", "line"),
        [
            ({"nose": 1}, "expected columns of the model, got 'nose'"),
            ({"height": "tall"}, "expected a number in column 'height', got 'tall'"),
            ({"height": 1e999}, "finite number"),
            ({"height": True}, "expected a number in column 'height', got 'True'"),
            ({"height": 1e30}, "expected a number as training had, 1"),
            ({"colour": "green"}, "expected one of 'blue', 'red' in column 'colour', got 'green'"),
        ],
    )
    def test_a_row_that_is_not_of_the_table_is_refused(self, ask: Ask, cells: dict[str, Any], line: str):
        typed = {"Content-Type": "application/json"}
        answer = ask("POST", "/api/runs/people/impute", content=json.dumps({"cells": cells}), headers=typed)
        assert answer.status_code == 422
        assert line in answer.json()["error"]

    def test_dates_are_written_as_dates(self, refusal: Callable[..., str]):
        days = Column("day", "date32[day]", "steps", 0.0, 60.0, 2.0)
        assert _ends(days) == ("1970-01-01", "1970-03-02")
        assert _typed("1970-01-03", days).to_pylist() == ["1970-01-03"]
        for value, line in (
            ("soon", "expected a moment, as 1970-01-01, in column 'day', got 'soon'"),
            (5, "expected a moment, as 1970-01-01, in column 'day', got '5'"),
            ("1970-01-02", "expected steps of 2 from 1970-01-01 in column 'day'"),
            ("1971-01-01", "expected a moment as training had, 1970-01-01 to 1970-03-02, in column 'day'"),
        ):
            assert line in refusal(_typed, value, days)

    @pytest.mark.parametrize(
        ("value", "line"),
        [
            (9, "a number as training had, 0 to 8, in column 'n', got '9'"),
            (-2, "0 to 8"),
            (3, "steps of 2 from 0 in column 'n', got '3'"),
            (4.5, "steps of 2"),
            (0.5, ""),
            (0.25, "expected one of 0.5, 1.5 in column 'few'"),
        ],
    )
    def test_cells_of_steps_and_of_few_values(self, refusal: Callable[..., str], value: float, line: str):
        steps = Column("n", "int64", "steps", 0.0, 8.0, 2.0)
        few = Column("few", "double", "values", 0.0, 1.0, 1.0, (0.5, 1.5))
        column = few if value < 1 and value > 0 else steps
        if line:
            assert line in refusal(_typed, value, column)
        else:
            assert _typed(value, column).to_pylist() == [value]

    def test_a_bomb_of_rows_is_cut_before_it_is_read(self, ask: Ask):
        count = 1_000_000
        same = [pa.array([value]).take(pa.array(np.zeros(count, np.int32))) for value in (170.5, 68.0, "red")]
        buffer = io.BytesIO()
        parquet.write_table(pa.table(same, ["height", "weight", "colour"]), buffer)
        assert len(buffer.getvalue()) < 100_000
        tracemalloc.start()
        found = ask("POST", "/api/runs/people/table?format=parquet", content=buffer.getvalue()).json()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (found["total"], len(found["scores"]), len(found["cells"])) == (count, limits.ROWS, limits.ROWS)
        assert peak < 5e7
        line = b"170.5,68,red\n"
        cut = ask("POST", "/api/runs/people/table", content=b"height,weight,colour\n" + line * (limits.ROWS + 1)).json()
        assert (cut["total"], len(cut["scores"])) == (None, limits.ROWS)
        fits = ask("POST", "/api/runs/people/table", content=b"height,weight,colour\n" + line * limits.ROWS).json()
        assert (fits["total"], len(fits["scores"])) == (limits.ROWS, limits.ROWS)

    def test_a_packed_file_of_too_many_bytes_is_refused(self, ask: Ask):
        """Though they are in proportion to its size: 270 MB of zeros beside 2 MB of noise."""
        noise = np.zeros(2_000_000)
        noise[: 2**18] = np.frombuffer(np.random.default_rng(0).bytes(2**21))
        zeros = pa.table([np.zeros(2_000_000)] * 17 + [noise], [f"c{i}" for i in range(18)])
        buffer = io.BytesIO()
        with pa.ipc.new_file(buffer, zeros.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as file:
            file.write_table(zeros)
        assert 2**21 < len(buffer.getvalue()) < limits.BODY
        answer = ask("POST", "/api/runs/people/table?format=arrow", content=buffer.getvalue())
        assert f"expected at most {limits.UNPACKED} bytes" in answer.json()["error"]

    def test_a_row_may_have_many_columns(self, ask: Ask):
        answer = ask("POST", "/api/runs/people/impute", json={"cells": dict.fromkeys(map(str, range(3000)))})
        assert "expected columns of the model" in answer.json()["error"]

    @pytest.mark.parametrize("content", [b"", b"\0\1\2", b"a,b\n1,2\n", b"height,weight,colour\nx,y,z\n"])
    def test_what_is_not_the_table_is_refused_without_a_path(self, ask: Ask, content: bytes):
        answer = ask("POST", "/api/runs/people/table", content=content)
        assert answer.status_code == 422
        assert "/tmp" not in answer.json()["error"]

    def test_a_model_of_the_other_kind_says_so(self, ask: Ask, test_image: str):
        assert "rows of 3 numbers" in ask("GET", "/api/runs/people/samples").json()["error"]
        assert "not of a table" in ask("POST", f"{DIGITS}/table", content=b"a\n1\n").json()["error"]


class TestTraining:
    def test_metrics_come_after_a_step(self, ask: Ask):
        rows = ask("GET", f"{DIGITS}/metrics").json()["rows"]
        assert len(rows) == 10
        after = ask("GET", f"{DIGITS}/metrics", params={"after": rows[-2]["step"]}).json()["rows"]
        assert after == rows[-1:]

    def test_the_spectrum_falls(self, ask: Ask):
        found = ask("GET", f"{DIGITS}/spectrum").json()
        for values in (found["sigma"], found["pca"]):
            assert len(values) == 64
            assert values == sorted(values, reverse=True)

    def test_a_run_that_stopped_early_is_finished_and_its_best_epoch_is_known(self, digits: Path, tmp_path: Path):
        served = Served("run", Path(shutil.copytree(digits, tmp_path / "run")))
        run = served.open().run
        run.recipe = replace(run.recipe, train=replace(run.recipe.train, epochs=1500, patience=20))
        nats = {10: 1.0, 20: 3.0, 30: 2.0, 40: 2.5}
        rows = [{"epoch": epoch, "step": 10 * epoch, "valid_nats": value} for epoch, value in nats.items()]
        for count, finished in ((3, False), (4, True)):
            lines = "".join(json.dumps(row) + "\n" for row in rows[:count])
            (tmp_path / "run" / "metrics.jsonl").write_text(lines)
            found = served.metrics(after=200)
            assert (found.best_epoch, found.finished, found.patience, found.epochs) == (20, finished, 20, 1500)
            assert [row["epoch"] for row in found.rows] == [30, 40][: count - 2]

    def test_a_model_that_training_replaced_is_read_again(self, digits: Path, tmp_path: Path):
        copy = Path(shutil.copytree(digits, tmp_path / "run"))
        served = Served("run", copy)
        first = served.open()
        assert served.open() is first
        shutil.copy(copy / "model.safetensors", copy / "new")
        (copy / "new").replace(copy / "model.safetensors")
        second = served.open()
        assert second is not first
        (copy / "model.safetensors").write_bytes((digits / "model.safetensors").read_bytes())  # of the same inode
        assert served.open() is not second


class TestTrainingHere:
    """Data that is sent, looked at and trained on, by a process that outlives its server."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Iterator[Path]:
        yield tmp_path / "own"
        trainer = Trainer(tmp_path / "own")
        for run in trainer.runs():
            if (pid := trainer.pid(run)) is not None:
                os.kill(pid, signal.SIGKILL)

    def until(self, true: Callable[[], Any]) -> Any:
        end = time.monotonic() + 120
        while not (found := true()):
            assert time.monotonic() < end
            time.sleep(0.1)
        return found

    def test_a_table_is_looked_at_trained_on_watched_stopped_and_downloaded(
        self, folder: Path, table: Path, tmp_path: Path
    ):
        ask = asking(create_app([table], folder=folder))
        lines = (table.parent / "people.csv").read_text()
        assert not folder.exists()
        name = {"name": "../My People!.csv"}
        found = ask("POST", "/api/train/data", params=name, content=lines.encode()).json()
        assert (found["kind"], found["rows"], found["name"]) == ("table", 300, "my-people")
        assert [(c["name"], c["kind"]) for c in found["columns"]] == [
            ("height", "real"), ("weight", "real"), ("colour", "categorical")
        ]  # fmt: skip
        assert found["columns"][2]["values"] == ["blue", "red"]
        assert len(found["preview"]) == 5
        begun = ask("POST", "/api/train", json={"id": found["id"], "name": "My People", "epochs": 20_000}).json()
        assert begun == {"run": "my-people"}
        assert ask("POST", "/api/train", json={"id": found["id"], "name": "x"}).status_code == 422
        metrics = self.until(
            lambda: (m := ask("GET", "/api/runs/my-people/metrics").json())["rows"] and m["process"]["running"] and m
        )
        assert (metrics["process"]["here"], metrics["process"]["failed"]) == (True, False)
        another = asking(create_app([table], folder=folder))  # the server ends, and another finds the training
        ids = [run["id"] for run in another("GET", "/api/runs").json()["runs"]]
        assert ids == ["people", "my-people"]
        assert another("GET", "/api/runs/my-people/metrics").json()["process"]["running"]
        again = another("POST", "/api/train/data", content=lines.encode()).json()
        told = another("POST", "/api/train", json={"id": again["id"], "name": "more"})
        assert "one at a time" in told.json()["error"]
        self.until(lambda: another("GET", "/api/runs").json()["runs"][1]["ready"])
        another("POST", "/api/runs/my-people/stop")
        self.until(lambda: not another("GET", "/api/runs/my-people/metrics").json()["process"]["running"])
        assert "not being trained" in another("POST", "/api/runs/my-people/stop").json()["error"]
        assert "not being trained" in another("POST", "/api/runs/people/stop").json()["error"]
        content = another("GET", "/api/runs/my-people/download").content
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            file.extractall(tmp_path / "elsewhere")
        assert [column.name for column in nicest.open(tmp_path / "elsewhere" / "my-people").columns] == [
            "height", "weight", "colour"
        ]  # fmt: skip

    def test_images_come_as_an_array(self, folder: Path):
        ask = asking(create_app([], folder=folder))
        buffer = io.BytesIO()
        np.save(buffer, np.random.default_rng(0).integers(0, 256, (60, 6, 5), np.uint8))
        found = ask("POST", "/api/train/data?format=npy&name=faces", content=buffer.getvalue()).json()
        assert (found["kind"], found["rows"], found["shape"]) == ("images", 60, [6, 5])

    @pytest.mark.parametrize(
        ("array", "line"),
        [
            (np.zeros((60, 100, 100), np.uint8), "at most 4096 numbers"),
            (np.zeros((60, 9), np.uint8), "expected images"),
            (np.zeros((60, 3, 3)), "expected images"),
            (np.arange(45, dtype=np.uint8).reshape(5, 3, 3), "at least 50 rows, got 5"),
            (np.array([{}]), "the data"),
        ],
    )
    def test_what_cannot_be_trained_on_is_refused_and_leaves_nothing(self, folder: Path, array: Any, line: str):
        ask = asking(create_app([], folder=folder))
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=True)
        answer = ask("POST", "/api/train/data?format=npy&name=the data", content=buffer.getvalue())
        assert answer.status_code == 422
        assert line in answer.json()["error"]
        assert str(folder) not in answer.json()["error"]
        assert list((folder / "data").iterdir()) == []

    def test_bombs_strangers_and_heaps_are_kept_out(self, folder: Path):
        ask = asking(create_app([], folder=folder))
        count = 20_000_000
        zeros = pa.array([0.5]).take(pa.array(np.zeros(count, np.int32)))
        buffer = io.BytesIO()
        parquet.write_table(pa.table([zeros, zeros], ["a", "b"]), buffer)
        assert len(buffer.getvalue()) < 200_000
        tracemalloc.start()
        bomb = ask("POST", "/api/train/data?format=parquet", content=buffer.getvalue())
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert "expected at most" in bomb.json()["error"]
        assert peak < 1e7
        assert ask("POST", "/api/train/data", content=bytes(limits.BODY + 1)).status_code == 413
        for headers in ({"origin": "http://elsewhere.example"}, {"sec-fetch-site": "cross-site"}):
            for path in ("/api/train/data", "/api/train", "/api/runs/x/stop"):
                assert ask("POST", path, content=b"a,b\n1,2\n", headers=headers).status_code == 403
        rows = b"".join(b"%d,%d\n" % (i % 7, i) for i in range(60))
        ids = [ask("POST", "/api/train/data", content=b"a,b\n" + rows).json()["id"] for _ in range(limits.STAGED + 2)]
        assert len(list((folder / "data").iterdir())) == limits.STAGED
        assert "send it again" in ask("POST", "/api/train", json={"id": ids[0], "name": "a"}).json()["error"]
        assert "send it again" in ask("POST", "/api/train", json={"id": "../../x", "name": "a"}).json()["error"]
        closed = asking(create_app([], folder=folder, hosts=("studio.example",), token="secret"))
        host = {"host": "studio.example"}
        assert closed("POST", "/api/train/data", content=rows, headers=host).status_code == 401

    def test_a_number_that_another_process_has_is_never_stopped(self, folder: Path, refusal: Callable[..., str]):
        (folder / "old").mkdir(parents=True)
        (folder / "old" / "studio.json").write_text(json.dumps({"pid": os.getpid()}))
        (folder / "old" / "train.log").write_text("epoch 1\nerror: out of memory\n")
        trainer = Trainer(folder)
        assert "not being trained" in refusal(trainer.stop, folder / "old")
        found = trainer.state(folder / "old")
        assert (found.running, found.failed, found.said) == (False, True, "error: out of memory")


class TestGuard:
    def test_every_answer_has_its_headers(self, ask: Ask):
        for path in ("/", "/docs", "/api/runs", "/api/nothing", "/page/app.js"):
            answer = ask("GET", path)
            for name, value in HEADERS.items():
                assert answer.headers[name] == value
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
    def test_a_page_of_another_origin_may_not_post(self, ask: Ask, test_image: str, headers: dict[str, str]):
        answer = ask("POST", f"{DIGITS}/score", json={"pictures": [test_image]}, headers=headers)
        assert answer.status_code == 403

    def test_no_page_elsewhere_may_have_anything_computed(self, ask: Ask):
        for site in ("cross-site", "same-site"):
            assert ask("GET", f"{DIGITS}/samples?n=1", headers={"sec-fetch-site": site}).status_code == 403
            assert ask("GET", "/", headers={"sec-fetch-site": site}).status_code == 200  # a link may lead here
        assert ask("GET", f"{DIGITS}/samples?n=1", headers={"sec-fetch-site": "same-origin"}).status_code == 200

    def test_on_any_host_but_loopback_its_names_and_the_token_are_asked_for(
        self, digits: Path, refusal: Callable[..., str]
    ):
        for everywhere in ("0.0.0.0", "::"):
            assert "--allow-host" in refusal(names, everywhere, [])
        assert names("192.168.1.2", [])[0] == "192.168.1.2"
        ask = asking(create_app([digits], hosts=names("0.0.0.0", ["Studio.example"]), token="secret"))
        host = {"host": "studio.example:8000"}
        assert ask("GET", "/", headers={"host": "attacker.example"}).status_code == 400
        for path in ("/", "/api/runs", "/page/app.js", "/?token=wrong", "/api/runs?token=secret"):
            answer = ask("GET", path, headers=host)
            assert answer.status_code == 401
            assert "token" in answer.json()["error"]
        opened = ask("GET", "/?token=secret", headers=host)
        assert (opened.status_code, opened.headers["location"]) == (303, "/")
        cookie = opened.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=Lax"} <= set(cookie.split("; "))
        for known in ({"cookie": f"a=b; {cookie.split(';')[0]}"}, {"authorization": "Bearer secret"}):
            assert ask("GET", "/api/runs", headers=host | known).status_code == 200
        assert ask("GET", "/api/runs", headers=host | {"cookie": "nicest-8000=wrong"}).status_code == 401

    def test_what_is_no_json_is_said_to_be_none(self, ask: Ask):
        typed = {"content-type": "application/json"}
        for content, at in ((b"{'a': 1}", 1), (b'{"pictures": [', 14), (b"", 0)):
            answer = ask("POST", f"{DIGITS}/score", content=content, headers=typed)
            assert answer.status_code == 422
            assert "got '{}'" not in answer.json()["error"]
            assert not content or "expected JSON in the body, got something else" in answer.json()["error"]
            assert not content or f"at character {at}" in answer.json()["error"]

    def test_true_is_no_number(self, ask: Ask, test_image: str):
        for path, more in (
            ("inpaint", {"mask": TOP, "steps": True}),
            ("move", {"places": [True]}),
            ("move", {"keep": False}),
        ):
            answer = ask("POST", f"{DIGITS}/{path}", json={"picture": test_image, **more})
            assert answer.status_code == 422
            assert "valid" in answer.json()["error"]

    def test_a_bug_is_one_clear_line(self, ask: Ask, monkeypatch: pytest.MonkeyPatch, capfd: Any):
        def broken(*_: Any) -> None:
            raise ZeroDivisionError("two\nlines")

        monkeypatch.setattr(Images, "samples", broken)
        answer = ask("GET", f"{DIGITS}/samples")
        assert answer.status_code == 500
        said = capfd.readouterr().err
        assert said.startswith(f"error: GET {DIGITS}/samples failed with ZeroDivisionError: two lines (a bug in nicest")
        assert said.count("\n") == 1

    def test_its_own_page_may(self, ask: Ask, test_image: str):
        own = {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}
        assert ask("POST", f"{DIGITS}/score", json={"pictures": [test_image]}, headers=own).status_code == 200

    def test_a_name_that_is_not_its_own_is_refused(self, ask: Ask):
        assert ask("GET", "/api/runs", headers={"host": "attacker.example"}).status_code == 400
        assert ask("GET", "/api/runs", headers={"host": "localhost:8000"}).status_code == 200

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

    def test_only_loopback_is_ones_own(self):
        assert all(is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"))
        assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.168.1.2", "example.org", ""))

    def test_the_page_is_small_and_names_no_other_host(self):
        files = list(PAGE.iterdir())
        assert sum(file.stat().st_size for file in files) < 250_000
        for file in files:
            text = file.read_text().replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in text
            assert "https://" not in text


@pytest.fixture
def listening(digits: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A real server with two places for inpainting, whose patience is short."""
    for name, value in {"HEAD_SECONDS": 2, "BODY_SECONDS": 1, "SEND_SECONDS": 1, "CONNECTIONS": 20}.items():
        monkeypatch.setattr(limits, name, value)
    monkeypatch.setattr(images, "SECONDS", 0)  # every step is a frame, and none waits for its time:
    monkeypatch.setattr(endpoints, "FRAME", 0)  # soon there is more than the buffers hold
    desk = Desk(jobs=2)
    server, found = make_server(create_app([digits], desk=desk), desk), bind("127.0.0.1", 0)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    thread = threading.Thread(target=server.run, args=([found],))
    thread.start()
    yield found.getsockname()
    desk.closing = server.should_exit = True
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
    """Clients that hold on to what they were given: they lose it, and the others never notice."""

    HEAD = b"POST /api/runs/digits/%s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"

    def test_who_does_not_read_loses_the_inpainting(self, listening: tuple[str, int], test_image: str):
        body = json.dumps({"picture": test_image, "mask": TOP, "steps": limits.STEPS, "chains": 8}).encode()
        text = self.HEAD % b"inpaint" + b"Content-Length: %d\r\n\r\n" % len(body) + body
        stalled = [raw(listening, text, small=True) for _ in range(2)]
        url = f"http://127.0.0.1:{listening[1]}"
        with httpx.Client(base_url=url, timeout=30) as client:
            self.until(lambda: client.get("/api/status").json()["ascents"] == 2)
            assert client.post("/api/runs/digits/inpaint", json={"picture": test_image, "mask": TOP}).status_code == 429
            self.until(lambda: client.get("/api/status").json()["ascents"] == 0)
            short = {"picture": test_image, "mask": TOP, "steps": 1}
            assert client.post("/api/runs/digits/inpaint", json=short).status_code == 200
        for each in stalled:
            each.close()

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not true():
            assert time.monotonic() < end
            time.sleep(0.1)

    def test_heads_and_bodies_that_do_not_come_and_too_many_clients(self, listening: tuple[str, int]):
        head, body = (
            raw(listening, b"GET / HTTP/1.1\r\nHost: 127"),
            raw(listening, self.HEAD % b"score" + b"Content-Length: 99\r\n\r\n{"),
        )
        assert b" 408 " in body.recv(200)
        assert head.recv(100) == b""
        many = [raw(listening, b"") for _ in range(20)]
        with pytest.raises(httpx.TransportError):  # one too many
            httpx.get(f"http://127.0.0.1:{listening[1]}/api/status")
        assert all(each.recv(1) == b"" for each in many)  # who says nothing is sent away
        assert httpx.get(f"http://127.0.0.1:{listening[1]}/api/status").status_code == 200
        for each in (head, body, *many):
            each.close()


def test_a_port_that_is_taken_is_named(digits: Path, refusal: Callable[..., str]):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "choose another --port" in refusal(serve, [digits], port=taken.getsockname()[1])


def test_what_cannot_be_served_is_refused_before_serving(digits: Path, tmp_path: Path, refusal: Callable[..., str]):
    (tmp_path / "rows.npy").touch()
    for host in ("", "http://studio.example", "two words", "[::1]", "studio.example:8000"):
        assert "without http:// or port" in refusal(serve, [digits], host=host, port=0)
        assert "without http:// or port" in refusal(serve, [digits], allowed=[host], port=0)
    for host in ("192.0.2.1", "no-such-machine.invalid"):
        assert "choose another --host" in refusal(serve, [digits], host=host, port=0)
    assert f"got the file {tmp_path / 'rows.npy'}" in refusal(serve, [tmp_path / "rows.npy"], port=0)
    assert f"got the file {tmp_path / 'rows.npy'}" in refusal(serve, [digits], folder=tmp_path / "rows.npy", port=0)


STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.none(), max_size=3),
)


def values_of(schema: dict[str, Any], components: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """Values as a schema describes them, and now and then others."""
    if "$ref" in schema:
        schema = components[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return st.one_of(*(values_of(each, components, depth) for each in schema["anyOf"]))
    if "enum" in schema:
        return st.one_of(st.sampled_from(schema["enum"]), st.text(max_size=8))
    low, high = schema.get("minimum", -(2**40)), schema.get("maximum", 2**40)
    match schema.get("type"):
        case "integer":
            plain: st.SearchStrategy[Any] = st.integers(int(low), int(high))
        case "number":
            plain = st.floats(low, high)
        case "string":
            plain = st.one_of(st.sampled_from([TOP, packed(np.zeros(64))]), st.text(max_size=30))
        case "boolean":
            plain = st.booleans()
        case "array":
            plain = st.lists(values_of(schema.get("items", {}), components, depth + 1), max_size=3)
        case "object":
            fields = schema.get("properties", {})
            plain = st.fixed_dictionaries(
                {}, optional={name: values_of(each, components, depth + 1) for name, each in fields.items()}
            )
        case _:
            plain = st.none()
    return st.one_of(plain, plain, plain, STRANGE) if depth else plain


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
    def test_no_request_that_the_schema_leads_to_makes_the_server_fail(
        self, ask: Ask, schema: dict[str, Any], data: st.DataObject
    ):
        components = schema["components"]["schemas"]
        path = data.draw(st.sampled_from(sorted(schema["paths"])))
        method, what = next(iter(schema["paths"][path].items()))
        run = data.draw(st.sampled_from(["digits", "digits", "digits", "people", "young", "none", "%00", "ü"]))
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
                body["steps"] = min(body["steps"], 5)  # what takes long is tested elsewhere
            options["content"] = json.dumps(body).encode()
            options["headers"] = {"content-type": "application/json"}
        elif content:
            options["content"] = data.draw(st.binary(max_size=200))
        answer = ask(method.upper(), path.replace("{run}", run), **options)
        assert answer.status_code in (200, 404, 409, 422, 413, 429), (answer.status_code, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]
