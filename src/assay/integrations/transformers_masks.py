"""The masks of transformers, in the cheapest form that is right.

None where `causal` alone says which keys are seen; where a window and padding say the rest, a `PositionMask`, whose
memory grows with the keys and not with queries times keys; the boolean mask of transformers' own `sdpa_mask` for
everything else: packed, chunked and custom patterns, a static cache that is no longer empty, and all that is traced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

from assay.integrations.position_mask import PositionMask, Rule


def mask(**given: Any) -> Tensor | None:
    """What transformers asks for before its layers run; its `AttentionMaskInterface` documents the arguments."""
    padding = given.get("attention_mask")
    if padding is not None and (not isinstance(padding, Tensor) or padding.dim() != 2):
        got = tuple(padding.shape) if isinstance(padding, Tensor) else type(padding).__name__
        raise ValueError(
            "attention_mask must be (batch, keys), 1 for tokens and 0 for padding, or a whole mask "
            f"(batch, heads or 1, queries, keys); got {got}."
        )
    rule = _rule(given)
    if rule is not None:
        start, keys = given.get("kv_offset", 0), given["kv_length"]
        after = given.get("q_offset", 0) - start + given["q_length"]  # the key after the last query's own
        filled = after if rule.causal else keys
        if filled <= keys and (rule.window is None or filled == after):
            if padding is None:
                tokens = torch.ones(1, filled, dtype=torch.bool, device=given.get("device", "cpu"))
            else:
                tokens = padding[:, start : start + filled].bool()
                tokens = pad(tokens, (0, filled - tokens.shape[1]))
                rule = rule._replace(padded=not tokens.all())
            return _shortest(rule, tokens, (given["batch_size"], 1, given["q_length"], keys))
    made: Tensor | None = masking_utils.sdpa_mask(**given)
    return made


def _rule(given: dict[str, Any]) -> Rule | None:
    """The rule, if the caller lets us leave the mask away, and gives positions as numbers that we may look at.

    A static cache that was used gives a tensor as `q_offset`, and transformers before 5.4 a tensor `cache_position`.
    """
    numbers = isinstance(given.get("q_length"), int) and isinstance(given.get("q_offset", 0), int)
    if not numbers or is_tracing(given.get("attention_mask")):
        return None
    rule = _behind(given["mask_function"])
    if rule is None:
        return None
    skip, default = ("allow_is_causal_skip", True) if rule.causal else ("allow_is_bidirectional_skip", False)
    return rule if given.get(skip, default) else None


def _behind(function: Callable[..., Any]) -> Rule | None:
    """The rule behind a mask function of transformers; None for any that is not one of its four plain ones."""
    parts = _made_with(function, "and_masks.<locals>.and_mask", "mask_functions") or (function,)
    if parts[-1] not in (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function):
        return None
    causal = parts[-1] is masking_utils.causal_mask_function
    if len(parts) == 1:
        return Rule(causal, None)
    overlay = "sliding_window_overlay" if causal else "sliding_window_bidirectional_overlay"
    size = _made_with(parts[0], f"{overlay}.<locals>.inner_mask", "sliding_window")
    if len(parts) > 2 or not isinstance(size, int):
        return None
    return Rule(causal, (size - 1, 0) if causal else (size, size))


def _made_with(function: Callable[..., Any], name: str, variable: str) -> Any:
    """The variable that a function of this name keeps from the one that made it; None for another function."""
    if getattr(function, "__qualname__", "") != name:
        return None
    return inspect.getclosurevars(function).nonlocals.get(variable)


def _shortest(rule: Rule, tokens: Tensor, shape: tuple[int, int, int, int]) -> PositionMask | None:
    """None if nothing but `causal`, or nothing at all, is left to say."""
    queries, keys = shape[2:]
    filled = tokens.shape[1]
    if rule.window is not None and max(rule.window) >= filled - 1:
        rule = rule._replace(window=None)
    if rule.window is None and not rule.padded:
        last_only = queries == 1 and filled == keys
        if not rule.causal or queries == filled or last_only:
            return None
    return PositionMask(shape, rule, tokens)
