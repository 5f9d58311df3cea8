"""A service of Ray is killed while Ray starts: the command ends, whatever it waited for at that moment."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.chaos.victims import kill
from tests.e2e.program import program, status, wait_for

CONFIG = Path(__file__).with_name("chaos.yaml")
END_S = 40.0


@pytest.mark.parametrize(("victim", "after_s"), [("gcs", 0.4), ("gcs", 1.2), ("raylet", 0.5), ("raylet", 2.5)])
def test_a_service_that_dies_at_the_start_ends_the_command(tmp_path, victim, after_s):
    with program(tmp_path) as rollout:
        command = rollout.start("run", CONFIG, "--run-id", "r")
        service = {"gcs": "gcs_server", "raylet": "raylet"}[victim]
        wait_for(lambda: rollout.find(service), 30, f"the {service}", command)
        time.sleep(after_s)
        assert kill(victim, rollout, command, "r")
        assert command.done(END_S).code == 1
        wait_for(lambda: not rollout.processes(), END_S, "the end of every process")
        assert status(rollout.run("r"))["step"] == 0
