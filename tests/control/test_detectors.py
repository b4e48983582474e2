# SPDX-License-Identifier: Apache-2.0
"""Detectors: each against a slow version written unit by unit, live decisions equal to a replay of the recorded
columns, a checkpoint in the middle that changes nothing, and what a full budget means."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference.replayed import replayed
from torch import nn

import trimtab
from trimtab import Controller, Policy, Recorder, TrimtabError
from trimtab.control import replay as replay_module
from trimtab.control.detectors import DETECTORS, GNMR, OnColumn, described, detector_of, full_budget
from trimtab.control.sensors import UpdateNorm
from trimtab.control.units import find_units
from trimtab.lab.faults import Faults
from trimtab.lab.model import Decoder, ModelConfig
from trimtab.report import read_trace, summarize

CONSTANT = Policy(alpha=1.2, alpha_warmup=None, max_high=2, window=3)
NAMES = tuple(DETECTORS)
INF, NAN = math.inf, math.nan


def readings(seed: int, steps: int = 60, units: int = 5) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Norms and columns with spikes, zeros, what is not finite, and what was not seen or not measured."""
    rng = np.random.default_rng(seed)

    def noise() -> np.ndarray:
        x = np.exp(rng.normal(0, 0.5, (steps, units)))
        x[rng.random(x.shape) < 0.1] *= 30
        x[rng.random(x.shape) < 0.03] = INF
        return x.astype(np.float32)

    norms, seen = noise(), rng.random((steps, units)) < 0.9
    norms[rng.random(norms.shape) < 0.03] = NAN
    norms[rng.random(norms.shape) < 0.03] = 0
    columns = {name: noise() for name in ("update", "spectral", "gsnr", "noise", "output", "grad_output", "gap")}
    for name, share in {"update": 0.1, "noise": 0.4, "gap": 0.7, "output": 0.1, "grad_output": 0.1}.items():
        columns[name][rng.random(norms.shape) < share] = NAN
    return norms, seen, columns


# Slow versions: one unit, one value at a time.


def median(values: list[float]) -> float:
    kept = [v for v in values if math.isfinite(v)]
    found = float(np.median(kept)) if kept else 1.0
    return found if found > 0 else 1.0


def risk_of(ratio: float, jump: float, policy: Policy) -> float:
    beta = INF if policy.beta is None else policy.beta
    return max(ratio / policy.alpha, 0.0 if beta == INF else jump / beta)


def plain_gnmr(norms: np.ndarray, seen: np.ndarray, policy: Policy) -> tuple[np.ndarray, np.ndarray]:
    d = trimtab.replay(norms, policy, seen=seen)
    return d.ratio, d.jump


def slow_relative(norms: np.ndarray, seen: np.ndarray, columns: dict, policy: Policy) -> np.ndarray:
    ratio, jump = plain_gnmr(norms, seen, policy)
    risk = np.zeros(norms.shape)
    for t, b in np.ndindex(norms.shape):
        if seen[t, b]:
            by = [median(list(x[t])) for x in (ratio, jump)]
            risk[t, b] = risk_of(ratio[t, b] / by[0], jump[t, b] / by[1], policy)
    return risk


def slow_zscore(norms: np.ndarray, seen: np.ndarray, columns: dict, policy: Policy) -> np.ndarray:
    risk = np.zeros(norms.shape)
    for b in range(norms.shape[1]):
        past: list[float] = []
        for t in range(len(norms)):
            n = float(norms[t, b])
            if seen[t, b] and not math.isfinite(n):
                risk[t, b] = INF
            elif seen[t, b] and n > 0:
                if len(past) >= policy.window:
                    z = (math.log(n) - np.mean(past)) / max(float(np.std(past)), 0.05)
                    risk[t, b] = max(z, 0.0) / 3.0 / policy.alpha
                past.append(math.log(n))
    return risk


