"""What the driver's process says. Invariant: the screen has this project's own lines; what Ray says goes to log/driver.log."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

from deployments.hosting import log_to_file
from pipeline.paths import RunPaths

NARRATORS = ("deployments", "workflows")
"""Loggers whose lines are for the person who started the run."""
RAY = ("ray", "ray.serve")
"""Loggers that Ray gives a handler on stderr when it is imported."""


class _Message(logging.Formatter):
    """The line alone; its traceback is in the file."""

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage()


class _Kept(io.TextIOBase):
    """A file that takes what it can: on a full disk the run's own error is what there is to say."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._file.write(text.encode())
        return len(text)

    def close(self) -> None:
        self._file.close()
        super().close()


@contextlib.contextmanager
def own_lines_only(paths: RunPaths) -> Iterator[None]:
    """Logging of this process and what Ray prints go to log/driver.log, our own lines also to stderr."""
    log_to_file(paths, "driver")
    for name in RAY:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    console = logging.StreamHandler(sys.stderr)
    console.setFormatter(_Message())
    for name in NARRATORS:
        logging.getLogger(name).addHandler(console)
    try:
        with _Kept(paths.log / "driver.log") as file, contextlib.redirect_stdout(file):
            yield
    finally:
        for name in NARRATORS:
            logging.getLogger(name).removeHandler(console)
