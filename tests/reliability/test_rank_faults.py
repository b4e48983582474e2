# SPDX-License-Identifier: Apache-2.0
"""Ranks that fail: killed, slow, poisoned, or never there. Nobody waits longer than was said, the plans of the ranks do
not part, and the message has the number of the rank. Real gloo processes."""

import json
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab import Controller, Policy
from trimtab.comm import GreedyLore
from trimtab.control import ranks
from trimtab.lab import checkpoint, meeting
from trimtab.lab.parallel import World
from trimtab.lab.run import Run, StepInfo
from trimtab.lab.task import Pretraining
from trimtab.lab.train import train

PRELOAD = ["torch", "torch.distributed.tensor", "torch.nn.parallel", "torch._dynamo", "trimtab.comm.greedylore"]


def in_processes(work: Callable[..., None], num: int, folder: Path, *args: Any) -> tuple[list[Any], float]:
    """Run `work(rank, num, port, folder, ...)` in processes; what each has left in its file, and how long all took."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    multiprocessing.set_forkserver_preload(PRELOAD)
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=work, args=(rank, num, port, folder, *args)) for rank in range(num)]
    for process in processes:
        process.start()
    ready = [folder / f"{rank}.ready" for rank in range(num)]
    until = time.monotonic() + 60
    while not all(path.exists() for path in ready) and time.monotonic() < until:
        time.sleep(0.05)
    began = time.monotonic()
    for process in processes:
        process.join(60)
        process.kill()
        process.join()
    took = time.monotonic() - began
    told = [folder / f"{rank}.json" for rank in range(num)]
    return [json.loads(path.read_text()) if path.exists() else None for path in told], took


def leave(folder: Path, rank: int, found: Any) -> None:
    (folder / f"{rank}.json").write_text(json.dumps(found))


def raised(error: BaseException) -> dict[str, Any]:
    return {"type": type(error).__name__, "text": str(error), "notes": getattr(error, "__notes__", [])}


# A run of the lab


def at_step(number: int, act: Callable[[Run], None]) -> None:
    """Do something before a step."""
    step = Run.train_step

    def train_step(self: Run) -> StepInfo:
        if self.step + 1 == number:
            act(self)
        return step(self)

    Run.train_step = train_step


def killed(_: Run) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def poisoned(steps: tuple[int, ...]) -> None:
    """The loss of this rank is NaN in some steps."""
    loss = Pretraining.loss
    calls = [0]

    def bad(self: Any, net: Any, inputs: Any, targets: Any) -> Any:
        found = loss(self, net, inputs, targets)
        calls[0] += torch.is_grad_enabled()
        return found * float("nan") if torch.is_grad_enabled() and calls[0] in steps else found

    Pretraining.loss = bad  # type: ignore[method-assign]


FAULTS: dict[str, tuple[int, Callable[[], None]]] = {
    "killed": (1, lambda: at_step(3, killed)),
    "first killed": (0, lambda: at_step(3, killed)),
    "too slow": (1, lambda: at_step(3, lambda run: time.sleep(60))),
    "slow, then poisoned": (1, lambda: (at_step(2, lambda run: time.sleep(1.0)), poisoned((3, *range(5, 99))))[0]),
}
"""Whom it meets, and how."""


def one_rank(rank: int, num: int, port: int, folder: Path, how: str, given: dict[str, Any]) -> None:
    """One rank, started as torchrun starts it."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    meeting.LINGER_SECONDS = 1.0
    meeting.LEAVE_SECONDS = 2.0 if how == "too slow" else 20.0  # only the first is sure not to leave by itself
    meeting.TIMEOUT = timedelta(seconds=4 if how == "too slow" else 60)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trimtab").addHandler(handler)
    plans: list[list[bool]] = []
    step = Run.train_step

    def kept(self: Run) -> StepInfo:
        info = step(self)
        plans.append(info.plan.mask.tolist())
        return info

    Run.train_step = kept
    whom, fault = FAULTS[how]
    if rank == whom:
        fault()
    (folder / f"{rank}.ready").touch()
    try:
        train(given, folder / "run")
        leave(folder, rank, {"plans": plans, "said": said})
    except BaseException as error:
        leave(folder, rank, raised(error) | {"plans": plans, "said": said})
        os._exit(3)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    text = tmp_path_factory.mktemp("data") / "words.txt"
    text.write_text(" ".join(f"word{i * i % 89}" for i in range(1500)), encoding="utf-8")
    given = {"steps": 9, "batch": 6, "seq": 8, "eval_batches": 1, "checkpoint_every": 2, "threads": 1, "recipe": "int8"}
    policy = {"max_high": 3, "alpha": 1.05, "alpha_warmup": None, "window": 2, "max_nonfinite": 3}
    return {"data": str(text), "device": "cpu", "parallel": "ddp", "policy": policy, **given}


