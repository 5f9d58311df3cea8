"""The quickstart on machines of 1, 2 and 4 logical CPUs: it runs, or is refused with the sum of what it asks. It never pends."""

from pathlib import Path

import pytest

from tests.e2e.program import status, trained_as_planned

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SHORT = [
    "trainer.steps=3",
    "eval.items=20",
    "student.supervised.steps=5",
    "teachers.speller.supervised.steps=10",
    "datasets.spell_backward.size=500",
    "rollout.tasks_per_step=16",
]


@pytest.mark.parametrize("cpus", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_the_quickstart_on_so_many_cpus(shared_rollout, cpus):
    done = shared_rollout.call("run", QUICKSTART, *SHORT, f"run.ray.num_cpus={cpus}", "--run-id", f"on{cpus}", timeout_s=120)
    paths = shared_rollout.run(f"on{cpus}")
    if done.code == 2:
        assert (done.out, len(done.err.splitlines())) == ("", 1)
        assert f"{cpus}" in done.err and "CPU" in done.err
        return
    assert done.code == 0, done
    assert trained_as_planned(paths, 3, 16)
    assert status(paths)["state"] == "finished"


def test_more_than_the_machine_has_is_refused_with_the_sum(shared_rollout):
    layout = "layout.nodes={a: {cpu: 4, memory_gb: 1}}"
    done = shared_rollout.call("run", QUICKSTART, *SHORT, "run.ray.num_cpus=1", layout, "--run-id", "more")
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert "layout.nodes.a asks for gpu 0, cpu 4" in done.err and "cpu 0.79" in done.err
    assert not shared_rollout.run("more").root.exists()
