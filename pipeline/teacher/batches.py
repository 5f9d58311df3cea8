"""Which items go into one call. Order is kept: a batch is always a prefix of what waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def take_batch(
    items: Sequence[Item],
    *,
    rows: Callable[[Item], int],
    tokens: Callable[[Item], int],
    max_rows: int,
    max_tokens: int,
    replicas: int = 1,
) -> list[Item]:
    """The longest prefix within both caps, at least one item (an item above a cap goes alone).

    replicas: how many are idle; each gets about an equal share of the rows instead of the first getting all.
    """
    share = -(-sum(rows(item) for item in items) // replicas)
    batch: list[Item] = []
    taken_rows = taken_tokens = 0
    for item in items:
        taken_rows += rows(item)
        taken_tokens += tokens(item)
        if batch and (taken_rows > min(max_rows, share) or taken_tokens > max_tokens):
            break
        batch.append(item)
    return batch