@pytest.mark.parametrize(("how", "num", "gone"), [("killed", 3, 1), ("first killed", 2, 0)])
def test_a_killed_rank_is_named_and_ends_all(
    tmp_path: Path, small: dict[str, Any], how: str, num: int, gone: int
) -> None:
    told, seconds = in_processes(one_rank, num, tmp_path / "ranks", how, small)
    assert seconds < 40  # of steps, and of the two seconds in which the ranks are called, and not the time-out
    assert told[gone] is None
    cause = f"rank {gone} of {num} ended without an error of its own (killed? out of memory?)"
    assert all(cause in each["text"] for rank, each in enumerate(told) if rank != gone), told
    assert sum(each["type"] == "ConnectionResetError" for each in told if each) == 1  # the others only stop
    assert checkpoint.latest(tmp_path / "ranks" / "run" / "checkpoints")[1]["step"] == 2  # type: ignore[index]


def test_a_rank_is_not_ended_while_it_lingers_for_others_to_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    """It left in time: the timer that ends those who do not runs on only after the lingering."""
    monkeypatch.setattr(meeting, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(meeting, "LINGER_SECONDS", 1.0)
    monkeypatch.setattr(meeting, "LEAVE_SECONDS", 0.6)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    line = meeting.Line(store, World(1, 2))
    assert meeting.Line(store, World(0, 2)).tell(ValueError("broken"))
    line.listen()
    first = line.tell(ConnectionResetError())
    line.hang_up()
    assert not first
    assert not ended
    assert "rank 0 of 2 failed first: ValueError: broken" in line.said()


def test_a_rank_whose_torchrun_was_killed_before_they_met_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not after the ten minutes in which other ranks might come; killed later, test_kill.py."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    for name, value in {**where, "RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "PATIENCE", timedelta(seconds=0.2))
    began = time.monotonic()
    with pytest.raises(ConnectionRefusedError, match="torchrun has ended") as caught, meeting.meet("ddp"):
        pass
    assert caught.value.__notes__ == ["on rank 1 of 2"]
    assert meeting.shows(caught.value)
    assert time.monotonic() - began < 20


def test_a_rank_that_keeps_others_waiting_is_named_after_the_time_out(tmp_path: Path, small: dict[str, Any]) -> None:
    told, seconds = in_processes(one_rank, 2, tmp_path / "ranks", "too slow", small)
    assert "rank 1 of 2 kept the others waiting for 4 s" in told[0]["text"]
    assert told[1] is None  # it did not look up, and was ended
    assert 4 < seconds < 30  # and not the minute that it slept


def test_a_slow_rank_is_waited_for_and_a_poisoned_one_is_named_and_skipped_by_all(
    tmp_path: Path, small: dict[str, Any], rounds: Callable[[int, int], int]
) -> None:
    """Slow in step 2, poisoned in step 3, and for ever from step 5 on: two steps are dropped, the third ends all."""
    for parallel in ("ddp", "fsdp2")[: rounds(1, 2)]:
        folder = tmp_path / parallel
        told, seconds = in_processes(one_rank, 2, folder, "slow, then poisoned", {**small, "parallel": parallel})
        assert sorted(each["type"] for each in told) == ["NonFiniteError", "RankError"]
        assert all("3 steps in a row (max_nonfinite=3), last at step 7" in each["text"] for each in told)
        assert told[0]["plans"] == told[1]["plans"]
        assert len(told[0]["plans"]) == 6
        named = [line for line in told[0]["said"] if "rank" in line]
        assert named == [f"step {step}: the loss is not finite on rank 1" for step in (3, 5)]
        assert seconds < 40
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "lr" in line and line["loss"] is None] == [3, 5, 6]
        found = checkpoint.latest(folder / "run" / "checkpoints")
        assert found is not None
        assert found[1]["step"] == 6
        assert all(bool(weight.isfinite().all()) for weight in checkpoint.weights(*found).values())


# A plain loop


def build() -> Any:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8))
    trimtab.convert_(net, "int8", head=nn.Linear(1, 1))
    return net


SPIKES: dict[str, Any] = {"alpha": 1.5, "alpha_warmup": None, "beta": None, "max_high": 1}


def attempt(act: Callable[[], Any]) -> tuple[dict[str, Any], float]:
    """What a call raised, and how long it took."""
    began = time.monotonic()
    try:
        act()
    except Exception as error:
        return raised(error), time.monotonic() - began
    return {}, time.monotonic() - began


def loop(rank: int, steps: int, poison: tuple[int, int] = (-1, -1), **late: float) -> dict[str, Any]:
    """DDP with GreedyLore under control; `poison` is (rank, step), `late` seconds before a step's controller."""
    model = DistributedDataParallel(build())
    compressed = GreedyLore(rank=2, every=4, start=2, compress=lambda name, p: p.dim() > 1)
    compressed.attach(model)
    controller = Controller(model, Policy(**SPIKES))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator, plans, bad = torch.Generator().manual_seed(rank), [], []
    for step in range(steps):
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        (loss * (float("nan") if (rank, step) == poison else 50.0 if step == 6 else 1.0)).backward()
        time.sleep(late.get(f"step{step}", 0.0) if rank == 1 else 0.0)
        plan = controller.step()
        plans.append(plan.mask.tolist())
        bad.append(plan.nonfinite)
        optimizer.step()
        optimizer.zero_grad()
    owed = compressed.state_dict()["state"]
    kept = [*model.state_dict().values(), *(matrix["error"] for matrix in owed.values())]
    kept += [v for entry in optimizer.state.values() for v in entry.values()]
    kept += list(controller.state_dict()["history"].values())
    return {"plans": plans, "bad": bad, "finite": all(bool(v.isfinite().all()) for v in kept), "parts": len(kept)}


