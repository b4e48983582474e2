# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of several ranks: written by all, read by any number of ranks, safe to read from a stranger.

    checkpoints/step_000200/
        __0_0.distcp, __1_0.distcp, ...    tensors, by torch.distributed.checkpoint (DCP): each rank writes its pieces
        .metadata                          DCP's own index, for other tools
        rest.pt                            everything else, and where each tensor lies

All ranks write into a draft beside its place. When all have written, the first adds `rest.pt` and moves the draft, in
one rename: a folder under its final name is whole.

Tensors have the names of the bare model (`model.blocks.0.attn.q.weight`, `optimizer.<parameter>.exp_avg`), so neither
wrappers nor the order of parameters matter, and DCP cuts them anew for the ranks that read. Optimizer states are named
here and not by `torch.distributed.checkpoint.state_dict`, whose functions take an optimizer step with zero gradients
where a state is missing: SPAM's clock would count it.

On safety: `.metadata` is a pickle, torch 2.13 loads it with `pickle.load`, and so whoever wrote it may run anything on
the machine that reads it. Values that are not tensors are pickles too, loaded with `weights_only=False`. So there are
tensors alone in DCP's files, which it reads with `weights_only=True`, and `.metadata` is never opened here: `rest.pt`,
read with `weights_only=True`, has an index of plain numbers, from which `_metadata` builds what DCP wants to know. An
index may name DCP's data files in its own folder and nothing else, and no more bytes than they have.
"""

import math
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from trimtab.errors import TrimtabError
from trimtab.files import disk_errors
from trimtab.lab import checkpoint
from trimtab.lab.checkpoint import REST
from trimtab.lab.parallel import World
from trimtab.shards import is_dtensor

FILE = re.compile(r"__\d+_\d+\.distcp")
ALONE = "torch.distributed is disabled, unavailable or uninitialized"


def save(path: Path, tensors: dict[str, Tensor], rest: dict[str, Any], world: World) -> None:
    """Write a checkpoint folder, whole or not at all; every rank must call this."""
    draft = path.with_name(f"{path.name}.tmp")
    if world.leads:
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.drop_drafts(path.parent)
        draft.mkdir()
    world.wait()
    try:
        metadata = _write(draft, tensors, alone=world.size == 1)
        if world.leads:
            with disk_errors(path), (draft / REST).open("wb") as file:
                torch.save({**rest, "index": _index(metadata)}, file)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                shutil.rmtree(path)
            os.replace(draft, path)
    except BaseException:
        if world.leads:
            shutil.rmtree(draft, ignore_errors=True)
        raise


def read(path: Path) -> dict[str, Any]:
    """All that a checkpoint folder holds but its tensors; `model` has their shapes, on the meta device."""
    state = checkpoint.load(path / REST)
    if not isinstance(state, dict) or not isinstance(state.get("index"), dict):
        raise TrimtabError(f"{path / REST} is not a checkpoint of trimtab train: it has no index")
    metadata = _metadata(state["index"], path)
    _check_sizes(metadata, path)
    shapes = {name: torch.empty(md.size, dtype=md.properties.dtype, device="meta") for name, md in _tensors(metadata)}
    return {**state, "model": below(shapes, "model")}


def below(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The entries under a prefix, by the rest of their names."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}


def fill(path: Path, state: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Read tensors in place; a DTensor gets its own piece. Every rank reads for itself."""
    reader = _Reader(path, _metadata(state["index"], path))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ALONE)
        try:
            load(dict(tensors), storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            cause = " ".join(str(next(iter(error.failures.values()))[0]).split())[:120]
            raise TrimtabError(f"{path} cannot be read ({cause}): restore it, or move it away") from None


def weights(path: Path, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The model's tensors, whole, on the CPU; no process group is needed."""
    found = {f"model.{name}": torch.empty_like(meta, device="cpu") for name, meta in state["model"].items()}
    fill(path, state, found)
    return below(found, "model")


def like(parameter: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Room for a state of a parameter: cut as the parameter is, if it has its rows, else whole."""
    if is_dtensor(parameter) and len(size) and size[0] == parameter.shape[0]:
        from torch.distributed.tensor import empty

        mesh, placements = parameter.device_mesh, parameter.placements
        return empty(*size, dtype=dtype, device_mesh=mesh, placements=placements)
    return torch.empty(size, dtype=dtype, device=parameter.device if len(size) else "cpu")


def sizes(state: Mapping[str, Any], prefix: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Size and type of every tensor under a prefix."""
    return below({name: (tuple(entry["size"]), _dtype(entry)) for name, entry in state["index"].items()}, prefix)


def _write(draft: Path, tensors: dict[str, Tensor], *, alone: bool) -> Metadata:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ALONE)
        try:
            found = save_tensors(dict(tensors), storage_writer=_Writer(draft, overwrite=True), no_dist=alone)
        except CheckpointException as error:  # what happened on some rank, told to all
            rank = min(error.failures)
            cause = error.failures[rank][0]
            cause.add_note(f"on rank {rank}, writing {draft}")
            raise cause from None
    assert isinstance(found, Metadata)
    return found


def _tensors(metadata: Metadata) -> list[tuple[str, TensorStorageMetadata]]:
    found = metadata.state_dict_metadata.items()
    return [(name, md) for name, md in found if isinstance(md, TensorStorageMetadata)]


def _index(metadata: Metadata) -> dict[str, Any]:
    """Where each tensor lies, in plain values: per chunk its offsets, its sizes, and file, start and length."""
    index: dict[str, Any] = {}
    for name, md in _tensors(metadata):
        places = [metadata.storage_data[MetadataIndex(name, chunk.offsets)] for chunk in md.chunks]
        index[name] = {
            "dtype": str(md.properties.dtype).removeprefix("torch."),
            "size": list(md.size),
            "chunks": [
                [list(chunk.offsets), list(chunk.sizes), place.relative_path, place.offset, place.length]
                for chunk, place in zip(md.chunks, places, strict=True)
            ],
        }
    return index


def _metadata(index: Mapping[str, Any], path: Path) -> Metadata:
    """What DCP wants to know, from an index that may come from anywhere."""
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    try:
        for name, entry in index.items():
            chunks = []
            for offsets, lengths, file, start, length in entry["chunks"]:
                if not FILE.fullmatch(file):
                    raise ValueError(f"{name} lies in {file!r}, which is no data file of the folder")
                chunks.append(ChunkStorageMetadata(_size(offsets), _size(lengths)))
                storage[MetadataIndex(str(name), _size(offsets))] = _StorageInfo(file, int(start), int(length))
            properties = TensorProperties(dtype=_dtype(entry))
            tensors[str(name)] = TensorStorageMetadata(properties, _size(entry["size"]), chunks)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TrimtabError(f"{path / REST} is not a checkpoint of trimtab train: {error}") from None
    return Metadata(state_dict_metadata=tensors, storage_data=storage)


def _check_sizes(metadata: Metadata, path: Path) -> None:
    """Refuse an index of more bytes than there are, before anything is allocated by it."""
    there: dict[str, int] = {}
    for name in {info.relative_path for info in metadata.storage_data.values()}:
        if not (path / name).is_file():
            raise TrimtabError(f"{path} lacks its part {name}")
        there[name] = (path / name).stat().st_size
    for index, info in metadata.storage_data.items():
        if not 0 <= info.offset <= info.offset + info.length <= there[info.relative_path]:
            raise TrimtabError(f"{path} is cut short: {info.relative_path} ends before {index.fqn} does")
    claimed = sum(math.prod(md.size) * md.properties.dtype.itemsize for _, md in _tensors(metadata))
    if claimed > sum(there.values()):
        raise TrimtabError(f"{path} claims {claimed:,} bytes of tensors and holds {sum(there.values()):,}: get it anew")


def _dtype(entry: Mapping[str, Any]) -> torch.dtype:
    found = getattr(torch, str(entry["dtype"]), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{entry['dtype']!r} is no type of tensors")
    return found


def _size(numbers: Sequence[int]) -> torch.Size:
    if any(not 0 <= int(number) < 1 << 62 for number in numbers):
        raise ValueError(f"{list(numbers)} is no size")
    return torch.Size([int(number) for number in numbers])


class _Writer(FileSystemWriter):
    """Says what a disk refused, where it did: all that the other ranks are told of an error is the error itself."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Write this rank's pieces."""
        with disk_errors(str(self.path)):
            return super().write_data(*args, **kwargs)


class _Reader(FileSystemReader):
    """Reads a folder by an index that is given to it; it opens no `.metadata`."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._given = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index it was given."""
        return self._given
