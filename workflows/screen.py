"""What the driver's process says. Invariant: the screen has this project's own lines; what Ray says goes to log/driver.log."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

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
        with open(paths.log / "driver.log", "a", buffering=1) as file, contextlib.redirect_stdout(file):
            yield
    finally:
        for name in NARRATORS:
            logging.getLogger(name).removeHandler(console)
