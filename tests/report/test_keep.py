# SPDX-License-Identifier: Apache-2.0
"""Keep: the offenders of a run, and no others, are kept high by the tool that loads the list."""

import fnmatch
import json
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trimtab.control.policy import Policy
from trimtab.errors import TrimtabError
from trimtab.report.keep import TARGETS, keep_list, to_megatron, to_te, to_torchao
from trimtab.report.summary import summarize

UNITS = [f"layers.{i}.{kind}" for i in range(4) for kind in ("q_proj", "up_proj", "down_proj")]
EVIL = "a'\"\n]\nimport os  # \N{LINE SEPARATOR}"
NASTY = [EVIL, "layers.1.mlp: {x}", "layers.2.w[0]", "back\\slash"]


@pytest.fixture(name="run", scope="module")
def _run(tmp_path_factory: pytest.TempPathFactory, make_run: Any) -> Path:
    """One unit that always comes back, one that spiked once."""
    folder = tmp_path_factory.mktemp("runs") / "offended"
    policy = Policy(max_high=3, alpha=1.5, beta=2.0, warmup_steps=10, persistent_after=3)
    make_run(folder, steps=200, units=UNITS, policy=policy, faults=((5, 60, 100, 7.0), (1, 30, 1, 9.0)))
    return folder


def loaded(text: str) -> dict[str, Any]:
    exec(compile(text, "exported.py", "exec"), names := {})
    return names


def test_the_persistent_offenders_are_the_list(run: Path) -> None:
    offenders = summarize(run).offenders
    assert [o.unit for o in offenders if o.persistent] == ["layers.1.down_proj"]
    assert keep_list(run) == ("layers.1.down_proj",)
    assert set(keep_list(run, top=2)) == {"layers.1.down_proj", "layers.0.up_proj"}
    assert len(keep_list(run, top=99)) == sum(o.steps_high > 0 for o in offenders)


def test_a_run_without_any_is_told(run: Path, tmp_path: Path, make_run: Any) -> None:
    make_run(tmp_path / "quiet", steps=60)
    with pytest.raises(TrimtabError, match=r"no unit of it ever ran high$"):
        keep_list(tmp_path / "quiet")
    make_run(tmp_path / "once", steps=60, faults=((1, 30, 1, 9.0),))
    with pytest.raises(TrimtabError, match="none of its units is a persistent offender; --top N"):
        keep_list(tmp_path / "once")
    assert len(keep_list(tmp_path / "once", top=3)) == 1
    with pytest.raises(TrimtabError, match="at least 1"):
        keep_list(run, top=0)


def test_torchao_converts_everything_but_the_list() -> None:
    pytest.importorskip("torchao")
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        def block() -> Any:
            return torch.nn.ModuleDict({"q": torch.nn.Linear(16, 16), "down": torch.nn.Linear(16, 16)})

        model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(block() for _ in range(12))})
        names = loaded(to_torchao(["layers.1.down", "layers.3", "*.10.q"], "mine"))
        config = Float8LinearConfig(emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=names["module_filter_fn"])
    plain = {path for path, module in model.named_modules() if type(module) is torch.nn.Linear}
    assert plain == {"layers.1.down", "layers.3.q", "layers.3.down", "layers.10.q"}
    low = model["layers"][0]["q"]
    assert type(low).__name__ == "Float8Linear"
    x = torch.randn(16, 16, requires_grad=True)
    model["layers"][1]["down"](low(x)).sum().backward()
    assert x.grad.isfinite().all()
    assert names["RUN"] == "mine"


def test_transformer_engine_runs_the_list_outside_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    state = {"fp8": True}

    @contextmanager
    def autocast(enabled: bool = True) -> Any:
        before, state["fp8"] = state["fp8"], enabled
        yield
        state["fp8"] = before

    class Linear(torch.nn.Module):
        def forward(self, x: Any, *, keep: list[bool]) -> Any:
            keep.append(state["fp8"])
            return x

    te = ModuleType("transformer_engine.pytorch")
    te.autocast = autocast  # type: ignore[attr-defined]
    package = ModuleType("transformer_engine")
    package.pytorch = te  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", te)
    model = torch.nn.ModuleDict(
        {"a": Linear(), "b": torch.nn.ModuleDict({"c": Linear(), "d": Linear()}), "e": Linear()}
    )
    names = loaded(to_te(["a", "b"]))
    assert names["keep_high_"](model) == ["a", "b"]
    ran: list[bool] = []
    for module in (model["a"], model["e"]):
        module(1, keep=ran)
    assert ran == [False, True]
    assert names["keep_high_"](torch.nn.ModuleDict({"b": torch.nn.ModuleDict({"c": Linear()})})) == ["b"]
    del te.autocast
    te.fp8_autocast = autocast  # type: ignore[attr-defined]  (what older ones call it)
    one = torch.nn.ModuleDict({"a": Linear()})
    names["keep_high_"](one)
    one["a"](1, keep=ran)
    assert ran[-1] is False


