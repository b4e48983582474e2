# SPDX-License-Identifier: Apache-2.0
"""The settings of a lab run: one flat, frozen, checked table; every key has a default.

    trimtab train --config run.toml --set lr=2e-3 --set policy.alpha=2

A file (TOML or YAML) holds the same keys as the command line; the policy's own are `policy.alpha` there and a
`[policy]` table in a file, with `policy.preset` as the starting point for the rest; the options of the optimizer, the
gradient transform, the detector and the guard are tables alike. Values on the command line are read as TOML would read
them, and as plain text where that fails, so `recipe=fp8` needs no quotes. Some files come with trimtab: `--config osp`.
"""

import dataclasses
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from trimtab.checks import is_number, is_whole, meant, require, shown
from trimtab.control.detectors import detector_of
from trimtab.control.policy import Policy
from trimtab.errors import TrimtabError, missing_extra

NONE = ("none", "null")
CHOICES = {
    "mode": ("act", "observe", "off"),
    "path": ("plan", "high", "low"),
    "dtype": ("fp32", "bf16"),
    "backend": ("auto", "emulated", "real"),
    "norm": ("rmsnorm", "ssnorm"),
    "lr_schedule": ("cosine", "trapezoid"),
    "selection": ("policy", "round_robin", "top_norm", "by_lot", "oracle"),
    "guard": ("none", "skip_step", "clip_flagged"),
    "parallel": ("none", "ddp", "fsdp2"),
}
KINDS: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    ("a whole number of at least 0", is_whole, ("eval_every", "checkpoint_every", "seed", "num_experts", "threads")),
    (
        "a whole number of at least 1",
        lambda value: is_whole(value, 1),
        ("steps", "batch", "accumulate", "split", "eval_batches", "top_k", "lora_r"),
    ),
    (
        "a whole number of at least 1, or none",
        lambda value: value is None or is_whole(value, 1),
        ("seq", "kv_heads", "lr_warmup"),
    ),
    (
        "text, not empty",
        lambda value: isinstance(value, str) and value.strip() != "",
        ("model", "data", "recipe", "optimizer", "transform", "detector", "device"),
    ),
    (
        "text, or none",
        lambda value: value is None or isinstance(value, str),
        ("roles", "tokenizer", "bad_data", "random_like"),
    ),
    ("true or false", lambda value: isinstance(value, bool), ("checkpointing", "embproj", "full")),
)
"""What a setting must be, and which ones."""
TABLES = {
    "policy": "alpha=2",
    "recipe_options": "scope=forward",
    "optimizer_options": "density=0.25",
    "transform_options": "global_norm=true",
    "detector_options": "full=true",
    "guard_options": "sigmas=4",
}
"""Settings that are tables themselves, each with an example: `policy.alpha=2` sets one entry."""
ENDS = "ends"
NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d{1,3}")
MOST_VALUES = 10_000
"""Of a config file, the entries of lists and tables counted."""
SHIPPED = Path(__file__).parent / "configs"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every run has, whatever it trains; `Config` and `FinetuneConfig` add their model and data."""

    model: str
    data: str
    recipe: str = "fp8"
    """What low and high mean; `none` leaves the linears as they are."""
    recipe_options: Mapping[str, Any] = field(default_factory=dict)
    """The recipe's own settings, such as `recipe_options.scope=forward` for `saved4`."""
    roles: str | None = None
    """Which GEMMs the low path quantizes, comma-separated: output, grad_input, grad_weight; None means its own."""
    unit: Any = "linear"
    """What switches together: `linear`, `block`, `expert`, or a list of name patterns."""
    backend: str = "emulated"
    """`emulated`, `real` kernels (a Hopper GPU), or `auto`: real on CUDA, emulated elsewhere."""
    mode: str = "act"
    """`act`, `observe` or `off`."""
    path: str = "plan"
    """`plan` (the controller decides), or every unit on `high` or on `low`, whatever the plan says."""
    detector: str = "gnmr"
    """What a unit's risk is read from: `gnmr`, or another of `trimtab.control.detectors`."""
    detector_options: Mapping[str, Any] = field(default_factory=dict)
    """The detector's own settings, such as `detector_options.full=true`: the whole budget in every step."""
    selection: str = "policy"
    """Who fills the seats: `policy`, or in every step `round_robin`, `top_norm` or `oracle` (exact recovery gaps)."""
    fixed_high: Any = None
    """Units that always run high, beside those chosen: name patterns, or `ends`, NVFP4's first and last blocks."""
    guard: str = "none"
    """`skip_step` (no update where loss or norm is an outlier) or `clip_flagged` (nobody runs high; units that would
    have been chosen are clipped to their own mean norm)."""
    guard_options: Mapping[str, Any] = field(default_factory=dict)
    """The settings of `skip_step`: `sigmas`, `window`, `warmup`."""
    optimizer: str = "adamw"
    """`adamw`, `sgd`, `spam`, `stable_spam`, or `osp` (Muon for matrices, AdamW for the rest)."""
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    """The optimizer's own settings, such as `optimizer_options.density=0.25` for `spam`."""
    transform: str = "none"
    """What is done to the gradients before the optimizer: `none`, `stabilizer`, `zclip`, `adagc` or `autoclip`."""
    transform_options: Mapping[str, Any] = field(default_factory=dict)
    """The transform's own settings, such as `transform_options.gammas=[0.7, 0.9]`."""
    lr: float = 2e-3
    """Peak learning rate."""
    lr_schedule: str = "cosine"
    """After a linear warm-up: `cosine` to a tenth of the peak, or `trapezoid`, constant and then linear to zero."""
    lr_warmup: int | None = None
    """Steps of warm-up; None means a tenth of all."""
    weight_decay: float = 0.0
    steps: int = 600
    """Optimizer steps."""
    batch: int = 16
    """Sequences per micro-batch, of all ranks together."""
    seq: int | None = None
    """Tokens per sequence; None means the model's longest."""
    accumulate: int = 1
    """Micro-batches per optimizer step."""
    split: int = 1
    """Parts into which each micro-batch is cut, one backward each: the same data, for detectors that need several."""
    clip: float | None = None
    """Largest total gradient norm; None does not clip."""
    dtype: str = "fp32"
    """Weights: fp32 or bf16."""
    checkpointing: bool = False
    """Recompute activations in the backward."""
    eval_every: int = 0
    """Steps between evaluations on the held-out part; 0 evaluates at the end only."""
    eval_batches: int = 8
    """Batches per evaluation."""
    checkpoint_every: int = 200
    """Steps between checkpoints; 0 writes one at the end only."""
    faults: Any = ""
    """Fault windows, such as `blocks.1.mlp.down:grad_scale:start=200,width=20,size=64`; several with `;`."""
    seed: int = 0
    parallel: str = "none"
    """How several ranks share the run (`torchrun -m trimtab train`): `ddp`, or `fsdp2`, which cuts the parameters."""
    device: str = "auto"
    threads: int = 0
    """CPU threads; 0 means one for `micro`, whose operators are too small to share, else torch's own choice."""
    policy: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `trimtab.Policy`, and `preset`."""

    def __post_init__(self) -> None:
        own = [f.name for f in dataclasses.fields(self)]
        for name in (name for name in own if name in CHOICES):
            valid = CHOICES[name]
            require(getattr(self, name) in valid, f"{name} must be one of {', '.join(valid)}", getattr(self, name))
        for rule, holds, names in KINDS:
            for name in (name for name in names if name in own):
                require(holds(getattr(self, name)), f"{name} must be {rule}", getattr(self, name))
        require(is_number(self.lr) and self.lr > 0, "lr must be a positive number", self.lr)
        require(
            is_number(self.weight_decay) and self.weight_decay >= 0,
            "weight_decay must not be negative",
            self.weight_decay,
        )
        require(
            self.clip is None or (is_number(self.clip) and self.clip > 0), "clip must be positive, or none", self.clip
        )
        require(self.batch % self.split == 0, f"split must divide the batch of {self.batch}", self.split)
        require(self.seed < 2**64, "seed must lie below 2^64", self.seed)
        patterns = isinstance(self.unit, list | tuple) and all(isinstance(p, str) for p in self.unit)
        require(isinstance(self.unit, str) or patterns, "unit must be a name or a list of patterns", self.unit)
        many = isinstance(self.fixed_high, list | tuple) and all(isinstance(p, str) for p in self.fixed_high)
        fine = many or self.fixed_high in (None, ENDS)
        require(fine, f"fixed_high must be a list of patterns, {ENDS!r}, or none", self.fixed_high)
        require("name" not in self.recipe_options, "recipe_options are a recipe's own, and its name is recipe=", "name")
        if self.recipe == "none" and self.recipe_options:
            raise TrimtabError(f"recipe=none has no options, got {dict(self.recipe_options)}: leave them out")
        if self.recipe == "none" and self.mode == "act":
            raise TrimtabError("mode=act needs something to switch, and recipe=none converts nothing: set mode=observe")
        self._check_choice()

    def _check_choice(self) -> None:
        """Refuse settings that would have no effect beside the others."""
        detector_of(self.detector, **self.detector_options)
        acting = self.mode == "act" and self.path == "plan"
        for name, asked in {"selection": self.selection != "policy", "fixed_high": bool(self.fixed_high)}.items():
            if asked and not acting:
                raise TrimtabError(
                    f"{name} needs a plan that is carried out, got mode={self.mode} and path={self.path}: "
                    "set mode=act and path=plan"
                )
        if self.selection == "oracle" and self.fixed_high:
            raise TrimtabError(f"the oracle fills all seats, got fixed_high={self.fixed_high}: leave one of them out")
        if self.guard_options and self.guard != "skip_step":
            raise TrimtabError(f"guard_options are those of skip_step, got guard={self.guard}: set guard=skip_step")
        policy = self.build_policy()
        if self.guard == "clip_flagged":
            wrong = {"mode": self.mode if self.mode == "off" else None, "replay_step": policy.replay_step}
            wrong |= {"detector": None if self.detector == "gnmr" else self.detector}
            wrong |= {"selection": None if self.selection == "policy" else self.selection}
            for name, value in wrong.items():
                if value is not None:
                    raise TrimtabError(
                        f"clip_flagged clips whom the policy's own rule flags, to the mean norm of gnmr, once a step, "
                        f"got {name}={value}: leave it out"
                    )

    def build_policy(self) -> Policy:
        """The policy these settings describe."""
        settings = dict(self.policy)
        base = Policy.preset(settings.pop("preset")) if "preset" in settings else Policy()
        return base.replace(**settings)

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values."""
        return dataclasses.asdict(self) | {name: dict(getattr(self, name)) for name in TABLES}

    def replace(self, /, **changes: Any) -> Self:
        """A copy with some settings changed."""
        return self.from_dict(self.to_dict() | changes)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build settings from plain values; an unknown key raises and names the nearest."""
        known = [f.name for f in dataclasses.fields(cls)]
        require(isinstance(values, Mapping), "settings must be a table of names and values", values)
        for key in values:
            if key not in known:
                raise TrimtabError(f"unknown setting {key!r}: {_hint(key, known)}")
        words = {key: "none" for key in ("recipe", "transform", "guard", "parallel") if values.get(key, "") is None}
        for name in TABLES:
            _table(values, name)
        return cls(**{**values, **words})


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of one run of `trimtab train`."""

    model: str = "micro"
    """Size of the decoder: micro, tiny, 60m, 130m, 350m, 1b, osp-1.4b."""
    kv_heads: int | None = None
    """Key and value heads, fewer than heads for grouped queries; None means as many."""
    num_experts: int = 0
    """Experts per layer; 0 is a dense model."""
    top_k: int = 2
    """Experts per token."""
    norm: str = "rmsnorm"
    """`rmsnorm`, or `ssnorm`: one gain for all features instead of one each (OSP)."""
    embproj: bool = False
    """A square matrix after the embedding and one before the head, to keep their outliers apart (OSP)."""
    data: str = "stdlib"
    """`stdlib` (the text of Python's own library), or a file, folder or .jsonl of text."""
    tokenizer: str | None = None
    """A `tokenizers` JSON file; None means bytes."""
    bad_data: str | None = None
    """Steps whose batches are random tokens, such as `start=200,width=20`; several with `;`."""


