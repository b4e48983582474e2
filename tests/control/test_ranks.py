# SPDX-License-Identifier: Apache-2.0
"""Ranks: that 1 rank and N ranks read the same norms and decide the same, under DDP, FSDP2, HSDP, tensor parallelism,
pipeline stages and experts, with one collective per step; that all ranks of a run are equal to the bit; and that what
cannot agree is refused. Real gloo processes, started once per world size, run many checks and hand back plain values.
"""

import multiprocessing as mp
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import trimtab
from trimtab import Controller, NonFiniteError, Policy, TrimtabError
from trimtab.control.units import Switch, find_units

SPIKES = {"alpha": 1.5, "alpha_warmup": None, "beta": None, "lock_steps": 1, "max_high": 1}
WORLDS = (2, 3, 4)


# A model, its wrappings, and what a run of it leaves


class Layer(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build(layers: int = 2, inner: int = 12, out: int = 3) -> nn.Sequential:
    """Two residual layers and a head of 3 rows: on 4 ranks one of them has nothing of it."""
    torch.manual_seed(1)
    model = nn.Sequential(*(Layer(8, inner) for _ in range(layers)), nn.Linear(8, out))
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.switch = Switch(path, roots=(module,))  # both paths are the plain one
    return model


UNITS = ("0.up", "0.down", "1.up", "1.down", "2")


def line(ranks: int) -> Any:
    from torch.distributed.tensor import init_device_mesh

    return init_device_mesh("cpu", (ranks,))


def grid(names: tuple[str, str] = ("dp", "tp")) -> Any:
    from torch.distributed.tensor import init_device_mesh

    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: nn.Module, mesh: Any = None) -> nn.Module:
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


def trace(steps: int = 60) -> np.ndarray:
    """Norms of every unit with spikes; no risk comes near 1, so that rounding decides nothing."""
    generator = np.random.default_rng(3)
    norms = np.exp(generator.normal(0, 0.05, (steps, len(UNITS)))).astype(np.float32)
    norms[generator.random(norms.shape) < 0.1] *= 40
    return norms


def feed(model: nn.Module, norms: np.ndarray, absent: tuple[str, ...] = ()) -> None:
    """Give every unit a gradient of this norm, cut and placed as its parameter is; the same numbers on every rank."""
    modules = trimtab.modules.bare_modules(model)
    for name, norm in zip(UNITS, norms.tolist(), strict=True):
        for i, p in enumerate(modules[name].parameters(recurse=False)):
            full = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
            full *= norm * (0.8 if i else 0.6) / full.norm()
            p.grad = None if name in absent else placed(full, p)


