"""Which probabilities dropout keeps: Philox4x32-10 in 64-bit integers, the same words on every device."""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def kept(
    seed: torch.Tensor, heads: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, dropout: float
) -> torch.Tensor:
    """(*heads, rows, keys) bool: True where the probability stays.

    `heads` is batch · (query heads) + head, of any shape; `rows` and `keys` count within their sequence.
    """
    heads, rows = heads[..., None, None], rows[:, None]
    word = philox((keys, rows, heads, torch.zeros_like(keys)), _halves(seed))[0]
    return word >= int(dropout * 2**32)


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """The four 32-bit words of Philox4x32-10, held in int64; the counter's words may be of shapes that broadcast.

    Between rounds only the low half of a word counts, and the first rounds stay as small as the counter's shapes allow.
    """
    a, b, c, d = counter
    for turn in range(10):
        first, second = (key[i] + turn * _KEY_STEPS[i] & _WORD for i in (0, 1))
        # The products overflow int64, which wraps: all 64 bits are right, and the mask drops the copies of the sign.
        low, high = (a & _WORD) * _MULTIPLIERS[0], (c & _WORD) * _MULTIPLIERS[1]
        a, b, c, d = (high >> 32) ^ (b ^ first), high, (low >> 32) ^ (d ^ second), low
    return a & _WORD, b & _WORD, c & _WORD, d & _WORD


def _halves(seed: torch.Tensor) -> tuple[int, int]:
    value = int(seed)
    return value & _WORD, value >> 32 & _WORD
