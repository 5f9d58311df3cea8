"""A whole run in one event loop: the real core, small parts around it, and a driver that starts, kills and resumes it.

Invariant: what survives a kill is the run folder and the workflow's storage, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.buffer.reader import read_status
from pipeline.buffer.schema import create_run
from pipeline.buffer.settings import BufferSettings
from pipeline.paths import RunPaths
from pipeline.trainer import checkpoints
from tests.simulation.cluster import Cluster
from tests.simulation.faults import SPLITS, Faults
from tests.simulation.loop import LIFE, SimulationLoop, Stuck
from tests.simulation.parts import Weights, read_model
from tests.simulation.scenario import SCENARIOS, Scenario
from tests.simulation.wire import Process, Remote
from tests.simulation.witness import Violation, Witness

MOST_RESUMES = 40
MOST_VIRTUAL_S = 20_000.0
MOST_TICKS = 40_000
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass(frozen=True, slots=True)
class Result:
    """How a run went. `trained` and `weights` are what an exact scenario must end with, whatever happened to it."""

    trained: dict[int, tuple[int, ...]]
    weights: str
    ticks: int
    resumes: int
    kills: int
    commits: int
    trace: int
    """Digest of the order of calls: equal for two runs of one seed."""


def simulate(seed: int) -> Result:
    """One seed: its scenario with its faults. Raises Violation."""
    scenario = SCENARIOS[seed % len(SCENARIOS)]
    expected = calm(scenario)
    result = run(scenario, Faults.of(seed, expected.ticks))
    if scenario.exact and (result.trained, result.weights) != (expected.trained, expected.weights):
        raise Violation(
            f"trained {result.trained}, without faults {expected.trained}; weights {result.weights}, {expected.weights}"
        )
    return result


@cache
def calm(scenario: Scenario) -> Result:
    return run(scenario, Faults.none())


def run(scenario: Scenario, faults: Faults) -> Result:
    with _silence(), tempfile.TemporaryDirectory(dir=MEMORY) as folder, closing(SimulationLoop()) as loop:
        paths = RunPaths(Path(folder) / "run")
        paths.groups.mkdir(parents=True)
        paths.database.write_bytes(_empty_run())
        world = World(scenario, faults, paths, loop)
        try:
            return loop.run_until_complete(world.main())
        except Stuck as error:
            raise Violation(str(error)) from error
        finally:
            world.bury()


@cache
def _empty_run() -> bytes:
    """A database as `create_run` leaves it."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        paths = RunPaths(Path(folder) / "run")
        create_run(paths, {})
        return paths.database.read_bytes()


@contextmanager
def _silence() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


