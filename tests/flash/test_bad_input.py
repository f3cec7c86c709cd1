"""What `flash_attention` and the SDPA drop-in refuse, before anything is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from assay import flash_attention, scaled_dot_product_attention
from assay.flash.compat import flash_attn_with_kvcache
from assay.flash.numerics import Numerics
from assay.flash.rotary import Rotary
from tests.flash.inputs import CU, draw, qkv

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "three dimensions": ({"q": draw(4, 20, 16)}, "must have the shape"),
    "not a tensor": ({"k": [1.0]}, "k must be a torch tensor, got list"),
    "sparse": ({"q": draw(2, 4, 20, 16).to_sparse()}, "q must be a dense tensor, got torch.sparse_coo"),
    "causal in words": ({"causal": "no"}, "causal must be True or False, got 'no'"),
    "causal in a tensor": ({"causal": torch.tensor([True, False])}, "causal must be True or False"),
    "LSE in words": ({"return_lse": "no"}, "return_lse must be True or False, got 'no'"),
    "deterministic in words": ({"deterministic": "no"}, "deterministic must be True or False"),
    "invariance of None": ({"batch_invariant": None}, "batch_invariant must be True or False"),
    "TF32 in numbers": ({"allow_tf32": 3}, "allow_tf32 must be True or False, got 3"),
    "dropout of None": ({"dropout_p": None}, "dropout_p must be a number"),
    "integers": ({"q": draw(2, 4, 20, 16).int()}, "bfloat16, float16 or float32"),
    "two dtypes": ({"v": draw(2, 4, 20, 16).bfloat16()}, "one dtype"),
    "another device": ({"k": torch.empty(2, 4, 20, 16, device="meta")}, "one device"),
    "other device alone": ({x: torch.empty(2, 4, 20, 16, device="meta") for x in "qkv"}, "runs on cpu and cuda"),
    "head dimension over 256": ({x: draw(2, 4, 20, 257) for x in "qkv"}, "1 to 256, got 257"),
    "head dimensions differ": ({"k": draw(2, 4, 20, 8)}, "one head dimension"),
    "lengths of k and v": ({"v": draw(2, 4, 19, 16)}, "same batch, heads and length"),
    "batches": ({"k": draw(3, 4, 20, 16), "v": draw(3, 4, 20, 16)}, "one batch size, got 2 and 3"),
    "heads that do not divide": ({"k": draw(2, 3, 20, 16), "v": draw(2, 3, 20, 16)}, "multiple of those of k and v"),
    "negative window": ({"window": (-1, 0)}, "at least 0"),
    "window of one side": ({"window": 5}, r"\(left, right\)"),
    "window of halves": ({"window": (1.5, None)}, "whole numbers"),
    "scale of NaN": ({"scale": float("nan")}, "scale must be a number"),
    "scale in words": ({"scale": "big"}, "scale must be a number"),
    "infinite scale": ({"scale": float("inf")}, "scale must be a number"),
    "scale of minus infinity": ({"scale": -float("inf")}, "scale must be a number, finite"),
    "a seed of half a number": ({"dropout_p": 0.5, "dropout_seed": 1.5}, "whole number of 64 bits"),
    "a seed too large": ({"dropout_p": 0.5, "dropout_seed": 2**63}, "whole number of 64 bits"),
    "negative softcap": ({"softcap": -1.0}, "softcap must be a number"),
    "dropout of 1": ({"dropout_p": 1.0}, "dropout_p must be a number"),
    "slopes of another shape": ({"alibi_slopes": torch.ones(3)}, r"\(heads,\) = \(4,\)"),
    "slopes with a gradient": ({"alibi_slopes": torch.ones(4, requires_grad=True)}, "no gradient"),
    "sinks of another shape": ({"sinks": torch.ones(2, 4)}, r"sinks must be float of shape \(heads,\)"),
    "bias of another shape": ({"bias": draw(19, 20)}, "must broadcast"),
    "bias of integers": ({"bias": torch.ones(20, 20, dtype=torch.int32)}, "float .* or bool"),
    "bias in 8 bits": ({"bias": draw(20, 20).to(torch.float8_e4m3fn)}, "float .* or bool"),
    "sparse bias": ({"bias": draw(20, 20).to_sparse()}, "bias must be a dense tensor, got torch.sparse_coo"),
    "bias of five dimensions": ({"bias": torch.ones(1, 1, 1, 20, 20)}, "must broadcast"),
    "bias on another device": ({"bias": torch.ones(20, 20, device="meta")}, "device of q"),
    "invariance and dropout": ({"batch_invariant": True, "dropout_p": 0.1}, "what is dropped depends on a sequence's"),
    "bias and packing": ({"bias": draw(20, 20), "cu_seqlens_q": CU}, "exclude each other"),
    "packing and a batch": ({"cu_seqlens_q": CU}, "batch of 1"),
    "only keys packed": ({"cu_seqlens_k": CU}, "needs cu_seqlens_q"),
    "rotary that is a tuple": ({"rotary": (draw(20, 8), draw(20, 8))}, "must be a Rotary"),
    "rotary in words": ({"rotary": Rotary(draw(20, 8), draw(20, 8), "no")}, "interleaved must be True or False"),  # type: ignore[arg-type]
    "rotary too short": ({"rotary": Rotary(draw(19, 8), draw(19, 8))}, "19"),
    "knobs on the CPU": ({"numerics": Numerics(row_sum="bf16")}, "tiled_attention"),
    "a seed of two numbers": ({"dropout_p": 0.5, "dropout_seed": torch.tensor([1, 2])}, "one int64"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    changes, message = BAD[name]
    given = dict(zip("qkv", qkv(), strict=True)) | changes
    with pytest.raises(ValueError, match=message):
        flash_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


@pytest.mark.parametrize(
    ("cu", "message"),
    [
        ([0, 7, 5, 20], "entry 2 is 5, after 7"),
        ([0, 5, 21], "ends with 21"),
        ([0, 5, 19], "ends with 19"),
        ([1, 5, 20], "begins with 1"),
        ([20], r"\(sequences \+ 1,\)"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bad_packing(cu: list[int], message: str, dtype: torch.dtype) -> None:
    q, k, v = (x[:1] for x in qkv())
    with pytest.raises(ValueError, match=message):
        flash_attention(q, k, v, cu_seqlens_q=torch.tensor(cu, dtype=dtype))


@pytest.mark.parametrize(
    "cu", [[0, 2**32 + 4, 20], [0, 4, 2**32 + 20], [0, 2**32, 20], [2**32, 4, 20], [0, -(2**32), 20]]
)
def test_numbers_that_int32_does_not_hold(cu: list[int]) -> None:
    """They would come back as others: 2³² + 4 as 4."""
    q, k, v = (x[:1] for x in qkv())
    with pytest.raises(ValueError, match="cu_seqlens_q must begin with 0, never fall, and end with"):
        flash_attention(q, k, v, cu_seqlens_q=torch.tensor(cu))
    cache = torch.zeros(2, 30, 4, 16)
    lengths = torch.tensor([5, max(cu, key=abs)])
    with pytest.raises(ValueError, match="cache_seqlens must be 0 to"):
        flash_attn_with_kvcache(
            cache[:, :1], cache, cache, k=cache[:, :1] + 1, v=cache[:, :1] + 1, cache_seqlens=lengths
        )
    assert not cache.any()


@pytest.mark.parametrize("view", [lambda cu: cu, lambda cu: cu.data, lambda cu: cu.numpy()], ids=["", "data", "numpy"])
def test_packing_is_checked_again_when_it_changes(view: Callable[[torch.Tensor], Any]) -> None:
    """Also through views that leave the tensor's version as it is."""
    q, k, v = (x[:1] for x in qkv())
    cu = CU.clone()
    flash_attention(q, k, v, cu_seqlens_q=cu)
    view(cu)[1] = 30
    with pytest.raises(ValueError, match="entry 2 is 20, after 30"):
        flash_attention(q, k, v, cu_seqlens_q=cu)


