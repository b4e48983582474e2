# SPDX-License-Identifier: Apache-2.0
"""Ranks: who must agree with whom, and the one collective of a step that makes them.

Ranks that disagree about who runs high train different functions. So all ranks of a run see the same numbers, bit
for bit; judging and deciding are pure functions of them. Once, when the controller is made, the ranks tell each other
which pieces of which parameters they hold. From then on, in every step:

    measure   the squared norm of each piece of a gradient that this rank answers for
    add up    ONE all-reduce (sum, float64) of [squares | which parameters had a gradient | the sensors' columns]

A rank answers for a piece if it is the first rank that holds it, and the others put a zero there. So

    DDP          the first rank answers for everything, and the sum is a broadcast from it; it is sent as one
    FSDP2, TP    each rank answers for its shards: |g|^2 is the sum of the shards' |g|^2
    HSDP         shards are those of the first replica, so a copy counts once
    FSDP2 x TP   as many pieces as ranks; a parameter that is cut over one dimension only counts once along the other
    experts      a parameter that lives on some ranks only is a sum over those, which is its expert-data group
    stages       units of other pipeline stages are known here by name and norm: one budget for all of them

x + 0 + ... + 0 is x in any order, and a sum of shards is made once and handed to all: agreement does not rest on ranks
rounding alike. A NaN in one rank's shard is a NaN for all. What a sensor says of a unit is what the first rank that has
the unit measured, on its own share of the batch.

Who belongs together is read off the model: the process group of its DDP wrapper, the mesh of its DTensors. A plain
model belongs to nobody, even where a process group exists, because other ranks may train other things: `process_group=`
says otherwise. With one rank nothing of this happens. All ranks must do alike what reads or writes gradients: step,
clip, and whatever changes a gradient between the two.

A rank that never comes would be waited for in silence, and a collective does not say who it was. So before the first
one the ranks count each other on the store on which their process group was made (`wait_for_all`), and whoever has not
made its controller after `PATIENCE` is named. In later steps the time-out is the process group's.
"""

import itertools
import logging
import sys
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from trimtab.control.units import Switch, Unit
from trimtab.errors import TrimtabError
from trimtab.modules import bare_modules
from trimtab.shards import is_dtensor, local

log = logging.getLogger(__name__)

WHOLE = ("update", "spectral", "gsnr", "gap")
"""Columns whose sensors need whole parameters or gradients."""
PATIENCE = timedelta(minutes=10)
"""How long a rank waits for the others to make their controller, unless their process group waits less."""
REMINDER = timedelta(minutes=1)
"""How often it says that it does."""


class Card(NamedTuple):
    """A unit as other ranks know it."""

    name: str
    parameters: tuple[str, ...]
    slice: int | None
    recoverable: bool
    bystander: bool


class Share(NamedTuple):
    """What a rank tells the others when the controller is made."""

    stage: int | None
    terms: dict[str, Any]
    """What must be the same everywhere: policy, mode, ..."""
    pieces: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """Parameter -> which piece of it is held (its place along the dimensions that cut it), and the whole shape."""
    units: tuple[Card, ...]


class Slots(NamedTuple):
    """Where numbers stand in the vector of squared norms: one slot per parameter, or per slice of a stacked one."""

    num: int
    slot_of: NDArray[np.int64]  # (pairs,) the slots that make up the units,
    unit_of: NDArray[np.int64]  # (pairs,) and whose they are
    sliced: NDArray[np.bool_]  # (num,) which slots are slices
    places: list[NDArray[np.int64]]
    """For each parameter here, the slots of its numbers: one, or one per slice that is here."""
    owned: NDArray[np.bool_]  # (P,) the parameters that this rank answers for


def lay_out(
    units: Sequence[Card], sizes: Mapping[str, int], here: Mapping[str, Sequence[int] | None], owned: set[str]
) -> Slots:
    """Number the slots.

    Args:
        sizes: every parameter of any rank, and how many slices it has.
        here: the parameters of this rank, and which slices of a stacked one are here.
        owned: those that this rank answers for.
    """
    stacked = {name for unit in units if unit.slice is not None for name in unit.parameters}
    widths = [sizes[name] if name in stacked else 1 for name in sizes]
    first = dict(zip(sizes, np.cumsum([0, *widths])[:-1].tolist(), strict=True))
    pairs: list[tuple[int, int]] = []
    for u, unit in enumerate(units):
        for name in unit.parameters:
            chosen = range(sizes[name]) if unit.slice is None and name in stacked else [unit.slice or 0]
            pairs += [(first[name] + i, u) for i in chosen]
    places = [
        np.array([first[name] + i for i in (slices if name in stacked and slices is not None else [0])], np.int64)
        for name, slices in here.items()
    ]
    return Slots(
        num=sum(widths),
        slot_of=np.array([slot for slot, _ in pairs], np.int64),
        unit_of=np.array([u for _, u in pairs], np.int64),
        sliced=np.repeat([name in stacked for name in sizes], widths).astype(bool),
        places=places,
        owned=np.array([name in owned for name in here], bool),
    )