def slow_update(norms: np.ndarray, seen: np.ndarray, columns: dict, policy: Policy) -> np.ndarray:
    column = columns["update"]
    ratio, jump = plain_gnmr(column, seen & ~np.isnan(column), policy)
    risk = np.zeros(norms.shape)
    for t, b in np.ndindex(norms.shape):
        if seen[t, b] and not math.isfinite(norms[t, b]):
            risk[t, b] = INF
        elif seen[t, b] and not math.isnan(column[t, b]):
            risk[t, b] = risk_of(ratio[t, b], jump[t, b], policy)
    return risk


def slow_column(name: str, level: float | None, inverse: bool) -> Any:
    def slow(norms: np.ndarray, seen: np.ndarray, columns: dict, policy: Policy) -> np.ndarray:
        risk, last = np.zeros(norms.shape), [NAN] * norms.shape[1]
        for t in range(len(norms)):
            row = []
            for b in range(norms.shape[1]):
                value = float(columns[name][t, b])
                value = float(np.float32(1) / np.float32(value)) if inverse else value
                row.append(last[b] * 0.9 if math.isnan(value) else value)
            last = [NAN if math.isinf(v) else v for v in row]
            by = median([v for v, s in zip(row, seen[t], strict=True) if s]) if level is None else level
            for b, value in enumerate(row):
                if seen[t, b] and (not math.isfinite(norms[t, b]) or math.isinf(value)):
                    risk[t, b] = INF
                elif seen[t, b] and not math.isnan(value):
                    risk[t, b] = value / by / policy.alpha
        return risk

    return slow


def slow_source(
    norms: np.ndarray,
    seen: np.ndarray,
    columns: dict,
    policy: Policy,
    sigmas: float = 6.0,
    norm_sigmas: float = 8.0,
) -> np.ndarray:
    class Unit:
        def __init__(self, follow: float, trend: float, floor: float) -> None:
            self.follow, self.trend, self.floor = follow, trend, floor
            self.count, self.level, self.slope, self.var = 0, 0.0, 0.0, 0.0

        def z(self, value: float) -> float:
            if not (math.isfinite(value) and value > 0):
                return 0.0
            x = math.log(value)
            foretold = self.level + self.slope if self.count else x
            sd, e = max(math.sqrt(self.var), self.floor), x - foretold
            z = e / sd if self.count >= 8 else 0.0
            e = min(max(e, -4 * sd), 4 * sd) if self.count >= 8 else e
            self.count += 1
            w, v = max(1 / self.count, self.follow), max(1 / self.count, 0.05)
            self.level, self.slope = foretold + w * e, self.slope + self.trend * w * e
            self.var = (1 - v) * (self.var + v * e * e)
            return z

    units = norms.shape[1]
    gains = [Unit(0.25, 0.1, 0.005) for _ in range(units)]
    backs = [Unit(0.05, 0.0, 0.05) for _ in range(units)]
    sizes = [Unit(0.05, 0.0, 0.1) for _ in range(units)]
    risk = np.zeros(norms.shape)
    for t in range(len(norms)):
        out, arrived = columns["output"][t], columns["grad_output"][t]
        zg = [abs(gains[b].z(float(out[b]))) if seen[t, b] else 0.0 for b in range(units)]
        made = [float(np.float32(norms[t, b]) / arrived[b]) for b in range(units)]
        zb = [abs(backs[b].z(made[b])) if seen[t, b] else 0.0 for b in range(units)]
        zn = [max(sizes[b].z(float(norms[t, b])), 0.0) if seen[t, b] else 0.0 for b in range(units)]
        own = [max(max(g, k) / sigmas, n / norm_sigmas) / policy.alpha for g, k, n in zip(zg, zb, zn, strict=True)]
        broken = [b for b in range(units) if seen[t, b] and math.isinf(out[b])]
        poisoned = [b for b in range(units) if seen[t, b] and not math.isfinite(norms[t, b])]
        torn = [b for b in poisoned if math.isfinite(arrived[b])]
        large = sigmas * policy.alpha
        sources = []
        if broken or torn:
            sources = broken or torn
        elif not poisoned and max(zg) > large:
            sources = [b for b in range(units) if zg[b] > large and zg[b] >= max(zg) / 3]
        elif not poisoned and max(zb) > large:
            sources = [b for b in range(units) if zb[b] > large and zb[b] >= max(zb) / 3]
        elif not poisoned and max(zn) > norm_sigmas * policy.alpha:
            sources = [max(b for b in range(units) if zn[b] >= max(zn) / 2)]
        for b in range(units):
            r = INF if b in broken or b in poisoned else own[b]
            if sources and b not in sources:
                r = np.finfo(float).max if r == INF else r / (1 + r)
            risk[t, b] = r if seen[t, b] else 0.0
    return risk


