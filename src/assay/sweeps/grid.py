"""The six sweeps: which points each measures."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from assay._suggest import did_you_mean
from assay.cases.attention.blocks import Block, block_from_sram, check_block, square, swapped
from assay.cases.attention.captured import Captured, captured
from assay.cases.attention.inputs import DISTRIBUTIONS, FROM_FILE, check_inputs
from assay.cases.attention.kernels import OURS, Kernel, available_kernels
from assay.cases.attention.plan import FORWARD_STEPS, Plan
from assay.cases.attention.plans import high_format, named_plan
from assay.flash.checks import LARGEST_DIM
from assay.formats.catalog import get
from assay.sweeps.measure import TENSORS
from assay.sweeps.point import FLASH, Point

STEPS = tuple(step for step in FORWARD_STEPS if step not in ("inputs", "accumulator"))
"""What the sweep `steps` lowers and raises. Inputs are rounded before golden sees them, so they cause no error here;
dot products add up in FP32 in every plan of a family."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """What a sweep measures. Fields that a sweep does not use are ignored by it."""

    name: str
    batch: int = 1
    heads: int = 2
    length: int = 1024
    dim: int = 64
    causal: bool = False
    seeds: int = 5
    """Draws of the inputs, numbered from 0; for captured inputs, heads of the file."""
    inputs: tuple[str, ...] = ("uniform", "normal")
    formats: tuple[str, ...] = ("bf16",)
    plans: tuple[str, ...] = ("uniform", "fp32_state", "shipped")
    """See `cases.attention.plans.named_plan`."""
    baselines: tuple[str, ...] = ("eager",)
    """Plans of the baseline: as PyTorch's operators do it ("eager"), or with every step rounded ("uniform")."""
    order: str = "fa1"
    sram: int = 12_800
    """Elements of fast memory, from which the paper's rule takes the block."""
    block: Block | None = None
    """(rows, columns), instead of `sram`."""
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    """Of the sweep `length`."""
    srams: tuple[int, ...] = (4096, 8192, 16_384, 32_768, 65_536, 131_072)
    """Of the sweep `blocks`."""

    def __post_init__(self) -> None:
        if self.name not in SWEEPS:
            hint = did_you_mean(self.name, SWEEPS)
            raise ValueError(f"Unknown sweep {self.name!r}. {hint}There are: {', '.join(SWEEPS)}.")
        for size in ("batch", "heads", "length", "dim", "seeds", "sram"):
            if type(getattr(self, size)) is not int or getattr(self, size) < 1:
                raise ValueError(f"{size} must be a whole number of at least 1, got {getattr(self, size)!r}.")
        for several in ("inputs", "formats", "plans", "baselines", "lengths", "srams"):
            if not getattr(self, several):
                raise ValueError(f"A sweep needs at least one of its {several}, got none.")
        for value in (*self.lengths, *self.srams):
            if type(value) is not int or value < 1:
                raise ValueError(f"lengths and srams must be whole numbers of at least 1, got {value!r}.")
        if self.order not in ("fa1", "fa2", "split_kv"):
            raise ValueError(f"order must be fa1, fa2 or split_kv, got {self.order!r}.")
        if self.block is not None:
            check_block(self.block)
        for name in self.inputs:
            check_inputs(name)
        for format in self.formats:
            get(format)
            for plan in (*self.plans, *self.baselines):
                named_plan(plan, format)

    def points(self, device: str) -> list[Point]:
        """Every point of the grid, those that share their inputs side by side."""
        found: list[Point] = []
        for inputs in self.inputs:
            settings, call = self, None
            if inputs.startswith(FROM_FILE):
                settings, call = self._captured(Path(inputs.removeprefix(FROM_FILE)))
            for seed in range(settings.seeds):
                points = SWEEPS[self.name].points(settings, inputs, seed, device)
                if call is not None:  # one that says which keys it hid is not asked what other masks would do
                    points = (replace(p, keys=call.keys) for p in points if not call.told or p.causal == call.causal)
                found.extend(points)
        # Kernels mask from the top left where lengths differ, we from the bottom right: not the same thing.
        return [p for p in found if p.variant == FLASH or not p.causal or p.keys in (None, p.shape[2])]

    def _captured(self, path: Path) -> tuple[Sweep, Captured]:
        """The same sweep with the shape, the heads and the mask of a captured call; and that call."""
        call = captured(path)
        if call.told and self.causal and not call.causal:
            raise ValueError(f"{path} says itself which keys a query sees. Leave causal out.")
        _, _, length, dim = call.shape
        size: dict[str, Any] = {"batch": 1, "heads": 1, "length": length, "lengths": (length,), "dim": dim}
        return replace(self, **size, causal=self.causal or call.causal, seeds=min(self.seeds, call.heads)), call

    @property
    def tile(self) -> Block:
        """The block that is used where the sweep does not vary it."""
        return self.block or block_from_sram(self.sram, self.dim)


