# SPDX-License-Identifier: Apache-2.0
"""The optimizers of a run by name, what is done to the gradients before them, and the learning rate.

    adamw, sgd     torch's own
    spam           spike-aware Adam with momentum reset (arXiv 2501.06842)
    stable_spam    SPAM without threshold and re-warm-up, resets every 1,000 steps, on stabilized gradients (2502.17055)
    osp            Muon for the matrices, AdamW for embeddings, head and vectors (arXiv 2506.19697)

A run has one `Update`: perhaps a gradient transform, then one or two optimizers. Each parameter group keeps its own
peak learning rate (`initial_lr`, as torch's schedulers call it) and all follow the same schedule.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from trimtab.checks import meant, shown
from trimtab.errors import TrimtabError
from trimtab.lab.config import Settings
from trimtab.optim.clipping import AdaGC, AutoClip, ZClip
from trimtab.optim.groups import osp_optimizers, spam_groups
from trimtab.optim.spam import SPAM
from trimtab.optim.stabilizer import GradStabilizer


class Transform(Protocol):
    """Changes `p.grad` in place, between the backward and the optimizer."""

    def step_(self) -> Any:
        """Change the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """All it remembers."""
        ...

    def load_state_dict(self, state_dict: Any) -> None:
        """Take that back."""


TRANSFORMS: dict[str, Callable[..., Transform]] = {
    "stabilizer": GradStabilizer,
    "zclip": ZClip,
    "adagc": AdaGC,
    "autoclip": AutoClip,
}
STABLE_SPAM = {"gammas": (0.7, 0.9), "clip_gamma": 0.999, "eps": 1e-8}
"""What Stable-SPAM does to the gradients, as options of `GradStabilizer`."""


def _adamw(model: nn.Module, **options: Any) -> list[Optimizer]:
    return [AdamW(model.parameters(), **options)]


def _sgd(model: nn.Module, **options: Any) -> list[Optimizer]:
    return [SGD(model.parameters(), **{"momentum": 0.9, **options})]


def _spam(model: nn.Module, *, density: float = 1.0, **options: Any) -> list[Optimizer]:
    return [SPAM(spam_groups(model, density) if density != 1.0 else model.parameters(), **options)]


def _stable_spam(model: nn.Module, **options: Any) -> list[Optimizer]:
    defaults = {"threshold": math.inf, "reset_every": 1000, "warmup": 0, "grace": 0, "eps": 1e-8}
    return _spam(model, **{**defaults, **options})


OPTIMIZERS: dict[str, tuple[Callable[..., list[Optimizer]], Callable[..., Any]]] = {
    "adamw": (_adamw, AdamW),
    "sgd": (_sgd, SGD),
    "spam": (_spam, SPAM),
    "stable_spam": (_stable_spam, SPAM),
    "osp": (osp_optimizers, osp_optimizers),
}
"""Each name with its builder, and with what its options are those of."""


def schedule(step: int, config: Settings) -> float:
    """Share of the peak learning rate in a step; a run that goes on past `config.steps` keeps the last one.

    warm-up      step / W                                        W = lr_warmup, or a tenth of the steps
    cosine       0.1 + 0.45 (1 + cos(pi * progress))             progress from 0 after the warm-up to 1 at the end
    trapezoid    1, and over the last fifth of the steps linear to 0
    """
    warmup = max(1, round(0.1 * config.steps)) if config.lr_warmup is None else config.lr_warmup
    if step <= warmup:
        return step / warmup
    if config.lr_schedule == "trapezoid":
        return min(1.0, max(0.0, (config.steps - step) / max(1, round(0.2 * config.steps))))
    progress = min(1.0, (step - warmup) / max(1, config.steps - warmup))
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