def card(unit: Unit, name_of: Callable[[nn.Parameter], str]) -> Card:
    """A unit by names."""
    return Card(unit.name, tuple(map(name_of, unit.parameters)), unit.index, unit.recoverable, unit.bystander)


def alone(units: Sequence[Unit], parameters: Sequence[nn.Parameter]) -> Slots:
    """The slots where nobody else takes part."""
    names = {id(p): str(i) for i, p in enumerate(parameters)}
    sizes = {names[id(p)]: len(p) if p.dim() else 1 for p in parameters}
    here = {name: range(size) for name, size in sizes.items()}
    return lay_out([card(unit, lambda p: names[id(p)]) for unit in units], sizes, here, set(sizes))


class Ranks:
    """What this rank contributes to a reading, and how the ranks add it up. Made by `join`."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        units: tuple[Unit, ...],
        stages: tuple[int, ...],
        slots: Slots,
        heard: Sequence[int],
        sole: bool,
    ) -> None:
        """Keep all that `join` has found.

        Args:
            units: those of every rank, the same tuple of names on all of them.
            stages: the pipeline stage of each.
            heard: the units whose columns this rank answers for.
            sole: whether the first rank answers for everything.
        """
        self.units, self.slots, self.stages = units, slots, stages
        self._group, self._sole = group, sole
        self._source = dist.get_global_rank(group, 0)
        self.is_first = dist.get_rank() == self._source
        self._heard = torch.tensor(list(heard), dtype=torch.int64)
        self._pattern: tuple[bytes, Tensor, Tensor] | None = None

    def add_up(self, norms: Tensor, present: NDArray[np.bool_], columns: Sequence[Tensor]) -> Tensor:
        """The squares, the presence of every slot and every column, equal on all ranks: one collective.

        Args:
            norms: of the gradients that exist and that this rank answers for, slice by slice, in order.
            present: which parameters have a gradient here, (P,).
        """
        slots, flags = self._pattern_of(present, norms.device)
        packed = torch.cat([flags, flags.new_zeros(len(columns) * len(self.units))])
        packed.index_copy_(0, slots, norms.double().square())
        return self._sum(self._with(packed, columns, 2 * self.slots.num))

    def add_up_columns(self, columns: Sequence[Tensor], place: torch.device) -> Tensor:
        """The columns alone, for when the norms are there already (clipping came first)."""
        packed = torch.zeros(len(columns) * len(self.units), dtype=torch.float64, device=place)
        return self._sum(self._with(packed, columns, 0))

    def _with(self, packed: Tensor, columns: Sequence[Tensor], start: int) -> Tensor:
        """Write the columns of the units that this rank answers for."""
        if columns and len(self._heard):
            self._heard = self._heard.to(packed.device)
            for i, column in enumerate(columns):
                mine = column.to(packed.device, torch.float64, non_blocking=True)[self._heard]
                packed.index_copy_(0, self._heard + (start + i * len(self.units)), mine)
        return packed

    def _sum(self, packed: Tensor) -> Tensor:
        if self._sole:
            dist.broadcast(packed, self._source, group=self._group)
        else:
            dist.all_reduce(packed, group=self._group)
        return packed

    def _pattern_of(self, present: NDArray[np.bool_], place: torch.device) -> tuple[Tensor, Tensor]:
        """The slots of the numbers that are measured, and the vector with presence alone: sent to the device once."""
        key = present.tobytes()
        if self._pattern is None or self._pattern[0] != key or self._pattern[1].device != place:
            mine = [self.slots.places[i] for i in np.flatnonzero(present & self.slots.owned)]
            slots = np.concatenate([*mine, np.zeros(0, np.int64)])
            flags = np.zeros(2 * self.slots.num)
            flags[self.slots.num + slots] = 1
            self._pattern = key, torch.from_numpy(slots).to(place), torch.from_numpy(flags).to(place)
        return self._pattern[1], self._pattern[2]


def join(
    model: nn.Module,
    units: tuple[Unit, ...],
    parameters: Sequence[nn.Parameter],
    terms: dict[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    stage: int | None = None,
) -> Ranks | None:
    """Meet the ranks that this controller must agree with; None if there are none. Every one of them must call this.

    Args:
        parameters: everything that is measured here, in the observer's order.
        terms: what must be the same on every rank, checked.
        stage: the pipeline stage that this model is; None outside a pipeline.
    """
    group = find_group(model, parameters, process_group, stage)
    if group is None:
        return None
    names = _names(model, units, parameters, stage)
    mine = Share(
        stage,
        terms,
        {names[id(p)]: (_place(p), tuple(p.shape)) for p in parameters},
        tuple(card(unit, lambda p: names[id(p)]) for unit in units),
    )
    shares: list[Share] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(shares, mine, group)
    _check(shares)
    return _ranks(group, shares, dist.get_rank(group), units, {names[id(p)]: _slices(p) for p in parameters})


def _ranks(
    group: dist.ProcessGroup,
    shares: Sequence[Share],
    rank: int,
    units: tuple[Unit, ...],
    here: Mapping[str, Sequence[int] | None],
) -> Ranks:
    """Put all shares together; the same on every rank, but for what it holds."""
    owners: dict[tuple[str, tuple[int, ...]], int] = {}
    for r, share in enumerate(shares):
        for name, (place, _) in share.pieces.items():
            owners.setdefault((name, place), r)
    listed = _unique_names(shares)
    hearers: dict[str, int] = {}
    for r, cards in enumerate(listed):
        for c in cards:
            hearers.setdefault(c.name, r)
    order = merged([[c.name for c in cards] for cards in _by_stage(shares, listed)])
    cards = {c.name: c for cards in reversed(listed) for c in cards}
    for c in (c for cards in listed for c in cards):
        known = cards[c.name]
        cards[c.name] = known._replace(parameters=tuple(dict.fromkeys((*known.parameters, *c.parameters))))
    own = {c.name: replace(unit, name=c.name) for c, unit in zip(listed[rank], units, strict=True)}
    everyone = tuple(own.get(name) or _elsewhere(cards[name]) for name in order)
    sizes = {name: (shape or (1,))[0] for share in shares for name, (_, shape) in share.pieces.items()}
    answered = {name for name, (place, _) in shares[rank].pieces.items() if owners[name, place] == rank}
    slots = lay_out([cards[name] for name in order], sizes, here, answered)
    heard = [i for i, name in enumerate(order) if hearers[name] == rank]
    sole = not any(owners.values()) and not any(hearers.values())
    stages = tuple(shares[hearers[name]].stage or 0 for name in order)
    return Ranks(group, everyone, stages, slots, heard, sole)


def _elsewhere(known: Card) -> Unit:
    """A unit of another rank: nothing of it is here, and the switch that it has here moves nobody."""
    return Unit(known.name, (), Switch(known.name) if known.recoverable else None, (), known.bystander, known.slice)


def _by_stage(shares: Sequence[Share], listed: Sequence[tuple[Card, ...]]) -> list[tuple[Card, ...]]:
    order = sorted(range(len(shares)), key=lambda r: (shares[r].stage or 0, r))
    return [listed[r] for r in order]


def _unique_names(shares: Sequence[Share]) -> list[tuple[Card, ...]]:
    """Each rank's units; where two stages use a name twice, every name says its stage."""
    stage_of: dict[str, int | None] = {}
    if all(stage_of.setdefault(c.name, share.stage) == share.stage for share in shares for c in share.units):
        return [share.units for share in shares]
    return [tuple(c._replace(name=f"stage{share.stage}.{c.name}") for c in share.units) for share in shares]


