# SPDX-License-Identifier: Apache-2.0
"""Ranks: that 1 rank and N ranks read the same norms and decide the same, under DDP, FSDP2, HSDP, tensor parallelism,
pipeline stages and experts, with one collective per step; that all ranks of a run are equal to the bit; and that what
cannot agree is refused. Real gloo processes, started once per world size, run many checks and hand back plain values.
"""

import multiprocessing as mp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from many_ranks import (
    EXPERTS,
    SPIKES,
    UNITS,
    WHOLE,
    WORLDS,
    WRAPS,
    Mixture,
    Part,
    Rows,
    batches,
    build,
    fill,
    follow,
    loss_of,
    trace,
    train,
    with_switches,
    work,
)

import trimtab
from trimtab import Controller, Policy, TrimtabError
from trimtab.control.ranks import merged
from trimtab.control.units import find_units


class Runs:
    """What the ranks of each world size have found, run when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._found = folder, {}

    def of(self, world: int, check: str) -> list[Any]:
        """The results of a check, one per rank."""
        if world not in self._found:
            handed = self.of(4, "state")[3] if world == 2 else None
            self._found[world] = self._run(world, handed)
        for results in self._found[world]:
            if isinstance(results.get(check, ""), str):
                pytest.fail(results.get(check) or next(r for r in results.values() if isinstance(r, str)))
        return [results[check] for results in self._found[world]]

    def _run(self, world: int, handed: Any) -> list[dict]:
        folder = self._folder / str(world)
        folder.mkdir()
        context = mp.get_context("forkserver")  # torch is imported once, for all ranks of all sizes
        context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "trimtab.lab"])
        ranks = [context.Process(target=work, args=(rank, world, str(folder), handed)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        assert [process.exitcode for process in ranks] == [0] * world
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def one_rank() -> dict:
    return train(build(), 0, 1, clip=True)


def same(values: list[Any]) -> bool:
    """Whether all ranks found the very same."""
    return all(np.array_equal(np.asarray(values[0]), np.asarray(value), equal_nan=True) for value in values)


WRAPPED = [(world, name) for world in WORLDS for name in WRAPS[world]]


# What they found


@pytest.mark.parametrize(("world", "name"), WRAPPED)
def test_one_rank_and_many_ranks_read_the_same_norms_and_decide_the_same(
    runs: Runs, one_rank: dict, world: int, name: str
) -> None:
    """A norm short by the root of the shards, or too large by the root of the replicas, is off by 41 % at least."""
    found = [result[name] for result in runs.of(world, "training")]
    assert list(found[0]["units"]) == list(UNITS)
    for key in ("norms", "high", "totals", "seen"):
        assert same([result[key] for result in found])
    np.testing.assert_allclose(found[0]["norms"], one_rank["norms"], rtol=2e-6)
    np.testing.assert_allclose(found[0]["totals"], one_rank["totals"], rtol=2e-6)
    assert np.array_equal(found[0]["high"], one_rank["high"])
    assert one_rank["high"].any()


@pytest.mark.parametrize(("world", "name"), WRAPPED)
def test_every_wrapping_decides_what_a_replay_of_the_norms_decides(runs: Runs, world: int, name: str) -> None:
    wanted = trimtab.replay(trace(), Policy(**SPIKES))
    assert np.abs(wanted.risk - 1).min() > 1e-4
    assert wanted.high.any()
    found = [result[name] for result in runs.of(world, "traces")]
    assert same([result["mask"] for result in found])
    assert np.array_equal(found[0]["mask"], wanted.high)
    assert same([result["norms"] for result in found])
    np.testing.assert_allclose(found[0]["norms"], trace(), rtol=1e-6)


@pytest.mark.parametrize("name", WRAPS[2])
def test_all_ranks_run_the_same_batches_again(runs: Runs, name: str) -> None:
    wanted = follow(build(), trace(30), replay_step=10.0)
    found = [result[name] for result in runs.of(2, "reruns")]
    assert wanted["rerun"].any()
    for key in ("rerun", "mask", "gone"):
        assert same([result[key] for result in found])
        assert np.array_equal(found[0][key], wanted[key])


@pytest.mark.parametrize("order", ["step, clip", "clip, step"])
@pytest.mark.parametrize(("world", "name"), WRAPPED)
def test_a_step_with_its_clipping_is_one_collective(runs: Runs, world: int, name: str, order: str) -> None:
    wanted = "broadcast" if name == "ddp" else "allreduce"
    assert [result[name, order] for result in runs.of(world, "counts")] == [[wanted]] * world


def test_a_plain_model_adds_no_collective_unless_it_is_given_a_group(runs: Runs) -> None:
    for world in WORLDS:
        for result in runs.of(world, "counts"):
            assert result["plain", "step, clip"] == []
            assert result["plain in a group", "step, clip"] == ["broadcast"]


@pytest.mark.parametrize(("world", "name"), [(w, n) for w, n in WRAPPED if w != 3])
def test_clipping_is_torch_s(runs: Runs, world: int, name: str) -> None:
    found = [result[name] for result in runs.of(world, "clipping")]
    assert same([total for total, _, _ in found])
    for ours, theirs, apart in found:
        assert ours == pytest.approx(2 * len(UNITS) ** 0.5, rel=1e-6)
        assert ours == pytest.approx(theirs, rel=1e-6)
        assert apart < 1e-7


def test_ranks_outside_the_mesh_have_no_say(runs: Runs) -> None:
    found = [result["norms"] for result in runs.of(4, "small meshes")]
    for rank in range(4):
        np.testing.assert_allclose(found[rank], trace(10) * (1 if rank < 2 else 3), rtol=1e-6)


def test_an_accumulated_shard_is_read_anew(runs: Runs) -> None:
    for once, twice in runs.of(2, "accumulation"):
        assert twice == pytest.approx(2 * once, rel=1e-5)


def test_a_pending_sum_is_added_up_before_it_is_measured(runs: Runs) -> None:
    assert runs.of(2, "pending sums") == [6.0, 6.0]  # four entries of 1 + 2


@pytest.mark.parametrize("world", [2, 4])
def test_a_nan_on_one_rank_is_skipped_by_all(runs: Runs, world: int) -> None:
    results = runs.of(world, "bad")
    assert set(results[0]) == {name for name in WRAPS[world] if name != "fsdp x tp"}
    for name in results[0]:
        nonfinite, mask, gone, *error = results[0][name]
        assert nonfinite
        assert gone
        assert [list(result[name]) for result in results] == [list(results[0][name])] * world
        if name == "ddp":
            assert mask == [True, False, False, False, False]  # all are poisoned: the lowest index wins the tie
        else:
            assert mask == [name == "1.up" for name in UNITS]
            assert "3 steps in a row" in error[0]
            assert "1.up" in error[0]


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_agree_on_who_has_a_gradient(runs: Runs, world: int) -> None:
    for name in ("ddp", "fsdp"):
        found = [result[name] for result in runs.of(world, "presence")]
        assert same([seen for seen, _ in found])
        assert same([norms for _, norms in found])
        assert found[0][0].tolist() == [unit != "0.up" for unit in UNITS]


def test_a_state_of_four_ranks_continues_on_two_and_on_one(runs: Runs) -> None:
    wanted = trimtab.replay(trace(), Policy(**SPIKES)).high[21:]
    states = runs.of(4, "state")
    for name in ("ddp", "fsdp"):
        for result in runs.of(2, "state"):
            assert np.array_equal(result[name], wanted)
    model = build()
    controller = Controller(model, Policy(**SPIKES))
    controller.load_state_dict(states[1])
    assert np.array_equal(follow(model, trace()[21:], controller)["mask"], wanted)


@pytest.mark.parametrize("wait", ["forward", "never"])
def test_who_does_not_wait_decides_the_same_and_skips_by_the_flag(runs: Runs, wait: str) -> None:
    wanted = trimtab.replay(trace(20), Policy(**SPIKES)).high
    for result in runs.of(2, "waiting"):
        for name in ("ddp", "fsdp"):
            masks, flag = result[wait, name]
            late = int(wait == "never")
            assert np.array_equal(masks[late:], wanted[: len(wanted) - late])
            assert flag == 1.0


def test_names_and_states_are_those_of_the_bare_model(runs: Runs) -> None:
    for result in runs.of(2, "wrappers"):
        assert len(result) == 5
        for names, watched, modules, steps in result.values():
            assert names == UNITS
            assert watched == UNITS
            assert modules == 1
            assert steps == 20


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("policy", "every rank must make the same controller, got policy"),
        ("shape", "a parameter must have one shape"),
        ("update", "a whole parameter is needed for update"),
        ("source", "whole outputs are needed for"),
        ("late", "call fully_shard or parallelize_module first"),
        ("flat", "use torch.distributed.fsdp.fully_shard"),
        ("stage", "stage must be given on every rank or on none"),
    ],
)
def test_what_cannot_agree_is_refused_on_every_rank(runs: Runs, case: str, words: str) -> None:
    for result in runs.of(2, "refusals"):
        assert len(result[case]) == 1
        assert words in result[case][0]


def test_columns_are_those_of_the_first_rank_and_travel_with_the_norms(runs: Runs) -> None:
    found = runs.of(2, "sensors")
    for name, wanted in {"ddp": "broadcast", "fsdp": "allreduce"}.items():
        columns, counts = found[0][name]
        assert counts == [[wanted], [wanted], [wanted, wanted]]
        assert all((here["mine"] == 1).all() for here in columns)
        assert found[1][name][1] == counts
        for step, here in enumerate(columns):
            assert set(here) == set(found[1][name][0][step])
            assert all(same([here[column], found[1][name][0][step][column]]) for column in here)
        assert all(np.isfinite(values).all() for values in columns[-1].values())


def test_switched_linears_under_fsdp_in_mixed_precision_are_those_of_a_bf16_model(runs: Runs) -> None:
    for result in runs.of(2, "mixed precision"):
        for key, apart in result.items():
            if key[2] == "low from high":
                assert apart > 0, key
            else:
                assert apart < 1e-6, key


def test_switched_linears_under_tensor_parallelism_are_those_of_a_whole_model(runs: Runs) -> None:
    for result in runs.of(2, "tensor parallel paths"):
        for recipe in ("fp8", "saved4", "int8"):
            assert max(result[recipe, "low"], result[recipe, "high"]) < 1e-5
        for recipe in ("fp8_delayed", "fp4", "nvfp4"):
            assert "under tensor parallelism a path must be emulated" in result[recipe][0]


# Experts


def test_experts_of_a_stack_are_units_by_slice_in_one_reduction_each(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Mixture()
    controller = Controller(model, Policy(**SPIKES), mode="observe", units="expert")
    assert list(controller.names) == EXPERTS
    wanted = fill(model)
    calls: list[int] = []
    original = torch.linalg.vector_norm
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda *a, **k: calls.append(1) or original(*a, **k))
    controller.step()
    assert len(calls) == 3  # three stacks of eight
    assert controller.reading is not None
    np.testing.assert_allclose(controller.reading.norm, wanted, rtol=1e-6)
    assert controller.reading.total == pytest.approx(float(np.linalg.norm(wanted)), rel=1e-6)
    assert float(controller.clip_grad_norm_(1.0)) == pytest.approx(float(np.linalg.norm(wanted)), rel=1e-6)


def test_an_expert_without_a_token_is_not_seen() -> None:
    model = Mixture()
    controller = Controller(model, Policy(**SPIKES), mode="observe", units="expert")
    fill(model, idle=5)
    controller.step()
    assert controller.reading is not None
    assert controller.reading.seen.tolist() == [name != "experts.5" for name in EXPERTS]


def test_a_stack_can_be_watched_whole_or_by_slice() -> None:
    model = Mixture()
    assert [unit.name for unit in find_units(model)] == ["router", "experts"]
    wanted = fill(model)
    with_switches(model)
    for watch, names in {"experts": ["router", "experts"], "experts.*": EXPERTS}.items():
        controller = Controller(model, Policy(**SPIKES), watch=[watch])
        assert list(controller.names) == names
        controller.step()
        assert controller.reading is not None
        assert np.linalg.norm(controller.reading.norm[1:]) == pytest.approx(np.linalg.norm(wanted[1:]), rel=1e-6)
    with pytest.raises(TrimtabError, match=r"update for units that are slices of a stack"):
        Controller(model, Policy(**SPIKES), watch=["experts.*"], detector="update")


@pytest.mark.parametrize("name", ["by expert", "then by data", "along a slice"])
def test_stacks_cut_over_ranks_have_the_norms_of_whole_ones(runs: Runs, name: str) -> None:
    found = [result[name] for result in runs.of(4, "expert parallel")]
    assert same([norms for _, norms, *_ in found])
    for names, norms, seen, wanted, collectives in found:
        assert list(names) == EXPERTS
        np.testing.assert_allclose(norms, wanted, rtol=1e-6)
        assert seen.tolist() == [unit != "experts.3" for unit in EXPERTS]
        assert collectives == ["allreduce"]


def test_experts_of_some_ranks_are_known_to_all_and_switched_where_they_are(runs: Runs) -> None:
    found = runs.of(2, "experts by name")
    for result in found:
        assert result["names"] == ("attn", "experts.0", "experts.1", "experts.2", "experts.3", "head")
        np.testing.assert_allclose(result["norms"] ** 2, [1, 1, 1, 1, 1, 4], rtol=1e-5)
        assert result["plans"] == [(), (), (), ("experts.3",), ("experts.3",), ()]
        assert result["left"] == []


# Pipeline


def whole_run() -> dict[str, Any]:
    """What the stages do, by one rank that has all layers."""
    model, rows = Part(WHOLE), Rows()
    controller = Controller(model, Policy(**SPIKES), recorder=rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, target in batches():
        for half, wanted in zip(x.chunk(2), target.chunk(2), strict=True):
            (loss_of(model(half), wanted) / 2).backward()
        controller.step()
        controller.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return rows.plain()


def test_two_stages_read_and_decide_what_the_whole_model_does(runs: Runs) -> None:
    wanted = whole_run()
    for result in runs.of(2, "pipeline"):
        found = result["one budget"]
        assert list(found["units"]) == [f"layers.{name}" for name in WHOLE]
        np.testing.assert_allclose(found["norms"], wanted["norms"], rtol=1e-4)
        np.testing.assert_allclose(found["totals"], wanted["totals"], rtol=1e-4)
        assert np.array_equal(found["high"], wanted["high"])
        assert found["high"].any()
        assert found["high"].sum(axis=1).max() == 1  # one seat for both stages
        assert found["counts"] == [["allreduce"]] * 10


def test_a_nan_in_one_stage_is_skipped_by_both(runs: Runs) -> None:
    left, right = (result["poisoned"] for result in runs.of(2, "pipeline"))
    assert left["plans"] == right["plans"]
    assert [nonfinite for _, nonfinite, _ in left["plans"]] == [step == 3 for step in range(10)]
    assert left["plans"][3][0] == [False, False, False, True]


def test_with_a_quota_each_stage_has_its_own_seat(runs: Runs) -> None:
    left, right = (result["quota"] for result in runs.of(2, "pipeline"))
    assert left["plans"] == right["plans"]
    assert left["limit"] == 2
    masks = np.array([mask for mask, _, _ in left["plans"]])
    assert masks[:, :2].sum(axis=1).max() == 1
    assert masks[:, 2:].sum(axis=1).max() == 1
    assert masks.sum(axis=1).max() == 2
    policy = Policy(**SPIKES)
    again = trimtab.replay(left["norms"], policy, seen=left["seen"], parts=[(0, 1), (2, 3)])
    assert np.array_equal(again.high, masks)
    assert again.limits.max_high == 2
    assert not np.array_equal(trimtab.replay(left["norms"], policy, seen=left["seen"]).high, masks)


def test_stages_that_use_a_name_twice_say_their_number(runs: Runs) -> None:
    for result in runs.of(2, "pipeline"):
        assert result["names"] == ("stage0.0", "stage1.0")


def test_a_quota_needs_stages() -> None:
    with pytest.raises(TrimtabError, match=r"quota must be None"):
        Controller(build(), Policy(**SPIKES), quota="stage")
    with pytest.raises(TrimtabError, match=r"init_process_group first"):
        Controller(build(), Policy(**SPIKES), stage=0)


@pytest.mark.parametrize(
    ("chains", "wanted"),
    [
        ([["a", "b"], ["a", "b"]], "ab"),
        ([["a", "b"], ["c", "d"]], "abcd"),
        ([["a", "e0", "e1", "z"], ["a", "e2", "z"]], ["a", "e0", "e1", "e2", "z"]),
        ([["a", "b"], ["b", "a"]], "ab"),
        ([["b"], ["a", "b", "c"], []], "abc"),
    ],
)
def test_units_of_all_ranks_come_in_the_order_of_the_whole_model(chains: list, wanted: Any) -> None:
    assert merged(chains) == list(wanted)
