# SPDX-License-Identifier: Apache-2.0
"""A process that starts `trimtab` again and again and ends it at a chosen moment.

Loading torch and Transformers takes seconds, a small run less than one. So `Stage` starts one process that loads them
once, and has it fork for every call: the fork is the command line, with a pid, files and a death of its own. A plan, a
dict, says how it is ended or hindered:

    after      seconds: SIGKILL from outside, whatever it is doing then
    op, how    its op-th operation on files below `out` (Python's audit events: open to write, rename, remove, ...)
        kill       is where it is killed
        torn       the same, but a file that is opened there is left empty, as between opening and writing
        full       fails with ENOSPC, like all later ones that need room
        readonly   fails with EROFS, like all later ones
    half, nth  the nth write of a `trace` batch or a `checkpoint` is killed in its middle, half of its bytes on the disk
    limit      no file may grow beyond so many bytes: a write in which one does fails in its middle (EFBIG), or, with
    fatal      kills the process there: SIGXFSZ, which like SIGKILL leaves no time for anything
    stdout     where its output goes: /dev/full takes none of it

A command may be several processes: ranks, or the workers of a bench. Then a plan also says

    whom       who is killed: `all` (unless told), `one` (the process that came to the operation or the write), or
               `parent` (the one that has started the others). Who came there then sleeps for a minute, and is an orphan
               unless something ends it. The stage is the reaper of what loses its parent, and counts who outlives it
    rank       the rank that has the plan (the first unless told); after a time, the one that is killed alone
    real       ranks are started by torchrun and workers are spawned, which takes seconds and tells nothing. Otherwise
               both are forks; the parent of ranks holds the store that they meet at, and ends all when one fails, as
               torchrun does

The trace is written every third row instead of every 256th, so that there is something to interrupt. What the process
did is told through a pipe: each operation, and each row that it was sure to have written.
"""

import atexit
import contextlib
import ctypes
import errno
import fcntl
import importlib
import io
import json
import math
import multiprocessing
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

KILLED = (-signal.SIGKILL, -signal.SIGXFSZ)
ROWS = 3
GRACE_SECONDS, SLOW_SECONDS = 10.0, 60.0
"""How long a process may outlive the one that has started it; and what a real one may take longer, which may have to
load torch first, and then to look for a torchrun that has gone for `meeting.PATIENCE`."""
PR_SET_CHILD_SUBREAPER = 36
PRELOADED = ("trimtab.cli.main", "trimtab.lab.train", "trimtab.lab.bench", "trimtab.lab.gather", "trimtab.report.bench")
PRELOADED += ("trimtab.lab.dcp", "torch.distributed.fsdp", "torch._dynamo")
PRETRAINED = ("trimtab.lab.finetune", "trimtab.lab.quantize", "peft", "transformers.models.llama.modeling_llama")
ALLOCATING = ("open", "os.mkdir")
PLACES = {"open": 0, "os.rename": 1, "os.remove": 0, "os.rmdir": 0, "os.mkdir": 0, "os.truncate": 0, "os.chmod": 0}
"""Which argument of an audit event is the path that changes."""
IN_FOLDER = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2}
"""Which argument is the open folder that this path is relative to, if any."""


class Answer(NamedTuple):
    """How a call ended: its exit code or minus the signal, its stderr, what it did, and how long it took."""

    code: int
    err: str
    ops: list[str]
    flushed: dict[str, int]
    """Of each run folder, the last step whose row was written to the trace."""
    seconds: float
    orphans: int
    """Processes that had to be ended after it."""

    @property
    def killed(self) -> bool:
        return self.code in KILLED


