# SPDX-License-Identifier: Apache-2.0
"""Settings: every key has a default, files and pairs mean the same, and what is wrong is refused in one line."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from trimtab.control.policy import Policy
from trimtab.errors import TrimtabError
from trimtab.lab.config import Config, load_settings, parse_value

IMPOSSIBLE = [
    ("steps", 0),
    ("steps", 1.5),
    ("steps", True),
    ("batch", -1),
    ("accumulate", 0),
    ("eval_batches", 0),
    ("eval_every", -1),
    ("checkpoint_every", -5),
    ("top_k", 0),
    ("num_experts", -1),
    ("seq", 0),
    ("kv_heads", 0),
    ("seed", -1),
    ("seed", 2**64),
    ("lr", 0),
    ("lr", float("nan")),
    ("lr", float("inf")),
    ("lr", "fast"),
    ("weight_decay", -0.1),
    ("clip", 0.0),
    ("mode", "watch"),
    ("path", "middle"),
    ("dtype", "fp16"),
    ("backend", "fast"),
    ("model", 3),
    ("data", ""),
    ("data", None),
    ("recipe", 8),
    ("roles", 3),
    ("tokenizer", 3),
    ("checkpointing", "maybe"),
    ("unit", 4),
    ("unit", ["ok", 4]),
    ("split", 0),
    ("detector", ""),
    ("selection", "random"),
    ("guard", "skip"),
    ("fixed_high", 3),
    ("fixed_high", "middle"),
    ("fixed_high", ["ok", 4]),
    ("bad_data", 200),
]


def refusal(**settings: Any) -> str:
    with pytest.raises(TrimtabError) as caught:
        Config.from_dict(settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_key_has_a_default() -> None:
    assert Config.from_dict({}) == Config()
    assert Config().build_policy() == Policy()


def test_settings_survive_as_plain_values() -> None:
    config = Config(unit=["a.*", "b"], faults="x:nan:start=2", policy={"preset": "steady", "alpha": 2})
    assert Config.from_dict(config.to_dict()) == config
    assert config.replace(lr=1.0) == dataclasses.replace(config, lr=1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(("key", "value"), IMPOSSIBLE)
def test_an_impossible_value_is_refused_with_its_key_and_itself(key: str, value: Any) -> None:
    message = refusal(**{key: value})
    assert message.startswith(f"{key} must")
    assert message.endswith(f"got {value!r}")


@pytest.mark.parametrize(("wrong", "right"), [("step", "'steps'"), ("batchsize", "'batch'"), ("alpha", "policy.alpha")])
def test_an_unknown_key_names_the_nearest(wrong: str, right: str) -> None:
    assert f"unknown setting {wrong!r}: did you mean {right}?" in refusal(**{wrong: 1})


def test_an_unknown_key_without_a_neighbour_lists_the_valid_ones() -> None:
    message = refusal(zzzzzz=1)
    assert all(field.name in message for field in dataclasses.fields(Config))


def test_policy_settings_are_checked_too() -> None:
    assert "'alpa': did you mean 'alpha'" in refusal(policy={"alpa": 2})
    assert "alpha must be a positive number, got -1" in refusal(policy={"alpha": -1})
    assert "'stead'" in refusal(policy={"preset": "stead"})
    assert "policy must be a table" in refusal(policy=3)


def test_the_detector_is_checked_too() -> None:
    assert "unknown detector 'zscor': did you mean 'zscore'?" in refusal(detector="zscor")
    assert "detector zscore does not have all of these options: sigma" in refusal(
        detector="zscore", detector_options={"sigma": 4}
    )
    assert "detector_options must be a table" in refusal(detector_options=3)
    assert Config(detector="zscore", detector_options={"sigmas": 4.0, "full": True}).detector == "zscore"


def test_a_preset_is_the_start_for_the_rest_of_the_policy() -> None:
    policy = Config(policy={"preset": "steady", "alpha": 7.0}).build_policy()
    assert policy == Policy.preset("steady").replace(alpha=7.0)


def test_recipe_none_cannot_act() -> None:
    assert "mode=observe" in refusal(recipe="none")
    assert Config.from_dict({"recipe": None, "mode": "observe"}).recipe == "none"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("fp8", "fp8"),
        ('"fp8"', "fp8"),
        ("2e-3", 2e-3),
        (" 7 ", 7),
        ("true", True),
        ("none", None),
        ("NULL", None),
        ('["a", "b"]', ["a", "b"]),
        ("a:nan:start=2,width=3", "a:nan:start=2,width=3"),
        ("x y\nz = 3", "x y\nz = 3"),
        ("", ""),
    ],
)
def test_values_are_read_as_toml_and_else_as_text(text: str, value: Any) -> None:
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_toml_and_yaml_mean_the_same(tmp_path: Path) -> None:
    toml, yaml = tmp_path / "a.toml", tmp_path / "a.yaml"
    toml.write_text('lr = 2e-3\nclip = "none"\nunit = ["a", "b"]\n[policy]\nalpha = 2\nbeta = "none"\n')
    yaml.write_text("lr: 2e-3\nclip: null\nunit: [a, b]\npolicy:\n  alpha: 2\n  beta: null\n")
    assert load_settings(toml) == load_settings(yaml)
    assert load_settings(yaml) == {
        "lr": 2e-3,
        "clip": None,
        "unit": ["a", "b"],
        "policy": {"alpha": 2, "beta": None},
    }


def test_a_file_may_write_the_policy_dotted(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    file.write_text("policy.alpha: 2\npolicy.window: 7\n")
    assert load_settings(file) == {"policy": {"alpha": 2, "window": 7}}
    assert load_settings(None, ["policy.alpha=2", "policy.window=7"]) == load_settings(file)


def test_a_pair_beats_the_file_key_by_key(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("lr = 1.0\nsteps = 5\n[policy]\nalpha = 2\nwindow = 3\n")
    settings = load_settings(file, ["lr=0.5", "policy.alpha=4", "policy.alpha=5"])
    assert settings == {"lr": 0.5, "steps": 5, "policy": {"alpha": 5, "window": 3}}


@pytest.mark.parametrize("pair", ["lr", "=3", "  =3"])
def test_a_pair_without_key_or_equals_is_refused(pair: str) -> None:
    with pytest.raises(TrimtabError, match="key=value, got"):
        load_settings(None, [pair])


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.toml", "lr = = 3", "not valid TOML"),
        ("a.yaml", "lr: [1", "not valid YAML"),
        ("a.yaml", "- 1\n- 2", "holds a list"),
        ("a.json", "{}", "ends in .toml, .yaml or .yml"),
        ("a.toml", b"\xff\xfe", "readable text file"),
        ("a.toml", None, "readable text file"),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_one_line(
    tmp_path: Path, name: str, content: str | bytes | None, reason: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TrimtabError, match=reason) as caught:
        load_settings(path)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("pairs", [["policy=3"], ["policy=3", "policy.alpha=2"], ["policy=none", "policy.alpha=2"]])
def test_a_policy_that_is_no_table_is_refused_whatever_comes_with_it(pairs: list[str]) -> None:
    with pytest.raises(TrimtabError, match=r"policy must be a table .*, got (3|None)"):
        Config.from_dict(load_settings(None, pairs))


def test_a_key_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("3: 4\n")
    with pytest.raises(TrimtabError, match="unknown setting 3"):
        Config.from_dict(load_settings(file))


def test_a_recipes_own_options_reach_it_and_wrong_ones_are_named(tmp_path):
    from trimtab.lab.run import Run, Silent

    settings = {"recipe": "saved4", "recipe_options": {"scope": "forward", "element": "int"}, "device": "cpu"}
    run = Run(Config.from_dict(settings), Silent())
    assert run.report is not None
    assert run.report.recipe.low.name == "saved-int4:forward"
    with pytest.raises(TrimtabError, match="recipe 'fp8' takes no options, got scope"):
        Run(Config.from_dict({"recipe_options": {"scope": "forward"}, "device": "cpu"}), Silent())
    with pytest.raises(TrimtabError, match="recipe=none has no options"):
        Config.from_dict({"recipe": "none", "mode": "observe", "recipe_options": {"scope": "forward"}})
