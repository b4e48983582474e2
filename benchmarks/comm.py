# SPDX-License-Identifier: Apache-2.0
"""What compressed gradient exchange saves on a slow link: whole steps, time inside collectives, bytes, by arm.

    python benchmarks/comm.py [--ranks 2] [--rates 0.1 1 10] [--batch 2] [--rounds 8] [--name comm_2ranks]

It needs Linux with `unshare`, `ip` and `tc` (iproute2), and the right to make namespaces; nothing outside them is
touched or reached. Every rank is a process in a network namespace of its own, with one link to a common bridge that
sends at most `--rates` Gbit/s (a token bucket, `tc ... tbf`): N machines with a network card each, on a machine.

Arms, all on the same decoder of 25.6M parameters with AdamW, from the same weights and moments after a dense start:

    dense              an all-reduce of each DDP bucket: torch's allreduce_hook, which is DDP's own exchange as a hook
    plain ddp          DDP without a hook, to show that it is the same; its collectives cannot be timed from here
    fp16               torch's fp16_compress_hook (the bf16 one is refused on gloo)
    powersgd           torch's powerSGD_hook at GreedyLore's rank, in one bucket: with several its callbacks mix up
                       their collectives on gloo, and the job dies
    greedylore         a low-rank step, which is `every` - 1 of `every` steps
    greedylore refresh the other one: dense, with new bases; the table's `greedylore, amortised` is their mean
    onebit adam        after the switch, with the second moment of the dense start

Columns. `step` is the slowest rank's. `collectives` is the time in which at least one was under way, issue to end, on
the rank where that is shortest (the others also wait there for their peers); part of it hides behind the backward.
`compression` is processor time that hooks and optimizer take for the exchange, averaged over ranks; with GreedyLore it
overlaps with the backward where cores are free. `payload`, `sent` are of `traffic()`, per rank (of powersgd, which
issues from other threads, by our own count), `wire` is what the link's counter says. Rounds are interleaved; factors
are dense over arm within a round, with quartiles. `loss` is held out, after the same number of steps of each arm: too
few to learn much, see `comm_learning.py` for that. One thread per rank.
"""

import argparse
import copy
import ctypes
import functools
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import save
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

from trimtab.comm import GreedyLore, OneBitAdam, traffic
from trimtab.comm.traffic import SHARES
from trimtab.lab.data import Corpus, Sampler, eval_batches, load_corpus
from trimtab.lab.model import Decoder, ModelConfig

