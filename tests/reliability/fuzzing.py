# SPDX-License-Identifier: Apache-2.0
"""Bad input by the thousand: the valid files of a target are damaged and read, over and over.

    python tests/reliability/fuzzing.py run tables --cases 5000     two targets, 5,000 damaged files each
    python tests/reliability/fuzzing.py run:1 --seed 4711           one case again, with its traceback

A target (`targets.py`, `model_targets.py`) makes valid files with trimtab's own writers and reads them as its verbs do.
A case takes one of the files, damages it (`damage.py`), and reads; the number of a case is the seed of its damage, so a
failure is found again by it.

What is allowed: the file is read, or one of trimtab's own errors is raised. Anything else fails: another exception,
more than `SECONDS`, more than `MEMORY` on top of what the process had (address space, so a promise of 10^12 rows fails
when memory is asked for, not when it is used). This file runs in a process of its own because of that limit. Where a
target says so, files that were not damaged must also be what they were before: what was finished is never lost.
"""

import argparse
import contextlib
import io
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import model_targets
import targets
from damage import damaged
from targets import ALLOWED, TOUCHED

SECONDS = 20.0
"""Longest that one case may take: a hang is what is looked for, and a busy machine is none."""
MEMORY = 2 << 30
"""Address space that all cases together may ask for, on top of what is there before the first."""
MOST = 400 << 20
"""What the largest of them may really use: the valid files have a few kilobytes."""
TARGETS = {**targets.TARGETS, **model_targets.TARGETS}


class Slow(BaseException):
    """A case took too long; not an Exception, so that no reader takes it for a damaged file."""


class Failed(NamedTuple):
    """A case that must not end as it did."""

    target: str
    seed: int
    what: str
    where: str
    trace: str


