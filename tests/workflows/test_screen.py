"""What a person sees of a run: our own lines, whatever becomes of the log."""

from __future__ import annotations

import logging

import pytest

from pipeline.errors import DiskFull
from pipeline.paths import RunPaths
from workflows.screen import own_lines_only


@pytest.fixture
def paths(tmp_path):
    """Logging of this process is what it was before."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield RunPaths(tmp_path / "run")
    root.handlers = handlers
    root.setLevel(level)


def say() -> None:
    logging.getLogger("workflows.run").info("the stages are ready")
    logging.getLogger("ray").warning("an actor died")
    print("noise" * 2000)


def test_our_lines_are_on_the_screen_and_all_of_them_in_the_log(paths, capsys):
    with own_lines_only(paths):
        say()
    assert capsys.readouterr() == ("", "the stages are ready\n")
    log = (paths.log / "driver.log").read_text()
    assert "the stages are ready" in log and "an actor died" in log and "noise" in log


@pytest.mark.fault(37)
def test_a_log_on_a_full_disk_hides_no_error(paths, capsys):
    paths.log.mkdir(parents=True)
    (paths.log / "driver.log").symlink_to("/dev/full")
    with pytest.raises(DiskFull, match="make room"), own_lines_only(paths):
        say()
        raise DiskFull("no space left: make room")
    assert capsys.readouterr() == ("", "the stages are ready\n")
