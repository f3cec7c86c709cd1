"""Where the records come from: what a reader needs to trust them or to measure them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from assay.results.record import Record

_COLUMNS = {
    "device": "device",
    "host_cpu": "host CPU",
    "threads": "threads",
    "platform": "platform",
    "python": "Python",
    "torch": "torch",
    "numpy": "numpy",
    "triton": "Triton",
    "code": "Assay",
}


class Provenance(NamedTuple):
    """Facts to list, and warnings to read first."""

    facts: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]


def provenance(
    points: Sequence[Record],
    problems: Sequence[str],
    command: str,
    training: Sequence[Record] = (),
    watched: Sequence[Record] = (),
) -> Provenance:
    """What all records say about their origin, together: points of sweeps, rows of training and of watches."""
    rows = [*points, *training, *watched]
    kinds = Counter(str(row["sweep"]) for row in points) + Counter(
        f"training {row['recipe'] or ''}" for row in training
    )
    kinds += Counter(f"watch of {row['model']}" for row in watched)
    times = sorted(str(row["time"]) for row in rows if row["time"])
    seconds = sum(row["seconds"] or 0.0 for row in rows)
    shapes = sorted(
        {(row["batch"], row["heads"], row["length"], row["dim"]) for row in points}, key=lambda s: [n or 0 for n in s]
    )
    facts = [
        ("records", f"{len(rows)}: " + ", ".join(f"{name} {count}" for name, count in sorted(kinds.items()))),
        *(
            (label, _listed([str(row[name]) for row in rows if row.get(name) is not None]))
            for name, label in _COLUMNS.items()
        ),
        ("shapes (batch, heads, length, dim)", _listed([str(shape).replace("None", "?") for shape in shapes])),
        ("trained", _listed([f"{row['model']} on {row['data']}" for row in training])),
        ("seeds", _seeds([row["seed"] for row in rows if row.get("seed") is not None])),
        ("measured", f"{times[0]} to {times[-1]}, {seconds / 60:.1f} minutes in all" if times else ""),
        ("to repeat it", command),
    ]
    warnings = list(problems)
    versions = {str(row["code"]) for row in rows}
    if len(versions) > 1:
        warnings.insert(
            0,
            f"The records come from {len(versions)} versions of the code: {', '.join(sorted(versions))}. "
            "Measure all of them with one version before you compare them.",
        )
    return Provenance(tuple((label, text) for label, text in facts if text), tuple(warnings))


def _listed(values: Sequence[str], most: int = 12) -> str:
    found = list(dict.fromkeys(values))
    return "; ".join(found[:most]) + (f"; and {len(found) - most} more" if len(found) > most else "")


def _seeds(seeds: Sequence[int]) -> str:
    found = sorted(set(seeds))
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]} to {found[-1]} ({len(found)})"
    return _listed([str(seed) for seed in found])
