# SPDX-License-Identifier: Apache-2.0
"""The page's claims: one file, offline, bounded, safe with any name, meaningful for any run."""

import base64
import json
import re
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab.control.policy import Policy
from trimtab.control.record import Recorder
from trimtab.control.replay import replay
from trimtab.report import page
from trimtab.report.page import render, write_page
from trimtab.report.read import read_run

plotly = pytest.importorskip("plotly.offline")
Make = Callable[..., np.ndarray]
EVIL = "</script><img src=x onerror=alert(1)>{{verdict}}"


class Parsed(HTMLParser):
    """Tags, attributes and text of a page, with plotly's own source left out."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text.replace(plotly.get_plotlyjs(), ""))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside != "style":
            (self.scripts if self._inside == "script" else self.words).append(data)

    @property
    def ids(self) -> set[str | None]:
        return {attrs.get("id") for _, attrs in self.tags}

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(next(script for script in self.scripts if script.startswith('{"')))


@pytest.fixture(name="faulty")
def _faulty(tmp_path: Path, make_run: Make) -> Path:
    """A run with a lasting fault, a NaN, and the fault's window in its config."""
    faults = [{"unit": "blocks.0.v", "kind": "scale x8", "start": 100, "width": 40}]
    make_run(tmp_path / "faulty", faults=((2, 100, 40, 8.0), (7, 300, 1, np.nan)), config={"faults": faults})
    return tmp_path / "faulty"


def test_the_page_has_every_part_and_its_figures_match_the_run(faulty: Path) -> None:
    path = write_page(faulty)
    assert path == faulty / "report.html"
    parsed = Parsed(path.read_text(encoding="utf-8"))
    assert parsed.ids >= {"verdict", "figures", "offenders", "keep-list", "copy", "numbers", "facts", "limits"}
    assert parsed.ids >= {"plot-loss", "plot-heat", "plot-timeline", "plot-budget"}
    assert "first at step 300 in blocks.1.k" in parsed.text
    assert "norms only" in parsed.text
    assert "open-loop" in parsed.text
    data, trace = parsed.data, read_run(faulty).trace
    assert trace is not None
    assert data["faults"] == [[100, 140]]
    assert data["high"] == trace.high.sum(axis=1).tolist()
    assert data["units"] == list(trace.units)
    assert [e["name"] for e in data["loss"]["evals"]] == ["eval_loss_high", "eval_loss_low"]
    assert len(data["loss"]["train"]["x"]) == 400


def test_the_heat_map_holds_the_replayed_ratios(faulty: Path) -> None:
    data = Parsed(render(read_run(faulty))).data
    trace = read_run(faulty).trace
    assert trace is not None
    ratio = replay(trace.norms, Policy.from_dict(trace.policy)).ratio
    codes = np.frombuffer(base64.b64decode(data["heat"]["data"]), np.uint8).astype(float).reshape(12, 400).T
    assert (codes[299, 7], np.count_nonzero(codes > 250)) == (254, 1)
    fine = codes <= 250
    assert np.allclose(2 ** (codes[fine] * 6 / 250 - 3.0), np.clip(ratio[fine], 1 / 8, 8), rtol=0.009)


def test_given_decisions_and_streamed_ones_give_the_same_page(faulty: Path) -> None:
    run = read_run(faulty)
    assert run.trace is not None
    decisions = replay(run.trace.norms, Policy.from_dict(run.trace.policy))
    streamed = render(read_run(faulty, with_trace=False))
    assert render(run, decisions) == streamed
    assert render(run) == streamed
    assert render(read_run(faulty, with_trace=False), decisions) == streamed


def test_nothing_of_a_run_becomes_markup(tmp_path: Path, make_run: Make) -> None:
    config = {EVIL: EVIL, "name": EVIL, "faults": [{"unit": EVIL, "kind": EVIL, "start": 3, "width": 2}]}
    make_run(tmp_path / "r", steps=60, units=[EVIL, "a&b\"'", "b"], faults=((0, 30, 1, np.nan), (1, 40, 3, 9.0)),
             config=config)  # fmt: skip
    with (tmp_path / "r" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 61, "eval_loss" + EVIL: 1.0}) + "\n")
    text = render(read_run(tmp_path / "r"))
    clean = Parsed(text)
    make_run(tmp_path / "tame", steps=60, units=["x", "y", "z"], faults=((0, 30, 1, np.nan), (1, 40, 3, 9.0)))
    assert {tag for tag, _ in clean.tags} == {tag for tag, _ in Parsed(render(read_run(tmp_path / "tame"))).tags}
    assert not any(key.startswith("on") for _, attrs in clean.tags for key in attrs)
    assert len(re.findall("</script>", text)) == len(re.findall("<script", text)) == 3
    assert clean.data["units"] == [EVIL, "a&b\"'", "b"]
    assert clean.text.count(EVIL) >= 4  # heading, config, offenders and keep-high list, whole and as text


def test_the_page_asks_for_nothing_from_outside(faulty: Path) -> None:
    text = render(read_run(faulty))
    rest = text.replace(plotly.get_plotlyjs(), "")
    assert len(text) - len(rest) > 1e6  # plotly is in, once
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"^\s*//.*$", "", rest, flags=re.M))
    parsed = Parsed(text)
    assert [attrs[key] for _, attrs in parsed.tags for key in ("src", "href") if key in attrs] == ["data:,"]
    policy = next(attrs["content"] for tag, attrs in parsed.tags if tag == "meta" and "http-equiv" in attrs)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "connect-src" not in policy


