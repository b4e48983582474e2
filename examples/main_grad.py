# SPDX-License-Identifier: Apache-2.0
"""Gradients in `main_grad`, as Megatron-Core keeps them, observed: FP32 buffers add up micro-batches, `p.grad` is None.

    python examples/main_grad.py [STEPS]

The lines that make it trimtab's are marked. The loop is plain PyTorch in Megatron's manner, so that it runs anywhere;
with Megatron itself the lines are the same, between `forward_backward_func` and `optimizer.step()`.
"""

import sys

import torch

from trimtab.integrations.megatron import MainGradController  # trimtab
from trimtab.lab.data import Sampler, load_corpus
from trimtab.lab.model import Decoder, ModelConfig


def accumulate(p: torch.nn.Parameter) -> None:
    p.main_grad.add_(p.grad)
    p.grad = None


def main(steps: int = 60) -> list[float]:
    torch.manual_seed(0)
    model = Decoder(ModelConfig.size("micro"), seed=0)
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        p.register_post_accumulate_grad_hook(accumulate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sampler = Sampler(load_corpus().train, batch=8, seq=64, seed=0)
    losses = []

    controller = MainGradController(model, total_steps=steps)  # trimtab

    for step in range(1, 2 * steps + 1):
        loss = model(*sampler.batch_at(step)).loss
        (loss / 2).backward()
        losses.append(loss.item())
        if step % 2 == 0:
            controller.step()  # trimtab
            for p in model.parameters():
                p.grad = p.main_grad.clone()
                p.main_grad.zero_()
            optimizer.step()
            optimizer.zero_grad()
    print(controller.median_ratios())  # trimtab
    return losses


if __name__ == "__main__":
    print(main(*(int(argument) for argument in sys.argv[1:2]))[-1])
