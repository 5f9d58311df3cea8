"""Saved trajectories, replayed in place of rollouts (`rollout.reuse`). They are used when asked for, and never otherwise.

Invariant: which trajectory an ordinal gets is a function of the ordinal and its task alone, and it is always one of that very
task. What made the tokens is not of this run: they keep their behaviour logprobs, and carry no weight version.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.buffer import retrieval
from pipeline.buffer.schema import open_reader
from pipeline.errors import ConfigError
from pipeline.paths import RunPaths
from pipeline.records import STUDENT, TEACHER, Group, Sample, Task

NOT_SAVED = "not_saved"
"""Reason under which an ordinal is dropped whose task has no saved trajectory."""
_HOLDING = "('written', 'ready', 'consumed', 'trained')"


def locate(reuse: str, runs: Path) -> list[Path]:
    """The files, or the run folder, that `rollout.reuse` names; none for `none`. Raises ConfigError for what is not there."""
    if reuse == "none":
        return []
    kind, _, name = reuse.partition(":")
    place = runs / name if kind == "run" else Path(name if kind == "file" else reuse)
    if kind == "file" and place.is_file():
        return [place]
    if kind != "file" and RunPaths(place).database.is_file():
        return [place]
    files = sorted(place.glob("*.jsonl")) if kind not in ("run", "file") else []
    if not files:
        wanted = {"run": f"no run {name!r} in {runs}", "file": f"no file {place}"}.get(kind, f"{place} holds no *.jsonl and no run")
        raise ConfigError(f"rollout.reuse {reuse!r}: {wanted}; it is none, run:<id>, file:<path> or a directory")
    return files


def open_saved(reuse: str, runs: Path) -> SavedTrajectories | None:
    """None for `none`. Reads everything once; raises ConfigError for a line that is not a trajectory, and when there is none."""
    places = locate(reuse, runs)
    if not places:
        return None
    found = [entry for place in places for entry in (_of_run(place) if place.is_dir() else _of_file(place))]
    if not found:
        raise ConfigError(f"rollout.reuse {reuse!r} holds no trajectories")
    return SavedTrajectories(reuse, found)


@dataclass(frozen=True, slots=True)
class _Entry:
    task_id: str
    ordinal: int
    """Its place in the run that made it, or its line."""
    read: Callable[[], tuple[Sample, ...]]


class SavedTrajectories:
    def __init__(self, source: str, entries: list[_Entry]) -> None:
        self.source = source
        self._by_task: dict[str, list[_Entry]] = {}
        for entry in entries:
            self._by_task.setdefault(entry.task_id, []).append(entry)

    def group(self, task: Task, step: int, attempt: int, version: int) -> Group | None:
        """That of the same ordinal if it is of the task, else the task's in turn; None when the task has none."""
        entries = self._by_task.get(task.task_id)
        if not entries:
            return None
        same = [entry for entry in entries if entry.ordinal == task.ordinal]
        chosen = same[0] if same else entries[task.ordinal % len(entries)]
        samples = tuple(
            replace(
                sample, sample_id=f"{task.ordinal}.{sample.index}", node="", versions=np.full(len(sample.token_ids), -1, np.int32)
            )
            for sample in chosen.read()
        )
        return Group(task.ordinal, step, attempt, task, version, samples)


def _of_run(folder: Path) -> Iterator[_Entry]:
    """Committed groups whose rows are still there."""
    paths = RunPaths(folder)

    def read(ordinal: int) -> Group | None:
        with closing(open_reader(paths.database)) as db:
            db.execute("BEGIN")
            return next(iter(retrieval.groups(db, paths.groups, [ordinal], columns=False)), None)

    def samples(ordinal: int) -> tuple[Sample, ...]:
        group = read(ordinal)
        if group is None:
            raise ConfigError(f"rollout.reuse: the rows of ordinal {ordinal} have left {folder} meanwhile")
        return group.samples

    with closing(open_reader(paths.database)) as db:
        rows = db.execute(f"SELECT ordinal FROM ordinals WHERE state IN {_HOLDING} ORDER BY ordinal").fetchall()
    for (ordinal,) in rows:
        group = read(ordinal)
        if group is not None:
            yield _Entry(group.task.task_id, ordinal, lambda ordinal=ordinal: samples(ordinal))


def _of_file(path: Path) -> Iterator[_Entry]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        place = f"rollout.reuse: {path}:{number}"
        try:
            said = json.loads(line)
            made = tuple(_sample(index, values) for index, values in enumerate(said["samples"]))
            task_id, ordinal = said["task_id"], int(said.get("ordinal", number))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{place}: not a trajectory ({type(error).__name__}: {error})") from error
        yield _Entry(task_id, ordinal, lambda made=made: made)


def _sample(index: int, values: dict[str, Any]) -> Sample:
    """`token_ids`, `loss_mask`, `logprobs` (null where none), of one length; optional `reward`, `text`, `finish_reason`, and, of
    the same length, `executor`: 1 for the student's tokens, 2 for the teacher's, 0 for the others."""
    mask = np.asarray(values["loss_mask"], np.uint8)
    logprobs = np.asarray([np.nan if value is None else value for value in values["logprobs"]], np.float32)
    tokens = np.asarray(values["token_ids"], np.int32)
    if not len(tokens) == len(mask) == len(logprobs):
        raise ValueError(f"sample {index}: {len(tokens)} token_ids, {len(mask)} in loss_mask, {len(logprobs)} logprobs")
    executor = np.asarray(values.get("executor", mask * STUDENT), np.uint8)
    if len(executor) != len(tokens) or ((executor > 0) != (mask > 0)).any() or (executor > TEACHER).any():
        raise ValueError(f"sample {index}: executor is not 1 or 2 for each token that is trained on, and 0 for the others")
    if not np.isfinite(logprobs[mask > 0]).all():
        raise ValueError(f"sample {index}: a token that is trained on has no logprob")
    reward = values.get("reward")
    return Sample(
        sample_id=str(index),
        index=index,
        status="ok",
        reward=None if reward is None else float(reward),
        token_ids=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        executor=executor,
        versions=np.full(len(tokens), -1, np.int32),
        finish_reason=str(values.get("finish_reason", "finish")),
        text=str(values.get("text", "")),
    )
