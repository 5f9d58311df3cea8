"""Kills a run at random moments, resumes it, and counts what was lost: `python -m tests.chaos.killer --kills 20 --seed 0 [--json]`.

Victims are dealt from a shuffled deck, so that each is killed equally often; a victim that does not live at the moment keeps its
card. Kills follow each other at uniform distances from the start of every command to its end, resumes included.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.paths import RunPaths
from tests.chaos.victims import DRIVER, EVERYTHING, HEALING, VICTIMS, kill
from tests.chaos.witnesses import Verdict, first_after, judge
from tests.e2e.program import Command, Program, program, status

CONFIG = Path(__file__).with_name("chaos.yaml")
STEPS, TASKS = 40, 4
GAP_S = 14.0
"""Between two kills, and from the start of a command to the first, at most; uniform."""
END_S = 180.0
"""For a command that nobody kills."""
DEAD_S = 90.0
"""For a command whose Ray was killed to notice it."""
POLL_S = 0.1
PHASES = {"running": "running", "written": "written-unscored", "consumed": "consumed-uncheckpointed"}


@dataclass(slots=True)
class Kill:
    number: int
    run: str
    command: str
    """`run` or `resume`."""
    victim: str
    after_s: float
    """Of the command's life."""
    step: int
    running: int
    written: int
    consumed: int
    """Groups in that state, in the ledger, at the kill."""


@dataclass(slots=True)
class Life:
    run: str
    command: str
    started: float
    kills: list[Kill] = field(default_factory=list)
    code: int | None = None
    seconds: float = 0.0
    first_sample_s: float | None = None
    """From the start of the command to the first group acknowledged, or step trained."""


