# SPDX-License-Identifier: Apache-2.0
"""GreedyLore in two, three and four gloo processes: against a one-process reference, for what it conserves, for equal
bits on all ranks, through checkpoints, and for what it sends and learns."""

import hashlib
import math
import time
import warnings
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from reference.greedylore import GreedyLore as Reference
from torch import nn

from trimtab.comm import GreedyLore, lowrank, traffic
from trimtab.comm.greedylore import greedylore_hook, kind_of
from trimtab.errors import NoEffectWarning, TrimtabError

DDP = nn.parallel.DistributedDataParallel
SHAPES = {"wide": (24, 40), "tall": (40, 24), "square": (16, 16), "conv": (8, 3, 3, 3), "bias": (7,)}
MATRICES = [name for name in SHAPES if name != "bias"]


class Given(nn.Module):
    """Parameters whose gradients are what the forward is given."""

    def __init__(self, dtype=torch.float32, shapes=SHAPES):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, given):
        return sum((p * given[name]).sum() for name, p in self.named_parameters())


def gradients(step, rank, dtype=torch.float32, shapes=SHAPES):
    """What a rank is given in a step: noise around a direction that all share, for all ranks to know."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    common = torch.Generator().manual_seed(77)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        + torch.randn(shape, generator=common, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def mean_gradients(step, num, dtype=torch.float64):
    each = [gradients(step, rank, dtype) for rank in range(num)]
    return {name: sum(one[name] for one in each) / num for name in SHAPES}


class Recording(GreedyLore):
    """Remembers which columns were chosen."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.chosen = {}

    def _select(self, step, matrix, mean_scores):
        self.chosen[step, matrix.name] = super()._select(step, matrix, mean_scores)
        return self.chosen[step, matrix.name]


def every_matrix(name, p):
    return True


def attached(module, *args, cls=GreedyLore, ddp=None, compress=every_matrix, **kwargs):
    model = DDP(module, **(ddp or {}))
    gl = cls(*args, compress=compress, **kwargs)
    gl.attach(model)
    return model, gl


def backward(model, given):
    """The gradients of one step."""
    model.zero_grad()
    model(given).backward()
    return {name: p.grad.clone() for name, p in model.module.named_parameters()}


def errors_of(gl):
    return {name: matrix.error.clone() for name, matrix in gl._matrices.items()}


def bases_of(gl):
    return {name: matrix.basis.clone() for name, matrix in gl._matrices.items()}


def digest(tensors):
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


# The method, against the reference


CONFIGS = [
    {"rank": 3, "every": 4, "start": 2},
    {"rank": 1, "every": 5, "start": 0},
    {"rank": 1.0, "every": 3, "start": 1},
    {"rank": 0.25, "every": 6, "start": 1, "probes": 3, "seed": 5},
    {"rank": 2, "every": 1, "start": 0},
]
STEPS = 11


def follow(rank, dtype):
    """Every configuration for some steps: gradients, columns, bases and residuals of each."""
    runs = []
    for config in CONFIGS:
        model, gl = attached(Given(dtype), cls=Recording, **config)
        steps = []
        for step in range(STEPS):
            out = backward(model, gradients(step, rank, dtype))
            chosen = {name: j for (t, name), j in gl.chosen.items() if t == step + 1}
            steps.append({"out": out, "chosen": chosen, "bases": bases_of(gl), "errors": errors_of(gl)})
        runs.append(steps)
    return runs


def compare(config, run, num, dtype, told, close):
    for index, name in enumerate(MATRICES):
        size = lowrank.size_of(torch.Size(SHAPES[name]), config["rank"])
        slow = Reference(size.rank, config["every"], config["start"])
        for step, seen in enumerate(run):
            grad = mean_gradients(step, num)[name]
            like = torch.empty(size.a, size.b, dtype=dtype)
            vectors = lowrank.probes(config.get("seed", 0), step + 1, index, config.get("probes", 1), like)
            hints = {"basis": seen["bases"][name].double(), "chosen": seen["chosen"].get(name)} if told else {}
            wanted = slow(grad, [v.double() for v in vectors], **hints)
            assert (seen["out"][name] - wanted).norm() <= close * wanted.norm(), (config, name, step)


@pytest.mark.parametrize("num", [2, 3, 4])
def test_many_ranks_do_in_float64_what_one_does_with_the_mean(num, tmp_path):
    runs = in_ranks(num, follow, tmp_path, torch.float64)[0]
    for config, run in zip(CONFIGS, runs, strict=True):
        compare(config, run, num, torch.float64, told=False, close=1e-12)
        for step, seen in enumerate(run):
            torch.testing.assert_close(seen["out"]["bias"], mean_gradients(step, num)["bias"], rtol=0, atol=1e-14)


