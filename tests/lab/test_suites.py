# SPDX-License-Identifier: Apache-2.0
"""Suites hold what they promise: valid settings for every arm, paired faults that move with the seed, named cells."""

from collections import Counter
from pathlib import Path

import pytest

from trimtab.errors import TrimtabError
from trimtab.lab.bench import tasks
from trimtab.lab.config import Config
from trimtab.lab.faults import KINDS, parse_faults
from trimtab.lab.suites import EXPERTS, LINEARS, SUITES, Cell, Suite, Windows, find_suite, merged


@pytest.mark.parametrize("name", SUITES)
def test_every_run_of_a_suite_has_settings_that_the_trainer_takes(name: str, tmp_path: Path) -> None:
    suite = SUITES[name]
    found = tasks(suite, tmp_path, seeds=(0, 1), given={})
    assert len({task.folder for task in found}) == len(found)
    assert {task.cell for task in found} == {cell.name for cell in suite.cells}
    for cell in suite.cells:
        arms = {task.arm.name for task in found if task.cell == cell.name}
        assert arms >= {"high", "low", "gnmr", "random", cell.top}


def test_the_top_of_a_cell_is_clean_where_it_injects_faults_and_high_elsewhere() -> None:
    tops = {f"{suite.name}/{cell.name}": cell.top for suite in SUITES.values() for cell in suite.cells}
    faulty = {name for name in tops if name.startswith("faults/")} | {"smoke/grad_scale", "experts/fault"}
    assert {name for name, top in tops.items() if top == "clean"} == faulty
    assert {top for name, top in tops.items() if name not in faulty} == {"high"}


@pytest.mark.parametrize("name", ["smoke", "faults", "experts"])
def test_nobody_acts_before_the_first_fault(name: str, tmp_path: Path) -> None:
    suite = SUITES[name]
    starts = {cell.name: cell.faults.start for cell in suite.cells if cell.faults is not None}
    assert starts
    for task in tasks(suite, tmp_path, seeds=(0,), given={}):
        settings = Config.from_dict(task.arm.over(task.settings))
        if task.cell in starts and settings.mode == "act" and not settings.fixed_high:
            policy = settings.build_policy()
            assert policy.warmup == "monitor", task.name
            limits = policy.resolve(20, settings.steps)
            assert 0.75 * starts[task.cell] <= limits.warmup_steps < starts[task.cell], task.name


def test_saved_has_a_cell_that_quantizes_the_forward_too(tmp_path: Path) -> None:
    found = tasks(SUITES["saved"].only(["saved", "forward"]), tmp_path, seeds=(0,), given={})
    scopes = {
        cell: {
            Config.from_dict(task.arm.over(task.settings)).recipe_options.get("scope")
            for task in found
            if task.cell == cell and task.arm.name != "plain"  # not converted, so it has no options
        }
        for cell in ("saved", "forward")
    }
    assert scopes == {"saved": {None}, "forward": {"forward"}}


def test_the_families_of_the_issue_are_there_by_letter_and_by_name() -> None:
    assert [find_suite(letter).name for letter in "ABDFL"] == ["saved", "blocks", "experts", "faults", "cliff"]
    assert find_suite("f") is find_suite("faults")
    with pytest.raises(TrimtabError, match="did you mean 'faults'"):
        find_suite("fautls")
    with pytest.raises(TrimtabError, match="no suite ''"):
        find_suite("")


def test_fault_cells_cover_kinds_both_ways_and_widths_from_one_to_fifty() -> None:
    windows = [cell.faults for cell in SUITES["faults"].cells if cell.faults is not None]
    assert len(windows) == len(SUITES["faults"].cells)
    for kind in ("grad_scale", "bit_flip", "output_scale", "zero_blocks"):
        assert {w.width for w in windows if w.kind == kind} >= {1, 5, 10, 20, 50}
    assert {w.units for w in windows} == {1, 3}
    assert {w.kind for w in windows} <= set(KINDS)
    assert len({w.size for w in windows if w.kind == "grad_scale"}) == 3


def test_windows_are_read_back_by_the_trainer_and_end_where_they_say() -> None:
    windows = Windows("grad_scale", width=7, size=16.0, units=3, start=20, every=30, count=4)
    found = parse_faults(windows.text(5))
    assert [f.start for f in found] == [start for start in (20, 50, 80, 110) for _ in range(3)]
    assert {(f.kind, f.width, f.size) for f in found} == {("grad_scale", 7, 16.0)}
    assert windows.last == max(f.start + f.width - 1 for f in found) == 116
    together = [{f.unit for f in found if f.start == start} for start in (20, 50, 80, 110)]
    assert all(len(units) == 3 for units in together)


def test_a_seed_fixes_the_units_and_seeds_strike_all_of_them_alike() -> None:
    windows = Windows("nan", count=4)
    assert windows.text(3) == windows.text(3)
    struck = Counter(f.unit for seed in range(400) for f in parse_faults(windows.text(seed)))
    assert set(struck) == set(LINEARS)
    mean = 400 * 4 / len(LINEARS)
    assert all(0.6 * mean < count < 1.4 * mean for count in struck.values())
    assert len({f.unit for f in parse_faults(windows.text(0))}) == 4  # four windows, four units
    assert set(EXPERTS) >= {f.unit for f in parse_faults(Windows("nan", targets=EXPERTS).text(0))}


def test_arms_of_a_seed_share_faults_and_every_other_setting_of_the_cell(tmp_path: Path) -> None:
    suite = SUITES["smoke"]
    found = tasks(suite, tmp_path, seeds=(0, 1), given={"lr": 1e-3})
    by_seed = [[task.settings for task in found if task.seed == seed] for seed in (0, 1)]
    for settings in by_seed:
        assert len(settings) == 5  # clean, low, high, gnmr, random
        assert all(one == settings[0] for one in settings)
    assert by_seed[0][0]["faults"] != by_seed[1][0]["faults"]
    assert {one["lr"] for one in by_seed[0]} == {1e-3}


def test_settings_that_leave_a_fault_out_are_refused() -> None:
    suite = SUITES["smoke"]
    with pytest.raises(TrimtabError, match="ends at step 129, got 100: raise steps"):
        suite.settings_of(suite.cells[0], 0, {"steps": 100})
    assert suite.settings_of(suite.cells[0], 0, {"steps": 100, "faults": ""})["faults"] == ""  # said so: none


def test_cells_are_chosen_by_name_or_pattern() -> None:
    chosen = SUITES["faults"].only(["bit_flip-*", "nan"])
    assert [cell.name for cell in chosen.cells] == [f"bit_flip-w{w}" for w in (1, 5, 10, 20, 50)] + ["nan"]
    with pytest.raises(TrimtabError, match="did you mean 'bit_flip-w10'"):
        SUITES["faults"].only(["bit_flip_w10"])


def test_tables_such_as_the_policy_are_merged_entry_by_entry() -> None:
    suite = Suite("s", "", {"lr": 1, "policy": {"alpha": 2, "beta": 3}}, (), (Cell("c", {"policy": {"beta": 4}}),))
    settings = suite.settings_of(suite.cells[0], 7, {"policy": {"max_high": 1}})
    assert settings == {"lr": 1, "policy": {"alpha": 2, "beta": 4, "max_high": 1}, "seed": 7}
    assert suite.settings["policy"] == {"alpha": 2, "beta": 3}
    assert merged({"faults": "a"}, {"faults": "b"}) == {"faults": "b"}
