# SPDX-License-Identifier: Apache-2.0
"""Bytes that one rank hands to its collectives, and bytes that it sends because of them.

    with traffic() as t:
        train_step()
    t.payload, t.sent, t.calls        in all;  t.by_kind["all_reduce"] of one kind;  print(t) for a table

The payload is what the call is given: a fact. What travels depends on the algorithm, so `sent` is the share of one of
N ranks under the usual one, which gloo's loopback counter confirms within 3 %:

    all_reduce                    the tensor     2 (N - 1) / N x payload     a ring
    broadcast, reduce             the tensor       (N - 1) / N x payload     a mean over ranks: the root's is another
    gather, scatter               one rank's       (N - 1) / N x payload     likewise
    all_gather                    the input        (N - 1)     x payload
    all_to_all, reduce_scatter    the input        (N - 1) / N x payload
    send                          the tensor                     payload     a receive counts nothing, nor a barrier

Two sources, never the same call twice. The collectives of this room go through the four functions below, which report
to every open counter from whatever thread they run on; callbacks of futures run on the backend's. All others (DDP's
own, FSDP's, yours) are seen by a dispatch mode, in the thread of the `with` and in the backward passes it starts.
The mode takes every operator through Python: count some steps, do not train under it.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Group = dist.ProcessGroup | None

SHARES: dict[str, Callable[[int], Fraction]] = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "broadcast": lambda n: Fraction(n - 1, n),
    "reduce": lambda n: Fraction(n - 1, n),
    "gather": lambda n: Fraction(n - 1, n),
    "scatter": lambda n: Fraction(n - 1, n),
    "all_gather": lambda n: Fraction(n - 1),
    "all_to_all": lambda n: Fraction(n - 1, n),
    "reduce_scatter": lambda n: Fraction(n - 1, n),
    "send": lambda n: Fraction(1),
}
"""What one of n ranks sends on average, in payloads."""

OPERATORS = {
    "c10d::allreduce_": ("all_reduce", "tensors"),
    "c10d::allreduce_coalesced_": ("all_reduce", "tensors"),
    "c10d::broadcast_": ("broadcast", "tensors"),
    "c10d::reduce_": ("reduce", "tensors"),
    "c10d::gather_": ("gather", "input_tensors"),
    "c10d::scatter_": ("scatter", "output_tensors"),
    "c10d::allgather_": ("all_gather", "input_tensors"),
    "c10d::allgather_coalesced_": ("all_gather", "input_list"),
    "c10d::_allgather_base_": ("all_gather", "input_tensor"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "inputs"),
    "c10d::alltoall_": ("all_to_all", "input_tensors"),
    "c10d::alltoall_base_": ("all_to_all", "input"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "c10d::send": ("send", "tensors"),
    "_c10d_functional::all_reduce": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", "inputs"),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", "inputs"),
    "_c10d_functional::broadcast": ("broadcast", "input"),
    "_c10d_functional::broadcast_": ("broadcast", "input"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "input"),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", "input"),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", "inputs"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
}
"""The kind of each collective's operator, and the argument that holds its payload."""


class Tally(NamedTuple):
    """What collectives came to, on this rank."""

    calls: int = 0
    payload: int = 0
    """Bytes handed over."""
    sent: float = 0.0
    """Bytes sent, by the table above: exact for whole numbers below 2^53."""


