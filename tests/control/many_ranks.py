# SPDX-License-Identifier: Apache-2.0
"""What the ranks of `test_ranks.py` do: models and their wrappings, and one check per subject, each a function of the
rank that returns plain values. `work` is one rank: it runs every check of its world size in real gloo processes."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import trimtab
from trimtab import Controller, NonFiniteError, Policy, TrimtabError
from trimtab.control.sensors import Base
from trimtab.control.units import Switch, find_units
from trimtab.modules import bare_modules
from trimtab.shards import is_dtensor, local

SPIKES: dict[str, Any] = {"alpha": 1.5, "alpha_warmup": None, "beta": None, "lock_steps": 1, "max_high": 1}
WORLDS = (2, 3, 4)


# A model, its wrappings, and what a run of it leaves


class Layer(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def with_switches(model: Any) -> Any:
    """A switch on every linear; both paths are the plain one."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            vars(module)["switch"] = Switch(path, roots=(module,))
    return model


def build(layers: int = 2, inner: int = 12, out: int = 3) -> nn.Sequential:
    """Two residual layers and a head of 3 rows: on 4 ranks one of them has nothing of it."""
    torch.manual_seed(1)
    model = nn.Sequential(*(Layer(8, inner) for _ in range(layers)), nn.Linear(8, out))
    return with_switches(model)


UNITS = ("0.up", "0.down", "1.up", "1.down", "2")


def line(ranks: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (ranks,))


def grid(names: tuple[str, str] = ("dp", "tp")) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: nn.Module, mesh: Any = None) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = line(dist.get_world_size()) if mesh is None else mesh
    for layer in model.children():
        if isinstance(layer, Layer):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hsdp(model: nn.Module) -> nn.Module:
    return fsdp(model, grid(("replica", "shard")))


def tensor_parallel(model: nn.Module, mesh: Any = None) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {}
    for i in range(2):
        plan |= {f"{i}.up": ColwiseParallel(), f"{i}.down": RowwiseParallel()}
    return parallelize_module(model, line(dist.get_world_size()) if mesh is None else mesh, plan)


def both(model: nn.Module) -> nn.Module:
    mesh = grid()
    return fsdp(tensor_parallel(model, mesh["tp"]), mesh["dp"])


class Rows:
    """A recorder in memory."""

    def __init__(self) -> None:
        self.norms, self.seen, self.high, self.totals, self.columns = [], [], [], [], []

    def open_trace(self, units: list[str], **header: object) -> None:
        self.units = units

    def observe(self, step, norms, seen, high, grad_norm, events, columns=None) -> None:  # type: ignore[no-untyped-def]
        self.norms.append(norms.copy())
        self.seen.append(seen.copy())
        self.high.append(high.copy())
        self.totals.append(grad_norm)
        self.columns.append({k: v.copy() for k, v in (columns or {}).items()})

    def plain(self) -> dict[str, Any]:
        found = {name: np.array(getattr(self, name)) for name in ("norms", "seen", "high", "totals")}
        return found | {"units": self.units, "columns": self.columns}


