# SPDX-License-Identifier: Apache-2.0
"""1-bit Adam: AdamW bit by bit in warm-up, the paper's recurrence afterwards, in one process and in two, three and
four; equal bits on all ranks, DDP, checkpoints for other numbers of ranks, skipped steps, bytes, and learning."""

import argparse
import copy
import hashlib
import io
import math
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from reference import onebit as reference
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.comm import OneBitAdam, onebit_adam, traffic
from trimtab.comm.onebit import Layout
from trimtab.comm.onebit_adam import exchange
from trimtab.comm.onebit_steps import has_settled, period, sum_of_variance
from trimtab.errors import NoEffectWarning, TrimtabError

SHAPES = ((6, 9), (7,), (), (5, 3, 2), (0, 4))
STEPS, WARMUP = 10, 4


def parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradient(p, step, rank, index):
    """On a grid on which sums over ranks are exact, so that a mean does not depend on their order."""
    draw = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * step + 10 * index + rank))
    return ((draw * 64).round() / 64).to(p.dtype)


def drive(optimizer, ps, steps, rank=0):
    for step in steps:
        for index, p in enumerate(ps):
            p.grad = gradient(p, step, rank, index)
        optimizer.step()


def copies(tensors):
    return [t.detach().clone() for t in tensors]


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def digest(tensors):
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# In one process


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"maximize": True}, {"weight_decay": 0.3, "eps": 1e-4}])
def test_warm_up_is_adamw_bit_by_bit(settings):
    ps, alone = parameters(), parameters()
    optimizer, adamw = OneBitAdam(ps, 1e-2, **settings), torch.optim.AdamW(alone, 1e-2, **settings)
    drive(optimizer, ps, range(STEPS))
    drive(adamw, alone, range(STEPS))
    assert same(ps, alone)
    for p, q in zip(ps, alone, strict=True):
        assert all(torch.equal(optimizer.state[p][name], adamw.state[q][name]) for name in ("exp_avg", "exp_avg_sq"))


def test_one_rank_is_momentum_with_a_frozen_size():
    ps = parameters(torch.float64)
    optimizer = OneBitAdam(ps, 1e-2, warmup=WARMUP)
    simulated = [reference.Adam(p.detach(), 1, lr=1e-2, warmup=WARMUP) for p in ps]
    variances = None
    for step in range(STEPS):
        drive(optimizer, ps, [step])
        for index, (p, simulation) in enumerate(zip(ps, simulated, strict=True)):
            simulation.step([gradient(p, step, 0, index)])
            np.testing.assert_allclose(p.detach().numpy().reshape(-1), simulation.p, rtol=0, atol=1e-13)
        if step >= WARMUP - 1:
            assert optimizer.frozen() == set(ps)
            now = copies(optimizer.state[p]["exp_avg_sq"] for p in ps)
            variances = variances or now
            assert same(now, variances)
        else:
            assert not optimizer.frozen()


def test_a_coordinate_without_a_history_stands_still():
    p = nn.Parameter(torch.ones(3))
    optimizer = OneBitAdam([p], 0.1, weight_decay=0.0, warmup=2)
    for step in range(5):
        p.grad = torch.tensor([1.0, 0.0, 0.0 if step < 2 else 1.0])
        optimizer.step()
    assert p[0] < 1
    assert p[1:].tolist() == [1, 1]


def test_narrow_parameters_have_wide_moments():
    ps, wide = parameters(torch.bfloat16), parameters(torch.float32)
    for p, w in zip(ps, wide, strict=True):
        w.data.copy_(p.data)
    optimizer, other = OneBitAdam(ps, 1e-2, warmup=WARMUP), OneBitAdam(wide, 1e-2, warmup=WARMUP)
    drive(optimizer, ps, range(STEPS))
    drive(other, wide, range(STEPS))
    for p, w in zip(ps, wide, strict=True):
        assert p.dtype == torch.bfloat16
        assert {optimizer.state[p][name].dtype for name in optimizer.state[p]} == {torch.float32}
        torch.testing.assert_close(p.float(), w, atol=0.05, rtol=0.05)
    again = OneBitAdam(parameters(torch.bfloat16), 1e-2, warmup=WARMUP)
    again.load_state_dict(optimizer.state_dict())
    for p, q in zip(ps, again.param_groups[0]["params"], strict=True):
        assert same(optimizer.state[p].values(), again.state[q].values())