DDP = nn.parallel.DistributedDataParallel
DENSE_STEPS = 40
"""The common start: two memories of the second moment."""
ADAM: dict[str, Any] = {"lr": 5e-4, "betas": (0.9, 0.95)}
SEQ = 128
ARMS: tuple[str, ...] = ("dense", "plain ddp", "fp16", "powersgd", "greedylore", "greedylore refresh", "onebit adam")
INSIDE = "TRIMTAB_PRIVATE_NETWORK"
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""glibc returns every large buffer to the kernel, which clears it page by page when it is next asked for; with this it
keeps them. All arms gain, 1-bit Adam, whose temporaries are as large as the model, most."""

# What is timed


class Clock:
    """Intervals of the collectives of this process and seconds of compression, from whatever thread they come."""

    def __init__(self) -> None:
        self.intervals: list[tuple[float, float]] = []
        self.calls: list[tuple[str, int]] = []
        self.seconds = 0.0
        self._here = threading.local()
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Put a stopwatch around torch's collectives and the callbacks of futures: hooks work in them."""
        payload_at = {"all_reduce": 0, "broadcast": 0, "all_to_all_single": 1, "all_gather_single": 1}
        payload_at["all_gather_into_tensor"] = 1
        for name, at in payload_at.items():
            if hasattr(dist, name):
                setattr(dist, name, self._timed(name, getattr(dist, name), at))
        future: Any = torch._C.Future
        then = future.then

        def timed_then(this: Any, callback: Callable[..., Any]) -> Any:
            def timed(done: Any) -> Any:
                with self.compressing():
                    return callback(done)

            return then(this, timed)

        future.then = timed_then

    def _timed(self, name: str, call: Callable[..., Any], payload_at: int) -> Callable[..., Any]:
        kind = "all_gather" if name.startswith("all_gather") else name.removesuffix("_single")

        def timed(*args: Any, **kwargs: Any) -> Any:
            given = args[payload_at]
            started = time.perf_counter()
            work = call(*args, **kwargs)
            if work is None:
                self._ended(started)
            else:
                work.get_future().add_done_callback(lambda _: self._ended(started))
            with self._lock:
                self.calls.append((kind, given.numel() * given.element_size()))
            return work

        return timed

    def _ended(self, started: float) -> None:
        with self._lock:
            self.intervals.append((started, time.perf_counter()))

    @contextmanager
    def compressing(self) -> Iterator[None]:
        """Count this block's work as compression: processor time of the thread, so that waiting is none."""
        if getattr(self._here, "inside", False):
            yield
            return
        self._here.inside, started = True, time.thread_time()
        try:
            yield
        finally:
            self._here.inside = False
            with self._lock:
                self.seconds += time.thread_time() - started

    def take(self) -> tuple[float, float, list[tuple[str, int]]]:
        """Seconds with a collective under way, seconds of compression, and the calls; and start anew."""
        with self._lock:
            busy, until = 0.0, 0.0
            for start, end in sorted(self.intervals):
                busy += max(end - max(start, until), 0.0)
                until = max(until, end)
            out = busy, self.seconds, self.calls
            self.intervals, self.seconds, self.calls = [], 0.0, []
        return out


CLOCK = Clock()


class TimedGreedyLore(GreedyLore):
    """GreedyLore whose computations between collectives are timed."""

    def _exchange(self, *args: Any) -> Any:
        inner = super()._exchange(*args)
        while True:
            with CLOCK.compressing():
                work = next(inner, None)
            if work is None:
                return
            yield work


class TimedOneBitAdam(OneBitAdam):
    """1-bit Adam whose exchange is timed: packing, both compressions, both errors."""

    def _onebit_mean(self, *args: Any) -> Any:
        with CLOCK.compressing():
            return super()._onebit_mean(*args)


def timed_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of torch whose own part is timed; its callbacks are by the futures."""

    @functools.wraps(hook)  # DDP reads the annotations
    def timed(state: Any, bucket: Any) -> Any:
        with CLOCK.compressing():
            return hook(state, bucket)

    return timed


# Arms


class Arm:
    """A model, its exchange and its optimizer, begun from given weights and moments."""

    def __init__(self, name: str, args: argparse.Namespace, start: dict[str, Any] | None) -> None:
        self.name = name
        model = Decoder(model_config(args), seed=0)
        if start is not None:
            model.load_state_dict(start["model"])
        bucket = {"bucket_cap_mb": 1000} if name == "powersgd" else {}
        warnings.filterwarnings("ignore", ".*broadcast_buffers.*")  # torch 2.13 has another name for it
        self.model, self.ddp = model, DDP(model, gradient_as_bucket_view=True, broadcast_buffers=False, **bucket)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        self.report = ""
        if name in ("dense", "fp16"):
            hook = default_hooks.allreduce_hook if name == "dense" else default_hooks.fp16_compress_hook
            self.ddp.register_comm_hook(None, timed_hook(hook))
        elif name == "powersgd":
            state = powersgd.PowerSGDState(None, matrix_approximation_rank=args.rank, start_powerSGD_iter=2)
            self.ddp.register_comm_hook(state, timed_hook(powersgd.powerSGD_hook))
        elif name == "greedylore":
            gl = TimedGreedyLore(rank=args.rank, every=args.every, start=0, exclude=("head",))
            gl.attach(self.ddp)
            self.report = str(gl.report()).splitlines()[-1]
        elif name == "greedylore refresh":
            gl = TimedGreedyLore(rank=args.rank, every=1, start=0, compress=lambda name, p: name.startswith("blocks."))
            gl.attach(self.ddp)
        elif name == "onebit adam":
            self.optimizer = TimedOneBitAdam(model.parameters(), warmup=DENSE_STEPS, **ADAM)
            self.optimizer.attach(self.ddp)
        if start is not None:
            self.optimizer.load_state_dict(copy.deepcopy(start["optimizer"]))  # torch's keeps the tensors it is given

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.ddp(*batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def held_out(self, corpus: Corpus) -> float:
        batches = list(eval_batches(corpus.held_out, batch=16, seq=SEQ, limit=4))
        return statistics.fmean(self.model(*batch).loss.item() for batch in batches)


def model_config(args: argparse.Namespace) -> ModelConfig:
    """A LLaMA's blocks with a vocabulary of bytes, or of as many words as one likes."""
    return ModelConfig.size("60m", vocab_size=args.vocab, max_seq=SEQ)


