"""The trainer on a real ledger: each step exactly once, whatever dies in between."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.buffer.api import StageReport
from pipeline.buffer.reader import read_run_epoch, run_fence
from pipeline.buffer.schema import create_run
from pipeline.buffer.service import BufferService
from pipeline.buffer.settings import BufferSettings
from pipeline.engines.pretrained import load_model
from pipeline.engines.weights import WeightStore
from pipeline.errors import BreakerTripped, FencedOut, RolloutError, StageFailed
from pipeline.paths import RunPaths, evaluation_id
from pipeline.trainer import checkpoints
from pipeline.trainer.service import TrainerService
from pipeline.watchdog import StallWatchdog
from tests.pipeline.trainer.helpers import make_column, make_config, make_group, saved_student, tiny_model

TASKS = 4
TEACHER = tiny_model(5)


class Died(BaseException):
    """In place of the end of the process."""


class Run:
    """A run folder with a student and a ledger; trainers come and go."""

    def __init__(self, folder: Path, **sections) -> None:
        self.paths = RunPaths(folder / "run")
        create_run(self.paths, {})
        self.student = saved_student(folder / "student")
        self.model = load_model(self.student)
        self.config = make_config(**sections)
        self.buffer: BufferService | None = None

    async def open(self) -> None:
        self.buffer = BufferService(self.paths, BufferSettings.from_config(self.config), threaded=False)
        await self.buffer.open()

    def trainer(self, **keywords) -> TrainerService:
        return TrainerService(self.config, self.paths, self.student, self.buffer, WeightStore(self.paths.weights), **keywords)

    async def produce(self, step: int, *, count: int = TASKS, limit: int | None = None, drop: int = 0, rewards=(1.0, 0.0)) -> None:
        """Groups of a step, rolled out and scored; the last `drop` of them are dropped after the rollout closed."""
        assigned = await self.buffer.assign(step, count, limit)
        for place, slot in enumerate(assigned):
            attempt = await self.buffer.start_attempt(slot.ordinal, max(0, step - 1), "worker")
            group = make_group(slot.ordinal, rewards, step=step, version=max(0, step - 1), model=self.model)
            group = replace(group, attempt=attempt.number, task=replace(group.task, needs=("teacher",), teacher="big"))
            await self.buffer.commit(attempt, group)
            if place < len(assigned) - drop:
                await self.buffer.mark_produced([make_column(group, TEACHER)])
        await self.buffer.close_rollout(step)
        for slot in assigned[len(assigned) - drop :] if drop else []:
            await self.buffer.discard(slot.ordinal, "scoring")

    async def train_to(self, last: int, trainer: TrainerService) -> list[dict]:
        results = []
        for step in range(1, last + 1):
            await self.produce(step)
            results.append(await trainer.train(step))
        return results

    async def state(self) -> dict:
        return (await self.buffer.status())["ordinals"]


@asynccontextmanager
async def opened(folder: Path, **sections):
    run = Run(folder, **sections)
    await run.open()
    try:
        yield run
    finally:
        await run.buffer.close()


def published(run: Run) -> tuple[int, torch.Tensor]:
    newest = WeightStore(run.paths.weights).latest()
    return newest.version, flat(newest.path)


def flat(folder: Path) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in load_model(folder).parameters()])


async def test_what_a_step_lacks_is_produced_once_it_is_selected(tmp_path):
    async with opened(tmp_path, teacher_stage={"mode": "score_at_select"}) as run:
        asked = []

        async def complete(groups):
            asked.append([group.ordinal for group in groups])
            for group in groups:
                group.columns["teacher"] = make_column(group, TEACHER)

        for slot in await run.buffer.assign(1, TASKS, None):
            attempt = await run.buffer.start_attempt(slot.ordinal, 0, "worker")
            await run.buffer.commit(attempt, make_group(slot.ordinal, (1.0, 0.0), model=run.model))
        await run.buffer.close_rollout(1)
        result = await run.trainer(complete=complete).train(1)
        assert asked == [[0, 1, 2, 3]] and result["teacher_coverage"] == 1.0
        again = run.trainer(complete=complete)  # a replay has them produced again: what they are depends on the tokens alone
        await again.start()
        assert asked == [[0, 1, 2, 3]] * 2 and published(run)[0] == 1


async def test_versions_are_published_step_by_step_and_everything_is_trained_at_the_end(tmp_path):
    async with opened(tmp_path) as run:
        trainer = run.trainer()
        await trainer.start()
        assert published(run)[0] == 0 and torch.equal(published(run)[1], flat(run.student))
        results = await run.train_to(6, trainer)
        assert [r["weight_version"] for r in results] == [1, 2, 3, 4, 5, 6] == [r["step"] for r in results]
        assert published(run)[0] == 6 and not torch.equal(published(run)[1], flat(run.student))
        assert [c.step for c in checkpoints.complete(run.paths)] == [6, 4]
        assert next(checkpoints.complete(run.paths)).covers.keys() == {5, 6}
        assert torch.equal(flat(run.paths.checkpoint(6)), published(run)[1])
        state = await run.state()
        assert state["trained"] == 24 == state["fetched"]
        assert results[-1]["reward_mean"] == 0.5 and results[-1]["teacher_coverage"] == 1.0
        assert trainer.report().finished == 6 and trainer.report().busy_s > 0
        await trainer.close()


async def test_a_repeated_call_returns_the_recorded_result_and_trains_nothing(tmp_path):
    async with opened(tmp_path) as run:
        trainer = run.trainer()
        results = await run.train_to(3, trainer)
        before = published(run)
        assert await trainer.train(3) == results[2]
        assert await trainer.train(1) == results[0]
        assert published(run)[0] == before[0] and torch.equal(published(run)[1], before[1])
        await trainer.close()


async def test_callers_of_one_step_share_it_and_a_caller_that_leaves_does_not_stop_it(tmp_path):
    async with opened(tmp_path) as run:
        trainer = run.trainer()
        await run.produce(1)
        leaver = asyncio.create_task(trainer.train(1))
        await asyncio.sleep(0)
        leaver.cancel()
        both = await asyncio.gather(trainer.train(1), trainer.train(1))
        assert both[0] == both[1] and trainer.version == 1
        await trainer.close()


@pytest.mark.parametrize("save_every", [1, 2, 5])
async def test_a_restart_replays_to_bit_equal_weights(tmp_path, save_every):
    async with opened(tmp_path, trainer={"save_every": save_every}) as run:
        trainer = run.trainer()
        results = await run.train_to(5, trainer)
        _, expected = published(run)
        await trainer.close()
        shutil.rmtree(run.paths.weights)
        again = run.trainer()
        await again.start()
        assert again.version == 5
        assert torch.equal(published(run)[1], expected)
        assert await again.train(5) == results[4]
        await run.produce(6)
        straight = await again.train(6)
        await again.close()
        from_scratch = run.trainer()
        shutil.rmtree(run.paths.checkpoints)
        await from_scratch.start()
        assert (await run.buffer.steps())["results"][6]["weights"] == straight["weights"]
        assert torch.equal(
            published(run)[1], torch.cat([p.detach().flatten() for p in from_scratch._learner.updater.model.parameters()])
        )
        await from_scratch.close()


async def test_raising_the_steps_changes_the_rate_from_there_and_not_of_what_is_replayed(tmp_path, caplog):
    async with opened(tmp_path, trainer={"steps": 6, "save_every": 4}) as run:
        trainer = run.trainer()
        results = await run.train_to(6, trainer)
        assert results[5]["lr"] < results[4]["lr"] < results[0]["lr"]
        await trainer.close()
        shutil.rmtree(run.paths.checkpoint(6))
        run.config = make_config(trainer={"steps": 12, "save_every": 4})
        again = run.trainer()
        await again.start()  # replays steps 5 and 6, whose rates the longer schedule would raise
        assert again._learner.updater.digest() == results[5]["weights"] and "replayed" not in caplog.text
        await run.produce(7)
        assert (await again.train(7))["lr"] > results[5]["lr"]
        await again.close()


@pytest.mark.fault(36)
async def test_a_torn_newest_checkpoint_falls_back_to_the_one_before(tmp_path, caplog):
    async with opened(tmp_path) as run:
        trainer = run.trainer()
        await run.train_to(5, trainer)
        _, expected = published(run)
        await trainer.close()
        (run.paths.checkpoint(4) / "model.safetensors").write_bytes(b"")
        shutil.rmtree(run.paths.weights)
        again = run.trainer()
        await again.start()
        assert "step_000004 is torn" in caplog.text
        assert torch.equal(published(run)[1], expected)
        assert (await run.buffer.steps())["checkpoint_step"] == 2
        await run.produce(6)
        await again.train(6)
        assert [c.step for c in checkpoints.complete(run.paths)] == [6, 2]
        await again.close()


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> torch.Tensor:
    """Weights after three steps without a fault."""

    async def play() -> torch.Tensor:
        async with opened(tmp_path_factory.mktemp("calm")) as run:
            trainer = run.trainer()
            await run.train_to(3, trainer)
            await trainer.close()
            return published(run)[1]

    return asyncio.run(play())


class Crash:
    """A buffer, store or fence that fails once at a chosen call."""

    def __init__(self, target, method: str, after: bool) -> None:
        self._target, self._method, self._after, self.armed = target, method, after, False

    def __getattr__(self, name: str):
        inner = getattr(self._target, name)
        if name != self._method:
            return inner

        async def call(*arguments):
            if self.armed and not self._after:
                self.armed = False
                raise ConnectionError("gone")
            result = await inner(*arguments)
            if self.armed:
                self.armed = False
                raise ConnectionError("gone")
            return result

        return call


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("method", ["wait_selection", "read", "record_step", "mark_trained"])
@pytest.mark.parametrize("restart", [False, True])
async def test_a_lost_call_at_any_point_is_made_good(tmp_path, calm, method, after, restart):
    """The same trainer goes on, or a new one: the weights are those of a run without the fault."""
    async with opened(tmp_path) as run:
        plain = run.buffer
        run.buffer = Crash(plain, method, after)
        trainer = run.trainer()
        await run.train_to(1, trainer)
        await run.produce(2)
        run.buffer.armed = True
        with pytest.raises(ConnectionError):
            await trainer.train(2)
        run.buffer.armed = False
        if restart:
            await trainer.close()
            run.buffer = plain
            trainer = run.trainer()
        assert (await trainer.train(2))["weight_version"] == 2
        await run.produce(3)
        await trainer.train(3)
        version, found = published(run)
        assert version == 3 and torch.equal(found, calm)
        state = await run.state()
        assert (state["trained"], state["consumed"]) == (8, 4)
        await trainer.close()


async def test_a_crash_before_the_last_checkpoint_is_made_good_at_the_next_start(tmp_path):
    async with opened(tmp_path, trainer={"steps": 1, "save_every": 5}) as run:
        plain = run.buffer
        run.buffer = Crash(plain, "record_step", after=True)
        trainer = run.trainer()
        await run.produce(1)
        run.buffer.armed = True
        with pytest.raises(ConnectionError):
            await trainer.train(1)
        await trainer.close()
        run.buffer = plain
        again = run.trainer()
        await again.start()
        assert (await run.state())["trained"] == 4 and [c.step for c in checkpoints.complete(run.paths)] == [1]
        await again.close()


async def test_an_exception_after_the_first_write_ends_the_process_and_one_before_does_not(tmp_path):
    def die():
        raise Died

    async with opened(tmp_path) as run:
        trainer = run.trainer(die=die)
        await run.train_to(1, trainer)
        await run.produce(2)
        optimizer = trainer._learner.updater.optimizer
        whole_step, calls = optimizer.step, []

        def fail_second(*arguments):
            calls.append(1)
            if len(calls) == 2:
                raise MemoryError("half-written")
            return whole_step(*arguments)

        optimizer.step = fail_second
        with pytest.raises(Died):
            await trainer.train(2)
        with pytest.raises(MemoryError):  # nothing can be asked of what may be half-written
            await trainer.save()
        assert (await run.buffer.steps())["trained_step"] == 1
        await trainer.close()
        again = run.trainer(die=die)
        assert (await again.train(2))["weight_version"] == 2
        await again.close()


async def test_uncovered_columns_fail_the_step_and_leave_the_trainer_whole(tmp_path):
    async with opened(tmp_path, algorithm={"opd": {"signal": "topk"}}) as run:
        trainer = run.trainer(die=lambda: pytest.fail("must not die"))
        await run.produce(1)
        with pytest.raises(StageFailed, match="min_teacher_coverage"):
            await trainer.train(1)
        assert trainer.version == 0
        await trainer.close()


async def test_a_short_step_is_skipped_and_three_in_a_row_fail_the_run(tmp_path):
    async with opened(tmp_path, trainer={"save_every": 10}) as run:
        trainer = run.trainer()
        await run.produce(1)
        first = await trainer.train(1)
        for step in (2, 3):
            await run.produce(step, drop=3)
            result = await trainer.train(step)
            assert result["skipped"] == "short" and result["weight_version"] == step
            assert result["weights"] == first["weights"] and result["entropy"] is None
            assert result["dropped_groups"] == {"scoring": 3}
        assert published(run)[0] == 3
        await run.produce(4, drop=3)
        with pytest.raises(BreakerTripped, match="3 training steps in a row were skipped.*'scoring': 3"):
            await trainer.train(4)
        with pytest.raises(BreakerTripped):
            await trainer.train(5)
        await trainer.close()


async def test_a_step_that_filters_empty_is_skipped_with_its_counts(tmp_path):
    async with opened(tmp_path, rollout={"filters": {"rejection": "all"}}) as run:
        trainer = run.trainer()
        await run.produce(1, rewards=(0.0, 0.0))
        result = await trainer.train(1)
        assert result["skipped"] == "emptied"
        assert result["dropped_groups"] == {"emptied": 4} and result["dropped_samples"] == {"rejected": 8}
        await trainer.close()


@pytest.mark.fault(4)
async def test_the_end_of_the_data_is_trained_saved_and_said(tmp_path):
    async with opened(tmp_path, trainer={"save_every": 10}) as run:
        trainer = run.trainer()
        await run.produce(1, limit=5)
        await trainer.train(1)
        await run.produce(2, limit=5)
        last = await trainer.train(2)
        assert last["skipped"] is None and last["groups"] == 1 and not last["end_of_data"]
        for step in (3, 4, 5, 6):
            await run.produce(step, limit=5)
            result = await trainer.train(step)
            assert result["end_of_data"] and result["weights"] == last["weights"] and result["weight_version"] == step
        state = await run.state()
        assert state["trained"] == 5 == state["fetched"]
        await trainer.close()


async def test_a_graceful_stop_saves_what_is_in_memory(tmp_path):
    async with opened(tmp_path, trainer={"save_every": 10}) as run:
        trainer = run.trainer()
        await run.train_to(3, trainer)
        assert await trainer.save() == 3 == await trainer.save()
        assert (await run.state())["trained"] == 12
        waiting = asyncio.ensure_future(trainer.train(4))
        await asyncio.sleep(0)
        await run.produce(4)
        assert await trainer.stop() == 3
        with pytest.raises(StageFailed, match="was stopped"):
            await waiting
        with pytest.raises(StageFailed, match="was stopped"):
            await trainer.train(4)
        assert next(checkpoints.complete(run.paths)).covers.keys() == {1, 2, 3}
        await trainer.close()
        with pytest.raises(StageFailed, match="was closed"):
            await trainer.train(4)


async def test_a_fenced_out_trainer_marks_and_publishes_nothing_more_and_ends(tmp_path):
    over, ended = False, []

    def fence():
        if over:
            raise FencedOut("epoch 1 is over")

    async with opened(tmp_path) as run:
        trainer = run.trainer(fence=fence, die=lambda: ended.append(1))
        await run.train_to(1, trainer)
        over = True
        await run.produce(2)
        with pytest.raises(FencedOut):
            await trainer.train(2)
        assert list(checkpoints.complete(run.paths)) == [] and published(run)[0] == 1
        assert (await run.state())["trained"] == 0 and ended == [1]
        await trainer.close()


async def test_a_fenced_out_trainer_publishes_nothing_where_no_checkpoint_is_due(tmp_path):
    """An old version would be put in front of the new trainer's newer one."""
    async with opened(tmp_path) as run:
        epoch = read_run_epoch(run.paths)
        trainer = run.trainer(
            fence=run_fence(run.paths, epoch, "trainer", await run.buffer.claim("trainer")), epoch=epoch, die=lambda: None
        )
        await trainer.start()
        await run.produce(1)
        await run.buffer.close()
        run.buffer = BufferService(run.paths, BufferSettings.from_config(run.config), threaded=False)
        await run.buffer.open(new_run_epoch=True)
        trainer._buffer = run.buffer  # it still reaches the ledger
        with pytest.raises(FencedOut, match="run epoch"):
            await trainer.train(1)
        assert published(run)[0] == 0
        await trainer.close()


