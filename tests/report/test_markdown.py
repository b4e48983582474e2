# SPDX-License-Identifier: Apache-2.0
"""The short summary: twenty lines, a picture that is valid XML, and names in which nothing is markup."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from trimtab.control.policy import Policy
from trimtab.control.record import Recorder
from trimtab.report.markdown import code, escaped, write_markdown
from trimtab.report.summary import summarize

Make = Callable[..., np.ndarray]
EVIL = [
    "</svg><script>alert(1)</script>",
    "a|b`c``d",
    "@all #12 [x](y) ![z](w)",
    "\x1b[31mred\x00\n# head",
    "\ud800half",
]


def test_a_run_is_twenty_lines_and_a_picture(make_run: Make, tmp_path: Path) -> None:
    make_run(tmp_path / "run", units=30, faults=((3, 100, 20, 8.0), (5, 300, 1, np.nan)))
    path = write_markdown(tmp_path / "run")
    lines = path.read_text().splitlines()
    assert path == tmp_path / "run" / "report.md"
    assert len(lines) <= 20
    assert lines[0] == "### `run`"
    assert escaped(summarize(tmp_path / "run").verdict) in lines
    assert "![loss and ratios](report.svg)" in lines
    assert any(line.startswith("| offenders | `blocks.0.o`") for line in lines)
    svg = ElementTree.fromstring((tmp_path / "run" / "report.svg").read_text())
    names = [e.text for e in svg.iter("{http://www.w3.org/2000/svg}text") if e.get("class") == "name"]
    assert "blocks.0.o" in names
    assert len(names) == 20  # of 30
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}polyline"))) == 1
    assert list(svg.iter("{http://www.w3.org/2000/svg}script")) == []


def test_where_it_goes_can_be_chosen(make_run: Make, tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=30)
    path = write_markdown(tmp_path / "run", tmp_path / "new" / "my report.md")
    assert "![loss and ratios](my%20report.svg)" in path.read_text()
    assert (tmp_path / "new" / "my report.svg").is_file()
    assert not (tmp_path / "run" / "report.md").exists()


@pytest.mark.parametrize("kind", ["no loss", "no trace", "empty", "nothing finite", "one step"])
def test_any_run_has_a_summary(make_run: Make, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run"
    if kind == "one step":
        make_run(folder, steps=1)
    else:
        make_run(folder, steps=40, loss=kind != "no loss", evals=False)
    if kind in ("no trace", "empty", "nothing finite"):
        (folder / "trace.arrow").unlink()
    if kind == "empty":
        (folder / "metrics.jsonl").write_text("")
    if kind == "nothing finite":
        (folder / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n')
    text = write_markdown(folder).read_text()
    assert 3 < len(text.splitlines()) <= 20
    assert "nan" not in text
    assert "None" not in text
    ElementTree.fromstring((folder / "report.svg").read_text())


def test_evil_names_stay_names(tmp_path: Path) -> None:
    units = [*EVIL, "fine"]
    norms = np.ones((80, len(units)), np.float32)
    norms[50:, :5] = 9
    policy = Policy(max_high=5, alpha_warmup=None)
    with Recorder(tmp_path / "run", run={"name": EVIL[0] + EVIL[1], "note": EVIL}) as recorder:
        recorder.open_trace(units, np.ones(len(units), bool), policy.to_dict(), 5, 0, 80)
        for t in range(80):
            recorder.observe(t + 1, norms[t], np.ones(6, bool), np.zeros(6, bool), 1.0)
            recorder.log(t + 1, loss=2.0)
    path = write_markdown(tmp_path / "run")
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)  # what is not in a code span
    assert not re.search(r"(?<!\\)<", outside)
    assert not re.search(r"(?<!\\)[<|@#]", "".join(line for line in outside.splitlines() if line[:1] not in "|#!"))
    for line in text.splitlines():
        if line.startswith("| "):
            assert len(re.findall(r"(?<!\\)\|", line)) == 3, line  # two cells, whatever the names hold
    picture = (tmp_path / "run" / "report.svg").read_text(encoding="utf-8")
    svg = ElementTree.fromstring(picture)
    assert list(svg.iter("{http://www.w3.org/2000/svg}script")) == []
    assert "</svg><script>" not in picture


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("a", "`a`"), ("a`b", "``a`b``"), ("`", "`` ` ``"), ("a|b", "`a|b`"), ("", "`  `"), (" a ", "`  a  `")],
)
def test_a_code_span_holds_any_name(name: str, wanted: str) -> None:
    assert code(name) == wanted


def test_bars_are_escaped_in_tables_only_and_long_names_cut() -> None:
    assert code("a|b", table=True) == "`a\\|b`"
    assert len(code("x" * 500)) < 90
    assert escaped("*a* [b](c) <d> @e #f") == "\\*a\\* \\[b\\](c) \\<d\\> \\@e \\#f"
    assert json.loads(json.dumps(escaped("\ud800"))) == "\\\\ud800"
