# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO observed: norms of every linear through its partitioned gradients, and what a policy would do.

    deepspeed examples/deepspeed_zero.py [STEPS]

The lines that make it trimtab's are marked. Observing changes not a bit of the run.
"""

import sys

import deepspeed
import torch

from trimtab.integrations.deepspeed import ZeroController  # trimtab
from trimtab.lab.data import Sampler, load_corpus
from trimtab.lab.model import Decoder, ModelConfig


def main(steps: int = 60, stage: int = 2) -> list[float]:
    torch.manual_seed(0)
    model = Decoder(ModelConfig.size("micro"), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    sampler = Sampler(load_corpus().train, batch=8 * engine.world_size, seq=64, seed=0)
    losses = []

    controller = ZeroController(engine, total_steps=steps)  # trimtab

    for step in range(1, 2 * steps + 1):
        inputs, targets = (t.chunk(engine.world_size)[engine.global_rank] for t in sampler.batch_at(step))
        loss = engine(inputs.to(engine.device), targets.to(engine.device)).loss
        engine.backward(loss)
        controller.step()  # trimtab
        engine.step()
        losses.append(loss.item())
    print(controller.median_ratios())  # trimtab
    return losses


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    print(main(*arguments[:1])[-1])
