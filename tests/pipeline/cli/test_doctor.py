import json
from importlib import metadata

import pytest

from pipeline.buffer.filesystem import Mount
from pipeline.cli import machine


@pytest.fixture
def quick(monkeypatch):
    """Leave out the check that starts a process to import Ray."""
    monkeypatch.setattr(machine, "_ray", lambda: iter([machine.Check("ray", "ok", "left out")]))


def test_every_line_says_how_to_mend_it(rollout, tmp_path, quick):
    code, out, _ = rollout("doctor", "--json", "--runs-dir", tmp_path / "runs")
    checks = json.loads(out)["checks"]
    assert {check["name"] for check in checks} >= {
        "python",
        "ray",
        "gpus",
        "memory",
        "disk",
        "file system",
        "fsync",
        "bubblewrap",
        "swe-rex",
        "docker",
    }
    assert all(check["mend"] for check in checks if check["status"] != "ok")
    assert code == (1 if any(check["status"] == "fail" for check in checks) else 0)
    assert not (tmp_path / "runs").exists()
    assert "python" in rollout("doctor", "--runs-dir", tmp_path / "runs")[1]


def test_a_wrong_version_fails_with_the_command(rollout, tmp_path, quick, monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy<1", "no-such-package>=3", 'gguf; extra == "smollm"'])
    code, out, _ = rollout("doctor", "--json", "--runs-dir", tmp_path)
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert code == 1
    assert checks["numpy"]["status"] == "fail" and "pip install 'numpy<1'" in checks["numpy"]["mend"]
    assert checks["no-such-package"]["detail"].startswith("not installed")
    assert "gguf" not in checks


def test_a_docker_that_does_not_answer_is_told_with_its_own_words(tmp_path, monkeypatch):
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\necho 'Cannot connect to the daemon.' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    checks = {check.name: check for check in machine._containers()}
    assert checks["docker"].status == "warn" and "Cannot connect to the daemon." in checks["docker"].detail
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    checks = {check.name: check for check in machine._containers()}
    assert "no docker on the PATH" in checks["docker"].detail and ".[swerex]" in checks["swe-rex"].mend


def test_a_network_file_system_fails(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(machine, "mounts", lambda: [Mount("/", "nfs4")])
    check = next(check for check in machine.check_machine(tmp_path) if check.name == "file system")
    assert check.status == "fail" and "--runs-dir" in check.mend


def test_ray_of_this_environment():
    (check,) = machine._ray()
    assert check.status == "ok", check.detail
