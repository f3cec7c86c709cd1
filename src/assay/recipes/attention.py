"""Flash Attention: the studies that `assay study` knows by name."""

from __future__ import annotations

from collections.abc import Callable

from assay.recipes import pairs
from assay.recipes.study import Study
from assay.sweeps.grid import default_sweep

_ASKED = (
    "How far is Flash Attention from the golden value, which step of it causes that, does it reach the trained "
    "weights, and do the paper's claims (Figures 3–8) hold?"
)


def quick() -> Study:
    """All six sweeps and the pairs of Figure 8, small: minutes on a laptop."""
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
        pairs=pairs.quick(),
    )


def paper() -> Study:
    """The paper's sections IV and V, with more lengths, block sizes and seeds than `quick`."""
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
        pairs=pairs.paper(),
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
        pairs=pairs.full(),
    )


RECIPES: dict[str, Callable[[], Study]] = {"quick": quick, "paper": paper, "full": full}
