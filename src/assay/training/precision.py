"""A Policy: in which precision a model computes at each of its places, as data. Changing one place is one `replace`.

"bf16" and "fp16" give the bits of torch.autocast with FP32 master weights; every cast is here, where it can be seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from assay._suggest import did_you_mean
from assay.models.arithmetic import Arithmetic, Attention, Place
from assay.training.fp8 import RESULT as FP8_RESULT
from assay.training.fp8 import fp8_linear
from assay.training.loss_scaling import LossScale, check_loss_scale
from assay.training.tf32 import tf32_linear

_Model = TypeVar("_Model", bound=nn.Module)

PLACES = ("norms", "attention", "residuals", "embeddings", "last_layer")

_MATMULS = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": FP8_RESULT,
}
"""Precision of the matmuls → the dtype of their results."""
_CHOICES = {
    "matmul": tuple(_MATMULS),
    **dict.fromkeys(PLACES, ("matmul", "fp32", "bf16", "fp16")),
    "weights": ("fp32", "bf16"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The precision of every place of a model, by name.

    A place has "fp32", "bf16", "fp16", or "matmul": what the matmuls have.
    """

    matmul: str
    """Linear layers: "fp32", "tf32", "bf16", "fp16" or "fp8" (whose results are bf16)."""
    norms: str = "fp32"
    """RMS norms, from their input to their result."""
    attention: str = "matmul"
    """Q, K and V as attention takes them. Its softmax is the attention's own: FP32 in every kernel of ours, and
    perturbed by the plan of an attention that has one."""
    residuals: str = "fp32"
    """The stream that the layers add to."""
    embeddings: str = "fp32"
    """Rows of the tables, once looked up."""
    last_layer: str = "matmul"
    """The product that makes the logits, or the image."""
    weights: str = "fp32"
    """What is stored and updated: "fp32" (master weights, cast where used) or "bf16"; the optimizer's state follows."""
    loss_scale: LossScale = None
    """None, a number, or "dynamic": see `LossScaler`."""
    name: str = field(default="custom", compare=False)
    """How the policy is called in tables."""

    def __post_init__(self) -> None:
        for place, choices in _CHOICES.items():
            value = getattr(self, place)
            if value not in choices:
                hint = did_you_mean(str(value), choices)
                raise ValueError(f"Policy: {place} must be one of {', '.join(choices)}; got {value!r}. {hint}".rstrip())
        check_loss_scale(self.loss_scale)

    def __str__(self) -> str:
        values = (f"{name.replace('_', ' ')} {value}" for name, value in self.as_dict().items() if name != "name")
        return f"{self.name}: {', '.join(values)}"

    def replace(self, **changes: LossScale | str) -> Policy:
        """The same policy with some places changed: `POLICIES["bf16"].replace(norms="matmul")`."""
        known = [f.name for f in fields(self)]
        for place in changes:
            if place not in known:
                hint = did_you_mean(place, known)
                raise ValueError(f"Unknown place {place!r}. {hint}The places are: {', '.join(known)}.")
        if "name" not in changes:
            listed = ", ".join(f"{place}={value}" for place, value in changes.items())
            changes["name"] = f"{self.name} with {listed}"
        return replace(self, **changes)  # type: ignore[arg-type]

    def precision(self, place: str) -> str:
        """What a place computes in, with "matmul" looked up."""
        value: str = getattr(self, place)
        return self.matmul if value == "matmul" else value

    def dtype(self, place: str) -> torch.dtype:
        """The dtype that a place's results have."""
        return _MATMULS[self.precision(place)]

    def as_dict(self) -> dict[str, str | float | None]:
        """Everything needed to write the policy down, as plain values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def _policies() -> Mapping[str, Policy]:
    low: dict[str, Any] = dict.fromkeys(PLACES, "matmul")
    policies = (
        Policy(name="fp32", matmul="fp32"),
        Policy(name="tf32", matmul="tf32"),
        Policy(name="bf16", matmul="bf16"),
        Policy(name="fp16", matmul="fp16", loss_scale="dynamic"),
        Policy(name="bf16_pure", matmul="bf16", weights="bf16", **low),
        Policy(name="fp8", matmul="fp8", last_layer="bf16"),
    )
    return MappingProxyType({policy.name: policy for policy in policies})


POLICIES = _policies()
"""Name → policy: fp32, tf32, bf16, fp16, bf16_pure, fp8."""


def convert_weights(model: _Model, policy: Policy) -> _Model:
    """The same model, its parameters stored as the policy says; buffers stay. Do it before making the optimizer."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(_MATMULS[policy.weights])
            parameter.grad = None
    return model


class PolicyArithmetic(Arithmetic):
    """A model's arithmetic as a policy says: each place casts what it takes, and leaves its result in that dtype."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, place: Place = "matmul") -> Tensor:
        """See `Arithmetic`; the bias is cast like the weight."""
        precision = self.policy.precision(place)
        if precision == "fp8":
            return fp8_linear(x, weight, bias)
        dtype = self.policy.dtype(place)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        if dtype == torch.float16 and x.device.type == "cpu":
            # Most CPUs have no products of FP16, and torch's are 30 times slower than this: rounded once, too.
            wide = None if bias is None else bias.float()
            return super().linear(x.float(), weight.float(), wide, place).to(dtype)
        return tf32_linear(x, weight, bias) if precision == "tf32" else super().linear(x, weight, bias, place)

    def norm(self, x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
        """See `Arithmetic`."""
        dtype = self.policy.dtype("norms")
        return super().norm(x.to(dtype), None if weight is None else weight.to(dtype), eps)

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        """See `Arithmetic`; the rows are cast, so that their gradients add up in the dtype of the table."""
        return super().embedding(ids, table).to(self.policy.dtype("embeddings"))

    def residual(self, x: Tensor, y: Tensor) -> Tensor:
        """See `Arithmetic`."""
        dtype = self.policy.dtype("residuals")
        return super().residual(x.to(dtype), y.to(dtype))

    def attention(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """See `Arithmetic`."""
        dtype = self.policy.dtype("attention")
        return super().attention(attention, q.to(dtype), k.to(dtype), v.to(dtype), causal)