def placed(full: Tensor, like: nn.Parameter) -> Tensor:
    if not trimtab.shards.is_dtensor(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def poison(model: nn.Module, name: str, rank: int) -> None:
    """Put a NaN into the gradient of a unit on one rank alone."""
    p = trimtab.modules.bare_modules(model)[name].weight
    if dist.get_rank() == rank:
        trimtab.shards.local(p.grad)[0, 0] = torch.nan


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
        torch.set_num_threads(1 + rank)
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
    found: dict[str, Any] = {}
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
        parameters = [p for p in model.parameters() if p.grad is not None]
        before = [trimtab.shards.local(p.grad).clone() for p in parameters]
        total = float(controller.clip_grad_norm_(1.0))
        ours = [trimtab.shards.local(p.grad).clone() for p in parameters]
        theirs, wanted = total, [grad / (total + 1e-6) for grad in before]
        if "tp" not in name:
            feed(model, np.full(len(UNITS), 2.0, np.float32))
            whole = nn.utils.clip_grad_norm_(parameters, 1.0)
            theirs = float(whole.full_tensor() if trimtab.shards.is_dtensor(whole) else whole)
            wanted = [trimtab.shards.local(p.grad) for p in parameters]
        apart = [float((a - b).abs().max()) for a, b in zip(ours, wanted, strict=True) if a.numel()]
        found[name] = total, theirs, max(apart, default=0.0)
    return found


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
        return follow(model, norms[:31])["state"]
    found = {}
    for name in ("ddp", "fsdp"):
        model = WRAPS[world][name](build())
        controller = Controller(model, Policy(**SPIKES))
        controller.load_state_dict(handed)
        found[name] = follow(model, norms[31:], controller)["mask"]
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
    for i in range(2):
        wrapped[i] = checkpoint_wrapper(wrapped[i])
    for name, model in {
        "checkpointed": wrapped,
        "compiled": torch.compile(wrapped),
        "ddp": ddp(torch.compile(wrapped)),  # type: ignore[arg-type]
        "compiled ddp": torch.compile(ddp(build())),
        "fsdp": fsdp(build()),
    }.items():
        controller = Controller(model, Policy(**SPIKES))  # type: ignore[arg-type]
        controller.load_state_dict(state)
        found[name] = controller.names, tuple(u.name for u in find_units(model, "linear")), controller.steps  # type: ignore[arg-type]
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

    other = Policy(**SPIKES | {"alpha": 1.5 + rank})
    attempt("policy", lambda: Controller(ddp(build()), other))
    attempt("shape", lambda: Controller(build(inner=12 + rank), Policy(**SPIKES), process_group=dist.group.WORLD))
    attempt("update", lambda: Controller(fsdp(build()), Policy(**SPIKES), detector="update"))
    attempt("source", lambda: Controller(tensor_parallel(build()), Policy(**SPIKES), detector="source"))
    attempt("late", late)
    flat = build()  # the real one wants a GPU
    methods = {"__init__": nn.Module.__init__, "__getattr__": nn.Module.__getattr__}
    flat.add_module("3", type("Flat", (FullyShardedDataParallel,), methods)())
    attempt("flat", lambda: Controller(flat, Policy(**SPIKES)))
    attempt(
        "stage",
        lambda: Controller(build(), Policy(**SPIKES), stage=0 if rank else None, process_group=dist.group.WORLD),
    )
    return found


def check_sensors(rank: int, world: int, handed: Any) -> dict:
    """Columns travel with the norms: those of the first rank, on every rank."""
    found: dict[str, Any] = {}
    for name, detector in {"ddp": "update", "fsdp": "source"}.items():
        model = WRAPS[world][name](build())
        controller = Controller(model, Policy(**SPIKES), detector=detector)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        columns, counts = [], []
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            model(x * (1 + rank)).square().mean().backward()
            with Collectives() as seen:
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
    for path, module in trimtab.modules.bare_modules(model).items():
        for name, p in module.named_parameters(recurse=False):
            assert p.grad is not None
            if trimtab.shards.is_dtensor(p.grad):
                found[f"{path}.{name}"] = p.grad.full_tensor()
            else:
                whole = p.grad.float()
                dist.all_reduce(whole)
                found[f"{path}.{name}"] = whole / dist.get_world_size()
    return found


def check_mixed_precision(rank: int, world: int, handed: Any) -> dict:
    """How far each gradient under FSDP2 is from that of a BF16 copy of the model, and low from high."""
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
    found: dict[str, float] = {}
    for recipe in ("fp8", "fp8_delayed", "saved4", "nvfp4"):
        for how in ("converted first", "converted last", "checkpointed"):
            reference = bare()
            trimtab.convert_(reference, recipe)
            reference, sharded = reference.to(torch.bfloat16), converted(recipe, how)
            paths = {}
            for high in ((), UNITS, ("0.down", "1.up"), ()):
                for flip in (False, True):
                    for model in (reference, sharded):
                        set_path(model, high)
                    wanted = paths[high, flip] = gradients(reference, x.to(torch.bfloat16), flip)
                    apart = [
                        (g - wanted[name]).abs().max() / wanted[name].abs().max()
                        for name, g in gradients(sharded, x, flip).items()
                    ]
                    found[recipe, how, high, flip] = float(torch.stack(apart).max())
            found[recipe, how, "low from high"] = float(
                (paths[(), False]["0.up.weight"] - paths[UNITS, False]["0.up.weight"]).abs().max()
            )
    return found


CHECKS: dict[int, dict[str, Callable[[int, int, Any], Any]]] = {
    2: {
        "training": check_training,
        "traces": check_traces,
        "reruns": check_reruns,
        "counts": check_counts,
        "clipping": check_clipping,
        "accumulation": check_accumulation,
        "bad": check_bad,
        "presence": check_presence,
        "state": check_state,
        "waiting": check_waiting,
        "wrappers": check_wrappers,
        "refusals": check_refusals,
        "sensors": check_sensors,
        "mixed precision": check_mixed_precision,
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


class Runs:
    """What the ranks of each world size have found, run when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._found = folder, {}

    def of(self, world: int, check: str) -> list[Any]:
        """The results of a check, one per rank."""
        if world not in self._found:
            handed = self.of(4, "state")[3] if world == 2 else None
            self._found[world] = self._run(world, handed)
        for results in self._found[world]:
            if isinstance(results.get(check, ""), str):
                pytest.fail(results.get(check) or next(r for r in results.values() if isinstance(r, str)))
        return [results[check] for results in self._found[world]]

    def _run(self, world: int, handed: Any) -> list[dict]:
        folder = self._folder / str(world)
        folder.mkdir()
        context = mp.get_context("forkserver")  # torch is imported once, for all ranks of all sizes
        context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "trimtab.lab"])
        ranks = [context.Process(target=work, args=(rank, world, str(folder), handed)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        assert [process.exitcode for process in ranks] == [0] * world
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def one_rank() -> dict:
    return train(build(), 0, 1, clip=True)


def same(values: list[Any]) -> bool:
    """Whether all ranks found the very same."""
    return all(np.array_equal(np.asarray(values[0]), np.asarray(value), equal_nan=True) for value in values)


WRAPPED = [(world, name) for world in WORLDS for name in WRAPS[world]]


# What they found


@pytest.mark.parametrize(("world", "name"), WRAPPED)
def test_one_rank_and_many_ranks_read_the_same_norms_and_decide_the_same(runs, one_rank, world, name) -> None:  # type: ignore[no-untyped-def]
    """A norm short by the root of the shards, or too large by the root of the replicas, is off by 41 % at least."""
    found = [result[name] for result in runs.of(world, "training")]
    assert list(found[0]["units"]) == list(UNITS)
    for key in ("norms", "high", "totals", "seen"):
        assert same([result[key] for result in found])
    np.testing.assert_allclose(found[0]["norms"], one_rank["norms"], rtol=2e-4)
    np.testing.assert_allclose(found[0]["totals"], one_rank["totals"], rtol=2e-4)
    assert np.array_equal(found[0]["high"], one_rank["high"])
    assert one_rank["high"].any()


@pytest.mark.parametrize(("world", "name"), WRAPPED)
def test_every_wrapping_decides_what_a_replay_of_the_norms_decides(runs, world, name) -> None:  # type: ignore[no-untyped-def]
    wanted = trimtab.replay(trace(), Policy(**SPIKES))
    assert np.abs(wanted.risk - 1).min() > 1e-4
    assert wanted.high.any()
    found = [result[name] for result in runs.of(world, "traces")]
    assert same([result["mask"] for result in found])
    assert np.array_equal(found[0]["mask"], wanted.high)
    assert same([result["norms"] for result in found])
    np.testing.assert_allclose(found[0]["norms"], trace(), rtol=1e-6)


@pytest.mark.parametrize("name", WRAPS[2])
def test_all_ranks_run_the_same_batches_again(runs, name) -> None:  # type: ignore[no-untyped-def]
    wanted = follow(build(), trace(30), replay_step=10.0)
    found = [result[name] for result in runs.of(2, "reruns")]
    assert wanted["rerun"].any()
    for key in ("rerun", "mask", "gone"):
        assert same([result[key] for result in found])
        assert np.array_equal(found[0][key], wanted[key])


@pytest.mark.parametrize("order", ["step, clip", "clip, step"])
@pytest.mark.parametrize(("world", "name"), WRAPPED)
def test_a_step_with_its_clipping_is_one_collective(runs, world, name, order) -> None:  # type: ignore[no-untyped-def]
    wanted = "broadcast" if name == "ddp" else "allreduce"
    assert [result[name, order] for result in runs.of(world, "counts")] == [[wanted]] * world


def test_a_plain_model_adds_no_collective_unless_it_is_given_a_group(runs) -> None:  # type: ignore[no-untyped-def]
    for world in WORLDS:
        for result in runs.of(world, "counts"):
            assert result["plain", "step, clip"] == []
            assert result["plain in a group", "step, clip"] == ["broadcast"]


@pytest.mark.parametrize(("world", "name"), [(w, n) for w, n in WRAPPED if w != 3])
def test_clipping_is_torch_s(runs, world, name) -> None:  # type: ignore[no-untyped-def]
    found = [result[name] for result in runs.of(world, "clipping")]
    assert same([total for total, _, _ in found])
    for ours, theirs, apart in found:
        assert ours == pytest.approx(2 * len(UNITS) ** 0.5, rel=1e-6)
        assert ours == pytest.approx(theirs, rel=1e-6)
        assert apart < 1e-7


def test_an_accumulated_shard_is_read_anew(runs) -> None:  # type: ignore[no-untyped-def]
    for once, twice in runs.of(2, "accumulation"):
        assert twice == pytest.approx(2 * once, rel=1e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_a_nan_on_one_rank_is_skipped_by_all(runs, world) -> None:  # type: ignore[no-untyped-def]
    results = runs.of(world, "bad")
    assert set(results[0]) == {name for name in WRAPS[world] if name != "fsdp x tp"}
    for name in results[0]:
        nonfinite, mask, gone, *error = results[0][name]
        assert nonfinite
        assert gone
        assert [list(result[name]) for result in results] == [list(results[0][name])] * world
        if name == "ddp":
            assert mask == [True, False, False, False, False]  # all are poisoned: the lowest index wins the tie
        else:
            assert mask == [name == "1.up" for name in UNITS]
            assert "3 steps in a row" in error[0]
            assert "1.up" in error[0]


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_agree_on_who_has_a_gradient(runs, world) -> None:  # type: ignore[no-untyped-def]
    for name in ("ddp", "fsdp"):
        found = [result[name] for result in runs.of(world, "presence")]
        assert same([seen for seen, _ in found])
        assert same([norms for _, norms in found])
        assert found[0][0].tolist() == [unit != "0.up" for unit in UNITS]


def test_a_state_of_four_ranks_continues_on_two_and_on_one(runs) -> None:  # type: ignore[no-untyped-def]
    wanted = trimtab.replay(trace(), Policy(**SPIKES)).high[31:]
    states = runs.of(4, "state")
    for name in ("ddp", "fsdp"):
        for result in runs.of(2, "state"):
            assert np.array_equal(result[name], wanted)
    model = build()
    controller = Controller(model, Policy(**SPIKES))
    controller.load_state_dict(states[1])
    assert np.array_equal(follow(model, trace()[31:], controller)["mask"], wanted)


@pytest.mark.parametrize("wait", ["forward", "never"])
def test_who_does_not_wait_decides_the_same_and_skips_by_the_flag(runs, wait) -> None:  # type: ignore[no-untyped-def]
    wanted = trimtab.replay(trace(20), Policy(**SPIKES)).high
    for result in runs.of(2, "waiting"):
        for name in ("ddp", "fsdp"):
            masks, flag = result[wait, name]
            late = int(wait == "never")
            assert np.array_equal(masks[late:], wanted[: len(wanted) - late])
            assert flag == 1.0


def test_names_and_states_are_those_of_the_bare_model(runs) -> None:  # type: ignore[no-untyped-def]
    for result in runs.of(2, "wrappers"):
        assert len(result) == 5
        for names, watched, steps in result.values():
            assert names == UNITS
            assert watched == UNITS
            assert steps == 20


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("policy", "every rank must make the same controller, got policy"),
        ("shape", "a parameter must have one shape"),
        ("update", "a whole parameter is needed for update"),
        ("source", "whole outputs are needed for"),
        ("late", "call fully_shard or parallelize_module first"),
        ("flat", "use torch.distributed.fsdp.fully_shard"),
        ("stage", "stage must be given on every rank or on none"),
    ],
)
def test_what_cannot_agree_is_refused_on_every_rank(runs, case, words) -> None:  # type: ignore[no-untyped-def]
    for result in runs.of(2, "refusals"):
        assert len(result[case]) == 1
        assert words in result[case][0]


def test_columns_are_those_of_the_first_rank_and_travel_with_the_norms(runs) -> None:  # type: ignore[no-untyped-def]
    found = runs.of(2, "sensors")
    for name, wanted in {"ddp": "broadcast", "fsdp": "allreduce"}.items():
        columns, counts = found[0][name]
        assert counts == [[wanted]] * 3
        assert found[1][name][1] == counts
        for step, here in enumerate(columns):
            assert set(here) == set(found[1][name][0][step])
            assert all(same([here[column], found[1][name][0][step][column]]) for column in here)
        assert all(np.isfinite(values).all() for values in columns[-1].values())


def test_switched_linears_under_fsdp_in_mixed_precision_are_those_of_a_bf16_model(runs) -> None:  # type: ignore[no-untyped-def]
    for result in runs.of(2, "mixed precision"):
        for key, apart in result.items():
            if key[2] == "low from high":
                assert apart > 0, key
            else:
                assert apart < 1e-6, key
