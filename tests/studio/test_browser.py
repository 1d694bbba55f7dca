"""The page in a real Chromium: painted on with the mouse, watched, dragged, fed with bad files, and photographed.

`make test-browser` runs this. NICEST_STUDIO_RUN names a better trained run to do it with, and NICEST_SCREENSHOTS a
folder for the pictures of docs/studio.md.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
SHOWN = {"inpaint-light", "explore-dark", "score-light", "training-dark", "inpaint-phone", "explore-phone"}
ASKED = os.environ.get("NICEST_BROWSER") == "1"

pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: install it, then make test-browser"),
    pytest.mark.skipif(not importlib.util.find_spec("playwright"), reason="no playwright here: pip install playwright"),
    pytest.mark.skipif(not ASKED, reason="in a browser: make test-browser runs it"),
]


@pytest.fixture(scope="module")
def server(digits: Path, table: Path) -> Iterator[str]:
    """The studio as a process of its own, as a person starts it."""
    run = os.environ.get("NICEST_STUDIO_RUN") or digits
    command = [sys.executable, "-m", "nicest", "studio", str(run), str(table), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield json.loads(process.stdout.readline())["url"]
        process.terminate()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Visit:
    """A page, and all that went wrong on it."""

    def __init__(self, chromium: Any, server: str, **options: Any) -> None:
        self.context = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        self.page, self.server, self.wrong = self.context.new_page(), server, []
        self.page.on("console", lambda message: self.note(message.type in ("error", "warning"), message.text))
        self.page.on("pageerror", lambda error: self.note(True, str(error)))
        self.page.on("requestfailed", lambda request: self.note(True, f"{request.url} {request.failure}"))
        self.page.on("request", lambda request: self.note(not self.own(request.url), f"outside: {request.url}"))
        self.page.on("response", lambda answer: self.note(answer.status >= 400, f"{answer.status} {answer.url}"))
        self.page.goto(server)
        self.page.wait_for_selector("#choices canvas")
        self.page.wait_for_selector("#masks button")

    def own(self, url: str) -> bool:
        return url.startswith((self.server, "blob:" + self.server, "data:"))

    def note(self, bad: bool, text: str) -> None:
        if bad:
            self.wrong.append(text)

    def go_and_wait(self) -> None:
        self.page.click("#go")
        self.page.wait_for_selector("#stop:not(:disabled)")
        self.page.wait_for_selector("#stop:disabled", timeout=60_000)

    def levels(self, selector: str) -> np.ndarray:
        return np.frombuffer(base64.b64decode(self.page.get_attribute(selector, "data-picture")), np.uint8)

    def shot(self, name: str, *, height: int | None = None) -> None:
        """A picture of the page for the documentation; without a folder for it, only that it can be taken."""
        folder = os.environ.get("NICEST_SCREENSHOTS")
        clip = {"clip": {"x": 0, "y": 0, "width": self.page.viewport_size["width"], "height": height}} if height else {}
        content = self.page.screenshot(full_page=True, **clip)
        with Image.open(io.BytesIO(content)) as picture:
            assert len(picture.getcolors(1 << 24) or []) > 20
            if folder and name.removeprefix("studio-") in SHOWN:
                small = picture.convert("RGB").quantize(128, dither=Image.Dither.NONE)
                small.save(Path(folder) / f"{name}.png", optimize=True)


@pytest.fixture
def visit(chromium: Any, server: str, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """A visit during which nothing may go wrong."""
    made = Visit(chromium, server, **getattr(request, "param", {}))
    yield made
    made.context.close()
    assert made.wrong == []


def stroke(visit: Visit, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw on the mask with the mouse, in shares of its side."""
    box = visit.page.locator("#mask").bounding_box()
    points = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in (start, end)]
    visit.page.mouse.move(*points[0])
    visit.page.mouse.down()
    visit.page.mouse.move(*points[1], steps=8)
    visit.page.mouse.up()


