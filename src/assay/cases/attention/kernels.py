"""The attention kernels that this machine has, and what each is known to round: its plan and its tiling.

A kernel's plan is a claim about its insides. `validate` puts it to the test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from assay.cases.attention.baseline import baseline_attention
from assay.cases.attention.plan import Plan
from assay.cases.attention.tiled import tiled_attention
from assay.flash.attention import flash_attention
from assay.flash.call import Call
from assay.flash.numerics import Numerics

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


class KernelCall(Protocol):
    """A kernel: an `Attention` that also takes what a captured call may have had."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        /,
        *,
        scale: float | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A real kernel and the emulation that claims to do the same."""

    name: str
    """As tables show it."""
    call: KernelCall
    """(q, k, v, causal) → output."""
    plan: Callable[[str], Plan]
    """From the input format: what the kernel rounds, and to what."""
    tiling: Callable[[torch.Tensor, torch.Tensor], dict[str, Any]] | None
    """From the queries and the keys: the tile sizes and tricks; None: not tiled (baseline)."""
    scales_inputs: bool = False
    """Whether Q and K, in FP32, are each multiplied by the root of the scale before their product."""
    own_p: bool = False
    """Whether only the forward pass has P in the plan's format: for dV it is cast as shipped."""
    formats: tuple[str, ...] = ("bf16", "fp16", "fp32")
    """Of the inputs it takes."""
    notes: tuple[str, ...] = field(default=())
    """What is known not to match, and why."""

    def emulate(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, plan: Plan) -> torch.Tensor:
        """The kernel re-implemented: tiled or baseline attention, with every step rounded as `plan` says."""
        if self.scales_inputs:
            root, dtype = q.shape[3] ** -0.25, q.dtype
            q, k, v = q.float() * root, k.float() * root, v.float()
            inside = plan.replace(inputs="fp32", output="fp32")  # rounded to its dtype at the end
            return baseline_attention(q, k, v, plan=inside, causal=causal, scale=1.0).to(dtype)
        if self.tiling is None:
            return baseline_attention(q, k, v, plan=plan, causal=causal)
        return tiled_attention(q, k, v, plan=plan, causal=causal, **self.tiling(q, k))


def available_kernels(device: torch.device) -> list[Kernel]:
    """Every kernel that runs on `device`, fastest known first."""
    if device.type == "cpu":
        return [_SDPA_CPU_FLASH, _SDPA_MATH]
    found = [*OURS, _SDPA_FLASH, _SDPA_CUDNN, _SDPA_EFFICIENT, _SDPA_MATH]
    return [_FLASH_ATTN, *found] if find_spec("flash_attn") else found


def is_refusal(error: RuntimeError) -> bool:
    """Whether a kernel says that it does not take this format, shape or mask."""
    return "No available kernel" in str(error) or "not support" in str(error)


def _sdpa(backend: SDPBackend) -> KernelCall:
    def call(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        *,
        scale: float | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        with sdpa_kernel(backend):
            grouped = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, scale=scale, enable_gqa=grouped)

    return call


def _flash_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    *,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    from flash_attn import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

    if bias is not None:
        raise RuntimeError("flash-attn does not support a bias.")
    out: torch.Tensor = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=scale, causal=causal)
    return out.transpose(1, 2)


def _cpu_flash_plan(fmt: str) -> Plan:
    """Shipped, but the running dQ, dK and dV are kept in the input format, rounded after every block."""
    return Plan.shipped(fmt).replace(dq=fmt, dk=fmt, dv=fmt, name=f"shipped {fmt}, gradients summed in {fmt}")


def _cpu_flash_tiling(q: torch.Tensor, k: torch.Tensor) -> dict[str, Any]:
    rows = 256 if q.shape[2] >= 768 else 64 if q.shape[2] >= 192 else 32
    return {"block": (rows, 512), "scale_inside": True}


