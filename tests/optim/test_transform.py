# SPDX-License-Identifier: Apache-2.0
"""The contract of every gradient transform: exact resume, who is skipped, what is not finite, which parameters it
takes, BF16, no wait for the device, and no work that grows with the number of parameters outside foreach calls."""

import io
import os

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.errors import TrimtabError
from trimtab.optim.clipping import AdaGC, AutoClip, ZClip
from trimtab.optim.stabilizer import GradStabilizer
from trimtab.optim.transform import LEAST_NORM, Gradients

TRANSFORMS = {
    "stabilizer": lambda p: GradStabilizer(p),
    "paper's stabilizer": lambda p: GradStabilizer(p, bias_correction=False),
    "stable-spam": lambda p: GradStabilizer(p, (0.7, 0.9), clip_gamma=0.99, eps=1e-8),
    "global stabilizer": lambda p: GradStabilizer(p, global_norm=True),
    "zclip": lambda p: ZClip(p, warmup=3, max_norm=2.0),
    "zclip per tensor": lambda p: ZClip(p, warmup=3, per_tensor=True),
    "adagc": lambda p: AdaGC(p, warmup=3),
    "autoclip": lambda p: AutoClip(p, window=5),
    "autoclip per tensor": lambda p: AutoClip(p, window=5, percentile=50.0, per_tensor=True),
}
PER_TENSOR = [n for n in TRANSFORMS if n not in ("global stabilizer", "zclip", "autoclip", "adagc")]
every = pytest.mark.parametrize("name", TRANSFORMS)
SHAPES = [(4, 3), (5,), (), (2, 2, 2)]


def parameters(dtype=torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]