class Stage:
    """The process that forks; a context manager."""

    def __init__(self, *, pretrained: bool = False) -> None:
        command = [sys.executable, __file__, *PRELOADED, *(PRETRAINED if pretrained else ())]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.communicate(timeout=60)

    def call(
        self, args: Sequence[object], out: Path, plan: Mapping[str, Any] | None = None, *, ranks: int = 1
    ) -> Answer:
        """Call `trimtab ARGS`, whose folder is `out`, under a plan; by several ranks, if told."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"args": [str(arg) for arg in args], "out": str(out), "plan": dict(plan or {}), "ranks": ranks}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return Answer(**json.loads(self._process.stdout.readline()))


def main() -> None:
    """Load the modules that are named, then fork for each line of stdin and answer with a line."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    answers, sys.stdout = sys.stdout, sys.stderr
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        told, err = os.pipe(), os.pipe()
        started = time.monotonic()
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(os.open(asked["plan"].get("stdout", os.devnull), os.O_WRONLY), 1)
            os.dup2(err[1], 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
            os.setpgid(0, 0)  # its processes can be killed at once
            _start(asked["args"], Path(asked["out"]), asked["plan"], told[1], asked["ranks"])  # ends the process
        for pipe in (told, err):
            os.close(pipe[1])
        code, texts, orphans = _wait(child, (told[0], err[0]), asked["plan"])
        said: dict[str, list[str]] = {"op": [], "flushed": [], "loaded": []}
        for row in texts[0].splitlines():
            kind, _, rest = row.partition(" ")
            said[kind].append(rest)
        for name in said["loaded"]:  # what is loaded late is loaded here for the next
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        ops, last = said["op"], {}
        for row in said["flushed"]:
            step, _, folder = row.partition(" ")
            last[folder] = int(step)
        print(
            json.dumps(Answer(code, texts[1], ops, last, time.monotonic() - started, orphans)._asdict()),
            file=answers,
            flush=True,
        )


def _wait(child: int, pipes: Sequence[int], plan: Mapping[str, Any]) -> tuple[int, list[str], int]:
    """Wait for a process and all that it has started, kill when the time has come, and read what they say meanwhile.

    Returns how the first of them ended, what was said, and how many of the others had to be ended here.
    """
    said = dict.fromkeys(pipes, b"")
    for pipe in pipes:
        fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_NONBLOCK)
    until = time.monotonic() + plan["after"] if "after" in plan else math.inf
    code, orphans = 0, set[int]()
    while True:
        left = min(0.02, max(0.0, until - time.monotonic()))
        for pipe in select.select(pipes, (), (), left)[0]:
            said[pipe] += os.read(pipe, 65536)
        if time.monotonic() >= until:
            orphans |= _end(child, plan)
            until = math.inf
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if ended and ended == child:
            code, child = os.waitstatus_to_exitcode(status), 0
            until = time.monotonic() + GRACE_SECONDS + (SLOW_SECONDS if plan.get("real") else 0)
    for pipe in pipes:
        while more := _read(pipe):
            said[pipe] += more
        os.close(pipe)
    return code, [text.decode() for text in said.values()], len(orphans)


def _end(child: int, plan: Mapping[str, Any]) -> set[int]:
    """Kill whom the plan says; where the command has ended before, those who are left, and name them."""
    below = _below(child or os.getpid())
    whom = plan.get("whom", "all") if child else "left"
    one = below[plan.get("rank", 0) :][:1] or [child]
    found = {"all": [child, *below], "one": one, "parent": [child], "left": below}[whom]
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return set() if child else set(found)


def _below(process: int) -> list[int]:
    """The processes that one has started, and those that they have."""
    found = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for child in map(int, file.read_text().split()):
                found += [child, *_below(child)]
    return found


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, 65536)
    except BlockingIOError:  # a grandchild has it open still
        return b""


def _start(args: list[str], out: Path, plan: Mapping[str, Any], told: int, ranks: int) -> None:
    """Be the command: one process, or torchrun and its ranks."""
    if ranks == 1:
        _play(args, out, plan, told)
    if plan.get("real"):
        from torch.distributed.run import main

        main(["--standalone", "--nproc-per-node", str(ranks), "-m", "trimtab", *args])
        os._exit(0)
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    from trimtab.lab import meeting

    meeting.LOOK_SECONDS, meeting.LINGER_SECONDS, meeting.LEAVE_SECONDS = 0.1, 0.2, 2.0
    port, processes = os.pipe(), []
    for rank in range(ranks):
        process = os.fork()
        if not process:
            where = {"MASTER_ADDR": "localhost", "MASTER_PORT": os.read(port[0], 8).decode().strip()}
            os.environ.update(where, RANK=str(rank), WORLD_SIZE=str(ranks), TORCHELASTIC_USE_AGENT_STORE="True")
            _play(args, out, plan if rank == plan.get("rank", 0) else {}, told)
        processes.append(process)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # after the forks: they must not hold it
    os.write(port[1], f"{store.port:8d}".encode() * ranks)
    code = 0
    for _ in range(ranks):
        process, status = os.wait()
        processes.remove(process)
        if status and not code:
            code = 1
            for other in processes:
                os.kill(other, signal.SIGTERM)
    os._exit(code)


