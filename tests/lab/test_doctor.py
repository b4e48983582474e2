# SPDX-License-Identifier: Apache-2.0
"""Doctor: each trap is found where it is, and not where it is not. A case that is free of all of them is changed by the
one thing that makes a trap."""

import ast
import inspect
import re
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

import trimtab
from trimtab import TrimtabError
from trimtab.lab import doctor as module
from trimtab.lab.config import Config
from trimtab.lab.doctor import CHECKS, Finding, Machine, decoder, doctor, is_healthy

HOPPER = Machine("cuda", (9, 0), "H200")
AMPERE = Machine("cuda", (8, 0), "A100")
BLACKWELL = Machine("cuda", (10, 0), "B200")
CPU = Machine("cpu")


class Model(nn.Module):
    """Two linears of a block, an embedding and a head, as shapes without numbers."""

    def __init__(self, width: int = 8192, ffn: int = 16384, *, tied: bool = False, dtype: Any = None) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embed = nn.Embedding(1000, width, dtype=dtype)
            self.blocks = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(width, ffn), "down": nn.Linear(ffn, width)})])
            self.head = nn.Linear(width, 1000, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.to(dtype)


def codes(*args: Any, **options: Any) -> list[str]:
    return [finding.code for finding in doctor(*args, **({"machine": HOPPER} | options))]


def found(code: str, *args: Any, **options: Any) -> Finding:
    findings = [f for f in doctor(*args, **({"machine": HOPPER} | options)) if f.code == code]
    assert len(findings) == 1, findings
    assert findings[0].remedy
    return findings[0]


def test_a_sound_case_has_no_finding() -> None:
    assert doctor(Model(), "fp8", machine=HOPPER) == ()
    assert trimtab.doctor is doctor


@pytest.mark.parametrize("recipe", ["fp8", "fp8_block", "int8"])
def test_nor_has_any_of_the_recipes_that_have_kernels(recipe: str) -> None:
    assert codes(Model(), recipe) == []


def test_a_model_without_linears() -> None:
    finding = found("nothing-to-convert", nn.Sequential(nn.Embedding(4, 4)))
    assert finding.severity == "error"
    assert "nothing-to-convert" in codes(Model(), filter_fn=lambda *_: False)
    assert "nothing-to-convert" not in codes(Model())
    assert "nothing-to-convert" not in codes(nn.Sequential(nn.Embedding(4, 4)), None)  # nothing is to be converted


@pytest.mark.parametrize("config", [{"quant_method": "fp8"}, SimpleNamespace(quant_method="fp8")])
def test_weights_that_are_stored_quantized(config: Any) -> None:
    model = Model()
    model.config = SimpleNamespace(quantization_config=config)
    assert "(fp8)" in found("already-quantized", model).message
    model.config = SimpleNamespace(quantization_config=None)
    assert codes(model) == []


def float8(width: int = 64, **options: Any) -> nn.Module:
    """A model converted by torchao, emulated."""
    pytest.importorskip("torchao")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        layers = {"embed": nn.Embedding(100, width), "up": nn.Linear(width, width), "lora_a": nn.Linear(width, width)}
        model = nn.ModuleDict({**layers, "head": nn.Linear(width, 100, bias=False)})
        model["head"].weight = model["embed"].weight
        skip = options.pop("skip", ())
        config = Float8LinearConfig(emulate=True, **options)
        return convert_to_float8_training(model, config=config, module_filter_fn=lambda _, path: path not in skip)


def test_weights_that_are_gathered_in_fp8() -> None:
    gathered = found("low-weights-gathered", float8(enable_fsdp_float8_all_gather=True))
    assert gathered.severity == "error"
    assert "up" in gathered.where
    assert "low-weights-gathered" not in codes(float8())
    assert found("low-weights-gathered", Model(), fp8_all_gather=True)
    assert "low-weights-gathered" not in codes(Model(), fp8_all_gather=False)


def test_a_tied_head_that_runs_low() -> None:
    finding = found("tied-head-low", float8())
    assert finding.where == ("head",)
    assert "tied-head-low" not in codes(float8(skip=("head",)))
    assert "tied-head-low" not in codes(Model(tied=True))  # convert_ leaves it alone
    other = Model(tied=True)
    other.out, other.head = nn.Linear(8, 8, device="meta"), other.head
    assert found("tied-head-low", other, head=other.out)  # somebody else was named as the head


def test_adapters_in_low_precision() -> None:
    assert found("adapters-low", float8()).where == ("lora_a",)
    assert "adapters-low" not in codes(float8(skip=("lora_a",)))


def test_norms_that_are_read_after_clipping() -> None:
    assert found("clipped-norms", Model(), clipping="before").severity == "error"
    for clipping in ("none", "after"):
        assert codes(Model(), clipping=clipping) == []


def test_sizes_that_matrix_units_cannot_take() -> None:
    odd = Model(ffn=16384 + 8)
    finding = found("shape-16", odd)
    assert finding.severity == "error"
    assert finding.where == ("blocks.0.up", "blocks.0.down")
    assert "blocks.0.up (8192x16392)" in finding.message
    assert found("shape-16", odd, backend="emulated").severity == "warning"
    assert "shape-16" not in codes(odd, "saved4")  # its products are plain
    assert "shape-16" not in codes(Model())


def test_sizes_that_block_scaling_pads() -> None:
    padded = Model(ffn=16384 + 16)
    assert found("shape-128", padded, "fp8_block").severity == "warning"
    assert codes(padded, "fp8") == []
    assert codes(Model(), "fp8_block") == []


@pytest.mark.parametrize(
    ("machine", "recipe", "severity"),
    [
        (CPU, "fp8", "warning"),
        (CPU, "int8", "warning"),
        (AMPERE, "fp8", "error"),
        (BLACKWELL, "fp8_block", "error"),
        (HOPPER, "fp8_block", None),
        (BLACKWELL, "fp8", None),
        (CPU, "saved4", None),
    ],
)
def test_machines_without_the_matrix_units(machine: Machine, recipe: str, severity: str | None) -> None:
    told = [f.severity for f in doctor(Model(), recipe, machine=machine) if f.code == "no-fp8-units"]
    assert told == ([] if severity is None else [severity])


def test_real_kernels_on_a_machine_without_them_are_an_error() -> None:
    assert found("no-fp8-units", Model(), machine=CPU, backend="real").severity == "error"
    assert found("no-fp8-units", Model(), machine=AMPERE, backend="emulated").severity == "warning"


@pytest.mark.parametrize("recipe", ["fp4", "fp6", "mxfp4", "nvfp4"])
def test_recipes_that_have_no_kernel(recipe: str) -> None:
    assert found("no-kernel", Model(), recipe).severity == "error"
    assert codes(Model(), recipe, backend="emulated") == []
    assert codes(Model(), recipe, machine=CPU) == []
    with pytest.raises(TrimtabError, match="cannot run on them"):  # the rule is convert_'s own
        trimtab.convert_(nn.Linear(128, 128), recipe, backend="real")


def test_delayed_scaling() -> None:
    assert found("delayed-scaling", Model(), "fp8_delayed").severity == "warning"
    assert "delayed-scaling" not in codes(Model(), "fp8")

    class DelayedScaling:
        pass

    model = Model()
    model.blocks[0]["up"].fp8_meta = {"recipe": DelayedScaling()}  # as a module of Transformer Engine has it
    assert found("delayed-scaling", model).where == ("blocks.0.up",)
    model.blocks[0]["up"].fp8_meta = {"recipe": object()}
    assert codes(model) == []


@pytest.mark.parametrize(("impl", "expected"), [("REENTRANT", True), ("NO_REENTRANT", False)])
def test_reentrant_recompute_by_torchs_wrapper(impl: str, expected: bool) -> None:
    model = Model()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0], checkpoint_impl=CheckpointImpl[impl])
    assert ("reentrant-recompute" in codes(model)) == expected


