import asyncio

import pytest

from pipeline.buffer.api import Assignment
from pipeline.config.schema import RunConfig
from pipeline.errors import CapacityFull
from pipeline.fetcher.catalog import Catalog
from pipeline.fetcher.service import Fetcher


class Ledger:
    """The two calls that a fetcher makes, kept in memory; room for `capacity` groups until `free` is called."""

    def __init__(self, capacity: int = 1000) -> None:
        self.capacity = capacity
        self.steps: dict[int, list[Assignment]] = {}
        self.next = 0
        self.waits = 0

    async def assign(self, step, count, limit):
        if step not in self.steps:
            if self.next + count > self.capacity:
                raise CapacityFull("full")
            self.steps[step] = [self._slot(step, slot) for slot in range(count) if limit is None or self.next < limit]
        return list(reversed(self.steps[step]))

    async def wait_capacity(self, count, wait_s):
        self.waits += 1
        await asyncio.sleep(wait_s)
        return False

    async def replace(self, ordinal, limit):
        return None if limit is not None and self.next >= limit else self._slot(1, 0)

    def _slot(self, step, slot):
        self.next += 1
        return Assignment(step, slot, self.next - 1, "pending")


def fetcher(ledger, **dataset):
    config = RunConfig.model_validate(
        {
            "student": {"architecture": {}},
            "algorithm": {"name": "grpo"},
            "datasets": {"w": {"generator": "spell_backward", "size": 60, **dataset}},
            "rollout": {"tasks_per_step": 4},
        }
    )
    catalog = Catalog(config)
    return Fetcher(config, catalog, ledger), catalog


async def test_a_repeated_fetch_gives_the_same_ordinals():
    stage, catalog = fetcher(Ledger())
    first = await stage.fetch(1)
    assert first == await stage.fetch(1) == [0, 1, 2, 3]
    assert await stage.fetch(2) == [4, 5, 6, 7]
    assert stage.tasks(first) == [catalog.task(ordinal) for ordinal in first]
    assert (stage.report().started, stage.report().finished) == (8, 4)
    await stage.fetch(1), stage.tasks(first)
    assert (stage.report().started, stage.report().finished) == (8, 4), "each ordinal counts once"
    stage.tasks([*first, 4])
    assert stage.report().detail["served"] == {"w": 5}


async def test_end_of_data():
    stage, catalog = fetcher(Ledger(), epochs=1)
    got = []
    for step in range(1, 100):
        ordinals = await stage.fetch(step)
        if not ordinals:
            break
        got += ordinals
    assert got == list(range(catalog.limit))
    assert await stage.replacement(3) is None


async def test_replacement_is_the_next_task():
    stage, catalog = fetcher(Ledger())
    await stage.fetch(1)
    assert await stage.replacement(2) == catalog.task(4)


@pytest.mark.looptime
async def test_waits_for_room():
    ledger = Ledger(capacity=4)
    stage, _ = fetcher(ledger)
    await stage.fetch(1)
    waiting = asyncio.create_task(stage.fetch(2))
    await asyncio.sleep(12)
    assert ledger.waits >= 2 and not waiting.done() and stage.report().backlog == 1
    assert "make room" in stage.report().detail["waiting_for"], "the watchdog is to look at the one who makes it"
    ledger.capacity = 8
    assert await waiting == [4, 5, 6, 7]
    assert stage.report().backlog == 0 and stage.report().detail["waiting_for"] is None


@pytest.mark.looptime
async def test_a_silent_ledger_is_a_time_out():
    ledger = Ledger()
    ledger.assign = lambda *_: asyncio.sleep(1e9)
    stage, _ = fetcher(ledger)
    with pytest.raises(TimeoutError):
        await stage.fetch(1)


def test_a_teacher_that_reads_examples_finds_them_between_the_system_message_and_the_task():
    dataset = {"source": "reasoning_gym", "generator": "spell_backward", "size": 50, "system": "Spell it backward."}
    config = RunConfig.model_validate(
        {
            "student": {"architecture": {}},
            "teachers": {"reader": {"architecture": {}, "shots": 2}, "plain": {"architecture": {}}},
            "datasets": {"d": dataset | {"teacher": "reader"}},
        }
    )
    served = Fetcher(config, Catalog(config), Ledger())
    asked, plain, read = served.eval_tasks(), served.eval_tasks("plain"), served.eval_tasks("reader")
    assert plain == asked and [task.task_id for task in read] == [task.task_id for task in asked]
    assert [role for role, _ in read[0].messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert read[0].messages[-1] == asked[0].messages[-1]
