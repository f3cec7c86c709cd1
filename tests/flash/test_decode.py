"""Decoding from a cache: on the CPU, by interpreted kernels, and where there is a GPU by compiled ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from assay.flash.decode import attention_with_cache
from tests.interpreter import interpret

from .decode_cases import CASES, IN_FP32, Case, Drawn, check, check_invariance

LARGE = Case(lengths=(8192, 1, 0, 5000), capacity=8192, heads=(32, 8), dims=(128, 128))
ON_GPU = {
    "one query": LARGE,
    "one split": replace(LARGE, splits=1),
    "three queries": replace(LARGE, queries=3),
    "sixteen queries": replace(LARGE, queries=16),
    "twenty queries, group 8": replace(LARGE, queries=20, heads=(32, 4)),
    "group 1": replace(LARGE, heads=(8, 8)),
    "more splits than blocks": replace(LARGE, splits=150),
    "one length": replace(LARGE, lengths=6001, batch=4),
    "transposed": replace(LARGE, layout="transposed", queries=2),
    "pages of 16": replace(LARGE, page=16),
    "pages of 64": replace(LARGE, page=64, queries=3),
    "pages of 256": replace(LARGE, page=256),
    "pages of 13": replace(LARGE, page=13),
    "window": replace(LARGE, window=(1000, 0), queries=2),
    "softcap": replace(LARGE, softcap=5.0),
    "alibi": replace(LARGE, alibi=True, queries=2),
    "sinks": replace(LARGE, sinks=True),
    "dim 64": replace(LARGE, dims=(64, 64)),
    "dim 256": replace(LARGE, dims=(256, 256), page=64, queries=8),
    "dims 192 and 128": replace(LARGE, dims=(192, 128)),
}


@pytest.mark.parametrize("name", CASES)
def test_on_the_cpu(name: str) -> None:
    check(CASES[name], torch.float32)


def test_interpreted_kernels() -> None:
    interpret("tests.flash.interpreted_decode")


@pytest.mark.parametrize("page", [None, 64])
def test_a_batch_does_not_change_its_members(page: int | None) -> None:
    check_invariance(torch.float32, page=page, sinks=True)


def test_double_has_a_double_lse() -> None:
    drawn = Drawn(Case(queries=2), torch.float64)
    out, lse = attention_with_cache(**drawn.arguments(), return_lse=True)
    assert lse.dtype == torch.float64
    for x, truth in zip((out, lse), drawn.reference(torch.float64), strict=True):
        torch.testing.assert_close(x, truth, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["one query", "one length", "pages of 16", "everything"])
def test_operator(name: str) -> None:
    how = Drawn(CASES[name], torch.float32).arguments()
    given = how["lengths"]
    lengths, longest = (given, 200) if isinstance(given, torch.Tensor) else (None, given)
    left, right = how["window"] or (None, 0)
    tensors = [how[x] for x in ("q", "k_cache", "v_cache")] + [lengths, how["block_table"], how["alibi_slopes"]]
    rest = (how["sinks"], longest, 0.125, left, right, how["softcap"], how["splits"], False)
    torch.library.opcheck(torch.ops.assay.flash_decode.default, (*tensors, *rest))


def test_compiles_whole() -> None:
    how = Drawn(CASES["pages of 16"], torch.float32).arguments()
    compiled = torch.compile(attention_with_cache, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**how), attention_with_cache(**how))


def test_results_are_heads_last_in_memory() -> None:
    out = attention_with_cache(**Drawn(Case(queries=3), torch.float32).arguments())
    assert out.transpose(1, 2).is_contiguous()


def test_no_queries_and_no_sequences() -> None:
    how = Drawn(Case(lengths=5), torch.float32).arguments()
    assert attention_with_cache(**how | {"q": how["q"][:, :, :0]}).shape == (2, 2, 0, 64)
    none = {name: how[name][:0] for name in ("q", "k_cache", "v_cache")}
    assert attention_with_cache(**how | none).shape == (0, 2, 1, 64)


def test_softcap_0_is_none() -> None:
    how = Drawn(Case(), torch.float32).arguments()
    assert torch.equal(attention_with_cache(**how | {"softcap": 0}), attention_with_cache(**how))


def test_gradients_are_refused() -> None:
    how = Drawn(Case(sinks=True), torch.float32).arguments()
    for name in ("q", "k_cache", "sinks"):
        leaf = {name: how[name].clone().requires_grad_()}
        with pytest.raises(ValueError, match=r"Use flash_attention, or call it within torch.no_grad"):
            attention_with_cache(**how | leaf)
        with torch.no_grad():
            attention_with_cache(**how | leaf)


PLAIN, PAGED = Case(), Case(lengths=(70, 33), page=16)
BAD: dict[str, tuple[Case, dict[str, Any], str]] = {
    "lengths' dtype": (
        PLAIN,
        {"lengths": torch.zeros(4)},
        r"lengths must be int32 of shape .* = \(4,\), got torch.float",
    ),
    "lengths' shape": (PLAIN, {"lengths": torch.zeros(3).int()}, r"got torch.int32 \(3,\)"),
    "length too large": (PLAIN, {"lengths": 201}, "0 to the cache's capacity 200; got 201"),
    "length too small": (PLAIN, {"lengths": -1}, "0 to the cache's capacity 200; got -1"),
    "length a bool": (PLAIN, {"lengths": True}, "a whole number"),
    "values too large": (PLAIN, {"lengths": torch.tensor([1, 201, 2, 3]).int()}, "got 201 for sequence 1"),
    "values too small": (PLAIN, {"lengths": torch.tensor([1, 2, -3, 3]).int()}, "got -3 for sequence 2"),
    "table's dtype": (PAGED, {"block_table": torch.zeros(2, 5)}, "block_table must be int32 of shape .*torch.float32"),
    "table's batch": (PAGED, {"block_table": torch.zeros(3, 5).int()}, r"= \(2, …\), got torch.int32 \(3, 5\)"),
    "table too narrow": (PAGED, {"block_table": torch.zeros(2, 4).int()}, "capacity 64, got 70 for sequence 0"),
    "page too large": (
        PAGED,
        {"block_table": torch.full((2, 5), 11).int()},
        "pages 0 to 10 wherever a sequence has keys, got 11 for page 0 of sequence 0",
    ),
    "page too small": (
        PAGED,
        {"block_table": torch.tensor([[0, 1, 2, 3, 4], [0, 1, -1, -1, -1]]).int()},
        "got -1 for page 2 of sequence 1, which has 33 keys",
    ),
    "no pages": (PAGED, dict.fromkeys(("k_cache", "v_cache"), torch.zeros(0, 1, 16, 64)), "all at least 1"),
    "three dimensions": (PAGED, {"k_cache": torch.zeros(9, 16, 64)}, r"k_cache must be a tensor \(pages, KV heads"),
    "pages apart": (PAGED, {"k_cache": torch.zeros(12, 1, 16, 64)}, "the same pages, KV heads and page size"),
    "pages' dtype": (PAGED, {"q": torch.zeros(2, 2, 1, 64).half()}, "must have one dtype"),
    "batch": (PLAIN, {"q": torch.zeros(3, 2, 1, 64)}, "must have one batch size, got 3 and 4"),
    "heads": (Case(heads=(4, 2)), {"q": torch.zeros(4, 3, 1, 64)}, "must be a multiple"),
    "head dimension": (PLAIN, {"q": torch.zeros(4, 2, 1, 300)}, "head dimension must be 1 to 256"),
    "dtype": (PLAIN, {"q": torch.zeros(4, 2, 1, 64).int()}, "must be bfloat16, float16 or float32"),
    "scale": (PLAIN, {"scale": float("nan")}, "scale must be a number"),
    "softcap": (PLAIN, {"softcap": -1.0}, "softcap must be a number"),
    "window": (PLAIN, {"window": (-1, 0)}, "window's sides"),
    "slopes": (PLAIN, {"alibi_slopes": torch.zeros(3)}, "alibi_slopes must be float of shape"),
    "sinks": (PLAIN, {"sinks": torch.zeros(3)}, "sinks must be float of shape"),
    "splits": (PLAIN, {"splits": 0}, "splits must be a whole number of at least 1"),
    "splits, invariant": (PLAIN, {"splits": 2, "batch_invariant": True}, "exclude each other"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_inputs(name: str) -> None:
    case, change, message = BAD[name]
    how = Drawn(case, torch.float32).arguments()
    with pytest.raises(ValueError, match=message):
        attention_with_cache(**how | change)


def test_values_are_checked_again_when_they_change() -> None:
    how = Drawn(PAGED, torch.float32).arguments()
    lengths, table = how["lengths"], how["block_table"]
    attention_with_cache(**how)
    attention_with_cache(**how)
    lengths[1] = 60  # its last page is not there
    with pytest.raises(ValueError, match="got -1 for page 3 of sequence 1, which has 60 keys"):
        attention_with_cache(**how)
    table[1, 3] = 0
    attention_with_cache(**how)
    lengths[0] = 999
    with pytest.raises(ValueError, match="got 999 for sequence 0"):
        attention_with_cache(**how)


def test_values_are_checked_in_inference_mode() -> None:
    with torch.inference_mode():
        how = Drawn(PAGED, torch.float32).arguments()
        attention_with_cache(**how)
        how["lengths"][0] = 999
        with pytest.raises(ValueError, match="got 999 for sequence 0"):
            attention_with_cache(**how)


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("name", ON_GPU)
def test_on_the_gpu(name: str) -> None:
    check(ON_GPU[name], torch.bfloat16, "cuda")


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("name", CASES)
def test_small_cases_on_the_gpu(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float32) if name in IN_FP32 else (torch.bfloat16,):
        check(CASES[name], dtype, "cuda")


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("name", ON_GPU)
def test_calls_that_repeat_have_the_same_bits_on_the_gpu(name: str) -> None:
    """Launched again, on other memory, with other numbers: as if for the first time."""
    from assay.flash import replay

    first, second = (Drawn(ON_GPU[name], torch.bfloat16, "cuda", seed).arguments() for seed in (0, 1))
    for how in (first, first):
        attention_with_cache(**how)
    again = attention_with_cache(**second, return_lse=True)
    replay.forget()
    for x, y in zip(attention_with_cache(**second, return_lse=True), again, strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("features", [{}, {"page": 64, "sinks": True}, {"page": 13, "window": (3000, 0), "queries": 3}])
def test_a_batch_does_not_change_its_members_on_the_gpu(features: dict[str, Any]) -> None:
    check_invariance(torch.bfloat16, "cuda", capacity=8192, heads=(32, 8), dims=(128, 128), **features)


@pytest.mark.gpu
@NEEDS_GPU
def test_a_graph_is_replayed_with_other_lengths() -> None:
    how = Drawn(replace(LARGE, lengths=(8192, 8192, 8192, 8192), page=64), torch.bfloat16, "cuda").arguments()
    attention_with_cache(**how)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attention_with_cache(**how, return_lse=True)
    for lengths in ([8192, 1, 0, 77], [5, 4000, 8000, 8191]):
        how["lengths"].copy_(torch.tensor(lengths))
        graph.replay()
        expected = attention_with_cache(**how, return_lse=True)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_host_waits_for_the_gpu_once() -> None:
    how = Drawn(replace(LARGE, page=64), torch.bfloat16, "cuda").arguments()
    attention_with_cache(**how)
    try:
        torch.cuda.set_sync_debug_mode("error")
        attention_with_cache(**how)
    finally:
        torch.cuda.set_sync_debug_mode("default")
