"""Rotary position embedding."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from assay.flash.checks import as_int32, check_boundaries, check_flag
from assay.flash.layout import empty_heads_last
from assay.flash.library import operator

_WHOLE = (torch.int32, torch.int64)


class Rotary(NamedTuple):
    """Angles by position; the first 2·(their width) dimensions of a head are rotated, the others left."""

    cos: Tensor
    """(positions, half the rotated dimensions)."""
    sin: Tensor
    interleaved: bool = False
    """Pairs are (0, 1), (2, 3), … (GPT-J); else (0, half), (1, half + 1), … (GPT-NeoX, Llama)."""


def rotate(
    q: Tensor, k: Tensor, rotary: Rotary, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Q and K, each rotated by its position: that of key j is j, that of query i is i + (keys − queries).

    Where there are more queries than keys the first ones stand before position 0, and are turned the other way.
    """
    check_rotary(rotary, q.shape[3], q.device)
    queries, keys, positions = q.shape[2], k.shape[2], rotary.cos.shape[0]
    if cu_seqlens_q is None and max(queries, keys) > positions:
        raise _too_far(f"{queries} queries and {keys} keys", positions)
    offsets = _offsets(queries, keys, cu_seqlens_q, cu_seqlens_k, q, positions)
    cos, sin, interleaved = rotary
    k = rotate_one(k, cos, sin, None, cu_seqlens_k, interleaved, False)
    return rotate_one(q, cos, sin, offsets, cu_seqlens_q, interleaved, False), k


def rotated(x: Tensor, rotary: Rotary, offset: Tensor | int = 0, cu_seqlens: Tensor | None = None) -> Tensor:
    """x (B, H, N, D), or packed (1, H, all lengths, D): row i of a sequence has the position offset + i.

    The offset is one for all sequences or one for each. On CUDA a tensor of them is not looked at: rows beyond the
    tables become NaN.
    """
    if not x.dtype.is_floating_point:
        raise ValueError(f"What is rotated must be float, got {x.dtype}. Cast it with .to.")
    check_rotary(rotary, x.shape[3], x.device)
    sequences = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    offsets = _check_offset(offset, sequences, x, rotary, cu_seqlens)
    out: Tensor = rotate_one(x, rotary.cos, rotary.sin, offsets, cu_seqlens, rotary.interleaved, False)
    return out


def check_rotary(rotary: Rotary, dim: int, device: torch.device) -> None:
    """Shapes, dtypes and devices of the tables, for a head dimension."""
    if not isinstance(rotary, Rotary):
        raise ValueError(f"rotary must be a Rotary(cos, sin), got {type(rotary).__name__}.")
    check_flag("interleaved", rotary.interleaved)
    for name, table in (("cos", rotary.cos), ("sin", rotary.sin)):
        if not isinstance(table, Tensor):
            raise ValueError(f"{name} must be a torch tensor, got {type(table).__name__}. Use torch.as_tensor.")
        if table.dim() != 2 or not table.dtype.is_floating_point:
            raise ValueError(
                f"{name} must be float of shape (positions, half the rotated dimensions), "
                f"got {table.dtype} {tuple(table.shape)}."
            )
        if table.device != device:
            raise ValueError(f"{name} must be on the device of what it rotates ({device}), got {table.device}.")
        if table.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} has no gradient here; pass {name}.detach().")
    if rotary.cos.shape != rotary.sin.shape:
        raise ValueError(
            f"cos and sin must have one shape, got {tuple(rotary.cos.shape)} and {tuple(rotary.sin.shape)}."
        )
    if not 2 <= 2 * rotary.cos.shape[1] <= dim:
        raise ValueError(
            f"cos and sin must be 1 to {dim // 2} wide, half of the dimensions that are rotated, "
            f"got {rotary.cos.shape[1]}. Tables that hold every angle twice are cut: cos[:, : dim // 2], or "
            "cos[:, ::2] if the equal angles are neighbours."
        )


def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    interleaved: bool,
    inverse: bool,
) -> Tensor:
    """x (B, H, N, D) rotated by position: the row's number in its sequence, plus the sequence's int32 offset.

    Computed in FP32 (for FP64 in FP64). With `inverse` by the same angles the other way. A position −p turns by the
    angle of p the other way. On CUDA offsets are not looked at: what is then beyond the tables becomes NaN.
    """
    out = _empty_like(x)
    _check_positions(x.shape[2], cos.shape[0], offsets, cu_seqlens)
    if x.is_cuda:
        with torch.cuda.device(x.device):  # Triton launches on the current device, whatever its arguments say
            kernel = import_module("assay.flash.kernels.rotary")
            kernel.launch(x, out, cos, sin, offsets, cu_seqlens, interleaved=interleaved, inverse=inverse)
    else:
        _rotate_plainly(x, out, Rotary(cos, sin, interleaved), _positions(x, offsets, cu_seqlens), inverse)
    return out


def _rotate_fake(x: Tensor, *_: Any) -> Tensor:
    return _empty_like(x)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:5])
    ctx.interleaved, ctx.inverse = inputs[5:]


