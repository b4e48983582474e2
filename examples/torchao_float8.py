# SPDX-License-Identifier: Apache-2.0
"""torchao's float8 training under control: its own linears become units, none is replaced.

    python examples/torchao_float8.py [STEPS]

The lines that make it trimtab's are marked. `emulate=True` lets it run without a GPU; leave it out on one.
"""

import sys

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import trimtab  # trimtab
from trimtab.integrations.torchao import adopt_  # trimtab
from trimtab.lab.data import Sampler, load_corpus
from trimtab.lab.model import Decoder, ModelConfig


def main(steps: int = 60) -> list[float]:
    torch.manual_seed(0)
    model = Decoder(ModelConfig.size("micro"), seed=0)
    config = Float8LinearConfig(emulate=not torch.cuda.is_available())
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, fqn: "blocks" in fqn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sampler = Sampler(load_corpus().train, batch=8, seq=64, seed=0)
    losses = []

    print(adopt_(model))  # trimtab
    controller = trimtab.Controller(model, trimtab.Policy(max_high=2), total_steps=steps)  # trimtab

    for step in range(1, steps + 1):
        loss = model(*sampler.batch_at(step)).loss
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
