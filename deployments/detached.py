"""Starts a `rollout` command that outlives the replica which asked for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_DETACH = "import subprocess, sys; subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, stdout=open(sys.argv[1], 'ab'), stderr=subprocess.STDOUT, start_new_session=True)"  # noqa: E501
START_S = 30.0


def start_detached(arguments: list[str], output: Path) -> None:
    """Through a process in between: Ray ends the children of a worker with it. What Ray told this worker is not handed on."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_") and name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "pipeline.cli.main", *arguments]
    subprocess.run([sys.executable, "-c", _DETACH, str(output), *command], env=environment, check=True, timeout=START_S)
