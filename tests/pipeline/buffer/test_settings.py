"""Settings come from the configuration; a place that cannot keep promises is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.buffer.filesystem import Mount, refuse_network_fs
from pipeline.buffer.settings import BufferSettings
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError, UserError
from tests.pipeline.buffer.helpers import make_settings


def test_settings_are_those_of_the_configuration():
    config = RunConfig.model_validate(
        {
            "student": {"architecture": {}},
            "teachers": {"big": {"architecture": {}}},
            "datasets": {"words": {"generator": "spell_backward"}},
            "rollout": {"tasks_per_step": 3, "max_staleness": 2, "on_dropped": "shrink", "retries": {"infra": 5, "backoff_s": 2}},
            "buffer": {"sampler": "windowed", "keep_groups": 9},
        }
    )
    assert BufferSettings.from_config(config) == BufferSettings(
        tasks_per_step=3, max_staleness=2, capacity=9, sampler="windowed", on_dropped="shrink", infra_attempts=5, data_attempts=1,
        backoff_s=2, keep_groups=9,
    )  # fmt: skip


@pytest.mark.fault(42)
def test_a_capacity_that_would_deadlock_is_refused_with_the_sum():
    with pytest.raises(ConfigError, match=r"buffer.capacity 3 is below 4 = rollout.tasks_per_step 2 \* \(rollout.max_staleness 1"):
        make_settings(capacity=3)


def test_network_file_systems_are_refused_by_the_innermost_mount(tmp_path):
    table = [Mount("/", "ext4"), Mount(str(tmp_path), "nfs4"), Mount(str(tmp_path / "local"), "xfs")]
    with pytest.raises(UserError, match=r"network file system \(nfs4\).*buffer.allow_network_fs"):
        refuse_network_fs(tmp_path / "runs", table)
    refuse_network_fs(tmp_path / "local" / "runs", table)
    refuse_network_fs(Path("/"), table)
