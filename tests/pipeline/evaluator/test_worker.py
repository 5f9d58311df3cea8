"""Episodes and workers: every sample ends, as a finished or an aborted one, with its cleanup done."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from pipeline.agents.base import Trajectory
from pipeline.buffer.api import Attempt
from pipeline.errors import EngineUnavailable, RowRefused, failure_class
from pipeline.evaluator.spec import PlacementToken, specs_from_config
from pipeline.evaluator.worker import EvaluatorWorker
from pipeline.records import StepContext, Stopping, sample_seed
from tests.pipeline.evaluator.parts import Echo, Letters, inline, make_config, make_task

TOKEN = PlacementToken("here", None, 0.0, 0.0, 0.0)


def make_worker(engine=None, **spec):
    config = make_config(spec=spec, rollout={"retries": {"infra": 3, "backoff_s": 0.5}})
    return EvaluatorWorker(config, Letters(), engine or Echo(), specs_from_config(config), "here", offload=inline)


async def play(worker, task, *, failures=0, context=None):
    attempt = Attempt(task.ordinal, 1, failures, 0)
    context = context or StepContext(1)
    return await worker.run_samples(task, range(task.samples), attempt, context, [TOKEN] * task.samples)


def now():
    return asyncio.get_running_loop().time()


@pytest.mark.looptime
async def test_one_call_of_the_engine_carries_the_whole_group_and_joins_by_id():
    engine = Echo()
    samples = await play(make_worker(engine, agent="single_turn"), make_task(3))
    assert [len(call) for call in engine.calls] == [4]
    assert [request.seed for request in engine.calls[0]] == [sample_seed(make_task(3), index, 0) for index in range(4)]
    assert [(sample.index, sample.status, sample.reward, sample.text) for sample in samples] == [
        (index, "ok", 1.0, "ih") for index in range(4)
    ]
    for sample in samples:
        assert sample.loss_mask.tolist() == [0, 0, 1, 1]
        assert np.isnan(sample.logprobs).tolist() == [True, True, False, False]
        assert sample.versions.tolist() == [-1, -1, 0, 0]
        assert sample.turns[0]["node"] == "here" and sample.turns[0]["seconds"] == 1


@pytest.mark.looptime
@pytest.mark.fault(6)
async def test_a_hanging_sample_is_timed_out_beside_its_siblings():
    task = make_task(0, {"by_index": {"2": {"fail_phase": "run", "fail": "hang"}}})
    samples = await play(make_worker(run_timeout_s=10, cleanup_timeout_s=1), task)
    assert now() <= 11
    assert [sample.status for sample in samples] == ["ok", "ok", "aborted", "ok"]
    bad = samples[2]
    assert (bad.abort_reason, bad.phase, bad.reward, bad.node) == ("agent_timeout", "run", None, "here")
    assert failure_class(bad.reward, bad.finish_reason) == "timeout"
    assert bad.token_ids.tolist() == [ord("h"), ord("i")] and not bad.loss_mask.any()
    assert "run_timeout_s 10" in bad.error


@pytest.mark.looptime
@pytest.mark.fault(7)
async def test_one_exception_costs_one_of_a_hundred_and_its_traceback_is_logged(caplog):
    task = make_task(0, {"by_index": {"17": {"fail_phase": "verify", "fail": "ZeroDivisionError"}}}, samples=100)
    samples = await play(make_worker(), task)
    assert [sample.index for sample in samples if sample.status == "aborted"] == [17]
    assert samples[17].error.startswith("ZeroDivisionError: scripted fault")
    assert samples[17].agent_reason == "finish"
    assert "ZeroDivisionError" in caplog.text and "_fault" in caplog.text and "CancelledError" not in caplog.text


@pytest.mark.looptime
@pytest.mark.parametrize("phase", ["init", "run", "verify", "cleanup"])
@pytest.mark.fault(8)
async def test_a_leaked_cancellation_aborts_its_sample_only(phase):
    task = make_task(0, {"by_index": {"1": {"fail_phase": phase, "fail": "cancel"}}})
    samples = await play(make_worker(), task)
    assert [sample.status for sample in samples].count("ok") == (4 if phase == "cleanup" else 3)
    assert samples[1].phase == phase
    assert asyncio.current_task().cancelling() == 0


class Tidy:
    """An agent that counts its cleanups; `stubborn` ones swallow every cancellation, `suicidal` ones cancel their own task."""

    cleanups = 0
    kind = ""

    async def init(self, episode):
        pass

    async def run(self, episode):
        if type(self).kind == "suicidal":
            asyncio.current_task().cancel()
        while True:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                if type(self).kind != "stubborn":
                    raise
            else:
                return Trajectory()

    async def verify(self, episode, trajectory):
        return 1.0

    async def cleanup(self, episode):
        await asyncio.sleep(0.5)
        type(self).cleanups += 1


@pytest.fixture
def tidy(monkeypatch):
    monkeypatch.setattr(Tidy, "cleanups", 0)
    monkeypatch.setattr(Tidy, "kind", "")
    return Tidy


def tidy_worker(**timeouts):
    return make_worker(agent=f"{__name__}:Tidy", **timeouts)


@pytest.mark.looptime
@pytest.mark.fault(8)
async def test_a_real_cancellation_propagates_once_cleanup_is_done(tidy):
    playing = asyncio.create_task(play(tidy_worker(), make_task(0)))
    await asyncio.sleep(1)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert tidy.cleanups == 4 and now() == pytest.approx(1.5)


@pytest.mark.looptime
async def test_an_agent_that_cancels_its_own_task_aborts_its_sample(tidy):
    tidy.kind = "suicidal"
    samples = await play(tidy_worker(), make_task(0, samples=2))
    assert [sample.abort_reason for sample in samples] == ["infra_other"] * 2
    assert tidy.cleanups == 2


@pytest.mark.looptime
async def test_an_agent_that_ignores_its_cancellation_is_left_behind_in_bounded_time(tidy, caplog):
    tidy.kind = "stubborn"
    worker = tidy_worker(init_timeout_s=1, run_timeout_s=5, verify_timeout_s=1, cleanup_timeout_s=1)
    samples = await play(worker, make_task(0, samples=1))
    assert samples[0].abort_reason == "agent_timeout" and now() < 30
    assert (samples[0].phase, samples[0].node, samples[0].seconds) == ("run", "here", now())
    assert "ignores its cancellation" in caplog.text
    await asyncio.sleep(200)  # it ends by itself, and nobody minds
    assert tidy.cleanups == 1


@pytest.mark.looptime
@pytest.mark.fault(18)
async def test_a_verifier_that_cannot_say_gives_no_reward_and_no_abort():
    samples = await play(make_worker(), make_task(0, {"by_index": {"0": {"reward": None}}}))
    assert (samples[0].status, samples[0].reward, samples[1].reward) == ("ok", None, 1.0)
    raised = await play(make_worker(), make_task(0, {"fail_phase": "verify", "fail": "VerifierError"}))
    assert (raised[0].status, raised[0].reward, raised[0].phase) == ("ok", None, "verify")
    assert raised[0].error.startswith("VerifierError")


@pytest.mark.looptime
@pytest.mark.fault(22)
async def test_an_empty_response_trains_nothing_of_the_prompt():
    samples = await play(make_worker(), make_task(0, {"tokens": 0}))
    assert samples[0].token_ids.tolist() == [ord("h"), ord("i")]
    assert not samples[0].loss_mask.any() and np.isnan(samples[0].logprobs).all()


@pytest.mark.looptime
async def test_a_failing_cleanup_keeps_the_sample_and_says_so():
    samples = await play(make_worker(), make_task(0, {"fail_phase": "cleanup", "fail": "SandboxError"}))
    assert (samples[0].status, samples[0].reward, samples[0].phase) == ("ok", 1.0, "cleanup")


@pytest.mark.looptime
async def test_an_engine_that_cannot_be_reached_is_asked_again_within_the_budget():
    engine = Echo(faults=[EngineUnavailable("restarting"), ConnectionError("reset")])
    samples = await play(make_worker(engine, agent="single_turn"), make_task(0))
    assert len(engine.calls) == 3 and all(sample.status == "ok" for sample in samples)
    engine = Echo(faults=[EngineUnavailable("gone")] * 3)
    samples = await play(make_worker(engine, agent="single_turn"), make_task(0))
    assert {sample.abort_reason for sample in samples} == {"infra_conn"}


class RefusesOne(Echo):
    """Refuses any call that holds the second sample's request."""

    async def generate(self, requests, version):
        if any(request.request_id == "0.1.0" for request in requests):
            self.calls.append(requests)
            raise RowRefused("0.1.0 is too long")
        return await super().generate(requests, version)


