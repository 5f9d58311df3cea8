from __future__ import annotations

import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pipeline.engines.renderer import ChatRenderer
from pipeline.trainer.tokenizer import build_tokenizer, constant_beginnings, ensure_tokenizer

WORDS = [f"{a}{b}{c}" for a in "snmt" for b in "aeu" for c in "xyz"]
SPELL = "Spell this word backward (example: sun -> nus): "
COUNT = "Spell out how many letters there are in: "


def texts(*beginnings: str) -> list:
    return [((("user", beginning + word),), word[::-1]) for beginning in beginnings for word in WORDS]


def test_the_constant_beginning_of_each_dataset_is_one_token(tmp_path: Path) -> None:
    build_tokenizer(texts(SPELL, COUNT), tmp_path)
    renderer = ChatRenderer.load(tmp_path)
    for beginning in (SPELL, COUNT):
        assert len(renderer.render((("user", beginning + "sax"),))) == 1 + 1 + 3 + 1
        assert renderer.decode(renderer.render((("user", beginning + "sax"),))) == beginning + "sax"


def test_item_text_is_never_swallowed() -> None:
    assert constant_beginnings(WORDS) == []
    assert constant_beginnings([SPELL + word for word in WORDS]) == [SPELL]
    assert constant_beginnings([SPELL + word for word in WORDS] + ["one odd turn that stands alone"]) == [SPELL]
    assert constant_beginnings([]) == []


def test_few_shot_turns_look_like_training(tmp_path: Path) -> None:
    build_tokenizer(texts(SPELL), tmp_path)
    renderer = ChatRenderer.load(tmp_path)
    shot = renderer.render((("user", "sax"), ("assistant", "xas"), ("user", "nuy")))
    assert shot.tolist() == [
        *renderer.render((("user", "sax"),)),
        *renderer.encode_text("xas"),
        renderer.eos_token_id,
        *renderer.render((("user", "nuy"),))[1:],
    ]


def test_the_order_of_texts_does_not_matter(tmp_path: Path) -> None:
    pairs = texts(SPELL, COUNT)
    build_tokenizer(pairs, tmp_path / "a")
    random.Random(0).shuffle(pairs)
    build_tokenizer(pairs, tmp_path / "b")
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    assert ensure_tokenizer(lambda: pairs, tmp_path) == ensure_tokenizer(lambda: pairs[::-1], tmp_path)


def test_any_text_of_known_characters_comes_back(tmp_path: Path) -> None:
    alphabet = "abc <>\n\t\\\"'{}%é世🙂-"
    build_tokenizer([*texts(SPELL), ((("user", alphabet),), alphabet)], tmp_path)
    renderer, theirs = ChatRenderer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)

    @given(st.text(alphabet))
    def comes_back(text: str) -> None:
        ids = renderer.encode_text(text)
        assert renderer.decode(ids) == theirs.decode(ids) == text
        assert len(ids) == len(text) and theirs.encode(text) == ids.tolist()

    comes_back()
    assert theirs.convert_ids_to_tokens(renderer.encode_text("a☃b").tolist()) == ["a", "<unk>", "b"]
