"""The program that runs a command inside a container or on a server. Its text is sent there: it needs Python 3.7 and nothing else.

Invariant: a command has a keeper, which adopts whatever the command leaves behind; when the command ends or its time is up, the
keeper ends all of that, and only then writes down what came of it, bounded in size.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from typing import Any

BLOCK = 65_536
POLL_S = 0.02
END_S = 10.0
"""For killed processes to be gone."""
SET_CHILD_SUBREAPER = 36
"""Of prctl(2): orphans below this process become its children."""
KILLED = 128 + signal.SIGKILL


@dataclass
class Kept:
    """The beginning and the end of what was written, `bound` bytes in all."""

    bound: int
    head: bytearray
    tail: bytearray
    total: int = 0

    @classmethod
    def empty(cls, bound: int) -> Kept:
        return cls(bound, bytearray(), bytearray())

    def add(self, block: bytes) -> None:
        self.total += len(block)
        room = self.bound // 2 - len(self.head)
        if room > 0:
            self.head += block[:room]
            block = block[room:]
        self.tail += block
        del self.tail[: max(0, len(self.tail) - (self.bound - self.bound // 2))]

    @property
    def left_out(self) -> int:
        return self.total - len(self.head) - len(self.tail)

    def text(self) -> str:
        """Bytes that are not UTF-8 become U+FFFD."""
        mark = f"\n[... {self.left_out} bytes left out ...]\n".encode() if self.left_out else b""
        return bytes(self.head + mark + self.tail).decode("utf-8", "replace")


def make(folder: str, max_age_s: str) -> None:
    """A sandbox's folder, and an end to those beside it that are older: whoever was to remove them is gone."""
    beside = os.path.dirname(folder)
    os.makedirs(beside, 0o700, exist_ok=True)
    for name in os.listdir(beside):
        path = os.path.join(beside, name)
        if time.time() - os.stat(path).st_mtime > float(max_age_s):
            remove(path)
    for part in ("work", "private", "calls"):
        os.makedirs(os.path.join(folder, part))


def unpack(folder: str, archive: str) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(os.path.join(folder, "work"))
    os.unlink(archive)


def begin(folder: str, call: str) -> None:
    """Start the keeper of a call and return: the server, which can do one thing at a time, goes on."""
    if os.fork():
        return
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    try:
        keep(folder, call)
    finally:
        os._exit(0)


def keep(folder: str, call: str) -> None:
    path = os.path.join(folder, "calls", call)
    with open(path + ".json") as file:
        request = json.load(file)
    os.unlink(path + ".json")  # the command is not to read how its result is known to be ours
    ctypes.CDLL(None, use_errno=True).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, stop)
    try:
        result = run(request)
    except OSError as error:
        result = {"fault": str(error)}
    with open(path + ".new", "w") as file:
        json.dump(dict(result, nonce=request["nonce"]), file)
    os.rename(path + ".new", path + ".result")


def stop(number: int, frame: Any) -> None:
    end_below()
    os._exit(0)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `Ran`."""
    started, timed_out = time.monotonic(), False
    kept = Kept.empty(request["output_bytes"])
    child = subprocess.Popen(
        ["/bin/bash", "-c", request["command"]],
        cwd=request["work"],
        env=environment(request),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: limit(request["limits"]),
    )
    left = memoryview(base64.b64decode(request["stdin"]))
    source, sink = child.stdout.fileno(), child.stdin.fileno()
    os.set_blocking(sink, False)
    while True:
        if left is not None and not len(left):
            child.stdin.close()
            left = None
        readable, writable, _ = select.select([source], [sink] if left is not None else [], [], POLL_S)
        if writable:
            try:
                left = left[os.write(sink, left[:BLOCK]) :]
            except BrokenPipeError:  # a command need not read what it is given
                left = left[:0]
        block = os.read(source, BLOCK) if readable else b""
        kept.add(block)
        if child.poll() is not None:
            break
        if readable and not block:  # it has closed its output and works on
            time.sleep(POLL_S)
        if time.monotonic() - started >= request["timeout_s"]:
            timed_out = True
            break
    code = child.returncode
    end_below()
    os.set_blocking(source, False)
    drain(source, kept)
    code = KILLED if code is None else code if code >= 0 else 128 - code
    return {
        "exit_code": code,
        "output": kept.text(),
        "timed_out": timed_out,
        "left_out": kept.left_out,
        "seconds": time.monotonic() - started,
    }


def environment(request: dict[str, Any]) -> dict[str, str]:
    """A container's own is the image's; a server's is not the command's to see."""
    own = dict(os.environ) if request["container"] else {"PATH": os.environ.get("PATH", os.defpath)}
    own.update({"HOME": own.get("HOME", "/tmp"), "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"})
    if request["private"]:
        own["PRIVATE"] = request["private"]
    return own


def limit(limits: dict[str, int]) -> None:
    """By name of `resource`: of each process."""
    for name, bound in limits.items():
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (bound, bound))


def drain(source: int, kept: Kept) -> None:
    """What the dead have left in the pipe."""
    try:
        while True:
            block = os.read(source, BLOCK)
            if not block:
                return
            kept.add(block)
    except BlockingIOError:
        return


def end_below() -> None:
    """Stop everything below this process before anything is killed, so that nothing can be begun meanwhile."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        found = set()
        while descendants() - found:
            new = descendants() - found
            found |= new
            for pid in new:
                send(pid, signal.SIGSTOP)
        for pid in found:
            send(pid, signal.SIGKILL)
        if not found and not reap():
            return
        reap()
        time.sleep(0.005)


def reap() -> bool:
    """Whether there are children still."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def descendants() -> set[int]:
    """Of this process, those that have not ended."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                children.setdefault(int(parent), []).append(int(name))
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting.extend(below)
    return found


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def remove(folder: str) -> None:
    """The keepers end what they keep; then the folder goes."""
    deadline = time.monotonic() + END_S
    left = keepers(folder)
    while left and time.monotonic() < deadline:
        for keeper in left:
            send(keeper, signal.SIGTERM)
        time.sleep(POLL_S)
        left = keepers(folder)
    for program in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):  # of any depth, unlike what Python has
        subprocess.call([*program, "--", folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if os.path.exists(folder):
        raise OSError(f"{folder} stays")


def keepers(folder: str) -> list[int]:
    """Known by their arguments; those that have ended have none."""
    found = []
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                said = file.read().split(b"\0")
        except OSError:
            continue
        if b"begin" in said and folder.encode() in said:
            found.append(int(name))
    return found


if __name__ == "__main__":
    {"make": make, "unpack": unpack, "begin": begin, "remove": remove}[sys.argv[1]](*sys.argv[2:])