def train(model: nn.Module, share: int, of: int, *, steps: int = 12, clip: bool = False, **options: Any) -> dict:
    """Train on a share of every batch, two of which are spikes."""
    rows = Rows()
    controller = Controller(model, Policy(**SPIKES), recorder=rows, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(5)
    for step in range(steps):
        x = torch.randn(12, 8, generator=generator) * (20.0 if step in (5, 9) else 1.0)
        y = model(x.chunk(of)[share])
        (y.square().mean() * (30.0 if step in (5, 9) else 1.0)).backward()
        controller.step()
        if clip:
            controller.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return rows.plain()


def trace(steps: int = 40) -> np.ndarray:
    """Norms of every unit with spikes; no risk comes near 1, so that rounding decides nothing."""
    generator = np.random.default_rng(3)
    norms = np.exp(generator.normal(0, 0.05, (steps, len(UNITS)))).astype(np.float32)
    norms[generator.random(norms.shape) < 0.1] *= 40
    return norms


def feed(model: nn.Module, norms: np.ndarray, absent: tuple[str, ...] = ()) -> None:
    """Give every unit a gradient of this norm, cut and placed as its parameter is; the same numbers on every rank."""
    modules = bare_modules(model)
    for name, norm in zip(UNITS, norms.tolist(), strict=True):
        for i, p in enumerate(modules[name].parameters(recurse=False)):
            full = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
            full *= norm * (0.8 if i else 0.6) / full.norm()
            p.grad = None if name in absent else placed(full, p)


def placed(full: Tensor, like: nn.Parameter) -> Tensor:
    if not is_dtensor(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def poison(model: nn.Module, name: str, rank: int) -> None:
    """Put a NaN into the gradient of a unit on one rank alone."""
    p: Any = bare_modules(model)[name].weight
    if dist.get_rank() == rank:
        local(p.grad)[0, 0] = torch.nan


def follow(model: nn.Module, norms: np.ndarray, controller: Controller | None = None, **policy: Any) -> dict:
    """Let a controller follow a trace."""
    controller = controller or Controller(model, Policy(**(SPIKES | policy)))
    found: dict[str, Any] = {"mask": [], "rerun": [], "norms": [], "gone": []}
    for row in norms:
        feed(model, row)
        plan = controller.step()
        found["mask"].append(plan.mask)
        found["rerun"].append(plan.rerun)
        found["norms"].append(controller.reading.norm)  # type: ignore[union-attr]
        found["gone"].append(all(p.grad is None for p in model.parameters()))
    return {name: np.array(values) for name, values in found.items()} | {"state": controller.state_dict()}


class Collectives(TorchDispatchMode):
    """Counts every collective, of torch.distributed and of DTensors, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        namespace, name = func.name().split("::")
        if "c10d" in namespace and not name.startswith("wait_tensor"):
            self.names.append(name.partition(".")[0].strip("_"))
        return func(*args, **(kwargs or {}))


@contextmanager
def refused() -> Iterator[list[str]]:
    """Keep what a TrimtabError says."""
    said: list[str] = []
    try:
        yield said
    except TrimtabError as error:
        said.append(str(error))


WRAPS: dict[int, dict[str, Callable[[nn.Module], nn.Module]]] = {
    2: {"ddp": ddp, "fsdp": fsdp, "tp": tensor_parallel},
    3: {"ddp": ddp, "fsdp": fsdp},
    4: {"ddp": ddp, "fsdp": fsdp, "hsdp": hsdp, "tp": tensor_parallel, "fsdp x tp": both},
}
SHARES = {"tp": lambda rank, world: (0, 1), "fsdp x tp": lambda rank, world: (rank // 2, 2)}
"""Which share of the batch a rank trains on; by default its own."""


# What the processes do


def check_training(rank: int, world: int, handed: Any) -> dict:
    """The same run under every wrapping, with as many threads as nobody else has."""
    found = {}
    for name, wrap in WRAPS[world].items():
        torch.set_num_threads(1 + rank if name in ("ddp", "fsdp") else 1)
        share = SHARES.get(name, lambda rank, world: (rank, world))(rank, world)
        found[name] = train(wrap(build()), *share, clip=True)
        torch.set_num_threads(1)
    return found


def check_traces(rank: int, world: int, handed: Any) -> dict:
    return {name: follow(wrap(build()), trace()) for name, wrap in WRAPS[world].items()}


def check_reruns(rank: int, world: int, handed: Any) -> dict:
    return {name: follow(wrap(build()), trace(30), replay_step=10.0) for name, wrap in WRAPS[world].items()}


def check_counts(rank: int, world: int, handed: Any) -> dict:
    """Collectives of a step and a clip, in either order; of a plain model; and of a plain model in a group."""
    found: dict[Any, Any] = {}
    options: dict[str, Any] = {"plain": {}, "plain in a group": {"process_group": dist.group.WORLD}}
    for name, wrap in (WRAPS[world] | dict.fromkeys(options, lambda model: model)).items():
        model = wrap(build())
        controller = Controller(model, Policy(**SPIKES), **options.get(name, {}))
        for order in ("step, clip", "clip, step"):
            feed(model, trace(1)[0])
            with Collectives() as seen:
                for action in order.split(", "):
                    _ = controller.step() if action == "step" else controller.clip_grad_norm_(1.0)
            found[name, order] = seen.names
    return found


def check_clipping(rank: int, world: int, handed: Any) -> dict:
    """Ours beside torch's, on the same gradients; torch takes neither plain ones beside DTensors nor two meshes."""
    found = {}
    for name, wrap in WRAPS[world].items():
        model = wrap(build())
        controller = Controller(model, Policy(**SPIKES))
        feed(model, np.full(len(UNITS), 2.0, np.float32))
        parameters: Any = [p for p in model.parameters() if p.grad is not None]
        before = [local(p.grad).clone() for p in parameters]
        total = float(controller.clip_grad_norm_(1.0))
        ours = [local(p.grad).clone() for p in parameters]
        theirs, wanted = total, [grad / (total + 1e-6) for grad in before]
        if "tp" not in name:
            feed(model, np.full(len(UNITS), 2.0, np.float32))
            whole = nn.utils.clip_grad_norm_(parameters, 1.0)
            theirs = float(whole.full_tensor() if is_dtensor(whole) else whole)
            wanted = [local(p.grad) for p in parameters]
        apart = [float((a - b).abs().max()) for a, b in zip(ours, wanted, strict=True) if a.numel()]
        found[name] = total, theirs, max(apart, default=0.0)
    return found


def check_small_meshes(rank: int, world: int, handed: Any) -> dict:
    """Two models on two ranks each, on a mesh of two dimensions that is not the whole world."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("model", "replica", "shard"))
    model = fsdp(build(), mesh["replica", "shard"])
    return follow(model, trace(10) * (1 if rank < 2 else 3))


def check_accumulation(rank: int, world: int, handed: Any) -> list[float]:
    """FSDP2 adds to a gradient without moving its version: a reading must not be reused after that."""
    model = fsdp(build())
    controller = Controller(model, Policy(**SPIKES))
    totals = []
    for _ in range(2):
        model(torch.ones(2, 8)).square().mean().backward()
        controller.step()
        totals.append(float(controller.reading.total))  # type: ignore[union-attr]
    return totals


def check_pending_sums(rank: int, world: int, handed: Any) -> float:
    """A gradient that is still to be added up over the ranks, as sequence parallelism leaves those of norms."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    mesh, model = line(world), with_switches(nn.Sequential(nn.Linear(2, 2, bias=False)))
    model[0].weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Replicate()]))
    model[0].weight.grad = DTensor.from_local(torch.full((2, 2), 1.0 + rank), mesh, [Partial()])
    controller = Controller(model, Policy(**SPIKES))
    controller.step()
    assert controller.reading is not None
    return float(controller.reading.norm[0])


