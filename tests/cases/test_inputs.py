"""Inputs: what their names promise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from assay.cases.attention.inputs import (
    DISTRIBUTIONS,
    captured,
    check_inputs,
    describe_inputs,
    draw_inputs,
)

SHAPE = (2, 3, 257, 16)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_same_seed_gives_the_same_numbers(name: str) -> None:
    first, again, other = (draw_inputs(name, SHAPE, seed) for seed in (1, 1, 2))
    for x, y, z in zip(first, again, other, strict=True):
        assert x.shape == SHAPE
        assert x.dtype == torch.float64
        assert torch.equal(x, y)
        assert not torch.equal(x, z)
        assert x.isfinite().all()


def test_uniform_and_normal() -> None:
    uniform, normal = (torch.stack(draw_inputs(name, SHAPE, 0)[:3]) for name in ("uniform", "normal"))
    assert 0 <= uniform.min() < 0.01 < 0.99 < uniform.max() < 1
    assert abs(float(normal.mean())) < 0.02
    assert abs(float(normal.std()) - 1) < 0.02


def test_outliers_are_one_in_a_thousand_with_variance_100() -> None:
    x = draw_inputs("outliers", (1, 4, 4096, 64), 0).q
    far = x[x.abs() > 6]  # N(0, 1) reaches 6 once in 5e8, N(0, 101) in 55 of 100
    assert far.numel() / x.numel() == pytest.approx(0.001 * 0.5505, rel=0.1)
    assert float(x.var()) == pytest.approx(1 + 0.1, rel=0.02)


def test_every_row_of_tied_has_its_largest_score_twice() -> None:
    q, k, _, _ = draw_inputs("tied", SHAPE, 0)
    top = (q @ k.mT)[..., :256].sort(-1, descending=True).values
    assert torch.equal(top[..., 0], top[..., 1])


def test_low_rank_is_of_rank_four() -> None:
    q, k, v, _ = draw_inputs("low_rank", SHAPE, 0)
    assert torch.linalg.matrix_rank(q[0, 0]) == torch.linalg.matrix_rank(k[0, 0]) == 4
    assert torch.linalg.matrix_rank(v[0, 0]) == 16
    assert float(q.std()) == pytest.approx(1, rel=0.25)


def test_large_logits_have_a_standard_deviation_of_16() -> None:
    q, k, _, _ = draw_inputs("large_logits", (1, 2, 512, 64), 0)
    assert float((q @ k.mT / 8).std()) == pytest.approx(16, rel=0.1)


def test_captured_inputs_give_a_head_for_a_seed(tmp_path: Path) -> None:
    q, k, v = torch.randn(2, 4, 10, 8), torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 8)
    path = tmp_path / "captured.safetensors"
    save_file({"q": q.bfloat16(), "k": k.bfloat16(), "v": v.bfloat16()}, path)
    name = f"file:{path}"
    assert captured(path) == (8, (1, 1, 10, 8), 12)
    drawn = draw_inputs(name, (1, 1, 1, 1), 7)  # batch 1, head 3, which reads key head 1
    assert torch.equal(drawn.q[0, 0], q[1, 3].bfloat16().double())
    assert torch.equal(drawn.k[0, 0], k[1, 1].bfloat16().double())
    assert drawn.grad.shape == (1, 1, 10, 8)
    assert describe_inputs(name) == "captured: captured.safetensors"
    with pytest.raises(ValueError, match="has 8 heads; a seed picks one"):
        draw_inputs(name, (1, 1, 1, 1), 8)


def test_bad_inputs_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Unknown inputs 'unifrom'. Did you mean uniform"):
        check_inputs("unifrom")
    with pytest.raises(ValueError, match="is not a file"):
        check_inputs("file:/nowhere/at.all")
    junk = tmp_path / "junk.safetensors"
    junk.write_bytes(b"\x80\x04not a tensor")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        captured(junk)
    save_file({"q": torch.zeros(1, 1, 2, 2)}, junk)
    with pytest.raises(ValueError, match="must have tensors q, k and v; it has q"):
        captured(junk)
    save_file({name: torch.zeros(2, 2) for name in "qkv"}, junk)
    with pytest.raises(ValueError, match="must be float of shape"):
        captured(junk)


@pytest.mark.parametrize(
    "shapes",
    [
        {"q": (2, 4, 8, 4), "k": (1, 4, 8, 4), "v": (1, 4, 8, 4)},  # batch
        {"q": (1, 4, 8, 4), "k": (1, 2, 8, 4), "v": (1, 4, 8, 4)},  # heads of k and v
        {"q": (1, 4, 8, 4), "k": (1, 2, 8, 4), "v": (1, 2, 9, 4)},  # lengths of k and v
        {"q": (1, 4, 8, 4), "k": (1, 4, 8, 6), "v": (1, 4, 8, 4)},  # dim of q and k
        {"q": (1, 4, 8, 4), "k": (1, 3, 8, 4), "v": (1, 3, 8, 4)},  # heads that do not divide
    ],
)
def test_captured_tensors_must_fit_together(shapes: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    path = tmp_path / "captured.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path)
    with pytest.raises(ValueError, match="must share the batch"):
        captured(path)


def test_captured_tensors_must_be_finite(tmp_path: Path) -> None:
    path = tmp_path / "captured.safetensors"
    save_file({name: torch.full((1, 1, 2, 2), float("nan")) for name in "qkv"}, path)
    with pytest.raises(ValueError, match="must be finite"):
        captured(path)
