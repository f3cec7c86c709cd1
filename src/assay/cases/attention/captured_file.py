"""Reading a captured call: q, k and v in a safetensors file, and what else it takes to make that call again.

Beside q, k and v, each (batch, heads, length, dim), the file may have `bias` (bool: False hides a key; float: added to
the scaled scores), which broadcasts to (batch, heads, queries, keys), and `alibi_slopes`. Its metadata may say `scale`,
and `left` and `right`: how many keys before and after its own position a query sees, the last one standing beside the
last key (right 0 is causal). A file that says none of this is attention without a mask, scaled by 1/√dim.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from assay.cases.attention.checks import check_call, check_scale
from assay.cases.attention.masking import Masking, Window

Three = tuple[Tensor, Tensor, Tensor]
_OTHERS = ("softcap", "sinks")
"""What a call may have had that plans have no step for."""


class CapturedFile(NamedTuple):
    """What is in it, checked."""

    qkv: Three
    masking: Masking
    scale: float | None
    layer: str
    """Where in a model the call was made; "" if the file does not say."""


def load(path: Path) -> CapturedFile:
    """Read all of it; a ValueError says what is wrong with it."""
    tensors, notes = _read(path)
    others = [name for name in _OTHERS if name in tensors or name in notes]
    if others:
        raise ValueError(f"The call in {path} had {' and '.join(others)}, which plans do not know: no replay of it.")
    qkv = _qkv(path, tensors)
    try:
        masking = _masking(qkv, tensors, notes)
        scale = check_scale(float(notes["scale"]), 1) if "scale" in notes else None
    except ValueError as error:
        raise ValueError(f"{path} is not a call that can be made again: {error}") from None
    return CapturedFile(qkv, masking, scale, notes.get("layer", ""))


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ValueError(f"Inputs from a file need the path of a safetensors file, but {path} is not a file.")
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None


def _qkv(path: Path, found: dict[str, Tensor]) -> Three:
    if any(name not in found for name in ("q", "k", "v")):
        raise ValueError(f"{path} must have tensors q, k and v; it has {', '.join(found) or 'none'}.")
    q, k, v = found["q"], found["k"], found["v"]
    shapes = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in (q, k, v))
    if not all(x.dim() == 4 and x.is_floating_point() and x.numel() for x in (q, k, v)):
        raise ValueError(f"q, k and v in {path} must be float of shape (batch, heads, length, dim), got {shapes}.")
    fits = k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q, k and v in {path} must share the batch, k and v their heads and length, q and k their dim, and the "
            f"key heads must divide the query heads; got {shapes}."
        )
    if not all(bool(x.isfinite().all()) for x in (q, k, v)):
        raise ValueError(f"q, k and v in {path} must be finite, but there are NaN or infinities among them.")
    return q, k, v


def _masking(qkv: Three, tensors: dict[str, Tensor], notes: dict[str, str]) -> Masking:
    sizes = [torch.empty(()).expand(x.shape) for x in qkv]  # its dtypes may be any
    found = check_call(
        sizes[0], sizes[1], sizes[2],
        causal=False, window=None, bias=tensors.get("bias"), alibi_slopes=tensors.get("alibi_slopes"),
    )  # fmt: skip
    left, right = (int(notes[side]) if side in notes else None for side in ("left", "right"))
    window: Window | None = None if left is right is None else (left, right)
    return replace(found, window=window)
