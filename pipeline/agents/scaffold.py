"""A repair task, played by a program that was not written for this: it asks a model over HTTP, and a shell for the sandbox.

Invariant: the program has its own process namespace, which goes with all that is in it; its commands run in the sample's sandbox;
and what it is answered is what is trained on.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Sequence

from pipeline.agents.base import Episode, Trajectory
from pipeline.agents.capture import Capture
from pipeline.agents.endpoint import Address, RunRequest, serving
from pipeline.agents.swe import TIME_SHARE, SweAgent
from pipeline.errors import DataError, SandboxError
from pipeline.sandboxes import processes
from pipeline.sandboxes.base import Ran
from pipeline.sandboxes.local import MISSING

MINI_SWE_AGENT = (sys.executable, "-m", "pipeline.scaffolds.mini_swe_agent")
KEEP_BYTES = 8192
"""Of what the program writes: for its fault, if it has one."""
FOREVER_S = 24 * 3600.0
"""The episode ends before."""
HOME = "/var/tmp"


class Scaffold(SweAgent):
    """command: starts the program, which is given the task's statement on its standard input, and OPENAI_BASE_URL, OPENAI_API_KEY
    and SANDBOX_URL (`endpoint`) in its environment. It has done its work when it ends with exit code 0."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__()
        self._command = command

    async def _turns(self, episode: Episode, trajectory: Trajectory) -> str:
        capture = Capture(episode, trajectory)
        limit_s = episode.task.stopping.max_seconds
        timeout_s = None if limit_s is None else TIME_SHARE * limit_s

        async def execute(body: RunRequest) -> Ran:
            record = {} if not trajectory.turns else trajectory.turns[-1]
            record["action"] = body.command
            return (await self._execute(episode, body.command, body.timeout_s, record))[0]

        async with serving(capture, execute, secrets.token_urlsafe(16)) as address:
            playing = asyncio.create_task(self._play(episode, address), name="program of a sample")
            ending = asyncio.create_task(capture.ended.wait(), name="end of a sample")
            try:
                await asyncio.wait({playing, ending}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                by_itself = playing.done() and not capture.ended.is_set()
                capture.end("over" if by_itself else "agent_timeout")
                playing.cancel()
                await asyncio.gather(playing, ending, return_exceptions=True)
        if capture.fault is not None:
            raise capture.fault
        return _outcome(playing.result(), trajectory) if by_itself else capture.reason

    async def _play(self, episode: Episode, address: Address) -> processes.Ended:
        return await processes.run(
            [*_bubblewrap(address), *processes.INIT, shlex.join(self._command)],
            timeout_s=FOREVER_S,
            keep_bytes=KEEP_BYTES,
            stdin=episode.task.messages[-1][1].encode(),
            limits={},
            admit=lambda pid: None,
            end=lambda: None,
        )


def _outcome(ended: processes.Ended, trajectory: Trajectory) -> str:
    """The finish reason. Raises DataError for a program that failed, or that never asked, SandboxError for one that never began."""
    lines = ended.kept.text().strip().splitlines()
    said = lines[-1] if lines else "no output"
    if not ended.began:
        raise SandboxError(f"the program cannot be started: {said}")
    if ended.returncode != 0:
        raise DataError(f"the program ended with exit code {processes.exit_code(ended.returncode)}: {said}")
    if not trajectory.turns:
        raise DataError(f"the program ended without asking the model: {said}")
    return "finish"


def _bubblewrap(address: Address) -> list[str]:
    """It sees this machine and cannot write on it; it may use the network, where the endpoint is."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError(MISSING)
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
    environment = kept | {"HOME": HOME, "TMPDIR": HOME} | address.environment()
    said = [part for name, value in environment.items() for part in ("--setenv", name, value)]
    places = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", HOME]
    ends = ["--unshare-pid", "--unshare-ipc", "--as-pid-1", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    return [program, *places, *ends, *said, "--chdir", HOME, "--"]
