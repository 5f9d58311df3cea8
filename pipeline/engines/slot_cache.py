"""A preallocated key-value cache whose rows are sequences of different lengths.

Invariant: a row's keys and values at position p are those of its own token p; what lies behind its length is never attended to.
Active rows are always the first ones, so that attention reads views and copies nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


class SlotCache:
    """What a transformers model calls on its cache: `update`, once a layer, after `aim` has said where.

    Shapes: B active rows, H key-value heads, Q new tokens a row, L positions read, D head size.
    """

    def __init__(self, layers: int, slots: int, length: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        shape = (slots, length, kv_heads, head_dim)
        self._keys = [torch.zeros(shape, dtype=dtype) for _ in range(layers)]
        self._values = [torch.zeros(shape, dtype=dtype) for _ in range(layers)]
        self._rows: Tensor | slice = slice(0, 0)
        self._positions: Tensor | slice = slice(0, 0)
        self._read: int | None = None

    def aim_prefill(self, first_row: int, rows: int, length: int) -> None:
        """The next forward fills positions 0..length-1 of `rows` rows; they attend to one another only."""
        self._rows, self._positions, self._read = slice(first_row, first_row + rows), slice(0, length), None

    def aim_decode(self, positions_b: Tensor, read: int) -> None:
        """The next forward writes one token a row at its own position, in rows 0..B-1, and reads positions 0..read-1."""
        self._rows, self._positions, self._read = torch.arange(len(positions_b)), positions_b, read

    def update(self, keys_bhqd: Tensor, values_bhqd: Tensor, layer: int, kwargs: object = None) -> tuple[Tensor, Tensor]:
        """Store the new keys and values; return those that the queries attend to, [B, H, L, D]."""
        keys, values = self._keys[layer], self._values[layer]
        if self._read is None:
            keys[self._rows, self._positions] = keys_bhqd.transpose(1, 2)
            values[self._rows, self._positions] = values_bhqd.transpose(1, 2)
            return keys_bhqd, values_bhqd
        keys[self._rows, self._positions] = keys_bhqd[:, :, 0]
        values[self._rows, self._positions] = values_bhqd[:, :, 0]
        rows = len(keys_bhqd)
        return keys[:rows, : self._read].transpose(1, 2), values[:rows, : self._read].transpose(1, 2)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a row over another row."""
        for tensor in (*self._keys, *self._values):
            tensor[target, :length] = tensor[source, :length]
