"""The private Ray of a run, without starting one."""

from __future__ import annotations

import tempfile

import pytest

from deployments import cluster
from pipeline.config.training import Ray
from pipeline.errors import ConfigError
from pipeline.paths import RunPaths


def test_a_temporary_folder_that_is_too_long_for_sockets_is_refused_by_name(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 30)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match=rf"{deep} is too long for Ray's sockets: 2[4-9] bytes at most, set TMPDIR"):
        cluster.start(RunPaths(tmp_path / "run"), Ray(), None)
    assert not deep.exists()
