"""How a model computes at its named places. A precision is a subclass; nothing else in a model knows of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Attention = Callable[..., Tensor]
"""`attention(q, k, v, causal=...)` of (batch, heads, length, head dimension); k and v may have fewer heads."""
Place = Literal["matmul", "last_layer"]


class Arithmetic:
    """Plain torch, in the dtype that the tensors have. A subclass casts at a place and leaves the result so."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, place: Place = "matmul") -> Tensor:
        """x · weightᵀ + bias; the place says whether these are the model's outputs."""
        return functional.linear(x, weight, bias)

    def norm(self, x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
        """The RMS norm over the last dimension, in the wider dtype of x and the weight."""
        if weight is not None:
            # Before the norm: torch has no fused one for two dtypes, and promoting after it rounds x once more.
            x, weight = (t.to(torch.promote_types(x.dtype, weight.dtype)) for t in (x, weight))
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        """The table's rows of these numbers."""
        return functional.embedding(ids, table)

    def residual(self, x: Tensor, y: Tensor) -> Tensor:
        """The stream x with y added."""
        return x + y

    def attention(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """What the attention that was passed in makes of q, k and v."""
        return attention(q, k, v, causal=causal)


PLAIN = Arithmetic()
"""What a model computes with if nothing is said."""
