# mypy: ignore-errors
"""`jit` functions and their launch."""

from __future__ import annotations

import inspect
import random

import numpy as np

from tests.gluon.dtypes import DType, PointerType, _number_dtype, float32, int1
from tests.gluon.errors import EmuError, _active, current, options, show, stats, where
from tests.gluon.language import constexpr
from tests.gluon.memory import Descriptor, TensorDescriptor, is_torch, memory_of
from tests.gluon.scheduler import World
from tests.gluon.tensors import Accumulator, Pointer, Tensor

_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "warmup", "launch_pdl", "debug"}


class Jit:
    """A jit function: a plain call in a kernel, `fn[grid](…)` outside."""

    def __init__(self, fn):
        self.fn = fn
        self.__name__, self.__doc__, self.__module__ = fn.__name__, fn.__doc__, fn.__module__
        self.signature = inspect.signature(fn)
        self.arg_names = list(self.signature.parameters)
        self.constexprs = {
            name
            for name, p in self.signature.parameters.items()
            if p.annotation is constexpr or "constexpr" in str(p.annotation)
        }

    def __call__(self, *args, **kwargs):
        if _active.task is None:
            raise EmuError(f"{self.__name__} was called outside a kernel: {self.__name__}[grid](…)")
        if self.constexprs:
            for name, value in [*zip(self.arg_names, args, strict=False), *kwargs.items()]:
                if name in self.constexprs and isinstance(value, (Tensor, Pointer, Accumulator)):
                    raise EmuError(
                        f"{self.__name__}: {name} is a constexpr and got the run-time value {value!r}\n{show(where())}"
                    )
        return self.fn(*args, **kwargs)

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            return self.launch(grid, args, kwargs)

        return launch

    def launch(self, grid, args, kwargs):
        launch_options = {k: kwargs.pop(k) for k in list(kwargs) if k in _OPTIONS and k not in self.arg_names}
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise EmuError(f"{self.__name__}: {error}") from None
        bound.apply_defaults()
        if callable(grid):
            grid = grid(bound.arguments)
        grid = tuple(int(g) for g in ((grid,) if isinstance(grid, int) else grid))
        grid = grid + (1,) * (3 - len(grid))
        values = {
            name: (value if name in self.constexprs else argument(value, name))
            for name, value in bound.arguments.items()
        }
        seed = random.randrange(2**31) if options.seed is None else options.seed
        if options.seed is not None:
            options.seed += 1
        stats["launches"] += 1
        world = World(self.__name__, grid, seed)
        warps = launch_options.get("num_warps", 4)

        def run():
            current().warps = warps
            return self.fn(**values)

        world.launch(run)


def argument(value, name):
    """A kernel's argument as the kernel sees it. 1 and None are compile-time values, as in Triton."""
    if value is None or isinstance(value, DType):
        return value
    if isinstance(value, (bool, np.bool_)):
        return Tensor(np.bool_(value), int1)
    if isinstance(value, (int, np.integer)):
        return 1 if value == 1 else Tensor(_number_dtype(int(value)).np.type(value))
    if isinstance(value, (float, np.floating)):
        return Tensor(np.float32(value), float32)
    if isinstance(value, tuple):
        inside = [argument(v, f"{name}.{i}") for i, v in enumerate(value)]
        return type(value)(*inside) if hasattr(value, "_fields") else type(value)(inside)
    if isinstance(value, TensorDescriptor):
        mem, offset, dtype = memory_of(value.base)
        return Descriptor(
            mem,
            offset,
            dtype,
            [int(s) for s in value.shape],
            [int(s) for s in value.strides],
            [int(s) for s in value.block_shape],
            value.layout,
            value.padding,
            name,
        )
    if isinstance(value, np.ndarray) or is_torch(value):
        mem, offset, dtype = memory_of(value)
        return Pointer(mem, offset, PointerType(dtype), None, name)
    raise EmuError(f"argument {name}: a {type(value).__module__}.{type(value).__name__} cannot be passed to a kernel")


def jit(fn=None, **_):
    if fn is None:
        return jit
    return fn if isinstance(fn, Jit) else Jit(fn)
