"""Our kernels behind torch's own SDPA: a provider that torch knows by the name "assay", and that the user switches on.

    import assay.flash.provider
    torch.nn.attention.activate_flash_attention_impl("assay")   # F.scaled_dot_product_attention now runs ours
    torch.nn.attention.restore_flash_attention_impl()

Importing only makes the name known. It takes the place of SDPA's flash backend on CUDA, for dense inputs.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor

from assay.flash.ops import attention, attention_gradients

NAME = "assay"


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """`aten::_scaled_dot_product_flash_attention`; its random state is our seed."""
    if return_debug_mask:
        raise ValueError("assay's kernels give no debug mask: call without return_debug_mask.")
    seed = torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=query.device) if dropout_p > 0 else None
    out, lse = attention(query, key, value, *_rest(query, key, seed, scale, is_causal, dropout_p))
    state = torch.zeros(2, dtype=torch.int64, device=query.device)  # the shapes that torch.compile plans with
    if seed is not None:
        state[0] = seed
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    return out, lse, None, None, query.shape[2], key.shape[2], state.view(torch.uint64), offset, query.new_empty(0)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`aten::_scaled_dot_product_flash_attention_backward`."""
    seed = philox_seed.view(torch.int64)[0] if dropout_p > 0 else None
    rest = _rest(query, key, seed, scale, is_causal, dropout_p)
    dq, dk, dv, _, _ = attention_gradients(out, logsumexp, grad_out, None, False, query, key, value, *rest)
    return dq, dk, dv


def _rest(
    query: Tensor, key: Tensor, seed: Tensor | None, scale: float | None, is_causal: bool, dropout_p: float
) -> tuple[Any, ...]:
    """What follows q, k and v in our operator; SDPA's causal mask counts from the first key."""
    right = query.shape[2] - key.shape[2] if is_causal else None
    scale = query.shape[3] ** -0.5 if scale is None else scale
    return None, None, None, None, None, seed, scale, None, right, None, dropout_p, False, False, False, ""


class _Active:
    """What torch keeps while ours is active, and removes to give the old kernels back."""

    def __init__(self) -> None:
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL", "CUDA")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is overridden: it is what the user asked for
            self._library.impl("_scaled_dot_product_flash_attention", _forward, "CUDA")
            self._library.impl("_scaled_dot_product_flash_attention_backward", _backward, "CUDA")

    def remove(self) -> None:
        """Give SDPA its own kernels back."""
        self._library = None


if hasattr(torch.nn.attention, "register_flash_attention_impl"):
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_Active)
