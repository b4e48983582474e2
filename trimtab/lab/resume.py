# SPDX-License-Identifier: Apache-2.0
"""Resuming: which settings a continued run has.

A run keeps the settings that its run.json was written with. They may be repeated when it is resumed; a different one
is refused by name, because half a run under one learning rate and half under another is neither. Only `steps` may grow.
It then moves the end and nothing else: learning rate and warm-up follow the length the run was started with. And
`parallel` may change, like the number of ranks: it says how a run is carried out, and not what it is.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from trimtab.checks import parse_json
from trimtab.control.record import RUN
from trimtab.errors import TrimtabError
from trimtab.lab.config import TABLES, Config, Settings

S = TypeVar("S", bound=Settings)
DERIVED = ("corpus", "hardware", "saved")
"""What run.json keeps beside the settings; they follow from them."""


def stored_settings(folder: Path) -> dict[str, Any] | None:
    """The settings in a folder's run.json; None if there is no run."""
    path = folder / RUN
    if not path.is_file():
        return None
    try:
        config = parse_json(path.read_text(encoding="utf-8"))["config"]
        return {key: value for key, value in config.items() if key not in DERIVED}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrimtabError(f"{path} is not the run.json of a trimtab run ({error!r}): choose another folder") from None


def merge_settings(
    stored: Mapping[str, Any] | None, given: Mapping[str, Any], steps: int | None, kind: type[S] = Config
) -> tuple[S, int]:
    """The settings to run with, and the step to run to.

    A resumed run keeps its stored settings, its `steps` included, which fix the learning rate and the warm-up; a
    larger `steps` only moves the end.
    """
    if stored is None:
        wanted = kind.from_dict(given)
        return wanted, wanted.steps
    config = kind.from_dict(stored)
    tables = {name: given[name] for name in TABLES if name in given}
    merged = {
        name: {**getattr(config, name), **table} if isinstance(table, Mapping) else table
        for name, table in tables.items()
    }
    wanted = config.replace(**{**given, **merged})
    steps = max(config.steps, steps or 0)
    ours, theirs = comparable(config), comparable(wanted)
    for key, value in theirs.items():
        if value != ours.get(key):
            raise changed(key, ours.get(key), value)
    if "steps" in given and wanted.steps < steps:
        raise TrimtabError(f"a resumed run may only get longer: steps was {steps} and is now {wanted.steps}")
    return config.replace(parallel=wanted.parallel), max(steps, wanted.steps)


def comparable(config: Settings) -> dict[str, Any]:
    """Settings that a resumed run must share, the policy written out; faults need the model (`Run.check_faults`)."""
    apart = ("steps", "faults", "policy", "parallel")
    settings = {key: value for key, value in config.to_dict().items() if key not in apart}
    settings |= {f"policy.{key}": value for key, value in config.build_policy().to_dict().items()}
    for table in (name for name in TABLES if name != "policy"):
        settings |= {f"{table}.{key}": value for key, value in settings.pop(table).items()}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}


def changed(key: str, before: object, now: object) -> TrimtabError:
    """The refusal of a setting that differs."""
    return TrimtabError(
        f"a resumed run keeps its settings: {key} was {before!r} and is now {now!r}; "
        "leave it out, or start a new folder"
    )