def test_and_in_float32_with_the_same_columns(tmp_path):
    """The choice of columns jumps at a tie, so it is taken from the run, and so is the basis."""
    runs = in_ranks(3, follow, tmp_path, torch.float32)[0]
    for config, run in zip(CONFIGS, runs, strict=True):
        compare(config, run, 3, torch.float32, told=True, close=1e-5)


def test_the_clock():
    kinds = [kind_of(step, start=2, every=3) for step in range(1, 10)]
    assert kinds == ["warm-up"] * 2 + ["refresh", "low rank", "low rank"] * 2 + ["refresh"]
    assert [kind_of(step, 0, 1) for step in (1, 2, 3)] == ["refresh"] * 3


# What is conserved


def conserve(rank, dtype, num_steps):
    """Relative error of mean(g + E) = out + mean(E') in each step, and of the sum of all steps."""
    model, gl = attached(Given(dtype), 2, 5, 1)
    kept, wrong, owed, sums = errors_of(gl), [], None, None
    for step in range(num_steps):
        grads = gradients(step, rank, dtype)
        out = backward(model, grads)
        errors = errors_of(gl)
        terms = [[grads[name].double() + kept[name], out[name].double(), errors[name].double()] for name in MATRICES]
        for before, _, after in terms:
            for term in (before, after):
                dist.all_reduce(term.div_(dist.get_world_size()))
        wrong.append(max(float((h - out - e).norm() / h.norm()) for h, out, e in terms))
        step_sums = [torch.stack([grads[name].double(), out[name].double()]) for name in MATRICES]
        sums = step_sums if sums is None else [a + b for a, b in zip(sums, step_sums, strict=True)]
        kept, owed = errors, [after for _, _, after in terms]
    for total in sums:
        dist.all_reduce(total[0].div_(dist.get_world_size()))
    telescoped = max(float((g - o - e).norm() / g.norm()) for (g, o), e in zip(sums, owed, strict=True))
    return wrong, telescoped, max(float(e.norm()) for e in errors.values())


@pytest.mark.parametrize("num", [2, 3])
def test_no_gradient_is_lost_in_any_step_nor_over_many(num, tmp_path):
    wrong, telescoped, owed = in_ranks(num, conserve, tmp_path, torch.float32, 14)[0]
    assert max(wrong) < 1e-6
    assert telescoped < 1e-6
    assert owed > 1  # at the end of a period


def test_bf16_messages_lose_only_what_their_summation_rounds(tmp_path):
    wrong, telescoped, _ = in_ranks(2, conserve, tmp_path, torch.bfloat16, 14)[0]
    assert max(wrong) < 5e-3
    assert telescoped < 5e-3


def rounded(rank):
    """What is owed after a low-rank step in BF16, and what it must be: the rest of the factor as it was sent."""
    model, gl = attached(Given(torch.bfloat16), 2, 9, 0, cls=Recording)
    wrong = []
    for step in range(4):
        grads, kept = gradients(step, rank, torch.bfloat16), errors_of(gl)
        backward(model, grads)
        for name, matrix in gl._matrices.items() if step else ():
            h = lowrank.orient(grads[name].float() + kept[name])
            p, r = lowrank.compress(h, matrix.basis, gl.chosen[step + 1, name])
            rest = h - p @ (r / 3).bfloat16().float() * 3
            wrong.append(float((lowrank.orient(matrix.error) - rest).norm() / h.norm()))
    return max(wrong)


def test_what_rounding_takes_from_a_factor_is_owed_too(tmp_path):
    assert max(in_ranks(3, rounded, tmp_path)) < 1e-6


# Against dense