def check_bad(rank: int, world: int, handed: Any) -> dict:
    """A NaN in the shard of the last rank that has one; in the loss of one rank under DDP; and too often."""
    found: dict[str, Any] = {}
    for name in ("fsdp", "hsdp", "tp"):
        if name in WRAPS[world]:
            model = WRAPS[world][name](build())
            controller = Controller(model, Policy(**SPIKES, max_nonfinite=3))
            feed(model, trace(1)[0])
            poison(model, "1.up", rank=1)
            plan = controller.step()
            found[name] = plan.nonfinite, plan.mask.tolist(), all(p.grad is None for p in model.parameters())
            try:
                for _ in range(2):
                    feed(model, trace(1)[0])
                    poison(model, "1.up", rank=1)
                    controller.step()
                found[name] += ("no error",)
            except NonFiniteError as error:
                found[name] += (str(error),)
    model = ddp(build())
    controller = Controller(model, Policy(**SPIKES))
    (model(torch.ones(2, 8)).mean() * (torch.nan if rank == 1 else 1.0)).backward()
    plan = controller.step()
    found["ddp"] = plan.nonfinite, plan.mask.tolist(), all(p.grad is None for p in model.parameters())
    return found


def check_presence(rank: int, world: int, handed: Any) -> dict:
    """A unit without a gradient on the last rank; one without any; and a rank that has nothing of a parameter."""
    found = {}
    for name in ("ddp", "fsdp"):
        model = WRAPS[world][name](build())
        controller = Controller(model, Policy(**SPIKES))
        feed(model, trace(1)[0], absent=("1.down", "0.up") if rank == world - 1 else ("0.up",))
        controller.step()
        assert controller.reading is not None
        found[name] = controller.reading.seen, controller.reading.norm
    return found


