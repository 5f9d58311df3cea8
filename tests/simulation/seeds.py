"""Many seeds one after the other, and what came of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.simulation.witness import Violation
from tests.simulation.world import SCENARIOS, calm, simulate

COLLECT_EVERY = 20
"""Seeds between two collections: a seed leaves many cycles, and the collector would run all the time."""


@dataclass(frozen=True, slots=True)
class Failure:
    seed: int
    message: str

    def __str__(self) -> str:
        scenario = SCENARIOS[self.seed % len(SCENARIOS)].name
        return f"seed {self.seed} ({scenario}): {self.message} [replay: python -m tests.simulation --seed {self.seed}]"


@dataclass(slots=True)
class Played:
    seeds: int = 0
    kills: int = 0
    resumes: int = 0
    commits: int = 0
    failures: list[Failure] = field(default_factory=list)


def warm_up() -> None:
    """Play every scenario without faults: what the seeds are compared with."""
    for scenario in SCENARIOS:
        calm(scenario)


def first_failure(seeds: Iterable[int]) -> Failure | None:
    for seed in seeds:
        try:
            simulate(seed)
        except Violation as broken:
            return Failure(seed, str(broken))
    return None


def play(seeds: Iterable[int], cpu_s: float | None = None) -> Played:
    """All of them, or as many as fit into `cpu_s` seconds of this process."""
    played, began, collecting = Played(), time.process_time(), gc.isenabled()
    gc.disable()
    try:
        for seed in seeds:
            if cpu_s is not None and time.process_time() - began > cpu_s:
                break
            _count(played, seed)
            if played.seeds % COLLECT_EVERY == 0:
                gc.collect()
    finally:
        if collecting:
            gc.enable()
    return played


def _count(played: Played, seed: int) -> None:
    played.seeds += 1
    try:
        result = simulate(seed)
    except Violation as broken:
        played.failures.append(Failure(seed, str(broken)))
        return
    played.kills += result.kills
    played.resumes += result.resumes
    played.commits += result.commits
