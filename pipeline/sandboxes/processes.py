"""One process tree with a deadline and bounded output.

Invariant: when `run` returns or raises, the process is gone, and memory held at most the kept bytes and one block of output.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import resource
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.errors import SandboxError
from pipeline.sandboxes.inside import Kept

BLOCK = 65_536
BEGIN_S = 20.0
"""For a command to begin once it was asked for."""
END_S = 10.0
"""For a killed process to be gone."""
READY = b"ready\n"
_GATE = ("/bin/sh", "-c", 'read -r go && exec "$@"', "sh")
"""Waits for a line before it becomes the command: limits are in place by then. Without its parent it reads the end and ends."""
_INIT = 'printf "ready\n" && read -r go && exec 2>/dev/null && { /bin/bash -c "$1" 2>&1; exit $?; }'
INIT = ("/bin/bash", "-c", _INIT, "bash")
"""The first process of the sandbox, of which the command is the last argument; `run` expects it at the end of what it runs. It
reaps what others leave, and says that it is there, by when it is bound to die with this process. It waits for an answer before it
begins the command: if this process is gone meanwhile, there is nobody to give it."""


@dataclass(frozen=True, slots=True)
class Ended:
    returncode: int
    """Below 0: ended by that signal."""
    kept: Kept
    """What the command wrote; when it never began, what the program around it wrote."""
    began: bool
    timed_out: bool


async def run(
    arguments: Sequence[str],
    *,
    timeout_s: float,
    keep_bytes: int,
    stdin: bytes = b"",
    limits: Mapping[int, int],
    admit: Callable[[int], None],
    end: Callable[[], None],
    files: Sequence[int] = (),
) -> Ended:
    """Standard error goes where standard output goes. limits: of `resource`, for each process. timeout_s: from its beginning.
    files: descriptors that it inherits.

    admit: called with the pid before anything begins. end: kills what the pid alone does not. Raises SandboxError when the
    process cannot be started, does not begin within BEGIN_S, or cannot be ended.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *_with_its_parent(),
            *_GATE,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={},
            cwd="/",
            start_new_session=True,
            pass_fds=files,
            limit=BLOCK,
        )
    except OSError as error:
        raise SandboxError(f"{arguments[0]} cannot be started: {error}") from error
    kept = Kept.empty(keep_bytes)
    feeding: asyncio.Task[None] | None = None
    began = timed_out = False
    try:
        admit(process.pid)
        for what, bound in limits.items():
            resource.prlimit(process.pid, what, (bound, bound))
        began = await _begin(process, kept)
        feeding = asyncio.create_task(_feed(process, b"go\n" + stdin), name="stdin of a sandbox")
        try:
            async with asyncio.timeout(timeout_s):
                await _drain(process, kept)
                await process.wait()
        except TimeoutError:
            timed_out = True
    except (OSError, ValueError) as error:
        raise SandboxError(f"a sandbox cannot be limited: {error}") from error
    finally:
        if feeding is not None:
            feeding.cancel()
        await _end(process, end)
        if feeding is not None:
            await asyncio.gather(feeding, return_exceptions=True)
    return Ended(process.returncode if process.returncode is not None else -9, kept, began, timed_out)


async def _begin(process: asyncio.subprocess.Process, kept: Kept) -> bool:
    """Open the gate, and wait for the inner one. False: the program ended before, and what it wrote is kept."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"go\n")
    try:
        async with asyncio.timeout(BEGIN_S):
            said = await process.stdout.readexactly(len(READY))
    except asyncio.IncompleteReadError as error:
        said = error.partial
    except TimeoutError as error:
        raise SandboxError(f"a command did not begin within {BEGIN_S:g} s") from error
    if said == READY:
        return True
    kept.add(said)
    return False


@functools.cache
def _with_its_parent() -> tuple[str, ...]:
    """Ends the process by SIGKILL when its parent dies, from before the gate on. bubblewrap's own care begins milliseconds later,
    and is all there is where util-linux is not installed; what slips through is the reaper's."""
    program = shutil.which("setpriv")
    return () if program is None else (program, "--pdeathsig", "KILL")


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    """A command need not read what it is given."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()


async def _drain(process: asyncio.subprocess.Process, kept: Kept) -> None:
    assert process.stdout is not None
    while block := await process.stdout.read(BLOCK):
        kept.add(block)


async def _end(process: asyncio.subprocess.Process, end: Callable[[], None]) -> None:
    """Also when this task is being cancelled: a process that lives on is a leak."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    end()
    waiting = asyncio.ensure_future(process.wait())
    cancelled = False
    deadline = asyncio.get_running_loop().time() + END_S
    while not waiting.done() and (left := deadline - asyncio.get_running_loop().time()) > 0:
        try:
            await asyncio.wait({waiting}, timeout=left)
        except asyncio.CancelledError:
            cancelled = True
    if not waiting.done():
        waiting.cancel()
        raise SandboxError(f"process {process.pid} is still there {END_S:g} s after it was killed")
    if cancelled:
        raise asyncio.CancelledError


def exit_code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode
