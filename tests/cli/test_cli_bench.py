# SPDX-License-Identifier: Apache-2.0
"""`trimtab bench`: a table, a file and a page from one command, names nearly right, and one line for errors."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trimtab.lab import bench
from trimtab.lab.arms import ARMS
from trimtab.lab.suites import SUITES


@pytest.fixture(name="small", scope="module")
def _small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("data") / "words.txt"
    words = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")
    path.write_text(" ".join(random.Random(0).choices(words, k=1200)), encoding="utf-8")
    fault = "blocks.1.mlp.up:grad_scale:start=3,width=2,size=64"
    pairs = (
        f"data={path}",
        "steps=6",
        "batch=2",
        "seq=16",
        "eval_batches=1",
        f"faults={fault}",
        "policy.warmup_steps=2",
    )
    return ["--device", "cpu", *(part for pair in pairs for part in ("--set", pair))]


def test_one_command_gives_a_table_a_file_and_a_page(trimtab: Any, small: list[str], tmp_path: Path) -> None:
    out = tmp_path / "bench"
    answer = trimtab("bench", "smoke", "--seeds", 2, "--out", out, *small)
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith(("1/10 ", "10/10 "))] == [
        ["1/10", "grad_scale"],
        ["10/10", "grad_scale"],
    ]
    header = next(i for i, line in enumerate(lines) if line.startswith("arm "))
    assert lines[header].split()[:2] == ["arm", "held-out"]
    assert [line.split()[0] for line in lines[header + 1 : header + 6]] == ["clean", "low", "high", "gnmr", "random"]
    result = json.loads((out / "bench.json").read_text(encoding="utf-8"))
    assert f"{result['cells'][0]['arms']['gnmr']['stats']['eval_high']['mean']:.4f}" in lines[header + 4]
    assert result["command"][:3] == ["trimtab", "bench", "smoke"]
    assert lines[-1] == f"report: {out / 'report.html'}"
    assert (out / "report.html").stat().st_size > 1_000_000
    assert "low minus clean" in (out / "report.html").read_text(encoding="utf-8")
    again = trimtab("bench", "smoke", "--seeds", 2, "--out", out, *small)
    assert again.out.count("found") == 10
    assert again.out.count("done,") == 0


def test_without_plotly_only_the_page_is_missing_and_the_same_command_writes_it_later(
    trimtab: Any, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("bench", "smoke", "--arms", "gnmr", "--seeds", 2, "--out", tmp_path, *small)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "plotly.offline", None)
        answer = trimtab(*command)
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("arm "))
    assert [line.split()[0] for line in lines[header + 1 : header + 4]] == ["clean", "low", "gnmr"]
    assert any(line.startswith("gnmr: better than low in ") for line in lines[header:])
    assert lines[-1] == (
        "report: not written. Writing a report needs plotly, which is not installed: pip install 'trimtab[report]', "
        "then the same command writes it"
    )
    assert len([line for line in lines if "plotly" in line]) == 1
    assert "plotly" not in answer.err
    assert list(json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["arms"]) == ["clean", "low", "gnmr"]
    assert not (tmp_path / "report.html").exists()
    again = trimtab(*command)
    assert again.out.count("found,") == 6
    assert again.out.splitlines()[-1] == f"report: {tmp_path / 'report.html'}"
    assert (tmp_path / "report.html").is_file()


def test_arms_and_cells_can_be_chosen(
    trimtab: Any, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def stop(task: bench.Task, watcher: Any = None) -> None:
        ran.append(f"{task.cell}/{task.arm.name}/{task.seed}/{task.settings['lr']}/{task.settings['device']}")
        if len(ran) == 8:
            raise KeyboardInterrupt
        return bench.Outcome(0.0)  # type: ignore[return-value]

    monkeypatch.setattr(bench, "run_task", stop)
    args = ("--arms", "random,gnmr", "--cells", "nan,bit_flip-w5", "--seeds", 1, "--out", tmp_path, "--set", "lr=0.5")
    answer = trimtab("bench", "F", *args, *small)
    assert answer.code == 130
    assert "the same command goes on" in answer.out
    assert ran == [
        f"{cell}/{arm}/0/0.5/cpu" for cell in ("bit_flip-w5", "nan") for arm in ("clean", "low", "gnmr", "random")
    ]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("smok",), "there is no suite 'smok': did you mean 'smoke'?"),
        ((), "bench needs the name of a suite: trimtab bench smoke"),
        (("smoke", "--arms", "gnmr-reply"), "there is no arm 'gnmr-reply': did you mean 'gnmr-replay'?"),
        (("faults", "--cells", "nann"), "no cell of faults is called 'nann': did you mean 'nan'?"),
        (("smoke", "--set", "lrr=1"), "unknown setting 'lrr': did you mean 'lr'?"),
        (("smoke", "--set", "seed=4"), "a bench has its own seeds, 0 and up, got seed=4: give --seeds N"),
        (("smoke", "--set", "steps=20"), "steps must reach past the last fault of smoke/grad_scale"),
        (("smoke", "--seeds", "0"), "Invalid value for '--seeds'"),
    ],
)
def test_bad_input_gets_one_line_and_code_2(trimtab: Any, tmp_path: Path, args: tuple[str, ...], says: str) -> None:
    answer = trimtab("bench", *args, "--out", tmp_path / "out")
    assert answer.code == 2
    assert says in answer.err
    assert len(answer.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_the_list_names_every_suite_cell_and_arm(trimtab: Any) -> None:
    answer = trimtab("bench", "--list")
    assert answer.code == 0
    words = answer.out.replace(",", " ").split()
    for name in (*SUITES, "museum", *ARMS, *(cell.name for suite in SUITES.values() for cell in suite.cells)):
        assert name in words
    for letter in "ABDFL":
        assert f"({letter})" in words


def test_a_wrong_name_is_found_before_torch_is_loaded() -> None:
    script = (
        "import sys\nsys.argv = ['trimtab', 'bench', 'smok']\nfrom trimtab.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as left:\n    assert left.code == 2\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize("plotly", [True, False])
def test_the_museum_prints_its_cases_and_writes_its_page_with_and_without_plotly(
    trimtab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plotly: bool
) -> None:
    from trimtab.lab import museum

    if not plotly:
        monkeypatch.setitem(sys.modules, "plotly.offline", None)
    row = {"case": "stale", "thread": "t", "what": "Scales are stale.", "arm": "low", "seeds": 2, "died": 2}
    row |= {"survived": 9.0, "loss": float("nan"), "lost": float("nan"), "interval": float("nan"), "saved": False}
    row |= {"blamed": None, "delay": None, "skipped": 0.0, "promotion": 0.0, "ms": 1.0, "note": ""}

    def fake(out: Path, *, seeds: int, watch: Any) -> list[dict[str, Any]]:
        out.mkdir(parents=True)
        with watch("stale/low-0") as watcher:
            assert hasattr(watcher, "stepped")
        return [row | {"seeds": seeds}]

    monkeypatch.setattr(museum, "run_museum", fake)
    answer = trimtab("bench", "museum", "--seeds", 2, "--out", tmp_path / "m")
    assert answer.code == 0, answer.err
    assert "stale: Scales are stale." in answer.out
    assert "2 of 2" in answer.out
    assert json.loads((tmp_path / "m" / "bench.json").read_text(encoding="utf-8"))["rows"][0]["loss"] is None
    assert "Scales are stale." in (tmp_path / "m" / "report.html").read_text(encoding="utf-8")