class Update:
    """What turns a run's gradients into new weights: a transform, if any, and its optimizers."""

    def __init__(self, model: nn.Module, config: Settings) -> None:
        if config.optimizer not in OPTIMIZERS:
            raise TrimtabError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {config.optimizer!r}")
        build, signature = OPTIMIZERS[config.optimizer]
        options = checked_options("optimizer_options", signature, config.optimizer_options, ("lr", "weight_decay"))
        self.optimizers = build(model, lr=config.lr, weight_decay=config.weight_decay, **options)
        self.transform = _transform(model, config)
        for group in self.param_groups:
            group["initial_lr"] = group["lr"]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, share: float) -> None:
        """Update the weights at a share of the peak learning rate."""
        for group in self.param_groups:
            group["lr"] = group["initial_lr"] * share
        if self.transform is not None:
            self.transform.step_()
        for optimizer in self.optimizers:
            optimizer.step()

    def moments(self) -> Iterator[Tensor]:
        """What the optimizers remember of past gradients."""
        entries = (entry for optimizer in self.optimizers for entry in optimizer.state.values())
        return (v for entry in entries for v in entry.values() if isinstance(v, Tensor) and v.is_floating_point())

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The state of all parts."""
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "transform": None if self.transform is None else self.transform.state_dict(),
        }

    def named_state(self, names: Mapping[int, str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state by the parameters' names: tensors (`<parameter>.exp_avg`), and the rest as plain values.

        Args:
            names: of each parameter, by its id.
        """
        tensors: dict[str, Tensor] = {}
        groups, values = [], {}
        for optimizer in self.optimizers:
            for p, entry in optimizer.state.items():
                for key, value in entry.items():
                    (tensors if isinstance(value, Tensor) else values)[f"{names[id(p)]}.{key}"] = value
            groups.append(
                [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
            )
        transform = None if self.transform is None else self.transform.state_dict()
        return tensors, {"groups": groups, "values": values, "transform": transform}

    def load_named_state(self, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
        """Take back what `named_state` gave."""
        entries: dict[str, dict[str, Any]] = {}
        for name, value in {**tensors, **rest["values"]}.items():
            parameter, _, key = name.rpartition(".")
            entries.setdefault(parameter, {})[key] = value
        for optimizer, groups in zip(self.optimizers, rest["groups"], strict=True):
            order = [name for group in groups for name in group["params"]]
            state = {number: entries[name] for number, name in enumerate(order) if name in entries}
            numbers = {name: number for number, name in enumerate(order)}
            groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        if self.transform is not None:
            self.transform.load_state_dict(rest["transform"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            groups = [dict(group) for group in optimizer.param_groups]
            optimizer.load_state_dict(state)
            _check_loaded(optimizer, groups)
        if self.transform is not None:
            self.transform.load_state_dict(state_dict["transform"])


def _check_loaded(optimizer: Optimizer, before: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a state that is not of these parameters and settings: torch takes it, and fails in the next step."""
    for ours, theirs in zip(before, optimizer.param_groups, strict=True):
        for key in ours.keys() | theirs.keys():
            if key not in ("params", "lr") and theirs.get(key, "absent") != ours.get(key, "absent"):
                raise TrimtabError(
                    f"the optimizer was saved with {key}={shown(theirs.get(key, 'absent'))}, and has "
                    f"{shown(ours.get(key, 'absent'))} now: resume with the settings it was made with"
                )
    if not type(optimizer).__module__.startswith("torch.optim"):
        return  # ours look at their own
    keys = [set(entry) for entry in optimizer.state.values()]
    for p, entry in optimizer.state.items():
        shapes = [tuple(value.shape) if isinstance(value, Tensor) else None for value in entry.values()]
        if set(entry) != keys[0] or not all(shape in ((), tuple(p.shape)) for shape in shapes):
            raise TrimtabError(f"the optimizer's state of a {tuple(p.shape)} parameter is not of that shape: {shapes}")


def _transform(model: nn.Module, config: Settings) -> Transform | None:
    name, options = config.transform, dict(config.transform_options)
    if config.optimizer == "stable_spam":
        if name not in ("none", "stabilizer"):
            raise TrimtabError(
                f"stable_spam stabilizes the gradients itself, got transform={name!r}: use optimizer=spam"
            )
        name, options = "stabilizer", {**STABLE_SPAM, **options}
    if name == "none":
        if options:
            raise TrimtabError(f"transform_options need a transform, got {options}: set transform=stabilizer")
        return None
    if name not in TRANSFORMS:
        raise TrimtabError(f"transform must be one of none, {', '.join(TRANSFORMS)}, got {name!r}")
    return TRANSFORMS[name](model.parameters(), **checked_options("transform_options", TRANSFORMS[name], options))


def checked_options(
    table: str, signature: Callable[..., Any], given: Mapping[str, Any], elsewhere: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The entries of a table as keyword arguments; an unknown one raises and names the nearest."""
    known = [name for name in inspect.signature(signature).parameters if name not in ("params", "model", *elsewhere)]
    for key in given:
        if key in elsewhere:
            raise TrimtabError(f"{table}.{key} is a setting of its own: write {key}={given[key]}")
        if key not in known:
            raise TrimtabError(f"unknown setting {f'{table}.{key}'!r}: {meant(key, known)}")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
