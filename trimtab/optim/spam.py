# SPDX-License-Identifier: Apache-2.0
"""SPAM: Adam that cuts gradient spikes and forgets its moments on a clock (arXiv 2501.06842).

A spike is one coordinate whose gradient is 50 to 1000 times its usual size. Adam remembers it for about 1/(1 - beta1)
steps in the first moment and 1/(1 - beta2) in the second. SPAM cuts each coordinate against its own second moment,
and wipes both moments every `reset_every` steps. Per element, at a parameter's update number t = 1, 2, ...:

    k = t mod reset_every
    if k = 0:                   m = v = 0                                       before the gradient is used
    s = 1 - 0.99 * (1 + cos(pi * k / (warmup + 1))) / 2                         for k < warmup after a reset: 0.01 -> 1
        1                                                                       otherwise, and before the first reset
    if k >= grace, v > 0 and g^2 > threshold * v:   g = sign(g) * sqrt(threshold * v)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g^2                                           the cut g enters both
    n = t before the first reset, then k + 1                                    the age of the moments
    p = p - lr * s * m / (1 - beta1^n) / (sqrt(v / (1 - beta2^n)) + eps)
    p = p - lr * weight_decay * p                                               not scaled by s

One integer per parameter, `step`, is the whole clock: `clock` gives everything else in closed form. The state is
{step, exp_avg, exp_avg_sq}, so saving and resuming at any k need no code. A parameter without a gradient is passed
over and its clock stands still.

v is not corrected for its age in the test, so k steps after a reset a spike is what exceeds
sqrt(threshold * (1 - beta2^k)) times the usual size: 10 at k = 20, 26 at 150, 44 at 500, 71 in the end.

An infinite gradient is a spike like any other, once the grace steps are over. A NaN is larger than nothing: it goes
into moments and parameter, as in Adam, and a reset wipes only the moments. Look for it before the step.

Where this differs from the published code, which `reference=True` gives back:
    bias correction     there n = t always: the first update after a reset is 2 to 3 times too large, and grows to 6.6
                        (late, constant gradient) while the cosine hides it. Here it is exactly lr * s.
    idle coordinates    there v = 0 is cut too, to zero: a coordinate without gradient during the grace steps (a rare
                        token's embedding, an idle expert) stays frozen until the next reset.
    eps                 there added to sqrt(v) before the correction: up to 32 times heavier at n = 1.
And where no switch brings the published behaviour back: gradients are never written to, and decay is never dropped.

`density` below 1 keeps moments for, and moves, a random share of each matrix: see `sparse.py`.
`threshold=math.inf`, `reset_every=1000`, `warmup=0` behind a `GradStabilizer` is Stable-SPAM without its AdaClip.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, ParamsT

from trimtab.checks import require
from trimtab.devices import has_triton
from trimtab.errors import NoEffectWarning, TrimtabError
from trimtab.optim import kernels, sparse
from trimtab.optim.kernels import Coefficients, Work, moment_dtype
from trimtab.optim.settings import check_gradient, check_group
from trimtab.shards import is_dtensor, local

MOMENTS = ("exp_avg", "exp_avg_sq")


class Clock(NamedTuple):
    """What the number of an update says about it."""

    reset: bool
    """Whether the moments are wiped first."""
    scale: float
    """s, the re-warm-up's share of the learning rate."""
    clips: bool
    """Whether the grace steps are over."""
    age: int
    """n, the exponent of the bias corrections."""
    num_resets: int
    """Resets so far, this one included."""


def clock(step: int, reset_every: int | None, warmup: int, grace: int, reference: bool = False) -> Clock:
    """Read the clock at a parameter's update number `step`, counted from 1; `reset_every=None` never resets."""
    if reset_every is None or step < reset_every:
        return Clock(reset=False, scale=1.0, clips=step >= grace, age=step, num_resets=0)
    num_resets, k = divmod(step, reset_every)
    scale = 1.0 if k >= warmup else 1 - 0.99 * (1 + math.cos(math.pi * k / (warmup + 1))) / 2
    return Clock(k == 0, scale, k >= grace, step if reference else k + 1, num_resets)


