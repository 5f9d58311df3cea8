from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.config.models import ModelSource
from pipeline.errors import ConfigError, UserError
from pipeline.trainer.models import ensure_model, load_model, model_digest, save_model

PAIRS = [((("user", f"Double this number: {n}"),), str(2 * n)) for n in range(30)]
SHAPE = {"hidden": 16, "layers": 1, "heads": 2, "mlp": 16}


def ensure(cache: Path, pairs: list = PAIRS, **source) -> Path:
    return ensure_model(
        ModelSource(**{"architecture": SHAPE, **source}),
        kind="students",
        catalog_texts=lambda: PAIRS,
        catalog_pairs=lambda: pairs,
        cache=cache,
    )


def test_what_is_made_loads_in_transformers_and_is_made_once(tmp_path: Path) -> None:
    supervised = {"steps": 3, "batch": 8}
    folder = ensure(tmp_path, supervised=supervised)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer) and model.generation_config.eos_token_id == tokenizer.eos_token_id
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["steps"] == 3 and manifest["seconds"] > 0 and 0 <= manifest["accuracy"] <= 1
    assert manifest["digest"] == model_digest(folder)
    stamp = (folder / "manifest.json").stat().st_mtime_ns
    assert ensure(tmp_path, supervised=supervised) == folder and (folder / "manifest.json").stat().st_mtime_ns == stamp
    others = [
        ensure(tmp_path, supervised=supervised, seed=1),
        ensure(tmp_path, supervised=supervised | {"steps": 2}),
        ensure(tmp_path, supervised=supervised, architecture=SHAPE | {"mlp": 24}),
        ensure(tmp_path, PAIRS[:-1], supervised=supervised),
        ensure(tmp_path),
    ]
    assert len({folder, *others}) == 6
    assert len({model_digest(each) for each in (folder, *others)}) == 6


def test_two_processes_build_once_and_debris_of_a_third_goes(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.pipeline.trainer.test_models import *\n"
        "print(ensure(Path(sys.argv[1]), supervised={'steps': 60, 'batch': 8}), "
        "(ensure(Path(sys.argv[1]), supervised={'steps': 60, 'batch': 8}) / 'manifest.json').stat().st_ino)"
    )
    both = [subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {process.communicate(timeout=60)[0] for process in both}
    assert len(said) == 1 and all(process.returncode == 0 for process in both)
    folder = Path(said.pop().split()[0])
    debris = folder.parent / f".{folder.name}-dead"
    folder.rename(debris)  # as if a builder had been killed
    assert ensure(tmp_path, supervised={"steps": 60, "batch": 8}) == folder
    assert not debris.exists() and (folder / "manifest.json").is_file()


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_positions"):
        ensure(tmp_path, architecture=SHAPE | {"max_positions": 8}, supervised={"steps": 1}, pairs=[((("user", "1" * 20),), "2")])
    with pytest.raises(ConfigError, match="architecture.hidden 18"):
        ensure(tmp_path, architecture=SHAPE | {"hidden": 18})
    assert not [path for path in (tmp_path / "students").iterdir() if not path.name.startswith(".")]
    folder = ensure(tmp_path, architecture=SHAPE)
    assert folder.is_dir()


def test_a_path_is_checked_and_taken_as_it_is(tmp_path: Path) -> None:
    made = ensure(tmp_path)
    assert ensure(tmp_path, architecture=None, path=made) == made
    further = ensure(tmp_path, architecture=None, path=made, supervised={"steps": 2, "batch": 4})
    assert further != made and model_digest(further) != model_digest(made)
    assert AutoTokenizer.from_pretrained(further).get_vocab() == AutoTokenizer.from_pretrained(made).get_vocab()
    with pytest.raises(UserError, match=r"config\.json"):
        ensure(tmp_path, architecture=None, path=tmp_path)
    (made / "model.safetensors").unlink()
    with pytest.raises(UserError, match="safetensors"):
        ensure(tmp_path, architecture=None, path=made)


@pytest.mark.parametrize("tie", [False, True])
def test_saving_and_loading_gives_the_same_model(tmp_path: Path, tie: bool, capfd: pytest.CaptureFixture[str]) -> None:
    made = ensure(tmp_path)
    model = load_model(made)
    model.config.tie_word_embeddings = tie
    if tie:
        model.tie_weights()
    save_model(model, tmp_path / "saved", made)
    again = load_model(tmp_path / "saved")
    ids = torch.from_numpy(np.arange(5, 15)[None])
    assert torch.equal(model(ids).logits, again(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").eos_token_id == 2
    assert load_model(tmp_path / "saved", "bfloat16").dtype == torch.bfloat16
    assert capfd.readouterr().err == ""