def draw(params, seed: int) -> None:
    """Heavy-tailed gradients, so that every rule has something to clip."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        scale = torch.exp(2 * torch.randn((), generator=generator))
        param.grad = (torch.randn(param.shape, generator=generator) * scale).to(param.dtype)


def tensors_in(state) -> list[torch.Tensor]:
    if isinstance(state, dict):
        return [t for value in state.values() for t in tensors_in(value)]
    return [] if state is None else [state]


@every
def test_ten_steps_equal_five_a_checkpoint_and_five(name):
    make = TRANSFORMS[name]
    straight, resumed = parameters(), parameters()
    one, other = make(straight), make(resumed)
    assert [t.shape for t in tensors_in(one.state_dict())] == [t.shape for t in tensors_in(other.state_dict())]
    for step in range(10):
        if step == 5:
            file = io.BytesIO()
            torch.save(other.state_dict(), file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
            other = make(resumed)
            other.load_state_dict(state)
            before = [t.clone() for t in tensors_in(state)]
        for params, transform in ((straight, one), (resumed, other)):
            draw(params, step)
            transform.step_()
        for a, b in zip(straight, resumed, strict=True):
            assert torch.equal(a.grad, b.grad)
    for a, b in zip(tensors_in(one.state_dict()), tensors_in(other.state_dict()), strict=True):
        assert torch.equal(a, b)
    assert all(map(torch.equal, tensors_in(state), before))  # the caller's state was left as it was
    assert torch.equal(one.scales, other.scales)


@every
def test_a_saved_state_does_not_move_with_the_transform(name):
    params = parameters()
    transform = TRANSFORMS[name](params)
    state = transform.state_dict()
    draw(params, 0)
    transform.step_()
    assert all(not t.any() for t in tensors_in(state))
    assert any(t.any() for t in tensors_in(transform.state_dict()))


@every
def test_a_state_of_other_parameters_or_options_is_refused(name):
    transform = TRANSFORMS[name](parameters())
    others = parameters()[:2]
    state = TRANSFORMS[name](others).state_dict()
    if name not in ("global stabilizer", "zclip", "autoclip"):  # these have one number for any parameters
        with pytest.raises(TrimtabError, match=r"must have shape .* got \(.*2,?\)"):
            transform.load_state_dict(state)
    foreign = AdaGC(others) if not isinstance(transform, AdaGC) else ZClip(others)
    with pytest.raises(TrimtabError, match="keys"):
        transform.load_state_dict(foreign.state_dict())


@every
def test_the_transform_changes_heavy_tailed_gradients_and_keeps_their_direction(name):
    params = parameters()
    transform = TRANSFORMS[name](params)
    changed = False
    for step in range(12):
        draw(params, step)
        before = [p.grad.clone() for p in params]
        transform.step_()
        changed |= any(not torch.equal(p.grad, b) for p, b in zip(params, before, strict=True))
        if name == "stable-spam":
            continue  # AdaClip bends the direction
        for param, old in zip(params, before, strict=True):
            scale = param.grad.norm() / old.norm()
            torch.testing.assert_close(param.grad, old * scale, rtol=1e-6, atol=0)
    assert changed


@every
def test_a_parameter_without_a_gradient_is_as_if_it_had_sat_out(name):
    """Its averages do not move: with the idle steps left out the others, and later it, see the same."""
    make = TRANSFORMS[name]
    params = parameters()
    transform = make(params)
    for step in range(4):
        draw(params, step)
        transform.step_()
    state = transform.state_dict()
    draw(params, 4)
    params[1].grad = None
    transform.step_()
    assert params[1].grad is None
    if name in PER_TENSOR or name == "adagc":
        for old, new in zip(tensors_in(state), tensors_in(transform.state_dict()), strict=True):
            assert torch.equal(old[..., 1], new[..., 1])
            assert not torch.equal(old[..., 0], new[..., 0])


@every
def test_with_all_gradients_missing_or_zero_nothing_moves(name):
    params = parameters()
    transform = TRANSFORMS[name](params)
    draw(params, 0)
    transform.step_()
    state = transform.state_dict()
    for value in (None, 0.0, LEAST_NORM / 100):
        for param in params:
            param.grad = None if value is None else torch.full_like(param, value)
        transform.step_()
        if value is not None:
            assert all((p.grad == value).all() for p in params)
        assert all(map(torch.equal, tensors_in(state), tensors_in(transform.state_dict())))


@every
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("at", [1, 6], ids=["in the warm-up", "later"])
def test_what_is_not_finite_is_left_alone_and_never_remembered(name, bad, at):
    params = parameters()
    transform = TRANSFORMS[name](params)
    for step in range(8):
        draw(params, step)
        if step == at:
            params[0].grad[1, 2] = bad
            state = [t.clone() for t in tensors_in(transform.state_dict())]
            before = params[0].grad.clone()
        transform.step_()
        if step == at:
            assert torch.equal(params[0].grad.nan_to_num(nan=7.0), before.nan_to_num(nan=7.0))
            after = tensors_in(transform.state_dict())
            assert all(torch.equal(a[..., 0], b[..., 0]) for a, b in zip(state, after, strict=True))
            assert all(torch.isfinite(p.grad).all() for p in params[1:])
        assert all(torch.isfinite(t).all() for t in tensors_in(transform.state_dict()))
    assert all(torch.isfinite(p.grad).all() for p in params)


@every
@pytest.mark.parametrize("exponent", [-25, 30])
def test_extreme_norms_neither_overflow_nor_vanish(name, exponent):
    params = parameters()
    transform = TRANSFORMS[name](params)
    for step in range(8):
        draw(params, step)
        for param in params:
            param.grad *= 10.0**exponent
        transform.step_()
        assert all(torch.isfinite(p.grad).all() and p.grad.any() for p in params)
        assert all(torch.isfinite(t).all() for t in tensors_in(transform.state_dict()))
    if "stabilizer" in name:
        assert 0.02 < float(params[0].grad.norm()) < 16


@every
def test_bf16_gradients_are_measured_and_scaled_in_fp32(name):
    narrow, wide = parameters(torch.bfloat16), parameters()
    one, other = TRANSFORMS[name](narrow), TRANSFORMS[name](wide)
    for step in range(6):
        draw(narrow, step)
        for a, b in zip(narrow, wide, strict=True):
            b.grad = a.grad.float()
        one.step_()
        other.step_()
        if name == "stable-spam":
            continue  # the second norm is of clipped coordinates that were stored in BF16
        for a, b in zip(narrow, wide, strict=True):
            assert torch.equal(a.grad, b.grad.bfloat16())
    assert all(t.dtype in (torch.float32, torch.int64) for t in tensors_in(one.state_dict()))


@every
def test_parameters_may_come_in_any_form(name):
    make = TRANSFORMS[name]
    params = parameters()
    named = [(str(i), p) for i, p in enumerate(params)]
    results = []
    for form in (
        params,
        (p for p in params),
        named,
        [{"params": params[:1], "lr": 1.0}, {"params": iter(params[1:])}],
        [{"params": params[0]}, {"params": params[1:]}],
        [*params, params[0]],  # a tied weight is scaled once
    ):
        transform = make(form)
        for step in range(5):
            draw(params, step)
            transform.step_()
        results.append([p.grad.clone() for p in params])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_parameters_that_cannot_be_transformed_are_refused():
    for params, message in (
        ([], "at least one"),
        ([torch.zeros(2)], "requires a gradient"),
        (nn.Parameter(torch.zeros(2)), "put it into a list"),
        (["weight"], "params must hold parameters"),
    ):
        with pytest.raises(TrimtabError, match=message):
            GradStabilizer(params)
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TrimtabError, match="sparse=False"):
        ZClip(embedding.parameters()).step_()


class Operations(TorchDispatchMode):
    """Counts operations, and those that make the host wait for a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "index")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@every
