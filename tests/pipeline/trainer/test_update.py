"""What the optimizer steps of a training step do to a small model."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.errors import StageFailed
from pipeline.trainer.packing import RowRules, make_rows
from pipeline.trainer.update import FIGURES, Updater
from tests.pipeline.trainer.helpers import make_column, make_config, make_group, tiny_model

MODEL, TEACHER = tiny_model(0), tiny_model(5)


def rows_of(groups, signal="sampled", **rules):
    ids = {sample.sample_id for group in groups for sample in group.samples}
    return make_rows(groups, ids, RowRules(**{"max_tokens": 100, "signal": signal, **rules})).rows


def groups_of(count=4, signal="sampled", **keywords):
    return [make_group(n, model=MODEL, **{"teacher": TEACHER, "signal": signal, **keywords}) for n in range(count)]


def updater(algorithm: dict, model=MODEL, autocast=None, **trainer) -> Updater:
    config = make_config(algorithm=algorithm, trainer={"lr": 1e-3, "minibatches": 1, **trainer})
    return Updater(copy.deepcopy(model), config.algorithm, config.trainer, autocast)


def opd(signal="sampled", **settings) -> dict:
    return {"name": "opd", "opd": {"signal": signal, "advantage": "raw", **settings}}


def weights(made: Updater) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in made.model.parameters()])


ALGORITHMS = [
    opd(),
    opd(advantage="mean"),
    opd(advantage="whiten"),
    opd("topk"),
    opd("topk", direction="reverse"),
    opd("full"),
    opd("full", direction="reverse"),
    {"name": "grpo"},
    {"name": "grpo", "grpo": {"aggregate": "sequence", "std": False}},
    {"name": "grpo_opd", "opd": {"signal": "topk", "coefficient": 0.3}, "grpo": {"coefficient": 0.7}},
]


def signal_of(algorithm: dict) -> str | None:
    return algorithm["opd"]["signal"] if "opd" in algorithm else None


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_one_chunk_or_many_give_equal_parameters(algorithm):
    wide = tiny_model(0, torch.float64)
    rows = rows_of(groups_of(signal=signal_of(algorithm) or "sampled", temperature=0.8), signal_of(algorithm))
    ends, figures = [], []
    for bound in (10_000, 24):
        made = updater(algorithm, wide, max_tokens_per_chunk=bound)
        figures.append([made.update(rows, step) for step in (1, 2)][-1])
        ends.append(weights(made))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-11)
    assert not torch.equal(ends[0], weights(updater(algorithm, wide)))
    for name, value in figures[0].items():
        assert figures[1][name] == (None if value is None else pytest.approx(value, rel=1e-6, abs=1e-9)), name


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_the_same_rows_give_bit_equal_weights(algorithm):
    rows = rows_of(groups_of(signal=signal_of(algorithm) or "sampled"), signal_of(algorithm))
    first, second = (updater(algorithm, minibatches=2, max_tokens_per_chunk=40) for _ in range(2))
    for step in (1, 2, 3):
        assert first.update(rows, step) == second.update(rows, step)
    assert first.digest() == second.digest()
    assert torch.equal(weights(first), weights(second))


def test_a_step_is_the_gradient_of_the_reference_loss():
    """The whole path (packing, prediction of token t from t - 1, masks, weights) against loops over single tokens."""
    model = tiny_model(0, torch.float64)
    groups = groups_of(2, signal="topk")
    made = updater({"name": "opd", "opd": {"signal": "topk"}}, model, clip_norm=1e9)
    made.update(rows_of(groups, "topk"), 1)
    reference = copy.deepcopy(model)
    losses, tokens = [], 0
    for group in groups:
        for sample in group.samples:
            ids = torch.from_numpy(sample.token_ids.astype(np.int64))
            logprobs = torch.log_softmax(reference(input_ids=ids[None]).logits[0], -1)
            column = group.columns["teacher"].samples[sample.sample_id]
            for t in range(len(ids)):
                if not sample.loss_mask[t]:
                    continue
                tokens += 1
                top = [(int(i), float(p)) for i, p in zip(column["topk_ids"][t], column["topk_logprobs"][t], strict=True)]
                losses += [math.exp(p) * (p - logprobs[t - 1, i]) for i, p in top]
                tail, rest = 1 - sum(math.exp(p) for _, p in top), [i for i in range(12) if i not in dict(top)]
                losses.append(tail * (math.log(tail) - torch.log(logprobs[t - 1, rest].exp().sum())))
    (sum(losses) / tokens).backward()
    found = torch.cat([p.grad.flatten() for p in made.model.parameters()])
    expected = torch.cat([p.grad.flatten() for p in reference.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


def test_distilling_a_model_into_itself_changes_no_loss_and_reports_no_divergence():
    groups = groups_of(teacher=MODEL, signal="topk")
    figures = updater(opd("topk")).update(rows_of(groups, "topk"), 1)
    assert figures["loss"] == pytest.approx(0.0, abs=1e-6)
    assert figures["teacher_kl"] == pytest.approx(0.0, abs=1e-6)
    assert figures["kl_behaviour"] == pytest.approx(0.0, abs=1e-6)
    assert figures["grad_norm"] == pytest.approx(0.0, abs=1e-5)
    assert (figures["ratio_mean"], figures["ratio_max"]) == pytest.approx((1.0, 1.0), abs=1e-5)


def test_a_teacher_that_is_likelier_by_a_tenth_shows_as_a_tenth():
    groups = groups_of(teacher=MODEL)
    for group in groups:
        for arrays in group.columns["teacher"].samples.values():
            arrays["logprobs"] += np.float32(0.1)
    assert updater(opd()).update(rows_of(groups), 1)["teacher_kl"] == pytest.approx(-0.1, abs=1e-6)


@pytest.mark.parametrize("signal", ["sampled", "topk", "full"])
@pytest.mark.fault(20)
def test_a_shuffled_teacher_column_changes_the_loss(signal):
    groups = groups_of(signal=signal)
    straight = updater(opd(signal)).update(rows_of(groups, signal), 1)["loss"]
    for group in groups:
        for sample in group.samples:
            arrays = group.columns["teacher"].samples[sample.sample_id]
            at = np.flatnonzero(sample.loss_mask)
            for array in arrays.values():
                array[at] = array[np.roll(at, 1)]
    assert updater(opd(signal)).update(rows_of(groups, signal), 1)["loss"] != pytest.approx(straight, rel=1e-3)


def test_columns_that_do_not_reach_the_loss_fail_the_step_before_it_writes():
    groups = groups_of()
    for group in groups:
        del group.columns["teacher"].samples[group.samples[1].sample_id]
    made = updater(opd())
    with pytest.raises(StageFailed, match=r"trainer\.min_teacher_coverage 0\.99.*'0\.1'"):
        made.update(rows_of(groups), 1)
    assert not made.writing and torch.equal(weights(made), weights(updater(opd())))
    figures = updater(opd(), min_teacher_coverage=0.5).update(rows_of(groups), 1)
    assert 0.5 < figures["teacher_coverage"] < 0.99


def test_a_column_of_the_wrong_signal_fails_the_step():
    with pytest.raises(StageFailed, match="signal 'topk'"):
        updater(opd("topk")).update(rows_of(groups_of(), "topk"), 1)


def test_uncovered_tokens_are_outside_the_loss():
    groups = groups_of()
    alone = [replace(group, samples=group.samples[:3]) for group in groups]
    for group in groups:
        del group.columns["teacher"].samples[group.samples[3].sample_id]
    partly = updater(opd(), min_teacher_coverage=0.0).update(rows_of(groups), 1)
    assert partly["loss"] == pytest.approx(updater(opd()).update(rows_of(alone), 1)["loss"], rel=1e-5)


def test_tokens_whose_ratio_is_out_of_bounds_are_masked_and_counted():
    groups = groups_of(1)
    groups[0].samples[0].logprobs[-1] -= 5.0  # ratio e^5 on one token of 15
    rows = rows_of(groups)
    figures = updater(opd(ratio_high=20.0)).update(rows, 1)
    assert figures["ratio_masked_share"] == pytest.approx(1 / figures["tokens"])
    assert figures["ratio_max"] == pytest.approx(math.exp(5), rel=1e-3)
    assert updater(opd()).update(rows, 1)["ratio_masked_share"] == 0.0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_on_policy_the_ratio_is_one_at_any_sampling_temperature(temperature):
    figures = updater(opd()).update(rows_of(groups_of(temperature=temperature)), 1)
    assert figures["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert figures["teacher_kl"] == pytest.approx(float(np.mean(expected_gap(temperature))), rel=1e-4)


def expected_gap(temperature: float) -> list[float]:
    """log p_student - log p_teacher of the sampled tokens, both at temperature 1."""
    gaps = []
    for group in groups_of(temperature=temperature):
        own = make_column(group, MODEL)
        for sample in group.samples:
            arrays = [column.samples[sample.sample_id]["logprobs"] for column in (own, group.columns["teacher"])]
            gaps += list((arrays[0] - arrays[1])[sample.loss_mask > 0])
    return gaps


def test_grpo_raises_the_likelihood_of_rewarded_answers():
    groups = groups_of(teacher=None)
    made = updater({"name": "grpo"}, lr=1e-3, clip_norm=100.0)
    rows = rows_of(groups, None, scored_only=True)
    for step in range(1, 6):
        figures = made.update(rows, step)
    gains = {True: [], False: []}
    for group in groups:
        before, after = make_column(group, MODEL), make_column(group, made.model)
        for sample in group.samples:
            change = after.samples[sample.sample_id]["logprobs"] - before.samples[sample.sample_id]["logprobs"]
            gains[sample.reward > 0].append(np.nanmean(change))
    assert np.mean(gains[True]) > 0.01 > -0.01 > np.mean(gains[False])
    assert figures["teacher_kl"] is None and figures["teacher_coverage"] is None and figures["loss_opd"] is None


def test_equal_rewards_teach_grpo_nothing():
    figures = updater({"name": "grpo"}).update(rows_of([make_group(0, (1.0, 1.0, "abort"), model=MODEL)], None), 1)
    assert figures["grad_norm"] == 0.0


def test_mixing_weighs_the_parts_by_their_coefficients():
    mixed = {"name": "grpo_opd", "opd": {"signal": "topk", "coefficient": 0.3}, "grpo": {"coefficient": 0.7}}
    figures = updater(mixed).update(rows_of(groups_of(signal="topk"), "topk"), 1)
    assert figures.keys() == set(FIGURES)
    assert figures["loss"] == pytest.approx(0.3 * figures["loss_opd"] + 0.7 * figures["loss_grpo"], rel=1e-6)


def test_a_gradient_that_is_not_finite_is_not_applied_and_is_counted():
    made = updater({"name": "grpo"})
    group = make_group(0, (1.0, 0.0), model=MODEL)
    for sample in group.samples:
        sample.logprobs[:] = np.where(sample.loss_mask > 0, -200.0, np.nan)  # the ratio overflows
    figures = made.update(rows_of([group], None), 1)
    assert figures["nonfinite_steps"] == 1 and figures["optimizer_steps"] == 0
    assert figures["grad_norm"] is None and figures["loss"] is None
    assert torch.equal(weights(made), weights(updater({"name": "grpo"})))


def test_gradients_are_clipped_and_the_rate_warms_up():
    rows = rows_of(groups_of())
    made = updater(opd(), clip_norm=1e-3, warmup_steps=10, lr=1e-2)
    figures = made.update(rows, 3)
    assert figures["lr"] == pytest.approx(3e-3)
    assert figures["grad_norm"] > 1e-3
    total = torch.cat([p.grad.flatten() for p in made.model.parameters()]).norm()
    assert float(total) == pytest.approx(1e-3, rel=1e-3)


def test_passes_and_minibatches_are_optimizer_steps():
    algorithm = opd() | {"passes": 3}
    assert updater(algorithm, minibatches=2).update(rows_of(groups_of()), 1)["optimizer_steps"] == 6


def test_a_failure_after_the_first_write_is_told_from_one_before(monkeypatch):
    made = updater(opd(), minibatches=2)
    calls = iter([None, RuntimeError("out of memory")])
    step = made.optimizer.step

    def fail_second():
        error = next(calls)
        if error:
            raise error
        step()

    monkeypatch.setattr(made.optimizer, "step", fail_second)
    with pytest.raises(RuntimeError):
        made.update(rows_of(groups_of()), 1)
    assert made.writing


def test_mixed_precision_keeps_float32_weights_and_comes_close():
    rows = rows_of(groups_of(signal="topk"), "topk")
    exact, narrow = updater(opd("topk")), updater(opd("topk"), autocast=torch.bfloat16)
    left, right = exact.update(rows, 1), narrow.update(rows, 1)
    assert {p.dtype for p in narrow.model.parameters()} == {torch.float32}
    assert right["loss"] == pytest.approx(left["loss"], rel=0.05)