def _point(sweep: Sweep, inputs: str, seed: int, format: str, plan: str | Plan, baseline: str, **how: Any) -> Point:
    defaults: dict[str, Any] = {
        "shape": (sweep.batch, sweep.heads, sweep.length, sweep.dim),
        "causal": sweep.causal,
        "order": sweep.order,
        "block": sweep.tile,
        "block_shape": "given" if sweep.block else "paper",
    }
    return Point(
        sweep=sweep.name,
        inputs=inputs,
        seed=seed,
        format=str(get(format)),
        plan=plan if isinstance(plan, Plan) else named_plan(plan, format),
        baseline=named_plan(baseline, format),
        **defaults | how,
    )


def _plain(sweep: Sweep, inputs: str, seed: int, device: str) -> Iterator[Point]:
    """Formats × plans × baselines."""
    for format in sweep.formats:
        for plan in sweep.plans:
            for baseline in sweep.baselines:
                yield _point(sweep, inputs, seed, format, plan, baseline)


def _over_inputs(sweep: Sweep, inputs: str, seed: int, device: str) -> Iterator[Point]:
    """Formats × plans × baselines; a captured call goes through every real kernel as well."""
    yield from _plain(sweep, inputs, seed, device)
    if inputs.startswith(FROM_FILE):
        for kernel, format in product(available_kernels(torch.device(device)), sweep.formats):
            if _takes(kernel, format, sweep.dim):
                for baseline in sweep.baselines:
                    yield _of_kernel(sweep, inputs, seed, format, baseline, kernel)


def _over_precision(sweep: Sweep, inputs: str, seed: int, device: str) -> Iterator[Point]:
    """Formats × plans × baselines; on CUDA also our real kernel, as it is and perturbed, in the formats it takes."""
    yield from _plain(sweep, inputs, seed, device)
    if torch.device(device).type != "cuda" or sweep.dim > LARGEST_DIM:
        return
    for kernel, format in product(OURS, sweep.formats):
        if str(get(format)) in kernel.formats:
            for baseline in sweep.baselines:
                yield _of_kernel(sweep, inputs, seed, format, baseline, kernel)


def _takes(kernel: Kernel, format: str, dim: int) -> bool:
    """Formats that no kernel has are rounded to and carried in FP32."""
    name = str(get(format))
    carried = name not in ("bf16", "fp16", "fp32")
    return (carried or name in kernel.formats) and not (kernel in OURS and dim > LARGEST_DIM)


def _of_kernel(sweep: Sweep, inputs: str, seed: int, format: str, baseline: str, kernel: Kernel, **how: Any) -> Point:
    named = {"variant": kernel.name, "order": None, "block": None, "block_shape": None}
    return _point(sweep, inputs, seed, format, kernel.plan(format), baseline, **named | how)


def _over_lengths(sweep: Sweep, inputs: str, seed: int, device: str) -> Iterator[Point]:
    for length in sweep.lengths:
        yield from _plain(replace(sweep, length=length), inputs, seed, device)


def _over_blocks(sweep: Sweep, inputs: str, seed: int, device: str) -> Iterator[Point]:
    shapes: dict[str, Callable[[Block], Block]] = {"paper": lambda b: b, "swapped": swapped, "square": square}
    for format in sweep.formats:
        for plan in sweep.plans:
            for sram in sweep.srams:
                for shape, change in shapes.items():
                    block = change(block_from_sram(sram, sweep.dim))
                    for baseline in sweep.baselines:
                        yield _point(sweep, inputs, seed, format, plan, baseline, block=block, block_shape=shape)


