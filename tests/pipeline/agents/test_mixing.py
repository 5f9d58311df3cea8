"""Who plays which turn: the coin of DAgger, the switch of AggreVaTe, and what is recorded of them."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from pipeline.agents.mixing import coins, executors, kappa
from pipeline.buffer.api import Attempt
from pipeline.evaluator.spec import PlacementToken, specs_from_config
from pipeline.evaluator.worker import EvaluatorWorker
from pipeline.records import NOBODY, STUDENT, TEACHER, StepContext
from tests.pipeline.evaluator.parts import Echo, Letters, inline, make_config, make_task

TOKEN = PlacementToken("local", None, 0.0, 0.0, 0.0)


def config_of(name: str, **parts):
    return make_config(algorithm={"name": name}, teachers={"t": {"architecture": {}}}, **parts)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_ten_thousand_turns_are_within_three_sigma_of_beta(beta: float):
    count = sum(coins(beta, seed)(turn) == TEACHER for seed in range(1000) for turn in range(10))
    assert abs(count - 10_000 * beta) < 3 * np.sqrt(10_000 * beta * (1 - beta))


def test_beta_0_and_1_leave_nothing_to_chance():
    assert {coins(0.0, seed)(turn) for seed in range(50) for turn in range(5)} == {STUDENT}
    assert {coins(1.0, seed)(turn) for seed in range(50) for turn in range(5)} == {TEACHER}


def test_kappa_is_uniform_on_0_to_t_max_and_one_for_all_samples_of_a_task():
    drawn = Counter(kappa(make_task(ordinal), 4) for ordinal in range(5000))
    assert sorted(drawn) == [0, 1, 2, 3, 4]
    chi_square = sum((count - 1000) ** 2 / 1000 for count in drawn.values())
    assert chi_square < 18.5  # 0.999 of chi-square with 4 degrees of freedom
    config, context = config_of("aggrevate"), StepContext(1, t_max=4)
    turns = {tuple(executors(config, make_task(7), index, 0, context)(turn) for turn in range(6)) for index in range(8)}
    assert len(turns) == 1


def test_a_try_is_mixed_in_the_same_way_again_and_the_next_one_is_not():
    config, context = config_of("dagger"), StepContext(1, beta=0.5)

    def played(attempt: int) -> list[int]:
        return [executors(config, make_task(3), index, attempt, context)(turn) for index in range(8) for turn in range(8)]

    assert played(0) == played(0) != played(1)


def test_an_evaluation_is_the_students_alone_unless_it_says_otherwise():
    context = StepContext(1, beta=1.0, t_max=0, phase="eval")
    for name in ("dagger", "aggrevate", "iter_sft"):
        assert executors(config_of(name), make_task(0), 0, 0, context)(0) == STUDENT
    assert executors(config_of("dagger", eval={"beta": 1.0}), make_task(0), 0, 0, context)(0) == TEACHER


async def sample_of(name: str, ordinal: int, context: StepContext):
    config = config_of(name)
    engines = {"student": Echo(seconds=0.0), "teacher": Echo(seconds=0.0)}
    worker = EvaluatorWorker(
        config,
        Letters(),
        engines["student"],
        specs_from_config(config),
        "local",
        offload=inline,
        teachers={"t": engines["teacher"]},
    )
    task = make_task(ordinal, {"turns": 6, "engine": True}, teacher="t")
    return (await worker.run_samples(task, [0], Attempt(ordinal, 1, 0, 0), context, [TOKEN]))[0]


@pytest.mark.looptime
async def test_executors_of_tokens_match_the_switch():
    seen = set()
    for ordinal in range(12):
        sample = await sample_of("aggrevate", ordinal, StepContext(1, t_max=4))
        letters = "".join({NOBODY: "-", STUDENT: "S", TEACHER: "T"}[int(value)] for value in sample.executor)
        runs = "".join(run[0] for run in re.findall(r"S+|T+", letters))
        first = kappa(make_task(ordinal), 4)
        assert re.fullmatch(rf"S{{{first}}}T*", runs)
        assert [turn["executor"][0].upper() for turn in sample.turns] == list("S" * first + "T" * (6 - first))
        assert (sample.versions[sample.executor == TEACHER] == -1).all()
        assert (sample.loss_mask == (sample.executor != NOBODY)).all()
        seen.add(first)
    assert len(seen) > 2


@pytest.mark.looptime
async def test_the_engine_of_each_turn_is_its_executors():
    sample = await sample_of("dagger", 1, StepContext(1, beta=0.5))
    assert {turn["executor"] for turn in sample.turns} == {"student", "teacher"}
    assert sample.status == "ok"
