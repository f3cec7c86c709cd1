# mypy: ignore-errors
"""Number formats, and the rules by which Triton promotes them."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np


class DType:
    element_ty = None

    def __init__(self, name, np_dtype, bits, kind):
        self.name, self.np, self.bits, self.kind = name, np.dtype(np_dtype), bits, kind  # kind: 0 bool 1 int 2 float
        self.primitive_bitwidth = bits
        self.itemsize = max(1, bits // 8)
        self.signed = name.startswith("int")

    def __repr__(self):
        return self.name

    def __reduce__(self):
        return self.name

    @property
    def scalar(self):
        return self

    def is_floating(self):
        return self.kind == 2

    def is_int(self):
        return self.kind < 2

    def is_int_signed(self):
        return self.kind == 1 and self.signed

    def is_int_unsigned(self):
        return self.kind == 1 and not self.signed

    def is_bf16(self):
        return self is bfloat16

    def is_fp16(self):
        return self is float16

    def is_fp32(self):
        return self is float32

    def is_fp8(self):
        return self.kind == 2 and self.bits == 8

    def is_ptr(self):
        return False

    def is_block(self):
        return False


int1 = DType("int1", np.bool_, 1, 0)
int8, int16, int32, int64 = (DType(f"int{b}", f"int{b}", b, 1) for b in (8, 16, 32, 64))
uint8, uint16, uint32, uint64 = (DType(f"uint{b}", f"uint{b}", b, 1) for b in (8, 16, 32, 64))
float16 = DType("float16", np.float16, 16, 2)
bfloat16 = DType("bfloat16", ml_dtypes.bfloat16, 16, 2)
float32 = DType("float32", np.float32, 32, 2)
float64 = DType("float64", np.float64, 64, 2)
float8e4nv = DType("float8e4nv", ml_dtypes.float8_e4m3fn, 8, 2)
float8e5 = DType("float8e5", ml_dtypes.float8_e5m2, 8, 2)
DTYPES = [
    int1,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
    float16,
    bfloat16,
    float32,
    float64,
    float8e4nv,
    float8e5,
]
_BY_NP = {d.np: d for d in DTYPES}
_LARGEST = {float8e4nv: 448.0, float8e5: 57344.0}


class PointerType:
    def __init__(self, element_ty):
        self.element_ty = element_ty
        self.scalar = self
        self.primitive_bitwidth = 64

    def __repr__(self):
        return f"pointer<{self.element_ty}>"

    def is_ptr(self):
        return True

    def is_floating(self):
        return False

    def is_int(self):
        return False


class BlockType:
    def __init__(self, element_ty, shape, layout=None):
        self.element_ty, self.shape, self.layout = element_ty, list(shape), layout
        self.scalar = element_ty
        self.numel = math.prod(self.shape)
        self.nbytes = self.numel * element_ty.bits // 8

    def __repr__(self):
        return f"<{self.shape}, {self.element_ty}>"

    def is_block(self):
        return True


def _int_promote(a, b):
    if a is b:
        return a
    if a.kind == 0:
        return b
    if b.kind == 0:
        return a
    if a.signed == b.signed:
        return a if a.bits > b.bits else b
    unsigned, signed = (a, b) if not a.signed else (b, a)
    return unsigned if unsigned.bits >= signed.bits else signed


def promote(a, b, div=False):
    """Triton's rule for two tensors (or run-time scalars)."""
    for big in (float64, float32):
        if a is big or b is big:
            return big
    for half in (float16, bfloat16):
        if a is half or b is half:
            if div:
                return float32
            return half if (a is b or a.kind < 2 or b.kind < 2) else float32
    if a.kind == 2 or b.kind == 2:
        if a is b:
            return float32 if div else a
        return float16 if a.kind == b.kind == 2 else (a if a.kind == 2 else b)
    return _int_promote(a, b)


def _number_dtype(x):
    if isinstance(x, (bool, np.bool_)):
        return int1
    if isinstance(x, (int, np.integer)):
        if -(2**31) <= x < 2**31:
            return int32
        if 2**31 <= x < 2**32:
            return uint32
        return int64
    return float32
