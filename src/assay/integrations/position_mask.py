"""A mask kept as the rule that it follows, which takes no memory for each pair of query and key."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only


class Rule(NamedTuple):
    """Which keys a query sees. The last query stands beside the last filled key, as in `flash_attention`."""

    causal: bool
    window: tuple[int, int] | None
    padded: bool = False
    """Whether some of the filled keys are padding, which nobody sees."""


class PositionMask(Tensor):
    """The boolean mask (batch, 1, queries, keys), True where seen, kept as the rule that it follows.

    Our attention reads the rule. The first time anybody else computes with it, it is written out: from then on it is
    that ordinary tensor, changes included.
    """

    rule: Rule
    tokens: Tensor
    """(batch or 1, filled keys), False for padding. Keys after these are of a cache that has room left."""
    written: Tensor | None

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], rule: Rule, tokens: Tensor, written: Tensor | None = None) -> PositionMask:
        """A tensor with no memory but `tokens`."""
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=tokens.device)
        mask.rule, mask.tokens, mask.written = rule, tokens, written
        return mask

    def write(self) -> Tensor:
        """The ordinary boolean mask, the same at every call."""
        if self.written is None:
            self.written = self._write()
        return self.written

    def _write(self) -> Tensor:
        queries, keys = self.shape[2:]
        filled = self.tokens.shape[1]
        place = torch.arange(filled - queries, filled, device=self.device)[:, None]
        key = torch.arange(keys, device=self.device)
        seen = pad(self.tokens, (0, keys - filled))[:, None, None, :]
        if self.rule.causal:
            seen = seen & (key <= place)
        if self.rule.window is not None:
            left, right = self.rule.window
            seen = seen & (key >= place - left) & (key <= place + right)
        return seen.expand(self.shape).contiguous()

    def __tensor_flatten__(self) -> tuple[list[str], Rule]:
        return ["tokens"] if self.written is None else ["tokens", "written"], self.rule

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], rule: Rule, size: Any, stride: Any) -> PositionMask:
        return PositionMask(size, rule, inner["tokens"], inner.get("written"))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(cls, cls.write, (args, kwargs or {}))
        return func(*args, **kwargs)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
