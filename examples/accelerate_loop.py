# SPDX-License-Identifier: Apache-2.0
"""A loop with Accelerate under control: a small model on the text of Python's standard library, in emulated FP4.

    accelerate launch examples/accelerate_loop.py [STEPS]

The lines that make it trimtab's are marked: the controller steps by itself, before clipping, once per optimizer step,
and `accelerator.save_state` keeps it.
"""

import sys

import torch
from accelerate import Accelerator

import trimtab  # trimtab
from trimtab.integrations.accelerate import control  # trimtab
from trimtab.lab.data import Sampler, load_corpus
from trimtab.lab.model import Decoder, ModelConfig


def main(steps: int = 100) -> list[float]:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = Decoder(ModelConfig.size("micro"), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sampler = Sampler(load_corpus().train, batch=8, seq=64, seed=0)
    losses = []

    print(trimtab.convert_(model, "fp4", unit="block"))  # trimtab
    model, optimizer = accelerator.prepare(model, optimizer)
    policy = trimtab.Policy.preset("steady").replace(max_high=1)  # trimtab
    controller = control(accelerator, model, policy, total_steps=steps)  # trimtab

    for step in range(1, 2 * steps + 1):
        with accelerator.accumulate(model):
            inputs, targets = (t.to(accelerator.device) for t in sampler.batch_at(step))
            loss = model(inputs, targets).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    print(controller.summary())  # trimtab
    return losses


if __name__ == "__main__":
    print(main(*(int(argument) for argument in sys.argv[1:2]))[-1])
