# SPDX-License-Identifier: Apache-2.0
"""What compressed exchange does to learning, in miniature: GreedyLore and 1-bit Adam against dense, arm by arm.

    python benchmarks/comm_learning.py [--parts speedup mlp digits memory lm rivals captured onebit] [--seeds 3]
    python benchmarks/comm_learning.py --parts rivals --model tiny --steps 1600 --seeds 2

Each part writes a result of its own, `comm_learning_<part>.json`, with model and steps in the name where they are not
micro and 400; together they take twenty minutes on two quiet cores.

    speedup    steps that a noisy quadratic needs to a target, with N = 1 to 32 workers whose gradients are averaged,
               dense and by GreedyLore, with momentum and with Adam; the best of three step sizes for each N
    mlp        a student MLP learns a teacher: GreedyLore, and what happens without error feedback, with random columns,
               with fixed ones
    digits     the same arms, a small convolutional net on scikit-learn's digits (pip install scikit-learn)
    memory     what residuals and bases take, by formula, by the tensors and by the process
    lm         the same arms, the lab's micro decoder on its usual text, with AdamW
    rivals     dense, GreedyLore with one probe and with eight, and torch's PowerSGD hook with at most as many bytes
    captured   why: the share of |H|^2 in GreedyLore's message, and in the best one of the same rank
    onebit     1-bit Adam against AdamW on that decoder, in two processes: other warm-ups, without error feedback, and
               Adam on 1-bit gradients, which the paper shows to fail; how the second moment settles; bytes of a run

By linearity N ranks of GreedyLore do exactly what one does with the mean of their gradients, so that its parts run in
one process, as a group of one rank; `tests/comm` holds many ranks against it. Signs are not linear: 1-bit Adam's part
has two ranks. Arms of a seed share weights and batches. Losses are held out, in nats.
"""

import argparse
import ctypes
import math
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import save
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.functional import cross_entropy

from trimtab.comm import GreedyLore, OneBitAdam, lowrank, traffic
from trimtab.comm.onebit import Errors, Layout, onebit_mean
from trimtab.comm.onebit_steps import sum_of_variance
from trimtab.lab.data import Sampler, eval_batches, load_corpus
from trimtab.lab.model import Decoder, ModelConfig

DDP = nn.parallel.DistributedDataParallel
WAYS: dict[str, tuple[str, bool]] = {
    "greedy": ("greedy", True),
    "greedy, no feedback": ("greedy", False),
    "random columns": ("random", True),
    "random, no feedback": ("random", False),
    "fixed columns": ("fixed", True),
    "fixed, no feedback": ("fixed", False),
}
"""Which columns are used, and whether what is left out is owed. Fixed ones without feedback are what GaLore does."""
Figures = dict[str, Any]

# Ranks


@contextmanager
def group(rank: int = 0, num: int = 1, folder: str | None = None) -> Iterator[None]:
    """A process group on this machine; by default of this process alone."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as own:
        dist.init_process_group("gloo", init_method=f"file://{folder or own}/meet", rank=rank, world_size=num)
        try:
            yield
        finally:
            dist.destroy_process_group()


class Variant(GreedyLore):
    """GreedyLore, or a worse choice of columns."""

    columns = "greedy"

    def _select(self, step: int, matrix: Any, mean_scores: Tensor) -> Tensor:
        if self.columns == "greedy":
            return super()._select(step, matrix, mean_scores)
        if self.columns == "fixed":
            return torch.arange(matrix.size.rank)
        generator = torch.Generator().manual_seed(1000 * step + matrix.index)
        return torch.randperm(matrix.size.a, generator=generator)[: matrix.size.rank]


def attach(model: nn.Module, way: str, **settings: Any) -> tuple[DDP, Callable[[], None]]:
    """A DDP model that exchanges in a way of `WAYS`, or densely, and what to call after each step."""
    ddp = DDP(model)
    if way == "dense":
        return ddp, lambda: None
    if way == "powersgd":
        attach_powersgd(ddp, **settings)
        return ddp, lambda: None
    columns, feedback = WAYS[way]
    gl = Variant(**settings)
    gl.columns = columns
    gl.attach(ddp)

    def after() -> None:
        if not feedback:
            for matrix in gl._matrices.values():
                matrix.error.zero_()

    return ddp, after


def attach_powersgd(ddp: DDP, rank: int, start: int, exclude: tuple[str, ...], **_: Any) -> None:
    """Torch's hook, made to leave alone what GreedyLore leaves alone: it knows matrices by their shapes only."""
    dense = {p.shape for name, p in ddp.module.named_parameters() if name.startswith(("embed", *exclude))}
    judge = powersgd._should_compress

    def should(rows: int, columns: int, *args: Any) -> tuple[bool, int, int]:
        return (False, rows * columns, rows * columns) if (rows, columns) in dense else judge(rows, columns, *args)

    powersgd._should_compress = should
    state = powersgd.PowerSGDState(None, rank, start_powerSGD_iter=max(start, 2), min_compression_rate=1)
    ddp.register_comm_hook(state, powersgd.powerSGD_hook)