def slow_gap(norms: np.ndarray, seen: np.ndarray, columns: dict, policy: Policy) -> np.ndarray:
    own = trimtab.replay(norms, policy, seen=seen).risk
    units, gap = norms.shape[1], columns["gap"]
    fast: list[float | None] = [None] * units
    slow: list[float] = [0.0] * units
    risk = np.zeros(norms.shape)
    for t in range(len(norms)):
        estimates: list[float | None] = []
        for b in range(units):
            n, g = float(norms[t, b]), float(gap[t, b])
            fine = seen[t, b] and math.isfinite(n)
            now = fast[b]
            if fine and n > 0 and math.isfinite(g):
                r = g / n
                fast[b] = r if now is None else now + 0.5 * (r - now)
                capped = min(r, 3 * slow[b]) if slow[b] > 0 else r
                slow[b] = r if now is None else slow[b] + 0.1 * (capped - slow[b])
            elif now is not None:
                fast[b] = slow[b] + 0.8 * (now - slow[b])
            known = fast[b]
            estimates.append(None if known is None or not seen[t, b] else (n if fine else 0.0) * known)
        kept = [e for e in estimates if e is not None]
        mean = sum(kept) / len(kept) if kept and sum(kept) > 0 else 1.0
        for b, e in enumerate(estimates):
            if seen[t, b]:
                broken = math.isinf(gap[t, b]) or math.isinf(own[t, b])
                risk[t, b] = INF if broken else max((e or 0.0) / mean / policy.alpha, own[t, b] / 2)
    return risk


SLOW = {
    "gnmr": lambda norms, seen, columns, policy: trimtab.replay(norms, policy, seen=seen).risk,
    "relative": slow_relative,
    "zscore": slow_zscore,
    "update": slow_update,
    "jacobian": slow_column("spectral", None, False),
    "gsnr": slow_column("gsnr", None, True),
    "snr": slow_column("noise", 0.1, False),
    "source": slow_source,
    "gap": slow_gap,
}


@pytest.mark.parametrize("rows", [1, 7, 1024])
@pytest.mark.parametrize("name", NAMES)
def test_a_detector_is_its_slow_version(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "ROWS", rows)
    for seed in range(4):
        norms, seen, columns = readings(seed)
        found = trimtab.replay(norms, CONSTANT, seen=seen, detector=name, columns=columns)
        wanted = SLOW[name](norms, seen, columns, CONSTANT)
        np.testing.assert_allclose(found.risk, wanted, rtol=1e-9, atol=1e-9)
        assert (found.risk > 1).any()
        assert (found.risk[seen] < 1).any()


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_any_length_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norms, seen, columns = readings(9)
    results = []
    for rows in (1, 5, 1024):
        monkeypatch.setattr(replay_module, "ROWS", rows)
        results.append(trimtab.replay(norms, CONSTANT, seen=seen, detector=f"{name}:full", columns=columns))
    for part in ("ratio", "jump", "risk", "high", "denied"):
        for other in results[1:]:
            np.testing.assert_array_equal(getattr(results[0], part), getattr(other, part))


# What each is for


