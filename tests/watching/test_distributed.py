"""Two processes that train together (DDP), both watched, into one folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed

from assay.results.lines import all_records
from assay.results.watch_record import WATCH


@pytest.mark.skipif(not distributed.is_available() or not distributed.is_gloo_available(), reason="needs gloo")
def test_ddp(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.watching.distributed_worker"]
    out = tmp_path / "run"
    both = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "meeting"), str(out)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    found = [json.loads(text) for text, _ in outputs]
    ids = []
    for rank in found:
        for watched, prefix in zip(rank, ("module.", ""), strict=True):
            assert watched["same"]  # weights, bit for bit, as if nobody had watched
            assert not watched["over"]
            assert watched["rows"] == sorted(
                [f"{prefix}layers.{layer}", tensor, step]
                for layer in range(3)
                for tensor in ("output", "dq", "dk", "dv")
                for step in range(3)
            )
            ids += watched["ids"]
    records = all_records(out, WATCH)
    assert sorted(record["id"] for record in records) == sorted(ids)
    assert len(set(ids)) == len(ids) == 2 * 2 * 3 * 3 * 4 * (4 + 1)
    assert len({record["watch"] for record in records}) == 4
    assert len(list(out.glob("watch-*.jsonl"))) == 4
