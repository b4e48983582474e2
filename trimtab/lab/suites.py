# SPDX-License-Identifier: Apache-2.0
"""The suites of `trimtab bench`: which model, precision and trouble each cell has, and which arms meet it.

    smoke     one cell in 3 minutes on 2 cores: clean, low, high, control, random
    saved     A  4-bit saved activations, 8 bit as recovery
    blocks    B  FP8 / plain, E3M2 / FP8 and E2M1 / FP8, by block
    experts   D  a mixture of experts, by expert
    faults    F  fault windows: kinds, widths 1 to 50, sizes, one or several units, backward and forward
    cliff     L  learning rates x precision: the largest stable rate, and how the loss depends on it
    harm         healthy runs of every family, and one bad data shard: control should cost nothing
    tables       the tables of the paper (arXiv 2606.00539) at small size

A cell is a set of `trimtab train` settings and nothing more, so each of its runs can be repeated by hand. What varies
with the seed beside weights and data is *where* the faults strike: `Windows` walks through the linears in an order
that the seed fixes, so that no result hangs on one lucky unit, and every arm of a seed meets the same ones.

Sizes. By default `tiny` (0.8M parameters, 28 linears), 8 x 128 tokens a step, 600 steps: about two minutes a run on one
CPU core, so a cell takes two minutes per arm and seed, and half of that with `--jobs 2`. Shorter runs say little: in
its first hundreds of steps a model this small falls from plateau to plateau, and rounding alone decides when. On a GPU:

    trimtab bench faults --device cuda --set model=60m --set seq=256 --set batch=64

The policy of a family is the paper's preset for its units; arms build on it (`arms`). Fault windows stand at absolute
steps: more `steps` give a longer healthy end, too few are refused. Units named in faults are in the first two blocks,
which every size has.
"""

import dataclasses
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from trimtab.checks import meant
from trimtab.errors import TrimtabError
from trimtab.lab.config import TABLES

LINEARS = tuple(
    f"blocks.{block}.{name}"
    for block in (0, 1)
    for name in ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
)
EXPERTS = tuple(f"blocks.{block}.mlp.experts.{expert}" for block in (0, 1) for expert in range(4))
BASE = {"model": "tiny", "batch": 8, "seq": 128, "steps": 600, "eval_batches": 16, "checkpoint_every": 0, "threads": 1}
LINEAR = {"recipe": "fp8", "unit": "linear", "policy": {"preset": "paper-a"}}
WATCHED = {"policy": {"warmup": "monitor", "warmup_steps": 240}}  # nobody acts before the first fault
SAVED = {"recipe": "saved4", "unit": "linear", "lr": 2.5e-3, "policy": {"preset": "paper-a"}}
BLOCK8 = {"recipe": "fp8", "unit": "block", "policy": {"preset": "paper-b8", "max_high": 0.25}}
BLOCK6 = {"recipe": "fp6", "unit": "block", "policy": {"preset": "paper-b6", "max_high": 0.25}}
BLOCK4 = BLOCK6 | {"recipe": "fp4"}
EXPERT = {"recipe": "fp8", "unit": "expert", "num_experts": 4, "policy": {"preset": "paper-moe"}}
PANGU = {"recipe": "fp4", "unit": "block", "kv_heads": 2, "policy": {"preset": "paper-pangu", "max_high": 0.25}}
CORE = ("high", "low", "gnmr", "random")
NOISE_ARMS = (*CORE, "plain", "gap-full", "by-lot", "random-gap-full", "oracle", "round-robin", "ends")
REPAIRS = ("gnmr-replay", "steady", "steady-replay", "source-replay")
FAULT_ARMS = (*CORE, *(f"{who}{name}" for name in REPAIRS for who in ("", "random-")), "gap")
CLIFF_ARMS = (*CORE, "clip", "gnmr-clip", "stable-spam")
HARM_ARMS = (*CORE, *REPAIRS, "gap", "clip")
TRIGGER_ARMS = (
    *CORE,
    "plain",
    "gnmr-full",
    "gsnr",
    "gsnr-full",
    "jacobian",
    "jacobian-full",
    "top-norm",
    "round-robin",
)


