# SPDX-License-Identifier: Apache-2.0
"""What the ranks of `test_parallel.py` do: runs of a few steps in gloo processes, and what each rank saw of them."""

import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.nn.parallel import DistributedDataParallel

from trimtab.errors import TrimtabError
from trimtab.lab import meeting
from trimtab.lab.config import Config
from trimtab.lab.parallel import World
from trimtab.lab.run import Run, Silent, StepInfo
from trimtab.lab.train import train
from trimtab.linear.linear import path_state
from trimtab.shards import local

KINDS = ("ddp", "fsdp2")
FAULT = {"faults": "blocks.1.mlp.up:grad_scale:start=3,width=2,size=64", "policy": {"replay_step": 4.0}}

CASES: dict[str, dict[str, Any]] = {
    "tokens": {"recipe": "int8", "checkpoint_every": 4},
    "accumulated, clipped": {"recipe": "int8", "accumulate": 2, "clip": 0.5, "weight_decay": 0.1},
    "fault": {"recipe": "fp8", "accumulate": 2, **FAULT},
    "not finite": {"recipe": "fp8", "faults": "blocks.1.mlp.up:nan:start=3,width=2"},
    "random rounding": {"recipe": "nvfp4", "accumulate": 2, "split": 2, "steps": 3},
    "spam": {"recipe": "fp8", "optimizer": "stable_spam", "optimizer_options": {"density": 0.5, "reset_every": 3}}
    | {"checkpoint_every": 4},
    "guards": {"recipe": "int8", "guard": "clip_flagged", "mode": "observe", "path": "low", "transform": "adagc"},
    "skipped, off": {"recipe": "int8", "guard": "skip_step", "mode": "off", "path": "low", "clip": 0.05}
    | {"guard_options": {"warmup": 2, "window": 4, "sigmas": 0.5}},
}
"""Runs that N ranks and one must share."""
EXPERTS = {"recipe": "int8", "num_experts": 4, "top_k": 1, "unit": "expert", "accumulate": 2}
DELAYED = {"recipe": "fp8_delayed"}
STUCK = {"recipe": "fp8", "steps": 3, "mode": "observe", "path": "low"}
STUCK |= {"faults": "blocks.1.attn.v:stuck_scale:start=2,width=2,size=2"}