# Speed-up


def descend(way: str, kind: str, workers: int, lr: float, seed: int, most: int) -> int:
    """Steps until a noisy quadratic of a 16 x 32 matrix has come down to a fiftieth; `most` if it does not.

    The noise of N workers' mean gradient is drawn at once: sigma / sqrt(N).
    """
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(seed)
    target = torch.randn(16, 32, generator=draw)
    stiffness = torch.logspace(0, -1, 16)[:, None]
    x = torch.zeros(16, 32, requires_grad=True)
    optimizer: torch.optim.Optimizer
    if kind == "momentum":
        optimizer = torch.optim.SGD([x], lr, momentum=0.9)
    else:
        optimizer = torch.optim.Adam([x], lr, betas=(0.9, 0.99))
    error, basis, first = torch.zeros(16, 32), torch.eye(16), 0.0
    for step in range(most):
        with torch.no_grad():
            away = x - target
            value = 0.5 * float((stiffness * away.square()).sum())
            first = first or value
            if not value < 4 * first:
                return most
            if value <= first / 50:
                return step
            g = stiffness * away + torch.randn(16, 32, generator=draw) * (2.0 / math.sqrt(workers))
            if way == "greedy":
                h = g + error
                if step % 50 == 0:
                    basis, error, g = lowrank.refresh(h), torch.zeros(16, 32), h
                else:
                    scores = lowrank.scores(h, basis, lowrank.probes(seed, step, 0, 1, h))
                    p, r = lowrank.compress(h, basis, lowrank.select(scores, 2))
                    error, g = lowrank.residual(h, p, r), p @ r
        x.grad = g
        optimizer.step()
    return most


def speedup(pool: ProcessPoolExecutor, seeds: int, *_: Any) -> tuple[Figures, Figures]:
    """Steps to the target by N, and the factor won over N = 1."""
    bases = {"momentum": (2e-4, 3e-4, 4e-4), "adam": (4e-3, 6e-3, 8e-3)}
    counts, tasks = (1, 2, 4, 8, 16, 32), {}
    for kind, rates in bases.items():
        for way in ("dense", "greedy"):
            for n in counts:
                for rate in rates:
                    lr = rate * (n if kind == "momentum" else math.sqrt(n))
                    tasks[kind, way, n, rate] = [
                        pool.submit(descend, way, kind, n, lr, seed, 12_000) for seed in range(seeds)
                    ]
    steps = {key: statistics.fmean(task.result() for task in of_seeds) for key, of_seeds in tasks.items()}
    table: Figures = {}
    for kind, rates in bases.items():
        for way in ("dense", "greedy"):
            best = {n: min((steps[kind, way, n, rate], rate) for rate in rates) for n in counts}
            table[f"{kind}, {way}"] = {
                "steps": {n: round(taken) for n, (taken, _) in best.items()},
                "speedup": {n: round(best[1][0] / taken, 2) for n, (taken, _) in best.items()},
                "base_lr": {n: rate for n, (_, rate) in best.items()},
            }
    settings = {"matrix": "16 x 32", "rank": 2, "every": 50, "sigma": 2.0, "target": "1/50 of the first value"}
    return table, settings