# One rank


def one_rank(rank: int, args: argparse.Namespace, corpus: Corpus, folder: Path, barrier: Any) -> None:
    """Move into a namespace, get a link, measure, and leave what was found in the folder."""
    new_network = 0x40000000
    if ctypes.CDLL(None, use_errno=True).unshare(new_network):
        raise OSError(ctypes.get_errno(), "unshare")
    barrier.wait()
    barrier.wait()  # the parent has moved our end of the link in here
    link = f"link{rank}"
    for command in ("link set lo up", f"addr add 10.77.0.{rank + 1}/24 dev {link}", f"link set {link} up"):
        subprocess.run(["ip", *command.split()], check=True)
    os.environ["GLOO_SOCKET_IFNAME"] = link
    torch.set_num_threads(1)
    meet = {"init_method": f"file://{folder}/meet", "rank": rank, "world_size": args.ranks}
    dist.init_process_group("gloo", timeout=timedelta(seconds=300), **meet)
    CLOCK.watch()
    torch.save(measure(rank, args, corpus, link), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def measure(rank: int, args: argparse.Namespace, corpus: Corpus, link: str) -> dict[str, Any]:
    """Everything that one rank sees."""
    sampler = Sampler(corpus.train, batch=args.batch, seq=SEQ, seed=0)

    def batch_at(step: int) -> tuple[Tensor, Tensor]:
        tokens, targets = sampler.batch_at(step, rank)
        return tokens % args.vocab, targets % args.vocab

    warm = Arm("dense", args, None)
    for step in range(DENSE_STEPS):
        warm.step(batch_at(step))
    start = {"model": warm.model.state_dict(), "optimizer": warm.optimizer.state_dict()}
    arms = [Arm(name, args, start) for name in args.arms]
    seen: dict[str, Any] = {"start loss": warm.held_out(corpus), "reports": {a.name: a.report for a in arms}}
    del warm, start
    step = DENSE_STEPS
    for _ in range(3):  # DDP orders its buckets anew after the first, powersgd begins in the third
        for arm in arms:
            arm.step(batch_at(step))
        step += 1
    seen["bytes"] = {arm.name: count(arm, [batch_at(step), batch_at(step + 1)], link) for arm in arms}
    step += 2
    for rate in args.rates:
        limit(link, rate)
        seen[f"link {rate:g}"] = speed(args.ranks)
        times: dict[str, list[tuple[float, float, float]]] = {arm.name: [] for arm in arms}
        for turn in range(args.rounds):
            for arm in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
                batch = batch_at(step)
                dist.barrier()
                CLOCK.take()
                started = time.perf_counter()
                arm.step(batch)
                taken = time.perf_counter() - started
                times[arm.name].append((taken, *CLOCK.take()[:2]))
            step += 1
        seen[f"times {rate:g}"] = times
        seen[f"loss {rate:g}"] = {arm.name: arm.held_out(corpus) for arm in arms}
        seen[f"steps {rate:g}"] = step
    return seen


def count(arm: Arm, batches: list[tuple[Tensor, Tensor]], link: str) -> dict[str, float]:
    """Bytes of one step: by `traffic`, by our own count, and on the link."""
    CLOCK.take()
    with traffic() as t:
        arm.step(batches[0])
    dist.barrier()
    calls = CLOCK.take()[2]
    ours = sum(num for _, num in calls), sum(num * SHARES[kind](dist.get_world_size()) for kind, num in calls)
    seen = {"payload": t.payload, "sent": t.sent, "calls": t.calls}
    if arm.name == "powersgd":
        seen = {"payload": ours[0], "sent": float(ours[1]), "calls": len(calls)}
    elif arm.name != "plain ddp" and (t.payload, t.calls) != (ours[0], len(calls)):
        raise SystemExit(f"{arm.name}: traffic() counts {t.payload} bytes in {t.calls} calls, we {ours[0]}, {calls}")
    before = transmitted(link)
    arm.step(batches[1])
    return seen | {"wire": transmitted(link) - before}


def transmitted(link: str) -> int:
    """Bytes that have left over the link, once it is quiet."""
    dist.barrier()
    time.sleep(0.3)
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    line = next(line for line in lines if line.strip().startswith(f"{link}:"))
    dist.barrier()
    return int(line.split(":")[1].split()[8])


def limit(link: str, rate: float) -> None:
    """Let the link send at most so many Gbit/s."""
    bucket = max(256, int(rate * 125))  # KiB: a millisecond's worth, and more than one packet of 64 KiB
    shape = f"qdisc replace dev {link} root tbf rate {rate:g}gbit burst {bucket}kb latency 100ms"
    subprocess.run(["tc", *shape.split()], check=True)


def speed(num_ranks: int) -> float:
    """Gbit/s that each rank sends in a plain all-reduce of 32 MB."""
    message = torch.ones(1 << 23)
    dist.all_reduce(message)
    dist.barrier()
    started = time.perf_counter()
    dist.all_reduce(message)
    seconds = time.perf_counter() - started
    return 8 * 4 * message.numel() * float(SHARES["all_reduce"](num_ranks)) / seconds / 1e9


# All ranks


def in_namespaces(args: argparse.Namespace, corpus: Corpus) -> list[dict[str, Any]]:
    """Start the ranks, and connect their links by a bridge."""

    def ip(command: str) -> None:
        subprocess.run(["ip", *command.split()], check=True)

    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(args.ranks + 1, timeout=60)
    ip("link add bridge0 type bridge")
    ip("link set bridge0 up")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=one_rank, args=(rank, args, corpus, Path(folder), barrier))
            for rank in range(args.ranks)
        ]
        for process in processes:
            process.start()
        barrier.wait()
        for rank, process in enumerate(processes):
            ip(f"link add link{rank} type veth peer name port{rank}")
            ip(f"link set link{rank} netns {process.pid}")
            ip(f"link set port{rank} master bridge0 up")
        barrier.wait()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a rank failed: see above")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(args.ranks)]


