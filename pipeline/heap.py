"""The garbage collector of a process that holds many live objects: thousands of episodes, and all that was imported."""

from __future__ import annotations

import gc

YOUNG = 10_000
"""Allocations between two young collections; the interpreter's 700 makes collecting cost as much as playing episodes."""
GENERATIONS = 20


def tune_collector() -> None:
    """For the process that calls it: what lives now is never looked at again, and collections become rare."""
    gc.freeze()
    gc.set_threshold(YOUNG, GENERATIONS, GENERATIONS)
