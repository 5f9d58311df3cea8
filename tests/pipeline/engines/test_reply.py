"""The tokens between two answers: by the template, behind answers that stay as they were sampled."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from pipeline.engines.renderer import ChatRenderer

PLAIN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% else %}[{{ m.content }}]{% endif %}"
    "{% endfor %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def renderer_of(template: str) -> ChatRenderer:
    specials = ["<pad>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(set("abcdefghijklmnopqrstuvwxyz []()?\n"))
    tokenizer = Tokenizer(models.WordLevel({token: n for n, token in enumerate([*specials, *letters])}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return ChatRenderer(tokenizer, template, {"eos_token": "<|im_end|>", "pad_token": "<pad>"}, "digest")


@pytest.mark.parametrize("template", [PLAIN, CHATML])
def test_an_episode_turn_by_turn_is_the_conversation_as_a_whole(template: str):
    renderer = renderer_of(template)
    tokens = list(renderer.render((("user", "fix it"),)))
    answers, outputs = ["ls", "cat a"], ["a b", "it is a"]
    for answer, output in zip(answers, outputs, strict=True):
        said = np.append(renderer.encode_text(answer), renderer.eos_token_id).astype(np.int32)
        tokens += [*said, *renderer.render_reply(output, said)]
    messages = (("user", "fix it"), ("assistant", "ls"), ("user", "a b"), ("assistant", "cat a"), ("user", "it is a"))
    assert tokens == renderer.render(messages).tolist()


@pytest.mark.parametrize("template", [PLAIN, CHATML])
def test_an_answer_that_was_cut_off_is_ended_by_the_template(template: str):
    renderer = renderer_of(template)
    cut = renderer.encode_text("ls")
    whole = np.append(cut, renderer.eos_token_id).astype(np.int32)
    assert renderer.render_reply("a", cut).tolist() == [renderer.eos_token_id, *renderer.render_reply("a", whole)]


def test_a_reply_that_names_the_stand_in_is_said_in_full():
    renderer = renderer_of(CHATML)
    said = np.asarray([renderer.eos_token_id], np.int32)
    assert "(the answer) again" in renderer.decode(renderer.render_reply("(the answer) again", said))
