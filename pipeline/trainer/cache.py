"""Folders that are expensive to make, kept under a digest of all that they depend on. Imports no torch.

Invariant: a cached folder is complete (written aside, then renamed) and is built once, however many processes ask for it.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.engines.digests import text_digest

Pairs = Sequence[tuple[Sequence[tuple[str, str]], str]]
"""(messages, answer) pairs."""
RECIPE = 1
"""Part of every digest: raise it when the code makes something else of the same input."""


def cached(folder: Path, depends: dict[str, Any], build: Callable[[Path], dict[str, Any]]) -> Path:
    """`folder/<digest of depends>`, built now unless it is there.

    `build` fills an empty folder and returns what manifest.json says besides `depends`. If it raises, nothing is kept.
    """
    name = text_digest(depends | {"recipe": RECIPE})
    target = folder / name
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f".{name}.lock"):
        for debris in folder.glob(f".{name}-*"):
            shutil.rmtree(debris, ignore_errors=True)
        if target.is_dir():
            return target
        aside = folder / f".{name}-{uuid.uuid4().hex}"
        aside.mkdir()
        record = build(aside)
        (aside / "manifest.json").write_text(json.dumps({"depends": depends, **record}, indent=2))
        aside.rename(target)
    return target


def debris(cache: Path) -> list[Path]:
    """Half-built folders whose builders are gone, in all folders of the cache."""
    return [left for lock in cache.glob("*/.*.lock") if _is_free(lock) for left in sorted(lock.parent.glob(f"{lock.stem}-*"))]


def _is_free(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def pairs_digest(pairs: Pairs, *, ordered: bool) -> str:
    """Digest of (messages, answer) pairs. ordered: another order is another digest."""
    lines = [json.dumps([[list(turn) for turn in messages], answer]) for messages, answer in pairs]
    return text_digest(lines if ordered else sorted(lines))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits without a deadline: the kernel frees the lock when its owner dies, and a build is bounded by its own settings."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
