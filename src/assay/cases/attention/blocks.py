"""Block sizes: given, or from the size of the fast memory as the Flash Attention paper has them."""

from __future__ import annotations

Block = tuple[int, int]
"""(rows, columns): queries and keys of one tile."""


def block_from_sram(elements: int, head_dim: int) -> Block:
    """B_c = ⌈M/4d⌉ columns and B_r = min(⌈M/4d⌉, d) rows, for M elements of fast memory."""
    if not all(isinstance(size, int) and size >= 1 for size in (elements, head_dim)):
        raise ValueError(f"SRAM size and head dimension must be at least 1 element, got {elements} and {head_dim}.")
    columns = -(-elements // (4 * head_dim))
    return min(columns, head_dim), columns


def swapped(block: Block) -> Block:
    """Rows and columns exchanged."""
    check_block(block)
    return block[1], block[0]


def square(block: Block) -> Block:
    """The largest square block of at most the same area."""
    check_block(block)
    side = int((block[0] * block[1]) ** 0.5)
    while (side + 1) ** 2 <= block[0] * block[1]:
        side += 1
    return side, side


def check_block(block: Block) -> Block:
    """Both sides whole numbers of at least 1."""
    if not isinstance(block, tuple) or len(block) != 2:
        raise ValueError(f"block must be (rows, columns), got {block!r}. For example block=(64, 64).")
    if not all(isinstance(side, int) and not isinstance(side, bool) and side >= 1 for side in block):
        raise ValueError(f"block sizes must be whole numbers of at least 1, got {block!r}.")
    return block