FIVE = draw(2, 3, 4, 20, 16)
BAD_DROP_IN: dict[str, tuple[dict[str, Any], str]] = {
    "a list": ({"query": [1.0]}, "query must be a torch tensor, got list"),
    "no value": ({"value": None}, "value must be a torch tensor, got NoneType"),
    "sparse": ({"key": draw(2, 4, 20, 16).to_sparse()}, "key must be a dense tensor, got torch.sparse_coo"),
    "leading dimensions": (
        {"query": draw(3, 4, 20, 16)},
        r"broadcast, got the shapes \(3, 4, 20, 16\), \(2, 4, 20, 16\)",
    ),
    "a mask in a list": ({"attn_mask": [[True]]}, "attn_mask must be a torch tensor, got list"),
    "a mask of another shape": ({"attn_mask": draw(19, 20)}, "attn_mask must broadcast"),
    "a mask of other leading dimensions": (
        {"query": FIVE, "key": FIVE, "value": FIVE, "attn_mask": draw(2, 5, 1, 20, 20)},
        r"leading dimensions \(2, 3\), got \(2, 5, 1, 20, 20\)",
    ),
    "causal in words": ({"is_causal": "no"}, "is_causal must be True or False, got 'no'"),
    "groups in words": ({"enable_gqa": "no"}, "enable_gqa must be True or False"),
    "dropout of None": ({"dropout_p": None}, "dropout_p must be a number"),
    "dropout over 1": ({"dropout_p": 1.5}, "dropout_p must be a number"),
}


@pytest.mark.parametrize("name", BAD_DROP_IN)
def test_bad_input_of_the_drop_in(name: str) -> None:
    changes, message = BAD_DROP_IN[name]
    given = dict(zip(("query", "key", "value"), qkv(), strict=True)) | changes
    with pytest.raises(ValueError, match=message):
        scaled_dot_product_attention(**given)


def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([draw(5, 4, 16), draw(6, 4, 16)], layout=torch.jagged).transpose(1, 2)
    for call in (flash_attention, scaled_dot_product_attention):
        with pytest.raises(ValueError, match="must be a dense tensor, got a nested tensor"):
            call(nested, nested, nested)


@pytest.mark.parametrize(
    "change",
    [{"row_sum": "fp8"}, {"probabilities": 16}, {"block": (64, 65)}, {"block": (8, 64)}, {"reverse_keys": 1}],
    ids=str,
)
def test_bad_numerics(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"Numerics: {next(iter(change))} must be"):
        Numerics(**change)