@pytest.mark.parametrize("reentrant", [True, False])
def test_reentrant_recompute_by_transformers(reentrant: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    assert "reentrant-recompute" not in codes(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert ("reentrant-recompute" in codes(model)) == reentrant
    model.gradient_checkpointing_disable()
    assert "reentrant-recompute" not in codes(model)


def test_reentrant_recompute_that_was_told() -> None:
    assert found("reentrant-recompute", Model(), checkpointing="reentrant")
    assert codes(Model(), checkpointing="nonreentrant") == []


def test_saved_activations_beside_recompute() -> None:
    assert found("nothing-saved", Model(), "saved4", checkpointing="nonreentrant")
    assert codes(Model(), "saved4") == []
    settings = {"recipe": "saved4", "checkpointing": True}
    assert "nothing-saved" in codes(decoder(Config.from_dict(settings)), "saved4")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of the compiler's own imports
def test_compile_modes_that_record_cuda_graphs() -> None:
    assert found("cuda-graphs", Model(), compile_mode="reduce-overhead")
    assert codes(Model(), compile_mode="default") == []
    assert codes(Model(), compile_mode="max-autotune-no-cudagraphs") == []
    assert found("cuda-graphs", torch.compile(Model(), mode="reduce-overhead"))
    assert codes(torch.compile(Model())) == []
    block = Model()
    block.blocks[0]["up"].compile(mode="reduce-overhead")
    assert found("cuda-graphs", block)


def test_the_combination_that_gave_nan_in_the_wild() -> None:
    case = {"compile_mode": "default", "checkpointing": "nonreentrant"}
    assert "emulate_precision_casts" in found("precision-casts", Model(), "fp8_row", **case).remedy
    for missing in case:
        assert "precision-casts" not in codes(Model(), "fp8_row", **{k: v for k, v in case.items() if k != missing})
    assert codes(Model(), "fp8", **case) == []


def test_gemms_that_are_too_small_to_gain() -> None:
    finding = found("small-gemms", Model(512, 1376))
    assert finding.where == ("blocks.0.down",)  # 1376 in, 512 out
    assert finding.message.startswith("1 of 2 linears")
    assert "small-gemms" not in codes(Model(512, 1376), "int8")
    assert codes(Model()) == []


def test_sizes_are_those_that_torchao_filters_by() -> None:
    pytest.importorskip("torchao")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import _auto_filter_for_recipe
    for recipe, is_small in (("tensorwise", module._small), ("rowwise", module._small_row_wise)):
        takes = _auto_filter_for_recipe(recipe, [])
        for inner in (1024, 1040, 2048, 2064, 4096, 4112):
            for outer in (1024, 1040, 2048, 2064, 4096, 4112):
                assert takes(nn.Linear(inner, outer, device="meta"), "x") == (not is_small(inner, outer))


def test_row_wise_scales_at_a_width_at_which_they_are_slower() -> None:
    finding = found("row-wise-slow", Model(2048, 8192), "fp8_row")
    assert "2,048" in finding.message
    assert "row-wise-slow" not in codes(Model(2048, 8192), "fp8")
    assert "row-wise-slow" not in codes(Model(), "fp8_row")


def test_weights_in_bf16() -> None:
    assert found("bf16-weights", Model(dtype=torch.bfloat16))
    assert codes(Model()) == []
    frozen = Model(dtype=torch.bfloat16)
    frozen.requires_grad_(False)
    assert codes(frozen) == []


def test_a_converted_model_is_looked_at_as_it_is() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 40), "b": nn.Linear(64, 64)})
    trimtab.convert_(model, "fp8", filter_fn=lambda _, path: path == "a")
    assert found("shape-16", model).where == ("a",)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    doctor(model, "fp8")
    assert before == {name: id(parameter) for name, parameter in model.named_parameters()}
    assert type(model["b"]) is nn.Linear


