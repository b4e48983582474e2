# SPDX-License-Identifier: Apache-2.0
"""Poison: a loss or gradient that is not finite, once, for ever, or between spikes. What remembers (the controller's
histories, the optimizer, the linears' scales) and what is kept (checkpoints) stays finite; a step that was dropped has
changed not a bit; and a run that cannot go on says so after `max_nonfinite` steps, and not before.

The oracle of a dropped step is the same run without that step.
"""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trimtab
from trimtab import Controller, NonFiniteError, Policy, TrimtabError
from trimtab.comm.onebit_adam import OneBitAdam
from trimtab.control.advance import State, advance
from trimtab.control.detectors import detector_of
from trimtab.control.policy import HISTORIES
from trimtab.lab import checkpoint
from trimtab.lab.run import Run, Silent
from trimtab.lab.train import train
from trimtab.optim import SPAM, AdaGC, AutoClip, GradStabilizer, SkipStep, ZClip
from trimtab.report.read import read_run, read_trace

QUIET: dict[str, Any] = {"max_high": 0, "alpha_warmup": None}


def broken(state: Any, path: str = "state") -> list[str]:
    """Where a state holds a tensor or array that is not finite."""
    if isinstance(state, dict):
        return [found for key, value in state.items() for found in broken(value, f"{path}.{key}")]
    if isinstance(state, list | tuple):
        return [found for i, value in enumerate(state) for found in broken(value, f"{path}[{i}]")]
    if isinstance(state, np.ndarray):
        state = torch.from_numpy(state)
    return [path] if isinstance(state, Tensor) and not bool(state.isfinite().all()) else []


def decisive(controller: Controller) -> dict[str, Any]:
    """What a controller's decisions depend on; its narrator also keeps the last ratios, as they were, for a message."""
    return {key: value for key, value in controller.state_dict().items() if key != "narrator"}


def same(one: Any, two: Any) -> bool:
    """Whether two states are equal, bit by bit."""
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return torch.equal(one, two) if isinstance(one, Tensor) else one == two


def test_what_is_not_finite_is_found() -> None:
    assert broken({"a": [1.0, torch.ones(2)], "b": np.array([0.0, np.nan])}) == ["state.b"]
    assert broken({"a": (torch.tensor([math.inf]),)}) == ["state.a[0]"]
    assert not same({"a": torch.ones(2)}, {"a": torch.zeros(2)})


# A plain loop


class Net(nn.Module):
    """Two linears in FP8, and a norm and a head that belong to no unit."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.norm(self.up(x).tanh())))


def build() -> Net:
    torch.manual_seed(1)
    net = Net()
    trimtab.convert_(net, "fp8", head="head")
    return net


def one(value: float, name: str) -> Callable[[Net], None]:
    def put(net: Net) -> None:
        net.get_parameter(name).grad.view(-1)[3] = value  # type: ignore[union-attr]

    return put


def everywhere(value: float) -> Callable[[Net], None]:
    def put(net: Net) -> None:
        for p in net.parameters():
            p.grad.fill_(value)  # type: ignore[union-attr]

    return put


POISONS: dict[str, tuple[float, Callable[[Net], None]]] = {
    "loss nan": (math.nan, lambda net: None),
    "loss inf": (math.inf, lambda net: None),
    "one nan": (1.0, one(math.nan, "down.weight")),
    "one -inf": (1.0, one(-math.inf, "up.bias")),
    "outside every unit": (1.0, one(math.nan, "norm.weight")),
    "all nan": (1.0, everywhere(math.nan)),
    "finite, but its norm is not": (1.0, everywhere(3e38)),
}
"""What the loss is multiplied by, and what is done to the gradients."""

Parts = tuple[list[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Callable[[Net], Parts]] = {
    "adamw": lambda net: ([], torch.optim.AdamW(net.parameters(), 1e-2)),
    "sgd": lambda net: ([], torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9)),
    "spam": lambda net: ([], SPAM(net.parameters(), 1e-2, reset_every=6, warmup=2, grace=2)),
    "sparse spam": lambda net: ([], SPAM(net.parameters(), 1e-2, reset_every=6, warmup=2, grace=2, density=0.5)),
    "stable spam": lambda net: (
        [GradStabilizer(net.parameters(), (0.7, 0.9), clip_gamma=0.999)],
        SPAM(net.parameters(), 1e-2, threshold=math.inf, warmup=0, grace=0),
    ),
    "onebit adam": lambda net: ([], OneBitAdam(net.parameters(), 1e-2, warmup=4)),
    "zclip": lambda net: ([ZClip(net.parameters(), warmup=3)], torch.optim.AdamW(net.parameters(), 1e-2)),
    "adagc": lambda net: ([AdaGC(net.parameters(), warmup=3)], torch.optim.AdamW(net.parameters(), 1e-2)),
    "autoclip": lambda net: ([AutoClip(net.parameters())], torch.optim.AdamW(net.parameters(), 1e-2)),
    "skip step": lambda net: ([SkipStep(net.parameters(), warmup=2)], torch.optim.AdamW(net.parameters(), 1e-2)),
}
DROPS_IT_ITSELF = ("onebit adam", "skip step")


def loop(
    optimizer: str,
    poison: str | None = None,
    *,
    at: int = 6,
    steps: int = 8,
    without: int | None = None,
    controlled: bool = True,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train for some steps; weights and optimizer's state at the end, and the controller's."""
    net = build()
    controller = Controller(net, Policy(**QUIET)) if controlled else None
    transforms, update = OPTIMIZERS[optimizer](net)
    for step in range(1, steps + 1):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        if step == without:
            continue
        factor, put = POISONS[poison] if poison is not None and step == at else (1.0, lambda net: None)
        (net(x).square().mean() * factor).backward()
        put(net)
        if controller is not None:
            controller.step()
        for transform in transforms:
            transform.step_()
        update.step()
        update.zero_grad()
    states = [part.state_dict() for part in (*transforms, update)]
    kept = {"weights": list(net.state_dict().values()), "update": copy.deepcopy(states)}
    return kept, {} if controller is None else decisive(controller)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_poisoned_step_is_a_step_that_never_was(optimizer: str) -> None:
    wanted, _ = loop(optimizer, without=6)
    assert not same(wanted["weights"], loop(optimizer)[0]["weights"])
    for poison in POISONS if optimizer == "adamw" else list(POISONS)[::3]:
        kept, controller = loop(optimizer, poison)
        assert same(kept, wanted), poison
        assert not broken(controller), poison


def test_without_a_controller_the_poison_stays() -> None:
    """Else the test above shows nothing."""
    for optimizer in OPTIMIZERS:
        kept, _ = loop(optimizer, "loss nan", controlled=False)
        assert bool(broken(kept)) == (optimizer not in DROPS_IT_ITSELF), optimizer
    for poison in POISONS:
        assert broken(loop("adamw", poison, controlled=False)[0]), poison


@pytest.mark.parametrize("transform", [GradStabilizer, ZClip, AdaGC, AutoClip, SkipStep])
def test_what_a_transform_remembers_stays_finite_by_itself(transform: Any) -> None:
    ps = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(5))]
    shaped = transform(ps, clip_gamma=0.9) if transform is GradStabilizer else transform(ps)
    generator = torch.Generator().manual_seed(2)
    for step in range(400):
        for p in ps:
            p.grad = torch.randn(p.shape, generator=generator) * (1e12 if step % 2 else 1e-12)
        if step % 3 == 0:
            ps[step % 2].grad.view(-1)[1] = (math.nan, math.inf)[step % 2]  # type: ignore[union-attr]
        shaped.step_()
        assert not broken(shaped.state_dict()), step


@pytest.mark.parametrize("unit", ["up", "down"])
def test_a_unit_that_never_recovers_ends_the_run_by_name(unit: str, tmp_path: Path) -> None:
    net = build()
    recorder = trimtab.Recorder(tmp_path / "run")
    controller = Controller(net, Policy(**QUIET, max_nonfinite=4), recorder=recorder)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)

    def step(poisoned: bool) -> None:
        net(torch.randn(16, 8)).square().mean().backward()
        if poisoned:
            one(math.nan, f"{unit}.weight")(net)
        controller.step()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(1, 6):
        step(poisoned=number == 3)
    good = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
    for _ in range(3):
        step(poisoned=True)
    with pytest.raises(NonFiniteError, match=rf"4 steps in a row \(max_nonfinite=4\), last at step 9; .* in {unit}:"):
        step(poisoned=True)
    assert same([dict(net.state_dict()), optimizer.state_dict()], [dict(good[0]), good[1]])
    assert not broken(decisive(controller))
    recorder.close()
    norms = read_trace(tmp_path / "run" / "trace.arrow").norms
    assert np.isnan(norms).sum(axis=0).tolist() == [5 * (name == unit) for name in ("up", "down")]


