# SPDX-License-Identifier: Apache-2.0
"""1-bit Adam: AdamW that, after a warm-up, exchanges signs of momentum in place of gradients (arXiv 2102.02888).

Error feedback repairs what compression loses only where the optimizer is linear, and Adam's second moment v is not.
But v settles early. So 1-bit Adam runs AdamW on the mean gradient for a while, then freezes v. What is left is
momentum with a fixed size per coordinate, whose momentum may travel as signs (`onebit.py`):

    warm-up     g = mean_i g_i, exchanged densely; then exactly torch.optim.AdamW
    frozen      m_i = beta1 * m + (1 - beta1) * g_i                                   on every rank i
                m = the 1-bit mean of the m_i, with worker and server errors          two collectives, 1/32 of the bytes
                p = p - lr * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^T)) + eps) + weight_decay * p)

t counts a parameter's updates and T those of its v; T stands still once frozen. A parameter freezes when its own v has
taken `warmup` gradients. A coordinate whose v is zero then never had a gradient: its size is unknown, signs would
shake it by lr * scale / eps, and it stands still from there on. With one rank nothing is sent and nothing compressed.

`warmup` should be 15 to 25 % of the run, outlast the learning rate's warm-up, and not fall below D = 1 / (1 - beta2):
a v that has seen less is noise, and frozen noise does not train. `warmup="auto"` looks every D updates at the sum of v,
corrected for its age, and freezes a group once it has changed by less than 4 % since the look before, not before 2 D
updates and not while the learning rate has been rising.

    for batch in loader:                      ddp = DDP(model)
        loss(model, batch).backward()         optimizer.attach(ddp)         before the first backward
        optimizer.step()                      ... then the usual loop, with `no_sync` if you like

On the left every rank has gradients of its own and `step` exchanges them, with one more FP32 number per tensor that
says who has a gradient. On the right DDP's hook averages densely in warm-up and leaves gradients alone afterwards.
Without `attach`, DDP would go on averaging. Clipping between backward and step acts, once frozen, on the rank's own
gradient; without DDP, always.

A gradient that is not finite, on any rank, is a step that no rank takes: parameters, moments and errors stay as they
were (where some parameters warm up and others are frozen, each half of the step decides by its own gradients). So does
a tensor for which no rank has a gradient; where some have, the others count as zero. A warm-up step reads the verdict
from the device; a frozen one does not, so that its clocks t go on.

A checkpoint does not depend on the number of ranks. Moments are equal on all of them, and of the errors only the sum
mean_i e_i + d has a meaning beyond one step; it is saved as each parameter's `residual`, so `state_dict()` is a
collective: call it on every rank. Mass is conserved, not the trajectory. `state_dict(exact=True)` gives this rank's
own errors instead, for the same rank of as many.
"""

# pyright: reportPrivateImportUsage=false
# (foreach operations are what torch.optim itself is written with)

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, ParamsT

from trimtab.checks import require
from trimtab.comm.guards import require_room, require_same
from trimtab.comm.onebit import SCALES, Errors, Layout, onebit_mean
from trimtab.comm.onebit_steps import (
    MOMENTS,
    adamw_,
    check_gradient,
    check_group,
    dense_mean,
    frozen_,
    has_settled,
    limit_of,
    period,
    sizes,
    sum_of_variance,
)
from trimtab.comm.traffic import Group, all_reduce, broadcast
from trimtab.errors import NoEffectWarning, TrimtabError
from trimtab.shards import tensor_norms

CLOCKS = ("step", "step_sq")
SETTINGS = ("lr", "betas", "eps", "weight_decay", "warmup", "maximize", "foreach", "freeze", "seen")
Owned = tuple[dict[str, Any], Tensor]
"""A parameter and its group."""

COPIED = ("_scale", "_compressed", "_errors")

LOADS = "the saved state must be OneBitAdam's or AdamW's: load what its state_dict() gave"

logger = logging.getLogger(__name__)


