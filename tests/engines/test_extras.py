"""The extras resolve together with what the pipeline itself asks for. Needs the package index; installs nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"


def resolved(*wanted: str) -> dict[str, str]:
    """name -> version of all that pip would install."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-input", *wanted, TORCH]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("Would install "))
    return dict(re.fullmatch(r"(.+)-([^-]+)", word).groups() for word in line.removeprefix("Would install ").split())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_vllm_resolves_with_the_pipeline() -> None:
    found = resolved(".[vllm]")
    assert (found["vllm"], found["ray"]) == ("0.32.0", "2.47.1")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_sglang_shares_with_the_pipeline_resolves() -> None:
    """sglang's kernels for GPUs come from NVIDIA's own index, so that pip can resolve all of it only where that is reached."""
    found = resolved(".", "-r", "requirements/engine-sglang.txt")
    assert (found["transformers"], found["ray"]) == ("5.12.1", "2.47.1")
