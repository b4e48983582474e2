# SPDX-License-Identifier: Apache-2.0
"""Names are somebody else's text: units, runs and events may be called anything, and stay names wherever they go.

The oracle is the same run with plain names. Its pages have the same elements, its Markdown the same blocks, its
pictures the same shapes; and no terminal is ever sent a character that is not to be seen.
"""

import importlib.util
import json
import threading
import unicodedata
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fuzzing import command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown import markdown
from targets import record_run

from trimtab.cli.console import Display
from trimtab.control.values import Event
from trimtab.report.compare import compare, write_comparison, write_comparison_markdown
from trimtab.report.imports import read_log
from trimtab.report.live import Live
from trimtab.report.markdown import write_markdown
from trimtab.report.names import visible
from trimtab.report.page import write_page
from trimtab.report.postmortem import postmortem, to_markdown

HOSTILE = (
    "</script><script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    "\"'><svg/onload=window.pwned=1>",
    "</textarea></title></style><iframe srcdoc='<script>parent.pwned=1</script>'>",
    "--><!-- ]]> &lt;b&gt; &#60;i&#62;",
    "{{verdict}} {{data}} ${window.pwned=1}",
    "`|*_~[a](javascript:window.pwned=1)![b](//c.example/d.png)",
    "[red]rich[/red] [/] [link=//c.example]x[/link] :smile:",
    "\x1b[2J\x1b[31mred\x1b]0;title\x07\x9b31m",
    "line\r\nbreak\rback\x0b\x0c\x85\u2028\u2029end",
    "\x00\x08\x7fdel",
    "\u202egnp.exe\u2066\u200b\ufeff\U000e0041",
    "half \ud800 of a pair",
    "n" * 5000,
    "# head\n\n---\n\n| a | b |\n|---|---|\n\n    code",
    " ",
)
PLAIN = tuple(f"blocks.{number}.mlp.up" for number in range(len(HOSTILE)))
UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def unseen(text: str) -> set[str]:
    """Characters that cannot be seen, line ends apart."""
    return {char for char in text if char != "\n" and unicodedata.category(char) in UNSEEN}


class Shape(HTMLParser):
    """The elements of a page, each with its attributes' names; and what its inline scripts say."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        self._in_script = tag == "script"
        self.scripts += [""] if self._in_script else []

    def handle_endtag(self, tag: str) -> None:
        self._in_script = self._in_script and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


def record(folder: Path, names: tuple[str, ...]) -> Path:
    """A run whose units, name and events are called so; each name in turn is the unit that runs high."""
    record_run(folder, names, name=names[0], message="; ".join(names))
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The hostile run and the plain one."""
    place = tmp_path_factory.mktemp("names")
    return record(place / "hostile", HOSTILE), record(place / "plain", PLAIN)


def test_the_oracle_sees_what_gets_through() -> None:
    plain = "<p>a</p><script>{}</script>"
    assert Shape(plain.replace("a", HOSTILE[1])).elements != Shape(plain).elements
    assert Shape(plain.replace("{}", HOSTILE[0])).elements != Shape(plain).elements
    assert unseen(HOSTILE[8]) == {"\x1b", "\x07", "\x9b"}
    assert "\u202e" in unseen(HOSTILE[11])


def write_sweep(folder: Path) -> Path:
    code, said = command(["sweep", str(folder), "--grid", "alpha=1.5,3", "--out", str(folder / "sweep.html")])
    assert code == 0, said
    return folder / "sweep.html"


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_page(folder, folder / "page.html"),
        lambda folder: write_comparison(compare([folder, folder]), folder / "both.html"),
        write_sweep,
    ],
    ids=["page", "comparison", "sweep"],
)
def test_no_name_becomes_an_element_of_a_page(pair: tuple[Path, Path], write: Callable[[Path], Path]) -> None:
    hostile, plain = (Shape(write(folder).read_text(encoding="utf-8")) for folder in pair)
    assert set(hostile.elements) == set(plain.elements)
    assert len(hostile.elements) == len(plain.elements)
    assert len(hostile.scripts) == len(plain.scripts)
    for ours, theirs in zip(hostile.scripts, plain.scripts, strict=True):
        if ours != theirs:
            json.loads(ours)  # what differs is data, and nothing but data
    assert not any(name.startswith("on") for _, names in hostile.elements for name in names)


