# SPDX-License-Identifier: Apache-2.0
"""Diagnose: which units does low precision hurt, found out without training.

A batch has one gradient per choice of paths. Let g(S) be the gradient of the loss over all trainable parameters while
the units in S run high and all others low, and g(all) the one with every unit high. Then

    E(S)             = |g(S) - g(all)|^2             the squared gradient error; E(all) = 0
    only b low       : E(all without b)              what b does to an otherwise high model
    only b high      : E({b})                        what is left when b alone is recovered
    recovery gap of b: gap(b) = E({}) - E({b})       what recovering b takes away

The paper (arXiv 2606.00539, Corollary 1) uses the recovery gap in its argument for choosing some units over others and
does not measure it. The lines above are the definition used here, and it is measured by brute force:

    recovery_gaps(model, batch)      gap(b) of one batch, U + 2 passes: what an oracle needs in every step
    diagnose(model, batches)         both sides and each of R roles, 3 + (2 + R) U passes a batch, 95 % intervals

A pass is a forward and a backward, so an oracle makes a step U + 3 times as expensive: it shows what knowing the gaps
would be worth, nobody would train with it. A diagnosis is made once, for a model that will be trained for days.

A role (output, grad_input, grad_weight) is probed by giving only that GEMM of b its low form. Gaps do not add up: two
units may spoil the gradient in opposite directions, or one may hide the other's error. So the list of the largest gaps
is a greedy choice, and what the whole list really recovers is measured once more, in the last pass of a batch.

What is worth recovering and what is broken are two questions. A unit that hardly matters to the gradient may be
thoroughly broken and still have a smaller gap than the plain rounding of one that matters. So each pass also looks at
the unit's own parameters alone: `own` = |g_b - g_b(all)| / |g_b(all)| with only b low, of the order of the format's
rounding for a healthy unit, and above it for a broken one (`Diagnosis.ranked("own")`).

An error that is not finite counts as infinite: recovering the one unit that makes a NaN has an infinite gap, recovering
a unit while another still makes a NaN has none. Nothing is trained and nothing changes: see `probing.py`.
"""

import glob
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from torch import Tensor, nn

from trimtab.control.units import Unit, find_units
from trimtab.control.values import Floats
from trimtab.errors import TrimtabError
from trimtab.lab.diagnosis import Diagnosis, Probe, gap, num_high
from trimtab.lab.probing import LossFn, Prober, Seen, only_role, probing
from trimtab.linear.linear import switch_linears
from trimtab.linear.paths import ROLES

Progress = Callable[[int, int], None]
"""Told after each pass: how many are done, how many there are."""