def coefficients(group: dict[str, Any], now: Clock) -> Coefficients:
    """The numbers of one update: p moves by size * m / (sqrt(v) + eps), the same as the corrected form above."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    root = math.sqrt(1 - beta2**now.age)
    return Coefficients(
        reset=now.reset,
        beta1=beta1,
        beta2=beta2,
        size=lr * now.scale * root / (1 - beta1**now.age),
        eps=group["eps"] if group["reference"] else group["eps"] * root,
        threshold=group["threshold"] if now.clips else math.inf,
        literal=group["reference"],
        decay=lr * group["weight_decay"],
    )


class SPAM(Optimizer):
    """SPAM as a drop-in for `torch.optim.AdamW`; every setting may differ between parameter groups.

    Args:
        lr: a number, or a 0-dim CPU tensor.
        eps: 1e-6 here, not AdamW's 1e-8.
        weight_decay: decoupled, as in AdamW.
        threshold: theta; a gradient is cut at sqrt(theta * v), that is, at 71 times its usual size by default.
            `math.inf` cuts nothing.
        reset_every: updates from one reset to the next; None never resets.
        warmup: updates of re-warm-up after each reset; 0 does without. Not the learning rate's own warm-up.
        grace: updates after a reset (and from the start) in which nothing is cut, because v has hardly begun.
        density: below 1, the share of each row that has moments and moves between two resets. It holds for
            matrices; other parameters of the group stay dense.
        seed: of the random choice that `density` makes.
        reference: the published code's semantics (see this file's docstring).
        foreach, fused: how the arithmetic is done (`kernels.py`), at most one of them True. Left alone, it is one
            Triton launch on a GPU (`foreach` where Triton is missing) and a plain loop elsewhere. Sparse matrices
            know the loop and the launch only.

    The state exists from the start, so that every rank saves the same keys. It survives `load_state_dict` bit by bit,
    in FP32 for narrower parameters too. Parameters may be DTensors (FSDP2): each rank updates its shard without
    communication, and sparse choices do not depend on the number of ranks.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        threshold: float = 5000.0,
        reset_every: int | None = 500,
        warmup: int = 150,
        grace: int = 20,
        density: float = 1.0,
        seed: int = 0,
        reference: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "threshold": threshold,
            "reset_every": reset_every,
            "warmup": warmup,
            "grace": grace,
            "density": density,
            "seed": seed,
            "reference": reference,
            "foreach": foreach,
            "fused": fused,
        }
        super().__init__(params, defaults)
        asked = [group["density"] for group in self.param_groups if group["density"] < 1]
        if asked and not any(sparse.is_sparse(p.shape, group["density"]) for group, p in self._parameters()):
            text = f"density = {asked[0]} has no effect without a matrix among the parameters: leave it at 1.0"
            warnings.warn(text, NoEffectWarning, stacklevel=2)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own; their clocks start at 0."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group)
            for p in group["params"]:
                if p.requires_grad:
                    self._state_of(p, group)
        except TrimtabError:
            self.param_groups.pop()
            for p in group["params"]:
                self.state.pop(p, None)
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ways: dict[Callable[[Sequence[Work]], None], list[Work]] = {}
        steps: list[Tensor] = []
        changed: list[Tensor] = []
        ages: dict[tuple[int, int], tuple[Clock, Coefficients]] = {}  # most parameters of a group share theirs
        for position, (group, p) in enumerate(self._parameters()):
            if p.grad is None:
                continue
            check_gradient(p.grad)
            state = self._state_of(p, group)
            age = (id(group), int(state["step"]) + 1)
            if age not in ages:
                now = clock(age[1], *(group[name] for name in ("reset_every", "warmup", "grace", "reference")))
                ages[age] = now, coefficients(group, now)
            work = share(p, state, *ages[age], group, position)
            steps.append(state["step"])
            changed.append(p)
            if work.p.numel():  # a shard may be empty; its clock goes on like the others'
                ways.setdefault(choose(group, work), []).append(work)
        for way, works in ways.items():  # only now, so that what was refused above has changed nothing
            way(works)
        if steps:
            increment_version(changed)  # neither a kernel of ours nor a write to a shard tells autograd by itself
            torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; the caller's tensors are copied, not kept.

        torch casts what it loads to the parameter's dtype, which would round the moments of BF16 parameters, and
        takes `step` to the GPU where a group says `fused`. So the state is put in once more, as it was saved.
        `foreach` and `fused` stay as they are here: a run may resume on other hardware.
        """
        saved: dict[str, Any] = {}
        mine = self.state, self.param_groups
        ways = [{name: group[name] for name in ("foreach", "fused")} for group in self.param_groups]
        before = self.register_load_state_dict_pre_hook(lambda _, state_dict: saved.update(state_dict))
        after = self.register_load_state_dict_post_hook(lambda _: self._restore(saved, ways), prepend=True)
        try:
            super().load_state_dict(state_dict)
        except Exception:
            self.state, self.param_groups = mine  # what is refused has changed nothing
            raise
        finally:
            before.remove()
            after.remove()

    def _restore(self, saved: dict[str, Any], ways: list[dict[str, Any]]) -> None:
        for group, way in zip(self.param_groups, ways, strict=True):
            group.update(way)
            check_group(group)
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        for number, (group, p) in zip(numbers, self._parameters(), strict=True):
            entry = saved["state"].get(number)
            if entry is None:  # it was frozen when this was saved
                continue
            rule = f"the saved state of parameter {number!r} must be SPAM's: load what SPAM.state_dict() gave"
            require({"step", *MOMENTS} <= entry.keys(), rule, sorted(entry))
            self.state.pop(p, None)
            state = self._state_of(p, group)
            state["step"].fill_(int(entry["step"]))
            for name in MOMENTS:
                here, there = state[name], entry[name]
                rule = (
                    f"the saved {name} of parameter {number!r} must have shape {tuple(here.shape)}"
                    f"{' and be sharded: use torch.distributed.checkpoint.state_dict' if is_dtensor(here) else ''}"
                )
                require(here.shape == there.shape and is_dtensor(here) == is_dtensor(there), rule, tuple(there.shape))
                here.copy_(there)

    def _parameters(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        return ((group, p) for group in self.param_groups for p in group["params"])

    def _state_of(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter: made if absent, moved if the parameter has moved."""
        state, dtype, shape = self.state[p], moment_dtype(p.dtype), sparse.moment_shape(p.shape, group["density"])
        if not state or (state["exp_avg"].is_meta and not p.is_meta):
            state["step"] = torch.zeros((), dtype=torch.int64, device="cpu")
            for name in MOMENTS:
                state[name] = torch.zeros_like(p, dtype=dtype) if shape == p.shape else sparse.zeros(p, shape, dtype)
        m = state["exp_avg"]
        if m.device != p.device or m.dtype != dtype:
            state.update({name: state[name].to(p.device, dtype) for name in MOMENTS})
        if m.shape != shape:
            raise TrimtabError(
                f"density cannot change: a parameter of shape {tuple(p.shape)} has moments of shape {tuple(m.shape)}, "
                f"and density = {group['density']} would need {tuple(shape)}: build a new optimizer"
            )
        return state