@pytest.mark.parametrize(("num_units", "steps"), [(500, 3000), (4000, 60)])
def test_the_page_stays_small_for_many_units_steps_and_long_names(tmp_path: Path, num_units: int, steps: int) -> None:
    rng = np.random.default_rng(0)
    units = ["m" * 190 + f".{i}" for i in range(num_units)]
    seen, config = (
        np.ones(num_units, bool),
        {f"key{i}": "x" * 3000 for i in range(40)} | {"many": dict.fromkeys("abc", 1)},
    )
    with Recorder(tmp_path / "r", run=config) as recorder:
        policy = Policy(max_high=num_units, alpha=1.1, beta=None, alpha_warmup=None)
        recorder.open_trace(units, seen, policy.to_dict(), num_units, 0, None)
        for step in range(1, steps + 1):
            norms, high = rng.lognormal(0, 0.5, num_units).astype(np.float32), rng.random(num_units) < 0.3
            recorder.observe(step, norms, seen, high, 1.0)
            recorder.log(step, loss=rng.random(), eval_loss_high=rng.random(), eval_loss_low=rng.random())
    path = write_page(tmp_path / "r", tmp_path / "out" / "page.html")
    assert path == tmp_path / "out" / "page.html"
    size = path.stat().st_size
    assert size < 6_000_000
    assert size - len(plotly.get_plotlyjs().encode()) < 1_150_000
    data = Parsed(path.read_text(encoding="utf-8")).data
    shown = [data["units"][i] for i in data["heat"]["units"]]
    assert len(shown) == min(num_units, 512)
    assert [data["units"][i] for i in data["time"]["units"]] == sorted(
        (data["units"][i] for i in data["time"]["units"]), key=units.index
    )


def nothing(folder: Path) -> None:
    Recorder(folder, run={"lr": 1}).close()


def zero_steps(folder: Path, make_run: Make) -> None:
    make_run(folder, steps=0)


def torn_header(folder: Path, make_run: Make) -> None:
    make_run(folder, steps=5)
    path = folder / "trace.arrow"
    path.write_bytes(path.read_bytes()[:50])


def only_metrics(folder: Path) -> None:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n{"step": 3, "lo')


def nan_losses(folder: Path) -> None:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n{"step": 2, "loss": null}\n')


EDGES: dict[str, tuple[Callable[..., Any], set[str], str]] = {
    "nothing": (lambda f, m: nothing(f), set(), "There is nothing to draw yet."),
    "zero steps": (zero_steps, set(), "Nothing has been recorded yet."),
    "one step": (lambda f, m: m(f, steps=1), {"loss", "heat", "budget"}, "no risk passed 1 in 1 step."),
    "no loss": (lambda f, m: m(f, loss=False, evals=False), {"heat", "budget"}, "no loss was logged"),
    "metrics alone": (lambda f, m: only_metrics(f), {"loss"}, "The last 15 bytes of the record were torn"),
    "nan losses": (lambda f, m: nan_losses(f), {"loss"}, "2 losses, none finite"),
    "torn header": (torn_header, {"loss"}, "The last 50 bytes of the record were torn"),
    "observed": (
        lambda f, m: m(f, act=False, faults=((1, 50, 4, 9.0),)), {"loss", "heat", "timeline", "budget"},
        "would have acted 1 time",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
def test_every_kind_of_run_gives_a_meaningful_page(tmp_path: Path, make_run: Make, name: str) -> None:
    make, panels, words = EDGES[name]
    make(tmp_path / "r", make_run)
    parsed = Parsed(write_page(tmp_path / "r").read_text(encoding="utf-8"))
    assert {i.removeprefix("plot-") for i in parsed.ids if i and i.startswith("plot-")} == panels
    assert words in parsed.text.replace("\xa0", " ")
    assert not re.search(r"\b(nan|inf)\b", parsed.text.lower())


def test_a_loss_that_was_not_finite_breaks_the_line(tmp_path: Path) -> None:
    losses = [5, None, None, 4, 3, None, 2]
    lines = [json.dumps({"step": i + 1, "loss": loss}) + "\n" for i, loss in enumerate(losses)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    loss = Parsed(render(read_run(tmp_path))).data["loss"]
    assert loss["train"] == {"x": [1, 1, 4, 5, 5, 7], "y": [5, None, 4, 3, None, 2]}
    assert loss["nonfinite"] == [2, 3, 6]


def test_refusals_are_on_the_page(tmp_path: Path, make_run: Make) -> None:
    faults = tuple((unit, 100, 2, 8.0) for unit in range(6))
    make_run(tmp_path / "r", faults=faults)
    parsed = Parsed(render(read_run(tmp_path / "r")))
    denied = [interval for interval in parsed.data["time"]["intervals"] if interval[3] == 0]
    assert sorted(interval[:3] for interval in denied) == [[3, 101, 1], [4, 101, 1], [5, 101, 1]]
    assert parsed.data["asked"][100] == 6
    assert parsed.data["high"][100] == 3
    assert "refused, budget full" in parsed.text


def test_a_page_needs_plotly_and_says_so(faulty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    with pytest.raises(ImportError, match=r"pip install 'trimtab\[report\]'"):
        render(read_run(faulty))


def test_the_wheel_carries_the_pages_assets() -> None:
    root = Path(page.__file__).parents[2]
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["trimtab"]
    for name in ("report/template.html", "report/page.js"):
        assert any(fnmatch(name, pattern.replace("**/", "*/")) for pattern in patterns), f"{name} is not in the wheel"
