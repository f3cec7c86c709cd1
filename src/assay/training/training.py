"""One training as data: everything that decides its bits. Two that differ in one field are a pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from assay._suggest import did_you_mean
from assay.training.attention import find_attention
from assay.training.optimizers import OPTIMIZERS
from assay.training.precision import POLICIES, Policy
from assay.training.tasks import TASKS

_SEEDS = ("init_seed", "order_seed", "noise_seed")
_SHAPES = {"task", "size", "image", "context"}
"""What decides how large the tensors are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What is trained, on what, and how."""

    task: str = "text_to_image"
    """Or "gpt"."""
    size: str = "1m"
    """Of the model: its parameters, roughly."""
    data: str = "openmoji"
    """For text "python"; or "folder:…", "tar:…", "hugging_face:…", "saved:…", "file:…" and a path; "synthetic"."""
    image: int = 32
    """Edge of the images."""
    context: int = 128
    """Bytes of text at a time."""
    attention: str = "standard"
    """See `attention.find_attention`."""
    precision: str | Policy = "bf16"
    """See `precision.POLICIES`."""
    init_seed: int = 0
    """Of the initial weights."""
    order_seed: int = 0
    """Of the order of the data."""
    noise_seed: int = 0
    """Of everything drawn in training: noise, times, dropped captions, dropout."""
    steps: int = 200
    batch: int = 16
    accumulate: int = 1
    """Batches of which a step sums up the gradients."""
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup: int = 20
    """Steps; then a cosine down to a tenth."""
    clip: float | None = 1.0
    """Largest norm of the gradient."""
    average: float = 0.99
    """Of the weights: the share of the old average that a step keeps (EMA)."""
    compile: bool = False
    skips_like: str | None = None
    """A control: skips the steps that the training of that name skips, for want of a smaller loss scale."""
    change: Callable[[nn.Module], None] | None = None
    """Done to the model before training: any other thing to compare."""

    def __post_init__(self) -> None:
        for field, known in (("task", TASKS), ("optimizer", OPTIMIZERS), ("precision", POLICIES)):
            value = getattr(self, field)
            if isinstance(value, str) and value not in known:
                hint = did_you_mean(value, known)
                raise ValueError(f"Unknown {field} {value!r}. {hint}There are: {', '.join(known)}.")
        find_attention(self.attention)
        for name in ("steps", "batch", "accumulate", "image", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")

    @property
    def policy(self) -> Policy:
        """The precision as data."""
        return POLICIES[self.precision] if isinstance(self.precision, str) else self.precision

    def reseeded(self, seed: int) -> Training:
        """The same training with other seeds; trainings that share or differ in seeds still do."""
        return replace(self, **{name: getattr(self, name) + 1000 * seed for name in _SEEDS})


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two trainings to be compared, by their names in the study."""

    name: str
    arm: str
    reference: str
    several: bool = False
    """Allows them to differ in more than one thing, or in none (a null)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairStudy:
    """Trainings that run together, and which of them are compared."""

    asked: str
    trainings: dict[str, Training]
    pairs: tuple[Pair, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    every: int = 40
    """Steps from one comparison to the next; the first is after step 1."""

    def __post_init__(self) -> None:
        if self.every < 1 or not self.seeds or not self.pairs:
            raise ValueError(
                f"A study of pairs needs pairs, seeds and a distance of at least 1 step between comparisons; got "
                f"{len(self.pairs)} pairs, seeds {self.seeds}, every {self.every}."
            )
        for pair in self.pairs:
            self._check(pair)
        for name, training in self.trainings.items():
            self._check_control(name, training)
        if len({training.steps for training in self.trainings.values()}) > 1:
            raise ValueError("Trainings of one study must have as many steps each: they are compared step by step.")

    def _check(self, pair: Pair) -> None:
        for name in (pair.arm, pair.reference):
            if name not in self.trainings:
                raise ValueError(f"The pair {pair.name!r} names {name!r}; there are: {', '.join(self.trainings)}.")
        found = changes(self.trainings[pair.arm], self.trainings[pair.reference])
        if _SHAPES & found.keys():
            raise ValueError(
                f"The trainings of a pair must have the same shapes, to be compared element by element; {pair.arm!r} "
                f"and {pair.reference!r} differ in {', '.join(sorted(_SHAPES & found.keys()))}."
            )
        if len(found) != 1 and not pair.several:
            what = "nothing" if not found else f"more than one thing: {', '.join(found)}"
            raise ValueError(
                f"The trainings of a pair must differ in exactly one thing; {pair.arm!r} and {pair.reference!r} do in "
                f"{what}. Change that, or say Pair(several=True) if it is meant."
            )

    def _check_control(self, name: str, training: Training) -> None:
        leader = training.skips_like
        if leader is not None and (leader not in self.trainings or self.trainings[leader].skips_like is not None):
            raise ValueError(
                f"{name!r} skips like {leader!r}, which must be a training of the study that skips by itself; "
                f"there are: {', '.join(self.trainings)}."
            )


def changes(arm: Training, reference: Training) -> dict[str, tuple[Any, Any]]:
    """Field → its value in the reference and in the arm, where they differ."""
    both = {field.name: (getattr(reference, field.name), getattr(arm, field.name)) for field in fields(Training)}
    return {name: values for name, values in both.items() if values[0] != values[1]}
