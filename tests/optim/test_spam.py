# SPDX-License-Identifier: Apache-2.0
"""SPAM against a letter-by-letter version, against pytorch_optimizer, and against the numbers of its specification;
what every optimizer must do is in `tests/contracts/test_optimizer_contract.py`."""

import copy
import math
import os
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import spam as reference
from torch import nn

from trimtab.errors import NoEffectWarning, TrimtabError
from trimtab.optim import kernels, sparse
from trimtab.optim.kernels import Coefficients, Work, spam_
from trimtab.optim.spam import SPAM, choose, clock

SHORT = {"lr": 1e-2, "weight_decay": 0.1, "threshold": 30.0, "reset_every": 40, "warmup": 12, "grace": 5}
SEMANTICS = {True: reference.Published, False: reference.Decided}


def parameter(*shape, dtype=torch.float32):
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64).to(dtype))


def gradients(steps, size, dtype=torch.float64, spikes=0.05):
    """Noise with spikes; coordinate 1 sleeps at first and coordinate 2 now and then."""
    rows = torch.randn(steps, size, dtype=torch.float64)
    rows *= torch.where(torch.rand(steps, size) < spikes, 1e3, 1.0)
    rows[: steps // 2, 1] = 0
    rows[::3, 2] = 0
    return rows.to(dtype)


def run(optimizer, p, rows):
    """Feed gradients; returns the parameter after each step."""
    seen = []
    for g in rows:
        p.grad = g.clone().view_as(p)
        optimizer.step()
        seen.append(p.detach().clone())
    return torch.stack(seen)


# The clock


@pytest.mark.parametrize(
    ("k", "scale"),
    [(0, 0.01), (1, 0.010107), (2, 0.010428), (3, 0.010964), (10, 0.020675), (75, 0.499851), (149, 0.999572), (150, 1)],
)
def test_the_re_warm_up_has_the_specified_values(k, scale):
    for resets in (1, 2, 7):
        assert clock(500 * resets + k, 500, 150, 20).scale == pytest.approx(scale, abs=1e-6)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 20), st.booleans())
def test_the_clock_equals_counters_that_run_beside(warmup, grace, more, literal):
    period = warmup + grace + more
    since, age, resets = None, 0, 0
    for t in range(1, 4 * period):
        age += 1
        since = None if since is None else since + 1
        if t % period == 0:
            since, resets, age = 0, resets + 1, age if literal else 1
        now = clock(t, period, warmup, grace, literal)
        assert now.reset == (since == 0)
        assert now.num_resets == resets
        assert now.age == age
        assert now.clips == ((t if since is None else since) >= grace)
        assert (now.scale < 1) == (since is not None and since < warmup)


def test_without_a_period_the_clock_never_resets():
    far = clock(10**9, None, 150, 20)
    assert far == (False, 1.0, True, 10**9, 0)


# The method


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("literal", [False, True])
def test_the_trajectory_is_the_reference_s_several_resets_deep(literal, foreach):
    p = parameter(7, dtype=torch.float64)
    slow = SEMANTICS[literal](p.tolist(), **SHORT)
    rows = gradients(130, 7)
    seen = run(SPAM([p], reference=literal, foreach=foreach, **SHORT), p, rows)
    wanted = torch.tensor([list(slow.step(g)) for g in rows.tolist()], dtype=torch.float64)
    torch.testing.assert_close(seen, wanted, rtol=1e-12, atol=1e-12)


