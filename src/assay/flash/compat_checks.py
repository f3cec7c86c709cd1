"""What flash-attn's functions are given, refused under the names of their own arguments."""

from __future__ import annotations

import operator
from numbers import Integral

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from assay.flash import checks

DENSE = "(batch, length, heads, head dimension)"
PACKED = "(all lengths, heads, head dimension)"


def check_dim(name: str, x: object, dims: int, shape: str) -> None:
    """A tensor of so many dimensions."""
    if not isinstance(x, Tensor) or x.dim() != dims:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must have the shape {shape}, got {got}.")


def check_integers(name: str, x: object, shape: str, device: torch.device, length: int | None = None) -> None:
    """A tensor of one dimension, int32 or int64, on the device, and so long if a length is given."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be an int32 tensor of shape {shape}, got {type(x).__name__}.")
    fits = x.dim() == 1 and (length is None or len(x) == length)
    if not fits or x.dtype not in (torch.int32, torch.int64) or x.device != device:
        raise ValueError(
            f"{name} must be int32 of shape {shape} on {device}, got {x.dtype} {tuple(x.shape)} on {x.device}."
        )


def check_whole(name: str, value: object) -> int:
    """A whole number of at least 0, also where it comes as a tensor of one."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}.") from None
    if number < 0:
        raise ValueError(f"{name} must be at least 0, got {number}.")
    return number


def check_window_size(window: object) -> checks.Window | None:
    """The window as our functions take it: None in place of −1, on a side or on both."""
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(f"window_size must be (left, right), −1 on a side meaning no limit; got {window!r}.")
    for side in window:
        if isinstance(side, bool) or not isinstance(side, int | Integral):
            raise ValueError(f"window_size must be two whole numbers, got {window!r}.")
    left, right = (None if side < 0 else int(side) for side in window)
    return None if left is None and right is None else (left, right)


def check_boundaries(name: str, cu: object, device: torch.device) -> None:
    """Of one sequence at least. Their values are checked where they run."""
    check_integers(name, cu, "(sequences + 1,)", device)
    assert isinstance(cu, Tensor)
    if len(cu) < 2:
        raise ValueError(f"{name} must have an entry for every sequence, at least 1, and the end; got {len(cu)}.")


def check_both_boundaries(cu_q: Tensor, cu_k: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Both as int32, for q (all lengths, heads, head dimension)."""
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        check_boundaries(name, cu, q.device)
    both = checks.check_packing(cu_q, cu_k, q[None])
    assert both[0] is not None
    assert both[1] is not None
    return both[0], both[1]


def readable(x: Tensor) -> bool:
    """Whether the values of x can be looked at: not while code is traced, nor while a CUDA graph is captured."""
    traced = torch.compiler.is_compiling() or isinstance(x, FakeTensor)
    return not traced and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def values(x: Tensor) -> list[int] | None:
    """The values of x, None if they cannot be looked at. On CUDA a version of a tensor is read once."""
    return checks.read_once(x, None) if readable(x) else None


def used(x: Tensor, boundaries: list[int] | None) -> Tensor:
    """x without the rows behind the last of the packed sequences. Boundaries that are wrong are refused elsewhere."""
    return x if boundaries is None or not 0 <= boundaries[-1] < len(x) else x[: boundaries[-1]]


_EXTREMES = WeakTensorKeyDictionary()
"""By indices: the version that was looked at, its least and its largest."""


def check_indices(indices: object, rows: int, device: torch.device, length: int | None = None) -> None:
    """Whole numbers from 0 to below `rows`. On CUDA a version of a tensor is read once: it waits for the GPU."""
    check_integers("indices", indices, "(tokens,)" if length is None else f"(tokens,) = ({length},)", device, length)
    assert isinstance(indices, Tensor)
    if indices.numel() == 0 or not readable(indices):
        return
    least, largest = _extremes(indices)
    if least < 0 or largest >= rows:
        raise ValueError(f"indices must be 0 to {rows - 1}, one of the {rows} rows; got {least} to {largest}.")


def _extremes(x: Tensor) -> tuple[int, int]:
    """The least and the largest of x. A version is looked at once on CUDA; one made in inference mode has none."""
    version = -1 if x.is_inference() or not x.is_cuda else x._version
    known: tuple[int, int, int] | None = _EXTREMES.get(x) if version >= 0 else None
    if known is not None and known[0] == version:
        return known[1:]
    least, largest = torch.stack(x.aminmax()).tolist()
    if version >= 0:
        _EXTREMES[x] = version, least, largest
    return least, largest
