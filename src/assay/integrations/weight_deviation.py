"""How far the weights of a training are from those of another at the same steps: a pair, in a user's own loop."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

from torch import nn

from assay.integrations.kept_weights import compare, moved, save, steps_in, weights_of
from assay.metrics.state_dicts import StateDictComparison


class WeightDeviation:
    """Keep the weights of a training, or compare them with those that another has kept.

        WeightDeviation(keep="runs/eager")       # in one training
        WeightDeviation(against="runs/eager")    # in another that differs from it in one thing

    Weights are kept at the beginning and at each step that `every` divides, whole: mind the disk. Figures, at each of
    those steps that the other has kept too: `max`, `rmse` and `w1`, the largest difference, the root mean square and
    the Wasserstein distance between the weights, over all layers; `moved`, the RMS of the way that the other has come
    from its first weights (with `keep` alone, this one); and `share`, rmse over moved. The same training twice is at 0
    throughout; another seed shows what is usual.
    """

    def __init__(self, *, keep: Path | str | None = None, against: Path | str | None = None, every: int = 100) -> None:
        if keep is None and against is None:
            raise ValueError("WeightDeviation needs a folder: keep=… for these weights, against=… for the other's.")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of steps, at least 1, got {every!r}.")
        self.keep, self.against = (None if folder is None else Path(folder).resolve() for folder in (keep, against))
        if self.keep == self.against:
            raise ValueError(f"keep and against must be two folders, got {self.keep} for both.")
        self.every = every
        self.last: StateDictComparison | None = None
        """The latest comparison, layer by layer."""
        self._done = -1

    def begin(self, model: nn.Module, step: int) -> None:
        """A training begins, or goes on from `step`."""
        weights, self._done, self.last = weights_of(model), step, None
        steps = {} if self.against is None else steps_in(self.against)
        if self.against is not None and not any(other > step and other % self.every == 0 for other in steps):
            raise ValueError(
                f"against must be a folder that `keep` has filled, with weights of some step after {step} that "
                f"every={self.every} divides; {self.against} has those of the steps {sorted(steps) or 'none'}."
            )
        if self.keep is not None:
            if step == 0 and steps_in(self.keep):
                raise ValueError(f"keep must be a folder without weights of another training, got {self.keep}.")
            save(self.keep, step, weights)
        if step not in steps:
            return
        self.last = compare(weights, steps[step])
        if self.last.combined.max > 0:
            warnings.warn(
                f"At step {step} the weights differ already from those in {self.against}, by up to "
                f"{self.last.combined.max:g}. To start from the same ones, set one seed before the model is made.",
                stacklevel=2,
            )

    def end_step(self, model: nn.Module, step: int) -> dict[str, float]:
        """`step` steps are over; the figures, if it is one that is looked at."""
        if step == self._done or step % self.every:
            return {}
        weights, self._done = weights_of(model), step
        if self.keep is not None:
            save(self.keep, step, weights)
        folder = self.keep if self.against is None else self.against
        assert folder is not None
        steps = steps_in(folder)
        if step not in steps:
            return {}
        way = moved(steps[min(steps)], steps[step])
        if self.against is None:
            return {"moved": way}
        self.last = compare(weights, steps[step])
        whole = self.last.combined
        share = whole.rmse / way if way else 0.0 if whole.rmse == 0 else math.inf
        return {"max": whole.max, "rmse": whole.rmse, "w1": whole.wasserstein, "moved": way, "share": share}
