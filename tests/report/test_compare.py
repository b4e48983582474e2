# SPDX-License-Identifier: Apache-2.0
"""Several runs on one page: every run, every number of its own summary, what differs, and names that stay names."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from trimtab import TrimtabError
from trimtab.control.policy import Policy
from trimtab.report.compare import (
    compare,
    differences,
    render_comparison,
    rows_of,
    verdict,
    write_comparison,
    write_comparison_markdown,
)
from trimtab.report.summary import summarize

pytest.importorskip("plotly.offline")
Make = Callable[..., np.ndarray]
EVIL = "</script><img src=x onerror=alert(1)>{{verdict}}\x1b[2J"


@pytest.fixture(scope="module", name="folders")
def _folders(tmp_path_factory: pytest.TempPathFactory, make_run: Make) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "calm", seed=1)
    make_run(folder / "faulty", seed=2, faults=((3, 100, 20, 8.0),), config={"lr": 2e-3, "deep": {"er": 1}})
    make_run(folder / "watching", seed=3, act=False, steps=200, policy=Policy(max_high=1, alpha=0.5, warmup_steps=5))
    metrics = folder / "faulty" / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    row = json.loads(lines[100])
    row["events"] = [{"kind": "high", "unit": "a"}, {"kind": "denied"}, {"kind": "<i>odd</i>"}, "broken"]
    lines[100] = json.dumps(row)
    metrics.write_text("\n".join(lines) + "\n")
    return [folder / name for name in ("calm", "faulty", "watching")]


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found.group(1))


def test_every_number_is_that_of_the_runs_own_summary(folders: list[Path]) -> None:
    runs = compare(folders)
    rows = {name: values for name, values, _ in rows_of(runs)}
    for place, folder in enumerate(folders):
        summary = summarize(folder)
        assert runs[place].summary.metrics == summary.metrics
        assert rows["denied"][place] == f"{int(summary.metrics['denied']):,}"
        assert rows["units"][place] == str(summary.num_recoverable)
        losses = runs[place].run.column("loss")[1]
        assert runs[place].end == pytest.approx(np.median(losses[-max(5, len(losses) // 20) :]))
    assert rows["steps"] == ["400", "400", "200"]
    assert rows["events: high"] == ["0", "1", "0"]
    assert rows["events: <i>odd</i>"] == ["0", "1", "0"]


def test_the_verdict_names_the_ends_and_claims_no_more(folders: list[Path]) -> None:
    runs = compare(folders)
    ends = sorted(runs, key=lambda one: one.end or 0)
    told = verdict(runs)
    assert told.startswith(f"{ends[0].name} ends lowest, at {ends[0].end:.4g}; {ends[-1].name} highest")
    assert "no proof" in told
    assert "not of equal length: 200 to 400 steps" in told


def test_settings_that_differ_are_listed_and_no_others(folders: list[Path]) -> None:
    found = dict(differences(compare(folders)))
    assert found["lr"] == ["0.001", "0.002", "0.001"]
    assert found["deep.er"] == ["-", "1", "-"]
    assert found["policy.alpha"] == ["1.5", "1.5", "0.5"]
    assert "policy.beta" in found
    assert "policy.window" not in found


def test_the_page_draws_every_run_in_every_figure(folders: list[Path]) -> None:
    page = render_comparison(compare(folders))
    data = data_of(page)
    figures = {figure["id"]: figure for figure in data["figures"]}
    assert list(figures) == ["losses", "promotion", "events"]
    for name in ("losses", "promotion"):
        assert [t["name"] for t in figures[name]["traces"]] == ["calm", "faulty", "watching"]
    loss = figures["losses"]["traces"][0]
    assert (len(loss["x"]), loss["x"][0], loss["x"][-1]) == (400, 1, 400)
    assert max(figures["promotion"]["traces"][2]["y"]) == pytest.approx(1 / 12, abs=1e-4)
    assert [t["y"] for t in figures["events"]["traces"]] == [[0, 1, 0]] * 3
    assert re.findall(r'id="(plot-\w+)"', page) == ["plot-losses", "plot-promotion", "plot-events"]
    assert "http" not in re.sub(r"<script>.*?</script>", "", page, flags=re.S).replace("http-equiv", "")


def test_it_lies_beside_the_first_run_unless_told_otherwise(folders: list[Path], tmp_path: Path) -> None:
    runs = compare(folders[:2])
    assert write_comparison(runs) == folders[0].parent / "comparison.html"
    assert write_comparison(runs, tmp_path / "new" / "page.html").is_file()
    path = write_comparison_markdown(runs, tmp_path / "table.md")
    lines = path.read_text().splitlines()
    assert "| | `calm` | `faulty` |".replace("| |", "|  |") in lines
    assert any(line.startswith("| promotion\\_ratio |") for line in lines)
    svg = ElementTree.fromstring((tmp_path / "table.svg").read_text())
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}polyline"))) == 2


def test_runs_of_the_same_name_are_told_apart(make_run: Make, tmp_path: Path) -> None:
    for place in ("a", "b"):
        make_run(tmp_path / place / "run", steps=30)
    names = [one.name for one in compare([tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "a" / "run"])]
    assert len(set(names)) == 3
    assert names[0] == f"run ({tmp_path / 'a' / 'run'})"


def test_runs_without_losses_traces_or_events_are_compared_too(make_run: Make, tmp_path: Path) -> None:
    make_run(tmp_path / "a", steps=30, loss=False, evals=False)
    make_run(tmp_path / "b", steps=30)
    (tmp_path / "b" / "trace.arrow").unlink()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n')
    runs = compare([tmp_path / name for name in "abc"])
    assert "cannot be compared" in verdict(runs)
    page = render_comparison(runs)
    assert [f["id"] for f in data_of(page)["figures"]] == ["losses", "promotion"]
    assert "nan" not in re.sub(r"<script>.*?</script>", "", page, flags=re.S)


@pytest.mark.parametrize("count", [0, 1, 41])
def test_too_few_and_too_many_are_refused(count: int, tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="2 to 40 runs"):
        compare([tmp_path] * count)


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(re.sub(r"<script>.*?</script>\n", "", page, flags=re.S))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)


def test_evil_names_stay_text(make_run: Make, tmp_path: Path) -> None:
    make_run(tmp_path / "a", steps=30, units=[EVIL, "b"], config={"name": EVIL, EVIL: EVIL})
    make_run(tmp_path / "b", steps=30, config={"name": "\ud800|`x`"})
    runs = compare([tmp_path / "a", tmp_path / "b"])
    page = render_comparison(runs)
    assert "img" not in Tags(page).tags
    assert "\x1b" not in page
    page.encode("utf-8")
    text = write_comparison_markdown(runs, tmp_path / "table.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {4}
    assert "\x1b" not in text + verdict(runs)
    ElementTree.fromstring((tmp_path / "table.svg").read_text())