def merged(chains: Sequence[Sequence[str]]) -> list[str]:
    """One order that keeps the order of every chain: the first chain's names first, unless another has some before."""
    left = [deque(chain) for chain in dict.fromkeys(map(tuple, chains))]
    waiting = Counter(name for chain in left for name in list(chain)[1:])
    found: dict[str, None] = {}
    while left := [chain for chain in left if chain]:
        found[next((chain[0] for chain in left if not waiting[chain[0]]), left[0][0])] = None
        for chain in left:
            while chain and chain[0] in found:
                chain.popleft()
                waiting.subtract(itertools.islice(chain, 1))
    return list(found)


def _check(shares: Sequence[Share]) -> None:
    """Refuse ranks that do not fit together; every rank has heard the same, so all of them refuse."""
    for r, share in enumerate(shares):
        for term, value in shares[0].terms.items():
            if share.terms[term] != value:
                raise TrimtabError(
                    f"every rank must make the same controller, got {term} {value!r} on the first rank and "
                    f"{share.terms[term]!r} on rank {r} of the group: pass the same arguments everywhere"
                )
        if (share.stage is None) != (shares[0].stage is None):
            raise TrimtabError("stage must be given on every rank or on none, got both: number the pipeline's stages")
    shapes: dict[str, tuple[int, ...]] = {}
    for r, share in enumerate(shares):
        for name, (_, shape) in share.pieces.items():
            if shapes.setdefault(name, shape) != shape:
                raise TrimtabError(
                    f"a parameter must have one shape, got {shapes[name]} and, on rank {r} of the group, {shape} for "
                    f"{name!r}: parts of a pipeline need stage=, other models a process_group of their own"
                )