def test_a_checkpoint_of_adamw_goes_on_and_freezes():
    ps = parameters()
    adamw = torch.optim.AdamW(ps, 1e-2, weight_decay=0.1)
    drive(adamw, ps, range(WARMUP))
    optimizer = OneBitAdam(ps, warmup=WARMUP)
    optimizer.load_state_dict(through_a_file(adamw.state_dict()))
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert optimizer.frozen() == set(ps)
    drive(optimizer, ps, range(WARMUP, STEPS))
    ps2 = parameters()
    straight = OneBitAdam(ps2, 1e-2, weight_decay=0.1, warmup=WARMUP)
    drive(straight, ps2, range(STEPS))
    assert same(ps, ps2)


@pytest.mark.parametrize("step", [1, WARMUP + 1])
@pytest.mark.parametrize("how", ["nan", "inf", "found_inf"])
def test_a_step_that_is_not_finite_is_not_taken(step, how):
    ps = parameters()
    optimizer = OneBitAdam(ps, 1e-2, warmup=WARMUP)
    drive(optimizer, ps, range(step))
    before = copies(ps), copies(optimizer.state[p]["exp_avg"] for p in ps)
    for index, p in enumerate(ps):
        p.grad = gradient(p, step, 0, index)
    if how == "found_inf":
        optimizer.found_inf = torch.tensor(1.0)
    else:
        ps[0].grad[0, 0] = float(how)
    optimizer.step()
    assert same(ps, before[0])
    assert same([optimizer.state[p]["exp_avg"] for p in ps], before[1])
    if how == "found_inf":
        optimizer.found_inf.zero_()
    drive(optimizer, ps, range(step, STEPS))
    assert not same(ps[:2], before[0][:2])
    assert all(p.isfinite().all() for p in ps)


def test_it_has_settled_when_nothing_moves_any_more():
    assert has_settled((0.97, 1e-3), (1.0, 1e-3), 20, 10)
    assert has_settled((1.0, 1e-3), (0.97, 1e-3), 20, 10)
    assert not has_settled((0.95, 1e-3), (1.0, 1e-3), 20, 10)
    assert not has_settled((1.0, 1e-3), (0.95, 1e-3), 20, 10)
    assert not has_settled((1.0, 1e-3), None, 20, 10)
    assert not has_settled((1.0, 1e-3), (1.0, 1e-3), 10, 10)
    assert not has_settled((1.0, 2e-3), (1.0, 1e-3), 20, 10)  # the learning rate rises
    assert has_settled((1.0, 1e-3), (1.0, 2e-3), 20, 10)
    assert not has_settled((0.0, 1e-3), (0.0, 1e-3), 20, 10)
    assert [period(b) for b in (0.999, 0.95, 0.0)] == [1000, 20, 1]


def test_auto_freezes_once_the_second_moment_has_settled():
    def froze_at(sizes, rates):
        p = nn.Parameter(torch.zeros(50))
        optimizer = OneBitAdam([p], warmup="auto", betas=(0.9, 0.9))
        for step, (size, rate) in enumerate(zip(sizes, rates, strict=True)):
            p.grad = torch.full_like(p, size)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            if optimizer.frozen():
                assert optimizer.param_groups[0]["freeze"] == step + 1
                return step + 1
        return None

    flat = [1e-3] * 100
    assert froze_at([1.0] * 100, flat) == 20  # twice the period, although v is constant once corrected
    assert froze_at([4.0] * 15 + [1.0] * 85, flat) == 80  # 1 + 15 * 0.9^(t - 15): 1.046 at 70, 1.016 at 80
    assert froze_at([1.1**k for k in range(100)], flat) is None
    assert froze_at([1.0] * 60, [1e-3 * min(k, 25) for k in range(60)]) == 40  # after the learning rate's warm-up


def test_a_group_may_stay_dense():
    ps = parameters()
    optimizer = OneBitAdam([{"params": ps[:1]}, {"params": ps[1:], "warmup": None}], warmup=2)
    drive(optimizer, ps, range(4))
    assert optimizer.frozen() == {ps[0]}