def check_state(rank: int, world: int, handed: Any) -> dict:
    """Continue what another number of ranks has saved in the middle of a trace."""
    norms = trace()
    if handed is None:
        model = hsdp(build()) if world == 4 else fsdp(build())
        return follow(model, norms[:21])["state"]
    found = {}
    for name in ("ddp", "fsdp"):
        model = WRAPS[world][name](build())
        controller = Controller(model, Policy(**SPIKES))
        controller.load_state_dict(handed)
        found[name] = follow(model, norms[21:], controller)["mask"]
    return found


def check_waiting(rank: int, world: int, handed: Any) -> dict:
    """Decisions without waiting in the step, and a bad step that the optimizer skips by its flag."""
    found = {}
    for wait in ("forward", "never"):
        for name in ("ddp", "fsdp"):
            model = WRAPS[world][name](build())
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
            controller = Controller(model, Policy(**SPIKES), wait=wait, optimizer=optimizer)
            masks = []
            for row in trace(20):
                feed(model, row)
                controller.step()
                masks.append(controller.settle().mask if wait == "forward" else controller.plan.mask)
            feed(model, trace(1)[0])
            if name == "fsdp":
                poison(model, "1.up", rank=1)
            else:
                for p in model.parameters():
                    p.grad = None if p.grad is None else p.grad * torch.nan
            controller.step()
            flag = float(optimizer.found_inf)  # type: ignore[attr-defined]
            found[wait, name] = np.array(masks), flag
    return found


def check_wrappers(rank: int, world: int, handed: Any) -> dict:
    """Names through wrappers, and a state that goes between them."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    found: dict[str, Any] = {}
    state = follow(build(), trace(20))["state"]
    wrapped = build()
    wrapped[0].add_module("up", checkpoint_wrapper(wrapped[0].get_submodule("up")))
    for i in range(2):
        wrapped[i] = checkpoint_wrapper(wrapped[i])
    for name, model in {
        "checkpointed": wrapped,
        "compiled": torch.compile(wrapped, backend="eager"),
        "ddp": ddp(torch.compile(wrapped, backend="eager")),  # type: ignore[arg-type]
        "compiled ddp": torch.compile(ddp(build()), backend="eager"),
        "fsdp": fsdp(build()),
    }.items():
        controller = Controller(model, Policy(**SPIKES))  # type: ignore[arg-type]
        controller.load_state_dict(state)
        modules = max(len(unit.modules) for unit in controller.units)
        watched = tuple(unit.name for unit in find_units(model, "linear"))  # type: ignore[arg-type]
        found[name] = controller.names, watched, modules, controller.steps
    return found


def check_refusals(rank: int, world: int, handed: Any) -> dict:
    """What cannot agree, or cannot be read from pieces; each rank keeps what it was told."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    found: dict[str, Any] = {}

    def attempt(name: str, act: Callable[[], Any]) -> None:
        with refused() as said:
            act()
        found[name] = said

    def late() -> None:
        model = build()
        controller = Controller(model, Policy(**SPIKES))
        fsdp(model)(torch.ones(2, 8)).mean().backward()
        controller.step()

    other = Policy(**SPIKES).replace(alpha=1.5 + rank)
    attempt("policy", lambda: Controller(ddp(build()), other))
    attempt("shape", lambda: Controller(build(inner=12 + rank), Policy(**SPIKES), process_group=dist.group.WORLD))
    attempt("update", lambda: Controller(fsdp(build()), Policy(**SPIKES), detector="update"))
    attempt("source", lambda: Controller(tensor_parallel(build()), Policy(**SPIKES), detector="source"))
    attempt("late", late)
    flat = build()  # the real one wants a GPU
    methods: Any = {"__init__": nn.Module.__init__, "__getattr__": nn.Module.__getattr__}
    made: Any = type("Flat", (FullyShardedDataParallel,), methods)
    flat.add_module("3", made())
    attempt("flat", lambda: Controller(flat, Policy(**SPIKES)))
    attempt(
        "stage",
        lambda: Controller(build(), Policy(**SPIKES), stage=0 if rank else None, process_group=dist.group.WORLD),
    )
    return found


