"""The sandboxes that a configuration asks for. swe-rex is imported only where it is asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from pipeline.config.stages import SandboxPart
from pipeline.errors import ConfigError
from pipeline.sandboxes.base import Sandboxes
from pipeline.sandboxes.local import LocalSandboxes

INSTALL = "pip install -e '.[swerex]' -c constraints.txt"


def check_kind(part: SandboxPart) -> None:
    """Raises ConfigError for a kind that cannot be had here."""
    if part.kind != "local" and find_spec("swerex") is None:
        raise ConfigError(f"sandbox.kind {part.kind!r} needs swe-rex, which is not installed: {INSTALL}")
    if part.token_env is not None and not os.environ.get(part.token_env):
        raise ConfigError(f"sandbox.token_env {part.token_env!r} is not set in the environment")


def sandboxes_by_type(parts: Mapping[str, SandboxPart]) -> dict[str, Sandboxes]:
    """parts: by task type. Types whose sandboxes are at one place share them, and the fewest start permits that one of them says.

    Raises ConfigError.
    """
    shared: dict[tuple[str | None, ...], list[str]] = {}
    for task_type, part in parts.items():
        check_kind(part)
        shared.setdefault((part.kind, part.image, part.url, part.token_env), []).append(task_type)
    made: dict[str, Sandboxes] = {}
    for task_types in shared.values():
        starts = min(parts[task_type].starts for task_type in task_types)
        made |= dict.fromkeys(task_types, open_sandboxes(parts[task_types[0]], starts))
    return made


def open_sandboxes(part: SandboxPart, starts: int, root: Path | None = None) -> Sandboxes:
    """root: of the leases; None: the machine's."""
    if part.kind == "local":
        return LocalSandboxes(starts, root)
    from pipeline.sandboxes.rex import DockerSandboxes, RemoteSandboxes

    if part.kind == "docker":
        assert part.image is not None
        return DockerSandboxes(part.image, starts, root)
    assert part.url is not None and part.token_env is not None
    return RemoteSandboxes(part.url, os.environ[part.token_env], starts, root)
