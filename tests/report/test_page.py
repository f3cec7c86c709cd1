"""The page as text: what is in it, in which order, and that no text can break out of its place."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.report import page as module
from assay.report.content import Content, content
from assay.report.page import embed, page
from assay.report.pictures import Picture
from assay.results.record import Record
from tests.report.samples import attribution, claim, row, seeds, study
from tests.report.trained import pair_row, png, run_row, trained

HOSTILE = (
    "</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "'\"&<>`", "<!--", "]]>",
    "\u2028\u2029\u202e", "&lt;b&gt;", "%{customdata}", "$x^2$", "a" * 5000, "\\u003c/script>",
    "{{}}", "ß→漢字🙂", "|_*[a](b)*_|",
)  # fmt: skip
TEXTS = st.one_of(st.sampled_from(HOSTILE), st.text(min_size=1, max_size=60).filter(str.strip))


class Tags(HTMLParser):
    """Every tag with its attributes, and the text of the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data

    def skeleton(self) -> list[tuple[str, tuple[str, ...]]]:
        """The tags and the names of their attributes: what text must not change."""
        return [(tag, tuple(attributes)) for tag, attributes in self.tags]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plotly's 5 MB are no matter here."""
    monkeypatch.setattr(module, "_plotly", lambda: "/* Plotly */")


def told(rows: list[Record], **changes: Any) -> Content:
    texts: dict[str, Any] = {
        "asked": "Why?",
        "verdict": "Because.",
        "problems": ["line 3: not JSON"],
        "command": "assay x",
    }
    claims, attributions = changes.pop("claims", [claim()]), changes.pop("attributions", [attribution()])
    return content(rows, claims, attributions, **texts | changes)


def test_order_of_the_page() -> None:
    text = page(told(study(), training=trained(), pictures=[picture()]))
    heads = re.findall(r"<h[123][^>]*>([^<]+)<", text)
    assert heads == [
        "Is Flash Attention stable?", "The paper&#x27;s claims", "Which step owns the deviation",
        "How much each step owns",
        "Number formats", "Figure 3: the difference between flash and baseline, by number format",
        "Figure 4: the error against golden, by number format", "Sequence length",
        "Figure 5a: the largest difference, by sequence length",
        "Figure 5b: mean and standard deviation of the difference, by sequence length",
        "The error of flash over that of the baseline, by sequence length", "Block size and shape",
        "Figure 6a: blocks with rows and columns swapped", "Figure 6b: square blocks",
        "Figure 6c: larger blocks", "Inputs", "The error of flash over that of the baseline, by inputs",
        "Real kernels", "The error of real kernels over that of the baseline",
        "Paired training", "Figure 7: the weights, flash against baseline, over training",
        "Figure 8: every pair, over training", "Low precision and other seeds over flash", "Where the weights part",
        "How the trainings went", "The loss of every training", "The loss on data that is held out", "The loss scale",
        "Steps skipped so far", "Samples", "After 20 steps", "Where the figures come from",
    ]  # fmt: skip
    assert text.index("Why?") < text.index("Because.") < text.index("<nav")


def test_headings_skip_no_level() -> None:
    levels = [int(level) for level in re.findall(r"<h(\d)", page(told(study())))]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_ids_are_unique_and_links_lead_somewhere() -> None:
    found = Tags(page(told(study(), claims=[claim(), claim(number="C2", anchor="nowhere"), claim(anchor="")])))
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [str(attributes["href"]) for tag, attributes in found.tags if tag == "a"]
    assert "#figure-3" in links
    assert all(link[0] == "#" and link[1:] in ids for link in links)
    fields = [attributes["for"] for tag, attributes in found.tags if tag == "label"]
    assert fields
    assert set(fields) == {a["id"] for tag, a in found.tags if tag == "select"}


def test_a_missing_sweep_is_named() -> None:
    text = page(told(seeds([1.0, 2.0]), attributions=[]))
    for sweep in ("steps", "length", "blocks", "inputs", "kernels"):
        assert f"<code>assay sweep {sweep}</code>" in text
    assert "<code>assay sweep precision</code>" not in text
    assert 'id="figure-5a"' not in text
    assert "<code>assay pair quick</code>" in text
    assert "Not measured here" not in page(told(study(), training=trained()))


def test_verdicts_have_words_marks_and_colours() -> None:
    verdicts = ("holds", "holds only when …", "does not hold", "not measured here")
    text = page(told(study(), claims=[claim(verdict=verdict) for verdict in (*verdicts, "holds")]))
    for look, mark, verdict in zip(("good", "partly", "bad", "none"), "✓◐✗–", verdicts, strict=True):
        assert re.search(rf'class="badge {look}"><span aria-hidden="true">{mark}</span>\s*{verdict}<', text)
    assert "2 hold; 1 holds only when …; 1 does not hold; 1 not measured here." in text


def test_many_lines_of_a_claim_are_folded() -> None:
    text = page(told(study(), claims=[claim(ours=("one", "two", "three", "four", "five"))]))
    shown, folded = re.search(r'data-head="Here">(.*?)<details>(.*?)</details>', text, re.S).groups()  # type: ignore[union-attr]
    assert re.findall(r"<li>(\w+)</li>", shown) == ["one", "two", "three"]
    assert re.findall(r"<li>(\w+)</li>", folded) == ["four", "five"]
    assert "and 2 more" in folded
    assert "more</summary>" not in page(told(study()))