class Mine(Base):
    """A column that says whose it is."""

    column = "mine"

    def read(self) -> Tensor:
        return torch.full((len(self.units),), 1.0 + dist.get_rank())


def check_sensors(rank: int, world: int, handed: Any) -> dict:
    """Columns travel with the norms: those of the first rank, on every rank; after a clip they travel alone."""
    found: dict[str, Any] = {}
    for name, detector in {"ddp": "update", "fsdp": "source"}.items():
        model = WRAPS[world][name](build())
        controller = Controller(model, Policy(**SPIKES), detector=detector, sensors=[Mine()])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        columns, counts = [], []
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            model(x * (1 + rank)).square().mean().backward()
            with Collectives() as seen:
                if step == 2:
                    controller.clip_grad_norm_(1.0)
                controller.step()
            counts.append(seen.names)
            assert controller.reading is not None
            columns.append({k: v for k, v in controller.reading.columns.items() if k != "norm"})
            optimizer.step()
            optimizer.zero_grad()
        found[name] = columns, counts
    return found


def bare() -> nn.Sequential:
    """The model without switches of its own."""
    model = build()
    for module in model.modules():
        module.__dict__.pop("switch", None)
    return model


def converted(recipe: str, how: str) -> nn.Module:
    """A converted model in mixed precision under FSDP2; `how` says what else is done to it."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, mesh = bare(), line(dist.get_world_size())
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if how != "converted last":
        trimtab.convert_(model, recipe)
    for i in range(2):
        if how == "checkpointed":
            model[i] = checkpoint_wrapper(model[i])
        fully_shard(model[i], mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)
    if how == "converted last":
        trimtab.convert_(model, recipe)
    return model


def set_path(model: nn.Module, high: tuple[str, ...]) -> None:
    for unit in find_units(model):
        assert unit.switch is not None
        unit.switch.planned = unit.name in high


def gradients(model: nn.Module, x: Tensor, flip: bool = False) -> dict[str, Tensor]:
    """Whole gradients by bare name, the mean over the ranks; `flip` moves every switch between forward and backward."""
    model.zero_grad()
    loss = model(x).float().square().mean()
    if flip:
        set_path(model, tuple(unit.name for unit in find_units(model) if not unit.switch.planned))  # type: ignore[union-attr]
    loss.backward()
    found = {}
    for path, module in bare_modules(model).items():
        for name, p in module.named_parameters(recurse=False):
            assert p.grad is not None
            if is_dtensor(p.grad):
                found[f"{path}.{name}"] = p.grad.full_tensor()
            else:
                whole = p.grad.float()
                dist.all_reduce(whole)
                found[f"{path}.{name}"] = whole / dist.get_world_size()
    return found


def check_mixed_precision(rank: int, world: int, handed: Any) -> dict:
    """How far each gradient under FSDP2 is from that of a BF16 copy of the model, and low from high."""
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
    found: dict[Any, float] = {}
    for recipe, how in (
        ("fp8", "converted first"),
        ("fp8", "converted last"),
        ("fp8_delayed", "checkpointed"),
        ("saved4", "converted first"),
        ("nvfp4", "checkpointed"),
    ):
        reference = bare()
        trimtab.convert_(reference, recipe)
        reference, sharded = reference.to(torch.bfloat16), converted(recipe, how)
        low_to_high = []
        for high, flip in ((), False), (UNITS, False), (("0.down", "1.up"), True), ((), True):
            for model in (reference, sharded):
                set_path(model, high)
            wanted, got = gradients(reference, x.to(torch.bfloat16), flip), gradients(sharded, x, flip)
            apart = [(got[name] - wanted[name]).abs().max() / wanted[name].abs().max() for name in wanted]
            found[recipe, how, high, flip] = float(torch.stack(apart).max())
            low_to_high.append(wanted["0.up.weight"])
        found[recipe, how, "low from high"] = float((low_to_high[0] - low_to_high[1]).abs().max())
    return found


def check_tensor_parallel_paths(rank: int, world: int, handed: Any) -> dict:
    """Converted linears that are cut, beside whole ones."""
    found: dict[Any, Any] = {}
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    for recipe in ("fp8", "saved4", "int8"):
        whole, cut = bare(), bare()
        for model in (whole, cut):
            trimtab.convert_(model, recipe)
        tensor_parallel(cut)
        for path in ("low", "high"):
            with trimtab.running(whole, path), trimtab.running(cut, path):
                wanted, got = gradients(whole, x), gradients(cut, x)
            apart = [(got[name] - wanted[name]).abs().max() / wanted[name].abs().max() for name in wanted]
            found[recipe, path] = float(torch.stack(apart).max())
    for recipe in ("fp8_delayed", "fp4", "nvfp4"):
        model = bare()
        trimtab.convert_(model, recipe)
        with refused() as found[recipe]:
            tensor_parallel(model)(x)
    return found


class Experts(nn.Module):
    """Experts as slices of one parameter each, the way grouped GEMMs want them."""

    def __init__(self, num: int = 8) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(torch.randn(num, 4, 6)), nn.Parameter(torch.randn(num, 6, 4))
        self.bias = nn.Parameter(torch.randn(num, 6))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.router, self.experts = nn.Linear(4, 8, bias=False), Experts()


def fill(model: nn.Module, idle: int | None = None) -> np.ndarray:
    """Give each parameter a gradient, none to an idle expert; the true norms of the router and of each expert."""
    squares = torch.zeros(9, dtype=torch.float64)
    for i, p in enumerate(model.parameters()):
        full = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
        if i == 0:
            squares[0] = full.double().square().sum()
        else:
            full *= torch.arange(1.0, 9).reshape(8, *[1] * (full.dim() - 1))
            full[slice(0, 0) if idle is None else idle] = 0
            squares[1:] += full.double().square().reshape(8, -1).sum(1)
        p.grad = placed(full, p)
    return squares.sqrt().numpy()


EXPERTS = ["router", *(f"experts.{i}" for i in range(8))]


def check_expert_parallel(rank: int, world: int, handed: Any) -> dict:
    """Stacks cut over experts, over experts and then by FSDP2, and along a slice; the router whole."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    found: dict[str, Any] = {}
    mesh = grid(("data", "expert"))
    for name in ("by expert", "then by data", "along a slice"):
        model = Mixture()
        dim = 1 if name == "along a slice" else 0
        for own, p in list(model.experts.named_parameters()):
            setattr(model.experts, own, nn.Parameter(distribute_tensor(p.detach(), mesh["expert"], [Shard(dim)])))
        if name == "then by data":
            fully_shard(model.experts, mesh=mesh["data"])
        group = dist.group.WORLD if name != "then by data" else None
        controller = Controller(model, Policy(**SPIKES), mode="observe", units="expert", process_group=group)
        wanted = fill(model, idle=3)
        with Collectives() as seen:
            controller.step()
        assert controller.reading is not None
        found[name] = controller.names, controller.reading.norm, controller.reading.seen, wanted, seen.names
    return found


