"""Endpoints of a model of images, asked in this process."""

import asyncio
import gc
import io
import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import nicest
from nicest.data import load
from nicest.studio import limits
from nicest.studio.explorer import LABELLED
from nicest.studio.film import Film
from nicest.studio.guard import Guard
from nicest.studio.images import Images
from nicest.studio.latents import Latents
from nicest.studio.limits import Desk
from nicest.studio.messages import ToScore
from nicest.studio.served import Served
from nicest.studio.server import create_app
from nicest.tasks.evaluate import evaluate
from nicest.tasks.score import keep_quantiles
from studio.conftest import DIGITS, TOP, Ask, asking, events, levels, packed, png


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

    def test_uploads_become_images_of_the_model(self, ask: Ask):
        def upload(array: np.ndarray, inverted: str = "false") -> np.ndarray:
            answer = ask("POST", f"{DIGITS}/upload?inverted={inverted}", content=png(array))
            return levels(answer.json()["picture"])

        assert (upload(np.full((50, 70), 255, np.uint8)) == 16).all()
        assert (upload(np.zeros((5, 5, 3), np.uint8), "true") == 16).all()
        ink = np.zeros((8, 8, 4), np.uint8)  # black ink on transparency
        ink[:, 4:, 3] = 255
        assert (upload(ink) == np.where(np.arange(8) < 4, 16, 0)).all()

    def test_the_masks_of_the_paper(self, ask: Ask):
        for name, count in (("top", 32), ("random:75", 48)):
            assert levels(ask("GET", f"{DIGITS}/mask", params={"name": name}).json()["mask"]).sum() == count
        assert ask("GET", f"{DIGITS}/mask?name=nose").status_code == 422

    def test_no_request_waits_for_large_uploads(self, app: Guard, monkeypatch: pytest.MonkeyPatch):
        gate = threading.Event()
        monkeypatch.setattr(Images, "upload", lambda *_, **__: {"picture": str(gate.wait(30))})

        async def scenario() -> None:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
                waiting = [asyncio.create_task(client.post(f"{DIGITS}/upload", content=b"x")) for _ in range(4)]
                await asyncio.sleep(0.2)
                answer = await asyncio.wait_for(client.get(f"{DIGITS}/samples?n=1"), 20)
                assert answer.status_code == 200
                gate.set()
                assert [each.status_code for each in await asyncio.gather(*waiting)] == [200] * 4

        asyncio.run(scenario())


