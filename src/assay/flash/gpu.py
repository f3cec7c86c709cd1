"""What a GPU is and has."""

from __future__ import annotations

import warnings
from functools import cache

import torch

FIRST_TRITON, LAST_TRITON = (3, 6), (3, 9)
"""Between these the Hopper kernels compile, and the tests have read their machine code. Gluon, which they are written
in, changes with every version of Triton."""
_HOPPERS: dict[int, bool] = {}


@cache
def processors(index: int) -> int:
    """Its multiprocessors."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def takes_hopper_kernels(index: int) -> bool:
    """Whether it is NVIDIA's Hopper (AMD's tell the same number), with a Triton that our kernels are made for."""
    if index in _HOPPERS:  # not `cache`, of which torch.compile warns
        return _HOPPERS[index]
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(index)[0] == 9
    if torch.compiler.is_compiling():  # where nothing can be said
        return hopper and FIRST_TRITON <= _triton() <= LAST_TRITON
    _HOPPERS[index] = hopper and _is_known_triton()
    return _HOPPERS[index]


def _triton() -> tuple[int, int]:
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def _is_known_triton() -> bool:
    known = FIRST_TRITON <= _triton() <= LAST_TRITON
    if not known:
        first, last, this = (".".join(map(str, each)) for each in (FIRST_TRITON, LAST_TRITON, _triton()))
        warnings.warn(
            f"assay's kernels for Hopper are made for Triton {first} to {last}, this is {this}: the portable ones are "
            f"used, as accurate but slower. Install Triton {last} or a newer assay.",
            RuntimeWarning,
            stacklevel=3,
        )
    return known
