# SPDX-License-Identifier: Apache-2.0
"""The bench's page: one file, offline, safe with any name, and no gap shown where there is none."""

import copy
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from trimtab.report.bench import plain_table, render_bench, says, show, table, write_bench_page
from trimtab.report.museum import HEADS, cases, entries, to_json, write_museum_page

plotly = pytest.importorskip("plotly.offline")
EVIL = "</script><img src=x onerror=alert(1)>{{verdict}}"
METRICS = {
    "eval_high": {"title": "held-out", "kind": "loss", "means": "held-out loss"},
    "eval_low": {"title": "on low", "kind": "loss", "means": "on the low path"},
    "gap": {"title": "gap closed", "kind": "share", "means": "the gap"},
    "promotion_ratio": {"title": "promoted", "kind": "share", "means": "unit-steps high"},
    "delay": {"title": "delay", "kind": "number", "means": "steps"},
    "extra_bytes_peak": {"title": "extra peak", "kind": "bytes", "means": "bytes"},
}


def arm(loss: float, versus: float | None = None, *, died: tuple[int, ...] = ()) -> dict[str, Any]:
    stats = {name: {"mean": None, "half": None, "n": 0} for name in METRICS}
    stats["eval_high"] = {"mean": loss, "half": 0.25, "n": 3}
    stats["gap"] = {"mean": 0.5, "half": 0.1, "n": 3}
    stats["promotion_ratio"] = {"mean": 0.042, "half": 0.001, "n": 3}
    stats["extra_bytes_peak"] = {"mean": 1_500_000.0, "half": 0.0, "n": 3}
    difference = None if versus is None else {"mean": versus, "half": 0.01, "n": 3}
    runs = {str(seed): {} for seed in range(3)}
    return {"runs": runs, "died": list(died), "stats": stats, "vs_low": difference, "vs_random": difference}


def bench(*, clear: bool = True, name: str = "gnmr", top: str = "high") -> dict[str, Any]:
    arms = {top: arm(1.0, -1.0), "low": arm(2.0), name: arm(1.5, -0.5, died=(2,)), "random": arm(2.1, 0.1)}
    points = {"x": [1.0, 2.0], "y": [5.0, None], "low": [4.0, None], "high": [6.0, None]}
    cell = {
        "name": "one",
        "top": top,
        "settings": {"lr": 0.1},
        "windows": [[3, 5]],
        "axis": ["lr", 0.1],
        "group": "g",
        "damage": {"mean": 1.0, "half": 0.1 if clear else 2.0, "n": 3, "clear": clear},
        "arms": arms,
        "curves": dict.fromkeys(arms, points),
    }
    sweep = {"group": "g", "axis": "lr", "x": [0.1], "eval_high": [1.0], "eval_high_half": [None], "gap": [None]}
    sweep |= {"gap_half": [None], "died": [0], "largest_stable": 0.1, "sensitivity": 0.25}
    facts = {"finished": "2026", "versions": {"torch": "2"}, "platform": "p", "cpu_count": 2, "git": None}
    return facts | {
        "suite": "smoke",
        "what": "What it asks.",
        "command": ["trimtab", "bench"],
        "given": {},
        "seeds": [0, 1, 2],
        "hardware": {},
        "corpus": {},
        "metrics": METRICS,
        "arms": {key: f"what {key} is" for key in arms},
        "cells": [cell],
        "sweeps": [{**sweep, "arm": key} for key in arms],
    }