class OneBitAdam(Optimizer):
    """1-bit Adam as a drop-in for `torch.optim.AdamW`.

    Args:
        lr: a number, or a 0-dim CPU tensor.
        warmup: gradients that a parameter's second moment takes before it is frozen: a number, "auto", or None for
            never. It may differ between groups, as may all of AdamW's settings; small tensors gain little.
        scale: "l2" as in the paper, or "l1", which is safer where most of a tensor's gradient is zero.
        group: the process group to average over; by default all ranks.
        maximize, foreach: as in AdamW. A frozen step always works on many tensors at once.

    The state is {step, step_sq, exp_avg, exp_avg_sq}, complete from the start, FP32 for narrower parameters too, and
    takes a checkpoint of AdamW. Warm-up is AdamW bit by bit for FP32 and FP64 parameters; narrower ones are widened
    for the update and rounded once.
    """

    _step_supports_amp_scaling = True
    """Tells GradScaler to always call `step`: a rank that stayed away would leave the others waiting."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        warmup: int | str | None = 2000,
        scale: str = "l2",
        group: Group = None,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        require(scale in SCALES, f"scale must be one of {', '.join(SCALES)}", scale)
        self._scale, self._group = scale, group
        self._compressed: list[Tensor] = []
        self._errors: Errors | None = None
        self._attached: set[Tensor] = set()
        self._warned = self._agreed = False
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "warmup": warmup,
            "maximize": maximize,
            "foreach": foreach,
            "freeze": None,  # the number that "auto" came to
            "seen": None,  # what "auto" saw when it last looked: the sum of v, and the learning rate
        }
        super().__init__(params, defaults)
        require(self.num_ranks > 0, "this process must belong to the group: build the optimizer on its ranks only", -1)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own; their warm-up starts now."""
        super().add_param_group(param_group)
        group, self._agreed = self.param_groups[-1], False
        try:
            check_group(group)
            devices = {p.device for _, p in self._parameters()}
            require(len(devices) == 1, "all parameters must lie on one device, to travel in one message", devices)
            for p in group["params"]:
                if p.requires_grad:
                    self._state_of(p)
        except TrimtabError:
            self.param_groups.pop()
            for p in group["params"]:
                self.state.pop(p, None)
            raise

    @property
    def num_ranks(self) -> int:
        """Ranks that exchange."""
        return dist.get_world_size(self._group) if dist.is_available() and dist.is_initialized() else 1

    def frozen(self) -> set[Tensor]:
        """The parameters whose second moment is frozen; their exchange takes one bit per number."""
        members = ((limit_of(group), p) for group, p in self._parameters() if p in self.state)
        return {p for limit, p in members if limit is not None and self.state[p]["step_sq"] >= limit}

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Let DDP's hook do the dense mean in warm-up, and nothing to a bucket whose parameters are all frozen."""
        rule = "attach needs a DistributedDataParallel model: wrap the model first, or leave attach out"
        require(isinstance(ddp, DistributedDataParallel), rule, type(ddp).__name__)
        rule = "DDP and the optimizer must average over the same ranks: give both the same process group"
        theirs, mine = (dist.get_process_group_ranks(group) for group in (ddp.process_group, self._group))
        require(theirs == mine, rule, (theirs, mine))
        require_room(ddp)
        ddp.register_comm_hook(self, exchange)
        named, ignored = ddp.module.named_parameters(), ddp.parameters_to_ignore
        self._attached = {p for name, p in named if p.requires_grad and name not in ignored}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Exchange and update; returns what the closure returns. With several ranks, all must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        members = [(group, p) for group, p in self._parameters() if p.requires_grad or p in self.state]
        for _, p in members:
            check_gradient(p)
            self._state_of(p)
        if not self._agreed:
            self._agree()
        if self._errors is not None:
            rule = f"the errors are of {self._errors.layout.num_ranks} ranks, and the number cannot change in a run: "
            rule += "save state_dict() before, and load it into an optimizer of the new ranks"
            require(self.num_ranks == self._errors.layout.num_ranks, rule, self.num_ranks)
        frozen = self.frozen()
        warm = [(group, p) for group, p in members if p not in frozen]
        if warm and not self._warm_step(warm):
            return loss
        if frozen:
            self._frozen_step([(group, p) for group, p in members if p in frozen])
            self._warn_of_stragglers(warm)
        return loss

    def state_dict(self, *, exact: bool = False) -> dict[str, Any]:
        """The state as plain Python and tensors; a collective with `exact=False`, once parameters are frozen.

        Args:
            exact: add this rank's own errors in place of `residual`: resumes bit by bit, on the same rank of as many.
        """
        packed = super().state_dict()
        if self._errors is None:
            return packed
        numbers = {p: number for number, (_, p) in enumerate(self._parameters())}
        which = [numbers[p] for p in self._compressed]
        if exact:
            _, worker, server = self._errors
            return {
                **packed,
                "errors": {self._place: {"params": which, "worker": worker.clone(), "server": server.clone()}},
            }
        state = dict(packed["state"])
        for number, p, residual in zip(which, self._compressed, self._errors.residuals(self._group), strict=True):
            state[number] = {**state[number], "residual": residual.clone().view(p.shape)}
        return {**packed, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, one of AdamW too; the caller's tensors are copied, not kept.

        torch casts what it loads to the parameter's dtype, which would round the moments of BF16 parameters: so the
        state is put in once more, as it was saved. `foreach` stays as it is here.
        """
        require(isinstance(state_dict, dict), LOADS, type(state_dict).__name__)
        require({"state", "param_groups"} <= state_dict.keys(), LOADS, sorted(state_dict))
        saved: dict[str, Any] = {}
        mine = self.state, self.param_groups, self._compressed, self._errors
        before = self.register_load_state_dict_pre_hook(lambda _, state_dict: saved.update(state_dict))
        after = self.register_load_state_dict_post_hook(lambda _: self._restore(saved, mine[1]), prepend=True)
        try:
            super().load_state_dict(state_dict)
        except Exception:
            self.state, self.param_groups, self._compressed, self._errors = mine  # what is refused has changed nothing
            raise
        finally:
            before.remove()
            after.remove()

    def __getstate__(self) -> dict[str, Any]:
        rule = "an optimizer with a process group of its own cannot be copied or pickled: use state_dict()"
        require(self._group is None, rule, self._group)
        return {**super().__getstate__(), **{name: getattr(self, name) for name in COPIED}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in (("_group", None), ("_attached", set()), ("_warned", False), ("_agreed", False)):
            self.__dict__.setdefault(name, value)  # a copy is attached to nothing
        super().__setstate__(state)

    def _warm_step(self, warm: list[Owned]) -> bool:
        """AdamW on the mean gradient; False if there is nothing finite to step with."""
        grads = [self._gradient(group, p) for group, p in warm]
        ours = [k for k, (_, p) in enumerate(warm) if p not in self._attached] if self.num_ranks > 1 else []
        if self.num_ranks > 1 and not ours and self._others_stop(warm[0][1].device):
            return False
        if ours:
            dense = dense_mean([grads[k] for k in ours], [warm[k][1] for k in ours], self._group, self._found_inf())
            for k, mean in zip(ours, dense, strict=True):
                grads[k] = mean
        given = [(group, p, g) for (group, p), g in zip(warm, grads, strict=True) if g is not None]
        if given and not bool(self._is_finite([g for _, _, g in given])):
            return False
        for group in self.param_groups:
            chosen = [(p, g) for owner, p, g in given if owner is group]
            if chosen:
                params, means = [p for p, _ in chosen], [g for _, g in chosen]
                adamw_(group, params, means, [self.state[p] for p in params])
                self._settle(group)
        return True

    def _others_stop(self, device: torch.device) -> bool:
        """Whether any rank wants no step: DDP's mean says who has no number, and not who has set `found_inf`."""
        found = self._found_inf()
        stop = torch.zeros((), device=device) if found is None else (found.to(device) > 0).float().reshape(())
        all_reduce(stop, self._group, op=dist.ReduceOp.MAX)
        return bool(stop)

    def _agree(self) -> None:
        """Ask in the first step, and when a group was added, whether all ranks have the same to exchange."""
        if self.num_ranks > 1:
            members = [p for _, p in self._parameters() if p.requires_grad or p in self.state]
            facts = {
                "scale": self._scale,
                "warmup": [group["warmup"] for group in self.param_groups],
                "list of shapes": [tuple(p.shape) for p in members],
                "list of dtypes": [p.dtype for p in members],
            }
            device = self.param_groups[0]["params"][0].device
            require_same({f"OneBitAdam's {name}": fact for name, fact in facts.items()}, self._group, device)
        self._agreed = True

    def _frozen_step(self, frozen: list[Owned]) -> None:
        """Momentum with a fixed size per coordinate, on the 1-bit mean."""
        alone = self.num_ranks == 1
        if alone:
            frozen = [(group, p) for group, p in frozen if p.grad is not None]
        if not frozen:
            return
        means, live = self._own_mean(frozen) if alone else self._onebit_mean(frozen)
        states = [self.state[p] for _, p in frozen]
        torch._foreach_add_([state["step"] for state in states], 1)
        numbers = [sizes(group, self.state[p]) for group, p in frozen]
        frozen_([p for _, p in frozen], states, means, live, numbers)

    def _own_mean(self, frozen: list[Owned]) -> tuple[list[Tensor], Tensor]:
        """The momenta of the only rank there is, and whether they are good."""
        grads = [g for group, p in frozen if (g := self._gradient(group, p)) is not None]
        states = [self.state[p] for _, p in frozen]
        weights = [1 - group["betas"][0] for group, _ in frozen]
        means = [state["exp_avg"].lerp(g, weight) for state, g, weight in zip(states, grads, weights, strict=True)]
        finite = self._is_finite(grads)
        left = [(mean, state) for mean, state in zip(means, states, strict=True) if "residual" in state]
        if left and bool(finite):  # what several ranks had not sent when they were saved
            for mean, state in left:
                mean.add_(state.pop("residual"))
        return means, finite.expand(len(frozen))

    def _onebit_mean(self, frozen: list[Owned]) -> tuple[list[Tensor], Tensor]:
        """The momenta after the exchange, and which of them are good."""
        errors, shapes = self._errors_of([p for _, p in frozen]), [p.shape for _, p in frozen]
        grads = [self._gradient(group, p) for group, p in frozen]
        flat = torch.zeros_like(errors.worker)
        momenta = errors.layout.views(flat, shapes)
        torch._foreach_copy_(momenta, [self.state[p]["exp_avg"] for _, p in frozen])
        for m, g, (group, _) in zip(momenta, grads, frozen, strict=True):
            beta1 = group["betas"][0]
            m.mul_(beta1) if g is None else m.lerp_(g.to(m.dtype), 1 - beta1)
        absent = [k for k, g in enumerate(grads) if g is None]
        found_inf = self._found_inf()
        mean, live = onebit_mean(flat, errors, self._group, scale=self._scale, absent=absent, found_inf=found_inf)
        return errors.layout.views(mean, shapes), live

    def _settle(self, group: dict[str, Any]) -> None:
        """Look whether a group with `warmup="auto"` has settled; rank 0's sum counts, so that all freeze alike."""
        states = [self.state[p] for p in group["params"] if p in self.state]
        now, every = max(int(state["step_sq"]) for state in states), period(group["betas"][1])
        if group["warmup"] != "auto" or group["freeze"] is not None or now % every:
            return
        total = sum_of_variance(states, group["betas"][1])
        if self.num_ranks > 1:
            broadcast(total, dist.get_process_group_ranks(self._group)[0], self._group)
        seen = total.item(), float(group["lr"])
        if has_settled(seen, group["seen"], now, every):
            group["freeze"] = now
            logger.info("a group of %d parameters is frozen after %d updates", len(states), now)
        group["seen"] = list(seen)

    def _warn_of_stragglers(self, warm: list[Owned]) -> None:
        """Say once that parameters without gradients keep a dense exchange alive."""
        if self._warned or self.num_ranks == 1:
            return
        oldest = max(int(state["step"]) for state in self.state.values())
        limits = [(limit_of(group), p) for group, p in warm]
        late = [tuple(p.shape) for limit, p in limits if limit is not None and oldest >= 2 * limit]
        if late:
            self._warned = True
            warnings.warn(
                f"parameters of shapes {late} have not had their warm-up's gradients after {oldest} steps, and are "
                "exchanged densely: call requires_grad_(False) before building the optimizer, or leave them out of it",
                NoEffectWarning,
                stacklevel=4,
            )

    def _errors_of(self, params: list[Tensor]) -> Errors:
        """The errors of the frozen parameters: as they are, or laid out anew, or begun with a checkpoint's residual."""
        old, here = self._errors, params[0].device
        same = [id(p) for p in params] == [id(p) for p in self._compressed]
        if old is not None and same and old.worker.device == here:
            return old
        kept = {} if old is None else dict(zip(self._compressed, old.pieces(), strict=True))
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32
        new = Errors.zeros(Layout(tuple(p.numel() for p in params), self.num_ranks), dtype, here)
        for p, (worker, server) in zip(params, new.pieces(), strict=True):
            residual = self.state[p].pop("residual", None)
            if p in kept:
                worker.copy_(kept[p][0])
                server.copy_(kept[p][1])
            elif residual is not None:
                worker.copy_(residual.reshape(-1))
        self._compressed, self._errors = params, new
        return new

    def _restore(self, saved: dict[str, Any], mine: list[dict[str, Any]]) -> None:
        for group, before in zip(self.param_groups, mine, strict=True):
            require("betas" in group, LOADS, sorted(group))
            group.update({name: before[name] for name in SETTINGS if name not in group or name == "foreach"})
            check_group(group)
        order = [number for group in saved["param_groups"] for number in group["params"]]
        for number, (_, p) in zip(order, self._parameters(), strict=True):
            entry = saved["state"].get(number)
            if entry is None:  # it was not trained when this was saved
                continue
            rule = f"the saved state of parameter {number!r} must be OneBitAdam's or AdamW's"
            require({"step", *MOMENTS} <= entry.keys(), rule, sorted(entry))
            self.state.pop(p, None)
            state = self._state_of(p)
            for name in CLOCKS:
                state[name].fill_(float(entry.get(name, entry["step"])))
            if "residual" in entry:
                state["residual"] = torch.zeros_like(state["exp_avg"])
            for name in (*MOMENTS, "residual"):
                if name in state:
                    here, there = state[name], entry[name]
                    rule = f"the saved {name} of parameter {number!r} must have shape {tuple(here.shape)}"
                    require(here.shape == there.shape, rule, tuple(there.shape))
                    here.copy_(there)
        self._compressed, self._errors = [], None
        if "errors" in saved:
            rule = f"exact errors must be those of rank {self._place}: load each rank's own, or save with exact=False"
            require(self._place in saved["errors"], rule, list(saved["errors"]))
            exact = saved["errors"][self._place]
            params = dict(zip(order, (p for _, p in self._parameters()), strict=True))
            errors = self._errors_of([params[number] for number in exact["params"]])
            errors.worker.copy_(exact["worker"])
            errors.server.copy_(exact["server"])

    @property
    def _place(self) -> str:
        rank = dist.get_rank(self._group) if self.num_ranks > 1 else 0
        return f"{rank} of {self.num_ranks}"

    def _parameters(self) -> Iterator[Owned]:
        return ((group, p) for group in self.param_groups for p in group["params"])

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        """The state of a parameter: made if absent, moved if the parameter has moved."""
        state, dtype = self.state[p], torch.float64 if p.dtype == torch.float64 else torch.float32
        if not state or (state["exp_avg"].is_meta and not p.is_meta):
            state.update({name: torch.zeros((), dtype=torch.float32, device="cpu") for name in CLOCKS})
            state.update({name: torch.zeros_like(p, dtype=dtype) for name in MOMENTS})
        m = state["exp_avg"]
        if m.device != p.device or m.dtype != dtype:
            state.update({name: state[name].to(p.device, dtype) for name in state if name not in CLOCKS})
        return state

    def _gradient(self, group: dict[str, Any], p: Tensor) -> Tensor | None:
        """The gradient to minimise with, as wide as the moments and without a loss scale."""
        if p.grad is None:
            return None
        g, scale = p.grad.to(self.state[p]["exp_avg"].dtype), getattr(self, "grad_scale", None)
        g = -g if group["maximize"] else g
        return g if scale is None else g / scale.to(g.device)

    def _found_inf(self) -> Tensor | None:
        """What a GradScaler, or whoever wants no step on this rank, has set."""
        found = getattr(self, "found_inf", None)
        return found if found is None else torch.as_tensor(found)

    def _is_finite(self, grads: list[Tensor]) -> Tensor:  # () bool
        finite, found = tensor_norms(grads).isfinite().all(), self._found_inf()
        return finite if found is None else finite & (found.to(finite.device) == 0)


def exchange(optimizer: OneBitAdam, bucket: dist.GradBucket) -> Future[Tensor]:
    """The hook of DDP: the dense mean while any parameter of the bucket warms up, else the rank's own gradients."""
    rule = 'OneBitAdam needs DDP\'s own reducer: do not set torch._dynamo.config.optimize_ddp = "python_reducer"'
    require(isinstance(bucket, dist.GradBucket), rule, type(bucket).__name__)
    buffer = bucket.buffer()
    if set(bucket.parameters()) <= optimizer.frozen():
        done: Future[Tensor] = Future()
        done.set_result(buffer)
        return done
    work = all_reduce(buffer.mul_(1 / optimizer.num_ranks), optimizer._group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])
