"""The page in a real Chromium: what only a browser can show. `make test-browser` runs this.

NICEST_STUDIO_RUN names a better trained run, NICEST_SCREENSHOTS a folder for the pictures of docs/studio.md, and
NICEST_AXE a copy of axe.min.js, which then checks every view.
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

from nicest.recipes import load_recipe
from nicest.train.fit import train
from studio.conftest import TINY

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
SHOWN = {f"{view}-light" for view in ("inpaint", "score", "table")} | {"explore-dark", "training-dark"}
SHOWN |= {"inpaint-phone", "explore-phone"}
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
ROWS = "height,weight,colour\n170,68,red\n150,90,blue\n,70,red\n"
AXE = os.environ.get("NICEST_AXE")

pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: install it, then make test-browser"),
    pytest.mark.skipif(not importlib.util.find_spec("playwright"), reason="no playwright here: pip install playwright"),
    pytest.mark.skipif(os.environ.get("NICEST_BROWSER") != "1", reason="in a browser: make test-browser runs it"),
]


@contextmanager
def studio(*runs: Path | str, port: int = 0, folder: Path | None = None) -> Iterator[tuple[str, Any]]:
    """The studio as a process of its own."""
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
        self.context.set_default_timeout(60_000)  # a busy machine takes its time
        self.page, self.server, self.wrong = self.context.new_page(), server, []
        self.page.on("console", lambda message: self.note(message.type in ("error", "warning"), message.text))
        self.page.on("pageerror", lambda error: self.note(True, str(error)))
        self.page.on("requestfailed", lambda request: self.note(True, f"{request.url} {request.failure}"))
        self.page.on("request", lambda request: self.note(not self.own(request.url), f"outside: {request.url}"))
        self.page.on("response", lambda answer: self.note(answer.status >= 400, f"{answer.status} {answer.url}"))
        self.page.goto(server)
        self.wait("#choices canvas", "#masks button")
        self.method = self.page.get_attribute("#methods [aria-pressed=true]", "data-method")
        self.page.click("[data-method=ascent]")

    def own(self, url: str) -> bool:
        return url.startswith((self.server, "blob:" + self.server, "data:"))

    def note(self, bad: bool, text: str) -> None:
        if bad:
            self.wrong.append(text)

    def end(self, *allowed: str) -> None:
        """Close the page; nothing else than what is allowed may have gone wrong."""
        self.context.close()
        assert [each for each in self.wrong if not any(word in each for word in allowed)] == []

    def wait(self, *selectors: str, timeout: int = 60_000) -> None:
        for selector in selectors:
            self.page.wait_for_selector(selector, timeout=timeout)

    def view(self, name: str, *ready: str) -> None:
        self.page.click(f"nav >> text={name}")
        self.wait(*ready)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def hidden(self) -> int:
        """The number of hidden pixels."""
        return int((re.match(r"\d+", self.text("#hidden-count")) or ["0"])[0])

    def fill_in(self) -> None:
        self.page.click("#go")
        self.wait("#stop:not(:disabled)", "#stop:disabled")

    def drag(self, selector: str, *points: tuple[float, float], button: str = "left") -> None:
        """Press, move through points in fractions of the element's box, and release."""
        self.page.locator(selector).scroll_into_view_if_needed()
        box = self.page.locator(selector).bounding_box()
        for i, (x, y) in enumerate(points):
            self.page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], steps=1 + 7 * min(i, 1))
            if i == 0:
                self.page.mouse.down(button=button)
        self.page.mouse.up(button=button)

    def keys(self, selector: str, *keys: str) -> None:
        self.page.focus(selector)
        for key in keys:
            self.page.keyboard.press(key)

    def slow(self, pattern: str, milliseconds: int) -> None:
        """Delay the next answer whose address holds the pattern."""
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

    def saved(self, button: str) -> Any:
        with self.page.expect_download() as waiting:
            self.page.click(button)
        return waiting.value

    def fits(self) -> None:
        """Check that nothing is wider than the screen."""
        assert self.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")

    def shot(self, name: str, *, height: int | None = None) -> None:
        """Take a picture of the page; it is kept if the documentation shows it."""
        self.fits()
        folder = os.environ.get("NICEST_SCREENSHOTS")
        clip = {"clip": {"x": 0, "y": 0, "width": self.page.viewport_size["width"], "height": height}} if height else {}
        self.page.evaluate("() => scrollTo(0, 0)")
        with Image.open(io.BytesIO(self.page.screenshot(full_page=True, **clip))) as picture:
            assert len(picture.getcolors(1 << 24) or []) > 20
            if folder and name in SHOWN:
                small = picture.convert("RGB").quantize(128, dither=Image.Dither.NONE)
                small.save(Path(folder) / f"studio-{name}.png", optimize=True)

    def check(self) -> None:
        """Let axe check the view, if there is a copy of it."""
        if AXE:
            self.page.evaluate(Path(AXE).read_text())
            found = self.page.evaluate("async () => (await axe.run()).violations")
            assert [f"{each['id']}: {node['html'][:150]}" for each in found for node in each["nodes"]] == []


