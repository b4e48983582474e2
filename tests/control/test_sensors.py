# SPDX-License-Identifier: Apache-2.0
"""Sensors: each column against numbers computed by hand, what does not count (recomputes, evaluations, unmeasured
units), the rotation of `gap` within its share, one copy to the host, and what is left on a model afterwards."""

import gc
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trimtab
from trimtab import Controller, Policy, Recorder, TrimtabError
from trimtab.control.gaps import Gap, Noise
from trimtab.control.listeners import GradientSNR, GradOutput, OutputGain
from trimtab.control.observe import Observer
from trimtab.control.sensing import SENSORS, sensor_of
from trimtab.control.sensors import SpectralNorm, UpdateNorm
from trimtab.control.units import Unit, find_units, trainable
from trimtab.lab.faults import Faults
from trimtab.linear.linear import switch_linears
from trimtab.report import read_trace

NOBODY = np.zeros(3, bool)


def model_of(recipe: str | None = "fp8", depth: int = 3, width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    if recipe is not None:
        trimtab.convert_(model, recipe)
    return model


def batch(step: int, width: int = 16) -> Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(step))


def attached(sensor: Any, model: nn.Module) -> Any:
    sensor.attach(find_units(model))
    return sensor


# Updates


def test_an_update_is_the_distance_the_parameters_moved() -> None:
    model = model_of(None)
    sensor = attached(UpdateNorm(), model)
    assert torch.isnan(sensor.read()).all()
    before = [torch.cat([p.detach().flatten() for p in module.parameters()]) for module in model]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(batch(0)).square().mean().backward()
    optimizer.step()
    moved = [torch.cat([p.detach().flatten() for p in m.parameters()]) - b for m, b in zip(model, before, strict=True)]
    found = sensor.read()
    assert found.tolist() == pytest.approx([float(m.norm()) for m in moved])
    assert sensor.read().tolist() == found.tolist()  # nothing has moved since: the last update is still the last
    optimizer.step()
    assert sensor.read().tolist() != found.tolist()


# Spectral norms


def test_power_iteration_finds_the_largest_singular_value_and_follows_it() -> None:
    model = model_of(None)
    sensor = attached(SpectralNorm(), model)
    for _ in range(100):
        found = sensor.read()
    assert found.tolist() == pytest.approx(
        [float(torch.linalg.matrix_norm(m.weight.detach(), 2)) for m in model], rel=1e-3
    )
    with torch.no_grad():
        model[1].weight.mul_(3)
    assert float(sensor.read()[1]) == pytest.approx(3 * float(found[1]), rel=1e-3)
    with torch.no_grad():
        model[0].weight.zero_()
    assert [float(sensor.read()[0]) for _ in range(2)] == [0.0, 0.0]


# Gradient signal-to-noise


def test_gsnr_is_signal_over_variance_across_micro_batches() -> None:
    model = model_of(None)
    sensor = attached(GradientSNR(), model)
    grads: list[list[Tensor]] = [[], [], []]
    for micro in range(4):
        model.zero_grad()
        model(batch(micro)).square().mean().backward()
        for kept, module in zip(grads, model, strict=True):
            kept.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
    wanted = [float(torch.stack(g).mean(0).square().sum() / torch.stack(g).var(0).sum()) for g in grads]
    assert sensor.read().tolist() == pytest.approx(wanted, rel=1e-4)


def test_gsnr_needs_two_backward_passes() -> None:
    model = model_of(None)
    controller = Controller(model, Policy(alpha_warmup=None), mode="observe", detector="gsnr")
    model(batch(0)).square().mean().backward()
    with pytest.raises(TrimtabError, match=r"at least 2 backward passes.*accumulate=2"):
        controller.step()


# Gains of outputs


def gain_by_hand(model: nn.Sequential, inputs: Sequence[Tensor]) -> list[float]:
    sums = [[0.0, 0.0] for _ in model]
    for x in inputs:
        for pair, module in zip(sums, model, strict=True):
            y = module(x).detach()
            pair[0] += float(x.double().square().mean())
            pair[1] += float(y.double().abs().sqrt().mean())
            x = y
    return [(out / len(inputs)) ** 2 / math.sqrt(into / len(inputs)) for into, out in sums]


def test_a_gain_is_output_over_input_of_the_step() -> None:
    model = model_of(None)
    wanted = gain_by_hand(model, [batch(0), batch(1)])
    sensor = attached(OutputGain(), model)
    for step in range(2):
        model(batch(step)).square().mean().backward()
    model.eval()
    model(batch(7) * 5)
    model.train()
    assert sensor.read().tolist() == pytest.approx(wanted, rel=1e-5)
    assert torch.isnan(sensor.read()).all()  # no forward since


