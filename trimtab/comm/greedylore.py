# SPDX-License-Identifier: Apache-2.0
"""GreedyLore (arXiv 2507.08784): DDP sends a low-rank part of each gradient matrix and owes the rest.

    ddp = DistributedDataParallel(model)
    gl = GreedyLore(rank=32, every=200, start=1000)
    gl.attach(ddp)                                  # once, before the first backward
    print(gl.report())                              # which tensors, why, and what it saves
    ...                                             # train as before, with any optimizer
    state = gl.state_dict()                         # on all ranks; the same dict on each, for any number of ranks

With g_i the gradient of rank i, E_i what it still owes, mean over the N ranks, and `lowrank.py` for the symbols:

    warm-up    step <= start                       out = mean g_i                               dense
    refresh    the first step then, every `every`  H = mean(g_i + E_i);  U = basis of H;  E_i = 0;  out = H
    low rank   all others                          H_i = g_i + E_i;  lambda = mean lambda(H_i);  J = top r of lambda^2
                                                   R = mean P^T H_i, P = U[:, J];  E_i = H_i - P P^T H_i;  out = P R

In every step mean(g_i + E_i) = out + mean(E_i'): no gradient is ever lost, only late. (At a refresh the published code
drops what is owed; here it is paid.) A refresh therefore brings a gradient 2 to 6 times as large as usual, which global
clipping after the hook would cut off for good, and which Adam's second moment remembers for a while.

What it does not cure: a basis grows old. On the lab's decoders a/8 columns of the step's own basis would hold 99 % of
|H|^2; the best a/8 of a basis kept for 50 steps hold 60 % (for 10 steps: 70 %), those that one probe finds 45 %. What
is owed then outgrows what is new, and torch's PowerSGD hook, which turns its basis in every step, learns better with as
many bytes (docs/results.md, "Compressed gradients"). `probes=8` and a larger rank win back a part.

The same on every rank. `eigh` gives other bits with other thread counts, and even other columns where singular values
repeat; so each matrix has one owner, rank (its number mod N), whose basis the others receive, packed into one broadcast
per owner and bucket. Everything else that decides comes out of an all-reduce. Two all-reduces per bucket and low-rank
step: scores with what stays dense, then factors.

Nothing waits: `exchange.py` resumes a bucket when its collective has ended, while the backward goes on. Buckets take
their turns in DDP's order, so that all ranks issue their collectives alike. Where those run on threads (gloo) that
needs a process group which nobody else uses: `attach` makes one of the same ranks.

Numbers. Arithmetic, residual and basis are FP32 (FP64 for FP64 gradients), messages have the bucket's dtype, and the
residual is taken from the factor as it was rounded. If anything that arrives for a bucket is not finite, on any rank,
its residuals and bases stay as they were and its matrices come out as NaN, so that a GradScaler skips the step. A
scaler that changes its scale leaves residuals in the old one: prefer BF16 or FP32.

`no_sync`, `gradient_as_bucket_view`, any bucket size and DDP's join() are fine. A rank that has joined sends zeros and
what it owes, so nothing is lost there either; the divisor stays N, join's default. A parameter that no rank used in a
step (`find_unused_parameters`) has its share of that step thrown away by DDP.

FSDP is refused. Its seam, `FSDPModule.set_all_reduce_hook` on a 1-D shard mesh, would do for a group of replicas: the
method is sound on each (m / S) x n shard. But the hook is handed one flat shard without shapes, whose layout only
torch's private state tells, and bases of shards fit no other number of shards, so that a checkpoint would not either.
"""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from trimtab.checks import is_number, is_whole, require
from trimtab.comm import lowrank
from trimtab.comm.choice import Choice, Report, Rule, Settings, choose
from trimtab.comm.exchange import Exchange, run
from trimtab.comm.guards import require_room, require_same
from trimtab.comm.lowrank import Size, orient, unorient
from trimtab.comm.traffic import all_reduce, broadcast
from trimtab.errors import NoEffectWarning, TrimtabError


@dataclass(eq=False)
class Matrix:
    """A compressed parameter: where it stands, and what this rank remembers of it."""

    name: str
    index: int
    """Its number among the compressed ones, in the model's order: it seeds the probes and names the owner."""
    size: Size
    error: Tensor
    """E, in the parameter's shape."""
    basis: Tensor
    """U, (a, a); the identity before the first refresh, which is a complete basis too."""

    def owes(self, grad: Tensor) -> Tensor:  # -> (a, b)
        """H: the gradient and what is owed, oriented."""
        return orient(grad.to(self.error.dtype) + self.error)


def kind_of(step: int, start: int, every: int) -> str:
    """What happens in a step, counted from 1: "warm-up", "refresh" or "low rank"."""
    if step <= start:
        return "warm-up"
    return "low rank" if (step - start - 1) % every else "refresh"