def refusals():
    sparse = nn.Parameter(torch.ones(3))
    sparse.grad = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (3,), check_invariants=True)
    one = [nn.Parameter(torch.ones(2))]
    return {
        "dense gradients": lambda: OneBitAdam([sparse]).step(),
        "torch.view_as_real": lambda: OneBitAdam([nn.Parameter(torch.ones(2, dtype=torch.complex64))]),
        "warmup must be": lambda: OneBitAdam(one, warmup=0),
        "or None": lambda: OneBitAdam(one, warmup="automatic"),
        "scale must be": lambda: OneBitAdam(one, scale="l3"),
        "lr must be": lambda: OneBitAdam(one, lr=-1.0),
        "betas must be": lambda: OneBitAdam(one, betas=(0.9, 1.0)),
        "eps must be": lambda: OneBitAdam(one, eps=0.0),
        "weight_decay must be": lambda: OneBitAdam(one, weight_decay=-1.0),
        "one device": lambda: OneBitAdam([*one, nn.Parameter(torch.ones(2, device="meta"))]),
        "python_reducer": lambda: exchange(OneBitAdam(one), (torch.ones(2), one[0])),
        "wrap the model first": lambda: OneBitAdam(one).attach(nn.Linear(2, 2)),
        "OneBitAdam's or AdamW's": lambda: OneBitAdam(one).load_state_dict(momentum()),
        "AdamW's: load": lambda: OneBitAdam(one).load_state_dict(torch.optim.SGD(one, 0.1).state_dict()),
        "got 'NoneType'": lambda: OneBitAdam(one).load_state_dict(None),
        r"got \['state'\]": lambda: OneBitAdam(one).load_state_dict({"state": {}}),
        "amsgrad": lambda: OneBitAdam(one).load_state_dict(torch.optim.AdamW(one, amsgrad=True).state_dict()),
        "must have shape": lambda: OneBitAdam(one).load_state_dict(OneBitAdam(parameters()[1:2]).state_dict()),
    }  # fmt: skip


def momentum():
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = torch.optim.SGD([p], momentum=0.9)
    optimizer.step()
    return {**optimizer.state_dict(), "param_groups": OneBitAdam([p]).state_dict()["param_groups"]}


@pytest.mark.parametrize("rule", refusals())
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_what_cannot_work_is_refused_with_its_remedy(rule):
    with pytest.raises(TrimtabError, match=rule):
        refusals()[rule]()


def test_what_is_refused_on_loading_changes_nothing():
    ps = parameters()
    optimizer = OneBitAdam(ps, warmup=2)
    drive(optimizer, ps, range(3))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(TrimtabError):
        optimizer.load_state_dict(OneBitAdam([nn.Parameter(torch.ones(3)) for _ in ps]).state_dict())
    after = optimizer.state_dict()
    assert all(same(before["state"][k].values(), after["state"][k].values()) for k in before["state"])


# In several


def two_groups(ps, **settings):
    groups = [{"params": ps[:2]}, {"params": ps[2:], "lr": 3e-2, "weight_decay": 0.2}]
    return OneBitAdam(groups, 1e-2, warmup=WARMUP, **settings)


def follow_the_recurrence(rank, num):
    """The parameters after every step, in FP64, and the second moments once frozen."""
    out = {}
    for scale in ("l2", "l1"):
        ps = parameters(torch.float64)
        optimizer = two_groups(ps, scale=scale)
        out[scale] = []
        for step in range(STEPS):
            drive(optimizer, ps, [step], rank)
            out[scale].append((copies(ps), copies(optimizer.state[p]["exp_avg_sq"] for p in ps)))
    return out


def warm_up(rank, num):
    ps, alone = parameters(), parameters()
    optimizer, adamw = OneBitAdam(ps, 1e-2), torch.optim.AdamW(alone, 1e-2)
    equal = []
    for step in range(STEPS):
        drive(optimizer, ps, [step], rank)
        for index, p in enumerate(alone):
            p.grad = torch.stack([gradient(p, step, r, index) for r in range(num)]).sum(0) / num
        adamw.step()
        equal.append(same(ps, alone))
    return equal


def stay_equal(rank, num):
    """Digests of parameters and momenta after every step; big enough for threads to split the work."""
    ps = parameters(shapes=((300, 200), (70_001,), (3,)))
    optimizer = OneBitAdam(ps, 1e-2, warmup=2)
    digests = []
    for step in range(5):
        drive(optimizer, ps, [step], rank)
        digests.append(digest([*ps, *(optimizer.state[p]["exp_avg"] for p in ps)]))
    return digests


def count(rank, num):
    """(calls, payload, sent) of warm-up steps, frozen steps, and a run with 15 % of warm-up."""
    shapes = ((128, 128), (20_000,), (200, 100))
    ps = parameters(shapes=shapes)
    optimizer, out = OneBitAdam(ps, 1e-2, warmup=3), {}
    with traffic() as run:
        for step in range(20):
            with traffic() as one:
                drive(optimizer, ps, [step], rank)
            out[step] = one.calls, one.payload, one.sent
    out["run"] = run.sent
    return out


