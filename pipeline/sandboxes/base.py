"""A place where an agent's commands run, and nothing of them gets out. The whole contract of a sandbox is on this screen.

Invariant: a command ends within its deadline with all that it started, and what it returns is bounded in size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """A folder that a container image holds."""

    image: str
    folder: str


Contents = Path | Mapping[str, str] | ImageFolder
"""What a sandbox begins with: a folder that is copied, the texts of files by relative path, or what is in an image."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What all processes of one command may use together, unless said otherwise."""

    cpu: float = 1.0
    """CPUs."""
    memory_mb: int = 1024
    processes: int = 64
    file_mb: int = 64
    """Of one file, and of each of /tmp and /dev/shm. `room` says what a folder may grow by."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One command and what became of it."""

    exit_code: int
    """As a shell reports it: 128 + n after signal n."""
    output: str
    """Standard output and error in the order of their writing; beginning and end when it was too long, with a mark between."""
    timed_out: bool
    left_out: int
    """Bytes of output that are not in `output`."""
    seconds: float


class Sandbox(Protocol):
    async def run(
        self, command: str, timeout_s: float, *, stdin: bytes = b"", output_bytes: int = 16_384, private: bool = False
    ) -> Ran:
        """A bash command in the sandbox's folder. What it leaves there is seen by the next; no process outlives it.

        private: a second folder, which other commands do not see, is at $PRIVATE. Raises SandboxError when the sandbox itself
        fails; a command that fails, or that passes its deadline, is an ordinary result.
        """
        ...

    async def close(self) -> None:
        """Ends what runs and removes everything. Repeatable."""
        ...


class Sandboxes(Protocol):
    async def open(self, name: str, contents: Contents, limits: Limits) -> Sandbox:
        """A started sandbox. One of the same name, of a try that was lost, is removed first. Raises SandboxError."""
        ...

    async def start(self) -> None:
        """Remove what others have left behind."""
        ...

    async def close(self) -> None:
        """End every sandbox that is open, and remove what others have left."""
        ...
