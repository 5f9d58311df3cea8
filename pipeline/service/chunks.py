"""The chunks of a stream, in OpenAI's form, as server-sent events. Nothing is decided here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pipeline.service.completing import Made
from pipeline.service.openai import ChatRequest, CompletionRequest
from pipeline.service.replies import Head, Prompt, beginning, chat_logprobs, text_choice, usage_of
from pipeline.service.streaming import Part, Parts

DONE = "data: [DONE]\n\n"


def event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


class Chunks:
    """Of one request. A chunk has one choice; what says nothing is no chunk."""

    def __init__(self, request: CompletionRequest | ChatRequest, head: Head, prompts: Sequence[Prompt]) -> None:
        self._request, self._head, self._prompts = request, head, prompts
        self._chat = isinstance(request, ChatRequest)
        self._usage = request.stream_options is not None and request.stream_options.include_usage
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        """Of text completions: characters of a choice's tokens so far."""
        self._made = self._version = 0

    def of(self, parts: Parts) -> str:
        """The events of what was said at the same moment."""
        self._version = parts.weight_version
        return "".join(self._events(part) for part in parts.parts)

    def end(self) -> str:
        """Behind the last choice."""
        if not self._usage:
            return DONE
        return event(self._chunk([]) | {"usage": usage_of(self._prompts, self._made)}) + DONE

    def _events(self, part: Part) -> str:
        first = part.index not in self._begun
        self._begun.add(part.index)
        self._made += len(part.made.token_ids)
        if self._chat:
            choices = self._deltas(part, first)
        else:
            choices = [self._text(part, first)] if first or part.made.finish_reason or self._says(part.made) else []
        return "".join(event(self._chunk([choice])) for choice in choices)

    def _says(self, made: Made) -> bool:
        return bool(made.text or made.logprobs or (self._request.return_token_ids and made.token_ids))

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        prefix, kind = ("chatcmpl", "chat.completion.chunk") if self._chat else ("cmpl", "text_completion")
        chunk = beginning(self._head, prefix, kind, self._version) | {"choices": choices}
        return chunk | {"usage": None} if self._usage else chunk

    def _text(self, part: Part, first: bool) -> dict[str, Any]:
        made, prompt = part.made, self._prompts[part.index // self._request.n]
        offset = self._offsets.get(part.index, 0)
        said = [token for logprobs in (made.prompt_logprobs, made.logprobs) if logprobs is not None for token in logprobs.tokens]
        self._offsets[part.index] = offset + sum(map(len, said))
        before = prompt.text if first and self._request.echo else ""
        ids = (prompt.token_ids if first else []) if self._request.return_token_ids else None
        return text_choice(part.index, made, before, ids, offset)

    def _deltas(self, part: Part, first: bool) -> list[dict[str, Any]]:
        """The role comes with the first, and the finish_reason alone."""
        made, deltas = part.made, []
        if first:
            deltas.append(self._delta(part.index, {"role": "assistant", "content": ""}))
            if self._request.return_token_ids:
                deltas[0]["prompt_token_ids"] = self._prompts[0].token_ids
        if self._says(made):
            deltas.append(self._said(part.index, made))
        if made.finish_reason is not None:
            deltas.append(self._delta(part.index, {}) | {"finish_reason": made.finish_reason})
        return deltas

    def _said(self, index: int, made: Made) -> dict[str, Any]:
        said = self._delta(index, {"content": made.text}) | {"logprobs": chat_logprobs(made.logprobs)}
        return said | {"token_ids": made.token_ids} if self._request.return_token_ids else said

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
