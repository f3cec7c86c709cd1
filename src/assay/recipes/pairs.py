"""Paired trainings: the arms of the paper's Figure 8, at three sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from assay.training.training import Pair, PairStudy, Training

_ASKED = (
    "Does the deviation of Flash Attention reach the trained weights, and is that more than another initialisation or "
    "low precision would do (the paper's section V, Figures 7 and 8)?"
)
BASE = "standard bf16"
MORE: dict[str, Callable[[Training, str], Training]] = {
    "FP8 ↔ BF16": lambda base, block: replace(base, precision="fp8"),
    "flash, small blocks": lambda base, block: replace(base, attention=f"tiled shipped bf16 {block}"),
    "flash, every step in bf16": lambda base, block: replace(base, attention=f"tiled uniform bf16 {block}"),
    "other order": lambda base, block: replace(base, order_seed=base.order_seed + 1),
}
"""Other trainings to hold against the base: name → how to make it of the base and a block."""


def figure_8(
    base: Training, seeds: int = 3, every: int = 40, more: tuple[str, ...] = (), block: str = "16x16"
) -> PairStudy:
    """The paper's arms and their controls; and of `MORE` those that `more` names, plans with a block.

    `base` is trained with standard attention under BF16; every other training differs from it, or from the same in
    FP32, in one thing.
    """
    fp32, fp16 = replace(base, precision="fp32"), replace(base, precision="fp16")
    trainings = {
        BASE: base,
        "again": base,
        "flash bf16": replace(base, attention="flash"),
        "other initialisation": replace(base, init_seed=base.init_seed + 1),
        "standard fp32": fp32,
        "standard fp16": fp16,
        "flash fp16": replace(fp16, attention="flash"),
        "fp32, skipping like fp16": replace(fp32, skips_like="standard fp16"),
    }
    pairs = [
        Pair(name="null", arm="again", reference=BASE, several=True),
        Pair(name="flash", arm="flash bf16", reference=BASE),
        Pair(name="flash in FP16", arm="flash fp16", reference="standard fp16"),
        Pair(name="other initialisation", arm="other initialisation", reference=BASE),
        Pair(name="BF16 ↔ FP32", arm=BASE, reference="standard fp32"),
        Pair(name="FP16 ↔ FP32", arm="standard fp16", reference="standard fp32"),
        Pair(name="skipped steps alone", arm="fp32, skipping like fp16", reference="standard fp32"),
        Pair(
            name="FP16 ↔ FP32, same steps",
            arm="standard fp16",
            reference="fp32, skipping like fp16",
            several=True,  # who skips by itself, and who like another
        ),
    ]
    for name in more:
        trainings[name] = MORE[name](base, block)
        pairs.append(Pair(name=name, arm=name, reference=BASE))
    return PairStudy(asked=_ASKED, trainings=trainings, pairs=tuple(pairs), seeds=tuple(range(seeds)), every=every)


def quick() -> PairStudy:
    """A text-to-image model on a laptop: about a minute."""
    return figure_8(Training(size="300k", steps=60, batch=8, warmup=10, learning_rate=2e-3), every=20)


def paper() -> PairStudy:
    """A text-to-image model of a million parameters, with more arms."""
    return figure_8(Training(size="1m", steps=320, batch=16), more=tuple(MORE))


def full() -> PairStudy:
    """A hundred million parameters at 256 tokens of image, for a GPU."""
    base = Training(size="100m", image=64, steps=320, batch=16, warmup=30, learning_rate=3e-4)
    return figure_8(base, more=("FP8 ↔ BF16", "flash, every step in bf16"), block="64x64")


def speed() -> PairStudy:
    """Flash and standard attention at 1024 tokens of image, enough work for a GPU: how long a step takes."""
    base = Training(size="100m", image=128, steps=24, batch=32)
    return PairStudy(
        asked="Is a training step faster with Flash Attention (the paper: 14%)?",
        trainings={BASE: base, "flash bf16": replace(base, attention="flash")},
        pairs=(Pair(name="flash", arm="flash bf16", reference=BASE),),
        seeds=(0, 1, 2),
        every=12,
    )


def long() -> PairStudy:
    """Long enough for samples that show what their captions say, with a million parameters: half an hour on a core."""
    base = Training(size="1m", steps=6000, batch=32, learning_rate=1e-3, warmup=100)
    return PairStudy(
        asked="Do a model with flash and the same with standard attention learn the same?",
        trainings={BASE: base, "flash bf16": replace(base, attention="flash")},
        pairs=(Pair(name="flash", arm="flash bf16", reference=BASE),),
        seeds=(0,),
        every=500,
    )


def gpt() -> PairStudy:
    """A decoder on text."""
    base = Training(task="gpt", data="python", size="1m", steps=200, batch=16)
    return figure_8(base)


PAIR_RECIPES: dict[str, Callable[[], PairStudy]] = {
    "quick": quick,
    "paper": paper,
    "full": full,
    "speed": speed,
    "long": long,
    "gpt": gpt,
}
