"""What a finished run is judged by: lines that its workers, its pool and its trainer wrote beside the ledger.

Invariant: lost, trained twice and regenerated are computed from these lines; the ledger is what they are held against.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.buffer import codec, retrieval
from pipeline.buffer.reader import read_status
from pipeline.buffer.schema import open_reader
from pipeline.paths import RunPaths


@dataclass(slots=True)
class Verdict:
    """Empty lists are what is promised. Each entry says what was seen."""

    lost: list[str] = field(default_factory=list)
    """Acknowledged groups that are not stored as they were acknowledged, or were never trained."""
    trained_twice: list[str] = field(default_factory=list)
    """Ordinals under two steps, and steps that a repetition trained on something else or to other weights."""
    regenerated: list[str] = field(default_factory=list)
    """Ordinals that were played, or acknowledged for another attempt, after an acknowledged commit."""
    wrong: list[str] = field(default_factory=list)
    """Counts that do not add up, and drops that no fault of the data explains."""

    def add(self, other: Verdict) -> None:
        for name in ("lost", "trained_twice", "regenerated", "wrong"):
            getattr(self, name).extend(getattr(other, name))


def judge(paths: RunPaths, steps: int, tasks: int) -> Verdict:
    """Of a run that has finished."""
    commits, plays, trained = lines(paths.commits), lines(paths.plays), lines(paths.trained)
    verdict = Verdict()
    _judge_commits(verdict, commits, plays)
    by_ordinal = _judge_training(verdict, trained, steps, tasks)
    with closing(open_reader(paths.database)) as db:
        _judge_ledger(verdict, db, paths, commits, by_ordinal)
    _judge_status(verdict, read_status(paths), steps, tasks)
    return verdict


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def first_after(paths: RunPaths, moment: float) -> float | None:
    """When the first group was acknowledged or step trained after `moment`."""
    later = (line["t"] for path in (paths.commits, paths.trained) for line in lines(path) if line["t"] > moment)
    return min(later, default=None)


def _judge_commits(verdict: Verdict, commits: list[dict], plays: list[dict]) -> None:
    acknowledged: dict[int, dict] = {}
    for line in commits:
        first = acknowledged.setdefault(line["ordinal"], line)
        if (first["attempt"], first["sha256"]) != (line["attempt"], line["sha256"]):
            verdict.regenerated.append(f"ordinal {line['ordinal']}: attempts {first['attempt']} and {line['attempt']} acknowledged")
    for line in plays:
        first = acknowledged.get(line["ordinal"])
        if first is not None and line["t"] > first["t"]:
            verdict.regenerated.append(
                f"ordinal {line['ordinal']}: attempt {line['attempt']} played after {first['attempt']} was kept"
            )


def _judge_training(verdict: Verdict, trained: list[dict], steps: int, tasks: int) -> dict[int, int]:
    """ordinal -> step."""
    by_step: dict[int, dict] = {}
    by_ordinal: dict[int, set[int]] = defaultdict(set)
    for line in trained:
        first = by_step.setdefault(line["step"], line)
        for key in ("ordinals", "weights"):
            if line[key] != first[key]:
                verdict.trained_twice.append(f"step {line['step']}: {key} {first[key]}, then {line[key]}")
        for ordinal in line["ordinals"]:
            by_ordinal[ordinal].add(line["step"])
    verdict.trained_twice += [
        f"ordinal {ordinal}: steps {sorted(found)}" for ordinal, found in by_ordinal.items() if len(found) > 1
    ]
    if sorted(by_step) != list(range(1, steps + 1)):
        verdict.wrong.append(f"trained steps are {sorted(by_step)}, not 1..{steps}")
    for step, line in by_step.items():
        planned = list(range(tasks * (step - 1), tasks * step))
        if line["ordinals"] != planned:
            verdict.wrong.append(f"step {step} was trained on {line['ordinals']}, an undisturbed run trains on {planned}")
    return {ordinal: min(found) for ordinal, found in by_ordinal.items()}


def _judge_ledger(
    verdict: Verdict, db: sqlite3.Connection, paths: RunPaths, commits: list[dict], by_ordinal: dict[int, int]
) -> None:
    db.execute("BEGIN")
    ordinals = sorted({line["ordinal"] for line in commits})
    stored = {group.ordinal: group for group in retrieval.groups(db, paths.groups, ordinals, columns=False)}
    for line in commits:
        ordinal, group = line["ordinal"], stored.get(line["ordinal"])
        if group is None:
            verdict.lost.append(f"ordinal {ordinal}: acknowledged, and its rows are gone")
        elif (group.attempt, codec.digest(codec.encode_group(group))) != (line["attempt"], line["sha256"]):
            verdict.lost.append(f"ordinal {ordinal}: stored rows are not those that were acknowledged")
        if ordinal not in by_ordinal:
            verdict.lost.append(f"ordinal {ordinal}: acknowledged, and never trained")


def _judge_status(verdict: Verdict, status: dict[str, Any], steps: int, tasks: int) -> None:
    counts = status["ordinals"]
    if counts["fetched"] != sum(counts[state] for state in counts if state != "fetched"):
        verdict.wrong.append(f"counts do not add up: {counts}")
    if counts["trained"] != steps * tasks:
        verdict.wrong.append(f"{counts['trained']} groups are trained, not {steps * tasks}; dropped {status['dropped_by_reason']}")
    if status["attempts"]["regenerated"]:
        verdict.regenerated.append(f"the ledger counts {status['attempts']['regenerated']}")
    if status["state"] != "finished":
        verdict.wrong.append(f"state {status['state']}: {status['error']}")
