"""One attention call after its checks: the tensors and what is to be done with them. Every backend takes this."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from assay.flash.numerics import SHIPPED, Numerics


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What a backend computes: softmax over visible keys of scale·Q·Kᵀ (capped, plus bias and ALiBi), times V.

    A query's position is its row plus (keys − queries): the last query stands beside the last key. With cu_seqlens
    this holds for each sequence by itself.
    """

    q: torch.Tensor
    """(B, H, queries, D). Packed: (1, H, all queries, D)."""
    k: torch.Tensor
    """(B, H_kv, keys, D), H a multiple of H_kv: query head h takes head h // (H / H_kv)."""
    v: torch.Tensor
    """(B, H_kv, keys, D_v)."""
    scale: float
    left: int | None = None
    """A key is hidden if it stands more than this before the query; None: no limit."""
    right: int | None = None
    """A key is hidden if it stands more than this after the query (causal: 0; may be negative); None: no limit."""
    softcap: float | None = None
    """Scores become softcap·tanh(scores / softcap), before bias and ALiBi."""
    bias: torch.Tensor | None = None
    """Of q's batch, heads, queries and keys, or 1 for any: float (added to the scores) or bool (False hides)."""
    slopes: torch.Tensor | None = None
    """(B, H), packed (sequences, H), FP32: −slope·|query's position − key's position| is added to the scores."""
    sinks: torch.Tensor | None = None
    """(H,): the logit of one more key, which every row sees and which has no value."""
    cu_seqlens_q: torch.Tensor | None = None
    """(sequences + 1,) int32: where each packed sequence begins, and the end of the last."""
    cu_seqlens_k: torch.Tensor | None = None
    dropout: float = 0.0
    """The share of probabilities set to 0 (after normalisation); the others are divided by 1 − dropout."""
    seed: torch.Tensor | None = None
    """() int64 on q's device: the seed of dropout."""
    deterministic: bool = False
    """Backward gives the same bits every time."""
    batch_invariant: bool = False
    """A sequence's result does not depend on what else is in the batch."""
    tf32: bool = False
    """FP32 dot products may take their operands in TF32."""
    numerics: Numerics = SHIPPED
    counted: dict[object, torch.Tensor] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What `places` has counted of the packed sequences: several kernels of a backward pass ask the same."""

    @property
    def group(self) -> int:
        """Query heads that share a head of K and V."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def scaled(self) -> bool:
        """Whether the scale is a number in FP32: −inf times 0 would be NaN."""
        return abs(self.scale) > 1e-37

    @property
    def scales(self) -> bool:
        """Whether the scores are a positive number times Q·Kᵀ, or times its softcap's tanh, but for ALiBi."""
        return self.bias is None and (self.scaled or self.softcap is not None)

    @property
    def near(self) -> bool:
        """ALiBi alone, no key ahead of its query. Not in FP32, where counting keys from elsewhere would show."""
        ahead = self.right is None or self.right > 0
        return self.slopes is not None and self.scales and not ahead and self.q.dtype != torch.float32

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed one after the other, by cu_seqlens."""
        return self.cu_seqlens_q is not None

    @property
    def masked(self) -> bool:
        """Whether rows may not see all keys of their sequence."""
        return self.left is not None or self.right is not None

    @property
    def sequences(self) -> int:
        """That are packed; 1 where none are."""
        return 1 if self.cu_seqlens_q is None else len(self.cu_seqlens_q) - 1

    def tiles(self, of: Literal["q", "k"], size: int) -> int:
        """Of a head's queries or keys; packed, as many as there can be, whatever the lengths."""
        length = (self.q if of == "q" else self.k).shape[2]
        return -(-length // size) + (self.sequences if self.packed else 0)


class Gradients(NamedTuple):
    """Of the same shapes and dtypes as what they are gradients of."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None
    sinks: torch.Tensor | None
