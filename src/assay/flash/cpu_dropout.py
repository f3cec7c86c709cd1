"""Which probabilities dropout keeps: Philox4x32-10 in 64-bit integers, the same words on every device."""

from __future__ import annotations

import math

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
CHUNK = 1 << 17
"""Words computed at once by each thread, in 48 bytes each: torch's share of a pass is small then."""

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """The four 32-bit words of Philox4x32-10, held in int64; the counter's words may be of shapes that broadcast.

    Between rounds only the low half of a word counts, and the first rounds stay as small as the counter's shapes allow.
    """
    a, b, c, d = counter
    for first, second in _round_keys(key):
        # The products overflow int64, which wraps: all 64 bits are right, and the mask drops the copies of the sign.
        low, high = (a & _WORD) * _MULTIPLIERS[0], (c & _WORD) * _MULTIPLIERS[1]
        a, b, c, d = (high >> 32) ^ (b ^ first), high, (low >> 32) ^ (d ^ second), low
    return a & _WORD, b & _WORD, c & _WORD, d & _WORD


class Dropout:
    """Masks of one seed, in buffers that are taken again: fresh memory would take longer than the arithmetic."""

    def __init__(self, seed: torch.Tensor, share: float) -> None:
        self.threshold, self.size = int(share * 2**32), CHUNK * torch.get_num_threads()
        self.keys = _round_keys(_halves(seed))
        # The words are (a, c) and (c, a) in turns: a round makes a of c's product, and c of a's.
        self.multipliers = [_pair(*_MULTIPLIERS[:: 1 if turn % 2 else -1]) for turn in range(_ROUNDS)]
        self.pairs = [_pair(*pair[:: -1 if turn % 2 else 1]) for turn, pair in enumerate(self.keys)]
        # A Python number is made a tensor every time.
        self.word, self.half = (torch.tensor(x, device="cpu") for x in (_WORD, 32))
        self.buffers: list[torch.Tensor] = []

    def kept(self, heads: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """(*heads, rows, keys) bool: True where the probability stays.

        `heads` is batch · (query heads) + head, of any shape; `rows` and `keys` count within their sequence. An
        element's word is the first of `philox` for the counter (key, row, head, 0).
        """
        mask = torch.empty(heads.numel(), len(rows), len(keys), dtype=torch.bool, device="cpu")
        if mask.numel():
            of_head = len(rows) * len(keys)
            some, few = max(1, self.size // of_head), max(1, self.size // len(keys))
            for numbers, of_heads in zip(heads.flatten().split(some), mask.split(some), strict=True):
                for places, out in zip(rows.split(few), of_heads.split(few, 1), strict=True):
                    word = self._first_word(numbers[:, None, None], places[:, None], keys)
                    torch.ge(word, self.threshold, out=out)
        return mask.view(*heads.shape, *mask.shape[1:])

    def _first_word(self, heads: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """The first word of `philox` for the counters (keys, rows, heads, 0).

        Three rounds are mostly of lists: until then a word of key and row is but the xor of one of each. From there on
        the words a and c stand side by side, and so do their products, of which b and d are the ones before: a round
        is six passes over memory. The last two leave out what the first word does not need.
        """
        words, products, before = self._room(len(heads), len(rows), len(keys))
        self._three_rounds(heads, rows, keys, words, before)
        for turn in range(3, _ROUNDS - 2):
            torch.mul(words, self.multipliers[turn], out=products)
            torch.bitwise_right_shift(products, self.half, out=words)
            words[0].bitwise_xor_(before[1])
            words[1].bitwise_xor_(before[0])
            words.bitwise_xor_(self.pairs[turn]).bitwise_and_(self.word)
            products, before = before, products
        (c, a), d = words, before[0]
        b, low = torch.mul(c, _MULTIPLIERS[1], out=products[0]), a.mul_(_MULTIPLIERS[0])
        c = low.bitwise_right_shift_(32).bitwise_xor_(d).bitwise_xor_(self.keys[-2][1]).bitwise_and_(_WORD)
        high = c.mul_(_MULTIPLIERS[1]).bitwise_right_shift_(32)
        first: torch.Tensor = high.bitwise_xor_(b).bitwise_xor_(self.keys[-1][0]).bitwise_and_(_WORD)
        return first

    def _three_rounds(
        self, heads: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, words: torch.Tensor, before: torch.Tensor
    ) -> None:
        """Leaves (a, c) in `words` and (b, d) in `before`."""
        low, high = keys * _MULTIPLIERS[0], heads * _MULTIPLIERS[1]
        a, b = _upper(high) ^ rows ^ self.keys[0][0], high  # of head and row, of head
        c, d = _upper(low) ^ self.keys[0][1], low  # both of key
        low, high = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b = _upper(high) ^ (b & _WORD) ^ self.keys[1][0], high  # of head and key, of key
        of_row, of_key, d = _upper(low) ^ self.keys[1][1], d & _WORD, low  # c is the xor of two; d of head and row
        low = a * _MULTIPLIERS[0]
        high = torch.bitwise_xor(of_row, of_key, out=before[0]).mul_(_MULTIPLIERS[1])
        torch.bitwise_right_shift(high, self.half, out=words[0])
        words[0].bitwise_xor_(b ^ self.keys[2][0]).bitwise_and_(self.word)
        torch.bitwise_xor(_upper(low), d & _WORD ^ self.keys[2][1], out=words[1])
        before[1] = low

    def _room(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Three pairs of that shape."""
        size = 2 * math.prod(shape)
        if not self.buffers or len(self.buffers[0]) < size:
            self.buffers = [torch.empty(size, dtype=torch.int64, device="cpu") for _ in range(3)]
        first, second, third = (buffer[:size].view(2, *shape) for buffer in self.buffers)
        return first, second, third


def _pair(first: int, second: int) -> torch.Tensor:
    return torch.tensor((first, second), device="cpu").view(2, 1, 1, 1)


def _upper(product: torch.Tensor) -> torch.Tensor:
    return product >> 32 & _WORD


def _round_keys(key: tuple[int, int]) -> list[tuple[int, int]]:
    return [(key[0] + turn * _KEY_STEPS[0] & _WORD, key[1] + turn * _KEY_STEPS[1] & _WORD) for turn in range(_ROUNDS)]


def _halves(seed: torch.Tensor) -> tuple[int, int]:
    value = int(seed)
    return value & _WORD, value >> 32 & _WORD
