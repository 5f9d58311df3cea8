"""Agents by short name or `module:attribute`. What is loaded makes one agent a sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from pipeline.agents.base import Agent
from pipeline.agents.scripted import Scripted
from pipeline.agents.single_turn import SingleTurn
from pipeline.agents.swe import SweAgent
from pipeline.fetcher.verifiers import load_verifier
from pipeline.importing import pick


def load_agent(name: str) -> Callable[[], Agent]:
    """The maker of an agent; agents of one maker share their verifiers. Raises ConfigError with the nearest short name."""
    return pick(name, {"single_turn": partial(SingleTurn, cache(load_verifier)), "scripted": Scripted, "swe": SweAgent}, "agent")
