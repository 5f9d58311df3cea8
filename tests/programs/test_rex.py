"""Sandboxes through swe-rex: its own server, on this machine and in a container, or what stands in for one."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.agents.repair import patch_of, remember, solves
from pipeline.bench.sandbox_kills import kills
from pipeline.config.stages import SandboxPart
from pipeline.errors import SandboxError
from pipeline.fetcher.swe import read_repair
from pipeline.sandboxes.base import ImageFolder, Limits
from pipeline.sandboxes.leases import LABEL, reap
from pipeline.sandboxes.local import MISSING
from pipeline.sandboxes.rex import DockerSandboxes, RemoteSandboxes
from tests.pipeline.agents.repairing import DOWN, MEND

STANDIN = Path(__file__).with_name("docker_standin.py")
SMALL = Limits(memory_mb=256, processes=32, file_mb=8)
START_S = 30.0
KILLS = 3
SECONDS = {"docker": "43431", "remote": "43432"}
"""That a command sleeps, by which it is known: other tests may run beside these."""
KINDS = pytest.mark.parametrize("kind", ["docker", "remote"])
OWNER = """
import asyncio, sys
from pathlib import Path
from pipeline.sandboxes import rex
from pipeline.sandboxes.base import Limits

async def main(kind, root, there, seconds, *where):
    rex.THERE = there
    boxes = rex.DockerSandboxes(*where, root=Path(root)) if kind == "docker" else rex.RemoteSandboxes(*where, root=Path(root))
    box = await boxes.open("s", {"a": "1"}, Limits())
    print("open", flush=True)
    await box.run(f"(setsid env -i sleep {seconds} &); sleep {seconds}", 600)

