"""What a command in a local sandbox can see, reach and use."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from pipeline.errors import SandboxError
from pipeline.sandboxes.base import Limits
from pipeline.sandboxes.local import LocalSandboxes

SMALL = Limits(memory_mb=128, processes=32, file_mb=8)


async def said(sandboxes: LocalSandboxes, command: str, timeout_s: float = 10.0) -> str:
    sandbox = await sandboxes.open("t", {"a.txt": "hello\n"}, SMALL)
    return (await sandbox.run(command, timeout_s)).output


async def test_a_command_works_in_its_own_copy_and_the_next_one_sees_what_it_left(sandboxes: LocalSandboxes, tmp_path: Path):
    task = tmp_path / "task"
    task.mkdir()
    (task / "a.txt").write_text("hello\n")
    sandbox = await sandboxes.open("t", task, SMALL)
    first = await sandbox.run("cat a.txt; echo new > b.txt; rm a.txt; exit 3", 10)
    second = await sandbox.run("pwd; ls", 10)
    assert (first.exit_code, first.output) == (3, "hello\n")
    assert second.output == "/work\nb.txt\n"
    assert os.listdir(task) == ["a.txt"]


async def test_there_is_no_network(sandboxes: LocalSandboxes):
    code = "import socket; socket.create_connection(('127.0.0.1', 22), 2)"
    assert "Connection refused" in await said(sandboxes, f'python3 -c "{code}"; ls /sys/class/net 2>&1')
    code = "import socket; socket.create_connection(('1.1.1.1', 80), 2)"
    assert "unreachable" in await said(sandboxes, f'python3 -c "{code}"')
    code = "import socket; socket.socket(socket.AF_VSOCK)"  # reaches a virtual machine's host from any network namespace
    assert "Operation not permitted" in await said(sandboxes, f'python3 -c "{code}"')


async def test_nothing_outside_the_folder_can_be_written(sandboxes: LocalSandboxes):
    places = "/usr/x /bin/x /etc/x /x /dev/x /proc/sys/kernel/panic /proc/sysrq-trigger /proc/self/oom_score_adj"
    output = await said(sandboxes, f"for place in {places}; do (: >> $place) 2>/dev/null && echo wrote $place; done; echo end")
    assert output == "end\n"


async def test_files_of_the_host_are_not_there(sandboxes: LocalSandboxes, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    output = await said(
        sandboxes, f"cat {secret} /etc/passwd /etc/shadow; ls /home /var /mnt {Path.home() / '.ssh'} {Path(__file__).parent}"
    )
    assert "secret\n" not in output and "root:" not in output
    assert output.count("No such file") == 8


async def test_a_link_to_the_host_leads_nowhere(sandboxes: LocalSandboxes, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    sandbox = await sandboxes.open("t", {}, SMALL)
    await sandbox.run(f"ln -s {secret} link; ln -s {tmp_path} folder", 10)
    assert "secret\n" not in (await sandbox.run("cat link folder/secret", 10)).output
    await sandbox.close()
    assert secret.read_text() == "secret"


async def test_other_processes_cannot_be_seen_or_signalled(sandboxes: LocalSandboxes):
    output = await said(sandboxes, f"ls /proc | grep -c '^[0-9]'; kill -0 {os.getpid()} 2>&1; ps ax | grep -c pytest")
    lines = output.splitlines()
    assert int(lines[0]) < 8
    assert "No such process" in lines[1]


async def test_the_environment_is_scrubbed_and_privileges_are_gone(sandboxes: LocalSandboxes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("API_KEY", "hunter2")
    output = await said(sandboxes, "env; id -u; grep CapEff /proc/self/status; unshare -U true 2>&1; echo userns $?")
    assert "hunter2" not in output
    assert "1000\n" in output
    assert "CapEff:\t0000000000000000" in output
    assert "userns 0" not in output


async def test_a_memory_hog_is_stopped_and_its_sandbox_goes_on(sandboxes: LocalSandboxes):
    sandbox = await sandboxes.open("t", {}, SMALL)
    hog = await sandbox.run("python3 -c 'x = bytearray(1 << 30); print(len(x))'", 20)
    assert hog.exit_code != 0 and "1073741824" not in hog.output
    assert (await sandbox.run("echo fine", 10)).output == "fine\n"


async def test_a_fork_bomb_is_contained(sandboxes: LocalSandboxes):
    before = len(psutil.pids())
    sandbox = await sandboxes.open("t", {}, SMALL)
    if sandbox.limited_by["pids"].startswith("nothing"):
        pytest.skip(sandbox.limited_by["pids"])
    await sandbox.run("bomb() { bomb | bomb & }; bomb; sleep 1", 3)
    assert len(psutil.pids()) < before + 60
    assert (await sandbox.run("echo fine", 10)).output == "fine\n"


async def test_a_file_cannot_grow_beyond_its_bound(sandboxes: LocalSandboxes):
    output = await said(sandboxes, "head -c 100000000 /dev/zero > big; stat -c %s big; head -c 100000000 /dev/zero > /tmp/big")
    assert str(8 * 2**20) in output.splitlines()


@pytest.mark.fault(29)
async def test_the_whole_tree_goes_at_the_deadline(sandboxes: LocalSandboxes):
    sandbox = await sandboxes.open("t", {}, SMALL)
    started = time.monotonic()
    ran = await sandbox.run("(setsid bash -c 'setsid sleep 4242 & disown' &) ; trap '' TERM; echo begun; sleep 4242", 1.0)
    assert ran.timed_out and ran.exit_code == 137 and ran.output == "begun\n"
    assert time.monotonic() - started < 3
    assert not _sleeping()


@pytest.mark.fault(29)
async def test_what_a_command_leaves_running_goes_with_it(sandboxes: LocalSandboxes):
    output = await said(sandboxes, "(setsid sleep 4242 &); echo done")
    assert output == "done\n"
    assert not _sleeping()


@pytest.mark.fault(30)
async def test_a_gigabyte_of_output_is_cut_with_a_mark_and_memory_stays_flat(sandboxes: LocalSandboxes):
    sandbox = await sandboxes.open("t", {}, SMALL)
    before = psutil.Process().memory_info().rss
    ran = await sandbox.run("echo first; head -c 1000000000 /dev/zero | tr '\\0' a; echo last", 60, output_bytes=1000)
    assert psutil.Process().memory_info().rss - before < 20e6
    assert ran.output.startswith("first\na") and ran.output.endswith("alast\n")
    assert ran.left_out == 1000000000 + 11 - 1000 and f"[... {ran.left_out} bytes left out ...]" in ran.output


async def test_a_command_is_given_bytes_and_may_leave_them_unread(sandboxes: LocalSandboxes):
    sandbox = await sandboxes.open("t", {}, SMALL)
    assert (await sandbox.run("wc -c", 10, stdin=b"x" * 300_000)).output.strip() == "300000"
    assert (await sandbox.run("true", 10, stdin=b"x" * 300_000)).exit_code == 0


async def test_what_is_no_command_is_told_and_not_run(sandboxes: LocalSandboxes):
    sandbox = await sandboxes.open("t", {}, SMALL)
    for command in ("echo \0", "echo " + "x" * 200_000):
        ran = await sandbox.run(command, 10)
        assert ran.exit_code == 126 and "not a command" in ran.output
    assert (await sandbox.run("echo fine", 10)).output == "fine\n"


async def test_the_private_folder_is_seen_only_when_asked_for(sandboxes: LocalSandboxes):
    sandbox = await sandboxes.open("t", {}, SMALL)
    await sandbox.run("echo 1 > /private/note", 10, private=True)
    assert "No such file" in (await sandbox.run("cat /private/note", 10)).output
    assert (await sandbox.run("cat /private/note", 10, private=True)).output == "1\n"


async def test_files_outside_the_folder_are_refused(sandboxes: LocalSandboxes):
    with pytest.raises(SandboxError, match="outside"):
        await sandboxes.open("t", {"../x": "1"}, SMALL)


async def test_a_closed_sandbox_runs_nothing(sandboxes: LocalSandboxes):
    sandbox = await sandboxes.open("t", {}, SMALL)
    await sandbox.close()
    await sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.run("true", 1)


def _sleeping() -> bool:
    return any((process.info["cmdline"] or [])[-1:] == ["4242"] for process in psutil.process_iter(["cmdline"]))
