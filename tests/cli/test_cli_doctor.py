# SPDX-License-Identifier: Apache-2.0
"""`trimtab doctor`: looks at folders, settings and runs without their weights; its exit code says what it found."""

import json
from pathlib import Path
from typing import Any

import pytest

from trimtab.errors import MissingExtraError
from trimtab.lab.doctor import Machine
from trimtab.lab.finetune_config import FinetuneConfig
from trimtab.lab.pretrained import smollm2_file


@pytest.fixture(autouse=True)
def _on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = Machine("cuda", (9, 0), "H200")
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: hopper))


def told(answer: Any) -> dict[str, str]:
    return {finding["code"]: finding["severity"] for finding in json.loads(answer.out)["findings"]}


def test_nothing_wrong_is_code_0_and_said(trimtab: Any) -> None:
    answer = trimtab("doctor")
    assert (answer.code, answer.err) == (0, "")
    assert "no model, recipe fp8, on H200" in answer.out
    assert "none of the known traps" in answer.out


def test_an_error_is_code_1_and_comes_with_its_remedy(trimtab: Any) -> None:
    answer = trimtab("doctor", "--clipping", "before")
    assert answer.code == 1
    assert "[clipped-norms]" in answer.out
    assert "remedy: call controller.step() first" in answer.out
    assert answer.out.endswith("1 error, 0 warnings\n")


def test_settings_are_looked_at_without_building_weights(trimtab: Any) -> None:
    answer = trimtab("doctor", "--set", "model=1b", "--set", "recipe=fp8", "--set", "backend=real", "--json")
    assert answer.code == 1
    assert told(answer) == {"shape-16": "error"}  # its inner width is 5461
    fine = trimtab("doctor", "--set", "model=osp-1.4b", "--set", "backend=real", "--json")
    assert (fine.code, told(fine)) == (0, {})
    assert json.loads(fine.out)["healthy"] is True


def test_a_file_of_settings_and_options_over_it(trimtab: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "osp-1.4b"\nrecipe = "saved4"\ncheckpointing = true\n')
    assert told(trimtab("doctor", file, "--json")) == {"nothing-saved": "warning"}
    assert told(trimtab("doctor", file, "--set", "checkpointing=false", "--json")) == {}
    changed = trimtab("doctor", file, "--recipe", "fp8_delayed", "--compile", "reduce-overhead", "--json")
    assert told(changed) == {"delayed-scaling": "warning", "cuda-graphs": "warning"}
    assert changed.code == 0


def test_a_run_folder_is_looked_at_by_its_settings(trimtab: Any, short_run: Any) -> None:
    run = short_run(1)
    answer = trimtab("doctor", run, "--json")
    assert answer.code == 0
    assert json.loads(answer.out)["model"] == "micro of the lab"
    assert set(told(answer)) == {"shape-16", "small-gemms"}  # an inner width of 172, emulated


def test_a_hugging_face_folder_is_read_without_its_weights(trimtab: Any, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_llama / "config.json").read_bytes())
    answer = trimtab("doctor", tmp_path, "--json")
    assert answer.code == 0
    assert told(answer) == {"small-gemms": "warning"}
    found = json.loads(answer.out)["findings"][0]["where"]
    assert "model.layers.3.mlp.down_proj" in found
    assert "lm_head" not in found
    config = json.loads((tmp_path / "config.json").read_text())
    config["intermediate_size"] = 60
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert told(trimtab("doctor", tmp_path, "--json"))["shape-16"] == "error"
    assert told(trimtab("doctor", tmp_path, "--json", "--backend", "emulated"))["shape-16"] == "warning"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--recipe", "fp9"], "recipe must be one of"),
        (["--compile", "fast"], "compile_mode must be one of"),
        (["--set", "modle=micro"], "unknown setting 'modle'"),
        (["{tmp}"], "there is neither"),
        (["{tmp}/x.toml"], "readable text file"),
    ],
)
def test_bad_input_gets_one_line(trimtab: Any, tmp_path: Path, args: list[str], words: str) -> None:
    answer = trimtab("doctor", *(arg.format(tmp=tmp_path) for arg in args))
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert words in answer.err


def test_settings_are_not_for_somebody_elses_model(trimtab: Any, tiny_llama: Path) -> None:
    assert "leave it out" in trimtab("doctor", tiny_llama, "--set", "model=micro").err


def test_a_broken_folder_gets_one_line(trimtab: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    answer = trimtab("doctor", tmp_path)
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert "a causal language model is needed" in answer.err


def test_a_fine_tuning_run_is_looked_at_by_the_model_it_started_from(
    trimtab: Any, tiny_llama: Path, tmp_path: Path
) -> None:
    config = FinetuneConfig.from_dict({"model": str(tiny_llama), "data": "x.jsonl", "recipe": "fp8", "backend": "real"})
    (tmp_path / "run.json").write_text(json.dumps({"config": config.to_dict()}))
    answer = trimtab("doctor", tmp_path, "--json")
    assert json.loads(answer.out)["model"] == tiny_llama.name
    assert json.loads(answer.out)["recipe"] == "fp8"
    assert told(answer) == {"small-gemms": "warning"}


def test_a_gguf_is_looked_at_by_name_and_nothing_else_is_printed(trimtab: Any) -> None:
    try:
        smollm2_file()
    except MissingExtraError as error:
        pytest.skip(str(error))
    answer = trimtab("doctor", "smollm2", "--recipe", "fp8", "--json")
    assert (answer.code, answer.err) == (0, "")
    assert told(answer) == {"small-gemms": "warning"}
