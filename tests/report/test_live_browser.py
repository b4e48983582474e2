# SPDX-License-Identifier: Apache-2.0
"""The live page in a real browser: it follows a run that is being written, resumed and started again, and is in shape,
quiet and on its own at every width and in both colour schemes."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from growing import Writer

from trimtab.report.live import Live

pytestmark = pytest.mark.browser
EVIL = "</script><img src=x onerror=alert(1)>"
PERSISTENT = ({"kind": "persistent", "unit": "u", "message": f"{EVIL} triggered again"},)


class Watched:
    """A run that is written, its server, and a browser that looks at it."""

    def __init__(self, browser: Any, *folders: Path) -> None:
        self.browser, self.live = browser, Live(folders, 0)
        self.thread = threading.Thread(target=self.live.serve)
        self.thread.start()

    def open(self, width: int = 1400, scheme: str = "light") -> None:
        self.browser.get("about:blank")
        self.browser.get_log("browser")
        self.browser.get_log("performance")
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.browser.get(self.live.url)
        self.wait(lambda: self.ask("document.documentElement.dataset.ready") == "1")

    def ask(self, script: str, *args: Any) -> Any:
        return self.browser.execute_script(f"return {script}", *args)

    def text(self, selector: str) -> str:
        return self.ask("document.querySelector(arguments[0]).textContent", selector)

    def colours(self, selector: str) -> int:
        """How many different colours a canvas shows."""
        return self.ask(
            "(c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size)"
            "(document.querySelector(arguments[0]))",
            selector,
        )

    def requests(self) -> set[str]:
        entries = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        sent = [e["params"]["request"]["url"] for e in entries if e["method"] == "Network.requestWillBeSent"]
        return {url.split("?")[0] for url in sent if not url.startswith("data:")}

    def wait(self, holds: Callable[[], bool]) -> None:
        ui = pytest.importorskip("selenium.webdriver.support.ui")
        ui.WebDriverWait(None, 20, poll_frequency=0.1).until(lambda _: holds())

    def close(self) -> None:
        self.browser.get("about:blank")
        self.live.stop()
        self.thread.join(10)
        self.live.close()


@pytest.fixture(name="watch")
def _watch(browser: Any) -> Iterator[Callable[..., Watched]]:
    opened: list[Watched] = []

    def watch(*folders: Path) -> Watched:
        opened.append(Watched(browser, *folders))
        return opened[-1]

    yield watch
    for one in opened:
        one.close()


@pytest.fixture(name="writer")
def _writer(tmp_path: Path) -> Writer:
    names = [EVIL, *(f"model.layers.{i}.mlp.{'long_' * 30}down_proj" for i in range(20))]
    writer = Writer(tmp_path / "first", names)
    writer.write(30)
    writer.write(10, spikes={3: 5.0, 7: float("nan")}, high=(3,), events=PERSISTENT)
    return writer


def test_drawn_quiet_on_its_own_and_in_shape(watch: Callable[..., Watched], writer: Writer) -> None:
    page = watch(writer.folder)
    for width in (390, 1400):
        for scheme in ("light", "dark"):
            page.open(width, scheme)
            assert page.ask("document.documentElement.scrollWidth") == width
            for name in ("h2", ".figures", "canvas.loss", "canvas.heat", ".now table", ".told ol"):
                box = page.ask("document.querySelector(arguments[0]).getBoundingClientRect()", name)
                assert box["width"] > 200, name
                assert box["height"] > 15, name
                assert box["left"] >= 0, name
                assert box["right"] <= width, name
            beside = "document.querySelector('.side').getBoundingClientRect().left"
            assert (page.ask(beside) > 700) == (width == 1400)  # who is high: beside the figures, or below them
            assert page.colours("canvas.loss") > 3
            assert page.colours("canvas.heat") > 20
            shade = page.ask("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
            assert (sum(shade) > 600) == (scheme == "light")
            assert page.browser.get_log("browser") == []
            own = {page.live.url + path for path in ("", "live.js", "data")}
            assert page.requests() == own


def test_names_of_a_run_stay_text(watch: Callable[..., Watched], writer: Writer) -> None:
    page = watch(writer.folder)
    page.open()
    assert page.ask("document.querySelectorAll('img').length") == 0
    assert f"{EVIL} triggered again" in page.text(".told")
    assert page.ask("document.querySelectorAll('li.notable.persistent').length") == 1
    row = page.ask("document.querySelector('tr.high td').title")
    assert row == writer.units[3]
    heat = page.browser.find_element("css selector", "canvas.heat")
    chains = pytest.importorskip("selenium.webdriver").ActionChains
    page.browser.execute_script("document.querySelector('canvas.heat').scrollIntoView({block: 'center'})")
    left, row_height = page.ask("[runs[0].heatBox.x, runs[0].heatBox.row]")
    size = heat.size
    x, y = left + 5 - size["width"] / 2, 6 + row_height / 2 - size["height"] / 2
    chains(page.browser).move_to_element_with_offset(heat, round(x), round(y)).perform()
    page.wait(lambda: page.text(".say").startswith(f"{EVIL}, step 1: ratio 1"))


def test_the_page_follows_a_run_that_is_written_resumed_and_started_again(
    watch: Callable[..., Watched], writer: Writer
) -> None:
    page = watch(writer.folder)
    page.open()
    assert "step 40 of 1,000" in page.text(".where")
    assert page.text(".how") == "running"
    assert page.ask("runs[0].units.length") == 21
    offsets = writer.recorder.offsets()
    writer.write(7, high=(5,), events=({"kind": "high", "unit": "u", "message": "five goes high"},))
    page.wait(lambda: "step 47" in page.text(".where"))
    told = page.ask("[...document.querySelectorAll('.told li')].map(line => line.textContent)")
    assert [line.split()[0] for line in told] == [f"40{EVIL.split()[0]}", "47five"]  # what needs an eye stays on top
    assert page.ask("document.querySelector('tr.high td').title") == writer.units[5]
    assert page.ask("[runs[0].ratio.length, runs[0].high.length, runs[0].curves.loss.mean.length]") == [47, 47, 47]
    writer.resume(offsets, 40)
    writer.write(2)
    page.wait(lambda: "step 42" in page.text(".where"))
    assert "five goes high" not in page.text(".told")
    assert page.ask("[runs[0].ratio.length, runs[0].high.length, runs[0].curves.loss.mean.length]") == [42, 42, 42]
    writer.recorder.close()
    Writer(writer.folder, ["alpha", "beta"], total=5, force=True).write(5)
    page.wait(lambda: "step 5 of 5" in page.text(".where"))
    assert page.text(".how") == "finished"
    assert page.ask("runs[0].units") == ["alpha", "beta"]
    assert page.browser.get_log("browser") == []


def test_several_runs_stand_side_by_side_on_one_scale(
    watch: Callable[..., Watched], writer: Writer, tmp_path: Path
) -> None:
    other = Writer(tmp_path / "second", seed=1)
    other.write(5)
    page = watch(writer.folder, other.folder)
    page.open(1400)
    assert page.ask("[...document.querySelectorAll('h2')].map(h => h.textContent)") == ["first", "second"]
    boxes = page.ask("[...document.querySelectorAll('.run')].map(r => r.getBoundingClientRect())")
    assert boxes[0]["top"] == boxes[1]["top"]
    assert boxes[0]["right"] < boxes[1]["left"]
    lines = [line for one in (writer, other) for line in (one.folder / "metrics.jsonl").read_text().splitlines()]
    losses = [json.loads(line)["loss"] for line in lines]
    assert page.ask("lossRange()") == pytest.approx([min(losses), max(losses)], rel=1e-5)
    page.open(390)
    boxes = page.ask("[...document.querySelectorAll('.run')].map(r => r.getBoundingClientRect())")
    assert boxes[0]["bottom"] < boxes[1]["top"]
    assert page.ask("document.documentElement.scrollWidth") == 390


def test_a_page_whose_server_is_gone_says_so(watch: Callable[..., Watched], writer: Writer) -> None:
    page = watch(writer.folder)
    page.open()
    page.live.stop()
    page.live.close()
    page.wait(lambda: "no answer" in page.text("#link"))
    assert "step 40" in page.text(".where")  # what it knows stays
