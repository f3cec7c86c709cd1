"""Any record at all, for hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from assay.results.record import POINTS, Record
from assay.results.schema import Schema

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)  # no halves of surrogate pairs
_KINDS: dict[type, st.SearchStrategy[Any]] = {
    str: TEXT,
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(),
    bool: st.booleans(),
}


@st.composite
def records(draw: st.DrawFn, schema: Schema = POINTS) -> Record:
    """Drawing 119 columns each time is slow: a few values of each kind, dealt out over the columns."""
    pools = {kind: draw(st.lists(st.none() | values, min_size=1, max_size=5)) for kind, values in _KINDS.items()}
    shift = draw(st.integers(0, 4))
    columns = enumerate(schema.columns.items())
    record = {name: pools[kind][(i + shift) % len(pools[kind])] for i, (name, kind) in columns}
    return record | {"schema": schema.version, "id": draw(TEXT), "time": draw(TEXT)}