async def test_a_held_version_delays_the_next_one_for_a_bounded_time(tmp_path):
    async with opened(tmp_path, eval={"hold_s": 0.3}) as run:
        trainer = run.trainer()
        await trainer.start()
        store = WeightStore(run.paths.weights)
        store.release(evaluation_id(0))
        hold = store.hold(0, 60.0)
        await run.produce(1)
        training = asyncio.create_task(trainer.train(1))
        await asyncio.sleep(0.15)
        assert store.latest().version == 0 and not training.done()
        store.release(hold)
        await training
        assert store.latest().version == 1
        store.hold(1, 60.0)
        await run.produce(2)
        await trainer.train(2)
        assert store.latest().version == 2
        await trainer.close()


@pytest.mark.looptime
async def test_a_long_rollout_is_waited_for_and_the_trainer_is_not_taken_for_stuck(tmp_path):
    async with opened(tmp_path) as run:
        trainer, now = run.trainer(), asyncio.get_running_loop().time
        await trainer.start()

        async def reports():
            return [trainer.report(), StageReport("evaluator_pool", "", 0, "", 0, int(now()), 0, 0.0)]

        watchdog = asyncio.ensure_future(StallWatchdog(reports, 120.0, now).run())
        waiting = asyncio.ensure_future(trainer.train(1))
        await asyncio.sleep(1000)
        assert not watchdog.done() and trainer.report().detail["waiting_for"] == "the groups of step 1"
        watchdog.cancel()
        await run.produce(1)
        assert (await waiting)["step"] == 1 and trainer.report().detail["waiting_for"] is None
        await trainer.close()


