# SPDX-License-Identifier: Apache-2.0
"""Which tensors GreedyLore compresses, why, and what that saves.

Compressed is a matrix (more dimensions are flattened) that then sends at most half of its bytes, the dense step and
the basis of each period included. Dense stay vectors, embeddings and what is tied to one (their gradients are sparse
in rows, not low in rank), and modules named in `exclude`. What stays dense is the ceiling: a 60M-parameter LLaMA has
more than half of its weights in embedding and head, and cannot send less than 1 / 1.7 of its bytes at any rank.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from trimtab.comm.lowrank import Size, basis_itemsize, mean_bytes, pays, size_of

Rule = Callable[[str, Tensor], bool]


@dataclass(frozen=True)
class Settings:
    """What GreedyLore was given; all ranks, and a run and its resumption, must agree on it."""

    rank: int | float
    every: int
    start: int
    probes: int
    seed: int


@dataclass(frozen=True)
class Choice:
    """What becomes of one tensor."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    size: Size | None
    """Sides and rank if it is compressed, None if it is not."""
    reason: str

    @property
    def dense_bytes(self) -> int:
        """Payload of one step without compression."""
        numel = 1
        for side in self.shape:
            numel *= side
        return numel * self.itemsize

    def bytes(self, settings: Settings) -> float:
        """Mean payload of one step, once compression has started."""
        if self.size is None:
            return self.dense_bytes
        return mean_bytes(self.size, settings.every, settings.probes, self.itemsize)


@dataclass(frozen=True)
class Report:
    """What becomes of each tensor, and the bytes that one step is expected to send; `str()` gives a table."""

    choices: tuple[Choice, ...]
    settings: Settings

    @property
    def dense_bytes(self) -> int:
        """Payload of one step without compression."""
        return sum(choice.dense_bytes for choice in self.choices)

    @property
    def bytes(self) -> float:
        """Mean payload of one step, once compression has started."""
        return sum(choice.bytes(self.settings) for choice in self.choices)

    @property
    def ratio(self) -> float:
        """How many times less is sent."""
        return self.dense_bytes / self.bytes

    @property
    def memory(self) -> int:
        """Bytes that residuals and bases take on each rank."""
        sizes = [(choice.size, basis_itemsize(choice.itemsize)) for choice in self.choices if choice.size]
        return sum(width * (size.a * size.b + size.a**2) for size, width in sizes)

    def __str__(self) -> str:
        wide = max([len("tensor"), *(len(choice.name) for choice in self.choices)])
        lines = [f"{'tensor':<{wide}}  {'shape':>16}  {'rank':>5}  {'ratio':>6}  why"]
        for choice in self.choices:
            rank, ratio = choice.size.rank if choice.size else "-", choice.dense_bytes / choice.bytes(self.settings)
            shape = " x ".join(map(str, choice.shape))
            lines.append(f"{choice.name:<{wide}}  {shape:>16}  {rank:>5}  {ratio:>5.1f}x  {choice.reason}")
        num = sum(choice.size is not None for choice in self.choices)
        lines.append(
            f"{num} of {len(self.choices)} tensors compressed: {self.ratio:.2f}x less, {self.bytes:,.0f} of "
            f"{self.dense_bytes:,} bytes per step, after step {self.settings.start}; {self.memory:,} bytes of memory"
        )
        return "\n".join(lines)


def choose(
    model: nn.Module, names: Iterable[str], settings: Settings, rule: Rule | None, exclude: Iterable[str]
) -> list[Choice]:
    """Decide for the parameters of `names`, in the model's order; `rule` replaces what is said above for matrices."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, kinds)}
    names, exclude = set(names), tuple(exclude)
    return [
        _choose(name, p, settings, rule, exclude, id(p) in embeddings)
        for name, p in model.named_parameters()
        if name in names
    ]


def _choose(
    name: str, p: Tensor, settings: Settings, rule: Rule | None, exclude: tuple[str, ...], embeds: bool
) -> Choice:
    def choice(size: Size | None, reason: str) -> Choice:
        return Choice(name, tuple(p.shape), p.element_size(), size, reason)

    if p.dim() < 2 or p.numel() == 0 or not p.is_floating_point():
        return choice(None, "dense: not a matrix")
    size = size_of(p.shape, settings.rank)
    if rule is not None:
        return choice(size, "chosen by `compress`") if rule(name, p) else choice(None, "dense: left by `compress`")
    if embeds:
        return choice(None, "dense: an embedding, or tied to one")
    for part in exclude:
        if f".{part}." in f".{name}.":
            return choice(None, f"dense: `exclude` names {part}")
    if not pays(size, settings.every, settings.probes, p.element_size()):
        return choice(None, f"dense: rank {size.rank} of {size.a} would not halve its bytes")
    return choice(size, "compressed")
