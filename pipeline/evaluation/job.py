"""One evaluation: where it stands, what it has found so far, and the events that it has caused.

Invariant: everything is derived from the state and the samples on disk, so that a restart tells the same story. The events of
sample number i (from 1) are `sample` with id 2i-1 and `progress` with id 2i; the last event follows those of the last sample.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from pipeline.evaluation.lines import played_again
from pipeline.evaluation.store import JobStore
from pipeline.evaluation.summary import figures, summarise
from pipeline.observe.jsonlines import JsonLines
from pipeline.records import Task

FINISHED = ("done", "failed", "cancelled")
FIGURES = ("accuracy", "accuracy_all", "solved", "scored", "done", "total", "pass@k")
_EVENT_KEYS = ("sample_id", "task_id", "dataset", "index", "status", "reward", "class", "answer", "text", "error")


class Job:
    def __init__(self, store: JobStore, name: str, record: dict[str, Any], state: dict[str, Any]) -> None:
        self.id = name
        self._store, self._record, self._state = store, record, state
        self._lines: list[dict[str, Any]] | None = None
        """Held while it runs; read from disk otherwise."""
        self._tasks: list[Task] = []
        self._appending: JsonLines | None = None
        self._done: int = state.get("done", 0)
        self._summary: dict[str, Any] | None = None
        self._partial: tuple[int, dict[str, Any]] = (0, {})
        self._change = asyncio.Event()

    @classmethod
    def read(cls, store: JobStore, name: str) -> Job:
        job = cls(store, name, store.request(name), store.state(name))
        if job.status == "done":
            job._summary = store.summary(name)
        elif job.status not in FINISHED:
            job._done = len(store.samples(name))
        return job

    @property
    def status(self) -> str:
        return self._state["status"]

    @property
    def created_at(self) -> float:
        return self._state["created_at"]

    @property
    def weight_version(self) -> int:
        return self._state["weight_version"]

    @property
    def key(self) -> str | None:
        return self._record["key"]

    @property
    def digest(self) -> str:
        return self._record["digest"]

    def lines(self) -> list[dict[str, Any]]:
        """Samples in the order in which they ended."""
        return self._lines if self._lines is not None else self._store.samples(self.id)

    def begin(self, now: float, tasks: list[Task], appending: JsonLines) -> None:
        self._lines, self._tasks, self._appending = self._store.samples(self.id), tasks, appending
        self._done = len(self._lines)
        self._set({"status": "running", "started_at": self._state.get("started_at", now)})

    def add(self, line: dict[str, Any]) -> None:
        """Written before it is counted. A line that comes after the end of the job is left out."""
        if self._lines is None or self._appending is None:
            return
        self._appending.append([line])
        self._lines.append(self._appending.last or line)
        self._done += 1
        self._tell()

    def finish(self, now: float, min_coverage: float) -> None:
        """The summary first, then the state: where the state says done, the summary is there."""
        summary = self._summarise(min_coverage) | {"seconds": now - self._state.get("started_at", now)}
        self._store.set_summary(self.id, summary)
        self._summary = summary
        self.end("done", now)

    def end(self, status: str, now: float, error: str | None = None) -> None:
        self._partial = (self._done, self._results())
        self._set({"status": status, "finished_at": now, "error": error, "done": self._done, "results": self._partial[1]})
        self._lines, self._tasks, self._appending = None, [], None

    def view(self) -> dict[str, Any]:
        """As `GET /v1/evals/ID` shows it."""
        summary = self._summary or {}
        return {
            "id": self.id,
            "status": self.status,
            "model": self._state["model"],
            "weight_version": self.weight_version,
            "progress": {"done": self._done, "total": self._record["total"]},
            "results": self._results(),
            "valid": summary.get("valid"),
            "why_invalid": summary.get("why_invalid", []),
            "error": self._state.get("error"),
            "artefacts": {name: f"/v1/evals/{self.id}/artefacts/{name}" for name in self._store.artefacts(self.id)},
            "created_at": self.created_at,
            "started_at": self._state.get("started_at"),
            "finished_at": self._state.get("finished_at"),
            "request": self._record["request"],
        }

    def events(self, after: int, most: int) -> list[dict[str, Any]]:
        """At most about `most` of those whose id is above `after`."""
        found: list[dict[str, Any]] = []
        last = 2 * self._done + 1
        if after >= last:
            return []
        total = self._record["total"]
        first = after // 2
        for number, line in enumerate(self.lines()[first : self._done], start=first + 1):
            if 2 * number - 1 > after:
                found.append(_event(2 * number - 1, "sample", {key: line[key] for key in _EVENT_KEYS}))
            if 2 * number > after:
                found.append(_event(2 * number, "progress", {"done": number, "total": total}))
            if len(found) >= most:
                return found
        if self.status in FINISHED:
            data = {key: value for key, value in self.view().items() if key != "request"}
            found.append(_event(last, "error" if self.status == "failed" else "done", data))
        return found

    async def changed(self) -> None:
        """Returns at the next change."""
        await self._change.wait()

    def _results(self) -> dict[str, Any]:
        if self._summary is not None:
            return {name: _figures(found, found["total"]) for name, found in self._summary["results"].items()}
        if self._tasks and self._lines is not None:
            if self._partial[0] != len(self._lines) or not self._partial[1]:
                self._partial = (len(self._lines), self._so_far())
            return self._partial[1]
        return self._state.get("results", {})

    def _so_far(self) -> dict[str, Any]:
        """Of every data set that is planned, also before its first sample is done."""
        planned: Counter[str] = Counter()
        for task in self._tasks:
            planned[task.dataset] += task.samples
        found, nothing = self._summarise(0.0)["results"], figures([], self._record["k"])
        return {name: _figures(found.get(name, nothing), total) for name, total in sorted(planned.items())}

    def _summarise(self, min_coverage: float) -> dict[str, Any]:
        played = played_again(self._tasks, self._lines or [])
        return summarise(self.id, played, k=self._record["k"], min_coverage=min_coverage, version=self.weight_version)

    def _set(self, changes: dict[str, Any]) -> None:
        self._state = self._state | changes
        self._store.set_state(self.id, self._state)
        self._tell()

    def _tell(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


def _figures(found: dict[str, Any], planned: int) -> dict[str, Any]:
    """accuracy_all is of what is done, whose number a summary calls its total."""
    named = found | {"done": found["total"], "total": planned}
    return {key: named[key] for key in FIGURES}


def _event(number: int, event: str, data: dict[str, Any]) -> dict[str, Any]:
    return {"id": number, "event": event, "data": data}
