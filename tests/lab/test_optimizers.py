# SPDX-License-Identifier: Apache-2.0
"""The optimizers of a run: by name and option, one learning-rate schedule for all, and bit-exact resumption."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.errors import TrimtabError
from trimtab.lab.config import Config, load_settings
from trimtab.lab.model import Decoder, ModelConfig
from trimtab.lab.optimizers import OPTIMIZERS, TRANSFORMS, Update, schedule
from trimtab.lab.train import train
from trimtab.optim.spam import SPAM
from trimtab.optim.stabilizer import GradStabilizer


def model(**changes: Any) -> Decoder:
    return Decoder(ModelConfig.size("micro", **{"width": 16, "heads": 2, "ffn": 24, "max_seq": 8, **changes}), seed=0)


def test_the_learning_rate_warms_up_falls_and_stays() -> None:
    rates = [schedule(step, Config(steps=100)) for step in range(1, 151)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[9] == max(rates) == 1.0
    assert rates[54] == pytest.approx(0.1 + 0.9 / 2)  # half-way down the cosine
    assert all(a > b for a, b in itertools.pairwise(rates[9:100]))
    assert rates[99:] == pytest.approx([0.1] * 51)
    assert schedule(1, Config(steps=1)) == 1.0


def test_a_trapezoid_is_flat_until_its_last_fifth() -> None:
    config = Config(steps=100, lr_schedule="trapezoid", lr_warmup=5)
    rates = [schedule(step, config) for step in range(1, 151)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:80] == [1.0] * 75
    assert rates[80:100] == pytest.approx([1 - 0.05 * n for n in range(1, 21)])
    assert rates[100:] == [0.0] * 50


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("transform", ["none", *TRANSFORMS])
def test_every_optimizer_learns_with_every_transform(name: str, transform: str) -> None:
    if name == "stable_spam" and transform not in ("none", "stabilizer"):
        pytest.skip("refused, see below")
    decoder, tokens = model(), torch.arange(64).view(8, 8)
    update = Update(decoder, Config(optimizer=name, transform=transform, lr=0.01 if name != "sgd" else 0.1))
    covered = [id(p) for group in update.param_groups for p in group["params"]]
    assert sorted(covered) == sorted(id(p) for p in decoder.parameters())
    losses = []
    for _ in range(12):
        loss = decoder(tokens, tokens).loss
        losses.append(loss.item())
        loss.backward()
        update.step(1.0)
        update.zero_grad()
    assert losses[-1] < losses[0] - 0.01


def test_every_group_follows_the_schedule_from_its_own_peak() -> None:
    update = Update(model(), Config(optimizer="osp", lr=0.02, optimizer_options={"adam_lr": 0.005}))
    assert [group["lr"] for group in update.param_groups] == [0.02, 0.005]
    update.step(0.5)
    assert [group["lr"] for group in update.param_groups] == [0.01, 0.0025]
    update.step(1.0)
    assert [group["lr"] for group in update.param_groups] == [0.02, 0.005]


def test_options_reach_the_optimizer_and_the_transform() -> None:
    update = Update(
        model(),
        Config(
            optimizer="spam",
            weight_decay=0.1,
            optimizer_options={"density": 0.25, "betas": [0.8, 0.99]},
            transform="stabilizer",
            transform_options={"gammas": [0.5, 0.9], "global_norm": True},
        ),
    )
    (spam,) = update.optimizers
    assert isinstance(spam, SPAM)
    assert {group["density"] for group in spam.param_groups} == {0.25, 1.0}
    assert all(group["betas"] == (0.8, 0.99) and group["weight_decay"] == 0.1 for group in spam.param_groups)
    assert isinstance(update.transform, GradStabilizer)
    stable = Update(model(), Config(optimizer="stable_spam", optimizer_options={"reset_every": 500}))
    assert isinstance(stable.transform, GradStabilizer)
    assert stable.optimizers[0].param_groups[0]["reset_every"] == 500
    assert stable.optimizers[0].param_groups[0]["threshold"] == float("inf")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "lion"}, "optimizer must be one of adamw, sgd, spam, stable_spam, osp, got 'lion'"),
        ({"optimizer_options": {"beta": 1}}, "unknown setting 'optimizer_options.beta': did you mean 'betas'"),
        ({"optimizer_options": {"lr": 1}}, "optimizer_options.lr is a setting of its own: write lr=1"),
        ({"transform": "clip"}, "transform must be one of none, stabilizer, zclip, adagc, autoclip, got 'clip'"),
        ({"transform_options": {"gammas": 1}}, "transform_options need a transform"),
        ({"transform": "zclip", "transform_options": {"gamma": 1}}, "unknown setting 'transform_options.gamma'"),
        ({"optimizer": "stable_spam", "transform": "zclip"}, "stable_spam stabilizes the gradients itself"),
        ({"optimizer": "spam", "optimizer_options": {"density": 2}}, "density must"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TrimtabError, match=message):
        Update(model(), Config(**settings))


def test_the_shipped_osp_file_sets_its_three_settings_and_more_may_follow() -> None:
    assert load_settings("osp") == {"optimizer": "osp", "norm": "ssnorm", "embproj": True}
    assert load_settings("osp", ["embproj=false"])["embproj"] is False
    with pytest.raises(TrimtabError, match=r"or one of .*osp.*, got 'ops'"):
        load_settings("ops")


def test_a_run_with_spam_a_recipe_control_and_faults_composes(tmp_path: Path, small: dict[str, Any]) -> None:
    settings = {
        **small,
        "optimizer": "spam",
        "optimizer_options": {"reset_every": 4, "warmup": 1, "grace": 1, "density": 0.5},
        "transform": "stabilizer",
        "norm": "ssnorm",
        "embproj": True,
        "recipe": "fp4",
        "policy": {"max_high": 2},
        "faults": "blocks.0.mlp.up:grad_spike:start=2,width=2",
    }
    result = train(settings, tmp_path / "run")
    assert result.summary["promotion_ratio"] > 0
    assert result.eval_loss_high < 7