def mlp(*sides, dtype=torch.float32):
    torch.manual_seed(3)
    layers = [layer for m, n in pairwise(sides) for layer in (nn.Linear(m, n), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(dtype)


def batch(step, rank, width, size=8):
    generator = torch.Generator().manual_seed(10_000 * rank + step)
    return torch.randn(size, width, generator=generator)


def side_by_side(rank, dtype, num_steps, config):
    """Parameters of a run with GreedyLore and of one without, after each step."""
    models = [attached(mlp(12, 20, 6, dtype=dtype), **config)[0], DDP(mlp(12, 20, 6, dtype=dtype))]
    seen = []
    for step in range(num_steps):
        for model in models:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            optimizer.zero_grad()
            model(batch(step, rank, 12).to(dtype)).square().mean().backward()
            optimizer.step()
        seen.append([[p.detach().clone() for p in model.parameters()] for model in models])
    return seen


@pytest.mark.parametrize(("num", "dtype"), [(2, torch.float32), (3, torch.float32), (3, torch.bfloat16)])
def test_the_warm_up_is_bit_by_bit_ddp_s_own(num, dtype, tmp_path):
    config = {"rank": 2, "every": 3, "start": 6}
    for seen in in_ranks(num, side_by_side, tmp_path, dtype, 7, config):
        assert all(torch.equal(ours, plain) for step in seen[:6] for ours, plain in zip(*step, strict=True))


@pytest.mark.parametrize("config", [{"rank": 2, "every": 1}, {"rank": 1.0, "every": 4}])
def test_a_refresh_in_every_step_and_a_full_rank_are_dense(config, tmp_path):
    for ours, plain in in_ranks(2, side_by_side, tmp_path, torch.float32, 10, config | {"start": 1})[0]:
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-5)


# The same on every rank


def hashes(rank, threads):
    torch.set_num_threads(1 + rank if threads else 1)
    model, gl = attached(mlp(256, 512, 512, 8), 8, 5, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    seen = []
    for step in range(12):
        optimizer.zero_grad()
        model(batch(step, rank, 256)).square().mean().backward()
        optimizer.step()
        grads = [p.grad for p in model.parameters()]
        seen.append((digest(grads), digest(model.parameters()), digest(m.basis for m in gl._matrices.values())))
    return seen, digest(m.error for m in gl._matrices.values())


@pytest.mark.parametrize(("num", "threads"), [(2, True), (4, True)])
def test_ranks_stay_equal_to_the_last_bit_with_other_thread_counts(num, threads, tmp_path):
    seen = in_ranks(num, hashes, tmp_path, threads)
    assert all(steps == seen[0][0] for steps, _ in seen)
    assert len({error for _, error in seen}) == num  # what a rank owes is its own


def decompositions(rank):
    """How many bases a rank computes in two refreshes of four matrices."""
    calls = []
    compute = lowrank.refresh
    lowrank.refresh = lambda mean: calls.append(mean.shape) or compute(mean)
    model, _ = attached(Given(), 2, 3, 0)
    for step in range(4):
        backward(model, gradients(step, rank))
    return calls


def test_each_basis_is_computed_by_its_owner_alone(tmp_path):
    first, second, third = in_ranks(3, decompositions, tmp_path)
    assert sorted(first) == [(8, 27)] * 2 + [(24, 40)] * 2
    assert second == [(24, 40)] * 2
    assert third == [(16, 16)] * 2


# Buckets, accumulation, the generator


def layouts(rank):
    """The same gradients through DDP's buckets of many kinds; and the state of the global generator."""
    seen = {}
    kinds = {
        "huge": {"bucket_cap_mb": 100},
        "tiny": {"bucket_cap_mb": 1e-6},
        "views": {"gradient_as_bucket_view": True},
        "tiny views": {"bucket_cap_mb": 1e-6, "gradient_as_bucket_view": True},
        "unused": {"find_unused_parameters": True, "bucket_cap_mb": 1e-6},
        "static": {"static_graph": True},
    }
    for kind, settings in kinds.items():
        model, _ = attached(Given(torch.float64), 3, 4, 1, ddp=settings)
        torch.manual_seed(5)
        before = torch.get_rng_state()
        seen[kind] = [backward(model, gradients(step, rank, torch.float64)) for step in range(10)]
        assert torch.equal(torch.get_rng_state(), before), f"{kind} touched the global generator"
    return seen


def test_buckets_make_no_difference(tmp_path):
    first, *others = in_ranks(3, layouts, tmp_path)
    for seen in [first, *others]:
        for kind, steps in seen.items():
            for step, (outs, wanted) in enumerate(zip(steps, first["huge"], strict=True)):
                for name, out in outs.items():
                    torch.testing.assert_close(out, wanted[name], rtol=0, atol=1e-12, msg=f"{kind} {step} {name}")


def accumulate(rank):
    whole, _ = attached(Given(torch.float64), 3, 4, 1)
    parts, gl = attached(Given(torch.float64), 3, 4, 1)
    wrong = []
    for step in range(8):
        wanted = backward(whole, gradients(step, rank, torch.float64))
        parts.zero_grad()
        third = {name: g / 3 for name, g in gradients(step, rank, torch.float64).items()}
        with parts.no_sync():
            parts(third).backward()
            parts(third).backward()
        parts(third).backward()
        wrong += [float((p.grad - wanted[name]).abs().max()) for name, p in parts.module.named_parameters()]
    return gl.step, max(wrong)


def test_micro_batches_under_no_sync_equal_one_large_batch(tmp_path):
    steps, wrong = in_ranks(2, accumulate, tmp_path)[0]
    assert steps == 8
    assert wrong < 1e-12


def uneven(rank):
    """Rank 1 runs out of data: what has been sent and what is owed still makes up all gradients."""
    model, gl = attached(Given(torch.float64), 2, 4, 1)
    sent, given = [torch.zeros(SHAPES[name], dtype=torch.float64) for name in MATRICES], []
    with model.join():
        for step in range(6 if rank == 1 else 10):
            grads = gradients(step, rank, torch.float64)
            out = backward(model, grads)
            for total, name in zip(sent, MATRICES, strict=True):
                total += out[name]
            given.append([grads[name] for name in MATRICES])
    owed = [matrix["error"] for matrix in gl.state_dict()["state"].values()]
    mine = [sum(column) for column in zip(*given, strict=True)]
    for total in mine:
        dist.all_reduce(total.div_(2))
    return sent, owed, mine, gl.step


def test_a_rank_that_joins_early_pays_what_it_owes(tmp_path):
    sent, owed, given, step = in_ranks(2, uneven, tmp_path)[0]
    assert step == 10
    for out, rest, total in zip(sent, owed, given, strict=True):
        torch.testing.assert_close(out + rest, total)


class Late(GreedyLore):
    """Remembers when DDP came with a bucket, when it could go on, and whether the promise was kept by then."""

    def _enqueue(self, bucket):
        begin = time.perf_counter()
        future = super()._enqueue(bucket)
        self.waits = [*getattr(self, "waits", []), (begin, time.perf_counter(), future.done())]
        return future


def overlap(rank):
    model, gl = attached(Given(), 2, 50, 0, cls=Late, ddp={"bucket_cap_mb": 1e-6})
    backward(model, gradients(0, rank))
    backward(model, gradients(1, rank))
    gl.waits = []
    dist.barrier()
    if rank == 1:
        time.sleep(1.0)
    backward(model, gradients(2, rank))
    return gl.waits


def test_the_hook_does_not_wait_for_the_other_ranks(tmp_path):
    waits = in_ranks(2, overlap, tmp_path)[0]
    assert len(waits) == len(SHAPES)
    assert waits[-1][1] - waits[0][0] < 0.5
    assert not any(done for _, _, done in waits)


def crowded(rank):
    """DDP's own collective about used parameters is issued while ours are under way, on all sizes of delay."""
    settings = {"find_unused_parameters": True, "bucket_cap_mb": 1e-6}
    model, _ = attached(Given(), 2, 5, 0, ddp=settings)
    for step in range(40):
        out = backward(model, gradients(step, rank))
        time.sleep(0.002 * ((step * 7 + 3 * rank) % 3))
    return digest(out.values())


def test_collectives_of_ours_and_of_ddp_do_not_get_mixed_up(tmp_path):
    assert len(set(in_ranks(3, crowded, tmp_path))) == 1


# Checkpoints


def resume(rank, folder):
    """Ten steps, saved after five, in the middle of a period; then the last five with everything new."""
    model, gl = attached(Given(torch.float64), 3, 4, 2, probes=2)
    outs, state = [], None
    for step in range(10):
        if step == 5:
            state = gl.state_dict()
            if rank == 0:
                torch.save(state, folder / "state.pt")
        outs.append(backward(model, gradients(step, rank, torch.float64)))
    dist.barrier()
    again, fresh = attached(Given(torch.float64), 3, 4, 2, probes=2)
    loaded = torch.load(folder / "state.pt", weights_only=True)
    fresh.load_state_dict(loaded)
    assert fresh.step == 5
    rest = [backward(again, gradients(step, rank, torch.float64)) for step in range(5, 10)]
    gl.load_state_dict(loaded)  # into one that has gone further
    back = [backward(model, gradients(step, rank, torch.float64)) for step in range(5, 10)]
    return outs, rest, back, digest(t for part in state["state"].values() for t in part.values())


def on_two(rank, state):
    """Two ranks on the mean gradients of four: each is given the mean of two of them."""
    model, gl = attached(Given(torch.float64), 3, 4, 2, probes=2)
    gl.load_state_dict(state)
    outs = []
    for step in range(5, 10):
        pair = [gradients(step, other, torch.float64) for other in (2 * rank, 2 * rank + 1)]
        outs.append(backward(model, {name: (pair[0][name] + pair[1][name]) / 2 for name in SHAPES}))
    return outs


def test_a_run_resumes_in_the_middle_of_a_period_with_four_ranks_or_with_two(tmp_path):
    (tmp_path / "two").mkdir()
    results = in_ranks(4, resume, tmp_path, tmp_path)
    assert len({result[-1] for result in results}) == 1  # every rank saves the same
    outs, rest, back, _ = results[0]
    fewer = in_ranks(2, on_two, tmp_path / "two", torch.load(tmp_path / "state.pt", weights_only=True))[0]
    for other in (rest, back, fewer):
        for seen, wanted in zip(other, outs[5:], strict=True):
            for name in SHAPES:
                torch.testing.assert_close(seen[name], wanted[name], rtol=0, atol=1e-12)


def refuse_states(rank):
    model, gl = attached(Given(), 3, 4, 1)
    backward(model, gradients(0, rank))
    state, told = gl.state_dict(), {}
    wrong = {key: {**state, "config": {**state["config"], key: 7}} for key in state["config"]}
    wrong["kind of rank"] = {**state, "config": {**state["config"], "rank": 3.0}}
    wrong["missing matrix"] = {**state, "state": {k: v for k, v in state["state"].items() if k != "tall"}}
    wrong["extra matrix"] = {**state, "state": {**state["state"], "more": state["state"]["tall"]}}
    wrong["shape"] = {**state, "state": {**state["state"], "tall": state["state"]["wide"]}}
    wrong["nothing"], wrong["no dict"], wrong["no config"] = {}, [state], {**state, "config": None}
    wrong["step"] = {**state, "step": -4}
    for kind, tall in {"no basis": {"basis": None}, "nan": {"error": torch.full((40, 24), math.nan)}}.items():
        wrong[kind] = {**state, "state": {**state["state"], "tall": state["state"]["tall"] | tall}}
    before = digest([*errors_of(gl).values(), *bases_of(gl).values()])
    for kind, bad in wrong.items():
        try:
            gl.load_state_dict(bad)
        except TrimtabError as error:
            told[kind] = str(error)
    assert (digest([*errors_of(gl).values(), *bases_of(gl).values()]), gl.step) == (before, 1)
    return told


def test_a_state_that_does_not_fit_is_refused_by_name(tmp_path):
    told = in_ranks(1, refuse_states, tmp_path)[0]
    for key in ("rank", "every", "start", "probes", "seed"):
        assert f"the saved {key} must be" in told[key]
        assert "got 7" in told[key]
    assert "got 3.0" in told["kind of rank"]
    assert "'tall'" in told["missing matrix"]
    assert "'more'" in told["extra matrix"]
    assert "'tall' must have shape (40, 24)" in told["shape"]
    assert all("must be GreedyLore's" in told[kind] for kind in ("nothing", "no dict", "no config"))
    assert "whole number from 0" in told["step"]
    assert "the saved basis of 'tall' must have shape (24, 24)" in told["no basis"]
    assert "the saved error of 'tall' must be finite" in told["nan"]


def distributed_checkpoint(rank, folder):
    """torch's own checkpoints, which keep one copy of what has one key."""
    import torch.distributed.checkpoint as dcp

    model, gl = attached(Given(torch.float64), 3, 4, 1)
    for step in range(4):
        backward(model, gradients(step, rank, torch.float64))
    dcp.save({"greedylore": gl}, checkpoint_id=folder / "dcp")
    wanted = backward(model, gradients(4, rank, torch.float64))
    again, fresh = attached(Given(torch.float64), 3, 4, 1)
    dcp.load({"greedylore": fresh}, checkpoint_id=folder / "dcp")
    out = backward(again, gradients(4, rank, torch.float64))
    return fresh.step, max(float((out[name] - wanted[name]).abs().max()) for name in SHAPES)


def test_it_goes_through_torch_s_distributed_checkpoint(tmp_path):
    for step, wrong in in_ranks(2, distributed_checkpoint, tmp_path, tmp_path):
        assert step == 5
        assert wrong < 1e-12


# What is not finite


def poisoned(rank, bad, name, dtype):
    """One tensor of rank 1 holds an Inf in one step; what each rank sees and keeps."""
    model, gl = attached(Given(dtype), 2, 4, 1)
    seen = []
    for step in range(8):
        before = digest([*errors_of(gl).values(), *bases_of(gl).values()])
        grads = gradients(step, rank, dtype)
        if step == bad and rank == 1:
            grads[name].view(-1)[5] = math.inf
        out = backward(model, grads)
        kept = digest([*errors_of(gl).values(), *bases_of(gl).values()]) == before
        assert all(g.any() for g in out.values())  # even without a first refresh there is a basis to send by
        seen.append((kept, {name: bool(g.isfinite().all()) for name, g in out.items()}))
    finite = all(t.isfinite().all() for t in [*errors_of(gl).values(), *bases_of(gl).values()])
    return seen, finite


@pytest.mark.parametrize("bad", [1, 3, 5])  # two refreshes with a low-rank step between them
@pytest.mark.parametrize(("name", "dtype"), [("tall", torch.float32), ("tall", torch.float16), ("bias", torch.float32)])
def test_an_infinite_gradient_changes_neither_residuals_nor_bases(bad, name, dtype, tmp_path):
    results = in_ranks(2, poisoned, tmp_path, bad, name, dtype)
    for seen, finite in results:
        assert finite
        for step, (kept, fine) in enumerate(seen):
            assert kept == (step in (0, bad)), step  # step 0 is the warm-up
            assert list(fine.values()) == [step != bad or other == "bias" != name for other in fine]


def overflowing(rank):
    """FP16 scores overflow although every gradient and every factor is finite."""
    shapes = {"wide": (4, 5000)}
    model, gl = attached(Given(torch.float16, shapes), 1, 9, 0)
    large = {"wide": torch.full((4, 5000), 600.0, dtype=torch.float16)}
    backward(model, {"wide": large["wide"] / 600})
    while not all(gl._scores(2, m, m.owes(large["wide"])).abs().max() > 66_000 for m in gl._matrices.values()):
        large["wide"] *= 1.5
    before = digest(errors_of(gl).values())
    out = backward(model, large)["wide"]
    return bool(large["wide"].isfinite().all()), bool(out.isnan().all()), digest(errors_of(gl).values()) == before


def test_scores_that_overflow_are_not_finite_either(tmp_path):
    assert in_ranks(1, overflowing, tmp_path)[0] == (True, True, True)


# What is sent


def count(rank, sides, config, cap):
    model, _ = attached(mlp(*sides), **config, compress=larger(config["rank"]), ddp={"bucket_cap_mb": cap})
    seen = []
    for step in range(config["start"] + 2 * config["every"] + 1):
        with traffic() as t:
            model(batch(step, rank, sides[0])).square().mean().backward()
        kinds = t.by_kind
        seen.append((t.payload, kinds["all_reduce"].calls, kinds["all_reduce"].payload, t.sent, t.by_kind))
    return seen


def larger(rank):
    return lambda name, p: min(p.shape) > rank


REBUILD = 32  # two small int32 broadcasts of DDP's own in its second step, when it rebuilds its buckets


@pytest.mark.parametrize(
    ("sides", "config", "dense", "bases", "low"),
    [
        ((96, 256, 64, 8), {"rank": 4, "every": 5, "start": 2}, 167_200, 53_504, 11_200),
        ((256, 512, 512, 8), {"rank": 8, "every": 5, "start": 2}, 1_593_376, 1_310_720, 56_352),
    ],
)
def test_payloads_are_the_specified_integers(sides, config, dense, bases, low, tmp_path):
    for seen in in_ranks(2, count, tmp_path, sides, config, 100):
        for step, (payload, calls, reduced, sent, kinds) in enumerate(seen, start=1):
            kind = kind_of(step, config["start"], config["every"])
            assert reduced == {"warm-up": dense, "refresh": dense, "low rank": low}[kind]
            extra = {"refresh": bases}.get(kind, REBUILD if step == 2 else 0)
            assert payload == reduced + extra
            assert calls == {"warm-up": 1, "refresh": 1, "low rank": 2}[kind]
            assert sent == reduced + extra / 2
            assert ("broadcast" in kinds) == (extra > 0)
            assert kind != "refresh" or kinds["broadcast"].calls == 2  # one for each owner


def test_two_buckets_take_twice_the_calls_for_the_same_bytes(tmp_path):
    config = {"rank": 8, "every": 5, "start": 2}
    for num, seen in enumerate(in_ranks(2, count, tmp_path, (256, 512, 512, 8), config, 1.0)):
        assert num < 2
        later = seen[2:]
        assert [row[0] for row in later] == ([2_904_096] + [56_352] * 4) * 2 + [2_904_096]
        assert [row[1] for row in later] == ([2] + [4] * 4) * 2 + [2]


# What it learns


class RandomColumns(GreedyLore):
    def _select(self, step, matrix, mean_scores):
        generator = torch.Generator().manual_seed(100 * step + matrix.index)
        return torch.randperm(matrix.size.a, generator=generator)[: matrix.size.rank]


class FixedColumns(GreedyLore):
    def _select(self, step, matrix, mean_scores):
        return torch.arange(matrix.size.rank)


WAYS = {"dense": None, "greedy": GreedyLore, "forgets": GreedyLore, "random": RandomColumns, "fixed": FixedColumns}


def learn(rank, seed, ways):
    """Test error of student MLPs after 300 steps, each with another way to exchange gradients."""
    num, losses, peaks = dist.get_world_size(), {}, {}
    for way in ways:
        cls = WAYS[way]
        torch.manual_seed(seed)
        teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)).requires_grad_(False)
        for p in teacher.parameters():
            p.mul_(2)
        student = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
        tests = torch.randn(2048, 32)
        model, gl = attached(student, 2, 50, 5, cls=cls) if cls else (DDP(student), None)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        trace = []
        for _ in range(300):
            x = torch.randn(128 // num, 32, generator=generator)
            optimizer.zero_grad()
            loss = (model(x) - teacher(x)).square().mean()
            loss.backward()
            optimizer.step()
            trace.append(loss.item())
            if way == "forgets":
                for matrix in gl._matrices.values():
                    matrix.error.zero_()
        losses[way] = float((student(tests) - teacher(tests)).square().mean())
        peaks[way] = max(after / before for before, after in pairwise(trace[20:]))
    return losses, peaks


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_like_dense_and_each_part_of_it_is_needed(seed, tmp_path):
    losses, peaks = in_ranks(1, learn, tmp_path, seed, tuple(WAYS))[0]
    assert losses["greedy"] <= 1.05 * losses["dense"]
    assert losses["forgets"] >= 1.3 * losses["dense"]
    assert losses["random"] >= 1.1 * losses["dense"]
    assert not losses["fixed"] < 10 * losses["dense"]
    assert peaks["greedy"] < 1.5  # the large gradient of a refresh does not make the loss jump


def test_two_ranks_learn_so_too(tmp_path):
    losses, _ = in_ranks(2, learn, tmp_path, 0, ("dense", "greedy"))[0]
    assert losses["greedy"] <= 1.05 * losses["dense"]


# The choice of tensors, the report, refusals


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)
        self.narrow = nn.Linear(64, 4)
        self.conv = nn.Conv2d(64, 64, 3)
        self.lm_head = nn.Linear(64, 50)
        self.tied = nn.Linear(64, 50, bias=False)
        self.tied.weight = self.embedding.weight
        self.frozen = nn.Linear(64, 64).requires_grad_(False)


