"""The evaluator pool over a real ledger: every ordinal is settled once, whatever happens to workers, engine and buffer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from pipeline.buffer.api import Attempt
from pipeline.errors import BreakerTripped, StageFailed
from pipeline.evaluator.spec import NodeSpec, PlacementToken
from pipeline.records import Batch, Sampling, StepContext
from pipeline.watchdog import StallWatchdog
from tests.pipeline.evaluator.parts import Echo, Mortal, make_config, make_task, world

pytestmark = pytest.mark.looptime


def now():
    return asyncio.get_running_loop().time()


def by_ordinal(**scripts):
    """Tasks whose script is that of `o<ordinal>`; `rest` is for all others."""
    return lambda ordinal: make_task(ordinal, scripts.get(f"o{ordinal}", scripts.get("rest")))


FAILS = {"fail_phase": "run", "fail": "DataError"}


def idle(pool):
    detail = pool.report().detail
    return (detail["tokens_held"], detail["samples_running"], detail["batches_waiting"], pool.report().backlog) == (0, 0, 0, 0)


async def test_a_step_is_rolled_out_and_nothing_of_it_again():
    engine = Echo()
    async with world(make_config(spec={"agent": "single_turn"}), engine=engine) as w:
        report = await w.rollout(1)
        assert (report.committed, report.attempts, report.samples, report.tokens) == (4, 4, 16, 32)
        assert report.failure_classes["solved"] == 16 and idle(w.pool)
        assert sorted(len(call) for call in engine.calls) == [4] * 4
        assert await w.states() == {"fetched": 4, "ready": 4}
        again = await w.rollout(1)
        assert (again.committed, again.already, again.attempts) == (0, 4, 0) and len(engine.calls) == 4


async def test_the_wake_up_follows_the_commit_and_its_failure_harms_nobody():
    heard = []

    async def scorer():
        heard.append((await w.buffer.status())["ordinals"]["written"])
        raise ConnectionError("the scorer is away")

    async with world(make=lambda ordinal: make_task(ordinal, needs=("teacher",), teacher="big"), scorer=scorer) as w:
        assert (await w.rollout(1)).committed == 4
        await asyncio.sleep(1)
        assert heard and heard[-1] == 4


@pytest.mark.fault(6)
async def test_a_straggler_does_not_wedge_the_step():
    straggler = {"by_index": {"3": {"fail_phase": "run", "fail": "hang"}}}
    async with world(make_config(spec={"run_timeout_s": 20}), by_ordinal(o2=straggler)) as w:
        report = await w.rollout(1)
        assert report.committed == 4 and report.aborted == 1 and report.failure_classes["timeout"] == 1
        assert now() < 21 and idle(w.pool)
        (group,) = await w.groups(2)
        assert [sample.status for sample in group.samples] == ["ok", "ok", "ok", "aborted"]


async def test_a_long_sample_is_no_stall_before_its_own_deadline():
    """`watchdog` gives it this long; the default of observe.stall_s is 120 s."""
    alone = by_ordinal(rest={"run_s": 300.0})
    async with world(make_config(spec={"run_timeout_s": 400}, rollout={"tasks_per_step": 1}), alone) as w:
        rollout = asyncio.ensure_future(w.rollout(1))

        async def reports():
            return [w.pool.report()]

        watching = asyncio.ensure_future(StallWatchdog(reports, 120.0, now).run())
        await asyncio.wait({rollout, watching}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        assert rollout.done() and rollout.result().committed == 1 and now() >= 300
        assert w.pool.report().detail["bound_s"] == 0


@pytest.mark.fault(9)
async def test_workers_that_all_die_fail_the_stage_with_the_cause():
    async with world(workers=lambda worker: Mortal(worker, None)) as w:
        with pytest.raises(StageFailed, match="evaluator_pool.*every evaluator worker died.*the worker died") as failed:
            await w.rollout(1)
        assert now() < 60 and isinstance(failed.value.__cause__, ConnectionError) and idle(w.pool)


async def test_a_worker_that_dies_once_costs_its_running_attempts_only():
    engine = Echo()
    config = make_config(spec={"agent": "single_turn"})
    async with world(config, engine=engine, workers=lambda worker: Mortal(worker, 2, 0.5)) as w:
        report = await w.rollout(1)
        assert (report.committed, report.attempts) == (4, 6)
        attempts = (await w.buffer.status())["attempts"]
        assert (attempts["lost"], attempts["regenerated"]) == (2, 0)
        for group in await w.groups(0, 1, 2, 3):  # a lost attempt is no failure: the seeds are those of the first
            assert group.samples[0].reward == 1.0


class Counting:
    """Counts what plays in its process; a caller that goes away does not stop it."""

    def __init__(self, worker, most: dict) -> None:
        self.node, self._worker, self._most, self._playing = worker.node, worker, most, 0

    async def run_samples(self, task, indices, *args):
        return await asyncio.shield(asyncio.ensure_future(self._run(task, indices, *args)))

    async def _run(self, task, indices, *args):
        self._playing += len(indices)
        self._most[self.node] = max(self._most.get(self.node, 0), self._playing)
        try:
            return await self._worker.run_samples(task, indices, *args)
        finally:
            self._playing -= len(indices)


@pytest.mark.parametrize("durable", [False, True])
async def test_the_death_of_a_worker_frees_no_token_of_what_its_siblings_still_play(durable):
    most: dict[str, int] = {}
    nodes = (NodeSpec("left", (), 2.0, 8.0), NodeSpec("right", (), 2.0, 8.0))

    def workers(worker):
        return Mortal(worker, deaths=1, after_s=1.0) if worker.node == "right" else Counting(worker, most)

    config = make_config(spec={"resource": {"cpu": 1.0}}, rollout={"tasks_per_step": 2}, buffer={"durable_samples": durable})
    async with world(config, by_ordinal(rest={"run_s": 5.0}), nodes=nodes, workers=workers) as w:
        report = await w.rollout(1)
        assert report.committed == 2 and idle(w.pool)
        assert most == {"left": 2}


async def test_of_an_attempt_that_is_lost_nothing_more_is_dispatched():
    engine = Echo(seconds=1.0)
    config = make_config(spec={"agent": "single_turn", "resource": {"cpu": 1.0}}, rollout={"tasks_per_step": 1})
    async with world(config, engine=engine, nodes=(NodeSpec("here", (), 1.0, 8.0),), workers=lambda w: Mortal(w, deaths=1)) as w:
        assert (await w.rollout(1)).committed == 1
        assert w.workers[0].calls == 1 + 4, "the first sample of the first attempt, then all four of the second"


async def test_a_node_whose_worker_is_given_up_leaves_its_work_to_the_others():
    nodes = (NodeSpec("bad", (), 8, 64), NodeSpec("good", (), 8, 8))
    config = make_config(spec={"resource": {"cpu": 1}})
    pick = lambda worker: Mortal(worker, None) if worker.node == "bad" else worker  # noqa: E731
    async with world(config, nodes=nodes, workers=pick) as w:
        report = await w.rollout(1)
        assert report.committed == 4 and idle(w.pool)
        assert {sample.node for group in await w.groups(0, 1, 2, 3) for sample in group.samples} == {"good"}


class LosesAcks:
    """A buffer whose first `count` acknowledgements of a commit never arrive."""

    def __init__(self, service, count):
        self._service = service
        self._left = count

    def __getattr__(self, name):
        return getattr(self._service, name)

    async def commit(self, attempt, group):
        written = await self._service.commit(attempt, group)
        if self._left:
            self._left -= 1
            raise ConnectionError("the buffer restarted")
        return written


@pytest.mark.fault(40)
async def test_a_lost_acknowledgement_starts_no_second_attempt():
    async with world(buffer=lambda service: LosesAcks(service, 3)) as w:
        report = await w.rollout(1)
        assert (report.committed, report.attempts) == (4, 4)
        assert (await w.buffer.status())["attempts"] == {"started": 4, "lost": 0, "late": 0, "regenerated": 0}


@pytest.mark.fault(16)
async def test_of_two_attempts_the_current_one_counts():
    class Takeover(LosesAcks):
        """While the first attempt of ordinal 1 commits, another pool has started a second one."""

        async def commit(self, attempt, group):
            if attempt.ordinal == 1 and attempt.number == 1:
                second = await self._service.start_attempt(1, 0, "elsewhere")
                await self._service.commit(second, replace(group, attempt=second.number))
            return await self._service.commit(attempt, group)

    async with world(buffer=lambda service: Takeover(service, 0)) as w:
        report = await w.rollout(1)
        assert (report.committed, report.already) == (3, 1)
        (group,) = await w.groups(1)
        assert group.attempt == 2
        assert (await w.buffer.status())["attempts"]["late"] == 1


@pytest.mark.fault(17)
async def test_a_failed_sample_has_no_reward():
    async with world(make=by_ordinal(o0={"by_index": {"3": FAILS}})) as w:
        await w.rollout(1)
        (group,) = await w.groups(0)
        assert [sample.reward for sample in group.samples] == [1.0, 1.0, 1.0, None]
        assert np.isnan(group.samples[3].logprobs).all()


async def test_an_infrastructure_fault_is_retried_with_backoff_and_a_bad_item_is_replaced():
    flaky = {"fail_phase": "init", "fail": "SandboxError", "fail_attempts": 2}
    async with world(make=by_ordinal(o0=flaky, o1=FAILS)) as w:
        report = await w.rollout(1)
        assert report.committed == 4 and report.replaced == 1 and dict(report.dropped) == {"data": 1}
        assert report.attempts == 3 + 1 + 2 + 1
        assert await w.states() == {"fetched": 5, "ready": 4, "dropped": 1}
        status = await w.buffer.status()
        assert status["dropped_by_reason"] == {"data": 1}


async def test_the_infrastructure_budget_ends_and_the_reason_is_kept():
    async with world(make=by_ordinal(o0={"fail_phase": "init", "fail": "SandboxError"})) as w:
        report = await w.rollout(1)
        assert dict(report.dropped) == {"infra_sandbox": 1} and report.replaced == 1


async def test_with_shrink_the_step_closes_short():
    async with world(make_config(rollout={"on_dropped": "shrink"}), by_ordinal(o1=FAILS)) as w:
        report = await w.rollout(1)
        assert (report.committed, report.replaced) == (3, 0)
        assert len((await w.buffer.select(1)).ordinals) == 3


async def test_a_group_needs_its_minimum_of_finished_samples():
    two_fail = {"by_index": {"0": FAILS, "1": FAILS}}
    async with world(make_config(rollout={"min_samples_per_group": 3}), by_ordinal(o1=two_fail)) as w:
        assert dict((await w.rollout(1)).dropped) == {"data": 1}


async def test_the_breaker_ends_a_rollout_in_which_everything_fails():
    config = make_config(rollout={"max_consecutive_failures": 6})
    async with world(config, by_ordinal(rest=FAILS)) as w:
        with pytest.raises(BreakerTripped, match="6 groups failed in a row .*max_consecutive_failures.*DataError: scripted fault"):
            await w.rollout(1)
        assert idle(w.pool)


async def test_a_replacement_drawn_before_a_crash_is_rolled_out_after_it():
    async with world(make=by_ordinal(o1=FAILS)) as w:
        batches = await w.assign(1)
        attempt = await w.buffer.start_attempt(1, 0, "before")
        await w.buffer.end_attempt(attempt, "data", "data")
        await w.buffer.replace(1, None)
        report = await w.pool.rollout(1, batches)
        assert report.committed == 4 and (await w.groups(4))[0].ordinal == 4
        assert (await w.pool.rollout(1, batches)).committed == 0


async def test_equal_rewards_are_refilled_up_to_the_bound_and_then_kept():
    config = make_config(rollout={"filters": {"zero_advantage": True, "max_refill": 0.5}})
    mixed = {"by_index": {"0": {"reward": 0.0}}}
    async with world(config, lambda ordinal: make_task(ordinal, mixed if ordinal in (0, 4) else None)) as w:
        report = await w.rollout(1)
        assert dict(report.dropped) == {"zero_advantage": 2} and report.committed == 4
        assert (await w.buffer.status())["dropped_by_reason"] == {"zero_advantage": 2}


@pytest.mark.fault(28)
async def test_hundreds_of_samples_at_once_keep_to_the_ceiling_and_none_fails():
    running = []

    class Counting(Echo):
        async def generate(self, requests, version):
            running.append(w.pool.report().detail["samples_running"])
            return await super().generate(requests, version)

    config = make_config(
        spec={"agent": "single_turn", "resource": {"concurrency": 4, "cpu": 1}, "batch_size": None},
        rollout={"tasks_per_step": 50},
        buffer={"capacity": 200},
    )
    async with world(config, engine=Counting(), nodes=(NodeSpec("here", (), 4, 4),)) as w:
        slots = await w.buffer.assign(1, 50, None)
        report = await w.pool.rollout(1, [Batch("1.0", "single_turn", "single_turn", tuple(slot.ordinal for slot in slots))])
        assert report.committed == 50 and report.aborted == 0
        assert max(running) <= 4 and now() == pytest.approx(50)


async def test_more_samples_than_tokens_run_in_turns():
    config = make_config(spec={"resource": {"concurrency": 3}})
    async with world(config, by_ordinal(rest={"run_s": 1.0}), nodes=(NodeSpec("here", (), 1, 1),)) as w:
        assert (await w.rollout(1)).samples == 16
        assert now() == pytest.approx(2)  # 3 samples, then 1, in all four groups at the same time


async def test_two_steps_roll_out_at_the_same_time_and_share_the_tokens():
    config = make_config(spec={"resource": {"cpu": 1}})
    async with world(config, by_ordinal(rest={"run_s": 1.0}), nodes=(NodeSpec("here", (), 16, 1),)) as w:
        first, second = await w.assign(1), await w.assign(2)
        await asyncio.gather(w.pool.rollout(1, first), w.pool.rollout(2, second))
        assert now() == pytest.approx(2)
        assert {group.step for group in await w.groups(*range(8))} == {1, 2}


async def test_the_version_at_dispatch_is_the_lowest_that_made_a_token():
    engine = Echo(version=5)
    async with world(make_config(spec={"agent": "single_turn"}), engine=engine) as w:
        await w.rollout(1)
        assert {group.weight_version for group in await w.groups(0, 1, 2, 3)} == {5}


async def test_stop_dispatches_nothing_new_and_waits_for_what_runs():
    config = make_config(spec={"resource": {"cpu": 1}})
    async with world(config, by_ordinal(rest={"run_s": 10.0}), nodes=(NodeSpec("here", (), 8, 1),)) as w:
        rolling = asyncio.create_task(w.pool.rollout(1, await w.assign(1)))
        await asyncio.sleep(1)
        assert await w.pool.stop(2) == 2
        assert await w.pool.stop(30) == 0
        assert await w.states() == {"fetched": 4, "ready": 2, "pending": 2}
        rolling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rolling
        assert idle(w.pool)


async def test_kept_samples_of_an_unfinished_group_are_not_played_again():
    engine = Echo()
    config = make_config(spec={"agent": "single_turn"}, buffer={"durable_samples": True})
    async with world(config, engine=engine) as w:
        batches = await w.assign(1, 4)
        attempt = await w.buffer.start_attempt(2, 0, "before")
        (first,) = await _played_alone(w, 2)
        await w.buffer.store_sample(attempt, first)
        engine.calls.clear()
        report = await w.pool.rollout(1, batches)
        assert report.committed == 4
        asked = [request.request_id for call in engine.calls for request in call if request.request_id.startswith("2.")]
        assert sorted(asked) == ["2.1.0", "2.2.0", "2.3.0"]


async def _played_alone(w, ordinal):
    token = PlacementToken("here", None, 0.0, 0.0, 0.0)
    return await w.workers[0].run_samples(make_task(ordinal), [0], Attempt(ordinal, 1, 0, 0), StepContext(1), [token])


async def test_an_unknown_error_is_the_stages_failure_with_its_cause():
    class Broken(LosesAcks):
        async def start_attempt(self, *args):
            raise KeyError("a defect")

    async with world(buffer=lambda service: Broken(service, 0)) as w:
        with pytest.raises(StageFailed, match="rollout of step 1: KeyError") as failed:
            await w.rollout(1)
        assert isinstance(failed.value.__cause__, KeyError) and idle(w.pool)


async def test_a_buffer_that_cannot_be_reached_fails_the_run_by_its_name():
    class Gone(LosesAcks):
        async def commit(self, attempt, group):
            raise ConnectionError("refused")

    async with world(buffer=lambda service: Gone(service, 0)) as w:
        with pytest.raises(StageFailed, match="stage replay_buffer: no answer to commit"):
            await w.rollout(1)
        assert now() < 60


async def test_a_training_step_leaves_its_artefacts_also_of_what_was_committed_before_a_restart():
    async with world(make=by_ordinal(o0={"reward": 0.0})) as w:
        batches = await w.assign(1)
        await w.pool.rollout(1, batches)
        await w.pool.stop(1.0)
        lines = [json.loads(line) for line in (w.paths.details / "train_1.jsonl").read_text().splitlines()]
        assert len(lines) == 16 and {line["class"] for line in lines} == {"solved", "finish_unresolved"}
        summary = json.loads((w.paths.details / "train_1.summary.json").read_text())
        assert summary["results"]["words"]["accuracy"] == 0.75
        (w.paths.details / "train_1.jsonl").unlink()
        await w.pool.rollout(1, batches)
        await w.pool.stop(1.0)
        assert len((w.paths.details / "train_1.jsonl").read_text().splitlines()) == 16


def eval_tasks(count=6, **changes):
    sampling = Sampling(temperature=0.0, max_tokens=8)
    return [make_task(o, dataset="ab"[o % 2], sampling=sampling, **{"samples": 2, **changes}) for o in range(count)]


async def test_an_evaluation_is_of_one_version_and_of_each_sample_once():
    engine = Echo(version=9)
    async with world(make_config(spec={"agent": "single_turn"}, eval={"n": 2, "k": [1, 2]}), engine=engine) as w:
        seen = []
        summary = await w.pool.evaluate("eval_3", eval_tasks(), 3, on_sample=lambda task, sample: seen.append(sample.sample_id))
        assert summary["valid"] and summary["weight_version"] == 3 and len(seen) == 12
        assert summary["results"]["a"]["accuracy"] == 1.0 and summary["results"]["a"]["pass@k"] == {"1": 1.0, "2": 1.0}
        calls = len(engine.calls)
        assert w.pool.report().detail["heartbeat"] == len(seen), "an evaluation is progress"
        assert await w.pool.evaluate("eval_3", eval_tasks(), 3) == summary and len(engine.calls) == calls
        assert await w.states() == {}


@pytest.mark.fault(18)
async def test_accuracy_is_over_the_scored_and_coverage_is_stated():
    async with world(make_config(eval={"n": 5, "k": [1], "min_coverage": 0.9})) as w:
        script = {"by_index": {"0": {"reward": None}, "1": FAILS}}
        tasks = [make_task(ordinal, script, samples=5) for ordinal in range(4)]
        summary = await w.pool.evaluate("eval_0", tasks, 0)
        figures = summary["results"]["words"]
        assert (figures["accuracy"], figures["accuracy_all"]) == (1.0, 0.6)
        assert (figures["solved"], figures["scored"], figures["total"]) == (12, 12, 20)
        assert not summary["valid"] and "12 of 20" in summary["why_invalid"][0]


@pytest.mark.fault(32)
async def test_an_evaluation_beside_training_sees_its_own_parameters_only():
    engine = Echo()
    async with world(make_config(spec={"agent": "single_turn"}), engine=engine) as w:
        batches = await w.assign(1)
        report, one, two = await asyncio.gather(
            w.pool.rollout(1, batches), w.pool.evaluate("eval_0", eval_tasks(), 0), w.pool.evaluate("other", eval_tasks(), 0)
        )
        assert report.committed == 4 and one["valid"] and two["valid"]
        for call in engine.calls:
            assert len({request.sampling.temperature for request in call}) == 1
        temperatures = [request.sampling.temperature for call in engine.calls for request in call]
        assert (temperatures.count(1.0), temperatures.count(0.0)) == (16, 24)


@pytest.mark.fault(33)
async def test_an_evaluation_outlives_a_worker_and_an_engine_that_restart():
    engine = Echo(faults=[ConnectionError("restart")])
    async with world(make_config(spec={"agent": "single_turn"}), engine=engine, workers=lambda worker: Mortal(worker, 1)) as w:
        summary = await w.pool.evaluate("eval_4", eval_tasks(), 4)
        assert summary["valid"] and summary["overall"]["scored"] == 12
        assert {path.name for path in w.paths.details.iterdir()} == {"eval_4.jsonl", "eval_4.turns.jsonl", "eval_4.summary.json"}


async def test_an_evaluation_without_workers_fails_in_bounded_time():
    async with world(workers=lambda worker: Mortal(worker, None)) as w:
        with pytest.raises(StageFailed, match="every evaluator worker died"):
            await w.pool.evaluate("eval_0", eval_tasks(), 0)
        assert now() < 60 and idle(w.pool)
        assert not w.paths.details.exists()


async def test_a_sample_that_kills_every_worker_is_given_up_and_the_evaluation_ends():
    class Poisoned(Mortal):
        async def run_samples(self, task, indices, *args):
            if task.ordinal == 1 and 0 in indices:
                await asyncio.sleep(0.1)
                raise ConnectionError("killed by this very sample")
            return await self._worker.run_samples(task, indices, *args)

    config = make_config(spec={"resource": {"concurrency": 2}}, run={"max_actor_restarts": 10})
    async with world(config, workers=lambda worker: Poisoned(worker, 0)) as w:
        summary = await w.pool.evaluate("eval_0", eval_tasks(), 0)
        assert (summary["overall"]["scored"], summary["failure_classes"]["infra"]) == (11, 1)
