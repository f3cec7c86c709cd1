"""A drop-in for `torch.nn.functional.scaled_dot_product_attention`, and our kernels behind torch's own."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from assay.flash import cpu_quick
from assay.flash.attention import attend, attend_plainly, in_autocast_dtype
from assay.flash.checks import check_bias, check_dense, check_flag, check_qkv


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What torch's function of this name computes, by `flash_attention`'s kernels.

    Its signature and its meaning: `is_causal` hides the keys after a query's own number, counted from the first
    (top-left; `flash_attention` counts from the last); `attn_mask` is bool (False hides) or float (added), and a float
    one has a gradient; any number of leading dimensions. On the CPU dropout is torch's own, to the bit, up to 2²⁴
    scores in all, where a mask has the inputs' dtype; else, and on CUDA, other numbers are drawn and no scores written
    out.
    """
    number = type(dropout_p) in (float, int)  # else it is for the checks
    if number and dropout_p == 0 and (enable_gqa is False or enable_gqa is True):
        out = cpu_quick.attention(query, key, value, is_causal, scale, attn_mask)
        if out is not None:
            return out
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_dense(name, x)
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal=True exclude each other: put the causal mask into attn_mask.")
    if number and dropout_p == 1:
        kept = scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
        return torch.dropout(kept, 1.0, train=True)
    query, key, value = in_autocast_dtype(query, key, value)
    leading = _leading(query, key, value)
    q, k, v = (_four_dimensional(x, leading) for x in (query, key, value))
    if not enable_gqa and not q.shape[1] == k.shape[1] == v.shape[1]:
        heads = max(q.shape[1], k.shape[1], v.shape[1])
        q, k, v = (x.expand(-1, heads, -1, -1) if x.shape[1] == 1 else x for x in (q, k, v))
        if not q.shape[1] == k.shape[1] == v.shape[1]:
            raise ValueError(
                f"query has {q.shape[1]} heads, key and value {k.shape[1]}: pass enable_gqa=True for grouped queries."
            )
    check_qkv(q, k, v)
    right = q.shape[2] - k.shape[2] if is_causal else None
    bias = None if attn_mask is None else check_bias(_mask(attn_mask, leading), q, k, "attn_mask")
    out = attend_plainly(q, k, v, None, right, scale, bias, dropout_p)
    if out is None:
        out, _ = attend(q, k, v, left=None, right=right, scale=scale, bias=bias, dropout_p=dropout_p)
    dims = max(query.dim(), key.dim(), value.dim())
    if dims == 4 and out.shape[0] == query.shape[0]:
        return out
    return out.reshape(*leading, *out.shape[2 if dims == 2 else 1 :])


def _leading(query: Tensor, key: Tensor, value: Tensor) -> torch.Size:
    """The dimensions before the heads, broadcast."""
    of_q, of_k, of_v = query.shape[:-3], key.shape[:-3], value.shape[:-3]
    if of_q == of_k == of_v:
        return of_q
    try:
        return torch.Size(torch.broadcast_shapes(of_q, of_k, of_v))
    except RuntimeError:
        raise ValueError(
            "query, key and value must have leading dimensions that broadcast, "
            f"got the shapes {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}."
        ) from None


def _four_dimensional(x: Tensor, leading: torch.Size) -> Tensor:
    """(batch, heads, length, dimension); a matrix alone is one head, three dimensions are heads of one batch."""
    if x.dim() < 2:
        raise ValueError(f"query, key and value must have at least 2 dimensions, got the shape {tuple(x.shape)}.")
    if x.dim() == 4 and x.shape[:1] == leading:
        return x
    own = x.shape[-3:] if x.dim() > 2 else (1, *x.shape)
    return x.expand(*leading, *own).reshape(math.prod(leading), *own)


def _mask(mask: Tensor, leading: torch.Size) -> Tensor:
    """Four-dimensional, with 1 where it is broadcast."""
    if len(leading) <= 1 or not isinstance(mask, Tensor) or mask.dim() <= 3:
        return mask
    whole = (*leading, *mask.shape[-3:])
    try:
        return mask.expand(whole).flatten(0, -4)
    except RuntimeError:
        raise ValueError(
            f"attn_mask must broadcast to the leading dimensions {tuple(leading)}, got {tuple(mask.shape)}."
        ) from None