def reported(rank):
    out = {}
    model = DDP(Small())
    kinds = {"default": {}, "named": {"exclude": ("up.weight", "conv")}, "own": {"compress": every_matrix}}
    for key, settings in kinds.items():
        gl = GreedyLore(4, 100, **settings)
        gl.attach(DDP(Small()) if key != "default" else model)
        report = gl.report()
        out[key] = {c.name: c.reason for c in report.choices}, list(gl._matrices), report, str(report)
    gl = GreedyLore(64, 100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gl.attach(DDP(nn.Linear(8, 8)))
    out["none"] = [(w.category, str(w.message)) for w in caught]
    return out


def test_the_report_says_what_becomes_of_each_tensor(tmp_path):
    out = in_ranks(1, reported, tmp_path)[0]
    reasons, compressed, report, text = out["default"]
    assert compressed == ["up.weight", "down.weight", "conv.weight"]
    assert "embedding" in reasons["embedding.weight"]
    assert "not a matrix" in reasons["up.bias"]
    assert "rank 4 of 4 would not halve" in reasons["narrow.weight"]
    assert "lm_head" in reasons["lm_head.weight"]
    assert not {"tied.weight", "frozen.weight"} & reasons.keys()
    sizes = {"up.weight": (64, 256), "down.weight": (64, 256), "conv.weight": (64, 576)}
    dense = 4 * sum(p.numel() for p in Small().parameters() if p.requires_grad)
    saved = sum(4 * a * b - (4 * (a * b + 99 * (a + 4 * b) + a * a)) / 100 for a, b in sizes.values())
    assert report.dense_bytes == dense
    assert report.bytes == pytest.approx(dense - saved)
    assert report.ratio == pytest.approx(dense / (dense - saved))
    assert report.memory == 4 * sum(a * b + a * a for a, b in sizes.values())
    assert f"3 of {len(reasons)} tensors compressed: {report.ratio:.2f}x less" in text
    assert out["named"][1] == ["down.weight", "lm_head.weight"]
    assert set(out["own"][1]) == {n for n, p in Small().named_parameters() if p.dim() > 1 and p.requires_grad}
    assert out["none"][0][0] is NoEffectWarning
    assert "none of 2 tensors" in out["none"][0][1]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rank": 0}, "rank must be a whole number from 1, or a float in (0, 1], got 0"),
        ({"rank": 1.5}, "rank must be"),
        ({"rank": True}, "rank must be"),
        ({"every": 0}, "every must be"),
        ({"every": 2.0}, "every must be"),
        ({"start": -1}, "start must be"),
        ({"probes": 0}, "probes must be"),
        ({"seed": -1}, "seed must be"),
        ({"compress": "all"}, "compress must be"),
        ({"exclude": "lm_head"}, "exclude must be a sequence of names"),
    ],
)
def test_settings_are_checked_at_once(settings, told):
    with pytest.raises(TrimtabError) as caught:
        GreedyLore(**settings)
    assert told in str(caught.value)


