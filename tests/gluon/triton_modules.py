# mypy: ignore-errors
"""What a kernel file gets for `import triton`."""

from __future__ import annotations

import types

from tests.gluon import access, dtypes, language, layouts, mathematics, memory, ptx
from tests.gluon.builtin_functions import _ReduceKind, builtin
from tests.gluon.dtypes import BlockType, DType, PointerType
from tests.gluon.errors import Unsupported, show, where
from tests.gluon.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from tests.gluon.language import constexpr_function, kernel_range
from tests.gluon.launch import jit
from tests.gluon.mathematics import where_
from tests.gluon.memory import TensorDescriptor
from tests.gluon.shared import Smem
from tests.gluon.tensors import Tensor


class _Missing:
    """What is not emulated: an error when it is called, not when it is imported."""

    def __init__(self, name):
        self.__name__ = name

    def __call__(self, *args, **kwargs):
        raise Unsupported(
            f"{self.__name__} is not emulated: write it in language.py and put it into LANGUAGE\n{show(where())}"
        )

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class FakeModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


def _module(name, real=None, **content):
    module = FakeModule(name)
    module.__path__ = []
    for key, value in content.items():
        setattr(module, key, value)
    return module


def _found(name):
    return next(vars(module)[name] for module in _PARTS if name in vars(module))


_PARTS = (dtypes, layouts, language, mathematics, access, ptx, memory)
_NAMES = """
constexpr int1 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float8e4nv float8e5 float16 bfloat16 float32 float64
allocate_shared_memory arange atomic_add atomic_and atomic_cas atomic_max atomic_min atomic_or atomic_xchg atomic_xor
assume broadcast broadcast_to cast convert_layout device_assert device_print dot dot_fma expand_dims full
inline_asm_elementwise join load max_constancy max_contiguous maximum minimum clamp mul add sub multiple_of
num_programs num_warps num_ctas permute trans program_id reduce reshape view ravel set_auto_layout split static_assert
static_print static_range store cumsum associative_scan barrier thread_barrier debug_barrier to_tensor warp_specialize
umulhi exp exp2 fma log log2 cos rsqrt sin sqrt sqrt_rn abs fdiv div_rn erf floor ceil cdiv full_like max min reduce_or
sum xor_sum zeros zeros_like AutoLayout BlockedLayout SliceLayout DistributedLinearLayout DotOperandLayout
NVMMADistributedLayout NVMMASharedLayout SwizzledSharedLayout PaddedSharedLayout SharedLinearLayout CoalescedLayout
make_tensor_descriptor
"""
LANGUAGE = {name: _found(name) for name in _NAMES.split()}
LANGUAGE |= {
    "where": where_,
    "dtype": DType,
    "tensor": Tensor,
    "pointer_type": PointerType,
    "block_type": BlockType,
    "shared_memory_descriptor": Smem,
    "range": kernel_range,
    "tuple": tuple,
    "PropagateNan": types.SimpleNamespace(ALL="ALL", NONE="NONE"),
}


def _fake_triton():
    hopper = _module(
        "triton.experimental.gluon.language.nvidia.hopper",
        fence_async_shared=fence_async_shared,
        mbarrier=mbarrier,
        tma=tma,
        warpgroup_mma=warpgroup_mma,
        warpgroup_mma_wait=warpgroup_mma_wait,
        warpgroup_mma_init=warpgroup_mma_init,
    )
    nvidia = _module("triton.experimental.gluon.language.nvidia", hopper=hopper)
    core = _module("triton.experimental.gluon.language._core", builtin=builtin, **LANGUAGE)
    gl = _module(
        "triton.experimental.gluon.language",
        nvidia=nvidia,
        _core=core,
        _layouts=_module("_layouts", **LANGUAGE),
        **LANGUAGE,
    )
    host_hopper = _module("triton.experimental.gluon.nvidia.hopper", TensorDescriptor=TensorDescriptor)
    gluon = _module(
        "triton.experimental.gluon",
        jit=jit,
        constexpr_function=constexpr_function,
        language=gl,
        nvidia=_module("triton.experimental.gluon.nvidia", hopper=host_hopper),
    )
    tl = _module(
        "triton.language",
        math=_module("triton.language.math", **LANGUAGE),
        core=_module("triton.language.core", builtin=builtin, constexpr_function=constexpr_function, **LANGUAGE),
        **LANGUAGE,
    )
    tools = _module(
        "triton.tools", tensor_descriptor=_module("triton.tools.tensor_descriptor", TensorDescriptor=TensorDescriptor)
    )
    ir = types.SimpleNamespace(DESCRIPTOR_REDUCE_KIND=_ReduceKind)
    return _module(
        "triton",
        jit=jit,
        language=tl,
        experimental=_module("triton.experimental", gluon=gluon),
        tools=tools,
        _C=_module("triton._C", libtriton=_module("triton._C.libtriton", ir=ir)),
        cdiv=lambda a, b: -(-a // b),
        next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
        constexpr_function=constexpr_function,
        __version__="3.6.0",
        runtime=_module("triton.runtime"),
        testing=_module("triton.testing"),
        autotune=lambda *a, **k: lambda f: f,
        heuristics=lambda *a, **k: lambda f: f,
    )


TRITON = _fake_triton()
