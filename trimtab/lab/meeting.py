# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a run find each other, and how a failure of one ends all of them.

A rank that fails stops in the middle of a step, and the others wait for it in their next collective: with gloo until
its process is gone, with NCCL for ten minutes, and then each reports that a peer was lost. Who reads that log wants the
error that came first. So:

    tell      A rank that fails writes rank and error to a key of the store on which the ranks found each other. The
              first to write is believed; it raises its error, with its rank as a note, and the command line shows it.
    listen    Every rank looks at that key twice a second. Who finds another's error aborts its process group, which
              wakes NCCL (gloo wakes when the failed process ends), and raises `RankError`, which nobody shows.
    leave     Who hears of an error lingers, so that the others hear it too. A rank that has not left `LEAVE_SECONDS`
              after that is ended. One that is stuck without an error ends all after `TIMEOUT`. Where torchrun holds the
              store and both are gone, it was killed: each rank ends, for whoever resumes the run must be alone.
    roll      Where a connection breaks, or SIGTERM comes, and nobody has said why, the ranks are called: who does not
              answer has ended (killed), who answers but waits for nobody is the one that the others waited for.

What is wrong on all ranks, such as a setting, is thereby shown once. SIGTERM, which torchrun sends to the ranks that
are left, unwinds like Ctrl-C, so that files are closed.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from trimtab.errors import RankError, TrimtabError
from trimtab.lab.parallel import World, launched

log = logging.getLogger(__name__)

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for another in one collective."""
PATIENCE = timedelta(seconds=15)
"""How long a rank looks for the store of torchrun, which was there before the ranks; torch may look twice."""
LEAVE_SECONDS = 10.0
"""How long a rank that learns of another's failure may take to leave by itself, lingering not counted."""
LINGER_SECONDS = 2.0
"""How long it stays although it could leave, so that whoever started the ranks sees the one that failed fail first."""
LOOK_SECONDS = 0.5
"""How often a rank looks whether another has failed, or calls the roll."""

_meetings = 0
"""How many have ended in this process: each has its own keys on the store."""


@contextmanager
def meet(kind: str) -> Iterator[World]:
    """Bring the ranks together for as long as this is open; a failure of one ends it for all.

    A process group that exists already is used and left; otherwise one is started from torchrun's environment.
    """
    global _meetings
    world, started = launched(), not dist.is_initialized()
    if kind == "none" and world.size > 1:
        raise TrimtabError(
            f"torchrun has started {world.size} ranks, got parallel=none: set parallel=ddp or parallel=fsdp2"
        )
    if kind != "none" and not started:
        world = World(dist.get_rank(), dist.get_world_size())
    if world.size == 1:
        yield world
        return
    store = _store() if started else distributed_c10d._get_default_store()
    line = Line(store, world)
    with _terminated_as_interrupted(line):
        line.listen()
        try:
            if started:
                _start(store, world)
            yield world
            world.wait()
        except BaseException as error:
            told = line.lost(error)
            mine = line.tell(told)
            with suppress(Exception):
                distributed_c10d._abort_process_group()
            if mine and told is error:
                raise
            raise (told if mine else RankError(line.said())) from error
        else:
            if started:
                dist.destroy_process_group()
        finally:
            line.hang_up()
            _meetings += 1


def shows(error: BaseException) -> bool:
    """Whether this process is the one to show an error: of several ranks, the first that failed."""
    if isinstance(error, RankError):
        return False
    world = launched()
    if world.size == 1 or getattr(error, "__notes__", None):
        return True
    try:  # they have not met yet: mostly a setting that is wrong on all of them
        return Line(_store(timedelta(seconds=LEAVE_SECONDS)), world).tell(error)
    except (RuntimeError, ValueError, OSError):
        return world.leads


