# SPDX-License-Identifier: Apache-2.0
"""The page of a diagnosis: complete, small, offline, safe with any name, and it says what its dict says."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from trimtab.report.diagnosis import MAX_ROWS, render_diagnosis, verdict, write_diagnosis

EVIL = "</script><img src=x onerror=alert(1)>{{verdict}}"
Value = dict[str, Any]


def value(mean: float | None, half: float | None = 0.01) -> Value:
    return {"mean": mean, "half": half, "n": 4}


def measures(relative: float | None, loss: float | None = 0.002) -> dict[str, Value]:
    error = None if relative is None else relative**2
    found = {"error": value(error), "relative": value(relative), "cosine": value(0.98765), "own": value(0.064)}
    return {**found, "loss_change": value(loss)}


def unit(name: str, gap: Value, share: float | None) -> dict[str, Any]:
    roles = {"output": measures(0.0123), "grad_input": measures(0.0456), "grad_weight": measures(0.0078)}
    sides = {"only_low": measures(0.31), "only_high": measures(0.42, -0.0017), "roles": roles}
    return {"unit": name, "pattern": name, "gap": gap, "share": share, **sides, "worst_role": "grad_input"}


def diagnosis(units: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    names = [one["unit"] for one in units[:2]]
    keep = {"units": names, "patterns": names, "gap": value(0.3), "share": 0.61, "sum_of_gaps": value(0.4)}
    keep |= measures(0.2)
    reference = {"loss": value(2.345), "grad_norm": value(1.25)}
    found = {"recipe": "fp8", "batches": 4, "passes": 123, "reference": reference, "all_low": measures(0.55, 0.031)}
    return {**found, "units": units, "keep_high": keep, **more}


@pytest.fixture(name="found")
def _found() -> dict[str, Any]:
    first, second = unit("blocks.1.down", value(0.25, 0.05), 0.5), unit("blocks.0.q", value(-0.05, 0.02), -0.1)
    return diagnosis([first, second], model="run", step=600, data="words.txt", seconds=12.3)


class Parsed(HTMLParser):
    """Tags and attributes, and the words outside styles and scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words, self._inside = "", ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        self.words += f" {data}" if self._inside not in ("style", "script") else ""


def test_the_page_has_every_part_and_its_figures(found: dict[str, Any], tmp_path: Path) -> None:
    path = write_diagnosis(found, tmp_path / "deep" / "page.html")
    page = path.read_text(encoding="utf-8")
    parsed = Parsed(page)
    ids = {attributes.get("id") for _, attributes in parsed.tags}
    assert ids >= {"verdict", "figures", "gaps", "sides", "keep", "keep-list", "copy", "numbers", "limits"}
    assert "{{" not in page
    words = " ".join(parsed.words.replace("\xa0", " ").split())
    for said in ("step 600", "4 batches", "words.txt", "123 passes", "12 s", "Nothing was trained", "2.345", "1.25"):
        assert said in words
    assert "0.25 +- 0.05 50 %" in words
    assert "-0.05 +- 0.02 -10 %" in words
    assert "6.4 % 31 % 0.98765 +0.0020 42 % -0.0017 1.2 % 4.6 % 0.78 %" in words
    assert "0.75 times the sum of their gaps" in words
    listed = re.search(r'<pre id="keep-list">(.*?)</pre>', page, re.DOTALL)
    assert listed is not None
    assert json.loads(listed.group(1).replace("&quot;", '"')) == ["blocks.1.down", "blocks.0.q"]
    worst = re.findall(r'<td class="n worst">(.*?)</td>', page)
    assert worst == ["4.6 %", "4.6 %"]


def test_bars_start_at_zero_and_end_at_the_gap(found: dict[str, Any]) -> None:
    page = render_diagnosis(found)
    least, most = -0.07, 0.30  # the ends of the two intervals
    bars = re.findall(r'<i(?: class="top")? style="--a: ([\d.]+)%; --w: ([\d.]+)%">', page)
    expected = [(0.0 - least, 0.25), (-0.05 - least, 0.05)]
    for (left, width), (a, w) in zip(bars, expected, strict=True):
        assert float(left) == pytest.approx(100 * a / (most - least), abs=0.01)
        assert float(width) == pytest.approx(100 * w / (most - least), abs=0.01)


def test_it_opens_offline_and_needs_no_library(found: dict[str, Any]) -> None:
    page = render_diagnosis(found)
    assert len(page) < 60_000
    assert "default-src 'none'" in page
    links = [a for _, a in Parsed(page).tags if "src" in a or (a.get("href") or "data:,") != "data:,"]
    assert links == []


def test_names_cannot_write_into_the_page() -> None:
    page = render_diagnosis(diagnosis([unit(EVIL, value(0.2), 0.4)], model=EVIL, data=EVIL))
    assert "<img" not in page
    assert page.count("</script>") == 1
    assert "&lt;/script&gt;" in page
    assert "{{verdict}}" in page  # as text, not filled in


def test_the_verdict_says_what_stands_out(found: dict[str, Any]) -> None:
    said = verdict(found)
    assert said.startswith("Of 2 units blocks.1.down is the one most worth running high: it takes away 50 %")
    assert said.endswith("The 2 units of the keep-high list take away 61 % together.")
    unclear = diagnosis([unit("a", value(0.1, 0.2), 0.1)])
    assert "not clear of zero" in verdict(unclear)
    assert "most worth running high" in verdict(diagnosis([unit("a", value(0.1, None), 0.1)]))  # one batch, no interval
    broken = diagnosis([unit("a", value(None, None), None)])
    assert verdict(broken).startswith("a makes the gradient infinite or not a number")
    render_diagnosis(broken)
    nothing = diagnosis([unit("a", value(-0.1), -0.1)])
    nothing["keep_high"] |= {"units": [], "patterns": []}
    assert verdict(nothing) == "No unit is worth recovering alone: none of 1 gaps is above zero under fp8."
    assert 'id="keep"' not in render_diagnosis(nothing)


def test_many_units_are_cut_and_said_so() -> None:
    page = render_diagnosis(diagnosis([unit(f"u{i}", value(1.0 - i / 1000), 0.001) for i in range(MAX_ROWS + 5)]))
    assert page.count('<div class="gap">') == MAX_ROWS
    assert f"The {MAX_ROWS} largest of {MAX_ROWS + 5} units." in page
