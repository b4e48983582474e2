# SPDX-License-Identifier: Apache-2.0
"""A plain training loop under control: a small model on the text of Python's standard library, in emulated FP4.

    python examples/plain_loop.py [STEPS]

The five lines that make it trimtab's are marked. The run folder is read with `trimtab report runs/example`.
"""

import sys

import torch

import trimtab
from trimtab.lab.data import Sampler, load_corpus
from trimtab.lab.model import Decoder, ModelConfig


def main(steps: int = 100, folder: str = "runs/example") -> dict[str, float]:
    torch.manual_seed(0)
    model = Decoder(ModelConfig.size("micro"), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sampler = Sampler(load_corpus().train, batch=8, seq=128, seed=0)

    print(trimtab.convert_(model, "fp4", unit="block"))  # 1: low = E2M1, high = hybrid FP8, block by block
    policy = trimtab.Policy.preset("steady").replace(max_high=1)  # 2: at most one block high at a time
    recorder = trimtab.Recorder(folder, force=True)  # 3: norms and decisions, for the report
    controller = trimtab.Controller(model, policy, total_steps=steps, recorder=recorder)  # 4

    for step in range(1, steps + 1):
        loss = model(*sampler.batch_at(step)).loss
        loss.backward()
        controller.step()  # 5: who runs high in the next step
        controller.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        recorder.log(step, loss=loss.item())
    recorder.close()
    return controller.summary()


if __name__ == "__main__":
    print(main(*(int(argument) for argument in sys.argv[1:2])))
