"""Functions of ours as operators of torch: one line that torch.compile keeps whole and autograd records.

`torch.library.custom_op` does the same and then checks every call for aliasing, which takes longer than launching a
kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("assay", "FRAGMENT")


def operator(
    function: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup: Callable[..., None] | None = None,
) -> Any:
    """`torch.ops.assay.<name of the function>`, on CPU and CUDA.

    Args:
        function: Takes and returns tensors (new ones) and plain values, with types.
        fake: The same for tensors without data: shapes, dtypes and strides of what would come.
        backward: The gradient, from (ctx, gradients of the results).
        setup: Keeps on ctx, from (ctx, inputs, output), what `backward` needs.
    """
    name = function.__name__
    schema = torch.library.infer_schema(function, mutates_args=())
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, function, device)
    torch.library.register_fake(f"assay::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"assay::{name}", backward, setup_context=setup, lib=_LIBRARY)
    return getattr(torch.ops.assay, name).default
