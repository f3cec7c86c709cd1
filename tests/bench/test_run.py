"""Real measurements on the CPU, of shapes that take no time."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from assay.bench import ceiling
from assay.bench.contenders import Contender, find_contenders
from assay.bench.figures import Point
from assay.bench.inputs import draw, sets_needed, work_on
from assay.bench.memory import too_large
from assay.bench.reasons import reason_of
from assay.bench.run import measure, samples_of
from assay.bench.shapes import Shape
from assay.cases.attention.golden import golden_attention

CPU = torch.device("cpu")
TINY = Shape(batch=2, heads=4, kv_heads=4, queries=32, keys=32, dim=16, causal=True)
GROUPED = Shape(batch=2, heads=4, kv_heads=2, queries=32, keys=32, dim=16, causal=True)
FEW = Shape(batch=2, heads=4, kv_heads=4, queries=1, keys=32, dim=16, causal=False)


@pytest.fixture(autouse=True)
def _small_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ceiling._SIDE, "cpu", 64)


def contender(call: Any, name: str = "theirs") -> Contender:
    return Contender(name=name, call=call, flash=True, takes_groups=True)


def measured(shape: Shape, contenders: list[Contender], **how: Any) -> Point:
    point = Point(shape=shape, dtype="fp32")
    settings: dict[str, Any] = {"backward": True, "device": CPU, "rounds": 2}
    measure(point, contenders, **settings | how)
    return point


@pytest.mark.parametrize("shape", [TINY, GROUPED, FEW])
def test_every_contender_computes_the_same(shape: Shape) -> None:
    q, k, v, _ = draw(shape, torch.float32, CPU)[0]
    golden = golden_attention(q, k, v, causal=shape.causal).float()
    everyone = find_contenders(CPU)
    assert [c.name for c in everyone] == ["assay", "SDPA flash (CPU)", "SDPA math", "standard"]
    assert [c.flash for c in everyone] == [True, True, False, False]
    for one in everyone:
        torch.testing.assert_close(one.run(q, k, v, shape.causal), golden, rtol=0, atol=2e-6)


def test_only_takes_parts_of_names() -> None:
    assert [c.name for c in find_contenders(CPU, ["FLASH", "stand"])] == ["SDPA flash (CPU)", "standard"]
    for part in ("cudnn", ""):
        with pytest.raises(ValueError, match="Here are: assay, SDPA flash"):
            find_contenders(CPU, [part])


def test_a_point_has_both_passes_of_everyone() -> None:
    ticks: list[str] = []
    everyone = find_contenders(CPU)
    point = measured(TINY, everyone, tick=ticks.append)
    assert [(f.contender, f.which, len(f.samples)) for f in point.figures] == [
        (c.name, which, 2) for c in everyone for which in ("forward", "forward+backward")
    ]
    assert all(f.reason is None and f.peak_bytes is None and f.seconds for f in point.figures)
    assert len(point.ceiling_samples) == 2
    assert len(ticks) == samples_of(TINY, 4, True, 2)


def test_nothing_is_trained_on_one_query() -> None:
    assert {f.which for f in measured(FEW, find_contenders(CPU, ["assay"])).figures} == {"forward"}
    assert {f.which for f in measured(TINY, find_contenders(CPU, ["assay"]), backward=False).figures} == {"forward"}


def test_who_refuses_says_why_and_the_others_go_on() -> None:
    def refuses(*_: object) -> torch.Tensor:
        raise ValueError("Only even days.\nAnd more")

    def no_backward(q: torch.Tensor, *_: object) -> torch.Tensor:
        return q.detach()

    point = measured(
        TINY, [contender(refuses), contender(no_backward, "forward only"), *find_contenders(CPU, ["assay"])]
    )
    reasons = {(f.contender, f.which): f.reason for f in point.figures}
    assert reasons["theirs", "forward"] == reasons["theirs", "forward+backward"] == "Only even days."
    assert reasons["forward only", "forward"] is None
    assert "does not require grad" in str(reasons["forward only", "forward+backward"])
    assert reasons["assay", "forward+backward"] is None


def test_out_of_memory_ends_nothing() -> None:
    calls = 0

    def hungry(q: torch.Tensor, *_: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        return q * 1

    point = measured(TINY, [contender(hungry), *find_contenders(CPU, ["assay"])], backward=False, rounds=3)
    assert [f.reason for f in point.figures] == ["ran out of memory", None]
    assert len(point.figures[1].samples) == 3


def test_inputs_that_do_not_fit_are_a_reason() -> None:
    huge = Shape(batch=2**20, heads=2**10, kv_heads=2**10, queries=2**12, keys=2**12, dim=128, causal=True)
    point = measured(huge, find_contenders(CPU, ["assay"]))
    assert point.reason
    assert point.figures == []


def test_standard_attention_is_skipped_where_its_matrix_does_not_fit() -> None:
    long = Shape(batch=1, heads=16, kv_heads=16, queries=65536, keys=65536, dim=128, causal=True)
    everyone = {c.name: c for c in find_contenders(CPU)}
    free = 100 * 2**30
    reason = too_large(everyone["standard"], long, "forward", torch.bfloat16, free)
    assert reason == "skipped: its 65536×65536 matrices need 320 GiB, 100 GiB are free"
    assert too_large(everyone["standard"], TINY, "forward", torch.bfloat16, free) is None
    assert too_large(everyone["standard"], long, "forward", torch.bfloat16, None) is None
    assert "640 GiB" in str(too_large(everyone["SDPA math"], long, "forward", torch.bfloat16, free))
    for name in ("assay", "SDPA flash (CPU)"):
        assert too_large(everyone[name], long, "forward+backward", torch.bfloat16, 1) is None


def test_inputs_outnumber_the_cache_and_take_turns() -> None:
    one = TINY.input_elements * 4
    assert sets_needed(TINY, 4, 10 * one) == 11
    assert sets_needed(TINY, 4, one // 2) == 2
    assert sets_needed(TINY, 4, 10**6 * one) == 64
    sets = draw(GROUPED, torch.float32, CPU)
    assert sets[0][1].shape == (2, 2, 32, 16)
    assert not torch.equal(sets[0][0], sets[1][0])
    seen: list[int] = []

    def note(q: torch.Tensor, *_: object) -> torch.Tensor:
        seen.append(q.data_ptr())
        return q

    work = work_on(contender(note), "forward", True, sets[:3])
    for _ in range(4):
        work()
    assert seen == [sets[i][0].data_ptr() for i in (0, 1, 2, 0)]


def test_a_refusal_of_sdpa_is_explained_by_its_warnings() -> None:
    error = RuntimeError("No available kernel.  Aborting execution.")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for text in (
            "Flash attention kernel not used because: (Triggered internally at x.cpp:1.)",
            "Expected half precision. (Triggered internally at x.cpp:2.)",
            "Memory efficient kernel not used because:",
            "Memory Efficient attention has been runtime disabled.",
        ):
            warnings.warn(text, UserWarning, stacklevel=1)
    assert reason_of(error, warned) == "Expected half precision."
    assert reason_of(error) == "refused by torch"
    assert reason_of(AssertionError()) == "AssertionError"
    assert len(reason_of(ValueError("x" * 999))) < 200
