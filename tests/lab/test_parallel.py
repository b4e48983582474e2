# SPDX-License-Identifier: Apache-2.0
"""Several ranks: one rank and N share a run to rounding, with equal decisions on all; one folder is written; a
checkpoint continues on any number of ranks, and is safe to read from a stranger; when a rank fails, all end and the
first error has its number. Real gloo processes, started once per world size, run many cases."""

import json
import multiprocessing
import os
import pickle
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comm.ranks import in_ranks
from many_runs import CASES, DELAYED, EXPERTS, KINDS, failing, interrupted, settings, watched, work

from trimtab.errors import TrimtabError
from trimtab.lab import checkpoint, dcp, parallel
from trimtab.lab.config import Config
from trimtab.lab.evaluate import evaluate_run
from trimtab.lab.parallel import World
from trimtab.lab.subject import load_subject
from trimtab.lab.train import train
from trimtab.report.read import read_run

BOTH = [(kind, name) for kind in KINDS for name in CASES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def two(folder: Path, small: dict[str, Any]) -> list[dict[Any, Any]]:
    """What each of two ranks has seen of every case."""
    (folder / "meet2").mkdir()
    return in_ranks(2, work, folder / "meet2", small, folder / "two", None)


@pytest.fixture(scope="module")
def three(folder: Path, small: dict[str, Any], two: Any) -> list[dict[Any, Any]]:
    """Three ranks that continue what two have begun."""
    (folder / "meet3").mkdir()
    return in_ranks(3, work, folder / "meet3", small, folder / "three", folder / "two")


@pytest.fixture(scope="module")
def one(folder: Path, small: dict[str, Any]) -> Any:
    """One process's run of a case, cut into the parts that `ranks` ranks would take."""
    found: dict[Any, dict[str, Any]] = {}

    def run(name: str, case: dict[str, Any], ranks: int) -> dict[str, Any]:
        if (name, ranks) not in found:
            given = settings(small, case)
            given["split"] = given.get("split", 1) * ranks
            found[name, ranks] = watched(given, folder / f"one {ranks}" / name)
        return found[name, ranks]

    return run


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def close(found: Any, wanted: Any, rtol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.array(found, float), np.array(wanted, float), rtol=rtol)


# One rank and N


@pytest.mark.parametrize(("kind", "name"), BOTH)
def test_two_ranks_are_one_that_takes_their_parts_in_turn(two: Any, one: Any, kind: str, name: str) -> None:
    """A sum of two has no order. Sums of more, and norms of pieces, round otherwise, and quantizers make more of it."""
    wanted, found = one(name, CASES[name], 2), two[0][kind, name]
    exact = not {"accumulate", "clip", "guard"} & set(CASES[name])
    close(found["losses"], wanted["losses"], 1e-6 if exact else 2e-4)
    close(found["evaluated"], wanted["evaluated"], 1e-4)
    assert np.array_equal(found["plans"], wanted["plans"])
    assert len(set(found["losses"])) == CASES[name].get("steps", 6)


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k in KINDS for n in ("tokens", "accumulated, clipped")])
def test_two_ranks_are_one_where_scales_are_per_token(two: Any, one: Any, kind: str, name: str) -> None:
    wanted, found = one(name, CASES[name], 1), two[0][kind, name]
    close(found["losses"], wanted["losses"], 1e-4)
    assert np.array_equal(found["plans"], wanted["plans"])


@pytest.mark.parametrize(("kind", "name"), BOTH)
def test_all_ranks_decide_and_report_the_same_bits(two: Any, kind: str, name: str) -> None:
    first, second = (ranks[kind, name] for ranks in two)
    assert first["losses"] == second["losses"]
    assert first["evaluated"] == second["evaluated"]
    assert np.array_equal(first["plans"], second["plans"])
    assert np.array_equal(list(first["summary"].values()), list(second["summary"].values()), equal_nan=True)