def share(
    p: Tensor, state: dict[str, Tensor], now: Clock, c: Coefficients, group: dict[str, Any], position: int
) -> Work:
    """This process's share of a parameter's update."""
    g, m, v, mask = p.grad, state["exp_avg"], state["exp_avg_sq"], None
    assert g is not None
    if sparse.is_sparse(p.shape, group["density"]):
        key = sparse.key_of(group["seed"], position, now.num_resets)
        mask = sparse.Mask(key, sparse.first_row(p), p.shape[1], m.shape[1])
    if not is_dtensor(p):
        return Work(p, g, m, v, c, mask)
    if is_dtensor(g) and g.placements != p.placements:
        g = g.redistribute(placements=p.placements)
    return Work(local(p), local(g), local(m), local(v), c, mask)


def choose(group: dict[str, Any], work: Work) -> Callable[[Sequence[Work]], None]:
    """The function that carries out an update, as the group asks and the tensors allow."""
    fuses = group["foreach"] is None if group["fused"] is None else group["fused"]
    if fuses and can_fuse(work):
        from trimtab.optim.fused import fused_

        return fused_
    rule = "fused=True needs Triton, and FP32, BF16 or FP16 parameters on a GPU in memory without gaps; leave it out"
    require(not group["fused"], rule, f"{work.p.dtype} on {work.p.device}")
    if work.mask is not None:
        return sparse.loop_
    by_many = work.p.is_cuda if group["foreach"] is None else group["foreach"]
    return kernels.foreach_ if by_many else kernels.loop_


def can_fuse(work: Work) -> bool:
    """Whether the Triton kernel is to be had for this parameter."""
    if not work.p.is_cuda or not has_triton():
        return False
    from trimtab.optim import fused

    return fused.takes(work)
