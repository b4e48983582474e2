# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: complete, atomic, safe to load, and never from a broken state.

A checkpoint is one file, `checkpoints/step_000200.pt`: model, optimizer, controller, faults, the step (which is
also the position in the data), random state, the settings, and how long metrics.jsonl and trace.arrow were at
that moment, so that a resume cuts both there and goes on. It holds tensors and plain values only and is read
with `weights_only=True`. It is written beside its place and moved there, so a file under its final name is
whole; the newest two are kept.

A run of several ranks (`parallel=ddp` or `fsdp2`) writes a folder instead, `checkpoints/step_000200/` (`dcp.py`), and
either kind can be resumed by the other, but that fsdp2 does not take the file of one process.
"""

import logging
import math
import re
import shutil
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.checks import is_whole
from trimtab.errors import TrimtabError
from trimtab.files import writing
from trimtab.lab.parallel import World
from trimtab.shards import local

log = logging.getLogger(__name__)

KEEP = 2
REST = "rest.pt"
"""In a checkpoint folder, what is no tensor."""
NAME = re.compile(r"^step_(\d+)(\.pt)?$")


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write a checkpoint, whole or not at all, and drop the older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    drop_drafts(folder)
    path = folder / f"{_name(step)}.pt"
    with writing(path) as file:
        torch.save(state, file)
    _drop_old(folder)
    return path


def save_together(folder: Path, step: int, tensors: dict[str, Tensor], rest: dict[str, Any], world: World) -> Path:
    """Write a checkpoint folder, whole or not at all, and drop the older ones; every rank must call this."""
    from trimtab.lab import dcp

    path = folder / _name(step)
    dcp.save(path, tensors, rest, world)
    if world.leads:
        _drop_old(folder)
    return path


def latest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that can be read, None if there is none; unreadable ones are passed over with a warning."""
    found = _list(folder)
    for _, path in reversed(found):
        try:
            state = read(path)
        except Exception as error:  # a torn zip, a foreign file: torch raises many kinds
            log.warning("%s cannot be read (%s): trying the one before", path, " ".join(str(error).split())[:120])
            continue
        if not is_ours(state):
            raise TrimtabError(f"{path} is not a checkpoint of trimtab train: move it away, or start a new folder")
        return path, state
    if found:  # starting over would remove them, and what they stand for
        raise TrimtabError(f"none of the {len(found)} checkpoints in {folder} can be read: restore one, or use --force")
    return None


def is_ours(state: Any) -> bool:
    """Whether it has what every checkpoint of a run has."""
    if not isinstance(state, dict) or not all(isinstance(state.get(key), dict) for key in ("model", "config")):
        return False
    offsets, tensors = state.get("offsets"), state["model"].values()
    counts = [state.get(key, -1) for key in ("step", "steps")]
    whole = all(is_whole(count) and count < 1 << 48 for count in counts) and isinstance(state.get("optimizer"), dict)
    kept = isinstance(offsets, dict) and all(is_whole(offsets.get(key)) for key in ("metrics", "trace"))
    return whole and kept and all(isinstance(tensor, Tensor) for tensor in tensors)


def read(path: Path) -> dict[str, Any]:
    """What a checkpoint holds; of a folder all but its tensors, the model's as shapes."""
    if not path.is_dir():
        return load(path)
    from trimtab.lab import dcp

    return dcp.read(path)


def load(path: Path) -> Any:
    """What `torch.save` has written: no code is run, and it is not larger in memory than on disk."""
    if not path.is_file():  # a pipe would be waited for
        raise TrimtabError(f"a checkpoint is a file, and {path} is none")
    with zipfile.ZipFile(path) as parts:
        packed = any(part.compress_type != zipfile.ZIP_STORED for part in parts.infolist())
        claimed = sum(part.file_size for part in parts.infolist())
    if packed or claimed > path.stat().st_size:
        raise TrimtabError(f"{path} says that it unpacks to {claimed:,} bytes, and has fewer: torch.save does not pack")
    state = torch.load(path, map_location="cpu", weights_only=True)
    todo, seen = [state], set()
    while todo:  # one stored number may stand for 10^12 of them, or none for as many
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor) and (one.is_meta or one.nbytes > one.untyped_storage().nbytes()):
            raise TrimtabError(f"{path} has a tensor of {one.numel():,} numbers that are not all in it")
        todo += one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple) else ()
    return state


def weights(path: Path, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The model's tensors, whole, of a checkpoint that was read."""
    if not path.is_dir():
        return state["model"]
    from trimtab.lab import dcp

    return dcp.weights(path, state)


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every tensor, or what is here of it, is finite: one pass, one wait."""
    pieces = [piece for tensor in tensors if (piece := local(tensor.detach())).numel()]
    # The largest value: a sum of squares, as of second moments, would overflow where every number is finite.
    largest = torch._foreach_norm(pieces, math.inf)  # pyright: ignore[reportPrivateImportUsage]
    return not largest or bool(torch.stack([value.float().cpu() for value in largest]).isfinite().all())


def check_model(weights: Mapping[str, Tensor], state: Mapping[str, Any], path: Path) -> None:
    """Say in one line where a checkpoint's weights are another model's."""
    ours = {name: tuple(value.shape) for name, value in weights.items()}
    theirs = {name: tuple(value.shape) for name, value in state.items()}
    for name in sorted(set(ours) | set(theirs)):
        if ours.get(name) != theirs.get(name):
            raise TrimtabError(
                f"{path} is of another model: {name} is {theirs.get(name, 'absent')} there and "
                f"{ours.get(name, 'absent')} here; resume with the settings it was made with"
            )


def _name(step: int) -> str:
    return f"step_{step:06d}"


def drop_drafts(folder: Path) -> None:
    """Remove what killed processes have left, of either kind: a file is in the way of a folder's draft, too."""
    for draft in folder.glob("step_*.tmp"):
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            draft.unlink(missing_ok=True)


def _drop_old(folder: Path) -> None:
    """Remove all but the newest. A folder becomes a draft first: under its final name it is whole to the end."""
    for _, old in _list(folder)[:-KEEP]:
        if old.is_dir():
            old.rename(old.with_suffix(".tmp"))
        else:
            old.unlink(missing_ok=True)
    drop_drafts(folder)


def _list(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    named = [(match, path) for path in folder.iterdir() if (match := NAME.match(path.name))]
    return sorted((int(match.group(1)), path) for match, path in named if path.is_dir() == (match.group(2) is None))
