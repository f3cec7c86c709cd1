"""What the summary and the report of a watch say of single heads, and of NaN that golden has too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from assay.report.watch_section import findings, worst_calls
from assay.results.lines import all_records
from assay.results.reader import compact, read_records
from assay.results.store import Store
from assay.results.watch_record import WATCH
from assay.watching import ledger
from assay.watching.watch import Watch, watch

HEADS, ROWS = 32, 16


class Attends(nn.Module):
    """To itself, as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


@pytest.fixture
def _sdpa_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    original = F.scaled_dot_product_attention

    def spoiled(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        out = original(query, key, value, **how).clone()
        out[:, 3] *= 1 + 2**-6
        return out

    monkeypatch.setattr(F, "scaled_dot_product_attention", spoiled)


def seen(x: Tensor, **how: Any) -> Watch:
    model = nn.Sequential(Attends(), Attends())
    with watch(model, **how) as w, torch.no_grad():
        model(x)
    return w


def draw() -> Tensor:
    return torch.randn(1, HEADS, ROWS, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


@pytest.mark.usefixtures("_sdpa_is_bad")
def test_one_head_over_budget_is_named() -> None:
    w = seen(draw())
    whole = next(row for row in w.rows if row["head"] is None)
    assert not whole["over"]
    assert w.first_over is not None
    assert (w.first_over["layer"], w.first_over["head"], w.first_over["over"]) == ("0", 3, True)
    table, *_, last = w.summary().split("\n", 1)[1].split("\n")
    assert f"{w.first_over['ratio_rmse']:.2f} (head 3)" in table
    assert table.endswith(" 1")
    assert last.startswith("First over budget: output of 0 (head 3) at step 0, ")
    assert "within budget" not in w.summary()
    (said,) = findings(list(w.rows))
    assert said.startswith("Sequential: 2 of 2 tensors over budget, first output of 0 (head 3) at step 0, ")
    assert {line[4] for line in worst_calls(list(w.rows)).rows} == {
        f"{row['ratio_rmse']:.2f} (head 3)" for row in w.rows if row["head"] == 3
    }


@pytest.mark.parametrize("golden", [True, False])
def test_nan_that_golden_has_too_is_counted(golden: bool) -> None:
    x = draw()
    x[0, :, 5] = torch.nan
    w = seen(x, golden=golden)
    rows = [row for row in w.rows if row["head"] is None]
    assert [row["actual_nonfinite"] for row in rows] == [HEADS * ROWS * 64] * 2
    assert {row["actual_nonfinite"] for row in w.rows if row["head"] is not None} == {ROWS * 64}
    assert w.first_over is None
    told = ", as in golden" if golden else ""
    assert f"NaN or infinity in 2 of 2 calls, first in output of 0 at step 0 (32,768 elements{told})." in w.summary()
    assert "All within budget." not in w.summary()
    assert w.summary().endswith("All else is within budget.") == golden
    first, judged = findings(list(w.rows))
    assert first.startswith("Sequential: NaN or infinity in 2 of 2 tensors, first in output of 0 at step 0 (32,768 el")
    assert ("all else within budget" in judged) == golden


def test_the_first_nan_is_remembered_when_its_rows_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "KEPT", 2 * (HEADS + 1))
    model, x = nn.Sequential(Attends(), Attends()), draw()
    broken = x.clone()
    broken[0, 0, 0, 0] = torch.inf
    with watch(model) as w, torch.no_grad():
        model(broken)
        model(x)
    assert not any(row["actual_nonfinite"] for row in w.rows)
    first = w._entered().first_nonfinite
    assert first is not None
    assert (first["layer"], first["step"], first["head"]) == ("0", 0, None)


def test_records_without_the_count_are_read_and_reported(tmp_path: Path) -> None:
    """As they were written before there was one."""
    w = seen(draw())
    old, new = list(w.rows)[: HEADS + 1], list(w.rows)[HEADS + 1 :]
    lines = [json.loads(WATCH.to_json(row)) for row in old]
    for line in lines:
        del line["actual_nonfinite"]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (tmp_path / "watch-old.jsonl").write_text(text, encoding="utf-8")
    with Store(tmp_path, WATCH) as store:
        assert store.done == {row["id"] for row in old}
        for row in new:
            store.append(row)
    found = read_records(tmp_path, schema=WATCH)
    assert found.problems == []
    expected = {row["id"]: row | {"actual_nonfinite": None} for row in old} | {row["id"]: row for row in new}
    assert {row["id"]: row for row in found.rows} == expected
    assert {row["id"]: row for row in all_records(tmp_path, WATCH)} == expected
    (said,) = findings(found.rows)
    assert said.startswith("Sequential: all 2 tensors within budget, at worst ")
    assert [line[7] for line in worst_calls(old).rows + worst_calls(new).rows] == ["0", "0"]
    assert "–" in {line[7] for line in worst_calls(found.rows).rows}
    assert compact(tmp_path, WATCH) == (tmp_path / "watch.parquet", 2 * (HEADS + 1), [])


def test_a_parquet_file_without_the_count_is_read(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    w = seen(draw())
    with Store(tmp_path / "new", WATCH) as store:
        for row in w.rows:
            store.append(row)
    compact(tmp_path / "new", WATCH)
    (tmp_path / "old").mkdir()
    with duckdb.connect() as connection:
        table = connection.read_parquet(str(tmp_path / "new" / "watch.parquet"))
        kept = ", ".join(f'"{name}"' for name in table.columns if name != "actual_nonfinite")
        table.project(kept).write_parquet(str(tmp_path / "old" / "watch.parquet"))
    found = read_records(tmp_path / "old", schema=WATCH)
    assert found.problems == []
    assert {row["id"]: row for row in found.rows} == {row["id"]: row | {"actual_nonfinite": None} for row in w.rows}
