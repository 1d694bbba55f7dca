"""The page in a real Chromium: painted on with the mouse, watched, dragged, fed with bad files, and photographed.

`make test-browser` runs this. NICEST_STUDIO_RUN names a better trained run to do it with, and NICEST_SCREENSHOTS a
folder for the pictures of docs/studio.md. NICEST_AXE names a copy of axe.min.js, which then looks at every view.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nicest.data import load
from nicest.recipes import load_recipe
from nicest.train.fit import train
from studio.conftest import TINY

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
SHOWN = {f"{view}-light" for view in ("inpaint", "score", "table")} | {"explore-dark", "training-dark"}
SHOWN |= {"inpaint-phone", "explore-phone"}
ASKED = os.environ.get("NICEST_BROWSER") == "1"

pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: install it, then make test-browser"),
    pytest.mark.skipif(not importlib.util.find_spec("playwright"), reason="no playwright here: pip install playwright"),
    pytest.mark.skipif(not ASKED, reason="in a browser: make test-browser runs it"),
]


@contextmanager
def studio(*runs: Path | str, port: int = 0, folder: Path | None = None) -> Iterator[tuple[str, Any]]:
    """The studio as a process of its own, as a person starts it."""
    command = [sys.executable, "-m", "nicest", "studio", *map(str, runs), "--port", str(port), "--json"]
    command += ["--folder", str(folder or "/nowhere")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield json.loads(process.stdout.readline())["url"], process
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def server(digits: Path, table: Path) -> Iterator[str]:
    with studio(os.environ.get("NICEST_STUDIO_RUN") or digits, table) as (url, _):
        yield url


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
        self.method = self.page.get_attribute("#methods [aria-pressed=true]", "data-method")  # that it begins with
        self.page.click("[data-method=ascent]")

    def own(self, url: str) -> bool:
        return url.startswith((self.server, "blob:" + self.server, "data:"))

    def note(self, bad: bool, text: str) -> None:
        if bad:
            self.wrong.append(text)

    def go_and_wait(self) -> None:
        self.page.click("#go")
        self.page.wait_for_selector("#stop:not(:disabled)")
        self.page.wait_for_selector("#stop:disabled", timeout=60_000)

    def slow(self, pattern: str, milliseconds: int) -> None:
        """Let the next answer whose address holds the pattern come late."""
        self.page.evaluate(
            """([pattern, wait]) => {
                const plain = window.fetch;
                window.fetch = async (...given) => {
                    const slow = pattern && String(given[0]).includes(pattern);
                    if (slow) pattern = null;
                    const answer = await plain(...given);
                    if (slow) await new Promise((done) => setTimeout(done, wait));
                    return answer;
                };
            }""",
            [pattern, milliseconds],
        )

    def levels(self, selector: str) -> np.ndarray:
        return np.frombuffer(base64.b64decode(self.page.get_attribute(selector, "data-picture")), np.uint8)

    def shot(self, name: str, *, height: int | None = None) -> None:
        """A picture of the page for the documentation; without a folder for it, only that it can be taken."""
        folder = os.environ.get("NICEST_SCREENSHOTS")
        clip = {"clip": {"x": 0, "y": 0, "width": self.page.viewport_size["width"], "height": height}} if height else {}
        self.page.evaluate("() => scrollTo(0, 0)")
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


def stroke(visit: Visit, start: tuple[float, float], end: tuple[float, float], button: str = "left") -> None:
    """Draw on the mask with the mouse, in shares of its side."""
    box = visit.page.locator("#mask").bounding_box()
    points = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in (start, end)]
    visit.page.mouse.move(*points[0])
    visit.page.mouse.down(button=button)
    visit.page.mouse.move(*points[1], steps=8)
    visit.page.mouse.up(button=button)


class TestInpainting:
    def test_painted_filled_in_and_the_observed_stay(self, visit: Visit):
        page = visit.page
        page.locator("#choices button").nth(2).click()
        page.click("#clear")
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
        before, after = (float(each.split()[0].replace("−", "-")) for each in (first, last))
        assert after > before
        assert int(page.get_attribute("#results", "data-frames")) >= 50
        assert "nats" in page.inner_text("#inpaint-note")
        frames = float(re.search(r"(\d+) frames/s", page.inner_text("#progress"))[1])  # type: ignore[index]
        print(f"{frames:.0f} frames a second")

    def test_at_once_one_button_and_the_original_beside(self, visit: Visit):
        page = visit.page
        assert page.inner_text("#hidden-count").startswith("32 of 64")  # the lower half
        assert visit.method == "draws"
        page.fill("#steps", "40")
        visit.go_and_wait()
        truth, filled = visit.levels("#truth-picture"), visit.levels("#results canvas")
        assert (truth == visit.levels("#original")).all()
        assert (filled[:32] == truth[:32]).all()
        assert (filled != truth).any()
        assert "nats" in page.inner_text("#truth-words")
        page.locator("#results canvas").first.hover()
        page.mouse.down()
        assert (visit.levels("#results canvas") == truth).all()
        page.mouse.up()
        assert (visit.levels("#results canvas") == filled).all()
        page.focus("#hold")
        page.keyboard.down(" ")
        assert (visit.levels("#results canvas") == truth).all()
        page.keyboard.up(" ")
        assert (visit.levels("#results canvas") == filled).all()

    def test_draws_differ_and_show_their_spread(self, visit: Visit):
        page = visit.page
        page.click("[data-method=draws]")
        page.fill("#steps", "200")
        visit.go_and_wait()
        page.wait_for_selector("#spread:not([hidden])")
        ends = np.stack([visit.levels(f"#results canvas >> nth={k}") for k in range(4)])
        assert (ends[:, :32] == visit.levels("#original")[:32]).all()
        assert len(np.unique(ends, axis=0)) == 4
        assert "R̂ =" in page.inner_text("#inpaint-note")
        assert re.search(r"sd up to \d+\s%", page.inner_text("#spread-words"))
        assert page.locator("#results .best").count() == 0

    def test_rectangle_invert_clear_and_the_ten_masks(self, visit: Visit):
        page = visit.page
        assert page.locator("#masks button").count() == 10
        page.click("#clear")
        assert page.locator("#go").is_disabled()
        stroke(visit, (0.1, 0.1), (0.9, 0.9), button="right")
        assert "Nothing" in page.inner_text("#hidden-count")
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
        page.click("#undo")
        assert "Nothing" in page.inner_text("#hidden-count")
        page.keyboard.press("Control+z")
        assert page.inner_text("#hidden-count").startswith("40 of 64")
        page.keyboard.press("Control+Shift+Z")
        page.click("#redo")
        assert page.inner_text("#hidden-count").startswith("32 of 64")
        assert page.locator("#redo").is_disabled()

    def test_by_keyboard(self, visit: Visit):
        page = visit.page
        page.click("#clear")
        page.focus("#mask")
        for key in ("ArrowRight", "ArrowDown", " ", "ArrowRight", "Enter"):
            page.keyboard.press(key)
        assert page.inner_text("#hidden-count").startswith("2 of 64")
        page.keyboard.press("Backspace")
        assert page.inner_text("#hidden-count").startswith("1 of 64")

    def test_a_rectangle_by_keyboard(self, visit: Visit):
        page = visit.page
        page.click("#clear")
        page.click("[data-tool=rectangle]")
        page.focus("#mask")
        page.keyboard.press(" ")
        assert "corner" in page.inner_text("#hidden-count")
        for key in ("ArrowRight", "ArrowDown", "ArrowDown", " "):
            page.keyboard.press(key)
        assert page.inner_text("#hidden-count").startswith("6 of 64")

    def test_another_image_or_run_begins_with_nothing(self, visit: Visit):
        page, home = visit.page, visit.page.input_value("#run")
        page.fill("#steps", "30")
        for again in ("image", "run"):
            page.locator("#masks button").nth(4).click()
            visit.go_and_wait()
            assert page.locator("#save-png").is_enabled()
            if again == "image":
                page.locator("#choices button").nth(5).click()
            else:
                page.select_option("#run", "people")
                page.select_option("#run", home)
                page.click("nav >> text=Inpaint")
                page.wait_for_selector("#masks button")
            for button in ("#save-png", "#save-gif"):
                assert page.locator(button).is_disabled()
            assert page.inner_text("#go") == "Fill in"
            assert page.inner_text("#progress") + page.inner_text("#inpaint-note") == ""
            assert page.locator("#results canvas[data-picture]").count() == 0

    def test_late_choices_do_not_replace_newer_ones(self, visit: Visit):
        page = visit.page
        visit.slow("/samples", 600)
        page.click("[data-source=samples]")
        page.click("[data-source=test]")
        page.wait_for_timeout(1200)
        assert page.get_attribute("#choices button >> nth=0", "aria-label") == "test image 1"
        assert (visit.levels("#choices canvas >> nth=0") == visit.levels("#original")).all()

    @pytest.mark.parametrize(
        ("field", "bad"), [("#steps", ""), ("#steps", "10.5"), ("#steps", "5001"), ("#noise", "-1")]
    )
    def test_settings_are_checked_before_they_are_sent(self, visit: Visit, field: str, bad: str):
        page = visit.page
        page.locator("#masks button").first.click()
        page.fill(field, bad)
        page.click("#go")
        assert "expected a" in page.inner_text("#inpaint-note")
        assert page.get_attribute(field, "aria-invalid") == "true"
        assert page.locator("#stop").is_disabled()

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


def test_keys_stop_an_ascent_and_keep_the_focus(chromium: Any, server: str):
    visit = Visit(chromium, server)
    page = visit.page
    page.fill("#steps", "5000")
    page.locator("#masks button").first.click()
    page.click("#go")
    page.wait_for_selector("#results[data-frames]")
    page.focus("#stop")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Stopped")
    assert page.evaluate("() => document.activeElement.id") == "go"
    page.keyboard.press("Enter")
    page.wait_for_selector("#stop:not(:disabled)")
    page.wait_for_selector("#results[data-frames]")
    page.focus("#mask")
    page.keyboard.press(" ")
    page.wait_for_selector("#stop:disabled", timeout=3000)
    visit.context.close()
    assert all("ERR_ABORTED" in each for each in visit.wrong)


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
    page.select_option("#run", "people")
    page.wait_for_selector("#where-column option", state="attached")
    page.select_option("#where-column", "colour")
    page.fill("#where-value", "green")
    page.click("#conditions button")
    page.wait_for_selector("#where-note.bad:has-text('green')")
    assert page.locator("#where-chips li").count() == 0
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


def test_a_server_that_ends_and_comes_back(chromium: Any, digits: Path):
    with studio(digits) as (url, process):
        visit = Visit(chromium, url)
        page = visit.page
        page.fill("#steps", "5000")
        page.locator("#masks button").first.click()
        page.click("#go")
        page.wait_for_selector("#results[data-frames]")
        process.kill()
        page.wait_for_selector("#inpaint-note.bad")
        assert "The server stopped, and the inpainting with it" in page.inner_text("#inpaint-note")
        page.wait_for_selector("#banner:not([hidden])")
        assert not page.inner_text("#progress").startswith("step")
        page.click("nav >> text=Explore")
        page.wait_for_selector("#wall-note.bad")
        assert page.locator("#keep").is_disabled()
        assert page.inner_text("#keep-value") == "64 of 64"
        process.wait()
    with studio(digits, port=int(url.rstrip("/").rsplit(":", 1)[1])):
        page.wait_for_selector("#banner", state="hidden", timeout=15_000)
        page.wait_for_selector("#wall canvas")
        page.wait_for_selector("#sliders label")
        page.wait_for_selector("#globe-note:has-text('220 codes')")
        assert page.inner_text("#wall-note") == ""
        assert page.locator("#keep").is_enabled()
        page.click("nav >> text=Inpaint")
        assert page.locator(".note.bad").count() == 0
        assert "The server is back" in page.inner_text("#inpaint-note")
        visit.context.close()


def test_the_first_model_of_a_run_is_noticed(chromium: Any, digits: Path, tmp_path: Path):
    young = tmp_path / "young"
    young.mkdir()
    with studio(young) as (url, _):
        page = chromium.new_page()
        page.goto(url)
        page.wait_for_selector("#state:has-text('This run has no model yet')")
        assert page.locator("nav a:visible").all_inner_texts() == ["Training", "New model"]
        shutil.copytree(digits, young, dirs_exist_ok=True)
        page.wait_for_selector("nav >> text=Inpaint")
        assert page.locator("#training").is_visible()
        assert page.inner_text("#state") == ""
        page.wait_for_selector("#spectrum polyline")
        page.wait_for_selector("#curves-note:has-text('Training is done')")
        page.close()


def test_a_run_that_is_replaced_damaged_or_deleted_is_shown_as_it_is(
    chromium: Any, digits: Path, table: Path, tmp_path: Path
):
    run = tmp_path / "run"
    wide = np.random.default_rng(0).integers(0, 17, (60, 4, 12), np.uint8)
    np.save(tmp_path / "wide.npy", wide)
    own = (f'data.name="{tmp_path / "wide.npy"}"', "train.epochs=1", "train.evaluate_every=1")
    train(load_recipe("digits"), tmp_path / "other", overrides=(*TINY, *own), device="cpu")
    shutil.copytree(digits, run)
    with studio(run) as (url, _):
        page = chromium.new_page()
        page.goto(url)
        page.wait_for_selector("#choices canvas")
        shutil.rmtree(run)
        shutil.copytree(tmp_path / "other", run)
        page.click("#others")
        page.wait_for_selector("#original[width='12'][height='4']")  # nothing is drawn in the shape of the one before
        page.wait_for_selector("#choices canvas")
        assert page.locator("#choices canvas:not([width='12'])").count() == 0
        (tmp_path / "wide.npy").rename(tmp_path / "gone.npy")
        with (run / "model.safetensors").open("r+b") as file:
            file.write(b"junk" * 100)
        page.click("#others")
        page.wait_for_selector("#state:has-text('damaged')")
        assert page.locator("nav a:visible").all_inner_texts() == ["Training", "New model"]
        assert page.locator(".note:visible:has-text('no model yet')").count() == 0
        shutil.rmtree(run)
        page.wait_for_selector("#state:has-text('is gone')")
        shutil.copytree(tmp_path / "other", run)  # without its data there are samples
        page.wait_for_selector("nav >> text=Inpaint")
        page.click("nav >> text=Inpaint")
        page.wait_for_selector("#choices-note:has-text('the test images are missing')")
        assert page.locator("#original[data-picture]").count() == 1
        assert page.get_attribute("[data-source=samples]", "aria-pressed") == "true"
        page.close()


class TestTheFrame:
    def test_the_skip_link_keeps_the_view(self, visit: Visit):
        page = visit.page
        page.click("nav >> text=Training")
        page.wait_for_selector("#training:not([hidden])")
        page.focus(".skip")
        page.keyboard.press("Enter")
        page.wait_for_timeout(200)
        assert page.locator("#training").is_visible()
        assert page.evaluate("() => document.activeElement.id") == "main"

    def test_the_address_keeps_view_and_run(self, visit: Visit):
        page = visit.page
        page.select_option("#run", "people")
        page.click("nav >> text=Training")
        page.wait_for_selector("#curves polyline")
        page.wait_for_load_state("networkidle")
        page.reload(wait_until="networkidle")
        page.wait_for_selector("#training:not([hidden])")
        assert page.input_value("#run") == "people"
        page.go_back()
        page.wait_for_selector("#table:not([hidden])")

    def test_a_link_holds_all_that_is_shown(self, visit: Visit, chromium: Any):
        page = visit.page
        page.locator("#choices button").nth(7).click()
        page.locator("#masks button").nth(6).click()
        page.fill("#steps", "30")
        page.select_option("#chains", "2")
        visit.go_and_wait()
        page.click("#link")
        page.wait_for_selector("#link-said:not(:empty)")
        links = [page.url]
        filled = visit.levels("#results canvas")
        page.click("nav >> text=Explore")
        page.wait_for_selector("#plane-picture[data-picture]")
        page.locator("#wall button").nth(9).click()
        page.wait_for_timeout(800)
        page.locator("#sliders input").nth(2).fill("-3")
        page.wait_for_timeout(800)
        moved = visit.levels("#moved")
        page.click("#link")
        links.append(page.url)
        other = Visit(chromium, visit.server)
        other.page.goto("about:blank")
        other.page.goto(links[0])
        other.page.wait_for_function("() => document.getElementById('steps').value === '30'")
        other.page.wait_for_selector("#choices canvas")
        assert (other.levels("#original") == visit.levels("#original")).all()
        assert other.page.inner_text("#hidden-count") == page.inner_text("#hidden-count", timeout=1000)
        other.go_and_wait()
        assert (other.levels("#results canvas") == filled).all()  # by the same seed
        other.page.goto(links[1])
        other.page.wait_for_selector("#moved[data-picture]")
        other.page.wait_for_timeout(1500)
        assert (other.levels("#moved") == moved).all()
        other.page.goto(links[1][:-40])
        other.page.wait_for_selector("#link-said:has-text('incomplete')")
        other.context.close()
        assert other.wrong == []

    def test_a_view_begins_at_its_top(self, visit: Visit):
        page = visit.page
        page.click("nav >> text=Explore")
        page.wait_for_selector("#wall canvas")
        for tab in ("Explore", "Score"):
            page.evaluate("() => scrollTo(0, 500)")
            page.click(f"nav >> text={tab}")
            page.wait_for_timeout(100)
            assert page.evaluate("() => scrollY") == 0

    def test_a_run_that_is_left_is_not_asked_again(self, visit: Visit):
        page, asked = visit.page, []
        page.on("request", lambda request: asked.append(request.url) if "/metrics" in request.url else None)
        visit.slow("/metrics", 500)
        page.click("nav >> text=Training")
        page.wait_for_timeout(100)
        page.click("nav >> text=Score")
        page.wait_for_timeout(3500)
        assert len(asked) == 1


class TestExploring:
    def test_a_late_answer_does_not_replace_a_newer_pick(self, visit: Visit):
        page = visit.page
        page.click("nav >> text=Explore")
        page.wait_for_selector("#sliders label")
        page.wait_for_selector("#between canvas[data-picture]")
        visit.slow("/move", 600)
        page.locator("#wall button").nth(5).click()
        page.locator("#wall button").nth(9).click()
        page.wait_for_timeout(1200)
        assert (visit.levels("#moved") == visit.levels("#wall canvas >> nth=9")).all()
        assert page.get_attribute("#wall button >> nth=9", "data-mark") == "A"

    def test_one_sample_may_be_both_picks(self, visit: Visit):
        page = visit.page
        page.click("nav >> text=Explore")
        page.wait_for_selector("#wall canvas")
        page.click("[data-pick=b]")
        page.locator("#wall button").nth(0).click()
        assert page.get_attribute("#wall button >> nth=0", "data-mark") == "A B"
        page.locator("#wall button").nth(3).click()
        assert page.get_attribute("#wall button >> nth=0", "data-mark") == "A"

    def test_the_wall_is_one_tab_stop_with_arrows(self, visit: Visit):
        page = visit.page
        page.click("nav >> text=Explore")
        page.wait_for_selector("#wall canvas")
        assert (page.locator("#wall button").count(), page.locator("#wall button[tabindex='0']").count()) == (64, 1)
        page.locator("#wall button").first.focus()
        for key in ("ArrowRight", "ArrowDown", "Enter"):
            page.keyboard.press(key)
        assert page.get_attribute("#wall button >> nth=9", "data-mark") == "A"
        page.keyboard.press("Tab")
        assert not page.evaluate("() => document.activeElement.closest('#wall')")

    def test_a_slider_moves_the_picture_and_back(self, visit: Visit):
        page = visit.page
        page.click("nav >> text=Explore")
        page.wait_for_selector("#sliders label")
        page.wait_for_selector("#globe-note:has-text('each 8.0 sd from the mode')")
        shown = (page.inner_text(each).split()[-2] for each in ("#moved-radius", "#moved-typical"))
        radius, typical = map(float, shown)
        assert typical == 8
        assert radius == pytest.approx(typical, rel=0.35)  # a draw lies where draws lie
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

    def test_a_direction_from_labels_moves_the_picture_and_a_link_keeps_it(self, visit: Visit):
        page = visit.page
        page.click("nav >> text=Explore")
        page.wait_for_selector("#labels button >> nth=9")
        page.wait_for_selector("#toward canvas[data-picture] >> nth=1")
        ends = "() => [...document.querySelectorAll('#toward canvas')].map((each) => each.dataset.picture)"
        toward_zero = page.evaluate(ends)
        page.click("[aria-label='label 8']")
        page.select_option("#label-start", "3")
        page.wait_for_function(f"old => String(({ends})()) !== String(old)", arg=toward_zero)
        before = visit.levels("#moved")
        page.get_by_label("From label 3 toward label 8").fill("2")
        page.wait_for_function(f"() => document.getElementById('moved').dataset.picture === ({ends})()[1]")
        moved = visit.levels("#moved")
        page.click("#link")
        link = page.url
        page.click("#reset")
        page.wait_for_timeout(500)
        assert (visit.levels("#moved") == before).all()
        assert page.inner_text("#toward output") == "+0.00"
        page.goto("about:blank")
        page.goto(link)
        page.wait_for_function(
            "picture => document.getElementById('moved')?.dataset.picture === picture",
            arg=base64.b64encode(moved.tobytes()).decode(),
        )
        assert page.get_by_label("From label 3 toward label 8").input_value() == "2"

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

    def test_the_plane_through_three_pictures_and_a_tile_of_the_sphere(self, visit: Visit):
        page = visit.page
        page.click("nav >> text=Score")
        box = page.locator("#sketch").bounding_box()
        page.mouse.move(box["x"] + 140, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + 140, box["y"] + 240, steps=5)
        page.mouse.up()
        page.click("#score-sketch")
        page.wait_for_selector(".card")
        page.click("nav >> text=Explore")
        page.wait_for_selector("#plane-picture[data-picture]")
        for wall, which, tile in (("test", "b", 5), ("own", "c", 0)):
            page.click(f"[data-wall={wall}]")
            page.wait_for_selector(f"#wall [aria-label^='{'test image' if wall == 'test' else 'drawing'}']")
            page.click(f"[data-pick={which}]")
            page.locator("#wall button").nth(tile).click()
            assert page.get_attribute(f"#wall button >> nth={tile}", "data-mark") == which.upper()
        drawn = visit.levels("#wall canvas")
        page.locator("#plane").scroll_into_view_if_needed()
        box = page.locator("#plane").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 6, box["y"] + box["height"] / 6)  # C, a quarter inside the edge
        page.wait_for_selector("#plane-shares:has-text('0.00, 1.00')")
        assert abs(visit.levels("#plane-picture").astype(int) - drawn).max() <= 1
        page.focus("#plane")
        page.keyboard.press("ArrowRight")
        page.wait_for_selector("#plane-shares:has-text('0.05')")
        page.wait_for_selector("#globe-note:has-text('220 codes')")
        page.click("[data-pick=a]")
        page.focus("#globe")
        page.keyboard.press("Enter")
        page.wait_for_selector("#globe-note:has-text('is A now')")
        before = visit.levels("#moved")
        box = page.locator("#globe").bounding_box()
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 3)
        page.wait_for_function(
            "old => document.getElementById('moved').dataset.picture !== old",
            arg=base64.b64encode(before.tobytes()).decode(),
        )
        assert page.locator("#sliders canvas[data-picture]").count() == 24


class TestScoring:
    def test_files_drawings_and_test_images(self, visit: Visit, tmp_path: Path):
        page = visit.page
        page.click("nav >> text=Score")
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 20), np.uint8)).save(tmp_path / "noise.png")
        page.set_input_files("#score-file", str(tmp_path / "noise.png"))
        page.wait_for_selector(".card")
        assert "Nearly every validation image is denser" in page.inner_text(".card")
        assert "± " in page.inner_text(".card .numbers")
        assert "lower bound" in page.inner_text("#caveat")
        assert "does not mean typical" in page.inner_text("#caveat")
        assert "validation images" in page.inner_text("#reference-note")
        box = page.locator("#sketch").bounding_box()
        page.mouse.move(box["x"] + 140, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + 140, box["y"] + 240, steps=5)
        page.mouse.up()
        page.click("#score-sketch")
        page.wait_for_selector(".card >> text=a drawing")
        look = "() => document.getElementById('sketch').toDataURL()"
        before = page.evaluate(look)
        page.mouse.move(box["x"] + 30, box["y"] + 40)
        page.mouse.down(button="right")
        page.mouse.move(box["x"] + 30, box["y"] + 240, steps=5)
        page.mouse.up(button="right")
        assert page.evaluate(look) == before
        parts = page.locator("#reference-scores .band, #reference-scores .mark")
        order = parts.evaluate_all("all => all.map((each) => each.classList[0])")
        assert order == ["band", "line", "line"]  # the marks of both scores stand before the histogram
        page.locator(".card button").first.click()
        page.wait_for_selector(".card .map:has-text('nats above what is expected')")
        look = (
            "() => [...new Set(document.querySelector('.map canvas').getContext('2d').getImageData(0, 0, 8, 8).data)]"
        )
        assert len(page.evaluate(look)) > 20
        page.click("#score-tests")
        page.wait_for_selector(".card >> nth=4")
        assert page.locator(".card .map").count() == 1  # of the drawing, which stays
        assert page.locator(".ledger").count() == 5
        page.check("#score-invert")  # the file is read again, the others stay
        page.wait_for_function("() => document.querySelector('.card h3').textContent === 'noise.png'")
        assert page.locator(".card").count() == 5


def test_scores_stay_with_their_run(visit: Visit):
    page = visit.page
    home = page.input_value("#run")
    page.click("nav >> text=Score")
    page.click("#score-tests")
    page.wait_for_selector(".card")
    visit.slow("/score", 600)
    page.click("#score-tests")
    page.wait_for_selector("#score-note:has-text('Scoring')")
    page.select_option("#run", "people")
    page.select_option("#run", home)
    page.click("nav >> text=Score")
    page.wait_for_timeout(1000)
    assert page.locator(".card").count() == 0
    assert page.inner_text("#score-note") + page.inner_text("#caveat") == ""


def test_an_upload_is_inverted_afterwards_and_photos_of_any_size_are_taken(visit: Visit, tmp_path: Path):
    page = visit.page
    page.click("[data-source=upload]")
    Image.fromarray(np.full((8, 8), 255, np.uint8)).save(tmp_path / "white.png")
    page.set_input_files("#upload-file", str(tmp_path / "white.png"))
    page.wait_for_selector("#choices-note:has-text('as the model sees it')")
    assert (visit.levels("#original") == 16).all()
    for each in (".easel", "#truth-picture", "#choices button"):  # white pictures have an edge
        assert page.locator(each).first.evaluate("each => getComputedStyle(each).boxShadow") != "none"
    page.check("#upload-invert")
    page.wait_for_function("() => atob(document.getElementById('original').dataset.picture).charCodeAt(0) === 0")
    page.uncheck("#upload-invert")
    noise = np.random.default_rng(0).integers(0, 256, (1800, 1800, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "heavy.png", compress_level=0)
    Image.new("L", (5000, 5000), 128).save(tmp_path / "long.png")
    assert (tmp_path / "heavy.png").stat().st_size > 8 * 2**20
    for name in ("heavy.png", "long.png"):
        page.set_input_files("#upload-file", str(tmp_path / name))
        page.wait_for_selector(f"#choices-note:has-text('{name}, as the model sees it')")
        assert abs(visit.levels("#original").mean() - 8) < 1


def test_the_label_is_chosen_where_the_run_is(chromium: Any, labelled: Path):
    """Of each label another picture comes first, one of the test images that have it."""
    splits = load("digits", labels=True)
    with studio(labelled) as (url, _):
        visit = Visit(chromium, url)
        for label in (0, 7):
            visit.page.select_option("#run", f"labelled-label-{label}")
            visit.page.wait_for_function(
                "id => location.href.includes(id) && document.querySelector('#choices canvas')", arg=f"label-{label}"
            )
            visit.page.wait_for_timeout(500)
            if label == 7:
                visit.page.click("nav >> text=Explore")
                visit.page.wait_for_selector("#classes figure >> nth=9")
                same = visit.levels("#classes canvas >> nth=7") == visit.levels("#wall canvas")
                assert same.all()
                assert visit.page.locator("#labels-part").is_hidden()  # codes do not depend on the label
                visit.page.click("nav >> text=Inpaint")
            first = visit.levels("#choices canvas")
            found = splits.test[(splits.test[:, :-1] == first).all(1), -1]
            assert set(found.tolist()) == {label}
        assert visit.wrong == []
        visit.context.close()


def test_labels_of_axes(visit: Visit):
    found = visit.page.evaluate(
        """async () => {
            const { ticks } = await import("/page/draw.js");
            const ranges = [[-26000, -14000, 5], [1100, 2700, 3], [0, 1, 4], [-3, 5e6, 3], [1.1e-4, 1.2e-4, 3]];
            return ranges.map((each) => ticks(...each));
        }"""
    )
    for each in found:
        assert len(each) >= 2
        assert len({name for _, name in each}) == len(each)
    assert [name for _, name in found[0]] == ["−25k", "−20k", "−15k"]
    assert [name for _, name in found[2]] == ["0", "0.5", "1.0"]


def test_a_run_that_stopped_early_and_its_best_epoch(visit: Visit):
    page = visit.page
    rows = [{"epoch": e, "step": e, "train_nats": e, "valid_nats": v} for e, v in ((80, 1.0), (160, 5.25), (240, 4.0))]
    answer = {"rows": rows, "idle_seconds": 900, "epochs": 1500, "patience": 80, "best_epoch": 160, "finished": True}
    answer["process"] = {"here": False, "running": False, "failed": False, "said": ""}
    page.route("**/metrics*", lambda route: route.fulfill(json=answer))
    page.click("nav >> text=Training")
    page.wait_for_selector("#curves-note:has-text('stopped early, at epoch 240')")
    assert "epoch 160: 5.25 nats" in page.inner_text("#curves-note")
    assert "1500" not in page.inner_text("#curves-note")
    best = page.locator("#curves polyline.accent").get_attribute("points").split()[1]
    assert float(page.get_attribute("#curves .mark", "x1")) == pytest.approx(float(best.split(",")[0]), abs=0.1)


@pytest.mark.parametrize("visit", [{"forced_colors": "active"}], indirect=True)
def test_the_active_view_is_seen_in_forced_colours(visit: Visit):
    links = visit.page.locator("nav a:visible")
    grounds = []
    for i in range(links.count()):
        with Image.open(io.BytesIO(links.nth(i).screenshot())) as picture:
            grounds.append(picture.convert("RGB").getpixel((6, picture.height // 2)))
    active, *others = grounds
    assert len(set(others)) == 1
    assert active not in others


def test_large_images_are_saved_as_gif_too(chromium: Any, tmp_path: Path):
    """Two hundred frames of these, sent back by the page, would be more than a request may hold."""
    np.save(tmp_path / "large.npy", np.random.default_rng(0).integers(0, 256, (60, 3, 72, 72), np.uint8))
    own = (f'data.name="{tmp_path / "large.npy"}"', "train.epochs=1", "train.evaluate_every=1")
    train(load_recipe("digits"), tmp_path / "run", overrides=(*TINY, *own), device="cpu")
    with studio(tmp_path / "run") as (url, _):
        visit = Visit(chromium, url)
        page = visit.page
        page.locator("#masks button").first.click()
        page.fill("#steps", "300")
        visit.go_and_wait()
        heights = page.locator("#climb polyline").first.get_attribute("points")
        ys = [float(each.split(",")[1]) for each in heights.split()]
        assert len(set(ys[:10])) == 10  # the start of the climb is no flat line
        names = page.locator("#climb text").all_text_contents()
        assert len(set(names)) == len(names)
        with page.expect_download() as waiting:
            page.click("#save-gif")
        with Image.open(waiting.value.path()) as picture:
            assert picture.format == "GIF"
        visit.context.close()
        assert visit.wrong == []


def test_training_with_hover(visit: Visit):
    page = visit.page
    page.click("nav >> text=Training")
    page.wait_for_selector("#curves polyline")
    page.wait_for_selector("#spectrum polyline")
    page.hover("#spectrum")
    assert "component" in page.inner_text("#spectrum .tip")
    page.focus("#curves")
    page.keyboard.press("Home")
    first = page.inner_text("#curves .tip")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#curves .tip").startswith("epoch ")
    assert page.inner_text("#curves .tip") != first


def test_two_runs_side_by_side(chromium: Any, digits: Path, table: Path, tmp_path: Path):
    worse = tmp_path / "worse"
    train(load_recipe("digits"), worse, overrides=(*TINY, "train.epochs=2", "train.evaluate_every=1"), device="cpu")
    with studio(digits, worse, table) as (url, _):
        visit = Visit(chromium, url)
        page = visit.page
        page.locator("#masks button").nth(4).click()
        page.click("nav >> text=Compare")
        page.wait_for_selector("#same td")
        assert page.input_value("#other-run") == "worse"  # of the same form
        lines = [line.split("\t") for line in page.inner_text("#same tbody").split("\n")]
        assert [line[0] for line in lines] == ["digits", "worse"]
        assert float(lines[0][1].replace("−", "-")) > float(lines[1][1].replace("−", "-")) + 10
        assert "digits gives them" in page.inner_text("#same-note")
        page.click("#fill-both")
        page.wait_for_selector("#both-note:has-text('gives the original')", timeout=60_000)
        original = visit.levels("#both-original").reshape(8, 8)
        for side in ("first", "second"):
            filled = visit.levels(f"#{side}-filled canvas").reshape(8, 8)
            assert (filled[:, 4:] == original[:, 4:]).all()  # the mask of Inpaint: the left half
            assert (filled[:, :4] != original[:, :4]).any()
        assert page.locator("#compare-curves polyline").count() == 2
        page.select_option("#other-run", "people")
        page.wait_for_selector("#second-samples td")
        assert "different data" in page.inner_text("#compare-note")
        assert page.locator("#same-part").is_hidden()
        visit.context.close()
        assert visit.wrong == []


def test_a_table_is_trained_on_here(chromium: Any, digits: Path, table: Path, tmp_path: Path):
    """Dropped, looked at, trained, watched after the server came back, stopped and downloaded; images are looked at."""
    own = tmp_path / "own"
    with studio(digits, folder=own) as (url, _):
        visit = Visit(chromium, url)
        page = visit.page
        page.click("nav >> text=New model")
        assert page.locator("#begin").is_disabled()
        pictures = tmp_path / "faces"
        pictures.mkdir()
        for i in range(60):
            Image.new("RGB", (40, 30), (i, 255 - i, 0)).save(pictures / f"{i}.png")
        page.set_input_files("#train-folder", str(pictures))
        page.wait_for_selector("#found:has-text('60 colour images of 28 by 28')")
        page.select_option("#train-size", "8")
        page.wait_for_selector("#found:has-text('60 colour images of 8 by 8')")
        page.wait_for_selector("#found canvas")
        assert page.input_value("#train-name") == "faces"
        page.set_input_files("#train-file", str(table.parent / "people.csv"))
        page.wait_for_selector("#found:has-text('300 rows of 3 columns')")
        assert page.locator("#found tbody >> nth=0").inner_text().split("\n")[2].split("\t") == [
            "colour", "categorical", "blue, red"
        ]  # fmt: skip
        page.fill("#train-name", "crowd")
        page.evaluate(  # many epochs, so that there is something to stop
            """() => {
                const plain = window.fetch, longer = (body) => JSON.stringify({ ...JSON.parse(body), epochs: 20000 });
                window.fetch = (path, given) =>
                    plain(path, path === "/api/train" ? { ...given, body: longer(given.body) } : given);
            }"""
        )
        page.click("#begin")
        page.wait_for_selector("#training:not([hidden])")
        page.wait_for_selector("#curves-note:has-text('started')")
        assert page.input_value("#run") == "crowd"
        visit.context.close()
        assert visit.wrong == []
    with studio(digits, folder=own) as (url, _):  # the server ended, and the training did not
        page = chromium.new_page()
        page.goto(f"{url}#training/crowd")
        page.wait_for_selector("#curves polyline", timeout=90_000)
        page.wait_for_selector("#growing td", timeout=30_000)
        page.click("#halt")
        page.wait_for_selector("#curves-note:has-text('stopped')", timeout=30_000)
        assert page.locator("#halt").is_hidden()
        with page.expect_download() as waiting:
            page.click("#fetch")
        assert waiting.value.suggested_filename == "crowd.zip"
        page.close()


def test_a_table(visit: Visit, tmp_path: Path):
    page = visit.page
    page.select_option("#run", "people")
    page.wait_for_selector("#sample-rows td")
    (tmp_path / "rows.csv").write_text("height,weight,colour\n170,68,red\n150,90,blue\n")
    page.set_input_files("#table-file", str(tmp_path / "rows.csv"))
    page.wait_for_selector("#table-scores td")
    assert page.locator("#table-scores tbody tr").count() == 2
    page.click("#table-scores th button >> nth=1")  # by density, from the lowest
    assert page.get_attribute("#table-scores th >> nth=1", "aria-sort") == "ascending"
    assert page.inner_text("#table-scores tbody td >> nth=0") == "2"
    page.click("[aria-label='Which cells of row 2 are surprising?']")
    page.wait_for_selector("#cells-note:has-text('weight is 90, expected')")
    assert "very" in page.get_attribute("#table-scores tbody td >> nth=4", "class").split()
    with page.expect_download() as waiting:
        page.click("#save-scores")
    saved = Path(waiting.value.path()).read_text().splitlines()
    assert saved[0].startswith("row,")
    assert saved[0].endswith(",height,weight,colour")
    assert len(saved) == 3
    page.wait_for_selector("#histograms svg >> nth=2")
    page.select_option("#where-column", "colour")
    page.fill("#where-value", "red")
    page.click("#conditions button")
    page.wait_for_selector("#where-note:has-text('% of the model')")
    assert set(page.locator("#sample-rows td:nth-child(3)").all_inner_texts()) == {"red"}
    page.click("#where-chips button")
    page.wait_for_selector("#rows-temperature:not(:disabled)")
    page.fill("[name=height]", "185")
    page.click("#impute button.main")
    page.wait_for_selector("#impute-note:has-text('filled in')")
    assert page.input_value("[name=weight]")
    assert page.locator("#impute .found").count() == 2
    assert page.locator("nav a:visible").all_inner_texts() == ["Table", "Training", "Compare", "New model"]


class TestFillingIn:
    @pytest.fixture
    def page(self, visit: Visit) -> Any:
        visit.page.select_option("#run", "people")
        visit.page.wait_for_selector("#impute input")
        return visit.page

    def fill_in(self, page: Any) -> None:
        page.click("#impute button.main")
        page.wait_for_selector("#impute-note:has-text('filled in. Clear')")

    @pytest.mark.parametrize("bad", ["1,5", "abc", "1e999", "0x10"])
    def test_what_is_no_number_is_refused_at_its_field(self, page: Any, bad: str):
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.fill("[name=height]", bad)
        page.click("#impute button.main")
        page.wait_for_selector("[name=height][aria-invalid=true]")
        assert "height: expected a number" in page.inner_text("#impute .wrong .hint")
        assert page.input_value("[name=height]") == bad
        assert page.evaluate("() => document.activeElement.name") == "height"
        assert asked == []
        page.fill("[name=height]", "170")
        assert page.locator("[aria-invalid=true]").count() == 0

    def test_an_edited_cell_is_known(self, page: Any):
        page.fill("[name=height]", "185")
        self.fill_in(page)
        page.fill("[name=weight]", "60")
        assert page.locator("#impute .found").count() == 1
        page.fill("[name=height]", "180")
        self.fill_in(page)
        assert page.input_value("[name=weight]") == "60"
        assert page.input_value("[name=height]") == "180"

    def test_clear_while_it_works(self, visit: Visit, page: Any):
        visit.slow("/impute", 800)
        page.fill("[name=height]", "185")
        page.click("#impute button.main")
        assert page.get_attribute("#impute button.main", "aria-disabled") == "true"
        page.click("#impute [type=reset]")
        page.wait_for_timeout(3000)
        assert page.input_value("[name=weight]") == ""
        assert page.inner_text("#impute-note") == ""

    def test_the_rows_are_those_of_the_last_temperature(self, visit: Visit, page: Any):
        page.wait_for_selector("#sample-rows td")
        visit.slow("temperature=0", 800)
        page.fill("#rows-temperature", "0")
        page.wait_for_timeout(250)
        page.fill("#rows-temperature", "1.5")
        page.wait_for_timeout(1500)
        assert len(set(page.locator("#sample-rows td:first-child").all_inner_texts())) > 5


def test_the_api_is_described_without_another_host(visit: Visit):
    visit.page.goto(visit.server + "docs")
    visit.page.wait_for_selector("text=POST /api/runs/{run}/inpaint")
    assert visit.page.locator("h2:empty, .scroll:not([tabindex='0'])").count() == 0


PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}


@pytest.mark.skipif(not os.environ.get("NICEST_AXE"), reason="NICEST_AXE names no axe.min.js")
@pytest.mark.parametrize("visit", [{}, {"color_scheme": "dark"}], indirect=True)
def test_axe_finds_nothing_in_any_view(visit: Visit, tmp_path: Path):
    """Every view of images and of a table, filled with results, and the API page."""
    page = visit.page
    page.fill("#steps", "20")
    visit.go_and_wait()
    found = {"inpaint": violations(page)}
    for name, ready in (
        ("Explore", "#plane-picture[data-picture]"),
        ("Score", "#score-tests:not(:disabled)"),
        ("Training", "#growing canvas"),
        ("Compare", "#second-samples td"),
        ("New model", "#found"),
    ):
        page.click(f"nav >> text={name}")
        page.wait_for_selector(ready)
        if name == "Explore":
            page.wait_for_selector("#toward canvas[data-picture]")
        if name == "Score":
            page.click("#score-tests")
            page.wait_for_selector(".card button")
            page.locator(".card button").first.click()
            page.wait_for_selector(".map:has-text('nats')")
        found[name] = violations(page)
    page.select_option("#run", "people")
    page.click("nav >> text=Table")
    (tmp_path / "rows.csv").write_text("height,weight,colour\n170,68,red\n150,90,blue\n")
    page.set_input_files("#table-file", str(tmp_path / "rows.csv"))
    page.click("[aria-label='Which cells of row 2 are surprising?']")
    page.wait_for_selector("td.odd")
    page.fill("#where-value", "160")
    page.select_option("#where-sign", ">")
    page.click("#conditions button")
    page.wait_for_selector("#where-note:has-text('of the model')")
    page.click(".words summary")
    found["table"] = violations(page)
    page.goto(visit.server + "docs")
    page.wait_for_selector("text=POST /api/runs/{run}/inpaint")
    found["docs"] = violations(page)
    assert {view: each for view, each in found.items() if each} == {}


def violations(page: Any) -> list[str]:
    page.evaluate(Path(os.environ["NICEST_AXE"]).read_text())
    found = page.evaluate("async () => (await axe.run()).violations")
    return [f"{each['id']}: {node['html'][:150]}" for each in found for node in each["nodes"]]


class TestLooks:
    """Light, dark and on a phone: nothing is wider than the screen, and the pictures are for the documentation."""

    @pytest.mark.parametrize(
        ("visit", "name"),
        [({}, "light"), ({"color_scheme": "dark"}, "dark"), (PHONE, "phone")],
        indirect=["visit"],
        ids=["light", "dark", "phone"],
    )
    def test_every_view(self, visit: Visit, name: str, tmp_path: Path):
        (tmp_path / "rows.csv").write_text("height,weight,colour\n170,68,red\n150,90,blue\n")
        page = visit.page
        page.locator("#choices button").nth(3).click()
        page.locator("#masks button").nth(6).click()
        page.click("[data-method=draws]")
        visit.go_and_wait()
        page.wait_for_selector("#spread:not([hidden])")
        self.fits(page)
        visit.shot(f"studio-inpaint-{name}", height=2300 if name == "phone" else None)
        page.click("nav >> text=Explore")
        page.wait_for_selector("#globe-note:has-text('220 codes')")
        page.wait_for_selector("#between canvas[data-picture]")
        page.click("[aria-label='label 3']")
        page.get_by_label("From all labels toward label 3").fill("1")
        page.wait_for_timeout(600)
        self.fits(page)
        visit.shot(f"studio-explore-{name}", height=2700 if name == "phone" else None)
        page.click("nav >> text=Score")
        page.click("#score-tests")
        page.wait_for_selector(".card >> nth=2")
        page.locator(".card button").first.click()
        page.wait_for_selector(".map:has-text('nats')")
        self.fits(page)
        visit.shot(f"studio-score-{name}")
        page.click("nav >> text=Training")
        page.wait_for_selector("#spectrum polyline")
        page.wait_for_selector("#growing canvas")
        self.fits(page)
        visit.shot(f"studio-training-{name}")
        for view, ready in (("Compare", "#second-samples td"), ("New model", "#found")):
            page.click(f"nav >> text={view}")
            page.wait_for_selector(ready)
            self.fits(page)
        page.select_option("#run", "people")
        page.click("nav >> text=Table")
        page.set_input_files("#table-file", str(tmp_path / "rows.csv"))
        page.click("[aria-label='Which cells of row 2 are surprising?']")
        page.wait_for_selector("td.odd")
        page.wait_for_selector("#histograms svg")
        self.fits(page)
        visit.shot(f"studio-table-{name}")

    @pytest.mark.parametrize("visit", [PHONE | {"viewport": {"width": 320, "height": 640}}], indirect=True)
    def test_the_narrowest_screen(self, visit: Visit):
        page = visit.page
        page.select_option("#chains", "8")
        page.fill("#steps", "30")
        page.locator("#masks button").first.click()
        visit.go_and_wait()
        page.focus("#climb")
        page.keyboard.press("End")
        assert self.inside(page, "#climb .tip", "#climb")
        assert self.inside(page, "#tools button", "#tools")
        assert self.inside(page, "nav a:not([hidden])", "nav")
        page.click("nav >> text=Explore")
        page.wait_for_selector("#sliders label")
        assert self.inside(page, ".facts dd", ".pane:has(.facts)")
        self.fits(page)

    def test_large_letters_and_long_names_stay_inside(self, visit: Visit):
        page = visit.page
        assert page.title() == f"Inpaint · {page.input_value('#run')} · nicest studio"
        page.evaluate("() => { document.documentElement.style.fontSize = '200%'; }")
        for view in ("Inpaint", "Explore", "Score", "Training"):
            page.click(f"nav >> text={view}")
            page.wait_for_timeout(300)
            cut = page.locator("main *:visible").evaluate_all(
                """all => all.filter((each) => getComputedStyle(each).overflow === "hidden" && !each.closest("svg")
                    && each.scrollWidth > each.clientWidth + 1).map((each) => each.id || each.className)"""
            )
            assert cut == []
            self.fits(page)
        name = "a_column_with_a_name_that_goes_on_and_on_" * 3
        column = {"name": name, "kind": "real", "moment": False, "low": 0, "high": 1, "values": []}
        page.route("**/columns", lambda route: route.fulfill(json={"columns": [column]}))
        page.select_option("#run", "people")
        page.click("nav >> text=Table")
        page.wait_for_selector("#impute label")
        assert page.title() == "Table · people · nicest studio"
        assert self.inside(page, "#impute label", "#impute")
        self.fits(page)

    def inside(self, page: Any, parts: str, whole: str) -> bool:
        return page.evaluate(
            """([parts, whole]) => {
                const frame = document.querySelector(whole).getBoundingClientRect();
                const end = Math.min(frame.right, innerWidth) + 1;
                const within = ({ left, right }) => left >= frame.left - 1 && right <= end;
                return [...document.querySelectorAll(parts)].every((each) => {
                    const text = document.createRange();
                    text.selectNodeContents(each);
                    return within(each.getBoundingClientRect()) && within(text.getBoundingClientRect());
                });
            }""",
            [parts, whole],
        )

    def fits(self, page: Any) -> None:
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