def test_a_gain_of_many_tokens_is_that_of_a_sample_spread_over_them() -> None:
    model = model_of(None)
    sensor = attached(OutputGain(), model)
    width = batch(0).shape[-1]
    tokens = torch.randn(2, 1500, width, generator=torch.Generator().manual_seed(0))
    wanted = gain_by_hand(model, [tokens.reshape(-1, width)[::3]])
    model(tokens).square().mean().backward()
    assert sensor.read().tolist() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_is_not_a_forward(reentrant: bool) -> None:
    model = model_of(None)
    sensor = attached(OutputGain(), model)
    calls: list[int] = []
    take = sensor.take
    sensor.take = lambda key, x, y: (calls.append(key), take(key, x, y))
    x = batch(0).requires_grad_()
    checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
    assert len(calls) == 3


def test_the_first_output_that_is_not_finite_is_infinite_and_what_follows_is_not_measured() -> None:
    model = model_of("fp8")
    sensor = attached(OutputGain(), model)
    Faults(model, "1:nan_output:start=1").at(1)
    model(batch(0)).square().mean().backward()
    found = sensor.read()
    assert math.isfinite(found[0])
    assert math.isinf(found[1])
    assert math.isnan(found[2])


# Gradients that arrive at outputs


def test_what_arrives_is_the_gradient_of_the_outputs_over_modules_and_micro_batches() -> None:
    model = model_of(None)
    units = [Unit("both", tuple(model[0].parameters()), None, (model[0], model[1])), Unit("none", ())]
    squares = 0.0
    for step in range(2):
        x, outputs = batch(step), []
        for module in model:
            x = module(x)
            x.retain_grad()
            outputs.append(x)
        x.square().mean().backward()
        squares += sum(float(y.grad.double().square().sum()) for y in outputs[:2])
    sensor = GradOutput()
    sensor.attach(units)
    for step in range(2):
        model(batch(step)).square().mean().backward()
    model.eval()
    model(batch(7)).square().mean().backward()
    model.train()
    found = sensor.read()
    assert found[0] == pytest.approx(math.sqrt(squares), rel=1e-5)
    assert math.isnan(found[1])
    assert torch.isnan(sensor.read()).all()  # no backward since


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_arrives_is_heard_once_under_a_recompute(reentrant: bool) -> None:
    found = []
    for checkpointed in (False, True):
        model = model_of(None)
        sensor = attached(GradOutput(), model)
        x = batch(0).requires_grad_()
        y = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
        y.square().mean().backward()
        found.append(sensor.read().tolist())
    assert found[0] == found[1]


def test_a_gradient_that_is_not_finite_arrives_as_infinite_upstream_only() -> None:
    model = model_of("fp8")
    sensor = attached(GradOutput(), model)
    Faults(model, "1:nan:start=1").at(1)
    model(batch(0)).square().mean().backward()
    found = sensor.read()
    assert math.isinf(found[0])
    assert torch.isfinite(found[1:]).all()


# Under torch.compile


@pytest.mark.parametrize("recipe", ["fp8", None])
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of dynamo itself, where a graph breaks
def test_a_compiled_model_is_heard_like_any_and_compiled_once(recipe: str | None) -> None:
    def run(compiled: bool) -> list[dict[str, list[float]]]:
        model = model_of(recipe)
        controller = Controller(model, Policy(alpha_warmup=None), mode="observe", detector="source")
        whole = recipe is not None  # a plain module is heard at the price of a break
        called = torch.compile(model, backend="aot_eager", fullgraph=whole) if compiled else model
        read = []
        for step in range(5):
            with torch._dynamo.config.patch(error_on_recompile=step > 1):
                called(batch(step)).square().mean().backward()
            controller.step()
            assert controller.reading is not None
            read.append({name: column.tolist() for name, column in controller.reading.columns.items()})
            model.zero_grad()
        controller.detach()
        assert not any(getattr(module, "ears", ()) for module in model.modules())
        return read

    for one, other in zip(run(False), run(True), strict=True):
        for name, column in one.items():
            assert other[name] == pytest.approx(column, rel=1e-5)
            assert np.isfinite(column).all()


# Noise and gap


def errors_by_hand(model: nn.Sequential, x: Tensor) -> list[float]:
    """Noise of each linear: low against high on the operands of the low run."""
    inputs, outputs = [], []
    for module in model:
        x = x.detach().requires_grad_()
        inputs.append(x)
        x = module(x)
        outputs.append(x)
    g = 2 * outputs[-1].detach() / outputs[-1].numel()
    found = []
    for module, x, y in reversed(list(zip(model, inputs, outputs, strict=True))):
        module.zero_grad()
        x.grad = None
        y.backward(g)
        low = (y.detach(), x.grad, module.weight.grad)
        weight, bias, kept = module.weight.detach(), module.bias.detach(), x.detach()
        high = (nn.functional.linear(kept, weight, bias), g @ weight, g.t() @ kept)
        found.append(
            math.sqrt(sum(float((a - b).square().sum() / b.square().sum()) for a, b in zip(low, high, strict=True)))
        )
        g = x.grad.clone()
    model.zero_grad()
    return found[::-1]


def test_noise_is_the_relative_error_of_the_three_products() -> None:
    model = model_of("fp8")
    wanted = errors_by_hand(model, batch(0))
    sensor = attached(Noise(), model)
    x = batch(0).requires_grad_()  # or the first linear passes no gradient on
    model(x).square().mean().backward()
    found = sensor.read()
    assert found.tolist() == pytest.approx(wanted, rel=1e-3)
    norms = [math.sqrt(sum(float(p.grad.square().sum()) for p in module.parameters())) for module in model]
    gaps = attached(Gap(units_per_step=3), model)
    model.zero_grad()
    model(x).square().mean().backward()
    assert gaps.read().tolist() == pytest.approx([e * n for e, n in zip(wanted, norms, strict=True)], rel=1e-3)


def test_a_unit_that_runs_high_is_not_measured() -> None:
    model = model_of("fp8")
    sensor = attached(Noise(), model)
    model[1].switch.planned = True
    model(batch(0)).square().mean().backward()
    assert torch.isnan(sensor.read()).tolist() == [False, True, False]


def measured(sensor: Gap) -> list[int]:
    return [u for u, unit in enumerate(sensor.units) if any(m.watch is not None for m in unit.modules)]


def test_the_rotation_stays_within_its_share_and_reaches_everybody() -> None:
    model = model_of("fp8", depth=6)
    sensor = attached(Gap(share=0.02), model)
    counts, quiet = np.zeros(6), np.zeros(6)
    for _ in range(600):
        counts[measured(sensor)] += 1
        sensor.aim(quiet, np.zeros(6, bool))
    assert counts.sum() / 6 / 600 <= 0.02
    assert counts.sum() / 6 / 600 > 0.019
    assert counts.max() - counts.min() <= 1


def test_every_other_measurement_goes_to_the_riskiest_that_still_runs_low() -> None:
    model = model_of("fp8", depth=6)
    sensor = attached(Gap(units_per_step=1), model)
    risk, high = np.array([0, 0, 5.0, 0, 9.0, 0]), np.zeros(6, bool)
    high[4] = True
    seen = []
    for _ in range(12):
        sensor.aim(risk, high)
        seen += measured(sensor)
    assert seen.count(2) >= 6
    assert 4 not in seen
    assert {0, 1, 3, 5} <= set(seen)


def test_a_fault_shows_in_its_own_gap_and_not_in_its_neighbours() -> None:
    for kind in ("output_scale", "grad_scale", "stale_scale", "zero_blocks", "grad_burst"):
        model = model_of("fp8", depth=5, width=32)
        sensor = attached(Noise(), model)
        faults = Faults(model, f"2:{kind}:start=2")
        columns = []
        for step in (1, 2):
            faults.at(step)
            model(batch(step, 32)).square().mean().backward()
            columns.append(sensor.read())
        grown = columns[1] / columns[0]
        assert int(grown.argmax()) == 2
        assert float(grown[[0, 1, 3, 4]].max()) < 2 < float(grown[2])


# All of them


@pytest.mark.parametrize("column", SENSORS)
def test_a_sensor_fills_its_column_and_leaves_the_model_as_it_was(column: str) -> None:
    model = model_of("fp8")
    sensor = attached(sensor_of(column), model)
    assert sensor.column == column
    for _ in range(2):
        model(batch(0)).square().mean().backward()
    found = sensor.read()
    assert found.shape == (3,)
    assert found.dtype == torch.float32
    sensor.detach()
    assert_bare(model)
    again = attached(sensor_of(column), model)
    del again
    gc.collect()
    assert_bare(model)  # a sensor that nobody holds takes its hooks with it


def assert_bare(model: nn.Module) -> None:
    assert all(module.watch is None for module in switch_linears(model))
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(parameter._backward_hooks for parameter in model.parameters())


@pytest.mark.parametrize("detector", ["gnmr", "update", "jacobian", "gsnr", "snr", "source", "gap"])
def test_everything_comes_to_the_host_in_one_copy(detector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("fp8")
    controller = Controller(model, Policy(alpha_warmup=None), detector=detector)
    for _ in range(2):
        model(batch(0)).square().mean().backward()
    copies = []
    plain = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self, *a, **k: (copies.append(self.shape), plain(self, *a, **k))[1])
    monkeypatch.setattr(Tensor, "item", lambda self: pytest.fail("a wait for the device"))
    monkeypatch.setattr(Tensor, "tolist", lambda self: pytest.fail("a wait for the device"))
    controller.step()
    assert len(copies) == 1


def test_observing_with_every_sensor_changes_no_bit() -> None:
    def train(sensors: Sequence[Any] | None) -> list[float]:
        model = model_of("fp8")
        controller = None
        if sensors is not None:
            controller = Controller(model, Policy(alpha_warmup=None), mode="observe", sensors=sensors)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for step in range(8):
            for micro in range(2):
                loss = model(batch(2 * step + micro)).square().mean()
                loss.backward()
            losses.append(loss.item())
            if controller is not None:
                controller.step()
            optimizer.step()
            optimizer.zero_grad()
        return losses

    assert train([sensor_of(column) for column in SENSORS if column != "noise"]) == train(None) == train([Noise()])


def test_columns_of_sensors_alone_go_into_the_trace(tmp_path: Path) -> None:
    model = model_of("fp8")
    with Recorder(tmp_path / "a") as recorder:
        controller = Controller(
            model, Policy(alpha_warmup=None), recorder=recorder, sensors=[OutputGain(), Gap(units_per_step=1)]
        )
        for step in range(4):
            model(batch(step)).square().mean().backward()
            controller.step()
            controller.clip_grad_norm_(1.0)
            model.zero_grad()
        offsets = recorder.offsets()
    trace = read_trace(tmp_path / "a" / "trace.arrow")
    assert list(trace.columns) == ["output", "gap"]
    assert np.isfinite(trace.columns["output"]).all()
    assert np.isfinite(trace.columns["gap"]).sum(axis=1).tolist() == [1, 1, 1, 1]
    assert trace.detector == {"name": "gnmr"}
    resumed = Recorder.resume(tmp_path / "a", offsets)
    with pytest.raises(TrimtabError, match="same detector and sensors"):
        Controller(model, Policy(alpha_warmup=None), recorder=resumed)
    resumed.close()


def test_a_clip_before_the_step_changes_no_column() -> None:
    columns = []
    for clip_first in (False, True):
        model = model_of("fp8")
        controller = Controller(model, Policy(alpha_warmup=None), detector="source")
        model(batch(0)).square().mean().backward()
        if clip_first:
            controller.clip_grad_norm_(100.0)
        controller.step()
        assert controller.reading is not None
        columns.append(controller.reading.columns["output"].tolist())
    assert columns[0] == columns[1]


@pytest.mark.parametrize(
    ("recipe", "options", "match"),
    [
        (None, {"detector": "gap"}, "convert_"),
        ("fp8", {"sensors": [Noise(), Gap()]}, "one seat"),
        ("fp8", {"sensors": [UpdateNorm(), UpdateNorm()]}, "column of its own"),
    ],
)
def test_what_cannot_be_sensed_is_refused(recipe: str | None, options: dict, match: str) -> None:
    with pytest.raises(TrimtabError, match=match):
        Controller(model_of(recipe), Policy(alpha_warmup=None), mode="observe", **options)


def test_an_unknown_column_and_wrong_settings_are_refused() -> None:
    with pytest.raises(TrimtabError, match="did you mean 'output'"):
        sensor_of("outputs")
    with pytest.raises(TrimtabError, match="share must be"):
        Gap(share=0.0)
    with pytest.raises(TrimtabError, match="units_per_step"):
        Gap(units_per_step=0)
    with pytest.raises(TrimtabError, match="these units name none"):
        OutputGain().attach([Unit("a", ())])


def test_detaching_a_controller_takes_its_sensors_off() -> None:
    model = model_of("fp8")
    controller = Controller(model, Policy(alpha_warmup=None), detector="gap", sensors=[OutputGain(), GradientSNR()])
    controller.detach()
    assert_bare(model)


def test_an_observer_without_sensors_reads_norms_alone() -> None:
    model = model_of(None)
    model(batch(0)).square().mean().backward()
    assert set(Observer(find_units(model), trainable([model])).read().columns) == {"norm"}
