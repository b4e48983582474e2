# SPDX-License-Identifier: Apache-2.0
"""A weight in few bits as it is stored, what it truly costs, and a whole model in one file.

    codes    b bits per weight, row by row, least significant bit first, in bytes
    scale    FP16, (out, groups)
    zero     b bits per group, packed like the codes; none where the grid is symmetric
    A, B     FP16 LoRA factors, if there are any

    bits per weight = b + groups * (16 + zero bits) / in + 16 * rank * (in + out) / (in * out)

that is 2.281 and not 2 for groups of 64, and 2.68 with factors of rank 64 on LLaMA-2-7B. Names and shapes stand in the
header of a safetensors file, and everything read is checked against them: a file of another model, of another size or
cut short is refused. Nothing is unpickled.

The weight that comes out, Q + (alpha / r) * B A, is computed in float64. The factors have 11 significant bits, so the
sum is exact for every order of summation: the same bits on every device, with any number of threads.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.checks import is_whole, parse_json, require, shown
from trimtab.errors import TrimtabError, missing_extra
from trimtab.files import disk_errors
from trimtab.retrain.settings import Settings

FORMAT = "trimtab packed 1"
PARTS = ("codes", "scale", "zero", "A", "B")


@dataclass(frozen=True, eq=False)
class Packed:
    """One weight matrix (rows, columns) as it is stored."""

    shape: tuple[int, int]
    settings: Settings
    codes: Tensor  # uint8
    scale: Tensor  # (rows, groups) float16
    zero: Tensor | None = None  # uint8
    A: Tensor | None = None  # (rank, columns) float16
    B: Tensor | None = None  # (rows, rank) float16

    @classmethod
    def make(
        cls,
        codes: Tensor,  # (rows, columns) uint8, below 2^bits
        scale: Tensor,  # (rows, groups) float16
        zero: Tensor | None,  # (rows, groups) uint8, below 2^bits
        A: Tensor | None,
        B: Tensor | None,
        *,
        settings: Settings,
    ) -> "Packed":
        """Pack what a quantizer has found; tensors go to the CPU."""
        for name, value in (("scale", scale), ("LoRA factor A", A), ("LoRA factor B", B)):
            if value is not None and not bool(torch.isfinite(value).all()):
                raise TrimtabError(f"a {name} is not finite in 16 bits: lower the learning rates")
        packed = None if zero is None else pack(zero, settings.bits)
        kept = [None if value is None else value.detach().cpu() for value in (A, B)]
        return cls((codes.shape[0], codes.shape[1]), settings, pack(codes, settings.bits), scale.cpu(), packed, *kept)

    def levels(self) -> tuple[Tensor, Tensor]:
        """The codes (rows, columns) and the zero points (rows, groups), uint8."""
        (rows, columns), groups, bits = self.shape, self.scale.shape[1], self.settings.bits
        codes = unpack(self.codes, bits, rows * columns).view(rows, columns)
        if self.zero is None:
            return codes, torch.full((rows, groups), 2 ** (bits - 1) - 1, dtype=torch.uint8)
        return codes, unpack(self.zero, bits, rows * groups).view(rows, groups)

    def quantized(self) -> Tensor:
        """Q, the base that LoRA stands on; float32, in which it is exact."""
        codes, zero = self.levels()
        columns = codes.shape[1]
        zero, scale = (
            part.float().repeat_interleave(self.settings.group, dim=1)[:, :columns] for part in (zero, self.scale)
        )
        return (codes.float() - zero) * scale

    def weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Q + (alpha / r) * B A, the weight to use."""
        quantized = self.quantized()
        if self.A is None or self.B is None:
            return quantized.to(dtype)
        change = self.B.double() @ self.A.double()
        return (quantized.double() + self.settings.factor * change).to(dtype)

    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by name."""
        return {name: value for name in PARTS if (value := getattr(self, name)) is not None}

    def num_bits(self) -> int:
        """What is stored, in bits; the filling of a last byte included."""
        return 8 * sum(value.numel() * value.element_size() for value in self.tensors().values())

    @classmethod
    def from_tensors(cls, shape: Iterable[int], settings: Settings, tensors: Mapping[str, Tensor]) -> "Packed":
        """The opposite of `tensors`; a size or type that does not fit the shape is refused."""
        rows, columns = shape
        require(is_whole(rows, 1) and is_whole(columns, 1), "a weight has a whole number of rows and columns", shape)
        expected = expected_tensors(rows, columns, settings)
        found = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
        for name in expected.keys() | found.keys():
            if expected.get(name) != found.get(name):
                raise TrimtabError(
                    f"{name} of a {rows} x {columns} weight in {settings.bits} bits must be "
                    f"{_say(expected.get(name))}, got {_say(found.get(name))}: the file is damaged or of another model"
                )
        return cls((rows, columns), settings, **tensors)


def expected_tensors(rows: int, columns: int, settings: Settings) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of what a packed weight consists of."""
    groups = -(-columns // settings.group)
    half, byte = torch.float16, torch.uint8
    expected = {"codes": ((-(-rows * columns * settings.bits // 8),), byte), "scale": ((rows, groups), half)}
    if not settings.symmetric:
        expected["zero"] = ((-(-rows * groups * settings.bits // 8),), byte)
    if settings.rank:
        expected |= {"A": ((settings.rank, columns), half), "B": ((rows, settings.rank), half)}
    return expected


def bits_per_weight(shapes: Iterable[tuple[int, int]], settings: Settings) -> float:
    """What a weight costs in truth: codes, scales, zero points, short last groups, LoRA factors."""
    shapes = list(shapes)
    weights = sum(rows * columns for rows, columns in shapes)
    grid = 16 + (0 if settings.symmetric else settings.bits)
    cost = weights * settings.bits
    for rows, columns in shapes:
        cost += rows * -(-columns // settings.group) * grid + 16 * settings.rank * (rows + columns)
    return cost / weights


def pack(codes: Tensor, bits: int) -> Tensor:
    """Whole numbers below 2^bits as bytes, `bits` bits each: eight of them are `bits` bytes of a 64-bit word."""
    values = codes.detach().cpu().numpy().reshape(-1).astype("<u8")
    words = np.pad(values, (0, -len(values) % 8)).reshape(-1, 8) << _shifts(bits)
    raw = np.bitwise_or.reduce(words, axis=1).view(np.uint8).reshape(-1, 8)[:, :bits].reshape(-1)
    return torch.from_numpy(raw[: -(-len(values) * bits // 8)].copy())


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` whole numbers of `pack`."""
    raw = packed.numpy()
    words = np.zeros((-(-count // 8), 8), dtype=np.uint8)
    words[:, :bits] = np.pad(raw, (0, len(words) * bits - len(raw))).reshape(-1, bits)
    values = (words.view("<u8") >> _shifts(bits)) & np.uint64(2**bits - 1)
    return torch.from_numpy(values.astype(np.uint8).reshape(-1)[:count])


def _shifts(bits: int) -> np.ndarray:
    return np.arange(8, dtype="<u8") * np.uint64(bits)


def write(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write a safetensors file with a header of ours, whole or not at all."""
    save = safetensors().torch.save_file
    room = path.with_suffix(".tmp")  # safetensors leaves a file with a name of its own here when it is killed
    draft = room / path.name
    _clear(room)
    room.mkdir(parents=True)
    try:
        with disk_errors(draft):
            save({name: value.contiguous() for name, value in tensors.items()}, draft, {"trimtab": json.dumps(header)})
            draft.chmod(0o644)  # safetensors makes it the owner's alone
            with draft.open("rb+") as file:
                os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        _clear(room)


def _clear(room: Path) -> None:
    if room.is_dir():
        shutil.rmtree(room, ignore_errors=True)
    else:
        room.unlink(missing_ok=True)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file of `write`, and its header."""
    header = read_header(path)
    with safetensors().safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118 (it is no mapping)


def read_header(path: Path) -> dict[str, Any]:
    """The header of a file of `write`; anything else is refused."""
    theirs = safetensors()
    if not path.is_file():
        raise TrimtabError(f"a packed file must exist, {str(path)!r} does not: give the path of one")
    try:
        with theirs.safe_open(path, framework="pt") as file:  # checks that the file is as long as it says
            header = parse_json((file.metadata() or {})["trimtab"])
        version = header["format"]
    except (KeyError, TypeError, ValueError):
        raise TrimtabError(f"{path} is a safetensors file but not one of trimtab quantize: give another") from None
    except theirs.SafetensorError as error:
        raise TrimtabError(f"{path} is not a whole safetensors file ({error}): make or get it once more") from None
    if version != FORMAT:
        raise TrimtabError(f"{path} has the format {shown(version)}, this trimtab reads {FORMAT!r}: update it")
    return header


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of tensors, their names, shapes and types."""
    digest = hashlib.sha256()
    for name, value in tensors.items():
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def safetensors() -> Any:
    """The package, or the line that installs it."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise missing_extra("safetensors", "hf", "A packed checkpoint") from None
    return safetensors


def to_file(linears: Mapping[str, Packed]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Packed weights as the tensors and the header of a file."""
    tensors = {f"{path}.{name}": t for path, one in linears.items() for name, t in one.tensors().items()}
    settings = next(iter(linears.values())).settings.to_dict() if linears else {}
    return tensors, {
        "format": FORMAT,
        "settings": settings,
        "linears": {path: list(one.shape) for path, one in linears.items()},
    }


def from_file(path: Path, tensors: dict[str, Tensor], header: Mapping[str, Any]) -> dict[str, Packed]:
    """The packed weights of a file; they are taken out of `tensors`."""
    try:
        settings, shapes = Settings.from_dict(header["settings"]), dict(header["linears"])
        linears = {}
        for name, shape in shapes.items():
            own = [part for part in PARTS if f"{name}.{part}" in tensors]
            pieces = {part: tensors.pop(f"{name}.{part}") for part in own}
            linears[name] = Packed.from_tensors(shape, settings, pieces)
    except (KeyError, TypeError, ValueError) as error:
        raise TrimtabError(f"{path} is not a packed file of trimtab quantize: {error}") from None
    return linears


def save_packed(model: nn.Module, linears: Mapping[str, Packed], path: str | Path) -> Path:
    """Write a whole model: its packed weights, and everything else as it stands."""
    tensors, header = to_file(linears)
    replaced = {f"{name}.weight" for name in linears}
    first: dict[tuple[int, torch.Size], str] = {}
    same: dict[str, str] = {}
    for name, value in model.state_dict().items():
        if name in replaced:
            continue
        place = first.setdefault((value.data_ptr(), value.shape), name)
        if place != name and value.numel():
            same[name] = place  # tied: stored once
        else:
            tensors[name] = value.detach().cpu()
    path = Path(path)
    write(path, tensors, header | {"same": same})
    return path


@torch.no_grad()
def load_packed_(model: nn.Module, path: str | Path) -> dict[str, Packed]:
    """Fill a model with a file of `save_packed`, in place; returns the packed weights by the path of their linear.

    The model has the architecture and the type that the file was made with, such as
    `AutoModelForCausalLM.from_config(config)` gives. It stays as it is when the file does not fit.
    """
    path = Path(path)
    tensors, header = read(path)
    linears = from_file(path, tensors, header)
    same = _tied(path, header, tensors)
    shapes = {f"{name}.weight": one.shape for name, one in linears.items()}
    _check_shapes(model, path, shapes | {name: tuple(value.shape) for name, value in tensors.items()}, same)
    own = model.state_dict()
    for name, value in tensors.items():
        own[name].copy_(value)
    for name, place in same.items():
        own[name].copy_(tensors[place])
    for name, one in linears.items():
        weight = own[f"{name}.weight"]
        weight.copy_(one.weight(weight.dtype))
    return linears


def check_packed(model: nn.Module, path: str | Path) -> None:
    """Refuse a file that is not of this model by its shapes alone: the model may be on the meta device."""
    path = Path(path)
    header = read_header(path)
    try:
        settings, linears = Settings.from_dict(header["settings"]), dict(header["linears"])
        with safetensors().safe_open(path, framework="pt") as file:
            stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
        for name, (rows, columns) in linears.items():
            for part, (shape, _) in expected_tensors(rows, columns, settings).items():
                if stored.pop(f"{name}.{part}", None) != shape:
                    raise ValueError(f"{name} is no {rows} x {columns} weight in {settings.bits} bits")
        shapes = {f"{name}.weight": tuple(shape) for name, shape in linears.items()}
        _check_shapes(model, path, shapes | stored, _tied(path, header, stored))
    except TrimtabError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise TrimtabError(f"{path} is not a packed file of trimtab quantize: {error}") from None


def _tied(path: Path, header: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, str]:
    """Names of tensors that are stored under another name, which must be there."""
    same = header.get("same", {})
    if not isinstance(same, dict) or not all(isinstance(place, str) and place in stored for place in same.values()):
        raise TrimtabError(f"{path} is not a packed file of trimtab quantize: it names tied tensors that are not in it")
    return same


def _check_shapes(model: nn.Module, path: Path, shapes: dict[str, Any], same: Mapping[str, str]) -> None:
    """Say in one line where a file's tensors are another model's; `same` names those that are stored once."""
    own = model.state_dict()
    shapes = shapes | {name: shapes.get(place) for name, place in same.items()}
    for name in sorted(own.keys() | shapes.keys()):
        here = tuple(own[name].shape) if name in own else None
        if here != shapes.get(name):
            raise TrimtabError(
                f"{path} is of another model: {name} is {shapes.get(name) or 'absent'} there and {here or 'absent'} "
                "here; build the model from the config.json beside the file"
            )


def _say(what: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "absent" if what is None else f"{tuple(what[0])} {str(what[1]).removeprefix('torch.')}"