def test_the_cases_are_what_they_say(folder: Path, two: Any) -> None:
    """Somebody runs high, a batch is run again, a step is skipped: else nothing was shared."""
    assert np.any(two[0]["ddp", "tokens"]["plans"])
    assert len(read_run(folder / "two" / "fsdp2" / "fault").trace.steps) > 6  # type: ignore[union-attr]
    broken = [line for line in lines(folder / "two" / "ddp" / "not finite") if line.get("grad_norm", 0) is None]
    assert [line["step"] for line in broken] == [3, 4]
    assert any(line.get("skipped") for line in lines(folder / "two" / "fsdp2" / "skipped, off"))
    assert any(line.get("clipped") for line in lines(folder / "two" / "fsdp2" / "guards"))


def test_experts_that_get_no_token_on_some_rank_train(two: Any, one: Any) -> None:
    close(two[0]["ddp", "experts"]["losses"], one("experts", EXPERTS, 2)["losses"], 1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_reduced_once_for_all_micro_batches(two: Any, kind: str) -> None:
    for ranks in two:
        assert ranks[kind, "reductions"]
        assert set(ranks[kind, "reductions"].values()) == {1}
        assert kind == "ddp" or len(ranks[kind, "reductions"]) == 3  # two blocks and the rest


def test_fsdp2_holds_a_piece_of_each_weight(two: Any) -> None:
    whole = [ranks["ddp", "tokens"]["weights"] for ranks in two]
    pieces = [ranks["fsdp2", "tokens"]["weights"] for ranks in two]
    assert whole == [sum(pieces)] * 2
    assert max(pieces) < 0.6 * whole[0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_linears_remember_is_the_same_on_all_ranks(two: Any, one: Any, kind: str) -> None:
    """Delayed scales: the largest of all ranks is that of the whole batch, but for the first step's."""
    first, second = (ranks[kind, "delayed"] for ranks in two)
    wanted = one("delayed", DELAYED, 1)["paths"]
    for name, memory in first["paths"].items():
        for key, value in memory.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(second["paths"][name][key])), (name, key)
            assert torch.as_tensor(value).shape == torch.as_tensor(wanted[name][key]).shape
        assert memory["input_count"] == wanted[name]["input_count"]
        here, there = (m["input_amax"].numpy()[:4] for m in (memory, wanted[name]))
        close(here[:1], there[:1], 1e-6 if name == "blocks.0.attn.q" else 0.1)
    (here,), (there,) = (ranks[kind, "stuck"]["captured"]["captured"].values() for ranks in two)
    assert here is not None
    assert here == there
    for ranks in two:
        draws = {memory["draws"] for memory in ranks[kind, "random rounding"]["paths"].values()}
        assert draws <= set(range(0, 25, 8))  # eight forwards a step, over both ranks


# The run folder


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_writes_and_the_folder_says_how_many_there_were(folder: Path, two: Any, kind: str) -> None:
    run = folder / "two" / kind / "tokens"
    assert {path.name for path in run.iterdir()} == {"run.json", "metrics.jsonl", "trace.arrow", "checkpoints"}
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000004", "step_000006"]
    config = read_run(run).config
    assert (config["parallel"], config["hardware"]["ranks"]) == (kind, 2)
    assert [line["step"] for line in lines(run) if "loss" in line] == list(range(1, 7))
    assert [line["loss"] for line in lines(run) if "loss" in line] == two[0][kind, "tokens"]["losses"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_ranks_is_evaluated_and_diagnosed_without_them(
    folder: Path, two: Any, one: Any, kind: str, small: dict[str, Any]
) -> None:
    run = folder / "two" / kind / "tokens"
    one("tokens", CASES["tokens"], 2)
    here, there = (evaluate_run(path, ("4-4-16",)) for path in (run, folder / "one 2" / "tokens"))
    close([score.loss for score in here.scores], [score.loss for score in there.scores], 1e-5)
    assert load_subject(run / "checkpoints" / "step_000004", small["data"], batches=1, device="cpu").step == 4


# Checkpoints


@pytest.mark.parametrize(("before", "kind"), [(a, b) for a in KINDS for b in KINDS])
def test_two_ranks_continue_as_three(two: Any, three: Any, before: str, kind: str) -> None:
    wanted = two[0][before, "spam"]
    for ranks in three:
        close(ranks[before, kind]["losses"], wanted["losses"][4:], 3e-3)  # fp8 scales are of 4 sequences, and were of 6
        assert len(set(ranks[before, kind]["losses"])) == 2
    close(three[0][before, kind]["losses"][0], wanted["losses"][4], 2e-4)  # the first step from the same weights


@pytest.mark.parametrize("after", ["none", "ddp", "fsdp2"])
@pytest.mark.parametrize("before", KINDS)
def test_two_ranks_continue_as_one(folder: Path, two: Any, before: str, after: str) -> None:
    """With the parts that two ranks took, one continues them to rounding: moments, clocks and plans are all there."""
    run = interrupted(folder / "two" / before / "spam", folder / f"{before} as one {after}")
    stored = json.loads((run / "run.json").read_text())
    stored["config"]["split"] = 2
    (run / "run.json").write_text(json.dumps(stored))
    rest = run / "checkpoints" / "step_000004" / "rest.pt"
    state = torch.load(rest, weights_only=True)
    state["config"]["split"] = 2
    torch.save(state, rest)
    found = watched({"parallel": after}, run, resume=True)
    close(found["losses"], two[0][before, "spam"]["losses"][4:], 1e-6)
    assert np.array_equal(found["plans"], two[0][before, "spam"]["plans"][4:])
    assert [line["step"] for line in lines(run) if "loss" in line] == list(range(1, 7))
    suffix = ".pt" if after == "none" else ""
    assert (run / "checkpoints" / f"step_000006{suffix}").exists()


@pytest.fixture
def alone(tmp_path: Path, small: dict[str, Any]) -> Path:
    """A run of one rank whose checkpoints are folders, as it was after four of six steps."""
    run = tmp_path / "whole"
    train({**settings(small, CASES["spam"]), "parallel": "ddp"}, run)
    return interrupted(run, tmp_path / "run")


def test_one_rank_needs_no_torchrun_and_resumes_bit_for_bit(alone: Path, tmp_path: Path) -> None:
    assert not torch.distributed.is_initialized()
    train({}, alone, resume=True)
    for key in ("loss", "eval_loss_high"):
        assert [line.get(key) for line in lines(alone)] == [line.get(key) for line in lines(tmp_path / "whole")]


def test_a_file_of_one_process_is_continued_by_ddp(tmp_path: Path, small: dict[str, Any]) -> None:
    given = settings(small, CASES["tokens"])
    train(given, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "checkpoints" / "step_000006.pt").unlink()
    train({"parallel": "ddp"}, tmp_path / "b", resume=True)
    assert [line.get("loss") for line in lines(tmp_path / "a")] == [line.get("loss") for line in lines(tmp_path / "b")]
    assert sorted(p.name for p in (tmp_path / "b" / "checkpoints").iterdir()) == ["step_000004.pt", "step_000006"]


class Bomb:
    """A pickle that leaves a mark where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_a_strangers_metadata_is_never_opened(alone: Path, tmp_path: Path) -> None:
    bad = alone / "checkpoints" / "step_000004" / ".metadata"
    assert bad.is_file()  # DCP has written it, and other tools read it
    bad.write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    evaluate_run(alone, ())
    train({}, alone, resume=True)
    assert not (tmp_path / "mark").exists()
    pickle.loads(pickle.dumps(Bomb(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["rest.pt", "__0_0.distcp"])
def test_a_strangers_pickle_is_refused(alone: Path, tmp_path: Path, name: str) -> None:
    bad = alone / "checkpoints" / "step_000004" / name
    torch.save(Bomb(tmp_path / "mark"), tmp_path / "bomb.pt")
    if name == "rest.pt":
        shutil.copy(tmp_path / "bomb.pt", bad)
    else:
        index = torch.load(bad.with_name("rest.pt"), weights_only=True)["index"]["model.norm.weight"]["chunks"][0]
        assert index[2] == name
        length = (tmp_path / "bomb.pt").stat().st_size
        bad.write_bytes((tmp_path / "bomb.pt").read_bytes())
        state = torch.load(bad.with_name("rest.pt"), weights_only=True)
        for entry in state["index"].values():
            for chunk in entry["chunks"]:
                chunk[3:] = [0, length]
        torch.save(state, bad.with_name("rest.pt"))
    with pytest.raises((TrimtabError, pickle.UnpicklingError)):
        evaluate_run(alone, ())
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("place", ["../../../secret.pt", "/etc/passwd", ".metadata", "rest.pt"])
def test_an_index_names_data_files_of_its_folder_alone(alone: Path, place: str) -> None:
    rest = alone / "checkpoints" / "step_000004" / "rest.pt"
    state = torch.load(rest, weights_only=True)
    state["index"]["model.norm.weight"]["chunks"][0][2] = place
    torch.save(state, rest)
    with pytest.raises(TrimtabError, match="is no data file of the folder"):
        dcp.read(rest.parent)


def test_a_torn_folder_falls_back_to_the_one_before(tmp_path: Path, small: dict[str, Any]) -> None:
    train({**settings(small, CASES["tokens"]), "parallel": "fsdp2"}, tmp_path)
    (tmp_path / "checkpoints" / "step_000006" / "__0_0.distcp").unlink()
    found = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None
    assert (found[0].name, found[1]["step"]) == ("step_000004", 4)


def test_a_folder_is_whole_or_absent_and_two_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, rest = {"model.w": torch.ones(3)}, {"step": 1, "optimizer": {}, "offsets": {}, "config": {}}
    for step in (1, 2, 3):
        checkpoint.save_together(tmp_path, step, tensors, rest, World())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000003"]
    (tmp_path / "step_000009.tmp").mkdir()  # what a killed one has left
    monkeypatch.setattr(dcp.torch, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save_together(tmp_path, 4, tensors, rest, World())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000003"]


# What is refused


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"batch": 15}, r"divisible by 2 ranks, got 15: set batch=16"),
        ({"batch": 9, "split": 3}, r"divisible by 2 ranks times split=3, got 9: set batch=12"),
        ({"selection": "oracle"}, "selection=oracle on several: set parallel=none"),
        ({"num_experts": 4, "parallel": "fsdp2"}, "num_experts=4: set parallel=ddp"),
        ({"device": "cuda:1"}, "got device=cuda:1: set device=cuda"),
    ],
)
def test_what_ranks_cannot_share_is_refused(given: dict[str, Any], match: str) -> None:
    config = Config.from_dict({"parallel": "ddp", **given})
    parallel.check(config, World())
    with pytest.raises(TrimtabError, match=match):
        parallel.check(config, World(0, 2))


def test_torchrun_without_parallel_is_refused(
    tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrimtabError, match="torchrun has started 2 ranks, got parallel=none: set parallel=ddp"):
        train(small, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(TrimtabError, match="RANK and WORLD_SIZE are numbers"):
        train(small, tmp_path / "run")


# When a rank fails


def ended(tmp_path: Path, how: str, given: dict[str, Any], num: int = 2) -> tuple[list[Any], list[int | None], float]:
    """What each rank raised, how each process ended, and how long the last took from the first end on."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    args = [(rank, num, port, how, given, tmp_path / "run") for rank in range(num)]
    ranks = [context.Process(target=failing, args=each) for each in args]
    for process in ranks:
        process.start()
    multiprocessing.connection.wait([process.sentinel for process in ranks], 60)
    began = time.monotonic()
    for process in ranks:
        process.join(30)
        process.kill()
    told = [tmp_path / f"{rank}.pt" for rank in range(num)]
    return (
        [torch.load(path, weights_only=True) if path.exists() else None for path in told],
        [process.exitcode for process in ranks],
        time.monotonic() - began,
    )


def test_a_rank_that_fails_ends_all_and_its_error_has_its_number(tmp_path: Path, small: dict[str, Any]) -> None:
    given = {**settings(small, CASES["tokens"]), "parallel": "ddp"}
    told, codes, seconds = ended(tmp_path, "raises", given, num=3)
    assert told[1] == {"type": "TrimtabError", "text": "a rule, got a value: a remedy", "notes": ["on rank 1 of 3"]}
    for other in (told[0], told[2]):
        assert other["type"] == "RankError"
        assert other["text"] == "rank 1 of 3 failed first: TrimtabError: a rule, got a value: a remedy"
    assert codes == [3, 3, 3]
    assert seconds < 5
    written = [line["step"] for line in lines(tmp_path / "run") if "loss" in line]
    assert written == [1, 2]  # its files were closed


def test_a_rank_that_does_not_look_up_is_ended(tmp_path: Path, small: dict[str, Any]) -> None:
    told, codes, seconds = ended(tmp_path, "stuck", {**settings(small, CASES["tokens"]), "parallel": "ddp"})
    assert told[1]["notes"] == ["on rank 1 of 2"]
    assert (told[0], codes) == (None, [1, 3])
    assert seconds < 8


def test_weights_that_one_rank_finds_broken_are_saved_by_nobody(tmp_path: Path, small: dict[str, Any]) -> None:
    told, _, _ = ended(tmp_path, "poisoned", {**settings(small, CASES["tokens"]), "parallel": "fsdp2"})
    assert sorted(each["type"] for each in told) == ["RankError", "TrimtabError"]
    assert all("the weights are not finite at step 4" in each["text"] for each in told)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_a_setting_that_is_wrong_on_all_is_raised_by_one(tmp_path: Path, small: dict[str, Any]) -> None:
    given = {**settings(small, CASES["tokens"]), "parallel": "fsdp2", "optimizer": "osp"}
    told, _, _ = ended(tmp_path, "nothing", given)
    assert sorted(each["type"] for each in told) == ["RankError", "TrimtabError"]
    assert all("Muon needs whole matrices" in each["text"] for each in told)
    assert not (tmp_path / "run").exists()


def test_sigterm_unwinds_as_an_interrupt_does(tmp_path: Path, small: dict[str, Any]) -> None:
    told, _, _ = ended(tmp_path, "terminated", {**settings(small, CASES["tokens"]), "parallel": "ddp"})
    assert told[1]["type"] == "KeyboardInterrupt"
    assert told[0]["text"] == "rank 1 of 2 failed first: KeyboardInterrupt"


# The command


def test_torchrun_trains_and_shows_an_error_once(tmp_path: Path, small: dict[str, Any]) -> None:
    given = {key: small[key] for key in ("data", "device", "seq")} | {"steps": 4, "batch": 4, "recipe": "int8"}

    def torchrun(**more: object) -> Any:
        sets = [part for key, value in {**given, **more}.items() for part in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "trimtab", "train", "--out", str(tmp_path / "run"), "--force", *sets]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)

    done = torchrun(parallel="fsdp2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("4 steps, loss") == done.stdout.count("held-out loss") == 1
    assert read_run(tmp_path / "run").config["hardware"]["ranks"] == 2
    train(given, tmp_path / "one")
    here, there = ([line["loss"] for line in lines(tmp_path / run) if "loss" in line] for run in ("run", "one"))
    close(here, there, 1e-4)
    wrong = torchrun(parallel="ddp", optimizer="lion")
    assert wrong.returncode != 0
    assert wrong.stderr.count("optimizer must be one of adamw") == 1, wrong.stderr
    assert "error: on rank" in wrong.stderr