def _fa2_tiling(q: torch.Tensor, k: torch.Tensor) -> dict[str, Any]:
    """FA2 splits the keys where its blocks of rows leave the GPU idle, and then takes other tiles."""
    dim = q.shape[3]
    split_columns = 256 if dim <= 64 else 128 if dim <= 128 else 64
    slots = 2 * torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
    splits = _fa2_splits(q.shape[0] * q.shape[1] * -(-q.shape[2] // 64), slots, -(-k.shape[2] // split_columns))
    if splits > 1:
        return {"block": (64, split_columns), "exp2": True, "order": "split_kv", "splits": splits, "reverse_keys": True}
    return {"block": (128, 128 if dim <= 64 else 64), "exp2": True, "reverse_keys": True}


def _fa2_splits(programs: int, slots: int, blocks: int) -> int:
    """The fewest parts of the keys that fill the GPU's slots within 85% of the best filling."""
    if programs >= 0.8 * slots:
        return 1

    def filling(splits: int) -> float:
        waves = programs * splits / slots
        return waves / math.ceil(waves)

    # Of the counts that give the same blocks a part, the smallest.
    counts = [n for n in range(1, min(128, slots, blocks) + 1) if n == 1 or -(-blocks // n) != -(-blocks // (n - 1))]
    best = max(map(filling, counts))
    return next(n for n in counts if filling(n) >= 0.85 * best)


def _efficient_plan(fmt: str) -> Plan:
    """Shipped, but backward multiplies dP − delta by P after its cast."""
    return Plan.shipped(fmt).replace(recomputed=fmt, name=f"shipped {fmt}, dS from P in {fmt}")


def _math_plan(fmt: str) -> Plan:
    return Plan.shipped("fp32").replace(inputs=fmt, output=fmt, name=f"fp32 inside, {fmt} outside")


def _ours(
    *steps: str,
    probabilities: str | None = None,
    block: tuple[int, int] | None = None,
    formats: tuple[str, ...] = ("bf16", "fp16", "fp32"),
    **how: bool,
) -> Kernel:
    """Our CUDA kernel, with some of its steps in the format of its inputs: the real thing, perturbed.

    Also P in a format of its own, and tiles of another size (rows, keys).
    """
    of_p = {} if probabilities is None else {"probabilities": probabilities}
    changes = [f"{step} in {format}" for step, format in of_p.items()] + list(how)
    changes += [] if block is None else [f"tiles of {block[0]} × {block[1]}"]

    def numerics(format: str) -> Numerics:
        return Numerics(**dict.fromkeys(steps, format), **of_p, block=block, **how)  # type: ignore[arg-type]

    def call(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        *,
        scale: float | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        how = numerics(_NAMES[q.dtype])
        return flash_attention(q, k, v, causal=causal, scale=scale, bias=bias, numerics=how)

    def plan(format: str) -> Plan:
        shipped = Plan.shipped(format)
        words = "".join(f", {word}" for word in [f"{step} in {format}" for step in steps] + changes)
        return shipped.replace(**dict.fromkeys(steps, format), **of_p, name=f"{shipped.name}{words}")

    def tiling(q: torch.Tensor, k: torch.Tensor) -> dict[str, Any]:
        from assay.flash.launch import key_blocks

        call = Call(q=q, k=k, v=k, scale=1.0, numerics=numerics(_NAMES[q.dtype]))
        columns, reverse = key_blocks(call)
        return {"block": (128, columns), "exp2": True, "reverse_keys": reverse, **how}

    name = ", ".join([" + ".join(steps) + " in the input format"] * bool(steps) + changes)
    return Kernel(
        name=f"assay{name and ': '}{name}",
        call=call,
        plan=plan,
        tiling=tiling,
        own_p=probabilities is not None,
        formats=formats,
        notes=_FA2_NOTES,
    )


_FA2_NOTES = ("The order of FP32 sums inside a matrix unit is not known, so single roundings move.",)
OURS = (
    _ours(),
    _ours("row_sum"),
    _ours("rescale"),
    _ours("output_accumulator"),
    _ours("row_sum", "rescale", "output_accumulator"),
    _ours(sum_after_cast=True),
    _ours(reverse_keys=True),
    _ours(probabilities="fp32", formats=("bf16", "fp16")),
    _ours(probabilities="fp16", formats=("bf16",)),
    _ours(probabilities="bf16", formats=("fp16",)),
    _ours(block=(64, 32), formats=("bf16", "fp16")),
)
"""`flash_attention` on CUDA, as it is and perturbed: what it carries from block to block in the format of its inputs,
P in another format, other sums and tiles."""
_SDPA_CPU_FLASH = Kernel(
    name="SDPA flash (CPU)",
    call=_sdpa(SDPBackend.FLASH_ATTENTION),
    plan=_cpu_flash_plan,
    tiling=_cpu_flash_tiling,
    notes=(
        "The kernel sums dQ, dK and dV up in the input format; CUDA kernels use FP32 there.",
        "For bf16 and fp16 it takes a shorter exponential than torch.exp, which moves single roundings of P.",
    ),
)
_SDPA_FLASH = Kernel(
    name="SDPA flash (FA2)",
    formats=("bf16", "fp16"),
    call=_sdpa(SDPBackend.FLASH_ATTENTION),
    plan=Plan.shipped,
    tiling=_fa2_tiling,
    notes=_FA2_NOTES,
)
_SDPA_CUDNN = Kernel(
    name="SDPA cuDNN",
    formats=("bf16", "fp16"),
    call=_sdpa(SDPBackend.CUDNN_ATTENTION),
    plan=Plan.shipped,
    tiling=lambda q, k: {"block": (128, 128), "exp2": True},
    notes=("cuDNN is closed: its tile size is assumed.", *_FA2_NOTES),
)
_SDPA_EFFICIENT = Kernel(
    name="SDPA efficient",
    call=_sdpa(SDPBackend.EFFICIENT_ATTENTION),
    plan=_efficient_plan,
    tiling=lambda q, k: {"block": (64, 64), "exp2": True},
    notes=_FA2_NOTES,
)
_SDPA_MATH = Kernel(
    name="SDPA math",
    call=_sdpa(SDPBackend.MATH),
    plan=_math_plan,
    tiling=None,
    scales_inputs=True,
    notes=("Computes in FP32 whatever its inputs are: it is no bf16 baseline.",),
)
_FLASH_ATTN = Kernel(
    name="flash-attn",
    formats=("bf16", "fp16"),
    call=_flash_attn,
    plan=Plan.shipped,
    tiling=_fa2_tiling,
    notes=_FA2_NOTES,
)