class TestInpainting:
    def test_the_likelihood_rises_and_visible_pixels_stay(self, ask: Ask, test_image: str):
        request = {"picture": test_image, "mask": TOP, "chains": 3, "steps": 80}
        (first, *frames, last) = events(ask("POST", f"{DIGITS}/inpaint", json=request).text)
        assert (first[0], {name for name, _ in frames}, last[0]) == ("start", {"frame"}, "end")
        steps = [data["step"] for _, data in frames]
        assert steps == sorted(set(steps))
        assert (steps[0], steps[-1]) == (0, 80)
        for _, data in frames:
            assert len(data["pictures"]) == len(data["nats"]) == 3
            for picture in data["pictures"]:
                np.testing.assert_array_equal(levels(picture)[4:], levels(test_image)[4:])
        for chain in range(3):
            assert frames[-1][1]["nats"][chain] > frames[0][1]["nats"][chain] + 10
        film = ask("GET", f"{DIGITS}/film", params={"id": first[1]["film"]}).content
        with Image.open(io.BytesIO(film)) as picture:
            assert (picture.format, picture.width > 2.8 * picture.height) == ("GIF", True)
            assert 2 <= picture.n_frames <= len(frames)  # type: ignore[attr-defined]
        assert "run it again" in ask("GET", f"{DIGITS}/film?id=none").json()["error"]

    def test_exact_draws_differ_as_samples_of_the_model_do(self, ask: Ask, test_image: str, digits: Path):
        """With all pixels hidden, the draws are the model's, inside the box of the pixels: a little narrower."""
        request = {"picture": test_image, "chains": 8, "steps": 1000, "method": "draws"}
        half = events(ask("POST", f"{DIGITS}/inpaint", json=request | {"mask": TOP, "steps": 60}).text)[-2][1]
        assert len(set(half["pictures"])) == 8
        assert max(half["spread"][32:]) == 0
        whole = events(ask("POST", f"{DIGITS}/inpaint", json=request | {"mask": packed(np.ones(64))}).text)[-2][1]
        expected = nicest.open(digits).engine.sample(4000).double().clamp(0, 16).std(0).numpy() / 16
        assert 0.7 < np.mean(whole["spread"]) / np.mean(expected) < 1.02
        assert np.corrcoef(whole["spread"], expected)[0, 1] > 0.97
        assert whole["r_hat"] < 1.5

    @pytest.mark.parametrize(
        ("change", "word"),
        [
            ({"steps": limits.STEPS + 1}, "steps"),
            ({"chains": 0}, "chains"),
            ({"noise": -1}, "noise"),
            ({"method": "guess"}, "method"),
            ({"steps": True}, "valid"),
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

    def test_one_too_many_is_refused_and_a_client_that_leaves_frees_its_slot(
        self, app: Guard, test_image: str, monkeypatch: pytest.MonkeyPatch
    ):
        """Two clients hold the slots, a third is refused; all leave, and the generators end without the collector."""
        body = json.dumps({"picture": test_image, "mask": TOP, "steps": limits.STEPS}).encode()
        ended: list[bool] = []
        climb = Images.climb

        def watched(*given: Any) -> Any:
            try:
                yield from climb(*given)
            finally:
                ended.append(True)

        async def scenario() -> list[int]:
            leaving, statuses, frames = asyncio.Event(), [], []

            async def client() -> None:
                messages = iter([{"type": "http.request", "body": body, "more_body": False}])

                async def receive() -> dict[str, Any]:
                    if message := next(messages, None):
                        return message
                    await leaving.wait()
                    return {"type": "http.disconnect"}

                async def send(message: dict[str, Any]) -> None:
                    if message["type"] == "http.response.start":
                        statuses.append(message["status"])
                    elif b"event: frame" in message["body"]:
                        frames.append(client)

                await app(scope_of(f"{DIGITS}/inpaint", len(body)), receive, send)

            clients = [asyncio.create_task(client()) for _ in range(3)]
            while len(statuses) < 3 or len(frames) < 10:
                await asyncio.sleep(0.01)
            assert app.app.state.desk.jobs.taken == 2
            leaving.set()
            await asyncio.wait_for(asyncio.gather(*clients), 20)
            assert app.app.state.desk.jobs.taken == 0
            return sorted(statuses)

        monkeypatch.setattr(Images, "climb", watched)
        gc.disable()
        try:
            assert asyncio.run(scenario()) == [200, 200, 429]
            assert len(ended) == 2
        finally:
            gc.enable()

    def test_a_film_of_any_length_and_size_stays_small(self):
        for shape, count in (((2, 8, 8), 5000), ((8, 3, 256, 256), 60)):
            film = Film(brightest=2)
            for i in range(count):
                film.add(np.full(shape, i / count))
            assert 5 <= len(film.frames) <= 200
            assert sum(each.nbytes for each in film.frames) <= 2**24


def scope_of(path: str, length: int) -> dict[str, Any]:
    headers = {"host": "127.0.0.1:8000", "content-type": "application/json", "content-length": str(length)}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }


class TestExploring:
    def test_a_code_is_moved_cut_and_left_alone(self, ask: Ask, test_image: str):
        still = ask("POST", f"{DIGITS}/move", json={"picture": test_image}).json()
        assert still["picture"] == test_image
        assert len(still["places"]) == len(still["sigma"]) == limits.COMPONENTS
        assert still["sigma"] == sorted(still["sigma"], reverse=True)
        moved = ask("POST", f"{DIGITS}/move", json={"picture": test_image, "places": [3.0, -3.0]}).json()
        assert moved["picture"] != test_image
        assert moved["places"] == [3, -3, *still["places"][2:]]
        cut = ask("POST", f"{DIGITS}/move", json={"picture": test_image, "keep": 0}).json()
        assert cut["radius"] == 0
        assert ask("POST", f"{DIGITS}/move", json={"picture": test_image, "keep": 65}).status_code == 422

    def test_a_sample_keeps_the_code_that_made_it(self, ask: Ask, digits: Path):
        """Its radius is that of a draw, not that of its rounded image."""
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
        ends = [{"sample": {**asked, "index": index}} for index in (0, 6)]
        for way in ("straight", "spherical"):
            request = {"start": ends[0], "end": ends[1], "count": 3, "way": way}
            found = ask("POST", f"{DIGITS}/between", json=request).json()
            assert [found["pictures"][0], found["pictures"][2]] == [pictures["pictures"][0], pictures["pictures"][6]]
        for wrong in ({"sample": {"index": 0}, "picture": pictures["pictures"][0]}, {}):
            assert "a picture or a sample" in ask("POST", f"{DIGITS}/move", json=wrong).json()["error"]

    def test_the_nats_of_a_code_follow_from_the_jacobian_of_the_decoder(self, digits: Path):
        """The change of variables: log p_H(h) - log |det dy/dh|."""
        run = nicest.open(digits, dtype=torch.float64)
        model = Latents(run)
        h = model.draw(1, seed=1)
        jacobian = torch.autograd.functional.jacobian(lambda h: run.flow.bijection.inverse(h[None])[0][0], h[0])
        expected = run.flow.prior.log_prob(h)[0] - torch.linalg.slogdet(jacobian)[1]  # on [0, 1], the recipe's interval
        assert float(model.code_nats(h)[0]) == pytest.approx(float(expected), abs=1e-8)

    def test_a_plane_has_three_corners_and_their_means_between(self, ask: Ask, digits: Path):
        corners = [{"sample": {"seed": 2, "index": i}} for i in range(3)]
        pictures = ask("GET", f"{DIGITS}/samples?n=3&seed=2").json()["pictures"]
        asked = {"corners": corners, "points": [[0, 0], [1, 0], [0, 1], [0.5, 0.25]]}
        found = ask("POST", f"{DIGITS}/plane", json=asked).json()
        assert found["pictures"][:3] == pictures
        model = Latents(nicest.open(digits))
        h = model.draw(limits.WALL, seed=2)[:3]
        between = model.decode((0.25 * h[0] + 0.5 * h[1] + 0.25 * h[2])[None])
        np.testing.assert_array_equal(levels(found["pictures"][3]).ravel(), between[0].numpy())
        for wrong in ({"points": [[0, 9]]}, {"points": [[0]]}, {"points": [[0, 0]] * 101}, {"corners": corners[:2]}):
            assert ask("POST", f"{DIGITS}/plane", json=asked | wrong).status_code == 422

    def test_a_point_of_a_sphere_has_its_code(self, ask: Ask):
        sphere = ask("GET", f"{DIGITS}/sphere?n=20&basis=random&seed=3").json()
        np.testing.assert_allclose(np.linalg.norm(sphere["points"], axis=1), 1, atol=1e-3)
        assert sphere["radius"] == pytest.approx(8)  # in standard deviations, as everywhere on the page
        point = {"basis": "random", "seed": 3, "n": 20, "index": 7}
        found = ask("POST", f"{DIGITS}/move", json={"sphere": point, "ends": True}).json()
        assert found["picture"] == sphere["pictures"][7]
        assert found["radius"] == pytest.approx(8, rel=1e-4)
        high = ask("POST", f"{DIGITS}/move", json={"sphere": point, "places": [found["places"][0], 3.0]}).json()
        assert abs(levels(high["picture"]).astype(int) - levels(found["ends"][1][1])).max() <= 1
        assert "points 0 to 19" in ask("POST", f"{DIGITS}/move", json={"sphere": point | {"index": 20}}).json()["error"]

    def test_a_direction_leads_from_one_label_to_another(self, ask: Ask, digits: Path):
        rows = load("digits", labels=True).train
        model = Latents(nicest.open(digits))
        codes = [model.encode(torch.from_numpy(rows[rows[:, -1] == k, :-1][:LABELLED])).mean(0) for k in range(10)]
        h = model.draw(limits.WALL)[:1]
        assert len(ask("GET", f"{DIGITS}/labels").json()["means"]) == 10
        for start, first in ((3, codes[3]), (None, torch.stack(codes).mean(0))):
            asked = {"sample": {"index": 0}, "direction": {"start": start, "end": 8, "amount": 1.5}}
            found = levels(ask("POST", f"{DIGITS}/move", json=asked).json()["picture"]).ravel()
            expected = model.decode(h + 1.5 * (codes[8] - first))[0].numpy()
            assert abs(found.astype(int) - expected).max() <= 1
        asked = {"sample": {"index": 0}, "direction": {"end": 10, "amount": 1}}
        assert "one of the 10 labels" in ask("POST", f"{DIGITS}/move", json=asked).json()["error"]

    def test_without_labelled_data_there_are_no_directions(self, digits: Path, labelled: Path, tmp_path: Path):
        np.save(tmp_path / "images.npy", np.zeros((60, 8, 8), np.uint8))
        gone, bare = Served("gone", digits).open(Images), Served("bare", digits).open(Images)
        gone.no_data = "gone"
        bare.data = replace(bare.data, name=str(tmp_path / "images.npy"))
        for model in (gone, bare, Served("given", labelled, 3).open(Images)):
            assert model.labels() == {"means": []}


class TestLabels:
    def test_every_label_of_a_run_is_served(self, labelled: Path, ask: Ask):
        """Samples of a label look like it to another classifier; one code is decoded by every label's model."""
        own = asking(create_app([labelled], desk=Desk(jobs=2)))
        runs = own("GET", "/api/runs").json()["runs"]
        assert [(run["id"], run["name"]) for run in runs] == [
            (f"labelled-label-{k}", f"labelled, label {k}") for k in range(10)
        ]
        assert all(run["ready"] and run["dim"] == 64 and run["classes"] == 10 for run in runs)
        sklearn = load_digits()
        judge = LogisticRegression(max_iter=2000).fit(sklearn.data, sklearn.target)
        for label in (0, 3):
            given = own("GET", f"/api/runs/labelled-label-{label}/samples", params={"n": 30}).json()["pictures"]
            assert (judge.predict([levels(each).ravel() for each in given]) == label).mean() > 0.6
        run, origin = "/api/runs/labelled-label-3", {"sample": {"seed": 1, "index": 4}}
        found = own("POST", f"{run}/classes", json=origin).json()["pictures"]
        alone = own("GET", "/api/runs/labelled-label-9/samples?n=5&seed=1").json()["pictures"]
        assert found[9] == alone[4]
        assert ask("POST", f"{DIGITS}/classes", json=origin).json()["pictures"] == []
        picture = own("GET", f"{run}/pictures?n=1").json()["pictures"][0]
        for path in ("sphere?n=4", "spectrum", "metrics", "reference-scores"):
            assert own("GET", f"{run}/{path}").status_code == 200
        assert own("POST", f"{run}/score", json={"pictures": [picture]}).status_code == 200
        for method in ("ascent", "draws"):
            asked = {"picture": picture, "mask": TOP, "steps": 8, "method": method}
            assert events(own("POST", f"{run}/inpaint", json=asked).text)[-1][0] == "end"


@pytest.fixture(scope="module")
def quantiles(ask: Ask) -> list[float]:
    """Reference scores, which are computed in the background."""
    until = time.monotonic() + 120
    while (found := ask("GET", f"{DIGITS}/reference-scores").json())["counting"] and time.monotonic() < until:
        time.sleep(0.05)
    return found["quantiles"]


@pytest.mark.usefixtures("quantiles")
class TestScoring:
    def test_the_terms_sum_to_the_nats_that_evaluate_finds(self, ask: Ask, digits: Path):
        run = nicest.open(digits)
        pictures = [packed(row) for row in run.splits.test]
        parts = [pictures[first : first + 16] for first in range(0, len(pictures), 16)]
        answers = [ask("POST", f"{DIGITS}/score", json={"pictures": part}).json() for part in parts]
        assert "typical" in answers[0]["caveat"]
        scores = [each for answer in answers for each in answer["scores"]]
        for each in scores[:5]:
            assert sum(each["terms"].values()) == pytest.approx(each["nats"], abs=1e-3)
            assert 0 <= each["denser_share"] <= 1
        expected = evaluate(run, baselines=False)
        assert np.mean([each["nats"] for each in scores]) == pytest.approx(expected.mean_nats, abs=0.5)
        assert np.mean([each["bits_per_dim"] for each in scores]) == pytest.approx(expected.bits_per_dim, abs=0.02)

    def test_an_image_has_one_score_with_its_standard_error(self, ask: Ask, digits: Path, quantiles: list[float]):
        picture, other = ask("GET", f"{DIGITS}/pictures?n=2").json()["pictures"]
        noise = packed(np.random.default_rng(0).integers(0, 17, 64))
        asked = [picture, other, picture, noise]
        scores = ask("POST", f"{DIGITS}/score", json={"pictures": asked}).json()["scores"]
        assert scores[0] == scores[2] != scores[1]
        run = nicest.open(digits)
        draws = run.engine.log_prob(torch.from_numpy(levels(picture).reshape(1, -1).copy()).repeat(4000, 1)).double()
        draws += run.flow.units.interval_nats
        assert scores[0]["nats_error"] == pytest.approx(float(draws.std()) / 32**0.5, rel=0.5)
        assert abs(scores[0]["nats"] - float(draws.mean())) < 5 * scores[0]["nats_error"]
        assert scores[3]["nats"] < quantiles[0]
        assert scores[3]["denser_share"] == 1
        many = [picture] * (limits.PICTURES + 1)
        assert ask("POST", f"{DIGITS}/score", json={"pictures": many}).status_code == 422

    def test_scores_are_compared_with_held_out_images(self, digits: Path, tmp_path: Path, test_image: str):
        """The density of training images does not matter: here they are all black, denser than any other."""
        served = Served("run", Path(shutil.copytree(digits, tmp_path / "run")))
        model = served.open(Images)
        (tmp_path / "run" / "validation-scores.npy").unlink(missing_ok=True)
        splits = model.run.splits
        model.run.splits = replace(splits, train=np.zeros_like(splits.train))
        while model.reference() is None:
            time.sleep(0.05)
        found = model.score(ToScore(pictures=[test_image]))
        assert found["reference"] == "validation"
        nats = model.run.nats(torch.from_numpy(splits.valid)).numpy()
        share = np.mean(nats > found["scores"][0]["nats"])
        assert found["scores"][0]["denser_share"] == pytest.approx(share, abs=0.05)
        served.close()

    def test_without_the_data_stored_scores_of_training_are_used(self, digits: Path, tmp_path: Path):
        served = Served("run", Path(shutil.copytree(digits, tmp_path / "run")))
        model = served.open(Images)
        (tmp_path / "run" / "validation-scores.npy").unlink(missing_ok=True)
        keep_quantiles(
            tmp_path / "run" / "training-scores.npy", np.linspace(-1, 1, 1001), model.draws, model.run.figures["step"]
        )
        model.no_data = "gone"
        found = model.reference_scores()
        assert (found["reference"], len(found["quantiles"])) == ("training", 101)

    def test_a_surprise_map_shows_the_changed_pixel(self, ask: Ask, test_image: str):
        odd = levels(test_image).copy()
        odd[0, 0] = 16  # a corner, always dark
        first, *frames, end = events(ask("POST", f"{DIGITS}/surprise", json={"picture": packed(odd)}).text)
        assert (first, end) == (("start", {"pixels": 64}), ("end", {}))
        excess = np.zeros(64)
        for _, data in frames:
            excess[data["pixels"]] += data["excess"]
        assert excess.argmax() == 0
