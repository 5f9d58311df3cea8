"""Commands that try to get out of a local sandbox, or to stay."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from pipeline.sandboxes.base import Limits, Ran
from pipeline.sandboxes.local import MISSING, LocalSandboxes
from pipeline.sandboxes.syscalls import MACHINES

SMALL = Limits(memory_mb=128, processes=32, file_mb=8)
LIBC = "import ctypes; libc = ctypes.CDLL(None, use_errno=True)"


@pytest.fixture
async def boxes(tmp_path: Path) -> AsyncIterator[LocalSandboxes]:
    if shutil.which("bwrap") is None:
        pytest.skip(f"did not run: {MISSING}")
    made = LocalSandboxes(root=tmp_path / "boxes")
    yield made
    await made.close()
    assert not list((tmp_path / "boxes").glob("*"))


async def ran(boxes: LocalSandboxes, command: str, timeout_s: float = 10.0) -> Ran:
    return await (await boxes.open("t", {"a.txt": "hello\n"}, SMALL)).run(command, timeout_s)


async def test_a_socket_without_a_file_is_the_hosts_alone(boxes: LocalSandboxes):
    with socket.socket(socket.AF_UNIX) as host:
        host.bind("\0rollout-test-escapes")
        host.listen()
        code = "import socket; socket.socket(socket.AF_UNIX).connect('\\0rollout-test-escapes')"
        assert "Connection refused" in (await ran(boxes, f'python3 -c "{code}"')).output


async def test_keys_of_the_hosts_session_cannot_be_read_and_none_can_be_left(boxes: LocalSandboxes, tmp_path: Path):
    add_key, request_key, keyctl, _ = MACHINES[platform.machine()].refused
    owner = f"""{LIBC}
import asyncio, sys
from pathlib import Path
from pipeline.sandboxes.base import Limits
from pipeline.sandboxes.local import LocalSandboxes
assert libc.syscall({keyctl}, 1, None) > 0 and libc.syscall({add_key}, b"user", b"rollout", b"hunter2", 7, -3) > 0
async def main():
    boxes = LocalSandboxes(root=Path(sys.argv[1]))
    print((await (await boxes.open("t", {{}}, Limits())).run(sys.argv[2], 10)).output)
    await boxes.close()