def test_relative_does_not_see_a_swing_of_the_whole_batch() -> None:
    rng = np.random.default_rng(0)
    norms = np.exp(rng.normal(0, 0.02, (100, 6)))
    norms[60] *= 20
    norms[80, 2] *= 20
    policy = CONSTANT.replace(alpha=2.0, beta=2.0)
    relative, plain = (trimtab.replay(norms, policy, detector=name) for name in ("relative", "gnmr"))
    assert plain.alarmed[60]
    assert not relative.alarmed[60]
    assert np.flatnonzero(relative.risk[80] > 1).tolist() == [2]


def test_relative_needs_units_to_compare() -> None:
    with pytest.raises(TrimtabError, match="at least 3"):
        trimtab.replay(np.ones((4, 2)), CONSTANT, detector="relative")


@pytest.mark.parametrize("history", ["window", "exclude_triggered"])
def test_zscore_refuses_a_history_it_cannot_keep(history: str) -> None:
    with pytest.raises(TrimtabError, match="winsorized or ema"):
        trimtab.replay(np.ones((4, 2)), CONSTANT.replace(history=history), detector="zscore")


def test_zscore_under_a_decay_is_the_bias_corrected_mean_and_deviation() -> None:
    rng = np.random.default_rng(3)
    norms = np.exp(rng.normal(0, 0.5, (30, 1))).astype(np.float32)
    policy = CONSTANT.replace(history="ema", decay=0.9)
    found = trimtab.replay(norms, policy, detector="zscore")
    logs = np.log(norms[:, 0].astype(np.float64))
    weights = 0.9 ** np.arange(28, -1, -1)
    mean = np.average(logs[:29], weights=weights)
    deviation = math.sqrt(np.average((logs[:29] - mean) ** 2, weights=weights))
    assert found.ratio[29, 0] == pytest.approx(max((logs[29] - mean) / deviation, 0) / 3)


def test_gap_keeps_a_steady_offender_and_forgets_a_fault_that_cannot_be_measured() -> None:
    norms, gap = np.ones((60, 4), np.float32), np.full((60, 4), 0.1, np.float32)
    gap[:, 3] = 1.0
    gap[20, 1] = 50.0  # a fault, measured once; then unit 1 runs high and is not measured
    gap[21:, 1] = NAN
    risk = trimtab.replay(norms, CONSTANT, detector="gap", columns={"gap": gap}).risk
    assert risk[20].argmax() == 1
    assert risk[22, 1] > 1
    assert risk[59].argmax() == 3
    assert risk[59, 3] > 1 > risk[59, 1]


def test_source_names_the_gain_that_moved_and_else_the_last_norm_that_rose() -> None:
    rng = np.random.default_rng(1)
    norms = np.exp(rng.normal(0, 0.1, (60, 6)))
    gain = np.exp(rng.normal(0, 0.01, (60, 6)))
    norms[30] *= 10  # a forward fault in unit 4: every norm rises, one gain falls
    gain[30, 4] *= 0.7
    gain[34] *= [1, 1.5, 1, 1.4, 1, 1.06]  # two at once, and one that they disturbed
    norms[38, :4] *= [40, 30, 35, 20]  # a backward fault in unit 2: unit 1 is not to blame for what arrives at it
    arrived = norms * np.exp(rng.normal(0, 0.1, (60, 6)))
    arrived[38, 2] /= 35
    norms[45, :4] *= [40, 30, 35, 20]  # what unit 4 hands on was damaged: no gain moves
    arrived[45, :4] *= [40, 30, 35, 20]
    d = trimtab.replay(norms, CONSTANT, detector="source", columns={"output": gain, "grad_output": arrived})
    assert np.flatnonzero(d.risk[30] > 1).tolist() == [4]
    assert np.flatnonzero(d.risk[34] > 1).tolist() == [1, 3]
    assert np.flatnonzero(d.risk[38] > 1).tolist() == [2]
    assert np.flatnonzero(d.risk[45] > 1).tolist() == [3]
    assert not (d.risk[10:30] > 1).any()
    plain = trimtab.replay(norms, CONSTANT)
    assert [plain.ratio[t].argmax() for t in (30, 38, 45)] != [4, 2, 3]


