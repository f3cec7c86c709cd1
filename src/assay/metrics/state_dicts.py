"""How two sets of weights differ, layer by layer and as a whole.

The Wasserstein distance sees each layer as a bag of values: two layers that are permutations of each
other are at distance 0. So the largest difference and an elementwise norm stand beside it in every row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.metrics.deviation import deviation
from assay.metrics.wasserstein import wasserstein


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDifference:
    """The differences of one layer, or of the whole model."""

    name: str
    count: int
    """Elements compared."""
    max: float
    """Largest |actual - reference|; inf if they disagree about a NaN or an infinity."""
    rmse: float
    """Root of the mean squared difference, element by element."""
    wasserstein: float
    """W_p between the values; over the whole model the layers' mean, weighted by their counts."""
    reference_std: float
    """Standard deviation of the reference weights; over the model the root mean square of the layers'."""

    @property
    def relative_rmse(self) -> float:
        """`rmse` in units of `reference_std`; 0 for 0/0, inf for constant weights that moved."""
        return _in_units(self.rmse, self.reference_std)

    @property
    def relative_wasserstein(self) -> float:
        """`wasserstein` in units of `reference_std`; 0 for 0/0, inf for constant weights that moved."""
        return _in_units(self.wasserstein, self.reference_std)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDictComparison:
    """Two state dicts, compared."""

    layers: tuple[WeightDifference, ...]
    """One row per floating-point tensor, in the order of the reference."""
    combined: WeightDifference
    """All layers as one."""
    skipped: tuple[str, ...]
    """Names that hold no weights: integer buffers such as step counters, empty tensors, other objects."""
    p: float
    """Order of the Wasserstein distance."""


def compare_state_dicts(
    actual: Mapping[str, Tensor], reference: Mapping[str, Tensor], p: float = 1
) -> StateDictComparison:
    """Compare two mappings from names to tensors, with the same names, shapes and devices.

    Dtypes may differ: BF16 weights can be compared with their FP32 master copy.
    """
    _check_same_layout(actual, reference)
    names = [name for name, weight in reference.items() if _is_weight(weight) and _is_weight(actual[name])]
    if not names:
        raise ValueError(
            "compare_state_dicts: at least one floating-point tensor is needed, got none among "
            f"{len(reference)} entries. Pass model.state_dict()."
        )
    layers = tuple(_compare_layer(name, actual[name], reference[name], p) for name in names)
    skipped = tuple(name for name in reference if name not in set(names))
    return StateDictComparison(layers=layers, combined=combine("combined", layers), skipped=skipped, p=p)


def _is_weight(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def _check_same_layout(actual: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> None:
    for which, value in (("actual", actual), ("reference", reference)):
        if not isinstance(value, Mapping):
            raise ValueError(
                f"compare_state_dicts: {which} must map names to tensors, got {type(value).__name__}. "
                "Pass model.state_dict()."
            )
    missing, extra = reference.keys() - actual.keys(), actual.keys() - reference.keys()
    if missing or extra:
        raise ValueError(
            "compare_state_dicts: both must have the same names; "
            f"only in reference: {sorted(missing)}, only in actual: {sorted(extra)}. "
            "Rename or drop them before comparing."
        )
    shapes = {name: (_shape(actual[name]), _shape(reference[name])) for name in reference}
    wrong = [f"{name} {mine} and {other}" for name, (mine, other) in shapes.items() if mine != other]
    if wrong:
        raise ValueError(
            f"compare_state_dicts: tensors of one name must have one shape, got {'; '.join(wrong)}. "
            "Were the two models built from the same configuration?"
        )


def _shape(value: object) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _compare_layer(name: str, actual: Tensor, reference: Tensor, p: float) -> WeightDifference:
    difference = deviation(actual, reference, quantiles=())
    # Measured against zeros, the standard deviation of the difference is that of the weights themselves.
    zero = torch.zeros((), dtype=torch.float32, device=reference.device).expand(reference.shape)
    return WeightDifference(
        name=name,
        count=difference.count,
        max=difference.max,
        rmse=difference.rmse,
        wasserstein=wasserstein(actual, reference, p),
        reference_std=deviation(reference, zero, quantiles=()).std,
    )


def combine(name: str, layers: Sequence[WeightDifference]) -> WeightDifference:
    """All layers as one: the same in whatever order they come."""
    return WeightDifference(
        name=name,
        count=sum(layer.count for layer in layers),
        max=_largest(layer.max for layer in layers),
        rmse=math.sqrt(_weighted_mean((layer.count, layer.rmse**2) for layer in layers)),
        wasserstein=_weighted_mean((layer.count, layer.wasserstein) for layer in layers),
        reference_std=math.sqrt(_weighted_mean((layer.count, layer.reference_std**2) for layer in layers)),
    )


def _weighted_mean(pairs: Iterable[tuple[int, float]]) -> float:
    pairs = list(pairs)
    return math.fsum(count * value for count, value in pairs) / sum(count for count, _ in pairs)


def _largest(values: Iterable[float]) -> float:
    """The maximum; NaN if any is NaN, wherever it stands."""
    values = list(values)
    return math.nan if any(math.isnan(v) for v in values) else max(values)


def _in_units(value: float, unit: float) -> float:
    if unit == 0:
        return 0.0 if value == 0 else math.inf
    return value / unit