class TestInpainting:
    def test_painted_filled_in_and_the_observed_stay(self, visit: Visit):
        page = visit.page
        page.locator("#choices button").nth(2).click()
        stroke(visit, (0.3, 0.3), (0.7, 0.6))
        hidden = int(re.match(r"\d+", page.inner_text("#hidden-count"))[0])  # type: ignore[index]
        assert 2 <= hidden < 40
        truth = visit.levels("#original")
        page.click("#go")
        page.wait_for_selector("#results[data-frames]")
        first = page.inner_text("#results figcaption >> nth=0")
        page.wait_for_selector("#stop:disabled", timeout=60_000)
        ends = np.stack([visit.levels(f"#results canvas >> nth={k}") for k in range(4)])
        changed = (ends != truth).any(0)
        assert 0 < changed.sum() <= hidden
        last = page.inner_text("#results figcaption >> nth=0")
        assert float(last.split()[0]) > float(first.split()[0])
        assert int(page.get_attribute("#results", "data-frames")) >= 50
        assert "nats" in page.inner_text("#inpaint-note")
        frames = float(re.search(r"(\d+) frames/s", page.inner_text("#progress"))[1])  # type: ignore[index]
        print(f"{frames:.0f} frames a second")

    def test_rectangle_invert_clear_and_the_ten_masks(self, visit: Visit):
        page = visit.page
        assert page.locator("#masks button").count() == 10
        assert page.locator("#go").is_disabled()
        page.click("[data-tool=rectangle]")
        stroke(visit, (0.05, 0.05), (0.45, 0.45))
        assert page.inner_text("#hidden-count").startswith("16 of 64")
        page.click("#invert")
        assert page.inner_text("#hidden-count").startswith("48 of 64")
        page.click("[data-tool=eraser]")
        stroke(visit, (0.9, 0.05), (0.9, 0.95))
        assert page.inner_text("#hidden-count").startswith("40 of 64")
        page.click("#clear")
        assert "Nothing" in page.inner_text("#hidden-count")
        page.locator("#masks button").first.click()
        assert page.inner_text("#hidden-count").startswith("32 of 64")

    def test_by_keyboard(self, visit: Visit):
        page = visit.page
        page.focus("#mask")
        for key in ("ArrowRight", "ArrowDown", " ", "ArrowRight", "Enter"):
            page.keyboard.press(key)
        assert page.inner_text("#hidden-count").startswith("2 of 64")
        page.keyboard.press("Backspace")
        assert page.inner_text("#hidden-count").startswith("1 of 64")

    def test_saved_as_png_and_gif(self, visit: Visit):
        page = visit.page
        page.fill("#steps", "60")
        page.locator("#masks button").nth(4).click()
        visit.go_and_wait()
        for button, kind in (("#save-png", "PNG"), ("#save-gif", "GIF")):
            with page.expect_download() as waiting:
                page.click(button)
            with Image.open(waiting.value.path()) as picture:
                assert picture.format == kind

    def test_a_sample_may_be_inpainted_too(self, visit: Visit):
        page = visit.page
        page.click("[data-source=samples]")
        page.wait_for_selector("[aria-label='sample 1']")
        page.locator("#choices button").nth(1).click()
        page.fill("#steps", "30")
        page.select_option("#chains", "1")
        page.locator("#masks button").first.click()
        visit.go_and_wait()
        assert page.locator("#results canvas").count() == 1


def test_stop_ends_the_ascent_on_the_server(chromium: Any, server: str):
    visit = Visit(chromium, server)
    page = visit.page
    page.fill("#steps", "5000")
    page.locator("#masks button").first.click()
    page.click("#go")
    page.wait_for_selector("#results[data-frames]")
    page.click("#stop")
    page.wait_for_selector("text=Stopped")
    page.wait_for_timeout(1000)
    assert page.evaluate("async () => (await (await fetch('/api/status')).json()).ascents") == 0
    visit.context.close()
    assert all("ERR_ABORTED" in each for each in visit.wrong)  # the stream that was stopped, and nothing else


def test_a_bad_file_is_answered_in_words(chromium: Any, server: str, tmp_path: Path):
    (tmp_path / "letter.png").write_text("Dear model,")
    visit = Visit(chromium, server)
    page = visit.page
    page.click("[data-source=upload]")
    page.set_input_files("#upload-file", str(tmp_path / "letter.png"))
    page.wait_for_selector("#choices-note.bad")
    assert "expected a picture" in page.inner_text("#choices-note")
    page.click("nav >> text=Score")
    page.set_input_files("#score-file", str(tmp_path / "letter.png"))
    page.wait_for_selector("#score-note.bad")
    assert "letter.png: expected a picture" in page.inner_text("#score-note")
    visit.context.close()
    assert visit.wrong
    assert all("422" in each for each in visit.wrong)


def test_a_server_that_has_gone_is_noticed(chromium: Any, server: str):
    visit = Visit(chromium, server)
    visit.context.set_offline(True)
    visit.page.click("#others")
    visit.page.wait_for_selector("#banner:not([hidden])")
    assert "does not answer" in visit.page.inner_text("#banner")
    visit.context.set_offline(False)
    visit.page.wait_for_selector("#banner", state="hidden", timeout=10_000)
    visit.context.close()