def test_it_needs_a_model_first():
    gl = GreedyLore()
    for call in (gl.report, gl.state_dict, lambda: gl.load_state_dict({})):
        with pytest.raises(TrimtabError, match="attach"):
            call()
    with pytest.raises(TrimtabError, match=r"DistributedDataParallel.*got 'Linear'"):
        gl.attach(nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]


def test_the_tuples_of_the_python_reducer_are_refused():
    with pytest.raises(TrimtabError, match=r"got a tuple.*optimize_ddp"):
        greedylore_hook(GreedyLore(), (torch.zeros(2), nn.Parameter(torch.zeros(2))))


class Broken(GreedyLore):
    def _select(self, step, matrix, mean_scores):
        raise RuntimeError("this failed on purpose")


def refuse_models(rank):
    told = {}

    def tell(key, call):
        try:
            call()
        except Exception as error:
            told[key] = f"{type(error).__name__}: {error}"

    def stranger():
        module = Given(shapes={"wide": (4, 6)})
        model, gl = attached(module, 1, 2, 0)
        gl._names.clear()
        backward(model, gradients(0, rank, shapes={"wide": (4, 6)}))

    def broken():
        model, _ = attached(Given(), 2, 4, 0, cls=Broken)
        backward(model, gradients(0, rank))
        backward(model, gradients(1, rank))

    from torch.nn.parallel.distributed import _MixedPrecision

    model, gl = attached(Given(), 2)
    half = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    tell("twice", lambda: gl.attach(DDP(Given())))
    tell("second hook", lambda: GreedyLore(2).attach(model))
    tell("mixed", lambda: GreedyLore(2).attach(DDP(Given(), mixed_precision=half)))
    tell("sparse", lambda: GreedyLore(2).attach(DDP(nn.Embedding(4, 4, sparse=True))))
    tell("stranger", stranger)
    tell("broken", broken)
    return told


