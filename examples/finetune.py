# SPDX-License-Identifier: Apache-2.0
"""LoRA with INT8 base linears in your own loop: peft makes the adapters, trimtab decides which layers run plain.

    python examples/finetune.py [STEPS]

The model is a small random Llama, so that nothing is downloaded; put your own in its place. For whole runs with chat
data, checkpoints and a report: `trimtab finetune MODEL DATA`.
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import trimtab


def main(steps: int = 60, folder: str = "runs/example-finetune") -> dict[str, float]:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=8, **shape))
    get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))  # in place
    model.train()
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)

    print(trimtab.convert_(model, "int8", unit="block"))  # switch: the frozen base linears; signal: the adapters
    policy = trimtab.Policy.preset("paper-c").replace(max_high=0.25, warmup="monitor")
    recorder = trimtab.Recorder(folder, force=True)
    controller = trimtab.Controller(model, policy, total_steps=steps, recorder=recorder)

    draw = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        start = torch.randint(64, (8, 1), generator=draw)
        tokens = (start + 3 * torch.arange(33)) % 64  # count on in threes
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        controller.step()
        controller.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        recorder.log(step, loss=loss.item())
    recorder.close()
    return controller.summary()


if __name__ == "__main__":
    print(main(*(int(argument) for argument in sys.argv[1:2])))