class Killer:
    def __init__(self, program: Program, kills: int, seed: int, tell: Any) -> None:
        self._program, self._wanted, self._tell = program, kills, tell
        self._random = random.Random(seed)
        self._deck: list[str] = []
        self._number = 0
        self.kills: list[Kill] = []
        self.lives: list[Life] = []
        self.verdict = Verdict()

    def run(self) -> None:
        while len(self.kills) < self._wanted:
            self._number += 1
            self._run_to_its_end(f"c{self._number}")

    def _run_to_its_end(self, name: str) -> None:
        paths, words = self._program.run(name), ("run", CONFIG, "--run-id", name)
        while (life := self._live(paths, words)).code != 0:
            if not life.kills:
                self.verdict.wrong.append(f"{name}: {words[0]} ended with {life.code} though nobody killed anything")
                return
            if paths.config.exists():
                words = ("resume", name)
            else:
                shutil.rmtree(paths.root, ignore_errors=True)  # killed before the run began
        left = self._program.processes()
        if left:
            self.verdict.wrong.append(f"{name}: {len(left)} processes are left after its end")
            self._program.kill_all()
        found = judge(paths, STEPS, TASKS)
        self.verdict.add(found)
        self._tell(f"{name} finished: {asdict(found)}")

    def _live(self, paths: RunPaths, words: tuple) -> Life:
        """One command, from its start to its end, whoever ends it."""
        life = Life(paths.run_id, words[0], time.time())
        self.lives.append(life)
        command = self._program.start(*words)
        while command.running() and len(self.kills) < self._wanted and not self._doomed(life):
            if self._wait(command, self._random.uniform(0.0, GAP_S)):
                self._strike(life, command, paths)
        if not self._wait_end(command, DEAD_S if self._doomed(life) else END_S):
            self.verdict.wrong.append(f"{paths.run_id}: {words[0]} neither ended nor failed after {life.kills}: {command.said()}")
            self._program.kill_all()
        life.seconds = time.time() - life.started
        life.code = command.done(10).code
        first = first_after(paths, life.started)
        life.first_sample_s = None if first is None else first - life.started
        if life.code not in (0, -9) and life.kills and life.kills[-1].victim in HEALING:
            self.verdict.wrong.append(f"{paths.run_id}: did not survive {life.kills[-1]}: {command.said().err[-400:]}")
        self._tell(f"{words[0]} {paths.run_id} ended with {life.code} after {life.seconds:.1f} s")
        return life

    def _doomed(self, life: Life) -> bool:
        """Nothing more is to be killed in it."""
        return bool(life.kills) and life.kills[-1].victim in (DRIVER, EVERYTHING, "raylet", "gcs")

    def _strike(self, life: Life, command: Command, paths: RunPaths) -> None:
        found = status(paths) or {"step": 0, "ordinals": {}}
        counts = found["ordinals"]
        victim = self._deal(lambda name: kill(name, self._program, command, paths.run_id))
        states = {state: counts.get(state, 0) for state in PHASES}
        at = time.time() - life.started
        done = Kill(len(self.kills) + 1, paths.run_id, life.command, victim, round(at, 2), found["step"], **states)
        self.kills.append(done)
        life.kills.append(done)
        self._tell(f"kill {done.number}: {victim} {at:.1f} s into {life.command} {paths.run_id}, step {done.step}, {states}")

    def _deal(self, strike: Any) -> str:
        """The first card of the deck whose victim lives."""
        for again in (False, True):
            if again or not self._deck:
                self._deck += self._random.sample(VICTIMS, len(VICTIMS))
            for victim in self._deck:
                if strike(victim):
                    self._deck.remove(victim)
                    return victim
        raise AssertionError("the driver always lives")

    def _wait(self, command: Command, seconds: float) -> bool:
        """False when the command ended before."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and command.running():
            time.sleep(POLL_S)
        return command.running()

    def _wait_end(self, command: Command, seconds: float) -> bool:
        return not self._wait(command, seconds)


def figures(killer: Killer) -> dict[str, Any]:
    """resume_s: from the start of a resume to the first group acknowledged or step trained; of resumes that ended before that, the
    time until their first kill is a lower bound and counts towards the largest only."""
    resumes = [life for life in killer.lives if life.command == "resume"]
    times = sorted(life.first_sample_s for life in resumes if life.first_sample_s is not None)
    cut_short = [life.kills[0].after_s for life in resumes if life.first_sample_s is None and life.kills]
    count = max(1, len(killer.kills))
    shares = {f"share_{state}": round(sum(getattr(k, state) > 0 for k in killer.kills) / count, 3) for state in PHASES}
    return {
        "kills": len(killer.kills),
        "runs": len({life.run for life in killer.lives}),
        "lost": len(killer.verdict.lost),
        "trained_twice": len(killer.verdict.trained_twice),
        "regenerated": len(killer.verdict.regenerated),
        "wrong": len(killer.verdict.wrong),
        "resumes": len(resumes),
        "resume_s_p50": round(statistics.median(times), 2) if times else None,
        "resume_s_max": round(max([*times, *cut_short]), 2) if times else None,
        **shares,
        "seconds": round(sum(life.seconds for life in killer.lives), 1),
    }


def table(killer: Killer) -> str:
    """A line a victim: how often, in which phases, and how the command fared."""
    rows = [("victim", "kills", "in resume", *PHASES.values())]
    for victim in VICTIMS:
        mine = [k for k in killer.kills if k.victim == victim]
        phases = (str(sum(getattr(k, state) > 0 for k in mine)) for state in PHASES)
        rows.append((victim, str(len(mine)), str(sum(k.command == "resume" for k in mine)), *phases))
    total = Counter(state for k in killer.kills for state in PHASES if getattr(k, state))
    in_resume = sum(k.command == "resume" for k in killer.kills)
    rows.append(("all", str(len(killer.kills)), str(in_resume), *(str(total[state]) for state in PHASES)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def campaign(folder: Path, kills: int, seed: int, tell: Any = lambda line: None) -> Killer:
    """Nothing of it is left afterwards but the folder."""
    with program(folder) as made:
        killer = Killer(made, kills, seed, tell)
        killer.run()
        return killer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, and nothing else there")
    parser.add_argument("--folder", type=Path, help="where the runs lie, and stay; a temporary folder when left out")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        killer = campaign(given.folder or Path(temporary), given.kills, given.seed, lambda line: print(line, file=sys.stderr))
    found = figures(killer)
    if given.json:
        kills = [asdict(k) for k in killer.kills]
        print(json.dumps({"figures": found, "kills": kills, "verdict": asdict(killer.verdict), "seed": given.seed}))
    else:
        print(table(killer))
        print("\n".join(f"{name} {value}" for name, value in found.items()))
        for name, entries in asdict(killer.verdict).items():
            print("\n".join(f"{name}: {entry}" for entry in entries), end="\n" if entries else "")
    return int(any(asdict(killer.verdict).values()))


if __name__ == "__main__":
    sys.exit(main())