# A student and its teacher


def student(way: str, kind: str, seed: int) -> Figures:
    """Test error after 300 steps, in units of 1."""
    torch.manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)).requires_grad_(False)
    for p in teacher.parameters():
        p.mul_(2)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    tests, draw = torch.randn(2048, 32), torch.Generator().manual_seed(1000 * seed)
    with group():
        ddp, after = attach(model, way, rank=2, every=50, start=5, compress=lambda name, p: True)
        parameters = list(model.parameters())
        optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
        if kind == "adam":
            optimizer = torch.optim.Adam(parameters, 3e-3)
        for _ in range(300):
            x = torch.randn(128, 32, generator=draw)
            optimizer.zero_grad()
            (ddp(x) - teacher(x)).square().mean().backward()
            optimizer.step()
            after()
    return {"value": float((model(tests) - teacher(tests)).square().mean())}


def mlp(pool: ProcessPoolExecutor, seeds: int, *_: Any) -> tuple[Figures, Figures]:
    """Every way, with momentum and with Adam."""
    table = {}
    for kind in ("momentum", "adam"):
        found = by_seed(pool, student, ("dense", *WAYS), seeds, kind)
        table |= {f"{kind}, {way}": one for way, one in against_dense(found).items()}
    return table, {"steps": 300, "batch": 128, "rank": "2 of 32", "every": 50, "start": 5, "value": "test error"}


# Digits


