"""The run, on the CPU: small inputs, no graphs, and peers that are told what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from assay import flash_attention
from assay.bench.timing import host_clock
from benchmarks import bench_record
from benchmarks.record import (
    CUDNN,
    FA2,
    FP8_KERNEL,
    FP16,
    OURS,
    PARTS,
    PLAIN,
    Case,
    Part,
    Point,
    cases,
    takes_eager,
)

BOTH: tuple[Part, ...] = ("forward", "backward")


def draw(
    length: int, dim: int, kv_heads: int | None = None, sets: int = 3, dtype: torch.dtype = torch.bfloat16
) -> list[list[torch.Tensor]]:
    shapes = [(1, 4, length, dim)] + 2 * [(1, 1 if kv_heads else 4, length, dim)]
    return [[torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes] for _ in range(sets)]


def peer(backend: SDPBackend, causal: bool) -> Callable[..., torch.Tensor]:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    return call


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_record, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(bench_record, "draw", draw)
    monkeypatch.setattr(bench_record, "peer", peer)
    monkeypatch.setattr(bench_record, "graph", bench_record.one_by_one)
    monkeypatch.setattr(bench_record, "cuda_clock", host_clock)
    monkeypatch.setattr(bench_record, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(bench_record, "matmul", lambda: (lambda: None, 1.0))
    monkeypatch.setattr(bench_record, "compile_first", lambda wanted, jobs, flex: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)


def case_of(kind: str, parts: tuple[Part, ...] = BOTH, **rest: object) -> Case:
    return Case(kind=kind, dim=16, length=64, causal=kind != "window", parts=parts, **rest)  # type: ignore[arg-type]


def measured(case: Case, part: Part, *, eager: bool = False) -> Point:
    everyone = bench_record.contenders(case, flex=False)
    return bench_record.measure(case, part, everyone, rounds=2, eager=eager)


@pytest.mark.parametrize("part", ["forward", "backward", "both"])
def test_plain_beside_both_peers(part: Part) -> None:
    point = measured(case_of("plain", (part,)), part, eager=True)
    assert set(point.ms) == set(point.eager_ms) == {OURS, CUDNN, FA2}
    assert min(point.ms.values()) > 0
    assert point.matmul > 0
    assert not point.missing
    assert "from Python" in bench_record.line_of(point)


@pytest.mark.parametrize(
    ("case", "who"),
    [
        (case_of("ragged"), {OURS, CUDNN, PLAIN}),
        (case_of("GQA"), {OURS, CUDNN, PLAIN}),
        (case_of("strided"), {OURS, CUDNN, PLAIN}),
        (case_of("window", window=16), {OURS, PLAIN}),
        (case_of("packed", packed=(32, 20, 12)), {OURS, PLAIN}),
    ],
)
def test_kinds_beside_their_twins(case: Case, who: set[str]) -> None:
    for part in BOTH:
        point = measured(case, part)
        assert set(point.ms) == who, point.missing
        assert point.over(PLAIN)


def test_strided_views_are_strided() -> None:
    q = bench_record.inputs(case_of("strided"))[0][0]
    assert q.shape == (1, 4, 64, 16)
    assert not q.is_contiguous()
    assert q.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("part", BOTH)
def test_fp16_beside_cudnn(part: Part) -> None:
    case = case_of(FP16)
    assert {x.dtype for each in bench_record.inputs(case) for x in each} == {torch.float16}
    assert set(measured(case, part).ms) == {OURS, CUDNN}


def test_inputs_that_were_quantised_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each set has its own, and they are quantised once."""
    made: list[tuple[torch.Tensor, ...]] = []
    attended = []

    def quantize_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, fp8: object) -> int:
        made.append((q, k, v))
        return len(made) - 1

    def attend(number: int, out: torch.Tensor, *_: object) -> None:
        attended.append(number)
        out.zero_()

    launch = pytest.importorskip("assay.flash.fp8_launch")
    monkeypatch.setattr(launch, "quantize_all", quantize_all)
    monkeypatch.setattr(launch, "attend", attend)
    point = measured(case_of(FP8_KERNEL, ("forward",)), "forward")
    assert set(point.ms) == {OURS, PLAIN}
    assert len(made) == 3
    assert attended[:3] == [0, 1, 2]
    assert not any(x.requires_grad for each in made for x in each)


def test_few_are_timed_from_python() -> None:
    eager = [case for case in cases(PARTS) if takes_eager(case)]
    assert {(case.kind, case.length) for case in eager} == {("plain", 1024), ("plain", 8192)}


def test_deterministic_looks_at_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("deterministic", ("backward",))
    assert measured(case, "backward").same_bits is True

    def noisy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: object) -> torch.Tensor:
        return flash_attention(q, k, v, causal=True) * (1 + torch.rand(()))

    monkeypatch.setattr(bench_record, "flash_attention", noisy)
    assert measured(case, "backward").same_bits is False


@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_fast_and_wrong_has_no_figure(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        return flash_attention(q, k, v, causal=causal) * factor

    monkeypatch.setattr(bench_record, "flash_attention", wrong)
    for part in BOTH:
        point = measured(case_of("plain"), part)
        assert OURS not in point.ms
        assert point.missing[OURS].startswith("WRONG")
        assert point.over(CUDNN) == 0


def test_who_refuses_has_a_reason_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(backend: SDPBackend, causal: bool) -> Callable[..., torch.Tensor]:
        def call(*_: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("not on this machine")

        return call if backend == SDPBackend.CUDNN_ATTENTION else peer(backend, causal)

    monkeypatch.setattr(bench_record, "peer", refusing)
    point = measured(case_of("plain"), "backward")
    assert set(point.ms) == {OURS, FA2}
    assert point.missing == {CUDNN: "not on this machine"}
    assert point.over(CUDNN) is None


def test_a_run_ends_with_its_goals_and_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def few(wanted: Sequence[str], *, quick: bool) -> list[Case]:
        return [case_of("plain", ("forward",)), case_of("FP8", ("forward",))]

    monkeypatch.setattr(bench_record, "cases", few)
    monkeypatch.setattr(bench_record, "has_fp8", lambda: False)
    monkeypatch.setattr(
        "benchmarks.record.Point.over", lambda self, who, eager=False: 1.05
    )  # what a CPU's clock says is no matter
    path = tmp_path / "record.json"
    with pytest.raises(SystemExit) as stopped:
        bench_record.main(["forward", "fp8", "--rounds", "1", "--json", str(path)])
    assert stopped.value.code == 0  # no figure at N 16384, and D 16 has no goal
    said = capsys.readouterr().out
    assert "FP8 is not measured" in said
    assert "not measured" in said.split("goal")[-1]
    document = json.loads(path.read_text(encoding="utf-8"))
    assert [point["kind"] for point in document["points"]] == ["plain"]
    assert document["environment"]["device"] == "CPU"


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bench_record.main([])
    assert "nothing is measured" in capsys.readouterr().out
