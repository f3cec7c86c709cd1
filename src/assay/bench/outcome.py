"""All that a run found, as the document that `--json` writes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from assay.bench.figures import Point
from assay.bench.findings import findings
from assay.bench.profiling import Profile


@dataclass(slots=True)
class Outcome:
    """Filled while the run goes on: cut short, it holds what there is."""

    device: str
    dtype: str
    rounds: int
    points: list[Point] = field(default_factory=list)
    profiles: list[Profile] = field(default_factory=list)
    complete: bool = False

    @property
    def measured(self) -> bool:
        """Whether there is any figure at all."""
        return any(figure.samples for point in self.points for figure in point.figures)

    def sentences(self) -> list[str]:
        """What the figures say."""
        return findings(self.points, on_gpu=self.device.startswith("cuda"))

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "complete": self.complete,
            "dtype": self.dtype,
            "rounds": self.rounds,
            "points": [point.as_dict() for point in self.points],
            "profile": [asdict(profile) for profile in self.profiles],
            "findings": self.sentences(),
        }