def _play(args: list[str], out: Path, plan: Mapping[str, Any], told: int) -> None:
    """Be the command line."""
    from trimtab.cli.main import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not plan.get("real"):
        forks = multiprocessing.get_context("fork")
        multiprocessing.get_context = lambda method=None: forks  # type: ignore[assignment, misc]
    _tell_rows(told, out)
    if "half" in plan:
        _kill_in_a_write(plan["half"], plan["nth"], plan.get("whom", "all"))
    if "limit" in plan:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if plan.get("fatal") else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (plan["limit"], plan["limit"]))
    sys.addaudithook(_Operations(out, told, plan))
    sys.argv = ["trimtab", *args]
    before, code = set(sys.modules), 1
    try:
        main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # as Python leaves: threads first, or a pool waits for ever
    atexit._run_exitfuncs()
    new = [name for name in sys.modules if name not in before]
    os.write(told, "".join(f"loaded {name}\n" for name in new).encode())
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120  # as Python itself does
    os._exit(code)  # all that is left is to take apart what torch has loaded, which takes longer than the run


def _kill(whom: str) -> None:
    """Kill all processes of the command, the one that started them, or this one."""
    if whom == "all":
        os.killpg(0, signal.SIGKILL)
    if whom == "parent":  # which leads the group
        os.kill(os.getpgrp(), signal.SIGKILL)
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGKILL)


class _Operations:
    """Counts the operations on files below a folder, and ends or refuses the chosen one."""

    def __init__(self, out: Path, told: int, plan: Mapping[str, Any]) -> None:
        self._root, self._told = str(out.resolve()), told
        self._chosen, self._how, self._whom = plan.get("op"), plan.get("how", "kill"), plan.get("whom", "all")
        self._count, self._busy = 0, False  # a fork counts its own

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in PLACES or self._busy:
            return
        self._busy = True
        try:
            path = self._path(event, args)
            if path is not None:
                self._meet(event, path, args)
        finally:
            self._busy = False

    def _path(self, event: str, args: tuple[Any, ...]) -> str | None:
        """The path below the folder that an event is about, if it is about one."""
        path = args[PLACES[event]]
        if not isinstance(path, str | os.PathLike):
            return None
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return None
        folder = args[IN_FOLDER[event]] if event in IN_FOLDER else -1
        base = os.readlink(f"/proc/self/fd/{folder}") if isinstance(folder, int) and folder >= 0 else os.getcwd()
        path = os.path.join(base, path)
        return path if f"{path}/".startswith(f"{self._root}/") else None

    def _meet(self, event: str, path: str, args: tuple[Any, ...]) -> None:
        self._count += 1
        os.write(self._told, f"op {event} {os.path.relpath(path, self._root)}\n".encode())
        if self._chosen is None or self._count < self._chosen:
            return
        if self._how == "full" and event in ALLOCATING:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if self._how == "readonly":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        if self._how == "torn" and event == "open" and args[2] & os.O_TRUNC:
            os.close(os.open(path, args[2], 0o644))
        if self._how in ("kill", "torn"):
            _kill(self._whom)


def _tell_rows(told: int, out: Path) -> None:
    """Write the trace often, and tell of each row that has been written."""
    from trimtab.control import writers

    real = writers.TraceWriter.flush

    def flush(self: Any) -> None:
        rows = self._rows
        real(self)
        if rows:
            folder = os.path.relpath(self.path.parent.resolve(), out.resolve())
            os.write(told, f"flushed {int(self._steps[rows - 1])} {folder}\n".encode())

    writers.BATCH_ROWS = ROWS
    writers.TraceWriter.flush = flush  # type: ignore[method-assign]


def _kill_in_a_write(what: str, nth: int, whom: str) -> None:
    """Kill when half of the bytes of a write are on the disk."""
    import torch

    from trimtab.control import writers

    counts = {"trace": 0, "checkpoint": 0}
    append, save = writers._append, torch.save

    def is_it(kind: str) -> bool:
        counts[kind] += 1
        return kind == what and counts[kind] == nth

    def half_a_batch(file: Any, data: Any, position: int) -> int:
        if str(file.name).endswith(".arrow") and is_it("trace"):
            file.write(memoryview(data)[: len(data) // 2])
            _kill(whom)
        return append(file, data, position)

    def half_a_checkpoint(state: Any, file: Any, **options: Any) -> None:
        if not isinstance(file, io.BytesIO) and is_it("checkpoint"):  # what ranks send each other is in memory
            save(state, whole := io.BytesIO())
            file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
            for stream in (file, getattr(file, "raw", file)):  # DCP's has another inside
                stream.flush()
            _kill(whom)
        save(state, file, **options)

    writers._append, torch.save = half_a_batch, half_a_checkpoint


if __name__ == "__main__":
    main()
