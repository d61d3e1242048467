"""The report in a real browser: it asks the network for nothing, works by hand and keyboard, fits a phone."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_engines.report.write import write_report
from engines.test_report_data import hostile_report, refused_report, sample_report, without_int8

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PHONE, DESKTOP = 320, 1280
ANSWER_S = 60
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe")  # fmt: skip


class Browser:
    """A headless Chromium with one page, spoken to in its DevTools protocol over a pair of pipes."""

    def __init__(self, folder: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self._number = 0
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        wired = 'exec "$@" 3<&"$EDGE_IN" 4>&"$EDGE_OUT"'  # the protocol's fixed descriptors
        with (folder / "browser.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", wired, "browser", browser_path(), *FLAGS, f"--user-data-dir={folder / 'profile'}"],
                pass_fds=(to_browser, from_browser),
                env=os.environ | {"EDGE_IN": str(to_browser), "EDGE_OUT": str(from_browser), "HOME": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(to_browser)
        os.close(from_browser)
        self._left = b""
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, page: Path, *, width: int = DESKTOP, dark: bool = False) -> None:
        """Show a page and wait until it has loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()
        self.run("new Promise(requestAnimationFrame)")  # a frame is drawn, so styles and sizes are final

    def run(self, script: str) -> Any:
        """Return the value of a script that runs in the page."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Press and release a key where the focus is."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come meanwhile are kept in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def close(self) -> None:
        self.call("Browser.close")
        self._process.wait(ANSWER_S)
        os.close(self._in)
        os.close(self._out)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            assert select.select([self._in], [], [], ANSWER_S)[0], f"the browser says nothing for {ANSWER_S} s"
            block = os.read(self._in, 1 << 20)
            assert block, "the browser ended; its folder holds browser.log"
            self._left += block
        raw, _, self._left = self._left.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        if "method" in message:
            self.events.append(message)
        return message


def browser_path() -> str:
    """Find a Chromium."""
    found = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if found is None:
        raise AssertionError("chromium is missing, and these tests need a real browser: apt-get install chromium")
    return found


PAGES = {
    "whole": sample_report,
    "refused": refused_report,
    "fp32": without_int8,
    "hostile": hostile_report,
}
VISIBLE_PANELS = (
    "[...document.querySelectorAll('svg.panel')].filter((e) => e.checkVisibility()).map((e) => e.ariaLabel)"
)
LAYOUT = (
    "['says', 'stage', 'legend', 'scroller'].map((name) => "
    "document.querySelector('.' + name).getBoundingClientRect().top + scrollY)"
)
UNITS_IN_ORDER = "[...document.querySelectorAll('#unit-table tbody tr')].map((row) => row.cells[0].textContent)"
KL_IN_ORDER = "[...document.querySelectorAll('#unit-table tbody tr')].map((row) => Number(row.cells[8].dataset.v))"
SHOWN = "[...document.querySelectorAll('#unit-table tbody tr')].filter((row) => row.checkVisibility()).length"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    try:
        yield browser
    finally:
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pages")
    return {name: write_report(root / name, make()) for name, make in PAGES.items()}


@pytest.fixture
def shown(browser: Browser, pages: dict[str, Path]) -> Browser:
    """The whole report on a desktop."""
    browser.open(pages["whole"])
    return browser


@pytest.mark.parametrize("name", PAGES)
def test_page_has_no_script_errors_and_asks_the_network_for_nothing(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    browser.open(pages[name])
    browser.run("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    wrong = [e for e in browser.events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
    asked = {e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"}
    assert not wrong
    assert asked == {pages[name].as_uri()}


def test_a_smuggled_request_would_be_seen_and_refused(browser: Browser, pages: dict[str, Path]) -> None:
    """The check above can fail: an image that a script adds is noticed, and the page's policy stops it."""
    browser.open(pages["whole"])
    browser.run(
        "new Promise((done) => { const e = new Image(); e.onerror = done; e.src = 'https://192.0.2.1/x.png'; })"
    )
    logged = [e["params"]["entry"]["text"] for e in browser.events if e["method"] == "Log.entryAdded"]
    assert any("192.0.2.1" in text for text in logged)


def test_hostile_names_stay_text(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["hostile"])
    assert browser.run("document.title").startswith("<script>document.title=")
    assert browser.run("document.images.length + document.scripts.length") == 1  # our script


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_page_never_scrolls_sideways(browser: Browser, pages: dict[str, Path], name: str, width: int) -> None:
    browser.open(pages[name], width=width)
    assert browser.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_measure_switch_shows_one_panel_and_moves_nothing(browser: Browser, pages: dict[str, Path], width: int) -> None:
    browser.open(pages["whole"], width=width)
    before, seen = browser.run(LAYOUT), []
    for measure in ("score", "pooled", "token", "worst", "kl"):
        browser.run(f"document.querySelector('label[for=m-{measure}]').click()")
        (panel,) = browser.run(VISIBLE_PANELS)
        seen.append(panel.partition(" of ")[0])
        assert browser.run(LAYOUT) == before
    assert len(set(seen)) == 5


