# SPDX-License-Identifier: Apache-2.0
"""A small random Llama as a folder of Transformers: weights, config, and a tokenizer by bytes with a chat template."""

from pathlib import Path

CHAT = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def make_llama(folder: Path, *, layers: int = 4, width: int = 32, positions: int = 512, chat: str = CHAT) -> Path:
    """Write one; four attention heads, two of keys and values."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    words.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|end|>", pad_token="<|pad|>", additional_special_tokens=["<|start|>"]
    )
    tokenizer.chat_template = chat
    numbers = tokenizer.get_vocab()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        eos_token_id=numbers["<|end|>"],
        pad_token_id=numbers["<|pad|>"],
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