def test_nothing_waits_and_work_outside_foreach_does_not_grow(name):
    counts = []
    for copies in (1, 8):
        params = [p for _ in range(copies) for p in parameters()]
        transform = TRANSFORMS[name](params)
        for step in range(2):
            draw(params, step)
            transform.step_()
        params[0].grad = None  # an absent one must not cost a copy either
        with Operations() as operations:
            transform.step_()
        assert not set(operations.calls) & set(Operations.WAITS)
        assert "_foreach_norm" in operations.calls
        counts.append(len([call for call in operations.calls if call not in ("view", "detach")]))  # these run no kernel
    more = counts[1] - counts[0]
    assert more == (4 * 7 * len(SHAPES) if name == "stable-spam" else 0)  # AdaClip compares tensor by tensor
    assert counts[0] < 100


def test_a_model_may_move_to_another_dtype_and_device_after_the_transform_was_built():
    model = nn.Linear(3, 3)
    transform = GradStabilizer(model.parameters())
    model.to(torch.bfloat16)
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    transform.step_()
    assert float(model.weight.grad.float().norm()) == pytest.approx(1.0, rel=1e-2)


def test_the_total_norm_is_that_of_all_gradients_together():
    params = parameters()
    draw(params, 1)
    params[2].grad = None
    gradients = Gradients(params)
    expected = torch.linalg.vector_norm(torch.cat([p.grad.double().flatten() for p in params if p.grad is not None]))
    assert gradients.norms(together=True).item() == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every
def test_on_a_gpu_a_bf16_product_is_rounded_once(name):
    params = [nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16, device="cuda")) for _ in range(3)]
    transform = TRANSFORMS[name](params)
    for step in range(8):
        for k, param in enumerate(params):
            param.grad = torch.randn(1000, device="cuda").mul(10.0**k * 3**step).bfloat16()
        before = [p.grad.clone() for p in params]
        transform.step_()
        if name == "stable-spam":
            continue
        for k, (param, old) in enumerate(zip(params, before, strict=True)):
            scale = transform.scales[k if len(transform.scales) > 1 else 0]
            assert torch.equal(param.grad, (old.float() * scale).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_launch_multiplies_as_many_calls_would(dtype):
    """On a GPU, or (slowly) with TRITON_INTERPRET=1 where Triton is installed."""
    pytest.importorskip("triton")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a CUDA device or TRITON_INTERPRET=1")
    from trimtab.optim.scaling import multiply_

    device = "cuda" if torch.cuda.is_available() else "cpu"
    grads = [torch.randn(shape).to(device, dtype) for shape in [(5000,), (3,), (64, 32), (0,), (1,)]]
    factors = torch.tensor([9.0, 0.5, 3.0, 0.1, 7.0, 2.0], device=device)
    limits = torch.tensor([0.0, -1.0, 0.7, -1.0, -1.0, 1e9], device=device)
    which = [2, 1, 5, 3, 4]
    expected = []
    for g, i in zip(grads, which, strict=True):
        wide = g.float()
        expected.append(torch.where(wide.abs() > limits[i], wide * factors[i], wide).to(dtype))
    multiply_(grads, which, factors, limits)
    for got, wanted in zip(grads, expected, strict=True):
        torch.testing.assert_close(
            got, wanted, rtol=2 * torch.finfo(dtype).eps if dtype != torch.float32 else 0, atol=0
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every
def test_on_a_gpu_no_step_waits_and_results_are_those_of_the_cpu(name, no_waits):
    here, there = parameters(), [nn.Parameter(p.detach().cuda()) for p in parameters()]
    one, other = TRANSFORMS[name](here), TRANSFORMS[name](there)
    for step in range(8):
        draw(here, step)
        for a, b in zip(here, there, strict=True):
            b.grad = a.grad.cuda()
        if step == 5:
            here[1].grad = there[1].grad = None
        one.step_()
        with no_waits():
            other.step_()
        for a, b in zip(here, there, strict=True):
            if a.grad is not None:
                torch.testing.assert_close(b.grad.cpu(), a.grad, rtol=1e-5, atol=0)
    assert all(t.is_cuda for t in tensors_in(other.state_dict()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every
def test_a_change_by_the_kernel_is_counted(name):
    params = [nn.Parameter(param.detach().cuda()) for param in parameters()]
    for param in params:
        param.grad = torch.ones_like(param)
    before = [param.grad._version for param in params]
    TRANSFORMS[name](params).step_()
    assert all(param.grad._version > version for param, version in zip(params, before, strict=True))


@every
def test_a_change_of_a_shard_is_counted(name, tmp_path):
    """Who remembers a gradient's norm (a controller does) looks at its version to see whether it still holds."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        param = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)]))
        grad = param.grad = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
        TRANSFORMS[name]([param]).step_()
        assert grad._version > 0
    finally:
        dist.destroy_process_group()
