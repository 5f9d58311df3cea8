"""dagger, aggrevate and iter_sft: whose tokens are trained on, and with what."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.records import NOBODY, STUDENT, TEACHER
from pipeline.trainer import losses
from pipeline.trainer.packing import RowRules, make_rows
from pipeline.trainer.update import Updater
from tests.pipeline.trainer.helpers import logprobs_of, make_config, make_group, tiny_model

MODEL = tiny_model(0, torch.float64)
BEHAVIOUR = tiny_model(3)


def mixed_groups(count: int = 3):
    """Each response: first half by the student, second half by a teacher that was sure of it."""
    groups = []
    for ordinal in range(count):
        group = make_group(ordinal, model=BEHAVIOUR)
        samples = []
        for sample in group.samples:
            said = np.flatnonzero(sample.loss_mask)
            by_teacher = said[len(said) // 2 :]
            executor, logprobs = np.full(len(sample.token_ids), NOBODY, np.uint8), sample.logprobs.copy()
            executor[said], executor[by_teacher], logprobs[by_teacher] = STUDENT, TEACHER, 0.0
            samples.append(replace(sample, executor=executor, logprobs=logprobs))
        groups.append(replace(group, samples=tuple(samples)))
    return groups


def rows_of(groups, **rules):
    return make_rows(groups, {s.sample_id for g in groups for s in g.samples}, RowRules(100, **rules)).rows


def updated(name: str, rows, **trainer):
    config = make_config(algorithm={"name": name, "imitation": {"kl_coefficient": 0.25}}, trainer={"minibatches": 1, **trainer})
    made = Updater(copy.deepcopy(MODEL), config.algorithm, config.trainer)
    return made, made.update(rows, 1)


def plainly(groups, executor: int | None, term) -> float:
    """Mean of `term(log pi, log mu)` over the tokens of an executor (None: all that are trained), one by one in float64."""
    values = []
    for sample in (sample for group in groups for sample in group.samples):
        table = logprobs_of(MODEL, sample.token_ids)
        for t in np.flatnonzero(sample.loss_mask):
            if executor is None or sample.executor[t] == executor:
                values.append(term(float(table[t, sample.token_ids[t]]), float(sample.logprobs[t])))
    return sum(values) / len(values)


def test_dagger_is_the_cross_entropy_of_the_teachers_tokens():
    groups = mixed_groups()
    _, figures = updated("dagger", rows_of(groups, imitate="teacher"))
    assert figures["loss_imitation"] == pytest.approx(plainly(groups, TEACHER, lambda pi, mu: -pi), rel=1e-9)
    assert figures["loss"] == figures["loss_imitation"]


def test_aggrevate_adds_the_kl_of_the_students_own_tokens():
    groups = mixed_groups()
    _, figures = updated("aggrevate", rows_of(groups, imitate="teacher"))
    anchor = plainly(groups, STUDENT, lambda pi, mu: math.exp(pi - mu) - 1 - (pi - mu))
    assert figures["loss_anchor"] == pytest.approx(anchor, rel=1e-6)
    assert figures["loss"] == pytest.approx(plainly(groups, TEACHER, lambda pi, mu: -pi) + 0.25 * anchor, rel=1e-6)
    assert figures["kl_behaviour"] == pytest.approx(anchor, rel=1e-6)


def test_iter_sft_is_the_cross_entropy_of_everything_kept():
    groups = mixed_groups()
    _, figures = updated("iter_sft", rows_of(groups, imitate="all"))
    assert figures["loss"] == pytest.approx(plainly(groups, None, lambda pi, mu: -pi), rel=1e-9)


@pytest.mark.parametrize("name", ["dagger", "aggrevate", "iter_sft"])
def test_one_chunk_or_many_give_equal_parameters(name):
    rows = rows_of(mixed_groups(), imitate="all" if name == "iter_sft" else "teacher")
    ends = [
        torch.cat([p.detach().flatten() for p in updated(name, rows, max_tokens_per_chunk=bound)[0].model.parameters()])
        for bound in (10_000, 16)
    ]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-11)


def test_dagger_learns_nothing_from_the_students_tokens():
    groups = mixed_groups(1)
    other = [replace(s, logprobs=np.where(s.executor == STUDENT, s.logprobs - 1, s.logprobs)) for s in groups[0].samples]
    ends = [
        torch.cat([p.detach().flatten() for p in updated("dagger", rows_of(g, imitate="teacher"))[0].model.parameters()])
        for g in (groups, [replace(groups[0], samples=tuple(other))])
    ]
    assert torch.equal(*ends)


def test_a_sample_without_a_teachers_token_is_rejected_by_name():
    group = make_group(0, model=BEHAVIOUR)
    packed = make_rows([group], {s.sample_id for s in group.samples}, RowRules(100, imitate="teacher", imitated_only=True))
    assert packed.rows == () and packed.rejected == {"not_imitated": len(group.samples)}


def test_the_anchor_estimates_kl_from_behaviour_to_student_and_so_does_its_gradient():
    rng = np.random.default_rng(0)
    mu_v = torch.log_softmax(torch.from_numpy(rng.normal(size=7)), -1)
    logits_v = torch.from_numpy(rng.normal(size=7)).requires_grad_()
    exact = (mu_v.exp() * (mu_v - torch.log_softmax(logits_v, -1))).sum()
    (wanted,) = torch.autograd.grad(exact, logits_v)
    estimate = (mu_v.exp() * losses.anchor_kl(torch.log_softmax(logits_v, -1), mu_v)).sum()
    (found,) = torch.autograd.grad(estimate, logits_v)
    assert estimate.item() == pytest.approx(exact.item(), rel=1e-12)
    torch.testing.assert_close(found, wanted)
