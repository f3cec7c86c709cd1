"""`assay sweep`, `study`, `report` and `info` as a user runs them."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from assay.results.record import COLUMNS, from_json
from tests.cli.test_cli import assay

SMALL = ("--dim", "16", "--seeds", "3", "--jobs", "1", "--device", "cpu")
TINY = (*SMALL, "--length", "64", "--sram", "640")
GRIDS = {
    "length": (*SMALL, "--lengths", "32,64", "--sram", "640"),
    "blocks": (*SMALL, "--length", "64", "--srams", "640,2560"),
    "kernels": (*SMALL, "--length", "64"),
}


def rows_in(folder: Path) -> list[dict[str, object]]:
    """Every whole line; a last line that was cut short is not one."""
    found = []
    for path in folder.glob("*.jsonl"):
        found += [from_json(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    return found


@pytest.mark.parametrize("name", ["precision", "length", "blocks", "steps", "inputs", "kernels"])
def test_every_sweep_prints_a_table_and_leaves_records(name: str, tmp_path: Path) -> None:
    done = assay("sweep", name, "--out", str(tmp_path), *GRIDS.get(name, TINY))
    assert done.returncode == 0, done.stderr
    assert "output_accumulator" in done.stdout if name == "steps" else "ratio" in done.stdout
    rows = rows_in(tmp_path)
    assert rows
    assert {row["sweep"] for row in rows} == {name}
    assert {row["null_max"] for row in rows} == {0.0}


def test_json_is_the_records_and_nothing_else(tmp_path: Path) -> None:
    command = ("sweep", "inputs", "--out", str(tmp_path), *TINY, "--inputs", "normal", "--plan", "uniform,row_sum=fp32")
    done = assay(*command, "--json")
    assert done.returncode == 0, done.stderr
    rows = [from_json(line) for line in done.stdout.splitlines()]
    assert len(rows) == 3
    assert set(rows[0]) == set(COLUMNS)
    assert rows[0]["plan_row_sum"] == "fp32"
    again = assay(*command, "--json")
    assert again.stdout == done.stdout  # read, not measured again: the times are the same
    assert len(rows_in(tmp_path)) == 3


def test_captured_inputs(tmp_path: Path) -> None:
    path = tmp_path / "q, k, v.safetensors"
    save_file({name: torch.randn(1, 4, 32, 16) for name in "qkv"}, path)
    done = assay("sweep", "inputs", "--out", str(tmp_path / "run"), *TINY, "--inputs", f"file:{path}", "--json")
    assert done.returncode == 0, done.stderr
    assert {json.loads(line)["distribution"] for line in done.stdout.splitlines()} == {"captured: q, k, v.safetensors"}


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """kill -9 again and again: every earlier row stays whole, none comes twice, and the end is the same."""
    command = [sys.executable, "-m", "assay", "sweep", "precision", "--out", str(tmp_path), *TINY]
    chance, kills, before = random.Random(0), 0, 0
    for _ in range(20):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        start = time.monotonic()
        while process.poll() is None and len(rows_in(tmp_path)) <= before and time.monotonic() < start + 60:
            time.sleep(0.02)  # let it get somewhere first
        time.sleep(chance.uniform(0, 0.3))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        rows = rows_in(tmp_path)
        assert len(rows) > before
        before = len(rows)
    assert process.returncode in (0, -signal.SIGKILL)
    done = assay("sweep", "precision", "--out", str(tmp_path), *TINY)  # whatever is left
    assert done.returncode == 0, done.stderr
    assert kills >= 2
    ids = [row["id"] for row in rows_in(tmp_path)]
    assert len(ids) == len(set(ids)) == 7 * 3 * 2 * 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_says_how_to_go_on(jobs: str, tmp_path: Path) -> None:
    arguments = ["sweep", "precision", "--out", str(tmp_path), *TINY, "--seeds", "40", "--jobs", jobs]
    process = subprocess.Popen(
        [sys.executable, "-m", "assay", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    while not rows_in(tmp_path):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "Go on with: assay sweep precision" in errors
    assert 0 < len(rows_in(tmp_path)) < 40 * 84


def test_two_processes_in_one_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "assay", "sweep", "inputs", "--out", str(tmp_path), *TINY, "--json"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1]
    ids = [row["id"] for row in rows_in(tmp_path)]
    assert len(ids) == len(set(ids)) == 6 * 3 * 3


def test_one_seed_has_no_interval_and_says_so(tmp_path: Path) -> None:
    done = assay("sweep", "inputs", "--out", str(tmp_path), *TINY, "--seeds", "1")
    assert done.returncode == 0, done.stderr
    assert "1 seed" in done.stdout
    assert "overflow" not in done.stdout
    done = assay("sweep", "steps", "--out", str(tmp_path), *TINY, "--seeds", "1")
    assert "--seeds 2 or more" in done.stdout


def test_the_same_point_twice_is_one_point(tmp_path: Path) -> None:
    done = assay(
        "sweep",
        "length",
        "--out",
        str(tmp_path),
        *SMALL,
        "--lengths",
        "32,32",
        "--plan",
        "uniform",
        "--plan",
        "uniform",
    )
    assert done.returncode == 0, done.stderr
    assert "3 seeds" in " ".join(done.stdout.split())


def test_records_of_other_code_are_named(tmp_path: Path) -> None:
    command = ("sweep", "inputs", "--out", str(tmp_path), *TINY, "--inputs", "normal")
    assert assay(*command).returncode == 0
    (path,) = tmp_path.glob("*.jsonl")
    path.write_text(re.sub(r'"code": "[^"]*"', '"code": "0.0.1"', path.read_text()))
    done = assay(*command)
    assert "measured before, by 0.0.1" in " ".join(done.stderr.split())


def test_info() -> None:
    found = json.loads(assay("info", "--json").stdout)
    assert found["devices"][0]["device"] == "cpu"
    assert "SDPA flash (CPU)" in found["devices"][0]["kernels"]
    assert {package["name"] for package in found["packages"]} >= {"duckdb", "plotly", "triton"}
    done = assay("info")
    assert done.returncode == 0
    assert "SDPA flash (CPU)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("sweep", "precison"), "Unknown sweep 'precison'. Did you mean precision?"),
        (("sweep", "precision", "--formats", "bf61"), "Unknown format 'bf61'. Did you mean bf16"),
        (("sweep", "precision", "--plan", "uniform,row_smu=fp32"), "Unknown step 'row_smu'. Did you mean row_sum"),
        (("sweep", "inputs", "--inputs", "norml"), "Did you mean normal"),
        (("sweep", "inputs", "--inputs", "file:nowhere"), "nowhere is not a file"),
        (("sweep", "length", "--lengths", "64,many"), "--lengths takes whole numbers"),
        (("sweep", "inputs", "--block", "64"), "--block is rows x columns"),
        (("sweep", "inputs", "--block", "²x3"), "--block is rows x columns"),
        (("sweep", "kernels", "--plan", "shipped"), "has no use for plans"),
        (("sweep", "inputs", "--length", "100000000000", "--jobs", "1"), "smaller shape"),
        (("sweep", "inputs", "--device", "abacus"), "no device 'abacus'"),
        (("sweep", "inputs", "--out", "/proc/nothing"), "/proc/nothing"),
        (("study", "papper"), "Unknown recipe 'papper'. Did you mean paper"),
        (("study", "nowhere.py"), "There is no file nowhere.py"),
        (("report", "/nowhere"), "/nowhere"),
        (("compact", "/nowhere"), "/nowhere"),
    ],
)
def test_bad_usage_exits_with_2(arguments: tuple[str, ...], says: str) -> None:
    done = assay(*arguments)
    assert done.returncode == 2, done.stderr
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