class Bench:
    """The files of one target, valid ones, and a place to damage and read them."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.target, self.folder = name, TARGETS[name], folder
        folder.mkdir(parents=True, exist_ok=True)
        self.target.make(folder)
        self.valid = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        with silent():
            self.target.read(folder)  # what is whole is read without a word
        self.restore()

    def restore(self) -> None:
        """Put the valid files back, and nothing else."""
        TOUCHED.clear()
        for path in [path for path in self.folder.rglob("*") if not path.is_dir() or path.is_symlink()]:
            if path.relative_to(self.folder).as_posix() not in self.valid or not path.is_file() or path.is_symlink():
                path.unlink()
        for name, data in self.valid.items():
            path = self.folder / name
            if path.is_dir():
                shutil.rmtree(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_file() or path.read_bytes() != data:
                path.write_bytes(data)

    def damage(self, seed: int) -> None:
        """Put the damaged files of a case in place: one, and now and then two."""
        rng = random.Random(f"{self.name} {seed}")
        for _ in range(rng.choice((1, 1, 1, 1, 2))):
            name = rng.choice(list(self.valid))
            (self.folder / name).write_bytes(damaged(name, self.valid[name], rng))
            TOUCHED.add(name)

    def case(self, seed: int, *, verbs: bool = False) -> Failed | None:
        """Damage, read, and see how it ended."""
        self.damage(seed)
        return self.end(seed, (lambda: self.verb(seed)) if verbs else lambda: self.target.read(self.folder))

    def odd_places(self, *, verbs: bool) -> Iterator[Failed | None]:
        """Each file in turn is a folder, a pipe that nobody writes to, a link to itself, empty, a device, or absent.

        Without verbs, one of those that have the same name.
        """
        kinds: dict[str, Callable[[Path], Any]] = {
            "folder": Path.mkdir,
            "pipe": os.mkfifo,
            "loop": lambda path: path.symlink_to(path.name),
            "dangling": lambda path: path.symlink_to("nothing here"),
            "empty": Path.touch,
            "zeros": lambda path: path.symlink_to("/dev/zero"),
            "missing": lambda path: None,
        }
        for name in self.valid if verbs else {Path(name).name: name for name in self.valid}.values():
            for make in kinds.values():
                for by_verb in (False, True) if verbs and self.target.verbs else (False,):
                    (self.folder / name).unlink()
                    make(self.folder / name)
                    TOUCHED.add(name)
                    yield self.end(-1, self.all_verbs if by_verb else self.read_or_os)

    def read_or_os(self) -> None:
        """Read; where a folder is in a file's place, what the operating system says of it is good enough."""
        with contextlib.suppress(OSError):
            self.target.read(self.folder)

    def all_verbs(self) -> None:
        """Every verb that reads these files."""
        for line in self.target.verbs:
            check_end(*command([part.format(self.folder) for part in line.split()]))

    def end(self, seed: int, read: Callable[[], None]) -> Failed | None:
        """Read, see how it ended, and put the valid files back."""
        try:
            with limit(SECONDS), silent(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    read()
                except ALLOWED as error:
                    check_cause(error)
            self.check_kept()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return Failed(
                self.name, seed, f"{type(error).__name__}: {str(error)[:200]}", _place(error), trace_of(error)
            )
        finally:
            self.restore()
        return None

    def check_kept(self) -> None:
        """What was not damaged is what it was, if the target promises that."""
        for name in set(self.valid) - TOUCHED if self.target.keeps else ():
            path = self.folder / name
            assert path.is_file(), f"{name} was removed"
            assert path.read_bytes() == self.valid[name], f"{name} was changed"

    def verb(self, seed: int) -> None:
        """One of the verbs that read these files, as a person runs it."""
        line = random.Random(seed).choice(self.target.verbs)
        check_end(*command([part.format(self.folder) for part in line.split()]))


def command(arguments: Sequence[str], *, show: bool = False) -> tuple[int, str]:
    """Run the command line in this process: its exit code, and what it said on stderr; stdout is dropped or left."""
    import logging

    from trimtab.cli.main import main

    said, logger, before = io.StringIO(), logging.getLogger("trimtab"), sys.argv
    sys.argv = ["trimtab", *arguments]
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(sys.stdout if show else io.StringIO()):
            main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        return code, said.getvalue()
    finally:
        sys.argv = before
        logger.handlers.clear()
    return 0, said.getvalue()


def check_end(code: int, said: str) -> None:
    """The rule of every verb: it works, or says in one line of plain text why not."""
    errors = [line for line in said.splitlines() if not line.startswith("warning: ")]
    if code == 0:
        assert not any(line.startswith("error: ") for line in errors), said[-2000:]
        return
    assert code in (1, 2), (code, said[-2000:])
    assert len(errors) == 1, said[-2000:]
    assert errors[0].startswith("error: "), said[-2000:]
    assert len(errors[0]) < 4000, "a line that nobody reads"
    assert errors[0].isprintable(), said[-2000:]
    assert "Traceback" not in said, said[-2000:]


def check_cause(error: BaseException) -> None:
    """A refusal that comes from memory that was asked for and not given is none: elsewhere it would be given."""
    one: BaseException | None = error
    while one is not None:
        assert not isinstance(one, MemoryError), trace_of(one)
        assert "allocate memory" not in str(one), trace_of(one)
        one = one.__cause__ or one.__context__


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise `Slow` in what takes longer."""

    def ring(*_: object) -> None:
        raise Slow(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def limit_memory(more: int = MEMORY) -> None:
    """Let this process ask for so much more address space than it has now, and no more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


@contextlib.contextmanager
def silent() -> Iterator[None]:
    import logging

    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def _place(error: BaseException) -> str:
    """The last line of trimtab's own that the error came through: what makes two failures the same one."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}trimtab{os.sep}" in frame.filename]
    frame = (ours or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"


def trace_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)[-14:])[-4000:]


def fuzz(name: str, cases: int, seed: int = 0, verbs: int = 0, *, odd: str = "") -> tuple[int, list[Failed], int]:
    """Run the cases of a target: how many, what failed (one of each kind), and by how many bytes memory grew."""
    failed: dict[tuple[str, str], Failed] = {}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        bench = Bench(name, Path(folder) / "files")
        limit_memory()
        for number in range(seed, seed + min(10, cases)):
            _take(failed, bench.case(number))  # what is imported late is imported now
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(seed + min(10, cases), seed + cases):
            _take(failed, bench.case(number))
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        for number in range(seed, seed + verbs):  # not counted: verbs load what they need when they run
            _take(failed, bench.case(number, verbs=True))
        for one in bench.odd_places(verbs=odd == "verbs") if odd else ():
            _take(failed, one)
            cases += 1
    return cases + verbs, list(failed.values()), grown


def _take(failed: dict[tuple[str, str], Failed], one: Failed | None) -> None:
    if one is not None:
        failed.setdefault((one.what.split(":")[0], one.where), one)


def main() -> int:
    """Fuzz some targets in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET[:CASES[:VERBS]]", help=f"of {', '.join(TARGETS)}; all if none is named"
    )
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--verbs", type=int, default=0, help="so many cases through the command line, besides")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first case")
    parser.add_argument(
        "--odd", choices=["reads", "verbs"], default="", help="also folders, pipes, links and devices in place of files"
    )
    given = parser.parse_args()
    worst = 0
    for target in given.targets or TARGETS:
        name, *numbers = target.split(":")
        cases, verbs = [*map(int, numbers), *(given.cases, given.verbs)[len(numbers) :]]
        count, failed, grown = fuzz(name, cases, given.seed, verbs if TARGETS[name].verbs else 0, odd=given.odd)
        print(f"{name}: {count} cases, {len(failed)} kinds of failure, {grown >> 20} MiB more memory", flush=True)
        for one in failed:
            print(f"  {one.target} --seed {one.seed}: {one.what} at {one.where}\n{one.trace}", flush=True)
        worst = max(worst, len(failed), grown > MOST)
    return 1 if worst else 0


if __name__ == "__main__":
    sys.exit(main())
