"""Agents by short name or `module:attribute`. What is loaded makes one agent a sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec

from pipeline.agents.base import Agent
from pipeline.agents.scripted import Scripted
from pipeline.agents.single_turn import SingleTurn
from pipeline.agents.swe import SweAgent
from pipeline.errors import ConfigError
from pipeline.fetcher.verifiers import load_verifier
from pipeline.importing import pick


def load_agent(name: str) -> Callable[[], Agent]:
    """The maker of an agent; agents of one maker share their verifiers. Raises ConfigError with the nearest short name."""
    if name == "mini-swe-agent" and find_spec("minisweagent") is None:
        raise ConfigError(f"agent {name!r} is not installed: pip install -e '.[scaffold]' -c constraints.txt")
    known = {
        "single_turn": partial(SingleTurn, cache(load_verifier)),
        "scripted": Scripted,
        "swe": SweAgent,
        "mini-swe-agent": _mini_swe_agent,
    }
    return pick(name, known, "agent")


def _mini_swe_agent() -> Agent:
    """Its module takes what an HTTP server needs, which is for those who ask for it."""
    from pipeline.agents.scaffold import MINI_SWE_AGENT, Scaffold

    return Scaffold(MINI_SWE_AGENT)
