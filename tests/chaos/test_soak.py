"""2,000 small steps on Ray, in four commands: what grows? `pytest -s` prints the table."""

from __future__ import annotations

from statistics import median

import pytest

from pipeline.buffer.reader import read_status
from tests.chaos import soak
from tests.e2e.program import Program

STEPS, LIVES = 2000, 4


@pytest.fixture(scope="module")
def soaked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    looks = soak.soak(folder, STEPS, LIVES)
    print(f"\n{soak.table(looks)}")
    return folder, looks


def lives(looks):
    """The looks of each life; the first of them is taken when everything has been loaded and done a few hundred times."""
    return [looks[first : first + soak.LOOKS] for first in range(0, len(looks), soak.LOOKS)]


def kinds(look, name):
    """Without the processes of workflow nodes, which come and go, and their connections."""
    return {kind: amount for kind, amount in look[name].items() if kind != "worker"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestWhatDoesNotGrow:
    def test_memory_of_each_process(self, soaked):
        for first, *_, last in lives(soaked[1]):
            before, after = kinds(first, "memory_mb"), kinds(last, "memory_mb")
            grown = {kind: round(after[kind] - before[kind], 1) for kind in before}
            assert max(grown.values()) < 8, grown
            assert sum(grown.values()) < 20, grown

    def test_open_files_and_threads(self, soaked):
        for first, *_, last in lives(soaked[1]):
            for name in ("open_files", "threads"):
                grown = {kind: kinds(last, name)[kind] - amount for kind, amount in kinds(first, name).items()}
                assert max(grown.values()) <= 8, (name, grown)

    def test_what_a_step_costs(self, soaked):
        costs = [look["step_cpu_s"] for look in soaked[1]]
        assert max(costs[-soak.LOOKS :]) < 1.3 * median(costs)

    def test_the_time_of_a_resume(self, soaked):
        times = [look["resume_s"] for look in soaked[1]]
        assert max(times) < 1.5 * min(times) + 5

    def test_what_lies_on_the_disk_of_what_was_trained(self, soaked):
        """What an evaluation or a log says of a step stays, a few kilobytes; rows, weights, checkpoints and windows do not."""
        _, looks = soaked
        for name in ("groups", "checkpoints", "weights", "workflow"):
            assert looks[-1]["disk_mb"][name] < looks[0]["disk_mb"][name] + 0.5, name
        assert looks[-1]["disk_mb"]["run.db"] < STEPS * 0.005

    def test_everything_was_trained_once(self, soaked):
        found = read_status(Program(soaked[0]).run(soak.RUN))
        assert (found["state"], found["step"]) == ("finished", STEPS)
        assert found["ordinals"]["trained"] == found["ordinals"]["fetched"] == 4 * STEPS
        assert found["attempts"]["regenerated"] == 0
