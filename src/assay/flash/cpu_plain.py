"""The plain call on the CPU: torch's kernel itself, where it gives what we promise. No operator of ours in between."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import pad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from assay.flash.cpu_aten import KEYS, LEAST_SCALE, PADDED_SCORES, ROWS, VECTOR, is_finite, lost_a_row
from assay.flash.library import in_forward_mode

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_sdpa = torch._C._nn.scaled_dot_product_attention  # not by F's name for it, which people replace
_ones = torch.ones  # the same

SCORES = 1 << 20
"""Scores that a short call has at most: written out they take 4 MB, and SDPA keeps a few times that."""
WINDOW_SCORES = 1 << 18
"""The same for a window: our blocks leave out what it hides, SDPA does not."""
MANY_SCORES = 6 << 20
"""The same where our blocks skip little: for a bias with a gradient, and for two head dimensions of short sequences, or
without a mask in FP32 and fp16. Beyond, the scores fall out of the cache, and blocks are faster."""
DROPPED_SCORES = 1 << 24
"""The same for dropout, whose mask our blocks make as CUDA does, in twice the time of everything else."""


def takes(q: Tensor, k: Tensor, v: Tensor, right: int | None, scale: float, bias: Tensor | None = None) -> bool:
    """Whether SDPA computes softmax(scale · q·kᵀ + bias)·v for these as well as our path does.

    Its causal mask begins at the top left, as the drop-in's does, and ours for as many queries as keys, and takes a
    positive scale; in bf16 its backward sums gradients up in bf16, over blocks of rows and keys and over a group's
    heads; in fp16 it is slow; it takes no empty tensors, and one head dimension: zeros make two of them one, which pays
    without backward and up to twice the smaller. It takes a mask or a bias without a gradient, not together with
    causal; under it a NaN in a hidden key reaches every row, so there the keys are looked at, or the output: 0 · NaN is
    NaN. Over a few keys it makes 0 of a NaN, so q and k are looked at.
    """
    if q.device.type != "cpu" or not (q.shape[2] and k.shape[2] and q.shape[0]):
        return False
    if q.shape[3] != v.shape[3] and (_ratio(q, v) > 2 or _recorded(q, k, v)):
        return False
    if right is not None and (right != q.shape[2] - k.shape[2] or scale < LEAST_SCALE):
        return False
    if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1 or in_forward_mode():
        return False
    if q.dtype == torch.float16 or (q.dtype == torch.bfloat16 and _recorded(q, k, v) and not _short(q, k)):
        return False
    if bias is not None and (right is not None or not _harmless(bias, q, k, v)):  # the costly questions last
        return False
    return is_watched(q, k, v) or k.shape[2] >= VECTOR or is_finite(q, k)


def as_mask(q: Tensor, k: Tensor, left: int | None, right: int | None) -> tuple[int | None, int | None, Tensor | None]:
    """The limits and the mask with which torch's kernel computes a call that has these limits and no mask.

    No limit where it hides nothing. Where the kernel's own causal mask is another, since queries and keys are not as
    many or there is a window, it is faster with one that is written out than our blocks are, as long as that is small.
    """
    queries, keys = q.shape[2], k.shape[2]
    ahead = keys - queries
    left = None if left is not None and left >= keys - 1 else left
    right = None if right is not None and right >= queries - 1 else right
    if left is None and right is None:
        return None, None, None
    own = left is None and (ahead == 0 or right == -ahead)
    blind = right is not None and ahead + right < 0  # the first row sees nothing
    if own or blind or queries * keys > (SCORES if left is None else WINDOW_SCORES) or is_watched(q, k):
        return left, right, None
    first, last = None if left is None else ahead - left, None if right is None else ahead + right
    return None, None, mask_of(first, last, queries, keys)


@lru_cache(8)
def mask_of(first: int | None, last: int | None, queries: int, keys: int) -> Tensor:
    """True where a key is seen: from `first` to `last` by the first row, and by each row after it one further on.

    Kept, up to 1 MB each: to make it takes a tenth of a short call. So it is made as if nobody had asked for it, in no
    mode of the caller's; where it would be no tensor of numbers (`is_watched`), it must not be asked for.
    """
    with torch.inference_mode(False), torch._C.DisableTorchFunction():
        mask = _ones(queries, keys, dtype=torch.bool, device="cpu")
        mask = mask if last is None else mask.tril_(last)
        return mask if first is None else mask.triu_(first)


def takes_short(
    q: Tensor, k: Tensor, v: Tensor, right: int | None, bias: Tensor | None = None, dropout: float = 0.0
) -> bool:
    """Whether SDPA writes the scores of this call out, and they are so few that this is faster than our blocks.

    It does for two head dimensions, for a bias with a gradient and for dropout, in FP32 inside. The rest as in `takes`.
    """
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    trained = bias is not None and _recorded(bias)
    two_dims = q.shape[3] != v.shape[3]
    few = two_dims and q.shape[2] * k.shape[2] <= PADDED_SCORES
    many = few or (right is None and (trained or (two_dims and q.dtype != torch.bfloat16)))
    most = DROPPED_SCORES if dropout > 0 else MANY_SCORES if many else SCORES
    if q.device.type != "cpu" or not 0 < scores <= most:
        return False
    if right is not None and (bias is not None or right != q.shape[2] - k.shape[2]):
        return False
    if not (dropout > 0 or two_dims or trained) or in_forward_mode():
        return False
    if bias is not None and bias.dtype not in (torch.bool, k.dtype):
        return False
    if is_watched(q, k, v) or not _sdpa_is_math():
        return False
    return not (_hides(right, bias) and _recorded(q, k, v)) or is_finite(k, v)


def attend_short(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    right: int | None,
    scale: float | None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor | None:
    """The output, by SDPA; dropout draws from torch's generator. None if a hidden key may have reached it."""
    grouped = q.shape[1] != k.shape[1]
    out: Tensor = _sdpa(q, k, v, bias, dropout, right is not None, scale=scale, enable_gqa=grouped)
    return out if not _hides(right, bias) or _recorded(q, k, v) or is_finite(out) else None