def load_settings(config: str | Path | None = None, sets: Sequence[str] = ()) -> dict[str, Any]:
    """The settings that a file and `key=value` pairs name, the latter winning; not yet checked."""
    settings = {} if config is None else _read_file(_find(Path(config)))
    for pair in sets:
        key, equals, text = pair.partition("=")
        key = key.strip()
        if not equals or not key:
            raise TrimtabError(f"a setting is written key=value, got {pair!r}")
        _put(settings, key, parse_value(text))
    return settings


def _put(settings: dict[str, Any], key: str, value: Any) -> None:
    """Set one entry; `policy.alpha` is the entry alpha of the table policy."""
    table, dot, entry = key.partition(".")
    if dot and table in TABLES:
        settings[table] = {**_table(settings, table), entry: value}
    else:
        settings[key] = value


def parse_value(text: str) -> Any:
    """Read a value as TOML does; `none` and `null` are None, anything else that is no TOML is text."""
    text = text.strip()
    if text.lower() in NONE:
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # also of a number of more than 4,300 digits
        return text
    except RecursionError:
        raise TrimtabError(f"a value must not nest so deep, got {text[:60]!r}...") from None


def _find(path: Path) -> Path:
    """A file, or the name of one that comes with trimtab."""
    shipped = SHIPPED / f"{path.name}.toml"
    if path.exists() or path.suffix or path.parent != Path():
        return path
    if not shipped.is_file():
        known = [file.stem for file in sorted(SHIPPED.glob("*.toml"))]
        raise TrimtabError(
            f"a config is a .toml or .yaml file, or one of {', '.join(known)}, got {str(path)!r}: {meant(path, known)}"
        )
    return shipped