def table_of(ranks: list[dict[str, Any]], rate: float, every: int) -> dict[str, dict[str, Any]]:
    """One row per arm: medians, factors of dense over arm with quartiles, and bytes of the mean rank."""
    rounds = {}  # arm -> one (step, collectives, compression) per round
    for name in ranks[0][f"times {rate:g}"]:
        of_ranks = zip(*(seen[f"times {rate:g}"][name] for seen in ranks), strict=True)
        rounds[name] = [
            (max(t[0] for t in turn), min(t[1] for t in turn), statistics.fmean(t[2] for t in turn))
            for turn in of_ranks
        ]
    sizes = {
        name: {key: statistics.fmean(seen["bytes"][name][key] for seen in ranks) for key in one}
        for name, one in ranks[0]["bytes"].items()
    }
    losses = dict(ranks[0][f"loss {rate:g}"])
    low, refresh = "greedylore", "greedylore refresh"
    if low in rounds and refresh in rounds:
        share, both = 1 / every, f"{low}, amortised"
        pairs = zip(rounds[low], rounds[refresh], strict=True)
        rounds[both] = [tuple((1 - share) * a + share * b for a, b in zip(*pair, strict=True)) for pair in pairs]
        sizes[both] = {key: (1 - share) * sizes[low][key] + share * sizes[refresh][key] for key in sizes[low]}
    table = {}
    for name, turns in rounds.items():
        row: dict[str, Any] = {}
        for at, column in enumerate(("step", "collectives", "compression")):
            if name == "plain ddp" and at:
                continue
            row[f"{column}_ms"] = round(1000 * statistics.median(turn[at] for turn in turns), 1)
            if at < 2:
                factors = [base[at] / turn[at] for base, turn in zip(rounds["dense"], turns, strict=True)]
                quartiles = statistics.quantiles(factors, n=4) if len(factors) > 1 else factors * 3
                row[f"{column}_factor"] = [round(value, 2) for value in (quartiles[1], quartiles[0], quartiles[2])]
        row |= {key: round(value) for key, value in sizes[name].items() if "amortised" not in name or key != "calls"}
        row["payload_factor"] = round(sizes["dense"]["payload"] / sizes[name]["payload"], 2)
        row["loss"] = round(losses[name], 4) if name in losses else None
        table[name] = row
    return table


def main() -> None:
    """Run the comparison, inside a private network namespace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 1.0, 10.0], help="Gbit/s of each rank's link")
    parser.add_argument("--batch", type=int, default=2, help="sequences of 128 tokens per rank and step")
    parser.add_argument("--rank", type=int, default=64, help="of GreedyLore and powersgd; the shorter side is 512")
    parser.add_argument("--every", type=int, default=200, help="GreedyLore's period")
    parser.add_argument("--vocab", type=int, default=256, help="rows of embedding and head, which stay dense")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--name", default="comm_2ranks", help="of the result file")
    args = parser.parse_args()
    if "dense" not in args.arms:
        raise SystemExit("--arms must name dense: factors are against it")
    if INSIDE not in os.environ:
        for tool in ("unshare", "ip", "tc"):
            if shutil.which(tool) is None:
                raise SystemExit(f"needs the command {tool}, found none: install util-linux and iproute2")
        os.environ |= {INSIDE: "1", "OMP_NUM_THREADS": "1", **KEEP}
        os.execvp("unshare", ["unshare", "--map-root-user", "--net", sys.executable, *sys.argv])
    torch.set_num_threads(1)
    before = os.getloadavg()
    config = model_config(args)
    ranks = in_namespaces(args, load_corpus())
    numel = Decoder(config, seed=0).num_parameters()
    tables = {f"{rate:g} Gbit/s": table_of(ranks, rate, args.every) for rate in args.rates}
    save(
        args.name,
        tables,
        parameters=numel,
        ranks=args.ranks,
        tokens_per_rank=args.batch * SEQ,
        rank=args.rank,
        every=args.every,
        rounds=args.rounds,
        dense_start=DENSE_STEPS,
        seed=0,
        start_loss=round(ranks[0]["start loss"], 4),
        steps={f"{rate:g} Gbit/s": ranks[0][f"steps {rate:g}"] for rate in args.rates},
        measured_gbit_s={f"{rate:g}": round(min(seen[f"link {rate:g}"] for seen in ranks), 2) for rate in args.rates},
        greedylore=ranks[0]["reports"].get("greedylore", ""),
        load_average={"before": before, "after": os.getloadavg()},
    )


if __name__ == "__main__":
    main()
