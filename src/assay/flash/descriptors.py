"""Tensors as the copy engine takes them: cut into blocks. Up to six matrices a call, checked once for each shape."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from assay.flash.layout import padded

KINDS = (TensorDescriptor, GluonDescriptor)
_KNOWN: dict[tuple[Any, ...], Any] = {}
_MOST = 4096
_NAMES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}


def tiles(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Blocks of so many rows of an `aligned` tensor, for Triton."""
    return _made(TensorDescriptor, x, rows, padded(x.shape[3]))


def row_tiles(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Of a (heads of all sequences, rows) matrix: so many rows of one head."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows])


def gluon_tiles(x: torch.Tensor, rows: int, columns: int | None = None) -> GluonDescriptor:
    """The same for Gluon, with the layout they have in shared memory; of so many columns, or all."""
    columns = padded(x.shape[3]) if columns is None else columns
    return _made(GluonDescriptor, x, rows, columns, _layout(rows, columns, x.dtype))


def gluon_lines(x: torch.Tensor) -> GluonDescriptor:
    """64 numbers of contiguous FP32 lines, one after the other."""
    return GluonDescriptor(x, [x.numel()], [1], [64], gl.NVMMASharedLayout(0, 32, 1))


def gluon_fragments(x: torch.Tensor) -> GluonDescriptor:
    """Tiles of 64 × 64 FP32 numbers, each 4096 in a row."""
    return GluonDescriptor(x, [x.numel() // 256, 256], [256, 1], [16, 256], gl.NVMMASharedLayout(0, 32, 2))


def _made(kind: type, x: torch.Tensor, rows: int, columns: int, *layout: Any) -> Any:
    key = kind, x.shape, x.stride(), x.dtype, rows, columns
    known = _KNOWN.get(key)
    if known is None:
        strides = [stride if length > 1 else 16 for stride, length in zip(x.stride()[:3], x.shape[:3], strict=True)]
        checked = kind(x, list(x.shape), [*strides, 1], [1, 1, rows, columns], *layout)
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        known = _KNOWN[key] = bare(checked)
    return of(x, known)


def bare(descriptor: Any) -> Any:
    """A descriptor without its tensor."""
    return of(None, descriptor)


def of(x: Any, like: Any) -> Any:
    """A descriptor like another, of another tensor of the same shape, strides and dtype: not checked again."""
    made = object.__new__(type(like))
    made.__dict__.update(like.__dict__, base=x)
    return made


@cache
def _layout(rows: int, dims: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, dims], _NAMES[dtype])