def _read_file(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise TrimtabError(f"a config must be a readable text file, and {str(path)!r} is no file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TrimtabError(f"a config must be a readable text file, got {str(path)!r}: {error}") from None
    if path.suffix == ".toml":
        try:
            values = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise TrimtabError(f"{path} is not valid TOML: {error}") from None
    elif path.suffix in (".yaml", ".yml"):
        values = _read_yaml(path, text)
    else:
        raise TrimtabError(f"a config file ends in .toml, .yaml or .yml, got {str(path)!r}")
    if not isinstance(values, dict):
        raise TrimtabError(f"a config must be a table of settings, {path} holds a {type(values).__name__}")
    _check_size(values, path)
    for key in [key for key in values if isinstance(key, str) and "." in key]:  # a file may write policy.alpha as well
        _put(values, key, values.pop(key))
    for table in TABLES:
        if isinstance(values.get(table), dict):
            values[table] = {key: _meant(value) for key, value in values[table].items()}
    return {key: _meant(value) for key, value in values.items()}


def _check_size(values: Mapping[Any, Any], path: Path) -> None:
    """Refuse what is no table of settings any more: a few aliases of YAML may stand for 10^10 values, or for no end."""
    todo: list[Any] = [values]
    seen = 0
    while todo:
        one = todo.pop()
        seen += 1
        todo += one.values() if isinstance(one, Mapping) else one if isinstance(one, list | tuple | set) else ()
        if seen + len(todo) > MOST_VALUES:
            raise TrimtabError(f"a config must have at most {MOST_VALUES:,} values, {path} has more: shorten its lists")


def _table(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The settings of one table."""
    table = settings.get(name, {})
    if not isinstance(table, Mapping) or not all(isinstance(key, str) for key in table):
        raise TrimtabError(f"{name} must be a table of settings such as {name}.{TABLES[name]}, got {shown(table)}")
    return table


def _meant(value: Any) -> Any:
    """TOML has no null: a file may write "none". And what YAML 1.1 takes for a text, 2e-3, is a number."""
    if not isinstance(value, str):
        return value
    return None if value.lower() in NONE else float(value) if NUMBER.fullmatch(value) else value


def _read_yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise missing_extra("pyyaml", "cli", "A YAML config") from None
    try:
        return yaml.safe_load(text) or {}
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise TrimtabError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None


def _hint(key: str, known: Sequence[str]) -> str:
    if key in {f.name for f in dataclasses.fields(Policy)} | {"preset"}:
        return f"did you mean policy.{key}?"
    return meant(key, known)
