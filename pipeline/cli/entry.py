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
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda sign, _: heard.append(sign))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if heard:
        raise KeyboardInterrupt