class Net(nn.Module):
    """Three convolutions and a classifier, for pictures of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((1, 16, 1), (16, 32, 1), (32, 64, 2))
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, stride=s, padding=1) for i, o, s in sizes)
        self.norms = nn.ModuleList(nn.GroupNorm(8, o) for _, o, _ in sizes)
        self.classifier = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).relu()
        return self.classifier(x.mean((2, 3)))


def classify(way: str, given: tuple[float, float], seed: int) -> Figures:
    """Held-out cross entropy and accuracy after 20 epochs, at some rank and learning rate."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("the part digits needs scikit-learn, found none: pip install scikit-learn") from None
    data: Any = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(99))
    test, train = order[:400], order[400:]
    torch.manual_seed(seed)
    model, draw = Net(), torch.Generator().manual_seed(seed)
    (share, lr), epochs, batch = given, 20, 64
    with group():
        ddp, after = attach(model, way, rank=share, every=50, start=20, compress=lambda name, p: "convs" in name)
        optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
        length = epochs * (len(train) // batch)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length)
        for _ in range(epochs):
            mixed = train[torch.randperm(len(train), generator=draw)]
            for chosen in mixed[: len(train) // batch * batch].split(batch):
                optimizer.zero_grad()
                cross_entropy(ddp(images[chosen]), labels[chosen]).backward()
                optimizer.step()
                schedule.step()
                after()
    with torch.no_grad():
        logits = model(images[test])
    wrong = float((logits.argmax(1) != labels[test]).float().mean())
    return {"value": float(cross_entropy(logits, labels[test])), "accuracy": 1 - wrong}


def digits(pool: ProcessPoolExecutor, seeds: int, *_: Any) -> tuple[Figures, Figures]:
    """Every way at a quarter of the shorter side and two learning rates, and greedy at an eighth."""
    table: Figures = {}
    for lr in (0.05, 0.0125):
        found = by_seed(pool, classify, ("dense", *WAYS), seeds, (0.25, lr))
        found["greedy, rank 1/8"] = by_seed(pool, classify, ("greedy",), seeds, (0.125, lr))["greedy"]
        for way, row in against_dense(found).items():
            table[f"lr {lr}, {way}"] = row | {"accuracy": [round(one["accuracy"], 4) for one in found[way]]}
    settings = {"epochs": 20, "batch": 64, "rank": "1/4", "every": 50, "start": 20, "optimizer": "SGD, momentum 0.9"}
    return table, settings | {"test": 400, "value": "held-out cross entropy"}


# Memory


def resident(way: str, size: str) -> Figures:
    """Bytes of residuals and bases: by formula, of the tensors, and all that the process has grown by."""

    def now() -> int:
        ctypes.CDLL(None).malloc_trim(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back at once
    model = Decoder(ModelConfig.size(size, vocab_size=256, max_seq=32), seed=0)
    tokens, found = torch.zeros(1, 32, dtype=torch.long), {"parameters": 4 * model.num_parameters()}
    with group():
        before = now()
        ddp = DDP(model, gradient_as_bucket_view=True)
        gl = GreedyLore(0.125, every=3, start=0, compress=lambda name, p: name.startswith("blocks."))
        if way == "greedy":
            gl.attach(ddp)
        for _ in range(5):  # a refresh, two steps of low rank, and both once more
            ddp(tokens, tokens).loss.backward()
        found["process"] = now() - before
        if way == "greedy":
            matrices = gl._matrices.values()
            found["tensors"] = sum(t.untyped_storage().nbytes() for m in matrices for t in (m.error, m.basis))
            found["report"] = gl.report().memory
            found["formula"] = 4 * sum(m.size.a * m.size.b + m.size.a**2 for m in matrices)
    return found


def memory(*_: Any) -> tuple[Figures, Figures]:
    """Three sizes of the lab's decoder, every run in a process of its own."""
    table, context = {}, multiprocessing.get_context("spawn")
    for size in ("micro", "tiny", "60m"):
        found = {}
        for way in ("dense", "greedy"):
            with ProcessPoolExecutor(1, mp_context=context) as fresh:
                found[way] = fresh.submit(resident, way, size).result()
        table[size] = found["greedy"] | {"process": found["greedy"]["process"] - found["dense"]["process"]}
    return table, {"unit": "bytes; `process` is what GreedyLore's has grown by beyond that of dense DDP"}


# A language model

BATCH, SEQ, PEAK, BETAS = 8, 128, 2e-3, (0.9, 0.98)


def rate(step: int, steps: int) -> float:
    """A linear rise over the first 5 % of the steps, then a cosine to a tenth."""
    rise = min(1.0, (step + 1) / (0.05 * steps))
    return PEAK * rise * (0.55 + 0.45 * math.cos(math.pi * step / steps))


@torch.no_grad()
def held_out(model: nn.Module, tokens: Any) -> float:
    return statistics.fmean(model(*batch).loss.item() for batch in eval_batches(tokens, batch=32, seq=SEQ, limit=12))


def speak(way: str, given: tuple[str, int, Figures], seed: int) -> Figures:
    """Held-out loss of a decoder, trained with AdamW on gradients exchanged in some way."""
    (size, steps, settings), corpus = given, load_corpus()
    model = Decoder(ModelConfig.size(size, vocab_size=256), seed=seed)
    sampler = Sampler(corpus.train, batch=BATCH, seq=SEQ, seed=seed)
    with group():
        ddp, after = attach(model, way, exclude=("head",), **settings)
        optimizer = torch.optim.AdamW(model.parameters(), PEAK, betas=BETAS)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = rate(step, steps)
            optimizer.zero_grad()
            ddp(*sampler.batch_at(step)).loss.backward()
            optimizer.step()
            after()
    return {"value": held_out(model, corpus.held_out)}


def lm(pool: ProcessPoolExecutor, seeds: int, steps: int, size: str) -> tuple[Figures, Figures]:
    """Every way at an eighth of the shorter side with the paper's dense start, and greedy with more of everything."""
    plain = {"rank": 0.125, "every": steps // 8, "start": steps // 10}
    late = {"rank": 0.125, "every": steps // 16, "start": steps // 4, "probes": 8}
    found = by_seed(pool, speak, ("dense", *WAYS), seeds, (size, steps, plain))
    more = {
        "greedy, rank 1/4": plain | {"rank": 0.25},
        "greedy, 8 probes": plain | {"probes": 8},
        "greedy, 8 probes, half the period, dense start 25 %": late,
        "the same, rank 1/4": late | {"rank": 0.25},
    }
    for name, settings in more.items():
        found[name] = by_seed(pool, speak, ("greedy",), seeds, (size, steps, settings))["greedy"]
    settings = {"model": size, "steps": steps, "batch": BATCH, "seq": SEQ, "greedylore": plain, "lr": PEAK}
    return against_dense(found), settings | {"betas": BETAS, "value": "held-out loss"}


def rivals(pool: ProcessPoolExecutor, seeds: int, steps: int, size: str) -> tuple[Figures, Figures]:
    """GreedyLore at an eighth of the shorter side, refreshed every 50 steps, against PowerSGD in every step."""
    plain = {"rank": 0.125, "every": 50, "start": steps // 10}
    shapes = [p.shape for name, p in Decoder(ModelConfig.size(size), seed=0).named_parameters() if ".weight" in name]
    matrices = [shape for shape in shapes if len(shape) == 2 and shape[0] != 256]
    sent = sum(lowrank.mean_bytes(lowrank.size_of(shape, 0.125), 50, 1, 4) for shape in matrices)
    per_rank = 4 * sum(map(sum, matrices))
    arms = {
        "dense": ("dense", plain),
        "greedy": ("greedy", plain),
        "greedy, 8 probes": ("greedy", plain | {"probes": 8}),
        "powersgd": ("powersgd", plain | {"rank": int(sent / per_rank)}),
    }
    tasks = {
        name: [pool.submit(speak, way, (size, steps, given), seed) for seed in range(seeds)]
        for name, (way, given) in arms.items()
    }
    found = {name: [task.result() for task in of_seeds] for name, of_seeds in tasks.items()}
    settings = {"model": size, "steps": steps, "batch": BATCH, "seq": SEQ, "greedylore": plain, "lr": PEAK}
    dense = 4 * sum(map(math.prod, matrices))
    settings["bytes_of_matrices"] = {
        "dense": dense,
        "greedy": round(sent),
        "greedy, 8 probes": round(sum(lowrank.mean_bytes(lowrank.size_of(s, 0.125), 50, 8, 4) for s in matrices)),
        "powersgd": per_rank * int(sent / per_rank),
    }
    return against_dense(found), settings | {"powersgd_rank": int(sent / per_rank), "value": "held-out loss"}


def watch(size: str, every: int, batch: int, steps: int) -> Figures:
    """Mean shares of |H|^2 over all low-rank messages of a run: GreedyLore's, and what others would have had."""
    seen: list[list[float]] = []

    class Watching(GreedyLore):
        def _low_rank(self, step: int, matrices: Any, dense: Any) -> Any:
            self.now = {matrix.name: (matrix.owes(grad), float(grad.norm())) for matrix, grad in matrices}
            yield from super()._low_rank(step, matrices, dense)

        def _select(self, step: int, matrix: Any, mean_scores: Tensor) -> Tensor:
            h, fresh = self.now[matrix.name]
            rows, rank = (matrix.basis.t() @ h).square().sum(1), matrix.size.rank
            values = torch.linalg.svdvals(h).square()
            chosen = {num: lowrank.select(mean_scores[:num], rank) for num in (1, 8)}
            shares = [rows[chosen[1]], rows[chosen[8]], rows.topk(rank).values, values[:rank]]
            seen.append(
                [*(float(part.sum() / rows.sum()) for part in shares), rank / matrix.size.a, float(h.norm()) / fresh]
            )
            return chosen[1]

    corpus, model = load_corpus(), Decoder(ModelConfig.size(size, vocab_size=256), seed=0)
    sampler = Sampler(corpus.train, batch=batch, seq=SEQ, seed=0)
    with group():
        ddp = DDP(model)
        Watching(0.125, every=every, start=40, probes=8, exclude=("head",)).attach(ddp)
        optimizer = torch.optim.AdamW(model.parameters(), PEAK, betas=BETAS)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = rate(step, 400)
            optimizer.zero_grad()
            ddp(*sampler.batch_at(step)).loss.backward()
            optimizer.step()
    names = ("one probe", "8 probes", "best columns of the basis", "best of any basis", "at random", "|H| / |g|")
    return {
        name: round(statistics.fmean(column), 3) for name, column in zip(names, zip(*seen, strict=True), strict=True)
    }


def captured(pool: ProcessPoolExecutor, seeds: int, steps: int, size: str) -> tuple[Figures, Figures]:
    """With shorter periods, larger batches, a wider model."""
    cases = {
        f"{size}, a basis for 50 steps": (size, 50, BATCH),
        f"{size}, for 10 steps": (size, 10, BATCH),
        f"{size}, for 50 steps, batch {8 * BATCH}": (size, 50, 8 * BATCH),
        "tiny, for 50 steps": ("tiny", 50, BATCH),
    }
    tasks = {name: pool.submit(watch, *case, 160) for name, case in cases.items()}
    table = {name: task.result() for name, task in tasks.items()}
    settings = {"seeds": [0], "rank": "1/8", "start": 40, "steps": 160, "batch": BATCH}
    return table, settings | {"value": "share of |H|^2, mean over low-rank messages"}


# 1-bit Adam


def onebit_arm(arm: str, seed: int, steps: int, corpus: Any) -> tuple[float, list[list[float]], dict[str, float]]:
    """Held-out loss of one arm, how v settled, and the bytes of a dense and a frozen step; on every rank."""
    rank, num = dist.get_rank(), dist.get_world_size()
    model = Decoder(ModelConfig.size("micro", vocab_size=256), seed=seed)
    sampler = Sampler(corpus.train, batch=BATCH // num, seq=SEQ, seed=seed)
    warmup = {"adamw": None, "naive": None, "auto": "auto", "warm-up 25 %": steps // 4, "warm-up 5 %": steps // 20}
    scale = "l1" if arm == "l1 scale" else "l2"
    limit = warmup.get(arm, 15 * steps // 100)
    optimizer = OneBitAdam(model.parameters(), PEAK, betas=BETAS, warmup=limit, scale=scale)
    parameters = list(model.parameters())
    sizes = tuple(p.numel() for p in parameters)
    naive = Errors.zeros(Layout(sizes, num)) if arm == "naive" else None
    every = round(1 / (1 - BETAS[1]))
    curve, before, bytes_of = [], None, {}
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate(step, steps)
        optimizer.zero_grad()
        model(*sampler.batch_at(step, rank)).loss.backward()
        if naive is not None:
            flat = torch.zeros_like(naive.worker)
            for view, p in zip(naive.layout.views(flat, [p.shape for p in parameters]), parameters, strict=True):
                view.copy_(p.grad)  # pyright: ignore[reportArgumentType]
            mean, _ = onebit_mean(flat, naive)
            for view, p in zip(naive.layout.views(mean, [p.shape for p in parameters]), parameters, strict=True):
                p.grad = view.clone()
        if step in (1, steps - 1) and arm == "1-bit":
            with traffic() as t:
                optimizer.step()
            bytes_of["dense" if step == 1 else "frozen"] = t.sent
        else:
            optimizer.step()
        if arm == "no feedback" and optimizer._errors is not None:
            optimizer._errors.worker.zero_()
            optimizer._errors.server.zero_()
        if arm == "adamw" and (step + 1) % every == 0:
            states = [optimizer.state[p] for p in parameters]
            age = 1 - BETAS[1] ** (step + 1)
            v = torch.cat([state["exp_avg_sq"].flatten() for state in states]) / age
            total = float(sum_of_variance(states, BETAS[1]))
            if before is not None:
                moved = float((v - before[0]).abs().sum() / before[0].sum())
                curve.append([step + 1, min(total, before[1]) / max(total, before[1]), moved])
            before = v, total
    if arm == "auto":
        bytes_of["frozen_at"] = optimizer.param_groups[0]["freeze"] or 0
    return held_out(model, corpus.held_out), curve, bytes_of


ONEBIT: tuple[str, ...] = (
    "adamw", "1-bit", "warm-up 25 %", "warm-up 5 %", "auto", "l1 scale", "no feedback", "naive"
)  # fmt: skip


def onebit_rank(rank: int, num: int, folder: str, seeds: int, steps: int) -> None:
    """All arms and seeds, one after the other."""
    corpus = load_corpus()
    with group(rank, num, folder):
        found = {arm: [onebit_arm(arm, seed, steps, corpus) for seed in range(seeds)] for arm in ONEBIT}
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")


def onebit(_: ProcessPoolExecutor, seeds: int, steps: int, *__: Any) -> tuple[Figures, Figures]:
    """Two ranks on this machine."""
    num, context = 2, multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=onebit_rank, args=(rank, num, folder, seeds, steps)) for rank in range(num)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed: see above")
        found = torch.load(f"{folder}/found.pt", weights_only=False)
    table = against_dense({arm: [{"value": one[0]} for one in runs] for arm, runs in found.items()}, "adamw")
    sent, share = found["1-bit"][0][2], 0.15
    volume = sent["dense"] / (share * sent["dense"] + (1 - share) * sent["frozen"])
    settings = {"model": "micro", "ranks": num, "steps": steps, "batch": BATCH, "seq": SEQ, "lr": PEAK, "betas": BETAS}
    settings |= {
        "warmup": "15 % of the steps unless said",
        "value": "held-out loss",
        "sent_per_step": sent,
        "volume_factor": {"a frozen step": sent["dense"] / sent["frozen"], "whole run": round(volume, 2)},
        "auto_froze_at": [one[2]["frozen_at"] for one in found["auto"]],
        "settling": {
            "columns": ["step", "sum of v, smaller over larger", "sum of |change of v| over sum of v"],
            "rows_by_seed": [[[round(x, 4) for x in row] for row in one[1]] for one in found["adamw"]],
        },
    }
    return table, settings


# All


def by_seed(
    pool: ProcessPoolExecutor, work: Callable[..., Figures], ways: tuple[str, ...], seeds: int, given: Any
) -> dict[str, list[Figures]]:
    """What each way comes to, by seed."""
    tasks = {way: [pool.submit(work, way, given, seed) for seed in range(seeds)] for way in ways}
    return {way: [task.result() for task in of_seeds] for way, of_seeds in tasks.items()}


def against_dense(found: dict[str, list[Figures]], dense: str = "dense") -> dict[str, Figures]:
    """The value of each seed, and its ratio to dense in that seed."""
    table = {}
    for way, runs in found.items():
        ratios = [one["value"] / base["value"] for one, base in zip(runs, found[dense], strict=True)]
        table[way] = {"value": [round(one["value"], 4) for one in runs], "ratio": [round(x, 4) for x in ratios]}
    return table


PARTS: dict[str, Callable[[ProcessPoolExecutor, int, int, str], tuple[Figures, Figures]]] = {
    "speedup": speedup,
    "mlp": mlp,
    "digits": digits,
    "memory": memory,
    "lm": lm,
    "rivals": rivals,
    "captured": captured,
    "onebit": onebit,
}


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400, help="of the parts lm, rivals and onebit")
    parser.add_argument("--model", choices=("micro", "tiny"), default="micro", help="of the parts lm and rivals")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for part in args.parts:
            table, settings = PARTS[part](pool, args.seeds, args.steps, args.model)
            name = f"comm_learning_{part}"
            name += f"_{args.model}" if args.model != "micro" and part in ("lm", "rivals") else ""
            name += f"_{args.steps}" if args.steps != 400 and part in ("lm", "rivals", "onebit") else ""
            save(name, table, **({"seeds": list(range(args.seeds))} | settings))


if __name__ == "__main__":
    main()