def model_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a model that takes inputs and targets and returns `.loss`."""
    return model(*batch).loss


def diagnose(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    units: Sequence[str] | None = None,
    roles: Sequence[str] = ROLES,
    loss_fn: LossFn = model_loss,
    max_high: int | float = 0.05,
    progress: Progress | None = None,
) -> Diagnosis:
    """Measure what each unit's low path does to the gradient and the loss; the model comes back as it was.

    The model stays in the mode it is in: one that is to be trained belongs in `train()`.

    Args:
        model: a converted one; every switch is a unit.
        batches: whatever `loss_fn` takes; two or more for intervals.
        units: names or globs of the units to probe; None means all. The others run with the rest.
        roles: the GEMMs to probe one by one; those that the low path does not change are left out. () probes none.
        loss_fn: `loss_fn(model, batch)` returns a scalar tensor.
        max_high: the budget of the keep-high list, a count or a fraction of the units.
    """
    found, batches = chosen(switchable(model), units), list(batches)
    if not batches:
        raise TrimtabError("a diagnosis needs at least 1 batch, got none: give 2 or more for intervals")
    num_high(max_high, len(found))  # refuse a bad budget before the passes, not after
    recipes = list(dict.fromkeys(linear.recipe for linear in switch_linears(model)))
    for role in roles:
        if role not in ROLES:
            raise TrimtabError(f"roles must be some of {', '.join(ROLES)}, got {role!r}")
    roles = [role for role in roles if any(getattr(r.low, role) != getattr(r.high, role) for r in recipes)]
    count = _Count(num_passes(len(found), len(batches), len(roles)), progress)
    names = [unit.name for unit in found]
    with probing(model, loss_fn, count) as prober:
        references = [prober.reference(batch, f"batch {i} of {len(batches)}") for i, batch in enumerate(batches, 1)]
        pairs = list(zip(batches, references, strict=True))
        seen = [_probe(prober, batch, reference, found, roles) for batch, reference in pairs]
        result = Diagnosis(
            recipe=", ".join(recipe.name for recipe in recipes),
            units=tuple(names),
            patterns=tuple(pattern_of(unit) for unit in found),
            norm=np.array([reference.norm for reference in references]),
            loss=np.array([reference.loss for reference in references]),
            low=_columns([one["low"] for one in seen]),
            only_low=_columns([[one["only_low", name] for one in seen] for name in names]),
            only_high=_columns([[one["only_high", name] for one in seen] for name in names]),
            roles={role: _columns([[one[role, name] for one in seen] for name in names]) for role in roles},
            passes=count.total,
        )
        kept = result.keep_high(max_high)
        high = [unit for unit in found if unit.name in kept]
        together = _columns([prober.high(batch, reference, *high) for batch, reference in pairs])
    return replace(result, kept=tuple(kept), kept_high=together)


def _probe(prober: Prober, batch: Any, reference: Any, units: Sequence[Unit], roles: Sequence[str]) -> dict[Any, Seen]:
    """All passes of a batch: everything low, and each unit on both sides and in each role."""
    seen: dict[Any, Seen] = {"low": prober.high(batch, reference)}
    for unit in units:
        seen["only_low", unit.name] = prober.low(batch, reference, unit, own=unit)
        seen["only_high", unit.name] = prober.high(batch, reference, unit, own=unit)
        for role in roles:
            with only_role(unit, role):
                seen[role, unit.name] = prober.low(batch, reference, unit, own=unit)
    return seen


def recovery_gaps(
    model: nn.Module, batch: Any, loss_fn: LossFn = model_loss, *, units: Sequence[Unit] | None = None
) -> Floats:
    """The exact recovery gap of every unit on one batch, (U,), by U + 2 passes; the model comes back as it was.

    Args:
        units: those of a controller, for an array in its order; a unit that cannot switch has a gap of 0. None means
            the units of the model.
    """
    own = switchable(model)
    with probing(model, loss_fn, lambda: None) as prober:
        reference = prober.reference(batch)
        low = prober.high(batch, reference).error
        high = [low if unit.switch is None else prober.high(batch, reference, unit).error for unit in units or own]
    return gap(np.full(len(high), low), np.array(high, float))


def num_passes(num_units: int, num_batches: int, num_roles: int = len(ROLES)) -> int:
    """How many forward and backward passes a diagnosis takes."""
    return num_batches * (3 + (2 + num_roles) * num_units)


class _Count:
    """Counts passes and tells who wants to know."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self._done, self._progress = total, 0, progress

    def __call__(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self.total)


def _columns(seen: Any) -> Probe:
    """Passes, in a list or a list of lists, as arrays of that shape."""
    return Probe(*np.moveaxis(np.array(seen, float), -1, 0))


def pattern_of(unit: Unit) -> str:
    """A glob over module paths that names a unit's linears: the unit's own path, or all that lies below it."""
    paths = [getattr(module, "fqn", unit.name) for module in unit.modules]
    if paths == [unit.name]:
        return glob.escape(unit.name)
    below = all(path.startswith(f"{unit.name}.") for path in paths)
    return f"{glob.escape(unit.name)}.*" if below else unit.name  # else the unit was named by a glob


def switchable(model: nn.Module) -> tuple[Unit, ...]:
    """The units of a converted model; a plain one is refused."""
    units = tuple(unit for unit in find_units(model) if unit.recoverable)
    if not units:
        raise TrimtabError(
            "a diagnosis needs units that can switch, and this model has none: call trimtab.convert_(model, recipe) "
            "first"
        )
    return units


def chosen(units: Sequence[Unit], wanted: Sequence[str] | None) -> list[Unit]:
    """The units that some names or globs choose, in the model's order."""
    if wanted is None:
        return list(units)
    names = [unit.name for unit in units]
    if not wanted:
        raise TrimtabError(f"units must name at least one of {', '.join(names[:3])}, ..., got none: None means all")
    matches = {pattern: [n for n in names if n == pattern or fnmatchcase(n, pattern)] for pattern in wanted}
    for pattern, found in matches.items():
        if not found:
            nearest = ", ".join(get_close_matches(pattern, names, n=3, cutoff=0.0))
            raise TrimtabError(f"units must name units of the model, {pattern!r} matches none: nearest are {nearest}")
    return [unit for unit in units if any(unit.name in found for found in matches.values())]