asyncio.run(main())
"""
    inside = f"""python3 - <<'END'
{LIBC}
found = libc.syscall({request_key}, b"user", b"rollout", None, 0)
print("found", found, "added", libc.syscall({add_key}, b"user", b"x", b"x", 1, -4))
END"""
    arguments = [sys.executable, "-c", owner, str(tmp_path / "other"), inside]
    process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    said, _ = await asyncio.wait_for(process.communicate(), 60)
    assert "found -1 added -1" in said.decode()


async def test_the_names_of_the_hosts_keys_are_not_shown(boxes: LocalSandboxes):
    done = await ran(boxes, "cat /proc/keys /proc/key-users")
    assert "keyring" not in done.output and done.exit_code != 0


@pytest.mark.parametrize(
    "command",
    [
        "ln /usr/bin/env x",
        "cp /bin/bash b && chmod 4755 b && ./b -p -c 'test $(id -u) != 1000'",
        "mount -t tmpfs none /tmp",
        "mount -o remount,rw /",
        "unshare -Ur true",
        "unshare -n true",
        "mknod disk b 254 0",
        "date -s 2000-01-01",
        "kill -9 1; kill -STOP 1; false",
        "nice -n -5 true 2>&1 | grep -v denied",
        f'python3 -c "{LIBC}; exit(libc.syscall(425, 4, ctypes.create_string_buffer(256)) < 0)"',
    ],
)
async def test_what_would_reach_beyond_the_sandbox_fails(boxes: LocalSandboxes, command: str):
    done = await ran(boxes, command)
    assert done.exit_code != 0 and not done.timed_out


async def test_the_first_process_can_be_stopped_and_the_deadline_holds(boxes: LocalSandboxes):
    before = set(psutil.Process().children(recursive=True))
    trace = f"{LIBC}; libc.ptrace(16, 1, 0, 0); import time; time.sleep(60)"
    done = await ran(boxes, f'trap "" TERM HUP INT; (setsid setsid python3 -c "{trace}" &); sleep 60', 1.0)
    assert done.timed_out and done.seconds < 5
    assert not set(psutil.Process().children(recursive=True)) - before


async def test_memory_cannot_be_had_through_files_in_memory(boxes: LocalSandboxes):
    code = "for folder in ('/tmp', '/dev/shm'):\n  try:\n    for n in range(99): open(f'{folder}/{n}', 'wb').write(bytes(1 << 20))"
    code += "\n  except OSError as error: print(n, error.strerror)"
    done = await ran(boxes, f'python3 -c "{code}"')
    assert done.output.splitlines() == ["8 No space left on device"] * 2
    code = "import os\nf = os.memfd_create('x')\nwhile True: os.write(f, bytes(1 << 20))"
    assert (await ran(boxes, f'python3 -c "{code}"')).exit_code != 0


async def test_names_that_are_hard_to_handle_are_removed_and_lead_nowhere(boxes: LocalSandboxes, tmp_path: Path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    names = "touch \"$(printf 'a\\nb')\" \"$(printf '\\377')\" -- -rf ' ' '*' && mkfifo pipe && mkdir -p d/e && touch d/e/f"
    links = f"ln -s / root && ln -s .. up && ln -s {tmp_path}/kept kept && mkdir -p $'\\n/..' && ln -s self self"
    deep = 'python3 -c \'import os\nfor _ in range(2000): os.mkdir("x"); os.chdir("x")\''
    done = await ran(boxes, f"{names} && {links} && {deep} && chmod 0 d/e d && echo made")
    assert done.output == "made\n"
    await boxes.close()
    assert os.listdir(tmp_path / "boxes") == [] and os.listdir(tmp_path / "kept") == ["file"]


@pytest.mark.parametrize(
    "fills",
    [
        "n=0; while :; do n=$((n + 1)); head -c 8000000 /dev/zero > $n || exit; done",
        "python3 -c 'n = 0\nwhile True: open(str(n), \"w\"); n += 1'",
        'python3 -c \'import os\nwhile True: os.mkdir("deep" * 20); os.chdir("deep" * 20)\'',
        "for n in $(seq 30); do head -c 8000000 /dev/zero > $n; done",
    ],
)
async def test_a_disk_is_not_filled_by_many_files(boxes: LocalSandboxes, tmp_path: Path, fills: str):
    done = await ran(boxes, fills, 60.0)
    assert done.exit_code == 137 and not done.timed_out and "beyond its bound" in done.output
    assert megabytes(tmp_path) < 2000


async def test_a_disk_is_not_filled_by_files_without_a_name(boxes: LocalSandboxes):
    box = await boxes.open("t", {}, SMALL)
    if "cgroup" not in box.limited_by["pids"]:
        pytest.skip("did not run: no control group can be written, by which the processes of a command are known")
    code = "import os, time\nfiles = []\nfor n in range(40):\n    files.append(open('x', 'wb')); os.unlink('x')"
    code += "\n    files[-1].write(bytes(8000000)); files[-1].flush()\ntime.sleep(50)"
    done = await box.run(f'python3 -c "{code}"', 60.0)
    assert done.exit_code == 137 and not done.timed_out and "beyond its bound" in done.output


async def test_a_full_folder_can_be_emptied_and_worked_in_again(boxes: LocalSandboxes):
    box = await boxes.open("t", {}, SMALL)
    assert (await box.run("for n in $(seq 30); do head -c 8000000 /dev/zero > $n; done; sleep 30", 60)).exit_code == 137
    assert (await box.run("rm *; sleep 1; echo fine", 10)).output == "fine\n"


async def test_many_commands_of_one_sandbox_end_alone(boxes: LocalSandboxes):
    box = await boxes.open("t", {}, SMALL)
    long = asyncio.ensure_future(box.run("sleep 2; echo whole", 10))
    assert (await box.run("(setsid sleep 50 &); kill -9 -1; sleep 50", 0.5)).timed_out
    assert (await long).output == "whole\n"


def megabytes(folder: Path) -> int:
    return int(subprocess.run(["du", "-sm", folder], capture_output=True, text=True, check=True).stdout.split()[0])
