"""The page in a real Chromium: it draws, obeys its controls, fits a phone, and asks nobody for anything."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.report.content import content
from assay.report.page import page
from tests.report.browser import EXECUTABLE, Browser, chromium
from tests.report.samples import attribution, claim, row, study
from tests.report.test_page import HOSTILE, hostile, picture
from tests.report.trained import trained

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="no chromium, chromium-browser or google-chrome on the PATH")

TAB, ENTER = ("Tab", 9), ("Enter", 13, "\r")
DARK = [{"name": "prefers-color-scheme", "value": "dark"}]
CONTROLS = "a[href], button, select, summary, [tabindex='0']"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "index.html"
    rows = [*study(), *(row(format="fp64", seed=seed, error_max=math.inf, difference_max=0.0) for seed in (0, 1))]
    rows += [row(device="GPU", inputs="normal", seed=s, error_max=7.0, baseline_error_max=1.0) for s in (0, 1)]
    attributions = [attribution(), attribution(inputs="normal")]
    told = content(rows, [claim()], attributions, asked="Why?", verdict="Because.", problems=["bad"], command="assay x")
    path.write_text(page(told), encoding="utf-8")
    return path


@pytest.fixture
def shown(browser: Browser, report: Path) -> Browser:
    """The report, freshly opened on a wide and light screen."""
    browser.scheme("light")
    browser.screen(1280)
    browser.open(report)
    return browser


def plotted(browser: Browser, figure: str, what: str) -> object:
    return browser.run(f"document.querySelector('#{figure} .plot').{what}")


def choose(browser: Browser, figure: str, label: str, value: str) -> None:
    browser.run(
        f"""(() => {{
        const label = [...document.querySelectorAll('#{figure} label')].find(l => l.textContent === '{label}');
        label.control.value = '{value}';
        label.control.dispatchEvent(new Event('change', {{bubbles: true}}));
        }})()"""
    )


def test_draws_everything_and_asks_nobody(shown: Browser, report: Path) -> None:
    assert report.stat().st_size < 6_000_000
    figures = shown.run("document.querySelectorAll('figure.chart').length")
    assert figures == 10
    assert shown.run("document.querySelectorAll('.plot svg.main-svg .trace').length") >= 2 * figures
    empty = "[...document.querySelectorAll('.plot')].filter(p => !p.querySelector('svg.main-svg .trace')).length"
    assert shown.run(empty) == 0
    assert shown.complaints() == []
    assert shown.requests() == [report.as_uri()]


def test_the_browser_would_tell(shown: Browser) -> None:
    """The two tests above can fail: an error, a request and a script that is not ours are seen, and refused."""
    shown.run("console.error('seen')")
    shown.run("fetch('https://example.invalid/').catch(() => 0)")
    shown.run(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.stolen = 1'}))"
    )
    told = " ".join(shown.complaints())
    assert "seen" in told
    assert "connect-src" in told or "default-src" in told
    assert shown.run("window.stolen === undefined")


def test_a_choice_changes_the_plot_and_all_that_belongs_to_it(shown: Browser) -> None:
    before = plotted(shown, "figure-4", "data[0].y[0]")
    assert before == pytest.approx(8 * 2**-8 * (1.1 * 1.3) ** (1 / 3), rel=1e-4)
    choose(shown, "figure-4", "Inputs", "normal")
    assert plotted(shown, "figure-4", "data[0].y[0]") == pytest.approx(before / 4, rel=1e-4)  # type: ignore[operator]
    assert "bf16 2 [2, 2]" in str(shown.run("document.querySelector('#figure-4 .notes').textContent"))
    assert "normal" in str(shown.run("document.querySelector('#figure-4 caption').textContent"))
    assert "normal" in str(shown.run("document.querySelector('#figure-4 .plot').getAttribute('aria-label')"))
    first = "[...document.querySelector('#figure-4 tbody tr').cells].map(c => c.textContent).slice(0, 3)"
    assert shown.run(first) == ["bf16", "flash", f"{2 * 2**-8 * 1.43 ** (1 / 3):.3g}"]
    assert plotted(shown, "figure-3", "data[0].y[0]") == pytest.approx(before, rel=1e-4)  # the other stays


def test_a_combination_that_was_not_measured_finds_the_nearest(shown: Browser) -> None:
    """On the GPU only normal inputs were measured."""
    values = "[...document.querySelectorAll('#figure-4 select')].map(s => s.value)"
    assert shown.run(values) == ["uniform", "uniform", "eager", "CPU"]
    choose(shown, "figure-4", "Plan", "shipped")
    choose(shown, "figure-4", "Device", "GPU")
    assert shown.run(values) == ["normal", "uniform", "eager", "GPU"]
    assert plotted(shown, "figure-4", "data[0].y") == [7]


def test_log_and_linear(shown: Browser) -> None:
    kind = "layout.yaxis.type"
    assert plotted(shown, "figure-5a", kind) == "log"
    shown.run("document.querySelector('#figure-5a .log').focus()")
    shown.press(*ENTER)
    assert plotted(shown, "figure-5a", kind) == "linear"
    assert shown.run("document.querySelector('#figure-5a .log').getAttribute('aria-pressed')") == "false"
    shown.run("document.querySelector('#figure-5a .log').click()")
    assert plotted(shown, "figure-5a", kind) == "log"


def test_what_is_not_drawn_is_named(shown: Browser) -> None:
    notes = str(shown.run("document.querySelector('#figure-4 .notes').textContent"))
    assert "not finite (overflow, or a division by 0): flash at fp64." in notes
    assert "Exactly 0" in str(shown.run("document.querySelector('#figure-3 .notes').textContent"))


def test_zoom_and_back(shown: Browser) -> None:
    zoom = "{'yaxis.range[0]': -3, 'yaxis.range[1]': -2}"
    shown.run(f"void Plotly.relayout(document.querySelector('#figure-5a .plot'), {zoom})")
    assert plotted(shown, "figure-5a", "layout.yaxis.range") == [-3, -2]
    shown.wait("document.querySelector('#figure-5a .plot').layout.yaxis.tickvals.includes(0.005)")
    shown.run("document.querySelector('#figure-5a .reset').click()")
    low = plotted(shown, "figure-5a", "layout.yaxis.range[0]")
    assert isinstance(low, float)
    assert low < -6


def test_a_series_can_be_hidden(shown: Browser) -> None:
    shown.run("document.querySelector('#figure-5a .legend button').click()")
    assert plotted(shown, "figure-5a", "data.map(t => t.visible)") == [False, True, True]
    assert shown.run("document.querySelector('#figure-5a .legend button').getAttribute('aria-pressed')") == "false"


def test_hover_tells_value_interval_and_seeds(shown: Browser) -> None:
    shown.run("void Plotly.Fx.hover(document.querySelector('#figure-4 .plot'), [{curveNumber: 0, pointNumber: 0}])")
    shown.wait("!!document.querySelector('#figure-4 .hoverlayer text')")
    told = str(shown.run("document.querySelector('#figure-4 .hoverlayer').textContent"))
    assert "flash" in told
    assert "format, by mantissa bits: bf16" in told
    assert f"{8 * 2**-8 * 1.43 ** (1 / 3):.3g} [" in told
    assert "3 seeds" in told
    assert "Flash over baseline: 8 [8, 8]" in told


def test_attribution_panels(shown: Browser) -> None:
    seen = "[...document.querySelectorAll('[data-panel]')].map(p => p.offsetHeight > 0)"
    assert shown.run(seen) == [True, False]
    select = "document.getElementById('attribution-choice')"
    shown.run(f"{select}.value = '1'; {select}.dispatchEvent(new Event('change'))")
    assert shown.run(seen) == [False, True]


def test_dark_and_light_follow_the_system(shown: Browser) -> None:
    def colours() -> tuple[object, object, object]:
        ground = shown.run("getComputedStyle(document.body).backgroundColor")
        return (
            ground,
            plotted(shown, "figure-5a", "data[0].line.color"),
            plotted(shown, "figure-5a", "layout.font.color"),
        )

    light = colours()
    shown.scheme("dark")
    shown.wait("getComputedStyle(document.body).backgroundColor === 'rgb(20, 23, 28)'")
    shown.wait("document.querySelector('#figure-5a .plot').layout.font.color === '#e6e9ef'")
    dark = colours()
    assert all(a != b for a, b in zip(light, dark, strict=True))
    shown.scheme("light")
    shown.wait("document.querySelector('#figure-5a .plot').layout.font.color === '#1c2128'")
    assert colours() == light


@pytest.mark.parametrize("width", [390, 320])
def test_fits_a_phone(browser: Browser, report: Path, width: int) -> None:
    browser.screen(width, 800)
    browser.open(report)
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    beyond = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, .skip, thead, .plot')
        && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 200))"""
    assert browser.run(beyond) == []
    assert browser.run("[...document.querySelectorAll('.plot .main-svg')].every(s => s.clientWidth <= innerWidth)")