def _recorded(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _short(q: Tensor, k: Tensor) -> bool:
    """Few enough terms that summing gradients up in bf16 does not show."""
    return q.shape[1] == k.shape[1] and q.shape[2] <= ROWS and k.shape[2] <= KEYS


def attend(
    q: Tensor, k: Tensor, v: Tensor, right: int | None, scale: float | None, bias: Tensor | None = None
) -> Tensor | None:
    """The output, by the kernel behind SDPA: which one that is must not depend on the caller's switches.

    A call by SDPA's own name takes half the time of one by the kernel's, and SDPA makes the mask a bias faster; but the
    kernel tells which rows of 0 are of NaN. None if a key that a mask hides may have reached the output.
    """
    dim = v.shape[3]
    if q.shape[3] != dim:
        q, k, v = (pad(x, (0, max(q.shape[3], dim) - x.shape[3])).contiguous() for x in (q, k, v))
        out = attend(q, k, v, right, scale, bias)
        return None if out is None else out[..., :dim].contiguous()
    if right is None and not is_watched(q, k, v) and _sdpa_is_flash():
        found = attend_short(q, k, v, right, scale, bias)
        if found is None or q.dtype != torch.bfloat16 or not lost_a_row(found, q, k, scale, bias):
            return found
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros((), dtype=q.dtype, device=q.device).where(bias, -torch.inf)
    if right is not None and right < 0:  # keys that no query sees, whose NaN would reach the last rows
        k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
    out, lse = _kernel(q, k, v, 0.0, right is not None, attn_mask=bias, scale=scale)
    if q.dtype == torch.bfloat16 and (is_watched(q, k, v) or (lse == torch.inf).any()):
        out = out + torch.where(lse == torch.inf, torch.nan, -0.0).to(out.dtype)[..., None]  # stays in the order of q
    return out if bias is None or _recorded(q, k, v) or is_finite(out) else None


def _ratio(q: Tensor, v: Tensor) -> float:
    return max(q.shape[3], v.shape[3]) / min(q.shape[3], v.shape[3])


def _hides(right: int | None, bias: Tensor | None) -> bool:
    return right is not None or bias is not None


def _harmless(bias: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    if bias.requires_grad or bias.dtype not in (torch.bool, k.dtype) or is_watched(q, k, v):
        return False
    return not _recorded(q, k, v) or is_finite(k, v)


def is_watched(*tensors: Tensor) -> bool:
    """Whether values must not be looked at: a compiler cannot, nor a transform."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return _get_current_dispatch_mode() is not None or any(type(x) not in (Tensor, Parameter) for x in tensors)


def _sdpa_is_flash() -> bool:
    """Whether the caller left SDPA its flash kernel, and asks for no calls of SDPA itself."""
    return torch._C._get_flash_sdp_enabled() and not torch._C._len_torch_function_stack()


def _sdpa_is_math() -> bool:
    """The same for the kernel that writes the scores out, which must be left to do so in FP32."""
    if torch._C._len_torch_function_stack() or torch._C._get_math_sdp_allow_fp16_bf16_reduction():
        return False
    return bool(torch._C._get_math_sdp_enabled())
