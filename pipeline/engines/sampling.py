"""Drawing tokens. A row's token depends on its own logits and its own uniform number, not on what shares the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import EngineError
from pipeline.records import Sampling

COLDEST = 1e-4
"""Below it a row is greedy: logits divided by less overflow."""


def uniforms(seed: int, count: int) -> list[float]:
    """The noise of one sequence: number t decides its token t."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count).tolist()


def draw(logits_bv: Tensor, settings: Sequence[Sampling], noise: Sequence[float]) -> tuple[list[int], list[float]]:
    """One token a row by inverse CDF, and its logprob under the distribution drawn from (greedy: the untempered one).

    logits_bv: [B, V], any float type. Raises EngineError when logits are not finite.
    """
    logits_bv = logits_bv.float()
    settings = [replace(each, temperature=0.0) if 0 < each.temperature < COLDEST else each for each in settings]
    temperature = [each.temperature for each in settings]
    if any(value not in (0.0, 1.0) for value in temperature):
        logits_bv = logits_bv / torch.tensor([value or 1.0 for value in temperature])[:, None]
    if any(each.temperature > 0 and (each.top_k or each.top_p < 1) for each in settings):
        logits_bv = _cut(logits_bv, settings)
    logprobs_bv = torch.log_softmax(logits_bv, -1)
    cumulated_bv = logprobs_bv.exp().cumsum(-1)
    total_b1 = cumulated_bv[:, -1:]
    target_b1 = torch.tensor(noise, dtype=torch.float32)[:, None] * total_b1
    target_b1 = torch.minimum(target_b1, torch.nextafter(total_b1, torch.zeros_like(total_b1)))  # rounding must not pass the end
    tokens_b1 = torch.searchsorted(cumulated_bv, target_b1, right=True).clamp_(max=logits_bv.shape[-1] - 1)
    if 0.0 in temperature:
        greedy_b1 = torch.tensor([value == 0 for value in temperature])[:, None]
        tokens_b1 = torch.where(greedy_b1, logits_bv.argmax(-1, keepdim=True), tokens_b1)
    chosen_b = logprobs_bv.gather(1, tokens_b1)[:, 0]
    if not torch.isfinite(chosen_b).all():
        raise EngineError("the model's logits are not finite: the weights are broken")
    return tokens_b1[:, 0].tolist(), chosen_b.tolist()


def _cut(logits_bv: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Logits outside top_k, then outside the smallest set that holds top_p, become -inf; greedy rows stay whole."""
    vocabulary = logits_bv.shape[-1]
    top_k = torch.tensor([each.top_k if each.top_k and each.temperature > 0 else vocabulary for each in settings])
    top_p = torch.tensor([each.top_p if each.temperature > 0 else 1.0 for each in settings])
    sorted_bv, order_bv = logits_bv.sort(-1, descending=True)
    sorted_bv = sorted_bv.masked_fill(torch.arange(vocabulary) >= top_k[:, None], float("-inf"))
    probs_bv = sorted_bv.softmax(-1)
    before_bv = probs_bv.cumsum(-1) - probs_bv
    outside_bv = (before_bv >= top_p[:, None]) & (top_p[:, None] < 1)
    outside_bv[:, 0] = False  # a top_p that is nearly 0 is 0 here
    return torch.empty_like(logits_bv).scatter_(-1, order_bv, sorted_bv.masked_fill(outside_bv, float("-inf")))
