"""Completions over an engine: stops, echo, log-probabilities, lost calls, and the one weight version of a reply."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engines.renderer import ChatRenderer
from pipeline.errors import EngineError, EngineUnavailable
from pipeline.records import Sampling
from pipeline.service.completing import Ask, Completing, choice_seed
from pipeline.service.stops import cut_at
from tests.pipeline.service.parts import Reverser, letters_folder


@pytest.fixture(scope="module")
def renderer(tmp_path_factory) -> ChatRenderer:
    return ChatRenderer.load(letters_folder(tmp_path_factory.mktemp("letters")))


@pytest.fixture
def engine(renderer) -> Reverser:
    return Reverser(renderer)


async def no_sleep(_seconds: float) -> None:
    pass


def completing(engine) -> Completing:
    return Completing(engine, engine.renderer, no_sleep)


def ask(engine, *texts, max_tokens=20, n=1, **parts) -> Ask:
    prompts = [engine.renderer.encode_text(text) for text in texts]
    return Ask(prompts, Sampling(max_tokens=max_tokens), n, 11, **parts)


async def test_choices_stand_under_their_prompt_and_have_seeds_of_their_own(engine):
    answer = await completing(engine).answer(ask(engine, "abc", "xy", n=2))
    assert [[made.text for made in choices] for choices in answer.choices] == [["cba", "cba"], ["yx", "yx"]]
    assert {made.finish_reason for choices in answer.choices for made in choices} == {"stop"} and answer.weight_version == 3
    seeds = [request.seed for request in engine.requests]
    assert seeds[0] == 11 and len(set(seeds)) == 4 and seeds[3] == choice_seed(11, 1, 1)


async def test_the_text_ends_before_a_stop_and_the_tokens_with_it(engine):
    answer = await completing(engine).answer(ask(engine, "abcdef", stops=["db", "dc", "a"], top_logprobs=0))
    (made,) = answer.choices[0]
    assert (made.text, made.finish_reason) == ("fe", "stop")
    assert engine.renderer.decode(made.token_ids) == "fedc" and len(made.logprobs.tokens) == 4
    cut = await completing(engine).answer(ask(engine, "abcdef", max_tokens=2))
    assert (cut.choices[0][0].text, cut.choices[0][0].finish_reason) == ("fe", "length")


@given(st.text(alphabet="ab", max_size=12), st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=3))
def test_a_text_ends_by_the_stop_that_is_said_first(text, stops):
    found, count, stopped = cut_at(list(text), stops, "".join)
    said = [text[:end] for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))]
    if not said:
        assert (found, count, stopped) == (text, len(text), False)
        return
    longest = max((stop for stop in stops if said[0].endswith(stop)), key=len)
    assert (found, count, stopped) == (said[0].removesuffix(longest), len(said[0]), True)


async def test_echo_scores_the_prompt_but_for_its_first_token(engine):
    answer = await completing(engine).answer(ask(engine, "abc", echo=True, top_logprobs=2, max_tokens=1))
    (made,) = answer.choices[0]
    ids = [int(token) for token in engine.renderer.encode_text("abc")]
    assert made.prompt_logprobs.tokens == ["a", "b", "c"]
    assert made.prompt_logprobs.logprobs == pytest.approx([None, -ids[1] / 100, -ids[2] / 100])
    assert made.prompt_logprobs.top[0] is None and [value for _, value in made.prompt_logprobs.top[1]] == pytest.approx(
        [-0.05, -0.06]
    )
    assert made.logprobs.logprobs == pytest.approx([-ids[2] / 100]) and made.logprobs.tokens == ["c"]


async def test_echo_alone_generates_nothing(engine):
    answer = await completing(engine).answer(ask(engine, "abc", echo=True, top_logprobs=1, max_tokens=0))
    assert engine.requests == [] and answer.choices[0][0].text == "" and len(answer.choices[0][0].prompt_logprobs.tokens) == 3
    assert answer.weight_version == 3


async def test_a_call_that_a_dying_replica_lost_is_made_again_with_the_same_seed(engine):
    engine.faults = [EngineUnavailable("replica died"), EngineUnavailable("not yet there")]
    answer = await completing(engine).answer(ask(engine, "abc"))
    assert answer.choices[0][0].text == "cba" and engine.requests[0].seed == 11
    engine.faults = [EngineUnavailable("gone")] * 4
    with pytest.raises(EngineUnavailable):
        await completing(engine).answer(ask(engine, "abc"))
    engine.faults = [EngineError("broken weights")]
    with pytest.raises(EngineError, match="broken"):
        await completing(engine).answer(ask(engine, "abc"))
    assert engine.faults == []


async def test_tokens_and_scores_are_of_one_version(engine):
    engine.versions = [3, 3, 4, 4]  # generate, before, after; new weights came in between: everything again
    answer = await completing(engine).answer(ask(engine, "abc", top_logprobs=1))
    assert answer.weight_version == 4 and len(engine.requests) == 2
    engine.versions = list(range(100))
    with pytest.raises(EngineUnavailable, match="replaced"):
        await completing(engine).answer(ask(engine, "abc", top_logprobs=1))


def test_seeds_fit_the_engine():
    assert all(0 <= choice_seed(2**63 - 1, place, 5) < 2**63 for place in range(20))
    assert np.unique([choice_seed(1, place, choice) for place in range(10) for choice in range(10)]).size == 100