class TestExploring:
    def test_a_slider_moves_the_picture_and_back(self, visit: Visit):
        page = visit.page
        page.click("nav >> text=Explore")
        page.wait_for_selector("#sliders label")
        before = visit.levels("#moved")
        page.locator("#sliders input").first.fill("4")
        page.locator("#sliders input").nth(1).fill("-4")
        page.wait_for_timeout(500)
        assert (visit.levels("#moved") != before).any()
        page.click("#reset")
        page.wait_for_timeout(500)
        assert (visit.levels("#moved") == before).all()
        page.locator("#keep").fill("0")
        page.wait_for_timeout(500)
        assert page.inner_text("#moved-radius") == "0.0 sd"

    def test_picks_ways_and_the_sphere(self, visit: Visit):
        page = visit.page
        page.click("nav >> text=Explore")
        page.wait_for_selector("#between canvas[data-picture]")
        page.click("[data-pick=b]")
        before = visit.levels("#between canvas >> nth=8")
        page.locator("#wall button").nth(20).click()
        page.wait_for_timeout(500)
        assert (visit.levels("#between canvas >> nth=8") != before).any()
        page.wait_for_selector("#globe-note:has-text('220 codes')")
        look = "() => document.getElementById('globe').toDataURL()"
        still = page.evaluate(look)
        box = page.locator("#globe").bounding_box()
        page.locator("#globe").scroll_into_view_if_needed()
        box = page.locator("#globe").bounding_box()
        page.mouse.move(box["x"] + 200, box["y"] + 200)
        page.mouse.down()
        page.mouse.move(box["x"] + 300, box["y"] + 220, steps=4)
        page.mouse.up()
        page.wait_for_timeout(200)
        assert page.evaluate(look) != still


class TestScoring:
    def test_files_drawings_and_test_images(self, visit: Visit, tmp_path: Path):
        page = visit.page
        page.click("nav >> text=Score")
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 20), np.uint8)).save(tmp_path / "noise.png")
        page.set_input_files("#score-file", str(tmp_path / "noise.png"))
        page.wait_for_selector(".card")
        assert "Nearly every training image is denser" in page.inner_text(".card")
        assert "typicality" in page.inner_text("#caveat")
        box = page.locator("#sketch").bounding_box()
        page.mouse.move(box["x"] + 140, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + 140, box["y"] + 240, steps=5)
        page.mouse.up()
        page.click("#score-sketch")
        page.wait_for_selector(".card >> text=a drawing")
        page.click("#score-tests")
        page.wait_for_selector(".card >> nth=4")
        assert page.locator(".ledger").count() == 5


def test_training_with_hover(visit: Visit):
    page = visit.page
    page.click("nav >> text=Training")
    page.wait_for_selector("#curves polyline")
    page.wait_for_selector("#spectrum polyline")
    page.hover("#spectrum")
    assert "component" in page.inner_text("#spectrum .tip")


def test_a_table(visit: Visit, tmp_path: Path):
    page = visit.page
    page.select_option("#run", "people")
    page.wait_for_selector("#sample-rows td")
    (tmp_path / "rows.csv").write_text("height,weight,colour\n170,68,red\n150,90,blue\n")
    page.set_input_files("#table-file", str(tmp_path / "rows.csv"))
    page.wait_for_selector("#table-scores td")
    assert page.locator("#table-scores tbody tr").count() == 2
    page.fill("[name=height]", "185")
    page.click("#impute button.main")
    page.wait_for_selector("#impute-note:has-text('filled in')")
    assert page.input_value("[name=weight]")
    assert page.locator("#impute .found").count() == 2
    assert page.locator("nav a:visible").all_inner_texts() == ["Table", "Training"]


def test_the_api_is_described_without_another_host(visit: Visit):
    visit.page.goto(visit.server + "docs")
    visit.page.wait_for_selector("text=POST /api/runs/{run}/inpaint")


PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}


class TestLooks:
    """Light, dark and on a phone: nothing is wider than the screen, and the pictures are for the documentation."""

    @pytest.mark.parametrize(
        ("visit", "name"),
        [({}, "light"), ({"color_scheme": "dark"}, "dark"), (PHONE, "phone")],
        indirect=["visit"],
        ids=["light", "dark", "phone"],
    )
    def test_every_view(self, visit: Visit, name: str):
        page = visit.page
        page.locator("#choices button").nth(3).click()
        page.locator("#masks button").nth(6).click()
        visit.go_and_wait()
        self.fits(page)
        visit.shot(f"studio-inpaint-{name}", height=2300 if name == "phone" else None)
        page.click("nav >> text=Explore")
        page.wait_for_selector("#globe-note:has-text('220 codes')")
        page.wait_for_selector("#between canvas[data-picture]")
        page.wait_for_timeout(300)
        self.fits(page)
        visit.shot(f"studio-explore-{name}", height=2700 if name == "phone" else None)
        page.click("nav >> text=Score")
        page.click("#score-tests")
        page.wait_for_selector(".card >> nth=2")
        self.fits(page)
        visit.shot(f"studio-score-{name}")
        page.click("nav >> text=Training")
        page.wait_for_selector("#spectrum polyline")
        self.fits(page)
        visit.shot(f"studio-training-{name}")

    def fits(self, page: Any) -> None:
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