def find_group(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    process_group: dist.ProcessGroup | None = None,
    stage: int | None = None,
) -> dist.ProcessGroup | None:
    """The process group of those who must agree, read off the model's wrapper and its parameters' meshes."""
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None or stage is not None:
            raise TrimtabError("process_group and stage speak of several ranks: call init_process_group first")
        return None
    _refuse_flat(model)
    wrappers = [m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)]
    meshes = {p.device_mesh for p in parameters if is_dtensor(p)}
    spans = {tuple(dist.get_process_group_ranks(w.process_group)): w.process_group for w in wrappers}
    spans |= {_ranks_of(mesh): mesh.get_group() if mesh.ndim == 1 else None for mesh in meshes}
    if process_group is None and stage is not None:
        process_group = dist.group.WORLD
    if process_group is not None:
        widest = tuple(dist.get_process_group_ranks(process_group))
    elif spans:
        widest = max(spans, key=len)
    else:
        if dist.get_world_size() > 1:
            log.warning(
                "%d ranks, and the model is neither wrapped nor sharded: each rank decides for itself; give the "
                "controller the wrapped model, or process_group=",
                dist.get_world_size(),
            )
        return None
    for ranks in spans:
        if not set(ranks) <= set(widest):
            raise TrimtabError(
                f"one group must hold every rank that has a piece or a copy of a parameter, got ranks {list(ranks)} "
                f"beside {list(widest)}: pass process_group= with all of them (torch.distributed.group.WORLD)"
            )
    if len(widest) == 1:
        return None
    if process_group is None:
        process_group = spans[widest]
    if process_group is None and len(widest) == dist.get_world_size():
        process_group = dist.group.WORLD
    wait_for_all(widest, min(PATIENCE, _time_out(process_group)))
    if process_group is None:
        process_group = dist.new_group(list(widest), use_local_synchronization=True)  # type: ignore[assignment]
    return process_group


def wait_for_all(ranks: tuple[int, ...], patience: timedelta) -> None:
    """Go on when all ranks have come here, and name those that have not when the time is over.

    No collective, but questions to the store: which meeting of theirs this is for the rank, how many have come to it,
    and, until they have, whether all have. `store.wait` would ask once, but hears no signal meanwhile: where a rank is
    killed here, torchrun's SIGTERM is what ends the others.
    """
    from torch.distributed import distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

    store, me = distributed_c10d._get_default_store(), dist.get_rank()
    key = f"trimtab/controllers/{zlib.crc32(repr(ranks).encode())}"
    number = store.add(f"{key}/of/{me}", 1)
    if store.add(f"{key}/{number}", 1) == len(ranks):
        store.set(f"{key}/{number}/all", "here")
    began, pause, reminders = time.monotonic(), 0.001, 0
    while not store.check([f"{key}/{number}/all"]):
        waited = timedelta(seconds=time.monotonic() - began)
        if waited >= min(patience, (reminders + 1) * REMINDER):
            absent = [rank for rank in ranks if store.add(f"{key}/of/{rank}", 0) < number]
            names = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
            if waited >= patience:
                for counted in (f"{key}/of/{me}", f"{key}/{number}"):
                    store.add(counted, -1)  # a second attempt, by all of them, begins where the others are
                raise TrimtabError(
                    f"every rank must make the controller, because they decide together, got none from {names} within "
                    f"{patience.total_seconds():g} s: make it on every rank, also where nothing is recorded, or give "
                    "it a process_group of those that do"
                )
            log.warning("rank %d waits for %s to make the controller too", me, names)
            reminders += 1
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _time_out(group: dist.ProcessGroup | None) -> timedelta:
    """How long a process group waits in a collective, as far as it is there and says so."""
    if group is None:
        return PATIENCE
    found = []
    for place in group._device_types:
        with suppress(AttributeError, RuntimeError):  # not every backend has options
            found.append(group._get_backend(place).options._timeout)
    return min(found, default=PATIENCE)