def test_models_that_do_not_fit_are_refused(tmp_path):
    told = in_ranks(1, refuse_models, tmp_path)[0]
    assert "one model" in told["twice"]
    assert "one hook, got one that has greedylore_hook" in told["second hook"]
    assert "mixed_precision" in told["mixed"]
    assert "sparse=False" in told["sparse"]
    assert "attach after the model is complete" in told["stranger"]
    assert "this failed on purpose" in told["broken"]


def groups(rank):
    """A group of one rank; then a group of our own, and a model that only ranks 1 and 2 have."""
    alone, pair, told = dist.new_group([0]), dist.new_group([1, 2]), ""
    model = DDP(Given())
    if rank == 0:
        with pytest.raises(TrimtabError) as caught:
            GreedyLore(2, group=alone).attach(model)
        told = str(caught.value)
    own, differ = dist.new_group([0, 1, 2]), []
    for settings in ({"every": 4 + (rank == 1)}, {"compress": lambda name, p: name != "wide" or rank != 1}):
        with pytest.raises(TrimtabError) as caught:
            attached(Given(), 2, start=0, group=own, **settings)
        differ.append(str(caught.value))
    model, gl = attached(Given(), 2, 4, 0, group=own)
    assert gl.group is own
    outs = [backward(model, gradients(step, rank)) for step in range(3)]
    if rank > 0:
        model, _ = attached(Given(torch.float64), 2, 4, 0, ddp={"process_group": pair})
        outs += [backward(model, gradients(step, rank - 1, torch.float64)) for step in range(3)]
    return told, outs, differ