class GreedyLore:
    """Low-rank gradients with error feedback, as a hook of `DistributedDataParallel`.

    Args:
        rank: columns that a matrix may use in one step, or, as a float, their share of its shorter side. 32 cost 6 to
            9 % of perplexity in independent runs, a quarter to a third about 1 %.
        every: steps from one refresh to the next.
        start: dense steps before the first refresh.
        probes: numbers per column that decide the choice; 8 come near the best choice and cost 8 a next to r b.
        seed: of the probes.
        compress: `(name, parameter) -> bool`, asked for every matrix; replaces the rule of `choice.py`, `exclude` too.
        exclude: names of modules or parameters that stay dense.
        group: the process group to send over; it needs DDP's ranks, and on gloo nobody else may use it meanwhile.
            Left alone, it is DDP's own on NCCL, and a new one elsewhere.
    """

    def __init__(
        self,
        rank: int | float = 32,
        every: int = 200,
        start: int = 1000,
        *,
        probes: int = 1,
        seed: int = 0,
        compress: Rule | None = None,
        exclude: Sequence[str] = ("lm_head", "classifier"),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        share = isinstance(rank, float) and is_number(rank) and 0 < rank <= 1
        require(is_whole(rank, 1) or share, "rank must be a whole number from 1, or a float in (0, 1]", rank)
        require(is_whole(every, 1), "every must be a whole number of steps from 1", every)
        require(is_whole(start), "start must be a whole number of steps from 0", start)
        require(is_whole(probes, 1), "probes must be a whole number from 1", probes)
        require(is_whole(seed), "seed must be a whole number from 0", seed)
        require(compress is None or callable(compress), "compress must be (name, parameter) -> bool, or None", compress)
        names = not isinstance(exclude, str) and all(isinstance(name, str) for name in exclude)
        require(names, "exclude must be a sequence of names: write ('lm_head',)", exclude)
        self.settings = Settings(rank, every, start, probes, seed)
        self.step = 0
        """Optimizer steps begun: backward passes in which DDP exchanged gradients."""
        self.group = group
        self._rule, self._exclude = compress, tuple(exclude)
        self._choices: list[Choice] | None = None
        self._matrices: dict[str, Matrix] = {}
        self._names: dict[Tensor, str] = {}
        self._streams: dict[torch.device, Any] = {}
        self._last: Future[Tensor] | None = None

    # What one sees of it

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Become the hook of a DDP model, on all ranks and before its first backward; once in a life."""
        _check_target(ddp, self._choices is not None)
        names = {name: p for name, p in ddp.module.named_parameters() if _exchanged(ddp, name, p)}
        choices = choose(ddp.module, names, self.settings, self._rule, self._exclude)
        chosen = [choice for choice in choices if choice.size]
        if not chosen:
            text = f"GreedyLore compresses none of {len(names)} tensors, all are sent dense: see report()"
            warnings.warn(text, NoEffectWarning, stacklevel=2)
        group = _group_for(ddp, self.group)
        facts = asdict(self.settings) | {"what is compressed": [(choice.name, choice.size) for choice in chosen]}
        require_same({f"GreedyLore's {name}": fact for name, fact in facts.items()}, group, ddp.device)
        self.group, self._choices = group, choices
        self._names = {p: name for name, p in names.items()}
        for index, choice in enumerate(chosen):
            assert choice.size is not None
            p = names[choice.name]
            like = {"dtype": torch.promote_types(p.dtype, torch.float32), "device": p.device}
            basis = torch.eye(choice.size.a, **like)
            self._matrices[choice.name] = Matrix(choice.name, index, choice.size, torch.zeros(p.shape, **like), basis)
        ddp.register_comm_hook(self, greedylore_hook)

    def report(self) -> Report:
        """What becomes of each tensor, and why; `print` it for a table."""
        return Report(tuple(self._attached()), self.settings)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, with any number of ranks: call it on all ranks, save it on one.

        What the ranks owe is averaged, which loses nothing: N ranks behave as one that owes the mean.
        """
        self._attached()
        state: dict[str, Any] = {}
        for name, matrix in self._matrices.items():
            error = matrix.error / self._num_ranks
            all_reduce(error, self.group)
            state[name] = {"error": error, "basis": matrix.basis.clone()}
        return {"config": asdict(self.settings), "step": self.step, "state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, after `attach`; what does not fit is refused and changes nothing."""
        self._attached()
        rule = "the saved state must be GreedyLore's: load what GreedyLore.state_dict() gave"
        require(isinstance(state_dict, dict), rule, type(state_dict).__name__)
        require({"config", "step", "state"} <= state_dict.keys(), rule, sorted(state_dict))
        config, step, saved = (state_dict[key] for key in ("config", "step", "state"))
        require(isinstance(config, dict) and isinstance(saved, dict), rule, (type(config), type(saved)))
        require(is_whole(step), "the saved step must be a whole number from 0: the file is damaged", step)
        for key, here in asdict(self.settings).items():
            there = config.get(key)
            rule = f"the saved {key} must be this GreedyLore's, {here!r}: build it with the saved settings"
            require(there == here and isinstance(there, int) == isinstance(here, int), rule, there)
        strangers = sorted(saved.keys() ^ self._matrices.keys())
        if strangers:
            rule = "the saved state must hold the matrices that are compressed here"
            raise TrimtabError(f"{rule}, got {strangers[0]!r} on one side only: use the saved run's model and rules")
        for name, matrix in self._matrices.items():
            for part in ("error", "basis"):
                wanted, found = tuple(getattr(matrix, part).shape), saved[name].get(part)
                rule = f"the saved {part} of {name!r} must have shape {wanted}: load it into the model it is of"
                require(isinstance(found, Tensor), rule, type(found).__name__)
                require(tuple(found.shape) == wanted, rule, tuple(found.shape))
                rule = f"the saved {part} of {name!r} must be finite, or no step would be: load an earlier state"
                require(bool(found.isfinite().all()), rule, float(found.abs().max()))
        for name, matrix in self._matrices.items():
            matrix.error.copy_(saved[name]["error"])
            matrix.basis.copy_(saved[name]["basis"])
        self.step = step

    def _attached(self) -> list[Choice]:
        if self._choices is None:
            raise TrimtabError("GreedyLore must belong to a model first, got none: call attach(ddp)")
        return self._choices

    @property
    def _num_ranks(self) -> int:
        return dist.get_world_size(self.group)

    # One bucket

    def _exchange(self, step: int, buffer: Tensor, named: list[tuple[str, Tensor]]) -> Exchange:
        """Replace the local gradients in a bucket by the common ones; `named` are views of `buffer`."""
        matrices = [(self._matrices[name], grad) for name, grad in named if name in self._matrices]
        kind = kind_of(step, self.settings.start, self.settings.every)
        if kind == "low rank" and matrices:
            dense = [grad for name, grad in named if name not in self._matrices]
            yield from self._low_rank(step, matrices, dense)
        elif kind == "refresh" and matrices:
            yield from self._refresh(buffer, matrices)
        else:
            yield self._sum(buffer.mul_(1 / self._num_ranks))

    def _refresh(self, buffer: Tensor, matrices: list[tuple[Matrix, Tensor]]) -> Exchange:
        """Pay all that is owed, and learn a new basis from what arrives."""
        for matrix, grad in matrices:
            grad.add_(matrix.error)
        yield self._sum(buffer.mul_(1 / self._num_ranks))
        fine = buffer.isfinite().all()
        for matrix, grad in matrices:
            matrix.error.copy_(torch.where(fine, 0.0, matrix.error))
            grad.copy_(torch.where(fine, grad, torch.nan))
        packs = []
        for owner in range(self._num_ranks):
            owned = [(matrix, grad) for matrix, grad in matrices if matrix.index % self._num_ranks == owner]
            if owned:
                packs.append((owner, owned, self._bases(owned, compute=owner == dist.get_rank(self.group))))
        yield from [self._from(owner, pack) for owner, _, pack in packs]  # each after its own part, not one by one
        for _, owned, pack in packs:
            for (matrix, _), basis in zip(owned, _unpack(pack, [matrix.basis for matrix, _ in owned]), strict=True):
                matrix.basis.copy_(torch.where(fine, basis, matrix.basis))

    def _bases(self, owned: list[tuple[Matrix, Tensor]], *, compute: bool) -> Tensor:
        """The new bases of one owner's matrices in one message: computed there, room for them elsewhere."""
        if not compute:
            return torch.cat([torch.empty_like(matrix.basis).flatten() for matrix, _ in owned])
        return torch.cat([lowrank.refresh(orient(grad.to(matrix.basis.dtype))).flatten() for matrix, grad in owned])

    def _low_rank(self, step: int, matrices: list[tuple[Matrix, Tensor]], dense: list[Tensor]) -> Exchange:
        """Agree on columns, exchange the factors, keep the rest."""
        num, dtype = self._num_ranks, matrices[0][1].dtype
        whole = [matrix.owes(grad) for matrix, grad in matrices]
        local = [self._scores(step, matrix, h) for (matrix, _), h in zip(matrices, whole, strict=True)]
        first = _pack([*local, *dense], dtype, num)
        yield self._sum(first)
        averaged = _unpack(first, [*local, *dense])
        for grad, mean in zip(dense, averaged[len(local) :], strict=True):
            grad.copy_(mean)

        columns, factors = [], []
        for (matrix, _), h, mean in zip(matrices, whole, averaged[: len(local)], strict=True):
            p, r = lowrank.compress(h, matrix.basis, self._select(step, matrix, mean.to(h.dtype)))
            columns.append(p)
            factors.append(r)
        second = _pack(factors, dtype, num)
        sent = _unpack(second.clone(), factors)
        yield self._sum(second)
        fine = first.isfinite().all() & second.isfinite().all()
        means = _unpack(second, factors)
        for (matrix, grad), h, p, mine, mean in zip(matrices, whole, columns, sent, means, strict=True):
            rest = lowrank.residual(h, p, mine.to(h.dtype) * num)
            matrix.error.copy_(torch.where(fine, unorient(rest, grad.shape), matrix.error))
            grad.copy_(torch.where(fine, unorient(p @ mean.to(h.dtype), grad.shape), torch.nan))

    def _scores(self, step: int, matrix: Matrix, h: Tensor) -> Tensor:  # (a, b) -> (q, a)
        settings = self.settings
        vectors = lowrank.probes(settings.seed, step, matrix.index, settings.probes, h)
        return lowrank.scores(h, matrix.basis, vectors)

    def _select(self, step: int, matrix: Matrix, mean_scores: Tensor) -> Tensor:  # (q, a) -> (r,)
        return lowrank.select(mean_scores, matrix.size.rank)

    def _sum(self, tensor: Tensor) -> dist.Work:
        return _work(all_reduce(tensor, self.group, async_op=True))

    def _from(self, owner: int, tensor: Tensor) -> dist.Work:
        assert self.group is not None
        return _work(broadcast(tensor, dist.get_global_rank(self.group, owner), self.group, async_op=True))

    # Its turn

    def _enqueue(self, bucket: GradBucket) -> Future[Tensor]:
        """Start a bucket's exchange when the one before has ended."""
        if bucket.index() == 0:
            self.step += 1
            self._last = None
        named = []
        for p, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if p not in self._names:
                rule = "every parameter must have been there at attach()"
                raise TrimtabError(f"{rule}, got one of shape {tuple(p.shape)}: attach after the model is complete")
            named.append((self._names[p], grad))
        buffer = bucket.buffer()
        self._last = run(self._exchange(self.step, buffer, named), buffer, self._last, self._stream(buffer.device))
        return self._last

    def _stream(self, device: torch.device) -> Any:
        """A stream of our own on a device that has streams: the backward goes on beside it."""
        if device.type == "cpu":
            return None
        if device not in self._streams:
            self._streams[device] = torch.get_device_module(device).Stream(device)
        return self._streams[device]


def greedylore_hook(state: GreedyLore, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP calls for each bucket of gradients that is ready."""
    if not isinstance(bucket, GradBucket):
        raise TrimtabError(
            f"GreedyLore needs DDP's buckets, got a {type(bucket).__name__}, as the Python reducer of torch.compile "
            "passes: leave torch._dynamo.config.optimize_ddp at True"
        )
    return state._enqueue(bucket)


def _pack(tensors: list[Tensor], dtype: torch.dtype, num_ranks: int) -> Tensor:
    """One message of many tensors, each rank's share of the mean."""
    return torch.cat([(tensor * (1 / num_ranks)).to(dtype).flatten() for tensor in tensors])


def _unpack(message: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The parts of a message, in the shapes of what was packed."""
    parts = message.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


def _exchanged(ddp: DistributedDataParallel, name: str, p: nn.Parameter) -> bool:
    """Whether DDP exchanges the gradient of a parameter."""
    return p.requires_grad and name not in ddp.parameters_to_ignore


def _check_target(ddp: object, attached: bool) -> None:
    rule = "attach takes a torch.nn.parallel.DistributedDataParallel: wrap the model in one (FSDP is not supported)"
    require(isinstance(ddp, DistributedDataParallel), rule, type(ddp).__name__)
    assert isinstance(ddp, DistributedDataParallel)
    if attached:
        raise TrimtabError("a GreedyLore has one model, got a second attach(): build another one, or load_state_dict()")
    require_room(ddp)
    for name, module in ddp.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise TrimtabError(f"gradients must be dense, got sparse=True in {name!r}: build it with sparse=False")


def _group_for(ddp: DistributedDataParallel, given: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group to send over: one of our own where a future ends later than its call, because on DDP's the order of
    its collectives and ours would be left to chance."""
    theirs = ddp.process_group
    assert theirs is not None
    ranks = dist.get_process_group_ranks(theirs)
    if given is not None:
        rule = f"group must have the ranks of DDP's, {ranks}"
        require(dist.get_process_group_ranks(given) == ranks, rule, dist.get_process_group_ranks(given))
        return given
    backends = dict(pair.split(":") for pair in dist.get_backend_config(theirs).split(","))
    if backends.get(ddp.device.type) != "gloo":
        return theirs
    made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
