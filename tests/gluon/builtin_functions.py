# mypy: ignore-errors
"""Builtins that users write: `@builtin` functions run with a `_semantic` of ours."""

from __future__ import annotations

from tests.gluon.errors import Unsupported
from tests.gluon.hopper import fence_async_shared, tma
from tests.gluon.language import thread_barrier
from tests.gluon.tensors import Tensor, tensor_of


class _ReduceKind:
    ADD, MIN, MAX = "add", "min", "max"


class _Builder:
    """What `_semantic.builder` does in @builtin functions. Add methods here."""

    def create_async_tma_reduce(self, kind, desc, coord, src):
        tma._store(desc, coord, src, kind, "create_async_tma_reduce")

    def create_async_tma_copy_global_to_local(self, desc, coord, barrier, result, pred=True):
        tma.async_copy_global_to_shared(desc, coord, barrier, result, pred)

    def create_async_tma_copy_local_to_global(self, desc, coord, src):
        tma.async_copy_shared_to_global(desc, coord, src)

    def create_async_tma_store_wait(self, pendings):
        tma.store_wait(pendings)

    def create_fence_async_shared(self, cluster=False):
        fence_async_shared(cluster)

    def create_barrier(self):
        thread_barrier()

    def __getattr__(self, name):
        raise Unsupported(
            f"_semantic.builder.{name} is not emulated: add a method to _Builder, or a replacement of the "
            "whole function to BUILTINS, in builtin_functions.py"
        )


class _Semantic:
    builder = _Builder()

    @staticmethod
    def _convert_to_ir_values(values, require_i64=False):
        return list(values)

    @staticmethod
    def to_tensor(x):
        return tensor_of(x)

    def __getattr__(self, name):
        raise Unsupported(
            f"_semantic.{name} is not emulated: add it to _Semantic, or a replacement of the whole function to "
            "BUILTINS, in builtin_functions.py"
        )


Tensor.handle = property(lambda self: self)
BUILTINS: dict = {}
"""Name of a user's @builtin function → what to call in its place."""


def builtin(fn):
    def call(*args, **kwargs):
        other = BUILTINS.get(fn.__name__)
        if other is not None:
            return other(*args, **kwargs)
        kwargs["_semantic"] = _Semantic()
        return fn(*args, **kwargs)

    call.__name__ = fn.__name__
    return call
