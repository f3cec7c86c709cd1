"""Flash Attention: the studies that `assay study` knows by name."""

from __future__ import annotations

from collections.abc import Callable

from assay.recipes.study import Study
from assay.sweeps.grid import default_sweep

_ASKED = (
    "How far is Flash Attention from the golden value, which step of it causes that, and do the claims of the paper's "
    "section IV (Figures 3–6) hold?"
)


def quick() -> Study:
    """All six sweeps, small: minutes on a laptop."""
    return Study(
        asked=_ASKED,
        sweeps=(
            default_sweep("precision"),
            default_sweep("length", lengths=(256, 512, 1024, 2048)),
            default_sweep("blocks", srams=(4096, 16_384, 32_768, 65_536)),
            default_sweep("steps"),
            default_sweep("inputs"),
            default_sweep("kernels", formats=("bf16", "fp16")),
        ),
    )


def paper() -> Study:
    """The paper's section IV, with more lengths, block sizes and seeds than `quick`."""
    return Study(
        asked=_ASKED,
        sweeps=(
            default_sweep("precision", seeds=10),
            default_sweep("precision", length=2048),
            default_sweep("length", lengths=(256, 512, 1024, 2048, 4096, 8192)),
            default_sweep("blocks", seeds=10),
            default_sweep("steps", seeds=10, formats=("bf16", "fp16")),
            default_sweep("inputs", seeds=10),
            default_sweep("kernels"),
        ),
    )


def full() -> Study:
    """Everything, at the sizes of a GPU."""
    size = {"heads": 16, "length": 4096, "dim": 128}
    tiled = {**size, "sram": 4 * 128 * 128}
    return Study(
        asked=_ASKED,
        sweeps=(
            default_sweep("precision", seeds=10, **tiled),
            default_sweep("length", lengths=(512, 1024, 2048, 4096, 8192, 16_384), seeds=10, heads=4),
            default_sweep("blocks", seeds=10, heads=4, length=4096),
            default_sweep("steps", seeds=10, formats=("bf16", "fp16", "fp8_e5m2"), heads=4, length=4096),
            default_sweep("inputs", seeds=10, formats=("bf16", "fp16"), **tiled),
            default_sweep("kernels", seeds=10, **size),
        ),
    )


RECIPES: dict[str, Callable[[], Study]] = {"quick": quick, "paper": paper, "full": full}