def _gradient(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    """A rotation's transpose is the rotation back."""
    dx = rotate_one(dout, *ctx.saved_tensors, ctx.interleaved, not ctx.inverse)
    return dx, None, None, None, None, None, None


rotate_one = operator(rotary_embedding, fake=_rotate_fake, backward=_gradient, setup=_setup)


def _empty_like(x: Tensor) -> Tensor:
    """(B, N, H, D) in memory where x is so, as models that split heads have it; else as its shape says."""
    heads, rows = x.shape[1:3]
    if heads > 1 and rows > 1 and x.stride(1) < x.stride(2):
        return empty_heads_last(x, x.shape)
    return x.new_empty(x.shape)


def _offsets(
    queries: int, keys: int, cu_q: Tensor | None, cu_k: Tensor | None, q: Tensor, positions: int
) -> Tensor | None:
    """The position of each sequence's first query; None: 0.

    That of queries without a key is never used, and would be one beyond the longest table that they need.
    """
    least = 1 - positions
    if cu_q is None or cu_k is None:
        if queries == keys:
            return None
        return torch.full((q.shape[0],), max(keys - queries, least), dtype=torch.int32, device=q.device)
    return None if cu_k is cu_q else (cu_k.diff() - cu_q.diff()).clamp_(min=least)


def _check_offset(
    offset: Tensor | int, sequences: int, x: Tensor, rotary: Rotary, cu_seqlens: Tensor | None
) -> Tensor | None:
    """(sequences,) int32 on the device of x; None: 0."""
    if isinstance(offset, Tensor):
        if tuple(offset.shape) != (sequences,) or offset.device != x.device or offset.dtype not in _WHOLE:
            raise ValueError(
                f"Offsets must be int32 of shape (sequences,) = ({sequences},) on {x.device}, "
                f"got {offset.dtype} {tuple(offset.shape)} on {offset.device}."
            )
        return as_int32(offset).contiguous()  # the kernel reads them one after the other in memory
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise ValueError(f"An offset must be a whole number or a tensor of them, got {offset!r}.")
    rows = x.shape[2] if cu_seqlens is None else 0  # of the longest packed sequence nothing is known yet
    farthest = max(rows + offset, 1 - offset)
    if farthest > rotary.cos.shape[0]:
        raise _too_far(f"positions up to {farthest - 1}", rotary.cos.shape[0])
    return None if offset == 0 else torch.full((sequences,), offset, dtype=torch.int32, device=x.device)


def _rotate_plainly(x: Tensor, out: Tensor, rotary: Rotary, positions: Tensor, inverse: bool) -> None:
    """In plain torch operations; positions (B or 1, N)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    entries, half = positions.abs(), rotary.cos.shape[1]
    c, s = (table[entries].to(wide)[:, None] for table in rotary[:2])
    back = (positions < 0) != inverse
    s = torch.where(back[:, None, :, None], -s, s)
    a, b = (part.to(wide) for part in _pairs(x, half, rotary.interleaved))
    to_a, to_b = _pairs(out, half, rotary.interleaved)
    to_a.copy_(a * c - b * s)
    to_b.copy_(a * s + b * c)
    out[..., 2 * half :] = x[..., 2 * half :]


def _pairs(x: Tensor, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and the second of every pair."""
    if interleaved:
        return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


def _positions(x: Tensor, offsets: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """(B or 1, N): the position of every row."""
    rows = torch.arange(x.shape[2], device=x.device)[None]
    if cu_seqlens is None:
        return rows if offsets is None else rows + offsets[:, None]
    starts = -cu_seqlens[:-1] if offsets is None else offsets - cu_seqlens[:-1]
    return rows + starts[torch.bucketize(rows, cu_seqlens[1:], right=True)]  # by how many sequences end before a row


def _check_positions(rows: int, positions: int, offsets: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """That the tables hold every position, where this is known without waiting for the GPU, or is read once."""
    if cu_seqlens is not None:
        check_boundaries("cu_seqlens", cu_seqlens, rows)
        if rows > positions and (longest := _longest(cu_seqlens)) > positions:
            raise _too_far(f"a packed sequence of {longest}", positions)
    elif rows > positions:
        raise _too_far(f"{rows} rows", positions)
    if offsets is None or offsets.is_cuda or rows == 0 or offsets.numel() == 0:
        return
    lengths = rows if cu_seqlens is None else cu_seqlens.diff()
    ends = torch.stack(((offsets + lengths - 1).amax(), -offsets.amin())).amax()
    if ends >= positions:
        raise _too_far(f"a position of {int(ends)}", positions)


def _too_far(what: str, positions: int) -> ValueError:
    return ValueError(
        f"cos and sin must have a row for every position: they have {positions}, there are {what}. "
        "Compute longer tables, or rotate shorter sequences."
    )


_LONGEST = WeakTensorKeyDictionary()
"""By cu_seqlens: the version that was looked at, and its longest sequence."""


def _longest(cu_seqlens: Tensor) -> int:
    """The longest packed sequence; 0 while a CUDA graph is captured, when nothing can be read.

    On CUDA a version of a tensor is looked at once: it waits for the GPU. One made in inference mode has no version.
    """
    if not cu_seqlens.is_cuda:
        return int(cu_seqlens.diff().amax())
    if torch.cuda.is_current_stream_capturing():
        return 0
    version = -1 if cu_seqlens.is_inference() else cu_seqlens._version
    known: tuple[int, int] | None = _LONGEST.get(cu_seqlens)
    if known is not None and known[0] == version >= 0:
        return known[1]
    longest = int(cu_seqlens.diff().amax())
    _LONGEST[cu_seqlens] = version, longest
    return longest