def refuse_sensors(
    columns: Sequence[str], model: nn.Module, units: Sequence[Unit], parameters: Sequence[nn.Parameter]
) -> None:
    """Refuse columns that pieces cannot give: those of whole parameters, and of outputs that are cut themselves."""
    if columns and any(unit.index is not None for unit in units):
        raise TrimtabError(
            f"a sensor reads whole parameters and modules, got {', '.join(columns)} for units that are slices of a "
            "stack: watch the stack as one unit, or leave the sensors out"
        )
    cuts = [sum(not placement.is_replicate() for placement in p.placements) for p in parameters if is_dtensor(p)]
    whole = [name for name in columns if name in WHOLE]
    if whole and any(cuts):
        raise TrimtabError(
            f"a whole parameter is needed for {', '.join(whole)}, got shards of them on each rank: choose another "
            "detector, or replicate the model (DDP)"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")
    only_stored = (
        fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in model.modules()) and max(cuts, default=0) < 2
    )
    if columns and any(cuts) and not only_stored:
        raise TrimtabError(
            f"whole outputs are needed for {', '.join(columns)}, got outputs that tensor parallelism cuts: choose a "
            "detector of norms alone"
        )


def check_bound(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse to measure parameters that the model no longer has: `fully_shard` replaces them."""
    known = set(map(id, parameters))
    replaced = [
        name for name, p in model.named_parameters() if is_dtensor(p) and p.requires_grad and id(p) not in known
    ]
    if replaced:
        raise TrimtabError(
            f"a controller measures the parameters that the model had when it was made, got others since "
            f"({', '.join(replaced[:3])}): call fully_shard or parallelize_module first, then make the controller"
        )


def _refuse_flat(model: nn.Module) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules()):
        raise TrimtabError(
            "a parameter must keep its shape or be a DTensor, got FullyShardedDataParallel, which cuts flat vectors: "
            "use torch.distributed.fsdp.fully_shard"
        )


def _names(
    model: nn.Module, units: Sequence[Unit], parameters: Sequence[nn.Parameter], stage: int | None
) -> dict[int, str]:
    """Each parameter's name in the bare model, the same on every rank that has it; stages have their own."""
    names: dict[int, str] = {}
    for path, module in bare_modules(model).items():
        for name, p in module.named_parameters(recurse=False):
            names.setdefault(id(p), f"{path}.{name}")
    for unit in units:
        for i, p in enumerate(unit.parameters):
            names.setdefault(id(p), f"{unit.name}/{i}")
    prefix = "" if stage is None else f"{stage}/"
    return {id(p): prefix + names[id(p)] for p in parameters}


def _place(p: nn.Parameter) -> tuple[int, ...]:
    """Which piece of a parameter is here: the rank's coordinates along the mesh dimensions that cut it."""
    if not is_dtensor(p):
        return ()
    coordinates = p.device_mesh.get_coordinate() or ()
    return tuple(c for c, placement in zip(coordinates, p.placements, strict=True) if not placement.is_replicate())


def _slices(p: nn.Parameter) -> list[int]:
    """Which slices along its first dimension are here."""
    if not is_dtensor(p):
        return list(range(len(p) if p.dim() else 1))
    from torch.distributed.tensor import Replicate, distribute_tensor

    if not p.dim():
        return [0]
    cut = [placement if getattr(placement, "dim", None) == 0 else Replicate() for placement in p.placements]
    index = torch.arange(len(p), device=local(p).device)
    return local(distribute_tensor(index, p.device_mesh, cut, src_data_rank=None)).tolist()


def _ranks_of(mesh: Any) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))
