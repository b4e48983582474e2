# SPDX-License-Identifier: Apache-2.0
"""A lab decoder as a plain Hugging Face LLaMA: the same logits, with nothing of trimtab left in it.

    SSNorm              an RMSNorm with its gain in every feature
    EmbProj             multiplied into embedding and head: E' = E P^T, H' = H R
    converted linears   their weights, which are plain ones (low precision is how they were trained, not what they are)
    tied weights        stay tied, but not with EmbProj, where E' and H' differ

Both rotate the same pairs (i, i + d/2) by the same angles, so no weight is permuted. The angles are rounded differently
(here from float64, there from float32), which is all the difference there is in FP32.

`save_llama` writes a folder that `LlamaForCausalLM.from_pretrained` and every tool that reads LLaMA can open. It holds
no tokenizer: a token is what it was in training, a byte or the id of the run's tokenizer.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError, missing_extra
from trimtab.lab.model import Attention, Decoder, causal_attention
from trimtab.linear.linear import SwitchLinear
from trimtab.nn import SSNorm
from trimtab.nn.embproj import fold_embedding, fold_head

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

BLOCK = {
    "attn_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
"""Path inside a block here -> there."""


def to_llama(model: Decoder) -> "LlamaForCausalLM":
    """The LLaMA that computes what a decoder does, in its dtype and on its device, in eval mode; the decoder stays."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise missing_extra("transformers", "hf", "to_llama") from None
    model = getattr(model, "_orig_mod", model)  # of a compiled one
    _check(model)
    ours = model.config
    config = LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.width,
        intermediate_size=ours.ffn,
        num_hidden_layers=ours.layers,
        num_attention_heads=ours.heads,
        num_key_value_heads=ours.kv_heads or ours.heads,
        max_position_embeddings=ours.max_seq,
        rms_norm_eps=ours.norm_eps,
        rope_theta=ours.rope_theta,  # pyright: ignore[reportCallIssue] (every release takes it, as a keyword)
        tie_word_embeddings=ours.tied and not ours.embproj,
        bos_token_id=None,
        eos_token_id=None,
    )
    weight = model.embed.weight
    with torch.random.fork_rng(devices=[]):  # the weights it draws are replaced, and cost nobody random numbers
        # Built in its dtype: a cast afterwards would round the rotary frequencies too.
        llama = LlamaForCausalLM._from_config(config, dtype=weight.dtype)
    llama.load_state_dict(_weights(model))
    nn.Module.to(llama, weight.device)
    return llama.eval()


def save_llama(model: Decoder, folder: str | Path) -> Path:
    """Write `to_llama(model)` to a folder (config.json and model.safetensors); returns the folder."""
    folder = Path(folder)
    to_llama(model).save_pretrained(folder)
    return folder


@torch.no_grad()
def _weights(model: Decoder) -> dict[str, Tensor]:
    """A decoder's weights under the names of a LLaMA, norms and projections made plain."""
    modules = dict(model.named_modules())
    names = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    for layer in range(model.config.layers):
        names |= {f"blocks.{layer}.{ours}": f"model.layers.{layer}.{theirs}" for ours, theirs in BLOCK.items()}
    weights = {}
    for ours, theirs in names.items():
        module = modules[ours]
        if type(module) not in (nn.Embedding, nn.Linear, SwitchLinear, nn.RMSNorm, SSNorm):
            raise TrimtabError(
                f"a LLaMA is made of plain parts, got {ours!r} as a {type(module).__name__}: export the model before "
                "its modules are wrapped or replaced"
            )
        if module._forward_pre_hooks or module._forward_hooks:
            raise TrimtabError(
                f"a LLaMA has no hooks, got {ours!r} with one, which may change what it computes: remove it, or export "
                "the model before it is quantized"
            )
        plain = module.to_rmsnorm() if isinstance(module, SSNorm) else module
        weights[f"{theirs}.weight"] = plain.get_parameter("weight").detach()
    if model.embed_proj is not None and model.head_proj is not None:
        weights["model.embed_tokens.weight"] = fold_embedding(model.embed.weight, model.embed_proj.weight)
        weights["lm_head.weight"] = fold_head(model.head.weight, model.head_proj.weight)
    return weights


def _check(model: Decoder) -> None:
    """Refuse what a LLaMA cannot do, before a model comes out that computes something else."""
    if not isinstance(model, Decoder):
        raise TrimtabError(f"to_llama takes a Decoder, got a {type(model).__name__}: pass what it wraps")
    if model.config.num_experts:
        raise TrimtabError(
            f"a LLaMA has one feed-forward layer per block, got a mixture of {model.config.num_experts} experts: "
            "only dense decoders can be exported"
        )
    for path, module in model.named_modules():
        if isinstance(module, Attention) and module.attend is not causal_attention:
            raise TrimtabError(
                f"a LLaMA attends to unchanged keys and values, got {path!r} with an `attend` of its own: export the "
                "model before its attention is quantized"
            )