def test_a_window_made_narrower(shown: Browser) -> None:
    shown.screen(600, 800)
    shown.wait("[...document.querySelectorAll('.plot .main-svg')].every(s => s.clientWidth <= innerWidth)", 5)


def test_every_control_is_reached_by_tab(shown: Browser) -> None:
    visible = (
        f'[...document.querySelectorAll("{CONTROLS}")].filter(e => e.offsetParent !== null && e.checkVisibility())'
    )
    count = shown.run(f"window.controls = {visible}, window.controls.length")
    assert count > 60
    shown.press(*TAB)
    assert shown.run("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(count + 5):
        reached.add(shown.run("controls.indexOf(document.activeElement)"))
        shown.press(*TAB)
    assert reached >= set(range(count)), shown.run(f"controls[{min(set(range(count)) - reached)}].outerHTML")


def test_focus_is_seen(shown: Browser) -> None:
    shown.press(*TAB)
    shown.press(*TAB)
    assert shown.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_every_control_has_a_name(shown: Browser) -> None:
    nameless = """[...document.querySelectorAll('button, select, a, summary, [role=img], [role=region], [role=group]')]
        .filter(e => !(e.getAttribute('aria-label') || e.labels?.length || e.textContent.trim())).length"""
    assert shown.run(nameless) == 0
    assert shown.run("[...document.querySelectorAll('table')].every(t => t.caption?.textContent.trim())")
    assert shown.run("[...document.querySelectorAll('th')].every(t => t.scope)")


def test_prints_in_black_on_white(shown: Browser) -> None:
    shown.scheme("dark")
    shown.wait("document.querySelector('#figure-5a .plot').layout.font.color === '#e6e9ef'")
    shown.run("dispatchEvent(new Event('beforeprint'))")
    assert plotted(shown, "figure-5a", "layout.font.color") == "#1c2128"
    assert plotted(shown, "figure-5a", "layout.width") == 660
    shown.call("Emulation.setEmulatedMedia", media="print", features=DARK)
    assert shown.run("getComputedStyle(document.body).color") == "rgb(28, 33, 40)"
    assert shown.run("document.querySelector('#figure-5a .main-svg').clientHeight") == 360
    assert shown.run("document.querySelector('#figure-5a .plot').clientHeight") == 360
    assert (
        shown.run("delete document.documentElement.dataset.print, getComputedStyle(document.body).color")
        == "rgb(28, 33, 40)"
    )
    shown.call("Emulation.setEmulatedMedia", media="", features=DARK)
    shown.run("dispatchEvent(new Event('afterprint'))")
    assert plotted(shown, "figure-5a", "layout.font.color") == "#e6e9ef"
    assert len(shown.call("Page.printToPDF")["data"]) > 50_000


@pytest.mark.parametrize(
    "text", [" ".join(HOSTILE[:9]), *HOSTILE[:2], "<b>bold</b> <a href='https://example.invalid'>link</a>"]
)
def test_hostile_text_is_only_text(browser: Browser, tmp_path: Path, text: str) -> None:
    path = tmp_path / "index.html"
    path.write_text(page(hostile(text)), encoding="utf-8")
    browser.screen(390, 800)
    browser.open(path)
    change = "s.selectedIndex = 1; s.dispatchEvent(new Event('change'))"
    browser.run(f"document.querySelectorAll('select').forEach(s => {{ {change} }})")
    browser.run("void Plotly.Fx.hover(document.querySelector('#kernels .plot'), [{curveNumber: 0, pointNumber: 0}])")
    browser.run(
        "void Plotly.Fx.hover(document.querySelector('#layers .plot'), [{curveNumber: 0, pointNumber: [0, 0]}])"
    )
    assert browser.complaints() == []
    assert browser.requests() == [path.as_uri()]
    assert browser.run("document.querySelectorAll('script').length") == 3
    assert browser.run("document.querySelectorAll('.plot a, #main script').length") == 0
    assert browser.run("[...document.images].map(i => [i.alt, i.naturalWidth])") == [[f"{text}: {text}; {text}", 2]]
    assert browser.run("document.querySelector('.asked').textContent") == text
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    label = str(browser.run("document.querySelector('#kernels .xaxislayer-above').textContent"))
    assert label == f"kernel {text}"[:11] + "…"


def test_a_chart_without_a_point_says_why_and_shows_no_axes(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "index.html"
    rows = [row(seed=0, difference_max=1.0, error_max=1.0, baseline_error_max=1.0)]
    path.write_text(page(content(rows, [claim()], [], asked="Why?", verdict="Because.")), encoding="utf-8")
    browser.screen(1280)
    browser.open(path)
    assert browser.complaints() == []
    assert browser.run("getComputedStyle(document.querySelector('#figure-3 .plot')).display") == "none"
    assert "bf16" in str(browser.run("document.querySelector('#figure-3 .notes').textContent"))


@pytest.fixture
def learnt(browser: Browser, tmp_path: Path) -> Browser:
    """A report of paired training alone, with a sample."""
    path = tmp_path / "index.html"
    told = content([], [claim()], [], asked="Why?", verdict="So.", training=trained(), pictures=[picture()])
    path.write_text(page(told), encoding="utf-8")
    browser.scheme("light")
    browser.screen(1280)
    browser.open(path)
    return browser


def test_training_is_drawn_and_asks_nobody(learnt: Browser) -> None:
    assert learnt.complaints() == []
    assert len(learnt.requests()) == 1
    assert learnt.run("document.querySelectorAll('figure.chart .plot svg.main-svg').length") >= 7
    assert learnt.run("document.images[0].naturalWidth") == 2
    assert plotted(learnt, "figure-8", "data.filter(t => t.fill === 'toself').length") == 6
    assert plotted(learnt, "figure-8", "data.every(t => t.error_y === undefined || !t.error_y.array)")


def test_a_band_goes_with_its_line(learnt: Browser) -> None:
    learnt.run("document.querySelector('#figure-8 .legend button').click()")
    assert plotted(learnt, "figure-8", "data.filter(t => t.visible === false).length") == 2


def test_bands_and_zeros_on_a_log_axis(learnt: Browser) -> None:
    assert plotted(learnt, "figure-8", "data.flatMap(t => t.y).every(y => y === null || y > 0)")
    learnt.run("document.querySelector('#figure-8 .log').click()")
    assert plotted(learnt, "figure-8", "data.flatMap(t => t.y).filter(y => y === 0).length") == 3 * 2  # steps 10, 20


def test_layers_have_a_pair_to_choose_and_two_scales(learnt: Browser) -> None:
    assert plotted(learnt, "layers", "data[0].y") == ["words", "block 0, mlp", "block 10, mlp", "last"]
    before = plotted(learnt, "layers", "data[0].z[0][2]")
    assert before == pytest.approx(math.log10(20 * 2e-5 * 1.43 ** (1 / 3)), rel=1e-3)
    choose(learnt, "layers", "Pair", "FP16 ↔ FP32")
    assert plotted(learnt, "layers", "data[0].z[0][2]") == pytest.approx(before + math.log10(3), rel=1e-3)  # type: ignore[operator]
    learnt.run("document.querySelector('#layers .log').click()")
    assert plotted(learnt, "layers", "data[0].z[0][2]") == pytest.approx(60 * 2e-5 * 1.43 ** (1 / 3), rel=1e-3)
    assert learnt.run("document.querySelectorAll('#layers tbody tr').length") == 4 * 3
    choose(learnt, "layers", "Pair", "skipped steps alone")
    assert "exactly 0" in str(learnt.run("document.querySelector('#layers .notes').textContent"))
    assert learnt.complaints() == []


def test_training_fits_a_phone(learnt: Browser) -> None:
    learnt.screen(360, 800)
    learnt.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    learnt.wait("[...document.querySelectorAll('.plot .main-svg')].every(s => s.clientWidth <= innerWidth)", 5)
    assert learnt.run("document.documentElement.scrollWidth <= innerWidth")