asyncio.run(main(*sys.argv[1:]))
"""


class World:
    """Where sandboxes of both kinds can be opened."""

    def __init__(self, folder: Path, url: str, token: str, image: str) -> None:
        self.root, self.state, self.there = folder / "leases", folder / "docker", folder / "there"
        self.where = {"docker": (image,), "remote": (url, token)}
        self.image = image

    def open(self, kind: str, starts: int = 8) -> DockerSandboxes | RemoteSandboxes:
        made = DockerSandboxes if kind == "docker" else RemoteSandboxes
        return made(*self.where[kind], starts=starts, root=self.root)

    def left(self) -> list[Path | str]:
        """Leases and their folders, containers, folders on the server."""
        return [*self.root.glob("*"), *containers(), *self.there.glob("*")]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, str]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    token = secrets.token_hex(8)
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--auth-token", token]
    process = subprocess.Popen(
        [f"{sys.prefix}/bin/swerex-remote", *arguments], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: answers(port), "the server of swe-rex does not answer")
        yield f"http://127.0.0.1:{port}", token
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def world(
    tmp_path: Path, server: tuple[str, str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[World]:
    if shutil.which("bwrap") is None:
        pytest.skip(MISSING)
    image = request.config.getoption("--docker-image")
    made = World(tmp_path, *server, image or "tasks:1")
    if image is None:
        stand_in(made, tmp_path / "bin" / "docker")
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr("pipeline.sandboxes.rex.THERE", str(made.there))
    yield made
    for container in containers():
        docker("rm", "--force", container)


def stand_in(world: World, program: Path) -> None:
    (world.state / "testbed").mkdir(parents=True)
    (world.state / "testbed" / "a.py").write_text("x = 1\n")
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {STANDIN} {world.state} "$@"\n')
    program.chmod(0o755)


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True).stdout


def containers() -> list[str]:
    """Of sandboxes, running or not."""
    return docker("ps", "--all", "--quiet", "--filter", f"label={LABEL}").split()


@KINDS
async def test_commands_work_in_a_copy_and_what_they_say_and_leave_is_bounded(world: World, kind: str, tmp_path: Path):
    task = tmp_path / "task"
    task.mkdir()
    (task / "a.sh").write_text("echo hello\n")
    (task / "a.sh").chmod(0o755)
    (task / "link").symlink_to("a.sh")
    boxes = world.open(kind)
    box = await boxes.open("t", task, SMALL)
    first = await box.run("./link; echo new > b.txt; rm link; echo bad >&2; exit 3", 10)
    assert (first.exit_code, first.output, first.timed_out, first.left_out) == (3, "hello\nbad\n", False, 0)
    assert (await box.run("ls", 10)).output == "a.sh\nb.txt\n"
    assert sorted(os.listdir(task)) == ["a.sh", "link"]

    long = await box.run("echo first; head -c 100000000 /dev/zero | tr '\\0' a; echo last", 30, output_bytes=1000)
    assert long.output.startswith("first\na") and long.output.endswith("alast\n")
    assert long.left_out == 100000000 + 11 - 1000 and f"[... {long.left_out} bytes left out ...]" in long.output
    assert (await box.run("wc -c", 10, stdin=b"\xff" * 300_000)).output.strip() == "300000"
    assert (await box.run("true", 10, stdin=b"x" * 300_000)).exit_code == 0
    assert (await box.run("echo \0", 10)).exit_code == 126
    assert "8388608" in (await box.run("head -c 100000000 /dev/zero > big; stat -c %s big", 10)).output

    await box.run('echo 1 > "$PRIVATE/note"', 10, private=True)
    assert (await box.run('cat "$PRIVATE/note"', 10, private=True)).output == "1\n"
    assert (await box.run('echo "<$PRIVATE>"', 10)).output == "<>\n"
    await boxes.close()
    assert not world.left()


@KINDS
async def test_a_patch_is_taken_and_judged_there_as_here(world: World, kind: str):
    boxes, repair = world.open(kind), read_repair(DOWN, "here")
    box = await boxes.open("run", repair.contents, SMALL)
    await remember(box)
    left = "printf '\\351' > name; echo '* working-tree-encoding=none' > .gitattributes"
    for command, worth in ((f"{MEND}; {left}", True), ("rm a.py", False)):
        await box.run(command, 10)
        patch = await patch_of(box, 20.0)
        assert "GIT binary patch" in patch
        assert await solves(lambda part, contents: boxes.open(part, contents, SMALL), repair, patch, 20.0) is worth
    await boxes.close()
    assert not world.left()


@KINDS
async def test_the_whole_tree_goes_at_the_deadline_and_with_the_command(world: World, kind: str):
    boxes = world.open(kind)
    box = await boxes.open("t", {}, SMALL)
    started = time.monotonic()
    sleep = f"sleep {SECONDS[kind]}"
    ran = await box.run(f"(setsid env -i bash -c 'setsid {sleep} & {sleep}' &) ; trap '' TERM; echo begun; {sleep}", 1.0)
    assert ran.timed_out and ran.exit_code == 137 and ran.output == "begun\n"
    assert time.monotonic() - started < 6
    assert not sleeping(SECONDS[kind])
    ran = await box.run(f"(setsid env -i {sleep} &); echo done", 20)
    assert (ran.output, ran.timed_out) == ("done\n", False) and ran.seconds < 5
    assert not sleeping(SECONDS[kind])
    await boxes.close()


@KINDS
async def test_closing_ends_a_command_and_leaves_nothing(world: World, kind: str):
    seconds = f"{SECONDS[kind]}0"
    boxes = world.open(kind)
    box = await boxes.open("t", {}, SMALL)
    running = asyncio.ensure_future(box.run(f"(setsid sleep {seconds} &); sleep {seconds}", 600))
    await until(lambda: sleeping(seconds))
    await box.close()
    await box.close()
    with pytest.raises(SandboxError):
        await running
    with pytest.raises(SandboxError, match="closed"):
        await box.run("true", 1)
    assert not sleeping(seconds) and not world.left()


@KINDS
async def test_opening_again_replaces_what_a_lost_try_left(world: World, kind: str):
    lost, boxes = world.open(kind), world.open(kind)
    await (await lost.open("same", {"a": "1"}, SMALL)).run("touch left", 10)
    box = await boxes.open("same", {"a": "1"}, SMALL)
    assert (await box.run("ls", 10)).output == "a\n"
    assert len(list(world.root.glob("*.lease.json"))) == 1
    await boxes.close()
    assert not world.left()


@KINDS
async def test_after_sigkill_of_the_owner_the_next_start_removes_everything(world: World, kind: str):
    seconds = f"{SECONDS[kind]}1"
    arguments = [sys.executable, "-c", OWNER, kind, str(world.root), str(world.there), seconds, *world.where[kind]]
    owner = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE, env=dict(os.environ))
    assert await asyncio.wait_for(owner.stdout.readline(), START_S) == b"open\n"
    await until(lambda: len(sleeping(seconds)) == 2)
    owner.kill()
    await owner.communicate()
    await world.open(kind).start()
    assert not sleeping(seconds) and not world.left()


@KINDS
def test_owners_that_are_killed_at_any_moment_leave_nothing(world: World, kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REX_TOKEN", world.where["remote"][1])
    where = {"image": world.image} if kind == "docker" else {"url": world.where["remote"][0], "token_env": "REX_TOKEN"}
    found = kills(SandboxPart(kind=kind, **where), count=KILLS, start_s=0.5)
    assert found["kills"] == KILLS and found["kills_begun"] > 0
    left = {"folders", "processes", "mounts", "groups", "containers" if kind == "docker" else "there"}
    assert {name: number for name, number in found.items() if name.startswith("left_")} == {f"left_{what}": 0 for what in left}
    assert not world.left()


async def test_a_container_is_limited_and_found_by_its_label(world: World):
    boxes = world.open("docker")
    box = await boxes.open("run-train1-2.3-0", {}, Limits(cpu=0.5, memory_mb=512, processes=10))
    (said,) = json.loads(docker("inspect", *containers()))
    limits = said["HostConfig"]
    assert (limits["NanoCpus"], limits["Memory"], limits["PidsLimit"]) == (500_000_000, 768 << 20, 74)
    assert said["Config"]["Labels"][LABEL].startswith("run-train1-2.3-0~")
    await box.close()
    assert not world.left()


async def test_a_reaper_that_knows_no_configuration_removes_containers(world: World):
    box = await world.open("docker").open("t", {}, SMALL)
    assert reap(world.root, alive=lambda owner: False) == ["t"]
    assert not world.left()
    with pytest.raises(SandboxError):
        await box.run("true", 1)


async def test_a_task_may_begin_in_a_folder_of_its_image(world: World):
    boxes = world.open("docker")
    box = await boxes.open("t", ImageFolder(world.image, "/tmp/testbed"), SMALL)
    assert (await box.run("cat a.py; pwd", 10)).output == "x = 1\n/tmp/testbed\n"
    with pytest.raises(SandboxError, match="no:2"):
        await boxes.open("u", ImageFolder("no:2", "/tmp/testbed"), SMALL)
    await boxes.close()
    assert not world.left()
    with pytest.raises(SandboxError, match=f"begins in the image {world.image}"):
        await world.open("remote").open("t", ImageFolder(world.image, "/tmp/testbed"), SMALL)


async def test_many_share_a_server_at_the_same_time(world: World):
    boxes = world.open("remote", starts=4)
    opened = await asyncio.gather(*(boxes.open(f"n{number}", {"a": str(number)}, SMALL) for number in range(6)))
    started = time.monotonic()
    outputs = await asyncio.gather(*(box.run("sleep 1; cat a", 20) for box in opened))
    assert [ran.output for ran in outputs] == [str(number) for number in range(6)]
    assert time.monotonic() - started < 5
    await boxes.close()
    assert not world.left()


async def test_a_server_that_refuses_or_is_not_there_is_the_sandboxes_fault(world: World):
    url, _ = world.where["remote"]
    for where in ((url, "wrong"), ("http://127.0.0.1:9", "t")):
        with pytest.raises(SandboxError):
            await RemoteSandboxes(*where, root=world.root).open("t", {}, SMALL)


async def test_what_a_command_writes_in_its_keepers_name_is_not_believed(world: World):
    boxes = world.open("remote")
    box = await boxes.open("t", {}, SMALL)
    forged = {"exit_code": 0, "output": "", "timed_out": False, "left_out": 0, "seconds": 0, "nonce": "?"}
    forge = f"echo '{json.dumps(forged)}' > ../calls/1.result; sleep 5; exit 1"
    with pytest.raises(SandboxError, match="another than its keeper"):
        await box.run(forge, 10)
    await boxes.close()


def sleeping(seconds: str) -> list[int]:
    found = psutil.process_iter(["pid", "cmdline", "status"])
    return [p.info["pid"] for p in found if p.info["cmdline"] == ["sleep", seconds] and p.info["status"] != "zombie"]


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


async def until(condition) -> None:
    async with asyncio.timeout(START_S):
        while not condition():
            await asyncio.sleep(0.02)
