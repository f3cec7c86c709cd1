# mypy: ignore-errors
"""`gl`: elementwise functions, reductions, scans, products."""

from __future__ import annotations

import math

import numpy as np

from tests.gluon.dtypes import bfloat16, float32, float64, int1, int32, uint32
from tests.gluon.errors import Unsupported
from tests.gluon.layouts import SliceLayout
from tests.gluon.tensors import Pointer, Tensor, _cast, _operands, _truediv, tensor_of


def where_(cond, x, y):
    if isinstance(x, Pointer) or isinstance(y, Pointer):
        raise Unsupported("gl.where of pointers")
    cond = tensor_of(cond)
    a, b, dtype, layout = _operands(x, y)
    return Tensor(np.where(cond.a.astype(bool), a, b), dtype, layout or cond.layout)


def _minmax(fn, nan):
    def run(x, y, propagate_nan=False):
        a, b, dtype, layout = _operands(x, y)
        return Tensor((nan if propagate_nan and propagate_nan != "NONE" else fn)(a, b), dtype, layout)

    return run


maximum, minimum = _minmax(np.fmax, np.maximum), _minmax(np.fmin, np.minimum)


def clamp(x, low, high, propagate_nan=False):
    return minimum(maximum(x, low), high)


def cdiv(x, div):
    if isinstance(x, Tensor) or isinstance(div, Tensor):
        return (x + div - 1) // div
    return (x + div - 1) // div


def _reduced(x, axis, fn, keep_dims, dtype):
    a = np.asarray(_cast(x.a, dtype))
    out = fn(a.reshape(-1), 0) if axis is None else fn(a, int(axis))
    if keep_dims and axis is not None:
        out = np.expand_dims(out, int(axis))
    layout = x.layout
    if axis is not None and not keep_dims and layout is not None:
        layout = SliceLayout(int(axis), layout) if np.ndim(out) else None
    return Tensor(out, dtype, layout)


def _wide(x, whole):
    if x.dtype is bfloat16:
        return float32
    if x.dtype.kind == 1 and x.dtype.bits < 32:
        return int32 if x.dtype.signed else uint32
    return int32 if x.dtype is int1 and whole else x.dtype


def max(x, axis=None, return_indices=False, keep_dims=False, **_):
    if return_indices:
        raise Unsupported("gl.max(return_indices=True)")
    x = tensor_of(x)
    return _reduced(x, axis, lambda a, i: np.fmax.reduce(a, i), keep_dims, _wide(x, True))


def min(x, axis=None, return_indices=False, keep_dims=False, **_):
    if return_indices:
        raise Unsupported("gl.min(return_indices=True)")
    x = tensor_of(x)
    return _reduced(x, axis, lambda a, i: np.fmin.reduce(a, i), keep_dims, _wide(x, True))


def sum(x, axis=None, keep_dims=False, dtype=None):
    x = tensor_of(x)
    wide = dtype or _wide(x, True)
    return _reduced(x, axis, lambda a, i: np.add.reduce(a, i, dtype=a.dtype), keep_dims, wide)


def xor_sum(x, axis=None, keep_dims=False):
    x = tensor_of(x)
    return _reduced(x, axis, lambda a, i: np.bitwise_xor.reduce(a, i), keep_dims, x.dtype)


def reduce_or(x, axis=None, keep_dims=False):
    x = tensor_of(x)
    return _reduced(x, axis, lambda a, i: np.bitwise_or.reduce(a, i), keep_dims, x.dtype)