class World:
    def __init__(self, scenario: Scenario, faults: Faults, paths: RunPaths, loop: SimulationLoop) -> None:
        self.scenario, self.faults, self.paths, self.loop = scenario, faults, paths, loop
        self.config = scenario.config
        self.settings = BufferSettings.from_config(self.config)
        self.witness = Witness(scenario, paths, self._break)
        self.weights = Weights(self._published)
        self.clusters: list[Cluster] = []
        self.storage: dict[str, Any] | None = None
        """Workflow storage: the window and the results of completed nodes."""
        self.broken: Violation | None = None
        self.kills = 0
        self.trace = 0
        self.writers = 0
        """Openings of the ledger so far."""
        self._kills = list(faults.kills)
        loop.alarm = self._alarm
        self._set_alarm()
        loop.set_exception_handler(self._fault_in_callback)

    # from beginning to end

    async def main(self) -> Result:
        deadline = self.loop.call_later(MOST_VIRTUAL_S, self._break, Violation(f"not finished after {MOST_VIRTUAL_S:g} virtual s"))
        resumes = -1
        outcome = ""
        while outcome != "finished":
            resumes += 1
            if resumes > MOST_RESUMES:
                raise Violation(f"not finished after {resumes} resumes; the last: {outcome}")
            cluster = Cluster(self, len(self.clusters))
            self.clusters.append(cluster)
            cluster.start()
            outcome = await cluster.over
            if self.broken is not None:
                raise self.broken
            if outcome != "finished":
                zombies = outcome == "left behind"
                if not zombies:
                    cluster.end_actors()
                self._damage(torn=not zombies and self.faults.chance(0.3))
            self.witness.check()
            await asyncio.sleep(self.faults.restart_s())
        deadline.cancel()
        return self._finished(cluster, resumes)

    def _finished(self, cluster: Cluster, resumes: int) -> Result:
        status = read_status(self.paths)
        counts = status["ordinals"]
        left = {state: counts[state] for state in ("pending", "running", "written", "ready", "consumed") if counts[state]}
        if left or status["attempts"]["regenerated"] or self.witness.regenerated:
            raise Violation(f"at the end {left} are left, regenerated {status['attempts']['regenerated']}")
        newest = next(checkpoints.complete(self.paths))
        held = read_model(newest.path)
        trained = {step: tuple(ordinals) for step, (ordinals, _) in sorted(self.witness.learned.items())}
        if held["trained"] != [ordinal for ordinals in trained.values() for ordinal in ordinals]:
            raise Violation(f"the last checkpoint was trained on {held['trained']}, the learner was given {trained}")
        if counts["trained"] != len(held["trained"]):
            raise Violation(f"{counts['trained']} groups are trained, the parameters have seen {len(held['trained'])}")
        pool = cluster.actors["evaluator_pool"].process
        if pool is not None and pool.service is not None and (held_tokens := pool.service.report().detail["tokens_held"]):
            raise Violation(f"{held_tokens} placement tokens are still held")
        return Result(trained, held["weights"], self.loop.ticks, resumes, self.kills, len(self.witness.commits), self.trace)

    # what goes wrong

    def _alarm(self) -> None:
        if self.loop.ticks >= MOST_TICKS:
            self._break(Violation(f"not finished after {MOST_TICKS} callbacks"))
            return
        _, victim = self._kills.pop(0)
        self._set_alarm()
        self.kills += 1
        self._strike(victim)

    def _set_alarm(self) -> None:
        self.loop.alarm_at = max(self._kills[0][0], self.loop.ticks + 1) if self._kills else MOST_TICKS

    def _strike(self, victim: str) -> None:
        cluster = self.clusters[-1]
        if cluster.over.done():
            return
        if victim in ("everything", "driver") or not cluster.actors:
            cluster.end_driver("left behind" if victim == "driver" else "killed")
        elif victim == "stop":
            cluster.life.spawn(self._stop(cluster), "stop")
        elif victim in SPLITS:
            cluster.actors[victim.removeprefix("split ")].split(self.faults.random.choice(SPLITS[victim]))
        else:
            process = cluster.actors[victim].process
            if process is not None:
                self.kill(process)
        self._check_now()

    async def _stop(self, cluster: Cluster) -> None:
        """SIGTERM, as the driver takes it."""
        with contextlib.suppress(Exception):
            await Remote(cluster.actors["evaluator_pool"], 40.0).stop(5.0)
            await Remote(cluster.actors["trainer"], 60.0).stop()
        cluster.end_driver("stopped")

    def kill(self, process: Process) -> None:
        process.actor.end(process, restart=True)

    def _damage(self, torn: bool) -> None:
        """What else may have happened until the resume."""
        faults = self.faults
        if faults.chance(0.4):
            self.storage = None
        if faults.chance(0.2):
            self.weights.newest = None
        if faults.chance(0.3):
            debris = self.paths.checkpoints / ".tmp-left"
            debris.mkdir(parents=True, exist_ok=True)
            (debris / "half").write_bytes(b"half")
        if torn:
            self._tear_newest()

    def _tear_newest(self) -> None:
        """Only when the one before is whole: more than that is not promised."""
        folders = sorted(self.paths.checkpoints.glob("step_*"), reverse=True)
        steps = [int(folder.name[5:]) for folder in folders]
        if folders and not self.witness.torn & set(steps[:2]):
            os.truncate(folders[0] / "model.json", 3)
            self.witness.torn.add(steps[0])

    # what is looked at meanwhile

    def _published(self, version: int) -> None:
        life = LIFE.get()
        if life is not None:
            self.witness.published(self.clusters[int(life.name.partition(".")[0])].epoch, version)

    def carrying_out(self, process: Process, method: str) -> bool:
        """Whether a process of the ledger is its newest writer."""
        self.trace = hash((self.trace, self.loop.ticks, len(method), len(process.life.name)))
        return process.writer == self.writers

    def _check_now(self) -> None:
        with contextlib.suppress(Violation):  # it has been told
            self.witness.check()

    def _break(self, violation: Violation) -> None:
        self.broken = self.broken or violation
        self.clusters[-1].end_driver("broken")

    def _fault_in_callback(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and "handle" in context:
            self._break(Violation(f"a callback failed: {error!r}"))

    def bury(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of coroutines that the dead had not begun
            self._bury()

    def _bury(self) -> None:
        for cluster in self.clusters:
            cluster.bury()
