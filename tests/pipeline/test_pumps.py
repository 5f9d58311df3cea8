"""supervise(): whose end counts, in which order, and that nothing is left behind. All on virtual time."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import StageFailed, Stalled
from pipeline.pumps import Pump, PumpKind, supervise

MONITOR, PRODUCER, STAGE, TERMINAL = PumpKind.MONITOR, PumpKind.PRODUCER, PumpKind.STAGE, PumpKind.TERMINAL
pytestmark = pytest.mark.looptime


class Script:
    """A pump that ends after `seconds` by returning `result` or raising `error`; None: never."""

    def __init__(self, seconds: float | None, *, result: object = None, error: BaseException | None = None) -> None:
        self.seconds, self.result, self.error = seconds, result, error
        self.cancelled = False
        self.ended_at: float | None = None

    async def __call__(self) -> object:
        try:
            if self.seconds is None:
                await asyncio.Event().wait()
            else:
                await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        finally:
            self.ended_at = asyncio.get_running_loop().time()
        if self.error is not None:
            raise self.error
        return self.result


class Drainable:
    """A stage with `backlog_s` seconds of work left when it is asked to drain."""

    def __init__(self, backlog_s: float, error: BaseException | None = None) -> None:
        self.backlog_s, self.error = backlog_s, error
        self.empty = asyncio.Event()
        self.drained = self.cancelled = False

    async def run(self) -> None:
        try:
            await self.empty.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def drain(self) -> None:
        await asyncio.sleep(self.backlog_s)
        if self.error is not None:
            raise self.error
        self.drained = True
        self.empty.set()


def now() -> float:
    return asyncio.get_running_loop().time()


def leftovers() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_returns_the_terminal_result_and_cancels_the_rest():
    loop_for_ever, monitor = Script(None), Script(None)
    result = await supervise(
        [
            Pump("train", TERMINAL, Script(3, result="trained")),
            Pump("evaluator", PRODUCER, loop_for_ever),
            Pump("watchdog", MONITOR, monitor),
        ]
    )
    assert result == "trained" and now() == 3
    assert loop_for_ever.cancelled and monitor.cancelled
    assert leftovers() == []


async def test_a_failure_carries_the_pumps_own_exception_as_its_cause():
    error = ValueError("boom")
    with pytest.raises(StageFailed, match="stage evaluator: ValueError: boom") as caught:
        await supervise([Pump("train", TERMINAL, Script(None)), Pump("evaluator", PRODUCER, Script(2, error=error))])
    assert caught.value.__cause__ is error and caught.value.stage == "evaluator"
    assert now() == 2 and leftovers() == []


async def test_a_stage_failure_that_already_names_its_stage_is_raised_as_it_is():
    stalled = Stalled("teacher", "no progress for 120 s")
    with pytest.raises(Stalled) as caught:
        await supervise([Pump("train", TERMINAL, Script(None)), Pump("watchdog", MONITOR, Script(1, error=stalled))])
    assert caught.value is stalled


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
async def test_precedence_among_simultaneous_failures_does_not_depend_on_the_order_given(order, caplog):
    pumps = [
        Pump("watchdog", MONITOR, Script(1, error=RuntimeError("the diagnosis"))),
        Pump("train", TERMINAL, Script(1, error=RuntimeError("a symptom"))),
        Pump("teacher", STAGE, Script(1, error=RuntimeError("another"))),
        Pump("evaluator", PRODUCER, Script(1, error=RuntimeError("a third"))),
    ]
    with caplog.at_level(logging.WARNING), pytest.raises(StageFailed, match="stage watchdog: RuntimeError: the diagnosis"):
        await supervise([pumps[index] for index in order])
    told = {name for name in ("train", "teacher", "evaluator") if f"pump:{name} failed too" in caplog.text}
    assert told == {"train", "teacher", "evaluator"}


async def test_the_terminal_failure_beats_a_stage_failure_of_the_same_moment():
    with pytest.raises(StageFailed) as caught:
        await supervise(
            [
                Pump("teacher", STAGE, Script(1, error=RuntimeError("stage"))),
                Pump("train", TERMINAL, Script(1, error=RuntimeError("terminal"))),
            ]
        )
    assert caught.value.stage == "train"


async def test_a_stage_failure_is_not_hidden_by_the_terminal_return_of_the_same_moment():
    with pytest.raises(StageFailed) as caught:
        await supervise(
            [
                Pump("train", TERMINAL, Script(1, result="fine")),
                Pump("teacher", STAGE, Script(1, error=RuntimeError("lost a column"))),
            ]
        )
    assert caught.value.stage == "teacher"


async def test_a_monitor_that_returns_has_failed():
    with pytest.raises(StageFailed, match="stage watchdog: a monitor ended"):
        await supervise([Pump("train", TERMINAL, Script(None)), Pump("watchdog", MONITOR, Script(2))])
    assert now() == 2


@pytest.mark.fault(14)
async def test_monitors_stay_armed_after_the_producer_ended_and_name_the_trainer():
    stage = Drainable(backlog_s=1)
    with pytest.raises(Stalled) as caught:
        await supervise(
            [
                Pump("evaluator", PRODUCER, Script(1)),
                Pump("teacher", STAGE, stage.run, stage.drain),
                Pump("train", TERMINAL, Script(None)),
                Pump("watchdog", MONITOR, Script(50, error=Stalled("train", "no progress for 40 s"))),
            ]
        )
    assert caught.value.stage == "train" and now() == 50
    assert stage.drained and leftovers() == []


@pytest.mark.fault(5)
async def test_the_end_of_data_drains_the_stage_and_the_trainer_still_trains_it():
    stage = Drainable(backlog_s=2)

    async def train() -> str:
        await stage.empty.wait()
        await asyncio.sleep(1)
        return "trained the last group"

    result = await supervise(
        [
            Pump("evaluator", PRODUCER, Script(1)),
            Pump("teacher", STAGE, stage.run, stage.drain),
            Pump("train", TERMINAL, train),
        ]
    )
    assert result == "trained the last group" and now() == 4 and not stage.cancelled


async def test_stages_drain_only_after_the_last_producer_ended():
    stage = Drainable(backlog_s=0)
    producers = [Pump(f"producer{index}", PRODUCER, Script(index + 1)) for index in range(3)]
    await supervise([*producers, Pump("teacher", STAGE, stage.run, stage.drain), Pump("train", TERMINAL, stage.empty.wait)])
    assert now() == 3


async def test_the_end_of_the_terminal_waits_for_a_draining_stage():
    stage = Drainable(backlog_s=30)
    pumps = [Pump("evaluator", PRODUCER, Script(1)), Pump("teacher", STAGE, stage.run, stage.drain)]
    assert await supervise([*pumps, Pump("train", TERMINAL, Script(2, result=7))], drain_s=60) == 7
    assert stage.drained and now() == 31


async def test_a_stage_that_never_drains_fails_by_name_within_its_deadline():
    stage = Drainable(backlog_s=1e6)
    pumps = [Pump("evaluator", PRODUCER, Script(1)), Pump("teacher", STAGE, stage.run, stage.drain)]
    with pytest.raises(StageFailed, match="stage teacher: did not drain within 60 s"):
        await supervise([*pumps, Pump("train", TERMINAL, Script(2))], drain_s=60)
    assert now() == 62 and leftovers() == []


async def test_a_failed_drain_is_the_stages_failure():
    stage = Drainable(backlog_s=1, error=OSError("disk"))
    pumps = [Pump("evaluator", PRODUCER, Script(1)), Pump("teacher", STAGE, stage.run, stage.drain)]
    with pytest.raises(StageFailed, match="stage teacher: OSError: disk"):
        await supervise([*pumps, Pump("train", TERMINAL, Script(None))])


async def test_a_terminal_that_ends_early_cancels_producers_and_stages_without_draining():
    stage, producer = Drainable(backlog_s=100), Script(None)
    pumps = [Pump("evaluator", PRODUCER, producer), Pump("teacher", STAGE, stage.run, stage.drain)]
    await supervise([*pumps, Pump("train", TERMINAL, Script(5))])
    assert now() == 5 and producer.cancelled and stage.cancelled and not stage.drained


async def test_a_stage_may_not_end_before_its_producers():
    pumps = [Pump("evaluator", PRODUCER, Script(10)), Pump("teacher", STAGE, Script(1)), Pump("train", TERMINAL, Script(20))]
    with pytest.raises(StageFailed, match="stage teacher: ended before its producers did"):
        await supervise(pumps)


async def test_without_a_terminal_the_end_of_all_workers_is_the_end():
    monitor = Script(None)
    result = await supervise([Pump("teacher", STAGE, Script(4)), Pump("watchdog", MONITOR, monitor)])
    assert result is None and now() == 4 and monitor.cancelled


async def test_a_cancellation_from_within_is_a_failure_of_that_pump():
    with pytest.raises(StageFailed, match="stage evaluator: cancelled itself"):
        await supervise(
            [Pump("evaluator", PRODUCER, Script(1, error=asyncio.CancelledError())), Pump("train", TERMINAL, Script(None))]
        )


async def test_cancelling_supervise_cancels_and_awaits_everything():
    scripts = [Script(None) for _ in range(4)]
    kinds = (MONITOR, PRODUCER, STAGE, TERMINAL)
    pumps = [Pump(kind.value, kind, script) for kind, script in zip(kinds, scripts, strict=True)]
    task = asyncio.create_task(supervise(pumps))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(script.cancelled for script in scripts) and leftovers() == []


async def test_a_pump_that_refuses_to_end_is_named_and_not_waited_for(caplog):
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    with pytest.raises(StageFailed, match="stage train"):
        await supervise(
            [Pump("evaluator", PRODUCER, stubborn), Pump("train", TERMINAL, Script(1, error=ValueError("x")))], cancel_s=5
        )
    assert now() == 6 and "pump:evaluator did not end within 5 s" in caplog.text
    release.set()
    await asyncio.sleep(0)


async def test_what_fails_while_it_is_cancelled_is_logged_and_does_not_replace_the_diagnosis(caplog):
    async def messy() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("cleanup failed")

    with pytest.raises(StageFailed, match="ValueError: first"):
        await supervise([Pump("pool", PRODUCER, messy), Pump("train", TERMINAL, Script(1, error=ValueError("first")))])
    assert "pump:pool failed too" in caplog.text and "cleanup failed" in caplog.text


async def test_a_run_that_raises_before_its_first_await_fails_like_any_other():
    def broken():
        raise TypeError("not even a coroutine")

    other = Script(None)
    with pytest.raises(StageFailed, match="TypeError: not even a coroutine"):
        await supervise([Pump("pool", PRODUCER, broken), Pump("train", TERMINAL, other)])
    assert leftovers() == []


async def test_two_terminals_or_no_pump_are_refused():
    with pytest.raises(ValueError, match="at most one terminal"):
        await supervise([Pump("a", TERMINAL, Script(1)), Pump("b", TERMINAL, Script(1))])
    with pytest.raises(ValueError):
        await supervise([])


def _expected(kinds, ends) -> tuple[str, float | str]:
    """The rules, read off a table of (kind, seconds, fails): who decides, and when."""
    events = sorted({seconds for seconds, _ in ends})
    rank = {MONITOR: 0, TERMINAL: 1, STAGE: 2, PRODUCER: 2}
    producers = [index for index, kind in enumerate(kinds) if kind is PRODUCER]
    for moment in events:
        done = [index for index, (seconds, _) in enumerate(ends) if seconds <= moment]
        upstream = bool(producers) and all(index in done for index in producers)
        for index in sorted(range(len(kinds)), key=lambda index: rank[kinds[index]]):
            if index not in done:
                continue
            early_stage = kinds[index] is STAGE and producers and not upstream
            if ends[index][1] or kinds[index] is MONITOR or early_stage:
                return str(index), moment
        if any(kinds[index] is TERMINAL for index in done):
            return "ok", moment
    raise AssertionError("the terminal always ends")


@given(
    st.lists(st.tuples(st.sampled_from([MONITOR, PRODUCER, STAGE]), st.integers(1, 4), st.booleans()), max_size=4),
    st.tuples(st.integers(1, 4), st.booleans()),
)
@settings(deadline=None, max_examples=60)
def test_any_mix_of_pumps_ends_when_and_how_the_rules_say(others, terminal):
    kinds = [kind for kind, _, _ in others] + [TERMINAL]
    ends = [(seconds, fails) for _, seconds, fails in others] + [terminal]

    async def main() -> tuple[str, float]:
        pumps = [
            Pump(str(index), kind, Script(seconds, error=ValueError("x") if fails else None))
            for index, (kind, (seconds, fails)) in enumerate(zip(kinds, ends, strict=True))
        ]
        try:
            await supervise(pumps)
        except StageFailed as error:
            return error.stage, now()
        finally:
            assert leftovers() == []
        return "ok", now()

    loop = _virtual_loop()
    try:
        assert loop.run_until_complete(main()) == _expected(kinds, ends)
    finally:
        loop.close()


def _virtual_loop() -> asyncio.AbstractEventLoop:
    import looptime

    return looptime.new_event_loop(start=0)
