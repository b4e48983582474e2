# SPDX-License-Identifier: Apache-2.0
"""Several ranks train one run: `torchrun --nproc-per-node 2 -m trimtab train --set parallel=ddp` (or `fsdp2`).

Each rank has the same model and takes its own rows of every batch; gradients are averaged once per optimizer step.

    ddp      every rank holds the whole model, and all of them the same bits
    fsdp2    every rank holds a piece of each parameter, of its gradient and of the optimizer's state

`batch` is that of all ranks together, so the number of ranks changes how a run is carried out and not what it is:

    N ranks with split s  =  one rank with split N s     to rounding, random rounding and replayed batches included
                          =  one rank with split s       where what one sequence gives depends on no other

The second holds for a dense model that is not converted, or whose scales are per token (int8, saved4). A scale for a
whole tensor (fp8), blocks along the tokens (those of the weight's gradient in fp8_row, fp8_block, mxfp4, nvfp4) and the
balance of a mixture see the rows of one rank instead of all. Delayed scales and stuck ones are those of all ranks
(`memories.py`), so that a checkpoint has one of each, and equal neither. Sensors measure on the first rank's rows
(`control/ranks.py`): detectors that read more than norms decide alike on all ranks, but not as one process would.

One rank needs no torchrun, no process group and no wrapper: it runs the plain model. Of several the first writes the
run folder and speaks, and the others are silent. An evaluation hands out whole batches in turn, so its figure is that
of one process. How ranks find each other, and what they do when one fails, is in `meeting.py`.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.errors import TrimtabError
from trimtab.lab.config import Config, Settings

T = TypeVar("T")


class World:
    """The ranks of a run, of which this process is one. Alone, all of this is trivial."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def leads(self) -> bool:
        """Whether this rank writes and speaks."""
        return self.rank == 0

    def first(self, work: Callable[[], T]) -> T:
        """What the first rank finds, handed to all; the others do not do the work."""
        if self.size == 1:
            return work()
        found: list[Any] = [work() if self.leads else None]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def share(self, *tensors: Tensor) -> list[Tensor]:
        """This rank's rows of tensors whose rows the ranks divide evenly."""
        return [tensor.chunk(self.size)[self.rank] for tensor in tensors]

    def gather(self, values: Tensor) -> Tensor:  # (...,) -> (size, ...)
        """The values of all ranks, on the host, the same bits on each."""
        if self.size == 1:
            return values.detach().cpu().unsqueeze(0)
        mine = values.detach().to(_host())
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine)
        return torch.stack(found).cpu()

    def mean(self, value: Tensor) -> float:
        """The mean of a number over the ranks, the same bits on each."""
        return self.gather(value.double()).mean().item() if self.size > 1 else value.item()

    def largest(self, values: Tensor) -> Tensor:
        """The largest of each value over the ranks, where the values were."""
        return self.gather(values).amax(dim=0).to(values.device)

    def all(self, holds: bool) -> bool:
        """Whether something holds on every rank."""
        return bool(self.gather(torch.tensor(holds)).all())

    def wait(self) -> None:
        """Go on when all ranks are here."""
        if self.size > 1:
            dist.barrier()


class Unwritten:
    """The recorder of a rank that writes nothing."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def log(self, step: int, **values: Any) -> None:
        """Write nothing."""

    def offsets(self) -> dict[str, int]:
        """No file, no length."""
        return {}

    def __enter__(self) -> "Unwritten":
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing is open."""


def launched() -> World:
    """The ranks that torchrun has started, by the environment; one where it has started none."""
    given = [os.environ.get(name, "0") for name in ("RANK", "WORLD_SIZE")]
    rank, size = (int(text) if text.isdecimal() else -1 for text in given)
    if size in (0, 1):
        return World()
    if not 0 <= rank < size:
        raise TrimtabError(
            f"RANK and WORLD_SIZE are numbers that torchrun sets, got {given[0]!r} and {given[1]!r}: unset them, or "
            "start with torchrun"
        )
    return World(rank, size)


def check(config: Settings, world: World) -> None:
    """Refuse what several ranks cannot do, or not alike."""
    if world.size == 1:
        return
    if config.batch % (world.size * config.split):
        raise TrimtabError(
            f"batch is that of all ranks together and must be divisible by {world.size} ranks"
            f"{f' times split={config.split}' if config.split > 1 else ''}, got {config.batch}: "
            f"set batch={-(-config.batch // (world.size * config.split)) * world.size * config.split}"
        )
    if config.selection == "oracle":
        raise TrimtabError("the oracle measures on one rank, got selection=oracle on several: set parallel=none")
    if config.parallel == "fsdp2" and _experts(config):
        raise TrimtabError(
            f"fsdp2 reduces a gradient that every rank has, and an expert may get no token on some, got "
            f"num_experts={_experts(config)}: set parallel=ddp"
        )
    if config.device.startswith("cuda:"):
        raise TrimtabError(f"each rank takes a GPU of its own, got device={config.device}: set device=cuda")


def local_device(name: str, world: World) -> str:
    """The device of this rank, where settings name a kind: the GPU with the rank's number on this machine."""
    if world.size == 1 or name not in ("auto", "cuda") or not torch.cuda.is_available():
        return name
    number, there = int(os.environ.get("LOCAL_RANK", world.rank)), torch.cuda.device_count()
    if number >= there:
        raise TrimtabError(
            f"each rank takes a GPU of its own, got rank {number} on a machine with {there}: lower --nproc-per-node, "
            "or set device=cpu"
        )
    return f"cuda:{number}"


def wrap(model: nn.Module, config: Settings, world: World) -> nn.Module:
    """What to call instead of the model so that gradients are shared: a wrapper, or the model cut into pieces."""
    if world.size == 1 or config.parallel == "none":
        return model
    if config.parallel == "ddp":
        # Buffers are constants: nobody need send them around. Some experts get no token on some ranks.
        constant = [name for name, _ in model.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, constant)
        return DistributedDataParallel(model, find_unused_parameters=_experts(config) > 0)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(next(model.parameters()).device.type, (world.size,))
    # Gradients of BF16 weights are added up in FP32. The root is cut again after each forward like the blocks:
    # evaluations have no backward that would do it.
    options: Any = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, reshard_after_forward=True, **options)
    fully_shard(model, reshard_after_forward=True, **options)
    return model


def _experts(config: Settings) -> int:
    return config.num_experts if isinstance(config, Config) else 0


def syncing(net: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
    """Around a forward and its backward: gradients travel with the last micro-batch alone."""
    if isinstance(net, DistributedDataParallel):
        return nullcontext() if last else net.no_sync()
    if hasattr(net, "set_requires_gradient_sync"):
        net.set_requires_gradient_sync(last)  # type: ignore[operator]
    return nullcontext()


def _host() -> torch.device:
    """Where small numbers must be to travel: on the host, unless all there is is NCCL."""
    return torch.device("cpu" if "gloo" in str(dist.get_backend_config()) else "cuda")
