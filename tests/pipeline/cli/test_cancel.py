"""Cancelling a run that stands still, and one that another process drives."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipeline.buffer.lock import is_held
from pipeline.buffer.reader import read_run_epoch, read_status
from pipeline.paths import RunPaths
from tests.pipeline.cli.test_run import drivers  # noqa: F401

DRIVER = """
import signal, sys, time
from pathlib import Path
from pipeline.buffer.lock import RunLock
from pipeline.paths import RunPaths

def stop(*_):
    raise SystemExit(3)

with RunLock(RunPaths(Path(sys.argv[1]))):
    signal.signal(signal.SIGTERM, stop)
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def paths(rollout, drivers, config_file, tmp_path) -> RunPaths:  # noqa: F811
    rollout("run", config_file, "--runs-dir", tmp_path / "runs", "--run-id", "one")
    return RunPaths(tmp_path / "runs" / "one")


def test_a_run_that_stands_still_is_marked_and_left_out_of_resume_all(rollout, paths, drivers, tmp_path):  # noqa: F811
    runs, before = tmp_path / "runs", read_run_epoch(paths)
    code, out, _ = rollout("cancel", "one", "--runs-dir", runs)
    assert code == 0 and "run one is cancelled" in out
    assert read_status(paths)["state"] == "cancelled" and read_run_epoch(paths) == before + 1
    assert rollout("resume", "--all", "--runs-dir", runs)[0] == 0 and len(drivers) == 1
    code, _, err = rollout("cancel", "one", "--runs-dir", runs)
    assert code == 2 and "is cancelled already" in err


def test_a_running_one_is_asked_to_stop_first(rollout, paths, tmp_path):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(paths.root)], stdout=subprocess.PIPE)
    try:
        assert driver.stdout.readline() == b"ready\n"
        code, _, err = rollout("cancel", "one", "--runs-dir", tmp_path / "runs")
        assert code == 0 and f"process {driver.pid} was asked to stop" in err
        assert driver.wait(10) == 3 and not is_held(paths)
        assert read_status(paths)["state"] == "cancelled"
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
