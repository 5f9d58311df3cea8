"""Whole runs with the student on one real engine and the teacher on the other, and what is killed in their middle."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.program import Program, program, status, step, title_of, trained_as_planned, wait_for
from tests.engines.conftest import FACTS, KINDS, interpreter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
STEPS, TASKS = 6, 16
SMALL = (
    f"trainer.steps={STEPS}",
    f"rollout.tasks_per_step={TASKS}",
    "student.supervised.steps=40",
    "teachers.speller.supervised.steps=60",
    "student.architecture.heads=2",  # heads of 32, which vLLM runs without a GPU
    "teachers.speller.architecture.heads=2",
    "eval={every: 0, items: 40}",
    "engine.slots=64",
    "run.start_timeout_s=300",
)


@pytest.fixture
def rollout(tmp_path: Path) -> Iterator[Program]:
    with program(tmp_path) as made:
        yield made


def overrides(config: pytest.Config, student: str, teacher: str) -> list[str]:
    for kind in KINDS:
        if not interpreter(config, kind).exists():
            pytest.skip(f"the environment of {kind} is not built: make engines")
    return [
        *SMALL,
        f"engine.kind={student}",
        f"engine.launch.python={interpreter(config, student)}",
        f"teachers.speller.engine={teacher}",
        f"teachers.speller.launch.python={interpreter(config, teacher)}",
    ]


def servers(rollout: Program, kind: str) -> list[psutil.Process]:
    """Of this kind, without their guards."""
    found = [process for process in rollout.processes() if f"{kind}_server.py" in title_of(process)]
    return [process for process in found if "guard.py" not in title_of(process)]


@pytest.mark.parametrize(("student", "teacher", "victim"), [("vllm", "sglang", "server"), ("sglang", "vllm", "replica")])
def test_a_run_over_two_engines_outlives_the_death_of_one(
    request: pytest.FixtureRequest, rollout: Program, student: str, teacher: str, victim: str
) -> None:
    command = rollout.start("run", QUICKSTART, "--run-id", "two", *overrides(request.config, student, teacher))
    paths = rollout.run("two")
    wait_for(lambda: step(paths) >= 2, 400, "two steps", command)
    first = servers(rollout, student)
    rollout.kill(first if victim == "server" else rollout.find("ray::ServeReplica:two:student"))
    killed, at = time.monotonic(), step(paths)
    wait_for(lambda: not any(process.is_running() for process in first), 20, "the end of the server", command)
    wait_for(lambda: step(paths) > at + 2, 300, "steps after the death", command)
    line = f"student on {student}, teacher on {teacher}: {victim} killed in step {at + 1}, two steps later after "
    request.config.stash[FACTS].append(f"{line}{time.monotonic() - killed:.1f} s")
    done = command.done(200)
    assert done.code == 0, done.err
    assert trained_as_planned(paths, STEPS, TASKS)
    assert status(paths)["attempts"]["regenerated"] == 0
    assert rollout.processes() == []
