# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser: drawn, quiet, offline, and in shape at every width and in both colour schemes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab.control.policy import Policy
from trimtab.report.compare import compare, write_comparison
from trimtab.report.imports import read_log
from trimtab.report.page import write_page
from trimtab.report.whatif import grid_of, whatif, write_sweep_page

pytestmark = pytest.mark.browser
EVIL = "</script><img src=x onerror=alert(1)>"


class Shown:
    """A page opened in a browser of a given width and colour scheme."""

    def __init__(self, browser: Any, path: Path, width: int, scheme: str) -> None:
        self.browser = browser
        browser.get("about:blank")
        browser.get_log("browser")
        browser.get_log("performance")
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(path.as_uri())

    def ask(self, script: str, *args: Any) -> Any:
        return self.browser.execute_script(f"return {script}", *args)

    def requests(self) -> list[str]:
        entries = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        sent = [e["params"]["request"]["url"] for e in entries if e["method"] == "Network.requestWillBeSent"]
        return [url.split(":")[0] for url in sent if not url.startswith(("data:", "blob:"))]

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser")]

    def ranges(self) -> list[list[float]]:
        script = (
            "['loss', 'heat', 'timeline', 'budget'].map(n => document.getElementById('plot-' + n).layout.xaxis.range)"
        )
        return [[round(x, 3) for x in pair] for pair in self.ask(script)]


@pytest.fixture(name="page", scope="module")
def _page(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Any]) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "browser"
    units = [EVIL, *(f"model.layers.{i}.mlp.{'long_' * 35}down_proj" for i in range(28)), "vec<b>x</b>"]
    faults = [{"unit": units[3], "kind": "scale", "start": 100, "width": 30}]
    make_run(
        folder, steps=300, units=units, config={"faults": faults, "note": "x" * 300, EVIL: EVIL},
        policy=Policy(max_high=2, alpha=1.5, beta=2.0, warmup_steps=10),
        faults=((3, 100, 30, 8.0), (0, 200, 1, np.nan), *((u, 250, 1, 9.0) for u in range(5, 10))),
    )  # fmt: skip
    return write_page(folder)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_drawn_quiet_offline_and_in_shape(browser: Any, page: Path, width: int, scheme: str) -> None:
    shown = Shown(browser, page, width, scheme)
    assert shown.ask("document.documentElement.dataset.ready") == "1"
    sections = (
        "verdict",
        "figures",
        "loss",
        "heat",
        "timeline",
        "budget",
        "offenders",
        "keep",
        "numbers",
        "facts",
        "limits",
    )
    for name in sections:
        box = shown.ask("document.getElementById(arguments[0]).getBoundingClientRect()", name)
        assert box["width"] > 200, name
        assert box["height"] > 10, name
        assert box["right"] <= width, name
    for name in ("loss", "heat", "timeline", "budget"):
        box = shown.ask(f"document.querySelector('#plot-{name} svg.main-svg').getBoundingClientRect()")
        assert box["width"] > 300, name
        assert box["height"] > 60, name
    assert shown.ask("document.querySelectorAll('#plot-heat image').length") == 1
    assert shown.ask("document.querySelectorAll('#plot-timeline .point').length") >= 5
    assert shown.ask("document.querySelectorAll('#plot-loss .scatterlayer .trace').length") == 3
    assert shown.ask("document.documentElement.scrollWidth") == width
    shade = shown.ask("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(shade) > 600) == (scheme == "light")
    assert shown.complaints() == []
    assert shown.requests() == ["file"]  # the page itself


def test_names_of_a_run_stay_text(browser: Any, page: Path) -> None:
    shown = Shown(browser, page, 1400, "light")
    assert shown.ask("document.querySelectorAll('img').length") == 0
    assert EVIL in shown.ask("document.getElementById('offenders').textContent")
    labels = shown.ask("[...document.querySelectorAll('#plot-heat .ytick text')].map(t => t.textContent)")
    assert "vec<b>x</b>" in labels  # plotly would have made it bold
    assert all(len(label) <= 28 for label in labels)
    room = shown.ask(
        "[...document.querySelectorAll('#plot-heat .ytick text')].every(t => t.getBoundingClientRect().left >= "
        "document.getElementById('plot-heat').getBoundingClientRect().left)"
    )
    assert room  # no label is cut at the margin


def test_zooming_one_figure_zooms_all_and_a_double_click_goes_back(browser: Any, page: Path) -> None:
    shown = Shown(browser, page, 1400, "light")
    whole = shown.ranges()
    assert whole == [[0.5, 300.5]] * 4
    chains = pytest.importorskip("selenium.webdriver").ActionChains
    area = browser.find_element("css selector", "#plot-loss .nsewdrag")
    browser.execute_script("document.getElementById('plot-loss').scrollIntoView({block: 'center'})")
    chains(browser).move_to_element_with_offset(area, -200, 0).click_and_hold().move_by_offset(
        300, 0
    ).release().perform()
    wait(lambda: shown.ranges()[0] != [0.5, 300.5] and len(set(map(tuple, shown.ranges()))) == 1)
    low, high = shown.ranges()[3]
    assert 0.5 < low < high < 300.5
    chains(browser).double_click(area).perform()
    wait(lambda: shown.ranges() == whole)
    assert shown.complaints() == []


def test_pointing_at_a_cell_names_unit_step_and_ratio(browser: Any, page: Path) -> None:
    shown = Shown(browser, page, 1400, "light")
    chains = pytest.importorskip("selenium.webdriver").ActionChains
    browser.execute_script("document.getElementById('plot-heat').scrollIntoView({block: 'center'})")
    area = browser.find_element("css selector", "#plot-heat .nsewdrag")
    chains(browser).move_to_element_with_offset(area, 40, 10).perform()
    wait(lambda: "ratio" in shown.ask("document.getElementById('say-heat').textContent"))
    said = shown.ask("document.getElementById('say-heat').textContent")
    assert said.startswith("model.layers.")
    assert "down_proj, step " in said
    assert shown.ask("getComputedStyle(document.querySelector('#plot-loss'), '::after').display") == "block"


def test_copy_gives_the_keep_high_list(browser: Any, page: Path) -> None:
    shown = Shown(browser, page, 1400, "light")
    names = json.loads(shown.ask("document.getElementById('keep-list').textContent"))
    assert names[0].startswith("model.layers.2.")
    button = browser.find_element("id", "copy")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    wait(lambda: button.text in ("Copied", "Selected"))


def test_the_colour_scheme_may_change_while_the_page_is_open(browser: Any, page: Path) -> None:
    shown = Shown(browser, page, 1400, "light")
    colour = "document.querySelector('#plot-loss .ytick text').style.fill"
    light = shown.ask(colour)
    media = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    wait(lambda: shown.ask(colour) != light)


@pytest.fixture(name="others", scope="module")
def _others(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Any]) -> dict[str, Path]:
    """The page that compares three runs, and that of a sweep; names as bad as they come."""
    folder = tmp_path_factory.mktemp("several")
    units = [EVIL, *(f"blocks.{i}" for i in range(7))]
    names = [EVIL, "b%{x}<b>" + "long_" * 40, "c"]
    for seed, name in enumerate(names):
        faults = ((2, 100, 10, 9.0), (3, 150, 1, np.nan))
        policy = Policy(max_high=2, alpha=1.5, beta=2.0, warmup_steps=10)
        make_run(
            folder / str(seed), steps=200, units=units, faults=faults, policy=policy, seed=seed, config={"name": name}
        )
    metrics = folder / "0" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows[99] |= {"loss": 30.0, "events": [{"kind": "high"}, {"kind": EVIL}]}
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = whatif(read_log(folder / "0"), grid_of(Policy(max_high=2)))
    compared = compare([folder / str(seed) for seed in range(3)])
    return {"compare": write_comparison(compared), "sweep": write_sweep_page(found, folder / "sweep.html")}


