"""Losses as pure functions of tensors: each returns one number a token, unreduced and unmasked.

Shapes: n trained tokens, v vocabulary, k teacher's top entries. Logprobs are natural logarithms.

Temperatures. Tokens were drawn at a sampling temperature T, and behaviour logprobs are of that tempered distribution. The
importance ratio and the policy gradient therefore use the trainer's logprobs at the same T; what is compared with the
teacher is always at temperature 1. Both agree on where the loss is at rest: student equal to teacher at temperature 1.
Cuts. With top_p or top_k the behaviour distribution is renormalised over the kept tokens, while the trainer's covers all of
them: on-policy the ratio is the kept mass (below 1) instead of 1. It is still the right weight for every token that can be
drawn; keep the cuts mild (kept mass above 1 - clip_low) when GRPO's clipping is to mean what it says.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

WHITEN_EPS = 1e-3
"""Added to the deviation when whitening: a student equal to its teacher must not turn rounding noise into a signal."""
TAIL_FLOOR = 1e-8
"""Least tail mass ascribed to a teacher whose top-k logprobs sum to one by rounding."""


def tempered_logprobs(logits_nv: Tensor, target_n: Tensor, temperature_n: Tensor) -> Tensor:
    """Log-probability of each target at its own sampling temperature, [n]. Temperature 0 (greedy) reads as 1."""
    scale_n = torch.where(temperature_n > 0, temperature_n, torch.ones_like(temperature_n))
    logprobs_nv = torch.log_softmax(logits_nv / scale_n[:, None], dim=-1)
    return logprobs_nv.gather(1, target_n[:, None]).squeeze(1)


def importance_ratio(logprob_n: Tensor, behaviour_n: Tensor) -> Tensor:
    """pi / mu for the sampled tokens, both at sampling temperature."""
    return torch.exp(logprob_n - behaviour_n)


def centre(
    advantage_n: Tensor, mode: Literal["raw", "mean", "whiten"], mean: Tensor | float = 0.0, std: Tensor | float = 1.0
) -> Tensor:
    """The advantage as it is, minus the batch mean, or divided by the batch deviation too. Statistics are the caller's:
    they span the whole optimizer step, not one chunk of it."""
    if mode == "raw":
        return advantage_n
    if mode == "mean":
        return advantage_n - mean
    return (advantage_n - mean) / (std + WHITEN_EPS)


def sampled_advantage(teacher_n: Tensor, student_n: Tensor) -> Tensor:
    """A = stop-gradient(log p_teacher - log p_trainer) on the sampled tokens, at temperature 1.

    Its expectation under the student is -KL(student || teacher): Lu et al. 2025 ("On-Policy Distillation", Thinking
    Machines Lab), which follows Agarwal et al. 2024 (GKD) and Gu et al. 2024 (MiniLLM).
    """
    return (teacher_n - student_n).detach()


def sampled_reverse_kl(logprob_n: Tensor, ratio_n: Tensor, advantage_n: Tensor, truncate: float) -> Tensor:
    """Policy gradient with truncated importance weights: -stop-gradient(min(pi / mu, c)) * A * log pi.

    Truncation bounds the variance of stale tokens: Espeholt et al. 2018 (IMPALA, rho-bar), Yao et al. 2025 (TIS).
    """
    return -ratio_n.detach().clamp(max=truncate) * advantage_n.detach() * logprob_n


def forward_kl(student_nv: Tensor, teacher_nv: Tensor) -> Tensor:
    """KL(teacher || student) = sum_v p (log p - log q) over the entries that both vocabularies have (padding differs)."""
    student_nv, teacher_nv = _common(student_nv, teacher_nv)
    p_nv = teacher_nv.exp()
    return torch.where(p_nv > 0, p_nv * (teacher_nv - student_nv), 0.0).sum(1)


def reverse_kl(student_nv: Tensor, teacher_nv: Tensor) -> Tensor:
    """KL(student || teacher) = sum_v q (log q - log p) over the entries that both vocabularies have."""
    student_nv, teacher_nv = _common(student_nv, teacher_nv)
    return (student_nv.exp() * (student_nv - teacher_nv)).sum(1)


def forward_kl_topk(student_nv: Tensor, topk_ids_nk: Tensor, topk_logprobs_nk: Tensor) -> Tensor:
    """KL(teacher || student) over k + 1 events: the teacher's top k tokens, and all others as one ("tail").

    Merging events can only lower a KL, so this is a lower bound of the full one; it is exact when the tails have one shape.
    """
    return forward_kl(*_with_tail(student_nv, topk_ids_nk, topk_logprobs_nk))


def reverse_kl_topk(student_nv: Tensor, topk_ids_nk: Tensor, topk_logprobs_nk: Tensor) -> Tensor:
    """KL(student || teacher) over the same k + 1 events. Without the tail the student could lower it by leaving the top k."""
    return reverse_kl(*_with_tail(student_nv, topk_ids_nk, topk_logprobs_nk))


def clipped_policy_gradient(ratio_n: Tensor, advantage_n: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A): Schulman et al. 2017 (PPO), eq. 7; apart low and high: Yu et al. 2025 (DAPO)."""
    clipped_n = ratio_n.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio_n * advantage_n, clipped_n * advantage_n)


def cross_entropy(logprob_n: Tensor) -> Tensor:
    """-log pi of the tokens that are imitated, at temperature 1: the surrogate loss of Ross, Gordon & Bagnell 2011 (DAgger)."""
    return -logprob_n


def anchor_kl(logprob_n: Tensor, behaviour_n: Tensor) -> Tensor:
    """r - 1 - log r with r = pi / mu, on tokens drawn from mu: an estimate of KL(mu || pi) that is never negative (Schulman 2020,
    "k3"). Its gradient has the expectation of that KL's, -E_mu[grad log pi]: the gradient of r itself has mean 0 under mu."""
    log_ratio_n = logprob_n - behaviour_n
    return log_ratio_n.exp() - 1.0 - log_ratio_n


def entropy(logprobs_nv: Tensor) -> Tensor:
    """-sum_v q log q."""
    return -(logprobs_nv.exp() * logprobs_nv).sum(1)


def _common(left_nv: Tensor, right_nv: Tensor) -> tuple[Tensor, Tensor]:
    width = min(left_nv.shape[1], right_nv.shape[1])
    return left_nv[:, :width], right_nv[:, :width]


def _with_tail(student_nv: Tensor, topk_ids_nk: Tensor, topk_logprobs_nk: Tensor) -> tuple[Tensor, Tensor]:
    """Both distributions over the teacher's top k and the rest, [n, k + 1] ([n, k] when k is the whole vocabulary)."""
    student_nk = student_nv.gather(1, topk_ids_nk)
    if topk_ids_nk.shape[1] >= student_nv.shape[1]:
        return student_nk, topk_logprobs_nk
    # The student's tail is summed over the other entries: 1 - sum of the top k would lose its gradient to rounding.
    rest_n = student_nv.scatter(1, topk_ids_nk, float("-inf")).logsumexp(1)
    tail_n = (1.0 - topk_logprobs_nk.exp().sum(1)).clamp_min(TAIL_FLOOR).log()
    return torch.cat([student_nk, rest_n[:, None]], 1), torch.cat([topk_logprobs_nk, tail_n[:, None]], 1)