def test_the_two_semantics_are_told_apart_by_that_data():
    rows, start = gradients(130, 7).tolist(), [1.0] * 7
    published, decided = reference.Published(start, **SHORT), reference.Decided(start, **SHORT)
    ends = [[one.step(g) for g in rows][-1] for one in (published, decided)]
    assert all(abs(a - b) > 1e-4 for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("literal", [False, True])
def test_a_spike_is_cut_to_the_threshold(literal):
    p = parameter(32, dtype=torch.float64)
    optimizer = SPAM([p], reference=literal)
    rows = gradients(700, 32, spikes=0.0)
    rows[699, 5] = -1e6
    run(optimizer, p, rows[:699])
    before = {name: optimizer.state[p][name].clone() for name in ("exp_avg", "exp_avg_sq")}
    run(optimizer, p, rows[699:])
    v, m = optimizer.state[p]["exp_avg_sq"], optimizer.state[p]["exp_avg"]
    assert v[5] / before["exp_avg_sq"][5] == pytest.approx(0.999 + 0.001 * 5000, rel=1e-12)  # 5.999
    bound = -math.sqrt(5000 * before["exp_avg_sq"][5].item())
    assert m[5].item() == pytest.approx(0.9 * before["exp_avg"][5].item() + 0.1 * bound, rel=1e-12)
    assert v[5] < 10
    assert (v[torch.arange(32) != 5] < 3).all()


def test_an_infinite_threshold_cuts_nothing():
    p = parameter(32, dtype=torch.float64)
    optimizer = SPAM([p], threshold=math.inf)
    rows = gradients(700, 32, spikes=0.0)
    rows[699, 5] = -1e6
    run(optimizer, p, rows)
    assert optimizer.state[p]["exp_avg_sq"][5] == pytest.approx(1e9, rel=1e-3)


def test_an_infinite_gradient_is_a_spike_too():
    p = parameter(3)
    optimizer = SPAM([p], grace=2)
    run(optimizer, p, torch.ones(5, 3))
    run(optimizer, p, torch.tensor([[1.0, math.inf, -math.inf]]))
    assert p.isfinite().all()
    v = 1 - 0.999**5
    wanted = [0.001, *[0.001 * 5000 * v] * 2]
    torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"], torch.tensor(wanted) + 0.999 * v)
    assert (optimizer.state[p]["exp_avg"].sign() == torch.tensor([1, 1, -1])).all()


@pytest.mark.parametrize("size", [1e-15, 1e18])
def test_the_cut_neither_overflows_nor_vanishes_where_v_does_not(size):
    p = parameter(2)
    optimizer = SPAM([p], reset_every=None)
    run(optimizer, p, torch.full((400, 2), size))
    before = optimizer.state[p]["exp_avg_sq"].clone()
    run(optimizer, p, torch.tensor([[size, 100 * size]]))
    assert p.isfinite().all()
    assert optimizer.state[p]["exp_avg_sq"][1] / before[1] == pytest.approx(5.999, rel=1e-4)


@pytest.mark.parametrize(
    ("literal", "step", "size"), [(False, 500, 1.0), (False, 1000, 1.0), (True, 500, 1.984), (True, 1000, 2.514)]
)
def test_the_first_update_after_a_reset(literal, step, size):
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    seen = run(SPAM([p], eps=1e-15, reference=literal), p, torch.ones(step, 1, dtype=torch.float64))
    assert seen[-2] - seen[-1] == pytest.approx(size * 1e-3 * 0.01, rel=1e-3 if literal else 1e-9)


def test_decay_needs_no_gradient_and_is_not_scaled_by_the_re_warm_up():
    p = nn.Parameter(torch.ones(4, dtype=torch.float64))
    run(SPAM([p], weight_decay=0.5, reset_every=10, warmup=5, grace=2), p, torch.zeros(30, 4, dtype=torch.float64))
    torch.testing.assert_close(p.detach(), torch.full((4,), (1 - 0.5e-3) ** 30, dtype=torch.float64))


@pytest.mark.parametrize(("literal", "moves"), [(False, True), (True, False)])
def test_a_coordinate_that_slept_through_the_grace_steps_wakes_up(literal, moves):
    p = nn.Parameter(torch.zeros(2))
    rows = torch.ones(430, 2)
    rows[:30, 0] = 0
    seen = run(SPAM([p], reference=literal), p, rows)
    assert seen[-1, 1] < -0.4
    assert (seen[-1, 0] < -0.35) if moves else (seen[-1, 0] == 0)


def test_without_spikes_and_resets_it_is_adamw():
    for dtype, close in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        p = parameter(50, dtype=dtype)
        q = copy.deepcopy(p)
        rows = gradients(100, 50, dtype)
        ours = run(SPAM([p], lr=1e-2, eps=1e-4, threshold=math.inf, reset_every=None), p, rows)
        theirs = run(torch.optim.AdamW([q], lr=1e-2, eps=1e-4, weight_decay=0.0), q, rows)
        torch.testing.assert_close(ours, theirs, rtol=close, atol=close)


@pytest.mark.parametrize("shape", [(60,), (6, 10)])
def test_reference_equals_pytorch_optimizer(monkeypatch, shape):
    theirs = pytest.importorskip("pytorch_optimizer.optimizer.spam")

    def shifted(self, k):
        """Their warm-up is one step ahead; this is the same cosine at k itself."""
        return 0.99 * (1 + math.cos(math.pi * k / (self.t_max + 1))) / 2 if k < self.t_max else 0.0

    monkeypatch.setattr(theirs.CosineDecay, "get_death_rate", shifted)
    p = parameter(*shape)
    q = copy.deepcopy(p)
    rows = gradients(220, 60, torch.float32)
    ours = run(SPAM([p], lr=1e-2, threshold=30.0, reset_every=60, warmup=20, grace=7, reference=True), p, rows)
    other = theirs.SPAM([q], lr=1e-2, threshold=30.0, update_proj_gap=60, warmup_epoch=20, grad_accu_steps=7)
    torch.testing.assert_close(ours, run(other, q, rows), rtol=1e-6, atol=1e-6)


# The ways to carry it out


PIECE = 1 << 12


def many(dtype, seed=0):
    """Parameters of all layouts with gradients for a few steps, some missing."""
    torch.manual_seed(seed)
    shapes = [(PIECE + 37,), (33, 64), (), (5, 4, 3), (64,), (64,)]
    ps = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    ps.append(nn.Parameter(torch.randn(70, 71).to(dtype).t()))  # larger than a piece, too
    ps.append(nn.Parameter(torch.randn(70, 140).to(dtype)[:, ::2]))
    grads = [[torch.randn(p.shape).to(dtype) for p in ps] for _ in range(12)]
    for step in grads[5:]:
        step[0][PIECE + 3] = step[1][7, 7] = step[6][70, 3] = step[7][9, 69] = 1e4
    grads[4][4] = grads[9][4] = grads[7][1] = None
    return ps, grads


def drive(optimizer, ps, grads):
    for step in grads:
        for p, g in zip(ps, step, strict=True):
            p.grad = g
        optimizer.step()
    return [p.detach() for p in ps] + [optimizer.state[p][name] for p in ps for name in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_loop_and_foreach_have_the_same_bits(dtype, literal, monkeypatch):
    monkeypatch.setattr(kernels, "CHUNK", PIECE)
    results = []
    for foreach in (None, False, True):
        ps, grads = many(dtype)
        groups = [{"params": ps[:3]}, {"params": ps[3:], "lr": 3e-2, "weight_decay": 0.1}]
        settings = {"reset_every": 8, "warmup": 3, "grace": 3, "threshold": 50.0, "lr": 1e-2}
        results.append(drive(SPAM(groups, reference=literal, foreach=foreach, **settings), ps, grads))
    for default, loop, foreach in zip(*results, strict=True):
        assert torch.equal(loop, foreach)
        assert torch.equal(loop, default)


def test_pieces_change_no_bit(monkeypatch):
    whole, pieces = [], []
    for size, out in ((1 << 16, whole), (1 << 10, pieces)):
        monkeypatch.setattr(kernels, "CHUNK", size)
        p, g, m = (torch.randn(50_000, generator=torch.Generator().manual_seed(i)) for i in range(3))
        g[40_000] = 1e5
        v = m.square()
        kernels.loop_([Work(p, g, m, v, Coefficients(False, 0.9, 0.999, 1e-3, 1e-6, 5000.0, False, 0.1))])
        out += [p, m, v]
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


def test_narrow_parameters_have_wide_moments_and_are_rounded_once():
    narrow = parameter(200, dtype=torch.bfloat16)
    wide = nn.Parameter(narrow.detach().float())
    optimizers = [SPAM([p], **SHORT) for p in (narrow, wide)]
    for g in gradients(90, 200, torch.bfloat16):
        with torch.no_grad():
            wide.copy_(narrow)  # so that each step starts from the same values
        narrow.grad, wide.grad = g, g.float()
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(narrow, wide.bfloat16())
    for name in ("exp_avg", "exp_avg_sq"):
        assert optimizers[0].state[narrow][name].dtype == torch.float32
        assert torch.equal(optimizers[0].state[narrow][name], optimizers[1].state[wide][name])


def test_the_second_moment_of_a_narrow_parameter_falls():
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = SPAM([p])
    run(optimizer, p, torch.ones(1, 4, dtype=torch.bfloat16))
    run(optimizer, p, torch.zeros(200, 4, dtype=torch.bfloat16))
    torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"], torch.full((4,), 0.001 * 0.999**200))
    assert torch.tensor(0.001, dtype=torch.bfloat16) * 0.999 == torch.tensor(0.001, dtype=torch.bfloat16)  # the reason


# State


def test_the_state_is_complete_before_the_first_step():
    p, frozen = parameter(3, 4), nn.Parameter(torch.zeros(2), requires_grad=False)
    state = SPAM([p, frozen]).state_dict()["state"]
    assert list(state) == [0]
    assert {name: value.shape for name, value in state[0].items()} == {
        "step": (),
        "exp_avg": (3, 4),
        "exp_avg_sq": (3, 4),
    }
    assert state[0]["step"].dtype == torch.int64


def test_loading_copies_and_leaves_the_caller_s_dict_alone():
    p, q = parameter(4), parameter(4)
    one, two = SPAM([p]), SPAM([q])
    run(one, p, torch.ones(3, 4))
    saved = one.state_dict()
    kept = copy.deepcopy(saved)
    two.load_state_dict(saved)
    run(two, q, torch.ones(3, 4))
    assert saved["param_groups"] == kept["param_groups"]
    assert all(torch.equal(saved["state"][0][name], kept["state"][0][name]) for name in kept["state"][0])
    assert two.state[q]["step"] == 6


def test_hooks_around_loading_see_the_final_state():
    p = parameter(4, dtype=torch.bfloat16)
    optimizer = SPAM([p])
    run(optimizer, p, torch.full((3, 4), 0.3, dtype=torch.bfloat16))
    saved, seen = copy.deepcopy(optimizer.state_dict()), []

    def double(_, state_dict):
        state = {0: state_dict["state"][0] | {"step": torch.tensor(40)}}
        return state_dict | {"state": state}

    optimizer.register_load_state_dict_pre_hook(double)
    optimizer.register_load_state_dict_post_hook(lambda one: seen.append(one.state[p]["exp_avg"].clone()))
    optimizer.load_state_dict(saved)
    assert optimizer.state[p]["step"] == 40
    assert torch.equal(seen[0], saved["state"][0]["exp_avg"])
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


def test_how_the_arithmetic_is_done_is_not_part_of_the_state():
    p, q = parameter(4), parameter(4)
    saved = SPAM([p], fused=True, lr=0.5).state_dict()  # as if it came from a GPU
    optimizer = SPAM([q], foreach=True)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert (optimizer.param_groups[0]["foreach"], optimizer.param_groups[0]["fused"]) == (True, None)
    assert optimizer.state[q]["step"].dtype == torch.int64
    run(optimizer, q, torch.ones(1, 4))


def test_a_state_of_another_optimizer_is_refused():
    p = parameter(4)
    other = torch.optim.AdamW([p])
    run(other, p, torch.ones(1, 4))
    with pytest.raises(TrimtabError, match="another optimizer"):
        SPAM([p]).load_state_dict(other.state_dict())


def test_a_state_of_another_shape_is_refused():
    saved = SPAM([parameter(4)]).state_dict()
    with pytest.raises(TrimtabError, match=r"exp_avg of parameter 0 must have shape \(5,\), got \(4,\)"):
        SPAM([parameter(5)]).load_state_dict(saved)


@pytest.mark.parametrize("other", [torch.optim.AdamW, SPAM])
def test_a_refused_state_has_changed_nothing(other):
    p, q = parameter(4), parameter(5)
    theirs, mine, twin = other([q], lr=0.5), SPAM([p]), copy.deepcopy(p)
    run(theirs, q, torch.ones(3, 5))
    run(mine, p, torch.ones(1, 4))
    with pytest.raises(TrimtabError):
        mine.load_state_dict(theirs.state_dict())
    run(mine, p, torch.ones(1, 4))
    run(SPAM([twin]), twin, torch.ones(2, 4))
    assert torch.equal(p, twin)


def test_the_state_follows_a_parameter_that_moves():
    module = nn.Linear(3, 2, device="meta")
    optimizer = SPAM(module.parameters())
    assert optimizer.state[module.weight]["exp_avg"].is_meta
    module = module.to_empty(device="cpu")
    nn.init.zeros_(module.weight)
    module.weight.grad = torch.ones(2, 3)
    optimizer.param_groups[0]["params"][0] = module.weight  # to_empty replaces parameters
    optimizer.step()
    assert (module.weight < 0).all()
    p = parameter(3)
    optimizer = SPAM([p])
    run(optimizer, p, torch.ones(1, 3))
    p.data, p.grad = p.data.double(), None
    run(optimizer, p, torch.ones(1, 3, dtype=torch.float64))
    assert optimizer.state[p]["exp_avg_sq"].dtype == torch.float64
    torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"], torch.full((3,), 0.001999, dtype=torch.float64))


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be a number of at least 0"),
        ({"lr": math.nan}, "lr must be"),
        ({"lr": torch.ones(1)}, "0-dim tensor"),
        ({"lr": torch.tensor(-1.0)}, "lr must be"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\)"),
        ({"betas": 0.9}, "betas must be"),
        ({"betas": (math.nan, 0.9)}, "betas must be"),
        ({"eps": 0.0}, "eps must be above 0"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"threshold": 0.0}, "math.inf cuts nothing"),
        ({"threshold": math.nan}, "threshold must be above 0"),
        ({"reset_every": 170}, r"must exceed warmup \+ grace = 170, or be None, got 170"),
        ({"reset_every": 0}, "reset_every must be"),
        ({"reset_every": math.inf}, "None for never"),
        ({"warmup": -1}, "warmup must be"),
        ({"warmup": 1.5}, "warmup must be"),
        ({"grace": True}, "grace must be"),
        ({"density": 0.0}, r"density must lie in \(0, 1\]"),
        ({"density": 1.5}, "density must lie"),
        ({"seed": -1}, "seed must be"),
        ({"reference": True, "grace": 1}, "needs a grace of at least 2"),
        ({"foreach": True, "fused": True}, "at most one"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_remedy(settings, message):
    p, q = parameter(2, 2), parameter(2)
    with pytest.raises(TrimtabError, match=message):
        SPAM([p], **settings)
    optimizer = SPAM([p])
    with pytest.raises(TrimtabError, match=message):
        optimizer.add_param_group({"params": [q], **settings})
    assert len(optimizer.param_groups) == 1
    assert list(optimizer.state) == [p]


def test_a_tensor_learning_rate_is_read_at_every_step():
    p, lr = nn.Parameter(torch.zeros(1)), torch.tensor(0.5)
    optimizer = SPAM([p], lr=lr)
    run(optimizer, p, torch.ones(1, 1))
    assert p.item() == pytest.approx(-0.5, rel=1e-5)
    lr.fill_(0.25)
    assert run(optimizer, p, torch.ones(1, 1)).item() == pytest.approx(-0.75, rel=1e-5)


def test_a_density_without_a_matrix_warns():
    with pytest.warns(NoEffectWarning, match="without a matrix"):
        SPAM([parameter(4)], density=0.5)


def test_there_is_no_maximize():
    with pytest.raises(TypeError, match="maximize"):
        SPAM([parameter(4)], maximize=True)  # type: ignore[call-arg]


def test_complex_parameters_are_refused():
    with pytest.raises(TrimtabError, match="view_as_real"):
        SPAM([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])


def test_a_refused_step_has_changed_nothing():
    dense, table = parameter(3), nn.Embedding(5, 2, sparse=True)
    optimizer = SPAM([dense, table.weight])
    before = dense.detach().clone()
    dense.grad = torch.ones(3)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TrimtabError, match="sparse=False"):
        optimizer.step()
    assert torch.equal(dense, before)
    assert optimizer.state[dense]["step"] == 0


def test_fused_is_refused_where_it_cannot_be_had():
    p = parameter(3)
    optimizer = SPAM([p], fused=True)
    p.grad = torch.ones(3)
    with pytest.raises(TrimtabError, match=r"fused=True needs Triton.* on cpu"):
        optimizer.step()
    assert optimizer.state[p]["step"] == 0


# The Triton kernel: on a GPU, or (slowly) with TRITON_INTERPRET=1 where Triton is installed


def kernel_device():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a CUDA device or TRITON_INTERPRET=1")
    return "cpu"


KINDS = {
    "plain": Coefficients(False, 0.9, 0.999, 1e-3, 1e-6, 50.0, False, 0.0),
    "decay": Coefficients(False, 0.9, 0.999, 1e-3, 1e-6, 50.0, False, 0.01),
    "reset": Coefficients(True, 0.9, 0.999, 1e-3, 1e-6, math.inf, False, 0.0),
    "literal": Coefficients(False, 0.8, 0.99, 1e-3, 1e-6, 2.0, True, 0.0),
    "reset and literal": Coefficients(True, 0.8, 0.99, 1e-3, 1e-6, 2.0, True, 0.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_computes_the_same(kind, dtype):
    device, c = kernel_device(), KINDS[kind]
    from trimtab.optim.fused import fused_, takes

    fast, slow = [], []
    for i, shape in enumerate([(5000,), (3,), (64, 33), (2048,), (), (40, 24), (40, 24)]):
        p, mask = torch.randn(shape).to(dtype), None
        if i == 2:
            p = p.t()
        g, m = torch.randn(p.shape).to(dtype), torch.zeros_like(p, dtype=torch.float32).normal_()
        v = torch.rand_like(m).where(torch.rand_like(m) > 0.2, torch.zeros(()))
        if p.dim():
            g[0] = 1e4
            m[-1] = math.nan if c.reset else 1.0  # a reset wipes what is not a number, too
        if i >= 5:
            mask = sparse.Mask(sparse.key_of(1, i, 2), 5, 24, 6 if i == 5 else 7)
            m, v = m[:, : mask.kept].contiguous(), v[:, : mask.kept].contiguous()
        for out in (fast, slow):
            tensors = [t.to(device).clone(memory_format=torch.preserve_format) for t in (p, g, m, v)]
            out.append(Work(*tensors, c._replace(size=1e-3 * (i + 1)), mask))
        assert takes(fast[-1])
    kernels.loop_([one for one in slow if one.mask is None])
    sparse.loop_([one for one in slow if one.mask is not None])
    fused_(fast)
    # Triton's interpreter cuts BF16 off where a GPU rounds: a unit in the last place, twice with sparse decay.
    ulp = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a.p, b.p, rtol=ulp, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(a.m, b.m, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(a.v, b.v, rtol=1e-6, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("density", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_all_ways_agree_and_none_waits(dtype, density, no_waits):
    results = []
    for way in ({}, {"foreach": True}, {"foreach": False}):
        ps, grads = many(dtype)
        ps = [nn.Parameter(p.detach().cuda()) for p in ps]
        grads = [[None if g is None else g.cuda() for g in step] for step in grads]
        optimizer = SPAM(ps, lr=1e-2, reset_every=8, warmup=3, grace=3, threshold=50.0, density=density, **way)
        drive(optimizer, ps, grads[:2])  # compiles, and fills caches
        with no_waits():
            results.append(drive(optimizer, ps, grads[2:]))
    rough = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for fused, foreach, loop in zip(*results, strict=True):
        torch.testing.assert_close(fused, loop, **rough)
        torch.testing.assert_close(foreach, loop, **rough)


def test_the_method_alone_reads_the_gradient_and_writes_the_rest():
    p, g, m, v = (torch.rand(5) for _ in range(4))
    kept = [t.clone() for t in (p, g, m, v)]
    spam_(p, g, m, v, KINDS["plain"])
    assert [torch.equal(a, b) for a, b in zip((p, g, m, v), kept, strict=True)] == [False, True, False, False]


def test_a_cpu_gets_the_loop_unless_told_otherwise():
    p = torch.zeros(2)
    work = Work(p, p, p, p, KINDS["plain"])
    assert choose({"foreach": None, "fused": None}, work) is kernels.loop_
    assert choose({"foreach": True, "fused": None}, work) is kernels.foreach_
    assert choose({"foreach": True, "fused": None}, work._replace(mask=sparse.Mask(0, 0, 2, 1))) is sparse.loop_


def test_the_threshold_rises_with_the_age_of_v():
    """sqrt(theta * (1 - beta2^k)) times the usual size: 9.95 at k = 20, 44.4 at 500."""
    for k, limit in ((20, 9.95), (150, 26.4), (500, 44.4)):
        p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = SPAM([p], reset_every=None)
        run(optimizer, p, torch.ones(k, 2, dtype=torch.float64))
        before = optimizer.state[p]["exp_avg_sq"].clone()
        run(optimizer, p, torch.tensor([[0.99 * limit, 1.01 * limit]], dtype=torch.float64))
        entered = (optimizer.state[p]["exp_avg_sq"] - 0.999 * before) / 0.001
        assert entered[0].sqrt() == pytest.approx(0.99 * limit)
        assert entered[1].sqrt() == pytest.approx(limit, rel=1e-3)


def test_the_cosine_rises():
    assert all(a.scale < b.scale for a, b in pairwise([clock(500 + k, 500, 150, 20) for k in range(151)]))


# What autograd and others must know


def assert_counted(p):
    """A step is a change in place: the parameter's version says so, and a backward that needs the old value refuses."""
    loss = (p * p).sum()
    p.grad, before = torch.ones_like(p.detach()), p._version
    SPAM([p]).step()
    assert p._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_step_on_a_shard_is_a_change_of_the_whole(tmp_path):
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert_counted(nn.Parameter(distribute_tensor(torch.randn(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])))
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_of_the_kernel_is_a_change():
    assert_counted(nn.Parameter(torch.randn(4, 4, device="cuda")))
