"""Answers in OpenAI's form. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.service.completing import Answer, Made, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Head:
    """What every reply of a request begins with."""

    request_id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    token_ids: list[int]


def completion_reply(head: Head, prompts: Sequence[Prompt], answer: Answer, *, echo: bool, token_ids: bool) -> dict[str, Any]:
    said = [(prompt, made) for prompt, choices in zip(prompts, answer.choices, strict=True) for made in choices]
    choices = [
        text_choice(index, made, prompt.text if echo else "", prompt.token_ids if token_ids else None)
        for index, (prompt, made) in enumerate(said)
    ]
    return _reply(head, "cmpl", "text_completion", answer, choices, prompts)


def text_choice(index: int, made: Made, before: str, prompt_ids: list[int] | None, offset: int = 0) -> dict[str, Any]:
    """prompt_ids: None: no token ids are asked for. offset: characters of a stream's tokens before these."""
    choice = {
        "index": index,
        "text": before + made.text,
        "logprobs": _text_logprobs(made, offset),
        "finish_reason": made.finish_reason,
    }
    return choice if prompt_ids is None else choice | {"prompt_token_ids": prompt_ids, "token_ids": made.token_ids}


def chat_reply(head: Head, prompt: Prompt, answer: Answer, *, token_ids: bool) -> dict[str, Any]:
    choices = []
    for index, one in enumerate(answer.choices[0]):
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": one.text, "refusal": None},
            "logprobs": chat_logprobs(one.logprobs),
            "finish_reason": one.finish_reason,
        }
        if token_ids:
            choice["token_ids"] = one.token_ids
        choices.append(choice)
    reply = _reply(head, "chatcmpl", "chat.completion", answer, choices, [prompt])
    return reply | {"prompt_token_ids": prompt.token_ids} if token_ids else reply


def _reply(
    head: Head, prefix: str, kind: str, answer: Answer, choices: list[dict[str, Any]], prompts: Sequence[Prompt]
) -> dict[str, Any]:
    made = sum(len(one.token_ids) for made in answer.choices for one in made)
    return beginning(head, prefix, kind, answer.weight_version) | {"choices": choices, "usage": usage_of(prompts, made)}


def beginning(head: Head, prefix: str, kind: str, weight_version: int) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{head.request_id}",
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": f"weights-{weight_version}",
    }


def usage_of(prompts: Sequence[Prompt], made: int) -> dict[str, int]:
    asked = sum(len(prompt.token_ids) for prompt in prompts)
    return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}


def _text_logprobs(made: Made, offset: int) -> dict[str, Any] | None:
    parts = [part for part in (made.prompt_logprobs, made.logprobs) if part is not None]
    if not parts:
        return None
    tokens = [token for part in parts for token in part.tokens]
    values = [value for part in parts for value in part.logprobs]
    tops = [top for part in parts for top in part.top]
    offsets = [offset]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    named = [_named(top, token, value) for top, token, value in zip(tops, tokens, values, strict=True)]
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": named if any(named) else None,
        "text_offset": offsets[: len(tokens)],
    }


def _named(top: list[tuple[str, float]] | None, token: str, value: float | None) -> dict[str, float] | None:
    """The likeliest tokens by their text, and the one that stands there. Of tokens of one text the likeliest counts."""
    if top is None or value is None:
        return None
    named = {text: logprob for text, logprob in reversed(top)}
    return named if token in named else named | {token: value}


def chat_logprobs(found: TokenLogprobs | None) -> dict[str, Any] | None:
    if found is None:
        return None
    content = []
    for token, value, top in zip(found.tokens, found.logprobs, found.top, strict=True):
        likely = [_entry(text, logprob) for text, logprob in top or []]
        content.append(_entry(token, value) | {"top_logprobs": likely})
    return {"content": content, "refusal": None}


def _entry(token: str, logprob: float | None) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
