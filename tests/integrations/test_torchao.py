# SPDX-License-Identifier: Apache-2.0
"""torchao's float8 linears, the real ones (emulated GEMMs on CPU), as units."""

import copy
import importlib
import warnings

import pytest
import torch
from integrations.notes import POLICY, Notes, example, without
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trimtab

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of kernels that a CPU lacks
    pytest.importorskip("torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

from trimtab.errors import MissingExtraError, NoEffectWarning, TrimtabError
from trimtab.integrations.torchao import adopt_, release_


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16))


def float8(model: nn.Module | None = None) -> nn.Module:
    return convert_to_float8_training(plain() if model is None else model, config=Float8LinearConfig(emulate=True))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def test_low_is_torchaos_and_high_is_the_plain_linear_to_the_bit() -> None:
    x = torch.randn(8, 16)
    model = float8()
    low = gradients(model, x)
    report = adopt_(model)
    assert report.covered == ("0", "2", "4")
    assert "3 of 3 modules switchable in 3 units" in str(report)
    assert same(gradients(model, x), low)
    with trimtab.running(model, "high"):
        high = gradients(model, x)
    assert same(high, gradients(plain(), x))
    assert not same(high, low)


def test_nothing_is_swapped_and_release_undoes_it() -> None:
    model = float8()
    modules, weights, saved = list(model.modules()), list(model.parameters()), list(model.state_dict())
    adopt_(model)
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert all(a is b for a, b in zip(weights, model.parameters(), strict=True))
    assert list(model.state_dict()) == saved
    assert release_(model) == 3
    assert [type(m) for m in model.modules()] == [type(m) for m in float8().modules()]


def test_a_forward_keeps_its_path_for_backward_and_recompute() -> None:
    x = torch.randn(8, 16, requires_grad=True)
    model = float8()
    adopt_(model)
    expected = gradients(model, x)
    model.zero_grad()
    loss = checkpoint(model, x, use_reentrant=False).square().sum()
    for module in model.modules():
        if isinstance(module, Float8Linear):
            module.switch.planned = True
    loss.backward()
    assert same([p.grad for p in model.parameters()], expected)


def test_a_controller_moves_the_units() -> None:
    model, notes = float8(), Notes()
    adopt_(model)
    controller = trimtab.Controller(model, POLICY, total_steps=8, recorder=notes)
    assert controller.names == ("0", "2", "4")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    for _ in range(8):
        x = torch.randn(8, 16)
        (model(x) - x).square().mean().backward()
        plan = controller.step()
        optimizer.step()
        optimizer.zero_grad()
        assert [model[int(name)].switch.high for name in controller.names] == plan.mask.tolist()  # type: ignore[index]
    assert notes.is_eventful()


def test_units_are_grouped_and_filtered() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([plain(), plain()])

    model = float8(Net())
    report = adopt_(model, unit="block", filter_fn=lambda _, path: not path.endswith(".4"))
    assert report.units == {"layers.0": ("layers.0.0", "layers.0.2"), "layers.1": ("layers.1.0", "layers.1.2")}
    assert set(report.skipped.values()) == {"filter_fn said no"}
    with pytest.raises(TrimtabError, match=r"already has layers\.0, layers\.1"):
        adopt_(model, unit="block")
    assert "adopted already" in adopt_(model, unit=["*.4"]).skipped.values()


def test_a_weight_that_is_gathered_in_fp8_is_left_alone() -> None:
    model = float8()
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
    mixed = nn.Sequential(model, convert_to_float8_training(plain(), config=config))
    report = adopt_(mixed)
    assert report.covered == ("0.0", "0.2", "0.4")
    assert "no high-precision weight arrives" in str(report)


def test_what_would_do_nothing_or_recompile_is_said() -> None:
    with pytest.warns(NoEffectWarning, match="0 of 0"):
        adopt_(plain())
    model = float8()
    adopt_(model)
    with pytest.raises(Exception, match="every new plan would recompile it") as caught:
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(8, 16))
    assert isinstance(caught.value, TrimtabError) or "TrimtabError" in str(caught.value)


def test_a_copy_has_a_switch_of_its_own() -> None:
    model = float8()
    adopt_(model)
    twin = copy.deepcopy(model)
    model[0].switch.planned = True  # type: ignore[index]
    assert not twin[0].switch.high  # type: ignore[index]


def test_the_example_learns_with_and_without_its_marked_lines(capsys: pytest.CaptureFixture) -> None:
    main, plain = example("torchao_float8.py")
    for run in (main, plain):
        losses = run(10)
        assert losses[-1] < losses[0] - 0.2
    assert "14 of 14 modules switchable in 14 units" in capsys.readouterr().out


def test_without_the_library_the_import_says_how_to_get_it() -> None:
    name = "trimtab.integrations.torchao"
    with without("torchao", name), pytest.raises(MissingExtraError, match=r"pip install 'trimtab\[torchao\]'$"):
        importlib.import_module(name)
