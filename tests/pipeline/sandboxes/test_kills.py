"""Owners that are killed at any moment of a start or of a command leave nothing, once the next one has started."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from pipeline.sandboxes import cgroups
from pipeline.sandboxes.base import Limits
from pipeline.sandboxes.leases import reap
from pipeline.sandboxes.local import LocalSandboxes

KILLS = 60


@pytest.mark.slow
def test_killed_owners_leave_no_process_no_folder_no_group_and_no_mount(sandboxes: LocalSandboxes, root: Path):
    root.mkdir()
    moments, begun = random.Random(0), 0
    for _ in range(KILLS):
        owner = os.fork()
        if owner == 0:
            try:
                asyncio.run(_own(root))
            finally:
                os._exit(0)
        time.sleep(moments.uniform(0.0, 0.15))
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        begun += len(list(root.glob("*.lease.json")))
        _wait_until_gone("6161")
    reap(root)
    _wait_until_gone(str(root))
    assert begun > KILLS / 4
    assert not list(root.iterdir())
    assert str(root) not in Path("/proc/self/mountinfo").read_text()
    assert not [f for h in cgroups.find().values() for f in h.folder.glob(f"{cgroups.PREFIX}kill*")]


async def _own(root: Path) -> None:
    boxes = LocalSandboxes(root=root)

    async def one(number: int) -> None:
        sandbox = await boxes.open(f"kill{number}", {"a": "1"}, Limits())
        await sandbox.run("(setsid sleep 6161 &); sleep 6161", 600)

    await asyncio.gather(one(0), one(1))


def _wait_until_gone(word: str) -> None:
    """No process of a sandbox has an argument that begins with it."""
    deadline = time.monotonic() + 10
    while found := [p.info for p in psutil.process_iter(["pid", "cmdline"]) if _names(p.info["cmdline"], word)]:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def _names(command: list[str] | None, word: str) -> bool:
    return any(part.startswith(word) for part in command or ())