FIGURES = {"compare": ["losses", "promotion", "events"], "sweep": ["policies-plot", "fires"]}
SECTIONS = {"compare": ["table", "settings"], "sweep": ["policies", "facts"]}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("kind", ["compare", "sweep"])
def test_pages_of_several_are_in_shape_too(
    browser: Any, others: dict[str, Path], kind: str, width: int, scheme: str
) -> None:
    shown = Shown(browser, others[kind], width, scheme)
    assert shown.ask("document.documentElement.dataset.ready") == "1"
    for name in ("verdict", "figures", "limits", *FIGURES[kind], *SECTIONS[kind]):
        box = shown.ask("document.getElementById(arguments[0]).getBoundingClientRect()", name)
        assert box["width"] > 200, name
        assert box["height"] > 10, name
        assert box["right"] <= width, name
    for name in FIGURES[kind]:
        box = shown.ask(f"document.querySelector('#plot-{name} svg.main-svg').getBoundingClientRect()")
        assert box["width"] > 300, name
        assert box["height"] > 200, name
    assert shown.ask("document.documentElement.scrollWidth") == width
    shade = shown.ask("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(shade) > 600) == (scheme == "light")
    assert shown.ask("document.querySelectorAll('img').length") == 0
    assert shown.complaints() == []
    assert shown.requests() == ["file"]


def test_runs_keep_their_colours_and_names_in_every_figure(browser: Any, others: dict[str, Path]) -> None:
    shown = Shown(browser, others["compare"], 1400, "light")
    legend = "[...document.querySelectorAll('#plot-{} .legendtext')].map(t => t.textContent)"
    names = shown.ask(legend.format("losses"))
    assert names == shown.ask(legend.format("promotion"))
    assert (names[0], names[2]) == (EVIL, "c")
    line = "[...document.querySelectorAll('#plot-{} .scatterlayer .js-line')].map(t => t.style.stroke)"
    colours = shown.ask(line.format("losses"))
    assert len(set(colours)) == 3
    assert colours == shown.ask(line.format("promotion"))
    light = shown.ask("document.querySelector('#plot-losses .ytick text').style.fill")
    media = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    wait(lambda: shown.ask("document.querySelector('#plot-losses .ytick text').style.fill") != light)


def wait(holds: Callable[[], bool]) -> None:
    ui = pytest.importorskip("selenium.webdriver.support.ui")
    ui.WebDriverWait(None, 10, poll_frequency=0.1).until(lambda _: holds())
