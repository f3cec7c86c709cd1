# mypy: ignore-errors
"""Global memory: arrays of torch and numpy, tensor descriptors on the host and in a kernel."""

from __future__ import annotations

import builtins as _py

import numpy as np

from tests.gluon.dtypes import (
    _BY_NP,
    BlockType,
    bfloat16,
    float8e4nv,
    float8e5,
    float16,
    float32,
    float64,
    int1,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
)
from tests.gluon.errors import EmuError, current
from tests.gluon.tensors import Tensor, _cast, _shape


def _torch_dtypes():
    import torch

    return {
        torch.bfloat16: bfloat16,
        torch.float16: float16,
        torch.float32: float32,
        torch.float64: float64,
        torch.int8: int8,
        torch.int16: int16,
        torch.int32: int32,
        torch.int64: int64,
        torch.uint8: uint8,
        torch.bool: int1,
        torch.float8_e4m3fn: float8e4nv,
        torch.float8_e5m2: float8e5,
        torch.uint32: uint32,
        torch.uint16: uint16,
    }


def is_torch(x):
    return type(x).__module__.startswith("torch") and hasattr(x, "untyped_storage")


def memory_of(x):
    """A torch tensor or numpy array → (its whole storage as a flat array, the offset of its first element, dtype)."""
    if is_torch(x):
        import torch

        dtype = _torch_dtypes()[x.dtype]
        storage = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
        raw = storage.numpy()
        raw = raw[: raw.size // dtype.itemsize * dtype.itemsize]
        return raw.view(dtype.np), x.storage_offset(), dtype
    if isinstance(x, np.ndarray):
        base = x
        while isinstance(base.base, np.ndarray):
            base = base.base
        if not base.flags.c_contiguous:
            raise EmuError("a numpy argument must be a view of a contiguous array")
        flat = base.reshape(-1).view(x.dtype)
        offset = (x.__array_interface__["data"][0] - flat.__array_interface__["data"][0]) // x.itemsize
        return flat, offset, _BY_NP[x.dtype]
    raise EmuError(f"not an array: {x!r}")


class TensorDescriptor:
    """On the host. Of Gluon with a layout, of Triton without."""

    def __init__(self, base, shape, strides, block_shape, layout=None, padding="zero"):
        self.base, self.shape, self.strides = base, list(shape), list(strides)
        self.block_shape, self.layout, self.padding = list(block_shape), layout, padding
        dtype = memory_of(base)[2]
        rank = len(self.shape)
        if not 1 <= rank <= 5 or len(self.strides) != rank or len(self.block_shape) != rank:
            raise EmuError(
                f"TensorDescriptor: shape {shape}, strides {strides}, block {block_shape}: 1 to 5 dimensions, the "
                "same of all"
            )
        if self.strides[-1] != 1:
            raise EmuError(f"TensorDescriptor: the last stride must be 1, got {strides}")
        if any(s * dtype.itemsize % 16 for s in self.strides[:-1]):
            raise EmuError(f"TensorDescriptor: strides {strides} of {dtype} are not whole 16 bytes")
        if is_torch(base) and base.data_ptr() % 16:
            raise EmuError("TensorDescriptor: the base is not 16-byte aligned")
        if any(s <= 0 for s in self.shape):
            raise EmuError(f"TensorDescriptor: the shape {shape} must be positive")
        if any(b <= 0 or b & (b - 1) for b in self.block_shape) or any(b > 256 for b in self.block_shape[:-1]):
            raise EmuError(f"TensorDescriptor: block {block_shape}: powers of two, up to 256")
        if self.block_shape[-1] * dtype.itemsize < 16:
            raise EmuError(
                f"TensorDescriptor: the last dimension of a block {block_shape} of {dtype} is under 16 bytes"
            )

    @staticmethod
    def from_tensor(tensor, block_shape, layout=None, padding="zero"):
        strides = tensor.stride() if is_torch(tensor) else [s // tensor.itemsize for s in tensor.strides]
        return TensorDescriptor(tensor, tensor.shape, strides, block_shape, layout, padding)


class Descriptor:
    """In the kernel."""

    def __init__(self, mem, offset, dtype, shape, strides, block_shape, layout, padding, name):
        self.dtype, self.block_shape, self.layout, self.padding, self.name = dtype, block_shape, layout, padding, name
        self.shape, self.strides = shape, strides
        self.block_type = BlockType(dtype, block_shape, layout)
        last = offset + _py.sum((n - 1) * s for n, s in zip(shape, strides, strict=False))
        if last >= mem.size:
            raise EmuError(f"descriptor {name}: shape {shape}, strides {strides} reach element {last} of {mem.size}")
        bits = mem.view(f"u{mem.itemsize}")  # numpy knows no name for some formats of 8 bits
        whole = np.lib.stride_tricks.as_strided(bits[offset:], shape, [s * mem.itemsize for s in strides])
        self.whole = whole.view(mem.dtype)
        self.handle = self

    type = property(lambda self: self)

    def __repr__(self):
        return f"descriptor {self.name}"

    def _cut(self, coord):
        theirs, mine = [], []
        for c, b, n in zip(coord, self.block_shape, self.shape, strict=False):
            low, high = _py.max(c, 0), _py.min(c + b, n)
            high = _py.max(high, low)
            theirs.append(slice(low, high))
            mine.append(slice(low - c, high - c))
        return tuple(theirs), tuple(mine)

    def read(self, coord):
        fill = np.nan if self.padding == "nan" else 0
        block = np.full(self.block_shape, fill, self.whole.dtype)
        theirs, mine = self._cut(coord)
        if all(s.stop > s.start for s in theirs):
            block[mine] = self.whole[theirs]
        return block

    def write(self, coord, data, how):
        theirs, mine = self._cut(coord)
        if all(s.stop > s.start for s in theirs):
            part = data[mine]
            if how == "store":
                self.whole[theirs] = part
            else:
                fn = {"add": np.add, "min": np.minimum, "max": np.maximum}[how]
                self.whole[theirs] = fn(self.whole[theirs], part).astype(self.whole.dtype)

    # as Triton's own (not Gluon) kernels use it
    def load(self, coord):
        current().point()
        return Tensor(self.read([int(c) for c in coord]), self.dtype)

    def store(self, coord, value):
        current().point()
        self.write([int(c) for c in coord], _cast(value.a, self.dtype).reshape(self.block_shape), "store")

    def atomic_add(self, coord, value):
        current().point()
        self.write([int(c) for c in coord], value.a.reshape(self.block_shape), "add")


def make_tensor_descriptor(base, shape, strides, block_shape, layout=None, padding_option="zero"):
    return Descriptor(
        base.mem,
        int(base.at),
        base.dtype.element_ty,
        [int(s) for s in shape],
        [int(s) for s in strides],
        _shape(block_shape),
        layout,
        padding_option,
        base.name,
    )
