# SPDX-License-Identifier: Apache-2.0
"""Where people already train: each file joins a controller to one library, and importing it needs that library.

    transformers, lightning, accelerate   the loop is theirs: `step()` is called where their gradients are whole,
                                          un-scaled and not yet clipped, and its state is in their checkpoints
    torchao, transformer_engine           the low path is theirs: their linears become units, in place
    torchtitan                            both: a model converter, named in its TOML
    deepspeed, megatron                   the gradients are theirs: norms come from where those are kept; observe only

`docs/integrations.md` opens with what each can observe and switch, and on what it was tested.
"""
