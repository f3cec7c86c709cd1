# mypy: ignore-errors
"""Values of a kernel: tensors, results of wgmma not yet given out, pointers."""

from __future__ import annotations

import builtins as _py

import numpy as np

from tests.gluon.dtypes import (
    _BY_NP,
    _LARGEST,
    DType,
    PointerType,
    _number_dtype,
    bfloat16,
    float16,
    float32,
    int1,
    promote,
)
from tests.gluon.errors import EmuError, Unsupported, show, where


def _cast(a, dtype):
    """Array → array, as Triton's casts round."""
    if a.dtype == dtype.np:
        return a
    if dtype.kind < 2 and dtype is not int1 and a.dtype.kind not in "iub":
        x = np.trunc(np.asarray(a, np.float64))
        info = np.iinfo(dtype.np)
        return np.clip(np.nan_to_num(x, nan=0.0), info.min, info.max).astype(dtype.np)
    if dtype is int1:
        return np.asarray(a) != 0
    largest = _LARGEST.get(dtype)
    if largest is not None:
        x = np.asarray(a, np.float32)
        return np.clip(x, -largest, largest).astype(dtype.np)  # satfinite; NaN stays
    return a.astype(dtype.np)


class _Type:
    """What x.type gives."""

    def __init__(self, dtype, shape, layout):
        self.element_ty = self.scalar = dtype
        self.shape, self.layout = shape, layout

    def is_block(self):
        return bool(self.shape)

    def is_floating(self):
        return self.scalar.is_floating()


class Tensor:
    """Values: an array (or numpy scalar) of dtype.np. Never changed in place."""

    __slots__ = ("a", "dtype", "layout")
    __array_priority__ = 1000
    __hash__ = None

    def __init__(self, a, dtype=None, layout=None):
        self.a = a
        self.dtype = dtype or _BY_NP[a.dtype]
        self.layout = layout

    @property
    def shape(self):
        return list(self.a.shape)

    @property
    def type(self):
        return _Type(self.dtype, self.shape, self.layout)

    @property
    def numel(self):
        return self.a.size

    @property
    def T(self):
        return Tensor(self.a.T, self.dtype, self.layout)

    def __repr__(self):
        return f"Tensor({self.a!r}, {self.dtype})" if self.a.size < 8 else f"Tensor({self.shape}, {self.dtype})"

    # scalars
    def _scalar(self, what):
        if self.a.size != 1 or self.a.ndim:
            raise EmuError(
                f"{what} of a tensor of shape {self.shape}: only scalars have one (in an if, while, range, "
                f"index).\n{show(where())}"
            )
        return self.a.item() if hasattr(self.a, "item") else self.a

    def __bool__(self):
        return bool(self._scalar("bool()"))

    def __index__(self):
        if self.dtype.kind == 2:
            raise EmuError(f"a {self.dtype} scalar used as an integer\n{show(where())}")
        return int(self._scalar("int()"))

    __int__ = __index__

    def __float__(self):
        return float(self._scalar("float()"))

    # shape and type
    def to(self, dtype, fp_downcast_rounding=None, bitcast=False):
        if not isinstance(dtype, DType):
            raise EmuError(f".to() needs a dtype, got {dtype!r}\n{show(where())}")
        if bitcast:
            if dtype.bits != self.dtype.bits:
                raise EmuError(f"bitcast of {self.dtype} to {dtype}: different widths\n{show(where())}")
            return Tensor(np.asarray(self.a).view(dtype.np), dtype, self.layout)
        return Tensor(_cast(self.a, dtype), dtype, self.layout)

    cast = to

    def __getitem__(self, key):
        keys = key if isinstance(key, tuple) else (key,)
        if not all(k is None or k == _py.slice(None) for k in keys):
            raise EmuError(f"tensors take only [:, None]-like indices, got {key!r}\n{show(where())}")
        return Tensor(np.asarray(self.a)[keys], self.dtype, self.layout)

    # arithmetic
    def __neg__(self):
        return Tensor(-self.a, self.dtype, self.layout)

    def __invert__(self):
        return Tensor(~self.a, self.dtype, self.layout)

    def __pos__(self):
        return self


class Accumulator:
    """The result of an asynchronous wgmma before warpgroup_mma_wait gives it out."""

    __hash__ = None

    def __init__(self, op, shape, layout):
        self.op, self.shape, self.layout, self.dtype = op, shape, layout, op.dtype

    @property
    def type(self):
        return _Type(self.dtype, self.shape, self.layout)

    def refuse(self, *_):
        raise EmuError(
            "the result of an asynchronous wgmma is used before a warpgroup_mma_wait that covers it gave it "
            f"out; it was issued at\n{show(self.op.place)}\n  and is used at\n{show(where())}"
        )

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()


_NAMES = """
add radd sub rsub mul rmul truediv rtruediv neg lt le gt ge eq ne and or getitem bool float int index
"""
for _n in _NAMES.split():
    setattr(Accumulator, f"__{_n}__", Accumulator.refuse)


