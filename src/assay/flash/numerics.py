"""What the kernel rounds on its way, as knobs: a real kernel, perturbed at full speed."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

FORMATS = {"bf16": 8, "fp16": 11, "fp32": 24}
"""Significant bits."""
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """Formats of what the forward kernel carries, the size of its tiles and the order of its loop. CUDA only.

    The default is what shipped kernels do: FP32 inside, P in the format of V. The names are those of the steps of a
    `Plan`.
    """

    probabilities: str | None = None
    """P as the P·V product takes it; None: the dtype of v. FP32 enters as two 16-bit numbers: 16 bits with bf16."""
    row_sum: str = "fp32"
    """The sum of P over a row: of a block, rescaled, and running."""
    rescale: str = "fp32"
    """The factor that corrects earlier blocks when the maximum moves."""
    output_accumulator: str = "fp32"
    """The running output: a block's P·V, its rescaling, its sum."""
    sum_after_cast: bool = False
    """Whether the row sum adds up P as the P·V product takes it, rather than P in FP32."""
    reverse_keys: bool = False
    """Whether the keys are taken in from the last block to the first."""
    block: tuple[int, int] | None = None
    """Rows and keys of a tile, powers of two from 16; None: from the tuning table."""

    def __post_init__(self) -> None:
        for name in ("probabilities", "row_sum", "rescale", "output_accumulator"):
            value = getattr(self, name)
            if value not in FORMATS and not (name == "probabilities" and value is None):
                raise ValueError(f"Numerics: {name} must be one of {', '.join(FORMATS)}, got {value!r}.")
        for name in ("sum_after_cast", "reverse_keys"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"Numerics: {name} must be True or False, got {getattr(self, name)!r}.")
        if self.block is not None and not (
            isinstance(self.block, tuple) and len(self.block) == 2 and all(map(_is_block, self.block))
        ):
            raise ValueError(
                f"Numerics: block must be (rows, keys), each a power of two from 16 to 256; got {self.block!r}."
            )

    def pieces(self, dtype: torch.dtype) -> int:
        """As how many numbers of this dtype, that of v, P enters the P·V product."""
        if self.probabilities is None:
            return 1
        return min(2, -(-FORMATS[self.probabilities] // FORMATS[NAMES[dtype]]))

    def encoded(self) -> str:
        """As one string, as an operator takes it; "" for the default."""
        default = Numerics()
        changed = [f.name for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)]
        return ";".join(f"{name}={_text(getattr(self, name))}" for name in changed)

    @classmethod
    def decoded(cls, text: str) -> Numerics:
        """What `encoded` wrote."""
        if not text:
            return SHIPPED
        values: dict[str, object] = {}
        for part in filter(None, text.split(";")):
            name, _, value = part.partition("=")
            if name == "block":
                rows, columns = map(int, value.split(","))
                values[name] = (rows, columns)
            else:
                values[name] = value == "True" if name in ("sum_after_cast", "reverse_keys") else value
        return cls(**values)  # type: ignore[arg-type]


SHIPPED = Numerics()
"""What shipped kernels do."""


def _is_block(size: object) -> bool:
    return type(size) is int and 16 <= size <= 256 and size & (size - 1) == 0


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
