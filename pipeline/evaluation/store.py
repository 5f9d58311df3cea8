"""Evaluations on disk, a folder each: request.json, tasks.jsonl, model/, state.json, samples.jsonl, summary.json.

Invariant: a folder appears whole, `state.json` is replaced as a whole, and a sample is in `samples.jsonl` before anyone hears of
it. What is left to do after a crash is what was planned minus what is there.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.durable import sync, write_whole
from pipeline.evaluation.plan import task_of, task_record
from pipeline.observe.jsonlines import JsonLines, jsonable, read_jsonlines
from pipeline.records import Task

REQUEST, TASKS, STATE, SAMPLES, SUMMARY, MODEL = (
    "request.json", "tasks.jsonl", "state.json", "samples.jsonl", "summary.json", "model",
)  # fmt: skip
ARTEFACTS = (REQUEST, SAMPLES, SUMMARY)
"""What may be downloaded."""
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


class JobStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(
        self, job_id: str, request: dict[str, Any], tasks: Sequence[Task], fill: Callable[[Path], dict[str, Any]]
    ) -> dict[str, Any]:
        """fill: puts the model under the path it is given, and returns the first state. If it raises, nothing is left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self.folder / f".new-{uuid.uuid4().hex}"
        aside.mkdir()
        try:
            state = fill(aside / MODEL)
            _write(aside / REQUEST, request)
            _write(aside / STATE, state)
            JsonLines(aside / TASKS).append(task_record(task) for task in tasks)
            aside.rename(self.folder / job_id)
            sync(self.folder)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        return state

    def ids(self) -> list[str]:
        """Those that were created whole, in no particular order."""
        if not self.folder.is_dir():
            return []
        return [entry.name for entry in self.folder.iterdir() if _ID.fullmatch(entry.name) and (entry / REQUEST).is_file()]

    def path(self, job_id: str) -> Path:
        return self.folder / job_id

    def request(self, job_id: str) -> dict[str, Any]:
        return json.loads((self.path(job_id) / REQUEST).read_text())

    def state(self, job_id: str) -> dict[str, Any]:
        return json.loads((self.path(job_id) / STATE).read_text())

    def set_state(self, job_id: str, state: dict[str, Any]) -> None:
        _write(self.path(job_id) / STATE, state)

    def tasks(self, job_id: str) -> list[Task]:
        return [task_of(record) for record in read_jsonlines(self.path(job_id) / TASKS)]

    def samples(self, job_id: str) -> list[dict[str, Any]]:
        return read_jsonlines(self.path(job_id) / SAMPLES)

    def appending(self, job_id: str) -> JsonLines:
        """Samples are added here; a line that a crash tore is cut off first."""
        return JsonLines(self.path(job_id) / SAMPLES)

    def summary(self, job_id: str) -> dict[str, Any] | None:
        path = self.path(job_id) / SUMMARY
        return json.loads(path.read_text()) if path.is_file() else None

    def set_summary(self, job_id: str, summary: dict[str, Any]) -> None:
        _write(self.path(job_id) / SUMMARY, summary)

    def model(self, job_id: str) -> Path:
        return self.path(job_id) / MODEL

    def drop_model(self, job_id: str) -> None:
        """A finished evaluation needs its model no more."""
        shutil.rmtree(self.model(job_id), ignore_errors=True)

    def artefacts(self, job_id: str) -> list[str]:
        return [name for name in ARTEFACTS if (self.path(job_id) / name).is_file()]

    def sweep(self) -> None:
        """Remove what a crash left half-created. Only for the owner of the folder."""
        for debris in self.folder.glob(".new-*"):
            shutil.rmtree(debris, ignore_errors=True)


def _write(path: Path, value: dict[str, Any]) -> None:
    write_whole(path, json.dumps(jsonable(value), indent=1) + "\n")