@pytest.mark.looptime
async def test_a_refused_row_does_not_take_its_siblings():
    samples = await play(make_worker(RefusesOne(), agent="single_turn"), make_task(0))
    assert [sample.abort_reason for sample in samples] == [None, "data", None, None]


@pytest.mark.looptime
async def test_a_call_that_nobody_waits_for_is_cancelled():
    engine = Echo(seconds=1000)
    samples = await play(make_worker(engine, agent="single_turn", turn_timeout_s=5), make_task(0))
    assert {sample.abort_reason for sample in samples} == {"agent_timeout"} and now() < 6
    assert "turn_timeout_s 5" in samples[0].error


@pytest.mark.looptime
@pytest.mark.fault(31)
async def test_a_reply_of_the_wrong_version_is_not_taken():
    class Stale(Echo):
        async def generate(self, requests, version):
            return [replace(completion, weight_version=1) for completion in await super().generate(requests, version)]

    samples = await play(make_worker(Stale(), agent="single_turn"), make_task(0), context=StepContext(4, min_version=2))
    assert {sample.abort_reason for sample in samples} == {"infra_other"}


@pytest.mark.looptime
async def test_a_prompt_that_fills_the_context_overflows_without_a_call():
    engine = Echo()
    samples = await play(make_worker(engine, agent="single_turn"), make_task(0, stopping=Stopping(max_context=2)))
    assert {failure_class(s.reward, s.finish_reason) for s in samples} == {"ctx_overflow"} and not engine.calls


@pytest.mark.looptime
async def test_another_failed_attempt_samples_differently_and_a_lost_one_does_not():
    engine = Echo()
    worker = make_worker(engine, agent="single_turn")
    for failures in (0, 0, 1):
        await play(worker, make_task(0), failures=failures)
    seeds = [[request.seed for request in call] for call in engine.calls]
    assert seeds[0] == seeds[1] != seeds[2]