def test_ten_thousand_steps_of_alternating_spikes(tmp_path: Path, rounds: Callable[[int, int], int]) -> None:
    """Up and down by 15 orders, on another unit in each step, with a NaN now and then: nothing is worn out by it."""
    num, steps = 4, rounds(1_000, 10_000)
    net = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(num)))
    trimtab.convert_(net, "fp8", head=nn.Linear(1, 1))
    recorder = trimtab.Recorder(tmp_path / "run")
    told: list[str] = []
    policy = Policy(max_high=1, alpha_warmup=None, lock_steps=2, max_nonfinite=2)
    controller = Controller(net, policy, recorder=recorder, on_event=lambda event: told.append(event.kind))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    sizes = torch.exp(torch.randn(steps, num, generator=torch.Generator().manual_seed(3)) / 10)
    for step in range(steps):
        sizes[step, step % num] *= (1e15, 1e-15, 1.0, 1e4, 1e-4)[step % 5]
    for step in range(0, steps, 97):
        sizes[step, step % num] = (math.nan, math.inf)[step % 2]
    for row in sizes:
        for linear, size in zip(net, row, strict=True):
            linear.weight.grad = torch.full((2, 2), float(size) / 2)
        plan = controller.step()
        assert len(plan.high) <= 1
        optimizer.step()
    assert controller.steps == steps
    assert not broken(decisive(controller))
    assert not broken([list(net.state_dict().values()), optimizer.state_dict()])
    assert told.count("nonfinite") == len(range(0, steps, 97)) == controller.summary()["nonfinite"]
    assert told.count("budget_full") <= 1
    recorder.close()
    trace = read_trace(tmp_path / "run" / "trace.arrow")
    assert np.array_equal(trimtab.replay(trace.norms, policy).high[:-1], trace.high[1:])


EXTREMES = np.array([np.nan, np.inf, -np.inf, 0.0, 1e-45, 3.4e38, 1.0, 1.0, 1e20, 1e-20], np.float32)


@pytest.mark.parametrize(
    ("detector", "history"),
    [
        *(("gnmr", history) for history in HISTORIES),
        *((detector, history) for detector in ("relative", "zscore") for history in ("cumulative", "winsorized")),
    ],
)
def test_every_memory_survives_every_float32(detector: str, history: str) -> None:
    rng = np.random.default_rng(4)
    norms = rng.choice(EXTREMES, (10_000, 8))
    norms[0] = np.nan
    policy = Policy(history=history, alpha_warmup=None, max_high=2, span=16, kappa=1.5)
    everybody = np.ones(8, bool)
    limits, judge = policy.resolve(8, None), detector_of(detector)
    state = State.fresh(everybody, policy, limits, judge)
    seen = rng.random(norms.shape) > 0.1
    seen[:, 7] &= np.isnan(norms[:, 7])  # this one has never been finite
    for start in range(0, 10_000, 500):
        rows = slice(start, start + 500)
        verdict, state = advance(state, norms[rows], seen[rows], everybody, policy, limits, judge)
        assert not broken(dict(state.history._asdict()))
        assert not np.isnan(verdict.risk.risk).any()
        assert (verdict.choice.high.sum(axis=1) <= 2).all()