class Traffic:
    """The count of one `with traffic()`, readable while it runs and afterwards."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[int, int, Fraction]] = {}
        self._lock = threading.Lock()

    def add(self, kind: str, payload: int, num_ranks: int) -> None:
        """Count one collective."""
        sent = payload * SHARES[kind](num_ranks)
        with self._lock:
            calls, before, already = self._sums.get(kind, (0, 0, Fraction(0)))
            self._sums[kind] = calls + 1, before + payload, already + sent

    @property
    def by_kind(self) -> dict[str, Tally]:
        """The count of each kind of collective that was seen."""
        with self._lock:
            return {kind: _tally([sums]) for kind, sums in self._sums.items()}

    @property
    def total(self) -> Tally:
        """The count of all kinds together."""
        with self._lock:
            return _tally(self._sums.values())

    @property
    def calls(self) -> int:
        """How many collectives."""
        return self.total.calls

    @property
    def payload(self) -> int:
        """Bytes that this rank handed to them."""
        return self.total.payload

    @property
    def sent(self) -> float:
        """Bytes that this rank sent because of them."""
        return self.total.sent

    def __str__(self) -> str:
        rows = [*self.by_kind.items(), ("all", self.total)]
        lines = [f"{kind:<16}{one.calls:>8}{one.payload:>18,}{one.sent:>18,.0f}" for kind, one in rows]
        return "\n".join([f"{'collective':<16}{'calls':>8}{'payload, bytes':>18}{'sent, bytes':>18}", *lines])


def _tally(sums: Iterable[tuple[int, int, Fraction]]) -> Tally:
    sums = list(sums)
    calls, payloads, sents = (sum(column) for column in zip(*sums, strict=True)) if sums else (0, 0, Fraction(0))
    return Tally(int(calls), int(payloads), float(sents))


_open: list[Traffic] = []
_open_lock = threading.Lock()


class _Issuing(threading.local):
    """Whether this thread is inside one of the functions below, which count by themselves."""

    ours = False


_issuing = _Issuing()


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count the collectives of a block of code; blocks may overlap, and each counts all that happens in it."""
    counter = Traffic()
    with _open_lock:
        _open.append(counter)
    try:
        with _Foreign(counter):
            yield counter
    finally:
        with _open_lock:
            _open.remove(counter)


class _Foreign(TorchDispatchMode):
    """Counts the collectives that are not ours."""

    def __init__(self, counter: Traffic) -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _issuing.ours and func.name() in OPERATORS:
            kind, argument = OPERATORS[func.name()]
            names = [one.name for one in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.counter.add(kind, _bytes(given[argument]), _num_ranks(given))
        return result


def _bytes(payload: Any) -> int:
    """Bytes of a tensor, or of all tensors in a list, or of lists of them."""
    if isinstance(payload, Tensor):
        return payload.numel() * payload.element_size()
    return sum(_bytes(part) for part in payload)


def _num_ranks(given: dict[str, Any]) -> int:
    """The size of the group that an operator was called with, as an object or by name."""
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # pyright: ignore
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(group, dist.ProcessGroup)
    return group.size()


def all_reduce(
    tensor: Tensor, group: Group = None, *, op: Any = dist.ReduceOp.SUM, async_op: bool = False
) -> dist.Work | None:
    """Reduce a tensor over the group, in place."""
    return _issue("all_reduce", tensor, group, lambda: dist.all_reduce(tensor, op, group, async_op))


def broadcast(tensor: Tensor, src: int, group: Group = None, async_op: bool = False) -> dist.Work | None:
    """Copy the tensor of rank `src`, counted in the whole job as torch does, to the group's others."""
    return _issue("broadcast", tensor, group, lambda: dist.broadcast(tensor, src, group, async_op))


def all_to_all(out: Tensor, inp: Tensor, group: Group = None, async_op: bool = False) -> dist.Work | None:
    """Send the j-th of N equal parts of `inp` to rank j, and receive its part for this rank in `out`."""
    return _issue("all_to_all", inp, group, lambda: dist.all_to_all_single(out, inp, None, None, group, async_op))


def all_gather(out: Tensor, inp: Tensor, group: Group = None, async_op: bool = False) -> dist.Work | None:
    """Put the `inp` of all ranks one after the other in `out`."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    return _issue("all_gather", inp, group, lambda: gather(out, inp, group, async_op))


def _issue(kind: str, payload: Tensor, group: Group, call: Callable[[], Any]) -> dist.Work | None:
    """Start a collective, keep the dispatch mode from counting it, and report it."""
    _issuing.ours = True
    try:
        work = call()
    finally:
        _issuing.ours = False
    num_bytes, num_ranks = _bytes(payload), dist.get_world_size(group)
    with _open_lock:
        counters = list(_open)
    for counter in counters:
        counter.add(kind, num_bytes, num_ranks)
    return work
