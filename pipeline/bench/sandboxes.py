"""`rollout bench sandboxes`: how long a sandbox takes to start, one by one and many at once, and a command in it.

Invariant: a start ends with the sandbox's first command, as in a run; what was opened is closed, and what is left is counted.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.bench.sandbox_kills import kills
from pipeline.config.loading import read_config
from pipeline.config.stages import SandboxPart
from pipeline.sandboxes.base import Limits, Sandboxes
from pipeline.sandboxes.kinds import sandboxes_by_type
from pipeline.sandboxes.leases import default_root, read_leases

ONE_BY_ONE, AT_ONCE = 100, 200
COMMAND_S = 20.0
FILES = {"a.py": "x = 1\n"}


def of_config(config: Path | None) -> dict[str, SandboxPart]:
    """By task type; without a configuration, the default."""
    if config is None:
        return {"local": SandboxPart()}
    return {spec.task_type: spec.sandbox for spec in read_config(config).config.specs}


def figures(
    parts: Mapping[str, SandboxPart], one_by_one: int = ONE_BY_ONE, at_once: int = AT_ONCE, owners: int = 0
) -> dict[str, Any]:
    """By name of the part: start_ms, command_ms and close_ms, p50 and p99; the same of the starts when all are asked for at once,
    and the seconds that those take together; left: sandboxes of this process afterwards; what so many owners that are killed leave.
    Raises ConfigError or SandboxError."""
    found = asyncio.run(_measure(parts, one_by_one, at_once))
    for name, part in parts.items() if owners else ():
        found |= {f"{name}_{key}": value for key, value in kills(part, owners, found[f"{name}_start_ms_p50"] / 1000).items()}
    return {"figures": found, "notes": [_note(*part) for part in parts.items()]}


async def _measure(parts: Mapping[str, SandboxPart], one_by_one: int, at_once: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, sandboxes in sandboxes_by_type(parts).items():
        await sandboxes.start()
        try:
            found |= {f"{name}_{key}": value for key, value in (await _alone(sandboxes, one_by_one)).items()}
            found |= {f"{name}_{key}": value for key, value in (await _together(sandboxes, at_once)).items()}
        finally:
            await sandboxes.close()
        found[f"{name}_left"] = sum(lease.owner.pid == os.getpid() for lease in read_leases(default_root()))
    return found


async def _alone(sandboxes: Sandboxes, count: int) -> dict[str, float]:
    starts, commands, closes = [], [], []
    for number in range(count):
        began = time.perf_counter()
        sandbox = await sandboxes.open(f"bench-{number}", FILES, Limits())
        opened = time.perf_counter()
        await sandbox.run("cat a.py", COMMAND_S)
        ran = time.perf_counter()
        await sandbox.close()
        for times, seconds in ((starts, opened - began), (commands, ran - opened), (closes, time.perf_counter() - ran)):
            times.append(seconds)
    return _percentiles("start", starts) | _percentiles("command", commands) | _percentiles("close", closes)


async def _together(sandboxes: Sandboxes, count: int) -> dict[str, float]:
    began = time.perf_counter()

    async def one(number: int) -> float:
        await sandboxes.open(f"bench-{number}", FILES, Limits())
        return time.perf_counter() - began

    seconds = await asyncio.gather(*(one(number) for number in range(count)))
    return _percentiles(f"start_of_{count}", seconds) | {f"all_{count}_s": max(seconds)}


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    return {f"{name}_ms_p{part}": float(np.percentile(seconds, part)) * 1000 for part in (50, 99)}


def _note(name: str, part: SandboxPart) -> str:
    return f"{name}: {part.kind}{f' {part.image or part.url}' if part.kind != 'local' else ''}, {part.starts} starts at a time"
