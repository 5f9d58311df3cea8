"""Names, start permits, and what is left when owners die."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.buffer.lock import ProcessId
from pipeline.errors import SandboxError
from pipeline.sandboxes.base import Limits
from pipeline.sandboxes.leases import Lease, reap, remove_folder, sandbox_name
from pipeline.sandboxes.local import LocalSandboxes

OWNER = """
import asyncio, sys
from pathlib import Path
from pipeline.sandboxes.base import Limits
from pipeline.sandboxes.local import LocalSandboxes

async def main():
    boxes = LocalSandboxes(root=Path(sys.argv[1]))
    opened = [await boxes.open(f"s{i}", {"a": "1"}, Limits()) for i in range(3)]
    runs = [asyncio.ensure_future(box.run("setsid sleep 5151 & sleep 5151", 600)) for box in opened]
    await asyncio.sleep(0.3)
    print("open", flush=True)
    await asyncio.gather(*runs)

asyncio.run(main())
"""


def test_a_try_has_one_name_and_others_have_others():
    names = {
        sandbox_name(run, phase, step, ordinal, index, attempt)
        for run in ("r1", "r2")
        for phase in ("train", "eval")
        for step in (1, 11)
        for ordinal in (1, 11)
        for index in (0, 1)
        for attempt in (0, 1)
    }
    assert len(names) == 64
    assert "/" not in sandbox_name("a/b", "train", 1, 2, 3, 4)


async def test_opening_again_replaces_what_a_lost_try_left(sandboxes: LocalSandboxes, root: Path):
    first = await sandboxes.open("same", {"a": "1"}, Limits())
    await first.run("touch left", 10)
    second = await sandboxes.open("same", {"a": "1"}, Limits())
    assert (await second.run("ls", 10)).output == "a\n"
    await first.close()
    assert (await second.run("ls", 10)).output == "a\n"
    assert len([path for path in left_in(root) if path.is_dir()]) == 1


@pytest.mark.fault(28)
async def test_no_more_than_the_permits_start_at_once_and_none_fails_for_being_early(sandboxes: LocalSandboxes, root: Path):
    boxes = LocalSandboxes(starts=2, root=root)
    preparing: set[str] = set()
    most = 0
    prepare = boxes._prepare

    def counted(sandbox, contents):
        nonlocal most
        preparing.add(sandbox.lease.name)
        most = max(most, len(preparing))
        prepare(sandbox, contents)
        preparing.discard(sandbox.lease.name)

    boxes._prepare = counted
    opened = await asyncio.gather(*(boxes.open(f"n{i}", {"a": "1"}, Limits()) for i in range(12)))
    outputs = await asyncio.gather(*(box.run("cat a", 20) for box in opened))
    assert [ran.output for ran in outputs] == ["1"] * 12
    assert most <= 2
    await boxes.close()


async def test_a_cancelled_start_leaves_nothing(sandboxes: LocalSandboxes, root: Path):
    files = {f"folder{n}/file": "text" for n in range(3000)}
    opening = asyncio.create_task(sandboxes.open("t", files, Limits()))
    while not any(path.is_dir() for path in left_in(root)):
        await asyncio.sleep(0.001)
    opening.cancel()
    await asyncio.wait({opening})
    assert opening.cancelled()
    assert not left_in(root)


@pytest.mark.fault(27)
async def test_after_sigkill_of_the_owner_no_process_lives_and_the_next_start_removes_the_rest(
    sandboxes: LocalSandboxes, root: Path
):
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, str(root), stdout=asyncio.subprocess.PIPE)
    assert await owner.stdout.readline() == b"open\n"
    assert len(_sleeping()) == 6
    owner.kill()
    await owner.wait()
    deadline = time.monotonic() + 5
    while _sleeping() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert not _sleeping()
    assert len([path for path in left_in(root) if path.is_file()]) == 3
    await (await sandboxes.open("next", {}, Limits())).close()
    assert not left_in(root)


def test_where_others_could_reach_in_no_sandbox_is_made(tmp_path: Path, root: Path):
    (tmp_path / "open").mkdir()
    root.symlink_to(tmp_path / "open")
    with pytest.raises(SandboxError, match="is a link"):
        LocalSandboxes(root=root)._own_root()
    root.unlink()
    root.mkdir(mode=0o777)
    LocalSandboxes(root=root)._own_root()
    assert root.stat().st_mode & 0o777 == 0o700


def test_the_reaper_goes_by_owner_and_by_age(root: Path):
    me = ProcessId.of(os.getpid())
    assert me is not None
    leases = {
        "mine": Lease("mine", root / "mine~1.1", me, 1000.0),
        "old": Lease("old", root / "old~1.2", me, 0.0),
        "orphan": Lease("orphan", root / "orphan~1.3", ProcessId(me.pid, me.start_time - 100), 1000.0),
    }
    root.mkdir()
    for lease in leases.values():
        lease.write()
        (lease.folder / "work").mkdir(parents=True)
    assert sorted(reap(root, max_age_s=500.0, now=lambda: 1100.0)) == ["old", "orphan"]
    assert leases["mine"].folder.is_dir() and not leases["old"].folder.exists() and not leases["orphan"].file.exists()
    assert reap(root, max_age_s=500.0, now=lambda: 1100.0) == []


def test_a_lease_whose_writer_was_killed_is_removed(root: Path):
    root.mkdir()
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True).stdout.strip()
    (root / f"t~{gone}.0.lease.new").write_text("{")
    (root / f"t~{os.getpid()}.1.lease.new").write_text("{")
    reap(root)
    assert [path.name for path in root.iterdir()] == [f"t~{os.getpid()}.1.lease.new"]


def test_a_torn_lease_stops_nobody_and_is_removed(root: Path):
    (root / "t~1.0" / "work").mkdir(parents=True)
    (root / "t~1.0.lease.json").write_text("")
    assert reap(root) == ["t"]
    assert not left_in(root)


async def test_what_is_left_later_is_removed_by_who_still_works(sandboxes: LocalSandboxes, root: Path, monkeypatch):
    await (await sandboxes.open("mine", {}, Limits())).close()
    me = ProcessId.of(os.getpid())
    orphan = Lease("orphan", root / "orphan~1.3", ProcessId(me.pid, me.start_time - 100), time.time())
    orphan.write()
    await (await sandboxes.open("mine", {}, Limits())).close()
    assert orphan.file.exists()
    monkeypatch.setattr("pipeline.sandboxes.owning.REAP_EVERY_S", 0.0)
    await (await sandboxes.open("mine", {}, Limits())).close()
    assert not left_in(root)


def test_removing_a_folder_never_follows_a_link(tmp_path: Path):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    (outside / "kept").write_text("1")
    (folder / "closed" / "inner").mkdir(parents=True)
    (folder / "link").symlink_to(outside)
    (folder / "closed" / "inner").chmod(0)
    (folder / "closed").chmod(0)
    remove_folder(folder)
    assert not folder.exists() and (outside / "kept").exists()


def test_a_folder_of_any_depth_is_removed(tmp_path: Path):
    deeper = "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')"
    subprocess.run([sys.executable, "-c", deeper], cwd=tmp_path, check=True)
    remove_folder(tmp_path / "d")
    assert not list(tmp_path.iterdir())


def left_in(root: Path) -> list[Path]:
    return sorted(root.iterdir()) if root.is_dir() else []


def _sleeping() -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "5151"]]