# trimtab train


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a ten-step run with a checkpoint after every second step."""
    text = tmp_path_factory.mktemp("data") / "words.txt"
    text.write_text(" ".join(f"word{i * i % 89}" for i in range(1500)), encoding="utf-8")
    given = {"steps": 10, "batch": 2, "seq": 16, "eval_batches": 1, "checkpoint_every": 2, "threads": 1, "lr": 0.004}
    return {"data": str(text), "device": "cpu", "policy": {"max_nonfinite": 3}, **given}


def kept(run: Path) -> dict[str, dict[str, Any]]:
    return {path.name: checkpoint.read(path) for path in sorted((run / "checkpoints").iterdir())}


class Every(Silent):
    """Looks at every checkpoint as it is written, not only at the two that are left."""

    def started(self, run: Run) -> None:
        self.run, self.steps, save = run, list[int](), run.save

        def watched() -> None:
            save()
            path = run.recorder.folder / "checkpoints" / f"step_{run.step:06d}.pt"
            state = checkpoint.read(path)
            state["controller"].pop("narrator", None)
            assert not broken(state), run.step
            self.steps.append(run.step)

        run.save = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("optimizer", ["adamw", "stable_spam"])
@pytest.mark.parametrize("kind", ["nan", "nan_output"])
def test_a_run_goes_on_after_poison_and_every_checkpoint_is_finite(
    tmp_path: Path, small: dict[str, Any], kind: str, optimizer: str
) -> None:
    """In the loss (`nan_output`) or the gradients alone, of one unit and of all, with delayed scales."""
    faults = f"blocks.0.mlp.up:{kind}:start=3; blocks.*:{kind}:start=6,width=2"
    watcher = Every()
    given = {**small, "recipe": "fp8_delayed", "optimizer": optimizer, "faults": faults}
    result = train(given, tmp_path / "run", watcher=watcher)
    assert watcher.steps == [2, 4, 6, 8, 10]
    assert math.isfinite(result.eval_loss_high)
    assert result.summary["nonfinite"] == 3
    losses = read_run(tmp_path / "run").column("loss")
    bad = [step for step, loss in zip(*losses, strict=True) if not math.isfinite(loss)]
    assert bad == ([3, 6, 7] if kind == "nan_output" else [])


NEVER = "blocks.*:nan:start=5,width=99"


@pytest.mark.parametrize(
    ("settings", "error", "message", "last"),
    [
        ({}, NonFiniteError, r"3 steps in a row \(max_nonfinite=3\), last at step 7; it began in blocks.0", 6),
        ({"mode": "observe", "path": "low"}, TrimtabError, "weights are not finite at step 6, so no checkpoint", 4),
        ({"mode": "off", "path": "low"}, TrimtabError, "weights are not finite at step 6, so no checkpoint", 4),
        (
            {"mode": "observe", "path": "low", "guard": "skip_step"},
            NonFiniteError,
            r"the step skipped, 3 times in a row \(max_nonfinite=3\)",
            6,
        ),
    ],
    ids=["act", "observe", "off", "guard"],
)
def test_a_run_that_never_recovers_ends_with_an_error_and_finite_checkpoints(
    tmp_path: Path, small: dict[str, Any], settings: dict[str, Any], error: type[Exception], message: str, last: int
) -> None:
    watcher = Every()
    with pytest.raises(error, match=message):
        train({**small, **settings, "faults": NEVER}, tmp_path / "run", watcher=watcher)
    assert watcher.steps == list(range(2, last + 1, 2))
    assert [f"step_{step:06d}.pt" for step in watcher.steps[-2:]] == list(kept(tmp_path / "run"))
    if last == 6:  # steps 5 and 6 were dropped
        before, after = kept(tmp_path / "run").values()
        assert same(before["model"], after["model"])
        assert same(before["optimizer"]["optimizers"][0]["state"], after["optimizer"]["optimizers"][0]["state"])


def test_moments_that_are_not_finite_never_reach_a_checkpoint(tmp_path: Path, small: dict[str, Any]) -> None:
    """A gradient of 1e25 is finite, and so are the weights after it: its square, Adam's second moment, is not."""
    faults = "blocks.1.mlp.up:grad_scale:start=5,size=1e25"
    given = {**small, "mode": "observe", "path": "low", "faults": faults}
    watcher = Every()
    with pytest.raises(TrimtabError, match="optimizer's moments are not finite at step 6, so no checkpoint"):
        train(given, tmp_path / "run", watcher=watcher)
    assert checkpoint.is_finite(watcher.run.model.parameters())
    assert list(kept(tmp_path / "run")) == ["step_000002.pt", "step_000004.pt"]
    assert train({**given, "mode": "act"}, tmp_path / "act").steps == 10  # who acts drops that step


def test_large_moments_are_finite() -> None:
    assert checkpoint.is_finite([torch.full((9,), 1e30), torch.ones(0)])
    assert not checkpoint.is_finite([torch.ones(3), torch.tensor([1.0, math.nan])])
    assert not checkpoint.is_finite([torch.tensor([-math.inf, 0.0]).bfloat16()])


# trimtab finetune


@pytest.mark.parametrize("recovers", [True, False])
def test_fine_tuning_has_the_same_guarantees(tmp_path: Path, tiny_llama: Path, recovers: bool) -> None:
    pytest.importorskip("peft")
    from trimtab.lab.finetune import ADAPTER, finetune

    sums = tmp_path / "sums.jsonl"
    sums.write_text("".join(json.dumps({"question": f"{a}?", "answer": f"{a}."}) + "\n" for a in range(30)))
    faults = f"model.layers.*:nan:start=3,width={1 if recovers else 99}"
    given = {"steps": 6, "batch": 2, "seq": 32, "eval_batches": 1, "checkpoint_every": 2, "threads": 1}
    given |= {"model": str(tiny_llama), "data": str(sums), "device": "cpu", "faults": faults}
    given |= {"policy": {"max_high": 1, "max_nonfinite": 3}}
    watcher = Every()
    if recovers:
        finetune(given, tmp_path / "run", watcher=watcher)
    else:
        with pytest.raises(NonFiniteError, match=r"3 steps in a row \(max_nonfinite=3\), last at step 5"):
            finetune(given, tmp_path / "run", watcher=watcher)
    assert watcher.steps == ([2, 4, 6] if recovers else [2, 4])
    from safetensors.torch import load_file

    adapter = load_file(tmp_path / "run" / ADAPTER / "adapter_model.safetensors")
    assert adapter
    assert not broken(adapter)
