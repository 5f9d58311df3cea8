from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.bench.engine import figures

pytestmark = pytest.mark.slow


def test_the_embedded_engine_is_measured_and_engines_that_are_not_here_are_named(tmp_path: Path) -> None:
    found = figures(tmp_path)
    assert set(found["figures"]) == {"torch_start_s", "torch_tokens_s", "torch_scored_rows_s"}
    assert min(found["figures"].values()) > 0
    assert [note.split(":")[0] for note in found["notes"][1:]] == ["vllm", "sglang"]
