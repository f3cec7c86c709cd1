"""The plainest call on the CPU, in one question: a short attention takes less time than to check and dispatch it."""

from __future__ import annotations

from math import inf
from typing import TypeGuard

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from assay.flash.checks import LARGEST_DIM
from assay.flash.cpu_aten import KEYS, LEAST_SCALE, ROWS, VECTOR, is_finite, lost_a_row
from assay.flash.cpu_plain import SCORES, as_mask, is_watched, mask_of

_attend = torch._C._nn.scaled_dot_product_attention  # not by F's name for it, which people replace
_flash_is_on = torch._C._get_flash_sdp_enabled
_function_modes = torch._C._len_torch_function_stack
_in_autocast = torch._C._is_any_autocast_enabled
_transforms = torch._C._functorch.peek_interpreter_stack
_TENSORS = frozenset((Tensor, Parameter))
_DTYPES = frozenset((torch.float32, torch.float64, torch.bfloat16))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    bias: Tensor | None = None,
    *,
    window: object = None,
    last_sees_all: bool = False,
) -> Tensor | None:
    """softmax(scale · q·kᵀ + bias)·v, or None for what is not of the plainest kind: the checks refuse it or not.

    SDPA computes it, with the kernel that `cpu_plain.attend` takes: only where `cpu_plain.takes` says yes, and no
    switch, mode or transform of the caller's makes it another. `last_sees_all`: causal masks are aligned with the last
    key, so that one query hides nothing, and fewer queries than keys need a mask that is written out, as a window does
    (which is aligned so in any case). What torch
    refuses (sparse or nested tensors have no strides, k and v may be of another dtype or device) is for the checks as
    well.
    """
    if is_compiling() or not (type(q) in _TENSORS and type(k) in _TENSORS and type(v) in _TENSORS and q.is_cpu):
        return None
    try:
        dtype, shape, of_k = q.dtype, q.shape, k.shape
        rows = None
        if window is not None:
            told = causal is True or causal is False
            if bias is not None or not told or not _is_window(window) or not len(shape) == len(of_k) == 4:
                return None
            left, right, bias = as_mask(q, k, window[0], 0 if causal else window[1])
            if left is not None or (right is not None and (right != 0 or shape[2] != of_k[2])):
                return None
            causal = right is not None
        if causal is True and last_sees_all and len(shape) == len(of_k) == 4:
            if shape[2] == 1:
                causal = False
            elif bias is None and shape[2] < of_k[2] and shape[2] * of_k[2] <= SCORES:
                causal, rows = False, shape[2]
        if (
            len(shape) != 4
            or of_k != v.shape
            or (shape != of_k and (causal or len(of_k) != 4 or of_k[2] == 0 or of_k != (*shape[:2], of_k[2], shape[3])))
            or 0 in shape
            or shape[3] > LARGEST_DIM
            or dtype not in _DTYPES
            or (dtype is torch.bfloat16 and (shape[2] > ROWS or of_k[2] > KEYS))
            or not q.stride()[3] == k.stride()[3] == v.stride()[3] == 1
            or not (causal is False or causal is True)
            or not (scale is None or (type(scale) is float and (LEAST_SCALE if causal else -inf) < scale < inf))
            or forward_ad._current_level >= 0
            or _function_modes()
            or _in_autocast()
            or not _flash_is_on()
            or _transforms() is not None
        ):
            return None
        if bias is None and rows is None:
            out = _attend(q, k, v, None, 0.0, causal, scale=scale)
            loses = of_k[2] < VECTOR or dtype is torch.bfloat16
            return None if loses and lost_a_row(out, q, k, scale) else out
        if causal or of_k[2] < VECTOR or is_watched():
            return None
        if rows is not None:
            bias = mask_of(None, of_k[2] - rows, rows, of_k[2])
        elif not _is_plain(bias, shape, of_k, dtype):
            return None
        recorded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if recorded and not is_finite(k, v):
            return None
        out = _attend(q, k, v, bias, 0.0, False, scale=scale)
        if dtype is torch.bfloat16 and lost_a_row(out, q, k, scale, bias):
            return None
        return out if recorded or is_finite(out) else None
    except RuntimeError:
        return None


def _is_window(window: object) -> TypeGuard[tuple[int | None, int | None]]:
    """As the checks take it, of Python's own numbers."""
    if type(window) is not tuple or len(window) != 2:
        return False
    return all(side is None or (type(side) is int and side >= 0) for side in window)


def _is_plain(bias: Tensor | None, of_q: torch.Size, of_k: torch.Size, dtype: torch.dtype) -> bool:
    """A mask or a bias of all queries and keys, without a gradient; for all heads or for each."""
    if bias is None or type(bias) not in _TENSORS or not bias.is_cpu or bias.requires_grad:
        return False
    shape = bias.shape
    whole = (of_q[2], of_k[2])
    if shape != whole and shape != (of_q[0], 1, *whole) and shape != (of_q[0], of_q[1], *whole):
        return False
    return (bias.dtype is dtype or bias.dtype is torch.bool) and bias.layout is torch.strided
