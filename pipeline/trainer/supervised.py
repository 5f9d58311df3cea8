"""Supervised training on the answers of training pairs, before a run.

Invariant: the loss is on answer tokens and the end of sequence only, and all randomness comes from one seed: the same pairs,
settings and seed give the same weights, unless `max_seconds` cuts the training short.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.config.models import Supervised
from pipeline.engines.renderer import ChatRenderer
from pipeline.errors import ConfigError

BETAS = (0.9, 0.99)
CLIP_NORM = 1.0
CHECK_EVERY = 50
CHECK_ROWS = 256
"""Training pairs on which `stop_at` is measured."""
FINAL_LR = 0.05
"""Share of the learning rate that is left at the last step."""

Progress = Callable[[int, int, float], None]
"""Called with (step, steps, loss) now and then."""


@dataclass(frozen=True, slots=True)
class Trained:
    steps: int
    seconds: float
    accuracy: float | None
    """Greedy, exact, on a slice of the *training* pairs; None without pairs."""
    stopped_by: str
    """`steps`, `stop_at` or `max_seconds`."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """All pairs as tensors, right-padded. N rows, T tokens."""

    ids_nt: Tensor
    answer_nt: Tensor
    """bool: the token belongs to the answer, or ends it."""
    lengths_n: Tensor

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        longest = int(self.lengths_n[rows].max())
        return self.ids_nt[rows, :longest], self.answer_nt[rows, :longest]


def train_supervised(
    model: PreTrainedModel,
    renderer: ChatRenderer,
    pairs: Sequence[tuple[Sequence[tuple[str, str]], str]],
    settings: Supervised,
    seed: int,
    progress: Progress | None = None,
) -> Trained:
    """Train in place. The learning rate warms up, then follows a cosine to FINAL_LR of itself at the last step.

    Raises ConfigError when there is nothing to train on, or a pair does not fit into the context.
    """
    if not pairs:
        raise ConfigError("supervised training needs training items with answers, and there are none")
    rows = _tokenise(renderer, pairs, model.config.max_position_embeddings)
    with _one_thread():
        return _train(model, rows, settings, seed, progress)


def _train(model: PreTrainedModel, rows: _Rows, settings: Supervised, seed: int, progress: Progress | None) -> Trained:
    began = time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), settings.lr, BETAS, weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(seed)
    checked = torch.randperm(len(rows.ids_nt), generator=generator)[:CHECK_ROWS]
    batches = _batches(len(rows.ids_nt), settings.batch, generator)
    step, stopped_by = 0, "steps"
    model.train()
    while step < settings.steps:
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * _lr_factor(step, settings)
        loss = _step(model, optimizer, *rows.take(next(batches)))
        step += 1
        if step % CHECK_EVERY == 0:
            if progress is not None:
                progress(step, settings.steps, loss)
            if time.monotonic() - began > settings.max_seconds:
                stopped_by = "max_seconds"
                break
            if settings.stop_at is not None and _accuracy(model, rows, checked) >= settings.stop_at:
                stopped_by = "stop_at"
                break
    model.eval()
    return Trained(step, time.monotonic() - began, _accuracy(model, rows, checked), stopped_by)


@torch.no_grad()
def _accuracy(model: PreTrainedModel, rows: _Rows, chosen: Tensor) -> float:
    """Greedy decoding says the answer exactly if and only if, given the answer so far, each of its tokens is the most likely."""
    solved = 0
    for part in chosen.split(CHECK_ROWS):
        ids_bt, answer_bt = rows.take(part)
        best_bt = model(input_ids=ids_bt[:, :-1], use_cache=False).logits.argmax(-1)
        solved += int(((best_bt == ids_bt[:, 1:]) | ~answer_bt[:, 1:]).all(1).sum())
    return solved / len(chosen)


def _step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, ids_bt: Tensor, answer_bt: Tensor) -> float:
    hidden_bth = model.model(input_ids=ids_bt[:, :-1], use_cache=False).last_hidden_state
    wanted_bt = answer_bt[:, 1:]
    logits_mv = model.lm_head(hidden_bth[wanted_bt]).float()
    loss = torch.nn.functional.cross_entropy(logits_mv, ids_bt[:, 1:][wanted_bt])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    optimizer.step()
    return loss.item()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small models are slower with more threads on a shared machine, and sums in another order give other weights."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _lr_factor(step: int, settings: Supervised) -> float:
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * done))


def _batches(rows: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Shuffled passes over all rows, without end."""
    left = torch.empty(0, dtype=torch.int64)
    while True:
        while len(left) < size:
            left = torch.cat([left, torch.randperm(rows, generator=generator)])
        yield left[:size]
        left = left[size:]


def _tokenise(renderer: ChatRenderer, pairs: Sequence[tuple[Sequence[tuple[str, str]], str]], bound: int) -> _Rows:
    prompts = [renderer.render(messages) for messages, _ in pairs]
    answers = [np.append(renderer.encode_text(answer), renderer.eos_token_id) for _, answer in pairs]
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    if max(lengths) > bound:
        raise ConfigError(
            f"a training item has {max(lengths)} tokens with its answer, above the model's context of {bound} "
            "(architecture.max_positions)"
        )
    ids = np.full((len(pairs), max(lengths)), renderer.pad_token_id, np.int64)
    answered = np.zeros(ids.shape, bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[row, : len(prompt)] = prompt
        ids[row, len(prompt) : lengths[row]] = answer
        answered[row, len(prompt) : lengths[row]] = True
    return _Rows(torch.from_numpy(ids), torch.from_numpy(answered), torch.tensor(lengths))
