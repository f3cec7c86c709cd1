"""The Triton kernels in Triton's interpreter, on CPU, against plain torch.

Run as `python -m tests.formats.interpreted_kernels` with TRITON_INTERPRET=1, which Triton reads when it is
imported: hence a process of its own. The interpreter only runs fp32 here; its bf16 is not right.
"""

from __future__ import annotations

import numpy as np
import torch

from assay.formats import NAMED, ROUNDINGS, Format
from assay.formats.dtypes import holds
from assay.formats.torch_rounding import Request, round_flat
from assay.formats.triton_rounding import launch

from .block_kernel import round_in_a_kernel
from .probes import probes, random_bits, special_values
from .twins import assert_same

FORMATS = [
    *(format for format in NAMED.values() if holds(torch.float32, format)),
    Format(exponent=5, mantissa=3, subnormals=False),
    Format(exponent=8, mantissa=10, subnormals=False),
    Format(exponent=8, mantissa=0),
    Format(exponent=5, mantissa=23),
]


def inputs() -> torch.Tensor:
    x = [random_bits(1000, np.float32), special_values(np.float32), probes("fp8_e4m3", np.float32)]
    return torch.from_numpy(np.concatenate(x))


def by_torch(x: torch.Tensor, request: Request) -> torch.Tensor:
    return round_flat(x, request, torch.float32, torch.float32)


def check_kernel(x: torch.Tensor, format: Format, rounding: str, saturate: bool) -> None:
    request, out = Request(format, rounding, saturate, None), torch.empty_like(x)
    launch(x, out, request, torch.float32)
    if rounding != "stochastic":
        assert_same(out.numpy(), by_torch(x, request).numpy(), x.numpy())
        return
    down, up = (by_torch(x, Request(format, way, saturate, None)) for way in ("down", "up"))
    one_of_them = (out == down) | (out == up) | out.isnan()
    assert one_of_them[x.abs() <= format.max].all(), (format, saturate)


def check_device_functions(x: torch.Tensor, format: Format, saturate: bool) -> None:
    for cut, rounding in ((False, "nearest_even"), (True, "toward_zero")):
        out = round_in_a_kernel(x, format, cut=cut, saturate=saturate)
        expected = by_torch(x, Request(format, rounding, saturate, None))
        assert_same(out.numpy(), expected.numpy(), x.numpy())


def main() -> None:
    x = inputs()
    for format in FORMATS:
        for saturate in (False, True):
            check_device_functions(x, format, saturate)
            for rounding in ROUNDINGS:
                check_kernel(x, format, rounding, saturate)
    print(f"{len(FORMATS)} formats agree")


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        main()
