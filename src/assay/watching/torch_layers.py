"""torch's own layers where they call no attention: fused for inference, or plain because their weights are wanted.

`nn.MultiheadAttention` and `nn.TransformerEncoderLayer` are one operation each when they infer, projections and all.
What that gives is compared with the same written out, as a whole: its heads cannot be told apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from assay.watching.adapters import Arguments, FunctionAdapter
from assay.watching.call import AttentionCall
from assay.watching.function_call import FunctionCall
from assay.watching.plain import plain


@dataclass(frozen=True, kw_only=True)
class _WithWeights(FunctionAdapter):
    """With weights wanted it multiplies whole matrices itself: it is plain, and only its error can be told."""

    def applies(self, arguments: Arguments) -> bool:
        """Otherwise it calls SDPA, which is caught by itself."""
        return bool(arguments.get("need_weights", arguments.get("15", True)))

    def call(self, arguments: Arguments) -> FunctionCall | str:
        """Its arguments, unless some are dropped."""
        if arguments.get("10", arguments.get("dropout_p")) and arguments.get("training", arguments.get("13", True)):
            return "dropout"
        return super().call(arguments)

    def differentiated(self, arguments: Arguments) -> tuple[str, ...]:
        """None: it is what it would be compared with."""
        return ()


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Tensor:
    """`torch._native_multi_head_attention` written out; key and value are the query."""
    if query.is_nested:
        given = (embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias)
        return torch.cat([_fused_attention(x[None], x, x, *given)[0] for x in query.unbind()])
    projected = F.linear(query, qkv_weight, qkv_bias)
    q, k, v = projected.unflatten(-1, (3, num_head, -1)).permute(2, 0, 3, 1, 4)
    call = AttentionCall(q=q, k=k, v=v, scale=q.shape[-1] ** -0.5, bias=_bias(mask, mask_type))
    return F.linear(plain(call)[0].transpose(1, 2).flatten(2), proj_weight, proj_bias)


def _encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    *weights: Any,
) -> Tensor:
    """`torch._transformer_encoder_layer_fwd` written out; `weights` are of both norms, both linears, and the mask."""
    if src.is_nested:
        given = (embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu, norm_first, eps)
        return torch.cat([_encoder_layer(x[None], *given, *weights[:8])[0] for x in src.unbind()])
    scale_1, shift_1, scale_2, shift_2, up, up_bias, down, down_bias, *masks = weights

    def attention(x: Tensor) -> Tensor:
        mask, kind = masks or (None, None)
        return _fused_attention(
            x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, mask_type=kind
        )

    def perceptron(x: Tensor) -> Tensor:
        x = F.linear(x, up, up_bias)
        return F.linear(F.gelu(x) if use_gelu else F.relu(x), down, down_bias)

    first, second = ((embed_dim,), scale_1, shift_1, eps), ((embed_dim,), scale_2, shift_2, eps)
    if norm_first:
        src = src + attention(F.layer_norm(src, *first))
        return src + perceptron(F.layer_norm(src, *second))
    src = F.layer_norm(src + attention(src), *first)
    return F.layer_norm(src + perceptron(src), *second)


def _bias(mask: Tensor | None, kind: int | None) -> Tensor | None:
    """0: of queries and keys; 1: of padding, (batch, keys); 2: of everything. torch's True hides."""
    if mask is None:
        return None
    full = mask[:, None, None] if kind == 1 else mask[(None,) * (4 - mask.dim())]
    return ~full if full.dtype == torch.bool else full


FUSED_ATTENTION = FunctionAdapter(name="fused_mha", plain=_fused_attention)
ENCODER_LAYER = FunctionAdapter(name="fused_layer", plain=_encoder_layer)
WITH_WEIGHTS = _WithWeights(name="mha_with_weights", plain=F.multi_head_attention_forward)
