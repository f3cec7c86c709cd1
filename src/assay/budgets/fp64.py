"""A plain implementation computed in FP64, also where it casts to a narrower format inside.

Plain implementations often say `x.float()` and cast back at the end. Run on FP64 inputs as they are, they would give
an FP64 tensor with an FP32 error, which nobody sees. Here every such cast leaves FP64 alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_REMEDY = "Pass golden=, a function that computes the same in FP64."


class _NarrowedError(ValueError):
    """Something left FP64."""


class _StaysInFp64(TorchDispatchMode):
    """Operations that ask for a narrower float dtype get FP64; what narrows in another way is refused."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _narrow(kwargs.get("dtype")):
            kwargs["dtype"] = torch.float64
        result = func(*args, **kwargs)
        given = [x.dtype for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        got = [x.dtype for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        reinterpreted = func is torch.ops.aten.view.dtype and given != got
        if torch.float64 in given and (reinterpreted or any(map(_narrow, got))):
            raise _NarrowedError(
                f"The baseline must stay in FP64 when it is given FP64, but {func} turned it into "
                f"{', '.join(sorted(map(str, set(got))))}. {_REMEDY}"
            )
        return result


def _narrow(dtype: object) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype != torch.float64


@contextlib.contextmanager
def baseline_in_fp64() -> Iterator[None]:
    """What is computed inside stays in FP64; if it cannot, a ValueError says why and what to do."""
    try:
        with _StaysInFp64():
            yield
    except _NarrowedError:
        raise
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            "The golden value is the baseline run in FP64, but with FP64 inputs the baseline failed: "
            f"{str(error).splitlines()[0]}. Hand every tensor that it uses over in `inputs`: those are promoted, "
            f"those it closes over are not. Or: {_REMEDY}"
        ) from error