def check_experts_by_name(rank: int, world: int, handed: Any) -> dict:
    """Each rank has experts of its own beside a layer that all have: all of them are known to all."""
    experts = nn.ModuleDict({str(2 * rank + i): nn.Linear(4, 4) for i in range(2)})
    model = with_switches(nn.ModuleDict({"attn": nn.Linear(4, 4), "experts": experts, "head": nn.Linear(4, 3)}))
    controller = Controller(model, Policy(**SPIKES), process_group=dist.group.WORLD)
    masks = []
    for spike in (1.0, 1.0, 1.0, 50.0, 1.0, 1.0):
        for path, p in model.named_parameters():
            size = spike if path.startswith("experts.3") else 1.0 + path.startswith("head")
            p.grad = torch.full(p.shape, size / (2 * p.numel()) ** 0.5)
        plan = controller.step()
        masks.append(plan.high)
    high = [unit.name for unit in find_units(model) if unit.switch is not None and unit.switch.planned]
    assert controller.reading is not None
    return {"names": controller.names, "norms": controller.reading.norm, "plans": masks, "left": high}


class Part(nn.Module):
    """Some of the layers of a whole model, under their names in it."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        torch.manual_seed(4)
        whole = {str(i): nn.Linear(8, 8) for i in range(4)}
        self.layers = nn.ModuleDict({name: whole[name] for name in names})
        with_switches(self)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


STAGES = (("0", "1"), ("2", "3"))
WHOLE = tuple(name for names in STAGES for name in names)


def batches(steps: int = 10) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(6)
    sizes = [8.0 if step in (4, 7) else 0.3 for step in range(steps)]
    return [(torch.randn(4, 8, generator=generator) * size, torch.randn(4, 8, generator=generator)) for size in sizes]


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target * y.detach().abs().mean()).square().mean()


def pipeline(rank: int, options: dict[str, Any], poisoned: int = -1) -> dict[str, Any]:
    """Train two stages by GPipe; the plans, the sets that ran here, and what was read."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    part, rows = Part(STAGES[rank]), Rows()
    controller = Controller(part, Policy(**SPIKES), stage=rank, recorder=rows, **options)
    schedule = ScheduleGPipe(PipelineStage(part, rank, 2, torch.device("cpu")), n_microbatches=2, loss_fn=loss_of)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    plans, counts = [], []
    for step, (x, target) in enumerate(batches()):
        _ = schedule.step(x) if rank == 0 else schedule.step(target=target)
        if step == poisoned and rank == 1:
            weight: Any = part.layers["3"].weight
            weight.grad[0, 0] = torch.nan
        with Collectives() as seen:
            plan = controller.step()
            total = controller.clip_grad_norm_(1.0)
        plans.append((plan.mask.tolist(), plan.nonfinite, float(total) if step != poisoned else None))
        counts.append(seen.names)
        optimizer.step()
        optimizer.zero_grad()
    return rows.plain() | {"plans": plans, "counts": counts, "limit": controller.limits.max_high}


