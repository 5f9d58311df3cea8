"""Files that are there as a whole or not at all, whenever the machine stops. Imports nothing of the project."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Written aside (`.<name>.new`), fsynced and renamed. Whoever needs the name itself to survive a crash syncs the folder."""
    aside = path.with_name(f".{path.name}.new")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def sync(path: Path) -> None:
    """fsync of a file's contents, or of the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
