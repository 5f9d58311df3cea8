"""Where a run folder may lie: file locks and fsync of network file systems cannot be trusted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

from pipeline.errors import UserError

NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "9p",
    "afs",
    "ceph",
    "lustre",
    "gluster",
    "beegfs",
    "gpfs",
    "fuse.sshfs",
    "fuse.gcsfuse",
    "fuse.s3fs",
)


class Mount(NamedTuple):
    point: str
    kind: str


def mounts() -> list[Mount]:
    return [Mount(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]


def refuse_network_fs(folder: Path, table: Iterable[Mount]) -> None:
    """Raises UserError when the innermost mount that holds the folder is of a network file system."""
    resolved = folder.resolve()
    holding = [mount for mount in table if resolved.is_relative_to(mount.point)]
    innermost = max(holding, key=lambda mount: len(mount.point), default=None)
    if innermost is not None and innermost.kind.startswith(NETWORK):
        raise UserError(
            f"{resolved} lies on {innermost.point}, a network file system ({innermost.kind}): use a local --runs-dir, or set"
            " buffer.allow_network_fs: true if its locks and fsync are to be trusted"
        )