def check_pipeline(rank: int, world: int, handed: Any) -> dict:
    twins = with_switches(nn.Sequential(nn.Linear(4, 4)))
    return {
        "one budget": pipeline(rank, {}),
        "poisoned": pipeline(rank, {}, poisoned=3),
        "quota": pipeline(rank, {"quota": "stage"}),
        "names": Controller(twins, Policy(**SPIKES), stage=rank).names,
    }


CHECKS: dict[int, dict[str, Callable[[int, int, Any], Any]]] = {
    2: {
        "training": check_training,
        "traces": check_traces,
        "reruns": check_reruns,
        "counts": check_counts,
        "clipping": check_clipping,
        "accumulation": check_accumulation,
        "pending sums": check_pending_sums,
        "bad": check_bad,
        "presence": check_presence,
        "state": check_state,
        "waiting": check_waiting,
        "wrappers": check_wrappers,
        "refusals": check_refusals,
        "sensors": check_sensors,
        "mixed precision": check_mixed_precision,
        "tensor parallel paths": check_tensor_parallel_paths,
        "experts by name": check_experts_by_name,
        "pipeline": check_pipeline,
    },
    3: {"training": check_training, "traces": check_traces, "counts": check_counts, "presence": check_presence},
    4: {
        "training": check_training,
        "traces": check_traces,
        "counts": check_counts,
        "clipping": check_clipping,
        "bad": check_bad,
        "presence": check_presence,
        "state": check_state,
        "expert parallel": check_expert_parallel,
        "small meshes": check_small_meshes,
    },
}


def work(rank: int, world: int, folder: str, handed: Any) -> None:
    """One rank: run every check of this world size, keep the results or what went wrong."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    found: dict[str, Any] = {}
    for name, check in CHECKS[world].items():
        try:
            found[name] = check(rank, world, handed)
        except Exception:
            found[name] = traceback.format_exc()
            break
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
