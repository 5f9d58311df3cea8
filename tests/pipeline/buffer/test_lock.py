"""One process owns a run."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeline.buffer.lock import RunLock, is_held, read_lock
from pipeline.errors import Locked
from tests.pipeline.buffer.helpers import new_run

HOLDER = """
import sys, time
from pathlib import Path
from pipeline.buffer.lock import RunLock
from pipeline.paths import RunPaths
lock = RunLock(RunPaths(Path(sys.argv[1])))
lock.acquire()
lock.record(map(int, sys.argv[2:]))
print("held", flush=True)
time.sleep(60)
"""


def hold(paths, *pids: int) -> subprocess.Popen:
    command = [sys.executable, "-c", HOLDER, str(paths.root), *map(str, pids)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    assert process.stdout.readline() == b"held\n"
    return process


def end(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@pytest.mark.fault(35)
def test_a_second_owner_is_refused_with_pid_and_run(tmp_path):
    paths = new_run(tmp_path)
    assert not is_held(paths)
    holder = hold(paths)
    try:
        assert is_held(paths)
        with pytest.raises(Locked, match=rf"run run is locked by process {holder.pid} on .*run\.lock"):
            RunLock(paths).acquire()
    finally:
        end(holder)
    assert not is_held(paths)
    with RunLock(paths):
        assert read_lock(paths)["pid"] == os.getpid()
        assert is_held(paths)


def test_who_only_looks_whether_a_run_is_held_does_not_keep_its_owner_out(tmp_path):
    paths = new_run(tmp_path)
    paths.lock.touch()
    look = os.open(paths.lock, os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH)
    threading.Timer(0.1, os.close, [look]).start()
    with RunLock(paths):
        assert is_held(paths)


def test_what_is_left_of_the_old_cluster_is_known_after_a_crash(tmp_path):
    paths = new_run(tmp_path)
    alive, gone = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    try:
        end(hold(paths, alive.pid, gone.pid))
        end(gone)
        lock = RunLock(paths)
        lock.acquire()
        assert [process.pid for process in lock.leftovers()] == [alive.pid]
        lock.record([os.getpid()])
        assert {process["pid"] for process in read_lock(paths)["cluster_pids"]} == {alive.pid, os.getpid()}
        end(alive)
        assert [process.pid for process in lock.leftovers()] == [os.getpid()]
        lock.release()
    finally:
        end(alive)


def test_a_pid_that_was_given_to_another_process_is_no_leftover(tmp_path):
    paths = new_run(tmp_path)
    end(hold(paths, os.getpid()))
    text = paths.lock.read_text()
    started = read_lock(paths)["cluster_pids"][0]["start_time"]
    paths.lock.write_text(text.replace(str(started), str(started - 100)))
    with RunLock(paths) as lock:
        assert lock.leftovers() == []


def test_a_torn_lock_file_is_no_obstacle(tmp_path):
    paths = new_run(tmp_path)
    paths.lock.write_text('{"pid": 12, "cluster_')
    with RunLock(paths) as lock:
        assert lock.leftovers() == []
    assert read_lock(paths)["pid"] == os.getpid()
