"""`run` and `resume` up to the point where Ray would start; the driver is played."""

from __future__ import annotations

import sqlite3

import pytest

from pipeline.buffer.lock import RunLock
from pipeline.buffer.reader import read_facts, read_status
from pipeline.paths import RunPaths


class Played:
    """In place of the driver: notes what it was given."""

    ran: list[tuple[str, int]] = []

    def __init__(self, paths, config, lock, started) -> None:
        self.paths, self.config = paths, config

    def run(self):
        from workflows.run import Outcome

        assert read_status(self.paths)["state"] == "starting"
        Played.ran.append((self.paths.run_id, self.config.trainer.steps))
        return Outcome(0, {})


@pytest.fixture
def drivers(monkeypatch):
    monkeypatch.setattr("workflows.run.Driver", Played)
    monkeypatch.setattr(Played, "ran", [])
    return Played.ran


def test_a_run_that_was_killed_while_it_was_made_is_resumed(rollout, drivers, config_file, tmp_path):
    runs = tmp_path / "runs"
    assert rollout("run", config_file, "--runs-dir", runs, "--run-id", "one")[0] == 0
    paths = RunPaths(runs / "one")
    assert read_facts(paths)["steps"] == 8
    for file in paths.root.glob("run.db*"):
        file.unlink()
    paths.database.touch()
    assert rollout("resume", "--all", "--runs-dir", runs)[0] == 0
    assert drivers == [("one", 8), ("one", 8)]
    assert read_facts(paths)["steps"] == 8


def test_a_resume_changes_nothing_of_a_run_that_another_process_owns(rollout, drivers, config_file, tmp_path):
    runs = tmp_path / "runs"
    rollout("run", config_file, "--runs-dir", runs, "--run-id", "one")
    paths = RunPaths(runs / "one")
    before = paths.config.read_text()
    with RunLock(paths):
        code, _, err = rollout("resume", "one", "trainer.steps=99", "--runs-dir", runs)
        assert rollout("resume", "--all", "--runs-dir", runs)[0] == 0, "a run that goes on was not interrupted"
    assert code == 4 and "locked" in err
    assert paths.config.read_text() == before and len(drivers) == 1
    assert rollout("resume", "one", "trainer.steps=99", "--runs-dir", runs)[0] == 0
    assert drivers[-1] == ("one", 99)


def test_a_damaged_ledger_is_named_and_left_as_it_is(rollout, drivers, config_file, tmp_path):
    runs = tmp_path / "runs"
    rollout("run", config_file, "--runs-dir", runs, "--run-id", "one")
    paths = RunPaths(runs / "one")
    for file in paths.root.glob("run.db*"):
        file.unlink()
    sqlite3.connect(paths.database).execute("CREATE TABLE other (a)").connection.close()
    found = paths.database.read_bytes()
    code, _, err = rollout("resume", "one", "--runs-dir", runs)
    assert code == 2 and "not a run's database" in err
    assert paths.database.read_bytes() == found and len(drivers) == 1


def test_a_run_that_cannot_go_on_does_not_keep_the_others_from_it(rollout, drivers, config_file, tmp_path):
    runs = tmp_path / "runs"
    for name in ("one", "two", "three"):
        rollout("run", config_file, "--runs-dir", runs, "--run-id", name)
    RunPaths(runs / "one").database.write_bytes(b"not a database, and longer than nothing")
    (runs / "two" / "config.yaml").write_text("trainer: {stepz: 1}\n")
    drivers.clear()
    code, _, err = rollout("resume", "--all", "--runs-dir", runs)
    assert code == 2 and [name for name, _ in drivers] == ["three"]
    assert [line for line in err.splitlines() if line.startswith("error: ")][0].startswith(
        f"error: {runs / 'one' / 'run.db'} cannot be"
    )
    assert "unknown key trainer.stepz" in err


def test_who_stops_one_of_all_runs_stops_all(rollout, drivers, config_file, tmp_path, monkeypatch):
    from workflows.run import Outcome

    runs = tmp_path / "runs"
    for name in ("one", "two"):
        rollout("run", config_file, "--runs-dir", runs, "--run-id", name)
    drivers.clear()
    play = Played.run
    monkeypatch.setattr(Played, "run", lambda self: Outcome(3, play(self).summary))
    assert rollout("resume", "--all", "--runs-dir", runs)[0] == 3 and len(drivers) == 1
