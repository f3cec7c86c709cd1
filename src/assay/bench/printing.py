"""A run's outcome on a terminal."""

from __future__ import annotations

from rich.console import Console

from assay.bench.outcome import Outcome
from assay.bench.profiling import WANTED, Profile
from assay.bench.table import notes_of, table_of, title_of

_SHOWN_PARTS = 8
_LEGEND = (
    "of the ceiling: TFLOP/s over those of a large matrix product, timed in turn with the rest. peak memory: of a "
    "call, above its inputs. × standard, × best other: times as fast as standard attention, as the fastest other."
)
_GRAPH_LEGEND = " graph ms: the same calls as a CUDA graph, without the launches from Python."


def show(outcome: Outcome, console: Console) -> None:
    """Tables, profiles, then sentences."""
    for point in outcome.points:
        console.print(title_of(point), style="bold", markup=False, highlight=False)
        if point.figures:
            console.print(table_of(point))
        for note in notes_of(point):
            console.print(f"  {note}", style="dim", markup=False, highlight=False)
    graphs = any(figure.graph_samples for point in outcome.points for figure in point.figures)
    console.print(_LEGEND + (_GRAPH_LEGEND if graphs else ""), style="dim", highlight=False)
    for profile in outcome.profiles:
        _show_profile(profile, console)
    console.print()
    for sentence in outcome.sentences():
        console.print(sentence, markup=False, highlight=False)


def _show_profile(profile: Profile, console: Console) -> None:
    console.print(f"\nWhere the time of assay goes: {profile.name}", style="bold", markup=False, highlight=False)
    for part in profile.parts[:_SHOWN_PARTS]:
        line = f"{part.share:7.1%} {part.seconds * 1e3:9.3f} ms  {part.launches:3.0f}×  {part.name}"
        console.print(line, markup=False, highlight=False, no_wrap=True, overflow="ellipsis")
    rest = profile.parts[_SHOWN_PARTS:]
    if rest:
        share = sum(part.share for part in rest)
        console.print(
            f"{share:7.1%} {sum(p.seconds for p in rest) * 1e3:9.3f} ms        {len(rest)} more", highlight=False
        )
    if profile.attention_share is not None:
        judged = "as wanted" if profile.attention_share > WANTED else f"below the {WANTED:.0%} wanted"
        console.print(
            f"Our attention kernels: {profile.attention_share:.1%} of the GPU's time, {judged}.", highlight=False
        )