def reduce(x, axis, combine_fn, keep_dims=False):
    many = isinstance(x, (tuple, list))
    xs = [tensor_of(t) for t in (x if many else (x,))]
    parts = [np.moveaxis(t.a, int(axis), 0) if axis is not None else t.a.reshape(-1) for t in xs]
    while parts[0].shape[0] > 1:
        half = parts[0].shape[0] // 2
        left = [Tensor(p[:half], t.dtype, t.layout) for p, t in zip(parts, xs, strict=False)]
        right = [Tensor(p[half:], t.dtype, t.layout) for p, t in zip(parts, xs, strict=False)]
        out = combine_fn(*left, *right)
        parts = [o.a for o in (out if many else (out,))]
    done = []
    for p, t in zip(parts, xs, strict=False):
        layout = SliceLayout(int(axis), t.layout) if axis is not None and t.layout is not None and p.ndim > 1 else None
        done.append(Tensor(p[0], t.dtype, layout))
    return tuple(done) if many else done[0]


def cumsum(x, axis=0, reverse=False, dtype=None):
    x = tensor_of(x)
    wide = dtype or _wide(x, True)
    a = _cast(x.a, wide)
    a = np.flip(a, axis) if reverse else a
    out = np.cumsum(a, axis, dtype=wide.np)
    return Tensor(np.flip(out, axis) if reverse else out, wide, x.layout)


def associative_scan(x, axis, combine_fn, reverse=False):
    many = isinstance(x, (tuple, list))
    xs = [tensor_of(t) for t in (x if many else (x,))]
    parts = [np.moveaxis(np.flip(t.a, axis) if reverse else t.a, axis, 0) for t in xs]
    rows = [[Tensor(p[0], t.dtype) for p, t in zip(parts, xs, strict=False)]]
    for i in range(1, parts[0].shape[0]):
        out = combine_fn(*rows[-1], *(Tensor(p[i], t.dtype) for p, t in zip(parts, xs, strict=False)))
        rows.append(list(out) if many else [out])
    done = [np.moveaxis(np.stack([np.asarray(r[j].a) for r in rows]), 0, axis) for j in range(len(xs))]
    done = [Tensor(np.flip(a, axis) if reverse else a, t.dtype, t.layout) for a, t in zip(done, xs, strict=False)]
    return tuple(done) if many else done[0]


def _elementwise(fn):
    def run(x, *_, **__):
        x = tensor_of(x)
        dtype = x.dtype if x.dtype.kind == 2 else float32
        wide = np.float64 if dtype is float64 else np.float32
        return Tensor(fn(_cast(x.a, dtype).astype(wide)).astype(dtype.np), dtype, x.layout)

    return run


exp2, exp, log2, log, sqrt, sin, cos, floor, ceil = map(
    _elementwise, (np.exp2, np.exp, np.log2, np.log, np.sqrt, np.sin, np.cos, np.floor, np.ceil)
)
sqrt_rn = sqrt
rsqrt = _elementwise(lambda x: 1 / np.sqrt(x))
erf = _elementwise(np.vectorize(math.erf, otypes=[np.float32]))


def abs(x):
    x = tensor_of(x)
    return Tensor(np.abs(x.a), x.dtype, x.layout)


def fma(x, y, z):
    return x * y + z


def fdiv(x, y, ieee_rounding=False):
    return _truediv(tensor_of(x), y)


div_rn = fdiv


def add(x, y, **_):
    return tensor_of(x) + y


def sub(x, y, **_):
    return tensor_of(x) - y


def mul(x, y, **_):
    return tensor_of(x) * y


def umulhi(x, y):
    a, b = x.a.astype(np.uint64), tensor_of(y).a.astype(np.uint64)
    return Tensor((a * b >> np.uint64(32)).astype(np.uint32).view(x.dtype.np), x.dtype, x.layout)


def dot(a, b, acc=None, input_precision=None, allow_tf32=None, max_num_imprecise_acc=None, out_dtype=None, **_):
    value = a.a.astype(np.float32) @ b.a.astype(np.float32)
    return Tensor(value if acc is None else value + acc.a, float32, None if acc is None else acc.layout)


dot_fma = dot


def _tensor_sum(self, axis=None, keep_dims=False):
    return sum(self, axis, keep_dims)


def _tensor_max(self, axis=None, keep_dims=False):
    return max(self, axis, keep_dims=keep_dims)


Tensor.sum = _tensor_sum
Tensor.max = _tensor_max
