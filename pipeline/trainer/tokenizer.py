"""A character tokenizer made from a run's own texts, in Hugging Face format.

Invariant: the same texts in any order give the same files, and decoding an encoded text of known characters gives it back.
The constant beginning of a dataset's turns is one token: a tiny model then attends to the item and not to its wrapping.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from pipeline.engines.digests import tokenizer_digest
from pipeline.trainer.cache import Pairs, cached, pairs_digest

Messages = Sequence[tuple[str, str]]
PAD, BOS, EOS, ANSWER, UNKNOWN = "<pad>", "<bos>", "<eos>", "<ans>", "<unk>"
SPECIALS = (PAD, BOS, EOS, ANSWER, UNKNOWN)

MIN_PREFIX = 8
"""Characters below which a shared beginning stays characters."""
MIN_SHARE = 0.02
"""Share of all turns that must begin alike."""
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<ans>{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<ans>{% endif %}"
)


def ensure_tokenizer(catalog_texts: Callable[[], Pairs], cache: Path) -> Path:
    """A cached folder with the character tokenizer of a run alone. Imports no torch."""
    texts = catalog_texts()

    def build(folder: Path) -> dict[str, str]:
        build_tokenizer(texts, folder)
        return {"digest": tokenizer_digest(folder)}

    return cached(cache / "tokenizers", {"texts": pairs_digest(texts, ordered=False)}, build)


def build_tokenizer(texts: Iterable[tuple[Messages, str | None]], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja for (messages, answer) pairs into `folder`.

    Characters that no text holds become <unk>.
    """
    turns: list[str] = []
    characters: set[str] = set()
    for messages, answer in texts:
        turns += [content for role, content in messages if role != "assistant"]
        for content in [*(content for _, content in messages), answer or ""]:
            characters.update(content)
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *sorted(characters)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken(prefix, normalized=False) for prefix in constant_beginnings(turns)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)


def constant_beginnings(turns: Iterable[str]) -> list[str]:
    """Beginnings of at least MIN_PREFIX characters that at least MIN_SHARE of the turns share, sorted.

    Turns that begin alike are split further only where their branches have long beginnings of their own (two datasets with
    the same first words), not where an item's own text begins.
    """
    ordered = sorted(turns)
    least = max(2, int(MIN_SHARE * len(ordered)))
    return sorted(set(_beginnings(ordered, 0, least)))


def _beginnings(ordered: list[str], done: int, least: int) -> list[str]:
    """Beginnings within one sorted branch whose first `done` characters are accounted for."""
    if len(ordered) < least:
        return []
    common = os.path.commonprefix([ordered[0], ordered[-1]])
    branches = [list(branch) for _, branch in groupby(ordered, key=lambda turn: turn[len(common) : len(common) + 1])]
    if len(branches) > 1:
        found = [_beginnings(branch, len(common), least) for branch in branches]
        covered = sum(len(branch) for branch, inner in zip(branches, found, strict=True) if inner)
        if covered >= 0.9 * len(ordered):
            return [prefix for inner in found for prefix in inner]
    return [common] if len(common) - done >= MIN_PREFIX else []