def test_groups_are_taken_as_given_if_their_ranks_are_ddp_s(tmp_path):
    results = in_ranks(3, groups, tmp_path)
    assert "the ranks of DDP's, [0, 1, 2], got [0]" in results[0][0]
    for name in SHAPES:
        assert all(torch.equal(outs[2][name], results[0][1][2][name]) for _, outs, _ in results)
        torch.testing.assert_close(results[1][1][3][name], mean_gradients(0, 2)[name])
        assert torch.equal(results[1][1][5][name], results[2][1][5][name])
    for rank, (_, _, (every, which)) in enumerate(results):
        assert f"every must be the same on all ranks, got {5 if rank == 1 else 4} here" in every
        assert f"another on rank {0 if rank == 1 else 1}" in every
        assert "what is compressed must be the same" in which


class Watching(GreedyLore):
    """Remembers whether its products run under autocast."""

    def _scores(self, step, matrix, h):
        self.narrow = torch.is_autocast_enabled("cpu")
        return super()._scores(step, matrix, h)


def under_autocast(rank):
    model, gl = attached(Given(), 2, 9, 0, cls=Watching)
    for step in range(2):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(gradients(step, rank)).backward()
    return gl.narrow


def test_a_backward_inside_autocast_does_not_make_our_products_narrow(tmp_path):
    assert in_ranks(1, under_autocast, tmp_path) == [False]


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_does_the_same_and_only_a_refresh_waits(tmp_path, no_waits):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        config = {"rank": 2, "every": 4, "start": 1}
        model, gl = attached(Given().cuda(), cls=Recording, **config)
        given = [{name: g.cuda() for name, g in gradients(step, 0).items()} for step in range(9)]
        run = []
        for step, grads in enumerate(given):
            waits = kind_of(step + 1, 1, 4) == "refresh" or step < 2  # DDP itself waits while it builds its buckets
            with nullcontext() if waits else no_waits():
                model.zero_grad()
                model(grads).backward()
            out = {name: p.grad.cpu() for name, p in model.module.named_parameters()}
            chosen = {name: j.cpu() for (t, name), j in gl.chosen.items() if t == step + 1}
            run.append({"out": out, "chosen": chosen, "bases": {n: b.cpu() for n, b in bases_of(gl).items()}})
        compare(config, run, 1, torch.float32, told=True, close=1e-5)
    finally:
        dist.destroy_process_group()
