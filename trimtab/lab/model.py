# SPDX-License-Identifier: Apache-2.0
"""A small LLaMA-style decoder: the model of the lab's experiments, and plain PyTorch throughout.

    tokens -> embed -> [ x + attn(attn_norm(x)) -> x + mlp(mlp_norm(x)) ] * layers -> norm -> head -> logits

    attn    q, k, v, o: rotary positions on q and k, causal, kv_heads may divide heads (grouped queries)
    mlp     SwiGLU: down(silu(gate(x)) * up(x)), or a mixture of such experts behind a router
    norm    RMSNorm, or SSNorm (one gain); embproj puts a square matrix after embed and one before head (`trimtab.nn`)

It knows nothing of precision: `trimtab.convert_` makes its linears switchable from outside, and every
linear has a path of its own (`blocks.3.attn.q`, `blocks.3.mlp.down`, `blocks.3.mlp.experts.5.up`).

Rotary positions turn the pair (x[i], x[i + d/2]) of position t by the angle t * theta^(-2i/d), so that
the product of a query and a key depends on their distance alone.

A mixture sends each token to the `top_k` experts with the largest router probability p. For top_k > 1
their weights are rescaled to sum to one (as Mixtral does); for top_k = 1 the weight is p itself (as in
Switch), because a rescaled one would be constant and give the router no gradient. The training loss
also carries Switch's balance term (arXiv 2101.03961, equation 4), averaged over the layers:

    balance = E * sum over experts e of  (share of assignments that went to e) * (mean p of e)

which is 1 when the load is even. An expert that got no token takes no part in the step: its parameters
keep `grad = None`, and an optimizer passes over them.

Weights are drawn from N(0, 0.02^2), the projections that write into the residual stream with another
1 / sqrt(2 * layers). They are drawn on the CPU in FP32, one tensor after the other, the orthogonal matrices of
embproj last: a seed means the same weights on every device, and the same shared ones with embproj and without.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from trimtab.errors import TrimtabError
from trimtab.nn import EmbProj, SSNorm

INIT_STD = 0.02
MOST_LINEARS = 32_768
"""What is built in seconds."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder; checked at construction."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    ffn: int
    """Inner width of the SwiGLU, of each expert in a mixture."""
    max_seq: int
    kv_heads: int | None = None
    """Heads of keys and values; None means as many as `heads`."""
    num_experts: int = 0
    """0: a dense model."""
    top_k: int = 2
    balance_coef: float = 0.01
    """Coefficient of the load-balance term in the training loss."""
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tied: bool = False
    """Whether the head shares the embedding's weight."""
    norm: str = "rmsnorm"
    """`rmsnorm` or `ssnorm`."""
    embproj: bool = False
    """Whether an `EmbProj` follows the embedding and another precedes the head. A tied model with them trains, and is
    exported untied."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads", "ffn", "max_seq"):
            if getattr(self, name) < 1:
                raise TrimtabError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise TrimtabError(
                f"width must be an even multiple of heads (rotary positions turn pairs), got width {self.width} "
                f"and heads {self.heads}: change one of them"
            )
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise TrimtabError(f"kv_heads must divide heads ({self.heads}), got {self.kv_heads}")
        if self.num_experts < 0:
            raise TrimtabError(f"num_experts must be 0 (dense) or more, got {self.num_experts}")
        if self.num_experts and not 1 <= self.top_k <= self.num_experts:
            raise TrimtabError(f"top_k must lie between 1 and num_experts ({self.num_experts}), got {self.top_k}")
        linears = self.layers * (4 + 3 * max(1, self.num_experts))
        if linears > MOST_LINEARS:  # a damaged file may say anything, and would be built for hours
            raise TrimtabError(
                f"a model may have at most {MOST_LINEARS:,} linears, got {linears:,} ({self.layers:,} layers, "
                f"{self.num_experts:,} experts): lower layers or num_experts"
            )
        if self.norm not in NORMS:
            raise TrimtabError(f"norm must be one of {', '.join(NORMS)}, got {self.norm!r}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

    @classmethod
    def size(cls, name: str, **overrides: Any) -> "ModelConfig":
        """The named size (see `SIZES`), with some fields replaced."""
        if name not in SIZES:
            raise TrimtabError(f"a model size must be one of {', '.join(SIZES)}, got {name!r}")
        fields = [field.name for field in dataclasses.fields(cls)]
        for key in overrides:
            if key not in fields:
                raise TrimtabError(f"a model has no field {key!r}: it has {', '.join(fields)}")
        return dataclasses.replace(SIZES[name], **overrides)


NORMS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "rmsnorm": lambda config: nn.RMSNorm(config.width, eps=config.norm_eps),
    "ssnorm": lambda config: SSNorm(config.width, eps=config.norm_eps),
}

SIZES: dict[str, ModelConfig] = {
    "micro": ModelConfig(vocab_size=256, width=64, layers=2, heads=4, ffn=172, max_seq=128),
    "tiny": ModelConfig(vocab_size=256, width=128, layers=4, heads=4, ffn=344, max_seq=256),
    "60m": ModelConfig(vocab_size=32_000, width=512, layers=8, heads=8, ffn=1376, max_seq=256),
    "130m": ModelConfig(vocab_size=32_000, width=768, layers=12, heads=12, ffn=2048, max_seq=256),
    "350m": ModelConfig(vocab_size=32_000, width=1024, layers=24, heads=16, ffn=2736, max_seq=256),
    # 1.3B parameters. arXiv 2606.00539 prints 24 heads and 32 layers, but 24 does not divide 2048: GaLore's
    # llama_1b, which it follows, has 32 heads and 24 layers.
    "1b": ModelConfig(vocab_size=32_000, width=2048, layers=24, heads=32, ffn=5461, max_seq=256),
    "osp-1.4b": ModelConfig(vocab_size=49_152, width=2048, layers=24, heads=16, ffn=5504, max_seq=2048),  # 2506.19697
}


class Output(NamedTuple):
    """What a decoder returns: the loss (None without targets) and the logits."""

    loss: Tensor | None
    logits: Tensor  # (batch, seq, vocab)


def rope_tables(seq: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each (seq, head_dim / 2)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    angles = torch.outer(torch.arange(seq, dtype=torch.float64, device="cpu"), theta**-exponent)
    return angles.cos().float(), angles.sin().float()


def rope(
    x: Tensor,  # (..., seq, head_dim)
    cos: Tensor,  # (seq, head_dim / 2)
    sin: Tensor,  # (seq, head_dim / 2)
) -> Tensor:
    """Turn each pair (x[i], x[i + head_dim / 2]) by its position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the experts of each token.

    Args:
        logits: (tokens, experts), the router's output.

    Returns:
        weights (tokens, top_k), chosen experts (tokens, top_k), and the balance term (a scalar).
    """
    probs = logits.float().softmax(dim=-1)  # (tokens, experts)
    weights, chosen = probs.topk(top_k, dim=-1)
    if top_k > 1:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    num_experts = logits.shape[-1]
    share = torch.bincount(chosen.flatten(), minlength=num_experts).to(probs.dtype) / chosen.numel()
    return weights, chosen, num_experts * (share * probs.mean(dim=0)).sum()


def _linear(num_in: int, num_out: int) -> nn.Linear:
    return nn.Linear(num_in, num_out, bias=False)


def causal_attention(
    q: Tensor,  # (batch, heads, seq, head_dim)
    k: Tensor,  # (batch, kv_heads, seq, head_dim)
    v: Tensor,  # (batch, kv_heads, seq, head_dim)
) -> Tensor:  # (batch, heads, seq, head_dim)
    """Attend to the past: each head of keys and values serves as many heads of queries as there are to one."""
    shared = q.shape[1] // k.shape[1]
    if shared > 1:
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    return scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and, if asked, grouped queries.

    `attend` is the function of q, k and v in the middle: an attribute, so that what would be stored as keys and values
    can be changed from outside.
    """

    attend: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.kv_heads = config.kv_heads or config.heads
        self.q = _linear(config.width, self.heads * self.head_dim)
        self.k = _linear(config.width, self.kv_heads * self.head_dim)
        self.v = _linear(config.width, self.kv_heads * self.head_dim)
        self.o = _linear(self.heads * self.head_dim, config.width)
        self.attend = causal_attention

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x: (batch, seq, width)
        batch, seq, _ = x.shape
        q = rope(self.q(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2), cos, sin)
        k = rope(self.k(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2), cos, sin)
        v = self.v(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        y = self.attend(q, k, v)  # (batch, heads, seq, head_dim)
        return self.o(y.transpose(1, 2).reshape(batch, seq, self.heads * self.head_dim))


class SwiGLU(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = _linear(config.width, config.ffn)
        self.up = _linear(config.width, config.ffn)
        self.down = _linear(config.ffn, config.width)

    def forward(self, x: Tensor) -> Tensor:  # (..., width)
        return self.down(silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """SwiGLU experts behind a router; returns its output and the balance term."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = _linear(config.width, config.num_experts)
        self.experts = nn.ModuleList(SwiGLU(config) for _ in range(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # x: (batch, seq, width)
        flat = x.reshape(-1, x.shape[-1])  # (tokens, width)
        weights, chosen, balance = route(self.router(flat), self.top_k)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, slot = (chosen == index).nonzero(as_tuple=True)
            if token.numel():  # without a token the expert is not called: its gradients stay None
                out.index_add_(0, token, (expert(flat[token]) * weights[token, slot, None]).to(out.dtype))
        return out.view_as(x), balance


class Block(nn.Module):
    """One layer; returns the residual stream and, from a mixture, its balance term."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm = NORMS[config.norm](config)
        self.attn = Attention(config)
        self.mlp_norm = NORMS[config.norm](config)
        self.mlp = Mixture(config) if config.num_experts else SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        out = self.mlp(self.mlp_norm(x))
        out, balance = out if isinstance(out, tuple) else (out, None)
        return x + out, balance


class Decoder(nn.Module):
    """The decoder of this file's docstring.

    Args:
        seed: an int, a CPU generator, or None for torch's global generator. An int leaves the global one
            untouched. On the meta device nothing is drawn: `to_empty` and `reset_parameters` do it later.
        checkpointing: recompute each block in the backward instead of keeping its activations; an attribute
            that may be changed at any step boundary.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, config: ModelConfig, *, seed: int | torch.Generator | None = None, checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.checkpointing = checkpointing
        device = torch.get_default_device()
        with torch.device("meta"):  # torch's own initial values would cost time and random numbers, and go unused
            self.embed = nn.Embedding(config.vocab_size, config.width)
            self.embed_proj = EmbProj(config.width) if config.embproj else None
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = NORMS[config.norm](config)
            self.head_proj = EmbProj(config.width) if config.embproj else None
            self.head = _linear(config.width, config.vocab_size)
            for name in ("cos", "sin"):
                self.register_buffer(name, torch.empty(config.max_seq, config.head_dim // 2), persistent=False)
        if device.type != "meta":
            self.to_empty(device=device)
        if config.tied:
            self.head.weight = self.embed.weight
        if device.type != "meta":
            self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int | torch.Generator | None = None) -> None:
        """Draw all weights anew and fill the rotary tables."""
        generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
        residual = INIT_STD / math.sqrt(2 * self.config.layers)
        projections = [module for module in self.modules() if isinstance(module, EmbProj)]
        for name, parameter in self.named_parameters():
            if any(parameter is projection.weight for projection in projections):
                continue
            if parameter.dim() < 2:
                parameter.fill_(1.0)  # the gains of the norms
                continue
            std = residual if name.endswith((".attn.o.weight", ".down.weight")) else INIT_STD
            drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            parameter.copy_(drawn.normal_(0.0, std, generator=generator))
        for projection in projections:
            projection.reset_parameters(generator)
        tables = rope_tables(self.config.max_seq, self.config.head_dim, self.config.rope_theta)
        for buffer, table in zip((self.cos, self.sin), tables, strict=True):
            buffer.copy_(table)

    def forward(
        self,
        tokens: Tensor,  # (batch, seq) int64
        targets: Tensor | None = None,  # (batch, seq) int64, -100 where no loss is wanted
    ) -> Output:
        seq = tokens.shape[1]
        if seq > self.config.max_seq:
            raise TrimtabError(
                f"a sequence may have at most max_seq = {self.config.max_seq} tokens, got {seq}: "
                "shorten it or build the model with a larger max_seq"
            )
        x, cos, sin = self.embed(tokens), self.cos[:seq], self.sin[:seq]
        if self.embed_proj is not None:
            x = self.embed_proj(x).to(x.dtype)  # autocast must not narrow the residual stream
        balances = []
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x, balance = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x, balance = block(x, cos, sin)
            if balance is not None:
                balances.append(balance)
        x = self.norm(x)
        if self.head_proj is not None:
            x = self.head_proj(x)
        logits = self.head(x)
        if targets is None:
            return Output(None, logits)
        loss = cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        if balances and self.training:
            loss = loss + self.config.balance_coef * torch.stack(balances).mean()
        return Output(loss, logits)

    def num_parameters(self) -> int:
        """How many parameters the model has, a shared one counted once."""
        return sum(parameter.numel() for parameter in self.parameters())