class Parsed(HTMLParser):
    """Tags and text of a page, plotly's own source left out."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.data = ""
        self._inside: list[str | None] = []
        self.feed(text.replace(plotly.get_plotlyjs(), ""))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = [tag, dict(attrs).get("id")]

    def handle_endtag(self, tag: str) -> None:
        self._inside = []

    def handle_data(self, data: str) -> None:
        if self._inside == ["script", "data"]:
            self.data = data
        elif "script" not in self._inside and "style" not in self._inside:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_the_page_is_one_file_that_needs_no_network(tmp_path: Path) -> None:
    path = write_bench_page(bench(), tmp_path / "deep" / "report.html")
    page = path.read_text(encoding="utf-8")
    assert plotly.get_plotlyjs() in page
    parsed = Parsed(page)
    for tag, attrs in parsed.tags:
        assert tag not in ("iframe", "object", "img")
        assert not attrs.get("src")
        assert attrs.get("href", "data:,") == "data:,"
    assert "connect-src" not in page.split("<title>")[0]
    assert "default-src 'none'" in page
    own = page.replace(plotly.get_plotlyjs(), "")
    assert not re.findall(r"https?://", own)
    assert "@import" not in own


def test_the_page_holds_every_arm_cell_and_number() -> None:
    parsed = Parsed(render_bench(bench()))
    for name in ("high", "low", "gnmr", "random", "one", "what gnmr is", "What it asks."):
        assert name in parsed.text
    assert "1.5000 \u00b1 0.2500" in parsed.text
    assert "50 % \u00b1 10 %" in parsed.text
    assert "1.5 MB" in parsed.text
    assert "1 of 3" in parsed.text
    assert "largest stable rate" in parsed.text
    ids = {attrs.get("id") for _, attrs in parsed.tags}
    assert ids >= {"pick", "plot-curves", "plot-versus", "plot-gap", "plot-sweep", "data"}
    data = json.loads(parsed.data)
    assert list(data["cells"][0]["curves"]) == data["arms"] == ["high", "low", "gnmr", "random"]


def test_names_are_escaped_wherever_they_stand() -> None:
    page = render_bench(bench(name=EVIL))
    parsed = Parsed(page)
    assert "img" not in {tag for tag, _ in parsed.tags}
    assert page.count("<img src=x") == 0
    assert EVIL in parsed.text  # as text, its braces not filled in
    assert EVIL in json.loads(parsed.data)["arms"]
    result = bench()
    result["cells"][0]["name"] = EVIL
    assert "<img src=x" not in render_bench(result)


def test_a_share_of_no_gap_is_not_shown() -> None:
    result = bench(clear=False)
    heads, rows = table(result["cells"][0], METRICS)
    assert {row[heads.index("gap closed")] for row in rows} == {"no gap"}
    data = json.loads(Parsed(render_bench(result)).data)
    assert {one["gap"] for one in data["cells"][0]["arms"].values()} == {None}


@pytest.mark.parametrize(("top", "other"), [("high", "clean"), ("clean", "high")])
def test_the_page_says_between_which_arms_the_gap_lies(top: str, other: str) -> None:
    result = bench(top=top)
    shown = Parsed(render_bench(result)).text
    assert f"low minus {top}: 1.0000 \u00b1 0.1000" in shown
    assert f"low minus {other}" not in shown
    assert "of the gap closed by gnmr" in shown  # an end of the gap is not what the page is about
    assert not any(line.startswith((f"{top}:", "low:")) for line in says(result))
    assert any(line.startswith("gnmr:") for line in says(result))


def test_the_table_has_a_row_per_arm_and_no_empty_column() -> None:
    heads, rows = table(bench()["cells"][0], METRICS)
    assert heads == ["arm", "held-out", "vs low", "vs random", "gap closed", "promoted", "died"]
    assert rows[2] == [
        "gnmr",
        "1.5000 +- 0.2500",
        "-0.5000 +- 0.0100",
        "-0.5000 +- 0.0100",
        "50 % +- 10 %",
        "4.2 %",
        "1 of 3",
    ]
    assert rows[3][2] == "+0.1000 +- 0.0100"
    assert rows[1][2] == "-"
    whole, _ = table(bench()["cells"][0], METRICS, brief=False)
    assert "extra peak" in whole
    lines = plain_table(heads, rows).splitlines()
    assert len(lines) == 5
    assert lines[3].split()[:4] == ["gnmr", "1.5000", "+-", "0.2500"]


def test_only_intervals_that_exclude_zero_are_called_better_or_worse() -> None:
    result = bench()
    vague = copy.deepcopy(result["cells"][0])
    for one in vague["arms"].values():
        for key in ("vs_low", "vs_random"):
            one[key] = one[key] and {**one[key], "half": 9.0}
    result["cells"].append(vague)
    told = "\n".join(says(result))
    assert "gnmr: better than low in 1 of 2 cells, worse in 0" in told
    assert "random: better than low in 0 of 2 cells, worse in 1" in told
    assert "high:" not in told


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        ("loss", 1.23456, "1.2346"),
        ("share", 0.5, "50 %"),
        ("share", 0.00123, "0.123 %"),
        ("share", -0.07, "-7 %"),
        ("bytes", 999.0, "999 B"),
        ("bytes", 12_345.0, "12.3 kB"),
        ("ms", 0.8412, "0.841"),
        ("number", 12_345.0, "12,345"),
    ],
)
def test_values_are_shown_by_their_kind(kind: str, value: float, shown: str) -> None:
    assert show(kind, value) == shown


def museum_row(name: str, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"case": "stale", "thread": "some/thread#1", "what": "Scales are stale.", "arm": name}
    row |= {"seeds": 3, "died": 0, "survived": 60.0, "loss": 2.5, "lost": 0.5, "interval": 0.1, "saved": True}
    row |= {"blamed": "blocks.0", "delay": 1.0, "skipped": 0.0, "promotion": 0.05, "ms": 40.0, "note": ""}
    return row | changes


def test_the_museum_says_who_died_and_who_saved(tmp_path: Path) -> None:
    nan = float("nan")
    low = museum_row("low", died=3, loss=nan, lost=nan, interval=nan, saved=False, blamed=None, delay=None)
    rows = [low, museum_row("control", note=EVIL), museum_row("random", case="other", saved=False)]
    assert list(cases(rows)) == ["stale", "other"]
    assert entries(low)[:7] == ["low", "3 of 3", "60", "-", "-", "", "-"]
    assert entries(rows[1])[4:6] == ["0.5000 +- 0.1000", "yes"]
    assert len(entries(low)) == len(HEADS)
    assert json.loads(to_json(rows, ["x"]))["rows"][0]["loss"] is None
    page = write_museum_page(rows, tmp_path / "report.html", command=["trimtab", "bench", "museum"])
    parsed = Parsed(page.read_text(encoding="utf-8"))
    assert EVIL in parsed.text
    assert "img" not in {tag for tag, _ in parsed.tags}
    assert "some/thread#1" in parsed.text


@pytest.mark.browser
@pytest.mark.skipif(not (shutil.which("chromium") and shutil.which("chromedriver")), reason="no browser: make browser")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_every_figure_without_complaint(tmp_path: Path, scheme: str) -> None:
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    result = bench()
    result["cells"].append({**bench(clear=False)["cells"][0], "name": "two", "axis": None})
    path = write_bench_page(result, tmp_path / "report.html")
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    browser = webdriver.Chrome(options=options, service=service)
    try:
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.get(path.as_uri())
        names = "['curves', 'versus', 'gap', 'sweep']"
        count = f"return {names}.map(n => (document.getElementById('plot-' + n).data || []).length)"
        assert browser.execute_script("return document.documentElement.dataset.ready") == "1"
        assert browser.execute_script(count) == [4, 3, 4, 4]
        hidden = "return ['gap', 'sweep'].map(n => document.getElementById('plot-' + n).hidden)"
        assert browser.execute_script(hidden) == [False, False]
        browser.execute_script(
            "const p = document.getElementById('pick'); p.value = '1'; p.dispatchEvent(new Event('change'))"
        )
        assert browser.execute_script(hidden) == [True, True]
        assert "no gap" in browser.execute_script("return document.getElementById('say-gap').textContent")
        assert [entry["message"] for entry in browser.get_log("browser")] == []
    finally:
        browser.quit()
