"""A decoder that guesses the next token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from assay.models.arithmetic import PLAIN, Arithmetic, Attention
from assay.models.checks import check_counts, check_multiple
from assay.models.layers import Embedding, Linear, MultiHead, Norm, SwiGlu
from assay.models.positions import Angles, rotary_angles
from assay.models.weights import Weights


@dataclass(frozen=True, kw_only=True)
class GptConfig:
    """The sizes of a Gpt."""

    vocabulary: int = 256
    context: int = 256
    """Tokens that it sees at most."""
    width: int = 128
    depth: int = 5
    heads: int = 4
    kv_heads: int = 2
    """Heads of keys and values, each for heads / kv_heads of the queries'."""
    tied: bool = True
    """The last layer's weight is the embedding's."""

    def __post_init__(self) -> None:
        counts = asdict(self)
        if not isinstance(counts.pop("tied"), bool):
            raise ValueError(f"tied must be True or False, got {self.tied!r}.")
        check_counts(**counts)
        check_multiple("width", self.width, "two (rotary pairs) for each head", 2 * self.heads)
        check_multiple("heads", self.heads, "kv_heads", self.kv_heads)


gpt_sizes = {
    "300k": GptConfig(width=80, depth=4, heads=4, kv_heads=2),
    "1m": GptConfig(width=128, depth=5, heads=4, kv_heads=2),
    "5m": GptConfig(width=256, depth=7, heads=4, kv_heads=2),
    "30m": GptConfig(context=512, width=512, depth=11, heads=8, kv_heads=2),
    "100m": GptConfig(context=1024, width=768, depth=16, heads=12, kv_heads=4),
    "300m": GptConfig(context=1024, width=1024, depth=27, heads=16, kv_heads=4),
}
"""By the number of parameters: from what a laptop trains in minutes to a GPU's."""


class Block(nn.Module):
    """Causal self-attention, then SwiGLU, each behind an RMS norm and added to the stream."""

    def __init__(self, config: GptConfig, attention: Attention, arithmetic: Arithmetic, weights: Weights) -> None:
        super().__init__()
        # So that the stream does not grow with the depth at first: 2 · depth layers add to it.
        width, gain = config.width, (2 * config.depth) ** -0.5
        self.arithmetic = arithmetic
        self.attention_norm = Norm(weights, arithmetic, width)
        self.attention = MultiHead(
            weights, arithmetic, attention, width, config.heads, kv_heads=config.kv_heads, causal=True, gain=gain
        )
        self.mlp_norm = Norm(weights, arithmetic, width)
        self.mlp = SwiGlu(weights, arithmetic, width, gain=gain)

    def forward(self, x: Tensor, angles: Angles) -> Tensor:
        """The stream, (B, N, width) → (B, N, width)."""
        seen = self.attention_norm(x)
        x = self.arithmetic.residual(x, self.attention(seen, seen, angles))
        return self.arithmetic.residual(x, self.mlp(self.mlp_norm(x)))


class Gpt(nn.Module):
    """A decoder as Llama is one: rotary positions, grouped queries, RMS norms, SwiGLU, no biases."""

    def __init__(self, config: GptConfig, attention: Attention, arithmetic: Arithmetic = PLAIN, seed: int = 0) -> None:
        super().__init__()
        weights, width = Weights(seed), config.width
        self.config, self.arithmetic = config, arithmetic
        self.embedding = Embedding(weights, arithmetic, config.vocabulary, width)
        self.blocks = nn.ModuleList(Block(config, attention, arithmetic, weights) for _ in range(config.depth))
        self.last_norm = Norm(weights, arithmetic, width)
        self.last = None
        if not config.tied:
            self.last = Linear(weights, arithmetic, width, config.vocabulary, place="last_layer")

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N) int64 → logits (B, N, vocabulary)."""
        if tokens.dim() != 2 or tokens.shape[1] > self.config.context:
            raise ValueError(
                f"Tokens must be (batch, at most {self.config.context}), got {tuple(tokens.shape)}. "
                "Cut them, or make a model with a longer context."
            )
        angles = rotary_angles(tokens.shape[1], self.config.width // self.config.heads, tokens.device)
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles)
        x = self.last_norm(x)
        if self.last is None:
            return self.arithmetic.linear(x, self.embedding.weight, place="last_layer")
        logits: Tensor = self.last(x)
        return logits


def next_token_loss(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """The mean cross entropy, in nats, of tokens 1 … N given those before each: (B, N + 1) int64, N ≤ context.

    Computed at least in FP32.
    """
    if tokens.dim() != 2 or tokens.shape[1] < 2:
        raise ValueError(f"Tokens must be (batch, at least 2), to have a next one; got {tuple(tokens.shape)}.")
    logits = model(tokens[:, :-1])
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(wide.flatten(0, 1), tokens[:, 1:].flatten())
