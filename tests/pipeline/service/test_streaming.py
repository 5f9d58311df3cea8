"""Streams: text that is never taken back, stops that are held back, streams that go on behind a lost replica."""

from __future__ import annotations

from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engines.renderer import ChatRenderer
from pipeline.errors import EngineUnavailable, SwapTimeout
from pipeline.records import Sampling
from pipeline.service.completing import Ask, Completing
from pipeline.service.stops import cut_at
from pipeline.service.streaming import Choice, Streaming
from tests.pipeline.service.parts import Reverser, letters_folder


@pytest.fixture
def engine(tmp_path) -> Reverser:
    return Reverser(ChatRenderer.load(letters_folder(tmp_path / "letters")))


async def no_sleep(_seconds: float) -> None:
    pass


def ask(engine, *texts, max_tokens=20, n=1, **parts) -> Ask:
    return Ask([engine.renderer.encode_text(text) for text in texts], Sampling(max_tokens=max_tokens), n, 11, **parts)


async def told(engine, asked: Ask) -> list:
    """The parts of each choice."""
    choices = [[] for _ in asked.requests()]
    async for parts in Streaming(engine, engine.renderer, asked, no_sleep).parts():
        assert parts.weight_version == 3
        for part in parts.parts:
            choices[part.index].append(part.made)
    return choices


def of_bytes(tokens) -> str:
    return bytes(tokens).decode(errors="replace")


@given(
    st.text(alphabet="ab€🙂", max_size=10),
    st.lists(st.text(alphabet="ab€🙂", min_size=1, max_size=3), max_size=3),
    st.binary(max_size=3),
)
def test_what_is_said_byte_by_byte_is_what_the_whole_says(text, stops, broken):
    tokens = list(text.encode() + broken)
    choice, said = Choice(stops, of_bytes), ""
    for place, token in enumerate(tokens):
        said += choice.say([token], "length" if place + 1 == len(tokens) else None)
        if choice.finish_reason is not None:
            break
    whole, count, stopped = cut_at(tokens, stops, of_bytes)
    assert said == whole and len(choice.token_ids) == count
    assert choice.finish_reason == (None if not tokens else "stop" if stopped else "length")


def test_a_character_is_told_when_its_last_byte_is_there():
    choice = Choice([], of_bytes)
    assert [choice.say([byte], None) for byte in "a🙂b".encode()] == ["a", "", "", "", "🙂", "b"]


def test_what_may_become_a_stop_is_held_back():
    choice = Choice(["bcd"], of_bytes)
    assert [choice.say([byte], None) for byte in b"abcbcde"[:4]] == ["a", "", "", "bc"]
    assert choice.say(list(b"cd"), None) == "" and choice.finish_reason == "stop"


async def test_a_stream_is_the_answer_token_by_token(engine):
    asked = ask(engine, "abc", "xyzw", n=2, stops=["a", "zy"], top_logprobs=1)
    whole = [made for choices in (await Completing(engine, engine.renderer, no_sleep).answer(asked)).choices for made in choices]
    choices = await told(engine, asked)
    for parts, one in zip(choices, whole, strict=True):
        assert "".join(part.text for part in parts) == one.text and parts[-1].finish_reason == one.finish_reason
        assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert [part.token_ids for part in parts] == [[token] for token in one.token_ids]
        assert [value for part in parts for value in part.logprobs.logprobs] == one.logprobs.logprobs
        assert [top for part in parts for top in part.logprobs.top] == one.logprobs.top
    assert engine.streaming == 0


async def test_a_stream_that_a_dying_replica_lost_goes_on_where_it_was(engine):
    engine.breaks = [EngineUnavailable("replica died"), EngineUnavailable("and the next")]
    (parts,) = await told(engine, ask(engine, "abcd", top_logprobs=0))
    assert [part.text for part in parts] == ["d", "c", "b", "a", ""] and parts[-1].finish_reason == "stop"
    assert [len(part.logprobs.logprobs) for part in parts] == [1] * 5 and len(engine.requests) == 3
    engine.breaks = [EngineUnavailable("gone")] * 4
    with pytest.raises(EngineUnavailable, match="gone"):
        await told(engine, ask(engine, "abcd"))


async def test_a_stream_is_of_one_version(engine):
    stream = Streaming(engine, engine.renderer, ask(engine, "abcd"), no_sleep)
    engine.breaks = [EngineUnavailable("replica died")]
    with pytest.raises(SwapTimeout, match="replaced"):
        async for _ in stream.parts():
            engine.versions = [4]


async def test_who_stops_listening_ends_the_work(engine):
    async with aclosing(Streaming(engine, engine.renderer, ask(engine, "abcd"), no_sleep).parts()) as parts:
        await anext(parts)
        assert engine.streaming == 1
    assert engine.streaming == 0
