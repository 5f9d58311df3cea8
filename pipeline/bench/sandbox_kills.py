"""`rollout bench sandboxes --kills N`: owners of sandboxes that are killed at any moment, and what is left once another starts.

Invariant: what is counted bears the name of this process, so that what others do beside it is not.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipeline.config.stages import SandboxPart
from pipeline.sandboxes import cgroups
from pipeline.sandboxes.base import Limits, Sandboxes
from pipeline.sandboxes.kinds import open_sandboxes
from pipeline.sandboxes.leases import DOCKER, LABEL, read_leases

SPAN, FORK_S = 4.0, 0.1
"""An owner is killed within so many times what a sandbox takes to start, after the seconds that the owner itself takes at most."""
OWNED = 2
COMMAND_S = 600.0
LOOK_S, LONGEST_LOOK = 20.0, 10**7


@dataclass(frozen=True, slots=True)
class Mark:
    """By which sandboxes and commands of one measurement are known."""

    pid: int

    @property
    def name(self) -> str:
        return f"killed{self.pid}"

    @property
    def sleep(self) -> tuple[str, str]:
        return "sleep", f"6161{self.pid}"

    def running(self) -> int:
        """Its commands in this machine's process table."""
        return sum(process.info["cmdline"] == list(self.sleep) for process in psutil.process_iter(["cmdline"]))


def kills(part: SandboxPart, count: int, start_s: float) -> dict[str, float]:
    """kills: of owners that had not ended by themselves; of `count` owners: with a sandbox begun, with a command running (theirs or
    one that was left before); and what is left. start_s: what one sandbox takes to start.

    Forks: call it from a process with one thread. Raises SandboxError when the last start fails.
    """
    moments, mark, killed, begun, running = random.Random(0), Mark(os.getpid()), 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="rollout-kills-") as folder:
        root = Path(folder) / "leases"
        for number in range(count):
            owner = os.fork()
            if owner == 0:
                try:
                    logging.disable(logging.WARNING)  # each removes what the last one left
                    asyncio.run(_own(open_sandboxes(part, part.starts, root), mark, number))
                finally:
                    os._exit(0)
            time.sleep(moments.uniform(0.0, FORK_S + SPAN * start_s))
            begun += any(lease.owner.pid == owner for lease in read_leases(root))
            running += mark.running() > 0
            os.kill(owner, signal.SIGKILL)
            killed += os.WIFSIGNALED(os.waitpid(owner, 0)[1])
        left = _left(part, root, mark)
    found = {"kills": killed, "kills_begun": begun, "kills_running": running}
    return found | {f"left_{what}": number for what, number in left.items()}


async def _own(sandboxes: Sandboxes, mark: Mark, number: int) -> None:
    async def one(place: int) -> None:
        sandbox = await sandboxes.open(f"{mark.name}-{number}.{place}", {"a": "1"}, Limits())
        sleep = " ".join(mark.sleep)
        await sandbox.run(f"(setsid {sleep} &); {sleep}", COMMAND_S)

    await asyncio.gather(*(one(place) for place in range(OWNED)))


def _left(part: SandboxPart, root: Path, mark: Mark) -> dict[str, int]:
    """When another has started: leases and folders, processes, mounts, control groups; containers; what a server holds."""
    asyncio.run(open_sandboxes(part, part.starts, root).start())
    found = {
        "folders": len(list(root.glob("*"))),
        "processes": mark.running(),
        "mounts": Path("/proc/self/mountinfo").read_text().count(str(root)),
        "groups": sum(len(list(each.folder.glob(f"{cgroups.PREFIX}{mark.name}*"))) for each in cgroups.find().values()),
    }
    if part.kind == "docker":
        found["containers"] = _containers(mark)
    if part.kind == "remote":
        found["there"] = asyncio.run(_there(open_sandboxes(part, part.starts, root), mark))
    return found


def _containers(mark: Mark) -> int:
    listing = [DOCKER, "ps", "--all", "--filter", f"label={LABEL}", "--format", f'{{{{.Label "{LABEL}"}}}}']
    labels = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split()
    return sum(label.startswith(mark.name) for label in labels)


async def _there(sandboxes: Sandboxes, mark: Mark) -> int:
    """Folders and processes."""
    look = await sandboxes.open(f"look{mark.pid}", {}, Limits())
    said = await look.run("ls ../..; cat /proc/[0-9]*/cmdline | tr '\\0' ' '", LOOK_S, output_bytes=LONGEST_LOOK)
    await sandboxes.close()
    return said.output.count(mark.name) + said.output.count(" ".join(mark.sleep))
