"""Draw the README's picture from a fresh measurement: how far bf16 attention is from golden, by what is rounded.

    python docs/make_figures.py

Takes about a minute on two cores. Writes docs/images/error_ratio.svg and the rows it was drawn from.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

import torch

from assay import Plan, baseline_attention, deviation, golden_attention, round_to, tiled_attention

HERE = Path(__file__).parent
LENGTHS = (512, 1024, 2048, 4096)
SEEDS = range(3)
BLOCK = (50, 50)  # the paper's rule with 12,800 elements of SRAM and D = 64
BF16 = Plan.uniform("bf16")
STATE = {"row_sum": "fp32", "rescale": "fp32", "output_accumulator": "fp32", "normalization": "fp32"}
PLANS = {
    "every step in bf16": ("#dc2626", BF16),
    "running sums and output in fp32": ("#2563eb", BF16.replace(**STATE)),
    "as shipped: all fp32 but the operands": ("#15803d", Plan.shipped("bf16")),
}


def measure() -> list[dict[str, object]]:
    """Max error over that of baseline attention in bf16, for uniform [0, 1) and N(0, 1) inputs."""
    rows: list[dict[str, object]] = []
    for inputs, draw in (("uniform [0, 1)", torch.rand), ("N(0, 1)", torch.randn)):
        for length in LENGTHS:
            for seed in SEEDS:
                generator = torch.Generator().manual_seed(seed)
                shape = (1, 2, length, 64)
                q, k, v = (round_to(draw(shape, generator=generator), "bf16") for _ in range(3))
                golden = golden_attention(q, k, v)
                plain = deviation(baseline_attention(q, k, v, plan=BF16), golden)
                for name, (_, plan) in PLANS.items():
                    error = deviation(tiled_attention(q, k, v, plan=plan, order="fa1", block=BLOCK), golden)
                    rows.append(
                        {
                            "inputs": inputs,
                            "shape": shape,
                            "seed": seed,
                            "plan": name,
                            "order": "fa1",
                            "block": BLOCK,
                            "device": "CPU",
                            "max_over_baseline": error.max / plain.max,
                            "rmse_over_baseline": error.rmse / plain.rmse,
                        }
                    )
    return rows


def draw(rows: list[dict[str, object]]) -> str:
    """Two panels, log scales, a line a plan with its range over the seeds."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 380" font-family="system-ui, sans-serif" '
        'font-size="13"><rect width="900" height="380" fill="white"/>'
    ]
    parts.append('<text x="20" y="26" font-size="16" font-weight="600">Flash Attention in bf16: ')
    parts.append("its largest error over that of plain bf16 attention, by what is rounded</text>")
    for panel, inputs in enumerate(dict.fromkeys(str(row["inputs"]) for row in rows)):
        parts.append(_panel(60 + panel * 440, inputs, [row for row in rows if row["inputs"] == inputs]))
    for i, (name, (colour, _)) in enumerate(PLANS.items()):
        parts.append(f'<rect x="{30 + 275 * i}" y="352" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{47 + 275 * i}" y="363" font-size="12">{escape(name)}</text>')
    return "".join(parts) + "</svg>\n"


def _panel(left: int, inputs: str, rows: list[dict[str, object]]) -> str:
    def x(length: int) -> float:
        return left + 340 * LENGTHS.index(length) / (len(LENGTHS) - 1)

    def y(ratio: float) -> float:
        exponent = float(torch.tensor(ratio).log2())
        return 300 - 230 * (exponent + 2.5) / 7.5  # 2^-2.5 … 2^5

    out = [f'<text x="{left}" y="52" font-weight="600">inputs {escape(inputs)}</text>']
    for tick in (0.25, 0.5, 1, 2, 4, 8, 16, 32):
        weight = 1.5 if tick == 1 else 0.5
        out.append(f'<path d="M{left} {y(tick):.1f}h340" stroke="#9ca3af" stroke-width="{weight}"/>')
        out.append(f'<text x="{left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}×</text>')
    for length in LENGTHS:
        out.append(f'<text x="{x(length):.1f}" y="322" text-anchor="middle">N {length}</text>')
    for name, (colour, _) in PLANS.items():
        points = []
        for length in LENGTHS:
            found = [
                float(str(row["max_over_baseline"]))
                for row in rows
                if row["plan"] == name and row["shape"] == (1, 2, length, 64)
            ]
            mean = sum(found) / len(found)
            points.append(f"{x(length):.1f},{y(mean):.1f}")
            low, high = y(min(found)), y(max(found))
            out.append(
                f'<path d="M{x(length):.1f} {low:.1f}V{high:.1f}" stroke="{colour}" stroke-width="5" opacity=".35"/>'
            )
            out.append(f'<circle cx="{x(length):.1f}" cy="{y(mean):.1f}" r="4" fill="{colour}"/>')
            out.append(f'<text x="{x(length) + 7:.1f}" y="{y(mean) - 6:.1f}" fill="{colour}">{mean:.1f}</text>')
        out.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return "".join(out)


def main() -> None:
    """Measure, write the rows, draw."""
    rows = measure()
    (HERE / "images" / "error_ratio.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (HERE / "images" / "error_ratio.svg").write_text(draw(rows))


if __name__ == "__main__":
    main()