def test_no_name_becomes_a_block_of_markdown_or_a_shape_of_a_picture(pair: tuple[Path, Path]) -> None:
    told = [write_markdown(folder, folder / "run.md") for folder in pair]
    told += [write_comparison_markdown(compare([folder, folder]), folder / "both.md") for folder in pair]
    for hostile, plain in (told[:2], told[2:]):
        texts = [path.read_text(encoding="utf-8") for path in (hostile, plain)]
        ours, theirs = (Shape(markdown(text, extensions=["tables"])).elements for text in texts)
        assert ours == theirs
        assert not unseen(texts[0])
        shapes = [[one.tag for one in ET.parse(path.with_suffix(".svg")).iter()] for path in (hostile, plain)]
        assert shapes[0] == shapes[1]
        assert not unseen(hostile.with_suffix(".svg").read_text(encoding="utf-8"))
    ours, theirs = (to_markdown(postmortem(read_log(folder))) for folder in pair)
    assert not unseen(ours)
    assert (
        Shape(markdown(ours, extensions=["tables"])).elements == Shape(markdown(theirs, extensions=["tables"])).elements
    )


VERBS = ("report {} --md", "replay {}", "sweep {} --grid alpha=1.5,3", "postmortem {}", "postmortem {} --md")
VERBS += tuple(f"export {{}} --to {tool} --top 16" for tool in ("torchao", "te", "megatron"))


@pytest.mark.parametrize("line", VERBS)
def test_no_name_moves_a_cursor(pair: tuple[Path, Path], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for folder in pair:
        code, errors = command([part.format(folder) for part in line.split()], show=True)
        shown = capsys.readouterr().out
        said.append(shown)
        assert not unseen(shown + errors), line
        assert code in (0, 2)
        assert not errors or errors.count("\n") == 1
    if line.startswith(("replay", "postmortem", "report")):
        assert said[0].count("\n") == said[1].count("\n")


def test_no_event_moves_the_cursor_of_a_run_that_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(switches=True)
    with display:
        for name in HOSTILE:
            display.happened(Event(3, "persistent", name, message=f"{name} triggered again"))
    shown = capsys.readouterr().out
    assert not unseen(shown)
    assert shown.count("\n") == len(HOSTILE)
    assert "[red]rich[/red] [/]" in shown


def test_the_live_page_is_told_names_as_data(pair: tuple[Path, Path]) -> None:
    with Live([pair[0]], 0) as live:
        page, data = live.answer("/"), live.answer("/data?run=0")
    assert page is not None
    assert data is not None
    assert not any(name.encode("utf-8", "replace") in page[1] for name in HOSTILE if name.strip())
    assert data[0] == "application/json"
    assert data[1].isascii()  # every character that is not plain is a code there
    told = json.loads(data[1])
    assert sorted(told["units"]) == sorted(map(visible, HOSTILE))
    assert told["name"] == HOSTILE[0]
    assert not unseen(json.dumps(told, ensure_ascii=False))


def test_any_text_is_a_name(tmp_path: Path, rounds: Callable[[int, int], int]) -> None:
    anything = st.text(st.characters(), max_size=40)

    @settings(max_examples=rounds(15, 2000), suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(anything, min_size=3, max_size=3, unique=True))
    def check(names: list[str]) -> None:
        for old in sorted(tmp_path.rglob("*"), reverse=True):
            old.unlink() if old.is_file() else old.rmdir()
        folder = record(tmp_path / "run", tuple(names))
        text = write_markdown(folder).read_text(encoding="utf-8")
        assert not unseen(text)
        assert len(text.splitlines()) <= 24
        ET.parse(folder / "report.svg")
        assert not unseen(to_markdown(postmortem(read_log(folder))))
        with Live([folder], 0) as live:
            told = json.loads((live.answer("/data?run=0") or ("", b""))[1])
        assert sorted(told["units"]) == sorted(map(visible, names))
        assert not unseen(json.dumps(told, ensure_ascii=False))

    check()


_spec = importlib.util.spec_from_file_location("report_fixtures", Path(__file__).parents[1] / "report" / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
_fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fixtures)
browser = _fixtures._browser  # the one of tests/report: a real browser, or a reason to skip


@pytest.mark.browser
def test_no_name_runs_in_a_real_browser(browser: Any, pair: tuple[Path, Path]) -> None:
    ui = pytest.importorskip("selenium.webdriver.support.ui")
    page = write_page(pair[0], pair[0] / "real.html")
    live = Live([pair[0]], 0)
    thread = threading.Thread(target=live.serve)
    thread.start()
    try:
        for url in (page.as_uri(), live.url):
            browser.get(url)
            wait = ui.WebDriverWait(browser, 20, poll_frequency=0.1)
            wait.until(lambda b: b.execute_script("return document.body.textContent.includes('window.pwned=1')"))
            turned = r"/[\u0000-\u0008\u001b\u202a-\u202e\u2066-\u2069]/.test(document.body.innerText)"
            assert browser.execute_script(f"return {turned}") is False, url
            found = "document.querySelectorAll('iframe, body img, [onerror], [onload]').length"
            assert browser.execute_script(f"return [typeof window.pwned, {found}]") == ["undefined", 0]
            severe = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
            assert not [line for line in severe if "favicon" not in line]
    finally:
        browser.get("about:blank")
        live.stop()
        thread.join(10)
        live.close()
