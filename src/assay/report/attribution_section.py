"""Which step owns the deviation, as HTML: a sentence, the algorithm coloured by share, and a bar for every step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from assay.report.attribution import Attribution, StepShare
from assay.report.shares import MEASURES, headline, percent, setting
from assay.report.steps import PARTS, STEPS, explain


def attribution_section(attributions: Sequence[Attribution]) -> str:
    """All attributions; the page's script shows the chosen one, without it all are there."""
    names = _names(attributions)
    options = "".join(f'<option value="{i}">{escape(name)}</option>' for i, name in enumerate(names))
    chooser = (
        '<div class="controls"><div class="field"><label for="attribution-choice">Setting</label>'
        f'<select id="attribution-choice">{options}</select></div></div>'
        if len(attributions) > 1
        else ""
    )
    panels = "".join(map(_panel, range(len(names)), attributions, names))
    return (
        '<p class="lead">The plan with every step in low precision against the one with every step in high precision: '
        f"how much of the error comes from each step.</p>{chooser}{panels}"
    )


def _names(attributions: Sequence[Attribution]) -> list[str]:
    """What tells them apart: the whole setting only where nothing shorter does."""
    names = [f"{found.inputs} inputs, {found.format}, length {found.length}" for found in attributions]
    return [
        name if names.count(name) == 1 else f"{name}: {found.setting}"
        for name, found in zip(names, attributions, strict=True)
    ]


def _panel(index: int, found: Attribution, name: str) -> str:
    start, lead, rest = headline(found)
    low, high = _range(found.steps)
    bars = "".join(_bars(step, low, high) for step in found.steps)
    rows = "".join(
        f'<tr><th scope="row">{escape(step.step)}</th>'
        + "".join(f"<td>{percent(get(step))}</td>" for _, get in MEASURES.values())
        + f"<td>{step.owns.seeds}</td></tr>"
        for step in found.steps
    )
    key = "".join(
        f'<li><span class="swatch {name}" aria-hidden="true"></span><span><b>{name}</b>: {escape(words)}</span></li>'
        for name, (words, _) in MEASURES.items()
    )
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("step", *MEASURES, "seeds"))
    name = escape(name)
    return f"""<div class="attribution" data-panel="{index}">
<p class="headline">{escape(start)}<strong>{_tight(lead)}</strong>{_tight(rest)}</p>
{_pipeline(found)}
<h3>How much each step owns</h3>
<ul class="key">{key}</ul>
<ol class="shares">{bars}</ol>
<p class="setting">{escape(setting(found))}.</p>
<details><summary>Data</summary><div class="scroll" tabindex="0" role="region" aria-label="Shares: {name}"><table>
<caption>Shares of the mean square error with 95% intervals: {name}</caption>
<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></details>
</div>
"""


def _tight(text: str) -> str:
    """Escaped, and an interval stays on one line with its value."""
    return re.sub(r"% \[(.\d*), ", "%\u00a0[\\1,\u00a0", escape(text))


def _range(steps: Sequence[StepShare]) -> tuple[float, float]:
    """From the lowest to the highest that is drawn, with 0 in it."""
    drawn = [get(step) for step in steps for _, get in MEASURES.values()]
    return min([0.0, *(share.low for share in drawn)]), max([0.01, *(share.high for share in drawn)])


def _bars(step: StepShare, low: float, high: float) -> str:
    def at(value: float) -> float:
        return 100 * (value - low) / (high - low)

    words = explain(step.step)
    drawn = ""
    for name, (_, get) in MEASURES.items():
        share = get(step)
        left, right = sorted((at(0.0), at(share.value)))
        from_, to = at(share.low), at(share.high)
        drawn += (
            f'<span class="track {name}"><span class="bar" style="left:{left:.2f}%;width:{right - left:.2f}%"></span>'
            f'<span class="whisker" style="left:{from_:.2f}%;width:{to - from_:.2f}%"></span></span>'
        )
    value, interval = percent(step.owns).split(" ", 1)
    others = "".join(
        f'<span class="small others">{name} {percent(get(step))}</span>'
        for name, (_, get) in MEASURES.items()
        if name != "owns"
    )
    return f"""<li><div class="what"><b>{escape(words.label)}</b> <code>{escape(step.step)}</code>
<span class="small">{escape(words.words)}</span></div>
<div class="bars" aria-hidden="true" style="--zero:{at(0.0):.2f}%">{drawn}</div>
<div class="value"><b>{value}</b> <span class="small">{interval}</span>{others}</div></li>
"""


def _pipeline(found: Attribution) -> str:
    """The steps in the order of the algorithm; the fuller the colour, the larger the share."""
    shares = {step.step: step for step in found.steps}
    largest = max([0.01, *(step.owns.value for step in found.steps)])
    order = [step for step in STEPS if step in shares] + [step for step in shares if step not in STEPS]
    groups = ""
    for part in PARTS:
        boxes = "".join(_box(shares[step], largest) for step in order if explain(step).part == part)
        if boxes:
            groups += f'<li class="part"><span class="part-name">{part}</span><ol>{boxes}</ol></li>'
    return f'<ol class="pipeline" aria-label="The algorithm, each step with its share">{groups}</ol>'


def _box(share: StepShare, largest: float) -> str:
    words = explain(share.step)
    size = max(0.0, share.owns.value) / largest
    value, interval = percent(share.owns).split(" ", 1)
    return (
        f'<li class="box{" strong" if size >= 0.8 else ""}" style="--share:{size:.3f}" title="{escape(words.words)}">'
        f'<span class="formula">{escape(words.formula)}</span><span class="label">{escape(words.label)}</span>'
        f'<span class="share">{value}</span><span class="small">{interval}</span></li>'
    )