def test_what_is_not_finite_began_where_what_came_in_was_finite() -> None:
    rng = np.random.default_rng(2)
    norms, gain, arrived = (np.exp(rng.normal(0, 0.05, (40, 5))) for _ in range(3))
    norms[20, :3], arrived[20, :2] = NAN, INF  # the backward of unit 2
    gain[30, 1], gain[30, 2:], norms[30], arrived[30] = INF, NAN, NAN, INF  # the forward of unit 1
    norms[35], arrived[35] = NAN, INF  # the loss itself: nobody's
    d = trimtab.replay(norms, CONSTANT, detector="source", columns={"output": gain, "grad_output": arrived})
    assert d.risk[20].argmax() == 2
    assert np.isinf(d.risk[20]).sum() == 1
    assert d.risk[30].argmax() == 1
    assert np.isinf(d.risk[30]).sum() == 1
    assert np.isinf(d.risk[35]).all()


@pytest.mark.parametrize("options", [{"norm_sigmas": 1.5}, {"sigmas": 2.0, "norm_sigmas": 4.0}])
def test_source_with_other_thresholds_is_its_slow_version(options: dict[str, float]) -> None:
    norms, seen, columns = readings(11)
    d = trimtab.replay(norms, CONSTANT, seen=seen, detector={"name": "source", **options}, columns=columns)
    np.testing.assert_allclose(d.risk, slow_source(norms, seen, columns, CONSTANT, **options), rtol=1e-9)
    usual = trimtab.replay(norms, CONSTANT, seen=seen, detector="source", columns=columns)
    assert (d.risk != usual.risk).any()
    with pytest.raises(TrimtabError, match="norm_sigmas must be a positive number, got 0"):
        detector_of("source", norm_sigmas=0)


def test_source_finds_faults_more_often_than_the_largest_ratio() -> None:
    config = ModelConfig.size("micro", width=32, heads=2, ffn=48, max_seq=16, vocab_size=64)
    found = {"source": 0, "ratio": 0}
    for trial in range(8):
        model = Decoder(config, seed=trial)
        trimtab.convert_(model, "fp8")
        units = [unit.name for unit in find_units(model)]
        guilty = (5 * trial + 2) % len(units)
        kind = ("output_scale", "zero_blocks", "stale_scale", "grad_scale")[trial % 4]
        faults = Faults(model, f"{units[guilty]}:{kind}:start=16")
        rows = []
        controller = Controller(model, CONSTANT, mode="observe", detector="source")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(1, 17):
            faults.at(step)
            tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(97 * trial + step))
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
            assert loss is not None
            loss.backward()
            controller.step()
            assert controller.reading is not None
            rows.append(controller.reading.columns)
            optimizer.step()
            optimizer.zero_grad()
        columns = {name: np.array([row[name] for row in rows]) for name in ("norm", "output", "grad_output")}
        norms = columns.pop("norm")
        d = trimtab.replay(norms, CONSTANT, detector="source", columns=columns)
        found["source"] += int(d.risk[-1].argmax() == guilty)
        found["ratio"] += int(trimtab.replay(norms, CONSTANT).ratio[-1].argmax() == guilty)
    assert found["source"] >= 7
    assert found["ratio"] <= 4


# A full budget


@pytest.mark.parametrize("name", NAMES)
def test_a_full_budget_takes_the_riskiest_in_every_step(name: str) -> None:
    norms, seen, columns = readings(5)
    recoverable = np.array([True, True, False, True, True])
    policy = CONSTANT.replace(lock_steps=2)
    options = {"seen": seen, "recoverable": recoverable, "columns": columns}
    full = trimtab.replay(norms, policy, detector=full_budget(name), **options)
    risk = trimtab.replay(norms, policy, detector=name, **options).risk
    for t in range(len(norms)):
        able = [b for b in range(5) if recoverable[b] and seen[t, b]]
        wanted = sorted(able, key=lambda b: (-risk[t, b], b))[:2]
        assert np.flatnonzero(full.high[t]).tolist() == sorted(wanted)
    assert not full.denied.any()


# By name


def test_a_detector_goes_through_plain_values() -> None:
    for which in [*NAMES, *(f"{name}:full" for name in NAMES)]:
        one = detector_of(which)
        assert one.name == which
        assert detector_of(described(one)) == one
    assert detector_of({"name": "gsnr", "full": True}) == detector_of("gsnr:full")
    assert detector_of("snr", decibels=40.0).against == pytest.approx(0.01)  # type: ignore[attr-defined]
    assert described(detector_of("gap", share=0.1))["share"] == 0.1


@pytest.mark.parametrize(
    ("which", "options", "match"),
    [
        ("gnmrr", {}, "did you mean 'gnmr'"),
        ("gnmr:half", {}, "unknown detector"),
        ("gnmr", {"sigmas": 3}, "sigmas"),
        ("zscore", {"sigmas": 0}, "sigmas must be a positive"),
        ("jacobian", {"against": "weather"}, "against must be"),
        (object(), {}, "fresh, judge"),
        (GNMR, {"full": True}, "takes no options"),
    ],
)
def test_what_is_not_a_detector_is_refused(which: Any, options: dict, match: str) -> None:
    with pytest.raises(TrimtabError, match=match):
        detector_of(which, **options)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(TrimtabError, match=r"'gap'.*not there.*detector='gap'"):
        trimtab.replay(np.ones((4, 2)), CONSTANT, detector="gap")
    with pytest.raises(TrimtabError, match="'gap' must have the shape"):
        trimtab.replay(np.ones((4, 2)), CONSTANT, detector="gap", columns={"gap": np.ones((3, 2))})


# Live


def build(name: str, recorder: Any = None, **options: Any) -> tuple[nn.Sequential, Controller]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    trimtab.convert_(model, "fp8")
    sigmas = name in ("source", "zscore")  # a ratio of 1 stands for several deviations there
    policy = Policy(alpha=0.2 if sigmas else 1.02, alpha_warmup=None, beta=1.05, max_high=2, window=2, lock_steps=1)
    return model, Controller(model, policy, detector=name, recorder=recorder, **options)


def drive(model: nn.Module, controller: Controller, steps: range, optimizer: torch.optim.Optimizer) -> list[tuple]:
    found = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for _ in range(2):
            x = torch.randn(4, 8, generator=generator) * (8 if step % 4 == 3 else 1)
            model(x).square().mean().backward()
        plan = controller.step()
        optimizer.step()
        optimizer.zero_grad()
        assert controller.reading is not None
        found.append((plan.high, {k: v.tolist() for k, v in controller.reading.columns.items()}))
    return found


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02)


@pytest.mark.parametrize("name", [*NAMES, "gap:full", "gsnr:full"])
def test_live_decisions_are_those_of_a_replay_of_the_trace(name: str, tmp_path: Path) -> None:
    with Recorder(tmp_path / "run") as recorder:
        model, controller = build(name, recorder)
        found = drive(model, controller, range(16), adam(model))
    trace = read_trace(tmp_path / "run" / "trace.arrow")
    assert tuple(trace.columns) == controller.detector.columns
    assert detector_of(trace.detector) == controller.detector
    d = replayed(trace)
    assert d.high.any()
    assert [tuple(np.array(trace.units)[row]) for row in d.high] == [plan for plan, _ in found]
    np.testing.assert_array_equal(trace.high[1:], d.high[:-1])
    for column, values in trace.columns.items():
        np.testing.assert_array_equal(values, np.array([row[column] for _, row in found], np.float32))
    summary = summarize(tmp_path / "run")  # the report judges by the run's own detector
    assert summary.metrics["promotion_ratio"] == controller.summary()["promotion_ratio"]
    assert summary.metrics["false_alarms_per_1k"] == controller.summary()["false_alarms_per_1k"]


@pytest.mark.parametrize("name", [*NAMES, "gap:full"])
def test_ten_steps_equal_five_a_checkpoint_and_five(name: str) -> None:
    model, whole = build(name)
    optimizer = adam(model)
    wanted = drive(model, whole, range(10), optimizer)
    first_model, first = build(name)
    first_optimizer = adam(first_model)
    before = drive(first_model, first, range(5), first_optimizer)
    file = io.BytesIO()
    torch.save((first_model.state_dict(), first_optimizer.state_dict(), first.state_dict()), file)
    file.seek(0)
    weights, moments, state = torch.load(file, weights_only=True)
    model, second = build(name)
    optimizer = adam(model)
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    second.load_state_dict(state)
    np.testing.assert_equal(before + drive(model, second, range(5, 10), optimizer), wanted)


def test_a_checkpoint_of_another_detector_or_other_sensors_is_refused() -> None:
    _, one = build("gap")
    _, two = build("jacobian")
    with pytest.raises(TrimtabError, match=r"another detector.*state\['detector'\]"):
        two.load_state_dict(one.state_dict())
    _, three = build("jacobian", sensors=[UpdateNorm()])
    with pytest.raises(TrimtabError, match="same detector and sensors"):
        three.load_state_dict(two.state_dict())


def test_a_state_from_before_there_were_detectors_loads() -> None:
    model, one = build("gnmr")
    wanted = drive(model, one, range(5), adam(model))
    assert wanted
    old = {key: value for key, value in one.state_dict().items() if key not in ("detector", "sensors")}
    _, two = build("gnmr")
    two.load_state_dict(old)
    assert two.steps == 5


def test_a_detector_of_ones_own_needs_only_its_methods(tmp_path: Path) -> None:
    class Largest:
        name, columns = "largest", ("update",)

        def fresh(self, num_units: int, policy: Policy) -> Any:
            return GNMR.fresh(num_units, policy)

        def judge(self, memory: Any, columns: Any, seen: Any, policy: Policy, alpha: Any) -> Any:
            return OnColumn("x", "update", "units").judge(
                OnColumn("x", "update", "units").fresh(seen.shape[1], policy), columns, seen, policy, alpha
            )[0], memory

        def rescaled(self, memory: Any, factor: float) -> Any:
            return memory

    with Recorder(tmp_path / "run") as recorder:
        model, controller = build(Largest(), recorder)  # type: ignore[arg-type]
        found = drive(model, controller, range(6), adam(model))
    assert any(plan for plan, _ in found)
    assert read_trace(tmp_path / "run" / "trace.arrow").detector == {"name": "largest"}
    assert summarize(tmp_path / "run").num_passes == 6


def test_the_scale_of_the_gradient_can_change_under_every_detector() -> None:
    norms, seen, columns = readings(2, steps=40)
    for name in NAMES:
        one = detector_of(name)
        alpha = np.full(20, CONSTANT.alpha)
        parts = [{"norm": norms} | columns, {"norm": norms * np.float32(4)} | columns]
        parts[1] |= {key: columns[key] * np.float32(4) for key in ("gap", "grad_output")}
        fresh = one.fresh(5, CONSTANT)
        _, memory = one.judge(fresh, {k: v[:20] for k, v in parts[0].items()}, seen[:20], CONSTANT, alpha)
        wanted, _ = one.judge(memory, {k: v[20:] for k, v in parts[0].items()}, seen[20:], CONSTANT, alpha)
        scaled = one.rescaled(memory, 4.0)
        found, _ = one.judge(scaled, {k: v[20:] for k, v in parts[1].items()}, seen[20:], CONSTANT, alpha)
        np.testing.assert_allclose(found.risk, wanted.risk, rtol=1e-6, err_msg=name)


def test_calibration_is_of_the_detector_it_is_for() -> None:
    rng = np.random.default_rng(0)
    norms = np.exp(rng.normal(0, 0.3, (400, 5)))
    policy = Policy.calibrated(norms, 5, detector="zscore", base=CONSTANT)
    found = trimtab.replay(norms, policy, detector="zscore").summary()
    assert 0 < found["false_alarms_per_1k"] <= 5
    assert policy.beta == CONSTANT.beta
