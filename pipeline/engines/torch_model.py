"""A transformers model as an engine runs it: prefill, decode and score over plain tensors. Not safe for threads.

Invariant: `load` changes parameters in place, all or (when it raises before the first write) none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log, log1p
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipeline.engines.base import ScoredRow, ScoreRow, Signal
from pipeline.engines.pretrained import load_model, read_state
from pipeline.engines.slot_cache import SlotCache
from pipeline.errors import ConfigError, EngineError

CHUNK_TOKENS = 8192
"""Padded tokens of one prefill or scoring forward."""
CHUNK_LOGITS = 1 << 25
"""Elements of one block of logits while scoring (128 MB)."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Rows that were prefilled together, and the logits of their first new token."""

    count: int
    logits_bv: Tensor


class TorchModel:
    def __init__(self, folder: Path, slots: int, max_context: int | None, dtype: torch.dtype) -> None:
        self._model = load_model(folder, dtype)
        self._config = self._model.config
        self._dtype = dtype
        self._slots = slots
        bound = self._config.max_position_embeddings
        if max_context is not None and max_context > bound:
            raise ConfigError(f"engine.max_context {max_context} is above the model's own bound {bound} ({folder.name})")
        self.max_context: int = max_context or bound
        self._cache = self._new_cache()

    @property
    def vocab_size(self) -> int:
        """Rows of the output matrix, padding included."""
        return self._model.get_output_embeddings().weight.shape[0]

    def load(self, folder: Path) -> None:
        """Copy the weights of `folder` into the parameters. Raises EngineError when names or shapes differ."""
        state = read_state(folder)
        own = self._model.state_dict()
        tied = self._model.get_output_embeddings().weight is self._model.get_input_embeddings().weight
        missing = own.keys() - state.keys() - ({"lm_head.weight"} if tied else set())
        wrong = [name for name in state if name not in own or own[name].shape != state[name].shape]
        if missing or wrong:
            raise EngineError(f"weights in {folder.name} are of another model: missing {sorted(missing)[:3]}, foreign {wrong[:3]}")
        for name, value in state.items():
            own[name].copy_(value)

    def forget(self) -> None:
        """Drop all cached keys and values (they may hold anything after a fault)."""
        self._cache = self._new_cache()

    def prefill(self, prompts: Sequence[np.ndarray], first_row: int) -> Iterator[Joined]:
        """Fill rows first_row.. with the prompts, a bounded chunk at a time."""
        for chunk in _chunks(prompts, CHUNK_TOKENS):
            length = max(len(prompt) for prompt in chunk)
            ids_bt = _right_padded(chunk, length)
            self._cache.aim_prefill(first_row, len(chunk), length)
            hidden_bth = self._hidden(ids_bt, torch.arange(length)[None], _causal(length, self._dtype))
            last_b = torch.tensor([len(prompt) - 1 for prompt in chunk])
            yield Joined(len(chunk), self._head(hidden_bth[torch.arange(len(chunk)), last_b]))
            first_row += len(chunk)

    def decode(self, tokens: list[int], positions: list[int]) -> Tensor:
        """Logits [B, V] after one more token in each of rows 0..B-1."""
        read = max(positions) + 1
        positions_b = torch.tensor(positions)
        mask_b11t = torch.zeros(len(tokens), 1, 1, read, dtype=self._dtype)
        mask_b11t.masked_fill_((torch.arange(read) > positions_b[:, None])[:, None, None], float("-inf"))
        self._cache.aim_decode(positions_b, read)
        hidden_bth = self._hidden(torch.tensor(tokens)[:, None], positions_b[:, None], mask_b11t)
        return self._head(hidden_bth[:, -1])

    def move(self, source: int, target: int, length: int) -> None:
        self._cache.move(source, target, length)

    def score(self, rows: Sequence[ScoreRow], signal: Signal, top_k: int, smoothing: float) -> list[ScoredRow]:
        """Teacher-forced logprobs of rows already checked, in the order given. See `engines.base.ScoredRow`."""
        by_length = sorted(range(len(rows)), key=lambda index: len(rows[index].token_ids))
        scored: dict[int, ScoredRow] = {}
        for chunk in _chunks([rows[index].token_ids for index in by_length], CHUNK_TOKENS):
            indices = by_length[len(scored) : len(scored) + len(chunk)]
            scored.update(
                zip(indices, self._score_chunk([rows[index] for index in indices], signal, top_k, smoothing), strict=True)
            )
        return [scored[index] for index in range(len(rows))]

    def _score_chunk(self, rows: list[ScoreRow], signal: Signal, top_k: int, smoothing: float) -> list[ScoredRow]:
        ids_bt = _right_padded([row.token_ids for row in rows], max(len(row.token_ids) for row in rows))
        # Right padding lies behind every real token, so that causality alone hides it.
        hidden_bth = self._model.model(input_ids=ids_bt, use_cache=False).last_hidden_state
        counts = [len(row.token_ids) - row.start for row in rows]
        row_n = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts))
        target_n = torch.from_numpy(np.concatenate([np.arange(row.start, len(row.token_ids)) for row in rows]))
        block = max(1, CHUNK_LOGITS // self.vocab_size)
        parts: list[tuple[Tensor, ...]] = []
        for first in range(0, max(1, len(row_n)), block):  # once even when nothing is scored: empty arrays of the right shape
            row_m, target_m = row_n[first : first + block], target_n[first : first + block]
            logprobs_mv = smoothed(torch.log_softmax(self._head(hidden_bth[row_m, target_m - 1]).float(), -1), smoothing)
            parts.append(_signal(logprobs_mv, ids_bt[row_m, target_m], signal, top_k))
        pieces = [torch.cat(column).split(counts) for column in zip(*parts, strict=True)]
        return [_scored(row, signal, [piece[index].numpy() for piece in pieces]) for index, row in enumerate(rows)]

    def _hidden(self, ids_bt: Tensor, positions_bt: Tensor, mask: Tensor) -> Tensor:
        # By position: the cache's name changed in transformers 5.20, its place did not.
        return self._model.model(ids_bt, mask, positions_bt, self._cache, use_cache=True).last_hidden_state

    def _head(self, hidden: Tensor) -> Tensor:
        return self._model.lm_head(hidden)

    def _new_cache(self) -> SlotCache:
        config = self._config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = config.num_key_value_heads
        return SlotCache(config.num_hidden_layers, self._slots, self.max_context, kv_heads, head_dim, self._dtype)


def smoothed(logprobs_bv: Tensor, smoothing: float) -> Tensor:
    """log((1 - s) p + s / V)."""
    if smoothing == 0:
        return logprobs_bv
    floor = torch.tensor(log(smoothing) - log(logprobs_bv.shape[-1]))
    return torch.logaddexp(logprobs_bv + log1p(-smoothing), floor)


def _signal(logprobs_mv: Tensor, token_m: Tensor, signal: Signal, top_k: int) -> tuple[Tensor, ...]:
    sampled_m = logprobs_mv.gather(1, token_m[:, None])[:, 0]
    if signal == "topk":
        best = logprobs_mv.topk(min(top_k, logprobs_mv.shape[-1]), -1)
        return sampled_m, best.indices.to(torch.int32), best.values
    return (sampled_m, logprobs_mv) if signal == "full" else (sampled_m,)


def _scored(row: ScoreRow, signal: Signal, arrays: list[np.ndarray]) -> ScoredRow:
    if signal == "topk":
        return ScoredRow(row.row_id, arrays[0], topk_ids=arrays[1], topk_logprobs=arrays[2])
    if signal == "full":
        return ScoredRow(row.row_id, arrays[0], full_logprobs=arrays[1])
    return ScoredRow(row.row_id, arrays[0])


def _chunks(rows: Sequence[np.ndarray], budget: int) -> Iterator[list[np.ndarray]]:
    """Consecutive rows whose padded size stays within the budget; a longer row goes alone."""
    chunk: list[np.ndarray] = []
    longest = 0
    for row in rows:
        longest = max(longest, len(row))
        if chunk and longest * (len(chunk) + 1) > budget:
            yield chunk
            chunk, longest = [], len(row)
        chunk.append(row)
    if chunk:
        yield chunk


def _right_padded(rows: Sequence[np.ndarray], length: int) -> Tensor:
    padded = np.zeros((len(rows), length), np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return torch.from_numpy(padded)


def _causal(length: int, dtype: torch.dtype) -> Tensor:
    """[1, 1, T, T], additive."""
    return torch.full((length, length), float("-inf"), dtype=dtype).triu_(1)[None, None]
