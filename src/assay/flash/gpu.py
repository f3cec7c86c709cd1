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
    if index not in _HOPPERS:  # not `cache`, of which torch.compile warns
        hopper = torch.version.hip is None and torch.cuda.get_device_capability(index)[0] == 9
        _HOPPERS[index] = hopper and _is_known_triton()
    return _HOPPERS[index]


def _is_known_triton() -> bool:
    import triton

    major, minor = triton.__version__.split(".")[:2]
    version = int(major), int(minor)
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
