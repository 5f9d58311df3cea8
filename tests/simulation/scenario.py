"""What is run in one seed: a tiny run, and what its data does by itself, without any fault from outside.

Invariant: everything here is a function of the scenario and of ids; nothing depends on time or on order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from pipeline.config.schema import RunConfig

NODES = ("left", "right")
CPU_A_NODE = 2
"""A sample takes one CPU: four run at the same time."""


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    steps: int = 3
    tasks: int = 2
    samples: int = 2
    staleness: int = 1
    sampler: str = "in_order"
    save_every: int = 1
    keep_groups: int | None = 0
    teacher: bool = True
    durable: bool = False
    on_dropped: str = "replace"
    limit: int | None = None
    fails: frozenset[int] = frozenset()
    """Ordinals whose first attempt fails for lack of infrastructure."""
    bad: frozenset[int] = frozenset()
    """Ordinals whose data is bad: they are dropped after one attempt."""
    filtered: frozenset[int] = frozenset()
    """Ordinals whose samples all have the same reward; with `filters.zero_advantage` they are dropped."""
    large: frozenset[int] = frozenset()
    """Ordinals whose rows are too large for the database: they go to a segment."""
    slow: frozenset[int] = frozenset()
    """Ordinals whose samples take ten times as long."""
    exact: bool = True
    """Without faults from outside the same ordinals are trained in the same order, whatever the timing."""

    @property
    def config(self) -> RunConfig:
        return _config(self)


@cache
def _config(scenario: Scenario) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "simulated"},
            "student": {"path": "student"},
            "teachers": {"big": {"engine": "fixed_cost"}},
            "datasets": {"words": {"generator": "spell_backward"}},
            "specs": [
                {"agent": "scripted", "resource": {"cpu": 1.0}, "init_timeout_s": 5, "run_timeout_s": 20, "verify_timeout_s": 5}
            ],
            "algorithm": {"name": "opd" if scenario.teacher else "grpo", "opd": {"signal": "sampled"}},
            "rollout": {
                "tasks_per_step": scenario.tasks,
                "samples_per_task": scenario.samples,
                "max_staleness": scenario.staleness,
                "on_dropped": scenario.on_dropped,
                "min_step_fraction": 0.01,
                "filters": {"zero_advantage": bool(scenario.filtered)},
            },
            "buffer": {
                "sampler": scenario.sampler,
                "keep_groups": scenario.keep_groups,
                "durable_samples": scenario.durable,
                "allow_network_fs": True,
            },
            "teacher_stage": {"call_timeout_s": 20.0},
            "trainer": {"steps": scenario.steps, "save_every": scenario.save_every},
            "eval": {"every": 0, "hold_s": 0.001},
            "observe": {"details": False},
        }
    )


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("plain"),
    Scenario("stragglers", steps=5, keep_groups=1, slow=frozenset({3, 9})),
    Scenario("no teacher", teacher=False, staleness=0),
    Scenario("rare checkpoints", steps=5, save_every=2),
    Scenario("one checkpoint", steps=4, save_every=5, keep_groups=None, staleness=2),
    Scenario("large rows", large=frozenset({0, 3, 4})),
    Scenario("failures", fails=frozenset({1, 2, 5}), staleness=0),
    Scenario("durable samples", durable=True, samples=3, fails=frozenset({2})),
    Scenario("end of data", limit=5, steps=4),
    Scenario("bad data, shrunk", bad=frozenset({1, 4}), on_dropped="shrink", tasks=3),
    Scenario("bad data, replaced", bad=frozenset({1, 4}), steps=3, exact=False),
    Scenario("bad data, replaced one at a time", bad=frozenset({1, 5}), staleness=0),
    Scenario("filtered", filtered=frozenset({0, 3}), exact=False, teacher=False),
    Scenario("ready first", sampler="ready_first", exact=False, steps=4, staleness=2, slow=frozenset({0, 3})),
    Scenario("windowed", sampler="windowed", exact=False, steps=4, save_every=2),
)
