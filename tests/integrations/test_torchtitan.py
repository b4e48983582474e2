# SPDX-License-Identifier: Apache-2.0
"""torchtitan, the real one, driven by a TOML: its configuration, converters, Llama, optimizer and `train_step`.

Two things are put in its place, because they need a GPU: the file of a Triton kernel for mixtures, which none of this
uses, and `Trainer.__init__`, which asks CUDA for its memory; the parts that it would make are made by hand.
"""

import copy
import importlib
import importlib.util
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from integrations.notes import Notes, without

import trimtab
from trimtab.errors import MissingExtraError, TrimtabError

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    kernels = ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None  # type: ignore[attr-defined]
    sys.modules.setdefault(kernels.__name__, kernels)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.models.llama3 import get_train_spec
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.protocols.model_converter import build_model_converters
    from torchtitan.train import Trainer

    from trimtab.integrations.torchtitan import TrimtabConverter

TOML = Path(__file__).parents[2] / "examples" / "torchtitan.toml"
STEPS = 6
ARGS = TransformerModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=64, rope_theta=10000, max_seq_len=64)


@pytest.fixture(autouse=True)
def _unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = getattr(dist_utils.clip_grad_norm_, "__wrapped__", dist_utils.clip_grad_norm_)
    monkeypatch.setattr(dist_utils, "clip_grad_norm_", clip)


def parsed(*more: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tyro
        return ConfigManager().parse_args([f"--job.config_file={TOML}", f"--training.steps={STEPS}", *more])


def dims(pp: int = 1) -> ParallelDims:
    made = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=pp, ep=1, etp=1, world_size=pp)
    made.get_optional_mesh = lambda _: None  # type: ignore[method-assign]  # it would ask for CUDA
    return made


def batches(config: Any) -> Any:
    draw = torch.Generator().manual_seed(1)
    while True:
        rows = torch.randint(0, 64, (config.training.local_batch_size, 17), generator=draw)
        yield {"input": rows[:, :-1]}, rows[:, 1:]


def trainer(config: Any) -> tuple[Any, Any]:
    """What `Trainer.__init__` makes, in its order, without CUDA."""
    spec = get_train_spec()
    made = object.__new__(Trainer)
    made.job_config, made.parallel_dims, made.device = config, dims(), torch.device("cpu")
    with torch.device("meta"):
        model = spec.model_cls(ARGS)
    converters = build_model_converters(config, made.parallel_dims)
    converters.convert(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
    model.train()
    made.model_parts, made.model_args, made.tokenizer = [model], ARGS, None
    made.optimizers = spec.build_optimizers_fn(made.model_parts, config.optimizer, made.parallel_dims)
    made.lr_schedulers = spec.build_lr_schedulers_fn(made.optimizers, config.lr_scheduler, config.training.steps)
    made.optimizers.register_step_post_hook(lambda *_, **__: converters.post_optimizer_hook(made.model_parts))
    made.loss_fn = spec.build_loss_fn(config, parallel_dims=made.parallel_dims)
    made.train_context, made.maybe_enable_amp = nullcontext, nullcontext()
    made.gradient_accumulation_steps = 2
    made.checkpointer = SimpleNamespace(maybe_wait_for_staging=lambda: None)
    made.metrics_processor = SimpleNamespace(
        should_log=lambda _: True, log=lambda *values, **_: norms.append(values[3]), ntokens_since_last_log=0
    )
    made.step, made.ntokens_seen = 0, 0
    norms: list[float] = []
    return made, (next(iter(converters.converters), None), norms)


def run(config: Any) -> tuple[Any, Any, list[float]]:
    made, (converter, norms) = trainer(config)
    data = batches(config)
    for _ in range(config.training.steps):
        made.step += 1
        made.train_step(data)
    return made.model_parts[0], converter, norms


def by_hand(config: Any) -> tuple[Any, Notes]:
    """The same training as a plain loop."""
    made, _ = trainer(plain(config))
    model, notes = made.model_parts[0], Notes()
    trimtab.convert_(model, "fp8")
    controller = trimtab.Controller(model, trimtab.Policy(max_high=4), total_steps=STEPS, recorder=notes)
    data = batches(config)
    for _ in range(STEPS):
        micro = [next(data) for _ in range(2)]
        made.optimizers.zero_grad()
        for inputs, labels in micro:
            (made.loss_fn(model(inputs["input"]), labels) / (2 * labels.numel())).backward()
        controller.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm, foreach=True)
        made.optimizers.step()
        made.lr_schedulers.step()
    return model, notes


def plain(config: Any) -> Any:
    config = copy.deepcopy(config)
    config.model.converters = []
    return config


def test_a_job_with_the_converter_decides_as_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parsed()
    assert config.trimtab.max_high == 4
    assert config.model.converters == ["trimtab"]
    model, expected = by_hand(config)
    notes = Notes()
    monkeypatch.setattr("trimtab.integrations.torchtitan.Recorder", lambda _: notes)
    config.trimtab.run_folder = "anywhere"
    trained, converter, norms = run(config)
    assert isinstance(converter, TrimtabConverter)
    assert expected.is_eventful()
    assert notes.rows == expected.rows
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), model.parameters(), strict=True))
    assert min(norms) > config.training.max_norm  # all were clipped, and read before
    assert norms == pytest.approx([row[3] for row in notes.rows], rel=1e-5)


def test_observing_changes_no_bit() -> None:
    config = parsed("--trimtab.mode=observe")
    bare, *_ = trainer(plain(config))
    data = batches(config)
    for _ in range(STEPS):
        bare.train_step(data)
    watched, converter, _ = run(config)
    assert converter.controller.mode == "observe"
    assert converter.controller.steps == STEPS
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), bare.model_parts[0].parameters(), strict=True))


def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrimtabError, match="pipeline parallelism"):
        TrimtabConverter(parsed(), dims(pp=2))
    with pytest.raises(TrimtabError, match="early_step_in_backward"):
        TrimtabConverter(parsed("--optimizer.early_step_in_backward"), dims())
    made, _ = trainer(parsed())
    monkeypatch.setattr(dist_utils, "clip_grad_norm_", dist_utils.clip_grad_norm_.__wrapped__)  # type: ignore
    with pytest.raises(TrimtabError, match="this step did not call it"):
        made.train_step(batches(made.job_config))


def test_the_toml_is_a_plain_job_without_its_marked_lines(tmp_path: Path) -> None:
    lines = TOML.read_text(encoding="utf-8").splitlines()
    bare = [line for line in lines if "# trimtab" not in line]
    assert len(lines) < 60
    assert len(lines) - len(bare) <= 6
    (tmp_path / "plain.toml").write_text("\n".join(bare), encoding="utf-8")
    config = ConfigManager().parse_args([f"--job.config_file={tmp_path / 'plain.toml'}"])
    assert config.model.converters == []
    assert not hasattr(config, "trimtab")


def test_without_the_library_the_import_says_how_to_get_it() -> None:
    name = "trimtab.integrations.torchtitan"
    with without("torchtitan", name), pytest.raises(MissingExtraError, match=r"pip install 'trimtab\[torchtitan\]'$"):
        importlib.import_module(name)
