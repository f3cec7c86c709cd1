"""`assay bench attention`, the real command line; and what Ctrl-C leaves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.cli.test_cli import assay

SMALL = ("bench", "attention", "--device", "cpu", "--tokens", "64", "--hidden", "64", "--dim", "16", "--rounds", "2")


def test_a_table_for_people_and_a_file_for_machines(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "bench.json"
    done = assay(*SMALL, "-n", "32", "-n", "64", "--kv-heads", "2", "--dtype", "bf16", "--profile", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    text = done.stdout
    assert "N 32, D 16: batch 2, 4 heads, 2 of K, V, causal, bf16; matmul" in text
    assert "1 query against 32 keys" in text
    assert "forward + backward" in text
    assert "…" not in "\n".join(line for line in text.splitlines() if "aten::" not in line)
    assert "Where the time of assay goes: N 64, D 16, forward+backward" in text
    assert "the fastest flash kernel over standard attention:" in text
    assert list(file.parent.iterdir()) == [file]
    _check_document(json.loads(file.read_text(encoding="utf-8")))


def _check_document(found: dict[str, Any]) -> None:
    assert found["complete"] is True
    assert found["environment"].keys() >= {"torch", "device", "host_cpu", "threads", "code"}
    assert found["date"].endswith("+00:00")
    assert (found["dtype"], found["rounds"]) == ("bf16", 2)
    assert [(p["queries"], p["keys"]) for p in found["points"]] == [(32, 32), (64, 64), (1, 32)]
    for point in found["points"]:
        passes = ["forward"] if point["queries"] == 1 else ["forward", "forward+backward"]
        names = ["assay", "SDPA flash (CPU)", "SDPA math", "standard"]
        assert [(f["contender"], f["pass"]) for f in point["figures"]] == [(n, p) for n in names for p in passes]
        for figure in point["figures"]:
            assert figure["reason"] is None
            assert len(figure["samples"]) == 2
            for name in ("seconds", "tflops", "ceiling_share", "tokens_per_second", "over_standard", "over_best_other"):
                assert 0 < figure[name] < math.inf
    assert len(found["profile"]) == 2
    assert sum(part["share"] for part in found["profile"][0]["parts"]) == pytest.approx(1)
    assert found["findings"]


def test_json_on_standard_output_and_nothing_else() -> None:
    done = assay(*SMALL, "-n", "32", "--full", "--no-backward", "--only", "assay", "--only", "stand", "--json", "-")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [point["causal"] for point in found["points"]] == [False, False]
    assert {(f["contender"], f["pass"]) for point in found["points"] for f in point["figures"]} == {
        ("assay", "forward"),
        ("standard", "forward"),
    }
    assert found["profile"] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--dim", "96"), "--hidden must be a multiple of --dim (heads = hidden / dim), got 256 and 96. Try --hidden"),
        (("--kv-heads", "3"), "must divide the heads (hidden / dim = 4), got 3. Choose of 1, 2, 4."),
        (("--dtype", "fp8"), "--dtype is one of bf16, fp16, fp32; got 'fp8'."),
        (("--only", "cudnn"), "got 'cudnn'. Here are: assay, SDPA flash (CPU), SDPA math, standard."),
        (("--json", "/proc/nothing/bench.json"), "the JSON cannot be written"),
        (("--json", "/"), "is a folder"),
        (("--device", "abacus"), "no device 'abacus'"),
        (("-n", "0"), "should be greater than or equal to 1"),
        (("--dim", "512"), "should be less than or equal to 256"),
        (("--rounds", "0"), "should be greater than or equal to 1"),
    ],
)
def test_bad_options_exit_with_2(arguments: tuple[str, ...], says: str) -> None:
    """In this process: nothing is measured, and a new one takes seconds to start."""
    from assay.cli.app import app

    device = () if "--device" in arguments else ("--device", "cpu")
    done = CliRunner().invoke(app, ["bench", "attention", *device, *arguments])
    assert done.exit_code == 2, done.output
    assert says in " ".join(done.output.replace("│", " ").split())


def test_a_bad_option_on_the_real_command_line() -> None:
    done = assay("bench", "attention", "--device", "cpu", "--dim", "96")
    assert done.returncode == 2
    assert "assay bench attention: --hidden must be a multiple of --dim" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_ctrl_c_prints_what_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from assay.bench import run
    from assay.cli.app import app

    real = run.measure

    def measure(point: Any, *arguments: Any, **how: Any) -> None:
        if point.shape.queries == 64:
            raise KeyboardInterrupt
        real(point, *arguments, **how)

    monkeypatch.setattr(run, "measure", measure)
    file = tmp_path / "bench.json"
    done = CliRunner().invoke(app, [*SMALL, "-n", "32", "-n", "64", "--json", str(file)])
    assert done.exit_code == 130
    assert "N 32, D 16" in done.output
    assert "Stopped before the end" in done.output
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["complete"] is False
    assert [len(point["figures"]) for point in found["points"]] == [8, 0]


def test_nothing_measured_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from assay.bench import run
    from assay.cli.app import app

    monkeypatch.setattr(run, "too_large", lambda *_: "skipped: no room")
    done = CliRunner().invoke(app, [*SMALL, "-n", "32", "--only", "standard"])
    assert done.exit_code == 1
    assert "standard, forward: skipped: no room" in done.output