def test_without_a_model_the_rest_is_looked_at() -> None:
    assert codes(None, "fp8", machine=CPU) == ["no-fp8-units"]
    assert codes(None, None, machine=CPU) == []


def test_errors_come_first_and_decide() -> None:
    findings = doctor(Model(ffn=16392), "fp8_delayed", machine=AMPERE, clipping="before")
    severities = [finding.severity for finding in findings]
    assert severities == sorted(severities)
    assert set(severities) == {"error", "warning"}
    assert not is_healthy(findings)
    assert is_healthy(doctor(Model(), "fp8_delayed", machine=HOPPER))
    assert "remedy: " in str(findings[0])


def test_the_table_lists_every_code_and_every_check_is_called() -> None:
    tree = ast.parse(inspect.getsource(module))
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding"
    ]
    made = [ast.literal_eval(call.args[0]) for call in calls]
    assert sorted(made) == sorted(
        re.findall(r"^    ([a-z0-9]+(?:-\w+)+) +(?:error|warning)", module.__doc__ or "", re.M)
    )
    checks = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and "Finding]" in ast.unparse(node)]
    assert {check.__name__ for check in CHECKS} == {name for name in checks if name.startswith("_")}


def test_unknown_words_are_refused() -> None:
    for option in ("backend", "compile_mode", "checkpointing", "clipping"):
        with pytest.raises(TrimtabError, match=f"{option} must be one of .*got 'x'"):
            doctor(None, machine=CPU, **{option: "x"})
    with pytest.raises(TrimtabError, match="recipe must be one of"):
        doctor(None, "fp9")


def test_this_machine_is_asked() -> None:
    assert Machine.here().device == ("cuda" if torch.cuda.is_available() else "cpu")