@pytest.mark.looptime
async def test_a_trainer_that_waits_for_groups_stops_within_a_moment(tmp_path):
    async with opened(tmp_path) as run:
        trainer = run.trainer()
        await run.train_to(1, trainer)
        waiting = asyncio.ensure_future(trainer.train(2))
        while trainer.report().detail["waiting_for"] is None:
            await asyncio.sleep(0)
        began = asyncio.get_running_loop().time()
        assert await trainer.stop() == 1 and asyncio.get_running_loop().time() - began <= 1.0
        with pytest.raises(StageFailed, match="was stopped"):
            await waiting
        await trainer.close()


@pytest.mark.looptime
async def test_a_buffer_that_does_not_answer_is_named(tmp_path):
    async with opened(tmp_path) as run:
        trainer = run.trainer()
        await trainer.start()
        run.buffer.wait_selection = lambda *_: asyncio.sleep(3600)
        with pytest.raises(StageFailed, match="stage replay_buffer: did not answer the trainer within 60 s"):
            await trainer.train(1)
        await trainer.close()


async def test_rows_that_are_gone_are_named(tmp_path):
    class Forgetful:
        def __init__(self, buffer):
            self._buffer = buffer

        def __getattr__(self, name):
            return getattr(self._buffer, name)

        async def read(self, ordinals, columns):
            return (await self._buffer.read(ordinals, columns))[:-1]

    async with opened(tmp_path) as run:
        run.buffer = Forgetful(run.buffer)
        trainer = run.trainer()
        await run.produce(1)
        with pytest.raises(RolloutError, match=r"consumed ordinals \[3\]"):
            await trainer.train(1)
        await trainer.close()


async def test_a_bfloat16_student_is_published_in_bfloat16_and_replays_exactly(tmp_path):
    async with opened(tmp_path, student={"dtype": "bfloat16"}) as run:
        trainer = run.trainer()
        await run.train_to(3, trainer)
        newest = WeightStore(run.paths.weights).latest().path
        assert {p.dtype for p in AutoModelForCausalLM.from_pretrained(newest).parameters()} == {torch.bfloat16}
        digest = trainer._learner.updater.digest()
        await trainer.close()
        again = run.trainer()
        await again.start()
        assert again._learner.updater.digest() == digest
        await again.close()