def _operands(x, y, div=False):
    """Both as arrays of one dtype, by Triton's rules."""
    for v in (x, y):
        if isinstance(v, Accumulator):
            v.refuse()
    tx, ty = isinstance(x, Tensor), isinstance(y, Tensor)
    if tx and ty:
        dtype = x.dtype if x.dtype is y.dtype and not div else promote(x.dtype, y.dtype, div)
        a, b = x.a, y.a
        layout = x.layout if np.ndim(a) >= np.ndim(b) and x.layout is not None else y.layout
        if np.ndim(a) and np.ndim(b) and np.ndim(a) != np.ndim(b):
            raise EmuError(
                f"operands of ranks {np.ndim(a)} and {np.ndim(b)} (shapes {x.shape}, {y.shape}): Gluon "
                f"broadcasts only equal ranks; use expand_dims\n{show(where())}"
            )
    elif tx or ty:
        t, number = (x, y) if tx else (y, x)
        if not isinstance(number, (int, float, bool, np.generic)):
            return None
        kind = _number_dtype(number)
        if kind.kind <= t.dtype.kind:
            dtype = float32 if div and t.dtype in (float16, bfloat16) else t.dtype
        else:
            dtype = promote(kind, t.dtype, div)
        try:
            other = dtype.np.type(number)
        except OverflowError:
            raise EmuError(f"the number {number} does not fit {dtype}\n{show(where())}") from None
        a, b = (t.a, other) if tx else (other, t.a)
        layout = t.layout
    else:
        dtype = promote(_number_dtype(x), _number_dtype(y), div)
        return dtype.np.type(x), dtype.np.type(y), dtype, None
    return _cast(a, dtype), _cast(b, dtype), dtype, layout


def _check_finite_divisor(b):
    if not np.all(b):
        raise EmuError(f"integer division by 0\n{show(where())}")


def _floordiv(a, b):
    if a.dtype.kind in "iu":
        _check_finite_divisor(b)
        if a.dtype.kind == "u":
            return a // b
        return ((a - np.fmod(a, b)) // b).astype(a.dtype)  # towards 0, as the hardware
    return np.floor(a / b)


def _mod(a, b):
    if a.dtype.kind in "iu":
        _check_finite_divisor(b)
    return np.fmod(a, b)


def _binary(name, fn, out=None, div=False, ints=False):
    def forward(self, other):
        ops = _operands(self, other, div)
        if ops is None:
            return NotImplemented
        a, b, dtype, layout = ops
        if ints and dtype.kind == 2:
            raise EmuError(f"{name} of {dtype}\n{show(where())}")
        try:
            return Tensor(fn(a, b), out or dtype, layout)
        except ValueError as error:
            raise EmuError(f"{name} of shapes {np.shape(a)} and {np.shape(b)}: {error}\n{show(where())}") from None

    def backward(self, other):
        ops = _operands(other, self, div)
        if ops is None:
            return NotImplemented
        a, b, dtype, layout = ops
        return Tensor(fn(a, b), out or dtype, layout)

    setattr(Tensor, f"__{name}__", forward)
    if out is None or out is float32:
        setattr(Tensor, f"__r{name}__", backward)


for _n, _f in {"add": np.add, "sub": np.subtract, "mul": np.multiply, "mod": _mod, "floordiv": _floordiv}.items():
    _binary(_n, _f, div=_n in ("mod", "floordiv"))
for _n, _f in {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
}.items():
    _binary(_n, _f, ints=True)
for _n, _f in {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}.items():
    _binary(_n, _f, out=int1)


def _truediv(x, y):
    ops = _operands(x, y, True)
    if ops is None:
        return NotImplemented
    a, b, dtype, layout = ops
    if dtype.kind < 2:
        a, b, dtype = _cast(a, float32), _cast(b, float32), float32
    return Tensor(a / b, dtype, layout)


Tensor.__truediv__ = lambda self, other: _truediv(self, other)
Tensor.__rtruediv__ = lambda self, other: _truediv(other, self)


def tensor_of(x, dtype=None):
    """A Tensor of a Tensor, number or pointer."""
    if isinstance(x, Accumulator):
        x.refuse()
    if isinstance(x, (Tensor, Pointer)):
        return x
    if isinstance(x, (int, float, bool, np.generic)):
        dtype = dtype or _number_dtype(x)
        return Tensor(dtype.np.type(x), dtype)
    raise EmuError(f"expected a tensor or a number, got {type(x).__name__} {x!r}\n{show(where())}")


class Pointer:
    """A pointer (or a tensor of them) into one array."""

    __hash__ = None

    def __init__(self, mem, at, dtype, layout=None, name="?"):
        self.mem, self.at, self.dtype, self.layout, self.name = mem, at, dtype, layout, name

    @property
    def shape(self):
        return list(np.shape(self.at))

    @property
    def type(self):
        return _Type(self.dtype, self.shape, self.layout)

    def __add__(self, other):
        t = tensor_of(other)
        if t.dtype.kind == 2:
            raise EmuError(f"a pointer plus {t.dtype}\n{show(where())}")
        if np.ndim(self.at) and np.ndim(t.a) and np.ndim(self.at) != np.ndim(t.a):
            raise EmuError(f"pointers of shape {self.shape} plus offsets of shape {t.shape}\n{show(where())}")
        return Pointer(
            self.mem,
            np.asarray(self.at, np.int64) + np.asarray(t.a).astype(np.int64),
            self.dtype,
            t.layout or self.layout,
            self.name,
        )

    __radd__ = __add__

    def __sub__(self, other):
        return self + (-tensor_of(other))

    def to(self, dtype, bitcast=False):
        if isinstance(dtype, PointerType):
            new = dtype.element_ty
            if new.itemsize == self.dtype.element_ty.itemsize:
                return Pointer(self.mem.view(new.np), self.at, dtype, self.layout, self.name)
        raise Unsupported(f"cast of a pointer to {dtype}")

    def check(self, at, mask, what):
        if mask is not None:
            at = at[mask]
        if at.size and (at.min() < 0 or at.max() >= self.mem.size):
            raise EmuError(
                f"{what} out of bounds of {self.name}: element {int(at.min())} … {int(at.max())} of "
                f"{self.mem.size}\n{show(where())}"
            )


def _shape(shape):
    shape = [shape] if isinstance(shape, (int, Tensor)) else shape
    for s in shape:
        if isinstance(s, Tensor):
            raise EmuError(f"a shape must be of compile-time numbers, got a run-time {s}\n{show(where())}")
    return [int(s) for s in shape]