def under_ddp(rank, num):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 4))

    def batch(step):
        generator = torch.Generator().manual_seed(10 * step + rank)
        return torch.randn(8, 12, generator=generator), torch.randn(8, 4, generator=generator)

    out = {"digests": [], "calls": [], "warm": [], "accumulated": [], "alone": []}
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    ddp, plain, accumulating = (DistributedDataParallel(build(), bucket_cap_mb=0.004) for _ in range(3))
    single = build()
    adamw = torch.optim.AdamW(plain.parameters(), **settings)
    optimizer, accumulator, own = (
        OneBitAdam(model.parameters(), warmup=WARMUP, **settings) for model in (ddp, accumulating, single)
    )
    optimizer.attach(ddp)
    accumulator.attach(accumulating)
    for step in range(STEPS):
        x, y = batch(step)
        random = torch.get_rng_state()
        with traffic() as counted:
            (ddp(x) - y).square().mean().backward()
            optimizer.step()
        assert torch.equal(random, torch.get_rng_state())
        out["calls"].append((counted.calls, counted.sent, sorted(counted.by_kind)))
        (plain(x) - y).square().mean().backward()
        adamw.step()
        (single(x) - y).square().mean().backward()
        own.step()
        with accumulating.no_sync():
            ((accumulating(x[:4]) - y[:4]).square().mean() / 2).backward()
        ((accumulating(x[4:]) - y[4:]).square().mean() / 2).backward()
        accumulator.step()
        for one in (optimizer, adamw, accumulator, own):
            one.zero_grad()
        out["digests"].append(digest(ddp.parameters()))
        out["warm"].append(same(ddp.parameters(), plain.parameters()))
        for name, other in (("accumulated", accumulating), ("alone", single)):
            pairs = zip(copies(ddp.parameters()), copies(other.parameters()), strict=True)
            out[name].append(max(float((p - q).abs().max()) for p, q in pairs))
    out["sizes"] = [p.numel() for p in ddp.parameters()]
    return out


