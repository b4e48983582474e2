# SPDX-License-Identifier: Apache-2.0
"""What a step keeps and what it peaks at: BF16 against saved activations in 4 and 8 bit, and against FP8.

    python benchmarks/memory.py [--model 936m] [--batch 8]

`kept` is what autograd holds for the backward of the covered linears, measured on their saved tensors; the ratio is to
the same in BF16. `peak` is the allocator's peak over a whole training step (blocks not compiled, AdamW), on CUDA.
`ms` is the time of that step, for what it costs: one round of five steps each, not interleaved.
"""

import argparse
import gc
import time
from typing import Any

import torch
from common import save
from step import MODELS
from torch import Tensor, nn

import trimtab
from trimtab import convert_
from trimtab.lab.model import Decoder

ARMS: dict[str, tuple[str | None, str]] = {
    "bf16": (None, "low"),
    "saved4, low": ("saved4", "low"),
    "saved4, high": ("saved4", "high"),
    "fp8, low": ("fp8", "low"),
}


def kept_bytes(model: Decoder, tokens: Tensor) -> int:
    """Bytes that the covered linears keep for backward, each storage once."""
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.head]
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}
    held: list[torch.UntypedStorage] = []
    inside = [0]

    def keep(t: Tensor) -> None:
        # The memory is held, not the tensor: an output that came back from here would hold its own graph for ever.
        storage = t.untyped_storage()
        held.append(storage)
        if inside[0] and storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()

    def enter(*_: Any) -> None:
        inside[0] += 1

    def leave(*_: Any) -> None:
        inside[0] -= 1

    hooks = [m.register_forward_pre_hook(enter) for m in linears] + [m.register_forward_hook(leave) for m in linears]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda _: torch.empty(0)):
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
    for hook in hooks:
        hook.remove()
    del loss
    return sum(seen.values())


def measure(name: str, recipe: str | None, path: str, batch: int, device: str) -> dict[str, float]:
    """One arm."""
    gc.collect()
    torch.manual_seed(0)
    model = Decoder(MODELS[name], seed=0).to(device, torch.bfloat16)
    if recipe is not None:
        convert_(model, recipe, backend="real")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    tokens = torch.randint(0, model.config.vocab_size, (batch, model.config.max_seq + 1), device=device)
    found: dict[str, float] = {}
    started = 0.0
    with trimtab.running(model, path):
        found["kept_mb"] = round(kept_bytes(model, tokens) / 1e6, 2)
        for turn in range(6):
            if turn == 1:
                started = time.perf_counter()
                if device == "cuda":
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    started = time.perf_counter()
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
            assert loss is not None
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
            found["peak_mb"] = round(torch.cuda.max_memory_allocated() / 1e6, 1)
    found["ms"] = round((time.perf_counter() - started) * 200, 2)
    return found


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="936m", choices=list(MODELS))
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arms = {arm: how for arm, how in ARMS.items() if device == "cuda" or how[0] != "fp8"}  # emulated it keeps copies
    table = {arm: measure(args.model, *how, args.batch, device) for arm, how in arms.items()}
    for row in table.values():
        row["kept_ratio"] = round(row["kept_mb"] / table["bf16"]["kept_mb"], 4)
    save(f"memory_{device}_{args.model}", table, batch=args.batch)


if __name__ == "__main__":
    main()
