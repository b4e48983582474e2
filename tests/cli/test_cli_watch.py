# SPDX-License-Identifier: Apache-2.0
"""`trimtab watch`: prints where the page is, serves it, and ends cleanly."""

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from trimtab import Recorder


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Path:
    with Recorder(tmp_path / "run") as recorder:
        recorder.log(1, loss=3.5)
    return tmp_path / "run"


def test_it_serves_until_it_is_interrupted(run: Path) -> None:
    command = [sys.executable, "-m", "trimtab", "watch", str(run), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"watching {run} at http://127.0.0.1:")
        url = line.split(" at ")[1].split()[0]
        with urllib.request.urlopen(f"{url}data?run=0", timeout=20) as answer:
            assert b'"loss":3.5' in answer.read()
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (0, "stopped\n", "")


def test_what_cannot_be_watched_is_refused_in_one_line(trimtab: Any, run: Path, tmp_path: Path) -> None:
    answer = trimtab("watch", tmp_path / "nothing")
    assert answer.code == 2
    assert answer.err.startswith("error: ")
    assert "is not a run folder" in answer.err
    assert answer.err.count("\n") == 1
    assert "between 0 and 65535" in trimtab("watch", run, "--port", "99999").err


@pytest.mark.parametrize(("options", "opened"), [([], 0), (["--no-browser"], 0), (["--open"], 1)])
def test_a_browser_is_opened_only_if_asked_for(
    trimtab: Any, run: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], opened: int
) -> None:
    urls: list[str] = []

    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("webbrowser.open", urls.append)
    monkeypatch.setattr("trimtab.report.live.Live.serve", interrupted)
    answer = trimtab("watch", run, "--port", "0", *options)
    assert answer.code == 0
    assert len(urls) == opened
    assert all(url in answer.out for url in urls)