@dataclass(frozen=True)
class Windows:
    """Fault windows of one kind, at other units in every seed."""

    kind: str
    width: int = 10
    size: float | None = None
    """In the kind's own sense; None means its usual one."""
    units: int = 1
    """How many units are struck at once."""
    start: int = 250
    every: int = 50
    """Steps from one start to the next."""
    count: int = 4
    targets: tuple[str, ...] = LINEARS

    @property
    def last(self) -> int:
        """The last step that is struck."""
        return self.start + (self.count - 1) * self.every + self.width - 1

    def text(self, seed: int) -> str:
        """The windows of a seed, as the setting `faults` reads them."""
        order = sorted(self.targets, key=lambda name: zlib.crc32(f"{seed}:{name}".encode()))
        size = "" if self.size is None else f",size={self.size:g}"
        return "; ".join(
            f"{order[(i * self.units + j) % len(order)]}:{self.kind}:start={self.start + i * self.every},"
            f"width={self.width}{size}"
            for i in range(self.count)
            for j in range(self.units)
        )


@dataclass(frozen=True)
class Cell:
    """One comparison: settings, trouble, and the arms that meet it."""

    name: str
    """Also the name of its folder."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    faults: Windows | None = None
    arms: tuple[str, ...] | None = None
    """None means the suite's."""
    variants: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Further arms: a name, the arm it varies, and the settings that differ."""
    axis: tuple[str, float] | None = None
    """What a sweep varies, and its value here; cells of one `group` are one line of its figure."""
    group: str = ""

    @property
    def top(self) -> str:
        """The arm that shows what is possible; every gap is the one between it and `low`.

        Where faults are injected that is `clean`: it is `low` to the bit until the first one strikes. `high` differs
        from the first step on, and early in training two such runs may part by more than any fault costs.
        """
        return "high" if self.faults is None else "clean"


@dataclass(frozen=True)
class Suite:
    """Cells that answer one question."""

    name: str
    what: str
    settings: Mapping[str, Any]
    arms: tuple[str, ...]
    cells: tuple[Cell, ...]
    family: str = ""

    def arms_of(self, cell: Cell) -> tuple[str, ...]:
        """The names of a cell's arms, its variants included."""
        return (*(self.arms if cell.arms is None else cell.arms), *cell.variants)

    def settings_of(self, cell: Cell, seed: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """What every arm of a cell and a seed trains with; `given` is what the person set, and wins."""
        settings = merged(self.settings, cell.settings, given, {"seed": seed})
        if cell.faults is not None and "faults" not in given:
            if settings["steps"] < cell.faults.last:
                raise TrimtabError(
                    f"steps must reach past the last fault of {self.name}/{cell.name}, which ends at step "
                    f"{cell.faults.last}, got {settings['steps']}: raise steps, or leave the cell out with --cells"
                )
            settings["faults"] = cell.faults.text(seed)
        return settings

    def only(self, patterns: Iterable[str]) -> "Suite":
        """The same suite with the cells that some pattern names."""
        patterns, names = list(patterns), [cell.name for cell in self.cells]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise TrimtabError(f"no cell of {self.name} is called {pattern!r}: {meant(pattern, names)}")
        cells = tuple(cell for cell in self.cells if any(fnmatchcase(cell.name, p) for p in patterns))
        return dataclasses.replace(self, cells=cells)


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Settings over settings, the later ones winning; tables such as `policy` are merged entry by entry."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            table = key in TABLES and isinstance(value, Mapping)
            result[key] = {**result.get(key, {}), **value} if table else value
    return result


def find_suite(name: str) -> Suite:
    """A suite by its name or its family's letter."""
    for suite in SUITES.values():
        if name in (suite.name, suite.family, suite.family.lower()) and name:
            return suite
    raise TrimtabError(f"there is no suite {name!r}: {meant(name, [*SUITES, 'museum'])}")


def _faults() -> Iterable[Cell]:
    """Kinds x widths; sizes and several units at width 10."""
    schedules = {1: (10, 16), 5: (25, 8), 10: (50, 4), 20: (50, 4), 50: (100, 2)}  # width: every, count
    for kind, size in (("grad_scale", 16.0), ("bit_flip", None), ("output_scale", None), ("zero_blocks", None)):
        for width, (every, count) in schedules.items():
            windows = Windows(kind, width, size, every=every, count=count)
            yield Cell(f"{kind}-w{width}", faults=windows, axis=("width", width), group=kind)
    for kind, size in (("grad_scale", 64.0), ("grad_scale", 256.0), ("output_scale", 4.0), ("output_scale", 16.0)):
        yield Cell(f"{kind}-x{size:g}", faults=Windows(kind, size=size))
    for kind in ("grad_burst", "stale_scale", "nan"):
        yield Cell(kind, faults=Windows(kind))
    for kind, size in (("grad_scale", 16.0), ("output_scale", None)):
        windows = Windows(kind, size=size, units=3)
        seats = {"source-replay-3-seats": ("source-replay", {"policy": {"max_high": 3}})}
        yield Cell(f"{kind}-3units", {"policy": {"max_high": 3}}, windows, variants=seats)


def _cliff() -> Iterable[Cell]:
    for name, settings in (("fp8", LINEAR), ("fp4", BLOCK4), ("saved4", SAVED)):
        for rate in (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2):
            yield Cell(f"{name}-lr{rate:g}", settings | {"lr": rate}, axis=("lr", rate), group=name)


def _tables() -> Iterable[Cell]:
    """One cell per table, so that all of a table's rows share their high, low and random runs."""
    schedules = {
        f"alpha {first}, {after}": ("gnmr", {"policy": {"alpha_warmup": first, "alpha": after}})
        for first, after in ((1.1, 1.1), (1.5, 1.1), (1.5, 1.5))
    }
    budgets = {f"maxO {most}": ("gnmr", {"policy": {"max_high": most}}) for most in (2, 4, 6, 8)}
    shares = {
        f"alpha {alpha}, beta {beta}": ("gnmr", {"policy": {"alpha": alpha, "beta": beta, "alpha_warmup": None}})
        for alpha, beta in ((1.5, 1.3), (2.0, 1.5), (3.0, 2.0))
    }
    whole = {"recipe": "fp6", "unit": "linear", "policy": {"max_high": 4}}  # the pair of Tables 5 and 6 is not stated
    yield Cell("t3-exceedance", SAVED, variants=shares)
    yield Cell("t5-alpha", whole, variants=schedules)
    yield Cell("t6-max-high", whole, variants=budgets)
    for size in ("micro", "tiny"):
        yield Cell(f"t9-{size}", BLOCK6 | {"model": size})
    yield Cell("t11-triggers", SAVED | {"policy": {"preset": "paper-a-matched"}}, arms=TRIGGER_ARMS)
    yield Cell("t14-grouped-kv", PANGU)


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "smoke",
            "Does control close more of the damage of injected faults than random units do? A first look, in minutes.",
            merged(BASE, LINEAR, {"model": "micro", "steps": 160, "policy": {"warmup": "monitor", "warmup_steps": 40}}),
            CORE,
            (Cell("grad_scale", faults=Windows("grad_scale", width=10, size=64.0, start=50, every=35, count=3)),),
        ),
        Suite(
            "saved",
            "4-bit saved activations with 8 bit as recovery, one projection a unit.",
            BASE | SAVED,
            NOISE_ARMS,
            (
                Cell("saved"),
                Cell("forward", {"recipe_options": {"scope": "forward"}}),
                Cell("clip", {"clip": 1.0}),
            ),
            family="A",
        ),
        Suite(
            "blocks",
            "FP8 with plain linears as recovery, and E3M2 and E2M1 with FP8 as recovery, one block a unit.",
            BASE,
            NOISE_ARMS,
            (Cell("fp8", BLOCK8), Cell("fp6", BLOCK6), Cell("fp4", BLOCK4)),
            family="B",
        ),
        Suite(
            "experts",
            "A mixture of experts, one expert a unit: healthy in two precisions, and with faults in single experts.",
            BASE | EXPERT,
            NOISE_ARMS,
            (
                Cell("fp8"),
                Cell("fp4", {"recipe": "fp4"}),
                Cell("fault", WATCHED, Windows("grad_scale", size=16.0, targets=EXPERTS)),
            ),
            family="D",
        ),
        Suite(
            "faults",
            "Faults on the low path of single units, from one step to fifty: found, how soon, and what is won back.",
            merged(BASE, LINEAR, WATCHED),
            FAULT_ARMS,
            tuple(_faults()),
            family="F",
        ),
        Suite(
            "cliff",
            "Where does static low precision fail as the learning rate grows, and does control move that point?",
            BASE,
            CLIFF_ARMS,
            tuple(_cliff()),
            family="L",
        ),
        Suite(
            "harm",
            "Healthy runs, and one bad data shard: what does control cost where there is nothing to control?",
            BASE,
            HARM_ARMS,
            (
                Cell("saved", SAVED),
                Cell("linear", LINEAR),
                Cell("blocks-fp8", BLOCK8),
                Cell("blocks-fp6", BLOCK6),
                Cell("blocks-fp4", BLOCK4),
                Cell("experts", EXPERT),
                Cell("bad-data", LINEAR | {"bad_data": "start=300,width=20"}),
            ),
        ),
        Suite(
            "tables",
            "The paper's own tables at small size, with random units and the unconverted run beside them.",
            BASE,
            (*CORE, "plain"),
            tuple(_tables()),
        ),
    )
}
"""Every suite by name; `museum` (`trimtab.lab.museum`) is one of another kind."""
