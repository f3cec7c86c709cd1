"""How each attention function takes its arguments, and what they mean: one AttentionCall whatever was called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from assay.watching.call import AttentionCall
from assay.watching.function_call import FunctionCall, as_one_head
from assay.watching.packed_call import PackedCall, packed

Arguments = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Of one attention function."""

    name: str
    """As rows have it."""
    parameters: tuple[str, ...] = ()
    """The names of its arguments that may come by position, if it does not have them itself."""
    tensors: tuple[str, ...]
    """Which of them are q, k and v; "kv" and "qkv" hold several."""
    call: Callable[[Arguments], AttentionCall | PackedCall | str]
    """What is computed; or why that cannot be compared."""
    heads_second: bool = True
    """(B, H, N, D) as SDPA, or (B, N, H, D) as flash-attn: of q, k, v and their gradients."""
    output_heads_second: bool = True

    def named(self, arguments: Arguments) -> str:
        """What the rows of this call say that it is."""
        return self.name

    def bound(self, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
        """All arguments by name."""
        return dict(zip(self.parameters, args, strict=False)) | kwargs

    def invoke(self, function: Callable[..., Any], arguments: Arguments) -> Any:
        """Call it."""
        return function(**arguments)

    def differentiated(self, arguments: Arguments) -> tuple[str, ...]:
        """Names of the arguments whose gradients are compared."""
        return self.tensors

    def views(self, arguments: Arguments) -> dict[str, Tensor] | None:
        """Views through which only this call's gradients flow, where they had to be made before; else None."""
        return None

    def output(self, result: Any) -> Tensor | None:
        """The tensor among what it returned; None if there is none."""
        out = result[0] if isinstance(result, tuple) else result
        return out if isinstance(out, Tensor) else None

    def seen_output(self, x: Tensor) -> Tensor:
        """The output or its gradient as (B, H, N, D)."""
        return heads_second(x, self.output_heads_second)

    def seen_inputs(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of q, k and v as (B, H, N, D), by these names."""
        parts = [part for name, x in gradients.items() for part in (x.unbind(-3) if name in ("kv", "qkv") else (x,))]
        return {name: heads_second(x, self.heads_second) for name, x in zip("qkv", parts, strict=True)}

    def applies(self, arguments: Arguments) -> bool:
        """Whether this call is attention; else it may call attention in turn."""
        return True


@dataclass(frozen=True, kw_only=True)
class FunctionAdapter:
    """Of a function that the user named, and the plain one beside it."""

    name: str
    plain: Callable[..., Any]

    def named(self, arguments: Arguments) -> str:
        """What the rows of this call say that it is."""
        return self.name

    def bound(self, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
        """By position and by name."""
        return {str(number): x for number, x in enumerate(args)} | kwargs

    def invoke(self, function: Callable[..., Any], arguments: Arguments) -> Any:
        """Call it."""
        args, kwargs = _split(arguments)
        return function(*args, **kwargs)

    def call(self, arguments: Arguments) -> FunctionCall | str:
        """What is computed; or why that cannot be compared."""
        args, kwargs = _split(arguments)
        return FunctionCall(plain_function=self.plain, args=args, kwargs=kwargs)

    def differentiated(self, arguments: Arguments) -> tuple[str, ...]:
        """All floating tensors."""
        return tuple(name for name, x in arguments.items() if isinstance(x, Tensor) and x.is_floating_point())

    def views(self, arguments: Arguments) -> dict[str, Tensor] | None:
        """Views through which only this call's gradients flow, where they had to be made before; else None."""
        return None

    def output(self, result: Any) -> Tensor | None:
        """The tensor, or the first of several; None if there is none."""
        out = result[0] if isinstance(result, tuple | list) and result else result
        if not isinstance(out, Tensor):
            return None
        return torch.cat(out.unbind()) if out.is_nested else out

    def seen_output(self, x: Tensor) -> Tensor:
        """As one head."""
        return as_one_head(x.detach())

    def seen_inputs(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """As one head each."""
        return {name: self.seen_output(x) for name, x in gradients.items()}

    def applies(self, arguments: Arguments) -> bool:
        """All its calls are looked at."""
        return True


def _split(arguments: Arguments) -> tuple[tuple[Any, ...], Arguments]:
    by_position = [name for name in arguments if name.isdigit()]
    args = tuple(arguments[str(number)] for number in range(len(by_position)))
    return args, {name: value for name, value in arguments.items() if not name.isdigit()}


def heads_second(x: Tensor, already: bool) -> Tensor:
    """(B, H, N, D), without a gradient; sequences one after the other are a batch of one."""
    if already:
        return x.detach()
    return x.detach().transpose(0, 1)[None] if x.dim() == 3 else x.detach().transpose(1, 2)


def _sdpa(a: Arguments) -> AttentionCall | str:
    q, k, v = computed_in(a["query"], a["key"], a["value"])
    if a.get("dropout_p", 0.0):
        return "dropout: its mask is torch's secret"
    if q.is_nested:
        return "nested tensors"
    if q.dim() != 4 or not k.shape[0] == v.shape[0] == q.shape[0]:
        return "q, k and v that are not (batch, heads, length, dimension)"
    if k.shape[1] != v.shape[1] or (k.shape[1] not in (1, q.shape[1]) and not a.get("enable_gqa")):
        return "k and v of other numbers of heads"
    right = q.shape[2] - k.shape[2] if a.get("is_causal") else None
    bias = a.get("attn_mask")
    if type(bias) not in (type(None), Tensor, nn.Parameter):
        return f"a mask of the kind {type(bias).__name__}"
    return AttentionCall(q=q, k=k, v=v, scale=scale_of(a.get("scale"), q), right=right, bias=_four(bias))


def _ours(a: Arguments) -> AttentionCall | PackedCall | str:
    if a.get("rotary") is not None:
        return "rotary, which the watch does not take apart"
    if a.get("dropout_p", 0.0):
        return "dropout"
    q, k, v = computed_in(a["q"], a["k"], a["v"])
    left, right = a.get("window") or (None, None)
    if a.get("causal"):
        right = 0 if right is None else min(right, 0)
    how: dict[str, Any] = {"scale": scale_of(a.get("scale"), q), "left": left, "right": right}
    how |= {"softcap": a.get("softcap"), "sinks": a.get("sinks")}
    starts, key_starts = a.get("cu_seqlens_q"), a.get("cu_seqlens_k")
    if starts is not None:
        return packed(q, k, v, starts, starts if key_starts is None else key_starts, a.get("alibi_slopes"), **how)
    return AttentionCall(q=q, k=k, v=v, bias=_four(a.get("bias")), slopes=a.get("alibi_slopes"), **how)


def _eager(a: Arguments) -> AttentionCall | str:
    module = a["module"]
    if a.get("dropout", 0.0) and module.training:
        return "dropout"
    q, k, v = computed_in(a["query"], a["key"], a["value"])
    mask, sinks = a.get("attention_mask"), getattr(module, "sinks", None)
    if mask is not None and mask.shape[-1] != k.shape[2]:
        mask = mask[..., : k.shape[2]]
    bias = a.get("position_bias")
    if bias is not None and mask is not None:  # both are added
        bias = bias + mask
    return AttentionCall(
        q=q, k=k, v=v, scale=scale_of(a.get("scaling"), q), bias=_four(mask if bias is None else bias),
        softcap=a.get("softcap"), sinks=sinks,
    )  # fmt: skip


def scale_of(scale: float | None, q: Tensor) -> float:
    """As given, or 1/√dim."""
    return float(q.shape[-1]) ** -0.5 if scale is None else float(scale)


def _four(bias: Tensor | None) -> Tensor | None:
    """A mask with all four dimensions."""
    return None if bias is None else bias.detach()[(None,) * (4 - bias.dim())]


def computed_in(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast hands them to the kernel."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


SDPA = Adapter(
    name="sdpa",
    parameters=("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    tensors=("query", "key", "value"),
    call=_sdpa,
)
EAGER = Adapter(
    name="eager",
    tensors=("query", "key", "value"),
    call=_eager,
    output_heads_second=False,
)
OURS = Adapter(name="assay", tensors=("q", "k", "v"), call=_ours)
