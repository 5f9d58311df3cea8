"""Finding control groups of either version, and what is written to them; the real ones are used in test_isolation."""

from __future__ import annotations

from pathlib import Path

from pipeline.sandboxes import cgroups
from pipeline.sandboxes.base import Limits


def test_version_1_controllers_are_found_below_the_own_group(tmp_path: Path):
    (tmp_path / "memory" / "mine").mkdir(parents=True)
    (tmp_path / "pids").mkdir()
    mountinfo, own = tmp_path / "mountinfo", tmp_path / "cgroup"
    mountinfo.write_text(
        f"30 1 0:1 / {tmp_path}/memory rw - cgroup cgroup rw,memory\n31 1 0:1 / {tmp_path}/pids rw - cgroup cgroup rw,pids\n"
    )
    own.write_text("4:memory:/mine\n3:pids:/elsewhere\n")
    found = cgroups.find(mountinfo, own)
    assert found["memory"] == cgroups.Hierarchy(1, tmp_path / "memory" / "mine")
    assert found["pids"] == cgroups.Hierarchy(1, tmp_path / "pids")
    swap = tmp_path / "memory/mine/rollout-x/memory.memsw.limit_in_bytes"
    swap.parent.mkdir()
    swap.touch()
    group = cgroups.limit(found, "x", Limits(memory_mb=10, processes=5))
    assert group.limits == {"memory": "cgroup v1", "pids": "cgroup v1"} and swap.read_text() == str(10 * 2**20)
    assert (tmp_path / "memory/mine/rollout-x/memory.limit_in_bytes").read_text() == str(10 * 2**20)
    assert (tmp_path / "pids/rollout-x/pids.max").read_text() == "9"


def test_version_2_is_one_folder_for_all(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "cgroup.controllers").write_text("cpu memory pids")
    mountinfo, own = tmp_path / "mountinfo", tmp_path / "cgroup"
    mountinfo.write_text(f"30 1 0:1 / {tmp_path} rw - cgroup2 cgroup2 rw\n")
    own.write_text("0::/mine\n")
    found = cgroups.find(mountinfo, own)
    group = cgroups.limit(found, "x", Limits(cpu=0.5, memory_mb=10, processes=5))
    assert group.folders == (tmp_path / "mine" / "rollout-x",)
    assert (tmp_path / "mine/rollout-x/cpu.max").read_text() == "50000 100000"
    assert (tmp_path / "mine/rollout-x/memory.max").read_text() == str(10 * 2**20)


def test_without_control_groups_nothing_is_claimed(tmp_path: Path):
    assert cgroups.find(tmp_path / "none", tmp_path / "none") == {}
    closed = {"memory": cgroups.Hierarchy(1, tmp_path / "not" / "there")}
    assert cgroups.limit(closed, "x", Limits()).limits == {}