def matched(text: str, path: str) -> str | None:
    """Which config Megatron's own rule gives a module: the first enabled glob that matches, in order."""
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load(text)
    for matcher in config["matchers"].values():
        assert set(matcher) == {"type", "enabled", "pattern", "config"}
        assert (matcher["type"], matcher["enabled"]) == ("glob", True)
        assert config["configs"][matcher["config"]] == {
            "transformer_engine_config_type": "TEQuantizationParams",
            "training_recipe": {},
        }
        if fnmatch.fnmatch(path, matcher["pattern"]):
            return matcher["config"]
    return None


@pytest.mark.parametrize(
    ("unit", "kept"),
    [
        ("model.layers.3.self_attn.q_proj", "self_attention.linear_qkv"),
        ("model.layers.3.self_attn.v_proj", "self_attention.linear_qkv"),
        ("model.layers.3.self_attn.o_proj", "self_attention.linear_proj"),
        ("model.layers.3.mlp.gate_proj", "mlp.linear_fc1"),
        ("model.layers.3.mlp.down_proj", "mlp.linear_fc2"),
        ("base_model.model.model.layers.3.mlp.down_proj", "mlp.linear_fc2"),
        ("blocks.3.attn.o", "self_attention.linear_proj"),
        ("blocks.3.mlp.up", "mlp.linear_fc1"),
        ("transformer.h.3.attn.c_proj", "self_attention.linear_proj"),
        ("transformer.h.3.mlp.c_proj", "mlp.linear_fc2"),
        ("decoder.layers.3.mlp.linear_fc1", "mlp.linear_fc1"),
        ("model.layers.3.mlp.experts.5.down_proj", "mlp.experts.linear_fc2"),
        ("model.layers.3.mlp.shared_experts.up_proj", "mlp.shared_experts.linear_fc1"),
    ],
)
def test_megatron_keeps_the_gemm_of_that_name(unit: str, kept: str) -> None:
    text = to_megatron([unit])
    assert matched(text, f"module.decoder.layers.3.{kept}") == "bf16"
    others = {"self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"} - {kept}
    for path in [f"decoder.layers.3.{other}" for other in others] + [f"decoder.layers.{n}.{kept}" for n in (0, 13, 30)]:
        assert matched(text, path) is None


@pytest.mark.parametrize(
    ("unit", "inside"),
    [
        ("blocks.2", "mlp.linear_fc1"),
        ("h.2.mlp", "mlp.linear_fc2"),
        ("layers.2.self_attn", "self_attention.linear_qkv"),
    ],
)
def test_megatron_keeps_a_whole_block(unit: str, inside: str) -> None:
    text = to_megatron([unit])
    assert matched(text, f"decoder.layers.2.{inside}") == "bf16"
    assert matched(text, f"decoder.layers.12.{inside}") is None


def test_fused_gemms_are_named_once_and_what_has_no_name_is_told() -> None:
    text = to_megatron(["layers.1.q_proj", "layers.1.k_proj", "layers.1.strange", "head"])
    assert text.count("pattern:") == 1
    assert '# no name of Megatron is known for "layers.1.strange"' in text
    assert '# no name of Megatron is known for "head"' in text
    with pytest.raises(TrimtabError, match="no name of Megatron is known for 'head'"):
        to_megatron(["head"])


@pytest.mark.parametrize("target", ["torchao", "te"])
def test_names_stay_text_in_python(target: str) -> None:
    names = loaded(TARGETS[target](NASTY, EVIL))
    assert names["KEEP_HIGH"] == NASTY
    assert names["RUN"] == EVIL
    assert "os" not in names
    assert names["is_kept"]("layers.2.w[0]")
    assert not names["is_kept"]("layers.2.w")


def test_names_stay_text_in_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    text = to_megatron([*NASTY, "layers.0.q"], EVIL)
    assert list(yaml.safe_load(text)) == ["configs", "matchers"]
    assert len(yaml.safe_load(text)["matchers"]) == 1
    assert json.dumps(EVIL) in text


def test_it_needs_no_torch() -> None:
    script = "import sys, trimtab.report.keep\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