def settings(small: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run of six steps, with a checkpoint at the end."""
    base = {"steps": 6, "batch": 12, "seq": 8, "eval_batches": 3, "checkpoint_every": 0}
    return {**small, **base, **case, "policy": {**small["policy"], **case.get("policy", {})}}


def watched(given: dict[str, Any], out: Path, **options: Any) -> dict[str, Any]:
    """Train, and keep what this very rank has seen: losses, plans and weights."""
    infos: list[StepInfo] = []
    runs: list[Run] = []
    step = Run.train_step

    def keep(run: Run) -> StepInfo:
        infos.append(step(run))
        runs[:] = [run]
        return infos[-1]

    Run.train_step = keep
    try:
        result = train(given, out, **options)
    finally:
        Run.train_step = step
    run = runs[0]
    here = (local(p.detach()).numel() for p in run.model.parameters())
    return {
        "losses": [info.loss for info in infos],
        "plans": [info.plan.mask for info in infos],
        "evaluated": (result.eval_loss_high, result.eval_loss_low),
        "summary": result.summary,
        "paths": path_state(run.model),
        "captured": None if run.faults is None else run.faults.state_dict(),
        "weights": sum(here),
    }


def reductions(given: dict[str, Any], rank: int) -> Counter:
    """How often each bucket of gradients, or each block's, travels in a step of three micro-batches."""
    seen: Counter = Counter()
    run = Run(Config.from_dict({**given, "accumulate": 3}), Silent(), world=World(rank, dist.get_world_size()))
    if isinstance(run.net, DistributedDataParallel):

        def hook(state: None, bucket: dist.GradBucket):  # type: ignore[no-untyped-def]
            seen[bucket.index()] += 1
            return allreduce_hook(None, bucket)  # type: ignore[arg-type]

        run.net.register_comm_hook(None, hook)
        run._backward()
        return seen
    reduce = _fsdp_param_group.foreach_reduce

    def counted(params: Any, *args: Any) -> Any:
        seen[id(params[0])] += 1
        return reduce(params, *args)

    _fsdp_param_group.foreach_reduce = counted
    try:
        run._backward()
    finally:
        _fsdp_param_group.foreach_reduce = reduce
    return seen


def work(rank: int, small: dict[str, Any], out: Path, earlier: Path | None) -> dict[Any, Any]:
    """One rank: every case in both kinds; or, where there are earlier runs, what continues them."""
    found: dict[Any, Any] = {}
    if earlier is not None:
        for kind, before in ((kind, before) for kind in KINDS for before in KINDS):
            where = out / f"{before} as {kind}"
            if rank == 0:
                interrupted(earlier / before / "spam", where)
            dist.barrier()
            found[before, kind] = watched({"parallel": kind}, where, resume=True)
        return found
    for kind in KINDS:
        found[kind, "reductions"] = reductions({**settings(small, CASES["tokens"]), "parallel": kind}, rank)
        for name, case in CASES.items():
            found[kind, name] = watched({**settings(small, case), "parallel": kind}, out / kind / name)
        for name, case in (("delayed", DELAYED), ("stuck", STUCK)):
            found[kind, name] = watched({**settings(small, case), "parallel": kind}, out / kind / name)
    found["ddp", "experts"] = watched({**settings(small, EXPERTS), "parallel": "ddp"}, out / "ddp" / "experts")
    return found


def interrupted(run: Path, where: Path) -> Path:
    """A copy of a finished run as it was when it was killed after its first checkpoint."""
    shutil.copytree(run, where)
    shutil.rmtree(where / "checkpoints" / "step_000006")
    return where


# How ranks fail. Each is called in every rank's process before it trains.


def raises(rank: int) -> None:
    """One rank fails in its third step."""
    step = Run.train_step

    def fail(run: Run) -> StepInfo:
        if run.step == 2:
            raise TrimtabError("a rule, got a value: a remedy")
        return step(run)

    if rank == 1:
        Run.train_step = fail


def stuck(rank: int) -> None:
    """One fails, and another does not look up from what it does."""
    raises(rank)
    step = Run.train_step

    def sleep(run: Run) -> StepInfo:
        if run.step == 2:
            time.sleep(60)
        return step(run)

    if rank == 0:
        meeting.LEAVE_SECONDS = 1.0
        Run.train_step = sleep


def poisoned(rank: int) -> None:
    """A weight that one rank alone holds is not finite when the checkpoint is due."""
    save = Run.save

    def spoil(run: Run) -> None:
        if rank == 1:
            with torch.no_grad():
                run.model.head.weight.to_local()[0, 0] = torch.nan  # type: ignore[operator]
        save(run)

    Run.save = spoil


def terminated(rank: int) -> None:
    """Somebody sends SIGTERM to one rank."""
    step = Run.train_step

    def signalled(run: Run) -> StepInfo:
        if run.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(run)

    if rank == 1:
        Run.train_step = signalled


def nothing(rank: int) -> None:
    """Nobody is harmed, unless by the settings."""


FAILURES: dict[str, Callable[[int], None]] = {f.__name__: f for f in (raises, stuck, poisoned, terminated, nothing)}


def failing(rank: int, num: int, port: int, how: str, given: dict[str, Any], out: Path) -> None:
    """One rank, started as torchrun starts it; it leaves what it raised, and when."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    meeting.LINGER_SECONDS = 1.0
    FAILURES[how](rank)
    try:
        train(given, out)
    except BaseException as error:
        told = {"type": type(error).__name__, "text": str(error), "notes": getattr(error, "__notes__", [])}
        torch.save(told, out.parent / f"{rank}.pt")
        os._exit(3)
