"""Which teacher scores what, checked before anything runs."""

from __future__ import annotations

import pytest

from pipeline.config.schema import RunConfig
from pipeline.engines.base import EngineInfo
from pipeline.errors import ConfigError
from pipeline.teacher.routing import aliases_by_dataset, check_vocabulary, teacher_groups
from pipeline.teacher.teacher import make_teachers
from tests.pipeline.teacher.fakes import Renderer, ToyTeacher, no_shots


def config(teachers: dict, datasets: dict, **more) -> RunConfig:
    return RunConfig.model_validate({"student": {"architecture": {}}, "teachers": teachers, "datasets": datasets, **more})


MODEL = {"architecture": {"hidden": 64}, "seed": 1}
SMALL = {"architecture": {"hidden": 32}, "seed": 1}


def test_aliases_of_one_model_share_a_group_with_the_most_replicas_that_any_asks_for():
    found = teacher_groups(
        config(
            {"a": {**MODEL, "shots": 2}, "b": {**MODEL, "replicas": 3}, "c": SMALL, "d": {**MODEL, "smoothing": 0.1}},
            {name: {"teacher": name} for name in "abcd"},
        )
    )
    assert [(group.name, group.aliases, group.replicas) for group in found] == [
        ("a", ("a", "b"), 3),
        ("c", ("c",), 1),
        ("d", ("d",), 1),
    ]


def test_a_teacher_that_no_dataset_uses_is_not_deployed():
    found = teacher_groups(config({"a": MODEL, "b": SMALL}, {"x": {"teacher": "b"}}))
    assert [group.name for group in found] == ["b"]


def test_without_an_algorithm_that_asks_for_teachers_there_are_none():
    grpo = config({"a": MODEL}, {"x": {"teacher": "a"}}, algorithm={"name": "grpo"})
    assert aliases_by_dataset(grpo) == {} and teacher_groups(grpo) == ()


def test_unknown_aliases_and_missing_engines_fail_at_start_up():
    with pytest.raises(ValueError, match="datasets.x.teacher 'nobody' is unknown"):
        config({"a": MODEL}, {"x": {"teacher": "nobody"}})
    with pytest.raises(ConfigError, match="teachers.a: no engine serves it"):
        make_teachers(config({"a": MODEL}, {"x": {}}), {"z": [ToyTeacher()]}, {}, no_shots)
    with pytest.raises(ConfigError, match="teachers.a.shots is 2, and there is no renderer"):
        make_teachers(config({"a": {**MODEL, "shots": 2}}, {"x": {}}), {"a": [ToyTeacher()]}, {}, no_shots)


def test_aliases_of_one_model_are_one_teacher_served_by_either_ones_engines():
    teachers = make_teachers(
        config({"a": MODEL, "b": {**MODEL, "shots": 1}}, {"x": {"teacher": "a"}, "y": {"teacher": "b"}}),
        {"b": [ToyTeacher(), ToyTeacher()]},
        {"b": Renderer()},
        no_shots,
    )
    assert teachers["a"] is teachers["b"] and teachers["a"].replicas == 2


def info(tokenizer: str, vocab: int) -> EngineInfo:
    return EngineInfo("torch", "big-model", "d", vocab, tokenizer, 0, 64, 1, 0, 0, 0, 0)


class Student:
    digest = "characters-of-student"
    vocab_size = 12


@pytest.mark.fault(23)
def test_another_vocabulary_is_refused_and_both_are_named():
    with pytest.raises(ConfigError) as caught:
        check_vocabulary("math", info("other-characters", 12), Student)
    for told in ("teachers.math", "big-model", "other-characters", "characters-of-student", "12 tokens", "12 output rows"):
        assert told in str(caught.value)


@pytest.mark.fault(23)
def test_padding_is_fine_and_missing_rows_are_not():
    check_vocabulary("math", info(Student.digest, 64), Student)
    check_vocabulary("math", info("", 12), Student)
    with pytest.raises(ConfigError, match="no output row for some of the student's tokens"):
        check_vocabulary("math", info(Student.digest, 11), Student)
