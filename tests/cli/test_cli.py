"""The real command line, in a subprocess."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from assay import __version__

SMALL = ("--device", "cpu", "--heads", "4", "--length", "1024")


def assay(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "assay", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=None)


def test_version_and_help() -> None:
    done = assay("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"assay {__version__}")
    done = assay("--help")
    assert done.returncode == 0
    assert "validate" in done.stdout


def test_command_and_module_are_the_same() -> None:
    command = Path(sys.executable).with_name("assay")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == assay("--version").stdout


@pytest.mark.slow
def test_validate_matches_the_cpu_kernel_within_two_percent(tmp_path: Path) -> None:
    """The goal itself: forward and backward, full and causal, bf16 and fp16."""
    page = tmp_path / "deep" / "index.html"
    done = assay("validate", *SMALL, "--json", "--html", str(page))
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {(row["format"], row["causal"], row["part"]) for row in rows} == {
        (fmt, causal, part)
        for fmt in ("bf16", "fp16")
        for causal in (False, True)
        for part in ("output", "dq", "dk", "dv")
    }
    for row in rows:
        assert abs(row["ratio"] - 1) <= 0.02
        assert row["matches"]
        assert sum(row["ulp_shares"]) == pytest.approx(1.0)
        assert row["bit_equal"] > 0.5
        if row["part"] == "output" and "flash" in row["kernel"]:  # with the plain shipped plan too
            assert abs(row["shipped_rmse"] / row["kernel_rmse"] - 1) <= 0.02
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert list(page.parent.iterdir()) == [page]


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "formats"), [(128, "bf16"), (96, "fp16"), (64, "fp32")])
def test_validate_matches_at_other_shapes(dim: int, formats: str) -> None:
    """1/√96 is no power of two: it shows where the kernel applies the scale. FP32 shows the blocks of its sums."""
    done = assay("validate", "--device", "cpu", "--heads", "8", "--dim", str(dim), "--formats", formats, "--json")
    assert done.returncode == 0, done.stdout


def test_one_key_has_no_error_at_all() -> None:
    done = assay("validate", "--device", "cpu", "--length", "1", "--formats", "bf16", "--json")
    assert done.returncode in (0, 1), done.stderr  # dQ and dK are 0 but for roundings, which need not match
    assert {row["ratio"] for row in json.loads(done.stdout) if row["part"] in ("output", "dv")} == {1.0}


@pytest.mark.slow
def test_validate_prints_a_table_for_people() -> None:
    done = assay("validate", *SMALL, "--formats", "bf16", "--length", "128")
    assert "SDPA flash (CPU): shipped bf16" in done.stdout
    assert "dv causal" in done.stdout
    assert "The kernel sums dQ, dK and dV up in the input format" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("validate", "--formats", "fp8"), "Kernels take bf16, fp16, fp32; got 'fp8'"),
        (("validate", "--formats", "bf16,"), "got ''"),
        (("validate", "--html", "/proc/nothing/index.html"), "the page cannot be written"),
        (("validate", "--html", "/"), "is a folder"),
        (("validate", "--device", "cuda:77"), "no device 'cuda:77'"),
        (("validate", "--device", "abacus"), "no device 'abacus'"),
        (("validate", "--length", "0"), "should be greater than or equal to 1"),
        (("valdate",), "No such command 'valdate'"),
    ],
)
def test_bad_usage_exits_with_2(arguments: tuple[str, ...], says: str) -> None:
    done = assay(*arguments)
    assert done.returncode == 2, done.stderr
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
