"""What a response is worth. A verifier is a callable (Task, text) -> reward in float, or None when it cannot say.

Invariant: a verifier that fails raises VerifierError, and never returns a made-up 0. With `reward: exact` a reward is 1.0 when
solved (SOLVED_AT) and 0.0 otherwise; with `reward: score` it is the scorer's own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from pipeline.errors import VerifierError, root_cause
from pipeline.fetcher.gym import make_generator
from pipeline.importing import pick
from pipeline.records import SOLVED_AT, Task

Verifier = Callable[[Task, str], float | None]

NEED_ANSWER = ("exact", "numeric", "contains")
"""Verifiers that compare with the item's answer."""

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_TOLERANCE = 1e-6


def load_verifier(name: str) -> Verifier:
    """A verifier by short name or `module:attribute`. Raises ConfigError; what it returns raises VerifierError only."""
    makers: dict[str, Callable[[], Verifier]] = {
        "exact": lambda: exact,
        "numeric": lambda: numeric,
        "contains": lambda: contains,
        "reasoning_gym": GymVerifier,
        "swe": lambda: _in_a_sandbox,
    }
    score = makers[name]() if name in makers else pick(name, makers, "verifier")
    return lambda task, text: _reward(name, score, task, text)


def _reward(name: str, score: Verifier, task: Task, text: str) -> float | None:
    try:
        value = score(task, text)
    except VerifierError:
        raise
    except Exception as error:
        raise VerifierError(f"verifier {name!r} failed on {task.task_id}: {root_cause(error)}") from error
    if value is None:
        return None
    if isinstance(value, str) or not math.isfinite(float(value)):
        raise VerifierError(f"verifier {name!r} returned {value!r} for {task.task_id}, not a finite number or None")
    if task.metadata.get("reward", "exact") == "score":
        return float(value)
    return 1.0 if value >= SOLVED_AT else 0.0


def exact(task: Task, text: str) -> float:
    """The response is the answer, white space around it aside."""
    return float(text.strip() == _answer(task).strip())


def contains(task: Task, text: str) -> float:
    """The answer stands somewhere in the response; the case of letters does not matter."""
    return float(_answer(task).strip().casefold() in text.casefold())


def numeric(task: Task, text: str) -> float:
    """The last number in the response equals the answer, within 1e-6 relative or absolute. Thousands may have commas."""
    wanted, found = _last_number(_answer(task)), _last_number(text)
    if wanted is None:
        raise VerifierError(f"verifier 'numeric': the answer {task.answer!r} of {task.task_id} holds no number")
    return float(found is not None and math.isclose(found, wanted, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE))


def _in_a_sandbox(task: Task, text: str) -> float:
    raise VerifierError(f"verifier 'swe': {task.task_id} is judged by running its tests: play it with the agent swe")


class GymVerifier:
    """The generator's own scorer, on the entry made again from its seed and index.

    Keeps what it made for the next sample; several threads may call it, each of which looks at the kept entry once.
    """

    def __init__(self) -> None:
        self._generators: dict[str, Any] = {}
        self._entry: tuple[tuple[str, int], dict[str, Any]] | None = None

    def __call__(self, task: Task, text: str) -> float:
        origin = task.metadata
        missing = [key for key in ("generator", "params", "seed", "size", "index") if key not in origin]
        if missing:
            raise VerifierError(f"verifier 'reasoning_gym': {task.task_id} is no item of reasoning_gym (no {missing[0]!r})")
        key = json.dumps([origin["generator"], origin["params"], origin["seed"], origin["size"]], sort_keys=True)
        if key not in self._generators:
            self._generators[key] = make_generator(origin["generator"], origin["params"], seed=origin["seed"], size=origin["size"])
        generator, entry = self._generators[key], self._entry
        if entry is None or entry[0] != (key, origin["index"]):
            entry = self._entry = ((key, origin["index"]), generator[origin["index"]])
        return float(generator.score_answer(text.strip(), entry[1]))


def _answer(task: Task) -> str:
    if task.answer is None:
        raise VerifierError(f"{task.task_id} has no answer to compare with")
    return task.answer


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
