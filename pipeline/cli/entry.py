"""Where the `rollout` command begins: Ctrl-C while modules are imported ends it as quietly as later."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
"""Exit code of Ctrl-C during a command that is no run: a run handles its signals itself."""


def main() -> None:
    try:
        with uninterrupted():
            from pipeline.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    run()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C is heard at the end: a module that is interrupted while it is imported may swallow it, and be half there."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
