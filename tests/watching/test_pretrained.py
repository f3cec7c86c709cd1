"""A real pretrained model on a real text: every layer watched, and its attention replaced by ours."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from assay.integrations import register_transformers, unregister_transformers
from assay.results.lines import all_records
from assay.results.watch_record import WATCH
from tests.cli.test_cli import assay
from tests.pretrained import pretrained

PROMPTS = (
    "An assay tells how pure gold is.",
    "Attention computed block by block, with a running maximum and a running sum, rounds at other places than "
    "attention written out as three operations: which of them is nearer to the true value, and by how much?",
)
LAYERS = [f"encoder.layer.{number}.attention.self" for number in range(6)]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_command_finds_every_layer_and_all_are_as_near_as_plain_attention(dtype: str, tmp_path: Path) -> None:
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    done = assay("watch", "--model", str(pretrained()), *prompts, "--dtype", dtype, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "All within budget." in done.stdout
    rows = all_records(tmp_path, WATCH)
    whole = [row for row in rows if row["head"] is None]
    assert [row["layer"] for row in whole] == LAYERS
    assert len(rows) == 6 * (12 + 1)
    for row in whole:
        assert (row["format"], row["batch"], row["heads"], row["dim"], row["masked"]) == (dtype, 2, 12, 32, True)
        assert row["ratio_rmse"] <= 2.0
        assert row["ratio_max"] <= 3.0
        assert 0 < row["error_rmse"] < 2 * torch.finfo({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]).eps
    assert max(row["logit_max"] for row in whole) > 25  # trained: far from what random weights give
    assert min(row["logit_min"] for row in whole) < -25
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "Watched models" in page
    assert all(layer in page for layer in LAYERS)
    with safe_open(tmp_path / "worst.safetensors", framework="pt") as file:
        notes, names = file.metadata(), set(file.keys())
    assert names == {"q", "k", "v", "bias"}
    assert float(notes["scale"]) == 32**-0.5
    assert notes["layer"] == max(whole, key=lambda row: float(row["ratio_rmse"]))["layer"]


@lru_cache
def states_of_eager(dtype: torch.dtype) -> list[Tensor]:
    return states("eager", dtype)


def states(implementation: str, dtype: torch.dtype) -> list[Tensor]:
    """What each layer gives for the words, without the padding."""
    folder = pretrained()
    model: Any = transformers.AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation=implementation)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(list(PROMPTS), return_tensors="pt", padding=True)
    with torch.no_grad():
        found = model.eval()(**tokens, output_hidden_states=True).hidden_states
    assert len(found) == 7
    return [x[tokens["attention_mask"].bool()] for x in found[1:]]


@pytest.mark.parametrize("own", [False, True], ids=["as it chooses", "our blocks"])
def test_with_our_attention_it_is_as_near_to_fp64_as_eager(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if own:
        monkeypatch.setattr("assay.flash.cpu_plain.takes", lambda *_: False)
    golden = states_of_eager(torch.float64)
    register_transformers()
    try:
        for dtype in (torch.float32, torch.bfloat16):
            for layer, (ours, eager, truth) in enumerate(
                zip(states("assay", dtype), states_of_eager(dtype), golden, strict=True)
            ):
                error, budget = ((x.double() - truth).square().mean().sqrt().item() for x in (ours, eager))
                assert 0 < error <= 2 * budget, (dtype, layer)
    finally:
        unregister_transformers()
