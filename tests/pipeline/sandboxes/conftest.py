"""Sandboxes of a test: real ones, in a folder of their own; skipped, with the reason, where bubblewrap is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.sandboxes.local import MISSING, LocalSandboxes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "sandboxes"


@pytest.fixture
async def sandboxes(root: Path):
    if shutil.which("bwrap") is None:
        pytest.skip(MISSING)
    made = LocalSandboxes(root=root)
    yield made
    await made.close()
    assert not left_in(root), "a sandbox left something behind"


def left_in(root: Path) -> list[Path]:
    return list(root.glob("*"))
