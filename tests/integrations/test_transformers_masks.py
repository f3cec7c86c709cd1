"""Our masks against transformers' own, written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
from transformers import masking_utils  # noqa: E402

from assay.integrations.position_mask import PositionMask, Rule  # noqa: E402
from assay.integrations.transformers_attention import attention  # noqa: E402
from assay.integrations.transformers_masks import mask  # noqa: E402

FUNCTIONS = {
    "causal": masking_utils.causal_mask_function,
    "sliding": masking_utils.sliding_window_causal_mask_function(4),
    "bidirectional": masking_utils.bidirectional_mask_function,
    "bidirectional sliding": masking_utils.sliding_window_bidirectional_mask_function(2),
}
# Queries, keys, the first query's and the first key's position.
PLACES = {
    "a prompt": (9, 9, 0, 0),
    "one query": (1, 9, 8, 0),
    "behind a cache": (4, 9, 5, 0),
    "a static cache's room": (5, 12, 0, 0),
    "a static cache, partly full": (3, 12, 4, 0),
    "a window's cache": (3, 6, 10, 7),
}


def request(kind: str, place: str, padding: Tensor | None) -> dict[str, Any]:
    queries, keys, first_query, first_key = PLACES[place]
    skip = "allow_is_bidirectional_skip" if kind.startswith("bidirectional") else "allow_is_causal_skip"
    given = {"batch_size": 2, "q_length": queries, "kv_length": keys, "q_offset": first_query, "kv_offset": first_key}
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False} | {skip: True}
    local = {"local_size": 4 if kind == "sliding" else 2} if kind.endswith("sliding") else {}
    return given | skips | local | {"mask_function": FUNCTIONS[kind], "attention_mask": padding, "device": "cpu"}


def written(given: dict[str, Any]) -> Tensor:
    """transformers' own mask, never left away."""
    never = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return masking_utils.sdpa_mask(**(given | never))  # type: ignore[return-value]


def seen_without_mask(given: dict[str, Any], causal: bool) -> Tensor:
    """What our attention makes of None: see `transformers_attention`."""
    seen = torch.ones(2, 1, given["q_length"], given["kv_length"], dtype=torch.bool)
    return seen.tril() if causal and given["q_length"] > 1 else seen


@pytest.mark.parametrize("side", ["none", "whole", "left", "right", "short"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_says_what_transformers_says(kind: str, place: str, side: str) -> None:
    queries, keys, first_query, first_key = PLACES[place]
    padding = None if side == "none" else torch.ones(2, first_key + keys, dtype=torch.bool)
    if padding is not None and side == "left":
        padding[0, : first_key + 2] = False
    elif padding is not None and side == "right":
        padding[1, first_query + queries - 2 :] = False
    elif padding is not None and side == "short":  # as while a static cache is being filled
        padding = padding[:, : first_query + queries]
    given = request(kind, place, padding)
    made, expected = mask(**given), written(given)
    if made is None:
        assert torch.equal(seen_without_mask(given, not kind.startswith("bidirectional")), expected)
    else:
        assert made.shape == expected.shape
        assert torch.equal(made & True, expected)


@pytest.mark.parametrize("kind", ["sliding", "bidirectional sliding"])
def test_windows_take_no_quadratic_memory(kind: str) -> None:
    """A rule and one byte a key: the boolean mask would take 10 GB."""
    given = request(kind, "a prompt", None) | {"q_length": 100_000, "kv_length": 100_000, "batch_size": 1}
    made = mask(**given)
    assert isinstance(made, PositionMask)
    assert made.rule == Rule(kind == "sliding", (3, 0) if kind == "sliding" else (2, 2))
    assert made.tokens.numel() == 100_000


def test_padding_takes_no_quadratic_memory() -> None:
    padding = torch.ones(2, 70_000, dtype=torch.bool)
    padding[0, :10] = False
    made = mask(**request("causal", "a prompt", padding) | {"q_length": 70_000, "kv_length": 70_000})
    assert isinstance(made, PositionMask)
    assert made.rule == Rule(True, None, padded=True)
    assert torch.equal(made.tokens, padding)


def test_nothing_where_causal_says_it() -> None:
    """Also a window that no key is outside of, as in decoding from a window's own cache."""
    for kind, place in [("causal", "a prompt"), ("causal", "one query"), ("causal", "a static cache's room")]:
        assert mask(**request(kind, place, torch.ones(2, 12, dtype=torch.bool))) is None
    assert mask(**request("bidirectional", "a prompt", None)) is None
    assert mask(**request("sliding", "a prompt", None) | {"q_length": 1, "kv_length": 4, "q_offset": 3}) is None


@pytest.mark.parametrize("kind", ["chunked", "packed", "custom"])
def test_other_patterns_are_written_out(kind: str) -> None:
    causal = masking_utils.causal_mask_function
    functions: dict[str, Any] = {
        "chunked": masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)),
        "packed": masking_utils.and_masks(causal, masking_utils.packed_sequence_mask_function(torch.ones(2, 9))),
        "custom": lambda batch, head, query, key: (key + query) % 3 > 0,
    }
    given = request("causal", "a prompt", None) | {"mask_function": functions[kind], "local_size": 4}
    made = mask(**given)
    assert type(made) is Tensor
    assert torch.equal(made, written(given))


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_written_out_for_who_asks_for_it(kind: str) -> None:
    given = request(kind, "a prompt", None) | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    made = mask(**given)
    assert type(made) is Tensor
    assert torch.equal(made, written(given))


def test_is_a_tensor_to_everybody_else() -> None:
    """Indexed, joined, inverted, cast, printed, changed: as if it had been written out."""
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[0, 0] = False
    given = request("sliding", "a prompt", padding)
    made, plain = mask(**given), written(given).clone()
    assert isinstance(made, PositionMask)
    assert (made.shape, made.dtype, made.device, made.dim()) == (plain.shape, plain.dtype, plain.device, 4)
    assert made.written is None
    assert torch.equal(made[:, :, -3:, :4], plain[:, :, -3:, :4])
    assert torch.equal(torch.cat([made, plain], -1), torch.cat([plain, plain], -1))
    assert torch.equal(torch.where(~made, 1.0, 0.0), torch.where(~plain, 1.0, 0.0))
    assert torch.equal(made.to(torch.float32), plain.to(torch.float32))
    assert "True" in repr(made)
    made[:, :, 0, 5] = plain[:, :, 0, 5] = True
    made.logical_not_()
    assert torch.equal(made.clone(), ~plain)
    q = torch.randn(2, 1, 9, 8, generator=torch.Generator().manual_seed(0))
    actual, _ = attention(torch.nn.Identity(), q, q, q, made)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, ~plain).transpose(1, 2)
    torch.testing.assert_close(actual, expected)  # the changed mask, not the rule
    names, rule = made.__tensor_flatten__()  # what a compiler does with it
    again = PositionMask.__tensor_unflatten__({name: getattr(made, name) for name in names}, rule, made.shape, None)
    assert torch.equal(again.write(), ~plain)


@pytest.mark.parametrize("unknown", [torch.ones(2, 9, 9), [[1, 1]]])
def test_a_padding_mask_of_another_kind(unknown: Any) -> None:
    with pytest.raises(ValueError, match=r"attention_mask must be \(batch, keys\).*got"):
        mask(**request("causal", "a prompt", unknown))
