"""Messages to tokens and back, by the model's own tokenizer and chat template. Imports neither torch nor transformers.

Invariant: `render` gives the ids that transformers' `apply_chat_template(..., add_generation_prompt=True)` gives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from pipeline.engines.digests import tokenizer_digest
from pipeline.errors import DataError, UserError

_ANSWER = "(the answer)"
"""Stands for an answer where only what surrounds it is asked for."""
_PLACE = "\ue000"
"""Surrounds the number of an answer that is put in as tokens: a character that means nothing."""
KEPT = 16
"""Prompts that are rendered once: the samples of a group ask for the same one."""
_SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatRenderer:
    """Implements agents.base.Renderer for one folder in Hugging Face format."""

    def __init__(self, tokenizer: Tokenizer, template: str, specials: dict[str, str], digest: str) -> None:
        self._tokenizer = tokenizer
        self._template = _environment().from_string(template)
        self._specials = specials
        self._render = lru_cache(KEPT)(self._rendered)
        self.digest = digest
        """Of the mapping between ids and text; the chat template is not part of it."""
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        """Ids that mean something; a model's output matrix may have more rows."""
        self.eos_token_id: int = tokenizer.token_to_id(specials["eos_token"])
        pad = specials.get("pad_token")
        self.pad_token_id: int = self.eos_token_id if pad is None else tokenizer.token_to_id(pad)

    @classmethod
    def load(cls, folder: Path) -> ChatRenderer:
        """Raises UserError naming the file that is missing or says too little."""
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if not (folder / name).is_file():
                raise UserError(f"{folder} has no {name}: not a model folder in Hugging Face format with a fast tokenizer")
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        specials = {name: _content(settings[name]) for name in _SPECIALS if settings.get(name)}
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if tokenizer.token_to_id(specials.get("eos_token", "")) is None:
            raise UserError(f"{folder / 'tokenizer_config.json'}: eos_token is missing or not in the vocabulary")
        return cls(tokenizer, _template_of(folder, settings), specials, tokenizer_digest(folder))

    @cached_property
    def longest_token(self) -> int:
        """Characters that a token stands for at most."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    def render(self, messages: Iterable[tuple[str, str]]) -> np.ndarray:
        """int32 [P], ending where the assistant's answer begins, not to be written to. Raises DataError when the template refuses
        the messages."""
        return self._render(tuple(messages))

    def _rendered(self, messages: tuple[tuple[str, str], ...]) -> np.ndarray:
        tokens = self.encode_text(self._text(messages))
        tokens.flags.writeable = False
        return tokens

    def render_reply(self, content: str, answer: np.ndarray) -> np.ndarray:
        """int32 [N]: what the template puts after an answer's own tokens, up to where the next answer begins.

        The answer stays as it was sampled: its text is never tokenised again. One that was cut off is ended here.
        """
        text = self._text((("user", "?"), ("assistant", _ANSWER), ("user", content)))
        rest = text.partition(_ANSWER)[2]
        if len(answer) and int(answer[-1]) == self.eos_token_id:
            rest = rest.removeprefix(self._specials["eos_token"])
        return self.encode_text(rest)

    def render_history(self, messages: Sequence[tuple[str, str | np.ndarray]]) -> np.ndarray:
        """int32 [P]: as `render`, but an answer that is given as its tokens stays as it was sampled: its text is never tokenised
        again, and one that was cut off is ended here. A longer history begins with the tokens of a shorter one and its answer."""
        sampled = [content for _, content in messages if isinstance(content, np.ndarray)]
        places = iter(f"{_PLACE}{number}{_PLACE}" for number in range(len(sampled)))
        texts = [(role, content if isinstance(content, str) else next(places)) for role, content in messages]
        parts = re.split(f"{_PLACE}[0-9]+{_PLACE}", self._text(texts))
        if len(parts) != len(sampled) + 1:
            raise DataError(f"the chat template leaves out {len(sampled) + 1 - len(parts)} of {len(sampled)} answers")
        pieces = [self.encode_text(parts[0])]
        for answer, rest in zip(sampled, parts[1:], strict=True):
            if len(answer) and int(answer[-1]) == self.eos_token_id:
                rest = rest.removeprefix(self._specials["eos_token"])
            pieces += [answer, self.encode_text(rest)]
        return np.concatenate(pieces).astype(np.int32)

    def _text(self, messages: Iterable[tuple[str, str]]) -> str:
        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, **self._specials)
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template refuses the messages: {error}") from error

    def encode_text(self, text: str) -> np.ndarray:
        """int32 [N]: the text alone, no special tokens added around it."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text without special tokens; ids of a padded vocabulary mean nothing and give nothing."""
        ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else [int(token) for token in token_ids]
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones by their name."""
        return self._tokenizer.decode([int(token_id)], skip_special_tokens=False)


def stop_ids(folder: Path, renderer: ChatRenderer) -> frozenset[int]:
    """End-of-sequence ids of the tokenizer and of generation_config.json."""
    file = folder / "generation_config.json"
    listed = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    return frozenset([renderer.eos_token_id, *(listed if isinstance(listed, list) else [listed] if listed is not None else [])])


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _template_of(folder: Path, settings: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    template = file.read_text() if file.is_file() else settings.get("chat_template")
    if not isinstance(template, str):
        raise UserError(f"{folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)")
    return template


def _environment() -> ImmutableSandboxedEnvironment:
    """The dialect that chat templates are written in: trimmed blocks and three helpers."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