def test_measure_switch_works_from_the_keyboard(shown: Browser) -> None:
    shown.run("document.querySelector('#m-score').focus()")
    shown.press("ArrowRight", 39)
    (panel,) = shown.run(VISIBLE_PANELS)
    assert panel.startswith("pooled of")


def test_slider_names_the_unit_and_marks_its_row(shown: Browser) -> None:
    assert shown.run("document.querySelector('#readout a').textContent") == "layers.11.down"  # the largest error
    shown.run("document.querySelector('#scrub').focus()")
    shown.press("ArrowRight", 39)
    assert shown.run("document.querySelector('#readout a').textContent") == "layers.12.qkv"
    assert shown.run("document.querySelector('tr.is-picked').cells[0].textContent") == "layers.12.qkv"
    assert shown.run("document.querySelector('#scrub').ariaValueText") == "layers.12.qkv, INT8"


def test_pointing_at_a_bar_names_its_unit(shown: Browser) -> None:
    box = shown.run("document.querySelector('#overlay').getBoundingClientRect().toJSON()")
    shown.call("Input.dispatchMouseEvent", type="mouseMoved", x=box["right"] - 2, y=box["top"] + 50)
    assert shown.run("document.querySelector('#readout a').textContent") == "head"


def test_table_sorts_largest_first_then_back(shown: Browser) -> None:
    in_graph_order = shown.run(UNITS_IN_ORDER)
    button = "document.querySelectorAll('#unit-table thead button')"
    shown.run(f"{button}[8].click()")
    effects = shown.run(KL_IN_ORDER)
    assert effects == sorted(effects, reverse=True)
    assert shown.run("document.querySelectorAll('#unit-table th')[8].ariaSort") == "descending"
    shown.run(f"{button}[8].click()")
    assert shown.run(KL_IN_ORDER) == effects[::-1]
    shown.run(f"{button}[0].click()")
    assert shown.run(UNITS_IN_ORDER) == in_graph_order


def test_table_filters_by_text_kind_and_precision(shown: Browser) -> None:
    type_in = (
        "(() => {{ const e = document.querySelector('#{}'); e.value = '{}'; e.dispatchEvent(new Event('input')); }})()"
    )
    shown.run(type_in.format("kind", "down"))
    assert shown.run(SHOWN) == 30
    shown.run(type_in.format("precision", "fp16"))
    shown.run(type_in.format("find", "hard rule"))
    assert shown.run(SHOWN) == 4
    assert shown.run("document.querySelector('#shown').textContent") == "4 of 122 units"
    shown.run(type_in.format("find", "no such unit"))
    assert shown.run("document.querySelector('#nothing').checkVisibility()")


def test_plan_is_copied_as_it_is(shown: Browser) -> None:
    shown.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    shown.run("document.querySelector('#copy').click()")
    shown.run(
        "new Promise((done) => { const look = () => document.querySelector('#copied').textContent ? done() : "
        "requestAnimationFrame(look); look(); })"
    )
    assert shown.run("document.querySelector('#copied').textContent") == "Copied."
    assert shown.run("navigator.clipboard.readText()") == sample_report().plan


def test_dark_mode_has_its_own_colours(browser: Browser, pages: dict[str, Path]) -> None:
    colours = []
    for dark in (False, True):
        browser.open(pages["whole"], dark=dark)
        colours.append(
            browser.run("[document.body, document.querySelector('.k-down')].flatMap((e) => "
                        "[getComputedStyle(e).color, getComputedStyle(e).backgroundColor, getComputedStyle(e).fill])")
        )  # fmt: skip
    light, dark_ones = colours
    assert light[0] != dark_ones[0]
    assert light[1] != dark_ones[1]
    assert light[5] != dark_ones[5]


def test_print_shows_the_whole_table_and_no_controls(shown: Browser) -> None:
    shown.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert (
            shown.run(
                "(() => { const e = document.querySelector('.scroller'); return e.scrollHeight - e.clientHeight; })()"
            )
            <= 1
        )
        assert shown.run("document.documentElement.scrollWidth") <= DESKTOP
        assert not shown.run("document.querySelector('#filters').checkVisibility()")
    finally:
        shown.call("Emulation.setEmulatedMedia", media="")
