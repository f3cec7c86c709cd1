"""What the record on Hopper measures, what it must be, and its file. Plain data: no GPU is needed here.

A `Case` is a problem, a `Point` what was measured of one pass over it, a `Record` all points with what they were
measured on. A `Goal` reads a record and says what it found.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from assay._files import write_whole
from benchmarks.bench_flash import HIDDEN, TOKENS

Part = Literal["forward", "backward", "both"]
PARTS: tuple[str, ...] = ("forward", "backward", "both", "kinds", "fp8")
"""What a run may be limited to."""
OURS, CUDNN, FA2, FLEX, PLAIN = "assay", "cuDNN", "FA2", "FlexAttention", "plain"
"""Who is timed. PLAIN is our own kernel on a case's twin."""
DIMS, LENGTHS = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)
KINDS = ("ragged", "GQA", "strided", "window", "packed")
"""Other than plain; each is held against its plain twin."""
FP16 = "FP16"
FP8, FP8_KERNEL = "FP8", "FP8 kernel"
"""From bf16 inputs, which are quantised on the way; and from inputs that were quantised before, sums of one level."""
GROUP = 4
"""Query heads to one of K and V."""
_PRODUCTS: dict[Part, int] = {"forward": 2, "backward": 5, "both": 7}
_ROWS = 128
"""Of a tile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A problem of 16,384 tokens (ragged: a little under) and a hidden size of 2048."""

    kind: str = "plain"
    dim: int
    length: int
    causal: bool
    parts: tuple[Part, ...]
    """The passes that are measured."""
    window: int = 0
    """Keys that a query sees, itself the last; 0: no window."""
    packed: tuple[int, ...] = ()
    """The lengths of sequences one after the other; `length` is their sum."""

    @property
    def name(self) -> str:
        """As the table shows it."""
        what = "" if self.kind == "plain" else f", {self.kind}"
        if self.kind == "GQA":
            what += f" {GROUP}"
        elif self.window:
            what += f" {self.window}"
        elif self.packed:
            what += f" {_in_words(self.packed)}"
        mask = "" if self.window else " causal" if self.causal else " full"
        return f"D {self.dim:3} N {self.length:5}{mask}{what}"

    @property
    def batch(self) -> int:
        """Sequences, or batches of packed ones."""
        return max(1, TOKENS // self.length)

    @property
    def pairs(self) -> float:
        """Of a query and a key that it sees, in one head; of a causal mask half the square, as everybody counts."""
        if self.window:
            return self.batch * (self.length * self.window - self.window**2 / 2)
        lengths = self.packed or (self.length,)
        return self.batch * sum(n**2 for n in lengths) / (2 if self.causal else 1)

    def flops(self, part: Part) -> float:
        """Each product is 2 · pairs · hidden size."""
        return 2.0 * _PRODUCTS[part] * self.pairs * HIDDEN

    @property
    def twin(self) -> Case | None:
        """The plain case of about the same FLOPs that a kind is held against, by TFLOP/s."""
        length, causal = self.length, self.causal
        if self.kind == "ragged":
            length = -(-length // _ROWS) * _ROWS
        elif self.kind == "window":
            length, causal = 2 * self.window, True
        elif self.kind == "packed":
            length = self.packed[0] if len(set(self.packed)) == 1 else 4096
        elif self.kind not in (*KINDS, FP8, FP8_KERNEL):
            return None
        return Case(dim=self.dim, length=length, causal=causal, parts=self.parts)


def _in_words(lengths: tuple[int, ...]) -> str:
    return f"{len(lengths)} × {lengths[0]}" if len(set(lengths)) == 1 else f"{min(lengths)}–{max(lengths)}"


def cases(wanted: Sequence[str], *, quick: bool = False) -> list[Case]:
    """What a run of these parts measures; `quick`: twelve shapes, of other kinds one each."""
    passes: tuple[Part, ...] = tuple(part for part in _PRODUCTS if part in wanted)
    found = []
    if passes:
        lengths = (1024, 16384) if quick else LENGTHS
        found = [
            Case(dim=dim, length=length, causal=causal, parts=passes)
            for dim in DIMS
            for length in lengths
            for causal in (False, True)
        ]
    if "kinds" in wanted:
        for dim in (128,) if quick else DIMS:
            kinds = _kinds(dim)
            found += [next(case for case in kinds if case.kind == kind) for kind in KINDS] if quick else kinds
        found += list(_deterministic((128,) if quick else DIMS, (4096,) if quick else (1024, 4096, 16384)))
        found += [
            Case(kind=FP16, dim=dim, length=4096, causal=causal, parts=("forward", "backward"))
            for dim in ((128,) if quick else DIMS)
            for causal in (False, True)
        ]
    if "fp8" in wanted:
        found += [
            Case(kind=kind, dim=dim, length=length, causal=causal, parts=("forward",))
            for kind in (FP8, FP8_KERNEL)
            for dim in (128, 256)
            for length in ((8192,) if quick else (8192, 16384))
            for causal in (False, True)
        ]
    return found


def _kinds(dim: int) -> list[Case]:
    parts: tuple[Part, ...] = ("forward", "backward")
    mixed = (8192, 4096, 2048, 1024, 512, 512)
    return [
        *(
            Case(kind=kind, dim=dim, length=length, causal=causal, parts=parts)
            for kind, length, causal in (
                ("ragged", 1000, True),
                ("ragged", 4090, False),
                ("ragged", 8150, True),
                ("GQA", 4096, True),
                ("GQA", 8192, False),
                ("strided", 2048, True),
                ("strided", 8192, False),
            )
        ),
        *(
            Case(kind="window", dim=dim, length=16384, causal=False, window=keys, parts=parts)
            for keys in (1024, 4096)
        ),
        *(
            Case(kind="packed", dim=dim, length=TOKENS, causal=True, packed=lengths, parts=parts)
            for lengths in (16 * (1024,), 4 * (4096,), mixed)
        ),
    ]  # fmt: skip


def _deterministic(dims: Sequence[int], lengths: Sequence[int]) -> Iterator[Case]:
    for dim in dims:
        for length in lengths:
            for causal in (False, True):
                yield Case(kind="deterministic", dim=dim, length=length, causal=causal, parts=("backward",))


def takes_flex(case: Case) -> bool:
    """FlexAttention is compiled for every shape, which takes seconds: so for few."""
    return case.kind == "plain" and case.length in (2048, 8192)


def takes_eager(case: Case) -> bool:
    """Calls from Python tell of the host, which is the same for all lengths: so for a short one and a long one."""
    return case.kind == "plain" and case.length in (1024, 8192)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One pass over one case: the median milliseconds of a call, for everybody who did it."""

    part: Part
    kind: str
    name: str
    dim: int
    length: int
    causal: bool
    flops: float
    """Of a call."""
    twin_flops: float = 0.0
    """Of a call of PLAIN."""
    ms: dict[str, float] = field(default_factory=dict)
    """As CUDA graphs: the kernels alone."""
    eager_ms: dict[str, float] = field(default_factory=dict)
    """Called from Python one by one."""
    matmul: float = 0.0
    """TFLOP/s of an 8192³ bf16 product, timed in the same rounds."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why somebody has no figure."""
    same_bits: bool | None = None
    """Whether a rerun gave the same gradients, where that was looked at."""

    def rate(self, who: str, *, eager: bool = False) -> float | None:
        """TFLOP/s."""
        ms = (self.eager_ms if eager else self.ms).get(who)
        return None if ms is None else (self.twin_flops if who == PLAIN else self.flops) / ms / 1e9

    def over(self, who: str, *, eager: bool = False) -> float | None:
        """Times as fast as another. 0 where the other could and ours could not; None where the other could not."""
        other = self.rate(who, eager=eager)
        return None if other is None else (self.rate(OURS, eager=eager) or 0.0) / other

    @property
    def ceiling_share(self) -> float | None:
        """Of the matmul rate."""
        return (self.rate(OURS) or 0.0) / self.matmul if self.matmul else None


@dataclass(kw_only=True, slots=True)
class Record:
    """A run. Filled as it goes on: one cut short holds what there is."""

    date: str
    environment: dict[str, Any]
    """Code, device, versions."""
    points: list[Point] = field(default_factory=list)
    fp8_rmse: float | None = None
    """Of the FP8 forward on inputs with outliers, against FP64."""

    def of(self, part: Part, *kinds: str) -> list[Point]:
        """The points of a pass, plain ones unless other kinds are named."""
        return [point for point in self.points if point.part == part and point.kind in (kinds or ("plain",))]

    def write(self, path: Path) -> None:
        """Whole or not at all, with the goals as judged."""
        document = {**asdict(self), "goals": [verdict._asdict() for verdict in judged(self)]}
        write_whole(path, f"{json.dumps(document, indent=1)}\n".encode())


def read(path: Path) -> Record:
    """A record as it was written. The goals are judged anew from the points."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return Record(
            date=document["date"],
            environment=document["environment"],
            points=[Point(**point) for point in document["points"]],
            fp8_rmse=document["fp8_rmse"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must be what bench_record.py --json writes, got {error!r}. Measure again.") from None


class Verdict(NamedTuple):
    """A goal, and what was found."""

    name: str
    wanted: str
    measured: float | None
    """None: this run did not look."""
    of: int
    """How many figures that is the least or the mean of."""
    met: bool | None

    @property
    def shown(self) -> str:
        """What was measured, as tables show it."""
        if self.measured is None:
            return "–"
        return f"{self.measured:.1e}" if 0 < self.measured < 0.1 else f"{self.measured:.3f}"


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on the least (of an upper bound the largest) of some figures, or on their geometric mean."""

    name: str
    bound: float
    figures: Callable[[Record], list[float]]
    mean: bool = False
    at_most: bool = False

    def judge(self, record: Record) -> Verdict:
        """Without figures it is neither met nor missed."""
        found, wanted = self.figures(record), f"{'≤' if self.at_most else '≥'} {self.bound:g}"
        if not found:
            return Verdict(self.name, wanted, None, 0, None)
        measured = geometric_mean(found) if self.mean else max(found) if self.at_most else min(found)
        met = measured <= self.bound if self.at_most else measured >= self.bound
        return Verdict(self.name, wanted, measured, len(found), met)


def geometric_mean(values: Sequence[float]) -> float:
    """0 where one is."""
    return 0.0 if min(values) <= 0 else math.exp(math.fsum(map(math.log, values)) / len(values))


def judged(record: Record) -> list[Verdict]:
    """Every goal."""
    return [goal.judge(record) for goal in GOALS]


def _over(part: Part, who: str, *kinds: str, dims: Sequence[int] = DIMS) -> Callable[[Record], list[float]]:
    def figures(record: Record) -> list[float]:
        points = [point for point in record.of(part, *kinds) if point.dim in dims]
        return [ratio for point in points if (ratio := point.over(who)) is not None]

    return figures


def _ceiling(dim: int) -> Callable[[Record], list[float]]:
    def figures(record: Record) -> list[float]:
        points = [point for point in record.of("forward") if (point.dim, point.length) == (dim, 16384)]
        return [share for point in points if (share := point.ceiling_share) is not None]

    return figures


def _same_bits(record: Record) -> list[float]:
    return [float(point.same_bits) for point in record.points if point.same_bits is not None]


def _of_kinds(part: Part) -> list[Goal]:
    return [
        Goal(f"{part}, other kinds over cuDNN, mean", 1.1, _over(part, CUDNN, *KINDS), mean=True),
        *(Goal(f"{part}, {kind} over plain, mean", 0.95, _over(part, PLAIN, kind), mean=True) for kind in KINDS),
    ]


GOALS: tuple[Goal, ...] = (
    Goal("forward over cuDNN, least", 1.0, _over("forward", CUDNN)),
    Goal("forward over cuDNN, mean", 1.15, _over("forward", CUDNN), mean=True),
    Goal("forward D 128, N 16384 over matmul, least", 0.85, _ceiling(128)),
    Goal("forward D 256, N 16384 over matmul, least", 0.9, _ceiling(256)),
    *_of_kinds("forward"),
    Goal("backward D 64, 128 over cuDNN, least", 1.05, _over("backward", CUDNN, dims=(64, 128))),
    Goal("backward D 64, 128 over cuDNN, mean", 1.18, _over("backward", CUDNN, dims=(64, 128)), mean=True),
    Goal("backward D 256 over cuDNN, least", 1.0, _over("backward", CUDNN, dims=(256,))),
    *_of_kinds("backward"),
    Goal("deterministic backward over cuDNN's plain, least", 0.85, _over("backward", CUDNN, "deterministic")),
    Goal("deterministic backward, the same bits again", 1.0, _same_bits),
    Goal("forward + backward over cuDNN, mean", 1.15, _over("both", CUDNN), mean=True),
    Goal("FP16 forward over cuDNN, least", 1.0, _over("forward", CUDNN, FP16)),
    Goal("FP16 backward over cuDNN, least", 1.0, _over("backward", CUDNN, FP16)),
    *(
        Goal(f"{kind}, D {dim} over bf16, least", 1.5, _over("forward", PLAIN, kind, dims=[dim]))
        for kind in (FP8, FP8_KERNEL)
        for dim in (128, 256)
    ),
    Goal(
        "FP8 RMSE on inputs with outliers",
        9.1e-3,
        lambda record: [] if record.fp8_rmse is None else [record.fp8_rmse],
        at_most=True,
    ),
)
"""What the record must be. Means are geometric; over: TFLOP/s of ours divided by the other's."""
