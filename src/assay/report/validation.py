"""The validation page: one HTML file that opens offline, from the rows of `assay validate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from assay._files import write_whole

Row = Mapping[str, Any]

_STYLE = """
:root { color-scheme: light dark; --ours: #2563eb; --theirs: #f59e0b; --line: #8884; --good: #15803d; --bad: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --ours: #60a5fa; --theirs: #fbbf24; --good: #4ade80; --bad: #f87171; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
th, td { padding: .2rem .5rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
.bar { display: inline-block; height: .8rem; background: var(--ours); vertical-align: middle; }
.bar.theirs { background: var(--theirs); }
figure { margin: 1rem 0; } figcaption, .small { font-size: .9rem; opacity: .8; }
"""


def write_page(rows: Sequence[Row], path: Path) -> None:
    """Write the page to `path`, whole or not at all."""
    if not rows:
        raise ValueError("A validation page needs at least one row; this machine ran no kernel.")
    write_whole(path, page(rows).encode())


def page(rows: Sequence[Row]) -> str:
    """The whole page as text."""
    first = rows[0]
    setting = f"{first['device']}, (batch, heads, length, dim) = {tuple(first['shape'])}, inputs "
    setting += f"{first['distribution']}, seed {first['seed']}"
    groups = dict.fromkeys((row["kernel"], row["format"]) for row in rows)
    sections = "".join(
        _section(kernel, fmt, [row for row in rows if (row["kernel"], row["format"]) == (kernel, fmt)])
        for kernel, fmt in groups
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Assay: validation</title><style>{_STYLE}</style></head><body>
<h1>Does the emulation do what the kernels do?</h1>
<p><strong>{escape(_verdict(rows))}</strong></p>
<p class="small">{escape(setting)}. Golden is attention in FP64 on the same rounded inputs.</p>
{sections}
</body></html>
"""


def _verdict(rows: Sequence[Row]) -> str:
    worst = max(rows, key=lambda row: abs(row["ratio"] - 1))
    matched = sum(bool(row["matches"]) for row in rows)
    return (
        f"{matched} of {len(rows)} tensors: the emulation's RMSE against golden is within 2% of the kernel's. "
        f"Furthest: {worst['kernel']}, {worst['format']}, {worst['part']}, ratio {worst['ratio']:.3f}."
    )


def _section(kernel: str, fmt: str, rows: Sequence[Row]) -> str:
    edges = rows[0]["ulp_edges"]
    names = ["0", *(f"≤ {edge:g}" for edge in edges[1:]), f"> {edges[-1]:g}"]
    header = "".join(f"<th>{name}</th>" for name in names)
    notes = "".join(f"<br>{escape(note)}" for note in rows[0]["notes"])
    widest = max(max(row["kernel_rmse"], row["emulation_rmse"]) for row in rows)
    body = "".join(_table_row(row, widest) for row in rows)
    return f"""<h2>{escape(kernel)}, {escape(fmt)}</h2>
<p>Plan: {escape(rows[0]["plan"])}. Block: {escape(rows[0]["tiling"])}.</p>
<figure><table><thead><tr><th rowspan="2">tensor</th><th colspan="2">RMSE against golden</th>
<th rowspan="2">ratio</th><th rowspan="2">shipped plan</th><th rowspan="2">bit-equal</th>
<th colspan="{len(names)}">% of elements by ULPs apart</th></tr>
<tr><th>kernel</th><th>emulation</th>{header}</tr></thead>
<tbody>{body}</tbody></table>
<figcaption>Bars: RMSE of the kernel (amber) and of its emulation (blue), to one scale.{notes}</figcaption></figure>
"""


def _table_row(row: Row, widest: float) -> str:
    name = row["part"] + (", causal" if row["causal"] else "")
    shares = "".join(f"<td>{100 * share:.1f}</td>" for share in row["ulp_shares"])
    mark = "good" if row["matches"] else "bad"
    return (
        f"<tr><td>{escape(name)}</td>{_bar(row['kernel_rmse'], widest, 'bar theirs')}"
        f"{_bar(row['emulation_rmse'], widest, 'bar')}<td class='{mark}'>{row['ratio']:.3f}</td>"
        f"<td>{row['shipped_ratio']:.3f}</td><td>{row['bit_equal']:.1%}</td>{shares}</tr>"
    )


def _bar(value: float, widest: float, css: str) -> str:
    width = 5 * value / widest if widest > 0 else 0.0
    return f"<td>{value:.2e} <span class='{css}' style='width:{width:.2f}rem'></span></td>"
