"""The stall watchdog and the engine probe, on virtual time."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.buffer.api import StageReport
from pipeline.errors import StageFailed, Stalled
from pipeline.pumps import Pump, PumpKind, supervise
from pipeline.watchdog import EngineProbe, StallWatchdog

pytestmark = pytest.mark.looptime
STAGES = ("evaluator", "teacher", "train")


def now() -> float:
    return asyncio.get_running_loop().time()


class Stages:
    """Reports of three stages; the test turns the counters."""

    def __init__(self) -> None:
        self.finished = dict.fromkeys(STAGES, 0)
        self.backlog = dict.fromkeys(STAGES, 0)
        self.detail: dict[str, dict] = {name: {} for name in STAGES}
        self.held_since = dict.fromkeys(STAGES, 0.0)

    async def probe(self) -> list[StageReport]:
        return [
            StageReport(
                stage=name,
                actor=f"{name}-actor",
                pid=7,
                node="node-a",
                started=self.finished[name] + self.backlog[name],
                finished=self.finished[name],
                backlog=self.backlog[name],
                oldest_s=now() - self.held_since[name],
                detail=dict(self.detail[name]),
            )
            for name in STAGES
        ]

    async def turn(self, name: str, every_s: float, until: float = 1e9) -> None:
        while now() < until:
            await asyncio.sleep(every_s)
            self.finished[name] += 1


def watchdog(stages: Stages, stall_s: float = 40.0) -> Pump:
    return Pump("watchdog", PumpKind.MONITOR, StallWatchdog(stages.probe, stall_s, now).run)


async def never() -> None:
    await asyncio.Event().wait()


@pytest.mark.fault(15)
async def test_commits_go_on_and_the_hanging_teacher_is_named():
    stages = Stages()
    stages.backlog["teacher"] = 5
    stages.detail["teacher"] = {"oldest": "group 17 (step 3)", "holder": "replica 0 of teacher math"}
    with pytest.raises(Stalled) as caught:
        await supervise(
            [
                watchdog(stages),
                Pump("evaluator", PumpKind.PRODUCER, lambda: stages.turn("evaluator", 2)),
                Pump("train", PumpKind.TERMINAL, never),
            ]
        )
    assert caught.value.stage == "teacher" and 40 <= now() <= 42
    for told in ("group 17 (step 3)", "for 40 s", "replica 0 of teacher math", "pid 7", "observe.stall_s 40"):
        assert told in str(caught.value)


@pytest.mark.fault(14)
async def test_the_producer_ends_then_the_trainer_wedges_and_is_named():
    stages = Stages()
    stages.backlog["train"] = 8

    async def train() -> None:
        await stages.turn("train", 5, until=30)
        await never()

    with pytest.raises(Stalled) as caught:
        await supervise(
            [
                watchdog(stages),
                Pump("evaluator", PumpKind.PRODUCER, lambda: stages.turn("evaluator", 2, until=20)),
                Pump("train", PumpKind.TERMINAL, train),
            ]
        )
    assert caught.value.stage == "train" and 70 <= now() <= 72


async def test_work_that_ends_by_its_own_deadlines_is_no_stall_before_them():
    stages = Stages()
    stages.backlog["evaluator"] = 1
    stages.detail["evaluator"] = {"bound_s": 90.0, "oldest": "group 3 (step 1)"}
    with pytest.raises(Stalled, match="no progress for 9[0-2] s.*group 3") as caught:
        await supervise([watchdog(stages), Pump("train", PumpKind.TERMINAL, never)])
    assert caught.value.stage == "evaluator" and 90 <= now() <= 92


async def test_a_bound_of_one_stage_excuses_no_other():
    stages = Stages()
    stages.backlog |= {"evaluator": 1, "teacher": 1}
    stages.detail["evaluator"] = {"bound_s": 90.0}
    with pytest.raises(Stalled) as caught:
        await supervise([watchdog(stages), Pump("train", PumpKind.TERMINAL, never)])
    assert caught.value.stage == "teacher" and 40 <= now() <= 42


async def test_nothing_moving_anywhere_fires_even_when_no_stage_admits_to_work():
    with pytest.raises(Stalled, match="nothing moved in any stage for 40 s.*no stage holds any work") as caught:
        await StallWatchdog(Stages().probe, 40, now).run()
    assert caught.value.stage == "pipeline"


async def test_a_stage_without_work_is_never_accused_while_others_move():
    stages = Stages()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1000):
            async with asyncio.TaskGroup() as group:
                group.create_task(stages.turn("evaluator", 3))
                group.create_task(StallWatchdog(stages.probe, 40, now).run())


async def test_work_that_arrives_late_starts_the_clock_then():
    stages = Stages()

    async def arrive() -> None:
        await asyncio.sleep(100)
        stages.backlog["teacher"] = 1
        stages.held_since["teacher"] = now()

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(stages.turn("evaluator", 3))
            group.create_task(arrive())
            group.create_task(StallWatchdog(stages.probe, 40, now).run())
    assert caught.value.exceptions[0].stage == "teacher" and 140 <= now() <= 142


async def test_heartbeats_keep_one_long_call_alive():
    stages = Stages()
    stages.backlog["teacher"] = 1

    async def beat() -> None:
        for count in range(20):
            stages.detail["teacher"] = {"heartbeat": count}
            await asyncio.sleep(30)

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(beat())
            group.create_task(StallWatchdog(stages.probe, 40, now).run())
    assert caught.value.exceptions[0].stage == "teacher" and 610 <= now() <= 612


async def test_a_stage_that_waits_for_another_is_not_the_one_accused():
    stages = Stages()
    stages.backlog["evaluator"] = stages.backlog["train"] = 4
    stages.detail["evaluator"] = {"waiting_for": "buffer capacity"}
    with pytest.raises(Stalled) as caught:
        await StallWatchdog(stages.probe, 40, now).run()
    assert caught.value.stage == "train"


async def test_of_several_stuck_stages_the_first_to_stand_still_is_named_and_the_others_are_listed():
    stages = Stages()
    stages.backlog = dict.fromkeys(STAGES, 2)

    async def everything() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(stages.turn("evaluator", 0.5, until=10))
            group.create_task(stages.turn("train", 0.5, until=10))
            group.create_task(StallWatchdog(stages.probe, 40, now, poll_s=30).run())

    with pytest.raises(ExceptionGroup) as caught:
        await everything()
    error = caught.value.exceptions[0]
    assert error.stage == "teacher" and "also" not in str(error) and now() == 60
    stages = Stages()
    stages.backlog = dict.fromkeys(STAGES, 2)
    with pytest.raises(Stalled, match="stage evaluator: .*also teacher: holds 2.*also train: holds 2"):
        await StallWatchdog(stages.probe, 40, now).run()


async def test_reports_that_never_arrive_are_a_stall_too():
    with pytest.raises(Stalled, match="reports did not arrive within 40 s"):
        await StallWatchdog(never, 40, now).run()
    assert now() == 40


class Flaky:
    """An engine whose `info` fails or hangs on the given calls."""

    def __init__(self, bad: set[int], hang: bool = False) -> None:
        self.bad, self.hang, self.calls = bad, hang, 0

    async def info(self) -> None:
        self.calls += 1
        if self.calls in self.bad:
            if self.hang:
                await never()
            raise ConnectionError("refused")


async def test_the_engine_probe_forgives_a_restart_and_names_an_engine_that_stays_away():
    engine = Flaky({2, 3, 5, 6, 7})
    with pytest.raises(StageFailed, match=r"stage engine: no answer for 15 s \(run.start_timeout_s 15\): ConnectionError: refused"):
        await EngineProbe("engine", engine, 15, now, every_s=5).run()
    assert engine.calls == 7 and now() == 30


async def test_the_engine_probe_has_a_deadline():
    with pytest.raises(StageFailed) as caught:
        await EngineProbe("engine", Flaky({1, 2, 3}, hang=True), 60, now, every_s=5, timeout_s=20).run()
    assert isinstance(caught.value.__cause__, TimeoutError) and now() == 70