def plain(rank: int, num: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    (folder / f"{rank}.ready").touch()
    dist.init_process_group(
        "gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=num, timeout=timedelta(seconds=60)
    )
    found: dict[str, Any] = {}
    for only in (0, 1):
        model = DistributedDataParallel(build())
        if rank == only:
            ranks.PATIENCE = timedelta(seconds=1)
            found["alone"] = attempt(lambda model=model: Controller(model, Policy(**SPIKES)))
            ranks.PATIENCE = timedelta(seconds=60)
        else:
            time.sleep(1.5)
        dist.barrier()
        found[f"together after {only}"] = attempt(lambda model=model: Controller(model, Policy(**SPIKES)))
    found["poisoned"] = loop(rank, 10, (1, 4))
    found["late"] = loop(rank, 10, (1, 4), step3=1.0)
    lonely = build()
    hasty: Any = dist.new_group(timeout=timedelta(seconds=3))
    found["time-out"] = ranks._time_out(hasty).total_seconds()
    controller = Controller(lonely, Policy(**SPIKES), process_group=hasty)
    lonely(torch.ones(2, 8)).sum().backward()
    if rank == 0:  # whose norms the others wait for
        time.sleep(5)
        leave(folder, rank, found)
    else:
        found["too late"] = attempt(controller.step)
        leave(folder, rank, found)
        time.sleep(2)
    os._exit(0)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    told, _ = in_processes(plain, 3, tmp_path_factory.mktemp("plain") / "ranks")
    assert all(told)
    return told


def test_a_controller_that_others_do_not_make_names_them_in_time(three: list[dict[str, Any]]) -> None:
    """Also where it is the first rank that is missing; what is then made by all is made."""
    for rank, absent in ((0, "ranks 1, 2"), (1, "ranks 0, 2")):
        error, seconds = three[rank]["alone"]
        assert error["type"] == "TrimtabError"
        assert f"got none from {absent} within 1 s: make it on every rank" in error["text"]
        assert 0.9 < seconds < 20
    assert "alone" not in three[2]
    for found in three:
        assert found["together after 0"][0] == found["together after 1"][0] == {}


def test_one_rank_s_nan_is_skipped_by_all_and_plans_stay_equal(three: list[dict[str, Any]]) -> None:
    for name in ("poisoned", "late"):
        found = [each[name] for each in three]
        assert all(each["bad"] == [step == 4 for step in range(10)] for each in found)
        assert all(each["finite"] for each in found)
        assert all(each["plans"] == found[0]["plans"] for each in found)
        assert np.any(found[0]["plans"])
    assert three[0]["late"] == three[0]["poisoned"]  # a slow rank changes nothing


def test_a_step_waits_no_longer_than_the_group_s_time_out(three: list[dict[str, Any]]) -> None:
    for rank in (1, 2):
        error, seconds = three[rank]["too late"]
        assert "3000ms" in error["text"]
        assert 2.5 < seconds < 20
        assert three[rank]["time-out"] == 3  # which a controller's making keeps, too, where it is the shorter


@pytest.fixture
def first_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a second process: a store, and two ranks of which one is here."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


@pytest.mark.usefixtures("first_of_two")
def test_who_waits_says_so_meanwhile(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "REMINDER", timedelta(seconds=0.3))
    error, seconds = attempt(lambda: ranks.wait_for_all((0, 1), timedelta(seconds=0.5)))
    assert "got none from rank 1 within 0.5 s" in error["text"]
    assert seconds < 2
    assert [record.getMessage() for record in caplog.records] == ["rank 0 waits for rank 1 to make the controller too"]


@pytest.mark.usefixtures("first_of_two")
def test_who_waits_hears_a_signal() -> None:
    """Where a rank is killed before it makes its controller, torchrun ends the others by one."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            ranks.wait_for_all((0, 1), timedelta(seconds=10))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 5


def interrupted(rank: int, num: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    (folder / f"{rank}.ready").touch()
    dist.init_process_group(
        "gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=num, timeout=timedelta(seconds=60)
    )
    model = build()
    controller = Controller(model, Policy(**SPIKES), process_group=dist.group.WORLD)
    for step in range(9):
        model(torch.ones(2, 8)).sum().backward()
        if (rank, step) == (0, 5):
            os.kill(os.getpid(), signal.SIGKILL)
        said, seconds = attempt(controller.step)
        if said:
            leave(folder, rank, [step, said, seconds])
            os._exit(0)


def test_a_killed_rank_is_noticed_at_once(tmp_path: Path) -> None:
    told, _ = in_processes(interrupted, 2, tmp_path / "ranks")
    step, said, seconds = told[1]
    assert step == 5
    assert said["text"]
    assert seconds < 20  # and not the minute of the group
