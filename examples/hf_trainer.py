# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer under control: a small random Llama learns to count on in threes, in emulated FP8.

    python examples/hf_trainer.py [STEPS]

The lines that make it trimtab's are marked; `trainer.train(resume_from_checkpoint=True)` restores the controller too.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import trimtab  # trimtab
from trimtab.integrations.transformers import TrimtabCallback  # trimtab


def main(steps: int = 60, folder: str = "runs/example-hf") -> list[float]:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=4, **shape))
    print(trimtab.convert_(model, "fp8", unit="block"))  # trimtab
    tokens = (torch.arange(64)[:, None] + 3 * torch.arange(33)) % 64
    args = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        max_grad_norm=1.0,
        logging_steps=1,
        report_to=[],
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = Trainer(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
    control = TrimtabCallback(trainer, trimtab.Policy.preset("steady").replace(max_high=1))  # trimtab
    trainer.add_callback(control)  # trimtab
    trainer.train()
    print(control.controller.summary())  # trimtab
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(main(*(int(argument) for argument in sys.argv[1:2]))[-1])
