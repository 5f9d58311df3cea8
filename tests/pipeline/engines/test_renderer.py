from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipeline.engines.renderer import ChatRenderer
from pipeline.errors import DataError, UserError
from tests.pipeline.engines.conftest import TEXTS

CHATS = [
    *(messages for messages, _ in TEXTS),
    (("system", "the stone"), ("user", "Spell this word backward: fox"), ("assistant", "xof"), ("user", "river")),
    (("user", "unknown ☃ and\nnewline"),),
]


@pytest.mark.parametrize("messages", CHATS)
def test_renders_what_transformers_renders(folder: Path, messages: tuple[tuple[str, str], ...]) -> None:
    renderer, theirs = ChatRenderer.load(folder), AutoTokenizer.from_pretrained(folder)
    turns = [{"role": role, "content": content} for role, content in messages]
    ids = renderer.render(messages)
    assert ids.dtype == "int32"
    assert ids.tolist() == theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert renderer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (renderer.eos_token_id, renderer.pad_token_id) == (theirs.eos_token_id, theirs.pad_token_id)
    assert renderer.vocab_size == len(theirs)


def test_a_template_in_the_config_with_helpers_works_too(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").unlink()
    config = tmp_path / "m" / "tokenizer_config.json"
    template = (
        "{% for m in messages %}\n    {% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
        "{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{{ strftime_now('') }}{% endfor %}"
    )
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    renderer, theirs = ChatRenderer.load(tmp_path / "m"), AutoTokenizer.from_pretrained(tmp_path / "m")
    turns = (("user", "the fox's stone"), ("user", "river"))
    told = [{"role": role, "content": content} for role, content in turns]
    assert renderer.render(turns).tolist() == theirs.apply_chat_template(told, add_generation_prompt=True, return_dict=False)
    with pytest.raises(DataError, match="no tools"):
        renderer.render((("tool", "x"),))


def test_a_template_cannot_reach_out(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(DataError):
        ChatRenderer.load(tmp_path / "m").render((("user", "x"),))


def test_the_digest_is_of_the_vocabulary_and_not_of_the_template(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages }}")
    assert ChatRenderer.load(tmp_path / "m").digest == ChatRenderer.load(folder).digest
    table = json.loads((tmp_path / "m" / "tokenizer.json").read_text())
    table["model"]["vocab"] = {token: index for token, index in table["model"]["vocab"].items() if token != "x"}
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(table))
    assert ChatRenderer.load(tmp_path / "m").digest != ChatRenderer.load(folder).digest


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tokenizer.json"):
        ChatRenderer.load(tmp_path)
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="chat template"):
        ChatRenderer.load(tmp_path / "m")


def test_light_modules_import_no_torch() -> None:
    code = (
        "import sys, pipeline.engines.renderer, pipeline.engines.weights, pipeline.engines.scripted, pipeline.engines.fixed_cost,"
        " pipeline.trainer.tokenizer, pipeline.trainer.cache; print({'torch', 'transformers', 'ray'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"