@pytest.fixture
def visit(chromium: Any, server: str, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """A visit during which nothing may go wrong."""
    made = Visit(chromium, server, **getattr(request, "param", {}))
    yield made
    made.end()


class TestInpainting:
    def test_filled_in_with_one_button_held_to_compare_and_saved(self, visit: Visit):
        page = visit.page
        assert (visit.hidden(), visit.method) == (32, "draws")  # the lower half
        page.fill("#steps", "60")
        visit.fill_in()
        truth, filled = visit.levels("#truth-picture"), visit.levels("#results canvas")
        assert (filled[:32] == truth[:32]).all()
        assert (filled != truth).any()
        page.locator("#results canvas").first.hover()
        for press, release in ((page.mouse.down, page.mouse.up), (None, None)):
            press() if press else (page.focus("#hold"), page.keyboard.down(" "))
            assert (visit.levels("#results canvas") == truth).all()
            release() if release else page.keyboard.up(" ")
            assert (visit.levels("#results canvas") == filled).all()
        for button, kind in (("#save-png", "PNG"), ("#save-gif", "GIF")):
            with Image.open(visit.saved(button).path()) as picture:
                assert picture.format == kind
        page.locator("#choices button").nth(5).click()  # another image begins with nothing
        assert page.locator("#save-png").is_disabled()
        assert visit.text("#progress") + visit.text("#inpaint-note") == ""
        assert page.locator("#results canvas[data-picture]").count() == 0

    def test_the_mask_by_mouse_and_by_keyboard(self, visit: Visit):
        page = visit.page
        assert page.locator("#masks button").count() == 10
        page.click("#clear")
        assert page.locator("#go").is_disabled()
        visit.drag("#mask", (0.1, 0.1), (0.9, 0.9), button="right")
        assert visit.hidden() == 0
        page.click("[data-tool=rectangle]")
        visit.drag("#mask", (0.05, 0.05), (0.45, 0.45))
        assert visit.hidden() == 16
        page.click("#invert")
        page.click("[data-tool=eraser]")
        visit.drag("#mask", (0.9, 0.05), (0.9, 0.95))
        assert visit.hidden() == 40
        page.locator("#masks button").first.click()
        assert visit.hidden() == 32
        page.click("#undo")
        assert visit.hidden() == 40
        page.keyboard.press("Control+Shift+Z")
        assert visit.hidden() == 32
        page.click("#clear")
        page.click("[data-tool=brush]")
        visit.keys("#mask", "ArrowRight", "ArrowDown", " ", "ArrowRight", "Enter", "Backspace")
        assert visit.hidden() == 1
        page.click("#clear")
        page.click("[data-tool=rectangle]")
        visit.keys("#mask", " ", "ArrowRight", "ArrowDown", "ArrowDown", " ")
        assert visit.hidden() == 6

    def test_settings_are_checked_before_they_are_sent(self, visit: Visit):
        for field, bad in (("#steps", ""), ("#steps", "10.5"), ("#noise", "-1")):
            visit.page.fill(field, bad)
            visit.page.click("#go")
            assert "expected a" in visit.text("#inpaint-note")
            assert visit.page.get_attribute(field, "aria-invalid") == "true"
            assert visit.page.locator("#stop").is_disabled()
            visit.page.fill(field, "1")

    def test_uploads_are_inverted_and_made_smaller(self, visit: Visit, tmp_path: Path):
        page = visit.page
        page.click("[data-source=upload]")
        Image.fromarray(np.full((8, 8), 255, np.uint8)).save(tmp_path / "white.png")
        page.set_input_files("#upload-file", str(tmp_path / "white.png"))
        visit.wait("#choices-note:has-text('as the model sees it')")
        assert (visit.levels("#original") == 16).all()
        page.check("#upload-invert")
        page.wait_for_function("() => atob(document.getElementById('original').dataset.picture).charCodeAt(0) === 0")
        page.uncheck("#upload-invert")
        noise = np.random.default_rng(0).integers(0, 256, (1800, 1800, 3), np.uint8)
        Image.fromarray(noise).save(tmp_path / "heavy.png", compress_level=0)
        Image.new("L", (5000, 5000), 128).save(tmp_path / "long.png")
        assert (tmp_path / "heavy.png").stat().st_size > 8 * 2**20
        for name in ("heavy.png", "long.png"):
            page.set_input_files("#upload-file", str(tmp_path / name))
            visit.wait(f"#choices-note:has-text('{name}, as the model sees it')")
            assert abs(visit.levels("#original").mean() - 8) < 1


def test_keys_stop_an_ascent_and_keep_the_focus(chromium: Any, server: str):
    visit = Visit(chromium, server)
    visit.page.fill("#steps", "5000")
    visit.page.click("#go")
    visit.wait("#results[data-frames]")
    visit.keys("#stop", "Enter")
    visit.wait("text=Stopped")
    assert visit.page.evaluate("() => document.activeElement.id") == "go"
    visit.page.keyboard.press("Enter")
    visit.wait("#stop:not(:disabled)", "#results[data-frames]")
    visit.keys("#mask", " ")
    visit.wait("#stop:disabled", timeout=3000)
    visit.page.wait_for_timeout(1000)
    assert visit.page.evaluate("async () => (await (await fetch('/api/status')).json()).ascents") == 0
    visit.end("ERR_ABORTED")


def test_bad_files_and_conditions_are_answered_in_words(chromium: Any, server: str, tmp_path: Path):
    (tmp_path / "letter.png").write_text("Dear model,")
    visit = Visit(chromium, server)
    page = visit.page
    page.click("[data-source=upload]")
    page.set_input_files("#upload-file", str(tmp_path / "letter.png"))
    visit.wait("#choices-note.bad:has-text('expected a picture')")
    visit.view("Score")
    page.set_input_files("#score-file", str(tmp_path / "letter.png"))
    visit.wait("#score-note.bad:has-text('letter.png: expected a picture')")
    page.select_option("#run", "people")
    page.wait_for_selector("#where-column option", state="attached")
    page.select_option("#where-column", "colour")
    page.fill("#where-value", "green")
    page.click("#conditions button")
    visit.wait("#where-note.bad:has-text('green')")
    assert page.locator("#where-chips li").count() == 0
    page.fill("[name=height]", "1,5x")
    page.click("#row button.main")
    visit.wait("[name=height][aria-invalid=true]")
    assert "expected a number" in visit.text("#row .wrong .hint")
    assert page.evaluate("() => document.activeElement.name") == "height"
    page.fill("[name=height]", "170")
    assert page.locator("[aria-invalid=true]").count() == 0
    visit.end("422")


def test_a_server_that_ends_and_comes_back(chromium: Any, digits: Path):
    with studio(digits) as (url, process):
        visit = Visit(chromium, url)
        visit.page.fill("#steps", "5000")
        visit.page.click("#go")
        visit.wait("#results[data-frames]")
        process.kill()
        visit.wait("#inpaint-note.bad:has-text('The server stopped')", "#banner:not([hidden])")
        visit.view("Explore", "#wall-note.bad")
        assert visit.page.locator("#keep").is_disabled()
        process.wait()
    with studio(digits, port=int(url.rstrip("/").rsplit(":", 1)[1])):
        visit.page.wait_for_selector("#banner", state="hidden", timeout=15_000)
        visit.wait("#wall canvas", "#sliders label", "#globe-note:has-text('220 codes')")
        visit.view("Inpaint")
        assert visit.page.locator(".note.bad").count() == 0
        assert "The server is back" in visit.text("#inpaint-note")
        visit.context.close()


def test_a_run_that_appears_is_replaced_damaged_or_deleted(chromium: Any, digits: Path, tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    np.save(tmp_path / "wide.npy", np.random.default_rng(0).integers(0, 17, (60, 4, 12), np.uint8))
    own = (f'data.name="{tmp_path / "wide.npy"}"', "train.epochs=1", "train.evaluate_every=1")
    train(load_recipe("digits"), tmp_path / "other", overrides=(*TINY, *own), device="cpu")
    with studio(run) as (url, _):
        page = chromium.new_page()
        page.goto(url)
        page.wait_for_selector("#state:has-text('This run has no model yet')")
        assert page.locator("nav a:visible").all_inner_texts() == ["Training", "New model"]
        shutil.copytree(digits, run, dirs_exist_ok=True)
        page.wait_for_selector("#curves-note:has-text('Training is done')")
        page.click("nav >> text=Inpaint")
        page.wait_for_selector("#choices canvas")
        shutil.rmtree(run)
        shutil.copytree(tmp_path / "other", run)
        page.click("#others")
        page.wait_for_selector("#original[width='12'][height='4']")  # never in the shape of the former model
        assert page.locator("#choices canvas:not([width='12'])").count() == 0
        (tmp_path / "wide.npy").rename(tmp_path / "gone.npy")
        with (run / "model.safetensors").open("r+b") as file:
            file.write(b"junk" * 100)
        page.click("#others")
        page.wait_for_selector("#state:has-text('damaged')")
        shutil.rmtree(run)
        page.wait_for_selector("#state:has-text('is gone')")
        shutil.copytree(tmp_path / "other", run)  # without its data there are samples
        page.wait_for_selector("nav >> text=Inpaint")
        page.click("nav >> text=Inpaint")
        page.wait_for_selector("#choices-note:has-text('the test images are missing')")
        assert page.get_attribute("[data-source=samples]", "aria-pressed") == "true"
        page.close()


class TestTheFrame:
    def test_skip_link_address_and_history(self, visit: Visit):
        page = visit.page
        page.select_option("#run", "people")
        visit.view("Training", "#curves polyline")
        assert page.locator("#spectrum-pane").is_hidden()  # a table has no latent space
        visit.keys(".skip", "Enter")
        page.wait_for_timeout(200)
        assert page.evaluate("() => document.activeElement.id") == "main"
        page.reload(wait_until="networkidle")
        visit.wait("#training:not([hidden])")
        assert page.input_value("#run") == "people"
        page.go_back()
        visit.wait("#table:not([hidden])")

    def test_a_link_holds_all_that_is_shown(self, visit: Visit, chromium: Any):
        page = visit.page
        page.locator("#choices button").nth(7).click()
        page.locator("#masks button").nth(6).click()
        page.fill("#steps", "30")
        visit.fill_in()
        page.click("#link")
        visit.wait("#link-said:not(:empty)")
        links, filled = [page.url], visit.levels("#results canvas")
        visit.view("Explore", "#plane-picture[data-picture]")
        page.locator("#wall button").nth(9).click()
        page.wait_for_timeout(800)
        page.locator("#sliders input").nth(2).fill("-3")
        page.wait_for_timeout(800)
        page.click("#link")
        links, moved = [*links, page.url], visit.levels("#moved")
        other = Visit(chromium, visit.server)
        other.page.goto("about:blank")
        other.page.goto(links[0])
        other.page.wait_for_function("() => document.getElementById('steps').value === '30'")
        other.wait("#choices canvas")
        assert (other.levels("#original") == visit.levels("#original")).all()
        other.fill_in()
        assert (other.levels("#results canvas") == filled).all()  # by the same seed
        other.page.goto(links[1])
        other.wait("#moved[data-picture]")
        other.page.wait_for_timeout(1500)
        assert (other.levels("#moved") == moved).all()
        other.page.goto(links[1][:-40])
        other.wait("#link-said:has-text('incomplete')")
        other.end()

    def test_the_api_is_described(self, visit: Visit):
        visit.page.goto(visit.server + "docs")
        visit.wait("text=POST /api/runs/{run}/inpaint")
        assert visit.page.locator("h2:empty, .scroll:not([tabindex='0'])").count() == 0
        visit.check()

    @pytest.mark.parametrize("visit", [{"forced_colors": "active"}], indirect=True)
    def test_the_active_view_is_seen_in_forced_colours(self, visit: Visit):
        links, grounds = visit.page.locator("nav a:visible"), []
        for i in range(links.count()):
            with Image.open(io.BytesIO(links.nth(i).screenshot())) as picture:
                grounds.append(picture.convert("RGB").getpixel((6, picture.height // 2)))
        active, *others = grounds
        assert len(set(others)) == 1
        assert active not in others


class TestExploring:
    def test_picks_by_mouse_and_keyboard_and_late_answers(self, visit: Visit):
        page = visit.page
        visit.view("Explore", "#sliders label", "#between canvas[data-picture]")
        assert page.locator("#wall button[tabindex='0']").count() == 1  # one tab stop
        visit.keys("#wall button", "ArrowRight", "ArrowDown", "Enter")
        assert page.get_attribute("#wall button >> nth=9", "data-mark") == "A"
        visit.slow("/move", 600)
        page.locator("#wall button").nth(5).click()
        page.locator("#wall button").nth(11).click()
        page.wait_for_timeout(1200)
        assert (visit.levels("#moved") == visit.levels("#wall canvas >> nth=11")).all()
        before = visit.levels("#moved")
        page.locator("#sliders input").first.fill("4")
        page.wait_for_timeout(500)
        assert (visit.levels("#moved") != before).any()
        page.click("#reset")
        page.wait_for_timeout(500)
        assert (visit.levels("#moved") == before).all()
        page.locator("#keep").fill("0")
        page.wait_for_timeout(500)
        assert visit.text("#moved-radius") == "0.0 sd"

    def test_the_plane_and_the_sphere(self, visit: Visit):
        page = visit.page
        visit.view("Score")
        visit.drag("#sketch", (0.5, 0.1), (0.5, 0.9))
        page.click("#score-sketch")
        visit.wait(".card")
        visit.view("Explore", "#plane-picture[data-picture]")
        page.click("[data-wall=own]")
        visit.wait("#wall [aria-label^='drawing']")
        page.click("[data-pick=c]")
        page.locator("#wall button").first.click()
        assert page.get_attribute("#wall button", "data-mark") == "C"
        drawn = visit.levels("#wall canvas")
        page.locator("#plane").scroll_into_view_if_needed()
        box = page.locator("#plane").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 6, box["y"] + box["height"] / 6)  # C, a quarter inside the edge
        visit.wait("#plane-shares:has-text('0.00, 1.00')")
        assert abs(visit.levels("#plane-picture").astype(int) - drawn).max() <= 1
        visit.keys("#plane", "ArrowRight")
        visit.wait("#plane-shares:has-text('0.05')", "#globe-note:has-text('220 codes')")
        look = "() => document.getElementById('globe').toDataURL()"
        still = page.evaluate(look)
        visit.drag("#globe", (0.4, 0.4), (0.6, 0.5))
        page.wait_for_timeout(200)
        assert page.evaluate(look) != still
        page.click("[data-pick=a]")
        visit.keys("#globe", "Enter")
        visit.wait("#globe-note:has-text('is A now')")


class TestScoring:
    def test_files_drawings_and_test_images(self, visit: Visit, tmp_path: Path):
        page = visit.page
        visit.view("Score")
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 20), np.uint8)).save(tmp_path / "noise.png")
        page.set_input_files("#score-file", str(tmp_path / "noise.png"))
        visit.wait(".card:has-text('Nearly every validation image is denser')")
        assert "lower bound" in visit.text("#caveat")
        visit.drag("#sketch", (0.5, 0.1), (0.5, 0.9))
        page.click("#score-sketch")
        visit.wait(".card >> text=a drawing")
        parts = page.locator("#reference-scores .band, #reference-scores .mark")
        order = parts.evaluate_all("all => all.map((each) => each.classList[0])")
        assert order == ["band", "line", "line"]  # both scores, in front of the histogram
        page.locator(".card button").first.click()
        visit.wait(".card .map:has-text('nats above what is expected')")
        page.click("#score-tests")
        visit.wait(".card >> nth=4")
        assert (page.locator(".card .map").count(), page.locator(".ledger").count()) == (1, 5)
        page.check("#score-invert")  # the file is read again
        page.wait_for_function("() => document.querySelector('.card h3').textContent === 'noise.png'")


class TestTables:
    def test_a_file_a_row_and_conditions(self, visit: Visit, tmp_path: Path):
        page = visit.page
        page.select_option("#run", "people")
        assert page.locator("nav a:visible").all_inner_texts() == ["Table", "Training", "Compare", "New model"]
        visit.wait("#sample-rows td", "#histograms svg >> nth=2")
        (tmp_path / "rows.csv").write_text(ROWS)
        page.set_input_files("#table-file", str(tmp_path / "rows.csv"))
        visit.wait("#table-scores td.very >> text=90")
        assert "italics" in visit.text("#table-note")
        assert page.locator("#table-scores td.filled").count() == 1
        page.click("#table-scores th button >> nth=1")  # by density, from the lowest
        assert page.get_attribute("#table-scores th >> nth=1", "aria-sort") == "ascending"
        assert visit.text("#table-scores tbody td >> nth=0") == "2"
        page.select_option("#predict", "height")
        visit.wait("th:has-text('predicted height')")
        saved = Path(visit.saved("#save-scores").path()).read_text().splitlines()
        assert (len(saved), saved[0].split(",")[-6:]) == (4, ["predicted height", "from", "to", *ROWS[:20].split(",")])
        page.click("[aria-label='What is expected of the cells of row 2?']")
        visit.wait("#row .wrong:has-text('surprising; expected: 90 % between')", "#row svg >> nth=2")
        page.click("#row [type=reset]")
        page.fill("[name=height]", "185")
        page.click("#row button.main")
        visit.wait("#row .found >> nth=1")
        page.fill("[name=weight]", "60")
        assert page.locator("#row .found").count() == 1  # an edited cell is known
        page.select_option("#where-column", "height")
        page.select_option("#where-sign", ">")
        page.fill("#where-value", "175")
        page.click("#conditions button")
        visit.wait("#where-note:has-text('% of the model')")
        assert min(float(each) for each in page.locator("#sample-rows td:first-child").all_inner_texts()) > 175
        page.click("#where-chips button")
        visit.wait("#where-note:empty")
        visit.check()

    def test_a_model_is_trained_from_the_page(self, chromium: Any, digits: Path, table: Path, tmp_path: Path):
        """Images are looked at; a table is trained on, watched after the server came back, stopped and downloaded."""
        own, pictures = tmp_path / "own", tmp_path / "faces"
        with studio(digits, folder=own) as (url, _):
            visit = Visit(chromium, url)
            page = visit.page
            visit.view("New model")
            pictures.mkdir()
            for i in range(60):
                Image.new("RGB", (40, 30), (i, 255 - i, 0)).save(pictures / f"{i}.png")
            page.set_input_files("#train-folder", str(pictures))
            visit.wait("#found:has-text('60 colour images of 28 by 28')")
            page.select_option("#train-size", "8")
            visit.wait("#found:has-text('60 colour images of 8 by 8')", "#found canvas")
            assert page.input_value("#train-name") == "faces"
            page.set_input_files("#train-file", str(table.parent / "people.csv"))
            visit.wait("#found:has-text('1000 rows of 3 columns')")
            lines = page.locator("#found tbody >> nth=0").inner_text().split("\n")
            assert lines[2].split("\t") == ["colour", "category", "blue, red"]
            page.fill("#train-name", "crowd")
            page.evaluate(  # many epochs, so that there is something to stop
                """() => {
                    const plain = window.fetch;
                    const longer = (body) => JSON.stringify({ ...JSON.parse(body), epochs: 20000 });
                    window.fetch = (path, given) =>
                        plain(path, path === "/api/train" ? { ...given, body: longer(given.body) } : given);
                }"""
            )
            page.click("#begin")
            visit.wait("#training:not([hidden])", "#curves-note:has-text('started')")
            assert page.input_value("#run") == "crowd"
            visit.end()
        with studio(digits, folder=own) as (url, _):  # the server ended, and the training did not
            page = chromium.new_page()
            page.goto(f"{url}#training/crowd")
            page.wait_for_selector("#curves polyline", timeout=90_000)
            page.wait_for_selector("#growing td", timeout=30_000)
            page.click("#halt")
            page.wait_for_selector("#curves-note:has-text('stopped')", timeout=30_000)
            with page.expect_download() as waiting:
                page.click("#fetch")
            assert waiting.value.suggested_filename == "crowd.zip"
            page.close()


class TestTraining:
    def test_curves_and_their_values(self, visit: Visit):
        page = visit.page
        visit.view("Training", "#curves polyline", "#spectrum polyline")
        page.hover("#spectrum")
        assert "component" in visit.text("#spectrum .tip")
        visit.keys("#curves", "Home")
        first = visit.text("#curves .tip")
        page.keyboard.press("ArrowRight")
        assert visit.text("#curves .tip") != first
        found = page.evaluate(
            """async () => {
                const { ticks } = await import("/page/draw.js");
                return [[-26000, -14000, 5], [0, 1, 4], [-3, 5e6, 3]].map((each) => ticks(...each));
            }"""
        )
        assert all(len(each) == len({name for _, name in each}) >= 2 for each in found)
        assert [[name for _, name in each] for each in found[:2]] == [["−25k", "−20k", "−15k"], ["0", "0.5", "1.0"]]

    def test_two_runs_side_by_side(self, chromium: Any, digits: Path, table: Path, tmp_path: Path):
        worse = (*TINY, "train.epochs=2", "train.evaluate_every=1")
        train(load_recipe("digits"), tmp_path / "worse", overrides=worse, device="cpu")
        with studio(digits, tmp_path / "worse", table) as (url, _):
            visit = Visit(chromium, url)
            page = visit.page
            page.locator("#masks button").nth(4).click()
            visit.view("Compare", "#same td", "#same-note:has-text('digits gives them')")
            assert page.input_value("#other-run") == "worse"  # of the same form
            lines = [line.split("\t") for line in visit.text("#same tbody").split("\n")]
            assert float(lines[0][1].replace("−", "-")) > float(lines[1][1].replace("−", "-")) + 10
            page.click("#fill-both")
            visit.wait("#both-note:has-text('gives the original')")
            original = visit.levels("#both-original").reshape(8, 8)
            for side in ("first", "second"):
                filled = visit.levels(f"#{side}-filled canvas").reshape(8, 8)
                assert (filled[:, 4:] == original[:, 4:]).all()  # the mask of Inpaint: the left half
                assert (filled[:, :4] != original[:, :4]).any()
            page.select_option("#other-run", "people")
            visit.wait("#second-samples td", "#compare-note:has-text('different data')")
            visit.end()


class TestLooks:
    """Light, dark and on a phone: nothing is wider than the screen; the pictures are for the documentation."""

    @pytest.mark.parametrize(
        ("visit", "name"),
        [({}, "light"), ({"color_scheme": "dark"}, "dark"), (PHONE, "phone")],
        indirect=["visit"],
        ids=["light", "dark", "phone"],
    )
    def test_every_view(self, visit: Visit, name: str, tmp_path: Path):
        page, phone = visit.page, name == "phone"
        page.locator("#choices button").nth(3).click()
        page.locator("#masks button").nth(6).click()
        page.click("[data-method=draws]")
        visit.fill_in()
        visit.wait("#spread:not([hidden])")
        visit.check()
        visit.shot(f"inpaint-{name}", height=2300 if phone else None)
        visit.view("Explore", "#globe-note:has-text('220 codes')", "#between canvas[data-picture]")
        page.click("[aria-label='label 3']")
        page.get_by_label("From all labels toward label 3").fill("1")
        page.wait_for_timeout(600)
        visit.check()
        visit.shot(f"explore-{name}", height=2700 if phone else None)
        visit.view("Score")
        page.click("#score-tests")
        visit.wait(".card >> nth=2")
        page.locator(".card button").first.click()
        visit.wait(".map:has-text('nats')")
        visit.check()
        visit.shot(f"score-{name}")
        visit.view("Training", "#spectrum polyline", "#growing canvas")
        visit.check()
        visit.shot(f"training-{name}")
        for view, ready in (("Compare", "#second-samples td"), ("New model", "#found")):
            visit.view(view, ready)
            visit.check()
            visit.fits()
        page.select_option("#run", "people")
        visit.view("Table")
        (tmp_path / "rows.csv").write_text(ROWS)
        page.set_input_files("#table-file", str(tmp_path / "rows.csv"))
        visit.wait("#table-scores td.odd", "#histograms svg")
        page.click("[aria-label='What is expected of the cells of row 2?']")
        visit.wait("#row svg >> nth=2")
        visit.shot(f"table-{name}")

    @pytest.mark.parametrize("visit", [PHONE | {"viewport": {"width": 320, "height": 640}}], indirect=True)
    def test_the_narrowest_screen(self, visit: Visit):
        visit.page.select_option("#chains", "8")
        visit.page.fill("#steps", "30")
        visit.fill_in()
        visit.keys("#climb", "End")
        for parts, whole in (("#climb .tip", "#climb"), ("#tools button", "#tools"), ("nav a:not([hidden])", "nav")):
            assert self.inside(visit, parts, whole)
        visit.view("Explore", "#sliders label")
        assert self.inside(visit, ".facts dd", ".pane:has(.facts)")
        visit.fits()

    def test_large_letters_and_long_names_stay_inside(self, visit: Visit):
        page = visit.page
        page.evaluate("() => { document.documentElement.style.fontSize = '200%'; }")
        for view in ("Inpaint", "Explore", "Score", "Training"):
            visit.view(view)
            page.wait_for_timeout(300)
            cut = page.locator("main *:visible").evaluate_all(
                """all => all.filter((each) => getComputedStyle(each).overflow === "hidden" && !each.closest("svg")
                    && each.scrollWidth > each.clientWidth + 1).map((each) => each.id || each.className)"""
            )
            assert cut == []
            visit.fits()
        column = {"name": "a_long_name_" * 10, "kind": "real", "low": 0, "high": 1, "values": []}
        page.route("**/columns", lambda route: route.fulfill(json={"columns": [column]}))
        page.select_option("#run", "people")
        visit.view("Table", "#row label")
        assert page.title() == "Table · people · nicest studio"
        assert self.inside(visit, "#row label", "#row")
        visit.fits()

    def inside(self, visit: Visit, parts: str, whole: str) -> bool:
        return visit.page.evaluate(
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
