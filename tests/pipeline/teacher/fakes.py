"""A teacher with known logprobs and stated costs, and a run's buffer filled by hand. Time is the event loop's."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from pipeline.buffer.api import StageReport
from pipeline.buffer.schema import create_run
from pipeline.buffer.service import BufferService
from pipeline.buffer.settings import BufferSettings
from pipeline.config.schema import RunConfig
from pipeline.engines.base import EngineInfo, ScoredRow, ScoreRow
from pipeline.errors import RowRefused
from pipeline.paths import RunPaths
from pipeline.records import NOBODY, STUDENT, Group, Sample, Sampling, Stopping, Task, aborted_sample
from pipeline.teacher.scorer import TeacherScorer

VOCAB = 40
POISON = 39
"""A token that the teacher refuses when it is told to."""
TEACHERS = ("ant", "bee", "cat")
PROMPT = 3


def now() -> float:
    return asyncio.get_running_loop().time()


def logits(salt: int, context: np.ndarray) -> np.ndarray:
    """float64 [V]: a function of the whole context and of nothing else."""
    mix = int(np.dot(context.astype(np.int64), np.arange(1, len(context) + 1)) % 1009)
    return np.log(1.0 + (np.arange(VOCAB) * 37 + mix * 11 + salt * 101) % 23)


def log_softmax(values: np.ndarray) -> np.ndarray:
    return values - np.log(np.exp(values).sum())


class ToyTeacher:
    """Implements engines.base.Engine. `faults(call, rows)` may return an exception to raise, or "hang"."""

    def __init__(
        self,
        salt: int = 0,
        *,
        call_s: float = 1.0,
        row_s: float = 0.0,
        faults: Callable[[int, list[ScoreRow]], Exception | str | None] = lambda call, rows: None,
        refuse: bool = False,
        tokenizer: str = "toy",
        vocab: int = VOCAB,
    ) -> None:
        self.salt, self.call_s, self.row_s, self.faults, self.refuse = salt, call_s, row_s, faults, refuse
        self.tokenizer, self.vocab = tokenizer, vocab
        self.calls: list[tuple[float, tuple[str, ...]]] = []
        """(start, row ids) of every call."""
        self.tokens: list[int] = []
        self.busy = False

    async def info(self) -> EngineInfo:
        return EngineInfo("toy", f"toy-{self.salt}", f"d{self.salt}", self.vocab, self.tokenizer, 0, 64, 1, 0, 0, 0, 0)

    async def score(self, rows: list[ScoreRow], signal: str, top_k: int) -> list[ScoredRow]:
        assert not self.busy, "one call per replica at a time"
        self.calls.append((now(), tuple(row.row_id for row in rows)))
        self.tokens.append(sum(len(row.token_ids) for row in rows))
        self.busy = True
        try:
            fault = self.faults(len(self.calls), rows)
            if fault == "hang":
                await asyncio.Event().wait()
            await asyncio.sleep(self.call_s + self.row_s * len(rows))
            if isinstance(fault, BaseException):
                raise fault
            for row in rows:
                if self.refuse and POISON in row.token_ids:
                    raise RowRefused(f"row {row.row_id}: token {POISON}")
            return self.reply(rows, signal, top_k)
        finally:
            self.busy = False

    def reply(self, rows: list[ScoreRow], signal: str, top_k: int) -> list[ScoredRow]:
        return [self._scored(row, signal, top_k) for row in reversed(rows)]

    def _scored(self, row: ScoreRow, signal: str, top_k: int) -> ScoredRow:
        table = np.array([log_softmax(logits(self.salt, row.token_ids[:t])) for t in range(row.start, len(row.token_ids))])
        sampled = table[np.arange(len(table)), row.token_ids[row.start :]].astype(np.float32)
        if signal == "full":
            return ScoredRow(row.row_id, sampled, full_logprobs=table.astype(np.float32))
        if signal == "topk":
            ids = np.argsort(-table, axis=1, kind="stable")[:, :top_k].astype(np.int32)
            return ScoredRow(row.row_id, sampled, ids, np.take_along_axis(table, ids, 1).astype(np.float32))
        return ScoredRow(row.row_id, sampled)

    async def generate(self, requests, version):
        raise NotImplementedError

    async def close(self) -> None:
        return None


class Renderer:
    """Renders every message as its length, after a mark."""

    digest = "toy"
    vocab_size = VOCAB

    def render(self, messages) -> np.ndarray:
        return np.asarray([1, *(2 + len(content) % 30 for _, content in messages), 2], np.int32)

    def decode(self, token_ids) -> str:
        return " ".join(map(str, token_ids))


def no_shots(dataset: str, count: int):
    return tuple((role, "x" * (index + 1)) for index in range(count) for role in ("user", "assistant"))


def make_config(teachers: int = 1, *, signal: str = "sampled", sampler: str = "in_order", tasks: int = 8, **stage) -> RunConfig:
    names = TEACHERS[:teachers]
    return RunConfig.model_validate(
        {
            "student": {"architecture": {}},
            "teachers": {name: {"engine": "fixed_cost", "fixed_cost_s": 1 + index} for index, name in enumerate(names)},
            "datasets": {f"data-{name}": {"teacher": name} for name in names},
            "rollout": {"tasks_per_step": tasks, "on_dropped": "shrink"},
            "buffer": {"sampler": sampler},
            "algorithm": {"opd": {"signal": signal, "top_k": 3}},
            "teacher_stage": stage,
        }
    )


def make_sample(ordinal: int, index: int, *, mask: str = "1111", poison: bool = False, status: str = "ok") -> Sample:
    """A prompt of three tokens, then one token for each character of `mask`; "1" is trained on."""
    sample_id = f"{ordinal}.{index}"
    rng = np.random.default_rng([ordinal, index])
    prompt = rng.integers(3, POISON, PROMPT)
    if status == "aborted":
        return aborted_sample(ordinal, index, list(prompt), abort_reason="infra_conn", error="gone", phase="run")
    made = rng.integers(3, POISON, len(mask))
    if poison:
        made[0] = POISON
    loss_mask = np.array([0] * PROMPT + [int(mark) for mark in mask], np.uint8)
    return Sample(
        sample_id=sample_id,
        index=index,
        status="ok",
        reward=1.0,
        token_ids=np.concatenate([prompt, made]).astype(np.int32),
        loss_mask=loss_mask,
        logprobs=np.where(loss_mask, -1.0, np.nan).astype(np.float32),
        executor=np.where(loss_mask, STUDENT, NOBODY).astype(np.uint8),
        versions=np.where(loss_mask, 0, -1).astype(np.int32),
        finish_reason="finish",
    )


def make_group(
    ordinal: int, step: int = 1, *, teacher: str = "ant", samples=None, needs=("teacher",), attempt: int = 1, messages=None
) -> Group:
    samples = tuple(samples) if samples is not None else tuple(make_sample(ordinal, index) for index in range(4))
    task = Task(
        ordinal=ordinal,
        task_id=f"data-{teacher}/{ordinal}",
        dataset=f"data-{teacher}",
        task_type="single_turn",
        messages=messages or (("system", "be brief"), ("user", "go" * ordinal)),
        answer="x",
        verifier="exact",
        samples=len(samples),
        sampling=Sampling(),
        stopping=Stopping(),
        seed=0,
        needs=tuple(needs),
        teacher=teacher,
    )
    return Group(ordinal, step, attempt, task, 0, samples)


class Run:
    """A real buffer in a temporary folder, on the loop's clock, and what writes into it."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config = config
        self.paths = RunPaths(folder / "run")
        create_run(self.paths, {})
        self.settings = BufferSettings.from_config(config)
        self.buffer = BufferService(self.paths, self.settings, clock=self.clock, threaded=False)
        self.produced: list[int] = []
        """Ordinals of all columns that were ever handed in."""
        self._mark = self.buffer.mark_produced
        self.buffer.mark_produced = self.mark_produced  # type: ignore[method-assign]

    @staticmethod
    def clock() -> float:
        return 1000.0 + now()

    async def mark_produced(self, columns):
        self.produced += [column.ordinal for column in columns]
        return await self._mark(columns)

    async def assign(self, step: int, count: int | None = None) -> list[int]:
        slots = await self.buffer.assign(step, count or self.settings.tasks_per_step, None)
        return [slot.ordinal for slot in slots]

    async def commit(self, group: Group) -> None:
        attempt = await self.buffer.start_attempt(group.ordinal, 0, "worker")
        await self.buffer.commit(attempt, group)

    async def fill(self, step: int = 1, **group) -> list[int]:
        """A whole step, its groups spread over the configured teachers."""
        ordinals = await self.assign(step)
        names = list(self.config.teachers)
        for ordinal in ordinals:
            await self.commit(make_group(ordinal, step, teacher=names[ordinal % len(names)], **group))
        await self.buffer.close_rollout(step)
        return ordinals

    def scorer(self, engines: dict[str, list], **options) -> TeacherScorer:
        renderers = {name: Renderer() for name in engines}
        return TeacherScorer(self.config, self.buffer, engines, renderers, Renderer(), no_shots, self.clock, **options)

    async def states(self) -> dict[str, int]:
        """Counts by state, without the zeros."""
        counts = (await self.buffer.status())["ordinals"]
        return {state: count for state, count in counts.items() if count and state != "fetched"}

    async def columns(self, ordinals: list[int]) -> dict[int, dict]:
        return {group.ordinal: group.columns for group in await self.buffer.read(ordinals, columns=True)}


def _folder() -> tempfile.TemporaryDirectory:
    """In memory where the machine can."""
    shm = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None)


@asynccontextmanager
async def opened(config: RunConfig) -> AsyncIterator[Run]:
    with _folder() as folder:
        run = Run(config, Path(folder))
        await run.buffer.open(new_run_epoch=True)
        try:
            yield run
        finally:
            await run.buffer.close()


@asynccontextmanager
async def running(scorer) -> AsyncIterator[asyncio.Task]:
    """The stage's pump, cancelled at the end; a failure of it fails the test unless it was awaited."""
    task = asyncio.create_task(scorer.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


def report(stage: str, finished: int, backlog: int) -> StageReport:
    return StageReport(stage, stage, 1, "here", finished + backlog, finished, backlog, 0.0)
