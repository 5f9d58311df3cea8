"""Who plays a turn, student or teacher: a pure function of the task, the sample and the step's values.

Invariant: the same sample of the same attempt is mixed in the same way again, whatever runs beside it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipeline.agents.base import student_alone
from pipeline.config.schema import RunConfig
from pipeline.records import STUDENT, TEACHER, StepContext, Task, sample_seed

_COIN, _KAPPA = 0xC014, 0x4A99
"""Keep the draws apart from those of the sampler."""


def executors(config: RunConfig, task: Task, index: int, attempt: int, context: StepContext) -> Callable[[int], int]:
    """Turn -> STUDENT or TEACHER. An evaluation is the student's alone unless `eval.beta` says otherwise."""
    if context.phase == "eval":
        return coins(config.eval.beta, sample_seed(task, index, attempt))
    if config.algorithm.name == "dagger":
        return coins(context.beta, sample_seed(task, index, attempt))
    if config.algorithm.name == "aggrevate":
        first = kappa(task, context.t_max)
        return lambda turn: STUDENT if turn < first else TEACHER
    return student_alone


def coins(beta: float, seed: int) -> Callable[[int], int]:
    """The teacher acts with probability beta, a coin a turn: Ross, Gordon & Bagnell 2011 (DAgger), algorithm 3.1."""
    if beta <= 0:
        return student_alone

    def executor(turn: int) -> int:
        coin = np.random.default_rng(np.random.SeedSequence([seed, turn, _COIN])).random()
        return TEACHER if coin < beta else STUDENT

    return executor


def kappa(task: Task, t_max: int) -> int:
    """Turns that the student plays before the teacher takes over: uniform on 0..t_max, one draw a task, the same for all of its
    samples. After Ross & Bagnell 2014 (AggreVaTe), where the learner acts until a random time."""
    rng = np.random.default_rng(np.random.SeedSequence([task.seed, task.ordinal, _KAPPA]))
    return int(rng.integers(0, t_max + 1))