def checkpoint(rank, num):
    """Save in mid-run; go on exactly, on half of the ranks, and on one."""
    ps = parameters()
    optimizer = two_groups(ps)
    drive(optimizer, ps, range(7), rank)
    true = copies(optimizer._errors.residuals())
    errors = copies(optimizer._errors[1:])
    state, exact = through_a_file(optimizer.state_dict()), through_a_file(optimizer.state_dict(exact=True))
    saved, frozen = copies(ps), copies(optimizer.state[p]["exp_avg_sq"] for p in ps)
    out = {"state": digest(t for entry in state["state"].values() for t in entry.values()), "true": true}
    drive(optimizer, ps, range(7, STEPS), rank)

    again = [nn.Parameter(p.clone()) for p in saved]
    resumed = two_groups(again)
    resumed.load_state_dict(exact)
    out["exact errors"] = same(resumed._errors[1:], errors)
    drive(resumed, again, range(7, STEPS), rank)
    out["exact"] = same(ps, again) and same(optimizer._errors[1:], resumed._errors[1:])

    half = dist.new_group(list(range(num // 2)))
    groups = [dist.new_group([r]) for r in range(num)]
    out["loaded"] = {}
    for name, group in (("all", None), ("half", half), ("one", groups[rank])):
        if group is half and rank >= num // 2:
            continue
        fewer = [nn.Parameter(p.clone()) for p in saved]
        loaded = two_groups(fewer, group=group)
        loaded.load_state_dict(state)
        resaved = loaded.state_dict()
        residuals = [resaved["state"][k]["residual"].reshape(-1) for k in range(len(fewer))]
        variances = [loaded.state[p]["exp_avg_sq"] for p in fewer]
        momenta = copies(loaded.state[p]["exp_avg"] for p in fewer)
        drive(loaded, fewer, [7], rank)
        due = [
            0.9 * m + 0.1 * gradient(p, 7, rank, k) + r.view(p.shape)
            for k, (m, p, r) in enumerate(zip(momenta, fewer, residuals, strict=True))
        ]  # with one rank: all that had not been sent comes now
        flushed = all(torch.allclose(loaded.state[p]["exp_avg"], d, atol=1e-6) for p, d in zip(fewer, due, strict=True))
        left = [] if loaded._errors is None else copies(loaded._errors.residuals(group))
        out["loaded"][name] = {
            "residuals": residuals, "v": same(variances, frozen), "flushed": flushed, "left": left,
            "pending": any("residual" in loaded.state[p] for p in fewer), "digest": digest(fewer),
            "due": due, "m": copies(loaded.state[p]["exp_avg"] for p in fewer),
        }  # fmt: skip
    try:
        out["mismatch"] = ""
        two_groups(parameters(), group=groups[rank]).load_state_dict(exact)
    except TrimtabError as error:
        out["mismatch"] = str(error)
    try:
        copy.deepcopy(two_groups(parameters(), group=groups[rank]))
    except TrimtabError as error:
        out["copied"] = str(error)
    optimizer._group = groups[rank]
    try:
        drive(optimizer, ps, [STEPS], rank)
    except TrimtabError as error:
        out["changed"] = str(error)
    return out


def poison(rank, num):
    out = {}
    for when, how in ((2, "nan"), (2, "inf"), (7, "nan"), (7, "inf"), (7, "found_inf"), (2, "scaler"), (7, "scaler")):
        ps = parameters()
        optimizer = OneBitAdam(ps, 1e-2, warmup=WARMUP)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if how == "scaler" else None
        drive(optimizer, ps, range(when), rank)
        kept = [*copies(ps), *copies(optimizer.state[p]["exp_avg"] for p in ps)]
        errors = [] if optimizer._errors is None else copies(optimizer._errors[1:])
        for index, p in enumerate(ps):
            p.grad = gradient(p, when, rank, index) * (4 if scaler else 1)
        if rank == 1:
            if how == "found_inf":
                optimizer.found_inf = torch.tensor(1.0)
            else:
                ps[0].grad[0, 0] = math.inf if scaler else float(how)
        if scaler:
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        if how == "found_inf" and rank == 1:
            del optimizer.found_inf
        now = [*ps, *(optimizer.state[p]["exp_avg"] for p in ps)]
        unchanged = same(now, kept) and same([] if not errors else optimizer._errors[1:], errors)
        drive(optimizer, ps, range(when + 1, STEPS), rank)
        out[when, how] = unchanged, digest(ps), not same(ps[:1], kept[:1])
    return out


def one_wants_no_step(rank, num):
    """Under DDP rank 1 wants no step, with a group that stays warm beside one that is frozen, and in warm-up."""
    out = {}
    for when, limit in ((4, 2), (1, 3)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        ddp = DistributedDataParallel(model)
        groups = [{"params": model[0].parameters(), "warmup": None}, {"params": model[1].parameters()}]
        optimizer = OneBitAdam(groups, 1e-2, warmup=limit)
        optimizer.attach(ddp)
        for step in range(6):
            optimizer.zero_grad()
            ddp(torch.randn(4, 6, generator=torch.Generator().manual_seed(9 * step + rank))).square().mean().backward()
            kept = copies(model.parameters())
            if step == when and rank == 1:
                optimizer.found_inf = torch.tensor(1.0)
            optimizer.step()
            if step == when:
                out[when] = same(model.parameters(), kept)
            if hasattr(optimizer, "found_inf"):
                del optimizer.found_inf
        out["digest", when] = digest(model.parameters())
    return out


def scaled(rank, num):
    """A loss scale that finds nothing is divided out."""
    ps, plain = parameters(), parameters()
    optimizer, same_one = two_groups(ps), two_groups(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(6):
        drive(same_one, plain, [step], rank)
        scaler.scale(torch.ones(()))
        for index, p in enumerate(ps):
            p.grad = gradient(p, step, rank, index) * 8
        scaler.step(optimizer)
        scaler.update()
    return same(ps, plain)


def miss(rank, num):
    """Gradients that are absent on rank 1, or everywhere, in both phases."""
    out = {}
    for when in (1, 7):
        ps, zeros = parameters(), parameters()
        optimizer, other = two_groups(ps), two_groups(zeros)
        for step in range(STEPS):
            for one, params in ((optimizer, ps), (other, zeros)):
                for index, p in enumerate(params):
                    p.grad = gradient(p, step, rank, index)
                if step == when:
                    if rank == 1:
                        params[0].grad = None if params is ps else torch.zeros_like(params[0])
                    params[1].grad = None
                before = params[1].detach().clone(), one.state[params[1]]["exp_avg"].clone()
                one.step()
                if step == when:
                    stood = same((params[1], one.state[params[1]]["exp_avg"]), before)
                    out.setdefault(("stood", when), []).append(stood)
        out["zero", when] = same(ps, zeros)
        out["digest", when] = digest(ps)
    return out


def join_late(rank, num):
    """A group added after the freeze warms up by itself, and the errors of the others stay."""
    ps, alone, late = parameters(), parameters(), nn.Parameter(torch.ones(4, 5))
    optimizer, other = two_groups(ps), two_groups(alone)
    frozen = []
    for step in range(STEPS + 4):
        if step == 6:
            optimizer.add_param_group({"params": [late]})
        late.grad = gradient(late, step, rank, 9)
        drive(optimizer, ps, [step], rank)
        drive(other, alone, [step], rank)
        frozen.append(late in optimizer.frozen())
    mine = [pair for pair, p in zip(optimizer._errors.pieces(), optimizer._compressed, strict=True) if p is not late]
    kept = all(same(a, b) for a, b in zip(mine, other._errors.pieces(), strict=True))
    return {"same": same(ps, alone), "frozen": frozen, "kept": kept, "late": digest([late]), "errors": len(mine)}


def settle(rank, num):
    """What `auto` decides where ranks would add up differently."""
    p = nn.Parameter(torch.zeros(20_000))
    optimizer = OneBitAdam([p], warmup="auto", betas=(0.9, 0.8))
    own = mock.patch.object(onebit_adam, "sum_of_variance", lambda *args: sum_of_variance(*args) * (1 + rank))
    with own:
        drive(optimizer, [p], range(20), rank)
    return optimizer.param_groups[0]["freeze"], optimizer.param_groups[0]["seen"], digest([p])


def straggle(rank, num):
    ps = parameters(shapes=((3, 4), (5,)))
    optimizer = OneBitAdam(ps, warmup=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NoEffectWarning)
        for step in range(8):
            drive(optimizer, ps[:1], [step], rank)
    return [str(one.message) for one in caught if one.category is NoEffectWarning]


def disagree(rank, num):
    """What each rank is told when rank 1 differs."""

    def told(**settings):
        sides = settings.pop("sides", (4, 5))
        optimizer = OneBitAdam(parameters(shapes=((3, 4), sides)), **settings)
        try:
            drive(optimizer, optimizer.param_groups[0]["params"], [0], rank)
        except TrimtabError as error:
            return str(error)

    odd = rank == 1
    return [told(warmup=5 if odd else 4), told(sides=(5, 4) if odd else (4, 5)), told(scale="l1" if odd else "l2")]


def refuse_shards(rank, num):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    p = nn.Parameter(distribute_tensor(torch.ones(8, 2), init_device_mesh("cpu", (num,)), [Shard(0)]))
    out = []
    for attempt in (lambda: OneBitAdam([p]), lambda: attach_other(num), attach_twice):
        try:
            attempt()
        except TrimtabError as error:
            out.append(str(error))
    return out


def attach_twice():
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    for _ in range(2):
        OneBitAdam(ddp.parameters()).attach(ddp)


def attach_other(num):
    model = nn.Linear(2, 2)
    alone = [dist.new_group([rank]) for rank in range(num)]
    OneBitAdam(model.parameters(), group=alone[dist.get_rank()]).attach(DistributedDataParallel(model))


def measure(rank):
    torch.set_num_threads(1 + rank)
    num = dist.get_world_size()
    parts = (follow_the_recurrence, warm_up, stay_equal, count, under_ddp, checkpoint, poison, one_wants_no_step,
             scaled, miss, join_late, settle, straggle, disagree, refuse_shards)  # fmt: skip
    return {part.__name__: part(rank, num) for part in parts}


@pytest.fixture(scope="module", params=[2, 3, 4])
def world(request, tmp_path_factory):
    return in_ranks(request.param, measure, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("scale", ["l2", "l1"])
def test_it_is_the_dense_simulation(world, scale):
    num, ps = len(world), parameters(torch.float64)
    settings = [{"lr": 1e-2}] * 2 + [{"lr": 3e-2, "weight_decay": 0.2}] * 3
    simulated = [
        reference.Adam(p.detach(), num, warmup=WARMUP, kind=scale, **s) for p, s in zip(ps, settings, strict=True)
    ]
    for step in range(STEPS):
        for index, (p, one) in enumerate(zip(ps, simulated, strict=True)):
            one.step([gradient(p, step, rank, index) for rank in range(num)])
            for rank in world:
                got = rank["follow_the_recurrence"][scale][step][0][index]
                np.testing.assert_allclose(got.numpy().reshape(-1), one.p, rtol=0, atol=1e-9)


def test_the_second_moment_is_frozen_to_the_bit(world):
    for rank in world:
        seen = [variances for _, variances in rank["follow_the_recurrence"]["l2"]]
        assert all(same(later, seen[WARMUP - 1]) for later in seen[WARMUP:])
        assert not same(seen[WARMUP - 1], seen[WARMUP - 2])


def test_warm_up_is_adamw_on_the_mean_bit_by_bit(world):
    assert all(rank["warm_up"] == [True] * STEPS for rank in world)


def test_all_ranks_have_the_same_bits_after_every_step_whatever_their_threads(world):
    assert len({tuple(rank["stay_equal"]) for rank in world}) == 1
    assert len({tuple(rank["under_ddp"]["digests"]) for rank in world}) == 1


def test_bytes_are_those_of_the_formula(world):
    num, sizes = len(world), (128 * 128, 20_000, 200 * 100)
    row = sum(math.ceil(n / (8 * num)) + 4 for n in sizes)
    assert row == Layout(sizes, num).row_bytes
    dense = 2 * (num - 1) / num * 4 * sum(sizes)
    for rank in world:
        seen = rank["count"]
        assert seen[0][:2] == (2, 4 * (sum(sizes) + len(sizes)) + 4 * 8)  # and whether all mean the same
        for step in (1, 2):
            assert seen[step][:2] == (1, 4 * (sum(sizes) + len(sizes)))
        for step in range(3, 20):
            assert seen[step] == (2, (num + 1) * row, 2 * (num - 1) * row)
            assert seen[step][2] * 30 <= dense
        assert seen["run"] * 5 <= 20 * dense  # three warm-up steps of twenty


def test_ddp_averages_in_warm_up_and_sends_nothing_afterwards(world):
    num = len(world)
    for rank in world:
        seen = rank["under_ddp"]
        assert seen["warm"] == [True] * WARMUP + [False] * (STEPS - WARMUP)
        row = sum(math.ceil(n / (8 * num)) + 4 for n in seen["sizes"])
        dense = 2 * (num - 1) / num * 4 * (sum(seen["sizes"]) + 1)  # and whether a rank wants no step
        assert seen["calls"][2][1:] == (dense, ["all_reduce"])
        assert seen["calls"][WARMUP:] == [(2, 2 * (num - 1) * row, ["all_gather", "all_to_all"])] * (STEPS - WARMUP)


def test_accumulation_under_no_sync_is_one_large_batch(world):
    for rank in world:
        assert max(rank["under_ddp"]["accumulated"][: WARMUP + 1]) < 1e-5
        assert max(rank["under_ddp"]["alone"][: WARMUP + 1]) < 1e-5
        assert max(rank["under_ddp"]["accumulated"]) < 0.05  # a sign that flips at zero moves a step
        assert max(rank["under_ddp"]["alone"]) < 0.05


def test_a_checkpoint_is_the_same_on_every_rank_and_keeps_what_was_not_sent(world):
    assert len({rank["checkpoint"]["state"] for rank in world}) == 1
    for rank in world:
        seen = rank["checkpoint"]
        for name, loaded in seen["loaded"].items():
            assert loaded["v"], name
            for got, true in zip(loaded["residuals"], seen["true"], strict=True):
                torch.testing.assert_close(got, true, rtol=1e-6, atol=1e-8)


def test_fewer_ranks_go_on_from_it(world):
    num = len(world)
    for name, members in (("all", world), ("half", world[: num // 2])):
        seen = [rank["checkpoint"]["loaded"][name] for rank in members]
        assert len({one["digest"] for one in seen}) == 1
        if len(members) == 1:
            continue
        for k in range(len(SHAPES)):  # out + mean e' + d' = mean m + mean e + d: each rank's due is its m + e
            due = torch.stack([one["due"][k] for one in seen]).mean(0)
            got = seen[0]["m"][k] + seen[0]["left"][k].view(due.shape)
            torch.testing.assert_close(got, due, rtol=1e-5, atol=1e-6)
            assert seen[0]["left"][k].any() or due.numel() < 2
    for rank in world:
        alone = rank["checkpoint"]["loaded"]["one"]
        assert alone["flushed"]
        assert not alone["pending"]


def test_exact_errors_resume_bit_by_bit_on_the_same_ranks_only(world):
    for rank in world:
        seen = rank["checkpoint"]
        assert seen["exact errors"]
        assert seen["exact"]
        assert "must be those of rank 0 of 1" in seen["mismatch"]


def test_the_number_of_ranks_cannot_change_in_a_run(world):
    for rank in world:
        assert "cannot change in a run" in rank["checkpoint"]["changed"]
        assert "use state_dict()" in rank["checkpoint"]["copied"]


def test_what_is_not_finite_on_one_rank_is_skipped_by_all(world):
    for case in world[0]["poison"]:
        assert len({rank["poison"][case][1] for rank in world}) == 1, case
        assert all(rank["poison"][case][0] for rank in world), case
        assert all(rank["poison"][case][2] for rank in world), case


def test_a_rank_that_wants_no_step_under_ddp_stops_the_others_too(world):
    for when in (1, 4):
        assert len({rank["one_wants_no_step"]["digest", when] for rank in world}) == 1
        assert all(rank["one_wants_no_step"][when] for rank in world)


def test_a_loss_scale_is_divided_out(world):
    assert all(rank["scaled"] for rank in world)


def test_an_absent_gradient_is_zero_if_another_rank_has_one_and_else_passed_over(world):
    for when in (1, 7):
        assert len({rank["miss"]["digest", when] for rank in world}) == 1
        for rank in world:
            assert rank["miss"]["zero", when]
            assert rank["miss"]["stood", when] == [True, True]


def test_a_group_added_after_the_freeze_has_a_warm_up_of_its_own(world):
    assert len({rank["join_late"]["late"] for rank in world}) == 1
    for rank in world:
        seen = rank["join_late"]
        assert seen["same"]
        assert seen["kept"]
        assert seen["errors"] == len(SHAPES)
        assert seen["frozen"] == [False] * (6 + WARMUP - 1) + [True] * (STEPS + 4 - 6 - WARMUP + 1)


def test_all_ranks_freeze_at_the_same_step(world):
    assert len({(freeze, tuple(seen), bits) for freeze, seen, bits in (rank["settle"] for rank in world)}) == 1
    assert world[0]["settle"][0] == 10


def test_a_parameter_that_keeps_the_exchange_dense_is_named_once(world):
    for rank in world:
        assert len(rank["straggle"]) == 1
        assert "(5,)" in rank["straggle"][0]
        assert "requires_grad_(False)" in rank["straggle"][0]


def test_ranks_that_were_given_other_things_are_told_which_and_where(world):
    for number, rank in enumerate(world):
        where = 0 if number == 1 else 1
        for told, name in zip(rank["disagree"], ("warmup", "list of shapes", "scale"), strict=True):
            assert f"OneBitAdam's {name} must be the same on all ranks" in told
            assert f"another on rank {where}" in told
    assert "got [5] here" in world[1]["disagree"][0]


def test_shards_and_other_ranks_are_refused(world):
    for rank in world:
        assert "sharded" in rank["refuse_shards"][0]
        assert "same process group" in rank["refuse_shards"][1]
        assert "one hook, got one that has exchange" in rank["refuse_shards"][2]


# Learning


TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long().clamp(max=127)
LENGTH, WARM, BETAS = 240, 60, (0.9, 0.98)


def build():
    from trimtab.lab.model import Decoder, ModelConfig

    torch.manual_seed(0)
    return Decoder(ModelConfig.size("micro", vocab_size=128, width=32, ffn=88, heads=2, layers=1, max_seq=32))


def windows(text, key, num):
    starts = torch.randint(len(text) - 33, (num,), generator=torch.Generator().manual_seed(key))
    rows = torch.stack([text[start : start + 33] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def rate(step):
    return 5e-3 * min(1.0, (step + 1) / 20) * (1 - step / LENGTH)


@torch.no_grad()
def held_out(model):
    return float(np.mean([model(*windows(TEXT[80_000:], k, 32)).loss.item() for k in range(8)]))


def learn(rank):
    losses = {}
    for arm in ("adamw", "1-bit", "without feedback"):
        model = build()
        optimizer = OneBitAdam(model.parameters(), betas=BETAS, warmup=None if arm == "adamw" else WARM)
        for step in range(LENGTH):
            optimizer.param_groups[0]["lr"] = rate(step)
            optimizer.zero_grad()
            model(*windows(TEXT[:80_000], 10 * step + rank, 8)).loss.backward()
            optimizer.step()
            if arm == "without feedback" and optimizer._errors is not None:
                optimizer._errors.worker.zero_()
                optimizer._errors.server.zero_()
        losses[arm] = held_out(model)
    return losses


def learn_naively():
    model = build()
    naive = [reference.NaiveAdam(p.detach(), 2, betas=BETAS) for p in model.parameters()]
    for step in range(LENGTH):
        grads = []
        for rank in range(2):
            model.zero_grad()
            model(*windows(TEXT[:80_000], 10 * step + rank, 8)).loss.backward()
            grads.append([p.grad for p in model.parameters()])
        for k, (p, one) in enumerate(zip(model.parameters(), naive, strict=True)):
            one.lr = rate(step)
            one.step([g[k] for g in grads])
            p.data.copy_(torch.from_numpy(one.p).view(p.shape))
    return held_out(model)


def test_it_learns_like_adamw_and_only_with_feedback_and_a_frozen_second_moment(tmp_path):
    losses = in_ranks(2, learn, tmp_path)[0]
    losses["naive"] = learn_naively()
    assert losses["1-bit"] <= 1.01 * losses["adamw"], losses
    assert losses["without feedback"] >= 1.15 * losses["adamw"], losses
    assert losses["naive"] >= 1.3 * losses["adamw"], losses
