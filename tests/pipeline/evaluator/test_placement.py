"""The placement pool: what fits is placed, what was taken comes back, and nobody waits for ever."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from pipeline.errors import AdmissionError
from pipeline.evaluator.nodes import UNBOUNDED, capacity
from pipeline.evaluator.placement import PlacementPool
from pipeline.evaluator.spec import GPU_UNIT, NodeSpec, Resource, Units


def fill(pool: PlacementPool, per_sample: Resource) -> list:
    tokens = []
    while (taken := pool.try_acquire_batch(per_sample, per_sample, 1)) is not None:
        tokens += taken
    return tokens


@pytest.mark.parametrize(("gpu", "packed"), [(0.33, 3), (0.05, 20), (1 / 3, 3), (0.1, 10), (1.0, 1)])
def test_a_gpu_packs_as_many_samples_as_its_share_says(gpu, packed):
    pool = PlacementPool([NodeSpec("n", (7,), 8, 8)])
    tokens = fill(pool, Resource(gpu=gpu))
    assert len(tokens) == packed == capacity([NodeSpec("n", (7,), 8, 8)], Resource(gpu=gpu))
    assert {token.gpu_id for token in tokens} == {7}


@pytest.mark.fault(25)
def test_a_batch_of_20_samples_of_a_twentieth_runs_on_one_gpu():
    sample = Resource(gpu=0.05)
    assert len(PlacementPool([NodeSpec("n", (0,))]).try_acquire_batch(sample.times(20), sample, 20)) == 20


def test_the_worked_figure_96_cpu_384_gb_holds_24_samples_of_4_cpu_16_gb():
    assert len(fill(PlacementPool([NodeSpec("n", (), 96, 384)]), Resource(cpu=4, memory_gb=16))) == 24


def test_a_thing_of_another_kind_is_counted_like_the_rest():
    nodes = [NodeSpec("a", (), 8, 8, (("licence", 2.0),)), NodeSpec("b", (), 8, 8, (("licence", 0.5),)), NodeSpec("c", (), 8, 8)]
    pool, half = PlacementPool(nodes), Resource(cpu=1, custom={"licence": 0.5})
    assert capacity(nodes, half) == 5
    tokens = fill(pool, half)
    assert sorted(token.node for token in tokens) == ["a", "a", "a", "a", "b"]
    pool.release(tokens[:1])
    assert len(fill(pool, half)) == 1
    assert len(pool.try_acquire_batch(Resource(cpu=2), Resource(cpu=1), 2)) == 2
    with pytest.raises(AdmissionError):
        pool.try_acquire_batch(half.times(6), half, 6)


def test_a_budget_of_another_kind_ends_a_batch_too():
    pool = PlacementPool([NodeSpec("n", (), 8, 8, (("seat", 4.0),))])
    assert len(pool.try_acquire_batch(Resource(custom={"seat": 2.0}), Resource(custom={"seat": 1.0}), 4)) == 2


def test_gpu_0_gates_on_cpu_and_memory_alone():
    tokens = fill(PlacementPool([NodeSpec("n", (0, 1), 4, 100)]), Resource(cpu=1, memory_gb=10))
    assert len(tokens) == 4 and {token.gpu_id for token in tokens} == {None}


def test_the_node_with_most_free_gpu_then_memory_comes_first_and_the_fullest_gpu_that_fits_is_taken():
    pool = PlacementPool([NodeSpec("small", (0,), 8, 8), NodeSpec("big", (0, 1), 8, 8), NodeSpec("roomy", (0,), 8, 64)])
    half = Resource(gpu=0.5)
    taken = pool.try_acquire_batch(half.times(5), half, 5)
    assert [(token.node, token.gpu_id) for token in taken] == [
        ("big", 0), ("big", 0), ("roomy", 0), ("small", 0), ("big", 1)
    ]  # fmt: skip


def test_a_budget_ends_a_batch_before_its_samples_do():
    pool = PlacementPool([NodeSpec("n", (), 8, 8)])
    assert len(pool.try_acquire_batch(Resource(cpu=2.5), Resource(cpu=1), 4)) == 2


def test_a_batch_that_does_not_fit_as_a_whole_takes_nothing():
    pool = PlacementPool([NodeSpec("a", (), 2, 8), NodeSpec("b", (), 2, 8)])
    one = Resource(cpu=1)
    pool.try_acquire_batch(one, one, 1)
    before = pool.free()
    assert pool.try_acquire_batch(one.times(4), one, 4) is None
    assert pool.free() == before


def test_the_pool_says_what_it_has_given_out_of_each_node():
    pool = PlacementPool([NodeSpec("a", (0, 1), 4, 8), NodeSpec("b", (), 2, 0, (("seat", 3),))])
    each = Resource(gpu=0.25, cpu=1.5)
    tokens = pool.try_acquire_batch(each.times(2), each, 2)
    assert pool.used() == {
        "a": {"gpu": (0.5, 2), "cpu": (3, 4), "memory_gb": (0, 8)},
        "b": {"cpu": (0, 2), "seat": (0, 3)},
    }
    pool.release(tokens)
    assert {taken for node in pool.used().values() for taken, _ in node.values()} == {0}


def test_a_double_release_is_refused():
    pool = PlacementPool([NodeSpec("n", (), 2, 8)])
    tokens = pool.try_acquire_batch(Resource(cpu=1), Resource(cpu=1), 1)
    pool.release(tokens)
    with pytest.raises(ValueError, match="not held"):
        pool.release(tokens)


def test_a_batch_that_can_never_be_placed_is_an_error_and_does_not_wait():
    with pytest.raises(AdmissionError, match="asks for 3 tokens .* holds 2"):
        PlacementPool([NodeSpec("n", (), 2, 8)]).try_acquire_batch(Resource(cpu=3), Resource(cpu=1), 3)


async def _stream(pool: PlacementPool, width: int, seconds: float, log: list, name: str) -> None:
    sample = Resource(cpu=1)
    tokens = await pool.acquire(sample.times(width), sample, width)
    log.append((name, asyncio.get_running_loop().time()))
    await asyncio.sleep(seconds)
    pool.release(tokens)


@pytest.mark.looptime
@pytest.mark.fault(26)
async def test_a_wide_batch_starts_within_the_patience():
    loop = asyncio.get_running_loop()
    pool = PlacementPool([NodeSpec("n", (), 8, 8)], patience_s=10, clock=loop.time)
    log: list = []
    async with asyncio.TaskGroup() as group:
        for lane in range(8):  # a steady stream: eight lanes, out of step with each other

            async def narrow(lane=lane):
                await asyncio.sleep(lane * 0.25)
                while loop.time() < 60:
                    await _stream(pool, 1, 2, log, "narrow")

            group.create_task(narrow())
        await asyncio.sleep(3)
        group.create_task(_stream(pool, 8, 1, log, "wide"))
    started = next(time for name, time in log if name == "wide")
    assert started - 3 <= 10 + 2  # the patience, then what was running ends
    assert not [time for name, time in log if name == "narrow" and 13 < time < started]


@pytest.mark.looptime
async def test_a_gap_is_filled_while_the_wide_batch_is_patient():
    loop = asyncio.get_running_loop()
    pool = PlacementPool([NodeSpec("n", (), 8, 8)], patience_s=10, clock=loop.time)
    log: list = []
    async with asyncio.TaskGroup() as group:
        for name, width, seconds in [("first", 4, 5), ("wide", 8, 1), ("narrow", 4, 1)]:
            group.create_task(_stream(pool, width, seconds, log, name))
            await asyncio.sleep(0)
    assert [(name, round(time)) for name, time in log] == [("first", 0), ("narrow", 0), ("wide", 5)]


@pytest.mark.looptime
async def test_who_stops_waiting_leaves_nothing_behind():
    pool = PlacementPool([NodeSpec("n", (), 2, 8)], clock=asyncio.get_running_loop().time)
    sample = Resource(cpu=1)
    held = await pool.acquire(sample.times(2), sample, 2)
    waiting = [asyncio.create_task(pool.acquire(sample.times(width), sample, width)) for width in (2, 1)]
    await asyncio.sleep(1)
    pool.release(held)  # grants the first, which is cancelled before it runs
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (pool.held, pool.waiting) == (0, 0)
    assert pool.free() == {"n": Units(0, 2000, 8192)}


@pytest.mark.looptime
async def test_a_batch_wider_than_the_nodes_that_are_left_is_told_so():
    pool = PlacementPool([NodeSpec("a", (), 2, 8), NodeSpec("b", (), 2, 8)], clock=asyncio.get_running_loop().time)
    sample = Resource(cpu=1)
    held = await pool.acquire(sample, sample, 1)
    waiting = asyncio.create_task(pool.acquire(sample.times(4), sample, 4))
    await asyncio.sleep(1)
    pool.set_up("a", False)
    with pytest.raises(AdmissionError):
        await waiting
    pool.release(held)
    pool.set_up("a", True)
    assert len(pool.try_acquire_batch(sample.times(4), sample, 4)) == 4


resources = st.builds(
    Resource,
    gpu=st.sampled_from([0.0, 0.0, 0.05, 0.25, 0.33, 0.5, 1.0]),
    cpu=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    memory_gb=st.sampled_from([0.0, 0.1, 2.0, 7.0]),
)
node_lists = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(0, 16)), min_size=1, max_size=4
).map(lambda rows: [NodeSpec(f"n{i}", tuple(range(gpus)), cpu, memory) for i, (gpus, cpu, memory) in enumerate(rows)])  # fmt: skip


@given(node_lists, resources, st.integers(1, 30))
@settings(max_examples=200, deadline=None)
def test_an_empty_pool_admits_exactly_what_the_proof_promises(nodes, sample, count):
    promised = capacity(nodes, sample)
    pool = PlacementPool(nodes)
    if count <= promised:
        assert len(pool.try_acquire_batch(sample.times(count), sample, count)) == count
    else:
        with pytest.raises(AdmissionError):
            pool.try_acquire_batch(sample.times(count), sample, count)


class PoolMachine(RuleBasedStateMachine):
    """Any order of acquiring and releasing, in batches of different needs."""

    batches = Bundle("batches")

    @initialize(nodes=node_lists)
    def start(self, nodes):
        self.nodes = {node.node: node for node in nodes}
        self.pool = PlacementPool(nodes)
        self.full = self.pool.free()
        self.out: list = []

    @rule(target=batches, sample=resources, count=st.integers(1, 6))
    def acquire(self, sample, count):
        before, fits = self.pool.free(), capacity(list(self.nodes.values()), sample)
        if count > fits:
            return []
        tokens = self.pool.try_acquire_batch(sample.times(count), sample, count)
        if tokens is None:
            assert self.pool.free() == before
            assert self.out, "an empty pool refused what the proof promised"
            return []
        assert len(tokens) == count
        self.out += tokens
        return tokens

    @rule(tokens=consumes(batches))
    def release(self, tokens):
        self.pool.release(tokens)
        for token in tokens:
            self.out.remove(token)

    @invariant()
    def nothing_is_spent_twice(self):
        if not hasattr(self, "pool"):
            return
        assert self.pool.held == len(self.out)
        for name, free in self.pool.free().items():
            here = [token for token in self.out if token.node == name]
            needs = [Units.of(token.gpu, token.cpu, token.memory_gb) for token in here]
            assert min(free) >= 0
            assert free == Units(*(full - sum(need[field] for need in needs) for field, full in enumerate(self.full[name])))
            for gpu in self.nodes[name].gpu_ids:
                assert sum(Units.of(token.gpu, 0, 0).gpu for token in here if token.gpu_id == gpu) <= GPU_UNIT


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0.1, 5)), min_size=1, max_size=25))
@settings(max_examples=25, deadline=None)
def test_every_batch_is_admitted_in_the_end(jobs):
    import looptime

    async def main():
        loop = asyncio.get_running_loop()
        pool = PlacementPool([NodeSpec("n", (), 8, 8)], patience_s=3, clock=loop.time)
        log: list = []
        await asyncio.gather(*(_stream(pool, width, seconds, log, str(i)) for i, (width, seconds) in enumerate(jobs)))
        assert len(log) == len(jobs)
        assert max(time for _, time in log) <= sum(seconds for _, seconds in jobs)
        assert pool.free() == {"n": Units(0, 8000, 8192)}

    loop = looptime.new_event_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def test_samples_that_ask_for_nothing_are_not_bounded_by_the_pool():
    assert capacity([NodeSpec("n", (), 1, 1)], Resource()) == UNBOUNDED
