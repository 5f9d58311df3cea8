"""Stands in for the `docker` command where no Docker runs: `python docker_standin.py FOLDER ARGUMENTS...`.

A container is a bubblewrap with a process namespace, a /tmp and an end of its own, in which swe-rex's own server runs; like one of
Docker's it outlives the command that started it. There is one image, `tasks:1`, with a folder /tmp/testbed. FOLDER holds a file a
container.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

IMAGE = "tasks:1"


def main(folder: Path, command: str, arguments: list[str]) -> int:
    if command == "inspect":
        return 0 if arguments[-1] == IMAGE else _inspect(folder / f"{arguments[-1]}.json")
    if command == "pull":
        return _fail(f"Error response from daemon: manifest for {arguments[-1]} not found")
    if command == "version":
        print("27.0")
        return 0
    if command == "run":
        return _run(folder, arguments)
    if command == "ps":
        label = arguments[-1].removeprefix("label=")
        print("\n".join(file.stem for file in sorted(folder.glob("*.json")) if _has(file, label)))
        return 0
    if command in ("kill", "rm"):
        files = [file for file in folder.glob("*.json") if {file.stem, json.loads(file.read_text())["name"]} & set(arguments)]
        if command == "rm" and any(file.with_suffix(".ended").exists() for file in files):
            return _fail("Error response from daemon: removal of container is already in progress")
        for file in files:
            _end(file)
            file.with_suffix(".ended").touch() if command == "kill" else _remove(file)
        return 0 if files else _fail("Error response from daemon: No such container")
    return _fail(f"docker: {command!r} is not a docker command")


def _run(folder: Path, arguments: list[str]) -> int:
    said = {name: value for name, value in zip(arguments, arguments[1:], strict=False) if name.startswith("-")}
    identity = f"c{time.time_ns()}"
    Path(said["--cidfile"]).write_text(identity)
    token = re.search(r"--auth-token (\S+)", arguments[-1]).group(1)
    port = said["-p"].partition(":")[0]
    testbed = folder / f"{identity}.testbed"
    shutil.copytree(folder / "testbed", testbed)
    server = [f"{sys.prefix}/bin/swerex-remote", "--host", "127.0.0.1", "--port", port, "--auth-token", token]
    places = [
        "--dev-bind",
        "/",
        "/",
        "--tmpfs",
        "/tmp",
        "--ro-bind",
        sys.prefix,
        sys.prefix,
        "--bind",
        str(testbed),
        "/tmp/testbed",
    ]
    path = f"{sys.prefix}/bin:/usr/bin:/bin"
    started = subprocess.Popen(
        ["bwrap", *places, "--unshare-pid", "--proc", "/proc", *server],
        env={"PATH": path},
        cwd="/",
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    limits = {"NanoCpus": int(float(said["--cpus"]) * 1e9), "PidsLimit": int(said["--pids-limit"])}
    limits["Memory"] = int(said["--memory"].removesuffix("m")) << 20
    record = {"name": said["--name"], "label": said["--label"], "limits": limits, "pid": started.pid}
    aside = folder / f"{identity}.new"
    aside.write_text(json.dumps(record))
    aside.rename(folder / f"{identity}.json")
    return started.wait()


def _inspect(file: Path) -> int:
    if not file.exists():
        return _fail(f"Error: No such object: {file.stem}")
    record = json.loads(file.read_text())
    labels = dict([record["label"].split("=", 1)])
    print(json.dumps([{"HostConfig": record["limits"], "Config": {"Labels": labels}}]))
    return 0


def _has(file: Path, label: str) -> bool:
    """label: its name, or its name and value. One that has ended by itself, or was killed, is seen once more and is then gone."""
    said = json.loads(file.read_text())["label"]
    if file.with_suffix(".ended").exists():
        _remove(file)
    return said == label or said.startswith(f"{label}=")


def _end(file: Path) -> None:
    pid = json.loads(file.read_text())["pid"]
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    while os.path.exists(f"/proc/{pid}/fd/0"):
        time.sleep(0.01)


def _remove(file: Path) -> None:
    file.unlink()
    file.with_suffix(".ended").unlink(missing_ok=True)
    shutil.rmtree(file.with_suffix(".testbed"))


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
