"""A Plan: which format each named step of attention rounds to."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from assay._suggest import did_you_mean
from assay.formats.catalog import FP32, FP64, get
from assay.formats.spec import Format

FORWARD_STEPS = (
    "inputs",
    "scores",
    "scale",
    "maximum",
    "exponential",
    "row_sum",
    "rescale",
    "probabilities",
    "accumulator",
    "output_accumulator",
    "normalization",
    "output",
)
BACKWARD_STEPS = ("log_sum_exp", "recomputed", "delta", "dprobabilities", "dscores", "dq", "dk", "dv")
STEPS = FORWARD_STEPS + BACKWARD_STEPS


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The format of every step, forward and backward. Changing one step is one `replace`.

    A field takes a `Format` or its name; it holds a `Format`.
    """

    inputs: Format
    """Q, K and V (and, in backward, the gradient of the output) as they enter."""
    scores: Format
    """Q·Kᵀ, as the dot product leaves it."""
    scale: Format
    """The scores times the softmax scale, and plus bias or ALiBi."""
    maximum: Format
    """The row maximum, of a block and running."""
    exponential: Format
    """Score minus maximum, and its exponential (P)."""
    row_sum: Format
    """The sum of P over a row, of a block and running."""
    rescale: Format
    """The factor that corrects earlier blocks when the maximum moves, and its products with the row sum."""
    probabilities: Format
    """P as the P·V product takes it."""
    accumulator: Format
    """Partial sums inside every dot product."""
    output_accumulator: Format
    """The running output: a block's P·V, its rescaling, its sum."""
    normalization: Format
    """The division by the row sum (baseline: of P; tiled: of the output)."""
    output: Format
    """The result, and the gradients as they leave."""
    log_sum_exp: Format
    """The row's log-sum-exp, which forward leaves for backward (and split-KV for its merge)."""
    recomputed: Format
    """Backward: P computed again, as dS = P∘(dP − delta) takes it."""
    delta: Format
    """Backward: the row sums of dO∘O (tiled) or P∘dP (baseline), and dP minus them."""
    dprobabilities: Format
    """Backward: dP = dO·Vᵀ."""
    dscores: Format
    """Backward: dS = P∘(dP − delta), as the products with K and Q take it."""
    dq: Format
    """Backward: the running dQ."""
    dk: Format
    """Backward: the running dK."""
    dv: Format
    """Backward: the running dV."""

    accumulator_width: int = 32
    """Products that `accumulator` takes in at once, in the carrier, before it rounds (an FP8 tensor-core step: 32)."""
    accumulator_truncates: bool = False
    """Whether `accumulator` rounds toward zero, as tensor cores do, rather than to nearest."""
    promotion: int | None = None
    """After so many products the partial sum moves to a total in the carrier (FP32) and starts anew; None: never."""
    saturate: bool = False
    """Whether finite values beyond a format's range become its largest value, rather than inf or NaN.

    What overflows FP32 itself, in which values are carried, is inf all the same."""
    name: str = field(default="custom", compare=False)
    """How the plan is called in tables."""

    def __post_init__(self) -> None:
        for step in STEPS:
            object.__setattr__(self, step, get(getattr(self, step)))
        for name in ("accumulator_truncates", "saturate"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"Plan: {name} must be True or False, got {getattr(self, name)!r}.")
        if type(self.accumulator_width) is not int or self.accumulator_width < 1:
            raise ValueError(
                f"Plan: accumulator_width must be a whole number, at least 1, got {self.accumulator_width}."
            )
        if self.promotion is not None and (
            type(self.promotion) is not int
            or self.promotion < self.accumulator_width
            or self.promotion % self.accumulator_width
        ):
            raise ValueError(
                f"Plan: promotion must be a multiple of accumulator_width ({self.accumulator_width}), since "
                f"that many products enter at once; got {self.promotion}. Change one of the two."
            )

    @classmethod
    def uniform(cls, format: Format | str) -> Plan:
        """Every step in one format: what the paper's re-implementation does.

        Dot products still add up in FP32 (FP64 for formats wider than FP32), as every matrix unit does;
        `replace(accumulator=...)` lowers them too.
        """
        fmt = get(format)
        steps: dict[str, Any] = dict.fromkeys(STEPS, fmt)
        steps["accumulator"] = _accumulator_for(fmt)
        return cls(**steps, name=f"uniform {fmt}")

    @classmethod
    def eager(cls, format: Format | str) -> Plan:
        """What PyTorch's operators do, one after the other: every result rounded, softmax in FP32 inside.

        For the baseline: `softmax(q @ k.mT * scale) @ v` in bf16 is this, also its gradients.
        """
        fmt = get(format)
        inside = dict.fromkeys(("maximum", "exponential", "row_sum", "delta"), _accumulator_for(fmt))
        return cls.uniform(fmt).replace(**inside, name=f"eager {fmt}")

    @classmethod
    def shipped(cls, format: Format | str) -> Plan:
        """What shipped kernels do: everything in FP32 but the operands of the dot products and the output."""
        fmt = get(format)
        state = _accumulator_for(fmt)
        steps: dict[str, Any] = dict.fromkeys(STEPS, state)
        steps |= dict.fromkeys(("inputs", "probabilities", "dscores", "output"), fmt)
        return cls(**steps, name=f"shipped {fmt}")

    @classmethod
    def fa3_fp8(cls, format: Format | str = "fp8_e4m3", output: Format | str = "bf16") -> Plan:
        """FA3's FP8 forward: FP8 operands, sums in the tensor core's short accumulator (E8M13, truncating).

        Inputs are scaled before they are rounded: see `quantization` of `tiled_attention`.
        """
        fmt = get(format)
        return cls.shipped("fp32").replace(
            inputs=fmt,
            probabilities=fmt,
            output=output,
            accumulator="e8m13",
            accumulator_truncates=True,
            name=f"fa3 {fmt}",
        )

    @classmethod
    def fp64(cls) -> Plan:
        """Every step in FP64."""
        return cls.uniform(FP64)

    def replace(self, **changes: Format | str | int | None) -> Plan:
        """The same plan with some steps changed: `plan.replace(row_sum="fp32")`."""
        known = [f.name for f in fields(self)]
        for step in changes:
            if step not in known:
                hint = did_you_mean(step, known)
                raise ValueError(f"Unknown step {step!r}. {hint}The steps are: {', '.join(STEPS)}.")
        if "name" not in changes:
            listed = ", ".join(f"{step}={value}" for step, value in changes.items())
            changes["name"] = f"{self.name} with {listed}"
        return replace(self, **changes)  # type: ignore[arg-type]

    def formats(self) -> dict[str, Format]:
        """Step → format, in the order of the algorithm."""
        return {step: getattr(self, step) for step in STEPS}

    def as_dict(self) -> dict[str, str | int | bool | None]:
        """Everything needed to write the plan down, as plain values."""
        return {
            "name": self.name,
            **{step: str(fmt) for step, fmt in self.formats().items()},
            "accumulator_width": self.accumulator_width,
            "accumulator_truncates": self.accumulator_truncates,
            "promotion": self.promotion,
            "saturate": self.saturate,
        }


def _accumulator_for(fmt: Format) -> Format:
    """FP32, or FP64 for a format that FP32 cannot hold."""
    return FP32 if fmt.mantissa <= FP32.mantissa and fmt.exponent <= FP32.exponent else FP64
