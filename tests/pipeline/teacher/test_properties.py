"""Whatever the arrivals, the caps, the replicas and the faults: every group is settled once, with the column it would get alone."""

from __future__ import annotations

import asyncio

import looptime
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import EngineUnavailable
from pipeline.teacher.scorer import score_groups
from tests.pipeline.teacher.fakes import TEACHERS, Run, ToyTeacher, make_config, make_group, make_sample, opened, running

GROUPS = 12

shapes = st.lists(
    st.tuples(
        st.floats(0, 3),  # seconds after the group before
        st.booleans(),  # is there a wake-up
        st.lists(st.sampled_from(["1111", "1", "11011", "", "aborted"]), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=GROUPS,
)
stages = st.fixed_dictionaries(
    {
        "max_batch_rows": st.integers(1, 20),
        "max_batch_tokens": st.integers(1, 200),
        "linger_ms": st.sampled_from([0.0, 300.0]),
    }
)


def sample_of(ordinal: int, index: int, mask: str):
    return make_sample(ordinal, index, status="aborted") if mask == "aborted" else make_sample(ordinal, index, mask=mask)


def on_virtual_time(coroutine):
    loop = looptime.new_event_loop(start=0)
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def same_columns(left, right) -> None:
    assert left.producer == right.producer and left.samples.keys() == right.samples.keys()
    for sample_id, arrays in left.samples.items():
        assert arrays.keys() == right.samples[sample_id].keys()
        for name, array in arrays.items():
            np.testing.assert_allclose(array, right.samples[sample_id][name], atol=1e-6, err_msg=f"{sample_id} {name}")


async def play(arrivals, stage, teachers: int, replicas: int, signal: str, flaky: frozenset[int]) -> None:
    config = make_config(teachers, signal=signal, tasks=GROUPS, **stage)

    def faults(call, rows):
        return EngineUnavailable("restarting") if call in flaky else None

    fleet = {
        name: [ToyTeacher(salt, call_s=0.7, row_s=0.1, faults=faults) for _ in range(replicas)]
        for salt, name in enumerate(TEACHERS[:teachers])
    }
    async with opened(config) as run:
        scorer = run.scorer(fleet)
        async with running(scorer) as task:
            groups = await arrive(run, scorer, arrivals, teachers)
            await scorer.drain(1)
            await scorer.drain()
            await task
        assert sorted(run.produced) == [group.ordinal for group in groups]
        assert await run.states() == {"ready": len(groups)}
        pulled = await score_groups(groups, scorer.teachers, config.teacher_stage.model_copy(update={"max_batch_rows": 3}))
        for group, found, one in zip(
            await run.buffer.read([group.ordinal for group in groups], columns=True), pulled, groups, strict=True
        ):
            same_columns(group.columns["teacher"], found)
            same_columns(found, (await score_groups([one], scorer.teachers, config.teacher_stage))[0])
    report = scorer.report()
    assert (report.started, report.finished, report.backlog) == (len(groups), len(groups), 0)


async def arrive(run: Run, scorer, arrivals, teachers: int):
    groups = []
    ordinals = await run.assign(1, len(arrivals))
    for ordinal, (wait_s, wake, masks) in zip(ordinals, arrivals, strict=True):
        await asyncio.sleep(wait_s)
        samples = [sample_of(ordinal, index, mask) for index, mask in enumerate(masks)]
        groups.append(make_group(ordinal, teacher=TEACHERS[ordinal % teachers], samples=samples))
        await run.commit(groups[-1])
        if wake:
            scorer.submit()
    await run.buffer.close_rollout(1)
    return groups


@given(
    arrivals=shapes,
    stage=stages,
    teachers=st.sampled_from([1, 3]),
    replicas=st.integers(1, 3),
    signal=st.sampled_from(["sampled", "topk", "full"]),
    flaky=st.frozensets(st.sampled_from([1, 3]), max_size=2),
)
@settings(deadline=None, max_examples=60)
def test_every_group_is_scored_exactly_once_and_as_if_it_were_alone(arrivals, stage, teachers, replicas, signal, flaky):
    on_virtual_time(play(arrivals, stage, teachers, replicas, signal, flaky))


@given(bad=st.frozensets(st.integers(0, 11), max_size=6), stage=stages, replicas=st.integers(1, 3))
@settings(deadline=None, max_examples=30)
def test_exactly_the_refused_groups_are_dropped(bad, stage, replicas):
    async def main() -> None:
        async with opened(make_config(tasks=GROUPS, max_consecutive_scoring_drops=20, **stage)) as run:
            for ordinal in await run.assign(1):
                samples = [make_sample(ordinal, index, poison=ordinal in bad and index == 1) for index in range(2)]
                await run.commit(make_group(ordinal, samples=samples))
            scorer = run.scorer({"ant": [ToyTeacher(refuse=True) for _ in range(replicas)]})
            async with running(scorer):
                await scorer.drain(1)
            assert sorted(run.produced) == sorted(set(range(GROUPS)) - bad)
            assert (await run.states()).get("dropped", 0) == len(bad)

    on_virtual_time(main())
