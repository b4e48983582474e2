# SPDX-License-Identifier: Apache-2.0
"""Guards: skip_step drops the update of the injected spike and of nothing else; clip_flagged brings flagged units back
to their own mean norm and touches no other."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trimtab.errors import TrimtabError
from trimtab.lab.config import Config
from trimtab.lab.run import Run, Silent, StepInfo
from trimtab.lab.train import train
from trimtab.report.read import read_run

SPIKE = "blocks.1.mlp.up:grad_scale:start=25,size=4096"
SKIP = {"guard": "skip_step", "guard_options": {"warmup": 20, "window": 20}, "mode": "observe", "path": "low"}


class Weights(Silent):
    """Keeps the weights after every step."""

    def __init__(self) -> None:
        self.kept: list[dict[str, torch.Tensor]] = []

    def started(self, run: Run) -> None:
        self.run = run

    def stepped(self, info: StepInfo) -> None:
        self.kept.append({name: p.detach().clone() for name, p in self.run.model.named_parameters()})


def column(folder: Path, name: str) -> list[int]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


@pytest.mark.parametrize("kind", ["spike", "nan", "none"])
def test_skip_step_skips_exactly_the_injected_spike(tmp_path: Path, small: dict[str, Any], kind: str) -> None:
    faults = {"spike": SPIKE, "nan": "blocks.1.mlp.up:nan:start=25", "none": ""}[kind]
    watcher = Weights()
    settings = {**small, **SKIP, "steps": 32, "checkpoint_every": 0, "faults": faults}
    train(settings, tmp_path / "run", watcher=watcher)
    skipped = [step for step, said in enumerate(column(tmp_path / "run", "skipped"), 1) if said]
    assert skipped == ([] if kind == "none" else [25])
    pairs = zip(watcher.kept[:-1], watcher.kept[1:], strict=True)
    still = [step for step, (a, b) in enumerate(pairs, 2) if all(a[name].equal(b[name]) for name in a)]
    assert still == skipped


def test_a_bad_batch_is_skipped_by_its_loss(tmp_path: Path, small: dict[str, Any]) -> None:
    settings = {**small, **SKIP, "steps": 60, "batch": 4, "checkpoint_every": 0, "bad_data": "start=50"}
    settings["guard_options"] = {"warmup": 20, "window": 20, "sigmas": 6.0}
    train(settings, tmp_path / "run")
    assert np.flatnonzero(column(tmp_path / "run", "skipped")).tolist() == [49]


def test_clip_flagged_brings_flagged_units_to_their_mean_norm(small: dict[str, Any], tmp_path: Path) -> None:
    class Norms(Silent):
        """Reads the gradients that the optimizer is given."""

        def started(self, run: Run) -> None:
            self.run, step = run, run.update.step

            def stepping(share: float) -> None:
                units = run.controller.units
                squares = [sum(float(p.grad.double().square().sum()) for p in u.parameters) for u in units]  # type: ignore
                given.append(np.sqrt(squares))
                step(share)

            run.update.step = stepping  # type: ignore[method-assign]

    given: list[np.ndarray] = []
    settings = {**small, "guard": "clip_flagged", "faults": "blocks.1.mlp.up:grad_scale:start=6,width=2,size=64"}
    train(settings, tmp_path / "run", watcher=Norms())
    trace = read_run(tmp_path / "run").trace
    assert trace is not None
    assert not trace.high.any()
    means = np.cumsum(trace.norms, axis=0, dtype=np.float64) / np.arange(1, 11)[:, None]
    ratio = np.array([np.asarray(given)[t] / trace.norms[t] for t in range(10)])
    clipped = ratio < 0.999
    assert clipped.sum(axis=1).tolist() == column(tmp_path / "run", "clipped")
    assert clipped.sum(axis=1).max() <= 3  # the budget
    assert clipped[5, trace.units.index("blocks.1.mlp.up")]
    assert np.asarray(given)[1:][clipped[1:]] == pytest.approx(means[:-1][clipped[1:]], rel=1e-4)
    assert ratio[~clipped] == pytest.approx(1.0, abs=1e-6)


def test_clip_flagged_and_a_selection_exclude_each_other(small: dict[str, Any]) -> None:
    with pytest.raises(TrimtabError, match="clip_flagged lets nobody run high, and a selection chooses"):
        Run(Config.from_dict({**small, "guard": "clip_flagged"}), Silent(), lambda step, verdict: np.zeros(14, bool))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"guard": "skip"}, "guard must be one of none, skip_step, clip_flagged, got 'skip'"),
        ({"guard_options": {"sigmas": 3}}, "guard_options are those of skip_step, got guard=none"),
        ({"guard": "clip_flagged", "mode": "off"}, "got mode=off"),
        ({"guard": "clip_flagged", "detector": "gap"}, "got detector=gap"),
        ({"guard": "clip_flagged", "selection": "top_norm"}, "got selection=top_norm"),
        ({"guard": "clip_flagged", "policy": {"replay_step": 3.0}}, "got replay_step=3.0"),
        (
            {"selection": "round_robin", "mode": "observe"},
            "selection needs a plan that is carried out, got mode=observe",
        ),
        (
            {"fixed_high": ["a"], "path": "low"},
            "fixed_high needs a plan that is carried out, got mode=act and path=low",
        ),
        ({"selection": "oracle", "fixed_high": "ends"}, "the oracle fills all seats"),
        ({"batch": 3, "split": 2}, "split must divide the batch of 3, got 2"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TrimtabError, match=message):
        Config.from_dict(settings)


def test_guard_options_are_checked(small: dict[str, Any]) -> None:
    wrong = {**small, "guard": "skip_step", "guard_options": {"sigma": 3}}
    with pytest.raises(TrimtabError, match=r"unknown setting 'guard_options.sigma': did you mean 'sigmas'"):
        Run(Config.from_dict(wrong), Silent())
