# SPDX-License-Identifier: Apache-2.0
"""Several processes: a DDP model under control, whose gradients travel as a low-rank part.

    torchrun --nproc-per-node 2 examples/ddp.py

Every rank makes the controller, from the wrapped model; all of them decide alike. GreedyLore is a hook of DDP and
works with any optimizer; OneBitAdam(model.parameters(), ...).attach(ddp) would be the other way.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.comm import GreedyLore, traffic
from trimtab.lab.data import Sampler, load_corpus
from trimtab.lab.model import Decoder, ModelConfig


def main(steps: int = 100) -> dict[str, float]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = Decoder(ModelConfig.size("micro"), seed=0)
    trimtab.convert_(model, "fp8")
    ddp = DistributedDataParallel(model)
    greedy = GreedyLore(rank=8, every=20, start=3)
    greedy.attach(ddp)
    controller = trimtab.Controller(ddp, trimtab.Policy(max_high=2), total_steps=steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sampler = Sampler(load_corpus().train, batch=8, seq=64, seed=0)
    if rank == 0:
        print(greedy.report())

    for step in range(1, steps + 1):
        inputs, targets = (t.chunk(num_ranks)[rank] for t in sampler.batch_at(step))
        with traffic() as sent:
            ddp(inputs, targets).loss.backward()
        controller.step()
        optimizer.step()
        optimizer.zero_grad()
    return controller.summary() | {"payload": float(sent.payload)}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main())
    dist.destroy_process_group()
