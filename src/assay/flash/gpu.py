"""What a GPU is and has."""

from __future__ import annotations

import warnings
from functools import cache

import torch

FIRST_TRITON, LAST_TRITON = (3, 6), (3, 9)
"""Between these the Hopper kernels compile, and the tests have read their machine code. Gluon, which they are written
in, changes with every version of Triton."""


@cache
def processors(index: int) -> int:
    """Its multiprocessors."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def takes_hopper_kernels(index: int) -> bool:
    """Whether it is NVIDIA's Hopper, with a Triton that our kernels are made for. Compilers do not look inside."""
    return _is_hopper(index) and _is_known_triton()


@cache
def _is_hopper(index: int) -> bool:
    """AMD's tell the same number."""
    return torch.version.hip is None and torch.cuda.get_device_capability(index)[0] == 9


@cache
def _is_known_triton() -> bool:
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    known = FIRST_TRITON <= version <= LAST_TRITON
    if not known:
        first, last = (".".join(map(str, each)) for each in (FIRST_TRITON, LAST_TRITON))
        warnings.warn(
            f"assay's kernels for Hopper are made for Triton {first} to {last}, this is {triton.__version__}: the "
            f"portable ones are used, as accurate but slower. Install Triton {last} or a newer assay.",
            RuntimeWarning,
            stacklevel=2,
        )
    return known
