"""The watch's kernels find what plain torch finds: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from assay.formats.catalog import BF16
from assay.results.watch_record import MEASURED
from assay.watching.call import AttentionCall
from assay.watching.comparing import Columns, Comparing
from assay.watching.plain import plain
from assay.watching.scores import HIDDEN, Scores
from assay.watching.watch import watch
from tests.interpreter import interpret
from tests.watching.models import inputs, stack


def test_interpreted_kernels() -> None:
    interpret("tests.watching.interpreted_kernels")


def test_interpreted_golden() -> None:
    interpret("tests.watching.interpreted_golden")


def columns_of(device: str, broken: bool, **how: Any) -> dict[str, Columns]:
    draws = torch.Generator().manual_seed(0)
    q, grad = (torch.randn(2, 6, 300, 32, generator=draws).to(device, torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(2, 2, 300, 32, generator=draws).to(device, torch.bfloat16) for _ in range(2))
    call = AttentionCall(q=q, k=k, v=v, scale=0.3, **how)
    goldens, scores = call.golden(grad)
    other = [x.to(torch.bfloat16) for x in goldens]
    actual = [(x * (1 + 1e-2)).to(torch.bfloat16) for x in goldens]
    if broken:
        actual[0][0, 1, 2, 3] = torch.nan
    names = ("output", "dq", "dk", "dv")
    return Comparing(dict(zip(names, actual, strict=True)), other, goldens, scores, BF16).columns()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("how", [{}, {"right": 0}, {"left": 70, "right": 3}])
def test_a_gpu_finds_what_a_cpu_finds(how: dict[str, Any], broken: bool) -> None:
    ours, theirs = (columns_of(device, broken, **how) for device in ("cuda", "cpu"))
    for tensor, columns in theirs.items():
        for name, values in columns.items():
            # Golden differs in its last bits, so a rounding may go the other way.
            assert ours[tensor][name] == pytest.approx(values, rel=1e-3, abs=1e-9), (tensor, name)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lengths", [(200, 333), (333, 200)])
@pytest.mark.parametrize(
    ("how", "dims"),
    [
        ({}, (64, 64)),
        ({"left": 70, "right": 3}, (64, 64)),
        ({"softcap": 2.0, "sinks": torch.arange(6.0) - 2, "slopes": torch.arange(6.0) / 9}, (64, 40)),
        ({"bias": "float", "right": 0}, (40, 64)),
        ({"bias": "bool"}, (128, 96)),
    ],
)
def test_fused_golden_is_golden(how: dict[str, Any], lengths: tuple[int, int], dims: tuple[int, int]) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    from assay.watching.triton_golden import golden

    draws = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draws).cuda()

    (queries, keys), (dim, value_dim) = lengths, dims
    q, k, v, grad = draw(2, 6, queries, dim), draw(2, 2, keys, dim), draw(2, 2, keys, value_dim), draw(2, 6, queries, 1)
    kinds = {"float": draw(1, 6, queries, keys), "bool": draw(2, 1, queries, keys) > 0}
    how = {name: kinds[x] if isinstance(x, str) else x for name, x in how.items()}
    how = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in how.items()}
    call = AttentionCall(q=q, k=k, v=v, scale=0.2, **how)
    grad = grad.expand(*grad.shape[:3], value_dim)
    scores = Scores(torch.float32, call.sinks is not None)
    expected = plain(call.in_double(), grad, scores)
    found, rows = golden(call, grad, HIDDEN)
    again, _ = golden(call, grad, HIDDEN, held=1 << 22)
    scored = torch.cat(scores._found, -1)
    for ours, later, theirs in zip((*found, rows), (*again, rows), (*expected, scored), strict=True):
        largest = theirs[theirs.isfinite()].abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 * largest)
        torch.testing.assert_close(ours, later, rtol=0, atol=1e-12 * largest)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_without_triton_a_gpu_finds_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = stack(dtype).cuda(), inputs(dtype).cuda()
    found = []
    for there in (True, False):
        monkeypatch.setattr("assay.watching.kernels._triton", lambda there=there: there)
        with watch(model) as w:
            model(x).float().square().mean().backward()
        found.append(w.rows)
    for ours, theirs in zip(*found, strict=True):
        for name in MEASURED:
            expected = theirs[name]
            near = None if expected is None else pytest.approx(expected, rel=1e-6, abs=1e-9)
            assert ours[name] == near, name
