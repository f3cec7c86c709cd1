"""The layers that both models are made of. What they compute goes through an `Arithmetic`."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import silu

from assay.models.arithmetic import Arithmetic, Attention, Place
from assay.models.positions import Angles, rotate
from assay.models.weights import Weights


class Linear(nn.Module):
    """x · weightᵀ + bias. The weight begins with a standard deviation of gain / √inputs, the bias with 0."""

    def __init__(
        self,
        weights: Weights,
        arithmetic: Arithmetic,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        gain: float = 1.0,
        place: Place = "matmul",
    ) -> None:
        super().__init__()
        self.arithmetic, self.place = arithmetic, place
        self.weight = (
            weights.normal(outputs, inputs, std=gain * inputs**-0.5) if gain else weights.zeros(outputs, inputs)
        )
        self.bias = weights.zeros(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs)."""
        return self.arithmetic.linear(x, self.weight, self.bias, place=self.place)


class Embedding(nn.Module):
    """A learnt row for each number."""

    def __init__(self, weights: Weights, arithmetic: Arithmetic, rows: int, width: int) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self.weight = weights.normal(rows, width, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """(…) → (…, width)."""
        return self.arithmetic.embedding(ids, self.weight)


class Norm(nn.Module):
    """The RMS norm with a learnt weight."""

    def __init__(self, weights: Weights, arithmetic: Arithmetic, width: int) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self.weight = weights.ones(width)

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) → (…, width)."""
        return self.arithmetic.norm(x, self.weight)


class SwiGlu(nn.Module):
    """down(silu(gate(x)) · up(x)), with 8/3 · width inside, rounded up to a multiple of 32."""

    def __init__(self, weights: Weights, arithmetic: Arithmetic, width: int, *, gain: float = 1.0) -> None:
        super().__init__()
        inside = -(-8 * width // 3 // 32) * 32
        self.gate_up = Linear(weights, arithmetic, width, 2 * inside)
        self.down = Linear(weights, arithmetic, inside, width, gain=gain)

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) → (…, width)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y: Tensor = self.down(silu(gate) * up)
        return y


class MultiHead(nn.Module):
    """Attention of many heads: from x to the context, which is x itself in self-attention.

    Query head h takes head h // (heads / kv_heads) of the keys and values. With `qk_norm` queries and keys have an RMS
    norm each, which keeps the scores from growing in training; rotary angles turn them after it.
    """

    def __init__(
        self,
        weights: Weights,
        arithmetic: Arithmetic,
        attention: Attention,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        causal: bool = False,
        qk_norm: bool = False,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.arithmetic, self.attention, self.causal = arithmetic, attention, causal
        self.dim = width // heads
        self.q = Linear(weights, arithmetic, width, width)
        self.kv = Linear(weights, arithmetic, width, 2 * (kv_heads or heads) * self.dim)
        self.q_norm = Norm(weights, arithmetic, self.dim) if qk_norm else nn.Identity()
        self.k_norm = Norm(weights, arithmetic, self.dim) if qk_norm else nn.Identity()
        self.out = Linear(weights, arithmetic, width, width, gain=gain)

    def forward(self, x: Tensor, context: Tensor, angles: Angles | None = None) -> Tensor:
        """(B, N, width) and (B, M, width) → (B, N, width)."""
        q = self._heads(self.q(x))
        k, v = (self._heads(t) for t in self.kv(context).chunk(2, dim=-1))
        q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        mixed = self.arithmetic.attention(self.attention, q, k, v, self.causal)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], -1, self.dim).transpose(1, 2)