def test_provenance() -> None:
    text = page(told([*seeds([1.0, 2.0]), row(code="2.0 (def)", seed=2, device="GPU <1>", time="2026-11-16")]))
    assert "2 versions of the code: 1.0 (abc), 2.0 (def)." in text
    assert "line 3: not JSON" in text
    assert "<dt>records</dt><dd>3: precision 3</dd>" in text
    assert "<dt>device</dt><dd>CPU; GPU &lt;1&gt;</dd>" in text
    assert "<dt>seeds</dt><dd>0 to 2 (3)</dd>" in text
    assert "<dd>(1, 2, 128, 64)</dd>" in text
    assert "2026-11-15T10:00:00+00:00 to 2026-11-16, 0.0 minutes" in text
    assert "<dd>assay x</dd>" in text
    assert "Triton" not in text
    assert "versions of the code" not in page(told(seeds([1.0, 2.0])))


def test_nothing_is_fetched_and_only_our_scripts_run() -> None:
    found = Tags(page(told(study())))
    assert not [a for _, a in found.tags if {"src", "srcset", "action", "data", "onload", "onclick"} & set(a)]
    assert not [tag for tag, _ in found.tags if tag in ("link", "iframe", "object", "embed", "img", "base")]
    policy = next(str(a["content"]) for _, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    data, *scripts = found.scripts
    assert json.loads(data)[0]["anchor"] == "figure-3"
    for script in scripts:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]


def picture(**changes: Any) -> Picture:
    """A sample with two captions."""
    words: dict[str, Any] = {"title": "After 20 steps", "captions": ("a cat", "a dog"), "attribution": "Me, CC BY"}
    return Picture(file="grid.png", png=png(), **words | changes)


def test_training_alone_makes_a_page() -> None:
    text = page(told([], attributions=[], training=trained()))
    assert text.index("<b>flash</b>: its weights drift less") < text.index('id="figure-7"')
    assert '<td>3× <span class="small">[3, 3]</span></td>' in text
    assert "<code>assay sweep precision</code>" in text
    assert "<dd>text_to_image tiny on shapes</dd>" in text
    data = {chart["anchor"]: chart for chart in json.loads(Tags(text).scripts[0])}
    assert list(data) == ["figure-7", "figure-8", "over-flash", "layers", "loss", "held-out", "loss-scale", "skipped"]
    assert data["layers"]["kind"] == "heat"
    assert data["figure-8"]["band"]


def test_pictures_are_in_the_page_with_their_words() -> None:
    found = Tags(page(told([], training=trained(), pictures=[picture()])))
    (image,) = [attributes for tag, attributes in found.tags if tag == "img"]
    assert image["alt"] == "After 20 steps: a cat; a dog"
    assert image["src"] == "data:image/png;base64," + base64.b64encode(png()).decode()
    assert "Me, CC BY" in page(told([], training=trained(), pictures=[picture()]))


def hostile(text: str) -> Content:
    """The text wherever a user's text can be."""
    rows = [
        row(format="bf16", inputs=inputs, plan=f"{text} bf16", device=text, options=text, seed=seed)
        | {"sweep": sweep, "difference_max": 1.0, "error_max": 2.0, "baseline_error_max": 1.0, "error_rmse": 1.0}
        | {"baseline_error_rmse": 1.0, "difference_mean": 1.0, "difference_std": 1.0, "variant": f"kernel {text}"}
        for seed in (0, 1)
        for sweep in ("precision", "length", "blocks", "inputs", "kernels")
        for inputs in ("uniform", f"file:{text}")
    ]
    claims = [claim(number=text, figure=text, text=text, paper=text, ours=(text,), because=text)]
    attributions = [attribution(inputs=text, setting=text, low=text), attribution(inputs="b")]
    training = [
        pair_row(pair, seed, step, 1e-6 * step, layer=layer, arm=text, changed=f"changed {text}", model=text, data=text)
        for pair in ("flash", f"pair {text}")
        for seed in (0, 1)
        for step in (1, 10)
        for layer in ("", f"layer {text}")
    ]
    training += [run_row(f"arm {text}", seed, step, model=text, data=text) for seed in (0, 1) for step in (1, 10)]
    pictures = [picture(title=text, captions=(text, text), attribution=text)]
    return told(
        rows, claims=claims, attributions=attributions, asked=text, verdict=text, problems=[text], command=text,
        training=training, pictures=pictures,
    )  # fmt: skip


@given(TEXTS)
def test_no_text_breaks_out_of_the_page(text: str) -> None:
    plain, found = Tags(page(hostile("plain"))), Tags(page(hostile(text)))
    assert found.skeleton() == plain.skeleton()
    assert len(found.scripts) == 3
    data = json.loads(found.scripts[0])
    assert any(f"kernel {text}" in (chart["categories"] or ()) for chart in data)
    assert found.scripts[1:] == plain.scripts[1:]


@given(st.recursive(TEXTS | st.floats(allow_nan=False, allow_infinity=False) | st.none(), st.lists))
def test_embedded_json_says_the_same(value: Any) -> None:
    text = embed(value)
    assert json.loads(text) == value
    assert not set(text) & set("<>&\u2028\u2029")


def test_numbers_that_json_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError):
        embed(float("nan"))


def test_without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "plotly", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'assay\[report\]'"):
        page(told(seeds([1.0, 2.0])))
