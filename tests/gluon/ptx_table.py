# mypy: ignore-errors
"""PTX instructions as functions of 32-bit registers."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.gluon.dtypes import float8e4nv, float8e5
from tests.gluon.tensors import _cast


def _f32(x):
    return np.asarray(x, np.uint32).view(np.float32)


def _bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


def _ftz(x):
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def _half_bits(x, np_dtype):
    bits = np.asarray(x, np.float32).astype(np_dtype).view(np.uint16).astype(np.uint32)
    return np.where(np.isnan(x), np.uint32(0x7FFF), bits)  # a GPU makes this NaN only; numpy's may be negative


def _fp8_bits(x, dtype):
    return _cast(np.asarray(x, np.float32), dtype).view(np.uint8).astype(np.uint32)


def _shift(x, n, left):
    n = np.minimum(n, 32)
    wide = x.astype(np.uint64)
    return ((wide << n) if left else (wide >> n)).astype(np.uint32)


def _prmt(a, b, sel):
    pool = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros(np.broadcast(a, b, sel).shape, np.uint32)
    for i in range(4):
        nibble = (sel >> np.uint32(4 * i)) & np.uint32(15)
        byte = ((pool >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)).astype(np.uint32)
        byte = np.where(nibble & 8, np.where(byte & 128, np.uint32(255), np.uint32(0)), byte)
        out |= byte << np.uint32(8 * i)
    return out


def _lop3(a, b, c, table):
    out, table = np.zeros(np.broadcast(a, b, c).shape, np.uint32), int(np.ravel(table)[0])
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def _halves(fn, np_dtype):
    """A packed instruction of two 16-bit numbers."""

    def run(*xs):
        lo = [(x & np.uint32(0xFFFF)).astype(np.uint16).view(np_dtype).astype(np.float32) for x in xs]
        hi = [(x >> np.uint32(16)).astype(np.uint16).view(np_dtype).astype(np.float32) for x in xs]
        return _half_bits(fn(*lo), np_dtype) | (_half_bits(fn(*hi), np_dtype) << np.uint32(16))

    return run


def _compared(fn):
    """A packed comparison: all bits of a half are set where it holds."""

    def run(*xs):
        low, high = (fn(*((x >> np.uint32(shift)).astype(np.uint16).view(np.float16) for x in xs)) for shift in (0, 16))
        return np.where(low, np.uint32(0xFFFF), np.uint32(0)) | np.where(high, np.uint32(0xFFFF0000), np.uint32(0))

    return run


def _largest_halves(x, y):
    """Of two 16-bit whole numbers each."""
    x, y = (np.stack([a & np.uint32(0xFFFF), a >> np.uint32(16)]).astype(np.uint16).view(np.int16) for a in (x, y))
    low, high = np.maximum(x, y).view(np.uint16).astype(np.uint32)
    return low | high << np.uint32(16)


_BF16, _F16 = ml_dtypes.bfloat16, np.float16
PTX: dict = {
    # regular expression of the whole opcode → function of the source registers (uint32 arrays), gives the destination
    r"ex2\.approx\.ftz\.f32": lambda x: _bits(_ftz(np.exp2(_ftz(_f32(x))))),
    r"ex2\.approx\.f32": lambda x: _bits(np.exp2(_f32(x))),
    r"ex2\.approx\.ftz\.bf16x2": _halves(np.exp2, _BF16),
    r"ex2\.approx(\.ftz)?\.f16x2": _halves(np.exp2, _F16),
    r"lg2\.approx(\.ftz)?\.f32": lambda x: _bits(np.log2(_f32(x))),
    r"rcp\.approx(\.ftz)?\.f32": lambda x: _bits(np.float32(1) / _f32(x)),
    r"rsqrt\.approx(\.ftz)?\.f32": lambda x: _bits(np.float32(1) / np.sqrt(_f32(x))),
    r"tanh\.approx\.f32": lambda x: _bits(np.tanh(_f32(x))),
    r"cvt\.rn(\.relu)?\.bf16x2\.f32": lambda hi, lo: (
        _half_bits(_f32(lo), _BF16) | _half_bits(_f32(hi), _BF16) << np.uint32(16)
    ),
    r"cvt\.rn(\.relu)?\.f16x2\.f32": lambda hi, lo: (
        _half_bits(_f32(lo), _F16) | _half_bits(_f32(hi), _F16) << np.uint32(16)
    ),
    r"cvt\.rn\.bf16\.f32": lambda x: _half_bits(_f32(x), _BF16),
    r"cvt\.rn\.f16\.f32": lambda x: _half_bits(_f32(x), _F16),
    r"cvt\.rn\.satfinite\.e4m3x2\.f32": lambda hi, lo: (
        _fp8_bits(_f32(lo), float8e4nv) | _fp8_bits(_f32(hi), float8e4nv) << np.uint32(8)
    ),
    r"cvt\.rn\.satfinite\.e5m2x2\.f32": lambda hi, lo: (
        _fp8_bits(_f32(lo), float8e5) | _fp8_bits(_f32(hi), float8e5) << np.uint32(8)
    ),
    r"cvt\.rn\.f16x2\.e4m3x2": lambda x: (
        _half_bits((x & np.uint32(255)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32), np.float16)
        | _half_bits(
            ((x >> np.uint32(8)) & np.uint32(255)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32),
            np.float16,
        )
        << np.uint32(16)
    ),
    r"mov\.(b|u|s|f)(16|32)": lambda x: x,
    r"add(\.rn)?(\.ftz)?\.f32": lambda x, y: _bits(_f32(x) + _f32(y)),
    r"sub(\.rn)?(\.ftz)?\.f32": lambda x, y: _bits(_f32(x) - _f32(y)),
    r"mul(\.rn)?(\.ftz)?\.f32": lambda x, y: _bits(_f32(x) * _f32(y)),
    r"fma\.rn(\.ftz)?\.f32": lambda x, y, z: _bits((_f32(x).astype(np.float64) * _f32(y) + _f32(z)).astype(np.float32)),
    r"max(\.ftz)?\.f32": lambda x, y: _bits(np.fmax(_f32(x), _f32(y))),
    r"max(\.ftz)?\.f32_3": lambda x, y, z: _bits(np.fmax(np.fmax(_f32(x), _f32(y)), _f32(z))),
    r"min(\.ftz)?\.f32": lambda x, y: _bits(np.fmin(_f32(x), _f32(y))),
    r"neg(\.ftz)?\.f32": lambda x: _bits(-_f32(x)),
    r"abs(\.ftz)?\.f32": lambda x: _bits(np.abs(_f32(x))),
    r"(add|sub|mul|fma)(\.rn)?\.bf16x2": None,  # filled in below
    r"min\.s32": lambda x, y: np.minimum(x.view(np.int32), y.view(np.int32)).view(np.uint32),
    r"max\.s32": lambda x, y: np.maximum(x.view(np.int32), y.view(np.int32)).view(np.uint32),
    r"max\.s16x2": _largest_halves,
    r"min\.u32": np.minimum,
    r"max\.u32": np.maximum,
    r"neg\.s32": lambda x: (-x.view(np.int32)).view(np.uint32),
    r"cvt\.rn\.f32\.s32": lambda x: _bits(x.view(np.int32).astype(np.float32)),
    r"cvt\.rn\.f32\.u32": lambda x: _bits(x.astype(np.float32)),
    r"cvt\.rn\.f16\.s32": lambda x: _half_bits(x.view(np.int32).astype(np.float32), _F16),
    r"set\.ge\.u32\.f16x2": _compared(np.greater_equal),
    r"set\.le\.u32\.f16x2": _compared(np.less_equal),
    r"add\.(s|u)32": lambda x, y: x + y,
    r"sub\.(s|u)32": lambda x, y: x - y,
    r"mul\.lo\.(s|u)32": lambda x, y: x * y,
    r"mad\.lo\.(s|u)32": lambda x, y, z: x * y + z,
    r"and\.b32": lambda x, y: x & y,
    r"or\.b32": lambda x, y: x | y,
    r"xor\.b32": lambda x, y: x ^ y,
    r"not\.b32": lambda x: ~x,
    r"shl\.b32": lambda x, n: _shift(x, n, True),
    r"shr\.(u|b)32": lambda x, n: _shift(x, n, False),
    r"shr\.s32": lambda x, n: (x.view(np.int32) >> np.minimum(n, 31).astype(np.int32)).view(np.uint32),
    r"prmt\.b32": _prmt,
    r"lop3\.b32": _lop3,
}
for (
    _name,
    _fn,
) in {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": lambda x, y, z: x * y + z,
    "max": np.fmax,
    "min": np.fmin,
}.items():
    PTX[rf"{_name}(\.rn)?(\.ftz)?\.bf16x2"] = _halves(_fn, _BF16)
    PTX[rf"{_name}(\.rn)?(\.ftz)?\.f16x2"] = _halves(_fn, _F16)
del PTX[r"(add|sub|mul|fma)(\.rn)?\.bf16x2"]
