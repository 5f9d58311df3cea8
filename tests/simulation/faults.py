"""What goes wrong in one seed, and when: drawn from the seed, and never beyond a budget, so that every run can end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

WireFault = Literal["lost", "deaf", "late", "hung", "full"]
"""`lost`: the request never arrives. `deaf`: it is done, and the caller hears of an error. `late`: it arrives after the caller
has given up (not at workers, which play what their caller still waits for). `hung`: it is done, and no answer ever comes.
`full`: the disk is full (the ledger only)."""

VICTIMS = (
    "replay_buffer", "trainer", "evaluator_pool", "teacher_scorer", "everything", "everything", "driver", "stop",
    "split replay_buffer", "split evaluator_pool", "split trainer", "worker_left", "worker_right", "teacher", "fetcher",
)  # fmt: skip
"""`driver`: only it dies, and its cluster lives on beside the one that resumes. `stop`: SIGTERM. `split`: the actor is taken for
dead and started anew, while the old process lives on and one of its callers still reaches it."""
SPLITS = {
    "split replay_buffer": ("evaluator_pool", "trainer", "teacher_scorer"),
    "split evaluator_pool": ("driver",),
    "split trainer": ("driver",),
}


@dataclass(slots=True)
class Faults:
    """Of one seed. `calm` has none, and every hop takes the same time."""

    random: random.Random
    rate: float = 0.0
    """Probability of a fault at a hop between two processes."""
    budget: int = 0
    """Faults at hops that are left."""
    kills: list[tuple[int, str]] = field(default_factory=list)
    """(tick, victim), by tick."""
    teacher_budget: int = 0
    """Of faults of the teacher: after three in a row a group is dropped by rule, and a run without faults drops none."""
    calm: bool = False

    @classmethod
    def none(cls) -> Faults:
        return cls(random.Random(0), calm=True)

    @classmethod
    def of(cls, seed: int, ticks: int) -> Faults:
        """ticks: of a calm run; kills are spread evenly over it, and a little beyond."""
        luck = random.Random(seed)
        count = luck.choice((0, 1, 1, 2, 2, 3, 4))
        instants = sorted(luck.randrange(1, int(1.2 * ticks)) for _ in range(count))
        kills = [(instant, luck.choice(VICTIMS)) for instant in instants]
        teacher = sum(victim == "teacher" for _, victim in kills)
        return cls(luck, luck.choice((0.0, 0.01, 0.04)), luck.randrange(7), kills, max(0, 2 - teacher))

    def on_wire(self, target: str) -> WireFault | None:
        if self.budget == 0 or self.random.random() >= self.rate:
            return None
        if target == "teacher":
            if not self.teacher_budget:
                return None
            self.teacher_budget -= 1
        self.budget -= 1
        last: WireFault = "full" if target == "replay_buffer" else "lost" if target.startswith("worker") else "late"
        return self.random.choice(("lost", "deaf", "deaf", "hung", "late" if target == "replay_buffer" else "lost", last))

    def hop_s(self) -> float:
        if self.calm:
            return 0.01
        return self.random.random() * (0.05 if self.random.random() < 0.9 else 2.0)

    def work_s(self) -> float:
        return 0.5 if self.calm else self.random.random() * (1.0 if self.random.random() < 0.8 else 6.0)

    def restart_s(self) -> float:
        return self.random.random() * 5.0

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability
