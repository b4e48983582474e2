# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine under control: its own linears become units, none is replaced. Needs a GPU with FP8.

    python examples/transformer_engine_loop.py [STEPS]

The lines that make it trimtab's are marked. The tests run it on a stand-in for the library, on CPU.
"""

import sys

import torch
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.common.recipe import Float8CurrentScaling

import trimtab  # trimtab
from trimtab.integrations.transformer_engine import adopt_  # trimtab


def main(steps: int = 100) -> list[float]:
    torch.manual_seed(0)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    layers = [nn.Sequential(te.LayerNormLinear(64, 128), nn.GELU(), te.Linear(128, 64)) for _ in range(4)]
    model = nn.Sequential(*layers).to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []

    print(adopt_(model))  # trimtab
    controller = trimtab.Controller(model, trimtab.Policy(max_high=2), total_steps=steps)  # trimtab

    for _ in range(steps):
        x = torch.randn(64, 64, device=place)
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            loss = (model(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        controller.step()  # trimtab
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(controller.summary())  # trimtab
    return losses


if __name__ == "__main__":
    print(main(*(int(argument) for argument in sys.argv[1:2]))[-1])
