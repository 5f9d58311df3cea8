"""Answers in OpenAI's form: whole, or as the chunks of a stream. Nothing is decided here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.service.completing import Answer, Made, TokenLogprobs

DONE = "data: [DONE]\n\n"


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
    choices = []
    for prompt, made in zip(prompts, answer.choices, strict=True):
        for one in made:
            choice: dict[str, Any] = {
                "index": len(choices),
                "text": prompt.text + one.text if echo else one.text,
                "logprobs": _text_logprobs(one),
                "finish_reason": one.finish_reason,
            }
            if token_ids:
                choice |= {"prompt_token_ids": prompt.token_ids, "token_ids": one.token_ids}
            choices.append(choice)
    return _reply(head, "cmpl", "text_completion", answer, choices, prompts)


def chat_reply(head: Head, prompt: Prompt, answer: Answer, *, token_ids: bool) -> dict[str, Any]:
    choices = []
    for index, one in enumerate(answer.choices[0]):
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": one.text, "refusal": None},
            "logprobs": _chat_logprobs(one.logprobs),
            "finish_reason": one.finish_reason,
        }
        if token_ids:
            choice["token_ids"] = one.token_ids
        choices.append(choice)
    reply = _reply(head, "chatcmpl", "chat.completion", answer, choices, [prompt])
    return reply | {"prompt_token_ids": prompt.token_ids} if token_ids else reply


def chunks(reply: dict[str, Any], include_usage: bool) -> Iterator[str]:
    """The reply as server-sent events: a choice is one chunk, since the engine answers whole calls."""
    chat = reply["object"] == "chat.completion"
    head = {key: value for key, value in reply.items() if key not in ("choices", "usage")}
    if chat:
        head["object"] = "chat.completion.chunk"
    extra = {"usage": None} if include_usage else {}
    for choice in reply["choices"]:
        for part in _deltas(choice) if chat else [choice]:
            yield _event(head | {"choices": [part]} | extra)
    if include_usage:
        yield _event(head | {"choices": [], "usage": reply["usage"]})
    yield DONE


def _deltas(choice: dict[str, Any]) -> list[dict[str, Any]]:
    said = {key: value for key, value in choice.items() if key not in ("message", "finish_reason")}
    delta = {"role": "assistant", "content": choice["message"]["content"]}
    last = {"index": choice["index"], "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
    return [said | {"delta": delta, "finish_reason": None}, last]


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _reply(
    head: Head, prefix: str, kind: str, answer: Answer, choices: list[dict[str, Any]], prompts: Sequence[Prompt]
) -> dict[str, Any]:
    asked = sum(len(prompt.token_ids) for prompt in prompts)
    made = sum(len(one.token_ids) for made in answer.choices for one in made)
    return {
        "id": f"{prefix}-{head.request_id}",
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": f"weights-{answer.weight_version}",
        "choices": choices,
        "usage": {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made},
    }


def _text_logprobs(made: Made) -> dict[str, Any] | None:
    parts = [part for part in (made.prompt_logprobs, made.logprobs) if part is not None]
    if not parts:
        return None
    tokens = [token for part in parts for token in part.tokens]
    values = [value for part in parts for value in part.logprobs]
    tops = [top for part in parts for top in part.top]
    offsets = [0]
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


def _chat_logprobs(found: TokenLogprobs | None) -> dict[str, Any] | None:
    if found is None:
        return None
    content = []
    for token, value, top in zip(found.tokens, found.logprobs, found.top, strict=True):
        likely = [_entry(text, logprob) for text, logprob in top or []]
        content.append(_entry(token, value) | {"top_logprobs": likely})
    return {"content": content, "refusal": None}


def _entry(token: str, logprob: float | None) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
