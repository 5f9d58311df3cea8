"""One process tree with a deadline and bounded output.

Invariant: when `run` returns or raises, the process is gone, and memory held at most the kept bytes and one block of output.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.errors import SandboxError

BLOCK = 65_536
END_S = 10.0
"""For a killed process to be gone."""
_GATE = ("/bin/sh", "-c", 'read -r go && exec "$@"', "sh")
"""Waits for a line before it becomes the command: limits are in place by then. Without its parent it ends at once."""


@dataclass(slots=True)
class Kept:
    """The beginning and the end of what was written, `bound` bytes in all."""

    bound: int
    head: bytearray
    tail: bytearray
    total: int = 0

    @classmethod
    def empty(cls, bound: int) -> Kept:
        return cls(bound, bytearray(), bytearray())

    def add(self, block: bytes) -> None:
        self.total += len(block)
        room = self.bound // 2 - len(self.head)
        if room > 0:
            self.head += block[:room]
            block = block[room:]
        self.tail += block
        del self.tail[: max(0, len(self.tail) - (self.bound - self.bound // 2))]

    @property
    def left_out(self) -> int:
        return self.total - len(self.head) - len(self.tail)

    def text(self) -> str:
        """Bytes that are not UTF-8 become U+FFFD."""
        mark = f"\n[... {self.left_out} bytes left out ...]\n".encode() if self.left_out else b""
        return bytes(self.head + mark + self.tail).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Ended:
    returncode: int
    """Below 0: ended by that signal."""
    kept: Kept
    timed_out: bool


async def run(
    arguments: Sequence[str],
    *,
    timeout_s: float,
    keep_bytes: int,
    stdin: bytes = b"",
    fds: Sequence[int] = (),
    limits: Mapping[int, int],
    admit: Callable[[int], None],
    end: Callable[[], None],
) -> Ended:
    """Standard error goes where standard output goes. fds: inherited. limits: of `resource`, for each process.

    admit: called with the pid before the command begins. end: kills what the pid alone does not. Raises SandboxError when the
    process cannot be started, or cannot be ended.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *_GATE,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={},
            cwd="/",
            pass_fds=fds,
            start_new_session=True,
            limit=BLOCK,
        )
    except OSError as error:
        raise SandboxError(f"{arguments[0]} cannot be started: {error}") from error
    kept = Kept.empty(keep_bytes)
    feeding = asyncio.create_task(_feed(process, b"go\n" + stdin), name="stdin of a sandbox")
    timed_out = False
    try:
        admit(process.pid)
        for what, bound in limits.items():
            resource.prlimit(process.pid, what, (bound, bound))
        try:
            async with asyncio.timeout(timeout_s):
                await _drain(process, kept)
                await process.wait()
        except TimeoutError:
            timed_out = True
    except (OSError, ValueError) as error:
        raise SandboxError(f"a sandbox cannot be limited: {error}") from error
    finally:
        feeding.cancel()
        await _end(process, end)
        await asyncio.gather(feeding, return_exceptions=True)
    return Ended(process.returncode if process.returncode is not None else -9, kept, timed_out)


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


def close(*fds: int) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
