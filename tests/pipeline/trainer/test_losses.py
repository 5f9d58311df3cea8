"""Each loss against plain float64 loops, and its gradient against finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pipeline.trainer import losses

N, V, K = 5, 7, 3
RNG = np.random.default_rng(0)
STUDENT = torch.log_softmax(torch.from_numpy(RNG.normal(size=(N, V))), -1)
TEACHER = torch.log_softmax(torch.from_numpy(RNG.normal(size=(N, V))), -1)
TARGET = torch.from_numpy(RNG.integers(0, V, N))
TOP_LOGPROBS, TOP_IDS = TEACHER.topk(K, dim=1)


def kl(left: list[float], right: list[float]) -> float:
    return sum(math.exp(a) * (a - b) for a, b in zip(left, right, strict=True))


def merged(row: np.ndarray, ids: np.ndarray) -> list[float]:
    """Log-probabilities of the listed entries, and of all others together."""
    listed = [float(row[i]) for i in ids]
    return [*listed, math.log(sum(math.exp(row[i]) for i in range(len(row)) if i not in set(ids.tolist())))]


def pairs(student: torch.Tensor, teacher: torch.Tensor):
    return zip(student.numpy(), teacher.numpy(), strict=True)


def test_kl_over_the_vocabulary_is_the_sum_over_its_entries():
    forward = [kl(list(t), list(s)) for s, t in pairs(STUDENT, TEACHER)]
    reverse = [kl(list(s), list(t)) for s, t in pairs(STUDENT, TEACHER)]
    np.testing.assert_allclose(losses.forward_kl(STUDENT, TEACHER), forward, rtol=1e-12)
    np.testing.assert_allclose(losses.reverse_kl(STUDENT, TEACHER), reverse, rtol=1e-12)


def test_topk_kl_counts_everything_else_as_one_event():
    rows = list(zip(STUDENT.numpy(), TEACHER.numpy(), TOP_IDS.numpy(), strict=True))
    forward = [kl(merged(t, ids), merged(s, ids)) for s, t, ids in rows]
    reverse = [kl(merged(s, ids), merged(t, ids)) for s, t, ids in rows]
    np.testing.assert_allclose(losses.forward_kl_topk(STUDENT, TOP_IDS, TOP_LOGPROBS), forward, rtol=1e-10)
    np.testing.assert_allclose(losses.reverse_kl_topk(STUDENT, TOP_IDS, TOP_LOGPROBS), reverse, rtol=1e-10)


def test_topk_is_a_lower_bound_of_the_full_kl_and_meets_it_at_the_whole_vocabulary():
    assert (losses.forward_kl_topk(STUDENT, TOP_IDS, TOP_LOGPROBS) <= losses.forward_kl(STUDENT, TEACHER)).all()
    everything, ids = TEACHER.topk(V, dim=1)
    torch.testing.assert_close(losses.forward_kl_topk(STUDENT, ids, everything), losses.forward_kl(STUDENT, TEACHER))
    torch.testing.assert_close(losses.reverse_kl_topk(STUDENT, ids, everything), losses.reverse_kl(STUDENT, TEACHER))


def test_a_student_that_leaves_the_teachers_top_k_pays_for_it():
    """Without the tail mass reverse KL over the top k would fall as the student moves its mass elsewhere."""
    away = STUDENT.clone()
    away[0, TOP_IDS[0]] -= 20.0
    away = torch.log_softmax(away, -1)
    assert losses.reverse_kl_topk(away, TOP_IDS, TOP_LOGPROBS)[0] > losses.reverse_kl_topk(STUDENT, TOP_IDS, TOP_LOGPROBS)[0]


def test_a_teacher_whose_top_k_holds_all_its_mass_stays_finite():
    sure = torch.log(torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).clamp_min(1e-30))
    ids = torch.tensor([[0, 1, 2]])
    for loss in (losses.forward_kl_topk, losses.reverse_kl_topk):
        assert torch.isfinite(loss(STUDENT[:1], ids, sure)).all()


def test_a_padded_vocabulary_does_not_change_the_forward_kl():
    padded = torch.cat([TEACHER, torch.full((N, 2), -math.inf, dtype=torch.float64)], 1)
    torch.testing.assert_close(losses.forward_kl(STUDENT, padded), losses.forward_kl(STUDENT, TEACHER))
    torch.testing.assert_close(losses.reverse_kl(STUDENT, padded), losses.reverse_kl(STUDENT, TEACHER))


def test_distilling_a_model_into_itself_is_zero_with_no_gradient():
    logits = STUDENT.clone().requires_grad_()
    student = torch.log_softmax(logits, -1)
    own = student.detach()
    top, ids = own.topk(K, dim=1)
    picked = student.gather(1, TARGET[:, None]).squeeze(1)
    advantage = losses.sampled_advantage(picked.detach(), picked)
    for loss in (
        losses.forward_kl(student, own),
        losses.reverse_kl(student, own),
        losses.forward_kl_topk(student, ids, top),
        losses.reverse_kl_topk(student, ids, top),
        losses.sampled_reverse_kl(picked, torch.ones(N), advantage, 4.0),
        losses.sampled_reverse_kl(
            picked, torch.ones(N), losses.centre(advantage, "whiten", advantage.mean(), advantage.std()), 4.0
        ),
    ):
        torch.testing.assert_close(loss, torch.zeros_like(loss), atol=1e-12, rtol=0)
        (gradient,) = torch.autograd.grad(loss.sum(), logits, retain_graph=True)
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-12, rtol=0)


def test_a_teacher_that_is_likelier_by_a_tenth_gives_an_advantage_of_a_tenth():
    student = STUDENT.gather(1, TARGET[:, None]).squeeze(1)
    advantage = losses.centre(losses.sampled_advantage(student + 0.1, student), "raw")
    assert float(advantage.mean()) == pytest.approx(0.1, abs=1e-15)


def test_sampled_loss_truncates_the_weight_and_ignores_the_gradient_of_everything_else():
    logprob = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([-1.0, -4.0, -0.4], dtype=torch.float64)
    teacher = torch.tensor([-0.5, -3.0, -0.5], dtype=torch.float64)
    advantage = losses.sampled_advantage(teacher, logprob)
    loss = losses.sampled_reverse_kl(logprob, losses.importance_ratio(logprob, behaviour), advantage, 4.0)
    expected, slopes = [], []
    for pi, mu, p in zip([-1.0, -2.0, -0.5], [-1.0, -4.0, -0.4], [-0.5, -3.0, -0.5], strict=True):
        weight = min(math.exp(pi - mu), 4.0)
        expected.append(-weight * (p - pi) * pi)
        slopes.append(-weight * (p - pi))
    np.testing.assert_allclose(loss.detach(), expected, rtol=1e-12)
    (gradient,) = torch.autograd.grad(loss.sum(), logprob)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-12)


def test_sampled_gradient_is_in_expectation_that_of_the_reverse_kl():
    logits = STUDENT[:1].clone().requires_grad_()
    student = torch.log_softmax(logits, -1)
    (exact,) = torch.autograd.grad(losses.reverse_kl(student, TEACHER[:1]).sum(), logits, retain_graph=True)
    each = student[0]
    loss = losses.sampled_reverse_kl(each, torch.ones(V), losses.sampled_advantage(TEACHER[0], each), 4.0)
    (sampled,) = torch.autograd.grad((each.detach().exp() * loss).sum(), logits)
    torch.testing.assert_close(sampled, exact)


@pytest.mark.parametrize("mode", ["raw", "mean", "whiten"])
def test_centring(mode: str):
    values = RNG.normal(size=20)
    mean, std = values.mean(), values.std()
    expected = {"raw": values, "mean": values - mean, "whiten": (values - mean) / (std + losses.WHITEN_EPS)}[mode]
    tensor = torch.from_numpy(values)
    np.testing.assert_allclose(losses.centre(tensor, mode, tensor.mean(), tensor.std(correction=0)), expected, rtol=1e-12)


def test_clipped_policy_gradient_is_the_lesser_of_two():
    ratios = [0.5, 0.79, 1.0, 1.19, 1.3, 2.0]
    for advantage in (-1.5, 0.0, 2.0):
        expected = [-min(r * advantage, min(max(r, 0.8), 1.28) * advantage) for r in ratios]
        found = losses.clipped_policy_gradient(
            torch.tensor(ratios, dtype=torch.float64), torch.full((6,), advantage).double(), 0.2, 0.28
        )
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_tempered_logprobs_use_each_tokens_own_temperature_and_read_greedy_as_one():
    logits = torch.from_numpy(RNG.normal(size=(3, V)))
    temperatures = [1.0, 0.5, 0.0]
    found = losses.tempered_logprobs(logits, TARGET[:3], torch.tensor(temperatures).double())
    for row, target, temperature, value in zip(logits.numpy(), TARGET.tolist(), temperatures, found, strict=False):
        scaled = [x / (temperature or 1.0) for x in row]
        assert float(value) == pytest.approx(scaled[target] - math.log(sum(math.exp(x) for x in scaled)), rel=1e-12)


def test_entropy():
    expected = [-sum(math.exp(x) * x for x in row) for row in STUDENT.numpy()]
    np.testing.assert_allclose(losses.entropy(STUDENT), expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "forward_kl_topk", "reverse_kl_topk", "clipped", "tempered"])
def test_gradients(name: str):
    logits = torch.from_numpy(RNG.normal(size=(N, V))).requires_grad_()
    advantage = torch.from_numpy(RNG.normal(size=N))

    def loss(x: torch.Tensor) -> torch.Tensor:
        student = torch.log_softmax(x, -1)
        if name.endswith("topk"):
            return getattr(losses, name)(student, TOP_IDS, TOP_LOGPROBS)
        if name == "clipped":
            picked = student.gather(1, TARGET[:, None]).squeeze(1)
            return losses.clipped_policy_gradient(
                losses.importance_ratio(picked, torch.full((N,), -1.0).double()), advantage, 0.2, 0.2
            )
        if name == "tempered":
            return losses.tempered_logprobs(x, TARGET, torch.full((N,), 0.7).double())
        return getattr(losses, name)(student, TEACHER)

    assert torch.autograd.gradcheck(loss, (logits,))
