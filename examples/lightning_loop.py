# SPDX-License-Identifier: Apache-2.0
"""Lightning under control: a small model on the text of Python's standard library, in emulated FP4.

    python examples/lightning_loop.py [STEPS]

The lines that make it trimtab's are marked. The controller's state is in Lightning's own checkpoints.
"""

import sys

import lightning.pytorch as pl
import torch

import trimtab  # trimtab
from trimtab.integrations.lightning import TrimtabCallback  # trimtab
from trimtab.lab.data import Sampler, load_corpus
from trimtab.lab.model import Decoder, ModelConfig


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder(ModelConfig.size("micro"), seed=0)
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = self.model(*batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main(steps: int = 100, folder: str = "runs/example-lightning") -> list[float]:
    torch.manual_seed(0)
    module = Module()
    sampler = Sampler(load_corpus().train, batch=8, seq=64, seed=0)
    batches = [sampler.batch_at(step) for step in range(1, 2 * steps + 1)]
    trainer = pl.Trainer(
        default_root_dir=folder,
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
    )
    print(trimtab.convert_(module, "fp4", unit="block"))  # trimtab
    trainer.callbacks.append(TrimtabCallback(trimtab.Policy.preset("steady").replace(max_high=1)))  # trimtab
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    print(trainer.callbacks[-1].controller.summary())  # trimtab
    return module.losses


if __name__ == "__main__":
    print(main(*(int(argument) for argument in sys.argv[1:2]))[-1])
