# SPDX-License-Identifier: Apache-2.0
"""Whatever is in a file: it is read, or refused in trimtab's own words; in time, and in bounded memory.

The cases are those of `fuzzing.py`. A few hundred of them run here; TRIMTAB_LONG=1 runs more than 130,000.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import damage
import fuzzing
import promises
import pytest
import targets
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trimtab.errors import TrimtabError
from trimtab.lab.config import Config, load_settings
from trimtab.report.imports import read_log
from trimtab.report.read import read_run

HERE = Path(__file__).parent
CASES = {
    "run": (20, 9_000),
    "trace": (40, 20_000),
    "tables": (40, 16_000),
    "config": (60, 20_000),
    "text": (30, 10_000),
    "tasks": (30, 12_000),
    "packed": (30, 12_000),
    "sharded": (10, 4_000),
    "checkpoint": (3, 1_000),
    "pages": (10, 4_000),
    "bench": (25, 4_000),
    "subject": (4, 1_000),
    "model": (10, 4_000),
    "gguf": (20, 4_000),
    "adapter": (8, 2_000),
    "quantized": (20, 6_000),
    "results": (20, 6_000),
}
"""How many damaged files of each target, in the normal suite and in the long mode."""


def run(*arguments: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent.parent)}
    line = [sys.executable, str(HERE / "fuzzing.py"), *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=timeout, env=environment, check=False)


@pytest.mark.timeout(4 * 3600)
def test_a_damaged_file_is_read_or_refused_in_our_own_words(rounds: Callable[[int, int], int]) -> None:
    assert list(CASES) == list(fuzzing.TARGETS)
    assert sum(long for _, long in CASES.values()) >= 130_000
    counts = {name: rounds(*CASES[name]) for name in CASES}
    odd = "verbs" if rounds(0, 1) else "reads"
    ended = run("--odd", odd, *(f"{n}:{count}:{count // 20}" for n, count in counts.items()), timeout=4 * 3600)
    print(ended.stdout)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"[-8000:]
    for name in CASES:
        assert f"{name}: " in ended.stdout


def test_a_promise_allocates_nothing() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent.parent)}
    line = [sys.executable, str(HERE / "promises.py")]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=280, env=environment, check=False)
    print(ended.stdout)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"[-8000:]
    assert ended.stdout.count(" MiB more, ") == len(promises.PROMISES)


def test_the_harness_sees_a_wrong_error_a_hang_and_too_much_memory(tmp_path: Path, monkeypatch: Any) -> None:
    ends: dict[str, Callable[[], Any]] = {
        "fine": lambda: None,
        "ours": lambda: targets.each(lambda: (_ for _ in ()).throw(TrimtabError("no"))),
        "KeyError": lambda: {}["a"],
        "Slow": lambda: time.sleep(60),
        "AssertionError": lambda: fuzzing.check_end(1, "error: a\nTraceback\n"),
    }
    monkeypatch.setattr(fuzzing, "SECONDS", 0.2)
    reading = {"is": "fine"}
    target = targets.Target(lambda folder: folder.joinpath("a.json").write_text("{}"), lambda _: ends[reading["is"]]())
    monkeypatch.setitem(fuzzing.TARGETS, "fake", target)
    bench = fuzzing.Bench("fake", tmp_path / "fake")
    for name in ends:
        reading["is"] = name
        found = bench.case(1)
        assert (found is None) == (name in ("fine", "ours"))
        assert found is None or found.what.startswith(name)
    assert bench.folder.joinpath("a.json").read_text() == "{}"  # what was damaged is whole again


def test_damage_is_found_again_by_its_number_and_does_damage(tmp_path: Path) -> None:
    bench = fuzzing.Bench("config", tmp_path)
    made = []
    for _ in range(2):
        for seed in range(40):
            bench.damage(seed)
            made.append({name: (tmp_path / name).read_bytes() for name in bench.valid})
            bench.restore()
    assert made[:40] == made[40:]
    assert sum(one != bench.valid for one in made[:40]) > 35


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(damage.NUMBERS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from([*Config.__dataclass_fields__, "policy.alpha", "policy.window", "policy.rebase_at"]) | st.text()


def test_any_settings_are_taken_or_refused(rounds: Callable[[int, int], int]) -> None:
    @settings(max_examples=rounds(150, 10_000))
    @given(st.dictionaries(names, values, max_size=4))
    def check(told: dict[str, Any]) -> None:
        allow(lambda: targets.settle(dict(told)))
        allow(
            lambda: targets.settle(load_settings(None, [f"{key}={damage.toml(value)}" for key, value in told.items()]))
        )

    check()


def test_any_text_is_taken_or_refused_as_a_setting(rounds: Callable[[int, int], int]) -> None:
    @settings(max_examples=rounds(100, 10_000))
    @given(st.lists(st.builds("{}={}".format, names, st.text()) | st.text(), max_size=3))
    def check(pairs: list[str]) -> None:
        allow(lambda: targets.settle(load_settings(None, pairs)))

    check()


def test_any_json_is_taken_or_refused_as_a_run_and_as_a_log(tmp_path: Path, rounds: Callable[[int, int], int]) -> None:
    row = st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("step", "loss", "grad_norm", "grad_norm/a", "events", "num_high"), values)
    )

    @settings(max_examples=rounds(60, 6_000), suppress_health_check=[HealthCheck.function_scoped_fixture])
    @example(None, [{"step": 0, "num_high": 10**400}], b"")
    @given(
        values | st.fixed_dictionaries({"config": values}), st.lists(row | values, max_size=4), st.binary(max_size=200)
    )
    def check(info: Any, rows: list[Any], raw: bytes) -> None:
        (tmp_path / "run.json").write_text(json.dumps(info))
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        for name in ("metrics.jsonl", "log.jsonl"):
            (tmp_path / name).write_text(lines)
        for name in ("trace.arrow", "log.csv", "log.parquet", "log.tfevents"):
            (tmp_path / name).write_bytes(raw)
        allow(lambda: read_run(tmp_path))
        allow(lambda: targets.read_folder(tmp_path))
        for name in ("log.jsonl", "log.csv", "log.parquet", "log.tfevents", "trace.arrow"):
            allow(lambda name=name: read_log(tmp_path / name))

    check()


def allow(read: Callable[[], Any]) -> None:
    """Nothing but trimtab's own errors."""
    with contextlib.suppress(*targets.ALLOWED):
        read()


@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(
    "target",
    ["config", "run", "trace", "tables", "text", "tasks", "packed", "sharded", "pages", "bench", "gguf", "results"],
)
def test_guided_by_coverage_nothing_else_is_found(
    target: str, tmp_path: Path, rounds: Callable[[int, int], int]
) -> None:
    pytest.importorskip("atheris", reason="coverage-guided fuzzing: pip install 'trimtab[fuzz]'")
    runs = rounds(0, 5_000)
    if not runs:
        pytest.skip("it takes 10 s to begin: with TRIMTAB_LONG=1 only")
    line = [sys.executable, str(HERE.parents[1] / "scripts" / "fuzz.py"), target, "--runs", str(runs)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*line, "--keep", str(tmp_path)], capture_output=True, text=True, env=environment, timeout=4 * 3600, check=False
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"[-8000:]
    assert f"stat::number_of_executed_units: {runs}" in ended.stderr