def _over_steps(sweep: Sweep, inputs: str, seed: int, device: str) -> Iterator[Point]:
    """All-high, all-low, one step changed from either, and two random orders of raising all of them.

    The second order is the first one backwards: what depends on the order cancels sooner.
    """
    for format, family in product(sweep.formats, sweep.plans):
        above = high_format(format)
        low = named_plan(family, format)
        high = low.replace(**dict.fromkeys(STEPS, above), accumulator=named_plan("shipped", above).row_sum)
        low = low.replace(accumulator=high.accumulator, name=low.name)
        high = high.replace(name=f"all steps in {above}")
        ladder = f"{low.name} → {high.name}"
        for baseline in sweep.baselines:
            at = partial(_rung, sweep, inputs, seed, format, baseline, ladder)
            yield at(low, low.name, role="low")
            yield at(high, high.name, role="high")
            for step in STEPS:
                lowered = high.replace(**{step: getattr(low, step)})
                yield at(lowered, f"{high.name} but {step}", role="lower", step=step)
                yield at(low.replace(**{step: above}), f"{low.name} but {step}", role="raise", step=step)
            forwards = list(STEPS)
            random.Random(seed).shuffle(forwards)
            for path, order in enumerate((forwards, forwards[::-1])):
                plan = low
                for position, step in enumerate(order, start=1):
                    plan = plan.replace(**{step: above})
                    name = f"{low.name}, {position} raised"
                    yield at(plan, name, role="path", step=step, path=path, position=position)


def _rung(
    sweep: Sweep, inputs: str, seed: int, format: str, baseline: str, ladder: str, plan: Plan, name: str, **role: Any
) -> Point:
    return _point(sweep, inputs, seed, format, plan.replace(name=name), baseline, ladder=ladder, **role)


def _over_kernels(sweep: Sweep, inputs: str, seed: int, device: str) -> Iterator[Point]:
    for causal in (False, True):
        for kernel in available_kernels(torch.device(device)):
            for format in [format for format in sweep.formats if _takes(kernel, format, sweep.dim)]:
                for tensor in TENSORS:
                    for baseline in sweep.baselines:
                        how = {"causal": causal, "tensor": tensor}
                        yield _of_kernel(sweep, inputs, seed, format, baseline, kernel, **how)


@dataclass(frozen=True, slots=True)
class _Kind:
    question: str
    """What the sweep asks."""
    points: Callable[[Sweep, str, int, str], Iterator[Point]]
    """(sweep, inputs, seed, device) → points."""
    defaults: dict[str, Any]
    """What differs from the defaults of `Sweep`."""
    ignores: tuple[str, ...] = ("lengths", "srams")
    """Fields that mean nothing to it."""


SWEEPS = {
    "precision": _Kind(
        "How far apart are flash and baseline, and both from golden, from FP8 to FP64? (Figures 3 and 4)",
        _over_precision,
        {
            "formats": ("fp8_e5m2", "fp8_e4m3", "bf16", "fp16", "tf32", "fp32", "fp64"),
            "baselines": ("eager", "uniform"),
        },
    ),
    "length": _Kind(
        "What does the sequence length do at a fixed tile? (Figure 5)",
        _over_lengths,
        {"baselines": ("eager", "uniform")},
        ignores=("length", "srams"),
    ),
    "blocks": _Kind(
        "What do the size and the shape of a block do? (Figure 6)",
        _over_blocks,
        {"formats": ("bf16", "fp16", "fp32", "fp64"), "plans": ("uniform",)},
        ignores=("lengths", "sram", "block"),
    ),
    "steps": _Kind("Which steps own the deviation?", _over_steps, {"plans": ("uniform",)}),
    "inputs": _Kind("What do the inputs do?", _over_inputs, {"inputs": tuple(DISTRIBUTIONS)}),
    "kernels": _Kind(
        "How far are the real kernels of this machine from golden, forward and backward?",
        _over_kernels,
        {"formats": ("bf16", "fp16", "fp32"), "inputs": ("normal",)},
        ignores=("lengths", "srams", "sram", "block", "order", "plans", "causal"),
    ),
}


def default_sweep(name: str, **changes: Any) -> Sweep:
    """The sweep with its own defaults, and with `changes`; None leaves a default as it is."""
    if name not in SWEEPS:
        return Sweep(name=name)  # which refuses it
    known = {field.name for field in fields(Sweep)}
    unknown = [change for change in changes if change not in known]
    if unknown:
        raise ValueError(f"A sweep has no {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
    given = {field: value for field, value in changes.items() if value is not None}
    useless = [field for field in given if field in SWEEPS[name].ignores]
    if useless:
        raise ValueError(f"The sweep {name} has no use for {', '.join(useless)}. Leave that out.")
    return Sweep(name=name, **SWEEPS[name].defaults | given)