class Line:
    """Where a rank tells the others that it has failed; the first who does is believed."""

    def __init__(self, store: Store, world: World) -> None:
        self._world = world
        self._store = PrefixStore(f"trimtab/failure/{_meetings}", store)
        self._ended = threading.Event()
        self._said = ""
        self.terminated = False
        """Whether SIGTERM has come."""

    def tell(self, error: BaseException) -> bool:
        """Say that this rank has failed; whether it was the first. Its error then carries its number."""
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        mine = f"{self._world.rank}\n{text}"
        try:
            found = self._store.compare_set("first", "", mine).decode()
        except (RuntimeError, ValueError):  # the store has gone with its rank
            found = self._said or mine
        self._said = found
        if found != mine:
            self._heard()
            return False
        if not getattr(error, "__notes__", None):
            error.add_note(f"on rank {self._world.rank} of {self._world.size}")
        self._wait_for_others()
        return True

    def lost(self, error: BaseException) -> BaseException:
        """The error to tell: where a connection broke, or torchrun ends all, and nobody has said why, who has gone."""
        broken = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
        if not broken and not self.terminated:
            return error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, for the rank that is to be named
        ended, working = self._roll()
        if self.terminated and not ended:
            return error
        if ended or not working:
            cause = f"{self._named(ended)} ended without an error of its own (killed? out of memory?)"
        else:
            cause = f"{self._named(working)} kept the others waiting for {TIMEOUT.total_seconds():g} s"
        return ConnectionResetError(
            f"{cause}; the run folder is whole up to its last checkpoint, --resume continues it"
        )

    def _roll(self) -> tuple[list[int], list[int]]:
        """Call the roll: ranks that have ended, and ranks that are at work while others wait for them."""
        store, ranks = self._store, range(self._world.size)
        try:
            store.add(f"waited/{self._world.rank}", 1)
            store.set("roll", "called")
            until = time.monotonic() + 4 * LOOK_SECONDS
            while time.monotonic() < until:
                if store.check(["first"]):  # somebody knows more, and is believed
                    return [], []
                time.sleep(LOOK_SECONDS / 5)
            here, waited = ({r for r in ranks if store.add(f"{kind}/{r}", 0)} for kind in ("here", "waited"))
        except (RuntimeError, ValueError):  # the store has gone with the rank that held it
            return ([] if _is_held_by_torchrun() else [0]), []
        return [r for r in ranks if r not in here | waited], [r for r in ranks if r not in waited]

    def _named(self, ranks: list[int]) -> str:
        if not ranks:
            return "another rank"
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {self._world.size}"

    def said(self) -> str:
        """What the first rank that failed has said."""
        rank, _, text = self._said.partition("\n")
        return f"rank {rank} of {self._world.size} failed first: {text}" if rank else "another rank failed first"

    def listen(self) -> None:
        """Look in the background whether somebody else has failed, and leave if this rank does not do it by itself."""
        apart: Store = self._store.clone()  # type: ignore[attr-defined]  (a connection of its own)
        threading.Thread(target=self._listen, args=(apart,), daemon=True).start()

    def hang_up(self) -> None:
        """Listen no more."""
        self._ended.set()

    def _listen(self, store: Store) -> None:
        try:
            answered = False
            while not self._ended.wait(LOOK_SECONDS):
                if not answered and store.check(["roll"]):
                    answered = store.add(f"here/{self._world.rank}", 1) > 0
                if store.check(["first"]):
                    self._said = self._said or store.get("first").decode()
                    break
        except (RuntimeError, ValueError):  # the store has gone: with a rank, so will the connections
            if _is_held_by_torchrun() and not self._ended.is_set():
                log.error("torchrun has ended (killed?), so its ranks do; the same command with --resume goes on")
                os._exit(1)
        if self._said and not self._said.startswith(f"{self._world.rank}\n"):
            with suppress(Exception):
                distributed_c10d._abort_process_group()
            if not self._ended.wait(LEAVE_SECONDS + LINGER_SECONDS):
                os._exit(1)

    def _heard(self) -> None:
        """Let the others know, and stay a little."""
        with suppress(RuntimeError, ValueError):
            self._store.add("heard", 1)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(LINGER_SECONDS)

    def _wait_for_others(self) -> None:
        """The rank that holds the store keeps it until all have heard: torchrun itself holds it, others may not."""
        if _is_held_by_torchrun() or not self._world.leads:
            return
        until = time.monotonic() + LINGER_SECONDS
        with suppress(RuntimeError, ValueError):
            while self._store.add("heard", 0) < self._world.size - 1 and time.monotonic() < until:
                time.sleep(0.05)


def _is_held_by_torchrun() -> bool:
    """Whether torchrun holds the store; otherwise the first rank does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(timeout: timedelta = TIMEOUT) -> Store:
    """The store that torchrun holds, or the first rank where something else has started them."""
    if not _is_held_by_torchrun():
        return next(rendezvous("env://", timeout=timeout))[0]
    try:
        store = next(rendezvous("env://", timeout=min(timeout, PATIENCE)))[0]
    except dist.DistNetworkError:
        gone = ConnectionRefusedError("torchrun has ended (killed?) before its ranks met; the same command goes on")
        gone.add_note(f"on rank {launched().rank} of {launched().size}")
        raise gone from None
    store.set_timeout(timeout)
    return store


def _start(store: Store, world: World) -> None:
    """Start the process group: gloo for what is on the host, NCCL beside it where there are GPUs."""
    gpus = torch.cuda.is_available() and dist.is_nccl_available()
    number = int(os.environ.get("LOCAL_RANK", world.rank))
    if gpus and number < torch.cuda.device_count():
        torch.cuda.set_device(number)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpus else "gloo",
        store=PrefixStore(f"trimtab/group/{_meetings}", store),
        rank=world.rank,
        world_size=world.size,
        timeout=TIMEOUT,
    )


@contextmanager
def _terminated_as_interrupted(line: Line) -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does, so that files are closed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        line.terminated = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
