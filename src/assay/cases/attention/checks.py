"""What an attention call must be given; everything else is refused here, before anything is computed."""

from __future__ import annotations

import torch

from assay.cases.attention.masking import Masking, Window
from assay.cases.attention.plan import Plan

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    window: Window | None,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> Masking:
    """Check the arguments of an attention call on (B, H, N, D), and return its masking."""
    _check_tensors(q, k, v)
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be True or False, got {causal!r}.")
    (batch, heads, queries, dim), (_, kv_heads, keys, _) = q.shape, k.shape
    if k.shape[-1] != dim:
        raise ValueError(f"q and k must have the same head dimension, got {dim} and {k.shape[-1]}.")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            "k and v must agree in batch, heads and length, got "
            f"{tuple(k.shape[:3])} and {tuple(v.shape[:3])}. Only their head dimensions may differ."
        )
    if k.shape[0] != batch:
        raise ValueError(f"q and k must have the same batch size, got {batch} and {k.shape[0]}.")
    if heads % kv_heads:
        raise ValueError(
            f"The query heads must be a multiple of the key/value heads (GQA), got {heads} and {kv_heads}."
        )
    return Masking(
        queries=queries,
        keys=keys,
        causal=causal,
        window=_check_window(window),
        bias=_check_bias(bias, (batch, heads, queries, keys), q.device),
        alibi_slopes=_check_slopes(alibi_slopes, batch, heads, q.device),
    )


def is_number(value: object, kind: type | tuple[type, ...] = (int, float)) -> bool:
    """Whether `value` is a number of that kind; True and False are not."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_plan(plan: object) -> Plan:
    """A plan, and not the name of a format."""
    if not isinstance(plan, Plan):
        raise ValueError(
            f"plan must be a Plan, got {plan!r}. Use Plan.uniform('bf16') for every step in one format, "
            "or Plan.shipped('bf16') for what kernels do."
        )
    return plan


def check_gradient(grad: object, shape: tuple[int, ...], device: torch.device) -> None:
    """The gradient of the output has the output's shape."""
    if not isinstance(grad, torch.Tensor) or not grad.dtype.is_floating_point:
        got = grad.dtype if isinstance(grad, torch.Tensor) else type(grad).__name__
        raise ValueError(f"grad must be a floating-point tensor, got {got}.")
    if tuple(grad.shape) != shape or grad.device != device:
        raise ValueError(
            f"grad must have the shape of the output, {shape}, on {device}; got {tuple(grad.shape)} on {grad.device}."
        )


def check_scale(scale: float | None, dim: int) -> float:
    """The softmax scale: given, or 1/√D."""
    if scale is None:
        return float(dim**-0.5)
    if not is_number(scale) or not 0 < scale < float("inf"):
        raise ValueError(f"scale must be a positive finite number, got {scale!r}. Leave it out for 1/√D.")
    return float(scale)


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} must be a torch tensor, got {type(x).__name__}. Use torch.as_tensor.")
        if x.dim() != 4:
            raise ValueError(
                f"{name} must have the shape (batch, heads, length, head dimension), got {tuple(x.shape)}. "
                f"Add the missing dimensions, e.g. {name}[None]."
            )
        if 0 in x.shape:
            raise ValueError(f"{name} must not be empty, got the shape {tuple(x.shape)}.")
        if x.dtype not in _FLOATS:
            raise ValueError(
                f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}. "
                "Other formats are set by the plan: pass float32 and choose Plan(inputs=...)."
            )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}. Cast them with .to(dtype)."
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}. Move them with .to(device)."
        )


def _check_window(window: Window | None) -> Window | None:
    if window is None:
        return None
    if not isinstance(window, tuple) or len(window) != 2:
        raise ValueError(f"window must be (left, right), None on a side meaning no limit; got {window!r}.")
    for side in window:
        if side is not None and not (is_number(side, int) and side >= 0):
            raise ValueError(
                f"window's sides must be None or whole numbers of at least 0, got {window!r}. "
                "(127, 0) is a causal window of 128 keys."
            )
    return None if window == (None, None) else window


def _check_bias(
    bias: torch.Tensor | None, shape: tuple[int, int, int, int], device: torch.device
) -> torch.Tensor | None:
    if bias is None:
        return None
    if not isinstance(bias, torch.Tensor):
        raise ValueError(f"bias must be a torch tensor, got {type(bias).__name__}. Use torch.as_tensor.")
    if bias.device != device:
        raise ValueError(f"bias must be on the device of q ({device}), got {bias.device}.")
    if bias.dtype != torch.bool and not bias.dtype.is_floating_point:
        raise ValueError(f"bias must be float (added) or bool (True = seen), got {bias.dtype}.")
    if bias.requires_grad:
        raise ValueError("bias has no gradient here; pass bias.detach().")
    try:
        return bias.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"bias must broadcast to (batch, heads, queries, keys) = {shape}, got {tuple(bias.shape)}."
        ) from None


def _check_slopes(slopes: torch.Tensor | None, batch: int, heads: int, device: torch.device) -> torch.Tensor | None:
    if slopes is None:
        return None
    if not isinstance(slopes, torch.Tensor):
        raise ValueError(f"alibi_slopes must be a torch tensor, got {type(slopes).__name__}. Use torch.as_tensor.")
    if slopes.requires_grad:
        raise ValueError("alibi_slopes have no gradient here; pass alibi_slopes.detach().")
    if slopes.device != device:
        raise ValueError(f"alibi_slopes must be on the device of q ({device}), got {slopes.device}.")
    if tuple(slopes.shape) not in ((heads,), (batch, heads)) or not slopes.dtype.is_floating_point:
        raise ValueError(
            f"alibi_slopes must be float of shape (heads,) = ({heads},) or (batch, heads) = ({batch}, {heads}), "
            f"got {slopes.dtype} {tuple(slopes.shape)}."
        )
    return slopes.expand(batch, heads)


def refuse_double_backward() -> None:
    """Called in backward: with create_graph=True gradients of the gradients would silently be wrong."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "Attention with a plan has no second derivative: call backward without create_graph=True, or use "
            "golden_attention's formula in plain torch operations."
        )
