"""The plugin in pytest sessions of its own, in this process.

Such a session forgets the modules that it was the first to import, and torch's cannot be imported twice. So all that
a session needs is imported before, what torch imports late included.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from assay.budgets import assertion as budget

pytest_plugins = ["pytester"]

PLUGIN = ("-p", "assay.integrations.pytest_plugin")

KERNEL = """
    import os, pytest, torch

    def noisy(x):
        noise = 2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(int(os.environ.get("DRAW", "0")))) - 1
        return (x.double().sigmoid() + float(os.environ.get("NOISE", "0")) * noise).to(x.dtype)

    def inputs(seed):
        return (torch.randn(512, generator=torch.Generator().manual_seed(seed)).bfloat16(),)
"""

RECORDED = (
    KERNEL
    + """
    @pytest.mark.assay_record
    def test_kernel(within_budget):
        within_budget(noisy, torch.sigmoid, inputs)
"""
)


@pytest.fixture(autouse=True, scope="module")
def _everything_imported() -> None:
    budget.assert_within_budget(torch.sigmoid, torch.sigmoid, (torch.ones(64),), gradients=True)


@pytest.fixture(autouse=True)
def _without_the_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin is named on the command line; where Assay is installed it would be there twice."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess(*PLUGIN, *arguments)


def test_a_good_kernel_passes_and_nothing_is_written(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(KERNEL + "    def test_kernel(within_budget): within_budget(noisy, torch.sigmoid, inputs)")
    result = run(pytester, "--strict-markers")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*assay:*")
    assert not (pytester.path / "assay_records.json").exists()


def test_a_bad_kernel_fails_under_the_tests_name(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOISE", "0.05")
    pytester.makepyfile(
        KERNEL
        + """
    @pytest.mark.parametrize("size", [3])
    def test_kernel(within_budget, size):
        within_budget(noisy, torch.sigmoid, inputs)
"""
    )
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*within_budget(noisy, torch.sigmoid, inputs)",
            "E*AssertionError: test_kernel[[]3[]] is over its error budget in 1 of 1 comparisons. The worst:",
            "E*output, bf16 (512,), inputs 5 seeds, on cpu*",
            "E*baseline *",
            "E*Worst element: seed *",
            "E*What to do: *",
        ]
    )
    result.stdout.no_fnmatch_line("*budgets/assertion.py*")  # the trace ends at the author's line


def test_records_are_kept_compared_and_accepted(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(test_it=RECORDED)
    path = pytester.path / "assay_records.json"

    first = run(pytester)
    first.assert_outcomes(passed=1)
    first.stdout.fnmatch_lines(["assay: 1 measurements have no record*--assay-update records them."])
    assert not path.exists()

    run(pytester, "--assay-update").stdout.fnmatch_lines(["assay: recorded 1 new error ratios in *assay_records.json*"])
    entries = json.loads(path.read_text())["tests"]["test_it.py::test_kernel"]
    assert [entry["torch"] for entry in entries] == [torch.__version__]
    assert set(entries[0]["ratios"]) == {"output, max", "output, RMSE"}
    assert len(entries[0]["ratios"]["output, RMSE"]) == 5
    run(pytester).assert_outcomes(passed=1)

    written = path.read_bytes()
    run(pytester, "--assay-update").assert_outcomes(passed=1)
    assert path.read_bytes() == written  # nothing is new

    monkeypatch.setenv("NOISE", "0.0015")  # 1.4 times the error: within the budget of 2, but worse
    worse = run(pytester)
    worse.assert_outcomes(failed=1)
    worse.stdout.fnmatch_lines(
        [
            "E*test_kernel is within its budget, but worse than recorded on 2*",
            "E*recorded  now       limit",
            "E*output, RMSE  *",
            "E*run pytest --assay-update and commit assay_records.json.",
        ]
    )
    assert path.read_bytes() == written  # only --assay-update writes

    run(pytester, "--assay-update").assert_outcomes(passed=1)
    assert len(json.loads(path.read_text())["tests"]["test_it.py::test_kernel"]) == 2
    run(pytester).assert_outcomes(passed=1)


def test_redrawn_errors_are_no_regression(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(test_it=RECORDED)
    monkeypatch.setenv("NOISE", "0.0015")
    run(pytester, "--assay-update").assert_outcomes(passed=1)
    for draw in range(1, 6):
        monkeypatch.setenv("DRAW", str(draw))
        run(pytester).assert_outcomes(passed=1)


def test_the_file_can_lie_elsewhere_and_calls_have_names(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nassay_records = kept/ratios.json")
    pytester.makepyfile(
        test_it=RECORDED
        + """
        within_budget(torch.sin, torch.sin, inputs)
"""
    )
    run(pytester, "--assay-update").assert_outcomes(passed=1)
    tests = json.loads((pytester.path / "kept" / "ratios.json").read_text())["tests"]
    assert sorted(tests) == ["test_it.py::test_kernel", "test_it.py::test_kernel #2"]


def test_what_is_over_budget_is_not_recorded(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOISE", "0.05")
    pytester.makepyfile(RECORDED)
    run(pytester, "--assay-update").assert_outcomes(failed=1)
    assert not (pytester.path / "assay_records.json").exists()


def test_a_marker_without_the_fixture_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.assay_record
        def test_nothing(): pass
        """
    )
    result = run(pytester)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*must use the fixture within_budget, but *::test_nothing does not*"])


def test_one_set_of_inputs_cannot_be_recorded(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(RECORDED.replace("torch.sigmoid, inputs)", "torch.sigmoid, inputs(0))"))
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*ValueError: What is recorded needs at least 3 seeds*"])


def test_a_broken_file_is_named(pytester: pytest.Pytester) -> None:
    (pytester.path / "assay_records.json").write_text("<<<<<<< HEAD")
    pytester.makepyfile(RECORDED)
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*assay_records.json must hold error ratios*Restore it*"])


def test_an_unwritable_file_is_named(pytester: pytest.Pytester) -> None:
    (pytester.path / "taken").write_text("a file, not a folder")
    pytester.makeini("[pytest]\nassay_records = taken/ratios.json")
    pytester.makepyfile(RECORDED)
    result = run(pytester, "--assay-update")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*assay_records must name a file that can be written*"])


def test_several_processes_cannot_write_one_file(pytester: pytest.Pytester) -> None:
    """As xdist does, which need not be installed: an option `dist` that is not "no"."""
    pytester.makeconftest('def pytest_addoption(parser): parser.addoption("--dist", default="no")')
    pytester.makepyfile(RECORDED)
    result = run(pytester, "--assay-update", "--dist=load")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*one process must run all tests. Leave out -n.*"])
    run(pytester, "--dist=load").assert_outcomes(passed=1)
    run(pytester, "--assay-update").assert_outcomes(passed=1)


def test_pytest_starts_without_torch(tmp_path: Path) -> None:
    """Everybody who has Assay installed loads the plugin."""
    (tmp_path / "test_other.py").write_text("def test_other(): pass")
    heavy = ("torch", "numpy", budget.__name__)
    program = (
        f"import sys, pytest; code = pytest.main([*{PLUGIN!r}, '-q', {str(tmp_path)!r}]);"
        f"print(int(code), [m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
